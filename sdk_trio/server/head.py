"""Parsing of HTTP/1.1 request heads and bodies, and encoding of responses. Pure.

The grammar is that of RFC 9112 without its leniencies. Anything that two parsers could read
differently is refused, because a proxy in front may read it the other way (request smuggling):

- two lengths, or both a length and a transfer coding
- folded lines
- line feeds without carriage returns
- white space before a colon

h11 accepts some of these. A message that both accept has the same meaning to both.

A later minor version is read as 1.1 (RFC 9110, 2.5). A target in absolute form is read as its path,
and its authority replaces the Host header (RFC 9112, 3.2.2). An ``Upgrade`` header is ignored and
removed (RFC 9110, 7.8); an application can ask the connection for the upgrade. A body is read by
its length or by its chunks (RFC 9112, 7.1), with the same strictness.

The project's server and hypercorn send the same bytes: the order and form of a response's headers
are h11's. ``tests/integration/test_server_conformance.py`` runs against both.
"""

import enum
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from ..base.http import FIELD_VALUE_BYTES, TOKEN_BYTES, Header, Whole, breaks_value, is_token_bytes
from .limits import Limits

#: The longest head from which a template is made, in bytes. It bounds one connection's memory.
#: Heads of senders and their proxies have a few hundred bytes.
_TEMPLATE_BYTES: Final = 4 * 1024

_HEAD: Final = re.compile(
    rb"(" + TOKEN_BYTES + rb") ([\x21-\x7e]++) HTTP/([0-9])\.([0-9])\r\n"
    rb"((?:" + TOKEN_BYTES + rb":" + FIELD_VALUE_BYTES + rb"\r\n)*+)\r\n"
)
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")

#: Headers that determine the connection or the body.
_DECISIVE: Final = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect")
)

#: The most digits of a content length, as in h11. Python's int() of a longer one takes quadratic
#: time.
_LENGTH_DIGITS: Final = 20

END_OF_HEAD: Final = b"\r\n\r\n"

#: The number of pieces of a split head that are not headers: the request line, and two after the
#: last header.
_NO_HEADERS: Final = 3

#: A translation that changes every byte except visible ASCII characters. Translating the values of
#: a whole head costs less than matching a pattern against one of them.
_ONLY_VISIBLE: Final = bytes(code if 0x21 <= code <= 0x7E else 0x21 for code in range(256))

#: A value with spaces in it, such as a list of signatures or a program's name. Values with other
#: characters are rare, and are left to the pattern of the whole head.
_is_plain_value = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?").fullmatch

_absolute_form = re.compile(rb"(?i:https?)://([^/?#]*+)([^#]*+)").fullmatch

#: The number of encoded responses that are cached, and the most bytes of their bodies. The
#: receiver's own bodies have about thirty.
_CACHED: Final = 256
_CACHED_BODY_BYTES: Final = 1024

#: Bodies of the server's own refusals, in the form of the receiver's.
_REFUSALS: Final = {
    400: b'{"error":"bad request"}',
    408: b'{"error":"request too slow"}',
    414: b'{"error":"request line too long"}',
    431: b'{"error":"headers too large"}',
    501: b'{"error":"not implemented"}',
    503: b'{"error":"temporarily unavailable"}',
    505: b'{"error":"HTTP version not supported"}',
}

_QUOTED: Final = rb'"(?:[\t !\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*+"'
#: The name of an extension, and its value if it has one (RFC 9112, 7.1.1). An extension without a
#: name or with an open quotation is refused, because parsers differ in where its line ends.
_EXTENSION: Final = (
    rb";[ \t]*+" + TOKEN_BYTES + rb"(?:[ \t]*+=[ \t]*+"
    rb"(?:" + TOKEN_BYTES + rb"|" + _QUOTED + rb"))?+"
)
#: Sixteen digits are 2**64 bytes. Extensions are ignored. White space after a size is refused: the
#: grammar allows it only before an extension, and requests can be smuggled if one parser trims it
#: and another does not.
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:" + _EXTENSION + rb")*+")
_TRAILER: Final = re.compile(TOKEN_BYTES + rb":" + FIELD_VALUE_BYTES)

#: A whole line with a size and no extension: nearly all chunks begin with one.
_plain_size = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n").match

