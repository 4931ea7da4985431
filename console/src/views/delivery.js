// One delivery: its content, its runs, and the reason of a failure.

import { useEffect, useMemo, useState } from "preact/hooks";
import { get, post } from "../api.js";
import { base64, bytes, clock, count, exact, sizeOf, span, visible, visibleLines } from "../format.js";
import { difference, parse } from "../json.js";
import { Act, Copy, Dialog, Empty, Failure, Loaded, Said, State, Tree, When, html, useAct, useData } from "../parts.js";
import { address, back } from "../route.js";

const AGAIN = ["dead", "parked", "retrying"];
// A longer body is shown as text in pieces; browsers lay out one line of megabytes slowly.
const SHOWN = 200_000;

export function Delivery({ item, overview }) {
  const event = useData(`api/events/${encodeURIComponent(item)}`, { kinds: ["delivery", "changed"], about: ({ event }) => [event.key, event.webhook_id].includes(item), parameters: { body: 1 } });
  return html`<p class="back"><a href=${back("deliveries")}>Deliveries</a></p>
    <${Loaded} of=${event}>${(data) => html`<${Whole} event=${data} again=${event.again} readOnly=${overview?.read_only} />`}<//>`;
}

function Whole({ event, again, readOnly }) {
  const [tab, setTab] = useState("payload");
  const tree = useMemo(() => read(event.raw), [event.raw]);
  const tabs = { payload: "Payload", raw: "Raw", headers: "Headers", difference: "Difference", other: `Other bodies (${event.other_bodies.length})` };
  if (!event.other_bodies.length) delete tabs.other;
  return html`
    <header class="title"><h1>${visible(event.type)}</h1><${State} of=${event.state} />
      <span class="actions">
        <${Replay} event=${event} again=${again} readOnly=${readOnly} />
        ${(event.raw ?? event.raw_base64) != null && html`<${Copy} text=${() => curl(event)}>Copy as curl<//>
        <${Copy} text=${() => pytest(event)}>Copy as pytest<//>`}
      </span></header>
    <dl class="facts">
      <div><dt>Id</dt><dd class="mono">${event.webhook_id}</dd></div>
      <div><dt>Received</dt><dd><${When} at=${event.received_at} /></dd></div>
      ${event.subject && html`<div><dt>Subject</dt><dd class="mono"><a href=${address("deliveries", null, { subject: event.subject })}>${visible(event.subject)}</a></dd></div>`}
      ${event.tenant_id && html`<div><dt>Tenant</dt><dd class="mono"><a href=${address("tenants", event.tenant_id)}>${event.tenant_id}</a></dd></div>`}
      ${event.source && html`<div><dt>Source</dt><dd class="mono"><a href=${address("deliveries", null, { source: event.source })}>${event.source}</a></dd></div>`}
      ${event.ordered && html`<div><dt>Order</dt><dd>kept within its subject</dd></div>`}
      <div><dt>Runs</dt><dd>${event.attempts + event.earlier_attempts}${event.earlier_attempts > 0 && ` (${event.earlier_attempts} before the last replay)`}</dd></div>
      ${event.process_ends > 0 && html`<div><dt>Ended the process</dt><dd class="bad">${event.process_ends} times</dd></div>`}
      ${event.next_attempt_at && html`<div><dt>Next run</dt><dd><${When} at=${event.next_attempt_at} /></dd></div>`}
    </dl>
    <nav class="beside" aria-label="Same subject">
      ${event.previous_key && html`<a href=${address("deliveries", event.previous_key)}>Previous of this subject</a>`}
      ${event.next_key && html`<a href=${address("deliveries", event.next_key)}>Next of this subject</a>`}
    </nav>
    <section><h2>What happened</h2><${TimeLine} event=${event} /></section>
    <section>
      <div class="tabs" role="tablist">${Object.entries(tabs).map(([name, label]) => html`
        <button type="button" role="tab" id="tab-${name}" aria-controls="panel" aria-selected=${tab === name} tabindex=${tab === name ? 0 : -1}
          onClick=${() => setTab(name)} onKeyDown=${(pressed) => turn(pressed, Object.keys(tabs), tab, setTab)}>${label}</button>`)}</div>
      <div id="panel" role="tabpanel" aria-labelledby="tab-${tab}" tabindex="0">
        ${tab === "payload" && html`<${Payload} event=${event} tree=${tree} />`}
        ${tab === "raw" && html`<${Raw} of=${event} />`}
        ${tab === "headers" && html`<${Headers} event=${event} />`}
        ${tab === "difference" && html`<${Difference} event=${event} tree=${tree} />`}
        ${tab === "other" && event.other_bodies.map((other) => html`<h3><${When} at=${other.received_at} /> from ${other.address ?? "an unknown address"}</h3><${Raw} of=${other} />`)}
      </div>
    </section>`;
}

function turn(event, names, current, set) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = names[(names.indexOf(current) + step + names.length) % names.length];
  set(next);
  document.getElementById(`tab-${next}`)?.focus();
}

function read(raw) {
  try {
    return raw == null ? null : parse(raw);
  } catch {
    return null;
  }
}

function Payload({ event, tree }) {
  if (tree) return html`<div class="tree"><${Tree} node=${tree} /></div>`;
  return html`<${Raw} of=${event} />`;
}

function Raw({ of }) {
  const [most, setMost] = useState(SHOWN);
  if (of.raw_base64 !== undefined) return html`<p class="faint">Not UTF-8; base64:</p><pre class="raw">${of.raw_base64}</pre>`;
  if (of.raw == null) return html`<${Empty}>The body is no longer stored.<//>`;
  return html`<p class="faint">${bytes(sizeOf(of.raw))} <${Copy} text=${of.raw}>Copy<//></p>
    <pre class="raw">${visibleLines(of.raw.slice(0, most))}</pre>
    ${of.raw.length > most && html`<button type="button" onClick=${() => setMost(most + 5 * SHOWN)}>Show more (${bytes(of.raw.length - most)} left)</button>`}`;
}

