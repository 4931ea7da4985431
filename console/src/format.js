// Times, numbers and states as people read them.

const COUNT = new Intl.NumberFormat();
const two = (value) => String(value).padStart(2, "0");

export const count = (value) => (value == null ? "-" : COUNT.format(value));

// The reader's own time zone, in the format of ISO 8601, which is unambiguous everywhere.
export function clock(seconds) {
  if (seconds == null) return "-";
  const moment = new Date(seconds * 1000);
  const time = [moment.getHours(), moment.getMinutes(), moment.getSeconds()].map(two).join(":");
  if (new Date().toDateString() === moment.toDateString()) return time;
  return `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())} ${time}`;
}

export const exact = (seconds) => (seconds == null ? "" : new Date(seconds * 1000).toISOString());

export function span(seconds) {
  if (seconds == null) return "-";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} us`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (value == null) return "-";
  if (value < 1024) return `${value} B`;
  if (value < 1024 * 1024) return `${(value / 1024).toFixed(1)} KiB`;
  return `${(value / 1024 / 1024).toFixed(1)} MiB`;
}

// How far the program's clock is ahead of this one: ages are computed with the program's clock.
let ahead = 0;

export function setClock(seconds) {
  ahead = seconds - Date.now() / 1000;
}

export function ago(seconds) {
  return seconds == null ? "-" : `${span(Math.max(0, Date.now() / 1000 + ahead - seconds))} ago`;
}

// The value of an input field for a time, which has no zone; the address has Unix seconds.
export function localMinute(seconds) {
  const moment = new Date(seconds * 1000);
  const year = moment.getFullYear();
  if (!seconds || !(year >= 1970 && year <= 9999)) return "";
  return `${year}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}T${two(moment.getHours())}:${two(moment.getMinutes())}`;
}

// Shows invisible characters, and those that reverse the following text (UAX 9), as code points: an
// event type with such a character is another type, although it looks the same. Joiners (U+200C,
// U+200D) are unchanged, because names and emoji contain them.
const UNSEEN = /[\p{Cc}\p{Cs}\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu;
const named = (character) => `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

export const visible = (text) => text?.replace(UNSEEN, named);

// The same for a text of several lines.
export const visibleLines = (text) => text?.replace(UNSEEN, (character) => ("\n\t".includes(character) ? character : named(character)));

export const base64 = (text) => btoa(unescape(encodeURIComponent(text)));

export const sizeOf = (text) => new TextEncoder().encode(text).length;
