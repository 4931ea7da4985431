"""The head of an HTTP/1.1 request: strict parsing of its lines, and where its body ends. Pure.

The grammar is that of RFC 9112 without its leniencies. Anything that two parsers could read
differently is refused, because a proxy in front may read it the other way (request smuggling): two
lengths, lengths beside a transfer coding, folded lines, line feeds without carriage returns, white
space before a colon. h11 accepts some of these; what both accept they read alike.

A later minor version is read as 1.1 (RFC 9110, 2.5). A target in absolute form is read as its path,
and its authority replaces the Host header (RFC 9112, 3.2.2). An ``Upgrade`` is ignored: the
application does not see the header (RFC 9110, 7.8).
"""

import re
from typing import Final

import msgspec

from ..base.asgi import Header
from ..base.http_grammar import FIELD_VALUE_BYTES, TOKEN_BYTES
from .limits import Limits

#: Lines of earlier requests of a connection, as they were read, and whether they decide about the
#: connection or the body.
KnownLines = dict[bytes, tuple[Header, bool]]

#: Bounds of one connection's memory: a sender repeats few lines, and they are short.
_KNOWN_LINES: Final = 32
_KNOWN_LINE_BYTES: Final = 256

_HEAD: Final = re.compile(
    rb"(" + TOKEN_BYTES + rb") ([\x21-\x7e]++) HTTP/([0-9])\.([0-9])\r\n"
    rb"((?:" + TOKEN_BYTES + rb":" + FIELD_VALUE_BYTES + rb"\r\n)*+)\r\n"
)
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")

#: Headers that decide about the connection or the body.
_DECISIVE: Final = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect")
)

#: The most digits of a content length, as in h11. Python's int() of a longer one takes quadratic
#: time.
_LENGTH_DIGITS: Final = 20

END_OF_HEAD: Final = b"\r\n\r\n"

_absolute_form = re.compile(rb"(?i:https?)://([^/?#]*+)([^#]*+)").fullmatch