#: Bytes that the size lines of all chunks may take, in addition to an eighth of the body itself.
#: Each chunk costs about the same CPU, however small it is. Without a bound, a body in chunks of
#: one byte cost a hundred times as much as a plain one (compare CVE-2023-39326). A bound equal to
#: the body let chunks of five bytes cost 58 ms for a MiB on the wire; with an eighth they cost 11
#: ms (ADR 26). Bodies of up to about 9 KiB may still arrive in single bytes, and larger ones in
#: chunks of 50.
OVERHEAD_BYTES: Final = 16 * 1024
_BODY_SHARE: Final = 8

#: The longest line with a chunk's size and extensions, in bytes.
SIZE_LINE_BYTES: Final = 256

#: All trailers of one body, in bytes.
TRAILER_BYTES: Final = 8 * 1024


class RequestError(Exception):
    """A malformed or unsupported request; ``status`` is that of the response."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """One request without its body.

    ``method`` is in capitals, as with hypercorn. ``target`` is in origin form, or the ``*`` of
    OPTIONS. ``length`` is the size of the body in bytes, None in the chunked coding. ``upgrade`` is
    the protocol that the client offers to upgrade to, in lower case, empty if there is none.
    """

    method: str
    target: bytes
    version: str
    headers: list[Header]
    length: int | None
    keep_alive: bool
    expects_continue: bool
    upgrade: bytes = b""


class HeadTemplate:
    """A head of one connection, and the lines in which other heads differ.

    A sender's requests differ only in a few lines: the id, the time, the signature. All other lines
    are compared with those of a head that was parsed before, in a tenth of the time of parsing.

    A new connection uses the template of the last one, because some senders open a connection for
    each delivery. The duration of a comparison must not reveal the lines of one client to another.
    So hashes with a random key, Python's own, are compared first.

    Requests with the same template have the same method, target and headers, except for the values
    of the headers in ``varying``. Their clients may be different ones. The application may cache in
    ``memo`` any decision that depends on nothing else.
    """

    __slots__ = ("_hash", "_head", "_headers", "_lines", "_varying", "memo", "varying")

    def __init__(self, lines: list[bytes], head: RequestHead, varying: Iterable[int] = ()) -> None:
        self._head = head
        # A copy, because the application has the list of the head itself and may change it, for
        # example in middleware that adds a header.
        self._headers = head.headers.copy()
        self._lines = lines
        #: The number of the line (the request line is 0), the bytes before its value, and its name.
        self._varying: list[tuple[int, bytes, bytes]] = []
        for number in varying:
            _, _, rest = lines[number].partition(b":")
            prefix = lines[number][: len(lines[number]) - len(rest.lstrip(b" \t"))]
            lines[number] = prefix
            self._varying.append((number, prefix, head.headers[number - 1][0]))
        self._hash = hash(tuple(lines))
        self.varying: frozenset[bytes] = frozenset(name for _, _, name in self._varying)
        self.memo: Any = None

    def fill(self, data: bytes) -> RequestHead | None:
        """Read a head that differs only in the varying lines; None if it differs elsewhere."""
        lines = data.split(b"\r\n")
        if len(lines) != len(self._lines):
            return None
        known = self._head
        headers = self._headers.copy()
        length = known.length
        values: list[bytes] = []
        for number, prefix, name in self._varying:
            value = lines[number].removeprefix(prefix)
            if name == b"content-length":
                if not value.isdigit() or len(value) > _LENGTH_DIGITS:
                    return None
                length = int(value)
            headers[number - 1] = (name, value)
            values.append(value)
            # The line does not begin with the prefix, so its name may be another one.
            if value == lines[number]:
                return None
            lines[number] = prefix
        if hash(tuple(lines)) != self._hash or lines != self._lines:
            return None
        text = b"".join(values)
        if text.translate(_ONLY_VISIBLE) != text and not all(map(_is_plain_value, values)):
            return None
        return RequestHead(
            known.method,
            known.target,
            known.version,
            headers,
            length,
            known.keep_alive,
            known.expects_continue,
        )

    def varying_lines(self, lines: list[bytes], head: RequestHead) -> list[int]:
        """Return the numbers of the lines that vary, counting a new head; none if the heads are too
        different."""
        if len(lines) != len(self._lines) or lines[0] != self._lines[0]:
            return []
        already = {number for number, _, _ in self._varying}
        varying = [
            number
            for number, (line, known) in enumerate(zip(lines, self._lines, strict=True))
            if line != known or number in already
        ]
        names = {head.headers[number - 1][0] for number in varying}
        # Only parse_head reads the values of decisive headers; the one exception is the length,
        # which fill() reads as well.
        return [] if names & _DECISIVE - {b"content-length"} else varying


def read_head(
    data: bytes, limits: Limits, template: HeadTemplate | None
) -> tuple[RequestHead, HeadTemplate | None]:
    """Read a head that ends with its empty line, as :func:`parse_head` does.

    Args:
        data: the bytes of the head.
        limits: bounds of the head.
        template: the template of the last head; None at first.

    Returns:
        The head, and the template for the next one. There is none if the head is unusual or the
        last of its connection.

    Raises:
        RequestError: it is malformed (400), too large (414, 431) or not supported (501, 505).
    """
    head = None if template is None else template.fill(data)
    if head is not None:
        return head, template
    head = parse_head(data, limits)
    if not head.keep_alive or len(data) > _TEMPLATE_BYTES:
        return head, None
    lines = data.split(b"\r\n")
    # After an Upgrade was removed or the authority of an absolute target moved, lines and headers
    # do not correspond.
    if len(head.headers) != len(lines) - _NO_HEADERS or lines[0].split(b" ")[1] != head.target:
        return head, None
    varying = [] if template is None else template.varying_lines(lines, head)
    return head, HeadTemplate(lines, head, varying)


def parse_head(data: bytes, limits: Limits) -> RequestHead:
    """Read a head that ends with its empty line.

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
        # After a 2xx response the bytes would be a tunnel's (RFC 9110, 9.3.6). An application that
        # answers 200 to every method would turn the body into the next request.
        raise RequestError(501, "CONNECT is not supported")
    lines = fields.split(b"\r\n")
    lines.pop()
    if len(lines) > limits.headers:
        raise RequestError(431, "too many headers")
    headers: list[Header] = []
    decisive: list[Header] = []
    for line in lines:
        header = _read_line(line)
        headers.append(header)
        if header[0] in _DECISIVE:
            decisive.append(header)
    # Methods are case-sensitive (RFC 9110, 9.1), but hypercorn reads "post" as POST, and both
    # servers must read a request in the same way.
    head = _decide(method.decode("ascii").upper(), target, minor != b"0", headers, decisive)
    if target[:1] != b"/":
        target, headers = in_origin_form(head.method, target, head.headers)
        head = msgspec.structs.replace(head, target=target, headers=headers)
    return head


