"""The head of an HTTP/1.1 answer: status line, headers, and the framing of the body. Pure.

Both servers of this package, this one and hypercorn, answer with the same bytes: the order and form
of the headers are h11's, and ``tests/integration/test_server_conformance.py`` runs on both.
"""

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

from ..base.http_grammar import breaks_value, is_token_bytes
from .request_head import RequestHead

#: Answers with the same status and the same tuple of headers are encoded once; so many are kept.
_KEPT: Final = 256


class AnswerError(Exception):
    """The application sent messages that make no answer."""


class Framing(enum.Enum):
    """The ways in which a client finds the end of an answer's body (RFC 9112, 6.3)."""

    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    CLOSE = enum.auto()
    NO_BODY = enum.auto()


class AnswerHead(NamedTuple):
    """An encoded head: ``data`` goes on the wire as it is.

    ``closes``: the connection ends after this answer. ``length`` is the announced one in bytes, 0
    where none is announced.
    """

    data: bytes
    framing: Framing
    length: int
    closes: bool


_encoded: dict[object, AnswerHead] = {}


def answer_head(
    request: RequestHead, status: int, headers: Iterable[tuple[bytes, bytes]], *, close: bool
) -> AnswerHead:
    """Encode a head as h11 does, so that this server and hypercorn answer with the same bytes.

    Args:
        request: the request that is answered.
        status: 200 to 599.
        headers: as the application sent them.
        close: announce that the connection ends.

    Raises:
        AnswerError: a header cannot be sent, or the content length is no number.
    """
    # Only a tuple can be a key of the memory: a list may change after it was remembered.
    if type(headers) is not tuple:
        return _encode(request, status, list(headers), close)
    key = (status, headers, close, request.method == "HEAD", request.version)
    try:
        found = _encoded.get(key)
    except TypeError:  # something in the tuple is mutable
        return _encode(request, status, list(headers), close)
    if found is None:
        if len(_encoded) >= _KEPT:
            _encoded.clear()
        found = _encoded[key] = _encode(request, status, list(headers), close)
    return found


def informational(status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Encode an interim answer, 100 to 199 without 101: this server switches no protocols."""
    return _lines(status, [_checked(name, value) for name, value in headers])


#: Bodies of the answers that the server itself gives, in the form of the receiver's own answers.
_REFUSALS: Final = {
    400: b'{"error":"bad request"}',
    408: b'{"error":"request too slow"}',
    414: b'{"error":"request line too long"}',
    431: b'{"error":"headers too large"}',
    501: b'{"error":"not implemented"}',
    503: b'{"error":"temporarily unavailable"}',
    505: b'{"error":"HTTP version not supported"}',
}


def refusal(status: int, *extra: tuple[bytes, bytes]) -> bytes:
    """Encode a whole answer of the server itself, after which the connection is closed."""
    body = _REFUSALS.get(status, b"")
    media = ((b"content-type", b"application/json"),) if body else ()
    length = (b"content-length", b"%d" % len(body))
    return _lines(status, [*media, length, *extra, (b"Connection", b"close")]) + body


def _encode(
    request: RequestHead, status: int, headers: list[tuple[bytes, bytes]], close: bool
) -> AnswerHead:
    lines: list[tuple[bytes, bytes]] = []
    connection: list[bytes] = []
    length: int | None = None
    chunked = False
    bodiless = status in (204, 304)  # these end with their head, whatever it says
    for name, value in headers:
        name, value = _checked(name, value)
        match name.lower():
            case b"content-length":
                if not value.isdigit() or (length is not None and length != int(value)):
                    raise AnswerError(f"no content length: {value!r}")
                if length is None:
                    lines.append((name, value))
                length = int(value)
            case b"transfer-encoding":
                if chunked or value.lower() != b"chunked":
                    raise AnswerError(f"a transfer coding that is not supported: {value!r}")
                chunked = True
                if bodiless:
                    lines.append((name, value.lower()))
            case b"connection":
                connection += [token.strip() for token in value.lower().split(b",")]
            case _:
                lines.append((name, value))
    close = close or b"close" in connection
    framing = Framing.NO_BODY
    if not bodiless and (chunked or length is None):
        # The chunked coding overrides a length (RFC 9112, 6.3). An answer to HEAD has the headers
        # that the answer to GET would have (RFC 9110, 9.3.2).
        lines = [pair for pair in lines if pair[0].lower() != b"content-length"]
        if request.version == "1.1":
            lines.append((b"Transfer-Encoding", b"chunked"))
            framing = Framing.CHUNKED
        else:
            # HTTP/1.0 knows no chunks: the end of the connection is the end of the body.
            framing, close = Framing.CLOSE, True
    elif not bodiless:
        framing = Framing.LENGTH
    if request.method == "HEAD":
        framing = Framing.NO_BODY
    if close:
        connection = [token for token in connection if token not in (b"close", b"keep-alive")]
        connection.append(b"close")
    lines += [(b"Connection", token) for token in sorted(set(connection)) if token]
    return AnswerHead(_lines(status, lines), framing, length or 0, close)


def _checked(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    name, value = bytes(name).strip(), bytes(value).strip()
    if is_token_bytes(name) is None or breaks_value(value) is not None:
        raise AnswerError(f"a header that cannot be sent: {name!r}: {value!r}")
    return name, value


def _lines(status: int, lines: list[tuple[bytes, bytes]]) -> bytes:
    head = b"".join(b"%b: %b\r\n" % pair for pair in lines)
    return b"HTTP/1.1 %d \r\n%b\r\n" % (status, head)
