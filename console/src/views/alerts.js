// Conditions that an operator has to know about: the open ones, and who was notified.

import { Loaded, State, When, html, useData } from "../parts.js";

export function Alerts() {
  const alerts = useData("api/alerts", { every: 5000 });
  return html`<h1>Alerts</h1><${Loaded} of=${alerts}>${(rows) => rows.length === 0 ? html`<p class="empty">No alert has opened yet.</p>` : html`
    <div class="wide"><table class="plain"><thead><tr><th scope="col">Alert</th><th scope="col">State</th><th scope="col">Detail</th><th scope="col">Opened</th><th scope="col">Closed</th><th scope="col" class="number">Openings</th><th scope="col">Last message</th></tr></thead>
    <tbody>${rows.map((each) => html`<tr key=${each.name}><td class="mono">${each.name}</td><td><${State} of=${each.state} /></td><td>${each.detail}</td>
      <td><${When} at=${each.opened_at} /></td><td><${When} at=${each.closed_at} /></td><td class="number">${each.openings}</td>
      <td><${When} at=${each.last_message_at} />${Object.entries(each.messages).map(([channel, state]) => html` <span>${channel}: <${State} of=${state} /></span>`)}</td></tr>`)}</tbody></table></div>`}<//>`;
}
