"""Outcomes of inline runs that the store has not confirmed.

The sender of such a run is answered 503. The lease of the run is renewed, and its outcome is
recorded as soon as the store answers. If a redelivery comes first, it records the outcome instead
of running the handler again. It also does so if the store no longer has the lease.
"""

from collections.abc import Iterator
from itertools import islice

import msgspec
import trio

from ..records.deliveries import Dead, Done, Lease, NewDelivery
from .bound import BoundHandler
from .recording import OutcomeRecorder

#: The most outcomes in memory. There are few: each belongs to a request that was being answered
#: when the store failed.
MOST_UNRECORDED = 1000

#: The most outcomes that one call of :meth:`UnrecordedRuns.record_all` records, because the next
#: renewal of leases waits for it.
_RECORDED_AT_ONCE = 50


class EndedRun(msgspec.Struct, eq=False):
    """A run that has ended, and whose outcome the store did not confirm.

    ``lease`` is None if the store does not have it. ``delivery`` has no body. ``seconds`` is the
    duration of the run. ``earlier_attempts`` is that of the event: a replay changes it, and the
    outcome is then obsolete.
    """

    lease: Lease | None
    delivery: NewDelivery
    attempt: int
    handler: BoundHandler
    outcome: Done | Dead
    seconds: float
    earlier_attempts: int


class UnrecordedRuns:
    """The ended runs by key, the oldest first."""

    def __init__(self, recorder: OutcomeRecorder) -> None:
        self._recorder = recorder
        self._by_key: dict[str, EndedRun] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def leases(self) -> Iterator[Lease]:
        """Return the leases to renew."""
        return (run.lease for run in self._by_key.values() if run.lease is not None)

    def add(self, key: str, run: EndedRun) -> None:
        """Keep a run; the oldest one is dropped if there are too many."""
        self._by_key[key] = run
        if len(self._by_key) > MOST_UNRECORDED:
            del self._by_key[next(iter(self._by_key))]

    def take(self, key: str) -> EndedRun | None:
        """Remove and return the run of a key; None if there is none."""
        return self._by_key.pop(key, None)

    async def record_all(self) -> None:
        """Record the outcomes whose leases the store may have, the first fifty.

        Raises:
            StoreUnavailableError: the store fails again; the others stay.
        """
        leased = (pair for pair in self._by_key.items() if pair[1].lease is not None)
        for key, run in [*islice(leased, _RECORDED_AT_ONCE)]:
            # A redelivery may have taken it meanwhile.
            if run.lease is None or self._by_key.get(key) is not run:
                continue
            if await self._recorder.record(run.lease, run.outcome):
                if self._by_key.get(key) is run:
                    del self._by_key[key]
                self._recorder.report(
                    run.delivery, run.attempt, run.outcome, run.handler, run.seconds
                )
            else:
                run.lease = None
        await trio.lowlevel.checkpoint()
