"""The leases of queued events that this process holds in memory.

If the store has leased an event to this process that is neither listed here nor an in-flight inline
run, the call that claimed it was abandoned. The next renewal gives the lease up, and the event is
claimed again.
"""

from collections.abc import Iterable, Iterator

import msgspec
import trio

from ..records.deliveries import Lease


class HeldLease(msgspec.Struct, eq=False):
    """The lease of a queued event, which waits in memory or runs.

    Args:
        lease: the lease.
        since: when the lease began, in Unix seconds.
        runs: a worker has taken the event.
        lost: another process has claimed the event in the meantime.
        is_ending: the outcome of the run is being recorded.
    """

    lease: Lease
    since: float
    runs: bool = False
    lost: bool = False
    is_ending: bool = False

    @property
    def key(self) -> str:
        """The key of the event."""
        return self.lease.key


class HeldLeases:
    """The leases by key; iterating gives those to renew."""

    def __init__(self) -> None:
        self._by_key: dict[str, HeldLease] = {}
        #: Held while leases are claimed or renewed, so that a renewal knows every claimed one.
        self.lock: trio.Lock = trio.Lock()

    def hold(self, lease: Lease, *, since: float) -> HeldLease | None:
        """Hold the lease of an event that the store has just leased, since that Unix time.

        None: the event already runs or waits here, under a lease that it had lost. It gets the new
        one, so that no second run of it begins. A run that is recording its outcome does not: that
        outcome is stale.
        """
        earlier = self._by_key.get(lease.key)
        if earlier is not None and not earlier.is_ending:
            earlier.lost = False
            earlier.lease.renew_as(lease)
            return None
        held = self._by_key[lease.key] = HeldLease(lease, since)
        return held

    def drop(self, held: HeldLease) -> None:
        """Stop renewing a lease; a later one of the same event is kept."""
        if self._by_key.get(held.key) is held:
            del self._by_key[held.key]

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

    def __iter__(self) -> Iterator[Lease]:
        return (held.lease for held in self._by_key.values() if not held.lost)
