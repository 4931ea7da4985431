"""What the pool keeps: servers with their slots, the lanes to their origins, who waits in them."""

from collections import OrderedDict
from typing import Protocol

import attrs
import trio

from sdk_trio.client.exchange import NetworkError, Origin, Timeouts
from sdk_trio.client.http1 import Http1Connection
from sdk_trio.client.http2 import Http2Connection


class ConnectionLimits(Protocol):
    """The settings that the pool obeys, ``Sdk:Connection`` (spec 2.3)."""

    @property
    def max_connections_per_server(self) -> int:
        """Cap on simultaneous TCP connections per host."""

    @property
    def pooled_connection_lifetime_minutes(self) -> float:
        """After this a connection takes no new request and closes after its last."""

    @property
    def pooled_connection_idle_timeout_minutes(self) -> float:
        """After this long without a request a connection is closed."""

    @property
    def enable_http2(self) -> bool:
        """Whether HTTP/2 is offered."""

    @property
    def enable_multiple_http2_connections(self) -> bool:
        """Whether a full HTTP/2 connection may be joined by another."""


@attrs.frozen
class PoolStatistics:
    """A count of what the pool holds: connections (and of these idle ones), dials, waiters."""

    connections: int
    idle: int
    connecting: int
    waiting: int
    exchanges: int


class Waiter:
    """A request that waits for a connection."""

    __slots__ = ("arrival", "connection", "error", "timeouts")

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self.connection: Http1Connection | Http2Connection | None = None
        self.error: NetworkError | None = None
        self.arrival = trio.Event()


class Lane:
    """What the pool holds for one origin."""

    __slots__ = (
        "active",
        "connecting",
        "dial_after",
        "http2",
        "idle",
        "multiplexed",
        "origin",
        "server",
        "waiters",
    )

    def __init__(self, origin: Origin, server: "Server") -> None:
        self.origin = origin
        self.server = server
        self.idle: list[Http1Connection] = []  # the most recently used last, and used first
        self.active: set[Http1Connection] = set()
        self.multiplexed: list[Http2Connection] = []
        self.connecting = 0
        self.dial_after = 0.0
        # None until the first connection has told; decides how many to open at a time.
        self.http2: bool | None = None
        # Ordered, for leaving from the middle (cancellation) in constant time.
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()


class Server:
    """One host, which the cap applies to: its lanes share the slots."""

    __slots__ = ("lanes", "slots_taken")

    def __init__(self) -> None:
        self.lanes: dict[Origin, Lane] = {}
        self.slots_taken = 0
