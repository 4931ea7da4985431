// Calls of the admin API. The token stays in this tab (sessionStorage) and is sent only in the
// Authorization header. A link may carry it in its fragment, which browsers never send.

const STORED = "sdk-trio-token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function token() {
  return sessionStorage.getItem(STORED) ?? "";
}

export function keepToken(value) {
  sessionStorage.setItem(STORED, value);
}

export function forgetToken() {
  sessionStorage.removeItem(STORED);
}

export function takeTokenOfLink() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return false;
  keepToken(given);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export function query(parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value != null);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

// `text` is a body in JSON.
async function call(method, path, text, signal) {
  const given = token();
  const headers = { authorization: `Bearer ${given}` };
  if (text !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      signal,
      body: text,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The program does not answer. It may be stopped, or starting again.");
  }
  // Another token may have been entered meanwhile; this refusal does not apply to it.
  if (response.status === 401 && given === token()) dispatchEvent(new Event("sdk-refused"));
  const answer = await response.text();
  let document = null;
  try {
    document = answer ? JSON.parse(answer) : null;
  } catch {
    throw new ApiError(response.status, `The answer (${response.status}) is no JSON.`);
  }
  if (!response.ok) {
    throw new ApiError(response.status, document?.error ?? `The call ended with ${response.status}.`);
  }
  return { document, next: nextOf(response.headers.get("link")) };
}

// The query of the next page, from a Link header (RFC 8288) of our own API.
function nextOf(link) {
  const found = /<([^>]*)>; rel="next"/.exec(link ?? "");
  return found ? found[1] : null;
}

export const get = async (path, parameters = {}, signal) =>
  (await call("GET", path + query(parameters), undefined, signal)).document;

export const page = (path, parameters = {}, signal) =>
  call("GET", path + query(parameters), undefined, signal);

export const postText = async (path, text) => (await call("POST", path, text)).document;

export const post = (path, order) => postText(path, JSON.stringify(order));