def in_origin_form(method: str, target: bytes, headers: list[Header]) -> tuple[bytes, list[Header]]:
    """Return the path of an absolute target, and the headers with its authority as their Host.

    A path is unchanged, and so is the ``*`` of OPTIONS (RFC 9112, 3.2.4).

    Raises:
        RequestError: the target is neither, has no host, or has a user (RFC 9110, 4.2.1, 4.2.4).
    """
    if target[:1] == b"/" or (target == b"*" and method == "OPTIONS"):
        return target, headers
    match = _absolute_form(target)
    if match is None:
        raise RequestError(400, "the target is neither a path nor an HTTP URL")
    authority, path = match.groups()
    if not authority or _HOST.fullmatch(authority) is None:
        raise RequestError(400, "the target names no host")
    headers = [(name, authority) if name == b"host" else (name, value) for name, value in headers]
    return (path if path[:1] == b"/" else b"/" + path), headers


def _read_line(line: bytes) -> Header:
    name, _, value = line.partition(b":")
    name = name.lower()
    value = value.strip(b" \t")
    if name == b"transfer-encoding":
        value = value.lower()  # as h11 does; the application must see the same on both servers
    return name, value


def _decide(
    method: str, target: bytes, modern: bool, headers: list[Header], decisive: list[Header]
) -> RequestHead:
    """Apply the rules of RFC 9112, sections 3.2 (Host), 6 (body) and 9.3 (connection)."""
    hosts = 0
    length: int | None = 0
    lengths = codings = 0
    keep_alive = modern  # HTTP/1.0 gets one response for each connection, as with h11
    expects_continue = changes = False
    upgrade: bytes | None = None
    for name, value in decisive:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                raise RequestError(400, "the Host header is malformed")
        elif name == b"content-length":
            lengths += 1
            # bytes.isdigit() accepts ASCII digits only, unlike str.isdigit().
            if not value.isdigit() or len(value) > _LENGTH_DIGITS:
                raise RequestError(400, "the content length is not a number")
            length = int(value)
        elif name == b"transfer-encoding":
            codings += 1
            if value != b"chunked":
                raise RequestError(501, "the transfer coding is not supported")
        elif name == b"connection":
            tokens = _tokens(value)
            changes = changes or b"upgrade" in tokens
            if b"close" in tokens:
                keep_alive = False
        elif name == b"upgrade":
            # Two headers are two offers; neither is passed on.
            upgrade = value.lower() if upgrade is None else b""
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
    if upgrade is not None:
        headers = [header for header in headers if header[0] != b"upgrade"]
    version = "1.1" if modern else "1.0"
    head = RequestHead(method, target, version, headers, length, keep_alive, expects_continue)
    # HTTP/1.0 has no upgrade. A body would come before the other protocol. A header that Connection
    # does not name was meant for an intermediary (RFC 9110, 7.8).
    if upgrade and changes and modern and method == "GET" and length == 0:
        return msgspec.structs.replace(head, upgrade=upgrade)
    return head


