"""What our own server offers beside the messages of ASGI, each of which costs a microsecond."""

from collections.abc import Sequence
from typing import Final, Protocol

#: The ASGI extension under which a server offers a :class:`Shortcut`. Others offer none.
SHORTCUT: Final = "sdk_trio.shortcut"

Whole = tuple[int, Sequence[tuple[bytes, bytes]], bytes]


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
