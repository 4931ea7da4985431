"""Decompression of answers' bodies within a bound (RFC 9110, 8.4).

httpx's own decoders return everything that a piece of the body decompresses to, however much that
is: 600 KiB of gzip can hold 600 MiB. This one stops at the bound while it decompresses.
"""

import zlib
from collections.abc import AsyncIterator, Iterable, Iterator

import httpx
import trio

#: The most bytes that one step of decompression returns, so that the bound is checked in between.
_STEP = 65_536

#: The most codings on top of each other. Servers use one; each further one multiplies the size that
#: a small body can expand to.
_MOST_CODINGS = 3

_KNOWN = frozenset({"gzip", "x-gzip", "deflate"})
_GZIP_MAGIC = b"\x1f"
_ZLIB_HEAD_BYTES = 2


class TooLargeError(Exception):
    """A body is larger than its bound; ``beginning`` holds the bytes up to it, if wanted."""

    def __init__(self, limit: int, beginning: bytes) -> None:
        self.limit = limit
        self.beginning = beginning
        super().__init__(f"the body has more than {limit} bytes")


class BoundedBody:
    """Decompresses one body, piece by piece, and counts it.

    Args:
        codings: the values of ``Content-Encoding``, the outermost last. ``gzip`` and ``deflate``
            are known; requests ask for no other.
        limit: bytes that the body may have, compressed and not; None for no bound.
        keeps_beginning: the bytes up to the bound are in the error.

    ``is_coded`` says whether there is anything to decompress.
    """

    def __init__(
        self, codings: Iterable[str], *, limit: int | None, keeps_beginning: bool = False
    ) -> None:
        names = [name for coding in codings if (name := coding.lower()) not in ("", "identity")]
        self._refusal = _refusal(names)
        self.is_coded: bool = bool(names)
        self._layers = [_Zlib(is_gzip=name != "deflate") for name in reversed(names)]
        self._limit = limit
        self._received = 0
        self._decoded = 0
        self._kept: list[bytes] | None = [] if keeps_beginning else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed ``data``, in pieces of 64 KiB at most if it is compressed.

        Raises:
            TooLargeError: the body exceeds the bound.
            httpx.DecodingError: it is not compressed as its head says.
        """
        if self._refusal:
            raise httpx.DecodingError(self._refusal)
        self._received += len(data)
        # The compressed size is bounded as well, because an endless row of empty gzip members
        # decompresses to nothing for ever. Incompressible data grow a little when compressed, so
        # that bound is somewhat wider.
        if self._layers:
            self._check(self._received - self._received // 8 - 1024)
        pieces: Iterator[bytes] = iter((data,))
        for layer in self._layers:
            pieces = layer.inflate(pieces)
        fault = ""
        try:
            for piece in pieces:
                self.count(piece)
                yield piece
        except zlib.error as error:
            fault = str(error)
        if fault:
            raise httpx.DecodingError(f"the answer is badly compressed: {fault}")

    def count(self, piece: bytes) -> None:
        """Count a piece of the body that is not compressed, or not any more.

        Raises:
            TooLargeError: the body exceeds the bound.
        """
        self._decoded += len(piece)
        if self._kept is not None:
            self._kept.append(piece)
        self._check(self._decoded)

    def end(self) -> None:
        """Check the body's end.

        Raises:
            httpx.DecodingError: the body ended before the compressed data did.
        """
        if self._received and not all(layer.has_ended for layer in self._layers):
            raise httpx.DecodingError("the answer ends before its compressed data do")

    def _check(self, size: int) -> None:
        if self._limit is not None and size > self._limit:
            raise TooLargeError(self._limit, b"".join(self._kept or ())[: self._limit])


class BoundedStream(httpx.AsyncByteStream):
    """The stream of a body as ``body`` decompresses it; its own iterator.

    Reading raises what :class:`BoundedBody` raises, and what the stream itself does.
    """

    def __init__(self, stream: httpx.AsyncByteStream, body: BoundedBody) -> None:
        self._stream = stream
        self._parts = aiter(stream)
        self._body = body
        self._pieces: Iterator[bytes] = iter(())

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._body.is_coded:
            data = await anext(self._parts)
            self._body.count(data)
            return data
        piece = next(self._pieces, None)
        if piece is not None:
            # One part can decompress to a thousand pieces; the checkpoint lets other tasks run.
            await trio.lowlevel.checkpoint()
            return piece
        while piece is None:
            try:
                data = await anext(self._parts)
            except StopAsyncIteration:
                self._body.end()
                raise
            self._pieces = self._body.feed(data)
            piece = next(self._pieces, None)
        return piece

    async def aclose(self) -> None:
        """Close the stream and its iterator, because a generator would hold the connection."""
        close = getattr(self._parts, "aclose", None)
        if close is not None:
            await close()
        await self._stream.aclose()


def bound(response: httpx.Response, *, limit: int | None, keeps_beginning: bool = False) -> None:
    """Have the unread body of ``response`` decompressed within a bound when it is read.

    The headers that describe a compressed body are removed, so that httpx does not decompress it
    again. A body whose announced length is within the bound, and which is not compressed, passes
    untouched: the connection checks its length.
    """
    codings: list[str] = []
    length: int | None = None
    for key, value in response.headers.raw:  # each answer comes here: a third of a look-up's time
        lower = key.lower()
        if lower == b"content-length" and value.isdigit():
            length = int(value)
        elif lower == b"content-encoding":
            codings = response.headers.get_list("content-encoding", split_commas=True)
    if not codings and (limit is None or (length is not None and length <= limit)):
        return
    body = BoundedBody(codings, limit=limit, keeps_beginning=keeps_beginning)
    stream = response.stream
    if isinstance(stream, httpx.AsyncByteStream):
        response.stream = BoundedStream(stream, body)
    if codings:
        for name in ("content-encoding", "content-length"):
            response.headers.pop(name, None)


def _refusal(codings: list[str]) -> str:
    unknown = [coding for coding in codings if coding not in _KNOWN]
    if unknown:
        return f"the answer is coded as {unknown[0]!r}, which was not asked for"
    return f"the answer has {len(codings)} codings" if len(codings) > _MOST_CODINGS else ""


class _Zlib:
    """One coding. ``deflate`` is zlib's format, and some send it without zlib's head."""

    def __init__(self, *, is_gzip: bool) -> None:
        self._is_gzip = is_gzip
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16 if is_gzip else zlib.MAX_WBITS)
        self._has_begun = is_gzip
        self._head = b""

    @property
    def has_ended(self) -> bool:
        return self._inflater.eof

    def inflate(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for data in pieces:
            yield from self._inflate(data)

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflater.eof:
                # A gzip file may have several members (RFC 1952, 2.2); any other data that follow
                # the end is padding, which every reader ignores.
                if not (self._is_gzip and data.startswith(_GZIP_MAGIC)):
                    return
                self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
            piece = self._begin(data) if not self._has_begun else self._step(data)
            yield piece
            # After a full step zlib may hold more output, although it has taken all of the input.
            while not self._inflater.eof and (
                self._inflater.unconsumed_tail or len(piece) == _STEP
            ):
                piece = self._step(self._inflater.unconsumed_tail)
                yield piece
            data = self._inflater.unused_data

    def _begin(self, data: bytes) -> bytes:
        self._head += data
        if len(self._head) < _ZLIB_HEAD_BYTES:
            return b""  # too little to tell whether it is a head
        self._has_begun = True
        try:
            return self._step(self._head)
        except zlib.error:
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._step(self._head)
        finally:
            self._head = b""

    def _step(self, data: bytes) -> bytes:
        return self._inflater.decompress(data, _STEP)
