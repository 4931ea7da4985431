// Pauses of events by type, and who requested them.

import { useState } from "preact/hooks";
import { post } from "../api.js";
import { visible } from "../format.js";
import { Act, Failure, Loaded, Said, When, html, useAct, useData } from "../parts.js";

export function Pauses({ overview }) {
  const pauses = useData("api/pauses", { every: 2000 });
  const [said, say] = useState("");
  const [error, setError] = useState(null);
  const act = async (path, order, done) => {
    setError(null);
    try {
      await post(path, order);
      say(done);
      pauses.again();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<h1>Pauses</h1><p class="faint">Events of a paused type are stored and answered 200. They run after the resume.</p>
    <${Said} text=${said} />${error && html`<${Failure} error=${error} />`}
    <${Loaded} of=${pauses}>${(rows) => html`
      ${rows.length === 0 ? html`<p class="empty">Nothing is paused.</p>` : html`
      <div class="wide"><table class="plain"><thead><tr><th scope="col">Types</th><th scope="col">Since</th><th scope="col">Until</th><th scope="col">By</th><th scope="col">Reason</th><th scope="col"></th></tr></thead>
        <tbody>${rows.map((each) => html`<${Row} key=${`${each.source ?? ""} ${each.type}`} of=${each} readOnly=${overview?.read_only}
          resume=${() => act("api/resume", { type: each.type, ...(each.source ? { source: each.source } : {}) }, `${each.type} is resumed.`)} />`)}</tbody></table></div>`}`}<//>
    <${Form} sources=${overview?.features.includes("sources")} readOnly=${overview?.read_only} pause=${(order) => act("api/pause", order, `${order.type} is paused.`)} />`;
}

function Row({ of, readOnly, resume }) {
  const [press, acting] = useAct(resume);
  return html`<tr><td class="mono">${visible(of.type)}${of.source && html`<span class="faint"> of ${of.source}</span>`}</td><td><${When} at=${of.since} /></td><td>${of.until == null ? "-" : html`<${When} at=${of.until} />`}</td>
    <td>${visible(of.actor)}</td><td>${visible(of.reason) || "-"}</td>
    <td><${Act} type="button" busy=${acting} disabled=${readOnly} onClick=${press}>Resume<//></td></tr>`;
}

function Form({ readOnly, pause, sources }) {
  const [source, setSource] = useState("");
  const [type, setType] = useState("");
  const [reason, setReason] = useState("");
  const [press, pausing] = useAct(() => pause({ type, ...(source ? { source } : {}), ...(reason ? { reason } : {}) }));
  return html`<form onSubmit=${press}><h2>Pause events</h2>
    <label class="field">Types<input name="type" value=${type} required maxlength="256" placeholder="order.*" spellcheck=${false} autocomplete="off" onInput=${(event) => setType(event.currentTarget.value)} /></label>
    ${sources && html`<label class="field">Source<input name="source" value=${source} maxlength="64" placeholder="the upstream" spellcheck=${false} autocomplete="off" onInput=${(event) => setSource(event.currentTarget.value)} /></label>`}
    <label class="field wide">Reason<input name="reason" value=${reason} maxlength="500" autocomplete="off" onInput=${(event) => setReason(event.currentTarget.value)} /></label>
    <p class="buttons"><${Act} busy=${pausing} disabled=${readOnly}>Pause<//></p></form>`;
}
