"""The upgrade's marker and its batches in the SQLite file of the inbox."""

from typing import Any, cast

import apsw
import attrs

from .committer import Committer
from .query_runner import QueryRunner
from .upgrade_records import Assigned, UpgradeMarker, UpgradeState

_SAVE = """
INSERT INTO upgrade (id, state, tenant_id, step, position, started_at, finished_at)
VALUES (1, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, tenant_id = excluded.tenant_id, step = excluded.step,
    position = excluded.position, started_at = excluded.started_at,
    finished_at = excluded.finished_at
"""

_MARKER = "SELECT state, tenant_id, step, position, started_at, finished_at FROM upgrade"

_END_OF_BATCH = """
SELECT max(sequence), count(*) FROM (
    SELECT sequence FROM inbox WHERE sequence > ? ORDER BY sequence LIMIT ?
)
"""

_ASSIGN = """
UPDATE inbox SET tenant_id = ? WHERE sequence > ? AND sequence <= ? AND tenant_id IS NULL
"""


class SqliteUpgrade:
    """:class:`~.ports.UpgradeStore` in SQLite; cancellation is as in the inbox."""

    def __init__(self, committer: Committer, queries: QueryRunner) -> None:
        self._committer = committer
        self._queries = queries

    async def marker(self) -> UpgradeMarker | None:
        """See :meth:`.ports.UpgradeStore.marker`."""
        return await self._queries.run(_marker)

    async def save(self, marker: UpgradeMarker) -> None:
        """See :meth:`.ports.UpgradeStore.save`."""
        await self._committer.submit(lambda c: _save(c, marker))

    async def count_unassigned(self) -> int:
        """See :meth:`.ports.UpgradeStore.count_unassigned`."""
        return await self._queries.run(
            lambda c: c.execute("SELECT count(*) FROM inbox WHERE tenant_id IS NULL").get
        )

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        """See :meth:`.ports.UpgradeStore.assign_batch`."""
        return await self._committer.submit(lambda c: _assign(c, marker, limit))


def _save(connection: apsw.Connection, marker: UpgradeMarker) -> None:
    connection.execute(
        _SAVE,
        (
            marker.state,
            marker.tenant_id,
            marker.step,
            marker.position,
            marker.started_at,
            marker.finished_at,
        ),
    )


def _marker(connection: apsw.Connection) -> UpgradeMarker | None:
    row = connection.execute(_MARKER).fetchone()
    if row is None:
        return None
    state, tenant_id, step, position, started_at, finished_at = cast("Any", row)
    return UpgradeMarker(
        state=UpgradeState(state),
        tenant_id=tenant_id,
        step=step,
        position=position,
        started_at=started_at,
        finished_at=finished_at,
    )


def _assign(connection: apsw.Connection, marker: UpgradeMarker, limit: int) -> Assigned:
    after = int(marker.position or 0)
    row = connection.execute(_END_OF_BATCH, (after, limit)).fetchone()
    end, count = cast("tuple[int | None, int]", row)
    if end is None:
        return Assigned(0, marker, last=True)
    connection.execute(_ASSIGN, (marker.tenant_id, after, end))
    assigned = connection.changes()
    moved = attrs.evolve(marker, position=str(end))
    _save(connection, moved)
    return Assigned(assigned, moved, last=count < limit)
