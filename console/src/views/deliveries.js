// The list of deliveries: filtered by the address, live at its top, and as long as the store.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { page } from "../api.js";
import { count, localMinute, visible } from "../format.js";
import { Choice, Empty, Failure, Field, State, When, html, useChanges } from "../parts.js";
import { address, cameFrom, go, refine } from "../route.js";

const STATES = ["received", "running", "retrying", "done", "dead", "parked"];
const ROW = 40;
const PAGE = 200;
// The number of pages whose rows are kept; others are read again when they are scrolled to.
const KEPT = 8;
// Firefox draws no element above 17.8 million pixels, Chromium none above 33.5: rows below would
// never become visible. A scaled scroll bar would skip rows, and no one reads so many.
const MOST = 400_000;

export function Deliveries({ filter, overview }) {
  const turn = (change) => refine("deliveries", { ...filter, ...change });
  const find = (text) => text && go("deliveries", text);
  return html`<h1>Deliveries</h1>
    <div class="filters" role="search">
      <${Field} label="Id" name="id" onChange=${find} placeholder="webhook-id, Enter" />
      <${Field} label="Type" name="type" value=${filter.type} onChange=${(type) => turn({ type })} placeholder="order.paid" />
      <${Choice} label="State" value=${filter.state} options=${STATES} onChange=${(state) => turn({ state })} />
      <${Field} label="Tenant" name="tenant" value=${filter.tenant} onChange=${(tenant) => turn({ tenant })} />
      ${overview?.features.includes("sources") && html`<${Field} label="Source" name="source" value=${filter.source} onChange=${(source) => turn({ source })} />`}
      <${Field} label="Subject" name="subject" value=${filter.subject} onChange=${(subject) => turn({ subject })} />
      <${Moment} label="Since" value=${filter.since} onChange=${(since) => turn({ since })} />
      <${Moment} label="Until" value=${filter.until} onChange=${(until) => turn({ until })} />
      ${Object.values(filter).some(Boolean) && html`<button type="button" class="quiet" onClick=${() => refine("deliveries", {})}>Clear</button>`}
    </div>
    <${Rows} key=${JSON.stringify(filter)} filter=${filter} />`;
}

// The browser reports each typed digit of a year: the 2 of 2026 would be the year 2.
function Moment({ label, value, onChange }) {
  const turn = (text) => (text === "" || text >= "1970") && onChange(text && String(new Date(text).getTime() / 1000));
  return html`<${Field} label=${label} type="datetime-local" value=${localMinute(value)} onChange=${turn} />`;
}

// Pages of the list: {before, rows or null, length}. Only a few have their rows.
function usePages(filter) {
  const [{ pages, end }, setList] = useState({ pages: [], end: false });
  const [error, setError] = useState(null);
  // The pages that are being read. A new list gets a new set: a page read for the earlier list
  // would leave a gap in this one.
  const reading = useRef(new Set());
  const read = useCallback(async (index, before, take) => {
    const mine = reading.current;
    if (mine.has(index)) return;
    mine.add(index);
    try {
      const { document, next } = await page("api/events", { ...filter, limit: PAGE, before, order: "newest" });
      if (mine !== reading.current) return;
      setError(null);
      take(document, !next);
    } catch (failure) {
      if (mine === reading.current) setError(failure);
    } finally {
      mine.delete(index);
    }
  }, []);
  // Starts over with the newest rows, if they are still `wanted` when they arrive. An answer that
  // is being read may be older than the last change, so another read follows it.
  const next = useRef(null);
  const renew = useCallback(async (wanted = () => true) => {
    next.current = wanted;
    while (next.current && !reading.current.has("newest")) {
      const mine = next.current;
      next.current = null;
      await read("newest", undefined, (rows, end) => {
        if (!mine()) return;
        reading.current = new Set();
        setList({ pages: [{ before: rows.length ? rows[0].sequence + 1 : undefined, rows, length: rows.length }], end });
      });
    }
  }, []);
  const load = useCallback((index, before) => read(index, before, (rows, last) => setList((old) => {
    const pages = [...old.pages];
    pages[index] = { before, rows, length: rows.length };
    return { pages: pages.map((each, place) => (Math.abs(place - index) > KEPT ? { ...each, rows: null } : each)), end: old.end || last };
  })), []);
  useEffect(() => { renew(); }, []);
  return { pages, end, error, load, renew, goOn: () => (pages.length ? setError(null) : renew()) };
}

// The index of a delivery in the list; -1 if its row is not loaded.
function placeOf(pages, key) {
  let start = 0;
  for (const { rows, length } of pages) {
    const at = rows?.findIndex((row) => row.key === key) ?? -1;
    if (at >= 0) return start + at;
    start += length;
  }
  return -1;
}

function rowAt(pages, place) {
  let start = 0;
  for (const { rows, length } of pages) {
    if (place < start + length) return rows?.[place - start];
    start += length;
  }
  return undefined;
}

