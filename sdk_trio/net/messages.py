"""One HTTP exchange: the parts of httpx's request, httpx's response with our body, and errors.

A connection of any HTTP version takes an ``httpx.Request`` and returns :class:`Received`; the
functions here read the parts of a request that all versions send. Connection errors are our own
classes, which distinguish what may be sent again; :func:`translated` converts them to httpx's at
the boundary.

::

    NetworkError ├── NothingSentError the server cannot have acted on the request │ ├──
    ConnectFailedError │ │ └── ConnectTimedOutError │ ├── PoolTimedOutError no connection became
    free in time │ ├── ClosedError the transport itself was closed │ └── NotProcessedError the
    server reported that (GOAWAY, REFUSED_STREAM), or never got it │ └── RenewedError its connection
    has served others and must be replaced ├── ReadFailedError │ ├── ReadTimedOutError │ └──
    StaleConnectionError a reused connection ended before any byte of the answer ├──
    WriteFailedError │ └── WriteTimedOutError ├── PeerProtocolError the server broke the protocol
    └── OurProtocolError the request cannot be sent unchanged
"""

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol, Self

import attrs
import httpx
import trio

from ..base.http import DEFAULT_PORTS

Headers = list[tuple[bytes, bytes]]

#: Seconds for a generator of chunks to clean up once it is no longer needed.
CLEANUP_SECONDS = 1.0


class Incident:
    """One failure of a dial or connection, shared by all requests that it carried.

    It is compared by identity, so that the breaker counts it once
    (docs/adr/0028-network-incidents.md).
    """

    __slots__ = ("__weakref__",)


class NetworkError(Exception):
    """Base of the errors of an exchange.

    ``incident`` is the failure of the whole connection or dial; None if only this exchange failed,
    as always on HTTP/1.1 with its one exchange at a time.
    """

    incident: Incident | None = None

    def again(self) -> Self:
        """Return an equal error for another exchange: each needs its own traceback."""
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
    """The program closed the transport; nothing more is sent."""


class NotProcessedError(NothingSentError):
    """The server promised not to have acted on the request, or never received it."""


class RenewedError(NotProcessedError):
    """The server ended a connection that had served other requests, as servers regularly do."""


class ReadFailedError(NetworkError):
    """The connection ended while the answer was awaited or read."""


class ReadTimedOutError(ReadFailedError):
    """No byte of the answer arrived within the limit."""


class StaleConnectionError(ReadFailedError):
    """A kept connection ended before any byte of the answer; probably closed while idle."""


class WriteFailedError(NetworkError):
    """The connection ended while the request was written."""


class WriteTimedOutError(WriteFailedError):
    """The server accepted no bytes within the limit."""


class PeerProtocolError(NetworkError):
    """The server broke the protocol."""


class OurProtocolError(NetworkError):
    """The request cannot be sent: a header contains a line break, the body's length differs, ..."""


class NotProcessed(httpx.ConnectError):
    """The server stated that it has not acted on the request; the request itself is valid."""


class TransportClosed(httpx.ConnectError):
    """The transport was closed while the request waited; nothing was sent."""


# Callers and their mocks know httpx's classes. Ours are more precise, and stay within the
# transport.
_HTTPX_ERRORS: dict[type[NetworkError], type[httpx.TransportError]] = {
    ConnectFailedError: httpx.ConnectError,
    ConnectTimedOutError: httpx.ConnectTimeout,
    PoolTimedOutError: httpx.PoolTimeout,
    NotProcessedError: NotProcessed,
    RenewedError: NotProcessed,
    ClosedError: TransportClosed,
    ReadFailedError: httpx.ReadError,
    ReadTimedOutError: httpx.ReadTimeout,
    StaleConnectionError: httpx.ReadError,
    WriteFailedError: httpx.WriteError,
    WriteTimedOutError: httpx.WriteTimeout,
    PeerProtocolError: httpx.RemoteProtocolError,
    OurProtocolError: httpx.LocalProtocolError,
}


def translated(error: NetworkError, request: httpx.Request) -> httpx.TransportError:
    """Return the equivalent httpx error."""
    return _HTTPX_ERRORS[type(error)](str(error), request=request)


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


#: Called for an abandoned request, with the incident that delayed it (or None) and whether the
#: server may have received the request.
Abandoned = Callable[[Incident | None, bool], None]


#: A request extension: a function called once per try, just before any of it can reach the server.
BEFORE_SEND = "sdk_trio.before_send"
#: A request extension: an :data:`Abandoned`, called if the request is cancelled while it waits for
#: a connection, or while its connection has been silent since it was sent.
ABANDONED = "sdk_trio.abandoned"

#: The zone of an IPv6 address in a Host header, up to the bracket.
_ZONE = re.compile(rb"%[^\]]*\]")


def origin_of(request: httpx.Request) -> Origin:
    """Return the origin that ``request`` is sent to.

    Raises:
        httpx.UnsupportedProtocol: its address is neither http nor https.
    """
    url = request.url
    scheme = url.scheme
    if scheme not in DEFAULT_PORTS:
        raise httpx.UnsupportedProtocol(
            f"the address {str(url.copy_with(query=None))!r} is neither http nor https",
            request=request,
        )
    # In a URL the % before an IPv6 zone is escaped (RFC 6874, 2); the resolver needs it plain.
    host = url.raw_host.decode("ascii").replace("%25", "%", 1)
    return Origin(scheme, host, DEFAULT_PORTS[scheme] if url.port is None else url.port)


