"""Asks the target what it holds, for a replicator that does not tell its lag.

Each question starts the replicator's binary, which asks the target with the keys of our own
environment. That costs a process and some requests, so it is bounded: it asks only for databases
that were written since they were found in step, at most :data:`SURVEYED` in one survey, two at a
time, and for no more after the first failure.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from ..config import Settings
from ..errors import ReplicationError, StorageError
from ..storage.data_directory import create_data_directory
from .lag import DatabaseMetrics, LagBook
from .replica import ReplicaFile, ReplicaReader, TenantReplica, newest_position
from .scratch import scratch_directory

#: Shortest time between two surveys, in seconds; otherwise it is ``HealthCheckMaxLagSeconds``.
LEAST_PAUSE_SECONDS = 10.0

#: Longest time between two surveys, in seconds.
LONGEST_PAUSE_SECONDS = 60.0

#: Time limit of a survey, in seconds. Databases that it did not reach come first in the next one.
SURVEY_SECONDS = 10.0

#: The most databases in one survey: each costs a process of some 40 ms, and a request or more.
SURVEYED = 50

_AT_A_TIME = 2

#: The level of fresh files; a listing of it is one request.
_FRESH = "0"


class LagSurveyor:
    """Compares what the replicator has read with what the target holds, now and then.

    Args:
        settings: validated settings with ``UseReplication``.
        reader: knows the target.
        pause: seconds between two surveys; None: ``HealthCheckMaxLagSeconds`` within bounds.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        reader: ReplicaReader | None = None,
        *,
        pause: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        options = settings.multi_tenant.file_db.replication
        self._reader = ReplicaReader(settings) if reader is None else reader
        self._data = Path(settings.storage.path).absolute()
        self._clock = clock
        threshold = max(float(options.health_check_max_lag_seconds), LEAST_PAUSE_SECONDS)
        self._pause = min(threshold, LONGEST_PAUSE_SECONDS) if pause is None else pause
        self._next_at = float("-inf")
        # The longest time between two surveys of a busy database, unless it was left out.
        self.book: LagBook = LagBook(2 * self._pause + SURVEY_SECONDS)
        #: The error of the last survey; empty: the target answered.
        self.problem: str = ""

    async def survey(self, paths: Collection[str], metrics: Mapping[str, DatabaseMetrics]) -> None:
        """Bring the book up to date; the target is asked when that is due.

        Args:
            paths: the databases that should be replicated.
            metrics: what the replicator says that it has read.

        Cancelled, it ends the binary.
        """
        await trio.lowlevel.checkpoint()
        self.book.note(metrics, self._clock())
        if trio.current_time() < self._next_at:
            return
        due = self.book.due(paths, SURVEYED)
        if due:
            await self._ask_all(due)
        else:
            self.problem = ""
        self._next_at = trio.current_time() + self._pause

    async def _ask_all(self, due: list[str]) -> None:
        self.problem = ""
        answered = 0
        # The tasks share one iterator, so each database is asked for once, the longest waiting
        # first.
        waiting = iter(due)

        async def work(scope: trio.CancelScope) -> None:  # noqa: ASYNC910 - there is one at least
            nonlocal answered
            for path in waiting:
                try:
                    await self._ask(path)
                except (ReplicationError, StorageError, OSError) as error:
                    self.problem = self.problem or str(error)
                    # A failure for one database is one for all; the next survey tries again.
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
                answered += 1

        with trio.move_on_after(SURVEY_SECONDS) as deadline:
            async with trio.open_nursery() as nursery:
                for _ in range(_AT_A_TIME):
                    nursery.start_soon(work, nursery.cancel_scope)
        if deadline.cancelled_caught and not answered:
            self.problem = (
                f"the replication target did not answer within {SURVEY_SECONDS:g} s: check that it "
                "is up and can be reached from this machine"
            )

    async def _ask(self, path: str) -> None:
        asked_at = self._clock()
        self.book.tried(path, asked_at)
        create_data_directory(self._data)
        with scratch_directory(self._data, ".listing-") as scratch:
            replica = self._reader.prepare(Path(path).stem, scratch)
            position = newest_position(await self._files(replica, path))
        since = await trio.to_thread.run_sync(partial(waiting_since, path, position.txid))
        self.book.found(path, position, since, asked_at)

    async def _files(self, replica: TenantReplica, path: str) -> tuple[ReplicaFile, ...]:
        """Return the fresh files, or all when these do not show that it is in step."""
        # Mostly enough: one request instead of one for each level.
        fresh = await replica.list_files(level=_FRESH)
        if self.book.covers(path, newest_position(fresh)):
            return fresh
        return await replica.list_files()


def waiting_since(path: str, replicated: int) -> float | None:
    """Return the time at which the replicator read the transaction after ``replicated``; blocks.

    The replicator keeps transactions in a directory beside the database until the target has them.

    Returns:
        Unix seconds; None if there is no such transaction, or the directory is elsewhere.
    """
    database = Path(path)
    directory = database.with_name(f".{database.name}-litestream") / "ltx" / "0"
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(f"{replicated + 1:016x}-"):
                return entry.stat().st_mtime
    return None
