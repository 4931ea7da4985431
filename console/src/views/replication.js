// Could the data be restored now, and to when?

import { ago, count, span } from "../format.js";
import { Loaded, State, When, html, useData } from "../parts.js";
import { address } from "../route.js";

export function Replication() {
  const replication = useData("api/replication", { every: 5000 });
  return html`<h1>Replication</h1><${Loaded} of=${replication}>${(data) => html`<${Shown} ...${data} />`}<//>`;
}

function Shown(data) {
  const { verified_at, ran_at, verified, failed } = data.verification;
  const failures = Object.entries(failed);
  // A run without any replica has verified nothing.
  const nothing = verified === 0 && failures.length === 0;
  return html`
    <div class="cards">
      <div class="card"><h2>State</h2><p class="figure"><${State} of=${data.state} /></p>${data.reason && html`<p>${data.reason}</p>`}<p class="faint">looked at ${ago(data.checked_at)}</p></div>
      <div class="card"><h2>Lag</h2><p class="figure">${span(data.lag_seconds)}</p></div>
      <div class="card ${nothing ? "" : verified_at == null || failures.length ? "failing" : "ok"}"><h2>Last verified restore</h2>
        <p class="figure">${nothing ? "nothing to verify" : verified_at == null ? "never" : ago(verified_at)}</p>
        <p class="faint">${ran_at == null ? "none was tried" : nothing ? `tried ${ago(ran_at)}: no active tenant had a database` : `tried ${ago(ran_at)}, ${count(failures.length)} failed`}</p></div>
    </div>
    ${failures.length > 0 && html`<section><h2>Failed verifications</h2><ul class="findings">${failures.map(([id, why]) => html`<li class="problem"><a class="mono" href=${address("tenants", id)}>${id}</a> ${why}</li>`)}</ul></section>`}
    <section><h2>Databases</h2>${data.databases.length === 0 ? html`<p class="empty">No database is replicated yet.</p>` : html`<div class="wide"><table class="plain">
      <thead><tr><th scope="col">Database</th><th scope="col">State</th><th scope="col" class="number">Lag</th><th scope="col">Last sync</th><th scope="col">Reason</th></tr></thead>
      <tbody>${data.databases.map((each) => html`<tr key=${each.path}><td class="mono">${each.path}</td><td><${State} of=${each.state} /></td><td class="number">${span(each.lag_seconds)}</td>
        <td><${When} at=${each.last_sync_at} /></td><td>${each.reason}</td></tr>`)}</tbody></table></div>`}</section>`;
}
