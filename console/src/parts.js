// The parts that all views share.

import htm from "htm";
import { h } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { get } from "./api.js";
import { feed } from "./feed.js";
import { clock, exact, visible } from "./format.js";
import { text } from "./json.js";

export const html = htm.bind(h);

// The shortest time between two reads of the same data in milliseconds, however many changes the
// feed reports.
const READ_EVERY = 1000;

// Reads `path` now, and again when the feed reports a change of one of `kinds` for which `about` is
// true, every `every` milliseconds, and on `again()`. Old data stay on the screen until the new
// data arrive.
export function useData(path, { kinds = [], about, every = 0, parameters = {} } = {}) {
  const key = path && JSON.stringify([path, parameters]);
  const [state, setState] = useState({ key: null, data: null, error: null });
  const reader = useRef(() => {});
  const again = useCallback(() => reader.current(), []);
  useEffect(() => {
    if (!key) return undefined;
    const abort = new AbortController();
    const read = async () => {
      try {
        const data = await get(path, parameters, abort.signal);
        if (!abort.signal.aborted) setState({ key, data, error: null });
      } catch (error) {
        if (!abort.signal.aborted) setState((old) => ({ key, data: old.key === key ? old.data : null, error }));
      }
    };
    // A read is never cancelled for the next one: if answers take longer than the time between two
    // changes, none would arrive.
    let reading = false;
    let wanted = false;
    reader.current = async (late = true) => {
      wanted ||= late || !reading;
      if (reading) return;
      reading = true;
      while (wanted && !abort.signal.aborted) {
        wanted = false;
        await read();
      }
      reading = false;
    };
    again();
    return () => abort.abort();
  }, [key]);
  useChanges(kinds, again, about);
  useEffect(() => {
    if (!every) return undefined;
    const timer = setInterval(() => feed.paused || document.hidden || reader.current(false), every);
    return () => clearInterval(timer);
  }, [every]);
  const current = state.key === key ? state : { data: null, error: null };
  return { ...current, loading: current.data === null && current.error === null, again };
}

// Calls `then` after changes of one of `kinds` for which `about` is true, at most once in
// READ_EVERY, and never while paused.
export function useChanges(kinds, then, about = () => true) {
  const latest = useRef(then);
  latest.current = then;
  const wanted = kinds.join(",");
  useEffect(() => {
    if (!wanted) return undefined;
    let timer = null;
    let last = 0;
    const end = feed.listen((message) => {
      if (!["lagged", "resumed"].includes(message.kind) && !(kinds.includes(message.kind) && about(message))) return;
      if (timer !== null) return;
      timer = setTimeout(() => {
        timer = null;
        last = Date.now();
        if (!feed.paused) latest.current();
      }, Math.max(0, last + READ_EVERY - Date.now()));
    });
    return () => {
      clearTimeout(timer);
      end();
    };
  }, [wanted]);
}

// Runs one action at a time: a second press while it runs has no effect. Returns the function for
// the press, and whether the action runs.
export function useAct(act) {
  const busy = useRef(false);
  const [acting, setActing] = useState(false);
  const press = async (event) => {
    event?.preventDefault?.();
    if (busy.current) return;
    busy.current = true;
    setActing(true);
    try {
      await act(event);
    } finally {
      busy.current = false;
      setActing(false);
    }
  };
  return [press, acting];
}

export function useFeedState() {
  const [state, setState] = useState(feed.state);
  useEffect(() => feed.watch(setState), []);
  return state;
}

export const State = ({ of }) => html`<span class="state state-${of}">${of}</span>`;

