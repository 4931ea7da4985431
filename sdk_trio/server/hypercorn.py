"""Hypercorn as the server, if ``Server:FastPath`` is false. No other module imports it.

It is the fallback if the project's own connections misbehave. The overrides below fix differences
that were found by sending the same bytes to both servers. Each private part of hypercorn that they
use has a test in ``tests/unit/test_hypercorn_seams.py``, and the minor version is pinned.
"""

import logging
from contextlib import suppress
from math import inf
from typing import Any

import trio
from h11 import SEND_BODY, LocalProtocolError, Request
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ..base.cells import is_cell_cancelled, run_in_cell
from ..base.http import App
from ..base.logs import get_logger
from .accept import BUSY
from .head import RequestError, in_origin_form
from .limits import Limits, NoteRefusal
from .slots import ConnectionSlots
from .tls import HANDSHAKE_SECONDS

_log = get_logger("server")


#: Trio's errors for a connection that has ended or is being closed.
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError)

#: Time for the TLS closing alert and for a refusal, in seconds; then the connection is closed.
CLOSE_SECONDS = 1.0


class HypercornServer:
    """Serves single connections of one server with hypercorn.

    Args:
        app: the ASGI application.
        limits: the limits of each connection. Hypercorn has settings for some; :class:`_Connection`
            enforces others.
        slots: the connection slots.
        note_refusal: called for every request that hypercorn itself refuses.
    """

    def __init__(
        self, app: App, limits: Limits, slots: ConnectionSlots, note_refusal: NoteRefusal
    ) -> None:
        self._app = ASGIWrapper(_without_disconnect_errors(app))
        self._limits = limits
        self._slots = slots
        self._refusals = 0
        self._note_refusal = note_refusal
        config = Config()
        config.keep_alive_timeout = limits.keep_alive_seconds
        config.keep_alive_max_requests = limits.keep_alive_requests
        # Neither header helps a sender, and the fast path sends neither: responses must be the
        # same.
        config.include_date_header = False
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("sdk_trio.server")
        self._config = config
        self._context = WorkerContext(None)

    async def begin_drain(self) -> None:
        """Close connections as they become idle."""
        await self._context.terminated.set()

    async def serve(self, stream: Any) -> None:
        """Serve one connection; its errors end no other connection."""
        sock = (stream.transport_stream if isinstance(stream, trio.SSLStream) else stream).socket
        try:
            peer = parse_socket_addr(sock.family, sock.getpeername())
        except OSError:  # the client has left already
            await trio.aclose_forcefully(stream)
            return
        source, connection = self._slots.source_of(peer), None
        if not self._slots.reserve(source, peer, trio.current_time()):
            await self._refuse(stream)
            return
        try:
            connection = _Connection(
                self._app, self._config, self._context, stream, self._limits, self._note_refusal
            )
            self._slots.register(connection, source)
            await connection.run()
        except* Exception as errors:
            # Hypercorn raises for some malformed upgrades and frames.
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
            _log.warning("server.connection_failed", error=reason)
        finally:
            self._slots.free(connection, source)

    async def _refuse(self, stream: Any) -> None:
        """Close a connection for which there is no slot; a few at a time get a 503 first.

        Over TLS there is no 503: it would need a handshake, which costs more than a request.
        """
        if self._refusals >= self._limits.refusals or isinstance(stream, trio.SSLStream):
            await trio.aclose_forcefully(stream)
            return
        self._refusals += 1
        try:
            with trio.move_on_after(CLOSE_SECONDS, shield=True), suppress(trio.BrokenResourceError):
                await stream.send_all(BUSY)
                await stream.send_eof()
                while await stream.receive_some():
                    pass
        finally:
            self._refusals -= 1
            await trio.aclose_forcefully(stream)


def _without_disconnect_errors(app: App) -> App:
    """Hide from the application that its client has left: hypercorn would log a traceback.

    The application runs in a cell, as on the fast path, because a handler that cancels its own
    nursery has failed. Hypercorn's own nursery is cancelled for other reasons as well.
    """

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        async def send_if_possible(message: Any) -> None:
            # A handler that has cancelled its own cell has failed; its sender still gets a
            # response.
            own = is_cell_cancelled()
            try:
                with trio.move_on_after(CLOSE_SECONDS if own else inf, shield=own):
                    await send(message)
            except (*_GONE, LocalProtocolError) as error:
                # The connection ended between two messages of the response, or was refused.
                _log.debug("server.answer_not_sent", error=str(error))
                await trio.lowlevel.checkpoint()

        await run_in_cell(app, scope, receive, send_if_possible)

    return serve


