// The address of a view is its fragment: #/deliveries?state=dead. It contains the filter, so that a
// reload, a link and the Back button keep it.

import { useEffect, useState } from "preact/hooks";

// The last address of each list: the link back from an item keeps the filter.
const lists = new Map();
let current = null;
let before = null;

export function route() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/");
  if (!rest.length) lists.set(view, location.hash);
  before = current;
  current = { view: view || "overview", item: rest.length ? decoded(rest.join("/")) : null, filter: Object.fromEntries(new URLSearchParams(search)) };
  return current;
}

// The item of a view that was shown last.
export const cameFrom = (view) => (before?.view === view ? before.item : null);

// A truncated escape, as in an address cut off by a message, is taken literally.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const back = (view) => lists.get(view) ?? address(view);

export function address(view, item = null, filter = {}) {
  const given = Object.entries(filter).filter(([, value]) => value !== "" && value != null);
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return `#/${view}${item === null ? "" : `/${encodeURIComponent(item)}`}${search}`;
}

export function go(...parts) {
  location.hash = address(...parts);
}

// Another filter of the same view replaces the current history entry.
export function refine(view, filter) {
  history.replaceState(null, "", address(view, null, filter));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [current, setCurrent] = useState(route);
  useEffect(() => {
    const turn = () => setCurrent(route());
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  return current;
}
