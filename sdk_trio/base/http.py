"""The grammar of HTTP (RFC 9110) and the ASGI types shared by all packages. Pure.

Our own server passes requests to the receiver without ASGI, whose scope and messages cost a
microsecond each. :class:`DirectRequest` and :class:`DirectApp` define that interface.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

#: A token (RFC 9110, 5.6.2): a method, header name or parameter name. The quantifier is possessive,
#: so that no input causes backtracking.
TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"  # noqa: S105 - no password
TOKEN_BYTES: Final = TOKEN.encode()

is_token: Callable[[str], re.Match[str] | None] = re.compile(TOKEN).fullmatch
is_token_bytes: Callable[[bytes], re.Match[bytes] | None] = re.compile(TOKEN_BYTES).fullmatch

#: Header values that a receiver accepts (RFC 9110, 5.5): no control character except tab. Bytes
#: beyond ASCII are allowed, as in the grammar (``obs-text``).
FIELD_VALUE_BYTES: Final = rb"[^\x00-\x08\x0a-\x1f\x7f]*+"

#: Matches characters that a sender must never put into a header value: an intermediary could read
#: them as the end of the value or of the head.
breaks_value: Callable[[bytes], re.Match[bytes] | None] = re.compile(rb"[\x00\r\n]").search

#: Idempotent methods (RFC 9110, 9.2.2).
IDEMPOTENT_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})

#: Headers that only proxies add. A proxy on this machine makes every request look local, so the
#: origin of a request with such a header is unknown.
PASSED_ON: Final = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
    }
)

#: Default ports by scheme (RFC 9110, 4.2).
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


# -- ASGI ----------------------------------------------------------------------------------------

# Servers and frameworks type the same messages in incompatible ways (typed dicts, mutable
# mappings). All of them accept an application typed with Any.
Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Names in lower case, and values, in the order sent.
Header = tuple[bytes, bytes]
Headers = Sequence[Header]

#: The key in ``scope["extensions"]`` of a request for a protocol upgrade (RFC 9110, 7.8); its value
#: is a :class:`ProtocolUpgrade`. Other requests do not have the key.
UPGRADE: Final = "sdk_trio.upgrade"

#: A complete response: status, headers and body.
Whole = tuple[int, Headers, bytes]


class Deadline(Protocol):
    """The end of a block with a deadline; Trio's cancel scopes have this interface."""

    @property
    def cancel_called(self) -> bool:
        """Return whether the time ran out before the block ended."""
        ...

    @property
    def cancelled_caught(self) -> bool:
        """Return whether the deadline cancelled the block."""
        ...


class Expiry(Protocol):
    """A deadline kept by the server: one cancel scope for all requests of a connection.

    When the time is up, the whole call of the application is cancelled. Recording the outcome
    therefore needs a shielded scope.
    """

    def move_on_after(self, seconds: float, answer: Whole) -> AbstractContextManager[Deadline]:
        """Limit a block to ``seconds``.

        The server sends ``answer`` if the time is up and the application has not answered.
        """
        ...


class ProtocolUpgrade(Protocol):
    """A request for another protocol on its connection."""

    @property
    def protocol(self) -> bytes:
        """Return the value of the ``Upgrade`` header, in lower case."""
        ...

    def take_over(self) -> Any:
        """Return the connection as a ``trio.abc.Stream`` that starts with the request's head.

        The server then neither reads nor writes on it. It closes the connection when the
        application returns.
        """
        ...


class RequestTemplate(Protocol):
    """The common part of several requests, whose clients may be different ones.

    They have the same method, target and headers, except for the values of the headers in
    ``varying``. ``memo`` belongs to the application and starts as None: it may cache there anything
    that depends only on the common part.
    """

    memo: Any

    @property
    def varying(self) -> frozenset[bytes]:
        """Return the names of the headers whose values differ."""
        ...


class DirectRequest(Protocol):
    """One request, as a server holds it."""

    @property
    def method(self) -> str:
        """Return the method, as in the ASGI scope."""
        ...

    @property
    def path(self) -> str:
        """Return the path, as in the ASGI scope."""
        ...

    @property
    def scheme(self) -> str:
        """Return the scheme of the connection, as in the ASGI scope."""
        ...

    @property
    def version(self) -> str:
        """Return the version of HTTP, as in the ASGI scope."""
        ...

    @property
    def headers(self) -> Headers:
        """Return the headers, names in lower case."""
        ...

    @property
    def client(self) -> tuple[str, int] | None:
        """Return the address of the connection's peer; None for a unix socket."""
        ...

    @property
    def server(self) -> tuple[str, int] | None:
        """Return the address that the peer connected to; None for a unix socket."""
        ...

    @property
    def expiry(self) -> Expiry | None:
        """Return the deadline that the connection keeps, or None."""
        ...

    @property
    def template(self) -> RequestTemplate | None:
        """Return the part shared with other requests; None if it is unknown."""
        ...

    async def receive(self) -> Any:
        """Return the next message, as ASGI's ``receive``."""
        ...

    def take_body(self, largest: int) -> bytes | None:
        """Return the whole body if it has arrived; if None, call ``receive()``.

        Also None if the body is larger than ``largest`` bytes.
        """
        ...


class DirectApp(Protocol):
    """An application that our own server can call without a scope and messages."""

    def respond(self, request: DirectRequest, /) -> Awaitable[Whole | None]:
        """Return the answer to one request; None if the client disconnected."""
        ...
