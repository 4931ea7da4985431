"""The runtime beside an application on asyncio: FastAPI, Starlette, Litestar, Django under uvicorn.

Two event loops in one process: the server's, and Trio's in a thread. A request crosses once each
way: with its head and the first piece of its body, and back with the answer. Further pieces of a
body are fetched one by one as the receiver asks for them, so that its bounds of size, time and
memory hold, and no more than a piece waits on the server's side.

Invariants: a request that has crossed is answered whatever becomes of the thread, at the latest
with 503; and what Trio's side does with a delivery does not depend on the server's side, but for a
cancellation, which is passed on in both directions.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import outcome
import trio

from .base.http import App, Receive, Scope, Send, Whole
from .base.logs import Throttle, get_logger
from .config import Settings
from .errors import NotRunningError, StoreLockedError
from .runtime import Runtime, Started
from .webhooks import HandlerRegistry, answers
from .webhooks.body import BODY_SECONDS
from .webhooks.endpoint import UNAVAILABLE_RETRY_SECONDS

if TYPE_CHECKING:
    from .client.client import Client
    from .runtime.notifications import ChannelFactory
    from .tenants.tenancy import ClientFactory
    from .tenants.upgrade import HostUpgrade

_log = get_logger("runtime")

#: The seconds after the drain's time in which cancelled handlers and the store may come to an end:
#: the runtime waits for the outcomes of inline runs for 5 s, and for its report.
GRACE_SECONDS = 6.0

#: The seconds that releasing the events of handlers may take which do not end.
LEAVE_SECONDS = 1.5

_UNAVAILABLE: Whole = answers.unavailable(UNAVAILABLE_RETRY_SECONDS)

_NOT_STARTED = (
    "the receiver has not been started, or has ended: give the application its lifespan, as in "
    "FastAPI(lifespan=receiver.lifespan); servers pass no lifespan to a mounted application"
)


class Threaded:
    """The whole runtime in a thread of its own, as an ASGI application of an asyncio server.

    ``app = FastAPI(lifespan=receiver.lifespan)``, ``app.mount("/hooks", receiver)``. It listens on
    no address for deliveries: the server does. The paths are those of the settings, whole ones: a
    mount at ``/hooks`` serves the default ``/hooks/sdk``.

    Before its start, after its end, and if its thread has died, deliveries are answered 503, and
    :attr:`ready` is False.

    Args:
        settings: validated settings of :func:`sdk_trio.load_settings`.
        handlers: the handlers by event type; those of ``asyncio=True`` run on the server's loop.
        client, standalone, client_factory, host_upgrade, channels: as of
            :class:`~sdk_trio.Runtime`.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: HandlerRegistry | None = None,
        *,
        client: "Client | None" = None,
        standalone: bool | None = None,
        client_factory: "ClientFactory | None" = None,
        host_upgrade: "HostUpgrade | None" = None,
        channels: "ChannelFactory | None" = None,
    ) -> None:
        self.settings = settings
        self._handlers = HandlerRegistry() if handlers is None else handlers
        self._options: dict[str, Any] = {
            "client": client,
            "standalone": standalone,
            "client_factory": client_factory,
            "host_upgrade": host_upgrade,
            "channels": channels,
        }
        self._thread: _RuntimeThread | None = None
        self._throttle = Throttle(lines=3, seconds=10.0)

    @property
    def ready(self) -> bool:
        """Whether deliveries are accepted: the answer for a readiness probe of the application."""
        return self._thread is not None and self._thread.ready

    @property
    def runtime(self) -> Runtime:
        """The running runtime, for its metrics and reports; other calls belong to its thread.

        Raises:
            NotRunningError: it has not been started, or has ended.
        """
        if self._thread is None:
            raise NotRunningError(_NOT_STARTED)
        return self._thread.runtime

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Start the runtime, and drain it at the end of the block.

        It takes the application, and ignores it, so that it is a ``lifespan`` of FastAPI, Starlette
        and Litestar; inside of your own: ``async with receiver.lifespan(): ...``. The end takes as
        long as the drain, and some seconds at most where handlers do not end: these are named in
        the log, and left behind in their threads, since the process is about to end.

        Raises:
            StoreLockedError: another process, such as a second worker, uses the data directory.
            SdkError: whatever else the start of a runtime raises.
        """
        if self._thread is not None:
            raise NotRunningError("this receiver runs already; it can start again once it ended")
        host = HostLoop(asyncio.get_running_loop())
        self._handlers.host_loop = host
        runtime = Runtime(self.settings, self._handlers, listens=False, **self._options)
        self._thread = thread = _RuntimeThread(runtime, host.loop)
        try:
            await thread.start()
            yield
        finally:
            await thread.stop()
            self._thread = None

    def in_front_of(self, app: App) -> App:
        """Return an ASGI application that serves deliveries itself and leaves the rest to ``app``.

        It starts and drains the runtime as the server starts and ends; ``app`` is asked about its
        own lifespan as well. For applications that know neither mounts nor a lifespan, as Django.
        """
        own = self.settings.webhooks.path
        tenants = f"{own.rstrip('/')}/" if self.settings.multi_tenant.enabled else None

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _Lifespan(self.lifespan, app).serve(scope, receive, send)
                return
            path = scope.get("path", "")
            mine = path == own or (tenants is not None and path.startswith(tenants))
            await (self if mine and scope["type"] == "http" else app)(scope, receive, send)

        return application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection of an asyncio server: ``http`` or ``lifespan``.

        If the sender leaves before its body is whole, nothing is kept; afterwards the handler runs
        to its end. Cancelled, it cancels the delivery, whose event is released.
        """
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _Lifespan(self.lifespan, None).serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
        else:
            raise NotRunningError(f"a webhook receiver serves no {scope['type']} connections")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        thread = self._thread
        whole: Whole | None = _UNAVAILABLE
        if thread is None or not thread.alive:
            self._note_not_running(thread)
        else:
            # A client that sends nothing must not hold a request for ever; of further pieces the
            # receiver itself keeps the time.
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    first = await receive()
            except TimeoutError:
                thread.note_slow(scope)
                whole = answers.TOO_SLOW
            else:
                if first["type"] != "http.request":
                    return
                whole = await thread.exchange(_whole_path(scope), first, receive)
        if whole is not None:
            status, headers, body = whole
            await send({"type": "http.response.start", "status": status, "headers": [*headers]})
            await send({"type": "http.response.body", "body": body})

    def _note_not_running(self, thread: "_RuntimeThread | None") -> None:
        extra = self._throttle.fields("not_running")
        if extra is not None:
            hint = _NOT_STARTED if thread is None else f"its thread has ended: {thread.error!r}"
            _log.warning("webhook.refused", cause="not_running", status=503, hint=hint, **extra)


