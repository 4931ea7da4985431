"""A connection that was upgraded to another protocol, as a Trio stream (RFC 9110, 7.8).

A library for the other protocol reads the request itself. So the stream begins with the head of the
request, encoded again, and continues with the bytes of the socket. The deadline for sending still
applies: a client that accepts nothing for that long counts as gone.
"""

from collections.abc import Sequence

import trio

from ..base.http import Header
from .client_socket import ClientSocket
from .limits import Expired

#: Bytes that are sent within one deadline, so that a long message over a slow line has the time it
#: needs.
PIECE_BYTES = 64 * 1024


def head_bytes(target: bytes, headers: Sequence[Header], protocol: bytes) -> bytes:
    """Encode the head of a request for an upgrade to ``protocol``, as a client may have sent it."""
    lines = [b"GET %b HTTP/1.1" % target, b"upgrade: " + protocol]
    lines += [b"%b: %b" % header for header in headers]
    return b"\r\n".join([*lines, b"", b""])


class UpgradedStream(trio.abc.Stream):
    """The stream of an upgraded connection.

    Args:
        connection: reads and sends.
        beginning: bytes that are read first.
    """

    def __init__(self, connection: ClientSocket, beginning: bytes) -> None:
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
            BrokenResourceError: the client has left, or accepts nothing.
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
