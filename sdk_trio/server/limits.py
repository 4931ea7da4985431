"""The bounds of one client of the HTTP/1.1 server: sizes, counts and times. Pure."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

#: Called for each request that the server itself refuses, with the status, a reason for the log,
#: and the peer's host (None for a unix socket).
NoteRefusal = Callable[[int, str, "str | None"], None]


class Expired(Exception):
    """The time that a client had is over."""


class DescriptorShares(NamedTuple):
    """The division of a process' descriptors; each number is at least 1.

    ``receiver`` and ``admin`` are connections of the two servers, ``refusals`` is what each of them
    refuses at the same time.
    """

    receiver: int
    admin: int
    refusals: int


#: Descriptors for the store, the logs, the client's connections and the handlers. A receiver on
#: SQLite that does nothing has 25 open.
OWN_DESCRIPTORS = 64
LEAST_OWN_DESCRIPTORS = 36


def share_descriptors(limit: int) -> DescriptorShares:
    """Divide ``limit`` descriptors, so that no flood of connections keeps an event from the store.

    Nor does a flood of one server's connections take those of the other.
    """
    own = max(LEAST_OWN_DESCRIPTORS, min(limit // 4, OWN_DESCRIPTORS))
    admin = max(1, min(limit // 8, 128))
    refusals = max(1, min(limit // 32, 32))
    return DescriptorShares(max(1, limit - own - admin - 2 * refusals), admin, refusals)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of every connection. Bodies are bounded by the application, which knows its own.

    Times are in seconds and are looked at every ``sweep_seconds``, so they may last that much
    longer.
    """

    #: A longer request line is answered 414. Common proxies allow as much.
    request_line_bytes: int = 8 * 1024
    #: Request line and headers together; more is answered 431. Hypercorn has the same bound.
    head_bytes: int = 16 * 1024
    #: Headers of one request; more is answered 431. Real senders and their proxies need about 30.
    headers: int = 100
    #: From the first byte of a request to the end of its headers; then it is answered 408.
    head_seconds: float = 10.0
    #: All waits for one body together; then it is answered 408. The receiver has a shorter deadline
    #: of its own.
    body_seconds: float = 60.0
    #: Time for a client to accept one message of an answer.
    write_seconds: float = 30.0
    #: From the start of a connection to its first byte: a client opens one because it has something
    #: to send.
    first_byte_seconds: float = 10.0
    #: Time that an idle connection is kept after a request. It is longer than the 60 s of common
    #: proxies: with a shorter one a proxy sends a request into a connection that was just closed,
    #: and cannot tell whether it was processed.
    keep_alive_seconds: float = 75.0
    #: Requests on one connection before it is closed; bounds what one connection can hold on to.
    keep_alive_requests: int = 100_000
    #: Time and bytes for reading and throwing away the rest of a refused request. A socket that is
    #: closed with unread bytes resets the connection, and the client might never see the answer.
    linger_seconds: float = 1.0
    linger_bytes: int = 1024 * 1024
    #: Open connections. A further one takes the slot of one that idles, or that waits for the rest
    #: of a request, or is answered 503. Descriptors may allow fewer: :func:`share_descriptors`.
    connections: int = 10_000
    #: Open connections of one source, if the server counts by source, and half of all at most;
    #: further ones are answered 503. One sender needs a few; many senders behind one address are a
    #: proxy, to be trusted.
    connections_per_source: int = 256
    #: A source at its limit ends its own idle connections and unfinished requests, the oldest
    #: first, before a further one is answered 503.
    source_gives_way: bool = False
    #: Connections over a limit that get a 503 at the same time; further ones are closed unanswered.
    refusals: int = 32
    #: Bytes of one read from a socket; also bounds the pipelined requests in memory.
    read_bytes: int = 64 * 1024
    #: Time between two looks at all deadlines, and so how late each of them may be.
    sweep_seconds: float = 0.5
