"""The accepting side of the HTTP/1.1 server: connection limits, the deadline sweep, the drain.

One task for each listening socket accepts, one task for each connection serves it, and one sweeper
for all connections enforces their deadlines. A timeout scope for each wait would cost every request
more than the check of its signature does; the price of the sweep is that a deadline may be late by
one ``sweep_seconds``.
"""

import errno
import socket
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import TYPE_CHECKING, cast

import trio

from ..base.bell import Bell
from ..base.http import App, DirectApp
from ..base.logs import Throttle, get_logger
from .connection import Address, Http1ServerConnection
from .head import refusal
from .limits import Limits, NoteRefusal
from .tls import TlsSocket

if TYPE_CHECKING:
    import ssl

#: Maps a peer's host to the key that its connections are counted under (IPv6: the /64). None: they
#: are not counted, because the peer is a trusted proxy and everybody is behind it.
SourceOf = Callable[["str | None"], Hashable]

_log = get_logger("server")

#: The method of a :class:`DirectApp`, which a wrapper around one has not.
_DIRECT = "serve_direct"

#: Errors of accept() while descriptors or memory are short. The connection stays in the kernel's
#: queue, so the listener stays readable: trying again at once would spin.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}

#: Pause in accepting after such an error, in seconds.
_SHORTAGE_PAUSE = 0.1

#: Connections over a limit that get a 503 at the same time; further ones are closed unanswered.
#: Their descriptors are among those that ``listener.RESERVED_DESCRIPTORS`` keeps.
REFUSALS = 32

BUSY = refusal(503, (b"retry-after", b"1"))


class Places:
    """Counts of open connections, in all and of each source, and whether there is room for more.

    Without the count of each source, 470 idle connections of one address were enough to take all
    places.

    Args:
        limits: of these, ``connections`` and ``connections_per_source`` count.
        source_of: tells sources apart, and says which are not counted.
    """

    def __init__(self, limits: Limits, source_of: SourceOf) -> None:
        self._limits = limits
        self._source_of = source_of
        self._taken = 0
        self._by_source: Counter[Hashable] = Counter()
        self._throttle = Throttle(lines=1, seconds=10.0)

    @property
    def full(self) -> bool:
        """Whether the places of all sources together are taken."""
        return self._taken >= self._limits.connections

    def source_of(self, peer: Address) -> Hashable:
        """Return the key under which :meth:`take` and :meth:`leave` count a connection."""
        return self._source_of(peer[0] if peer else None)

    def has_room_for(self, source: Hashable) -> bool:
        """Whether a source may have one connection more."""
        return source is None or self._by_source[source] < self._limits.connections_per_source

    def take(self, source: Hashable) -> None:
        """Count one connection."""
        self._taken += 1
        if source is not None:
            self._by_source[source] += 1

    def leave(self, source: Hashable) -> None:
        """Stop counting one connection."""
        self._taken -= 1
        if source is not None:
            self._by_source[source] -= 1
            if not self._by_source[source]:
                del self._by_source[source]

    def note_refusal(self, peer: Address) -> None:
        """Log that a connection found no room, once in ten seconds at most for each limit."""
        event = "server.connections_full" if self.full else "server.source_full"
        limit = self._limits.connections if self.full else self._limits.connections_per_source
        suppressed = self._throttle.admit(event)
        if suppressed is not None:
            address = peer[0] if peer else None
            _log.warning(event, limit=limit, address=address, suppressed=suppressed)


