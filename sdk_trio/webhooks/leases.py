"""The leases of queued events that this process holds in memory.

If the store has leased an event to this process that is neither listed here nor an in-flight inline
run, the call that claimed it was abandoned. The next renewal gives the lease up, and the event is
claimed again.
"""

from collections.abc import Iterable, Iterator

import msgspec
import trio


class HeldLease(msgspec.Struct, eq=False):
    """One claim of a queued event, which waits in memory or runs.

    Args:
        key: the key of the event.
        since: when the lease began, in Unix seconds.
        runs: a worker has taken the event.
        lost: another process has claimed the event in the meantime.
        is_ending: the outcome of the run is being recorded.
        is_ended: the store has that outcome, although it has not confirmed it.
    """

    key: str
    since: float
    runs: bool = False
    lost: bool = False
    is_ending: bool = False
    is_ended: bool = False


class HeldLeases:
    """The leases by key; iterating gives the keys to renew."""

    def __init__(self) -> None:
        self._by_key: dict[str, HeldLease] = {}
        #: Held while leases are claimed or renewed, so that a renewal knows every claimed one.
        self.lock: trio.Lock = trio.Lock()

    def hold(self, key: str, *, since: float) -> HeldLease | None:
        """Hold the lease of an event that is about to be claimed; None if a run already holds one.

        ``since`` is the start of the lease, in Unix seconds.
        """
        if key in self._by_key:
            return None
        lease = self._by_key[key] = HeldLease(key, since)
        return lease

    def hold_claimed(self, key: str, *, since: float) -> HeldLease | None:
        """Hold the lease of an event that the store has just leased; None if a run already holds
        one.

        If an outcome of the event is being recorded at the same time, the store must have it
        already, or it would not have leased the event again. That recording ends: if it were
        repeated, it would become the outcome of the next run.
        """
        earlier = self._by_key.get(key)
        if earlier is not None:
            if not earlier.is_ending:
                earlier.lost = False
                return None
            earlier.is_ended = True
            del self._by_key[key]
        return self.hold(key, since=since)

    def drop(self, lease: HeldLease) -> None:
        """Stop renewing a lease; a later one of the same event is kept."""
        if self._by_key.get(lease.key) is lease:
            del self._by_key[lease.key]

    def lose(self, keys: Iterable[str]) -> list[str]:
        """Stop renewing leases that others have taken over; return the keys that were held.

        A run in progress keeps its lease, so that no second run of the event begins in this
        process.
        """
        lost = [lease for key in keys if (lease := self._by_key.get(key)) is not None]
        for lease in lost:
            lease.lost = True
            if not lease.runs:
                self.drop(lease)
        return [lease.key for lease in lost]

    def __iter__(self) -> Iterator[str]:
        return (key for key, lease in self._by_key.items() if not lease.lost)