class _Connection(TCPServer):
    """Hypercorn's connection, for HTTP/1.1 only, with four differences.

    - It ends as soon as nothing more can arrive. Hypercorn would keep a closed connection and its
      descriptor until the keep-alive time is over, and a request that arrives after the last
      response would delay a drain until its deadline.
    - It limits the time for a head.
    - A response that has begun is completed even if the client sends malformed bytes meanwhile.
    - It can be evicted while it waits for a request or for the rest of one. It cannot be evicted
      while the client accepts no response: hypercorn has no public API to end that wait.
    """

    _reading = True
    _idle = True
    _head_begun = False
    _evicted = False

    def __init__(
        self,
        app: Any,
        config: Config,
        context: WorkerContext,
        stream: Any,  # hypercorn annotates only one of the types that it accepts
        limits: Limits,
        note_refusal: NoteRefusal,
    ) -> None:
        super().__init__(app, config, context, ConnectionState({}), stream)
        self._limits = limits
        self._note_refusal = note_refusal
        self._reading_scope = trio.CancelScope()
        self._waits_since = trio.current_time()

    @property
    def idle_since(self) -> float | None:
        idles = self._idle and not self._head_begun and not self._evicted
        return self._waits_since if idles else None

    @property
    def unfinished_since(self) -> float | None:
        if self._evicted or (self._idle and not self._head_begun):
            return None
        if self._head_begun or self.protocol.connection.their_state is SEND_BODY:  # type: ignore[attr-defined]
            return self._waits_since
        return None

    def evict(self) -> None:
        self._evicted = True
        self._reading_scope.cancel()

    async def run(self) -> None:
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
                self.protocol = protocol = _Http1(  # type: ignore[assignment]  # the wrapper declares a union
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
                protocol.note_refusal = self._note_refusal
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            await trio.lowlevel.checkpoint()  # the client has left, or speaks no TLS
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await self._close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._reading_scope.cancel()
            if self.protocol.connection.our_state is SEND_BODY:  # type: ignore[attr-defined]
                # A response is being sent; its end closes the connection.
                return
            with trio.move_on_after(CLOSE_SECONDS):
                async with self.send_lock:  # let another task finish sending first
                    pass
        elif isinstance(event, Updated):
            self._idle = event.idle
            # The next head may have begun before this request was over.
            connection = self.protocol.connection  # type: ignore[attr-defined]
            self._head_begun = event.idle and bool(connection.trailing_data[0])
            self._waits_since = trio.current_time()
            patience = self._limits.head_seconds if self._head_begun else inf
            self._reading_scope.deadline = trio.current_time() + patience
            if not self._reading:
                return
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:  # it is being closed
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        limits = self._limits
        scope = self._reading_scope
        scope.deadline = trio.current_time() + limits.first_byte_seconds
        try:
            with scope:
                while data := await self.stream.receive_some(limits.read_bytes):
                    if self._idle and not self._head_begun:
                        self._head_begun = True
                        self._waits_since = trio.current_time()
                        scope.deadline = trio.current_time() + limits.head_seconds
                    await self.protocol.handle(RawData(bytes(data)))
                await self.protocol.handle(RawData(b""))
        except _GONE:
            await trio.lowlevel.checkpoint()
        finally:
            self._reading = False
        await self.protocol.handle(Closed())
        await self.idle_task.stop()


class _Http1(H11Protocol):
    """HTTP/1.1 only.

    A request for another protocol gets an ordinary response (RFC 9110, 7.8). No sender of webhooks
    asks for one, and hypercorn's HTTP/2 leaks the tasks of a connection that ends at a bad moment.
    Versions and targets are read as on the fast path.
    """

    note_refusal: NoteRefusal

    async def _check_protocol(self, event: Request) -> None:
        pass

    async def _send_error_response(self, status_code: int) -> None:
        self.note_refusal(
            status_code, "hypercorn's parser", self.client[0] if self.client else None
        )
        await super()._send_error_response(status_code)

    async def _create_stream(self, request: Request) -> None:
        try:
            request = _as_on_the_fast_path(request)
        except RequestError as error:
            await self._send_error_response(error.status)
            await self.send(Closed())
        else:
            await super()._create_stream(request)


def _as_on_the_fast_path(request: Request) -> Request:
    """Return the request as :func:`parse_head` would, or raise its RequestError."""
    headers = list(request.headers)
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        # A proxy may have used the other one of the two lengths (RFC 9112, 6.3).
        raise RequestError(400, "the body has two lengths")
    version = bytes(request.http_version)
    if version[:2] != b"1.":
        raise RequestError(505, "the version of HTTP is not supported")
    if version > b"1.1" and names.count(b"host") != 1:
        raise RequestError(400, "there must be one Host header")
    target, headers = in_origin_form(
        request.method.decode("ascii").upper(), bytes(request.target), headers
    )
    return Request(
        method=request.method,
        headers=[pair for pair in headers if pair[0] != b"upgrade"],
        target=target,
        http_version=min(version, b"1.1"),
    )
