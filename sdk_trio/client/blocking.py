"""The client for programs without an event loop: ``with SyncClient(settings) as client: ...``.

A dedicated thread runs Trio with a :class:`~sdk_trio.client.client.Client`. A call passes its work
to that thread, waits, and returns or raises as the asynchronous call would. So both clients have
one pipeline: retries, breaker, limits, errors and settings are the same.
"""

import contextlib
import inspect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import httpx

from ..base.breaker import BreakerState
from ..config import Settings
from .answers import broken_by_closing
from .call import NO_OPTIONS, CallOptions, OperationSender
from .client import Client, HookType
from .export import CsvExport, CsvRows
from .layers import ClientCounters
from .layers.retry import BudgetPolicy
from .operation import description_of
from .operations import Resources
from .pages import Item, Listing, Page
from .pipeline import ClientConfig, RequestSources
from .portal import ClientClosedError, OpenContext, Portal
from .resources import Blocking, BoundEndpoint, OfInstance, OperationMethod, WithResponse

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class BlockingOperation(OperationMethod[P, Result]):
    """A callable operation that blocks until it has ended.

    Its arguments are those of the asynchronous one: path parameters positional or named, others
    named; ``query={...}`` and ``body={...}`` add fields that are newer than this client.
    """

    __doc__: Any = OfInstance(__doc__, description_of)

    def __init__(
        self,
        portal: Portal,
        endpoint: BoundEndpoint,
        sender: OperationSender,
        options: CallOptions = NO_OPTIONS,
    ) -> None:
        super().__init__(endpoint, sender, options)
        self._portal = portal

    def _finish(self, result: Any) -> Any:
        if isinstance(result, Listing):
            return SyncListing(self._portal, result)
        if isinstance(result, CsvExport):
            return SyncExport(self._portal, result)
        return self._portal.run(result)

    def raw(self, *args: P.args, **kwargs: P.kwargs) -> httpx.Response:
        """Call the operation and return the response itself, with headers and exact bytes."""
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # error reports include variables
        return self._portal.run(self._sender.send(call))

    @overload
    def with_response(
        self: "BlockingOperation[P, SyncListing[Item]]", *args: P.args, **kwargs: P.kwargs
    ) -> WithResponse[Page[Item]]: ...
    @overload
    def with_response(self, *args: P.args, **kwargs: P.kwargs) -> WithResponse[Result]: ...
    def with_response(self, *args: Any, **kwargs: Any) -> WithResponse[Any]:
        """Call the operation and return its result (for a list: one page) with the response."""
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # error reports include variables
        return self._portal.run(self._send_with_response(call))


class SyncListing(Generic[Item]):
    """A list of the upstream, read page by page during iteration.

    ``for order in client.orders.list(): ...`` yields every record; each loop starts over.
    """

    def __init__(self, portal: Portal, listing: Listing[Item]) -> None:
        self._portal = portal
        self._listing = listing

    def __iter__(self) -> Iterator[Item]:
        for page in self.pages():
            yield from page.items

    def pages(self) -> Iterator[Page[Item]]:
        """Return an iterator over the pages, one request each."""
        pages = self._listing.pages()
        # One job per page, not one for the whole list: between two pages nothing runs, so an
        # interrupt of the loop has nothing to cancel.
        while (page := self._portal.run(_next_or_none(pages))) is not None:
            yield page

    def first_page(self) -> Page[Item]:
        """Return the page selected by the query; costs one request."""
        return self._portal.run(self._listing.first_page())

    def __repr__(self) -> str:
        return repr(self._listing)


async def _next_or_none(iterator: AsyncIterator[T]) -> T | None:
    return await anext(iterator, None)


class _SyncContext(Generic[T]):
    """An asynchronous context entered by ``with``."""

    def __init__(self, portal: Portal, context: AbstractAsyncContextManager[T]) -> None:
        self._portal = portal
        self._context = context
        self._held: OpenContext[T] | None = None

    def _enter(self) -> T:
        if self._held is not None:
            raise RuntimeError("this is open already: call the operation again")
        held = OpenContext(self._context)
        value = self._portal.enter(held)
        self._held = held
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._held is not None
        held, self._held = self._held, None
        with contextlib.suppress(ClientClosedError):  # the client has exited it
            self._portal.run(held.leave())


class SyncExport(_SyncContext[CsvRows]):
    """A CSV file of the upstream, of any length: ``with client.orders.export() as rows:``.

    In the context, ``for row in rows`` yields a dict per row; leaving early closes the answer.
    """

    _context: CsvExport

    def __enter__(self) -> "SyncRows":
        return SyncRows(self._portal, self._enter())

    def text(self) -> str:
        """Return the whole file as one text, which must fit into memory."""
        return self._portal.run(self._context.text())

    def __repr__(self) -> str:
        return repr(self._context)


