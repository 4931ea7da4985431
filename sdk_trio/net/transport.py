"""The client's connections as an httpx transport: the only place that knows both sides.

Requests and answers are httpx's, the connections underneath are this package's own; errors are
translated here, once. httpcore's pool is not used, because a cancelled request loses its slot there
(encode/httpcore#1093), and hedges and timeouts cancel all the time
(docs/adr/0007-own-pool.md). The errors tell a retry layer what may be repeated:

- ``httpx.ConnectError``, ``ConnectTimeout`` and ``PoolTimeout`` mean that the server cannot have
  acted on the request, whatever its method;
- every other ``httpx.TransportError`` means that it may have;
- a kept connection that ends before any byte of the answer is tried once more on another, when
  the method is idempotent and the body can be sent again.
"""

import re
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

import httpx
import trio

from ..base.http_grammar import DEFAULT_PORTS, IDEMPOTENT_METHODS
from ..errors import NotRunningError, OptionsValidationError, Problem
from .http3_origins import Http3Origins, require_http3
from .messages import (
    NO_TIMEOUTS,
    BodyReader,
    ClientConnection,
    ClosedError,
    ConnectFailedError,
    ConnectTimedOutError,
    NetworkAnswer,
    NetworkError,
    NotProcessedError,
    Origin,
    OurProtocolError,
    Outgoing,
    PeerProtocolError,
    PoolTimedOutError,
    ReadFailedError,
    ReadTimedOutError,
    RenewedError,
    StaleConnectionError,
    Timeouts,
    WriteFailedError,
    WriteTimedOutError,
)
from .origin import ConnectionLimits, PoolStatistics
from .pool import ConnectionPool
from .proxy import ProxySettings, proxy_of
from .socket import Dial

#: How often one request may be sent away unprocessed by a connection that served nobody.
NOT_PROCESSED_TRIES = 3

#: The extension of a request: a function that is called before the request leaves.
BEFORE_SEND = "sdk_trio.before_send"
#: The extension of a request: a function that is called when the request is cancelled before it
#: left, or while its connection has been silent since it left.
ABANDONED = "sdk_trio.abandoned"


class NotProcessed(httpx.ConnectError):
    """The server said that it has not acted on the request; the request itself is valid."""


class TransportClosed(httpx.ConnectError):
    """The transport was closed while the request waited; nothing was sent."""


#: The zone of an IPv6 address in a Host header, up to the bracket.
_ZONE = re.compile(rb"%[^\]]*\]")
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


def require_trio() -> None:
    """Check that this runs under Trio.

    Raises:
        NotRunningError: it runs under asyncio, or in no loop at all.
    """
    if not trio.lowlevel.in_trio_run():
        raise NotRunningError(
            "sdk_trio runs under Trio: start the program with trio.run(main), not asyncio.run; a "
            "web application under asyncio calls the client from a thread that runs Trio"
        )


class ConnectionSettings(ConnectionLimits, ProxySettings, Protocol):
    """``Sdk:ClientConnection``."""

    @property
    def enable_http3(self) -> bool:
        """Say whether HTTP/3 is tried first."""

    @property
    def ca_file(self) -> str | None:
        """PEM file with the authorities to trust; None: httpx's."""

    @property
    def client_cert_file(self) -> str | None:
        """PEM file with the client's certificate; None: it has none."""

    @property
    def client_key_file(self) -> str | None:
        """PEM file with its key."""


