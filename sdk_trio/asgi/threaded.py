"""The receiver as an application for asyncio servers, its lifespan, and handlers on their loop."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import outcome
import trio

from ..base.http import App, Receive, Scope, Send, Whole
from ..base.logs import Throttle, get_logger
from ..config import Settings
from ..errors import NotRunningError
from ..runtime import Runtime
from ..webhooks import HandlerRegistry, answers
from ..webhooks.body import BODY_SECONDS
from .thread import UNAVAILABLE, RuntimeThread, call_soon

if TYPE_CHECKING:
    from ..client.client import Client
    from ..runtime.notifications import ChannelFactory
    from ..tenants.tenancy import ClientFactory
    from ..tenants.upgrade import HostUpgrade, Quiescence

_log = get_logger("runtime")

_NOT_STARTED = (
    "the receiver is not started, or has ended; pass its lifespan to the application, as in "
    "FastAPI(lifespan=receiver.lifespan): servers pass no lifespan to a mounted application"
)


class Threaded:
    """The whole runtime in a thread of its own, as an ASGI application of an asyncio server.

    ``app = FastAPI(lifespan=receiver.lifespan)``, ``app.mount("/hooks", receiver)``. The server
    listens for deliveries, not the runtime. Paths in the settings include the mount: one at
    ``/hooks`` serves the default ``/hooks/sdk``.

    Before the start, after the end, and if the thread has died, deliveries are answered 503, and
    :attr:`ready` is False.

    Args:
        settings: validated settings of :func:`sdk_trio.load_settings`.
        handlers: the handlers by event type; those of ``asyncio=True`` run on the server's loop.
        client, standalone, client_factory, host_upgrade, quiescence, channels: as for
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
        quiescence: "Quiescence | None" = None,
        channels: "ChannelFactory | None" = None,
    ) -> None:
        self.settings = settings
        self._handlers = HandlerRegistry() if handlers is None else handlers
        self._options: dict[str, Any] = {
            "client": client,
            "standalone": standalone,
            "client_factory": client_factory,
            "host_upgrade": host_upgrade,
            "quiescence": quiescence,
            "channels": channels,
        }
        self._thread: RuntimeThread | None = None
        self._throttle = Throttle(lines=3, seconds=10.0)

    @property
    def ready(self) -> bool:
        """Whether deliveries are accepted, for a readiness probe of the application."""
        return self._thread is not None and self._thread.ready

    @property
    def runtime(self) -> Runtime:
        """The running runtime, for its metrics and reports; make other calls in its thread.

        Raises:
            NotRunningError: it is not started, or has ended.
        """
        if self._thread is None:
            raise NotRunningError(_NOT_STARTED)
        return self._thread.runtime

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Start the runtime, and drain it at the end of the block.

        It ignores its argument, which FastAPI, Starlette and Litestar pass to a ``lifespan``.
        Inside your own lifespan, write ``async with receiver.lifespan(): ...``. Leaving the block
        takes as long as the drain, or a few seconds more if handlers do not end. Such handlers are
        logged and abandoned in their threads, because the process is about to end.

        Raises:
            StoreLockedError: another process, such as a second worker, uses the data directory.
            SdkError: any other error of the start of a runtime.
        """
        if self._thread is not None:
            raise NotRunningError("this receiver already runs; start it again after it has ended")
        host = HostLoop(asyncio.get_running_loop())
        self._handlers.host_loop = host
        runtime = Runtime(self.settings, self._handlers, listens=False, **self._options)
        self._thread = thread = RuntimeThread(runtime, host.loop)
        try:
            await thread.start()
            yield
        finally:
            await thread.stop()
            self._thread = None

    def in_front_of(self, app: App) -> App:
        """Return an ASGI application that serves deliveries, and passes other requests to ``app``.

        It starts and drains the runtime with the server, and passes the lifespan on to ``app``. Use
        it for applications without mounts or a lifespan, such as Django.
        """
        own = self.settings.webhooks.path
        routes = {own, *(source.route for source in self.settings.sources)}
        tenants = f"{own.rstrip('/')}/" if self.settings.multi_tenant.enabled else None

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _Lifespan(self.lifespan, app).serve(scope, receive, send)
                return
            path = scope.get("path", "")
            mine = path in routes or (tenants is not None and path.startswith(tenants))
            await (self if mine and scope["type"] == "http" else app)(scope, receive, send)

        return application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection of an asyncio server: ``http`` or ``lifespan``.

        If the sender leaves before its body is complete, nothing is stored. If it leaves later, the
        handler still runs to its end. Cancellation cancels the delivery and releases its event.
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
        whole: Whole | None = UNAVAILABLE
        if thread is None or not thread.alive:
            self._note_not_running(thread)
        else:
            # A client that sends nothing must not occupy a request forever. The receiver itself
            # limits the time for further pieces.
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

    def _note_not_running(self, thread: "RuntimeThread | None") -> None:
        extra = self._throttle.fields("not_running")
        if extra is not None:
            died = None if thread is None else thread.error
            hint = _NOT_STARTED if died is None else f"its thread has ended: {died!r}"
            _log.warning("webhook.refused", cause="not_running", status=503, hint=hint, **extra)


def _whole_path(scope: Scope) -> Scope:
    """Return the scope with the full path: some hosts remove the path of a mount."""
    root = scope.get("root_path", "")
    if not root or scope["path"].startswith(root):
        return scope
    return {**scope, "path": root.rstrip("/") + scope["path"]}


# -- handlers on the server's loop ---------------------------------------------------------------


class HostLoop:
    """Runs coroutines of ``asyncio=True`` handlers on the server's loop, from Trio's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await the result of ``call`` on the other loop, in this task's context.

        Cancellation cancels the coroutine on the other loop and waits for its end. It raises
        Cancelled only if that coroutine was cancelled; another end is kept. If the other loop
        cancels the coroutine, ``asyncio.CancelledError`` is raised, so the run fails.

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
            # A task that was cancelled before its first step has captured nothing.
            ended = outcome.Error(asyncio.CancelledError()) if done.cancelled() else done.result()
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(trio.lowlevel.reschedule, waiting, ended)

        def cancel() -> None:
            if running is not None:
                running.cancel()

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal cancelled
            cancelled = True
            call_soon(self.loop, cancel)
            # Keep waiting: otherwise its event could run a second time concurrently.
            return trio.lowlevel.Abort.FAILED

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            raise NotRunningError("the server's event loop has been closed") from error
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        except asyncio.CancelledError:
            # If Trio cancelled this task, raise Trio's exception instead.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise


