"""The types of ASGI, and an extension of it: the short cut between our own server and receiver.

Each message of ASGI costs a microsecond; the short cut does without them.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

# Servers and frameworks type the same messages in ways that exclude each other (typed dicts,
# mutable mappings); Any is what all of them accept an application with.
Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Names, in lower case, and values, in the order in which they are sent.
Header = tuple[bytes, bytes]
Headers = Sequence[Header]

#: The key in ``scope["extensions"]`` under which a server offers a :class:`DirectRequest`; others
#: do not.
SHORTCUT: Final = "sdk_trio.shortcut"

#: A whole answer: status, headers and body.
Whole = tuple[int, Headers, bytes]


class Expiry(Protocol):
    """A deadline that the server keeps: one cancel scope for all requests of a connection.

    Once the time is over, the whole call of the application is cancelled, so recording the outcome
    needs a shielded scope. The server then sends ``answer``: status, headers and body.
    """

    answer: Whole | None

    def arm(self, seconds: float) -> None:
        """Cancel the application in so many seconds."""
        ...

    def disarm(self) -> bool:
        """Stop the deadline; return True if it has passed.

        The application is cancelled then, at once or where it waits next.
        """
        ...


class DirectRequest(Protocol):
    """One request, as the server holds it."""

    @property
    def expiry(self) -> Expiry:
        """Return the deadline that the connection keeps."""
        ...

    def take_body(self) -> bytes | None:
        """Return the whole body if it has arrived; None: call ``receive()`` for it."""
        ...

    async def answer(self, answer: Whole) -> None:
        """Send a whole answer: status, headers and body."""
        ...