def check_beginning(data: bytes | bytearray, limits: Limits, seen: int = 0) -> None:
    """Check a head whose end has not arrived; return if it may still become valid.

    ``seen`` bytes were checked before, which keeps the cost of many small pieces linear.

    Raises:
        RequestError: no further bytes can make it a valid request.
    """
    # A TLS handshake begins with 0x16; a lone CR may be the first half of an empty line.
    if data[0] <= 0x20 and data != b"\r":
        raise RequestError(400, "this is not a request line")
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
    return RequestError(400, "this is not a request")


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip() for token in value.lower().split(b",")]


class ResponseError(Exception):
    """The messages of the application do not make a valid response."""


class Framing(enum.Enum):
    """The means by which a client finds the end of a response body (RFC 9112, 6.3)."""

    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    CLOSE = enum.auto()
    NO_BODY = enum.auto()


class ResponseHead(NamedTuple):
    """An encoded head: ``data`` is sent unchanged.

    ``closes``: the connection ends after this response. ``length`` is the Content-Length in bytes,
    0 without one.
    """

    data: bytes
    framing: Framing
    length: int
    closes: bool


def response_head(
    request: RequestHead, status: int, headers: Iterable[tuple[bytes, bytes]], *, close: bool
) -> ResponseHead:
    """Encode a head as h11 does, so that this server and hypercorn send the same bytes.

    Args:
        request: the request that the response is for.
        status: 200 to 599.
        headers: as the application sent them.
        close: announce that the connection ends.

    Raises:
        ResponseError: a header cannot be sent, or the content length is not a number.
    """
    return _encode_head(request.method == "HEAD", request.version, status, headers, close)


def encode_response(
    request: RequestHead, response: Whole, *, close: bool
) -> tuple[ResponseHead, bytes]:
    """Encode a whole response; return its head, and all of its bytes. Small ones are cached.

    Raises:
        ResponseError: as :func:`response_head`, or the body is not as long as its Content-Length.
    """
    key = (response, request.method == "HEAD", request.version, close)
    if len(response[2]) <= _CACHED_BODY_BYTES:
        try:
            return _encode_once(*key)
        except TypeError:
            pass  # a part of it is mutable, so it cannot be cached
    return _encode_response(*key)


def _encode_response(
    response: Whole, to_head: bool, version: str, close: bool
) -> tuple[ResponseHead, bytes]:
    status, headers, body = response
    head = _encode_head(to_head, version, status, headers, close)
    if head.framing is Framing.NO_BODY:
        body = b""
    elif head.framing is Framing.CHUNKED:
        body = (chunk(body) if body else b"") + chunk(b"")
    elif head.framing is Framing.LENGTH and head.length != len(body):
        raise ResponseError("the body is not as long as its Content-Length")
    return head, head.data + body


_encode_once = lru_cache(_CACHED)(_encode_response)


