"""HTTP/1.1 connections, each served in one task that calls the ASGI application itself.

A request costs one wait for the socket and one send: no nursery, lock, timeout scope, thread or
task of its own. On hypercorn a delivery takes 21 steps of the event loop and 2 tasks, here 3 steps
and none, which is 93 us of CPU instead of 388. Deadlines are fields (``read_deadline``,
``write_deadline``): the acceptor's sweep looks at them twice a second and wakes the connections
whose time is over by ``notify_closing``, which ends a wait for the socket with
``ClosedResourceError`` and leaves the socket open.
"""

import socket
from math import inf
from typing import Protocol

import trio

from ..base.asgi import App
from ..base.logs import get_logger
from .answer_head import refusal
from .deadline_keeper import Expiry
from .exchange import Exchange
from .limits import Expired, Limits, NoteRefusal
from .request_head import (
    END_OF_HEAD,
    KnownLines,
    RequestError,
    RequestHead,
    check_beginning,
    parse_head,
)
from .tls_socket import TlsSocket

_log = get_logger("server")

Address = tuple[str, int] | None


class Surroundings(Protocol):
    """The state that the connections of one server share.

    ``now`` is the event loop's clock as of the last sweep, which saves a call of the clock for each
    wait; ``draining``: no further request begins. ``note_refusal`` is called for every request that
    the server itself refuses.
    """

    app: App
    limits: Limits
    now: float
    draining: bool
    note_refusal: NoteRefusal


