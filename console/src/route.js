// The address of a view is its fragment: #/deliveries?state=dead. A filter lives in it, so that a
// reload, a link and the way back keep it.

import { useEffect, useState } from "preact/hooks";

export function route() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/");
  return { view: view || "overview", item: rest.length ? decodeURIComponent(rest.join("/")) : null, filter: Object.fromEntries(new URLSearchParams(search)) };
}

export function address(view, item = null, filter = {}) {
  const given = Object.entries(filter).filter(([, value]) => value !== "" && value != null);
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return `#/${view}${item === null ? "" : `/${encodeURIComponent(item)}`}${search}`;
}

export function go(...parts) {
  location.hash = address(...parts);
}

// Another filter of the same view takes the place of this one in the history.
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