def chunk(data: bytes) -> bytes:
    """Encode a part of a body in the chunked coding; an empty one ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def informational(status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Encode an interim response, 100 to 199 without 101: this server switches no protocols."""
    return _lines(status, [_checked(name, value) for name, value in headers])


def refusal(status: int) -> bytes:
    """Encode a response of the server itself, after which it closes the connection."""
    body = _REFUSALS.get(status, b"")
    media = ((b"content-type", b"application/json"),) if body else ()
    extra = ((b"retry-after", b"1"),) if status == 503 else ()
    length = (b"content-length", b"%d" % len(body))
    return _lines(status, [*media, length, *extra, (b"Connection", b"close")]) + body


def _encode_head(
    to_head: bool, version: str, status: int, headers: Iterable[tuple[bytes, bytes]], close: bool
) -> ResponseHead:
    lines: list[tuple[bytes, bytes]] = []
    connection: list[bytes] = []
    length: int | None = None
    chunked = False
    bodiless = status in (204, 304)  # these never have a body
    for name, value in headers:
        name, value = _checked(name, value)
        match name.lower():
            case b"content-length":
                if not value.isdigit() or (length is not None and length != int(value)):
                    raise ResponseError(f"an invalid content length: {value!r}")
                if length is None:
                    lines.append((name, value))
                length = int(value)
            case b"transfer-encoding":
                if chunked or value.lower() != b"chunked":
                    raise ResponseError(f"a transfer coding that is not supported: {value!r}")
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
        # The chunked coding overrides a length (RFC 9112, 6.3). A response to HEAD has the headers
        # of the response to GET (RFC 9110, 9.3.2).
        lines = [pair for pair in lines if pair[0].lower() != b"content-length"]
        if version == "1.1":
            lines.append((b"Transfer-Encoding", b"chunked"))
            framing = Framing.CHUNKED
        else:
            # HTTP/1.0 has no chunks: the end of the connection is the end of the body.
            framing, close = Framing.CLOSE, True
    elif not bodiless:
        framing = Framing.LENGTH
    if to_head:
        framing = Framing.NO_BODY
    if close:
        connection = [token for token in connection if token not in (b"close", b"keep-alive")]
        connection.append(b"close")
    lines += [(b"Connection", token) for token in sorted(set(connection)) if token]
    return ResponseHead(_lines(status, lines), framing, length or 0, close)


def _checked(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    name, value = bytes(name).strip(), bytes(value).strip()
    if is_token_bytes(name) is None or breaks_value(value) is not None:
        raise ResponseError(f"a header that cannot be sent: {name!r}: {value!r}")
    return name, value


def _lines(status: int, lines: list[tuple[bytes, bytes]]) -> bytes:
    head = b"".join(b"%b: %b\r\n" % pair for pair in lines)
    return b"HTTP/1.1 %d \r\n%b\r\n" % (status, head)


class ChunkedBody:
    """Decodes the chunked coding of one body.

    ``complete`` is true once the last line was read; ``rest`` then holds the bytes after it.
    """

    def __init__(self) -> None:
        self.complete: bool = False
        self.rest: bytes = b""
        self._left = 0  # bytes of the current chunk that have not arrived
        self._closing = False  # the line end after a chunk is due
        self._overhead = 0.0  # bytes of lines and line ends, less the body's share
        self._trailing = -1  # bytes of trailers that were read; -1 before the last chunk

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes and return the part of the body in them, which may be empty.

        Raises:
            RequestError: the bytes are not in the chunked coding; do not call it again.
        """
        data = self.rest + data
        at = 0
        pieces: list[bytes] = []
        while not self.complete:
            if not (self._left or self._closing) and self._trailing < 0:
                at = self._decode_plain(data, at, pieces)
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
                self._decode_line(line)
        self.rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _decode_plain(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Decode the whole chunks without extensions; return the position after the last one."""
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
            raise RequestError(400, "the chunks are too many and too small")

    def _decode_line(self, line: bytes) -> None:
        if self._trailing < 0:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise RequestError(400, "a chunk's size is not a number")
            self._left = int(match[1], 16)
            if not self._left:
                self._trailing = 0
        elif not line:
            self.complete = True
        else:
            # Trailers are read to find the beginning of the next request, and then ignored: they
            # must not change the meaning of the headers (RFC 9110, 6.5.1).
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
