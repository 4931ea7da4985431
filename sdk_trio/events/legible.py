"""JSON that a strict decoder refuses, made legible: what it cannot read is replaced. Pure.

Some texts are JSON (RFC 8259), or are read as JSON by most programs, and compiled decoders refuse
them all the same: an escape that is half of a surrogate pair, which JavaScript writes for a text
that was cut inside an emoji; nesting beyond a limit; a number of thousands of digits; ``NaN`` and
``Infinity``, which are none of RFC 8259 and which Python and others write. An event that came in
such a text is an event: its sender would deliver the same bytes again for ever.
"""

import re
from typing import Final

#: Arrays and objects within each other. Real payloads nest 6 deep; the interpreter's own limit
#: depends on its version and on how deep the caller stands.
MAX_DEPTH: Final = 256

#: Characters of one number. CPython refuses to make an integer out of more digits.
MAX_NUMBER_LENGTH: Final = 4300

_BOM: Final = b"\xef\xbb\xbf"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_next_token = re.compile(
    rb"""[ \t\n\r]*+(?:
    ("(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+")  # 1: text
    |(-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)   # 2: number
    |(true|false|null)                                             # 3
    |(NaN|-?Infinity)                                              # 4: not in RFC 8259
    |([\[{])                                                       # 5
    |([\]}])                                                       # 6
    |([,:])                                                        # 7
    )""",
    re.VERBOSE,
).match
_is_blank = re.compile(rb"[ \t\n\r]*+").fullmatch
_TEXT, _NUMBER, _LITERAL, _CONSTANT, _OPENING, _CLOSING, _SIGN = range(1, 8)

#: Escapes of a text one by one: a pair of surrogates, half of one (1), or any other.
_ESCAPE: Final = re.compile(
    rb"\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"
    rb"|(\\u[Dd][89A-Fa-f][0-9A-Fa-f]{2})|\\."
)
_HALF: Final = re.compile(rb"\\u[Dd][89A-Fa-f]")

_VALUE, _VALUE_OR_END, _NAME, _NAME_OR_END, _COLON, _COMMA_OR_END = range(6)


class NotJsonError(ValueError):
    """The text is no JSON, however leniently it is read."""


def legible(raw: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return JSON that every decoder reads, and what had to be changed in ``raw`` for it.

    Half of a surrogate pair becomes U+FFFD; numbers that are none, numbers of more than 4300
    characters and what nests deeper than 256 become null. A byte order mark is passed over, as RFC
    8259 section 8.1 allows; other encodings than UTF-8 are no JSON by the same section. Accepts
    every UTF-8 text that Python's ``json.loads`` accepts. Takes linear time and no deep stack.

    Raises:
        NotJsonError: it is no JSON.
    """
    changes: dict[str, None] = {}
    raw = raw.removeprefix(_BOM)
    try:
        raw.decode()
    except UnicodeDecodeError:
        raw = _without_encoded_surrogates(raw)
        changes["half of a surrogate pair"] = None
    pieces: list[bytes] = []
    copied = at = 0
    cut_from = -1
    stack = bytearray()
    wanted = _VALUE
    while True:
        token = _next_token(raw, at)
        if token is None:
            raise NotJsonError(f"no JSON at byte {at}")
        kind = token.lastindex
        start, at = token.span(kind or 0)
        ends_value = False
        if kind == _SIGN:
            colon = raw[start] == 0x3A
            if wanted != (_COLON if colon else _COMMA_OR_END) or not stack:
                raise NotJsonError(f"no JSON at byte {start}")
            wanted = _VALUE if colon or stack[-1] == 0x5B else _NAME
        elif kind == _CLOSING:
            # "]" and "}" stand two after their opening brackets in ASCII.
            if not stack or wanted not in _ENDS or stack.pop() + 2 != raw[start]:
                raise NotJsonError(f"no JSON at byte {start}")
            ends_value = True
        elif wanted in (_NAME, _NAME_OR_END):
            if kind != _TEXT:
                raise NotJsonError(f"no JSON at byte {start}")
            wanted = _COLON
        elif wanted not in (_VALUE, _VALUE_OR_END):
            raise NotJsonError(f"no JSON at byte {start}")
        elif kind == _OPENING:
            stack.append(raw[start])
            wanted = _VALUE_OR_END if raw[start] == 0x5B else _NAME_OR_END
            if len(stack) == MAX_DEPTH + 1:
                cut_from = start
        else:
            ends_value = True
        instead: bytes | None = None
        if cut_from < 0:
            instead, change = _instead_of(kind, raw, start, at)
        elif kind == _CLOSING and len(stack) == MAX_DEPTH:
            instead, change = b"null", f"nested deeper than {MAX_DEPTH}"
            start, cut_from = cut_from, -1
        if instead is not None:
            changes[change] = None
            pieces += (raw[copied:start], instead)
            copied = at
        if ends_value:
            wanted = _COMMA_OR_END
            if not stack:
                break
    if _is_blank(raw, at) is None:
        raise NotJsonError(f"more than one value, at byte {at}")
    return b"".join((*pieces, raw[copied:])), tuple(changes)


_ENDS: Final = (_COMMA_OR_END, _VALUE_OR_END, _NAME_OR_END)


def _instead_of(kind: int | None, raw: bytes, start: int, end: int) -> tuple[bytes | None, str]:
    """Return what replaces a token, None if it stays, and the reason."""
    if kind == _TEXT:
        if raw.find(b"\\u", start, end) >= 0 and _HALF.search(raw, start, end):
            text = raw[start:end]
            whole = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)
            if whole != text:
                return whole, "half of a surrogate pair"
    elif kind == _NUMBER:
        if end - start > MAX_NUMBER_LENGTH:
            return b"null", f"a number of more than {MAX_NUMBER_LENGTH} characters"
    elif kind == _CONSTANT:
        return b"null", "a number that is none"
    return None, ""


def _without_encoded_surrogates(raw: bytes) -> bytes:
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise NotJsonError("not in UTF-8") from None
    return _SURROGATE.sub("\ufffd", text).encode()
