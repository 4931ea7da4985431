"""JSON values without a strict schema: made legible, decoded, and fitted to a class. Pure.

Three steps, each for what the one before refuses. First, text: some texts are JSON (RFC 8259), or
are read as JSON by most programs, and compiled decoders refuse them all the same: an escape that is
half of a surrogate pair, which JavaScript writes for a text that was cut inside an emoji; nesting
beyond a limit; a number of thousands of digits; ``NaN`` and ``Infinity``, which RFC 8259 has not
and which Python and others write. An event that came in such a text is an event: its sender would
deliver the same bytes again for ever. :func:`legible` replaces what cannot be read.

Second, plain values: the bytes given to :func:`plain` are part of a body that
:func:`~sdk_trio.events.decoding.decode_envelope` has accepted.

Third, :func:`fit` reads a payload that does not fit its class field by field. It never raises: a
value that does not fit leaves its field at the default and is reported by its path. Paths and
messages hold no content of the body, except what an application's own validators put into theirs.
"""

import contextlib
import dataclasses
import functools
import json
import re
import types
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import attrs
import msgspec

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
# Possessive quantifiers (`*+`) in all of these: nothing is given back, so that no text makes the
# engine try twice.
_is_blank = re.compile(rb"[ \t\n\r]*+").fullmatch
_TEXT, _NUMBER, _LITERAL, _CONSTANT, _OPENING, _CLOSING, _SIGN = range(1, 8)

#: Escapes of a text one by one: a pair of surrogates, half of one (1), or any other.
_ESCAPE: Final = re.compile(
    rb"\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"
    rb"|(\\u[Dd][89A-Fa-f][0-9A-Fa-f]{2})|\\."
)
_HALF: Final = re.compile(rb"\\u[Dd][89A-Fa-f]")

_VALUE, _VALUE_OR_END, _NAME, _NAME_OR_END, _COLON, _COMMA_OR_END = range(6)

_ENDS: Final = (_COMMA_OR_END, _VALUE_OR_END, _NAME_OR_END)

#: Errors that decoding an accepted document may still raise: for a value of another kind, or for a
#: number beyond the range of a float.
UNFIT = (msgspec.MsgspecError, ValueError, RecursionError)

#: Called with the path (``data.items[2].amount``) and what is wrong with the value there.
Report = Callable[[str, str], None]

#: Values of one event that are looked at again, each alone, because they do not fit as they are:
#: about a tenth of a second. What does not fit beyond them is left out.
MAX_REPAIRS: Final = 2000

_JSON_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_MESSAGE_LIMIT = 200

_KINDS = {ord("["): "an array", ord('"'): "a string", ord("t"): "a boolean", ord("f"): "a boolean"}


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
    # A dict as an ordered set: each kind of change is told once, however often it was made.
    changes: dict[str, None] = {}
    raw = raw.removeprefix(_BOM)
    try:
        raw.decode()
    except UnicodeDecodeError:
        raw = _without_encoded_surrogates(raw)
        changes["half of a surrogate pair"] = None
    pieces: list[bytes] = []
    # One pass that checks the grammar as well: a text that is no JSON must not become one by what
    # is replaced in it.
    copied = at = 0
    cut_from = -1
    # The open brackets, a byte each: nesting costs no frame of Python's, whose number is limited.
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
            # The rest is still read as JSON, and left out as a whole where its bracket closes.
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


def _instead_of(kind: int | None, raw: bytes, start: int, end: int) -> tuple[bytes | None, str]:
    """Return what replaces a token, None if it stays, and the reason."""
    if kind == _TEXT:
        # The search in C first: most texts have no escape at all.
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
        # Surrogates written as three bytes each, as CESU-8 does.
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise NotJsonError("not in UTF-8") from None
    return _SURROGATE.sub("\ufffd", text).encode()


def _build_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


#: Returns the compiled decoder of a type, built at its first use and kept.
decoder_for: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_build_decoder)


