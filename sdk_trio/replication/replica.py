"""What a replica holds, and what can be restored from it. Pure (contracts 7).

A replica is a set of files. Each holds the changes from one transaction to another; a snapshot
begins at transaction 1. Fresh files hold single transactions. Later they are merged into larger
ones that carry the time of their *last* transaction: a point in time long ago is therefore
restored to the last boundary before it, never to a later state.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import attrs

from ..base.times import readable
from .lag import ReplicaPosition

#: The level of snapshots; what is below are changes.
SNAPSHOT_LEVEL = 9


@attrs.frozen
class ReplicaFile:
    """One file of a replica; ``written_at`` are Unix seconds of its last transaction.

    The listing cuts fractions of seconds off, so it may be up to a second later.
    """

    level: int
    first_txid: int
    last_txid: int
    bytes: int
    written_at: float

    @property
    def is_snapshot(self) -> bool:
        """Whether a restore can begin with it."""
        return self.level == SNAPSHOT_LEVEL or self.first_txid == 1


@attrs.frozen
class RestorePoint:
    """The state that a restore gives: its last transaction, when that was, and what to fetch."""

    txid: int
    as_of: float
    bytes: int


def parse_files(text: str) -> tuple[ReplicaFile, ...]:
    """Return the files of ``litestream ltx -json``.

    Raises:
        ValueError: this is no such listing.
    """
    rows = json.loads(text or "[]")
    # A replica without files is no list at all.
    if not isinstance(rows, list | type(None)):
        raise ValueError("no listing")
    return tuple(_file(row) for row in rows or ())


def parse_plan(text: str) -> RestorePoint:
    """Return the state that ``litestream restore -dry-run -json`` would restore.

    Raises:
        ValueError: this is no such plan.
    """
    plan = json.loads(text)
    try:
        files = [_file(row) for row in plan["files"]]
        return RestorePoint(
            int(plan["max_txid"], 16), files[-1].written_at, sum(file.bytes for file in files)
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no plan of a restore: {error}") from error


def _file(row: Any) -> ReplicaFile:
    try:
        return ReplicaFile(
            level=int(row["level"]),
            first_txid=int(row["min_txid"], 16),
            last_txid=int(row["max_txid"], 16),
            bytes=int(row["size"]),
            written_at=datetime.fromisoformat(row["timestamp"]).timestamp(),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no file of a replica: {error}") from error


def newest_txid(files: Iterable[ReplicaFile]) -> int:
    """Return the last transaction that any file holds; 0 for no files."""
    return max((file.last_txid for file in files), default=0)


def newest_time(files: Iterable[ReplicaFile]) -> float | None:
    """Return when the last transaction was, None for no files."""
    return max((file.written_at for file in files), default=None)


def newest_position(files: Sequence[ReplicaFile]) -> ReplicaPosition:
    """Return the last transaction that any file holds, and the earliest time said of it.

    A snapshot is written later than its last transaction, and has the time of its writing.
    """
    txid = newest_txid(files)
    times = (file.written_at for file in files if file.last_txid == txid)
    return ReplicaPosition(txid, min(times, default=None))


def earliest_snapshot(files: Iterable[ReplicaFile], since: float = float("-inf")) -> float | None:
    """Return when the first snapshot at or after ``since`` (Unix seconds) was, None for none.

    Only snapshots of their own level count: they go with the retention alone, while a file of
    changes that begins at transaction 1 is merged into a later one.
    """
    times = (file.written_at for file in files if file.level == SNAPSHOT_LEVEL)
    return min((time for time in times if time >= since), default=None)


def why_impossible(files: Sequence[ReplicaFile], at: float | None) -> str | None:
    """Return why nothing can be restored, None when something can.

    Args:
        files: all files of the replica.
        at: Unix seconds of the point in time that is wanted; None: the newest state.
    """
    if not files:
        return "the target holds no replica of it"
    beginnings = [file.written_at for file in files if file.is_snapshot]
    if not beginnings:
        return (
            "the replica has no snapshot to begin with: its oldest files were removed; restart the "
            "replicator, which then makes one, or wait for SnapshotIntervalMinutes"
        )
    if at is not None and at <= min(beginnings):
        return (
            f"the replica begins at {readable(min(beginnings))}, after the point in time that was "
            "asked for"
        )
    return None


def find_gap(
    files: Iterable[ReplicaFile], point: RestorePoint, at: float | None
) -> ReplicaFile | None:
    """Return a file that a restore to ``at`` should have reached and did not, None for none.

    It exists when a file between is missing. The replicator notices that for the newest state
    alone; for a point in time it restores what comes before the gap, as if nothing were wrong.
    """
    for file in files:
        if file.last_txid > point.txid and (at is None or file.written_at + 1 <= at):
            return file
    return None
