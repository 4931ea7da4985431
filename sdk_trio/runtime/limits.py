"""What one client may ask of the server: sizes, counts and times. Pure."""

from collections.abc import Callable

import attrs

#: Is told of a request that the server itself refuses: status, reason for the log, the peer's host
#: (None for a unix socket).
NoteRefusal = Callable[[int, str, "str | None"], None]


class Expired(Exception):
    """The time that a client had is over."""


@attrs.frozen(kw_only=True)
class Limits:
    """The bounds of every connection. Bodies are bounded by the application, which knows its own.

    Times are in seconds and are looked at every ``sweep_seconds``, so they may last that much
    longer.
    """

    #: A request line longer than this is answered 414: what proxies commonly allow.
    request_line_bytes: int = 8 * 1024
    #: Request line and headers together; more is answered 431. The same as hypercorn's.
    head_bytes: int = 16 * 1024
    #: Headers of one request; more is answered 431. Real senders and their proxies need about 30.
    headers: int = 100
    #: From the first byte of a request to the end of its headers; then it is answered 408.
    head_seconds: float = 10.0
    #: For a body, all of it; then it is answered 408. The receiver has a shorter one of its own.
    body_seconds: float = 60.0
    #: How long a client may take to accept one message of an answer.
    write_seconds: float = 30.0
    #: From the start of a connection to its first byte: who opens one has something to send.
    first_byte_seconds: float = 10.0
    #: How long a connection that was used is kept while it idles: longer than the 60 s of common
    #: proxies, which would otherwise send a request into a connection that we have just closed.
    keep_alive_seconds: float = 75.0
    #: Requests on one connection before it is closed; bounds what one connection can hold on to.
    keep_alive_requests: int = 100_000
    #: After a refusal, how long and how much is read and thrown away. A socket that is closed with
    #: unread bytes resets the connection, and the client might never see the answer.
    linger_seconds: float = 1.0
    linger_bytes: int = 1024 * 1024
    #: Open connections. A further one takes the place of one that idles, or is answered 503.
    #: Descriptors may allow fewer.
    connections: int = 10_000
    #: Open connections of one source, if the server counts by source; further ones are answered
    #: 503. One sender needs a few; many senders behind one address are a proxy, to be trusted.
    connections_per_source: int = 256
    #: What is read from a socket at once; also bounds the requests that a client sends ahead.
    read_bytes: int = 64 * 1024
    sweep_seconds: float = 0.5
