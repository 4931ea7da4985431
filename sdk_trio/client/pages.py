"""Pages of a list: the content of an answer, and the number of the next page. Pure.

Pages are numbered from 1. A list is read to its end when its page's number has reached
``max_page``, or a page is empty: a number that is too large, or missing, ends no program and asks
for no thousands of empty pages. Lists of the cursor kind say ``has_next_page`` instead; the next
page has the next number there too.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs
import trio

from .answers import decode_json, unexpected
from .call import Call, OperationSender
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


def read_page(document: object, number: int, origin: Origin = None) -> Page[Record]:
    """Read the answer to the request for page ``number``; ``origin`` says what its items are.

    Raises:
        NotAPageError: it is no page. Treating it as the end of the list would hide records.
    """
    # Strict about the form and lenient about the items: an error page that is taken for an empty
    # list would say that there are no orders.
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
    # An empty page ends the list, whatever the counts say: records may be deleted while it is read.
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


def _count(pagination: Mapping[str, object], name: str) -> int | None:
    value = pagination.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json_kind(value: object) -> str:
    kinds = {list: "an array", str: "a text", bool: "a Boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


class Listing(Generic[Item]):
    """A list of the upstream, read page by page while it is iterated.

    ``async for order in client.orders.list(): ...`` gives every record. Each loop starts anew from
    the query's ``page`` (1). A page holds ``limit`` records, 100 (the upstream's maximum) when the
    query does not say. The next page is asked for when the one before is used up, so a loop that
    ends early costs no further request.

    Pages are numbered, so records that are created or deleted meanwhile move others across a page's
    border. Sorted by ``created_at``, created records come at the end and repeat none. A deletion
    still hides as many records as it moves: collect the ids first if the loop deletes what it
    lists.
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
        """Return the page that the query asks for; it costs one request.

        Raises:
            CallError: the call failed.
            UnexpectedAnswerError: the answer is no page.
        """
        return await _fetch_page(self._sender, self._call, start_page(self._call.query))

    def __repr__(self) -> str:
        return f"<listing {self._call.name}>"


class PageIterator(AsyncIterator[Page[Item]]):
    """The pages of a list, one request each.

    Cancelling loses nothing: the page that was being fetched is the next one again. It serves one
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
        # Two tasks would ask for the same page, and each would miss what the other one got.
        self._busy = True
        try:
            page = await _fetch_page(self._sender, self._call, self._next)
        finally:
            self._busy = False
        # The page before is kept for one comparison: some routes answer every number with the first
        # page.
        last, self._last = self._last, page
        if last is not None and page.repeats(last):
            self._next = None
            raise StopAsyncIteration
        self._next = page.number + 1 if page.has_next else None
        return page


class RecordIterator(AsyncIterator[Item]):
    """The records of a list, in the upstream's order; cancelling loses none of them."""

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
    # A copy, as a call keeps the progress of one sending, and each page is one.
    call = attrs.evolve(call, query=with_page(call.query, number))
    response = await sender.send(call)
    try:
        return read_page(await decode_json(response, call), number, call.name)
    except NotAPageError as error:
        # Raised below, without the handler: the frames of the reading hold the page.
        fault = str(error)
    raise unexpected(call, fault, response)
