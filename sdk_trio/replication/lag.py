"""The lag of replicas, by what the target holds. Pure.

This is for a replicator whose control socket cannot be asked. Its metrics report the newest
transaction that it has read from each database, the target's listing the newest that has arrived
there. The transactions in between wait, and the age of the oldest is the lag. The metrics are
believed as long as they show that the replicator goes on reading.
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
    """The last observations of one database; times are Unix seconds, None: never.

    Attributes:
        metrics: the last metrics.
        read_at: the replicator was seen to read the database.
        tried_at: the target was asked, also without an answer.
        looked_at: the target was asked and answered.
        held: the newest transaction that the target held then; 0: none.
        in_step_at: everything up to this time was at the target then; None if nothing was.
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
    """The observations of all databases, and the choice of those to ask for next.

    ``fresh_seconds``: the time for which an observation counts; after it the lag grows by itself.
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
            # A count that has changed between two looks shows that the replicator is reading. A
            # smaller one means that it was restarted; 0 means that it has read nothing yet.
            read_at = known.read_at if each.syncs in (0, known.metrics.syncs) else now
            found[path] = attrs.evolve(known, metrics=each, read_at=read_at)
        self._known = found

    def due(self, paths: Collection[str], limit: int) -> list[str]:
        """Return up to ``limit`` of ``paths`` that are not in step, the longest waiting first.

        Databases that are in step and were not written since are left out: each request costs.
        """
        due = [path for path in paths if path in self._known and not self._known[path].is_in_step]
        due.sort(key=lambda path: (self._known[path].tried_at or 0.0, path))
        return due[:limit]

    def tried(self, path: str, now: float) -> None:
        """Remember that the target is asked now; if it fails, other databases are asked first."""
        if path in self._known:
            self._known[path] = attrs.evolve(self._known[path], tried_at=now)

    def covers(self, path: str, position: ReplicaPosition) -> bool:
        """Return whether the target holds all that the replicator has read of a database."""
        known = self._known.get(path)
        return known is not None and attrs.evolve(known, held=position.txid).is_in_step

    def found(
        self, path: str, position: ReplicaPosition, waiting_since: float | None, now: float
    ) -> None:
        """Remember the position of a database at the target.

        Args:
            path: the database's.
            position: the newest transaction at the target.
            waiting_since: the time at which the replicator read the first transaction that the
                target does not hold, None if that is not known.
            now: the time of the question.
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
        """Return the time up to which all of a database is at the target, None if nothing is."""
        known = self._known.get(path)
        if known is None:
            return None
        return known.read_at if known.is_in_step else known.in_step_at

    def delay(self, path: str, now: float, *, unanswered: bool) -> float | None:
        """Return the age of the oldest waiting transaction, in seconds; None if it is unknown.

        It is as of the last look. If the target does not answer any more, or was not asked for this
        database in time, it grows with the time since.
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
