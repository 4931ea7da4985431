// Lists that are read page by page, with a button for the next page.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { page } from "../api.js";
import { feed } from "../feed.js";
import { Empty, Failure, html, useChanges } from "../parts.js";

const NOTHING = { rows: null, next: null, error: null };
// The most rows of one answer.
const LARGEST = 500;

// Reads again after changes of `kinds`, and every `every` milliseconds for what no change reports.
export function useMore(path, parameters, kinds = [], every = 0) {
  const key = JSON.stringify([path, parameters]);
  const [state, setState] = useState({ key: null, rows: null, next: null, error: null });
  // Answers may arrive in another order than their requests: only the last request counts.
  const asked = useRef(0);
  const answered = useRef(0);
  const read = useCallback(async (url, given, before) => {
    asked.current += 1;
    const mine = asked.current;
    try {
      const { document, next } = await page(url, given);
      if (mine === asked.current) setState({ key, rows: [...before, ...document], next, error: null });
    } catch (error) {
      if (mine === asked.current) setState((old) => ({ ...(old.key === key ? old : NOTHING), key, error }));
    } finally {
      answered.current += 1;
    }
  }, [key]);
  // As many rows as are shown already: a change does not move the reader back.
  const length = useRef(0);
  const again = useCallback(() => read(path, { ...parameters, limit: Math.min(LARGEST, Math.max(parameters.limit, length.current)) }, []), [key]);
  useEffect(() => {
    length.current = 0;
    again();
  }, [key]);
  useChanges(kinds, again);
  useEffect(() => {
    if (!every) return undefined;
    const rests = () => feed.paused || document.hidden || answered.current < asked.current || length.current > LARGEST;
    const timer = setInterval(() => rests() || again(), every);
    return () => clearInterval(timer);
  }, [every, again]);
  const current = state.key === key ? state : NOTHING;
  length.current = current.rows?.length ?? 0;
  return { ...current, again, more: () => read(current.next.replace(/^\//, ""), {}, current.rows) };
}

export function More({ of, empty, children }) {
  return html`${of.error && html`<${Failure} error=${of.error} again=${of.again} />`}
    ${of.rows === null ? !of.error && html`<p class="empty" aria-busy="true">Loading…</p>` : of.rows.length === 0 ? html`<${Empty}>${empty}<//>` : children(of.rows)}
    ${of.next && html`<button type="button" onClick=${of.more}>More</button>`}`;
}
