"""The limits of the HTTP/1.1 server: sizes, counts and times. Pure."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

#: Called for each request that the server itself refuses, with the status, a reason for the log,
#: and the peer's host (None for a unix socket).
NoteRefusal = Callable[[int, str, "str | None"], None]


class Expired(Exception):
    """A deadline for the client has passed, or its connection must end for another reason."""


class DescriptorShares(NamedTuple):
    """The file descriptors of a process, divided; each number is at least 1.

    ``receiver`` and ``admin`` are the connections of the two servers. ``refusals`` is the number of
    connections that each of them refuses at the same time.
    """

    receiver: int
    admin: int
    refusals: int


#: Descriptors for the store, the logs, the client's connections and the handlers. A receiver on
#: SQLite that does nothing has 25 open.
OWN_DESCRIPTORS = 64
LEAST_OWN_DESCRIPTORS = 36


def share_descriptors(limit: int) -> DescriptorShares:
    """Divide ``limit`` descriptors, so that no flood of connections takes those of the store.

    Nor can a flood of connections to one server take those of the other.
    """
    own = max(LEAST_OWN_DESCRIPTORS, min(limit // 4, OWN_DESCRIPTORS))
    admin = max(1, min(limit // 8, 128))
    refusals = max(1, min(limit // 32, 32))
    return DescriptorShares(max(1, limit - own - admin - 2 * refusals), admin, refusals)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of every connection. The application limits the size of a body.

    Times are in seconds. They are checked every ``sweep_seconds``, so each may last that much
    longer.
    """

    #: A longer request line is answered 414. Common proxies allow the same.
    request_line_bytes: int = 8 * 1024
    #: Request line and headers together; more is answered 431. Hypercorn has the same bound.
    head_bytes: int = 16 * 1024
    #: Headers of one request; more is answered 431. Real senders and their proxies need about 30.
    headers: int = 100
    #: From the first byte of a request to the end of its headers; a slower one is answered 408.
    head_seconds: float = 10.0
    #: All waits for one body together; a slower one is answered 408. The receiver has a shorter
    #: deadline of its own.
    body_seconds: float = 60.0
    #: Time for a client to accept one message of a response.
    write_seconds: float = 30.0
    #: From the start of a connection to its first byte: a client opens one because it has something
    #: to send.
    first_byte_seconds: float = 10.0
    #: Time that an idle connection is kept after a request. It is longer than the 60 s of common
    #: proxies. Otherwise a proxy might send a request into a connection that was just closed, and
    #: not know whether it was processed.
    keep_alive_seconds: float = 75.0
    #: Requests on one connection before it is closed; bounds the resources that one can accumulate.
    keep_alive_requests: int = 100_000
    #: Time and bytes for discarding the rest of a refused request. Closing a socket with unread
    #: bytes resets the connection, and the client might never see the response.
    linger_seconds: float = 1.0
    linger_bytes: int = 1024 * 1024
    #: Open connections. A further one evicts one that is idle or waits for the rest of a request,
    #: or is answered 503. Descriptors may allow fewer: :func:`share_descriptors`.
    connections: int = 10_000
    #: Open connections of one source, if the server counts by source, and at most half of all.
    #: Further ones are answered 503. One sender needs a few. Many senders behind one address are
    #: behind a proxy, which should be configured as trusted.
    connections_per_source: int = 256
    #: A source at its limit evicts its own idle connections and unfinished requests, the oldest
    #: first, before a further one is answered 503.
    source_evicts_own: bool = False
    #: Connections over a limit that get a 503 at the same time; further ones are closed unanswered.
    refusals: int = 32
    #: Bytes of one read from a socket; also bounds the pipelined requests in memory.
    read_bytes: int = 64 * 1024
    #: Time between two checks of all deadlines, and so the longest delay of each.
    sweep_seconds: float = 0.5
