"""The parts of HTTP/2 beside h2: corrections of h2, headers in its form, the state of a stream."""

import re
from typing import Any

import h2.config
import h2.connection
import trio
from hpack import NeverIndexedHeaderTuple

from sdk_trio.base.bell import Bell
from sdk_trio.client.exchange import Headers, NetworkError, Outgoing, PeerProtocolError
from sdk_trio.client.http1 import are_sound, check_request

#: The number of streams that h2 remembers above which ended ones are removed.
SWEEP_STREAMS = 512

#: Headers that belong to a connection of HTTP/1.1 and are forbidden here (RFC 9113, 8.2.2).
_CONNECTION_HEADERS = frozenset(
    [b"host", b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"]
)
#: h2's checks of headers are off, because this file checks them in both directions in a fifth of
#: the time.
CONFIG = h2.config.H2Configuration(
    client_side=True,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
)
_STATUS = re.compile(rb"[1-9][0-9][0-9]")
#: Values that must not enter the compression tables, of ours or of a proxy (RFC 7541, 7.1.3).
_SECRET_HEADERS = frozenset([b"authorization", b"cookie", b"proxy-authorization"])


class CorrectedProtocol(h2.connection.H2Connection):
    """h2, corrected in two places; a canary test watches the overridden methods.

    GOAWAY ends no stream that the server still answers. h2 treats GOAWAY as the end of the
    connection: it drops queued frames and refuses later ones. But a server that sends it gracefully
    (as nginx does after some 1000 requests) goes on answering every stream up to the one it names
    (RFC 9113, 6.8).

    Opening a stream counts none of the others. h2 would go through all of them each time, although
    the pool has kept the server's limit already. That walk also removes ended streams, so it is
    still done once there are many.
    """

    @property
    def open_outbound_streams(self) -> int:
        """Return a number below every limit; with many streams, remove ended ones and count."""
        return super().open_outbound_streams if len(self.streams) > SWEEP_STREAMS else 0

    def _receive_goaway_frame(self, frame: Any) -> Any:
        state, queued = self.state_machine.state, self.data_to_send()
        result = super()._receive_goaway_frame(frame)
        self.state_machine.state = state
        self._data_to_send += queued
        return result


def request_headers(request: Outgoing) -> Headers:
    """Return the pseudo-headers and headers of ``request``; raises :class:`OurProtocolError`."""
    check_request(request)
    authority = str(request.origin).partition("://")[2].encode()
    headers: Headers = []
    for name, value in request.headers:
        lower = name.lower()
        if lower == b"host":
            authority = value
        elif lower in _SECRET_HEADERS:
            headers.append(NeverIndexedHeaderTuple(lower, value.strip()))
        elif lower == b"te":
            if value.strip().lower() == b"trailers":  # nothing else is allowed (RFC 9113, 8.2.2)
                headers.append((lower, b"trailers"))
        elif lower not in _CONNECTION_HEADERS:
            headers.append((lower, value.strip()))
    return [
        (b":method", request.method),
        (b":authority", authority),
        (b":scheme", request.origin.scheme.encode()),
        (b":path", request.target),
        *headers,
    ]


def answer_head(fields: Headers) -> tuple[int, Headers]:
    """Return status and headers of an answer.

    Raises:
        PeerProtocolError: they are no valid headers, or hold bytes that would break a message that
            they are passed on in.
    """
    (name, status), *headers = fields or [(b"", b"")]
    if name == b":status" and _STATUS.fullmatch(status) and are_sound(headers):
        return int(status), headers
    raise PeerProtocolError("the answer's headers are no headers of HTTP/2")


class Stream:
    """One exchange's state; the reader fills it, the request's task empties it."""

    __slots__ = (
        "arrival",
        "chunks",
        "ended",
        "error",
        "headers",
        "id",
        "opened",
        "unacknowledged",
        "upload_ended",
        "window",
    )

    def __init__(self, stream_id: int, *, opened: float, upload_ended: bool) -> None:
        self.id = stream_id
        self.opened = opened
        self.upload_ended = upload_ended
        self.headers: tuple[int, Headers] | None = None
        self.chunks: list[bytes] = []
        self.unacknowledged = 0
        self.ended = False
        self.error: NetworkError | None = None
        self.arrival = trio.Event()
        self.window = Bell()

    def open_window(self) -> None:
        """Wake the upload, if one waits for the server's window."""
        if self.upload_ended:
            return
        self.window.ring()

    def fail(self, error: NetworkError) -> None:
        """End with ``error``; each stream raises a new one, so that tracebacks stay apart."""
        self.error = error
        self.arrival.set()
        self.open_window()

    def check(self) -> None:
        """Raise the stream's error, unless the answer is complete all the same."""
        if self.error is not None and not self.ended:
            raise self.error.again()
