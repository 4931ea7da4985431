"""The only place that knows hypercorn: HTTP beside the fast path (architecture.md, ADR 12).

Imported by ``server.py`` when the first connection needs it: most receivers never do,
and start without the 40 ms and 5 MB of it.
"""

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from h11 import Request
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ..logs import get_logger
from .acceptor import BUSY
from .limits import Limits
from .tls_socket import HANDSHAKE_SECONDS

_log = get_logger("server")

App = Callable[[Any, Any, Any], Awaitable[None]]

#: How long the farewell of a TLS connection may take, in seconds; after that it is cut off.
CLOSE_SECONDS = 1.0


class HypercornServer:
    """Serves single connections of one server with hypercorn.

    Args:
        app: the ASGI application.
        limits: bounds of the connections; hypercorn keeps those that it has.
    """

    def __init__(self, app: App, limits: Limits) -> None:
        self._app = ASGIWrapper(app)
        self._limits = limits
        self._open = 0
        config = Config()
        config.keep_alive_timeout = limits.keep_alive_seconds
        config.keep_alive_max_requests = limits.keep_alive_requests
        # Neither helps a sender, and both would make equal answers differ.
        config.include_date_header = False
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("sdk_trio.server")
        self._config = config
        self._context = WorkerContext(None)

    async def begin_drain(self) -> None:
        """Close connections as they become idle."""
        await self._context.terminated.set()

    async def serve(  # noqa: ASYNC910 - a connection that fails at once is at its end
        self, stream: Any
    ) -> None:
        """Serve one connection; whatever its client sends ends this connection at worst."""
        if self._open >= self._limits.connections:
            _log.warning("server.connections_full", limit=self._limits.connections)
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await _refuse(stream)
            return
        self._open += 1
        try:
            await _Connection(
                self._app,
                self._config,
                self._context,
                ConnectionState({}),
                stream,  # hypercorn names one of the kinds that it takes
            ).run()
        except* Exception as errors:
            # Hypercorn lets some malformed upgrades and frames escape as exceptions.
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
            _log.warning("server.connection_failed", error=reason)
        finally:
            self._open -= 1

    async def take_over(  # noqa: ASYNC910 - as serve
        self, sock: socket.socket, received: bytes
    ) -> None:
        """Serve a connection of which ``received`` has been read before."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        await self.serve(_Begun(stream, received))


class _Connection(TCPServer):
    """Hypercorn's connection, for HTTP/1.1 alone, which ends as soon as nothing more can arrive.

    Without that, the task that waits for the next request keeps a closed connection, and its file
    descriptor, until the keep-alive time is over. A request that has been read behind the last
    answer of a drain would even be waited for until the drain's deadline.
    """

    _reading = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reading_scope = trio.CancelScope()

    async def run(self) -> None:  # noqa: ASYNC910 - reading is a checkpoint, or it has raised
        stream = self.stream
        secure = isinstance(stream, trio.SSLStream)
        try:
            if secure:
                with trio.fail_after(HANDSHAKE_SECONDS):
                    await stream.do_handshake()
            plain = (stream.transport_stream if secure else stream).socket
            client = parse_socket_addr(plain.family, plain.getpeername())
            server = parse_socket_addr(plain.family, plain.getsockname())
            async with TaskGroup() as tasks:
                self._task_group = tasks
                self.protocol = _Http1(  # type: ignore[assignment]  # what the wrapper would hold
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState({}),
                    secure,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            await trio.lowlevel.checkpoint()  # the client has left, or speaks no TLS
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await self._close()

    async def protocol_send(self, event: Event) -> None:  # noqa: ASYNC910 - as hypercorn's own
        if self._reading or not isinstance(event, Updated):
            await super().protocol_send(event)
        if isinstance(event, Closed):
            self._reading_scope.cancel()

    async def _read_data(self) -> None:
        try:
            with self._reading_scope:
                await super()._read_data()
        finally:
            self._reading = False
        await self.idle_task.stop()


class _Http1(H11Protocol):
    """HTTP/1.1 and nothing else.

    Requests to change to another protocol are passed over (RFC 9110, 7.8): no sender of webhooks
    makes any, and hypercorn's HTTP/2 keeps the tasks of a connection that ends at a bad moment.
    """

    async def _check_protocol(self, event: Request) -> None:  # noqa: ASYNC910 - nothing to do
        pass

    async def _create_stream(self, request: Request) -> None:
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            # Two lengths of one body: a proxy may have seen another end of it (RFC 9112, 6.3).
            await self._send_error_response(400)
            await self.send(Closed())
            return
        if b"upgrade" in names:
            request = Request(
                method=request.method,
                headers=[pair for pair in request.headers if pair[0] != b"upgrade"],
                target=request.target,
                http_version=request.http_version,
            )
        await super()._create_stream(request)


class _Begun:
    """A stream of which ``received`` has been read before."""

    def __init__(self, stream: trio.SocketStream, received: bytes) -> None:
        self.socket = stream.socket
        self.send_all = stream.send_all
        self.send_eof = stream.send_eof
        self.aclose = stream.aclose
        self._stream = stream
        self._received = received

    async def receive_some(self, max_bytes: int) -> bytes | bytearray:
        """Return what was read before, then what the stream receives."""
        if not self._received:
            return await self._stream.receive_some(max_bytes)
        await trio.lowlevel.checkpoint()
        received, self._received = self._received[:max_bytes], self._received[max_bytes:]
        return received


async def _refuse(stream: trio.abc.Stream) -> None:
    """Say that there is no room, where it can be said before a handshake, and close."""
    if isinstance(stream, trio.SocketStream):
        try:
            await stream.send_all(BUSY)
            await stream.send_eof()
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            await trio.lowlevel.checkpoint()
        await stream.aclose()
    elif isinstance(stream, trio.SSLStream):
        await trio.aclose_forcefully(stream)
    else:
        await stream.aclose()
