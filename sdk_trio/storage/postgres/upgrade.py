"""The upgrade's marker and its batches in PostgreSQL."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ...records.upgrades import Assigned, StoredBody, UpgradeMarker, UpgradeState
from . import leases
from .commits import GroupCommit
from .connect import StoreConnection
from .queries import QueryPool
from .writes import lane, write_checkpoint

_SAVE = """
INSERT INTO upgrade (id, state, tenant_id, step, position, started_at, finished_at)
VALUES (1, %s, %s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, tenant_id = excluded.tenant_id, step = excluded.step,
    position = excluded.position, started_at = excluded.started_at,
    finished_at = excluded.finished_at
"""

# A checkpoint, as in the other stores, so that moving from one to another keeps it.
_FINISHED = "upgrade.finished"

_MARKER = """
SELECT state, tenant_id, step, position, started_at, finished_at,
       (SELECT value FROM checkpoint WHERE name = %s)
FROM upgrade
"""

_BODIES = """
SELECT sequence, type, raw FROM arrival
WHERE sequence > %s AND tenant_id IS NOT DISTINCT FROM %s AND raw IS NOT NULL
ORDER BY sequence LIMIT %s
"""

# Batches are ranges of sequences: the position then moves on also where no row of the range needs a
# tenant.
_END_OF_BATCH = """
SELECT max(sequence), count(*) FROM (
    SELECT sequence FROM arrival WHERE sequence > %s ORDER BY sequence LIMIT %s
) AS batch
"""

_ASSIGN = """
UPDATE arrival SET tenant_id = %s WHERE sequence > %s AND sequence <= %s AND tenant_id IS NULL
"""

_MOVE_LANES = f"""
UPDATE work SET lane = {lane("work.ordered", "arrival.tenant_id", "arrival.subject")}
FROM arrival WHERE arrival.sequence = work.sequence AND work.lane IS NOT NULL
    AND work.sequence > %s AND work.sequence <= %s
"""


class PostgresUpgrade:
    """:class:`UpgradeStore` in PostgreSQL; cancellation is as in the inbox."""

    def __init__(self, commits: GroupCommit, queries: QueryPool, owner: str) -> None:
        self._commits = commits
        self._queries = queries
        self._owner = owner

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`UpgradeStore.lead`."""
        owner = self._owner
        return await self._commits.submit(
            lambda c: leases.lead(c, owner, seconds, name=leases.UPGRADER)
        )

    @contextmanager
    def fenced(self, term: int) -> Iterator[None]:
        """See :meth:`UpgradeStore.fenced`."""
        owner = self._owner
        self._commits.fence = lambda c: leases.require_term(c, owner, term, name=leases.UPGRADER)
        try:
            yield
        finally:
            self._commits.fence = None

    async def marker(self) -> UpgradeMarker | None:
        """See :meth:`UpgradeStore.marker`."""
        return await self._queries.run(_marker)

    async def save(self, marker: UpgradeMarker) -> None:
        """See :meth:`UpgradeStore.save`."""
        await self._commits.submit(lambda c: _save(c, marker))

    async def count_unassigned(self) -> int:
        """See :meth:`UpgradeStore.count_unassigned`."""
        return await self._queries.run(_count_unassigned)

    async def bodies(
        self, tenant_id: str | None, *, after: int, limit: int
    ) -> Sequence[StoredBody]:
        """See :meth:`UpgradeStore.bodies`."""
        return await self._queries.run(
            lambda c: [StoredBody(*row) for row in c.execute(_BODIES, (after, tenant_id, limit))]
        )

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        """See :meth:`UpgradeStore.assign_batch`."""
        return await self._commits.submit(lambda c: _assign(c, marker, limit))


def _count_unassigned(connection: StoreConnection) -> int:
    statement = "SELECT count(*) FROM arrival WHERE tenant_id IS NULL"
    (count,) = connection.execute(statement).fetchone() or (0,)
    return int(count)


def _save(connection: StoreConnection, marker: UpgradeMarker) -> None:
    connection.write(
        _SAVE,
        (
            marker.state,
            marker.tenant_id or "",
            marker.step,
            marker.position,
            marker.started_at,
            marker.finished_at,
        ),
    )
    finished = None if marker.finished is None else json.dumps(marker.finished)
    write_checkpoint(connection, _FINISHED, finished)


def _marker(connection: StoreConnection) -> UpgradeMarker | None:
    row = connection.execute(_MARKER, (_FINISHED,)).fetchone()
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


def _assign(connection: StoreConnection, marker: UpgradeMarker, limit: int) -> Assigned:
    after = int(marker.position or 0)
    end, count = connection.execute(_END_OF_BATCH, (after, limit)).fetchone() or (None, 0)
    if end is None:
        return Assigned(0, marker, last=True)
    assigned = connection.write(_ASSIGN, (marker.tenant_id, after, end)).rowcount
    connection.write(_MOVE_LANES, (after, end))
    moved = msgspec.structs.replace(marker, position=str(end))
    _save(connection, moved)
    return Assigned(assigned, moved, last=count < limit)
