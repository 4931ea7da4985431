"""HTTP POST for notifications, over our own transport, to public addresses if requested.

The errors show whether the request may have arrived, because an SMS cannot be recalled:
``NotSentError`` may be retried, ``AnswerLostError`` must not be.

A customer may have chosen a webhook URL, which could make this process send requests inside the
operator's network (SSRF). Such a connection goes to a public address only, and to the very address
that was checked: resolving the name again could give another one.
"""

import contextlib
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import attrs
import httpx
import trio

from ..base import opener
from ..base.public_addresses import is_internal, is_public
from ..base.retry_after import parse_retry_after
from ..config.options.client import ConnectionOptions
from ..errors import AddressInvalidError, AddressRefusedError, AnswerLostError, NotSentError
from .messages import BEFORE_SEND
from .socket import Dial
from .transport import Transport

#: Seconds for one address while others are left to try.
PATIENCE_SECONDS = 3.0

#: Resolves a host and port to addresses, or raises ``OSError``.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

#: Bytes of an answer that are read; providers' answers have a few hundred.
MAX_ANSWER_BYTES = 64 * 1024

#: Errors of an unusable URL; UnicodeError: its host cannot be a host name.
_NO_ADDRESS = (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError)

#: HTTP/1.1 only: each connection serves one exchange and gains nothing from streams.
_CONNECTION = ConnectionOptions(enable_http2=False)


@attrs.frozen
class PostAnswer:
    """A server's answer; header names are in lower case.

    ``body`` may be truncated if it is long or broke off. ``retry_after`` is the value of
    ``Retry-After``, in seconds from now.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    retry_after: float | None = None


class NoAllowedAddressError(OSError):
    """A host has no allowed address."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host in the resolver's order, each once."""
    found = await opener.resolve(host, port)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def dial_unix(path: str) -> Dial:
    """Return a function that connects to a unix socket, whatever the host."""

    async def dial(_host: str, _port: int) -> trio.SocketStream:
        return await opener.dial_unix(path)

    return dial


async def _dial_allowed(
    host: str,
    port: int,
    *,
    allowed: Callable[[str], bool],
    kind: str,
    resolve: Resolve = resolve,
    connect: Dial = opener.dial_tcp,
) -> trio.SocketStream:
    """Connect to the first ``allowed`` address of a host that answers.

    The name is resolved once, and the checked address itself is used: a name server that gives
    another address the second time (DNS rebinding) gains nothing. Other addresses are skipped, in
    any notation (``2130706433``, ``::ffff:127.0.0.1``).

    Args:
        host: a name or address.
        port: the port.
        allowed: returns whether an address may be connected to.
        kind: describes such an address in an error.
        resolve: resolves names.
        connect: connects to an address.

    Raises:
        NoAllowedAddressError: the host has no such address; nothing was connected to.
        OSError: it cannot be resolved, or no such address answers.
    """
    addresses = await resolve(host, port)
    usable = [address for address in addresses if allowed(address)]
    if not usable:
        raise NoAllowedAddressError(
            f"{host!r} has no address {kind}" if addresses else f"{host!r} has no address"
        )
    for address in usable[:-1]:
        with trio.move_on_after(PATIENCE_SECONDS), contextlib.suppress(OSError):
            return await connect(address, port)
    return await connect(usable[-1], port)


#: Connects to a public address only.
dial_public = partial(_dial_allowed, allowed=is_public, kind="of the public internet")

#: Connects to an internal address only; not to link-local ones, where clouds serve credentials.
dial_private = partial(
    _dial_allowed, allowed=is_internal, kind="of this machine or a private network"
)