def _whole_path(scope: Scope) -> Scope:
    """Return the scope with the path that the sender asked for: some hosts cut that of a mount."""
    root = scope.get("root_path", "")
    if not root or scope["path"].startswith(root):
        return scope
    return {**scope, "path": root.rstrip("/") + scope["path"]}


# -- the thread ----------------------------------------------------------------------------------


class _RuntimeThread:
    """One runtime in one thread: started, asked and stopped from an asyncio loop.

    Args:
        runtime: not run yet.
        loop: the loop that starts and stops it; requests may come from any.
    """

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
        self.runtime = runtime
        self.error: BaseException | None = None
        self._loop = loop
        self._token: trio.lowlevel.TrioToken | None = None
        self._requests: trio.Nursery | None = None
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended = asyncio.Event()
        # Touched by several threads; each operation is one step of the interpreter.
        self._pending: set[_Exchange] = set()
        # A daemon thread: a handler that does not end must not keep the process.
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
        """Start the thread, and wait until deliveries are accepted; raise what kept it from it."""
        self._thread.start()
        try:
            # Shielded, because the thread sets it also if nobody waits any more.
            await asyncio.shield(self._started)
        except StoreLockedError as error:
            raise StoreLockedError(
                f"{error} Several workers of a server (uvicorn --workers) cannot share a directory "
                "of SQLite: start one worker, set Sdk:Storage:Backend to Postgres, or let "
                "`sdk-trio run` receive in processes of its own."
            ) from error

    async def stop(self) -> None:
        """Drain the runtime and wait for its end; give up what does not end."""
        self._call(self.runtime.shut_down, "the server ends")
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
        now = time.perf_counter()
        runs = [
            {
                "handler": run.handler,
                "webhook_id": run.webhook_id,
                "seconds": round(now - run.begun, 1),
            }
            for run in self.runtime.receiver.runs
        ]
        hint = "nothing ends these handlers; their events are run again at the next start"
        _log.error("runtime.left_behind", runs=runs, hint=hint)
        left = asyncio.Event()
        self._call(self._begin_to_leave, left)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await left.wait()

    async def exchange(
        self, scope: Scope, first: dict[str, Any], receive: Receive
    ) -> Whole | None:
        """Let the receiver serve one request; return its answer, None if it has none.

        Cancelled, it cancels the request on the other side.
        """
        exchange = _Exchange(scope, first, receive)
        self._pending.add(exchange)
        try:
            if not self._call(self._begin, exchange):
                return _UNAVAILABLE
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
        # Whatever ends the loop is told on the other side, where somebody waits for it; a thread
        # has nobody to raise it to.
        except BaseException as error:
            self.error = error
            if self.runtime.started is not None:
                _log.error("runtime.thread_ended", error=repr(error), exc_info=error)
        finally:
            self._requests = None
            for exchange in self._pending.copy():
                exchange.answer(outcome.Value(_UNAVAILABLE))
            _call_soon(self._loop, self._settle)

    def _settle(self) -> None:
        self._ended.set()
        if not self._started.done():
            error = self.error or NotRunningError("the runtime ended before it had started")
            self._started.set_exception(error)
            self._started.exception()  # read, so that asyncio does not warn if nobody waits

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as requests:
            self._requests = requests
            # Requests end with the drain: what still runs then is cancelled, and released.
            requests.start_soon(self._end_requests, requests)
            try:
                await self.runtime.run(task_status=self)
            finally:
                self._requests = None
                requests.cancel_scope.cancel()

    def started(self, value: Started | None = None) -> None:
        """Tell the other loop that deliveries are accepted, as a ``trio.TaskStatus`` does."""
        _call_soon(self._loop, self._started.set_result, None)

    async def _end_requests(self, requests: trio.Nursery) -> None:
        end = await self.runtime.wait_draining()
        await trio.sleep(max(0.0, end - time.monotonic()))
        requests.cancel_scope.cancel()

    def _begin(self, exchange: "_Exchange") -> None:
        if self._requests is None:
            exchange.answer(outcome.Value(_UNAVAILABLE))
        else:
            # In the context of the request: the host's span is the parent of the delivery's.
            exchange.context.run(
                self._requests.start_soon, exchange.serve, self.runtime.application
            )

    def _begin_to_leave(self, left: asyncio.Event) -> None:
        trio.lowlevel.spawn_system_task(self._leave_runtime, left)

    async def _leave_runtime(self, left: asyncio.Event) -> None:
        with trio.move_on_after(LEAVE_SECONDS):
            await self.runtime.leave()
        _call_soon(self._loop, left.set)