const Headers = ({ event }) => event.headers.length === 0
  ? html`<${Empty}>No signature is given out: Admin:ReadOnly is true, the relay is off for other machines, or the sender signs with a private key.<//>`
  : html`
  <table class="plain"><caption class="faint">The signature is made again with the secret of today; other headers are not kept.</caption>
    <tbody>${event.headers.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="mono">${value}</td></tr>`)}</tbody></table>`;

function Difference({ event, tree }) {
  const [before, setBefore] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setBefore(null);
    setError(null);
    if (!event.previous_key) return undefined;
    const abort = new AbortController();
    get(`api/events/${encodeURIComponent(event.previous_key)}`, { body: 1 }, abort.signal).then(setBefore, (failure) => failure.name !== "AbortError" && setError(failure));
    return () => abort.abort();
  }, [event.previous_key]);
  if (!event.previous_key) return html`<${Empty}>${event.subject ? "This is the first kept delivery of its subject." : "This delivery has no subject."}<//>`;
  if (error) return html`<${Failure} error=${error} />`;
  if (!before) return html`<p class="empty" aria-busy="true">Loading…</p>`;
  const old = read(before.raw);
  if (!tree || !old) return html`<${Empty}>One of the two bodies is no JSON, or gone.<//>`;
  const changes = difference(old, tree);
  return html`<p class="faint">Since ${before.type} at ${clock(before.received_at)}: ${count(changes.length)} changes.</p>
    <table class="plain difference"><thead><tr><th scope="col">Where</th><th scope="col">Before</th><th scope="col">Now</th></tr></thead>
      <tbody>${changes.slice(0, 500).map(([path, was, is]) => html`<tr><th scope="row" class="mono">${visible(path) || "/"}</th>
        <td class="mono gone">${cut(was)}</td><td class="mono new">${cut(is)}</td></tr>`)}</tbody></table>`;
}

const cut = (value) => (value?.length > 2000 ? `${visible(value.slice(0, 2000))}…` : visible(value) ?? "");

