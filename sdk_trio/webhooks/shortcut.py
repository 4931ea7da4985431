"""An ASGI extension: read a request and answer it without ASGI messages (about 1 us each).

Only our own HTTP/1.1 server offers it; the receiver works without it on any ASGI server. Body,
answer and deadline together save 8 us of a delivery (docs/adr/0012-fast-path.md).
"""

from collections.abc import Sequence
from typing import Final, Protocol

#: The key in ``scope["extensions"]`` under which a server offers a :class:`Shortcut`.
SHORTCUT: Final = "sdk_trio.shortcut"

Whole = tuple[int, Sequence[tuple[bytes, bytes]], bytes]


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


class Shortcut(Protocol):
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
