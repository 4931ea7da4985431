"""Bytes of valid and invalid requests."""

from .serving import chunked

HOST = b"Host: test\r\n"


def get(path=b"/", *headers, method=b"GET", version=b"1.1", host=HOST):
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"%b %b HTTP/%b\r\n%b%b\r\n" % (method, path, version, host, lines)


def post(body, path=b"/", *headers, length=None):
    size = b"Content-Length: %d" % (len(body) if length is None else length)
    return get(path, size, *headers, method=b"POST") + body


def streamed(body, path=b"/", *headers, trailers=b""):
    head = get(path, b"Transfer-Encoding: chunked", *headers, method=b"POST")
    return head + chunked(body, 5).removesuffix(b"\r\n") + trailers + b"\r\n"


#: name: (request, status). Both servers refuse it and read nothing after it.
REFUSED = {
    "a length and a coding": (
        get(b"/", b"Content-Length: 3", b"Transfer-Encoding: chunked", method=b"POST"),
        400,
    ),
    "a coding and a length": (
        get(b"/", b"Transfer-Encoding: chunked", b"Content-Length: 3", method=b"POST"),
        400,
    ),
    "two lengths": (get(b"/", b"Content-Length: 1", b"Content-Length: 2"), 400),
    "a list of lengths": (get(b"/", b"Content-Length: 1, 2"), 400),
    "a signed length": (get(b"/", b"Content-Length: +1"), 400),
    "a length in hexadecimal": (get(b"/", b"Content-Length: 0x1"), 400),
    "a length with an underscore": (get(b"/", b"Content-Length: 1_0"), 400),
    "an empty length": (get(b"/", b"Content-Length:"), 400),
    "a length of 21 digits": (get(b"/", b"Content-Length: " + b"0" * 20 + b"1"), 400),
    "two codings": (get(b"/", b"Transfer-Encoding: gzip, chunked"), 501),
    "two headers of codings": (get(b"/", *[b"Transfer-Encoding: chunked"] * 2), (400, 501)),
    "a coding with a tab": (get(b"/", b"Transfer-Encoding: \x0bchunked"), (400, 501)),
    "identity": (get(b"/", b"Transfer-Encoding: identity"), 501),
    "a target that is not a path": (get(b"!"), 400),
    "the whole server as the target of a POST": (get(b"*", method=b"POST"), 400),
    "the preface of HTTP/2 with the version of 1.1": (get(b"*", method=b"PRI"), 400),
    "white space before the colon": (get(b"/", b"Content-Length : 0"), 400),
    "a header without a colon": (get(b"/", b"Content-Length"), 400),
    "a header without a name": (get(b"/", b": x"), 400),
    "a line that begins with white space": (get(b"/", host=b" X: y\r\n" + HOST), 400),
    "NUL in a value": (get(b"/", b"X: a\0b"), 400),
    "carriage return in a value": (get(b"/", b"X: a\rb"), 400),
    "no host": (get(b"/", host=b""), 400),
    "two hosts": (get(b"/", b"Host: other"), 400),
    "two equal hosts": (get(b"/", b"Host: test"), 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "half a version": (b"GET / HTTP/1\r\n" + HOST + b"\r\n", 400),
    "a version in small letters": (b"GET / http/1.1\r\n" + HOST + b"\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a tab": (b"GET\t/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a space in the path": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a letter that is not ASCII in the path": (get(b"/\xe9"), 400),
    "a space at the end": (b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
    "two empty lines before it": (b"\r\n\r\n" + get(), 400),
    "a target without a host": (get(b"http:///"), 400),
    "a target with a user": (get(b"http://user@test/"), 400),
    "HTTP/2.0": (get(b"/", version=b"2.0"), 505),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    "a space before it": (b" " + get(), 400),
    "TLS": (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"a" * 90 + b"\r\n\r\n", 400),
}


#: Bodies in the chunked coding that both servers refuse.
BAD_CHUNKS = {
    "no number": b"ZZ\r\n",
    "an empty size": b"\r\n\r\n",
    "a negative size": b"-1\r\n",
    "a size with a prefix": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a size with an underscore": b"1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n",
    "white space before the size": b" 3\r\nabc\r\n0\r\n\r\n",
    "a size of 21 digits": b"0" * 20 + b"3\r\nabc\r\n0\r\n\r\n",
    "a chunk that is longer than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk that ends in a line feed": b"3\r\nabc\n0\r\n\r\n",
    "a trailer without a colon": b"3\r\nabc\r\n0\r\ntrailer\r\n\r\n",
    "a trailer with white space": b"3\r\nabc\r\n0\r\nX : y\r\n\r\n",
}


def _chunk(line):
    return get(b"/", b"Transfer-Encoding: chunked", method=b"POST") + line + b"\r\nabc\r\n0\r\n\r\n"


#: Refused only by the fast path: hypercorn accepts them, or waits forever.
STRICTER = {
    "line feeds alone": (b"GET / HTTP/1.1\nHost: test\n\n", 400),
    "one line feed alone": (b"GET / HTTP/1.1\r\nHost: test\nX: y\r\n\r\n", 400),
    "a folded line": (get(b"/", b"X: a\r\n b"), 400),
    "a folded length": (get(b"/", b"Content-Length:\r\n 0"), 400),
    "equal lengths": (get(b"/", b"Content-Length: 0", b"Content-Length: 0"), 400),
    "a list of equal lengths": (get(b"/", b"Content-Length: 0, 0"), 400),
    "a tunnel": (get(b"test:443", method=b"CONNECT"), 501),
    "a control character in a value": (get(b"/", b"X: a\x01b"), 400),
    "a host with a space": (get(b"/", host=b"Host: a b\r\n"), 400),
    "a host with a path": (get(b"/", host=b"Host: a/b\r\n"), 400),
    "a coding of HTTP/1.0": (
        get(b"/", b"Transfer-Encoding: chunked", version=b"1.0") + b"0\r\n\r\n",
        400,
    ),
    "a chunk extension without a name": (_chunk(b"3;"), 400),
    "a chunk extension without a name but with a value": (_chunk(b"3;=a"), 400),
    "a chunk extension without its value": (_chunk(b"3;a="), 400),
    "a chunk extension with half a quotation": (_chunk(b'3;a="b'), 400),
    "a chunk extension with a quotation too many": (_chunk(b'3;a="b""'), 400),
    "a long request line": (get(b"/" + b"a" * 9000), 414),
    "101 headers": (get(b"/", *[b"X: y"] * 100), 431),
    "17 kB of headers": (get(b"/", *[b"X: " + b"y" * 1000] * 17), 431),
    "a request line without end": (b"GET /" + b"a" * 100_000, 414),
    "headers without end": (get()[:-2] + (b"X: " + b"y" * 100 + b"\r\n") * 1000, 431),
}
