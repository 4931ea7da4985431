// Lists that are read page by page, with a button for the next one.

import { useCallback, useEffect, useState } from "preact/hooks";
import { page } from "../api.js";
import { Empty, Failure, html, useChanges } from "../parts.js";

export function useMore(path, parameters, kinds = []) {
  const key = JSON.stringify([path, parameters]);
  const [state, setState] = useState({ key: null, rows: null, next: null, error: null });
  const read = useCallback(async (url, given, before) => {
    try {
      const { document, next } = await page(url, given);
      setState({ key, rows: [...before, ...document], next, error: null });
    } catch (error) {
      setState((old) => ({ ...old, key, error }));
    }
  }, [key]);
  const again = useCallback(() => read(path, parameters, []), [key]);
  useEffect(() => { again(); }, [key]);
  useChanges(kinds, again);
  const current = state.key === key ? state : { rows: null, next: null, error: null };
  return { ...current, again, more: () => read(current.next.replace(/^\//, ""), {}, current.rows) };
}

export function More({ of, empty, children }) {
  return html`${of.error && html`<${Failure} error=${of.error} again=${of.again} />`}
    ${of.rows === null ? !of.error && html`<p class="empty" aria-busy="true">Loading…</p>` : of.rows.length === 0 ? html`<${Empty}>${empty}<//>` : children(of.rows)}
    ${of.next && html`<button type="button" onClick=${of.more}>More</button>`}`;
}
