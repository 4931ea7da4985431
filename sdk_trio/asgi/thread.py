"""A runtime in its own thread, and the exchange of requests with an asyncio loop.

A request crosses from one loop to the other with its head and the first piece of its body, and the
response crosses back. Further pieces of a body are fetched one by one as the receiver asks for
them, so its limits of size, time and memory apply.

Invariants:

- A request that has crossed gets a response even if the thread ends: 503.
- Once a delivery has begun, only a cancellation from the server's side affects it.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import outcome
import trio

from ..base.cells import Cells
from ..base.clock import monotonic
from ..base.http import DirectApp, Receive, Scope, Whole
from ..base.logs import get_logger
from ..errors import NotRunningError, StoreLockedError, only_member
from ..runtime import Runtime, Started
from ..webhooks import answers
from ..webhooks.asgi import AsgiRequest
from ..webhooks.endpoint import UNAVAILABLE_RETRY_SECONDS
from ..webhooks.run import LEFT_BEHIND

_log = get_logger("runtime")

#: Seconds after the drain timeout in which cancelled handlers and the store must end: the runtime
#: waits 5 s for the outcomes of inline runs, and for its report.
GRACE_SECONDS = 6.0

#: The seconds for releasing the events of handlers that do not end.
LEAVE_SECONDS = 1.5

#: The response while the receiver does not run.
UNAVAILABLE: Whole = answers.unavailable(UNAVAILABLE_RETRY_SECONDS)

_REASON = "the server is stopping"


class RuntimeThread:
    """One runtime in one thread: started, called and stopped from an asyncio loop.

    Args:
        runtime: not run yet.
        loop: the loop that starts and stops it; requests may come from any.
    """

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
        self.runtime: Runtime = runtime
        self.error: BaseException | None = None
        self._loop = loop
        self._token: trio.lowlevel.TrioToken | None = None
        self._requests: Cells | None = None
        self._stopping = False
        self._announced = False
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended = asyncio.Event()
        # Used by several threads; each operation is atomic under the GIL.
        self._pending: set[_Exchange] = set()
        # A daemon thread: a handler that does not end must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="sdk_trio", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether requests can cross; the receiver itself refuses those of its drain."""
        return self._requests is not None

    @property
    def ready(self) -> bool:
        """Whether deliveries are accepted."""
        return self.alive and self.runtime.ready

    # -- in the asyncio loop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread and wait until deliveries are accepted; raise the error of the start."""
        self._thread.start()
        try:
            # Shielded, because the thread sets the future even after this wait was cancelled.
            await asyncio.shield(self._started)
        except StoreLockedError as error:
            # "from None": servers print the traceback, and only its last line helps.
            raise StoreLockedError(
                f"{error}. If that is another worker of this server (uvicorn --workers): workers "
                "cannot share a directory of SQLite; start one worker, set Sdk:Storage:Backend to "
                "Postgres, or receive with `sdk-trio run` in separate processes"
            ) from None

    async def stop(self) -> None:
        """Drain the runtime and wait for its end; abandon handlers that do not end."""
        self._stopping = True
        self._call(self.runtime.shut_down, _REASON)
        options = self.runtime.settings
        seconds = (
            options.server.shutdown_delay_seconds
            + options.webhooks.graceful_drain_timeout_seconds
            + GRACE_SECONDS
        )
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            await self._leave()
        if self._ended.is_set():
            self._thread.join()

    async def _leave(self) -> None:
        now = monotonic()
        runs = [run.described(now) for run in self.runtime.receiver.runs]
        _log.error("runtime.left_behind", runs=runs, hint=LEFT_BEHIND)
        left = asyncio.Event()
        self._call(self._begin_to_leave, left)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await left.wait()

    async def exchange(self, scope: Scope, first: dict[str, Any], receive: Receive) -> Whole | None:
        """Let the receiver serve one request; return the response, None if the sender has left.

        Cancellation cancels the request in the other thread.
        """
        exchange = _Exchange(scope, first, receive)
        self._pending.add(exchange)
        try:
            if not self._call(self._begin, exchange):
                return UNAVAILABLE
            return await exchange.answered
        except asyncio.CancelledError:
            self._call(exchange.cancel)
            raise
        finally:
            self._pending.discard(exchange)
            exchange.end()

    def note_slow(self, scope: Scope) -> None:
        """Note a request whose body did not begin in time."""
        client = scope.get("client")
        address = client[0] if client else None
        self._call(self.runtime.receiver.note_refusal, 408, "slow", address)

    def _call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have Trio's thread call a function; False if it has ended."""
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            return False
        return True

    # -- in Trio's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main, strict_exception_groups=True)
        # The asyncio side reports the error to its caller; a thread has no caller.
        except BaseException as error:
            self.error = only_member(error) if isinstance(error, BaseExceptionGroup) else error
            if self.runtime.started is not None:
                _log.exception("runtime.thread_ended", error=repr(self.error))
        finally:
            self._requests = None
            for exchange in self._pending.copy():
                exchange.answer(outcome.Value(UNAVAILABLE))
            call_soon(self._loop, self._settle)

    def _settle(self) -> None:
        self._ended.set()
        if not self._started.done():
            error = self.error or NotRunningError("the runtime ended before it had started")
            self._started.set_exception(error)
            self._started.exception()  # read, so that asyncio does not warn without a waiter

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        if self._stopping:  # stop() was called before there was a token
            self.runtime.shut_down(_REASON)
        async with trio.open_nursery() as requests:
            self._requests = Cells(requests)
            # Requests that still run at the end of the drain are cancelled, and their events
            # released.
            requests.start_soon(self._end_requests, requests)
            try:
                await self.runtime.run(task_status=self)
            finally:
                self._requests = None
                requests.cancel_scope.cancel()

    def started(self, value: Started | None = None) -> None:
        """Notify the other loop that deliveries are accepted; a method of ``trio.TaskStatus``."""
        call_soon(self._loop, self._started.set_result, None)

    async def _end_requests(self, requests: trio.Nursery) -> None:
        end = await self.runtime.wait_draining()
        await trio.sleep(max(0.0, end - monotonic()))
        requests.cancel_scope.cancel()

    def _begin(self, exchange: "_Exchange") -> None:
        if self._requests is None:
            exchange.answer(outcome.Value(UNAVAILABLE))
        else:
            if not self._announced:
                self._announced = True
                self.runtime.announce(_address_in(exchange.scope))
            # In the context of the request, so that the host's span is the parent of the
            # delivery's.
            self._requests.start_soon(
                exchange.serve, self.runtime.receiver, context=exchange.context
            )

    def _begin_to_leave(self, left: asyncio.Event) -> None:
        trio.lowlevel.spawn_system_task(self._leave_runtime, left)

    async def _leave_runtime(self, left: asyncio.Event) -> None:
        with trio.move_on_after(LEAVE_SECONDS):
            await self.runtime.leave()
        call_soon(self._loop, left.set)


