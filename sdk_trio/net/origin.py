"""The records of the pool: hosts with their slots, connections by origin, waiting requests."""

from collections import OrderedDict
from collections.abc import Iterator

import attrs
import trio

from .http1 import Http1Connection
from .http2 import Http2Connection
from .messages import Incident, NetworkError, Origin, Timeouts


@attrs.frozen
class PoolStatistics:
    """Counts of the pool: connections (and idle ones among them), dials, waiting requests."""

    connections: int
    idle: int
    connecting: int
    waiting: int
    exchanges: int


class Waiter:
    """A request waiting for a connection."""

    __slots__ = ("arrival", "began", "connection", "error", "timeouts")

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts: Timeouts = timeouts
        self.began: float = trio.current_time()
        self.connection: Http1Connection | Http2Connection | None = None
        self.error: NetworkError | None = None
        self.arrival: trio.Event = trio.Event()


class ConnectionAttempt:
    """One dial in progress. It is *overdue* once it has taken longer than ``patience`` seconds.

    An overdue attempt is raced by another one, and the first connection is used. ``is_second``
    marks the repetition of a failed attempt. ``since`` is the start of the first attempt in a chain
    in which each took over its predecessor's slot. ``address`` is set once connected, or while the
    attempt tries a single address.
    """

    __slots__ = (
        "address",
        "began",
        "incident",
        "is_given_up",
        "is_overdue",
        "is_second",
        "patience",
        "scope",
        "since",
        "watch",
    )

    def __init__(self, *, patience: float, limit: float) -> None:
        self.began: float = trio.current_time()
        self.since: float = self.began
        self.patience: float = patience
        self.incident: Incident = Incident()
        self.scope: trio.CancelScope = trio.CancelScope(deadline=self.began + limit)
        self.watch: trio.CancelScope = trio.CancelScope()
        self.is_overdue: bool = False
        self.is_given_up: bool = False
        self.is_second: bool = False
        self.address: str | None = None


class OriginConnections:
    """The connections, attempts and waiting requests of one origin."""

    __slots__ = (
        "active",
        "attempts",
        "connect_seconds",
        "dial_after",
        "given_up",
        "http2",
        "idle",
        "multiplexed",
        "origin",
        "patience",
        "promising",
        "server",
        "waiters",
    )

    def __init__(self, origin: Origin, server: "OriginServer") -> None:
        self.origin: Origin = origin
        self.server: OriginServer = server
        self.idle: list[
            Http1Connection
        ] = []  # the most recently used one is last, and is used first
        self.active: set[Http1Connection] = set()
        self.multiplexed: list[Http2Connection] = []
        self.attempts: list[ConnectionAttempt] = []
        self.promising: int = 0  # the number of attempts that are not overdue
        self.patience: float = 0.0  # of the next attempt, in seconds
        self.connect_seconds: float = 0.0  # the time that the last successful attempt took
        self.dial_after: float = 0.0
        self.given_up: ConnectionAttempt | None = None  # the next attempt takes its slot
        # None until the first connection has negotiated. It decides how many connections are
        # opened: one per request with HTTP/1.1, one for all with HTTP/2.
        self.http2: bool | None = None
        # An ordered dictionary, so that a cancelled request is removed in constant time.
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()

    @property
    def unused(self) -> "Iterator[Http1Connection | Http2Connection]":
        """Yield the open connections without an exchange."""
        yield from self.idle
        yield from (connection for connection in self.multiplexed if not connection.in_use)


class OriginServer:
    """One host, which the connection limit applies to: its origins share the slots."""

    __slots__ = ("lanes", "slots_taken")

    def __init__(self) -> None:
        self.lanes: dict[Origin, OriginConnections] = {}
        self.slots_taken: int = 0
