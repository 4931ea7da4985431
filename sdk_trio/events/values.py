"""JSON values without a strict schema: repaired, decoded, and fitted to a class. Pure.

Three steps, each for input that the previous one refuses. First, text that is valid JSON (RFC
8259), or that most programs accept, but that compiled decoders refuse: half of a surrogate pair as
an escape, which JavaScript writes for a text cut inside an emoji; nesting beyond a limit; a number
of thousands of digits; ``NaN`` and ``Infinity``, which RFC 8259 excludes and which Python and
others write. Such a text is an event all the same: its sender would redeliver the same bytes
forever. :func:`legible` replaces the refused parts.

Second, plain values: :func:`plain` gets parts of a body that
:func:`~sdk_trio.events.decoding.decode_envelope` has accepted.

Third, :func:`fit` reads a payload that does not fit its class, field by field. It never raises: a
field whose value does not fit keeps its default, and its path is reported. Paths and messages
contain no content of the body, except through an application's own validators.
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

from ..base.text import storable

#: Nesting of arrays and objects. Real payloads nest 6 deep; the interpreter's own limit depends on
#: its version and the stack.
MAX_DEPTH: Final = 256

#: Characters of one number. CPython refuses to convert more digits to an integer.
MAX_NUMBER_LENGTH: Final = 4300

_BOM: Final = b"\xef\xbb\xbf"

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
# Possessive quantifiers (`*+`) in all of these prevent backtracking.
_is_blank = re.compile(rb"[ \t\n\r]*+").fullmatch
_TEXT, _NUMBER, _LITERAL, _CONSTANT, _OPENING, _CLOSING, _SIGN = range(1, 8)

#: Escapes of a string: a surrogate pair, half of one (1), or any other.
_ESCAPE: Final = re.compile(
    rb"\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"
    rb"|(\\u[Dd][89A-Fa-f][0-9A-Fa-f]{2})|\\."
)
_HALF: Final = re.compile(rb"\\u[Dd][89A-Fa-f]")

_VALUE, _VALUE_OR_END, _NAME, _NAME_OR_END, _COLON, _COMMA_OR_END = range(6)

_ENDS: Final = (_COMMA_OR_END, _VALUE_OR_END, _NAME_OR_END)

#: Errors that decoding an accepted document may still raise: for a value of another type, or a
#: number beyond the range of a float.
UNFIT = (msgspec.MsgspecError, ValueError, RecursionError)

#: Called with the path (``data.items[2].amount``) and the fault of its value.
Report = Callable[[str, str], None]

#: Values of one event that are fitted one by one, in about a tenth of a second. Further values that
#: do not fit are omitted.
MAX_REPAIRS: Final = 2000

_JSON_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_MESSAGE_LIMIT = 200

_KINDS = {ord("["): "an array", ord('"'): "a string", ord("t"): "a boolean", ord("f"): "a boolean"}


class NotJsonError(ValueError):
    """The text is not JSON, even by lenient rules."""


def legible(raw: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return JSON that every decoder accepts, and the kinds of changes made to ``raw``.

    Half of a surrogate pair becomes U+FFFD. Non-finite numbers, numbers of more than 4300
    characters, and values nested deeper than 256 become null. A byte order mark is skipped (RFC
    8259, 8.1); other encodings than UTF-8 are not JSON by the same section. Accepts every UTF-8
    text that Python's ``json.loads`` accepts. Takes linear time and no deep stack.

    Raises:
        NotJsonError: it is not JSON.
    """
    # A dict as an ordered set: each kind of change is reported once.
    changes: dict[str, None] = {}
    raw = raw.removeprefix(_BOM)
    try:
        raw.decode()
    except UnicodeDecodeError:
        raw = _without_encoded_surrogates(raw)
        changes["half of a surrogate pair"] = None
    pieces: list[bytes] = []
    # The same pass checks the grammar: replacements must not turn invalid text into JSON.
    copied = at = 0
    cut_from = -1
    # The open brackets, a byte each: nesting needs no Python stack frames, which are limited.
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
            # In ASCII, "]" and "}" are two after their opening brackets.
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
            # The rest is still read as JSON, and omitted as a whole when its bracket closes.
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
    """Return the replacement of a token and the reason, or None to keep it."""
    if kind == _TEXT:
        # Search in C first: most strings have no escape.
        if raw.find(b"\\u", start, end) >= 0 and _HALF.search(raw, start, end):
            text = raw[start:end]
            whole = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)
            if whole != text:
                return whole, "half of a surrogate pair"
    elif kind == _NUMBER:
        if end - start > MAX_NUMBER_LENGTH:
            return b"null", f"a number of more than {MAX_NUMBER_LENGTH} characters"
    elif kind == _CONSTANT:
        return b"null", "a non-finite number"
    return None, ""


