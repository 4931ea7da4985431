"""The upgrade's marker and its batches in the SQLite file of the inbox."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import apsw
import msgspec
import trio

from ...records.upgrades import Assigned, StoredBody, UpgradeMarker, UpgradeState
from .committer import Committer
from .listing import note_tenants
from .queries import QueryRunner

_SAVE = """
INSERT INTO upgrade (id, state, tenant_id, step, position, started_at, finished_at)
VALUES (1, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, tenant_id = excluded.tenant_id, step = excluded.step,
    position = excluded.position, started_at = excluded.started_at,
    finished_at = excluded.finished_at
"""

# The list of finished steps is newer than the table. As a checkpoint it needs no new column, so an
# older version that opens the store still sees the marker that it knows.
_FINISHED = "upgrade.finished"

_SAVE_FINISHED = """
INSERT INTO checkpoint (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""

_MARKER = """
SELECT state, tenant_id, step, position, started_at, finished_at,
       (SELECT value FROM checkpoint WHERE name = ?)
FROM upgrade
"""

_BODIES = """
SELECT sequence, type, raw FROM arrival JOIN body USING (sequence)
WHERE sequence > ? AND tenant_id IS ? ORDER BY sequence LIMIT ?
"""

# Batches are ranges of sequences: the position then moves on also where no row of the range needs a
# tenant.
_END_OF_BATCH = """
SELECT max(sequence), count(*) FROM (
    SELECT sequence FROM arrival WHERE sequence > ? ORDER BY sequence LIMIT ?
)
"""

_ASSIGN = """
UPDATE {} SET tenant_id = ? WHERE sequence > ? AND sequence <= ? AND tenant_id IS NULL
"""


class SqliteUpgrade:
    """:class:`UpgradeStore` in SQLite; cancellation is as in the inbox."""

    def __init__(self, committer: Committer, queries: QueryRunner) -> None:
        self._committer = committer
        self._queries = queries

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`UpgradeStore.lead`; the lock of the upgrade has one holder."""
        await trio.lowlevel.checkpoint()
        return 1

    def fenced(self, term: int) -> AbstractContextManager[None]:
        """See :meth:`UpgradeStore.fenced`."""
        return nullcontext()

    async def marker(self) -> UpgradeMarker | None:
        """See :meth:`UpgradeStore.marker`."""
        return await self._queries.run(_marker)

    async def save(self, marker: UpgradeMarker) -> None:
        """See :meth:`UpgradeStore.save`."""
        await self._committer.submit(lambda c: _save(c, marker))

    async def count_unassigned(self) -> int:
        """See :meth:`UpgradeStore.count_unassigned`."""
        return await self._queries.run(
            lambda c: c.execute("SELECT count(*) FROM arrival WHERE tenant_id IS NULL").get
        )

    async def bodies(
        self, tenant_id: str | None, *, after: int, limit: int
    ) -> Sequence[StoredBody]:
        """See :meth:`UpgradeStore.bodies`."""
        return await self._queries.run(
            lambda c: [StoredBody(*row) for row in c.execute(_BODIES, (after, tenant_id, limit))]
        )

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        """See :meth:`UpgradeStore.assign_batch`."""
        return await self._committer.submit(lambda c: _assign(c, marker, limit))


def _save(connection: apsw.Connection, marker: UpgradeMarker) -> None:
    connection.execute(
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
    if marker.finished is None:
        connection.execute("DELETE FROM checkpoint WHERE name = ?", (_FINISHED,))
    else:
        connection.execute(_SAVE_FINISHED, (_FINISHED, json.dumps(marker.finished)))


def _marker(connection: apsw.Connection) -> UpgradeMarker | None:
    row = connection.execute(_MARKER, (_FINISHED,)).fetchone()
    if row is None:
        return None
    state, tenant_id, step, position, started_at, finished_at, finished = cast("Any", row)
    return UpgradeMarker(
        state=UpgradeState(state),
        tenant_id=tenant_id or None,
        step=step,
        position=position,
        started_at=started_at,
        finished_at=finished_at,
        finished=None if finished is None else tuple(json.loads(finished)),
    )


def _assign(connection: apsw.Connection, marker: UpgradeMarker, limit: int) -> Assigned:
    after = int(marker.position or 0)
    row = connection.execute(_END_OF_BATCH, (after, limit)).fetchone()
    end, count = cast("tuple[int | None, int]", row)
    if end is None:
        return Assigned(0, marker, last=True)
    # A row of `open` repeats the tenant, because ordered deliveries stand in line by it.
    for table in ("open", "arrival"):
        connection.execute(_ASSIGN.format(table), (marker.tenant_id, after, end))
    assigned = connection.changes()
    note_tenants(connection, after, end)
    moved = msgspec.structs.replace(marker, position=str(end))
    _save(connection, moved)
    return Assigned(assigned, moved, last=count < limit)