@contextmanager
def asyncio_loop() -> Iterator[HostLoop]:
    """Run an asyncio loop in a thread for the block, for tests of ``asyncio=True`` handlers."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="asyncio", daemon=True)
    thread.start()
    try:
        yield HostLoop(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _captured(call: Callable[[], Awaitable[None]]) -> "outcome.Outcome[None]":
    try:
        await call()
    except BaseException as error:
        # Otherwise SystemExit and KeyboardInterrupt would end the server's loop. They are failures
        # of the handler, as in every other handler.
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
            async with self.around(), _inner_lifespan(self.app, scope):
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
    """Start and end an application with a lifespan; one that refuses the scope has none."""
    if app is None:
        yield
        return
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def serve() -> None:
        try:
            await app(scope, to_app.get, from_app.put)
        finally:
            from_app.put_nowait(None)

    serving: asyncio.Task[None] = asyncio.create_task(serve())
    to_app.put_nowait({"type": "lifespan.startup"})
    answer = await from_app.get()
    if answer is not None and answer["type"] == "lifespan.startup.failed":
        await serving
        raise NotRunningError(answer.get("message") or "the application did not start")
    try:
        yield
    finally:
        if answer is not None:
            to_app.put_nowait({"type": "lifespan.shutdown"})
            await from_app.get()
        # An application without a lifespan raises; the protocol allows that.
        with suppress(Exception):
            await serving