def plain(raw: bytes | msgspec.Raw) -> Any:
    """Return the JSON value in ``raw`` as dict, list, str, int, float, bool or None."""
    try:
        return decoder_for(Any).decode(raw)
    except UNFIT:
        # Half a surrogate pair, say, or a number like 1e400, which is read as infinity here: a
        # readable document is worth more than one odd number.
        text, _ = legible(bytes(raw))
        # Python's own reader takes the rest, such as 1e400.
        return json.loads(text)


def members_of(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """Return the undecoded members of the JSON object in ``raw``; None when it is no object."""
    decode = decoder_for(dict[str, msgspec.Raw]).decode
    members: dict[str, msgspec.Raw]
    try:
        members = decode(raw)
    except msgspec.ValidationError:
        return None
    except UNFIT:
        try:
            members = decode(legible(bytes(raw))[0])
        except UNFIT:
            return None
    return members


def plain_members(raw: bytes | msgspec.Raw, *, without: AbstractSet[str]) -> dict[str, Any]:
    """Return the members of the object in ``raw`` whose names are not in ``without``.

    Empty when ``raw`` is no object.
    """
    members = members_of(raw) or {}
    return {name: plain(value) for name, value in members.items() if name not in without}


class _Reports:
    """Passes reports on, and counts the values that were looked at again."""

    __slots__ = ("_left", "_report")

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left = MAX_REPAIRS

    def __call__(self, path: str, message: str) -> None:
        self._report(path, message)

    def may_repair(self, path: str) -> bool:
        """Whether one more value may be looked at again."""
        # Each of them is decoded anew, so that a payload of a million wrong values would hold the
        # loop up.
        self._left -= 1
        if self._left == 0:
            self._report(path, f"more than {MAX_REPAIRS} values do not fit; further ones left out")
        return self._left > 0


class _Nothing:
    """The type of :data:`_NOTHING`: no value was found that fits."""


_NOTHING: Final = _Nothing()


class Field(msgspec.Struct, frozen=True):
    """One field of a data class: its argument, its name in JSON, and the type of its value."""

    argument: str
    wire_name: str
    kind: Any


def _list_fields(record_class: Any) -> tuple[Field, ...] | None:
    if not isinstance(record_class, type):
        return None
    if issubclass(record_class, msgspec.Struct):
        return tuple(
            Field(field.name, field.encode_name, field.type)
            for field in msgspec.structs.fields(record_class)
        )
    named: list[tuple[str, str]]
    if attrs.has(record_class):
        named = [(f.alias or f.name, f.name) for f in attrs.fields(record_class) if f.init]
    elif dataclasses.is_dataclass(record_class):
        named = [(f.name, f.name) for f in dataclasses.fields(record_class) if f.init]
    else:
        return None
    hints = get_type_hints(record_class, include_extras=True)
    return tuple(Field(argument, name, hints[name]) for argument, name in named)


#: Returns the fields of an attrs class, msgspec.Struct or dataclass; None for anything else.
fields_of: Callable[[Any], tuple[Field, ...] | None] = functools.cache(_list_fields)


def fit(record_class: type[Any], raw: bytes | msgspec.Raw, path: str, report: Report) -> Any:
    """Return a ``record_class`` with the members of ``raw`` that fit, the others at their default.

    None when not even an empty one can be made: the catalogue refuses such data classes.

    Args:
        record_class: a data class of the catalogue.
        raw: the undecoded JSON value.
        path: where it stands in the document, for ``report``.
        report: called once for each value that does not fit.
    """
    found = _fit_record(record_class, raw, path, _Reports(report))
    return None if found is _NOTHING else found


def _fit_record(
    record_class: type[Any], raw: bytes | msgspec.Raw, path: str, report: _Reports
) -> Any:
    members = members_of(raw)
    if members is None:
        report(path, f"expected an object, got {_kind_of(raw)}")
        members = {}
    # An application that asked for a dict has no fields that could not fit.
    if issubclass(record_class, dict):
        return {name: plain(value) for name, value in members.items()}
    values: dict[str, Any] = {}
    for field in fields_of(record_class) or ():
        # Absent is not wrong: the default stands for it, and nothing is reported.
        if field.wire_name not in members:
            continue
        found = _fit_value(field, members[field.wire_name], f"{path}.{field.wire_name}", report)
        if found is not _NOTHING:
            values[field.argument] = found
    return _construct(record_class, values, path, report)


def _construct(record_class: type[Any], values: dict[str, Any], path: str, report: _Reports) -> Any:
    """Make the record; where its constructor objects, without the values that it objects to."""
    with contextlib.suppress(Exception):  # asked again below, field by field
        return record_class(**values)
    # Value by value, because a constructor says that something is wrong and not which of its
    # arguments.
    accepted: dict[str, Any] = {}
    for argument, found in values.items():
        try:
            record_class(**accepted, **{argument: found})
        except Exception as error:  # the application's own validator
            report(f"{path}.{argument}", str(error)[:_MESSAGE_LIMIT])
        else:
            accepted[argument] = found
    try:
        return record_class(**accepted)
    except Exception as error:  # a nested class of the application with a field that has no default
        report(path, str(error)[:_MESSAGE_LIMIT])
        return _NOTHING


def _fit_value(field: Field, raw: msgspec.Raw, path: str, report: _Reports) -> Any:
    try:
        return decoder_for(field.kind).decode(raw)
    except Exception as error:  # a type of the application may raise anything
        if not report.may_repair(path):
            return _NOTHING
        message = str(error)[:_MESSAGE_LIMIT]
    # Before anything else: without its id nobody could tell what the event is about.
    identifier = _number_as_text(field, raw)
    if identifier is not None:
        report(path, "expected text, got a number; kept as text")
        return identifier
    repaired = _fit_nested(field.kind, raw, path, report)
    if repaired is _NOTHING:
        report(path, message)
    return repaired


def identifier_in(raw: bytes | msgspec.Raw) -> str | None:
    """Return the identifier in the JSON value ``raw``: text, or a number as it was sent."""
    sent = bytes(raw)
    if _JSON_NUMBER.fullmatch(sent):
        return sent.decode()
    try:
        return str(decoder_for(str).decode(sent))
    except UNFIT:
        return None


def _number_as_text(field: Field, raw: msgspec.Raw) -> str | None:
    """Return a number as the text it was sent as, where the field is an identifier."""
    # By the name, because a class says of an amount or a code as well that it is text.
    names_a_record = field.wire_name == "id" or field.wire_name.endswith("_id")
    if not (names_a_record and str in alternatives(field.kind)):
        return None
    return identifier_in(raw)


def _fit_nested(kind: Any, raw: msgspec.Raw, path: str, report: _Reports) -> Any:
    """Save what fits inside a record, a list of records, or an open mapping."""
    # The first byte says what the value is, so only an alternative of that kind is tried.
    opening = bytes(raw)[:1]
    for alternative in alternatives(kind):
        if opening == b"{":
            if get_args(alternative) == (str, Any) and get_origin(alternative) is dict:
                return plain(raw)
            if fields_of(alternative) is not None:
                return _fit_record(alternative, raw, path, report)
        if opening == b"[":
            if get_origin(alternative) is list:
                return _fit_elements(get_args(alternative)[0], raw, path, report)
            if get_origin(alternative) is tuple and get_args(alternative)[1:] == (Ellipsis,):
                return tuple(_fit_elements(get_args(alternative)[0], raw, path, report))
    return _NOTHING


def _fit_elements(kind: Any, raw: msgspec.Raw, path: str, report: _Reports) -> list[Any]:
    elements = decoder_for(list[msgspec.Raw]).decode(raw)
    element = Field("", "", kind)
    found = [
        _fit_value(element, value, f"{path}[{index}]", report)
        for index, value in enumerate(elements)
    ]
    # An element that does not fit is left out: a list with holes would surprise every handler.
    return [value for value in found if value is not _NOTHING]


@functools.cache
def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, without None and without ``Annotated``."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return tuple(member for member in members if member is not type(None))


def _kind_of(raw: bytes | msgspec.Raw) -> str:
    sent = bytes(raw)
    if not sent:
        return "nothing"
    if sent == b"null":
        return "null"
    return _KINDS.get(sent[0], "a number")
