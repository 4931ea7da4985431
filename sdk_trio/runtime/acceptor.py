"""Accepts plain connections for the fast path, sweeps those whose time is over, and ends them."""

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import trio

from ..logs import get_logger
from .answer_head import refusal
from .fast_path import Address, App, Connection
from .limits import Limits
from .tls_socket import TlsSocket

if TYPE_CHECKING:
    import ssl

    from .http2 import Http2Service

_log = get_logger("server")

#: What accept() says while descriptors or memory are short; trying again at once would spin.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}

#: How long nothing is accepted after that, in seconds.
_SHORTAGE_PAUSE = 0.1

#: Connections over the limit that are told so at one time; more are closed without a word.
REFUSALS = 100

BUSY = refusal(503, (b"retry-after", b"1"))


class Acceptor:
    """The connections of one server, and what they share.

    Args:
        app: the ASGI application.
        limits: bounds of the connections.
        hand_over: serves a connection of another protocol, from its first bytes to its end.
        certificate: returns what connections from now on speak TLS with, None for plain ones.
    """

    _http2: "Http2Service | None" = None

    def __init__(
        self,
        app: App,
        limits: Limits,
        hand_over: Callable[[socket.socket, bytes], Awaitable[None]],
        certificate: "Callable[[], ssl.SSLContext | None]" = lambda: None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.now = trio.current_time()
        self.draining = False
        self._hand_over = hand_over
        self._certificate = certificate
        self._connections: set[Connection] = set()
        self._refusals = 0
        self._full = False
        self._changed = trio.Event()
        self._sweeping = trio.CancelScope()

    async def hand_over(self, sock: socket.socket, received: bytes) -> None:
        """Let hypercorn serve the rest of a connection."""
        await self._hand_over(sock, received)

    async def serve_http2(self, connection: Connection) -> None:
        """Serve a connection of HTTP/2; what does that is loaded for the first one."""
        if self._http2 is None:
            from .http2 import Http2Service

            self._http2 = Http2Service(
                app=self.app, limits=self.limits, draining=lambda: self.draining
            )
        await self._http2.serve(connection)

    async def accept(  # noqa: ASYNC910 - it never returns
        self, listener: socket.socket, connections: trio.Nursery, refusals: trio.Nursery
    ) -> None:
        """Accept until cancelled; each connection is a task in the nursery ``connections``.

        Those that are refused are tasks in ``refusals``, so that they end with accepting.
        """
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener)
            except OSError as error:
                if error.errno in _SHORTAGES:
                    _log.error("server.accept_failed", error=str(error))
                    await trio.sleep(_SHORTAGE_PAUSE)
                else:  # that one connection has gone already
                    await trio.lowlevel.checkpoint()
            else:
                self._admit(sock, connections, refusals)
                await trio.lowlevel.checkpoint()

    def _admit(
        self, sock: socket.socket, connections: trio.Nursery, refusals: trio.Nursery
    ) -> None:
        sock.setblocking(False)
        full = len(self._connections) >= self.limits.connections
        if full and not self._full:
            _log.warning("server.connections_full", limit=self.limits.connections)
        self._full = full
        if not full:
            connections.start_soon(self._serve, sock)
        elif self._refusals < REFUSALS and self._certificate() is None:
            refusals.start_soon(self._refuse, sock)
        else:
            sock.close()

    async def _serve(  # noqa: ASYNC910 - a connection that fails at once is at its end
        self, sock: socket.socket
    ) -> None:
        """Serve one connection; whatever its client sends ends this connection at worst."""
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client, server = _address(sock.getpeername()), _address(sock.getsockname())
            context = self._certificate()
            stream = sock if context is None else TlsSocket(sock, context)
        except OSError:
            sock.close()  # it has gone before it was served
            return  # noqa: ASYNC910 - its task is at its end
        connection = Connection(self, stream, client, server)
        self._connections.add(connection)
        try:
            await connection.run()
        except* Exception as errors:
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
            _log.warning("server.connection_failed", error=reason)
        finally:
            self._connections.discard(connection)
            self._changed.set()

    async def _refuse(self, sock: socket.socket) -> None:
        """Tell a client that there is no room, and wait a moment for it to read that."""
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

    async def sweep(self) -> None:  # noqa: ASYNC910 - it returns when its scope is cancelled
        """Wake the connections whose time is over, until :meth:`drain` has ended."""
        with self._sweeping:
            while True:
                await trio.sleep(self.limits.sweep_seconds)
                self.now = trio.current_time()
                self._sweep_once()

    async def drain(self) -> None:
        """Begin no request any more; return when every connection has ended.

        Idle ones end now, others after their answer. Cancelled, it leaves that going on.
        """
        self.draining = True
        self._sweep_once()
        while self._connections:
            self._changed = trio.Event()
            await self._changed.wait()
        self._sweeping.cancel()
        await trio.lowlevel.checkpoint()

    def _sweep_once(self) -> None:
        for connection in tuple(self._connections):
            connection.sweep(self.now)


def _address(name: Sequence[object] | str | bytes) -> Address:
    """Return host and port, as the ASGI scope wants them; None for a Unix socket."""
    if isinstance(name, tuple):
        return (name[0], name[1])
    return None