class Connection:
    """One client's connection, from its first byte to its end.

    ``client`` and ``server`` are the addresses for the ASGI scope; None for Unix sockets.
    ``scheme`` is ``https`` over TLS.
    """

    __slots__ = (
        "_around",
        "_buffer",
        "_descriptor",
        "_exchange",
        "_idle",
        "_idle_since",
        "_interrupted",
        "_known_lines",
        "_pending",
        "_requests",
        "_socket",
        "client",
        "ended",
        "expiry",
        "limits",
        "read_deadline",
        "scheme",
        "server",
        "waiting",
        "write_deadline",
    )

    def __init__(
        self,
        around: Surroundings,
        sock: socket.socket | TlsSocket,
        client: Address,
        server: Address,
    ) -> None:
        self._around = around
        self._socket = sock
        self._descriptor = sock.fileno()
        self._buffer: bytes | bytearray = b""
        self._known_lines: KnownLines = {}
        self._requests = 0
        self._idle = True
        self._idle_since = around.now
        self._interrupted = False
        self._exchange: Exchange | None = None
        self.limits = around.limits
        self.expiry = Expiry(around.limits.sweep_seconds)
        self.client = client
        self.server = server
        self._pending = sock.pending if isinstance(sock, TlsSocket) else None
        self.scheme = "http" if self._pending is None else "https"
        self.read_deadline = around.now + self.limits.first_byte_seconds
        self.write_deadline = inf
        self.waiting = False
        #: Nothing more is read or sent: the client has left, or the connection has to end.
        self.ended = False

    # -- for the acceptor --------------------------------------------------------------------

    async def run(self) -> None:
        """Serve requests until the client leaves or the server ends the connection.

        Over TLS the handshake comes first. If it is cancelled, the application is cancelled, too,
        and the connection is closed at once.
        """
        try:
            if isinstance(self._socket, TlsSocket):
                await self._socket.handshake()
            await self._serve()
        except (OSError, trio.TooSlowError, trio.ClosedResourceError):
            # The client has left, speaks no TLS, or has not begun when the server ends.
            await trio.lowlevel.checkpoint()
        finally:
            self.ended = True
            # Breaks the reference cycle: without the garbage collector both are freed now.
            self._exchange = None
            trio.lowlevel.notify_closing(self._descriptor)
            self._socket.close()

    @property
    def idle_since(self) -> float | None:
        """The time at which the connection became idle; None while a request is in progress."""
        if not self._idle or self._buffer:
            return None
        return self._idle_since

    def give_way(self) -> None:
        """End an idle connection now, so that another one gets its place."""
        self.read_deadline = -inf
        trio.lowlevel.notify_closing(self._descriptor)

    def sweep(self, now: float) -> None:
        """Wake the connection if a deadline has passed, or if it idles while the server ends."""
        if (
            now >= self.read_deadline
            or now >= self.write_deadline
            or (self._idle and self._around.draining)
        ) and not self.ended:
            trio.lowlevel.notify_closing(self._descriptor)
        self.expiry.sweep(now)

    # -- requests ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve request after request, with a new scope after each deadline that has passed."""
        while True:
            with self.expiry.scope:
                await self._serve_requests()
                if not self.expiry.spent:
                    return
            # The scope was cancelled: the application's deadline has passed. It may have answered
            # before that, so the exchange decides whether the connection goes on.
            self.expiry.spent = True
            if self._exchange is None or not await self._conclude(self._exchange):
                return
            self.expiry.renew()

    async def _serve_requests(self) -> None:
        """Serve the requests of one scope: until the connection ends, or the scope is spent."""
        app = self._around.app
        while True:
            try:
                head = await self._read_head()
            except RequestError as error:
                await self._refuse(error)
                return
            if head is None:
                return
            self._requests += 1
            self._exchange = exchange = Exchange(self, head)
            try:
                await app(exchange.scope(), exchange.receive, exchange.send)
            except Exception:
                # ASGI leaves this to the server. The client gets a 500 in _conclude.
                _log.exception("server.application_failed", method=head.method)
            if self.expiry.spent or not await self._conclude(exchange):
                return

    async def _conclude(self, exchange: Exchange) -> bool:
        """Finish the answer; return False if the connection ends with it."""
        if self.expiry.spent and self.expiry.answer and not exchange.begun:
            await exchange.answer(self.expiry.answer)
        if self.waiting and exchange.answered:
            await self.interrupt_readers()
        exchange.finish()
        if self.ended:
            return False
        if exchange.error is not None:
            await self._refuse(exchange.error)
            return False
        if not exchange.closes:
            return True
        if exchange.unread:
            await self._linger()
        return False

    @property
    def is_last(self) -> bool:
        """Whether no request is accepted after the present one."""
        return self._around.draining or self._requests >= self.limits.keep_alive_requests

    async def _read_head(self) -> RequestHead | None:
        """Return the next head and leave the first bytes of its body in the buffer.

        Returns None if the connection ends before another request.
        """
        limits = self.limits
        buffer = self._buffer
        searched = 0
        skipped = False
        if buffer:
            # A pipelined request is in the buffer, so nothing below has to wait: other connections
            # get their turn here.
            await trio.lowlevel.checkpoint()
        while True:
            if buffer[:2] == b"\r\n" and not skipped:
                # One empty line before a request is ignored: old clients send it after a body
                # (RFC 9112, 2.2).
                self._buffer = buffer = bytes(buffer[2:])
                skipped = True
                searched = 0
            if buffer:
                end = buffer.find(END_OF_HEAD, searched)
                if end >= 0:
                    break
                check_beginning(buffer, limits, searched)
                searched = max(0, len(buffer) - 3)
                if not isinstance(buffer, bytearray):
                    # Nearly all heads arrive in one piece. Only a second piece is worth a
                    # bytearray, in which many small pieces cost linear time.
                    self._buffer = buffer = bytearray(buffer)
                    self.read_deadline = self._around.now + limits.head_seconds
            else:
                # A new connection gets less time than a kept one: its client opened it to send.
                patience = (
                    limits.keep_alive_seconds if self._requests else limits.first_byte_seconds
                )
                self._idle_since = self._around.now
                self.read_deadline = self._idle_since + patience
            chunk = await self._read_for_head()
            if chunk is None:
                return None
            if isinstance(buffer, bytearray):
                buffer += chunk
            else:
                self._buffer = buffer = chunk
        self.read_deadline = inf
        end += 4
        if end > limits.head_bytes:
            raise RequestError(431, "the headers are too large")
        head = parse_head(bytes(buffer[:end]), limits, self._known_lines)
        self._buffer = bytes(buffer[end:])
        return head

    async def _read_for_head(self) -> bytes | None:
        """Return the next bytes of a head; None if the connection ends before another request."""
        try:
            chunk = await self.read(idle=True)
        except Expired:
            if self._buffer and not self._around.draining:
                raise RequestError(408, "the headers took too long") from None
            return None
        if not chunk:
            if self._buffer:
                raise RequestError(400, "the headers are not complete")
            return None
        return chunk

    # -- bytes -------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The event loop's clock as of the last sweep."""
        return self._around.now

    @property
    def buffer(self) -> bytes | bytearray:
        """Bytes that were read and not taken yet."""
        return self._buffer

    def take(self, size: int) -> bytes:
        """Remove at most ``size`` bytes from the buffer and return them."""
        buffer = self._buffer
        if len(buffer) <= size:
            self._buffer = b""
            return bytes(buffer)
        self._buffer = buffer[size:]
        return bytes(buffer[:size])

    def give_back(self, data: bytes) -> None:
        """Push surplus bytes back in front of the buffer."""
        self._buffer = data + self._buffer

    async def read_ahead(self) -> bool:
        """Append the client's next bytes to the buffer; return False at the end of its stream."""
        chunk = await self.read()
        self._buffer = bytes(self._buffer) + chunk
        return bool(chunk)

    async def read(self, *, idle: bool = False) -> bytes:
        """Wait for bytes and return them; empty at the end of the client's stream.

        ``idle``: no request is in progress, so that the connection ends when the server drains.

        Raises:
            Expired: :attr:`read_deadline` has passed, the server drains and the connection is idle,
                or the answer has been sent while a task of the application still reads.
            OSError: the connection is broken.
        """
        while True:
            self._idle = idle
            self.waiting = True
            try:
                # Wait first and receive then: a client that has just got its answer has not sent
                # anything yet, so receiving first would cost one more system call a request.
                if not (idle and self._around.draining):
                    # OpenSSL may hold decrypted bytes that the descriptor does not show.
                    if self._pending is not None and self._pending():
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(self._descriptor)
            except trio.ClosedResourceError:
                if self._interrupted or self._around.now >= self.read_deadline:
                    raise Expired from None
            finally:
                self.waiting = False
                self._idle = False
            try:
                return self._socket.recv(self.limits.read_bytes)
            except BlockingIOError:
                # A request whose bytes arrived before the drain began is served, later ones not.
                if idle and self._around.draining:
                    raise Expired from None

    async def send(self, data: bytes) -> None:
        """Send all of ``data``. If the client has left or is too slow, the connection ends."""
        if self.ended:
            return
        try:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                await self._send_rest(memoryview(data)[sent:])
        except (OSError, Expired):
            self.ended = True

    async def _send_rest(self, data: memoryview) -> None:
        self.write_deadline = self._around.now + self.limits.write_seconds
        try:
            while data:
                try:
                    await trio.lowlevel.wait_writable(self._descriptor)
                except trio.ClosedResourceError:
                    if self._around.now >= self.write_deadline:
                        raise Expired from None
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    continue
        except trio.Cancelled:
            # A part of the answer is out. Whatever followed would be taken for its rest.
            self.ended = True
            raise
        finally:
            self.write_deadline = inf

    async def interrupt_readers(self) -> None:
        """End the wait of a task of the application that still calls ``receive``.

        An application may wait for the client's leaving in a task of its own while it answers. That
        task must not read the bytes of the next request.
        """
        self._interrupted = True
        while self.waiting:
            trio.lowlevel.notify_closing(self._descriptor)
            await trio.lowlevel.checkpoint()
        self._interrupted = False

    async def _refuse(self, error: RequestError) -> None:
        peer = self.client[0] if self.client else None
        self._around.note_refusal(error.status, str(error), peer)
        await self.send(refusal(error.status))
        await self._linger()

    async def _linger(self) -> None:
        """Half-close, and throw away what the client still sends, within time and size limits.

        A close with unread bytes resets the connection, and the client might not see the answer
        (RFC 9112, 9.6).
        """
        if self.ended:
            await trio.lowlevel.checkpoint()
            return
        self._socket.shutdown(socket.SHUT_WR)
        self.read_deadline = self._around.now + self.limits.linger_seconds
        left = self.limits.linger_bytes
        try:
            while left > 0:
                # The bytes themselves are not held on to, while more of them are waited for.
                size = len(await self.read(idle=True))
                if not size:
                    return
                left -= size
        except Expired:
            await trio.lowlevel.checkpoint()
