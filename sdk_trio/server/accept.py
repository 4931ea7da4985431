"""The accepting side of the HTTP/1.1 server: connection limits, the deadline sweep, the drain.

One task for each listening socket accepts, one task for each connection serves it, and one sweeper
task enforces the deadlines of all connections. A timeout scope for each wait would cost every
request more than the check of its signature. In return, a deadline may be late by up to
``sweep_seconds``.
"""

import errno
import socket
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, cast

import trio

from ..base.bell import Bell
from ..base.cells import Cells
from ..base.http import App, DirectApp
from ..base.logs import get_logger
from .connection import Http1ServerConnection
from .head import HeadTemplate, refusal
from .limits import Limits, NoteRefusal
from .slots import Address, ConnectionSlots, address_of
from .tls import TlsSocket

if TYPE_CHECKING:
    import ssl

_log = get_logger("server")

#: The method of a :class:`DirectApp`. A wrapper around such an application does not have it.
_DIRECT = "respond"

#: Errors of accept() while descriptors or memory are short. The connection stays in the kernel's
#: queue and the listener stays readable, so trying again at once would spin.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}

#: Pause in accepting after such an error, in seconds.
_SHORTAGE_PAUSE = 0.1

BUSY = refusal(503)


class Acceptor:
    """The connections of one server, and the state that they share.

    Args:
        app: the ASGI application.
        limits: the limits of each connection.
        slots: the connection slots.
        note_refusal: called for every request that the server itself refuses.
        certificate: returns the TLS context for new connections; None for plain HTTP.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        slots: ConnectionSlots,
        note_refusal: NoteRefusal,
        certificate: "Callable[[], ssl.SSLContext | None]" = lambda: None,
    ) -> None:
        self.app = app
        self.direct: DirectApp | None = cast("DirectApp", app) if hasattr(app, _DIRECT) else None
        self.limits = limits
        self.note_refusal = note_refusal
        self.now: float = trio.current_time()
        self.draining: bool = False
        self.template: HeadTemplate | None = None
        self._slots = slots
        self._certificate = certificate
        #: A dict for its order: connections in the order in which they were accepted.
        self._connections: dict[Http1ServerConnection, None] = {}
        self._refusals = 0
        self._changed = Bell()
        self._sweeping = trio.CancelScope()

    async def accept(
        self, listener: socket.socket, connections: Cells, refusals: trio.Nursery
    ) -> None:
        """Accept until cancelled; each connection is a task in ``connections``.

        Refused connections are tasks in ``refusals``, so that they end when accepting ends and do
        not lengthen the drain.
        """
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            # Accepted sockets inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            # Accept one connection per wait, so that the open connections can run in between.
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                continue  # another process has accepted it
            except OSError as error:
                # With any other error the client left before it was accepted (ECONNABORTED).
                if error.errno in _SHORTAGES:
                    _log.error("server.accept_failed", error=str(error))
                    await trio.sleep(_SHORTAGE_PAUSE)
            else:
                self._admit(sock, address_of(peer), connections, refusals)

    def _admit(
        self,
        sock: socket.socket,
        peer: Address,
        connections: Cells,
        refusals: trio.Nursery,
    ) -> None:
        sock.setblocking(False)
        source = self._slots.source_of(peer)
        if self._slots.reserve(source, peer, self.now):
            connections.start_soon(self._serve, sock, peer, source)
        # Over TLS a response would need a handshake first, which costs more than a request.
        elif self._refusals < self.limits.refusals and self._certificate() is None:
            refusals.start_soon(self._refuse, sock)
        else:
            sock.close()

    async def _serve(self, sock: socket.socket, peer: Address, source: Hashable) -> None:
        """Serve one connection; its errors end no other connection."""
        connection = None
        try:
            connection = self._connect(sock, peer)
            if connection is not None:
                self._slots.register(connection, source)
                await connection.run()
        except* Exception as errors:  # other connections continue
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
            _log.warning("server.connection_failed", error=reason)
        finally:
            self._slots.free(connection, source)
            if connection is not None:
                del self._connections[connection]
                self._changed.ring()

    def _connect(self, sock: socket.socket, peer: Address) -> Http1ServerConnection | None:
        """Return the connection on a socket; None if the client left before it was served."""
        try:
            context = self._certificate()
            stream = sock if context is None else TlsSocket(sock, context)
        except OSError:
            sock.close()
            return None
        connection = Http1ServerConnection(self, stream, peer)
        self._connections[connection] = None
        return connection

    async def _refuse(self, sock: socket.socket) -> None:
        """Answer 503, and wait a moment for the client to read it.

        Closing a socket with unread bytes resets the connection, and the client might never see the
        response. So its request is read and discarded.
        """
        self._refusals += 1
        try:
            sock.send(BUSY)
            sock.shutdown(socket.SHUT_WR)
            with trio.move_on_after(self.limits.linger_seconds):
                while True:
                    await trio.lowlevel.wait_readable(sock)
                    if not sock.recv(self.limits.read_bytes):
                        break
        except OSError:
            await trio.lowlevel.checkpoint()
        finally:
            self._refusals -= 1
            sock.close()

    async def sweep(self) -> None:
        """Enforce the deadlines of all connections, until :meth:`drain` has ended."""
        with self._sweeping:
            while True:
                await trio.sleep(self.limits.sweep_seconds)
                self.now = trio.current_time()
                self._sweep_once()

    async def drain(self) -> None:
        """Begin no further request; return when every connection has ended.

        Idle connections end now, others after their current response. Cancellation ends only the
        wait for them.
        """
        self.draining = True
        self._sweep_once()
        while self._connections:
            await self._changed.wait()
        self._sweeping.cancel()
        await trio.lowlevel.checkpoint()

    def _sweep_once(self) -> None:
        for connection in tuple(self._connections):
            connection.sweep(self.now)
