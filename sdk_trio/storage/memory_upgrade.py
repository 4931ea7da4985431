"""The upgrade's marker and its one batch in this process's memory."""

from collections.abc import Sequence

import attrs
import trio

from .memory_rows import Deliveries
from .upgrade_records import Assigned, StoredBody, UpgradeMarker


class MemoryUpgrade:
    """:class:`~.ports.UpgradeStore` in memory; cancelled means untouched."""

    def __init__(self, rows: Deliveries) -> None:
        self._rows = rows
        self._marker: UpgradeMarker | None = None

    async def marker(self) -> UpgradeMarker | None:
        """See :meth:`.ports.UpgradeStore.marker`."""
        await trio.lowlevel.checkpoint()
        return self._marker

    async def save(self, marker: UpgradeMarker) -> None:
        """See :meth:`.ports.UpgradeStore.save`."""
        await trio.lowlevel.checkpoint()
        self._marker = marker

    async def count_unassigned(self) -> int:
        """See :meth:`.ports.UpgradeStore.count_unassigned`."""
        await trio.lowlevel.checkpoint()
        return sum(row.tenant_id is None for row in self._rows.by_sequence.values())

    async def bodies(
        self, tenant_id: str | None, *, after: int, limit: int
    ) -> Sequence[StoredBody]:
        """See :meth:`.ports.UpgradeStore.bodies`."""
        await trio.lowlevel.checkpoint()
        found = sorted(
            sequence
            for sequence, row in self._rows.by_sequence.items()
            if sequence > after and row.tenant_id == tenant_id and row.raw is not None
        )
        rows = [self._rows.by_sequence[sequence] for sequence in found[:limit]]
        return [StoredBody(row.sequence, row.type, row.raw or b"") for row in rows]

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        """See :meth:`.ports.UpgradeStore.assign_batch`."""
        await trio.lowlevel.checkpoint()
        after = int(marker.position or 0)
        waiting = sorted(sequence for sequence in self._rows.by_sequence if sequence > after)
        assigned = 0
        for sequence in waiting[:limit]:
            row = self._rows.by_sequence[sequence]
            if row.tenant_id is None:
                self._rows.change(row, row.state, tenant_id=marker.tenant_id)
                assigned += 1
        if waiting:
            marker = attrs.evolve(marker, position=str(waiting[:limit][-1]))
            self._marker = marker
            self._rows.changes += 1
        return Assigned(assigned, marker, last=len(waiting) < limit)
