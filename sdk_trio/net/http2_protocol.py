"""Additions to h2: corrections, HPACK encoding, conversion of headers, the state of a stream."""

import re
from typing import Any, Protocol

import h2.config
import h2.connection
import h2.errors
import httpx
import trio
from hpack import Encoder, NeverIndexedHeaderTuple
from hpack.hpack import encode_integer

from .http1 import are_sound, check_request
from .messages import (
    AnswerBody,
    Headers,
    NetworkError,
    PeerProtocolError,
    ReadTimedOutError,
    headers_of,
    origin_of,
    target_of,
)

#: Above this number of remembered streams, h2's ended ones are removed.
SWEEP_STREAMS = 512

#: Connection headers of HTTP/1.1, which are forbidden here (RFC 9113, 8.2.2).
_CONNECTION_HEADERS = frozenset(
    [b"host", b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"]
)
#: h2's header checks are off: this file does them in both directions in a fifth of the time.
CONFIG = h2.config.H2Configuration(
    client_side=True,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
)
_STATUS = re.compile(rb"[1-9][0-9][0-9]")
#: Values that must not enter our compression table or a proxy's (RFC 7541, 7.1.3).
_SECRET_HEADERS = frozenset([b"authorization", b"cookie", b"proxy-authorization"])


#: First bits of a field that must not enter our table, or any other (RFC 7541, 6.2).
_NOT_INDEXED, _NEVER_INDEXED = 0x00, 0x10
_NAME_BITS, _LENGTH_BITS = 4, 7


class FieldEncoder(Encoder):
    """An HPACK encoder that caches encoded fields: requests of one client differ little.

    hpack adds each new field to the table, which evicts others and changes every index. Here only
    the first value of a name is added, and other values are sent literally: the table stabilizes
    after the first requests, and a field in it costs one lookup. Literal values are not
    Huffman-coded, which would save some bytes. A call costs a tenth less.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[bytes, bytes], bytes] = {}
        self._names: set[bytes] = set()  # names with a value in the table

    def encode(self, headers: Any, huffman: bool = True) -> bytes:
        """Return the block of ``headers``, pairs of bytes with the pseudo-headers first."""
        sizes = b"" if not self.table_size_changes else self._size_update()
        known = self._known
        return sizes + b"".join([known.get(field) or self._encode(field) for field in headers])

    def _size_update(self) -> bytes:
        """Return the announcement of the table's new size, including the smallest one in between.

        hpack announces every size, which a server may refuse by then (RFC 7541, 4.2), and none if
        the same size was set twice.
        """
        self._known.clear()
        self._names.clear()
        self.table_size_changes = sorted({min(self.table_size_changes), self.header_table_size})
        self.header_table.resized = True
        return super().encode(())

    def _encode(self, field: tuple[bytes, bytes]) -> bytes:
        name, value = field
        is_secret = isinstance(field, NeverIndexedHeaderTuple)
        index, _, whole = self.header_table.search(name, value) or (0, name, None)
        if whole is not None and not is_secret:
            self._known[name, value] = encoded = self.add((name, value), sensitive=False)
            return encoded
        if index and (is_secret or name in self._names):
            kind = _NEVER_INDEXED if is_secret else _NOT_INDEXED
            length = _integer(len(value), _LENGTH_BITS, 0)
            return b"".join((_integer(index, _NAME_BITS, kind), length, value))
        if not is_secret:
            self._known.clear()  # the new entry moves all others
            self._names.add(name)
        return self.add((name, value), sensitive=is_secret, huffman=True)


def _integer(value: int, bits: int, first: int) -> bytes:
    """Return ``value`` as an integer with a prefix of ``bits``; ``first`` has the other bits."""
    if value < (1 << bits) - 1:
        return bytes((first | value,))
    encoded = encode_integer(value, bits)
    encoded[0] |= first
    return bytes(encoded)


#: The bytes at the start of a frame that contain its length (RFC 9113, 4.1).
_LENGTH_BYTES = 3


class CorrectedProtocol(h2.connection.H2Connection):
    """h2 with three corrections and our encoder; a canary test watches the overridden parts.

    GOAWAY does not end streams that the server still answers. h2 treats GOAWAY as the end of the
    connection: it drops queued frames and refuses later ones. But a server that sends it gracefully
    (as nginx does after some 1000 requests) still answers every stream up to the one it names (RFC
    9113, 6.8).

    Opening a stream does not count the others. h2 would iterate over all of them each time,
    although the pool already enforces the server's limit. The iteration also removes ended streams,
    so it still runs once there are many.

    A frame with a too large announced length is refused once its length has arrived. h2 checks it
    only after the whole frame, so a connection with an announced length of 16 MiB, or with plain
    text, waited for bytes that never came.
    """

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.encoder: FieldEncoder = FieldEncoder()

    @property
    def incomplete(self) -> bytearray:
        """The incomplete beginning of the next frame."""
        return self.incoming_buffer._data

    def check_next_frame(self) -> None:
        """Check the announced length of the next frame, if it has arrived.

        Raises:
            PeerProtocolError: it exceeds our limit; GOAWAY is queued.
        """
        beginning = self.incomplete
        if len(beginning) < _LENGTH_BYTES:
            return
        length = int.from_bytes(beginning[:_LENGTH_BYTES], "big")
        if length > self.max_inbound_frame_size:
            self.close_connection(h2.errors.ErrorCodes.FRAME_SIZE_ERROR)
            # The bytes may be an answer, which errors never show.
            text = "; it answers as HTTP/1 does" if beginning.startswith(b"HTT") else ""
            raise PeerProtocolError(
                f"the server announced an HTTP/2 frame of {length} bytes, of which "
                f"{self.max_inbound_frame_size} are allowed{text}"
            )

    @property
    def has_data_to_send(self) -> bool:
        """Whether ``data_to_send`` would return anything."""
        return bool(self._data_to_send)

    @property
    def open_outbound_streams(self) -> int:
        """Return a number below every limit; with many streams, remove ended ones and count."""
        return super().open_outbound_streams if len(self.streams) > SWEEP_STREAMS else 0

    def _receive_goaway_frame(self, frame: Any) -> Any:
        # Saved before h2 handles the frame, and restored after: h2 discards these.
        state, queued = self.state_machine.state, self.data_to_send()
        result = super()._receive_goaway_frame(frame)
        self.state_machine.state = state
        self._data_to_send += queued
        return result


def request_headers(request: httpx.Request) -> Headers:
    """Return the pseudo-headers and headers of ``request``; raises :class:`OurProtocolError`."""
    method, target = request.method.encode("ascii"), target_of(request)
    given = headers_of(request)
    check_request(method, target, given)
    authority = b""
    headers: Headers = []
    for name, value in given:
        lower = name.lower()
        if lower == b"host":
            # HTTP/2 has a pseudo-header for it, and a server may refuse both (RFC 9113, 8.3.1).
            authority = value
        elif lower in _SECRET_HEADERS:
            # Never in a table, ours or a proxy's: compressing it with attacker-chosen text would
            # leak it (RFC 7541, 7.1).
            headers.append(NeverIndexedHeaderTuple(lower, value.strip()))
        elif lower == b"te":
            if value.strip().lower() == b"trailers":  # nothing else is allowed (RFC 9113, 8.2.2)
                headers.append((lower, b"trailers"))
        elif lower not in _CONNECTION_HEADERS:
            headers.append((lower, value.strip()))
    return [
        (b":method", method),
        (b":authority", authority or str(origin_of(request)).partition("://")[2].encode()),
        (b":scheme", request.url.scheme.encode()),
        (b":path", target),
        *headers,
    ]


def answer_head(fields: Headers) -> tuple[int, Headers]:
    """Return status and headers of an answer.

    Raises:
        PeerProtocolError: they are invalid, or contain bytes that would break a message they are
            forwarded in.
    """
    (name, status), *headers = fields or [(b"", b"")]
    # h2 checks the form of the fields, but httpx passes their bytes on, where a line break would
    # start another header.
    if name == b":status" and _STATUS.fullmatch(status) and are_sound(headers):
        return int(status), headers
    raise PeerProtocolError("the answer's headers are not valid in HTTP/2")


class ClientStream:
    """One exchange's state; the reader fills it, the request's task drains it."""

    __slots__ = (
        "arrival",
        "chunks",
        "ended",
        "error",
        "headers",
        "id",
        "opened",
        "upload_ended",
    )

    def __init__(self, stream_id: int, *, opened: float, upload_ended: bool) -> None:
        self.id: int = stream_id
        self.opened: float = opened
        self.upload_ended: bool = upload_ended
        self.headers: tuple[int, Headers] | None = None
        self.chunks: list[bytes] = []
        self.ended: bool = False
        self.error: NetworkError | None = None
        self.arrival: trio.Event = trio.Event()

    def fail(self, error: NetworkError) -> None:
        """End with ``error``; each stream raises its own copy, to keep tracebacks separate."""
        self.error = error
        self.arrival.set()

    def check(self) -> None:
        """Raise the stream's error, unless the answer is complete anyway."""
        if self.error is not None and not self.ended:
            raise self.error.again()

    async def wait(self, limit: float | None) -> None:
        """Wait for the server's next frame, at most ``limit`` seconds; None for no limit.

        Raises:
            NetworkError: the stream has failed, or nothing arrived in time.
        """
        self.check()
        if limit is None:
            await self.arrival.wait()
        else:
            with trio.move_on_after(limit) as scope:
                await self.arrival.wait()
            if scope.cancelled_caught:
                raise ReadTimedOutError(f"the server sent nothing for {limit:g} s")
        self.arrival = trio.Event()
        self.check()

    async def receive(self, limit: float | None) -> bytes:
        """Return the next bytes of the body, ``b""`` at its end; errors are those of :meth:`wait`.

        It checkpoints only if it has to wait.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.chunks and not self.ended:
            await self.wait(limit)
        data = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        self.chunks.clear()
        return data


class StreamConnection(Protocol):
    """The part of a connection that the body of an answer uses, for HTTP/2 and HTTP/3."""

    def note_read(self, stream: Any) -> None:
        """Note that the request's task has taken the received bytes of ``stream``."""

    def abandon(self, stream: Any) -> None:
        """Abandon ``stream``: reset it unless the exchange is over."""


class StreamBody(AnswerBody):
    """Reads one stream's body."""

    def __init__(
        self,
        request: httpx.Request,
        connection: StreamConnection,
        stream: ClientStream,
        limit: float | None,
    ) -> None:
        super().__init__(request)
        self._connection = connection
        self._stream = stream
        self._limit = limit

    async def receive(self) -> bytes:
        """Return the next bytes, ``b""`` at the end; cancellation abandons the exchange."""
        try:
            data = await self._stream.receive(self._limit)
        except BaseException:
            self.abandon()
            raise
        self._connection.note_read(self._stream)
        return data

    def abandon(self) -> None:
        """Abandon the rest."""
        self._connection.abandon(self._stream)
