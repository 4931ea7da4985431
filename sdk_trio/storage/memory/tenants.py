"""Tenants, and the rows of messages about them, in this process's memory.

Cancellation: every method but ``close`` is one checkpoint, *before* anything is looked at or
changed, as in the inbox in memory.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

import attrs
import trio

from ...errors import StoreUnavailableError
from ...records.notifications import OPEN, NotificationId, NotificationRecord
from ...records.tenants import (
    AuditRecord,
    CredentialSource,
    OutboxRecord,
    Tenant,
    TenantPurged,
    TenantStatus,
    erasure_mark,
    require_version,
    taken,
)


@attrs.define(eq=False)
class NotificationRow:
    """One message, with the owner and the deadline of its lease."""

    record: NotificationRecord
    owner: str | None = None
    until: float = 0.0


@attrs.define(eq=False)
class NotificationRows:
    """The messages of one store, and the last transition that was enlisted (``position``).

    ``open`` are those of ``by_id`` that will still be sent without an operator. The look for work,
    twice a second, reads these few and not the finished ones of 90 days. ``silent``: notifications
    are switched off, and no transition sets ``position`` until the next ``enlist``.
    """

    by_id: dict[NotificationId, NotificationRow] = attrs.Factory(dict)
    open: dict[NotificationId, NotificationRow] = attrs.Factory(dict)
    position: int | None = None
    silent: bool = False

    def keep(self, row: NotificationRow, record: NotificationRecord) -> None:
        """Store ``record`` in ``row``, which may be new."""
        row.record = record
        self.by_id[record.id] = row
        if record.state in OPEN:
            self.open[record.id] = row
        else:
            self.open.pop(record.id, None)

    def forget_tenant(self, tenant_id: str) -> None:
        """Remove the messages about one tenant."""
        for id, row in list(self.by_id.items()):
            if row.record.outbox.tenant_id == tenant_id:
                del self.by_id[id]
                self.open.pop(id, None)


class MemoryTenants:
    """:class:`TenantStore` in memory."""

    def __init__(self) -> None:
        self._by_id: dict[str, Tenant] = {}
        self._by_identifier: dict[str, str] = {}
        self._by_organization: dict[str, str] = {}
        self._identifiers: list[str] = []
        self._statuses: Counter[TenantStatus] = Counter()
        self._audit: list[AuditRecord] = []
        self._outbox: list[OutboxRecord] = []
        self.notification_rows: NotificationRows = NotificationRows()
        self._erased: dict[str, str] = {}
        self._last_audit = 0
        self._last_outbox = 0
        self._closed = False

    async def _begin(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise StoreUnavailableError("the store is closed")

    # -- changes ---------------------------------------------------------------------------------

    async def add(self, tenant: Tenant, audit: AuditRecord) -> None:
        """See :meth:`TenantStore.add`."""
        await self._begin()
        if tenant.id in self._by_id:
            raise taken("id", tenant.id, self._by_id[tenant.id].identifier)
        self._refuse_taken(tenant)
        self._put(tenant)
        insort(self._identifiers, tenant.identifier)
        self._keep(audit, None)

    async def change(
        self,
        tenant: Tenant,
        audit: AuditRecord,
        outbox: OutboxRecord | None = None,
        *,
        announced: bool = False,
    ) -> None:
        """See :meth:`TenantStore.change`."""
        await self._begin()
        before = self._require(tenant, expected=tenant.version - 1)
        self._refuse_taken(tenant)
        self._drop(before)
        self._put(tenant)
        told = self.notification_rows
        if announced and outbox is not None and told.position is None and not told.silent:
            told.position = self._last_outbox
        self._keep(audit, outbox)

    async def note(self, audit: AuditRecord) -> None:
        """See :meth:`TenantStore.note`."""
        await self._begin()
        self._keep(audit, None)

    async def purge(
        self, tenant: Tenant, audit: AuditRecord, *, forget_audit: bool = False
    ) -> TenantPurged:
        """See :meth:`TenantStore.purge`."""
        await self._begin()
        stored = self._require(tenant, expected=tenant.version)
        self._drop(stored)
        self._identifiers.remove(stored.identifier)
        if stored.organization_id is not None:
            self._erased[erasure_mark(stored.organization_id)] = stored.id
        counts = len(self._outbox), len(self._audit)
        self._outbox = [record for record in self._outbox if record.tenant_id != tenant.id]
        self.notification_rows.forget_tenant(tenant.id)
        if forget_audit:
            self._audit = [record for record in self._audit if record.tenant_id != tenant.id]
        purged = TenantPurged(counts[0] - len(self._outbox), counts[1] - len(self._audit))
        self._keep(audit, None)
        return purged

    def _require(self, tenant: Tenant, *, expected: int) -> Tenant:
        stored = self._by_id.get(tenant.id)
        require_version(None if stored is None else stored.version, tenant, expected=expected)
        return self._by_id[tenant.id]

    def _refuse_taken(self, tenant: Tenant) -> None:
        for column, value, index in (
            ("identifier", tenant.identifier, self._by_identifier),
            ("organization_id", tenant.organization_id, self._by_organization),
        ):
            holder = None if value is None else index.get(value)
            if holder not in (None, tenant.id):
                raise taken(column, value, self._by_id[holder].identifier)

    def _put(self, tenant: Tenant) -> None:
        self._by_id[tenant.id] = tenant
        self._by_identifier[tenant.identifier] = tenant.id
        if tenant.organization_id is not None:
            self._by_organization[tenant.organization_id] = tenant.id
        self._statuses[tenant.status] += 1

    def _drop(self, tenant: Tenant) -> None:
        del self._by_id[tenant.id]
        del self._by_identifier[tenant.identifier]
        if tenant.organization_id is not None:
            del self._by_organization[tenant.organization_id]
        self._statuses[tenant.status] -= 1

    def _keep(self, audit: AuditRecord, outbox: OutboxRecord | None) -> None:
        self._last_audit += 1
        self._audit.append(attrs.evolve(audit, sequence=self._last_audit))
        if outbox is not None:
            self._last_outbox += 1
            self._outbox.append(attrs.evolve(outbox, sequence=self._last_outbox))

    # -- looks -----------------------------------------------------------------------------------

    async def get(self, tenant_id: str) -> Tenant | None:
        """See :meth:`TenantStore.get`."""
        await self._begin()
        return self._by_id.get(tenant_id)

    async def find(self, identifier: str) -> Tenant | None:
        """See :meth:`TenantStore.find`."""
        await self._begin()
        return self._by_id.get(self._by_identifier.get(identifier, ""))

    async def owner_of(self, organization_id: str) -> Tenant | str | None:
        """See :meth:`TenantStore.owner_of`."""
        await self._begin()
        tenant = self._by_id.get(self._by_organization.get(organization_id, ""))
        return tenant or self._erased.get(erasure_mark(organization_id))

    async def holders(
        self, sources: Sequence[CredentialSource], *, but: str
    ) -> Mapping[CredentialSource, Sequence[str]]:
        """See :meth:`TenantStore.holders`."""
        await self._begin()
        others = [self._by_id[self._by_identifier[name]] for name in self._identifiers]
        return {
            source: [
                tenant.identifier
                for tenant in others
                if tenant.id != but and source in tenant.credentials.sources
            ]
            for source in sources
        }

    async def page(
        self, *, status: TenantStatus | None = None, after: str = "", limit: int = 100
    ) -> Sequence[Tenant]:
        """See :meth:`TenantStore.page`."""
        await self._begin()
        names = islice(self._identifiers, bisect_right(self._identifiers, after), None)
        tenants = (self._by_id[self._by_identifier[name]] for name in names)
        return list(islice((t for t in tenants if status in (None, t.status)), limit))

    async def counts(self) -> dict[TenantStatus, int]:
        """See :meth:`TenantStore.counts`."""
        await self._begin()
        return {status: self._statuses[status] for status in TenantStatus}

    async def audit(
        self, tenant_id: str | None = None, *, after_sequence: int = 0, limit: int = 100
    ) -> Sequence[AuditRecord]:
        """See :meth:`TenantStore.audit`."""
        await self._begin()
        start = bisect_right(self._audit, after_sequence, key=lambda record: record.sequence)
        rows = islice(self._audit, start, None)
        return list(islice((r for r in rows if tenant_id in (None, r.tenant_id)), limit))

    async def outbox(self, *, after_sequence: int = 0, limit: int = 100) -> Sequence[OutboxRecord]:
        """See :meth:`TenantStore.outbox`."""
        await self._begin()
        return self.outbox_after(after_sequence, limit)

    def outbox_after(self, sequence: int, limit: int) -> Sequence[OutboxRecord]:
        """Return the same as :meth:`outbox`, without a checkpoint."""
        start = bisect_right(self._outbox, sequence, key=lambda record: record.sequence)
        return self._outbox[start : start + limit]

    def holdings(self, tenant_id: str) -> dict[str, int]:
        """Count messages, transitions and audit rows of a tenant."""
        rows = self.notification_rows.by_id.values()
        return {
            "messages": sum(row.record.outbox.tenant_id == tenant_id for row in rows),
            "outbox": sum(record.tenant_id == tenant_id for record in self._outbox),
            "audit": sum(record.tenant_id == tenant_id for record in self._audit),
        }

    def has(self, tenant_id: str) -> bool:
        """Return whether there is a tenant with this id."""
        return tenant_id in self._by_id

    @property
    def is_closed(self) -> bool:
        """Whether the store was closed."""
        return self._closed

    @property
    def last_sequence(self) -> int:
        """The sequence of the last transition, 0 if there was none."""
        return self._last_outbox

    async def revision(self) -> int:
        """See :meth:`TenantStore.revision`."""
        await self._begin()
        return self._last_audit

    async def close(self) -> None:
        """Close the store: every further call fails."""
        self._closed = True
        await trio.lowlevel.checkpoint()
