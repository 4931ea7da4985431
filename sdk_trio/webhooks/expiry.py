"""The time limit of an inline run, where the server keeps it for its application."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

#: The ASGI extension of a server that cancels its application at the time that this asks for.
EXPIRY: Final = "sdk_trio.expiry"


class Expiry(Protocol):
    """What a server gives for a deadline that costs nothing unless it passes.

    Once the time is over, the whole call of the application is cancelled, and what has to be done
    about it needs a shielded scope; the server then sends ``answer``, ASGI messages.
    """

    answer: Sequence[Mapping[str, Any]]

    def arm(self, seconds: float) -> None:
        """Cancel the application in so many seconds."""
        ...

    def disarm(self) -> bool:
        """Do not cancel it; True: it has been, or will be where it waits next."""
        ...
