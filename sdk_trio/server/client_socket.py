"""The socket of one client: a read buffer, and deadlines for reading and sending.

A timeout scope for each wait would cost every request more than the check of its signature. So the
deadlines are fields, ``read_deadline`` and ``write_deadline``. Twice a second the acceptor's sweep
compares them with the clock, and wakes each connection whose deadline has passed by
``notify_closing``. The wait then ends with ``ClosedResourceError``; the socket stays open.
"""

import socket
from math import inf
from typing import Protocol

import trio

from ..base.cells import current_cell
from ..base.http import App, DirectApp
from .head import HeadTemplate
from .limits import Expired, Limits, NoteRefusal
from .slots import Address, address_of
from .tls import TlsSocket


class ServerState(Protocol):
    """The state that all connections of one server share.

    ``direct`` is the application if it can be called without an ASGI scope, else None. ``now`` is
    the event loop's clock as of the last sweep, which saves each wait a call of the clock.
    ``draining``: no further request begins. ``note_refusal`` is called for every request that the
    server itself refuses. ``template`` is the template of the last head of any connection.
    """

    app: App
    direct: DirectApp | None
    limits: Limits
    now: float
    draining: bool
    note_refusal: NoteRefusal
    template: HeadTemplate | None


class ClientSocket:
    """Reads and sends the bytes of one connection, within its deadlines.

    ``client`` is the peer's address; None for a unix socket. ``scheme`` is ``https`` over TLS.
    """

    __slots__ = (
        "_cell",
        "_descriptor",
        "_idle",
        "_interrupted",
        "_pending",
        "_requests",
        "_shared",
        "_socket",
        "buffer",
        "client",
        "ended",
        "evicted",
        "limits",
        "read_deadline",
        "scheme",
        "waiting",
        "write_deadline",
    )

    def __init__(
        self, shared: ServerState, sock: socket.socket | TlsSocket, client: Address
    ) -> None:
        self._shared = shared
        self._socket = sock
        self._descriptor = sock.fileno()
        #: Bytes that were read and not yet taken. A plain attribute, because a property is a call.
        self.buffer: bytes | bytearray = b""
        self._requests = 0  # that have begun
        self._idle = True
        self._interrupted = False
        self._cell = current_cell()
        self.limits: Limits = shared.limits
        self.client: Address = client
        self._pending = sock.pending if isinstance(sock, TlsSocket) else None
        self.scheme = "http" if self._pending is None else "https"
        self.read_deadline: float = shared.now + self.limits.first_byte_seconds
        self.write_deadline: float = inf
        #: Whether a task waits for bytes.
        self.waiting: bool = False
        #: Another connection needs the slot, so no further wait for this client begins.
        self.evicted: bool = False
        #: Nothing more is read or sent: the client has left, or the connection has to end.
        self.ended: bool = False

    @property
    def server(self) -> Address:
        """The address that the client has connected to; None for a unix socket."""
        return address_of(self._socket.getsockname())

    @property
    def is_last(self) -> bool:
        """Whether no request is accepted after the current one."""
        return (
            self._shared.draining
            or self._requests >= self.limits.keep_alive_requests
            # A handler that has cancelled its cell has cancelled this connection.
            or (self._cell is not None and self._cell.cancel_scope.cancel_called)
        )

    @property
    def now(self) -> float:
        """The event loop's clock as of the last sweep."""
        return self._shared.now

    def take(self, size: int) -> bytes:
        """Remove at most ``size`` bytes from the buffer and return them."""
        buffer = self.buffer
        if len(buffer) <= size:
            self.buffer = b""
            return bytes(buffer)
        self.buffer = buffer[size:]
        return bytes(buffer[:size])

    def give_back(self, data: bytes) -> None:
        """Push surplus bytes back in front of the buffer."""
        self.buffer = data + self.buffer

    async def read_ahead(self) -> bool:
        """Append the client's next bytes to the buffer; return False at the end of its stream."""
        chunk = await self.read()
        self.buffer = bytes(self.buffer) + chunk
        return bool(chunk)

    async def read(self, *, idle: bool = False) -> bytes:
        """Wait for bytes and return them; none at the end of the client's stream.

        ``idle``: no request is in progress, so the connection ends when the server drains.

        Raises:
            Expired: :attr:`read_deadline` has passed, the connection was evicted, it is idle while
                the server drains, or the response has been sent while a task of the application
                still reads.
            OSError: the connection is broken.
        """
        while True:
            # Over TLS a connection may be evicted before it first waits here.
            if self.evicted:
                raise Expired
            self._idle = idle
            self.waiting = True
            try:
                # Wait before receiving: a client that has just got its response has not sent
                # anything yet, so receiving first would cost each request a system call more.
                if not (idle and self._shared.draining):
                    # OpenSSL may hold decrypted bytes that the descriptor does not show.
                    if self._pending is not None and self._pending():
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(self._descriptor)
            except trio.ClosedResourceError:
                if self._interrupted or self._shared.now >= self.read_deadline:
                    raise Expired from None
            finally:
                self.waiting = False
                self._idle = False
            try:
                return self._socket.recv(self.limits.read_bytes)
            except BlockingIOError:
                # A request whose bytes arrived before the drain began is served, later ones not.
                if idle and self._shared.draining:
                    raise Expired from None

    def read_at_once(self) -> bytes | None:
        """Return bytes that have arrived already; None if there are none.

        Raises:
            OSError: the connection is broken.
        """
        try:
            data = self._socket.recv(self.limits.read_bytes)
        except BlockingIOError:
            return None
        self._idle = False
        return data

    def stop_reading(self) -> None:
        """End the wait of a reader with :class:`Expired`, and every later one."""
        self.read_deadline = -inf
        trio.lowlevel.notify_closing(self._descriptor)

    async def send(self, data: bytes) -> None:
        """Send all of ``data``. If the client has left or is too slow, the connection ends."""
        if self.ended:
            return
        try:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data) and self.evicted:
                self.ended = True
            elif sent < len(data):
                await self._send_rest(memoryview(data)[sent:])
        except (OSError, Expired):
            self.ended = True

    async def _send_rest(self, data: memoryview) -> None:
        self.write_deadline = self._shared.now + self.limits.write_seconds
        try:
            while data:
                try:
                    await trio.lowlevel.wait_writable(self._descriptor)
                except trio.ClosedResourceError:
                    if self._shared.now >= self.write_deadline:
                        raise Expired from None
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    continue
        except trio.Cancelled:
            # A part of the response is out. The client would take later bytes for its rest.
            self.ended = True
            raise
        finally:
            self.write_deadline = inf

    async def interrupt_readers(self) -> None:
        """End the wait of a task of the application that still calls ``receive``.

        An application may wait for the client to leave in a task of its own while it responds.
        That task must not read the bytes of the next request.
        """
        self._interrupted = True
        while self.waiting:
            trio.lowlevel.notify_closing(self._descriptor)
            await trio.lowlevel.checkpoint()
        self._interrupted = False

    async def linger(self) -> None:
        """Half-close, and discard further bytes from the client, within time and size limits.

        Closing with unread bytes resets the connection, and the client might not see the response
        (RFC 9112, 9.6).
        """
        if self.ended or self.evicted:
            await trio.lowlevel.checkpoint()
            return
        self._socket.shutdown(socket.SHUT_WR)
        self.read_deadline = self._shared.now + self.limits.linger_seconds
        left = self.limits.linger_bytes
        try:
            while left > 0:
                # Only the size is kept, so that the wait for more bytes holds no memory.
                size = len(await self.read(idle=True))
                if not size:
                    return
                left -= size
        except Expired:
            await trio.lowlevel.checkpoint()
