"""The only place that knows hypercorn: sockets, TLS, HTTP and graceful stop (architecture.md)."""

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
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

from ..errors import OptionsValidationError, Problem
from ..logs import get_logger
from .acceptor import BUSY, Acceptor
from .limits import Limits
from .listener import BindError, descriptor_limit, listen

__all__ = ["BindError", "Server"]

_log = get_logger("server")

App = Callable[[Any, Any, Any], Awaitable[None]]

#: How long a client may take for the TLS handshake, in seconds.
HANDSHAKE_SECONDS = 10.0

#: How long the farewell of a TLS connection may take, in seconds; after that it is cut off.
CLOSE_SECONDS = 1.0


class Server:
    """Serves one ASGI application on a list of addresses until told to stop.

    Args:
        app: the ASGI application.
        bind: ``HOST:PORT``, ``[v6]:PORT``, ``unix:PATH`` or ``fd:N``; port 0 picks a free one.
        key: the setting that ``bind`` came from, for messages.
        cert_file, key_file: PEM files; with both, every address speaks TLS.
        graceful_seconds: how long requests in progress may take after :meth:`stop`.
        fast_path: serve plain HTTP/1.1 without hypercorn; TLS is always hypercorn's.
        limits: bounds of the connections; hypercorn's keep those that it has.
    """

    def __init__(
        self,
        app: App,
        bind: Sequence[str],
        *,
        key: str,
        graceful_seconds: float,
        cert_file: str | None = None,
        key_file: str | None = None,
        fast_path: bool = True,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self._limits = attrs.evolve(limits, connections=min(limits.connections, descriptor_limit()))
        self._plain_app = app
        self._fast_path = fast_path
        self._open = 0
        self._app = ASGIWrapper(app)
        self._bind = tuple(bind)
        self._key = key
        self._graceful_seconds = graceful_seconds
        self._stop_wanted = trio.Event()
        self.ended = trio.Event()
        config = _tls_config(cert_file, key_file)
        config.keep_alive_timeout = limits.keep_alive_seconds
        config.keep_alive_max_requests = limits.keep_alive_requests
        # Neither helps a sender, and both would make equal answers differ.
        config.include_date_header = False
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("sdk_trio.server")
        self._config = config
        self._context = WorkerContext(None)
        self._tls: ssl.SSLContext | None = None

    def prepare_certificate(self, cert_file: str, key_file: str) -> Callable[[], None]:
        """Return what gives the present content of the files to connections from then on.

        It does nothing where no TLS is served; established connections keep what they have.

        Raises:
            OptionsValidationError: the certificate or its key cannot be used.
        """
        context = _load_certificate(_tls_config(cert_file, key_file))

        def commit() -> None:
            if self._tls is not None:
                self._tls = context

        return commit

    async def run(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind, report the real addresses as URLs, and serve until :meth:`stop`.

        Requests in progress get ``graceful_seconds``, then they are cancelled. Cancelled, it
        closes every connection at once.

        Raises:
            BindError: an address is in use, not ours, or not permitted.
            OptionsValidationError: the certificate or its key cannot be used.
        """
        self._tls = tls = _load_certificate(self._config)
        sockets = listen(self._bind, key=self._key)
        try:
            async with trio.open_nursery() as connections:
                fast = self._fast_path and tls is None
                acceptor = Acceptor(self._plain_app, self._limits, self._take_over)
                async with trio.open_nursery() as accepting:
                    if fast:
                        connections.start_soon(acceptor.sweep)
                        for sock in sockets:
                            accepting.start_soon(acceptor.accept, sock, connections, accepting)
                    else:
                        accepting.start_soon(
                            partial(
                                trio.serve_listeners,
                                self._serve_connection,
                                [self._listener(sock) for sock in sockets],
                                handler_nursery=connections,
                            )
                        )
                    scheme = "http" if tls is None else "https"
                    task_status.started(tuple(_url(sock, scheme) for sock in sockets))
                    await self._stop_wanted.wait()
                    accepting.cancel_scope.cancel()
                for sock in sockets:
                    sock.close()
                # Idle connections close now; requests in progress have until the deadline.
                connections.cancel_scope.deadline = trio.current_time() + self._graceful_seconds
                await self._context.terminated.set()
                await acceptor.drain()
        finally:
            for sock in sockets:
                sock.close()
            self.ended.set()

    def stop(self) -> None:
        """Stop accepting connections; :meth:`run` returns when the present requests have ended."""
        self._stop_wanted.set()

    def _listener(self, sock: socket.socket) -> trio.abc.Listener[Any]:
        plain = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        return plain if self._tls is None else _SecureListener(plain, lambda: self._tls)

    async def _serve_connection(  # noqa: ASYNC910 - a connection that fails at once is at its end
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

    async def _take_over(  # noqa: ASYNC910 - as _serve_connection
        self, sock: socket.socket, received: bytes
    ) -> None:
        """Serve a connection whose first bytes asked the fast path for another protocol."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        await self._serve_connection(_Begun(stream, received))


class _Connection(TCPServer):
    """Hypercorn's connection, for HTTP/1.1 alone, which ends as soon as nothing more can arrive.

    Without that, the task that waits for the next request keeps a closed connection, and its file
    descriptor, until the keep-alive time is over.
    """

    _reading = True

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

    async def _read_data(self) -> None:
        try:
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


class _SecureListener(trio.abc.Listener["trio.SSLStream[trio.SocketStream]"]):
    """As ``trio.SSLListener``, with the context that is in force when a connection comes."""

    def __init__(
        self, plain: trio.SocketListener, context: Callable[[], ssl.SSLContext | None]
    ) -> None:
        self._plain = plain
        self._context = context

    async def accept(self) -> "trio.SSLStream[trio.SocketStream]":
        stream = await self._plain.accept()
        context = self._context()
        assert context is not None  # noqa: S101 - TLS is on or off for as long as it listens
        return trio.SSLStream(stream, context, server_side=True, https_compatible=True)

    async def aclose(self) -> None:
        await self._plain.aclose()


def _tls_config(cert_file: str | None, key_file: str | None) -> Config:
    config = Config()
    config.certfile = cert_file
    config.keyfile = key_file
    config.alpn_protocols = ["http/1.1"]
    return config


def _load_certificate(config: Config) -> ssl.SSLContext | None:
    try:
        return config.create_ssl_context()
    except OSError as error:  # SSLError is one
        raise OptionsValidationError(
            [
                Problem(
                    "Sdk:Server:CertFile",
                    f"{config.certfile} with Sdk:Server:KeyFile {config.keyfile} "
                    f"cannot be used: {error.strerror or error}; both must be PEM, and the "
                    "key must be the certificate's",
                )
            ]
        ) from error


def _url(sock: socket.socket, scheme: str) -> str:
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{scheme}://{host}:{name[1]}"
