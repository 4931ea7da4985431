"""Field-by-field decoding: what becomes of a payload that does not fit its class (contracts 3).

Pure. Nothing here raises: a value that does not fit leaves its field at the default, and is
reported by its path; paths and messages hold no content of the body, except what an application's
own validators put into theirs.
"""

import contextlib
import dataclasses
import functools
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import attrs
import msgspec

from .values import UNFIT, decoder_for, members_of, plain

#: Called with the path (``data.items[2].amount``) and what is wrong with the value there.
Report = Callable[[str, str], None]

#: Values of one event that are looked at again, each alone, because they do not fit as they are:
#: about a tenth of a second. What does not fit beyond them is left out.
MAX_REPAIRS: Final = 2000

_JSON_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_MESSAGE_LIMIT = 200


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
        self._left -= 1
        if self._left == 0:
            self._report(path, f"more than {MAX_REPAIRS} values do not fit; further ones left out")
        return self._left > 0


class _Nothing:
    """The type of :data:`_NOTHING`: no value was found that fits."""


_NOTHING: Final = _Nothing()


@attrs.frozen
class Field:
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
    if issubclass(record_class, dict):
        return {name: plain(value) for name, value in members.items()}
    values: dict[str, Any] = {}
    for field in fields_of(record_class) or ():
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
    names_a_record = field.wire_name == "id" or field.wire_name.endswith("_id")
    if not (names_a_record and str in _alternatives(field.kind)):
        return None
    return identifier_in(raw)


def _fit_nested(kind: Any, raw: msgspec.Raw, path: str, report: _Reports) -> Any:
    """Save what fits inside a record, a list of records, or an open mapping."""
    opening = bytes(raw)[:1]
    for alternative in _alternatives(kind):
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
    return [value for value in found if value is not _NOTHING]


@functools.cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, without None and without ``Annotated``."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return tuple(member for member in members if member is not type(None))


_KINDS = {ord("["): "an array", ord('"'): "a string", ord("t"): "a boolean", ord("f"): "a boolean"}


def _kind_of(raw: bytes | msgspec.Raw) -> str:
    sent = bytes(raw)
    if not sent:
        return "nothing"
    if sent == b"null":
        return "null"
    return _KINDS.get(sent[0], "a number")
