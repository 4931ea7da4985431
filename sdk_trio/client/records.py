"""What the upstream answers, as records that lose nothing. Pure.

A record is a view of a JSON object: nothing is validated, renamed or dropped, so a field or an
enumeration value that the upstream adds tomorrow is readable today.
"""

import difflib
from collections.abc import Iterator
from typing import Any, NoReturn

#: Fields whose values a repr shows. All else may be personal or secret (tokens, keys, addresses),
#: and which fields are is the upstream's choice, so a list of what to hide would never be whole.
_SHOWN = ("id", "type", "status", "slug")

#: The longest value that a repr shows, in characters.
_SHOWN_CHARACTERS = 64


class Record:
    """One JSON object: ``record.status`` and ``record["status"]`` are the same.

    Nested objects are records, lists of objects are lists of records. A field that is absent
    raises ``AttributeError`` (``KeyError`` with brackets); one that is null is None. The only name
    of our own is ``raw``, the JSON object itself as a dict, so that fields named ``items`` or
    ``get`` are read as the upstream means them; a field named ``raw`` is ``record["raw"]``.

    Records are read-only and equal when their JSON is. ``in``, ``len`` and iteration are about
    the names of the fields. The repr shows no value that could be secret or personal.
    """

    __slots__ = ("_fields",)
    _fields: dict[str, Any]

    def __init__(self, fields: dict[str, Any]) -> None:
        object.__setattr__(self, "_fields", fields)

    @property
    def raw(self) -> dict[str, Any]:
        """Return the JSON object as it came; it is not a copy."""
        return self._fields

    def __getattr__(self, name: str) -> Any:
        # Names with two underscores are questions of the interpreter and of copy and pickle.
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return wrap(self._fields[name])
        except KeyError:
            near = difflib.get_close_matches(name, list(self._fields), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"the record has no field {name!r}{hint}") from None

    def __getitem__(self, name: str) -> Any:
        return wrap(self._fields[name])

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._fields})

    def __eq__(self, other: object) -> bool:
        return self._fields == other._fields if isinstance(other, Record) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # its JSON is made of dicts and lists

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a record is read-only: change {name!r} by an update operation")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a record is read-only: {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[type["Record"], tuple[dict[str, Any]]]:
        return Record, (self._fields,)

    def __repr__(self) -> str:
        shown = [f"{name}={self._fields[name]!r}" for name in _SHOWN if self._is_shown(name)]
        others = len(self._fields) - len(shown)
        if others:
            shown.append(f"and {others} field{'s' if others != 1 else ''}")
        return f"Record({', '.join(shown)})"

    def _is_shown(self, name: str) -> bool:
        value = self._fields.get(name)
        return isinstance(value, str) and len(value) <= _SHOWN_CHARACTERS


def wrap(value: Any) -> Any:
    """Return a JSON value with every object in it as a :class:`Record`."""
    if isinstance(value, dict):
        return Record(value)
    if isinstance(value, list):
        return [wrap(item) for item in value]
    return value