class Transport(httpx.AsyncBaseTransport):
    """Sends httpx requests over connections that it keeps, bounds and renews.

    An async context manager; requests are possible inside it only. An ``httpx.AsyncClient``
    enters its transport by itself; entering again inside is allowed and has no effect.
    Cancelling a request never waits: its HTTP/1.1 connection is closed, its HTTP/2 or HTTP/3
    stream reset.

    Args:
        connection: the settings of ``Sdk:ClientConnection``; they are read on each use, so an
        object that
            changes has effect without a new transport.
        http3: overrides ``connection.enable_http3``.
        verify: the context of TLS connections, in place of the files that ``connection`` names;
            its ALPN protocols are set by the transport.
        dial: makes the TCP connections of HTTP/1.1 and HTTP/2, in place of Trio's function and of
            the proxy that ``connection`` names: ``await dial(host, port)``.

    Raises:
        OptionsValidationError: a file or variable that ``connection`` names cannot be used, or
            HTTP/3 is asked for and its extra is not installed.
    """

    #: Says that the extensions ``BEFORE_SEND`` and ``ABANDONED`` are called.
    tells_before_send = True

    def __init__(
        self,
        connection: ConnectionSettings,
        *,
        http3: bool | None = None,
        verify: ssl.SSLContext | None = None,
        dial: Dial | None = None,
    ) -> None:
        self._settings = connection
        self._use_http3 = connection.enable_http3 if http3 is None else http3
        if self._use_http3:
            require_http3()
        if verify is None and (connection.ca_file or connection.client_cert_file):
            verify = tls_context(connection)  # now, so that the start says what is wrong
        self._context = verify
        if dial is None and (proxy := proxy_of(connection)) is not None:
            dial = proxy.dial
        self._dial = dial
        self._entered = 0
        self._was_closed = False
        self._pool: ConnectionPool | None = None
        self._http3: Http3Origins | None = None

    async def __aenter__(self) -> "Transport":
        require_trio()
        self._entered += 1
        if self._entered > 1:
            await trio.lowlevel.checkpoint()
            return self
        manager = trio.open_nursery()
        nursery = await manager.__aenter__()
        self._manager, self._nursery = manager, nursery
        self._pool = ConnectionPool(self._settings, tls=self._tls, nursery=nursery, dial=self._dial)
        nursery.start_soon(self._pool.reap)
        if self._use_http3:
            self._http3 = Http3Origins(self._settings, tls=self._tls, nursery=nursery)
            nursery.start_soon(self._http3.reap)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._entered -= 1
        if self._entered:
            await trio.lowlevel.checkpoint()  # noqa: ASYNC102 - the nursery is cancelled already
            return
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        # A call after the end gets an error of its own, not the hint to open a transport that was
        # open.
        self._was_closed = True
        if self._http3 is not None:
            self._http3.close()
        self._nursery.cancel_scope.cancel()
        # The exception is not passed to the nursery: it must leave as it is, not in a group of one.
        try:
            await self._manager.__aexit__(None, None, None)  # noqa: ASYNC102 - the nursery is cancelled already
        except BaseExceptionGroup as group:
            if group.split(trio.Cancelled)[1] is not None:
                raise  # a task of the transport failed, which caused the exception inside
            # A cancellation from outside leaves as itself too, here or at the next checkpoint.
            if exc_value is None:
                await trio.lowlevel.checkpoint()  # noqa: ASYNC102 - raises at once

    async def aclose(self) -> None:
        """Close every connection now; requests under way fail. The context may stay open."""
        if self._pool is not None:
            self._pool.close()
        await trio.lowlevel.checkpoint()

    @property
    def statistics(self) -> PoolStatistics:
        """Return the numbers of connections, dials and waiting requests, for metrics and tests."""
        if self._pool is None:
            return PoolStatistics(0, 0, 0, 0, 0)
        return self._pool.statistics()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and return the response, its body not read yet.

        The response must be read to its end or closed, as with any httpx transport. Honours
        httpx's ``timeout`` and ``target`` extensions, and ``sdk_trio.before_send``: a function
        without arguments that is called before anything of the request can reach the server, so
        that a request given up earlier is known not to have been executed.

        Raises:
            httpx.TransportError: see the module; the classes say whether anything was sent.
            RuntimeError: the transport was never opened.
        """
        pool = self._pool
        if pool is None:
            await trio.lowlevel.checkpoint()
            if self._was_closed:
                raise TransportClosed("the client was closed", request=request)
            raise RuntimeError("the transport is not open: use it as 'async with Transport(...)'")
        try:
            outgoing = _outgoing(request)
            answer = await self._exchange(pool, outgoing)
        except NetworkError as error:
            raise _translate(error, request) from error
        extensions: dict[str, object] = {"http_version": answer.version}
        if answer.version.startswith(b"HTTP/1"):
            extensions["reason_phrase"] = answer.reason
        return Received(
            answer.status,
            headers=answer.headers,
            stream=_ResponseStream(answer.body, request),
            extensions=extensions,
            request=request,
        )

    async def _exchange(self, pool: ConnectionPool, request: Outgoing) -> NetworkAnswer:
        tries = 0
        was_stale = False
        while True:
            connection: ClientConnection | None = None
            if self._http3 is not None:
                connection = await self._http3.acquire(request.origin)
            if connection is None:
                # After a first try that may have been executed, a second one that never left proves
                # nothing, so the caller is not told that the request was not sent.
                abandoned = None if was_stale else request.abandoned
                connection = await pool.acquire(request.origin, request.timeouts, abandoned)
            try:
                return await connection.exchange(request)
            # Neither of these two was processed, so any method may be sent again, without the retry
            # layer, its waits and its budget.
            except RenewedError:
                if not request.is_replayable:
                    raise
            except NotProcessedError:
                tries += 1
                if not request.is_replayable or tries >= NOT_PROCESSED_TRIES:
                    raise
            except StaleConnectionError:
                repeatable = request.method.decode() in IDEMPOTENT_METHODS
                if was_stale or not repeatable or not request.is_replayable:
                    raise
                was_stale = True
                # The other idle connections are probably dead as well, so the second try gets a new
                # one or one that was in use a moment ago.
                pool.forget_idle(request.origin)

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = tls_context(self._settings)
        return self._context


def tls_context(connection: ConnectionSettings) -> ssl.SSLContext:
    """Return a TLS context with the authorities and the certificate that ``connection`` names.

    Raises:
        OptionsValidationError: a file cannot be used.
    """
    ca_file, cert_file = connection.ca_file, connection.client_cert_file
    if not ca_file:
        context = httpx.create_ssl_context()  # certifi's authorities, or SSL_CERT_FILE
    else:
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # SSLError is one
            raise _unusable(
                "CaFile", f"{ca_file} cannot be used", error, "it must hold certificates as PEM"
            ) from error
    if cert_file:
        try:
            # The empty passphrase refuses a protected key; without it, OpenSSL would ask for the
            # passphrase on the terminal.
            context.load_cert_chain(cert_file, connection.client_key_file, password=b"")
        except OSError as error:
            raise _unusable(
                "ClientCertFile",
                f"{cert_file} with ClientKeyFile {connection.client_key_file} cannot be used",
                error,
                "both must be PEM, and the key, without a passphrase, the certificate's",
            ) from error
    return context


def _unusable(key: str, what: str, error: OSError, advice: str) -> OptionsValidationError:
    said = f"{what}: {error.strerror or error}; {advice}"
    return OptionsValidationError([Problem(f"Sdk:Connection:{key}", said)])


class Received(httpx.Response):
    """A response from this transport. It reads a body that is not coded without httpx's help.

    httpx passes each part through three generators, a decoder and two buffers, which was an eighth
    of what a call costs. What is asked of the body otherwise, httpx does.
    """

    _received_bytes = 0

    def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """As httpx does it: the body, decoded, in parts of ``chunk_size`` or as they come."""
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
        """The length of the body that has come so far, in bytes and as it was sent."""
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
    """The parts of a body as they come; closes the response behind the last one."""

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
        """Give up the rest, as closing one of httpx's generators does."""
        close = getattr(self._parts, "aclose", None)
        if close is not None:  # httpx's own client puts a generator around the stream
            await close()
        await self._response.aclose()


