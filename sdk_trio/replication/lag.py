"""The lag of replicas, by what the target holds. Pure.

This is for a replicator whose control socket cannot be asked. Its metrics tell the newest
transaction that it has read from each database, the target's listing tells the newest that has
arrived there. What lies between waits, and its age is the lag. The metrics are believed as long
as they show that the replicator goes on reading.
"""

import math
from collections.abc import Collection, Mapping
from typing import Final

import attrs

#: The metrics of one database, as an exposition names them.
_TXID: Final = "litestream_txid"
_SYNCS: Final = "litestream_sync_count"
_FAILED_SYNCS: Final = "litestream_sync_error_count"


@attrs.frozen
class DatabaseMetrics:
    """The replicator's reading of a database: up to which transaction, and how often."""

    txid: int = 0
    syncs: int = 0


@attrs.frozen
class ReplicaPosition:
    """The newest transaction that the target holds, 0 for none, and its time (Unix seconds)."""

    txid: int
    written_at: float | None


@attrs.frozen
class _Known:
    """Of one database; times are Unix seconds, each of them the last one.

    Attributes:
        metrics: as they were read last.
        read_at: when the replicator was seen to read the database; None: never.
        tried_at: when the target was asked, also without an answer; None: never.
        looked_at: when it was asked and answered; None: never.
        held: what the target held then.
        in_step_at: up to when everything was there then, None if nothing was.
    """

    metrics: DatabaseMetrics
    read_at: float | None = None
    tried_at: float | None = None
    looked_at: float | None = None
    held: int = 0
    in_step_at: float | None = None

    @property
    def is_in_step(self) -> bool:
        return self.held > 0 and self.held >= self.metrics.txid


class LagBook:
    """Remembers what was seen of each database, and says which are to be looked at again.

    ``fresh_seconds``: how long a look counts; what was not reached again gets older after that.
    """

    def __init__(self, fresh_seconds: float = math.inf) -> None:
        self._fresh_seconds = fresh_seconds
        self._known: dict[str, _Known] = {}
        self._noted_at = 0.0

    def note(self, metrics: Mapping[str, DatabaseMetrics], now: float) -> None:
        """Remember the replicator's metrics; databases that they do not name are forgotten."""
        self._noted_at = now
        found = {}
        for path, each in metrics.items():
            known = self._known.get(path, _Known(each))
            # One look shows what was read some time, two show that it goes on. Fewer than before:
            # it was restarted, and none at all is no success.
            read_at = known.read_at if each.syncs in (0, known.metrics.syncs) else now
            found[path] = attrs.evolve(known, metrics=each, read_at=read_at)
        self._known = found

    def due(self, paths: Collection[str], limit: int) -> list[str]:
        """Return which of ``paths`` have something new: those that waited longest, at most so many.

        What is in step and was not written since is not asked for: a request costs.
        """
        due = [path for path in paths if path in self._known and not self._known[path].is_in_step]
        due.sort(key=lambda path: (self._known[path].tried_at or 0.0, path))
        return due[:limit]

    def tried(self, path: str, now: float) -> None:
        """Remember that the target is asked now: without an answer, the others come first."""
        if path in self._known:
            self._known[path] = attrs.evolve(self._known[path], tried_at=now)

    def covers(self, path: str, position: ReplicaPosition) -> bool:
        """Return whether the target holds all that the replicator has read of a database."""
        known = self._known.get(path)
        return known is not None and attrs.evolve(known, held=position.txid).is_in_step

    def found(
        self, path: str, position: ReplicaPosition, waiting_since: float | None, now: float
    ) -> None:
        """Remember what the target holds of a database.

        Args:
            path: the database's.
            position: what the target holds.
            waiting_since: when the replicator read the first transaction that the target does not
                hold, None if that is not known.
            now: when the target was asked.
        """
        known = self._known.get(path)
        if known is None:
            return
        known = attrs.evolve(known, looked_at=now, held=position.txid)
        times = [known.in_step_at, waiting_since, position.written_at]
        in_step_at = max((time for time in times if time is not None), default=None)
        if known.is_in_step:
            in_step_at = known.read_at
        elif not position.txid:
            in_step_at = None
        self._known[path] = attrs.evolve(known, in_step_at=in_step_at)

    def was_looked_at(self, path: str) -> bool:
        """Return whether the target was ever asked for this database."""
        return path in self._known and self._known[path].looked_at is not None

    def has_replica(self, path: str) -> bool:
        """Return whether the target held anything of this database."""
        return path in self._known and self._known[path].held > 0

    def waits_for_reading(self) -> bool:
        """Return whether there is a database that the replicator was not seen to read yet."""
        return any(known.read_at is None for known in self._known.values())

    def in_step_at(self, path: str) -> float | None:
        """Return up to when all of a database is known to be at the target, None if nothing is."""
        known = self._known.get(path)
        if known is None:
            return None
        return known.read_at if known.is_in_step else known.in_step_at

    def delay(self, path: str, now: float, *, unanswered: bool) -> float | None:
        """Return how old the oldest is that waits, in seconds; None if nobody knows.

        It is as of the last look. When the target does not answer any more, or was not asked for
        this database in time, it grows by itself.
        """
        known = self._known.get(path)
        if known is None or known.looked_at is None or known.read_at is None:
            return None
        in_step_at = self.in_step_at(path)
        outdated = unanswered or now - known.looked_at > self._fresh_seconds
        as_of = now if outdated else known.looked_at
        if known.is_in_step:
            as_of = self._noted_at
        return None if in_step_at is None else max(0.0, as_of - in_step_at)


def read_metrics(text: str) -> dict[str, DatabaseMetrics]:
    """Return the databases that the replicator's metrics name, out of the text of its endpoint."""
    values: dict[tuple[str, str], int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition('{db="')
        path, quote, value = rest.rpartition('"} ')
        if quote and name in (_TXID, _SYNCS, _FAILED_SYNCS):
            try:
                values[name, _unescaped(path)] = int(float(value))
            except (ValueError, OverflowError):
                continue
    return {
        path: DatabaseMetrics(
            txid, values.get((_SYNCS, path), 0) - values.get((_FAILED_SYNCS, path), 0)
        )
        for (name, path), txid in values.items()
        if name == _TXID
    }


def _unescaped(label: str) -> str:
    """Undo the escapes of the exposition format: backslash, quotation mark, line break."""
    parts = label.split("\\\\")
    return "\\".join(part.replace('\\"', '"').replace("\\n", "\n") for part in parts)
