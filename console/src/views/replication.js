// Could the data be restored now, and to when?

import { ago, count, span } from "../format.js";
import { Loaded, State, When, html, useData } from "../parts.js";
import { address } from "../route.js";

export function Replication() {
  const replication = useData("api/replication", { every: 5000 });
  return html`<h1>Replication</h1><${Loaded} of=${replication}>${(data) => html`
    <div class="cards">
      <div class="card"><h2>State</h2><p class="figure"><${State} of=${data.state} /></p>${data.reason && html`<p>${data.reason}</p>`}<p class="faint">looked at ${ago(data.checked_at)}</p></div>
      <div class="card"><h2>Lag</h2><p class="figure">${span(data.lag_seconds)}</p></div>
      <div class="card ${data.verification.verified_at == null || Object.keys(data.verification.failed).length ? "failing" : "ok"}"><h2>Last verified restore</h2>
        <p class="figure">${data.verification.verified_at == null ? "never" : ago(data.verification.verified_at)}</p>
        <p class="faint">${data.verification.ran_at == null ? "none was tried" : html`tried ${ago(data.verification.ran_at)}, ${count(Object.keys(data.verification.failed).length)} failed`}</p></div>
    </div>
    ${Object.keys(data.verification.failed).length > 0 && html`<section><h2>Failed verifications</h2><ul class="findings">${Object.entries(data.verification.failed).map(([id, why]) => html`<li class="problem"><a class="mono" href=${address("tenants", id)}>${id}</a> ${why}</li>`)}</ul></section>`}
    <section><h2>Databases</h2>${data.databases.length === 0 ? html`<p class="empty">No database is replicated yet.</p>` : html`<div class="wide"><table class="plain">
      <thead><tr><th scope="col">Database</th><th scope="col">State</th><th scope="col" class="number">Lag</th><th scope="col">Last sync</th><th scope="col">Reason</th></tr></thead>
      <tbody>${data.databases.map((each) => html`<tr key=${each.path}><td class="mono">${each.path}</td><td><${State} of=${each.state} /></td><td class="number">${span(each.lag_seconds)}</td>
        <td><${When} at=${each.last_sync_at} /></td><td>${each.reason}</td></tr>`)}</tbody></table></div>`}</section>`}<//>`;
}