def _without_encoded_surrogates(raw: bytes) -> bytes:
    try:
        # Surrogates encoded as three bytes each, as in CESU-8.
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise NotJsonError("not in UTF-8") from None
    return storable(text).encode()


def _build_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


#: Returns the compiled decoder of a type, built on first use and cached.
decoder_for: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_build_decoder)


def plain(raw: bytes | msgspec.Raw) -> Any:
    """Return the JSON value in ``raw`` as dict, list, str, int, float, bool or None."""
    try:
        return decoder_for(Any).decode(raw)
    except UNFIT:
        # Such as half a surrogate pair, or 1e400, which becomes infinity: a readable document
        # matters more than one odd number.
        text, _ = legible(bytes(raw))
        # Python's decoder accepts the rest, such as 1e400.
        return json.loads(text)


def is_json(raw: bytes) -> bool:
    """Return whether :func:`plain` can read ``raw``."""
    try:
        plain(raw)
    except UNFIT:
        return False
    return True


def members_of(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """Return the undecoded members of the JSON object in ``raw``; None if it is not an object."""
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

    Empty if ``raw`` is not an object.
    """
    members = members_of(raw) or {}
    return {name: plain(value) for name, value in members.items() if name not in without}


class _Reports:
    """Forwards reports, and counts the values that were fitted one by one."""

    __slots__ = ("_left", "_report")

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left = MAX_REPAIRS

    def __call__(self, path: str, message: str) -> None:
        self._report(path, message)

    def may_repair(self, path: str) -> bool:
        """Return whether one more value may be fitted."""
        # Each of them is decoded again; a payload of a million wrong values would block the event
        # loop.
        self._left -= 1
        if self._left == 0:
            self._report(
                path, f"more than {MAX_REPAIRS} values do not fit; further ones are omitted"
            )
        return self._left > 0


class _Nothing:
    """The type of :data:`_NOTHING`: no fitting value was found."""


_NOTHING: Final = _Nothing()


class Field(msgspec.Struct, frozen=True):
    """One field of a data class: its attribute, its name in JSON, and its type."""

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
    """Return a ``record_class`` with the members of ``raw`` that fit, and defaults otherwise.

    None if not even an empty record can be created: the catalogue refuses such classes.

    Args:
        record_class: a data class of the catalogue.
        raw: the undecoded JSON value.
        path: its location in the document, for ``report``.
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
    # An application that uses a dict has no fields that could fail to fit.
    if issubclass(record_class, dict):
        return {name: plain(value) for name, value in members.items()}
    values: dict[str, Any] = {}
    for field in fields_of(record_class) or ():
        # Absence is not a fault: the default is used, and nothing is reported.
        if field.wire_name not in members:
            continue
        found = _fit_value(field, members[field.wire_name], f"{path}.{field.wire_name}", report)
        if found is not _NOTHING:
            values[field.argument] = found
    return _construct(record_class, values, path, report)


def _construct(record_class: type[Any], values: dict[str, Any], path: str, report: _Reports) -> Any:
    """Create the record, without the values that its constructor refuses."""
    with contextlib.suppress(Exception):  # tried again below, field by field
        return record_class(**values)
    # Value by value, because a constructor's error does not name the argument.
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
    # First of all: without its id, the subject of the event is unknown.
    identifier = _number_as_text(field, raw)
    if identifier is not None:
        report(path, "expected text, got a number; used as text")
        return identifier
    repaired = _fit_nested(field.kind, raw, path, report)
    if repaired is _NOTHING:
        report(path, message)
    return repaired


def identifier_in(raw: bytes | msgspec.Raw) -> str | None:
    """Return the identifier in the JSON value ``raw``: text, or a number as sent."""
    sent = bytes(raw)
    if _JSON_NUMBER.fullmatch(sent):
        return sent.decode()
    try:
        return str(decoder_for(str).decode(sent))
    except UNFIT:
        return None


def _number_as_text(field: Field, raw: msgspec.Raw) -> str | None:
    """Return a number as its original text if the field is an identifier."""
    # By name, because amounts and codes can be declared as text, too.
    names_a_record = field.wire_name == "id" or field.wire_name.endswith("_id")
    if not (names_a_record and str in alternatives(field.kind)):
        return None
    return identifier_in(raw)


def _fit_nested(kind: Any, raw: msgspec.Raw, path: str, report: _Reports) -> Any:
    """Fit the parts of a record, a list of records, or an open mapping."""
    # The first byte shows the kind of the value, so only alternatives of that kind are tried.
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
    # Omit an element that does not fit: a list with None items would surprise every handler.
    return [value for value in found if value is not _NOTHING]


@functools.cache
def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, without None and ``Annotated``."""
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
