// Payloads exactly as sent. JSON.parse turns 12345678901234567890 into another number, so this
// reader keeps every number as text. It returns nodes: {kind, value}, where an object's value is a
// list of [key, node], because keys may be repeated.

const WORDS = { true: "true", false: "false", null: "null" };
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\.)*"/y;
const SPACE = /[\t\n\r ]*/y;

// Deeper payloads are shown as text: they could exceed the browser's stack.
const DEEPEST = 200;

export function parse(text) {
  let at = 0;
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (!found) throw new SyntaxError(`no JSON at character ${at}`);
    at = pattern.lastIndex;
    return found[0];
  };
  const skip = () => match(SPACE);
  const take = (character) => {
    if (text[at] !== character) throw new SyntaxError(`no JSON at character ${at}`);
    at += 1;
  };
  const members = (close, depth, read) => {
    const found = [];
    at += 1;
    skip();
    if (text[at] === close) {
      at += 1;
      return found;
    }
    for (;;) {
      skip();
      found.push(read(depth + 1));
      skip();
      if (text[at] === close) {
        at += 1;
        return found;
      }
      take(",");
    }
  };
  const value = (depth) => {
    if (depth > DEEPEST) throw new SyntaxError("too deep");
    skip();
    const first = text[at];
    if (first === "{") {
      const pair = (inner) => {
        const key = JSON.parse(match(STRING));
        skip();
        take(":");
        return [key, value(inner)];
      };
      return { kind: "object", value: members("}", depth, pair) };
    }
    if (first === "[") return { kind: "array", value: members("]", depth, value) };
    if (first === '"') return { kind: "string", value: JSON.parse(match(STRING)) };
    for (const word of Object.keys(WORDS)) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return { kind: word === "null" ? "null" : "boolean", value: word };
      }
    }
    return { kind: "number", value: match(NUMBER) };
  };
  const root = value(0);
  skip();
  if (at !== text.length) throw new SyntaxError(`no JSON at character ${at}`);
  return root;
}

// Leaves by their path, as JSON pointers (RFC 6901); an empty object or array is a leaf.
export function leaves(node, path = "", found = new Map()) {
  if (node.kind === "object" && node.value.length) {
    for (const [key, inner] of node.value) {
      leaves(inner, `${path}/${key.replaceAll("~", "~0").replaceAll("/", "~1")}`, found);
    }
  } else if (node.kind === "array" && node.value.length) {
    node.value.forEach((inner, index) => leaves(inner, `${path}/${index}`, found));
  } else {
    found.set(path, node);
  }
  return found;
}

export function text(node) {
  if (node.kind === "string") return JSON.stringify(node.value);
  if (node.kind === "object") return "{}";
  if (node.kind === "array") return "[]";
  return node.value;
}

// The differences between two payloads: [pointer, before or null, after or null].
export function difference(before, after) {
  const old = leaves(before);
  const now = leaves(after);
  const changes = [];
  for (const [path, node] of now) {
    const earlier = old.get(path);
    if (earlier === undefined) changes.push([path, null, text(node)]);
    else if (text(earlier) !== text(node)) changes.push([path, text(earlier), text(node)]);
  }
  for (const [path, node] of old) if (!now.has(path)) changes.push([path, text(node), null]);
  return changes.sort((one, other) => (one[0] < other[0] ? -1 : 1));
}
