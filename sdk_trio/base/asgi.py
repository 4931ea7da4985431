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

#: The key in ``scope["extensions"]`` under which a server offers a :class:`Shortcut`; others do
#: not.
SHORTCUT: Final = "sdk_trio.shortcut"

#: A whole answer: status, headers and body.
Whole = tuple[int, Headers, bytes]


class Expiry(Protocol):
    """A deadline that costs nothing unless it passes.

    Once the time is over, the whole call of the application is cancelled, and what has to be done
    about it needs a shielded scope. The server then sends ``answer``: status, headers and body.
    """

    answer: Whole | None

    def arm(self, seconds: float) -> None:
        """Cancel the application in so many seconds."""
        ...

    def disarm(self) -> bool:
        """Do not cancel it; True: it has been, or will be where it waits next."""
        ...


class Shortcut(Protocol):
    """One request, as its server holds it."""

    @property
    def expiry(self) -> Expiry:
        """The deadline that the connection keeps."""
        ...

    def take_body(self) -> bytes | None:
        """Return the whole body, within the server's own limits of time, or None: receive it."""
        ...

    async def answer(self, answer: Whole) -> None:
        """Send a whole answer: status, headers and body."""
        ...
