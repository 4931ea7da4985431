"""Inline runs that have ended, and whose outcomes the store did not confirm.

The sender of such a run is answered 503, and its redelivery records the outcome instead of running
the handler again. Nor need a success wait for that: its lease is renewed, and
:meth:`.InlineRuns.record_ended` records it once the store answers.
"""

from collections.abc import Iterator

import msgspec

from ..base.bell import Flag
from ..records.deliveries import Dead, Done, Lease
from .arrival import VerifiedDelivery
from .bound import BoundHandler

#: The most runs in memory. There are few: each belongs to a request that was being answered when
#: the store failed.
MOST_UNRECORDED = 1000


class EndedRun(msgspec.Struct, eq=False):
    """A run that has ended; ``seconds`` is its duration."""

    lease: Lease
    arrival: VerifiedDelivery
    handler: BoundHandler
    outcome: Done | Dead
    seconds: float


class UnrecordedRuns:
    """The ended runs by key, the oldest first."""

    def __init__(self) -> None:
        self._by_key: dict[str, EndedRun] = {}
        #: Set when a success was added.
        self.added: Flag = Flag()

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def successes(self) -> Iterator[EndedRun]:
        """Return the runs that have succeeded."""
        return (run for run in self._by_key.values() if isinstance(run.outcome, Done))

    def add(self, run: EndedRun) -> None:
        """Keep a run; the oldest one is dropped if there are too many."""
        self._by_key[run.lease.key] = run
        if len(self._by_key) > MOST_UNRECORDED:
            del self._by_key[next(iter(self._by_key))]
        if isinstance(run.outcome, Done):
            self.added.set()

    def take(self, key: str, earlier_attempts: int) -> EndedRun | None:
        """Remove the run of a key and return it.

        None if there is none, or if the event was replayed since: its number of earlier attempts
        has changed then, and the outcome is obsolete.
        """
        run = self._by_key.pop(key, None)
        if run is not None and run.arrival.earlier_attempts == earlier_attempts:
            return run
        return None
