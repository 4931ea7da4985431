"""The connection slots of one server: limits, and eviction when no slot is free.

Anyone who knows the address can open connections. So no source gets more than half of the slots,
and a connection that waits for its client is evicted when its slot is needed. Otherwise 300
connections of one address with unfinished requests could lock out all other addresses.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import Protocol

from ..base.logs import Throttle, get_logger
from .limits import Limits

#: Maps a peer's host to the source that its connections count for (IPv6: the /64). None: they have
#: no limit, because the peer is a trusted proxy with many clients behind it.
SourceOf = Callable[["str | None"], Hashable]

Address = tuple[str, int] | None


def address_of(name: Sequence[object] | str | bytes) -> Address:
    """Return host and port of a socket's name, as in the ASGI scope; None for a unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


#: Computed times of the same wait differ by less, in seconds: they are sums of floats.
_SAME_SECONDS = 0.001

#: The candidates with a request in progress that are skipped for one new connection.
_MOST_TRIES = 16

_log = get_logger("server")


class Connection(Protocol):
    """A connection that holds a slot.

    Both times are None while the application works, and after :meth:`evict`.
    """

    @property
    def idle_since(self) -> float | None:
        """The time since which no request is in progress."""
        ...

    @property
    def unfinished_since(self) -> float | None:
        """The time since which it waits for the rest of a request, or to send a response."""
        ...

    def evict(self) -> None:
        """End soon, without waiting for the client."""
        ...


class ConnectionSlots:
    """Counts open connections, in total and per source, and evicts one when a slot is needed.

    Args:
        limits: ``connections``, ``connections_per_source``, ``source_evicts_own`` apply here.
        source_of: returns the source of a peer; None: no limit.
    """

    def __init__(self, limits: Limits, source_of: SourceOf) -> None:
        self._limits = limits
        #: At most half of all, so that one source alone cannot take all slots.
        self._most_of_one = max(1, min(limits.connections_per_source, limits.connections // 2))
        self._source_of = source_of
        self._reserved = 0
        self._by_source: Counter[Hashable] = Counter()
        self._open: dict[Connection, Hashable] = {}
        #: The connections to evict, in order, as of the time ``_listed_at``.
        self._candidates: deque[tuple[float, Connection]] = deque()
        self._listed_at = -inf
        self._throttle = Throttle(lines=1, seconds=10.0)

    @property
    def is_full(self) -> bool:
        """Whether all slots are in use."""
        return self._reserved >= self._limits.connections

    def source_of(self, peer: Address) -> Hashable:
        """Return the source that a connection counts for; None: no limit."""
        return self._source_of(peer[0] if peer else None)

    def reserve(self, source: Hashable, peer: Address, now: float) -> bool:
        """Reserve a slot, if necessary by evicting another connection; return False if none is
        free.

        ``source`` is that of ``peer``, and ``now`` the event loop's clock, as of the last sweep or
        later.
        """
        if source is not None and self._by_source[source] >= self._most_of_one:
            if not (self._limits.source_evicts_own and self._evict_own(source)):
                self._note_refusal("server.source_full", self._most_of_one, peer)
                return False
        elif self.is_full and not self._evict_for(source, now):
            self._note_refusal("server.connections_full", self._limits.connections, peer)
            return False
        self._reserved += 1
        self._by_source[source] += 1
        return True

    def register(self, connection: Connection, source: Hashable) -> None:
        """Make ``connection``, which has a slot of ``source``, a candidate for eviction."""
        self._open[connection] = source

    def free(self, connection: Connection | None, source: Hashable) -> None:
        """Free a slot; ``connection`` was registered for it, None if none was registered."""
        if connection is not None:
            del self._open[connection]
        self._reserved -= 1
        self._by_source[source] -= 1
        if not self._by_source[source]:
            del self._by_source[source]

    def _evict_own(self, source: Hashable) -> bool:
        """Evict the connection of one source that has waited longest; False if none waits."""
        own = [it for it, owner in self._open.items() if owner == source]
        waiting = [(since, n) for n, it in enumerate(own) if (since := _waits_since(it)) < inf]
        if waiting:
            own[min(waiting)[1]].evict()
        return bool(waiting)

    def _evict_for(self, newcomer: Hashable, now: float) -> bool:
        """Evict the next candidate; return False if none may be evicted for ``newcomer``.

        The candidates are listed at most once per sweep: otherwise each connection of a flood would
        cost an iteration over all of them.
        """
        if now - self._listed_at >= self._limits.sweep_seconds / 2:
            self._listed_at = now
            self._candidates = deque(self._list_candidates())
        tries = _MOST_TRIES
        while self._candidates and tries:
            since, connection = self._candidates[0]
            waits_since = _waits_since(connection)
            if connection not in self._open or since + _SAME_SECONDS < waits_since < inf:
                self._candidates.popleft()  # it has ended, or its client has finished a request
                continue
            if (
                waits_since == inf
            ):  # the application works; a client that pipelines soon waits again
                self._candidates.rotate(-1)
                tries -= 1
                continue
            if connection.idle_since is None and not self._outranks(newcomer, connection):
                return False
            self._candidates.popleft()
            connection.evict()
            return True
        return False

    def _outranks(self, newcomer: Hashable, connection: Connection) -> bool:
        """Return whether a connection of ``newcomer`` may evict an unfinished request.

        A source's first connection may evict one of any source. Further ones may evict only from a
        source that keeps at least as many: otherwise two sources would evict each other's
        connections endlessly. Only a trusted proxy evicts connections of a trusted proxy.
        """
        source = self._open[connection]
        if newcomer is None or source is None:
            return newcomer is None
        own = self._by_source[newcomer]
        return own == 0 or self._by_source[source] >= own + 2

    def _list_candidates(self) -> Iterator[tuple[float, Connection]]:
        """Yield idle connections, the longest idle first; then unfinished requests.

        The next unfinished request is the oldest one of the source that has the most connections
        left at that point. A sender can replace an idle connection, so it loses nothing.
        """
        idle: list[tuple[float, int, Connection]] = []
        unfinished: dict[Hashable, list[tuple[float, int, Connection]]] = {}
        for n, (connection, source) in enumerate(self._open.items()):
            if (since := connection.idle_since) is not None:
                idle.append((since, n, connection))
            elif (since := connection.unfinished_since) is not None:
                unfinished.setdefault(source, []).append((since, n, connection))
        yield from ((since, connection) for since, _, connection in sorted(idle))
        largest: list[tuple[bool, int, float, int, Hashable]] = []
        for source, waiting in unfinished.items():
            waiting.sort(reverse=True)
            # Trusted proxies come last: many clients are behind each.
            largest.append((source is None, -self._by_source[source], *waiting[-1][:2], source))
        heapq.heapify(largest)
        while largest:
            is_proxy, left, since, _, source = heapq.heappop(largest)
            waiting = unfinished[source]
            yield since, waiting.pop()[2]
            if waiting:
                heapq.heappush(largest, (is_proxy, left + 1, *waiting[-1][:2], source))

    def _note_refusal(self, event: str, limit: int, peer: Address) -> None:
        """Log that no slot was free, at most once in ten seconds for each limit."""
        suppressed = self._throttle.admit(event)
        if suppressed is not None:
            address = peer[0] if peer else None
            _log.warning(event, limit=limit, address=address, suppressed=suppressed)


def _waits_since(connection: Connection) -> float:
    """Return the time since which a connection waits for its client; infinity if it does not."""
    for since in (connection.idle_since, connection.unfinished_since):
        if since is not None:
            return since
    return inf