function TimeLine({ event }) {
  const failed = event.failed_attempts;
  return html`<ol class="line">
    <li><${When} at=${event.received_at} /> <b>received</b></li>
    ${failed.map((attempt) => html`<li class="bad">
      <${When} at=${attempt.started_at} /> <b>run ${attempt.number} failed</b> after ${span(attempt.finished_at - attempt.started_at)}
      <pre class="error">${visibleLines(attempt.error)}</pre>
      ${attempt.place && html`<p class="mono faint">${attempt.place}</p>`}
      ${attempt.traceback && html`<details><summary>Traceback</summary><pre class="raw">${visibleLines(attempt.traceback)}</pre></details>`}</li>`)}
    ${event.answered_attempts.map((attempt) => html`<li class="good">
      <${When} at=${attempt.started_at} /> <b>run ${attempt.number} answered</b> after ${span(attempt.finished_at - attempt.started_at)}
      ${attempt.place && html`<p class="mono faint">${attempt.place}</p>`}</li>`)}
    ${event.state === "running" && html`<li><${When} at=${event.started_at} /> <b>running</b></li>`}
    ${event.state === "done" && html`<li class="good"><${When} at=${event.finished_at} /> <b>done</b>${event.started_at && event.finished_at ? ` after ${span(event.finished_at - event.started_at)}` : ""}</li>`}
    ${event.state === "dead" && html`<li class="bad"><${When} at=${event.finished_at} /> <b>dead letter</b>: no run follows by itself</li>`}
    ${event.state === "parked" && html`<li class="warn"><b>parked</b>: ${visible(event.last_error) ?? "the reason is not kept"}</li>`}
    ${event.next_attempt_at && event.state === "retrying" && html`<li class="warn"><${When} at=${event.next_attempt_at} /> <b>next run</b></li>`}
  </ol>`;
}

function Replay({ event, again, readOnly }) {
  const [open, setOpen] = useState(false);
  const [said, say] = useState("");
  const [act, acting] = useAct(async () => {
    try {
      const { events } = await post("api/events/replay", { ids: [event.key] });
      say(events[0]?.replayed ? "It is in the queue again." : events[0]?.reason ?? "It was not put back.");
      again();
    } catch (error) {
      say(error.message);
    }
    setOpen(false);
  });
  // The result stays when the state, and with it the button, has changed.
  return html`<${Said} as="span" text=${said} />
    ${AGAIN.includes(event.state) && html`<button type="button" disabled=${readOnly} title=${readOnly ? "Admin:ReadOnly is set" : ""} onClick=${() => setOpen(true)}>Replay</button>`}
    ${open && html`<${Dialog} title="Replay this delivery?" onClose=${() => setOpen(false)}>
      <p>Its handlers run again with the same bytes.</p>
      <p class="buttons"><button type="button" onClick=${() => setOpen(false)}>Cancel</button><${Act} type="button" busy=${acting} onClick=${act}>Replay<//></p><//>`}`;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
// A terminal interprets these even within quotation marks; a tab completes a file's name.
const CONTROLS = /[\0-\x09\x0b-\x1f\x7f]/;

// A program gets no argument above 128 KiB; `printf` has no such limit, because it is part of the
// shell.
function curl(event) {
  const encoded = event.raw_base64 ?? (CONTROLS.test(event.raw) ? base64(event.raw) : null);
  const body = encoded === null ? `printf %s ${quoted(event.raw ?? "")}` : `printf %s ${quoted(encoded)} | base64 -d`;
  const headers = [["content-type", "application/json"], ...event.headers.filter(([name]) => name.toLowerCase() !== "content-type")];
  const lines = ["# The receiver refuses the signature some minutes after it was made: copy again then.", `${body} |`, `  curl -i http://127.0.0.1:8080/hooks/${event.source ?? "sdk"} \\`];
  for (const [name, value] of headers) lines.push(`  -H ${quoted(`${name}: ${value}`)} \\`);
  lines.push("  --data-binary @-");
  return `${lines.join("\n")}\n`;
}

// JSON strings are also Python strings, except for lone surrogates and line separators;
// JSON.stringify writes these as escapes.
const literal = (text) => JSON.stringify(text).replace(/[\u007f-\uffff]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`).replace(/(?:\\ud[89ab][0-9a-f]{2})(?:\\ud[c-f][0-9a-f]{2})/g, astral);

function astral(pair) {
  const [high, low] = [parseInt(pair.slice(2, 6), 16), parseInt(pair.slice(8, 12), 16)];
  return `\\U${((high - 0xd800) * 0x400 + (low - 0xdc00) + 0x10000).toString(16).padStart(8, "0")}`;
}

function pytest(event) {
  const name = event.type.replaceAll(/[^a-z0-9]+/gi, "_");
  return `BODY = ${literal(event.raw ?? "null")}


async def test_${name}(deliver):
    """The delivery ${event.webhook_id.replaceAll(/[^\w.-]/g, "?")} of ${exact(event.received_at)}."""
    await deliver(BODY.encode(), ${event.source ? `source="${event.source}", type=${literal(event.type)}, ` : ""}expect="done")
`;
}
