"""The upstream's JSON objects as lossless records. Pure.

A record is a view of a JSON object: nothing is validated, renamed or dropped. A field or
enumeration value that the upstream adds tomorrow is readable today.
"""

import difflib
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import msgspec

from .stubs import fields_of, known_operation, models_in, time_names

#: The kind of an object: the name of an operation or model, or a field of another object; None if
#: unknown.
Origin = str | tuple["Origin", str] | None

_Time = Annotated[datetime, msgspec.Meta(tz=True)]

#: The fields whose values a repr shows. All other values may be personal or secret (tokens, keys,
#: addresses). The upstream can add such fields at any time, so a list of hidden fields would never
#: be complete.
_SHOWN = ("id", "type", "status", "slug")

#: The longest value that a repr shows, in characters.
_SHOWN_CHARACTERS = 64


class Record:
    """One JSON object: ``record.status`` and ``record["status"]`` are the same.

    Nested objects are records, lists of objects are lists of records. A time in the upstream's
    model is an aware ``datetime``, as in events; invalid times stay text. The only name of our own
    is ``raw``, the JSON object as a dict, so fields named ``items`` or ``get`` are the upstream's.
    A field named ``raw`` is ``record["raw"]``.

    A field of the upstream's model that this answer lacks reads as None, like a null. ``"seats" in
    order`` distinguishes them, and ``order["seats"]`` then raises ``KeyError``. A name that neither
    the answer nor the model has raises ``AttributeError``. Type checkers see the model
    (:mod:`sdk_trio.client.models`), whose fields are attributes; brackets read any field.

    Records are read-only and equal if their JSON is. ``in``, ``len`` and iteration cover the names
    of the fields. The repr shows no value that could be secret or personal.
    """

    __slots__ = ("_fields", "_origin")
    _fields: dict[str, Any]
    _origin: Origin

    def __init__(self, fields: dict[str, Any], origin: Origin = None) -> None:
        object.__setattr__(self, "_fields", fields)
        object.__setattr__(self, "_origin", origin)

    @property
    def raw(self) -> dict[str, Any]:
        """Return the JSON object as received; not a copy."""
        return self._fields

    if not TYPE_CHECKING:  # type checkers know each model's fields, and this would accept any name

        def __getattr__(self, name: str) -> Any:
            # The interpreter, copy and pickle ask for names with two underscores; returning None
            # would mislead them.
            if name.startswith("__"):
                raise AttributeError(name)
            try:
                return self[name]
            except KeyError:
                known = _known_fields(self._origin)
            if name in known:
                return None
            near = difflib.get_close_matches(name, [*self._fields, *known], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"the record has no field {name!r}{hint}")

    def __getitem__(self, name: str) -> Any:
        value = self._fields[name]
        if isinstance(value, str):
            return _read_time(value) if _is_time(self._origin, name) else value
        return wrap(value, (self._origin, name))

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    # ``if order.customer`` tests presence; an empty object is present, although its length is 0.
    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._fields})

    def __eq__(self, other: object) -> bool:
        return self._fields == other._fields if isinstance(other, Record) else NotImplemented

    __hash__: ClassVar[None]  # type: ignore[assignment]  # its JSON is made of dicts and lists

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a record is read-only: change {name!r} by an update operation")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a record is read-only: {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[type["Record"], tuple[dict[str, Any], Origin]]:
        # For pickling to other processes, where attributes of a read-only object could not be set.
        return Record, (self._fields, self._origin)

    def __repr__(self) -> str:
        shown = [f"{name}={self._fields[name]!r}" for name in _SHOWN if self._is_shown(name)]
        others = len(self._fields) - len(shown)
        if others:
            shown.append(f"and {others} field{'s' if others != 1 else ''}")
        return f"Record({', '.join(shown)})"

    def _is_shown(self, name: str) -> bool:
        value = self._fields.get(name)
        return isinstance(value, str) and len(value) <= _SHOWN_CHARACTERS


def wrap(value: Any, origin: Origin = None) -> Any:
    """Return a JSON value with every object in it as a :class:`Record`."""
    if isinstance(value, dict):
        return Record(value, origin)
    if not isinstance(value, list):
        return value
    # Not recursive, because nested lists may be deeper than the stack.
    outermost: list[Any] = []
    waiting = [(value, outermost)]
    while waiting:
        items, wrapped = waiting.pop()
        for item in items:
            if isinstance(item, list):
                inner: list[Any] = []
                waiting.append((item, inner))
                wrapped.append(inner)
            else:
                wrapped.append(Record(item, origin) if isinstance(item, dict) else item)
    return outermost


def _is_time(origin: Origin, name: str) -> bool:
    # Most field names are never a time in any model, which saves the lookup.
    return name in time_names() and any(
        "datetime" in fields_of(model).get(name, "") for model in _models_of(origin)
    )


def _read_time(text: str) -> datetime | str:
    try:
        return msgspec.convert(text, _Time)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter of half a surrogate pair
        # The upstream may send anything: no value is lost, and none ends the program.
        return text


def _known_fields(origin: Origin) -> set[str]:
    """Return the fields of the upstream's models for an object from ``origin``."""
    return {name for model in _models_of(origin) for name in fields_of(model)}


def _models_of(origin: Origin) -> frozenset[str]:
    """Return the possible models of an object from ``origin``; a union has several."""
    if origin is None:
        return frozenset()
    if isinstance(origin, str):
        operation = known_operation(origin)
        return models_in(origin if operation is None else operation.returns)
    # Resolved only on demand, when a field is absent.
    parent, name = origin
    kinds = (fields_of(model).get(name, "") for model in _models_of(parent))
    return frozenset[str]().union(*map(models_in, kinds))
