"""Messages to site managers in this process's memory.

Cancellation: every method is one checkpoint, *before* anything is looked at or changed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from ...errors import StoreUnavailableError
from ...records.notifications import (
    CUT_OFF,
    OPEN,
    RETRIABLE,
    SWITCHED_OFF,
    DueNotifications,
    Enlisted,
    Lookout,
    NotificationId,
    NotificationRecord,
    NotificationState,
    Recovered,
    SendResult,
    too_old,
)
from ...records.tenants import OutboxRecord
from ..admission import LeaseTerms
from .tenants import NotificationRow, NotificationRows

if TYPE_CHECKING:
    from .tenants import MemoryTenants

_WAITING = OPEN - {NotificationState.SENDING}


class MemoryNotifications:
    """:class:`NotificationStore` in memory; the rows are those of ``tenants``."""

    def __init__(self, terms: LeaseTerms, tenants: "MemoryTenants") -> None:
        self._terms = terms
        self._tenants = tenants

    async def _begin(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._tenants.is_closed:
            raise StoreUnavailableError("the store is closed")

    @property
    def _rows(self) -> NotificationRows:
        return self._tenants.notification_rows

    @property
    def _open(self) -> dict[NotificationId, NotificationRow]:
        return self._rows.open

    # -- new messages ----------------------------------------------------------------------------

    async def enlist(
        self, channels: Mapping[str, bool], *, now: float, oldest: float, limit: int = 500
    ) -> Enlisted:
        """See :meth:`NotificationStore.enlist`."""
        await self._begin()
        skipped = 0
        for id, row in list(self._open.items()):
            waits = row.record.state in _WAITING and row.owner is None
            if waits and id.channel not in channels:
                self._end(row, NotificationState.SKIPPED, SWITCHED_OFF, now)
                skipped += 1
        rows = self._rows
        if rows.position is None:
            rows.position = self._tenants.last_sequence
            rows.silent = False
            return Enlisted(0, skipped, more=False)
        records = self._tenants.outbox_after(rows.position, limit)
        pending = 0
        for outbox in records:
            rows.position = outbox.sequence
            for channel, repeatable in channels.items():
                row = self._add(outbox, channel, repeatable, now)
                if outbox.occurred_at >= oldest:
                    pending += 1
                else:
                    self._end(
                        row, NotificationState.SKIPPED, too_old(now - outbox.occurred_at), now
                    )
                    skipped += 1
        return Enlisted(pending, skipped, more=len(records) == limit)

    async def switch_off(self) -> None:
        """See :meth:`NotificationStore.switch_off`."""
        await self._begin()
        self._rows.position = None
        self._rows.silent = True

    def _add(
        self, outbox: OutboxRecord, channel: str, repeatable: bool, now: float
    ) -> NotificationRow:
        record = NotificationRecord(
            id=NotificationId(outbox.sequence, channel),
            state=NotificationState.PENDING,
            repeatable=repeatable,
            attempts=0,
            created_at=now,
            next_attempt_at=None,
            started_at=None,
            finished_at=None,
            provider_id=None,
            reason=None,
            outbox=outbox,
        )
        row = NotificationRow(record)
        self._rows.keep(row, record)
        return row

    def _end(self, row: NotificationRow, state: NotificationState, reason: str, now: float) -> None:
        row.owner, row.until = None, 0.0
        ended = attrs.evolve(
            row.record, state=state, reason=reason, finished_at=now, next_attempt_at=None
        )
        self._rows.keep(row, ended)

    async def look(self, channels: Mapping[str, bool], *, now: float) -> Lookout:
        """See :meth:`NotificationStore.look`."""
        await self._begin()
        position = self._rows.position
        due = {
            id.channel
            for id, row in self._open.items()
            if (row.until if row.owner else row.record.next_attempt_at or 0.0) <= now
        }
        return Lookout(
            position is None or self._tenants.outbox_after(position, 1) != [],
            frozenset(due & channels.keys()),
        )

    # -- leases ----------------------------------------------------------------------------------

    async def take_due(self, channel: str, *, limit: int, now: float) -> DueNotifications:
        """See :meth:`NotificationStore.take_due`."""
        await self._begin()
        mine = self._terms.owner
        here = [row for id, row in sorted(self._open.items()) if id.channel == channel]
        expired = [row for row in here if row.owner not in (None, mine) and row.until <= now]
        lost = self._free(expired, now).lost
        waiting = [row for row in here if row.record.state in _WAITING and row.owner is None]
        due, next_due_at = [], None
        for row in waiting:
            at = row.record.next_attempt_at
            if at is None or at <= now:
                due.append(row)
            else:
                next_due_at = at if next_due_at is None else min(at, next_due_at)
        for row in due[:limit]:
            row.owner, row.until = mine, now + self._terms.lease_seconds
            self._rows.keep(row, attrs.evolve(row.record, next_attempt_at=None))
        records = [row.record for row in due[:limit]]
        return DueNotifications(records, lost, len(due) > limit, next_due_at)

    def _free(self, rows: Iterable[NotificationRow], now: float) -> Recovered:
        resumed = 0
        lost = []
        for row in rows:
            if row.record.state is NotificationState.SENDING and not row.record.repeatable:
                self._end(row, NotificationState.UNKNOWN, CUT_OFF, now)
                lost.append(row.record)
            else:
                self._put_back(row)
                resumed += 1
        return Recovered(resumed, lost)

    def _put_back(self, row: NotificationRow, *, attempts: int | None = None) -> None:
        row.owner, row.until = None, 0.0
        waiting = attrs.evolve(
            row.record,
            state=NotificationState.PENDING,
            next_attempt_at=None,
            attempts=row.record.attempts if attempts is None else attempts,
        )
        self._rows.keep(row, waiting)

    async def release(self) -> None:
        """See :meth:`NotificationStore.release`."""
        await self._begin()
        for row in self._open.values():
            if row.owner == self._terms.owner and row.record.state in _WAITING:
                self._put_back(row)

    async def recover(self, *, now: float) -> Recovered:
        """See :meth:`NotificationStore.recover`."""
        await self._begin()
        others = (None, self._terms.owner)
        return self._free([r for _, r in sorted(self._open.items()) if r.owner not in others], now)

    async def renew(self, ids: Collection[NotificationId], *, now: float) -> Recovered:
        """See :meth:`NotificationStore.renew`."""
        await self._begin()
        ours = [
            (id, row) for id, row in sorted(self._open.items()) if row.owner == self._terms.owner
        ]
        for id, row in ours:
            if id in ids:
                row.until = now + self._terms.lease_seconds
        return self._free([row for id, row in ours if id not in ids], now)

    # -- attempts --------------------------------------------------------------------------------

    async def start(self, id: NotificationId, *, now: float) -> bool:
        """See :meth:`NotificationStore.start`."""
        await self._begin()
        row = self._open.get(id)
        if row is None or row.owner != self._terms.owner or row.record.state not in _WAITING:
            return False
        row.until = now + self._terms.lease_seconds
        sending = attrs.evolve(
            row.record,
            state=NotificationState.SENDING,
            attempts=row.record.attempts + 1,
            started_at=now,
            next_attempt_at=None,
        )
        self._rows.keep(row, sending)
        return True

    async def finish(self, id: NotificationId, ending: SendResult, *, now: float) -> bool:
        """See :meth:`NotificationStore.finish`."""
        await self._begin()
        row = self._open.get(id)
        if row is None or row.owner != self._terms.owner:
            return False
        before = row.record
        if ending.state is NotificationState.PENDING:
            begun = before.state is NotificationState.SENDING
            self._put_back(row, attempts=before.attempts - begun)
            return True
        row.owner, row.until = None, 0.0
        ended = attrs.evolve(
            before,
            state=ending.state,
            reason=ending.reason,
            provider_id=ending.provider_id,
            next_attempt_at=ending.next_attempt_at,
            finished_at=None if ending.state is NotificationState.RETRYING else now,
        )
        self._rows.keep(row, ended)
        return True

    async def retry(self, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
        """See :meth:`NotificationStore.retry`."""
        await self._begin()
        put_back = []
        for id in ids:
            row = self._rows.by_id.get(id)
            if row is None or row.record.state not in RETRIABLE:
                continue
            self._put_back(row, attempts=0)
            fresh = attrs.evolve(
                row.record, started_at=None, finished_at=None, provider_id=None, reason=None
            )
            self._rows.keep(row, fresh)
            put_back.append(id)
        return put_back

    # -- looks and retention ---------------------------------------------------------------------

    async def get(self, id: NotificationId) -> NotificationRecord | None:
        """See :meth:`NotificationStore.get`."""
        await self._begin()
        row = self._rows.by_id.get(id)
        return None if row is None else row.record

    async def find(
        self,
        *,
        state: NotificationState | None = None,
        channel: str | None = None,
        tenant_id: str | None = None,
        before: NotificationId | None = None,
        limit: int = 50,
    ) -> Sequence[NotificationRecord]:
        """See :meth:`NotificationStore.find`."""
        await self._begin()
        found = [
            row.record
            for id, row in sorted(self._rows.by_id.items(), reverse=True)
            if state in (None, row.record.state)
            and channel in (None, id.channel)
            and tenant_id in (None, row.record.outbox.tenant_id)
            and (before is None or id < before)
        ]
        return found[:limit]

    async def counts(self) -> dict[NotificationState, int]:
        """See :meth:`NotificationStore.counts`."""
        await self._begin()
        states = [row.record.state for row in self._rows.by_id.values()]
        return {state: states.count(state) for state in NotificationState}

    async def purge(self, *, before: float) -> int:
        """See :meth:`NotificationStore.purge`."""
        await self._begin()
        old = [
            id
            for id, row in self._rows.by_id.items()
            if row.record.finished_at is not None and row.record.finished_at < before
        ]
        for id in old:
            del self._rows.by_id[id]
        return len(old)
