"""The upgrade's marker and its batches."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ...base import clock
from ...records.upgrades import Assigned, StoredBody, UpgradeMarker, UpgradeState
from ..admission import LeaseTerms
from . import arrivals, leases
from .deliveries import lane_of, write_checkpoint
from .dialect import Reads, SqlTransaction, Writes

_SAVE = """
INSERT INTO upgrade (id, state, tenant_id, step, position, started_at, finished_at)
VALUES (1, :state, :tenant_id, :step, :position, :started_at, :finished_at)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, tenant_id = excluded.tenant_id, step = excluded.step,
    position = excluded.position, started_at = excluded.started_at,
    finished_at = excluded.finished_at
"""

_FINISHED = "upgrade.finished"

_MARKER = """
SELECT state, tenant_id, step, position, started_at, finished_at,
       (SELECT value FROM checkpoint WHERE name = :name)
FROM upgrade
"""

_BODIES = """
SELECT sequence, type, raw FROM arrival
WHERE sequence > :after AND tenant_id IS NOT DISTINCT FROM :tenant_id AND raw IS NOT NULL
ORDER BY sequence LIMIT :limit
"""

# Batches are ranges of sequences: the position then moves on also where no row of the range needs a
# tenant.
_BATCH = """
SELECT sequence, tenant_id FROM arrival WHERE sequence > :after ORDER BY sequence LIMIT :limit
"""

_IN_LANES = """
SELECT work.sequence, arrival.tenant_id, arrival.subject
FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE work.lane IS NOT NULL AND work.sequence IN ints(:sequences)
"""

_MOVE_LANE = "UPDATE work SET lane = :lane WHERE sequence = :sequence"


class SqlUpgrade:
    """:class:`UpgradeStore` in a SQL store; cancellation is as in the inbox."""

    def __init__(self, terms: LeaseTerms, commits: Writes, readers: Reads) -> None:
        self._owner = terms.owner
        self._commits = commits
        self._readers = readers

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`UpgradeStore.lead`."""
        owner, now = self._owner, clock.wall()
        return await self._commits.submit(
            lambda tx: leases.lead(tx, owner, seconds=seconds, now=now, name=leases.UPGRADER)
        )

    @contextmanager
    def fenced(self, term: int) -> Iterator[None]:
        """See :meth:`UpgradeStore.fenced`."""
        owner = self._owner
        self._commits.fence = lambda tx: leases.require_term(tx, owner, term, name=leases.UPGRADER)
        try:
            yield
        finally:
            self._commits.fence = None

    async def marker(self) -> UpgradeMarker | None:
        """See :meth:`UpgradeStore.marker`."""
        return await self._readers.run(_marker)

    async def save(self, marker: UpgradeMarker) -> None:
        """See :meth:`UpgradeStore.save`."""
        await self._commits.submit(lambda tx: _save(tx, marker))

    async def count_unassigned(self) -> int:
        """See :meth:`UpgradeStore.count_unassigned`."""
        return await self._readers.run(_count_unassigned)

    async def bodies(
        self, tenant_id: str | None, *, after: int, limit: int
    ) -> Sequence[StoredBody]:
        """See :meth:`UpgradeStore.bodies`."""
        return await self._readers.run(
            lambda tx: [
                StoredBody(*row)
                for row in tx.all(_BODIES, after=after, tenant_id=tenant_id, limit=limit)
            ]
        )

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        """See :meth:`UpgradeStore.assign_batch`."""
        return await self._commits.submit(lambda tx: _assign(tx, marker, limit))


def _count_unassigned(tx: SqlTransaction) -> int:
    (count,) = tx.one("SELECT count(*) FROM arrival WHERE tenant_id IS NULL") or (0,)
    return int(count)


def _save(tx: SqlTransaction, marker: UpgradeMarker) -> None:
    tx.run(
        _SAVE,
        state=marker.state,
        tenant_id=marker.tenant_id or "",
        step=marker.step,
        position=marker.position,
        started_at=marker.started_at,
        finished_at=marker.finished_at,
    )
    finished = None if marker.finished is None else json.dumps(marker.finished)
    write_checkpoint(tx, _FINISHED, finished)


def _marker(tx: SqlTransaction) -> UpgradeMarker | None:
    row = tx.one(_MARKER, name=_FINISHED)
    if row is None:
        return None
    state, tenant_id, step, position, started_at, finished_at, finished = row
    return UpgradeMarker(
        state=UpgradeState(state),
        tenant_id=tenant_id or None,
        step=step,
        position=position,
        started_at=started_at,
        finished_at=finished_at,
        finished=None if finished is None else tuple(json.loads(finished)),
    )


def _assign(tx: SqlTransaction, marker: UpgradeMarker, limit: int) -> Assigned:
    batch = tx.all(_BATCH, after=int(marker.position or 0), limit=limit)
    if not batch:
        return Assigned(0, marker, last=True)
    sequences = [sequence for sequence, tenant_id in batch if tenant_id is None]
    assigned = arrivals.assign(tx, sequences, marker.tenant_id or "")
    for sequence, tenant_id, subject in tx.all(_IN_LANES, sequences=sequences):
        tx.run(_MOVE_LANE, lane=lane_of(True, tenant_id, subject), sequence=sequence)
    moved = msgspec.structs.replace(marker, position=str(batch[-1][0]))
    _save(tx, moved)
    tx.note_change()
    return Assigned(assigned, moved, last=len(batch) < limit)
