"""Reads bodies of deliveries that nobody has verified yet, within bounds that strangers share."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import trio

from . import answers
from .answers import Answer

#: How long a sender may take for its body, in seconds: it gives up on us after 10 itself.
BODY_SECONDS: Final = 10.0

#: What a sender is asked to wait when too many bodies are in flight, in seconds.
CROWDED_RETRY_SECONDS: Final = 5.0


@attrs.frozen
class Unread:
    """Why a body was not read: the cause for the log, the answer, and the bytes that had come."""

    cause: str
    answer: Answer
    received: int


@attrs.define(eq=False)
class _InFlight:
    scope: trio.CancelScope
    size: int = 0
    gave_way: bool = False


class Bodies:
    """Reads bodies, and counts the bytes of those that have not arrived whole.

    When they are too many, the largest body gives way: those who fill the memory with bodies that
    they do not end are refused, and the small deliveries of others go on.

    Args:
        largest: the most bytes of one body.
        together: the most bytes of all that are in flight.
    """

    def __init__(self, *, largest: int, together: int) -> None:
        self._largest = largest
        # A body that is allowed on its own has to fit.
        self._together = max(largest, together)
        self._bytes = 0
        self._in_flight: set[_InFlight] = set()

    async def read(self, receive: Callable[[], Awaitable[Any]]) -> bytes | Unread | None:
        """Return the body; why it was not read; or None if the sender has left.

        Cancelled, what has arrived is forgotten.
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
            # One buffer for many pieces: kept apart, small ones take ten times their size.
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
        largest.gave_way = True
        self._bytes -= largest.size
        largest.scope.cancel()