class RequestError(Exception):
    """A malformed or unsupported request; ``status`` is the answer to it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """One request without its body.

    ``method`` is in capitals, as with hypercorn. ``length`` is the body's in bytes; None: it is in
    the chunked coding. ``target`` is in origin form; only ``*`` and URLs that are not HTTP's stay
    as they were sent.
    """

    method: str
    target: bytes
    version: str
    headers: list[Header]
    length: int | None
    keep_alive: bool
    expects_continue: bool


def parse_head(data: bytes, limits: Limits, known: KnownLines) -> RequestHead:
    """Read a head that ends with its empty line.

    ``known`` belongs to the connection and is empty at first: most lines are the same in every
    request, so they are parsed once.

    Raises:
        RequestError: it is malformed (400), too large (414, 431) or not supported (501, 505).
    """
    match = _HEAD.fullmatch(data)
    if match is None:
        raise _refusal(data, limits)
    method, target, major, minor, fields = match.groups()
    if major != b"1":
        raise RequestError(505, "the version of HTTP is not supported")
    if match.end(2) > limits.request_line_bytes:
        raise RequestError(414, "the request line is too long")
    if method == b"CONNECT":
        # After an answer of 2xx the bytes would be a tunnel's (RFC 9110, 9.3.6). An application
        # that answers 200 to every method would turn the body into the next request.
        raise RequestError(501, "CONNECT is not supported")
    lines = fields.split(b"\r\n")
    lines.pop()
    if len(lines) > limits.headers:
        raise RequestError(431, "too many headers")
    headers: list[Header] = []
    decisive: list[Header] = []
    for line in lines:
        header, decides = known.get(line) or _read_line(line, known)
        headers.append(header)
        if decides:
            decisive.append(header)
    # Methods are case-sensitive (RFC 9110, 9.1), but hypercorn takes "post" for POST, and both
    # servers must read a request alike.
    head = _decide(method.decode("ascii").upper(), target, minor != b"0", headers, decisive)
    if target[:1] != b"/":
        target, headers = in_origin_form(target, headers)
        head = msgspec.structs.replace(head, target=target, headers=headers)
    return head


def in_origin_form(target: bytes, headers: list[Header]) -> tuple[bytes, list[Header]]:
    """Return the path of an absolute target, and the headers with its authority as their Host.

    A target that is not in absolute form stays as it is.

    Raises:
        RequestError: the target names no host, or a user (RFC 9110, 4.2.1 and 4.2.4).
    """
    match = _absolute_form(target)
    if match is None:
        return target, headers
    authority, path = match.groups()
    if not authority or _HOST.fullmatch(authority) is None:
        raise RequestError(400, "the target names no host")
    headers = [(name, authority) if name == b"host" else (name, value) for name, value in headers]
    return (path if path[:1] == b"/" else b"/" + path), headers


def _read_line(line: bytes, known: KnownLines) -> tuple[Header, bool]:
    name, _, value = line.partition(b":")
    name = name.lower()
    value = value.strip(b" \t")
    if name == b"transfer-encoding":
        value = value.lower()  # as h11 does; the application must see the same on both servers
    read = (name, value), name in _DECISIVE
    if len(known) < _KNOWN_LINES and len(line) <= _KNOWN_LINE_BYTES:
        known[line] = read
    return read


def _decide(
    method: str, target: bytes, modern: bool, headers: list[Header], decisive: list[Header]
) -> RequestHead:
    """Apply the rules of RFC 9112, sections 3.2 (Host), 6 (body) and 9.3 (connection)."""
    hosts = 0
    length: int | None = 0
    lengths = codings = 0
    keep_alive = modern  # HTTP/1.0 gets one answer for each connection, as with h11
    expects_continue = upgrade = False
    for name, value in decisive:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                raise RequestError(400, "the Host header is malformed")
        elif name == b"content-length":
            lengths += 1
            # bytes.isdigit() accepts ASCII digits only, unlike str.isdigit().
            if not value.isdigit() or len(value) > _LENGTH_DIGITS:
                raise RequestError(400, "the content length is no number")
            length = int(value)
        elif name == b"transfer-encoding":
            codings += 1
            if value != b"chunked":
                raise RequestError(501, "the transfer coding is not supported")
        elif name == b"connection":
            if b"close" in _tokens(value):
                keep_alive = False
        elif name == b"upgrade":
            upgrade = True
        elif name == b"expect" and b"100-continue" in _tokens(value):
            expects_continue = modern
    if hosts > 1 or (modern and not hosts):
        raise RequestError(400, "there must be one Host header")
    if lengths + codings > 1:
        raise RequestError(400, "the body has two lengths")
    if codings:
        if not modern:
            raise RequestError(400, "HTTP/1.0 has no transfer codings")
        length = None
    if upgrade:
        headers = [header for header in headers if header[0] != b"upgrade"]
    version = "1.1" if modern else "1.0"
    return RequestHead(method, target, version, headers, length, keep_alive, expects_continue)


def check_beginning(data: bytes | bytearray, limits: Limits, seen: int = 0) -> None:
    """Check a head whose end has not arrived; it returns if the head may still become valid.

    ``seen`` bytes were checked before, so that a head in small pieces costs linear time.

    Raises:
        RequestError: no further bytes can make it a valid request.
    """
    # A TLS handshake begins with 0x16; a lone CR may be the first half of an empty line.
    if data[0] <= 0x20 and data != b"\r":
        raise RequestError(400, "this is no request line")
    start = seen - (data[seen - 1 : seen] == b"\r")  # CR and LF may come in two pieces
    if data.count(b"\n", start) != data.count(b"\r\n", start):
        raise RequestError(400, "a line feed without carriage return")
    if len(data) > limits.request_line_bytes and b"\r\n" not in data:
        raise RequestError(414, "the request line is too long")
    if len(data) > limits.head_bytes:
        raise RequestError(431, "the headers are too large")


def _refusal(data: bytes, limits: Limits) -> RequestError:
    if data.find(b"\r\n") > limits.request_line_bytes:
        return RequestError(414, "the request line is too long")
    return RequestError(400, "this is no request")


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip() for token in value.lower().split(b",")]
