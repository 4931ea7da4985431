// The frame: sign-in, the views, the keyboard shortcuts, and the state of the feed.

import { render } from "preact";
import { useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";
import { forgetToken, get, keepToken, takeTokenOfLink, token } from "./api.js";
import { feed } from "./feed.js";
import { Dialog, Failure, html, useAct, useData, useFeedState } from "./parts.js";
import { address, back, useRoute } from "./route.js";
import { Alerts } from "./views/alerts.js";
import { Dead } from "./views/dead.js";
import { Deliveries } from "./views/deliveries.js";
import { Delivery } from "./views/delivery.js";
import { Notifications } from "./views/notifications.js";
import { Overview } from "./views/overview.js";
import { Pauses } from "./views/pauses.js";
import { Rejected } from "./views/rejected.js";
import { Replication } from "./views/replication.js";
import { Doctor, Settings } from "./views/settings.js";
import { Tenant, Tenants } from "./views/tenants.js";
import { Trigger } from "./views/trigger.js";

// Name: label, view, view of one item, the part of the program that it needs.
const VIEWS = {
  overview: ["Overview", Overview],
  deliveries: ["Deliveries", Deliveries, Delivery],
  rejected: ["Rejected", Rejected],
  dead: ["Dead letters", Dead],
  pauses: ["Pauses", Pauses],
  tenants: ["Tenants", Tenants, Tenant, "tenants"],
  notifications: ["Notifications", Notifications, null, "notifications"],
  replication: ["Replication", Replication, null, "replication"],
  alerts: ["Alerts", Alerts, null, "alerts"],
  settings: ["Settings", Settings],
  doctor: ["Doctor", Doctor, null, "doctor"],
  trigger: ["Trigger", Trigger, null, "trigger"],
};
const LIVE = { live: "live", connecting: "connecting", lost: "connection lost", paused: "paused", closed: "not live" };
const THEME = "sdk-trio-theme";

function Console() {
  const [inside, setInside] = useState(Boolean(token()));
  const [why, setWhy] = useState(null);
  const leave = (reason = null) => {
    forgetToken();
    feed.stop();
    setWhy(reason);
    setInside(false);
  };
  return inside ? html`<${Frame} onLeave=${leave} />` : html`<${Door} why=${why} onEnter=${() => setInside(true)} />`;
}

function Door({ why, onEnter }) {
  const [error, setError] = useState(why);
  const [enter] = useAct(async (event) => {
    const given = new FormData(event.currentTarget).get("token").trim();
    // Remove quotation marks and line breaks around the token, which a header cannot contain.
    if (!/^[\x21-\x7e]+$/.test(given)) {
      setError("This is not a token: it has letters, digits and signs of ASCII alone, without spaces.");
      return;
    }
    keepToken(given);
    try {
      await get("api/overview");
      onEnter();
    } catch (failure) {
      forgetToken();
      setError(failure.status === 401 ? "This is not the token of this program." : failure.message);
    }
  });
  return html`<main class="door"><h1>sdk_trio</h1><form onSubmit=${enter}>
    <label class="field wide">Admin token<input type="password" name="token" required autofocus autocomplete="off" /></label>
    <p class="faint">It is in the file admin-token of the data directory, or in the variable that Admin:TokenEnvVar names. It stays in this tab.</p>
    ${error && html`<p class="failure" role="alert">${error}</p>`}
    <p class="buttons"><button class="strong">Enter</button></p></form></main>`;
}

function Frame({ onLeave }) {
  const { view, item, filter } = useRoute();
  const overview = useData("api/overview", { every: 15_000 });
  const [help, setHelp] = useState(false);
  useEffect(() => {
    feed.start();
    return () => feed.stop();
  }, []);
  useEffect(() => {
    const refused = () => onLeave("The receiver no longer accepts this token.");
    addEventListener("sdk-refused", refused);
    return () => removeEventListener("sdk-refused", refused);
  }, []);
  // A key applies to the view on the screen, and effects run later than rendering.
  const latest = useRef();
  latest.current = { view, item };
  useEffect(() => {
    const keys = (event) => pressed(event, latest.current, () => setHelp(true));
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  }, []);
  const features = overview.data?.features ?? [];
  const views = Object.entries(VIEWS).filter(([, [, , , needs]]) => !needs || features.includes(needs));
  const [label, List, One] = Object.hasOwn(VIEWS, view) ? VIEWS[view] : ["Not found", () => html`<h1>There is no such page</h1>`];
  const Shown = item !== null && One ? One : List;
  useEffect(() => {
    document.title = `${label} - sdk_trio`;
    // In a narrow window, the line of views is wider than the window.
    document.querySelector("nav.views [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [label, views.length]);
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the content</a>
    <header class="bar"><a class="name" href=${address("overview")}>sdk_trio</a>
      ${overview.data?.development && html`<span class="badge">Development</span>`}${overview.data?.read_only && html`<span class="badge">read-only</span>`}
      <span class="right"><${Live} /><${Theme} /><button type="button" class="quiet" onClick=${() => setHelp(true)} aria-label="Keys">?</button><button type="button" class="quiet" onClick=${() => onLeave()}>Leave</button></span></header>
    <nav class="views" aria-label="Views"><ul>${views.map(([name, [title]]) => html`<li><a href=${address(name)} aria-current=${name === view ? "page" : null}>${title}</a></li>`)}</ul></nav>
    <main id="main" tabindex="-1"><${Safe} key=${view}><${Shown} key=${`${view}/${item}`} item=${item} filter=${filter} overview=${overview.data} /><//></main>
    ${help && html`<${Keys} views=${views} onClose=${() => setHelp(false)} />`}`;
}

// An error of one view is shown there; the other views continue to work.
function Safe({ children }) {
  const [error, again] = useErrorBoundary();
  useEffect(again, [location.hash]);
  return error ? html`<${Failure} error=${{ message: `This view has a fault: ${error.message}` }} again=${again} />` : children;
}

function Live() {
  const state = useFeedState();
  const paused = state === "paused";
  return html`<span class="live live-${state}" role="status"><i class="dot"></i>${LIVE[state]}</span>
    <button type="button" class="quiet" aria-pressed=${paused} onClick=${() => feed.pause(!paused)}>${paused ? "Go on" : "Pause"}</button>`;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "system");
  const turn = () => {
    const next = { system: "light", light: "dark", dark: "system" }[theme];
    localStorage.setItem(THEME, next);
    setTheme(next);
    dress(next);
  };
  return html`<button type="button" class="quiet" onClick=${turn} aria-label="Colours: ${theme}">${theme}</button>`;
}

function dress(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("sdk-theme"));
}

function Keys({ views, onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}><table class="plain"><tbody>
    ${views.slice(0, 9).map(([, [title]], index) => html`<tr><th scope="row"><kbd>${index + 1}</kbd></th><td>${title}</td></tr>`)}
    <tr><th scope="row"><kbd>j</kbd> <kbd>k</kbd></th><td>next and previous row of the list</td></tr>
    <tr><th scope="row"><kbd>Home</kbd> <kbd>End</kbd></th><td>its first row, and the last one that was read</td></tr>
    <tr><th scope="row"><kbd>Enter</kbd></th><td>open</td></tr><tr><th scope="row"><kbd>Escape</kbd></th><td>back to the list</td></tr>
    <tr><th scope="row"><kbd>/</kbd></th><td>filter</td></tr><tr><th scope="row"><kbd>p</kbd></th><td>pause</td></tr><tr><th scope="row"><kbd>?</kbd></th><td>these keys</td></tr></tbody></table>
    <p class="buttons"><button type="button" onClick=${onClose}>Close</button></p><//>`;
}

function pressed(event, { view, item }, help) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const shown = [...document.querySelectorAll("nav.views a")];
  if (/^[1-9]$/.test(event.key) && shown[event.key - 1]) shown[event.key - 1].click();
  else if (event.key === "?") help();
  else if (event.key === "p") feed.pause(!feed.paused);
  else if (event.key === "Escape" && item !== null) location.hash = back(view);
  else if (event.key === "/") {
    event.preventDefault();
    document.querySelector(".filters input, .filters select")?.focus();
  } else if ((event.key === "j" || event.key === "k") && item === null) {
    document.querySelector(".scroll")?.focus();
  }
}

const place = document.getElementById("console");
function begin() {
  render(null, place);
  render(html`<${Console} />`, place);
}
takeTokenOfLink();
// The same link, opened where the page is open already. The page is not reloaded: its requests
// would continue, and a refusal would remove the new token before the next page has it.
addEventListener("hashchange", () => takeTokenOfLink() && begin());
dress(localStorage.getItem(THEME) ?? "system");
place.replaceChildren();
begin();
