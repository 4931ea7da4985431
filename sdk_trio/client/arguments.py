"""The encoding of Python values as a path, a query and a JSON body. Pure.

Values that the upstream would silently read as something else are refused: an empty path
parameter (``GET /orders/{id}`` would become the list), a time without its zone, NaN.
"""

import difflib
import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from urllib.parse import quote
from uuid import UUID

from .records import Record

#: Lists in arguments; a text is one value, not a list of letters.
_LISTS = (list, tuple, set, frozenset)


def path_segment(value: Any, where: str) -> str:
    """Return ``value`` as one percent-encoded segment of a path; ``where`` is for messages.

    Raises:
        TypeError: no text, integer, UUID or enumeration of these.
        ValueError: empty, or a segment of dots, which servers and proxies remove, so that the
            request would reach another route.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(
            f"{where} takes a text, an integer or a UUID, not {_kind(value)}: "
            "it becomes part of the path"
        )
    text = str(value)
    if text in ("", ".", ".."):
        raise ValueError(f"{where} is {text!r}: the path would be another operation's")
    return quote(text, safe="")


def query_pairs(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the query's pairs in order.

    None is left out, also inside lists. A list is its key repeated, a mapping is ``key[inner]``
    for each of its members (the upstream's ``metadata``), a Boolean is ``true`` or ``false``, a
    date or time is ISO 8601.

    Raises:
        TypeError, ValueError: a value has no form in a query.
    """
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from query_pairs({f"{key}[{inner}]": item for inner, item in value.items()})
        elif isinstance(value, _LISTS):
            yield from ((key, _query_text(item, key)) for item in value if item is not None)
        elif value is not None:
            yield key, _query_text(value, key)


def json_value(value: Any, where: str = "body") -> Any:
    """Return ``value`` as plain JSON values; ``where`` names the value in messages.

    None stays (it clears a field of the upstream's record). Records, mappings, lists, sets,
    enumerations, UUIDs, decimals (as text, exactly), dates and times are converted.

    Raises:
        TypeError, ValueError: a value has no form in JSON.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Record):
        return value.raw
    if isinstance(value, Mapping):
        return {_key(key, where): json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, _LISTS):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: JSON has no such number")
        return value
    return _scalar_text(value, where, "JSON")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of ``known``, or nothing."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _query_text(value: Any, where: str) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: the upstream takes finite numbers")
    if isinstance(value, str | int | float):
        return str(value)
    return _scalar_text(value, where, "a query")


def _scalar_text(value: Any, where: str, place: str) -> str:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(
                f"{where} is {value.isoformat()}, a time without a zone: "
                "give it one, as in datetime.now(UTC)"
            )
        return value.isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    raise TypeError(f"{where} is {_kind(value)}, which has no form in {place}: convert it first")


def _key(key: Any, where: str) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}: JSON takes texts as keys")
    return key


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"a {name}" if name[:1].lower() not in "aeiou" else f"an {name}"
