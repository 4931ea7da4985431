"""Pages of a list: their content, and the number of the next page. Pure.

Pages are numbered from 1. A list ends when the page number reaches ``max_page``, or with an empty
page. So a missing or too large number neither fails the program nor requests thousands of empty
pages. Lists of the cursor kind have ``has_next_page`` instead; their next page has the next number
too.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs
import trio

from .answers import decode_json, unexpected
from .call import Call, OperationSender
from .records import Origin, Record

Item = TypeVar("Item", bound=Record, covariant=True)

#: Records per page by default: the upstream's maximum. Its own default of 10 would cost ten times
#: the requests for a whole list.
DEFAULT_LIMIT = 100

FIRST_PAGE = 1


class NotAPageError(ValueError):
    """An answer is not a page of a list; the text names the missing part."""


@attrs.frozen
class Page(Generic[Item]):
    """One page of a list.

    ``number`` counts from 1. ``total_count`` (records) and ``max_page`` (the last page's number, 0
    for an empty list) are None if absent; a cursor has neither. ``has_next`` is whether another
    page may follow.
    """

    number: int
    items: tuple[Item, ...] = attrs.field(repr=lambda items: f"<{len(items)} records>")
    has_next: bool
    total_count: int | None = None
    max_page: int | None = None

    def repeats(self, before: "Page[Any]") -> bool:
        """Return whether the upstream sent the page ``before`` again instead of the next one.

        This ends a list whose route ignores page numbers and has no page count.
        """
        return self.max_page is None and bool(self.items) and self.items == before.items


def read_page(document: object, number: int, origin: Origin = None) -> Page[Record]:
    """Read the answer for page ``number``; ``origin`` is the kind of its items.

    Raises:
        NotAPageError: it is not a page. Treating it as the end of the list would hide records.
    """
    # Strict about the form, lenient about the items: an error page taken for an empty list would
    # mean that there are no orders.
    if not isinstance(document, Mapping):
        raise NotAPageError(f"a page is a JSON object, but this is {_json_kind(document)}")
    items = document.get("items")
    # Skip a null among the items instead of refusing the other records.
    if not isinstance(items, list) or not all(
        item is None or isinstance(item, dict) for item in items
    ):
        raise NotAPageError("the page has no list of objects named 'items'")
    pagination = document.get("pagination")
    if not isinstance(pagination, Mapping):
        raise NotAPageError("the page has no object named 'pagination'")
    records = tuple(Record(item, origin) for item in items if item is not None)
    if "has_next_page" in pagination:
        # Nothing follows an empty numbered page, whatever the flag. A flag stuck at true would make
        # the client request pages forever.
        has_next = pagination["has_next_page"] is True and bool(records)
        return Page(number, records, has_next)
    total, last = (_count(pagination, name) for name in ("total_count", "max_page"))
    # An empty page ends the list, whatever the counts: records may be deleted while it is read.
    has_next = bool(records) and (last is None or number < last)
    return Page(number, records, has_next, total, last)


def with_page(
    query: Iterable[tuple[str, str]], number: int, *, default_limit: int = DEFAULT_LIMIT
) -> tuple[tuple[str, str], ...]:
    """Return ``query`` for page ``number``, with a ``limit`` if it has none."""
    pairs = [(key, value) for key, value in query if key != "page"]
    if not any(key == "limit" for key, _ in pairs):
        pairs.append(("limit", str(default_limit)))
    return (*pairs, ("page", str(number)))


def start_page(query: Iterable[tuple[str, str]]) -> int:
    """Return the page number in ``query``, 1 if it has none.

    Raises:
        ValueError: it is not an integer from 1.
    """
    text = next((value for key, value in query if key == "page"), str(FIRST_PAGE))
    if not (text.isascii() and text.isdigit() and int(text) >= FIRST_PAGE):
        raise ValueError(f"page is {text!r}: it must be an integer from {FIRST_PAGE}")
    return int(text)


def _count(pagination: Mapping[str, object], name: str) -> int | None:
    value = pagination.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json_kind(value: object) -> str:
    kinds = {list: "an array", str: "a text", bool: "a Boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


class Listing(Generic[Item]):
    """A list of the upstream, read page by page during iteration.

    ``async for order in client.orders.list(): ...`` yields every record. Each loop starts at the
    query's ``page`` (1). A page has ``limit`` records, by default 100 (the upstream's maximum). The
    next page is requested when the current one is used up, so a loop that ends early costs no
    further request.

    Pages are numbered, so records created or deleted meanwhile shift others across page borders.
    Sorted by ``created_at``, new records come at the end and repeat none. A deletion still hides as
    many records as it shifts: collect the ids first if the loop deletes the listed records.
    """

    def __init__(self, sender: OperationSender, call: Call) -> None:
        start_page(call.query)
        self._sender = sender
        self._call = call

    def __aiter__(self) -> "RecordIterator[Item]":
        return RecordIterator(self.pages())

    def pages(self) -> "PageIterator[Item]":
        """Return an iterator over the pages, for their counts or to work in batches."""
        return PageIterator(self._sender, self._call)

    async def first_page(self) -> Page[Item]:
        """Return the page selected by the query; costs one request.

        Raises:
            CallError: the call failed.
            UnexpectedAnswerError: the answer is not a page.
        """
        return await _fetch_page(self._sender, self._call, start_page(self._call.query))

    def __repr__(self) -> str:
        return f"<listing {self._call.name}>"


class PageIterator(AsyncIterator[Page[Item]]):
    """The pages of a list, one request each.

    Cancellation loses nothing: the page being fetched is the next one again. An iterator serves one
    task at a time; a second one gets ``trio.BusyResourceError``.
    """

    def __init__(self, sender: OperationSender, call: Call) -> None:
        self._sender = sender
        self._call = call
        self._next: int | None = start_page(call.query)
        self._busy = False
        self._last: Page[Item] | None = None

    async def __anext__(self) -> Page[Item]:
        if self._next is None:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        if self._busy:
            raise trio.BusyResourceError("another task is fetching the next page of this list")
        # Two tasks would request the same page, and each would miss the other's records.
        self._busy = True
        try:
            page = await _fetch_page(self._sender, self._call, self._next)
        finally:
            self._busy = False
        # The previous page is kept for one comparison: some routes answer every number with the
        # first page.
        last, self._last = self._last, page
        if last is not None and page.repeats(last):
            self._next = None
            raise StopAsyncIteration
        self._next = page.number + 1 if page.has_next else None
        return page


class RecordIterator(AsyncIterator[Item]):
    """The records of a list, in the upstream's order; cancellation loses none of them."""

    def __init__(self, pages: PageIterator[Item]) -> None:
        self._pages = pages
        self._page: tuple[Item, ...] = ()
        self._position = 0

    async def __anext__(self) -> Item:
        if self._position < len(self._page):
            await trio.lowlevel.checkpoint()
        while self._position >= len(self._page):
            page = await anext(self._pages)
            self._page, self._position = page.items, 0
        record = self._page[self._position]
        self._position += 1
        return record  # noqa: ASYNC910 - either branch above is one


async def _fetch_page(sender: OperationSender, call: Call, number: int) -> Page[Any]:
    # A copy, because a call records the progress of one sending, and each page is one.
    call = attrs.evolve(call, query=with_page(call.query, number))
    response = await sender.send(call)
    try:
        return read_page(await decode_json(response, call), number, call.name)
    except NotAPageError as error:
        # Raised outside the handler: the parser's frames hold the page.
        fault = str(error)
    raise unexpected(call, fault, response)
