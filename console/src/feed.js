// The feed of changes: one WebSocket for the page. It resumes after the last sequence it has seen,
// reconnects with growing pauses, and is closed while the page is paused.

import { token } from "./api.js";
import { base64, setClock } from "./format.js";

const FIRST_WAIT = 500;
const LONGEST_WAIT = 15_000;
// A connection that was silent for this long is lost: heartbeats arrive every 15 seconds.
const SILENCE = 40_000;
// The most deliveries per second that the program sends one by one.
const MOST = 20;

export class Feed {
  #listeners = new Set();
  #watchers = new Set();
  #socket = null;
  #timer = null;
  #silence = null;
  #wait = FIRST_WAIT;
  #after = null;
  #store = null;
  #paused = false;
  #wanted = false;
  state = "closed";

  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  start() {
    this.#wanted = true;
    this.#open();
  }

  stop() {
    this.#wanted = false;
    this.#close("closed");
  }

  get paused() {
    return this.#paused;
  }

  pause(paused) {
    this.#paused = paused;
    if (paused) this.#close("paused");
    else if (this.#wanted) {
      this.#wait = FIRST_WAIT;
      this.#open();
      // The views read again what has changed meanwhile.
      this.#notify({ kind: "resumed" });
    }
  }

  #setState(state) {
    if (this.state === state) return;
    this.state = state;
    for (const watcher of this.#watchers) watcher(state);
  }

  #notify(message) {
    for (const listener of this.#listeners) listener(message);
  }

  #open() {
    if (this.#socket || this.#paused || !token()) return;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const url = new URL("feed", `${scheme}//${location.host}${location.pathname}`);
    // Views read their data again; during a flood, the page only has to know that there are
    // changes.
    url.searchParams.set("most", MOST);
    if (this.#after !== null) url.searchParams.set("after", this.#after);
    if (this.#store !== null) url.searchParams.set("store", this.#store);
    const secret = base64(token()).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
    const socket = new WebSocket(url, ["sdk-trio.feed", `sdk-trio.token.${secret}`]);
    this.#socket = socket;
    this.#setState(this.state === "live" ? "live" : "connecting");
    socket.onmessage = ({ data }) => {
      if (socket !== this.#socket) return;
      this.#listenForSilence();
      // A frame holds one or several messages, one per line.
      for (const line of data.split("\n")) this.#take(JSON.parse(line));
    };
    socket.onclose = () => {
      if (socket === this.#socket) this.#again();
    };
    this.#listenForSilence();
  }

  #take(message) {
    this.#after = message.seq;
    if (message.kind === "hello" || message.kind === "heartbeat") setClock(message.at);
    if (message.kind === "hello") {
      this.#store = message.store;
      this.#wait = FIRST_WAIT;
      this.#setState("live");
      // Open views have read their data before this, also the first time, so they lack later
      // changes.
      this.#notify({ kind: "resumed" });
    } else if (message.kind !== "heartbeat") this.#notify(message);
  }

  #listenForSilence() {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => this.#socket?.close(), SILENCE);
  }

  #again() {
    this.#socket = null;
    clearTimeout(this.#silence);
    if (this.#paused || !this.#wanted) return;
    this.#setState("lost");
    // Jitter keeps many pages from reconnecting at the same moment.
    const wait = this.#wait * (0.5 + Math.random() / 2);
    this.#wait = Math.min(this.#wait * 2, LONGEST_WAIT);
    this.#timer = setTimeout(() => this.#open(), wait);
  }

  #close(state) {
    clearTimeout(this.#timer);
    clearTimeout(this.#silence);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
    this.#setState(state);
  }
}

export const feed = new Feed();
