// Why does the sender get 400? The newest refused and rejected requests, without their bodies.

import { bytes, count, visible } from "../format.js";
import { Choice, Loaded, When, html, useData } from "../parts.js";
import { refine } from "../route.js";

export function Rejected({ filter }) {
  const rejections = useData("api/rejections", { kinds: ["rejected"], parameters: { cause: filter.cause, limit: 200 } });
  return html`<h1>Rejected</h1><${Loaded} of=${rejections}>${(data) => html`
    <div class="filters"><${Choice} label="Cause" value=${filter.cause} options=${Object.keys(data.causes).sort()} onChange=${(cause) => refine("rejected", { cause })} /></div>
    <p class="faint">${count(data.total)} since the start; bodies are not kept, and ids and types are only claimed.</p>
    ${data.rejections.length === 0 ? html`<p class="empty">Nothing was rejected${filter.cause ? " for this cause" : ""}.</p>` : html`
    <div class="wide"><table class="plain"><thead><tr><th scope="col">When</th><th scope="col">Answer</th><th scope="col">Cause</th><th scope="col">From</th><th scope="col">Claimed id and type</th><th scope="col" class="number">Size</th></tr></thead>
      <tbody>${data.rejections.map((each) => html`<tr key=${each.seq}><td><${When} at=${each.at} /></td><td>${each.status}</td>
        <td><b>${each.cause}</b>${each.detail && html`<p class="faint">${visible(each.detail)}</p>`}</td><td class="mono name">${each.address ?? "-"}</td>
        <td class="mono">${visible(each.webhook_id) ?? "-"}${each.type && html`<p class="faint">${visible(each.type)}</p>`}</td><td class="number">${bytes(each.size)}</td></tr>`)}</tbody></table></div>`}`}<//>`;
}
