// Tenants with their audit trail, and the transitions that people make by hand.

import { useState } from "preact/hooks";
import { post } from "../api.js";
import { Act, Choice, Dialog, Failure, Loaded, Said, State, When, html, useAct, useData } from "../parts.js";
import { address, back, refine } from "../route.js";
import { More, useMore } from "./more.js";

const STATUSES = ["Active", "Suspended", "Deactivated", "Deleted"];
const TRANSITIONS = { Active: ["Suspended", "Deactivated"], Suspended: ["Reactivated", "Deactivated"], Deactivated: ["Reactivated"], Deleted: [] };
const VERBS = { Suspended: "Suspend", Reactivated: "Reactivate", Deactivated: "Deactivate" };

export function Tenants({ filter }) {
  const tenants = useMore("api/tenants", { status: filter.status, limit: 100 }, ["tenant"]);
  return html`<h1>Tenants</h1>
    <div class="filters"><${Choice} label="Status" value=${filter.status} options=${STATUSES} onChange=${(status) => refine("tenants", { status })} /></div>
    <${More} of=${tenants} empty=${filter.status ? "No tenant has this status." : "There are no tenants. Add one: sdk-trio tenant add acme --name Acme"}>${(rows) => html`
      <div class="wide"><table class="plain"><thead><tr><th scope="col">Tenant</th><th scope="col">Name</th><th scope="col">Status</th><th scope="col">Site manager</th><th scope="col">Since</th></tr></thead>
      <tbody>${rows.map((tenant) => html`<tr key=${tenant.id}><td><a href=${address("tenants", tenant.id)}>${tenant.identifier}</a></td><td>${tenant.name}</td>
        <td><${State} of=${tenant.status} /></td><td>${tenant.site_manager_email ?? tenant.site_manager_phone ?? "-"}</td><td><${When} at=${tenant.created_at} /></td></tr>`)}</tbody></table></div>`}<//>`;
}

export function Tenant({ item, overview }) {
  const path = `api/tenants/${encodeURIComponent(item)}`;
  const tenant = useData(path, { kinds: ["tenant"] });
  const audit = useMore(`${path}/audit`, { limit: 500 }, ["tenant"]);
  return html`<p class="back"><a href=${back("tenants")}>Tenants</a></p>
    <${Loaded} of=${tenant}>${(data) => html`<${One} tenant=${data} readOnly=${overview?.read_only} again=${() => { tenant.again(); audit.again(); }} />`}<//>
    <section><h2>Audit</h2><${More} of=${audit} empty="Nothing has happened to this tenant.">${(rows) => html`
      <ol class="line">${[...rows].reverse().map((each) => html`<li key=${each.sequence}><${When} at=${each.occurred_at} /> <b>${each.action}</b>
        ${each.previous_status && each.new_status && html` ${each.previous_status} to ${each.new_status}`} by ${each.actor}
        ${each.reason && html`<p>${each.reason}</p>`}${each.details && html`<p class="faint mono">${each.details}</p>`}${each.relaxation && html`<p class="warn">without: ${each.relaxation}</p>`}</li>`)}</ol>`}<//></section>`;
}

function One({ tenant, again, readOnly }) {
  const [asked, ask] = useState(null);
  const [said, say] = useState("");
  return html`<header class="title"><h1>${tenant.name}</h1><${State} of=${tenant.status} />
      <span class="actions">${TRANSITIONS[tenant.status].map((transition) => html`
        <button type="button" disabled=${readOnly} onClick=${() => ask(transition)}>${VERBS[transition]}…</button>`)}
        <a class="button" href=${address("deliveries", null, { tenant: tenant.identifier })}>Its deliveries</a></span></header>
    <${Said} text=${said} />
    <dl class="facts"><div><dt>Identifier</dt><dd class="mono">${tenant.identifier}</dd></div><div><dt>Id</dt><dd class="mono">${tenant.id}</dd></div>
      <div><dt>Email</dt><dd>${tenant.site_manager_email ?? "-"}${tenant.site_manager_email && (tenant.site_manager_email_verified ? " (verified)" : " (not verified)")}</dd></div>
      <div><dt>Phone</dt><dd>${tenant.site_manager_phone ?? "-"}</dd></div><div><dt>Organization</dt><dd class="mono">${tenant.organization_id ?? "-"}</dd></div>
      <div><dt>Created</dt><dd><${When} at=${tenant.created_at} /></dd></div></dl>
    ${asked && html`<${Change} tenant=${tenant} transition=${asked} onClose=${(text) => { ask(null); if (text) { say(text); again(); } }} />`}`;
}

function Change({ tenant, transition, onClose }) {
  const [reason, setReason] = useState("");
  const [bypass, setBypass] = useState(false);
  const [error, setError] = useState(null);
  const [act, acting] = useAct(async () => {
    try {
      const order = { transition, bypass_email_verification: bypass, ...(reason ? { reason } : {}) };
      const { new_status, no_op } = await post(`api/tenants/${encodeURIComponent(tenant.id)}/transition`, order);
      onClose(no_op ? `The tenant was ${new_status} already.` : `The tenant is ${new_status} now.`);
    } catch (failure) {
      setError(failure);
    }
  });
  return html`<${Dialog} title="${VERBS[transition]} ${tenant.identifier}?" onClose=${() => onClose("")}><form onSubmit=${act}>
    <p>Its site manager is notified on the configured channels, and the audit trail records it.</p>
    ${error && html`<${Failure} error=${error} />`}
    <label class="field wide">Reason<input name="reason" value=${reason} maxlength="500" autocomplete="off" onInput=${(event) => setReason(event.currentTarget.value)} /></label>
    ${transition === "Suspended" && !tenant.site_manager_email_verified && html`<label class="check"><input type="checkbox" name="bypass" checked=${bypass} onChange=${(event) => setBypass(event.currentTarget.checked)} /> although its email is not verified</label>`}
    <p class="buttons"><button type="button" onClick=${() => onClose("")}>Cancel</button><${Act} busy=${acting}>${VERBS[transition]}<//></p></form><//>`;
}
