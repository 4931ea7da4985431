"""The client for programs without an event loop: ``with SyncClient(settings) as client: ...``.

A thread of its own runs Trio with a :class:`~sdk_trio.client.client.Client` in it. A call hands its
work to that thread, waits, and returns or raises as the asynchronous call would. So both clients
have one pipeline: retries, breaker, limits, errors and settings are the same.
"""

import contextlib
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import httpx
import outcome
import trio

from ..base.breaker import BreakerState
from ..config import Settings
from ..errors import only_member
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
from .resources import Blocking, BoundEndpoint, OfInstance, OperationMethod, WithResponse

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result", covariant=True)

#: Time for an interrupted call to end, in seconds; it closes its connection meanwhile.
INTERRUPT_SECONDS = 5.0

#: Time for calls under way to end once the client is being closed, in seconds.
CLOSING_SECONDS = 5.0

_CLOSED = "the client is closed: make a new one"


class ClientClosedError(RuntimeError):
    """The client is closed; nothing was done."""


class _Job(Generic[T]):
    """One coroutine that the thread runs while its caller waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine
        # The caller's context variables, so that its trace and its log fields hold in the call.
        self.context: Context = copy_context()
        self.scope = trio.CancelScope()
        self.has_begun = False
        self.value: T | None = None
        self.error: BaseException | None = RuntimeError(
            "the client was closed while this call was under way; a write may have been executed"
        )
        # A lock that is held until the job has ended: of all things to wait for that Ctrl-C can
        # interrupt, it is the cheapest.
        self.ended = threading.Lock()
        self.ended.acquire()


class _Loop:
    """Trio in a thread, with a client open in it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._jobs: set[_Job[Any]] = set()
        self._held: weakref.WeakSet[_Held[Any]] = weakref.WeakSet()
        self._nursery: trio.Nursery | None = None
        self._stop = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._begun = threading.Lock()
        self.process: int = os.getpid()
        self.thread: threading.Thread | None = None

    # -- called by other threads

    @property
    def is_open(self) -> bool:
        """Return whether :meth:`start` has finished."""
        return self._token is not None

    def start(self) -> None:
        """Start the thread and wait until the client is open; raise the error if it cannot open.

        Called again after an interrupt, it goes on waiting.
        """
        # The thread itself takes the lock, so two threads may be started here after an interrupt;
        # the second one finds the lock taken and ends.
        if not self._begun.locked():
            # A daemon: a program that forgets to close its client must be able to end.
            threading.Thread(target=self._run, name="sdk-trio-client", daemon=True).start()
        self._opened.wait()
        if self._error is not None:
            raise self._error

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` in the thread; return its result or raise its error."""
        job = _Job(coroutine)
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._begin, job)
            job.ended.acquire()
        except trio.RunFinishedError:
            raise ClientClosedError(_CLOSED) from self._error
        except BaseException:  # an interrupt of the caller's thread
            # Ctrl-C cancels the call in the thread as well, and waits until its connection is
            # closed: otherwise a write could still leave after the program believes that it was
            # stopped.
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._interrupt, job)
                job.ended.acquire(timeout=INTERRUPT_SECONDS)
            raise
        finally:
            if not job.has_begun:
                coroutine.close()  # Python warns of one that was never awaited
        if job.error is None:
            return cast("T", job.value)
        try:
            raise job.error
        finally:
            del job  # its error's traceback holds this frame

    def stop(self) -> None:
        """Close the client and wait for the thread, unless the caller is that thread."""
        # A fork copies the memory and not the thread: in the child there is nothing to stop.
        if self._token is None or self.process != os.getpid():
            return
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        # Twice the time that calls under way get: the client's own closing comes after it. The
        # thread is a daemon, so a hang beyond that cannot keep the process alive.
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(2 * CLOSING_SECONDS)

    # -- runs in the thread

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # an interrupted start was repeated before this thread came to run
        self.thread = threading.current_thread()
        ended = outcome.capture(trio.run, self._live)
        if isinstance(ended, outcome.Error):
            self._error = only_member(ended.error)
        self._opened.set()
        # Callers of jobs that never came to their end must not wait for ever.
        for job in self._jobs:
            job.ended.release()

    async def _live(self) -> None:
        # Leaving the client ends the calls under way with errors, as in a Trio program.
        async with trio.open_nursery() as nursery, self._client:
            self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
            self._opened.set()
            await self._stop.wait()
            self._nursery = None
            # Calls that have begun may finish within this time; no new ones are accepted.
            nursery.cancel_scope.deadline = trio.current_time() + CLOSING_SECONDS
            for held in self._held:
                held.leaving.set()

    def _begin(self, job: _Job[Any]) -> None:
        # An exception here would end the loop.
        if self._nursery is None:
            job.error = ClientClosedError(_CLOSED)
            job.ended.release()
        else:
            self._jobs.add(job)
            job.context.run(self._nursery.start_soon, self._work, job)

    def _interrupt(self, job: _Job[Any]) -> None:
        job.scope.cancel()
        # A job that was not handed over, or has just ended: its caller waits for nothing.
        if job not in self._jobs and job.ended.locked():
            job.ended.release()

    async def _work(self, job: _Job[Any]) -> None:  # noqa: ASYNC910 - the job may have no checkpoint
        try:
            if self._nursery is None:
                raise ClientClosedError(_CLOSED)
            job.has_begun = True
            with job.scope:
                job.value = await job.coroutine
                job.error = None
        except trio.Cancelled:
            raise
        except BaseException as error:  # it is the caller's
            job.error = error
        finally:
            self._jobs.discard(job)
            job.ended.release()

    async def enter(self, held: "_Held[T]") -> T:
        """Enter a context in a task of its own; Trio's scopes must be left in the same task."""
        assert self._nursery is not None
        self._held.add(held)
        value: T = await self._nursery.start(held.live)
        return value


class _Held(Generic[T]):
    """An asynchronous context that is open in the thread."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self.leaving: trio.Event = trio.Event()
        self._context = context
        self._left = trio.Event()
        self._error: Exception | None = None

    async def live(self, *, task_status: trio.TaskStatus[T]) -> None:
        """Enter the context, and leave it once ``leaving`` is set."""
        await trio.lowlevel.checkpoint()
        try:
            async with self._context as value:
                task_status.started(value)
                await self.leaving.wait()
        except Exception as error:
            # Before it was entered, the error belongs to the one who enters, through
            # ``nursery.start``.
            if not self.leaving.is_set():
                raise
            self._error = error
        finally:
            self._left.set()

    async def leave(self) -> None:
        """Leave the context, and raise the error of leaving it, if any."""
        self.leaving.set()
        await self._left.wait()
        if self._error is not None:
            raise self._error


class Portal:
    """The way into the client's thread, from any other; the thread starts with the first call.

    It closes when nothing refers to it any more.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._loop: _Loop | None = None
        self._lock = threading.RLock()  # a handler of signals may close what is being opened
        self._is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` beside the client; return its result or raise its error.

        Raises:
            RuntimeError: the client is closed, belongs to the process that forked this one, or
                this is its own thread.
        """
        try:
            loop = self.opened()
        except BaseException:
            coroutine.close()
            raise
        return loop.do(coroutine)

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the client's thread, so that it may ask Trio for the time."""

        async def call() -> T:
            await trio.lowlevel.checkpoint()
            return function()

        return self.run(call())

    def enter(self, held: _Held[T]) -> T:
        """Enter a context beside the client; return its value."""
        loop = self.opened()
        return loop.do(loop.enter(held))

    def opened(self) -> _Loop:
        """Return the loop, started if it has not been."""
        loop = self._loop
        if loop is None or not loop.is_open:
            loop = self._open()
        if self._is_closed:
            raise ClientClosedError(_CLOSED)
        self._check_process(loop)
        if loop.thread is threading.current_thread():
            raise RuntimeError(
                "this is the client's own thread (in a hook), which cannot wait for itself"
            )
        return loop

    def _open(self) -> _Loop:
        # Checked before the lock is taken: in a forked process, a thread that does not exist there
        # may hold it.
        self._check_process(self._loop)
        with self._lock:
            if self._is_closed:
                raise ClientClosedError(_CLOSED)
            loop = self._loop
            if loop is None:
                loop = self._loop = _Loop(self.client)
                # A client that is dropped without close() ends its thread as well: the thread knows
                # the loop, and only clients and their views know the portal.
                weakref.finalize(self, loop.stop)
            try:
                loop.start()
            except Exception:
                # The next call tries again: a missing file, for instance, may be there by then.
                self._loop = None
                raise
            if self._is_closed:
                loop.stop()
            return loop

    def _check_process(self, loop: _Loop | None) -> None:
        if loop is not None and loop.process != os.getpid():
            raise RuntimeError(
                f"this client was opened in process {loop.process}, and its thread and connections "
                f"do not live on in process {os.getpid()}, which was forked from it: open a client "
                "in each process, for instance at its first use"
            )

    def close(self) -> None:
        """Close the client and end the thread; a second call does nothing."""
        self._is_closed = True
        loop = self._loop
        if loop is None or loop.process != os.getpid():
            return
        with self._lock:  # whoever opens it has done so then
            loop.stop()


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
        self._held: _Held[T] | None = None

    def _enter(self) -> T:
        if self._held is not None:
            raise RuntimeError("this is open already: call the operation again")
        held = _Held(self._context)
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
