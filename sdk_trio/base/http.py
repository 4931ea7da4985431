"""The grammar of HTTP (RFC 9110), and the types of ASGI, as all packages share them. Pure.

Our own server hands requests to the receiver without ASGI: the scope and each message of ASGI cost
a microsecond. :class:`DirectRequest` and :class:`DirectApp` are that interface.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

#: A token (RFC 9110, 5.6.2): the name of a method, a header, a parameter. It takes all that it can
#: and gives nothing back, so that no text makes the engine try twice.
TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"  # noqa: S105 - no password
TOKEN_BYTES: Final = TOKEN.encode()

is_token = re.compile(TOKEN).fullmatch
is_token_bytes = re.compile(TOKEN_BYTES).fullmatch

#: The values of headers that a receiver accepts (RFC 9110, 5.5): no control character but the
#: tab. Bytes beyond ASCII are let through, as the grammar does (``obs-text``).
FIELD_VALUE_BYTES: Final = rb"[^\x00-\x08\x0a-\x1f\x7f]*+"

#: Finds what a sender must not put into a header's value, whatever else it holds: it would end the
#: value, or the head, for some reader on its way.
breaks_value = re.compile(rb"[\x00\r\n]").search

#: Methods whose second execution changes nothing more (RFC 9110, 9.2.2).
IDEMPOTENT_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})

#: Headers that only a proxy adds. A proxy on this machine makes every request look local, so the
#: origin of a request with one of them is unknown.
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

#: The port of an address that names none, by its scheme (RFC 9110, 4.2).
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


# -- ASGI ----------------------------------------------------------------------------------------

# Servers and frameworks type the same messages in ways that exclude each other (typed dicts,
# mutable mappings); Any is what all of them accept an application with.
Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Names, in lower case, and values, in the order in which they are sent.
Header = tuple[bytes, bytes]
Headers = Sequence[Header]

#: The key in ``scope["extensions"]`` of a request that asks to change its protocol (RFC 9110, 7.8);
#: its value is a :class:`ProtocolUpgrade`. Other requests have no such key.
UPGRADE: Final = "sdk_trio.upgrade"

#: A whole answer: status, headers and body.
Whole = tuple[int, Headers, bytes]


class Deadline(Protocol):
    """Tells how a block with a deadline has ended; a cancel scope of Trio's is one, too."""

    @property
    def cancel_called(self) -> bool:
        """Say whether the time was over before the block's end."""
        ...

    @property
    def cancelled_caught(self) -> bool:
        """Say whether the deadline has cut the block short."""
        ...


class Expiry(Protocol):
    """A deadline that the server keeps: one cancel scope for all requests of a connection.

    Once the time is over, the whole call of the application is cancelled, so recording the outcome
    needs a shielded scope.
    """

    def move_on_after(self, seconds: float, answer: Whole) -> AbstractContextManager[Deadline]:
        """Limit a block to so many seconds.

        The server sends ``answer`` if the time passes and the application gives no answer.
        """
        ...


class ProtocolUpgrade(Protocol):
    """A request that asks for another protocol on its connection."""

    @property
    def protocol(self) -> bytes:
        """Return the value of the ``Upgrade`` header, in lower case."""
        ...

    def take_over(self) -> Any:
        """Return the connection as a ``trio.abc.Stream`` that begins with the request's head.

        From then on the server neither reads nor answers on it; when the application returns, the
        connection is closed.
        """
        ...


class RequestTemplate(Protocol):
    """The common part of many requests of one connection.

    All of them have the same method, target and headers, but for the values of the headers named in
    ``varying``. ``memo`` is None at first and the application's own: it may keep there what depends
    on nothing else.
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
        """Return the address that the peer has connected to; None for a unix socket."""
        ...

    @property
    def expiry(self) -> Expiry | None:
        """Return the deadline that the connection keeps; None if it keeps none."""
        ...

    @property
    def template(self) -> RequestTemplate | None:
        """Return the common part of it and other requests, None if it is not known."""
        ...

    async def receive(self) -> Any:
        """Return the next message, as ASGI's ``receive``."""
        ...

    def take_body(self, largest: int) -> bytes | None:
        """Return the whole body if it has arrived; None: call ``receive()`` for it.

        None as well if it has more than ``largest`` bytes.
        """
        ...


class DirectApp(Protocol):
    """An application that our own server may call without a scope and messages."""

    def respond(self, request: DirectRequest) -> Awaitable[Whole | None]:
        """Return the answer to one request; None if its client has left."""
        ...
