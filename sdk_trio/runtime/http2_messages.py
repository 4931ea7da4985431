"""Heads of requests and answers in the form of HTTP/2, as strict as those of HTTP/1.1. Pure.

h2 checks some of this too, but ends the connection where one request is malformed; here that
request is refused and the others go on.
"""

import re
from collections.abc import Iterable
from typing import Final

from .answer_head import AnswerError
from .limits import Limits
from .request_head import Headers, RequestError, RequestHead

#: Lower case alone (RFC 9113, 8.2).
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE: Final = re.compile(rb"(?![ \t])[^\x00-\x08\x0a-\x1f\x7f]*(?<![ \t])")
_METHOD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET: Final = re.compile(rb"/[\x21-\x7e]*|\*")
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")
_SENT_VALUE: Final = re.compile(rb"[^\x00\r\n]*")
_LENGTH_DIGITS: Final = 20

_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))

#: They are about a connection of HTTP/1.1 and make a message of HTTP/2 malformed (8.2.2).
_CONNECTION: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


def request_head(fields: Iterable[tuple[bytes, bytes]], limits: Limits) -> RequestHead:
    """Read the fields of one request.

    ``length`` of the result is None where none was declared: the stream's end is the body's.

    Raises:
        RequestError: they are malformed (400), too large (414, 431) or not supported (501).
    """
    pseudo: dict[bytes, bytes] = {}
    headers: Headers = []
    cookies: list[bytes] = []
    size = 0
    for name, value in fields:
        name, value = bytes(name), bytes(value)
        size += len(name) + len(value) + 4  # as it would be in HTTP/1.1
        if name[:1] == b":":
            if headers or name in pseudo or name not in _PSEUDO:
                raise RequestError(400, "a pseudo-header that does not belong there")
            pseudo[name] = value
            continue
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise RequestError(400, "a malformed header")
        if name in _CONNECTION or (name == b"te" and value != b"trailers"):
            raise RequestError(400, "a header of HTTP/1.1 connections")
        if name == b"cookie":
            cookies.append(value)
        else:
            headers.append((name, value))
    if cookies:  # sent apart for the sake of compression (8.2.3)
        headers.append((b"cookie", b"; ".join(cookies)))
    if len(headers) > limits.headers:
        raise RequestError(431, "too many headers")
    method, target = _request_line(pseudo, limits)
    if size > limits.head_bytes:
        raise RequestError(431, "the headers are too large")
    return RequestHead(
        method,
        target,
        "2",
        _with_host(pseudo, headers),
        _length(headers),
        True,
        any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers),
        False,
    )


def _request_line(pseudo: dict[bytes, bytes], limits: Limits) -> tuple[str, bytes]:
    method = pseudo.get(b":method", b"")
    if _METHOD.fullmatch(method) is None:
        raise RequestError(400, "the method is malformed")
    if method == b"CONNECT":
        raise RequestError(501, "CONNECT is not supported")
    target = pseudo.get(b":path", b"")
    if len(target) > limits.request_line_bytes:
        raise RequestError(414, "the path is too long")
    if _TARGET.fullmatch(target) is None:
        raise RequestError(400, "the path is malformed")
    if pseudo.get(b":scheme") not in (b"https", b"http"):
        raise RequestError(400, "the scheme is neither https nor http")
    return method.decode("ascii").upper(), target


def _with_host(pseudo: dict[bytes, bytes], headers: Headers) -> Headers:
    """Return the headers with one Host in front, which is what HTTP/1.1 would have."""
    hosts = {value for name, value in headers if name == b"host"}
    if b":authority" in pseudo:
        hosts.add(pseudo[b":authority"])
    if len(hosts) != 1:
        raise RequestError(400, "there must be one authority")
    (host,) = hosts
    if _HOST.fullmatch(host) is None:
        raise RequestError(400, "the authority is malformed")
    return [(b"host", host), *(pair for pair in headers if pair[0] != b"host")]


def _length(headers: Headers) -> int | None:
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return None
    if len(lengths) > 1:
        raise RequestError(400, "the body has two lengths")
    if not lengths[0].isdigit() or len(lengths[0]) > _LENGTH_DIGITS:
        raise RequestError(400, "the content length is no number")
    return int(lengths[0])


def answer_fields(
    status: int, headers: Iterable[tuple[bytes, bytes]]
) -> tuple[Headers, int | None]:
    """Return the fields of an answer and the length that they declare.

    Headers about a connection of HTTP/1.1 are left out: they mean nothing here.

    Raises:
        AnswerError: a header cannot be sent, or its length is none.
    """
    fields: Headers = [(b":status", b"%d" % status)]
    length: int | None = None
    for name, value in headers:
        name, value = bytes(name).strip().lower(), bytes(value).strip()
        if _NAME.fullmatch(name) is None or _SENT_VALUE.fullmatch(value) is None:
            raise AnswerError(f"a header that cannot be sent: {name!r}: {value!r}")
        if name == b"content-length":
            if not value.isdigit() or length not in (None, int(value)):
                raise AnswerError(f"no content length: {value!r}")
            length = int(value)
        elif name not in _CONNECTION:
            fields.append((name, value))
    if length is not None:
        fields.append((b"content-length", b"%d" % length))
    return fields, length
