"""One HTTP exchange as the connections of this package see it: records and what can go wrong.

The connection files know nothing of httpx; ``transport.py`` translates in both directions, once.

::

    NetworkError
    ├── NothingSentError            the server cannot have acted on the request
    │   ├── ConnectFailedError
    │   │   └── ConnectTimedOutError
    │   ├── PoolTimedOutError       no connection became free in time
    │   └── NotProcessedError       the server said so (GOAWAY, REFUSED_STREAM), or never got it
    ├── ReadFailedError
    │   ├── ReadTimedOutError
    │   └── StaleConnectionError    a reused connection ended before any byte of the answer
    ├── WriteFailedError
    │   └── WriteTimedOutError
    ├── PeerProtocolError           the server broke the protocol
    └── OurProtocolError            the request cannot be sent as it is
"""

from collections.abc import AsyncIterable, Callable
from typing import NamedTuple, Protocol

import attrs

Headers = list[tuple[bytes, bytes]]


class NetworkError(Exception):
    """Base of what can go wrong with an exchange."""


class NothingSentError(NetworkError):
    """The server cannot have acted on the request: any method may be sent again."""


class ConnectFailedError(NothingSentError):
    """No connection could be made: name, address, port, TLS."""


class ConnectTimedOutError(ConnectFailedError):
    """Connecting took longer than allowed."""


class PoolTimedOutError(NothingSentError):
    """No connection became free in time."""


class NotProcessedError(NothingSentError):
    """The server promised not to have acted on the request, or never received it."""


class ReadFailedError(NetworkError):
    """The connection ended while the answer was awaited or read."""


class ReadTimedOutError(ReadFailedError):
    """No byte of the answer arrived for longer than allowed."""


class StaleConnectionError(ReadFailedError):
    """A kept connection ended before any byte of the answer: probably closed before we wrote."""


class WriteFailedError(NetworkError):
    """The connection ended while the request was written."""


class WriteTimedOutError(WriteFailedError):
    """The server took no bytes for longer than allowed."""


class PeerProtocolError(NetworkError):
    """The server broke the protocol."""


class OurProtocolError(NetworkError):
    """The request cannot be sent as it is: a header with a line break, a body of another length."""


@attrs.frozen
class Timeouts:
    """Limits in seconds, each None for no limit: of connecting, one read, one write, the queue."""

    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None


NO_TIMEOUTS = Timeouts()


class Origin(NamedTuple):
    """Where requests go: ``http`` or ``https``, a host name or address, a port."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@attrs.frozen
class Outgoing:
    """A request. ``body`` holds it whole; a streamed one is in ``stream`` instead."""

    method: bytes
    origin: Origin
    target: bytes
    headers: Headers
    body: bytes
    stream: AsyncIterable[bytes] | None
    timeouts: Timeouts
    #: Called once per try, just before anything of the request can reach the server.
    before_send: Callable[[], None] | None = None

    @property
    def is_replayable(self) -> bool:
        """Whether the body can be sent a second time."""
        return self.stream is None


class BodyReader(Protocol):
    """The body of one answer."""

    async def receive(self) -> bytes:
        """Return the next bytes, ``b""`` at the end; cancelling abandons the exchange."""

    def abandon(self) -> None:
        """Give the rest up, at once and without waiting; no effect once the body has ended."""


@attrs.frozen
class Answer:
    """The head of an answer, and the reader of its body."""

    status: int
    reason: bytes
    headers: Headers
    version: bytes
    body: BodyReader


class Connection(Protocol):
    """What the pool and the transport need of a connection, of whichever version of HTTP."""

    async def exchange(self, request: Outgoing) -> Answer:
        """Send ``request`` on this connection, which was acquired for it; return the answer.

        Whatever happens, cancellation included, the connection goes back to its pool or ends
        by itself: at the end of the body, or when the exchange fails or is abandoned.
        """
