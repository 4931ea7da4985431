"""The connection of a request that changes its protocol, as a stream of Trio (RFC 9110, 7.8).

A library that speaks the other protocol wants to read the request itself. So the stream begins with
the head, written again out of what was read of it, and goes on with the bytes of the socket. The
connection keeps its deadline for sending: a client that takes nothing for that long is gone.
"""

from collections.abc import Sequence
from typing import Protocol

import trio

from ..base.http import Header
from .limits import Expired

#: Bytes that are sent within one deadline: so many get through on a slow line, whatever the length
#: of a message.
PIECE_BYTES = 64 * 1024


class UpgradedConnection(Protocol):
    """The connection below the stream."""

    ended: bool

    async def read(self, *, idle: bool = False) -> bytes:
        """Wait for bytes; raise Expired once :meth:`stop_reading` was called."""
        ...

    async def send(self, data: bytes) -> None:
        """Send all of ``data``; if that fails, ``ended`` is true."""
        ...

    def stop_reading(self) -> None:
        """End the wait of a reader, and every later one."""
        ...


def head_bytes(target: bytes, headers: Sequence[Header], protocol: bytes) -> bytes:
    """Return the head of a request that asks for ``protocol``, as a client may have sent it."""
    lines = [b"GET %b HTTP/1.1" % target, b"upgrade: " + protocol]
    lines += [b"%b: %b" % header for header in headers]
    return b"\r\n".join([*lines, b"", b""])


class UpgradedStream(trio.abc.Stream):
    """A connection whose requests are over.

    Args:
        connection: reads and sends.
        beginning: bytes that are read first.
    """

    def __init__(self, connection: UpgradedConnection, beginning: bytes) -> None:
        self._connection = connection
        self._beginning = beginning
        self._closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes and return up to ``max_bytes``; none at the end of the stream.

        Raises:
            ClosedResourceError: it was closed.
            BrokenResourceError: the connection is broken.
        """
        if self._closed:
            raise trio.ClosedResourceError
        if not self._beginning:
            self._beginning = await self._read()
        else:
            await trio.lowlevel.checkpoint()
        size = len(self._beginning) if max_bytes is None else max_bytes
        part, self._beginning = self._beginning[:size], self._beginning[size:]
        return part

    async def _read(self) -> bytes:
        try:
            return await self._connection.read()
        except Expired:
            raise trio.ClosedResourceError from None
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``.

        Raises:
            ClosedResourceError: it was closed.
            BrokenResourceError: the client has left, or takes nothing.
        """
        view = bytes(data)
        for start in range(0, len(view), PIECE_BYTES):
            if self._closed:
                raise trio.ClosedResourceError
            await self._connection.send(view[start : start + PIECE_BYTES])
            if self._connection.ended:
                raise trio.BrokenResourceError
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once: :meth:`send_all` waits by itself."""
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Stop reading and sending; the socket is closed when the application returns."""
        if not self._closed:
            self._closed = True
            self._connection.stop_reading()
        await trio.lowlevel.checkpoint()
