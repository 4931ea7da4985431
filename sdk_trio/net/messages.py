"""One HTTP exchange as the connections of this package see it: records, bodies and errors.

The connection files know nothing of httpx; ``transport.py`` translates in both directions, once.

::

    NetworkError
    ├── NothingSentError            the server cannot have acted on the request
    │   ├── ConnectFailedError
    │   │   └── ConnectTimedOutError
    │   ├── PoolTimedOutError       no connection became free in time
    │   ├── ClosedError             the transport itself was closed
    │   └── NotProcessedError       the server said so (GOAWAY, REFUSED_STREAM), or never got it
    │       └── RenewedError        its connection has served others and is to be replaced
    ├── ReadFailedError
    │   ├── ReadTimedOutError
    │   └── StaleConnectionError    a reused connection ended before any byte of the answer
    ├── WriteFailedError
    │   └── WriteTimedOutError
    ├── PeerProtocolError           the server broke the protocol
    └── OurProtocolError            the request cannot be sent as it is
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol, Self

import attrs
import trio

Headers = list[tuple[bytes, bytes]]

#: How long a generator of chunks may take to clean up, in seconds, once it is not needed any more.
CLEANUP_SECONDS = 1.0


class Incident:
    """One failure of a dial or a connection, shared by all the requests that it carried.

    It is known by its identity alone, so that the breaker counts it once
    (docs/adr/0028-one-event-one-failure.md).
    """

    __slots__ = ("__weakref__",)


class NetworkError(Exception):
    """Base of the errors of an exchange.

    ``incident`` is the failure of the whole connection or the dial; None when only this exchange
    failed, as always on HTTP/1.1, where a connection carries one exchange at a time.
    """

    incident: Incident | None = None

    def again(self) -> Self:
        """Return an equal error for another exchange: each raises its own traceback."""
        other = type(self)(*self.args)
        other.incident = self.incident
        other.__cause__ = self.__cause__
        return other


class NothingSentError(NetworkError):
    """The server cannot have acted on the request: any method may be sent again."""


class ConnectFailedError(NothingSentError):
    """No connection could be made: name, address, port, TLS."""


class ConnectTimedOutError(ConnectFailedError):
    """Connecting took longer than allowed."""


class PoolTimedOutError(NothingSentError):
    """No connection became free in time."""


class ClosedError(NothingSentError):
    """The program has closed the transport; nothing will be sent any more."""


class NotProcessedError(NothingSentError):
    """The server promised not to have acted on the request, or never received it."""


class RenewedError(NotProcessedError):
    """The server ended a connection that has served other requests, as servers do regularly."""


class ReadFailedError(NetworkError):
    """The connection ended while the answer was awaited or read."""


class ReadTimedOutError(ReadFailedError):
    """No byte of the answer arrived for longer than allowed."""


class StaleConnectionError(ReadFailedError):
    """A kept connection ended before any byte of the answer; the server had probably closed it."""


class WriteFailedError(NetworkError):
    """The connection ended while the request was written."""


class WriteTimedOutError(WriteFailedError):
    """The server took no bytes for longer than allowed."""


class PeerProtocolError(NetworkError):
    """The server broke the protocol."""


class OurProtocolError(NetworkError):
    """The request cannot be sent: a header holds a line break, the body has another length, ..."""


@attrs.frozen
class Timeouts:
    """Limits in seconds, each None for no limit: of connecting, one read, one write, the queue."""

    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None


NO_TIMEOUTS = Timeouts()


class Origin(NamedTuple):
    """The destination of requests: ``http`` or ``https``, a host name or address, a port."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


#: The function that is called for a request that is given up, with the incident that kept it
#: waiting (None when there was none) and whether the server may have received the request.
Abandoned = Callable[[Incident | None, bool], None]


@attrs.frozen
class Outgoing:
    """A request. ``body`` holds it whole; a streamed one is in ``stream`` instead."""

    method: bytes
    origin: Origin
    # Kept out of the repr, because reports of a failure show variables, and the headers hold the
    # token.
    target: bytes = attrs.field(repr=False)
    headers: Headers = attrs.field(repr=False)
    body: bytes = attrs.field(repr=False)
    stream: AsyncIterable[bytes] | None
    timeouts: Timeouts
    #: Called once per try, just before anything of the request can reach the server.
    before_send: Callable[[], None] | None = None
    #: Called when the request is cancelled while it waits for a connection, or on a silent one.
    abandoned: Abandoned | None = None

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
class NetworkAnswer:
    """The head of an answer, and the reader of its body."""

    status: int
    reason: bytes
    headers: Headers
    version: bytes
    body: BodyReader


class ClientConnection(Protocol):
    """The part of a connection that pool and transport use, in any version of HTTP."""

    async def exchange(self, request: Outgoing) -> NetworkAnswer:
        """Send ``request`` on this connection, which was acquired for it; return the answer.

        In every case, cancellation included, the connection goes back to its pool or ends by
        itself: at the end of the body, or when the exchange fails or is abandoned.
        """


def content_length(headers: Headers) -> int | None:
    """Return the value of Content-Length, None when there is none (or no number)."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return None


@asynccontextmanager
async def chunks_of(
    stream: AsyncIterable[bytes], *, length: int | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Iterate over the chunks of ``stream`` that are not empty, and close it in the end.

    Args:
        stream: the body.
        length: what Content-Length announced, in bytes; None when the length is open.

    Raises:
        OurProtocolError: from the iteration, before the chunk that exceeds ``length`` or at an
            end that comes too early. The server would read the surplus as the next request.
    """
    source = aiter(stream)
    counted = _counted(source, length)
    try:
        yield counted
    finally:
        with trio.move_on_after(CLEANUP_SECONDS, shield=True):
            await counted.aclose()
            if isinstance(source, AsyncGenerator):
                await source.aclose()


async def _counted(source: AsyncIterator[bytes], length: int | None) -> AsyncGenerator[bytes, None]:  # noqa: ASYNC900 - no scope is open across the yield
    sent = 0
    async for chunk in source:
        sent += len(chunk)
        if length is not None and sent > length:
            raise OurProtocolError(f"the body is longer than its Content-Length of {length}")
        if chunk:
            yield chunk
    if length is not None and sent < length:
        raise OurProtocolError(f"the body has {sent} bytes, its Content-Length says {length}")
