"""Pages of a list: the content of an answer, and the number of the next page. Pure.

Pages are numbered from 1. A list is read to its end when its page's number has reached
``max_page``, or a page is empty: a number that is too large, or missing, ends no program and asks
for no thousands of empty pages. Lists of the cursor kind say ``has_next_page`` instead; the next
page has the next number there too.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from .records import Origin, Record

Item = TypeVar("Item", bound=Record, covariant=True)

#: Records a page when the caller does not say: the upstream's maximum, so that reading a whole
#: list costs a tenth of the requests that its own default of 10 would.
DEFAULT_LIMIT = 100

FIRST_PAGE = 1


class NotAPageError(ValueError):
    """An answer is no page of a list; the text names the part that it lacks."""


@attrs.frozen
class Page(Generic[Item]):
    """One page of a list.

    ``number`` counts from 1. ``total_count`` (of records) and ``max_page`` (the last page's
    number, 0 for an empty list) are None where the answer does not say; a cursor knows neither.
    ``has_next`` says whether there may be a page after this one.
    """

    number: int
    items: tuple[Item, ...] = attrs.field(repr=lambda items: f"<{len(items)} records>")
    has_next: bool
    total_count: int | None = None
    max_page: int | None = None

    def repeats(self, before: "Page[Any]") -> bool:
        """Return whether the upstream gave the page ``before`` again instead of the next one.

        That is the end of a list whose route ignores page numbers and names no count of pages.
        """
        return self.max_page is None and bool(self.items) and self.items == before.items


def read_page(document: Any, number: int, origin: Origin = None) -> Page[Record]:
    """Read the answer to the request for page ``number``; ``origin`` says what its items are.

    Raises:
        NotAPageError: it is no page. Treating it as the end of the list would hide records.
    """
    if not isinstance(document, Mapping):
        raise NotAPageError(f"a page is a JSON object, and this is {_json_kind(document)}")
    items = document.get("items")
    # A null among the items is left out; it is no reason to refuse the other records.
    if not isinstance(items, list) or not all(
        item is None or isinstance(item, dict) for item in items
    ):
        raise NotAPageError("the page has no list of objects named 'items'")
    pagination = document.get("pagination")
    if not isinstance(pagination, Mapping):
        raise NotAPageError("the page has no object named 'pagination'")
    records = tuple(Record(item, origin) for item in items if item is not None)
    if "has_next_page" in pagination:
        # Pages have numbers, so nothing follows an empty one, whatever the flag says. A flag that
        # is stuck at true would have the client ask for ever.
        has_next = pagination["has_next_page"] is True and bool(records)
        return Page(number, records, has_next)
    total, last = (_count(pagination, name) for name in ("total_count", "max_page"))
    has_next = bool(records) and (last is None or number < last)
    return Page(number, records, has_next, total, last)


def with_page(
    query: Iterable[tuple[str, str]], number: int, *, default_limit: int = DEFAULT_LIMIT
) -> tuple[tuple[str, str], ...]:
    """Return ``query`` asking for page ``number``, with a ``limit`` if it has none."""
    pairs = [(key, value) for key, value in query if key != "page"]
    if not any(key == "limit" for key, _ in pairs):
        pairs.append(("limit", str(default_limit)))
    return (*pairs, ("page", str(number)))


def start_page(query: Iterable[tuple[str, str]]) -> int:
    """Return the number of the page that ``query`` asks for, 1 when it does not say.

    Raises:
        ValueError: it is no whole number from 1.
    """
    text = next((value for key, value in query if key == "page"), str(FIRST_PAGE))
    if not (text.isascii() and text.isdigit() and int(text) >= FIRST_PAGE):
        raise ValueError(f"page is {text!r}: it takes a whole number from {FIRST_PAGE}")
    return int(text)


def _count(pagination: Mapping[str, Any], name: str) -> int | None:
    value = pagination.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "a text", bool: "a Boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
