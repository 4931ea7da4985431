"""The client for programs without an event loop: ``with SyncClient(settings) as client: ...``.

A thread of its own runs Trio with a :class:`~sdk_trio.client.client.Client` in it. A call hands its
work to that thread, waits, and returns or raises as the asynchronous call would. So both clients
have one pipeline: retries, breaker, limits, errors and settings are the same.
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
from .portal import ClientClosedError, HeldContext, Portal
from .resources import Blocking, BoundEndpoint, OfInstance, OperationMethod, WithResponse

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class BlockingOperation(OperationMethod[P, Result]):
    """An operation that is ready to be called, and returns when it has ended.

    Its arguments are those of the asynchronous one: path parameters by position or name, others by
    name; ``query={...}`` and ``body={...}`` add fields that are newer than this client.
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
        """Call the operation and return the answer itself, with its headers and exact bytes."""
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # reports of a failure show variables
        return self._portal.run(self._sender.send(call))

    @overload
    def with_response(
        self: "BlockingOperation[P, SyncListing[Item]]", *args: P.args, **kwargs: P.kwargs
    ) -> WithResponse[Page[Item]]: ...
    @overload
    def with_response(self, *args: P.args, **kwargs: P.kwargs) -> WithResponse[Result]: ...
    def with_response(self, *args: Any, **kwargs: Any) -> WithResponse[Any]:
        """Call the operation and return its result, of a list one page, with its answer."""
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # reports of a failure show variables
        return self._portal.run(self._send_with_response(call))


class SyncListing(Generic[Item]):
    """A list of the upstream, read page by page while it is iterated.

    ``for order in client.orders.list(): ...`` gives every record; each loop starts anew.
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
        # A job for each page, none for the whole list: between two pages nothing of it runs, so an
        # interrupt of the loop over the records has nothing to cancel.
        while (page := self._portal.run(_next_or_none(pages))) is not None:
            yield page

    def first_page(self) -> Page[Item]:
        """Return the page that the query asks for; it costs one request."""
        return self._portal.run(self._listing.first_page())

    def __repr__(self) -> str:
        return repr(self._listing)


async def _next_or_none(iterator: AsyncIterator[T]) -> T | None:
    return await anext(iterator, None)


class _SyncContext(Generic[T]):
    """An asynchronous context that is entered by ``with``."""

    def __init__(self, portal: Portal, context: AbstractAsyncContextManager[T]) -> None:
        self._portal = portal
        self._context = context
        self._held: HeldContext[T] | None = None

    def _enter(self) -> T:
        if self._held is not None:
            raise RuntimeError("this is open already: call the operation again")
        held = HeldContext(self._context)
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
        with contextlib.suppress(ClientClosedError):  # the client has left it
            self._portal.run(held.leave())


class SyncExport(_SyncContext[CsvRows]):
    """A CSV file of the upstream, of any length: ``with client.orders.export() as rows:``.

    Inside, ``for row in rows`` gives a dict per row; leaving early closes the answer.
    """

    _context: CsvExport

    def __enter__(self) -> "SyncRows":
        return SyncRows(self._portal, self._enter())

    def text(self) -> str:
        """Return the whole file as one text, which has to fit into memory."""
        return self._portal.run(self._context.text())

    def __repr__(self) -> str:
        return repr(self._context)


class _SyncBody:
    """An open answer, whose body is read as it comes; ``response`` is httpx's own, for its head."""

    def __init__(self, portal: Portal, response: httpx.Response) -> None:
        self.response = response
        self._portal = portal

    def _read(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Read on; closing the client breaks the answer off."""
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
            # All rows that have arrived are taken at once: a visit to the thread for each row would
            # cost more than reading the row.
            self._rows.extend(self._read(self._source.batch()))
        if not self._rows:
            raise StopIteration
        return self._rows.popleft()


class SyncStream(_SyncContext[httpx.Response]):
    """An answer whose body is read as it comes: ``with client.stream(...) as answer:``."""

    def __enter__(self) -> "SyncAnswer":
        return SyncAnswer(self._portal, self._enter())


# httpx's own methods of reading would run in the caller's thread, where there is no Trio.
class SyncAnswer(_SyncBody):
    """An answer whose body is read as it comes; ``response`` is httpx's own, for its head."""

    @property
    def status_code(self) -> int:
        """Return the status."""
        return self.response.status_code

    @property
    def headers(self) -> httpx.Headers:
        """Return the headers."""
        return self.response.headers

    def read(self) -> bytes:
        """Return the whole body, which has to fit into memory."""
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
    """The upstream's circuit breaker, from any thread."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal

    @property
    def state(self) -> BreakerState:
        """Return the state now."""
        # The state follows from the time, and the client's clock is Trio's, which only its own
        # thread can read.
        return self._portal.call(lambda: self._portal.client.breaker.state)

    def isolate(self) -> None:
        """Open the circuit by hand; it stays so until :meth:`close`."""
        self._portal.call(lambda: self._portal.client.breaker.isolate())

    def close(self) -> None:
        """Close the circuit by hand and forget the failures so far."""
        self._portal.call(lambda: self._portal.client.breaker.close())


class SyncClient(Resources[Blocking], path=""):
    """The client of the upstream API for scripts and threads: no Trio, no asyncio, no ``await``.

    ``with SyncClient(settings) as client: ...``, or without ``with`` and :meth:`close` in the end:
    it opens with the first call, so it may be made at import and before a fork. All threads of a
    program can share one. It has the operations, options and errors of
    :class:`~sdk_trio.client.client.Client`, which runs in a thread of its own; a call blocks the
    thread that makes it, also where an event loop runs in it. Ctrl-C cancels the call that it
    interrupts; a write that was already sent may have been executed.

    Args:
        settings: validated settings.
        transport: sends requests in place of the client's own connections.
        budget: how fast the retry budget fills.
        sources: clock, randomness and keys; tests put their own in.

    Raises:
        OptionsValidationError: the settings lack something that a client needs.
        RuntimeError: from calls, once it is closed, or in a process forked after it was opened.
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
        """Close the connections and end the thread; calls under way end with an error."""
        self._portal.close()

    @_with_arguments_of(Client.request)
    def request(self, *args: Any, **kwargs: Any) -> httpx.Response:
        """Call a route that has no method of its own, or get an answer as it came.

        Arguments, answer and errors are those of the asynchronous client's ``request``.
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
        """Return the plan in force; its ``repr`` masks the token."""
        return self._portal.client.plan

    @property
    def counters(self) -> ClientCounters:
        """Return the totals so far; they go on counting, so copy the numbers that you compare."""
        return self._portal.client.counters

    @property
    def retry_budget(self) -> float:
        """Return how many retries and hedges could be paid for now."""
        # As the breaker's state: the budget fills by Trio's clock.
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
