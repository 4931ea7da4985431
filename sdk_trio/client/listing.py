"""Lists of the upstream, read page by page while they are iterated."""

from collections.abc import AsyncIterator
from typing import Any, Generic

import attrs
import trio

from .operation import PreparedCall
from .pages import Item, NotAPageError, Page, read_page, start_page, with_page
from .sender import Sender, decode_json, unexpected


class Listing(Generic[Item]):
    """A list of the upstream, read page by page while it is iterated.

    ``async for order in client.orders.list(): ...`` gives every record. Each loop starts anew from
    the query's ``page`` (1). A page holds ``limit`` records, 100 (the upstream's maximum) when the
    query does not say. The next page is asked for when the one before is used up, so a loop that
    ends early costs no further request. Records that are created or deleted meanwhile can move
    across a page's border and so appear twice or not at all: sort by ``created_at`` to see all of
    those that were there.
    """

    def __init__(self, sender: Sender, call: PreparedCall) -> None:
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
        return f"<listing {self._call.operation.full_name}>"


class PageIterator(AsyncIterator[Page[Item]]):
    """The pages of a list, one request each.

    Cancelling loses nothing: the page that was being fetched is the next one again. It serves one
    task at a time; a second one gets ``trio.BusyResourceError``.
    """

    def __init__(self, sender: Sender, call: PreparedCall) -> None:
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
        self._busy = True
        try:
            page = await _fetch_page(self._sender, self._call, self._next)
        finally:
            self._busy = False
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


async def _fetch_page(sender: Sender, call: PreparedCall, number: int) -> Page[Any]:
    response = await sender.send(attrs.evolve(call, query=with_page(call.query, number)))
    try:
        return read_page(await decode_json(response, call), number, call.operation.full_name)
    except NotAPageError as error:
        fault = str(error)
    raise unexpected(call, fault, response)
