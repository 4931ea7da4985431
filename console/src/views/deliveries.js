// The list of deliveries: filtered in the address, live at its top, and as long as the store.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { page } from "../api.js";
import { count } from "../format.js";
import { Choice, Empty, Failure, Field, State, When, html, useChanges } from "../parts.js";
import { address, go, refine } from "../route.js";

const STATES = ["received", "running", "retrying", "done", "dead", "parked"];
const ROW = 40;
const PAGE = 200;
// Pages whose rows are kept; those farther away are read again when one comes back to them.
const KEPT = 8;

export function Deliveries({ filter }) {
  const turn = (change) => refine("deliveries", { ...filter, ...change });
  const find = (text) => text && go("deliveries", text);
  return html`<h1>Deliveries</h1>
    <div class="filters" role="search">
      <${Field} label="Id" name="id" onChange=${find} placeholder="webhook-id, Enter" />
      <${Field} label="Type" name="type" value=${filter.type} onChange=${(type) => turn({ type })} placeholder="order.paid" />
      <${Choice} label="State" value=${filter.state} options=${STATES} onChange=${(state) => turn({ state })} />
      <${Field} label="Tenant" name="tenant" value=${filter.tenant} onChange=${(tenant) => turn({ tenant })} />
      <${Field} label="Subject" name="subject" value=${filter.subject} onChange=${(subject) => turn({ subject })} />
      <${Moment} label="Since" value=${filter.since} onChange=${(since) => turn({ since })} />
      <${Moment} label="Until" value=${filter.until} onChange=${(until) => turn({ until })} />
      ${Object.values(filter).some(Boolean) && html`<button type="button" class="quiet" onClick=${() => refine("deliveries", {})}>Clear</button>`}
    </div>
    <${Rows} key=${JSON.stringify(filter)} filter=${filter} />`;
}

// The browser's own field for a moment has no zone; the address has Unix seconds.
function Moment({ label, value, onChange }) {
  const shown = value ? new Date(value * 1000 - new Date(value * 1000).getTimezoneOffset() * 60_000).toISOString().slice(0, 16) : "";
  return html`<${Field} label=${label} type="datetime-local" value=${shown}
    onChange=${(text) => onChange(text ? String(new Date(text).getTime() / 1000) : "")} />`;
}

// Pages of the list: {before, rows or null, length}. Only a few have their rows.
function usePages(filter) {
  const [pages, setPages] = useState([]);
  const [end, setEnd] = useState(false);
  const [error, setError] = useState(null);
  const busy = useRef(new Set());
  const load = useCallback(async (index, before) => {
    if (busy.current.has(index)) return;
    busy.current.add(index);
    try {
      const { document, next } = await page("api/events", { ...filter, limit: PAGE, before, order: "newest" });
      setError(null);
      setPages((old) => {
        const now = index === 0 ? [] : [...old];
        now[index] = { before, rows: document, length: document.length };
        return now.map((each, place) => (each && Math.abs(place - index) > KEPT ? { ...each, rows: null } : each));
      });
      if (index === 0 || !next) setEnd(!next);
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure);
    } finally {
      busy.current.delete(index);
    }
  }, []);
  useEffect(() => { load(0); }, []);
  return { pages, end, error, load };
}

