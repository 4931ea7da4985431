"""The types of ASGI, and an extension of it: the short cut between our own server and receiver.

Each message of ASGI costs a microsecond; the short cut does without them.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
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


class Deadline(Protocol):
    """The end of a block with a deadline, as a cancel scope of Trio's tells it, too."""

    @property
    def cancel_called(self) -> bool:
        """Say whether the time was over before the block's end."""
        ...

    @property
    def cancelled_caught(self) -> bool:
        """Say whether that has cut the block short."""
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