class _Exchange:
    """One request on its way through both loops: made in the asyncio one, served in Trio's."""

    def __init__(self, scope: Scope, first: dict[str, Any], receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[Whole | None] = self._loop.create_future()
        self.context = contextvars.copy_context()
        self._scope = scope
        self._first: dict[str, Any] | None = first
        self._pull = receive
        self._pulling: asyncio.Task[None] | None = None
        self._cancelling = trio.CancelScope()
        self._head: tuple[int, Any] | None = None
        self._whole: Whole | None = None

    # -- in Trio's thread ------------------------------------------------------------------------

    async def serve(self, application: App) -> None:
        """Let ``application`` serve the request, and send the answer across."""
        # Only what our own receiver says: a server's extensions would answer past this exchange.
        scope = {**self._scope, "extensions": {}}
        served: outcome.Outcome[Whole | None] = outcome.Value(_UNAVAILABLE)
        try:
            with self._cancelling:
                await application(scope, self._receive, self._send)
                served = outcome.Value(self._whole)
        except Exception as error:
            # The server's own way of saying 500 and logging the traceback.
            served = outcome.Error(error)
            await trio.lowlevel.checkpoint()
        finally:
            self.answer(served)

    async def _receive(self) -> dict[str, Any]:
        if self._first is not None:
            first, self._first = self._first, None
            await trio.lowlevel.checkpoint()
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

        def hand_over(message: outcome.Outcome[dict[str, Any]]) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(deliver, message)

        _call_soon(self._loop, self._fetch, hand_over)
        message: dict[str, Any] = await trio.lowlevel.wait_task_rescheduled(abort)
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._head = (message["status"], message["headers"])
        elif self._head is not None:
            self._whole = (*self._head, message.get("body", b""))
        await trio.lowlevel.checkpoint()

    def cancel(self) -> None:
        """Cancel the request on this side."""
        self._cancelling.cancel()

    def answer(self, served: "outcome.Outcome[Whole | None]") -> None:
        """Send the answer across; a second one is of no account."""
        _call_soon(self._loop, self._settle, served)

    # -- in the asyncio loop ---------------------------------------------------------------------

    def _settle(self, served: "outcome.Outcome[Whole | None]") -> None:
        if self.answered.done():
            return
        if isinstance(served, outcome.Error):
            self.answered.set_exception(served.error)
        else:
            self.answered.set_result(served.unwrap())

    def _fetch(self, hand_over: Callable[["outcome.Outcome[dict[str, Any]]"], None]) -> None:
        async def fetch() -> None:
            try:
                message = outcome.Value(await self._pull())
            except Exception:  # the server's side is broken: for the receiver the sender has left
                message = outcome.Value({"type": "http.disconnect"})
            hand_over(message)

        self._pulling = self._loop.create_task(fetch())

    def end(self) -> None:
        """Forget a piece that nobody waits for any more."""
        if self._pulling is not None:
            self._pulling.cancel()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *a: Any) -> None:
    # A loop that was closed has nobody left who waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *a)


