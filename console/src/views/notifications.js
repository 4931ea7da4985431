// Messages to site managers: what was sent, what was not and why, and previews of the texts.

import { useState } from "preact/hooks";
import { post } from "../api.js";
import { Choice, Dialog, Loaded, State, When, html, useAct, useData } from "../parts.js";
import { address, refine } from "../route.js";
import { More, useMore } from "./more.js";

const STATES = ["pending", "sending", "retrying", "sent", "failed", "skipped", "unknown"];
const TRANSITIONS = ["Suspended", "Reactivated", "Deactivated", "Deleted"];
const AGAIN = ["failed", "skipped", "unknown"];

export function Notifications({ filter, overview }) {
  const messages = useMore("api/notifications", { ...filter, limit: 100 }, ["tenant"], 3000);
  const [preview, setPreview] = useState(null);
  const [said, say] = useState("");
  const [retry, retrying] = useAct(async (message) => {
    try {
      const { retried } = await post("api/notifications/retry", { ids: [message.id] });
      say(retried.length ? "It will be sent again." : "It was left as it is.");
      messages.again();
    } catch (error) {
      say(error.message);
    }
  });
  return html`<h1>Notifications</h1>
    <div class="filters"><${Choice} label="State" value=${filter.state} options=${STATES} onChange=${(state) => refine("notifications", { ...filter, state })} />
      <${Choice} label="Channel" value=${filter.channel} options=${["email", "sms", "webhook"]} onChange=${(channel) => refine("notifications", { ...filter, channel })} />
      <${Choice} label="Preview of" value=${preview} options=${TRANSITIONS} all="nothing" onChange=${(transition) => setPreview(transition || null)} /></div>
    <p role="status" class="said">${said}</p>
    <${More} of=${messages} empty="No message fits: they are written when a tenant's status changes.">${(rows) => html`
      <div class="wide"><table class="plain"><thead><tr><th scope="col">When</th><th scope="col">Tenant</th><th scope="col">Transition</th><th scope="col">Channel</th><th scope="col">State</th><th scope="col">Reason</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
      <tbody>${rows.map((message) => html`<tr key=${message.id}><td><${When} at=${message.occurred_at} /></td><td><a href=${address("tenants", message.tenant_id)}>${message.tenant_identifier}</a></td>
        <td>${message.transition}</td><td>${message.channel}</td><td><${State} of=${message.state} /></td><td>${message.reason ?? ""}</td>
        <td>${AGAIN.includes(message.state) && html`<button type="button" disabled=${overview?.read_only || retrying} onClick=${() => retry(message)}>Send again</button>`}</td></tr>`)}</tbody></table></div>`}<//>
    ${preview && html`<${Preview} transition=${preview} onClose=${() => setPreview(null)} />`}`;
}

// The HTML is shown as text: this page's policy refuses an email's own styles and pictures.
function Preview({ transition, onClose }) {
  const message = useData("api/notifications/preview", { parameters: { transition } });
  return html`<${Dialog} title="Texts of ${transition}" onClose=${onClose}><${Loaded} of=${message}>${(data) => html`
    <h3>Subject</h3><p>${data.email_subject}</p><h3>Email</h3><pre class="raw">${data.email_text}</pre>
    <details><summary>HTML</summary><pre class="raw">${data.email_html}</pre></details><h3>SMS</h3><pre class="raw">${data.sms_text}</pre>`}<//>
    <p class="buttons"><button type="button" onClick=${onClose}>Close</button></p><//>`;
}
