"""Reading of bodies that are not verified yet, within bounds that all senders share."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import trio

from . import answers
from .answers import Answer

#: How long a sender may take for its body, in seconds. The upstream gives up on a delivery after 10
#: seconds itself, so waiting longer serves nobody but a client that means to hold a connection.
BODY_SECONDS: Final = 10.0

#: The Retry-After, in seconds, of a delivery whose body gave way because too many were in flight.
CROWDED_RETRY_SECONDS: Final = 5.0


@attrs.frozen
class Unread:
    """A body that was not read: the cause for the log, the answer, and the bytes received."""

    cause: str
    answer: Answer
    received: int


@attrs.define(eq=False)
class _InFlight:
    scope: trio.CancelScope
    size: int = 0
    gave_way: bool = False


class Bodies:
    """Reads bodies, and bounds the memory of those that have not arrived whole.

    When their bytes exceed ``together``, the largest body gives way, not the one that came last:
    otherwise 64 connections with unfinished bodies would have every delivery refused that arrives
    in two parts.

    Args:
        largest: the most bytes of one body.
        together: the most bytes of all that are in flight.
    """

    def __init__(self, *, largest: int, together: int) -> None:
        self._largest = largest
        # A body that MaxPayloadBytes allows has to fit even if MaxBodyBytesInFlight is smaller; it
        # is alone in flight then.
        self._together = max(largest, together)
        self._bytes = 0
        self._in_flight: set[_InFlight] = set()

    async def read(self, receive: Callable[[], Awaitable[Any]]) -> bytes | Unread | None:
        """Return the body; an :class:`Unread` with the reason; or None if the sender has left.

        Cancelled, it forgets the bytes received so far.
        """
        with trio.move_on_after(BODY_SECONDS) as scope:
            body = _InFlight(scope)
            self._in_flight.add(body)
            try:
                return await self._receive(receive, body)
            finally:
                self._in_flight.remove(body)
                self._bytes -= 0 if body.gave_way else body.size
        if body.gave_way:
            return Unread("crowded", answers.unavailable(CROWDED_RETRY_SECONDS), body.size)
        return Unread("slow", answers.TOO_SLOW, body.size)

    async def _receive(
        self, receive: Callable[[], Awaitable[Any]], body: _InFlight
    ) -> bytes | Unread | None:
        received: bytes | bytearray = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk: bytes = message.get("body", b"")
            more = bool(message.get("more_body", False))
            body.size += len(chunk)
            self._bytes += len(chunk)
            if body.size > self._largest:
                return Unread("size", answers.TOO_LARGE, body.size)
            # A body that comes whole, as nearly all do, is never copied. Pieces go into one buffer:
            # kept apart, small ones take ten times their size.
            if not received:
                received = chunk
            elif isinstance(received, bytes):
                received = bytearray(received)
                received += chunk
            else:
                received += chunk
            if not more:
                return bytes(received)
            if self._bytes > self._together:
                self._free_the_largest()

    def _free_the_largest(self) -> None:
        largest = max(
            (body for body in self._in_flight if not body.gave_way), key=lambda body: body.size
        )
        # Its bytes are subtracted now and not when its task has noticed: until then further pieces
        # would make other bodies give way for the same excess.
        largest.gave_way = True
        self._bytes -= largest.size
        largest.scope.cancel()