class Acceptor:
    """The connections of one server, and the state that they share.

    Args:
        app: the ASGI application.
        limits: bounds of the connections.
        places: counts the connections.
        note_refusal: is told of every request that the server itself refuses.
        certificate: returns the TLS context for new connections; None for plain HTTP.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        places: Places,
        note_refusal: NoteRefusal,
        certificate: "Callable[[], ssl.SSLContext | None]" = lambda: None,
    ) -> None:
        self.app = app
        self.direct: DirectApp | None = cast("DirectApp", app) if hasattr(app, _DIRECT) else None
        self.limits = limits
        self.note_refusal = note_refusal
        self.now: float = trio.current_time()
        self.draining: bool = False
        self._places = places
        self._certificate = certificate
        #: A dict for its order: connections in the order in which they were accepted.
        self._connections: dict[Http1ServerConnection, None] = {}
        #: Connections that idled at the time ``_idle_as_of``, the longest first.
        self._idle: deque[Http1ServerConnection] = deque()
        self._idle_as_of = -inf
        self._refusals = 0
        self._changed = Bell()
        self._sweeping = trio.CancelScope()

    async def accept(
        self, listener: socket.socket, connections: trio.Nursery, refusals: trio.Nursery
    ) -> None:
        """Accept until cancelled; each connection is a task in the nursery ``connections``.

        Refused connections are tasks in ``refusals``, so that they end when accepting ends and do
        not lengthen the drain.
        """
        while True:
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener)
            except OSError as error:
                if error.errno in _SHORTAGES:
                    _log.error("server.accept_failed", error=str(error))
                    await trio.sleep(_SHORTAGE_PAUSE)
                else:  # this one client left before it was accepted (ECONNABORTED)
                    await trio.lowlevel.checkpoint()
            else:
                self._admit(sock, _address(peer), connections, refusals)
                # accept() succeeds without waiting while a burst lasts: the connections that were
                # admitted before get their turn here.
                await trio.lowlevel.checkpoint()

    def _admit(
        self,
        sock: socket.socket,
        peer: Address,
        connections: trio.Nursery,
        refusals: trio.Nursery,
    ) -> None:
        sock.setblocking(False)
        places = self._places
        source = places.source_of(peer)
        if places.has_room_for(source) and (not places.full or self._make_room()):
            places.take(source)
            connections.start_soon(self._serve, sock, source)
            return
        places.note_refusal(peer)
        # Over TLS the answer would need a handshake first, which costs more than a request.
        if self._refusals < REFUSALS and self._certificate() is None:
            refusals.start_soon(self._refuse, sock)
        else:
            sock.close()

    def _make_room(self) -> bool:
        """End the connection that has idled the longest; return False if none is idle.

        A sender whose kept connection ends opens another one, so it loses nothing. The list of idle
        connections is made once in a sweep at most: otherwise each connection of a flood would cost
        a walk over all of them.
        """
        if not self._idle and self._idle_as_of < self.now:
            self._idle_as_of = self.now
            idle = [(since, c) for c in self._connections if (since := c.idle_since) is not None]
            self._idle.extend(c for _, c in sorted(idle, key=lambda pair: pair[0]))
        while self._idle:
            connection = self._idle.popleft()
            if connection.idle_since is not None and not connection.ended:
                connection.stop_reading()
                return True
        return False

    async def _serve(self, sock: socket.socket, source: Hashable) -> None:
        """Serve one connection; whatever its client sends ends this connection at worst."""
        connection = None
        try:
            connection = self._connect(sock)
            if connection is not None:
                await connection.run()
        except* Exception as errors:  # other connections go on
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
            _log.warning("server.connection_failed", error=reason)
        finally:
            self._places.leave(source)
            if connection is not None:
                del self._connections[connection]
                self._changed.ring()

    def _connect(self, sock: socket.socket) -> Http1ServerConnection | None:
        """Return the connection on a socket; None if the client left before it was served."""
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client, server = _address(sock.getpeername()), _address(sock.getsockname())
            context = self._certificate()
            stream = sock if context is None else TlsSocket(sock, context)
        except OSError:
            sock.close()
            return None
        connection = Http1ServerConnection(self, stream, client, server)
        self._connections[connection] = None
        return connection

    async def _refuse(self, sock: socket.socket) -> None:
        """Answer 503 and wait a moment for the client to read it.

        Closing a socket that holds unread bytes resets the connection, and the client might never
        see the answer; so its request is read and thrown away.
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

        Idle connections end now, others after their answer. If it is cancelled, they still end
        that way, but nobody waits for them.
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


def _address(name: Sequence[object] | str | bytes) -> Address:
    """Return host and port in the form of the ASGI scope; None for a Unix socket."""
    if isinstance(name, tuple):
        return (name[0], name[1])
    return None