function Rows({ filter }) {
  const { pages, end, error, load, renew, goOn } = usePages(filter);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(800);
  const [fresh, setFresh] = useState(false);
  const [chosen, setChosen] = useState(() => cameFrom("deliveries"));
  const box = useRef(null);
  useEffect(() => {
    const sized = new ResizeObserver(() => box.current && setHeight(box.current.clientHeight));
    sized.observe(box.current);
    return () => sized.disconnect();
  }, []);
  // New rows appear only while the list is scrolled to its top; otherwise the rows stay in place.
  const stays = () => box.current?.scrollTop < ROW || setFresh(true);
  useChanges(["delivery", "changed"], () => stays() && renew(stays));
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
    // A failed read would fail again at once.
    if (error) return;
    for (const [index, before] of missing) load(index, before);
    const rows = pages.at(-1)?.rows;
    if (!end && total < MOST && last > total - 30 && rows?.length) load(pages.length, rows.at(-1).sequence);
  });
  const up = () => {
    box.current.scrollTop = 0;
    setFresh(false);
    renew();
  };
  const place = placeOf(pages, chosen);
  const choose = (next) => {
    const [above, below] = [next * ROW, (next + 1) * ROW - height];
    if (box.current.scrollTop > above) box.current.scrollTop = above;
    if (box.current.scrollTop < below) box.current.scrollTop = below;
    // A row that is not loaded yet is chosen by the next key press.
    const row = rowAt(pages, next);
    if (row) setChosen(row.key);
  };
  const keys = (event) => {
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (step && total) {
      event.preventDefault();
      const from = place < 0 && Number.isFinite(step) ? Math.ceil(top / ROW) : place + step;
      choose(Math.max(0, Math.min(total - 1, from)));
    } else if (event.key === "Enter" && place >= 0) go("deliveries", chosen);
  };
  const began = pages.length > 0;
  // The link back from a delivery leads to its row.
  useEffect(() => { if (place > 0) choose(place); }, [began]);
  const said = rowAt(pages, place);
  const sum = end ? "" : total < MOST ? " read, more below" : " read. Browsers draw no longer list: narrow it, such as with Until, to see older ones.";
  const narrowed = Object.values(filter).some(Boolean);
  const nothing = narrowed ? "No delivery fits this filter." : "No delivery has arrived yet. Send a sample: sdk-trio events trigger order.paid";
  return html`
    ${error && html`<${Failure} error=${error} again=${goOn} />`}
    ${fresh && html`<button type="button" class="fresh" onClick=${up}>New deliveries: go to the top</button>`}
    <div class="list" role="table" aria-label="Deliveries" aria-rowcount=${end ? total + 1 : -1}>
      <div class="row head" role="row">${["Received", "Type", "State", "Id", "Subject", "Runs", "Last error"].map((name) => html`<span role="columnheader">${name}</span>`)}</div>
      <div class="scroll" ref=${box} tabindex="0" role="rowgroup" aria-label="Rows; j and k move, Enter opens" aria-busy=${total === 0 && !end && !error ? "true" : undefined} onScroll=${(event) => { setTop(event.currentTarget.scrollTop); if (event.currentTarget.scrollTop < ROW && fresh) up(); }} onKeyDown=${keys}>
        <div class="rows" role="presentation" ref=${(element) => element && (element.style.height = `${total * ROW}px`)}>
          ${shown.map(([at, event]) => html`<${Row} key=${event?.key ?? at} place=${at} event=${event} chosen=${event?.key === chosen} />`)}
        </div>
        ${total === 0 && html`<div role="row"><div role="cell"><${Empty}>${error ? "Nothing was read." : end ? nothing : "Loading…"}<//></div></div>`}
      </div>
    </div>
    <p class="hidden" role="status">${said && `${said.type}, ${said.state}, ${said.webhook_id}`}</p>
    <p class="faint">${count(total)} deliveries${sum}</p>`;
}

function Row({ place, event, chosen }) {
  const placed = (element) => element && (element.style.transform = `translateY(${place * ROW}px)`);
  if (!event) return html`<div class="row" role="row" ref=${placed} aria-rowindex=${place + 2}><span role="cell" class="faint">…</span></div>`;
  return html`<div class="row ${chosen ? "chosen" : ""}" role="row" ref=${placed} aria-rowindex=${place + 2}>
    <span role="cell"><${When} at=${event.received_at} /></span>
    <span role="cell" class="type">${event.source && html`<span class="faint">${event.source} </span>`}${visible(event.type)}</span>
    <span role="cell"><${State} of=${event.state} /></span>
    <span role="cell" class="mono"><a class="cover" tabindex="-1" href=${address("deliveries", event.key)}>${event.webhook_id}</a></span>
    <span role="cell" class="mono">${visible(event.subject) ?? ""}</span>
    <span role="cell" class="number">${event.attempts + event.earlier_attempts}</span>
    <span role="cell" class="error">${visible(event.last_error) ?? ""}</span></div>`;
}