class HttpPoster:
    """A :class:`~sdk_trio.notifications.send.Poster`.

    Each request has its own connection. Notifications are rare, and if the server closed a kept
    connection at the wrong moment, it would be unknown whether the message was sent. Proxies are
    not supported.

    Args:
        clock: returns Unix seconds, for dates in ``Retry-After``.
        verify: of TLS; default httpx's authorities or ``SSL_CERT_FILE``. Certificates are always
            verified.
        dial: makes TCP connections.
        dial_public: makes those for ``public_only`` requests.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        verify: ssl.SSLContext | None = None,
        dial: Dial = opener.dial_tcp,
        dial_public: Dial = dial_public,
    ) -> None:
        self._clock = clock
        self._verify = verify
        self._dial = dial
        self._dial_public = dial_public

    async def post(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
        timeout_seconds: float,
        public_only: bool = False,
        wants_body: bool = True,
        head_counts: bool = False,
    ) -> PostAnswer:
        """Send one POST request; see :class:`~sdk_trio.notifications.send.Poster`.

        With ``head_counts`` a success counts once its head has arrived, and a body that breaks off
        is truncated. Cancellation abandons the request; it is then unknown whether it arrived.
        """
        exchange = _Exchange(wants_body)
        try:
            with trio.fail_after(timeout_seconds):
                async with self._transport(url, public_only=public_only) as transport:
                    await exchange.run(transport, _request(url, headers, body, exchange.depart))
        except trio.TooSlowError as error:
            failure: Exception = error
            text = f"no complete answer within {timeout_seconds:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            failure = error
            text = str(error) or type(error).__name__
        else:
            return self._answer(exchange)
        if exchange.response is not None and (head_counts or not exchange.response.is_success):
            # The body is missing, but the status of a failure shows what happened to the message.
            return self._answer(exchange)
        # From here on a byte may have reached the provider. Check that first: it forbids a second
        # try.
        if exchange.has_begun:
            raise AnswerLostError(text) from failure
        if _has_cause(failure, NoAllowedAddressError):
            raise AddressRefusedError(text) from failure
        if _has_cause(failure, _NO_ADDRESS):
            raise AddressInvalidError(text) from failure
        raise NotSentError(text) from failure

    def _transport(self, url: str, *, public_only: bool) -> Transport:
        # Created once, at the first message: it reads all of the system's authorities.
        if self._verify is None and url.startswith("https:"):
            self._verify = httpx.create_ssl_context()
        dial = self._dial_public if public_only else self._dial
        return Transport(_CONNECTION, verify=self._verify, dial=dial)

    def _answer(self, exchange: "_Exchange") -> PostAnswer:
        if exchange.response is None:
            raise AssertionError("an exchange that ended well has a response")
        headers = {name.lower(): value for name, value in exchange.response.headers.items()}
        retry_after = parse_retry_after(
            headers.get("retry-after"), date=headers.get("date"), now=self._clock()
        )
        status = exchange.response.status_code
        return PostAnswer(status, headers, exchange.content[:MAX_ANSWER_BYTES], retry_after)


@attrs.define
class _Exchange:
    """The progress of one request."""

    wants_body: bool
    has_begun: bool = False
    response: httpx.Response | None = None
    content: bytes = b""

    def depart(self) -> None:
        self.has_begun = True

    async def run(self, transport: Transport, request: httpx.Request) -> None:
        self.response = await transport.handle_async_request(request)
        if not self.wants_body:
            return
        stream = self.response.stream
        if not isinstance(stream, httpx.AsyncByteStream):
            raise TypeError("the transport's answers are asynchronous")
        async for chunk in stream:  # the connection is closed with the unread rest
            self.content += chunk
            if len(self.content) >= MAX_ANSWER_BYTES:
                break


def _request(
    url: str, headers: Mapping[str, str], body: bytes, depart: Callable[[], None]
) -> httpx.Request:
    # The connection serves only this request; "close" lets the server close it without waiting.
    sent = {**headers, "user-agent": "sdk-trio", "connection": "close"}
    return httpx.Request("POST", url, headers=sent, content=body, extensions={BEFORE_SEND: depart})


def _has_cause(
    error: BaseException | None, kind: type[BaseException] | tuple[type[BaseException], ...]
) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__
    return False
