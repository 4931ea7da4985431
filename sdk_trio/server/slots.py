"""The connection slots of one server: who may take one, and who gives way when none is free.

A stranger needs nothing but an address to open connections. So no source gets more than half of the
slots, and a connection that waits for its client ends when its slot is needed. 300 connections of
one address with unfinished requests once locked all other addresses out.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import Protocol

from ..base.logs import Throttle, get_logger
from .limits import Limits

#: Maps a peer's host to the key that its connections are counted under (IPv6: the /64). None: they
#: have no limit, because the peer is a trusted proxy and everyone is behind it.
SourceOf = Callable[["str | None"], Hashable]

Address = tuple[str, int] | None


def address_of(name: Sequence[object] | str | bytes) -> Address:
    """Return host and port of a socket's name, as in the ASGI scope; None for a unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


#: Two times of one wait differ by less, in seconds: they are sums of others.
_SAME_SECONDS = 0.001

#: The candidates with a request in progress that are passed over for one new connection.
_MOST_TRIES = 16

_log = get_logger("server")


class Connection(Protocol):
    """A connection that holds a slot.

    Both times are None while the application works, and once the connection has to give way.
    """

    @property
    def idle_since(self) -> float | None:
        """The time since which no request is in progress."""
        ...

    @property
    def unfinished_since(self) -> float | None:
        """The time since which it waits for the rest of a request, or for an answer to be read."""
        ...

    def give_way(self) -> None:
        """End soon, without waiting for the client."""
        ...


class ConnectionSlots:
    """Counts open connections, in all and of each source, and frees a slot when one is needed.

    Args:
        limits: ``connections``, ``connections_per_source``, ``source_gives_way`` apply here.
        source_of: tells sources apart, and says which have no limit.
    """

    def __init__(self, limits: Limits, source_of: SourceOf) -> None:
        self._limits = limits
        #: Half of all at most, so that two sources are needed to take all slots.
        self._most_of_one = max(1, min(limits.connections_per_source, limits.connections // 2))
        self._source_of = source_of
        self._taken = 0
        self._by_source: Counter[Hashable] = Counter()
        self._open: dict[Connection, Hashable] = {}
        #: Those that may end, in their order, as of the time ``_listed_at``.
        self._candidates: deque[tuple[float, Connection]] = deque()
        self._listed_at = -inf
        self._throttle = Throttle(lines=1, seconds=10.0)

    @property
    def is_full(self) -> bool:
        """Whether the slots of all sources together are taken."""
        return self._taken >= self._limits.connections

    def source_of(self, peer: Address) -> Hashable:
        """Return the source that a connection counts for; None: one without a limit."""
        return self._source_of(peer[0] if peer else None)

    def take(self, peer: Address, now: float) -> bool:
        """Take a slot, for which another connection may have to end; False if there is none.

        ``now`` is the event loop's clock, as of the last sweep or later.
        """
        source = self.source_of(peer)
        if source is not None and self._by_source[source] >= self._most_of_one:
            if not (self._limits.source_gives_way and self._end_one_of(source)):
                self._note_refusal("server.source_full", self._most_of_one, peer)
                return False
        elif self.is_full and not self._end_one_for(source, now):
            self._note_refusal("server.connections_full", self._limits.connections, peer)
            return False
        self._taken += 1
        self._by_source[source] += 1
        return True

    def register(self, connection: Connection, source: Hashable) -> None:
        """Let ``connection``, which has a slot of ``source``, give way from now on."""
        self._open[connection] = source

    def free(self, connection: Connection | None, source: Hashable) -> None:
        """Free a slot; ``connection`` is what was registered for it, if anything was."""
        if connection is not None:
            del self._open[connection]
        self._taken -= 1
        self._by_source[source] -= 1
        if not self._by_source[source]:
            del self._by_source[source]

    def _end_one_of(self, source: Hashable) -> bool:
        """End the connection of one source that has waited the longest; False if none waits."""
        own = [it for it, owner in self._open.items() if owner == source]
        waiting = [(since, n) for n, it in enumerate(own) if (since := _waits_since(it)) < inf]
        if waiting:
            own[min(waiting)[1]].give_way()
        return bool(waiting)

    def _end_one_for(self, newcomer: Hashable, now: float) -> bool:
        """End the next candidate; return False if there is none that has to give way.

        The candidates are listed once in a sweep at most: otherwise each connection of a flood
        would cost a walk over all of them.
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
            if waits_since == inf:  # the application works; a client that pipelines is soon back
                self._candidates.rotate(-1)
                tries -= 1
                continue
            if connection.idle_since is None and not self._outranks(newcomer, connection):
                return False
            self._candidates.popleft()
            connection.give_way()
            return True
        return False

    def _outranks(self, newcomer: Hashable, connection: Connection) -> bool:
        """Say whether an unfinished request gives way to a connection of the source ``newcomer``.

        A source's first connection may end one of any source, further ones only those of a source
        that keeps at least as many: otherwise two sources would end each other's connections
        without end. Connections of a trusted proxy end for others of it only.
        """
        source = self._open[connection]
        if newcomer is None or source is None:
            return newcomer is None
        own = self._by_source[newcomer]
        return own == 0 or self._by_source[source] >= own + 2

    def _list_candidates(self) -> Iterator[tuple[float, Connection]]:
        """Yield idle connections, the longest first; then unfinished requests.

        Of those, the oldest of the source that would have the most connections left by then. A
        sender whose idle connection ends opens another one, so it loses nothing.
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
            # Those of trusted proxies come last: everyone is behind them.
            largest.append((source is None, -self._by_source[source], *waiting[-1][:2], source))
        heapq.heapify(largest)
        while largest:
            is_proxy, left, since, _, source = heapq.heappop(largest)
            waiting = unfinished[source]
            yield since, waiting.pop()[2]
            if waiting:
                heapq.heappush(largest, (is_proxy, left + 1, *waiting[-1][:2], source))

    def _note_refusal(self, event: str, limit: int, peer: Address) -> None:
        """Log that a connection found no slot, once in ten seconds at most for each limit."""
        suppressed = self._throttle.admit(event)
        if suppressed is not None:
            address = peer[0] if peer else None
            _log.warning(event, limit=limit, address=address, suppressed=suppressed)


def _waits_since(connection: Connection) -> float:
    """Return the time since which a connection waits for its client; infinite if it does not."""
    for since in (connection.idle_since, connection.unfinished_since):
        if since is not None:
            return since
    return inf