function Rows({ filter }) {
  const { pages, end, error, load } = usePages(filter);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(800);
  const [fresh, setFresh] = useState(false);
  const [chosen, setChosen] = useState(-1);
  const box = useRef(null);
  useEffect(() => {
    const sized = new ResizeObserver(() => box.current && setHeight(box.current.clientHeight));
    sized.observe(box.current);
    return () => sized.disconnect();
  }, []);
  // At the top, new rows come in; who reads farther down keeps the rows in their places.
  useChanges(["delivery", "changed"], () => (box.current.scrollTop < ROW ? load(0) : setFresh(true)));
  const total = pages.reduce((sum, each) => sum + each.length, 0);
  const first = Math.max(0, Math.floor(top / ROW) - 5);
  const last = Math.min(total, Math.ceil((top + height) / ROW) + 5);
  const shown = [];
  let start = 0;
  const missing = [];
  pages.forEach((each, index) => {
    const from = Math.max(first, start);
    const to = Math.min(last, start + each.length);
    if (from < to && each.rows === null) missing.push([index, each.before]);
    for (let place = from; place < to; place += 1) shown.push([place, each.rows?.[place - start]]);
    start += each.length;
  });
  useEffect(() => {
    for (const [index, before] of missing) load(index, before);
    const rows = pages.at(-1)?.rows;
    if (!end && last > total - 30 && rows?.length) load(pages.length, rows.at(-1).sequence);
  });
  const up = () => {
    box.current.scrollTop = 0;
    setFresh(false);
    load(0);
  };
  const rowAt = (place) => shown.find(([each]) => each === place)?.[1];
  const keys = (event) => {
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (step) {
      event.preventDefault();
      const next = Math.max(0, Math.min(total - 1, chosen + step));
      setChosen(next);
      const [above, below] = [next * ROW, (next + 1) * ROW - height];
      if (box.current.scrollTop > above) box.current.scrollTop = above;
      if (box.current.scrollTop < below) box.current.scrollTop = below;
    } else if (event.key === "Enter" && rowAt(chosen)) go("deliveries", rowAt(chosen).key);
  };
  const narrowed = Object.values(filter).some(Boolean);
  const nothing = narrowed ? "No delivery fits this filter." : "No delivery has arrived yet. Send a sample: sdk-trio events trigger order.paid";
  return html`
    ${error && html`<${Failure} error=${error} again=${() => load(0)} />`}
    ${fresh && html`<button type="button" class="fresh" onClick=${up}>New deliveries: go to the top</button>`}
    <div class="list" role="table" aria-label="Deliveries" aria-rowcount=${end ? total + 1 : -1}>
      <div class="row head" role="row">${["Received", "Type", "State", "Id", "Subject", "Runs", "Last error"].map((name) => html`<span role="columnheader">${name}</span>`)}</div>
      <div class="scroll" ref=${box} tabindex="0" role="rowgroup" aria-label="Rows; j and k move, Enter opens" aria-busy=${total === 0 && !end && !error ? "true" : undefined} onScroll=${(event) => { setTop(event.currentTarget.scrollTop); if (event.currentTarget.scrollTop < ROW && fresh) up(); }} onKeyDown=${keys}>
        <div class="rows" role="presentation" ref=${(element) => element && (element.style.height = `${total * ROW}px`)}>
          ${shown.map(([place, event]) => html`<${Row} key=${event?.key ?? place} place=${place} event=${event} chosen=${place === chosen} />`)}
        </div>
        ${total === 0 && html`<div role="row"><div role="cell"><${Empty}>${error ? "Nothing was read." : end ? nothing : "Loading…"}<//></div></div>`}
      </div>
    </div>
    <p class="faint">${end ? `${count(total)} deliveries` : `${count(total)} deliveries read, more below`}</p>`;
}

function Row({ place, event, chosen }) {
  const placed = (element) => element && (element.style.transform = `translateY(${place * ROW}px)`);
  if (!event) return html`<div class="row" role="row" ref=${placed} aria-rowindex=${place + 2}><span role="cell" class="faint">…</span></div>`;
  return html`<div class="row ${chosen ? "chosen" : ""}" role="row" ref=${placed} aria-rowindex=${place + 2}>
    <span role="cell"><${When} at=${event.received_at} /></span>
    <span role="cell" class="type">${event.type}</span>
    <span role="cell"><${State} of=${event.state} /></span>
    <span role="cell" class="mono"><a class="cover" tabindex="-1" href=${address("deliveries", event.key)}>${event.webhook_id}</a></span>
    <span role="cell" class="mono">${event.subject ?? ""}</span>
    <span role="cell" class="number">${event.attempts + event.earlier_attempts}</span>
    <span role="cell" class="error">${event.last_error ?? ""}</span></div>`;
}
