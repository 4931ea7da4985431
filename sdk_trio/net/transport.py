"""The client's connections as an httpx transport, through a proxy if configured.

Requests and answers are httpx's; the connections underneath are our own. httpcore's pool is not
used: a cancelled request leaks its slot there (encode/httpcore#1093), and hedges and timeouts
cancel constantly (docs/adr/0007-own-pool.md). The errors show a retry layer what may be repeated:

- ``httpx.ConnectError``, ``ConnectTimeout`` and ``PoolTimeout`` mean that the server cannot have
  acted on the request, regardless of its method;
- every other ``httpx.TransportError`` means that it may have;
- a kept connection that ends before any byte of the answer is retried once on another one, if the
  method is idempotent and the body can be resent.
"""

import base64
import os
import re
import ssl
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

import attrs
import httpx
import trio

from ..base import opener
from ..base.http import IDEMPOTENT_METHODS
from ..config.options.client import ConnectionOptions
from ..errors import NotRunningError, OptionsValidationError, Problem
from .http3_origins import Http3Origins, require_http3
from .messages import (
    ABANDONED,
    ClientConnection,
    NetworkError,
    NotProcessedError,
    RenewedError,
    StaleConnectionError,
    TransportClosed,
    is_replayable,
    origin_of,
    timeouts_of,
    translated,
)
from .origin import PoolStatistics
from .pool import ConnectionPool
from .socket import Dial

# The proxy: a tunnel opened by CONNECT (RFC 9110, 9.3.6). TLS runs inside, so the proxy sees only
# the upstream's name and port. Variables such as HTTPS_PROXY are ignored, because anyone who may
# set a variable could redirect the access token. The log and ``doctor`` report an ignored variable.

URL_KEY = "Sdk:Connection:ProxyUrl"
CREDENTIALS_KEY = "Sdk:Connection:ProxyCredentialsEnvVar"

#: Variables that other programs take their proxy from; the first one set wins.
VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

#: The longest answer to CONNECT, in bytes.
MAX_HEAD_BYTES = 16 * 1024

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: ([^\r\n]*))?\r?\n")
#: Statuses that request credentials: 407, and 401 from proxies that confuse the two.
_ASKS_FOR_CREDENTIALS = (401, 407)


class ProxyRefusedError(OSError):
    """The proxy opened no tunnel; the upstream was not reached."""