class _ResponseStream(httpx.AsyncByteStream):
    """The body of one response."""

    __slots__ = ("_body", "_request")

    def __init__(self, body: BodyReader, request: httpx.Request) -> None:
        self._body = body
        self._request = request

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self  # an object and not a generator, which would have to be closed

    async def __anext__(self) -> bytes:
        try:
            data = await self._body.receive()
        except NetworkError as error:
            raise _translate(error, self._request) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        self._body.abandon()


def _outgoing(request: httpx.Request) -> Outgoing:
    url = request.url
    scheme, host = url.scheme, url.raw_host.decode("ascii")
    if scheme not in DEFAULT_PORTS:
        raise httpx.UnsupportedProtocol(
            f"the address {str(url.copy_with(query=None))!r} is neither http nor https",
            request=request,
        )
    headers = request.headers.raw
    if "%" in host:
        # The zone of an IPv6 address has a meaning on this machine only, so it is removed from Host
        # (RFC 6874, 4; RFC 4007, 11).
        headers = [(k, _ZONE.sub(b"]", v) if k.lower() == b"host" else v) for k, v in headers]
        host = host.replace("%25", "%", 1)
    limits = request.extensions.get("timeout")
    stream = request.stream
    if isinstance(stream, httpx.ByteStream):
        body: bytes = request.read()
        streamed: httpx.AsyncByteStream | None = None
    elif isinstance(stream, httpx.AsyncByteStream):
        body, streamed = b"", stream
    else:
        raise TypeError("the request's body is synchronous: give an asynchronous iterable")
    return Outgoing(
        method=request.method.encode("ascii"),
        origin=Origin(scheme, host, DEFAULT_PORTS[scheme] if url.port is None else url.port),
        target=request.extensions.get("target") or url.raw_path,
        headers=headers,
        body=body,
        stream=streamed,
        timeouts=_timeouts(limits) if limits else NO_TIMEOUTS,
        before_send=request.extensions.get(BEFORE_SEND),
        abandoned=request.extensions.get(ABANDONED),
    )


def _timeouts(limits: dict[str, float | None]) -> Timeouts:
    return Timeouts(
        connect=limits.get("connect"),
        read=limits.get("read"),
        write=limits.get("write"),
        pool=limits.get("pool"),
    )


def _translate(error: NetworkError, request: httpx.Request) -> httpx.TransportError:
    return _HTTPX_ERRORS[type(error)](str(error), request=request)
