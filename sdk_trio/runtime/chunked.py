"""The chunked transfer coding of request bodies (RFC 9112, 7.1), read strictly. Pure."""

import re
from typing import Final

from ..base.http_grammar import FIELD_VALUE_BYTES, TOKEN_BYTES
from .request_head import RequestError

#: Sixteen digits are 2**64 bytes; an extension is passed over, control characters are not. White
#: space after a size is refused: the grammar has it before an extension alone, which nobody writes,
#: and a parser that trims it where another does not is how requests are smuggled.
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;" + FIELD_VALUE_BYTES + rb")?")
_TRAILER: Final = re.compile(TOKEN_BYTES + rb":" + FIELD_VALUE_BYTES)

#: A whole line with a size and no extension, which is how nearly all chunks begin.
_plain_size = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n").match

#: Bytes that the size lines of all chunks may take, beside an eighth of the body itself. Each chunk
#: costs about the same CPU, however small it is: without this bound a body in chunks of one byte
#: cost a hundred times a plain one (as in CVE-2023-39326). Go allows as much as the body itself; at
#: that, chunks of five bytes cost 58 ms for a MiB on the wire, with an eighth 11 ms. Bodies up to
#: about 9 KiB may still be cut into single bytes, and whole megabytes into pieces of 50.
OVERHEAD_BYTES: Final = 16 * 1024
_BODY_SHARE: Final = 8

#: The longest line with a chunk's size and extensions, in bytes.
SIZE_LINE_BYTES: Final = 256

#: All trailers of one body, in bytes.
TRAILER_BYTES: Final = 8 * 1024


class ChunkedBody:
    """A decoder: takes the bytes of a connection and returns those of the body.

    ``complete`` is true once the last line has been taken; ``rest`` then holds what followed it.
    """

    def __init__(self) -> None:
        self.complete = False
        self.rest = b""
        self._left = 0  # bytes of the present chunk that have not arrived
        self._closing = False  # the line end after a chunk is due
        self._overhead = 0.0  # bytes of lines and line ends, less the body's share
        self._trailing = -1  # bytes of trailers that have been seen; -1 before the last chunk

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return the part of the body that they complete, maybe nothing.

        Raises:
            RequestError: the bytes are not in the chunked coding; do not call it again.
        """
        data = self.rest + data
        at = 0
        pieces: list[bytes] = []
        while not self.complete:
            if not (self._left or self._closing) and self._trailing < 0:
                at = self._take_plain(data, at, pieces)
            if self._left:
                piece = data[at : at + self._left]
                if not piece:
                    break
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._overhead -= len(piece) / _BODY_SHARE
                self._closing = not self._left
            elif self._closing:
                end = data[at : at + 2]
                if not b"\r\n".startswith(end):
                    raise RequestError(400, "a chunk is longer than its size")
                if len(end) < 2:
                    break
                at += 2
                self._spend(2)
                self._closing = False
            else:
                line = _line(data, at, SIZE_LINE_BYTES if self._trailing < 0 else TRAILER_BYTES)
                if line is None:
                    break
                at += len(line) + 2
                self._spend(len(line) + 2)
                self._take_line(line)
        self.rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take_plain(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take the chunks that have arrived whole and have no extension; return where they end."""
        begun, taken = at, 0
        while (size := _plain_size(data, at)) is not None:
            start = size.end()
            end = start + int(size[1], 16)
            if end == start or data[end : end + 2] != b"\r\n":
                break
            pieces.append(data[start:end])
            taken += end - start
            at = end + 2
        self._spend(at - begun - taken - taken / _BODY_SHARE)
        return at

    def _spend(self, overhead: float) -> None:
        self._overhead += overhead
        if self._overhead > OVERHEAD_BYTES:
            raise RequestError(400, "the chunks are too small for so many")

    def _take_line(self, line: bytes) -> None:
        if self._trailing < 0:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise RequestError(400, "a chunk's size is no number")
            self._left = int(match[1], 16)
            if not self._left:
                self._trailing = 0
        elif not line:
            self.complete = True
        else:
            # Trailers are read to find the beginning of the next request, and then ignored: nothing
            # that follows a body may change what its headers said (RFC 9110, 6.5.1).
            self._trailing += len(line)
            if self._trailing > TRAILER_BYTES:
                raise RequestError(431, "the trailers are too large")
            if _TRAILER.fullmatch(line) is None:
                raise RequestError(400, "a trailer is malformed")


def _line(data: bytes, start: int, longest: int) -> bytes | None:
    """Return the line at ``start`` without its end; None if the end has not arrived."""
    end = data.find(b"\r\n", start, start + longest + 2)
    if end >= 0:
        return data[start:end]
    if len(data) - start > longest + 1:
        raise RequestError(400, "a line of the chunked coding is too long")
    if b"\n" in data[start:]:
        raise RequestError(400, "a line feed without carriage return")
    return None