@attrs.frozen
class Proxy:
    """An HTTP proxy at ``host`` and ``port``; ``credentials`` are ``user:password`` or empty."""

    host: str
    port: int
    credentials: str = attrs.field(default="", repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def dial(self, host: str, port: int) -> trio.SocketStream:
        """Return a stream to ``host`` and ``port``.

        The proxy resolves the name. Cancellation closes everything opened so far.

        Raises:
            OSError: the proxy cannot be reached, or opens no tunnel.
        """
        try:
            stream = await opener.dial_tcp(self.host, self.port)
        except OSError as error:
            raise ProxyRefusedError(f"the proxy {self} cannot be reached: {error}") from error
        try:
            await stream.send_all(self._request(host, port))
            self._check(await _head(stream))
        except trio.BrokenResourceError as error:
            stream.socket.close()
            raise ProxyRefusedError(f"the proxy {self} ended the connection") from error
        except BaseException:
            stream.socket.close()
            raise
        return stream

    def _request(self, host: str, port: int) -> bytes:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.credentials:
            encoded = base64.b64encode(self.credentials.encode()).decode("ascii")
            lines.append(f"Proxy-Authorization: Basic {encoded}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _check(self, head: bytes) -> None:
        found = _STATUS.match(head)
        if found is None:
            raise ProxyRefusedError(f"the server at {self} is not an HTTP proxy")
        status = int(found[1])
        if not 200 <= status < 300:
            said = f"{status} {(found[2] or b'').decode('ascii', 'replace')}".rstrip()
            hint = f"; see {CREDENTIALS_KEY}" if status in _ASKS_FOR_CREDENTIALS else ""
            raise ProxyRefusedError(f"the proxy {self} answered {said}{hint}")
        if not head.endswith(b"\r\n\r\n") or head.count(b"\r\n\r\n") > 1:
            raise ProxyRefusedError(
                f"the proxy {self} sent an incomplete answer, or extra data after it"
            )


def proxy_of(settings: ConnectionOptions, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy that ``settings`` configure, or None.

    Raises:
        OptionsValidationError: the variable with its credentials has no credentials.
    """
    if not settings.proxy_url:
        return None
    url = urlsplit(settings.proxy_url)
    name = settings.proxy_credentials_env_var
    credentials = environ.get(name, "")
    if credentials and (":" not in credentials or not credentials.isprintable()):
        problem = Problem(
            CREDENTIALS_KEY,
            f"names the variable {name}, which does not hold user:password: set it so, or unset it",
        )
        raise OptionsValidationError([problem])
    return Proxy(url.hostname or "", url.port or 80, credentials)


def ignored_variable(host: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that makes other programs reach ``host`` through a proxy."""
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    for name in exempt.split(","):
        suffix = name.strip().removeprefix("*").removeprefix(".").casefold()
        if name.strip() == "*" or (suffix and f".{host.casefold()}".endswith(f".{suffix}")):
            return None
    return next((name for name in VARIABLES if environ.get(name)), None)


async def _head(stream: trio.SocketStream) -> bytes:
    """Receive an answer up to its empty line, and any bytes after it in the same packet.

    These are an error (see ``_check``): in TLS the client speaks first, so nothing may follow.
    """
    head = b""
    while True:
        data = await stream.receive_some(MAX_HEAD_BYTES)
        head += data
        if not data or b"\r\n\r\n" in head or len(head) > MAX_HEAD_BYTES:
            return head


#: Tries of a request that new connections reject unprocessed.
NOT_PROCESSED_TRIES = 3


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


class Transport(httpx.AsyncBaseTransport):
    """Sends httpx requests over a bounded pool of reused connections.

    An async context manager; requests need an open context. An ``httpx.AsyncClient`` enters its
    transport itself; entering again inside is a no-op. Cancelling a request never waits: its
    HTTP/1.1 connection is closed, its HTTP/2 or HTTP/3 stream reset.

    Args:
        connection: the settings ``Sdk:Connection``.
        http3: overrides ``connection.enable_http3``.
        verify: the TLS context, instead of the files in ``connection``; the transport sets its ALPN
            protocols.
        dial: makes the TCP connections of HTTP/1.1 and HTTP/2 with ``await dial(host, port)``,
            instead of Trio and of the proxy in ``connection``.

    Raises:
        OptionsValidationError: a file or variable in ``connection`` cannot be used, or HTTP/3 is
            requested and its extra is not installed.
    """

    #: This transport calls the extensions ``BEFORE_SEND`` and ``ABANDONED``.
    calls_before_send = True

    def __init__(
        self,
        connection: ConnectionOptions,
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
            verify = tls_context(connection)  # now, so that the start reports errors
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
        # A call after the end gets its own error, not the hint to open the transport.
        self._was_closed = True
        if self._http3 is not None:
            self._http3.close()
        self._nursery.cancel_scope.cancel()
        # The exception is not passed to the nursery: it must not leave in a group of one.
        try:
            await self._manager.__aexit__(None, None, None)  # noqa: ASYNC102 - the nursery is cancelled already
        except BaseExceptionGroup as group:
            if group.split(trio.Cancelled)[1] is not None:
                raise  # a task of the transport failed, which caused the exception inside
            # An outer cancellation also leaves as itself, here or at the next checkpoint.
            if exc_value is None:
                await trio.lowlevel.checkpoint()  # noqa: ASYNC102 - raises at once

    async def aclose(self) -> None:
        """Close every connection now; requests in progress fail. The context may stay open."""
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

        The response must be read to its end or closed, as with any httpx transport. Supports
        httpx's ``timeout`` and ``target`` extensions, and ``sdk_trio.before_send``: a function
        without arguments, called before anything of the request can reach the server. A request
        abandoned earlier was certainly not executed.

        Raises:
            httpx.TransportError: see the module; the class shows whether anything was sent.
            RuntimeError: the transport was never opened.
        """
        pool = self._pool
        if pool is None:
            await trio.lowlevel.checkpoint()
            if self._was_closed:
                raise TransportClosed("the client was closed", request=request)
            raise RuntimeError("the transport is not open: use it as 'async with Transport(...)'")
        tries = 0
        was_stale = False
        try:
            origin, timeouts = origin_of(request), timeouts_of(request)
            if not isinstance(request.stream, httpx.AsyncByteStream):
                raise TypeError("the request's body is synchronous: give an asynchronous iterable")
            while True:
                connection: ClientConnection | None = None
                if self._http3 is not None:
                    connection = await self._http3.acquire(origin)
                if connection is None:
                    # The first try may have been executed, so an unsent second try must not be
                    # reported as "not sent".
                    abandoned = None if was_stale else request.extensions.get(ABANDONED)
                    connection = await pool.acquire(origin, timeouts, abandoned)
                try:
                    return await connection.exchange(request)
                # Neither of these was processed, so any method may be resent, without the retry
                # layer's waits and budget.
                except RenewedError:
                    if not is_replayable(request):
                        raise
                except NotProcessedError:
                    tries += 1
                    if not is_replayable(request) or tries >= NOT_PROCESSED_TRIES:
                        raise
                except StaleConnectionError:
                    repeatable = request.method in IDEMPOTENT_METHODS
                    if was_stale or not repeatable or not is_replayable(request):
                        raise
                    was_stale = True
                    # Other idle connections are probably dead too, so the second try gets a new one
                    # or one used a moment ago.
                    pool.forget_idle(origin)
        except NetworkError as error:
            raise translated(error, request) from error

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = tls_context(self._settings)
        return self._context


def tls_context(connection: ConnectionOptions) -> ssl.SSLContext:
    """Return a TLS context with the authorities and the certificate in ``connection``.

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
            # The empty passphrase refuses a protected key; without it, OpenSSL would prompt on the
            # terminal.
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