# -- handlers on the server's loop ---------------------------------------------------------------


class HostLoop:
    """Runs coroutines of ``asyncio=True`` handlers on the server's loop, from Trio's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await what ``call`` returns on the other loop, in this task's context; return its end.

        Cancelled, it cancels the other side, waits for its end, and raises Cancelled if that was
        cancelled for it; a coroutine that ends otherwise has ended so. A cancellation from the
        other side is raised as ``asyncio.CancelledError``, so it fails the run.

        Raises:
            NotRunningError: the loop has been closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waiting, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()
        context = contextvars.copy_context()
        running: asyncio.Task[outcome.Outcome[None]] | None = None
        cancelled = False

        def begin() -> None:
            nonlocal running
            running = self.loop.create_task(_captured(call), context=context)
            running.add_done_callback(report)
            if cancelled:
                running.cancel()

        def report(done: "asyncio.Task[outcome.Outcome[None]]") -> None:
            # Cancelled before its first step, the task has captured nothing.
            ended = outcome.Error(asyncio.CancelledError()) if done.cancelled() else done.result()
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(trio.lowlevel.reschedule, waiting, ended)

        def cancel() -> None:
            if running is not None:
                running.cancel()

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal cancelled
            cancelled = True
            _call_soon(self.loop, cancel)
            # Not given up: its event would run a second time beside it.
            return trio.lowlevel.Abort.FAILED

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            raise NotRunningError("the server's event loop has been closed") from error
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        except asyncio.CancelledError:
            # Ours, if there was one: then it is Trio's own that is raised.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise


async def _captured(call: Callable[[], Awaitable[None]]) -> "outcome.Outcome[None]":
    # SystemExit and KeyboardInterrupt would end the server's loop: they are the handler's failure,
    # as in every other handler.
    try:
        await call()
    except BaseException as error:
        return outcome.Error(error)
    return outcome.Value(None)


# -- lifespans -----------------------------------------------------------------------------------


@attrs.frozen
class _Lifespan:
    """The lifespan protocol of ASGI around the runtime and, within it, that of an application."""

    around: Callable[[], Any]
    app: App | None

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a ``lifespan`` connection."""
        await receive()
        started = False
        try:
            async with self.around():
                async with _inner_lifespan(self.app, scope):
                    await send({"type": "lifespan.startup.complete"})
                    started = True
                    await receive()
        except Exception as error:
            kind = "shutdown" if started else "startup"
            await send({"type": f"lifespan.{kind}.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})


@asynccontextmanager
async def _inner_lifespan(app: App | None, scope: Scope) -> AsyncIterator[None]:
    """Start and end an application that has a lifespan; one that refuses it has none."""
    if app is None:
        yield
        return
    asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def serve() -> None:
        try:
            await app(scope, asked.get, told.put)
        finally:
            told.put_nowait(None)

    serving: asyncio.Task[None] = asyncio.create_task(serve())
    asked.put_nowait({"type": "lifespan.startup"})
    answer = await told.get()
    if answer is not None and answer["type"] == "lifespan.startup.failed":
        await serving
        raise NotRunningError(answer.get("message") or "the application did not start")
    try:
        yield
    finally:
        if answer is not None:
            asked.put_nowait({"type": "lifespan.shutdown"})
            await told.get()
        # An application without a lifespan says so by raising; the protocol asks no more of it.
        with suppress(Exception):
            await serving
