"""Bodies of requests that are not verified yet, read within bounds that all senders share."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import trio

from . import answers
from .answers import Answer, RequestRefusal

#: Seconds that a sender may take for its body. The upstream gives up on a delivery after 10
#: seconds; only a client that wants to occupy a connection takes longer.
BODY_SECONDS: Final = 10.0

#: Pieces below this size are copied into one buffer: as separate objects, small ones take ten times
#: their size.
_SMALL_BYTES: Final = 16 * 1024

#: The buffer is closed at this size. A buffer that grows without bound leaves gaps in the heap
#: which take as much memory again.
_BLOCK_BYTES: Final = 64 * 1024

#: The Retry-After, in seconds, when too many bodies are in flight.
CROWDED_RETRY_SECONDS: Final = 5.0


class _Pieces:
    """The received pieces of one body; they need little more memory than the body."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._small = bytearray()

    def add(self, piece: bytes) -> None:
        """Keep one more piece."""
        if len(piece) < _SMALL_BYTES:
            self._small += piece
            if len(self._small) < _BLOCK_BYTES:
                return
            self._close_block()
        else:
            self._close_block()
            self._done.append(piece)

    def _close_block(self) -> None:
        if self._small:
            self._done.append(bytes(self._small))
            self._small = bytearray()

    def whole(self, last: bytes) -> bytes:
        """Return the body with its last piece."""
        if not self._done and not self._small:
            return last
        return b"".join((*self._done, self._small, last))


class _InFlight(msgspec.Struct, eq=False):
    scope: trio.CancelScope
    pieces: _Pieces = msgspec.field(default_factory=_Pieces)
    size: int = 0
    is_refused: bool = False


class Bodies:
    """Reads bodies, and limits the memory of incomplete ones.

    When their total exceeds ``together``, the largest body is refused, not the newest. Otherwise 64
    connections with unfinished bodies would cause every delivery that arrives in two parts to be
    refused.

    Args:
        largest: the maximum size of one body, in bytes.
        together: the maximum size of all incomplete bodies, in bytes.
    """

    def __init__(self, *, largest: int, together: int) -> None:
        self._largest = largest
        # A body that MaxPayloadBytes allows has to fit even if MaxBodyBytesInFlight is smaller; no
        # other body is in flight then.
        self._together = max(largest, together)
        self._bytes = 0
        self._in_flight: set[_InFlight] = set()

    async def read(self, receive: Callable[[], Awaitable[Any]]) -> bytes | RequestRefusal | None:
        """Return the body; the refusal, if it was not read; or None if the sender has left.

        Cancellation discards the bytes received so far.
        """
        with trio.move_on_after(BODY_SECONDS) as scope:
            body = _InFlight(scope)
            self._in_flight.add(body)
            try:
                received = await self._receive(receive, body)
            finally:
                self._in_flight.remove(body)
                self._bytes -= 0 if body.is_refused else body.size
            if not body.is_refused:
                return received
        if body.is_refused:
            return _unread("crowded", answers.unavailable(CROWDED_RETRY_SECONDS), body)
        return _unread("slow", answers.TOO_SLOW, body)

    async def _receive(
        self, receive: Callable[[], Awaitable[Any]], body: _InFlight
    ) -> bytes | RequestRefusal | None:
        while True:
            message = await receive()
            # A piece of a refused body may still arrive; it is not counted.
            if body.is_refused or message["type"] != "http.request":
                return None
            chunk: bytes = message.get("body", b"")
            more = bool(message.get("more_body", False))
            body.size += len(chunk)
            self._bytes += len(chunk)
            if body.size > self._largest:
                return _unread("size", answers.TOO_LARGE, body)
            if not more:
                return body.pieces.whole(chunk)
            body.pieces.add(chunk)
            # Otherwise the last piece would be held twice while the next one is awaited.
            del message, chunk
            if self._bytes > self._together:
                self._free_the_largest()

    def _free_the_largest(self) -> None:
        largest = max(
            (body for body in self._in_flight if not body.is_refused), key=lambda body: body.size
        )
        # Its bytes are freed and subtracted now, not when its task runs next: until then, pieces of
        # other bodies would cause further refusals for the same excess.
        largest.is_refused = True
        largest.pieces = _Pieces()
        self._bytes -= largest.size
        largest.scope.cancel()


def _unread(cause: str, answer: Answer, body: _InFlight) -> RequestRefusal:
    return RequestRefusal(cause, answer, {"received": body.size})