class _Exchange:
    """One request in both loops: made in the asyncio loop, served in Trio's."""

    def __init__(self, scope: Scope, first: dict[str, Any], receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[Whole | None] = self._loop.create_future()
        self.context = contextvars.copy_context()
        self.scope = scope
        self._first: dict[str, Any] | None = first
        self._pull = receive
        self._pulling: asyncio.Task[None] | None = None
        self._cancelling = trio.CancelScope()

    # -- in Trio's thread ------------------------------------------------------------------------

    async def serve(self, application: DirectApp) -> None:
        """Have ``application`` respond to the request, and pass the response to the other loop."""
        served: outcome.Outcome[Whole | None] = outcome.Value(UNAVAILABLE)
        try:
            with self._cancelling:
                answer = await application.respond(AsgiRequest(self.scope, self._receive))
                served = outcome.Value(answer)
        except Exception as error:
            # The server answers 500 and logs the traceback.
            served = outcome.Error(error)
            await trio.lowlevel.checkpoint()
        finally:
            self.answer(served)

    async def _receive(self) -> dict[str, Any]:
        if self._first is not None:
            first, self._first = self._first, None
            # Without a wait there is no schedule point: the other thread may have to wait for the
            # GIL during each step of this loop.
            await trio.lowlevel.checkpoint_if_cancelled()
            return first
        task, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()
        given_up = False

        def deliver(message: outcome.Outcome[dict[str, Any]]) -> None:
            if not given_up:
                trio.lowlevel.reschedule(task, message)

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal given_up
            given_up = True
            return trio.lowlevel.Abort.SUCCEEDED

        def pass_on(message: outcome.Outcome[dict[str, Any]]) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(deliver, message)

        call_soon(self._loop, self._fetch, pass_on)
        message: dict[str, Any] = await trio.lowlevel.wait_task_rescheduled(abort)
        return message

    def cancel(self) -> None:
        """Cancel the request in this thread."""
        self._cancelling.cancel()

    def answer(self, served: "outcome.Outcome[Whole | None]") -> None:
        """Pass the response to the other loop; a second one is ignored."""
        call_soon(self._loop, self._settle, served)

    # -- in the asyncio loop ---------------------------------------------------------------------

    def _settle(self, served: "outcome.Outcome[Whole | None]") -> None:
        if self.answered.done():
            return
        if isinstance(served, outcome.Error):
            self.answered.set_exception(served.error)
        else:
            self.answered.set_result(served.unwrap())

    def _fetch(self, pass_on: Callable[["outcome.Outcome[dict[str, Any]]"], None]) -> None:
        async def fetch() -> None:
            try:
                message = outcome.Value(await self._pull())
            except Exception:  # the server failed; for the receiver, the sender has left
                message = outcome.Value({"type": "http.disconnect"})
            pass_on(message)

        self._pulling = self._loop.create_task(fetch())

    def end(self) -> None:
        """Cancel the fetch of a piece that is no longer needed."""
        if self._pulling is not None:
            self._pulling.cancel()


def _address_in(scope: Scope) -> str:
    """Return the address of the server that got a request; "" if the scope has none."""
    host, port = scope.get("server") or (None, None)
    if host is None or port is None:
        return f"unix:{host}" if host else ""
    # A proxy may have set the scheme of the scope. Only the "tls" extension, which hypercorn has,
    # describes the connection itself.
    scheme = "https" if "tls" in scope.get("extensions", ()) else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *a: Any) -> None:
    """Have an asyncio loop call a function, from any thread."""
    # A closed loop has no waiters.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *a)