def timeouts_of(request: httpx.Request) -> Timeouts:
    """Return the limits of ``request``, httpx's extension ``timeout``."""
    limits = request.extensions.get("timeout")
    if not limits:
        return NO_TIMEOUTS
    return Timeouts(
        connect=limits.get("connect"),
        read=limits.get("read"),
        write=limits.get("write"),
        pool=limits.get("pool"),
    )


def target_of(request: httpx.Request) -> bytes:
    """Return the target of the request line: path and query, or httpx's extension ``target``."""
    target: bytes = request.extensions.get("target") or request.url.raw_path
    return target


def headers_of(request: httpx.Request) -> Headers:
    """Return the headers of ``request`` in the form they are sent."""
    headers = request.headers.raw
    if b"%" not in request.url.raw_host:
        return headers
    # An IPv6 zone is meaningful on this machine only, so it is removed from Host (RFC 6874, 4; RFC
    # 4007, 11).
    return [(k, _ZONE.sub(b"]", v) if k.lower() == b"host" else v) for k, v in headers]


def body_of(request: httpx.Request) -> bytes | httpx.AsyncByteStream:
    """Return the body of ``request``: its bytes, or an asynchronous stream."""
    stream = request.stream
    if isinstance(stream, httpx.ByteStream):
        return request.read()
    assert isinstance(stream, httpx.AsyncByteStream)
    return stream


def is_replayable(request: httpx.Request) -> bool:
    """Return whether the body can be sent a second time."""
    # After a failed try, a caller's stream has been read at least in part.
    return isinstance(request.stream, httpx.ByteStream)


def note_departure(request: httpx.Request) -> None:
    """Call the request's ``BEFORE_SEND``, if it has one."""
    before_send = request.extensions.get(BEFORE_SEND)
    if before_send is not None:
        before_send()


class AnswerBody(httpx.AsyncByteStream, ABC):
    """The body of the answer to ``request``.

    It is its own iterator instead of a generator, which would have to be closed.
    """

    def __init__(self, request: httpx.Request) -> None:
        self._request = request

    @abstractmethod
    async def receive(self) -> bytes:
        """Return the next bytes, ``b""`` at the end; cancellation abandons the exchange."""

    @abstractmethod
    def abandon(self) -> None:
        """Abandon the rest without waiting; no effect once the body has ended."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await self.receive()
        except NetworkError as error:
            raise translated(error, self._request) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        """Abandon the unread rest."""
        self.abandon()


class Received(httpx.Response):
    """A response of our connections; it reads a body without content coding by itself.

    httpx passes each part through three generators, a decoder and two buffers, an eighth of the
    cost of a call. It still does everything else.
    """

    _received_bytes = 0

    def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """As in httpx: the body, decoded, in parts of ``chunk_size`` or as received."""
        if chunk_size is not None or self.is_stream_consumed or self.is_closed or _is_coded(self):
            return super().aiter_bytes(chunk_size)
        self.is_stream_consumed = True
        return _Parts(self)

    async def aclose(self) -> None:
        """End the exchange, at once and without waiting, unless its body was read to the end."""
        if not self.is_closed:
            self.is_closed = True
            assert isinstance(self.stream, httpx.AsyncByteStream)
            await self.stream.aclose()

    @property
    def num_bytes_downloaded(self) -> int:
        """The bytes of the body received so far, as sent."""
        return self._received_bytes or super().num_bytes_downloaded

    def note_part(self, part: bytes) -> None:
        """Count a part of the body that was read."""
        self._received_bytes += len(part)


def _is_coded(response: httpx.Response) -> bool:
    for name, _ in response.headers.raw:  # noqa: SIM110 - twice as fast as any(), on every answer
        if name.lower() == b"content-encoding":
            return True
    return False


class _Parts(AsyncIterator[bytes]):
    """The parts of a body as received; closes the response after the last one."""

    __slots__ = ("_parts", "_response")

    def __init__(self, response: Received) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._response = response
        self._parts = aiter(response.stream)

    def __aiter__(self) -> "AsyncIterator[bytes]":
        return self

    async def __anext__(self) -> bytes:
        try:
            part = await anext(self._parts)
        except StopAsyncIteration:
            await self._response.aclose()
            raise
        self._response.note_part(part)
        return part

    async def aclose(self) -> None:
        """Abandon the rest, as closing one of httpx's generators does."""
        close = getattr(self._parts, "aclose", None)
        if close is not None:  # httpx's client wraps the stream in a generator
            await close()
        await self._response.aclose()


class ClientConnection(Protocol):
    """The part of a connection that pool and transport use, in any version of HTTP."""

    async def exchange(self, request: httpx.Request) -> Received:
        """Send ``request`` on this connection, which was acquired for it; return the answer.

        Its body is not read yet.

        In every case, including cancellation, the connection returns to its pool or closes by
        itself: at the end of the body, or when the exchange fails or is abandoned.
        """


def content_length(headers: Headers) -> int | None:
    """Return the value of Content-Length, None if absent or not a number."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return None


@asynccontextmanager
async def chunks_of(
    stream: AsyncIterable[bytes], *, length: int | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Iterate over the non-empty chunks of ``stream``, and close it at the end.

    Args:
        stream: the body.
        length: the announced Content-Length in bytes; None if unknown.

    Raises:
        OurProtocolError: raised by the iteration, before a chunk that exceeds ``length`` or at a
            premature end. The server would read the surplus as the next request.
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
    # The server would wait for the rest until its own timeout.
    if length is not None and sent < length:
        raise OurProtocolError(f"the body has {sent} bytes, its Content-Length says {length}")
