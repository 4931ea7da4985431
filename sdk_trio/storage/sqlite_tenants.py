"""Tenants in the SQLite file of the inbox, committed by the inbox's own writer."""

from collections.abc import Mapping, Sequence

from . import sqlite_tenant_rows as rows
from .committer import ANSWER_SECONDS, Committer
from .query_runner import QueryRunner
from .tenant_records import (
    AuditRecord,
    CredentialSource,
    OutboxRecord,
    Tenant,
    TenantPurged,
    TenantStatus,
)


class SqliteTenants:
    """:class:`~.ports.TenantStore` in SQLite; :class:`~.sqlite_store.SqliteInbox` owns the file.

    It reads through a connection of its own, so that a long listing of deliveries delays no
    look-up of a tenant. Cancellation is as in the inbox.
    """

    def __init__(self, file: str, committer: Committer) -> None:
        self._committer = committer
        self._queries = QueryRunner(file, committer)

    async def add(self, tenant: Tenant, audit: AuditRecord) -> None:
        """See :meth:`.ports.TenantStore.add`."""
        await self._committer.submit(lambda c: rows.add(c, tenant, audit))

    async def change(
        self,
        tenant: Tenant,
        audit: AuditRecord,
        outbox: OutboxRecord | None = None,
        *,
        announced: bool = False,
    ) -> None:
        """See :meth:`.ports.TenantStore.change`."""
        await self._committer.submit(lambda c: rows.change(c, tenant, audit, outbox, announced))

    async def note(self, audit: AuditRecord) -> None:
        """See :meth:`.ports.TenantStore.note`."""
        await self._committer.submit(lambda c: rows.note(c, audit))

    async def purge(
        self, tenant: Tenant, audit: AuditRecord, *, forget_audit: bool = False
    ) -> TenantPurged:
        """See :meth:`.ports.TenantStore.purge`."""
        return await self._committer.submit(lambda c: rows.purge(c, tenant, audit, forget_audit))

    async def get(self, tenant_id: str) -> Tenant | None:
        """See :meth:`.ports.TenantStore.get`."""
        return await self._look_up("id", tenant_id)

    async def find(self, identifier: str) -> Tenant | None:
        """See :meth:`.ports.TenantStore.find`."""
        return await self._look_up("identifier", identifier)

    async def owner_of(self, organization_id: str) -> Tenant | str | None:
        """See :meth:`.ports.TenantStore.owner_of`."""
        return await self._queries.run(
            lambda c: rows.owner_of(c, organization_id), seconds=ANSWER_SECONDS
        )

    async def holders(
        self, sources: Sequence[CredentialSource], *, but: str
    ) -> Mapping[CredentialSource, Sequence[str]]:
        """See :meth:`.ports.TenantStore.holders`."""
        return await self._queries.run(lambda c: rows.holders(c, sources, but))

    async def _look_up(self, column: str, value: str) -> Tenant | None:
        # A sender may wait for it.
        return await self._queries.run(lambda c: rows.get(c, column, value), seconds=ANSWER_SECONDS)

    async def page(
        self, *, status: TenantStatus | None = None, after: str = "", limit: int = 100
    ) -> Sequence[Tenant]:
        """See :meth:`.ports.TenantStore.page`."""
        return await self._queries.run(lambda c: rows.page(c, status, after, limit))

    async def counts(self) -> dict[TenantStatus, int]:
        """See :meth:`.ports.TenantStore.counts`."""
        return await self._queries.run(rows.counts)

    async def audit(
        self, tenant_id: str | None = None, *, after_sequence: int = 0, limit: int = 100
    ) -> Sequence[AuditRecord]:
        """See :meth:`.ports.TenantStore.audit`."""
        return await self._queries.run(
            lambda c: rows.audit_rows(c, tenant_id, after_sequence, limit)
        )

    async def outbox(self, *, after_sequence: int = 0, limit: int = 100) -> Sequence[OutboxRecord]:
        """See :meth:`.ports.TenantStore.outbox`."""
        return await self._queries.run(lambda c: rows.outbox_rows(c, after_sequence, limit))

    async def revision(self) -> int:
        """See :meth:`.ports.TenantStore.revision`."""
        return await self._queries.run(rows.revision)

    async def close(self) -> None:
        """Close what reads; the inbox closes the rest."""
        await self._queries.close()
