"""Unawaited ends: queued runs on SQLite whose success is recorded by a later commit.

A queued run acknowledges nothing, so its success need not be synced at once. It waits for the next
commit, at most :data:`LINGER_SECONDS`, and shares its sync. So an enqueued event costs one sync
instead of two. A run whose end is not committed when the process is killed runs again
(docs/adr/0047-unawaited-claims.md).
"""

from itertools import islice
from typing import NamedTuple

from ..errors import StoreLostError
from .commit import GroupCommit, Kind, Unit
from .sql.deliveries import RunEnd

#: The longest time that the end of a run waits for other work, in seconds. At 100 events a second,
#: nine of ten ends share the commit of another event.
LINGER_SECONDS = 0.025


class UnawaitedEnd(NamedTuple):
    """The end of a run on its way to the store."""

    key: str
    run: RunEnd
    unit: Unit


class UnawaitedEnds:
    """The unawaited ends of one inbox. An end that the store has failed is posted again.

    Args:
        commits: commits the ends.
        ending: the kind of work that records ends of runs.
        pending: the inbox's tokens that a renewal must not give up.
    """

    def __init__(self, commits: GroupCommit, ending: Kind, pending: set[int]) -> None:
        self._commits = commits
        self._ending = ending
        self._pending = pending
        # By token, in the order in which they were posted.
        self._ends: dict[int, UnawaitedEnd] = {}

    def post(self, key: str, run: RunEnd) -> None:
        """Record the success of a run of ours, without waiting for the commit."""
        # Each call forgets two committed ends at most, so that none makes the event loop wait.
        for end in list(islice(self._ends.values(), 2)):
            if end.unit.finished and end.unit.error is None:
                self._forget(end)
        self._pending.add(run.token)
        unit = self._commits.post(self._ending, key, run, durable=True, linger=LINGER_SECONDS)
        self._ends[run.token] = UnawaitedEnd(key, run, unit)

    def _forget(self, end: UnawaitedEnd) -> None:
        # `post` may have forgotten it while `repeat_failed` was on its way through the ends.
        self._ends.pop(end.run.token, None)
        self._pending.discard(end.run.token)

    @property
    def are_committed(self) -> bool:
        """Whether no end is on its way to the store."""
        return all(end.unit.finished for end in self._ends.values())

    def repeat_failed(self) -> None:
        """Post again what the store has failed; the next commit of any caller takes it along."""
        for end in list(self._ends.values()):
            if end.unit.finished:
                self._forget(end)
                if end.unit.error is not None and not isinstance(end.unit.error, StoreLostError):
                    self.post(end.key, end.run)