export const When = ({ at }) =>
  at == null ? html`<span class="faint">-</span>` : html`<time datetime=${exact(at)} title=${exact(at)}>${clock(at)}</time>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Failure = ({ error, again }) => html`
  <div class="failure" role="alert">
    <p>${error.message}</p>
    ${again && html`<button type="button" onClick=${again}>Try again</button>`}
  </div>`;

// Shows the data, or instead of them an error, a note that they are loading, or that there are
// none.
export function Loaded({ of, empty, children }) {
  if (of.data === null) {
    return of.error ? html`<${Failure} error=${of.error} again=${of.again} />` : html`<p class="empty" aria-busy="true">Loading…</p>`;
  }
  const none = Array.isArray(of.data) && of.data.length === 0;
  return html`${of.error && html`<${Failure} error=${of.error} again=${of.again} />`}${none && empty ? html`<${Empty}>${empty}<//>` : children(of.data)}`;
}

export function Choice({ label, value, options, onChange, all = "all" }) {
  return html`<label class="field">${label}
    <select value=${value ?? ""} onChange=${(event) => onChange(event.currentTarget.value)}>
      <option value="">${all}</option>
      ${options.map((option) => html`<option value=${option} selected=${option === value}>${option}</option>`)}
    </select></label>`;
}

// A text field that takes effect when it loses the focus or Enter is pressed. Unsent text stays
// when the page is rendered again.
export function Field({ label, value, onChange, type = "text", placeholder = "", name, wide = false }) {
  const [draft, setDraft] = useState(null);
  useEffect(() => setDraft(null), [value]);
  return html`<label class="field ${wide ? "wide" : ""}">${label}
    <input type=${type} name=${name} value=${draft ?? value ?? ""} placeholder=${placeholder} spellcheck=${false} autocomplete="off"
      onInput=${(event) => setDraft(event.currentTarget.value)}
      onChange=${(event) => onChange(event.currentTarget.value.trim())} /></label>`;
}

export function Copy({ text, children }) {
  const [said, say] = useState("");
  const copy = async () => {
    say((await toClipboard(typeof text === "function" ? text() : text)) ? "copied" : "not copied");
    setTimeout(() => say(""), 1500);
  };
  return html`<button type="button" class="quiet" onClick=${copy}>${children}<span class="said" aria-live="polite">${said && ` ${said}`}</span></button>`;
}

// Browsers give the clipboard only to pages of https and of this machine; elsewhere execCommand
// works.
async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    try {
      return document.execCommand("copy");
    } finally {
      area.remove();
    }
  }
}

// The result of an action. It takes the focus, because the button of the action may be gone by then.
export function Said({ text, as = "p" }) {
  const element = useRef(null);
  useEffect(() => {
    if (text) element.current.focus();
  }, [text]);
  return html`<${as} ref=${element} tabindex="-1" role="status" class="said">${text}<//>`;
}

// A button that acts. It keeps the focus while its action runs: a `disabled` button would lose it.
export const Act = ({ busy, children, ...rest }) => html`<button class="strong" aria-disabled=${busy ? "true" : null} ...${rest}>${children}</button>`;

// A dialog that asks for confirmation before a change.
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    const dialog = element.current;
    return () => {
      // The result of an action may have the focus already.
      const { activeElement } = document;
      if (activeElement !== document.body && !dialog.contains(activeElement)) return;
      (before?.isConnected ? before : document.getElementById("main"))?.focus();
    };
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose} onCancel=${(event) => { event.preventDefault(); onClose(); }}
    onClick=${(event) => event.target === element.current && onClose()}>
    <div class="dialog"><h2>${title}</h2>${children}</div></dialog>`;
}

export function Tree({ node, name, depth = 0 }) {
  const branch = (node.kind === "object" || node.kind === "array") && node.value.length > 0;
  const label = name !== undefined && html`<span class="key">${visible(String(name))}</span>`;
  if (!branch) {
    return html`<div class="leaf">${label}<${Value} kind=${node.kind} text=${text(node)} /></div>`;
  }
  const children = node.kind === "object" ? node.value : node.value.map((inner, index) => [index, inner]);
  return html`<${Branch} label=${label} summary=${node.kind === "object" ? `{${children.length}}` : `[${children.length}]`} open=${depth < 2} >
    ${() => html`<${Members} of=${children} depth=${depth} />`}<//>`;
}

// Browsers lay out a line of megabytes slowly.
const SHOWN_AT_ONCE = 20_000;

function Value({ kind, text }) {
  const [most, setMost] = useState(SHOWN_AT_ONCE);
  return html`<span class="value ${kind}">${visible(text.slice(0, most))}</span>
    ${text.length > most && html`<button type="button" class="quiet" onClick=${() => setMost(most * 5)}>${text.length - most} more characters</button>`}`;
}

// Children are rendered when the branch is first opened: a payload may have a hundred thousand of
// them.
function Branch({ label, summary, open, children }) {
  const [opened, setOpened] = useState(open);
  return html`<details class="branch" open=${open} onToggle=${(event) => event.currentTarget.open && setOpened(true)}>
    <summary>${label}<span class="faint">${summary}</span></summary>${opened && children()}</details>`;
}

const MEMBERS_AT_ONCE = 200;

function Members({ of, depth }) {
  const [most, setMost] = useState(MEMBERS_AT_ONCE);
  return html`<div class="members">${of.slice(0, most).map(([key, inner]) => html`<${Tree} name=${key} node=${inner} depth=${depth + 1} />`)}
    ${of.length > most && html`<button type="button" class="quiet" onClick=${() => setMost(most * 5)}>${of.length - most} more</button>`}</div>`;
}
