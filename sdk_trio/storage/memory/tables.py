"""Tenants, messages, alerts, upgrade of a store in memory: a SQLite database without a file."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import apsw
import msgspec
import trio

from ...base.opener import open_database
from ...errors import StoreUnavailableError
from ...records.states import DeliveryState
from ...records.upgrades import Assigned, StoredBody, UpgradeMarker
from ..admission import LeaseTerms
from ..engines.sqlite_connection import SQLITE, SqliteTransaction
from ..sql.alerts import AlertStore
from ..sql.dialect import SqlTransaction
from ..sql.schema import statements
from ..sql.tenants import UpgradeStore
from .rows import Deliveries

T = TypeVar("T")


class MemoryTables:
    """A SQLite database in memory: it commits and reads in the caller's thread.

    Cancellation: each call is one checkpoint of Trio, *before* it reads or changes anything.
    """

    def __init__(self) -> None:
        self.fence: Callable[[SqlTransaction], None] | None = None
        self._connection = open_database(
            ":memory:", flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        )
        for statement in statements(SQLITE):
            self._connection.execute(statement)
        self._transaction = SqliteTransaction(self._connection)
        self._closed = False

    async def submit(self, work: Callable[[SqlTransaction], T], /, *, single: bool = False) -> T:
        """Run ``work`` in a transaction and return its result."""
        await self._begin()
        self._connection.execute("BEGIN")
        try:
            if self.fence is not None:
                self.fence(self._transaction)
            value = work(self._transaction)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return value

    async def run(self, query: Callable[[SqlTransaction], T], /, *, seconds: float = math.inf) -> T:
        """Run ``query`` and return its result."""
        await self._begin()
        return query(self._transaction)

    async def _begin(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise StoreUnavailableError("the store is closed")

    def close(self) -> None:
        """Close it: every further call fails."""
        self._closed = True


class MemoryAlerts(AlertStore):
    """:class:`AlertStore` where deliveries are rows of Python."""

    def __init__(self, terms: LeaseTerms, tables: MemoryTables, rows: Deliveries) -> None:
        super().__init__(terms, tables, tables)
        self._rows = rows

    async def count_dead_letters(self, *, since: float) -> int:
        await trio.lowlevel.checkpoint()
        return sum(
            row.state is DeliveryState.DEAD and (row.finished_at or 0.0) >= since
            for row in self._rows.by_sequence.values()
        )


class MemoryUpgrade(UpgradeStore):
    """:class:`UpgradeStore` where deliveries are rows of Python."""

    def __init__(self, terms: LeaseTerms, tables: MemoryTables, rows: Deliveries) -> None:
        super().__init__(terms, tables, tables)
        self._rows = rows

    async def count_unassigned(self) -> int:
        await trio.lowlevel.checkpoint()
        return sum(row.tenant_id is None for row in self._rows.by_sequence.values())

    async def bodies(
        self, tenant_id: str | None, *, after: int, limit: int
    ) -> Sequence[StoredBody]:
        await trio.lowlevel.checkpoint()
        found = sorted(
            sequence
            for sequence, row in self._rows.by_sequence.items()
            if sequence > after and row.tenant_id == tenant_id and row.raw is not None
        )
        rows = [self._rows.by_sequence[sequence] for sequence in found[:limit]]
        return [StoredBody(row.sequence, row.type, row.raw or b"") for row in rows]

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        after = int(marker.position or 0)
        later = sorted(sequence for sequence in self._rows.by_sequence if sequence > after)
        if not later:
            await trio.lowlevel.checkpoint()
            return Assigned(0, marker, last=True)
        moved = msgspec.structs.replace(marker, position=str(later[:limit][-1]))
        await self.save(moved)
        assigned = 0
        for sequence in later[:limit]:
            # Some may have been removed while the marker was saved.
            row = self._rows.by_sequence.get(sequence)
            if row is not None and row.tenant_id is None:
                self._rows.change(row, row.state, tenant_id=marker.tenant_id)
                assigned += 1
        self._rows.changes += 1
        return Assigned(assigned, moved, last=len(later) < limit)
