"""HTTP/3 connections by origin: tried briefly; failures are remembered.

UDP is often blocked, and a blocked port is silent. So the wait for a first connection is short, and
after a failure the origin is reached over TCP for a while.
"""

import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ..base import opener
from ..base.logs import get_logger
from ..config.options.client import ConnectionOptions
from ..errors import OptionsValidationError, Problem
from .messages import Origin
from .pool import reaper_pause

if TYPE_CHECKING:
    from .http3 import Http3Connection

#: Seconds that a request waits for HTTP/3 before it uses TCP. A handshake takes one round trip, so
#: a reachable server answers well within this.
ATTEMPT_SECONDS = 1.0
#: Seconds for which a failed origin is reached over TCP only.
FAILURE_SECONDS = 600.0

#: The requested size of the kernel's buffers per connection, in bytes, so that bursts are not lost;
#: the kernel may grant less.
SOCKET_BUFFER_BYTES = 2 * 1024 * 1024

_log = get_logger("client")


def require_http3() -> None:
    """Import the modules of HTTP/3.

    Raises:
        OptionsValidationError: the extra ``http3`` is not installed.
    """
    try:
        from . import http3  # noqa: F401 - optional, and slow to import
    except ModuleNotFoundError as error:
        problem = Problem(
            "Sdk:Connection:EnableHttp3",
            f"needs the module {error.name}: pip install 'sdk-trio[http3]', or set it to false",
        )
        raise OptionsValidationError([problem]) from error


class _Attempt:
    """A connection attempt shared by all requests that wait for it; None if it fails."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.connection: Http3Connection | None = None


class Http3Origins:
    """At most one connection per origin, and the times of failed attempts.

    Args:
        limits: the settings of connections; only lifetime and idle timeout apply here.
        tls: called for the TLS context.
        nursery: runs the connections.

    """

    def __init__(
        self,
        limits: ConnectionOptions,
        *,
        tls: Callable[[], ssl.SSLContext],
        nursery: trio.Nursery,
    ) -> None:
        self._limits = limits
        self._tls = tls
        self._nursery = nursery
        self._connections: dict[Origin, Http3Connection] = {}
        self._attempts: dict[Origin, _Attempt] = {}
        self._failed_at: dict[Origin, float] = {}

    def has_failed(self, origin: Origin) -> bool:
        """Return whether ``origin`` is currently reached over TCP only."""
        failed_at = self._failed_at.get(origin)
        return failed_at is not None and trio.current_time() - failed_at < FAILURE_SECONDS

    async def acquire(self, origin: Origin) -> "Http3Connection | None":
        """Return a connection for one exchange, or None to use TCP.

        Waits at most ``ATTEMPT_SECONDS``. If it returns None, nothing was sent.
        """
        if origin.scheme != "https" or self.has_failed(origin):
            return None
        connection = self._usable(origin)
        while connection is None:
            attempt = self._attempts.get(origin)
            if attempt is None:
                attempt = self._attempts[origin] = _Attempt()
                self._nursery.start_soon(self._attempt, origin, attempt)
            await attempt.ended.wait()
            if attempt.connection is None:
                return None
            # A new connection serves the requests that waited for it, even if a short lifetime
            # setting has already passed; otherwise they would wait again, without end.
            if not attempt.connection.is_draining and not attempt.connection.is_closed:
                connection = attempt.connection
        connection.in_use += 1
        return connection

    def close(self) -> None:
        """Close every connection at once."""
        for connection in list(self._connections.values()):
            connection.close()

    async def reap(self) -> None:
        """Close idle and old connections; runs until cancelled."""
        while True:
            unused = [
                (it.idle_since, it.created) for it in self._connections.values() if not it.in_use
            ]
            await trio.sleep(reaper_pause(self._limits, unused, trio.current_time()))
            now = trio.current_time()
            idle = 60 * self._limits.pooled_connection_idle_timeout_minutes
            for origin, connection in list(self._connections.items()):
                self._usable(origin)
                if not connection.in_use and now - connection.idle_since >= idle:
                    connection.close()

    def _usable(self, origin: Origin) -> "Http3Connection | None":
        connection = self._connections.get(origin)
        if connection is None:
            return None
        age = trio.current_time() - connection.created
        if age >= 60 * self._limits.pooled_connection_lifetime_minutes:
            connection.is_draining = True
        if connection.is_draining:
            del self._connections[origin]
            if not connection.in_use:
                connection.close()
            return None
        return connection

    async def _attempt(self, origin: Origin, attempt: "_Attempt") -> None:
        try:
            with trio.move_on_after(ATTEMPT_SECONDS):
                await self._connect(origin)
        except Exception as error:  # TCP remains, whatever the error
            _log.debug("client.http3_failed", origin=str(origin), error=str(error))
        finally:
            # Also remembered if the attempt timed out: a blocked UDP port is silent.
            if origin not in self._connections:
                self._failed_at[origin] = trio.current_time()
                _log.info("client.http3_left", origin=str(origin), seconds=FAILURE_SECONDS)
            else:
                self._failed_at.pop(origin, None)
            attempt.connection = self._connections.get(origin)
            del self._attempts[origin]
            attempt.ended.set()

    async def _connect(self, origin: Origin) -> None:
        from .http3 import Http3Connection

        sock = await open_udp(origin.host, origin.port)

        def ended(connection: Http3Connection) -> None:
            if self._connections.get(origin) is connection:
                del self._connections[origin]

        connection = Http3Connection(
            sock,
            host=origin.host,
            context=self._tls(),
            idle_seconds=60 * self._limits.pooled_connection_idle_timeout_minutes,
            ended=ended,
        )
        await self._nursery.start(connection.run)
        if not connection.is_closed:
            self._connections[origin] = connection


async def open_udp(host: str, port: int) -> socket.socket:
    """Return a non-blocking UDP socket connected to ``host``; raises ``OSError``."""
    addresses = await opener.resolve(host, port, kind=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    sock = opener.open_socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