class _SyncBody:
    """An open answer with an unread body; ``response`` is httpx's own, for its head."""

    def __init__(self, portal: Portal, response: httpx.Response) -> None:
        self.response = response
        self._portal = portal

    def _read(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Continue reading; closing the client ends it."""
        try:
            return self._portal.run(coroutine)
        except ClientClosedError as error:
            raise broken_by_closing(self.response) from error


class SyncRows(_SyncBody, Iterator[dict[str, str]]):
    """The rows of an open export; ``response`` has the status and the headers."""

    def __init__(self, portal: Portal, rows: CsvRows) -> None:
        super().__init__(portal, rows.response)
        self._source = rows
        self._rows: deque[dict[str, str]] = deque()

    def __next__(self) -> dict[str, str]:
        if not self._rows:
            # Takes all received rows at once: a job for each row would cost more than reading it.
            self._rows.extend(self._read(self._source.batch()))
        if not self._rows:
            raise StopIteration
        return self._rows.popleft()


class SyncStream(_SyncContext[httpx.Response]):
    """An answer with a streamed body: ``with client.stream(...) as answer:``."""

    def __enter__(self) -> "SyncAnswer":
        return SyncAnswer(self._portal, self._enter())


# httpx's own read methods would run in the caller's thread, where there is no Trio.
class SyncAnswer(_SyncBody):
    """An answer with a streamed body; ``response`` is httpx's own, for its head."""

    @property
    def status_code(self) -> int:
        """Return the status."""
        return self.response.status_code

    @property
    def headers(self) -> httpx.Headers:
        """Return the headers."""
        return self.response.headers

    def read(self) -> bytes:
        """Return the whole body, which must fit into memory."""
        return self._read(self.response.aread())

    def iter_bytes(self) -> Iterator[bytes]:
        """Yield the body in parts, decompressed."""
        chunks = cast("AsyncGenerator[bytes, None]", self.response.aiter_bytes())
        try:
            while (chunk := self._read(_next_or_none(chunks))) is not None:
                yield chunk
        finally:
            with contextlib.suppress(ClientClosedError):
                self._portal.run(_closed(chunks))


async def _closed(generator: AsyncGenerator[Any, None]) -> None:
    await generator.aclose()


def _with_arguments_of(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate["SyncClient", P], T]]:
    """Return a decorator: type checkers and ``help()`` show the arguments of ``method``."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return function

    return decorate


class SyncBreaker:
    """The upstream's circuit breaker, callable from any thread."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal

    @property
    def state(self) -> BreakerState:
        """Return the current state."""
        # The state depends on the time, and only the client's own thread can read Trio's clock.
        return self._portal.call(lambda: self._portal.client.breaker.state)

    def isolate(self) -> None:
        """Open the circuit manually; it stays open until :meth:`close`."""
        self._portal.call(lambda: self._portal.client.breaker.isolate())

    def close(self) -> None:
        """Close the circuit manually and forget earlier failures."""
        self._portal.call(lambda: self._portal.client.breaker.close())


class SyncClient(Resources[Blocking], path=""):
    """The client of the upstream API for scripts and threads: no Trio, no asyncio, no ``await``.

    ``with SyncClient(settings) as client: ...``, or call :meth:`close` at the end. It opens with
    the first call, so it may be created at import and before a fork. All threads of a program can
    share one. It has the operations, options and errors of :class:`~sdk_trio.client.client.Client`,
    which runs in a dedicated thread. A call blocks its thread, even if an event loop runs there.
    Ctrl-C cancels the interrupted call; a write that was already sent may have been executed.

    Args:
        settings: validated settings.
        transport: sends requests instead of the client's own connections.
        budget: how fast the retry budget fills.
        sources: clock, randomness and keys; replaceable in tests.

    Raises:
        OptionsValidationError: the settings lack a value that a client needs.
        RuntimeError: raised by calls once it is closed, or in a process forked after it was opened.
    """

    def __init__(
        self,
        settings: Settings,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        budget: BudgetPolicy | None = None,
        sources: RequestSources | None = None,
    ) -> None:
        client = Client(settings, transport, budget=budget, sources=sources)
        portal = Portal(client)
        super().__init__(client.sender, method=lambda *row: BlockingOperation(portal, *row))
        self._portal: Portal = portal

    def __enter__(self) -> Self:
        self._portal.opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; calls in progress fail."""
        self._portal.close()

    @_with_arguments_of(Client.request)
    def request(self, *args: Any, **kwargs: Any) -> httpx.Response:
        """Call a route without a method of its own, or get a response unchanged.

        Arguments, result and errors are those of the asynchronous client's ``request``.
        """
        try:
            asked = self._view.request(*args, **kwargs)
        finally:
            del args, kwargs  # as for the operations
        return self._portal.run(asked)

    @_with_arguments_of(Client.stream)
    def stream(self, *args: Any, **kwargs: Any) -> SyncStream:
        """Make a call as :meth:`request` does, for bodies that do not fit into memory.

        ``with client.stream("GET", "/orders/export") as answer``, then ``answer.iter_bytes()``.
        """
        try:
            context = self._view.stream(*args, **kwargs)
        finally:
            del args, kwargs  # as for the operations
        return SyncStream(self._portal, context)

    def on_attempt(self, hook: HookType) -> HookType:
        """Call ``hook`` with the record of every attempt, in the client's own thread."""
        return self._portal.client.on_attempt(hook)

    @property
    def plan(self) -> ClientConfig:
        """Return the current plan; its ``repr`` masks the token."""
        return self._portal.client.plan

    @property
    def counters(self) -> ClientCounters:
        """Return the totals so far; they keep counting, so copy numbers to compare them."""
        return self._portal.client.counters

    @property
    def retry_budget(self) -> float:
        """Return how many retries and hedges the budget allows now."""
        # As for the breaker's state: the budget fills by Trio's clock.
        return self._portal.call(lambda: self._portal.client.retry_budget)

    @property
    def breaker(self) -> "SyncBreaker":
        """Return the upstream's circuit breaker: ``state``, ``isolate()`` and ``close()``."""
        return SyncBreaker(self._portal)

    def __repr__(self) -> str:
        return f"<SyncClient of {self.plan.base_url}>"

    @property
    def _view(self) -> Client:
        return self._portal.client.with_options(self._options)
