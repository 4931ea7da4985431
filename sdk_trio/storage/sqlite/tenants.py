"""Tenants, audit and outbox in the SQLite file of the inbox.

Plain functions of a connection; :class:`SqliteTenants` hands them to the inbox's own committer. A
function that changes something is a job for the :class:`Committer`: it runs within a transaction
that it neither begins nor ends, so that a tenant's row, its audit row and its outbox row are
committed together or not at all. :class:`TenantStore` says what each means.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import apsw
import attrs

from ...records.notifications import POSITION
from ...records.tenants import (
    AuditAction,
    AuditRecord,
    CredentialSource,
    OutboxRecord,
    Tenant,
    TenantPurged,
    TenantStatus,
    Transition,
    credentials_from_text,
    credentials_to_text,
    erasure_mark,
    require_version,
    source_to_text,
    taken,
)
from . import reads, writes
from .committer import ANSWER_SECONDS, Committer
from .connect import MARK_AS_UNWIPED
from .queries import QueryRunner

_TENANT = tuple(field.name for field in attrs.fields(Tenant))
_AUDIT = tuple(field.name for field in attrs.fields(AuditRecord))
OUTBOX_COLUMNS = tuple(field.name for field in attrs.fields(OutboxRecord))


def _insert(table: str, columns: Sequence[str]) -> str:
    places = ", ".join(f":{name}" for name in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"


_INSERT_TENANT = _insert("tenant", _TENANT)
_INSERT_AUDIT = _insert("audit", _AUDIT[1:])
_INSERT_OUTBOX = _insert("outbox", OUTBOX_COLUMNS[1:])
_UPDATE_TENANT = (
    f"UPDATE tenant SET {', '.join(f'{name} = :{name}' for name in _TENANT[1:])} "
    "WHERE id = :id AND version = :version - 1"
)
_SELECT_TENANT = f"SELECT {', '.join(_TENANT)} FROM tenant"
_SELECT_AUDIT = f"SELECT {', '.join(_AUDIT)} FROM audit"
_SELECT_OUTBOX = f"SELECT {', '.join(OUTBOX_COLUMNS)} FROM outbox"

# Sets the position to just before the first announced transition, unless it is set already or
# notifications are switched off.
_DRAW_LINE = """
INSERT INTO checkpoint (name, value) VALUES (?, (SELECT coalesce(max(sequence), 0) FROM outbox))
ON CONFLICT (name) DO NOTHING
"""

_DELETE_NOTIFICATIONS = """
DELETE FROM notification WHERE sequence IN (SELECT sequence FROM outbox WHERE tenant_id = ?)
"""

_KEEP_MARK = "INSERT OR REPLACE INTO checkpoint (name, value) VALUES (?, ?)"

_HOLDERS = """
SELECT identifier FROM source JOIN tenant ON tenant.id = source.tenant_id
WHERE source.text = ? AND source.tenant_id <> ? ORDER BY identifier
"""

#: To SQLite, no limit.
_ALL = -1


# -- changes -----------------------------------------------------------------------------------


def add(connection: apsw.Connection, tenant: Tenant, audit: AuditRecord) -> None:
    """Insert a tenant and its first audit row."""
    # Looked up before the insert: the message names the holder, which SQLite's own error does not.
    _refuse_taken(connection, tenant, but="")
    connection.execute(_INSERT_TENANT, _values_of(tenant))
    connection.execute(_INSERT_AUDIT, attrs.asdict(audit))


def change(
    connection: apsw.Connection,
    tenant: Tenant,
    audit: AuditRecord,
    outbox: OutboxRecord | None,
    announced: bool,
) -> None:
    """Update a tenant from the version before its own, with its audit and outbox rows."""
    require_version(_version_of(connection, tenant.id), tenant, expected=tenant.version - 1)
    _refuse_taken(connection, tenant, but=tenant.id)
    connection.execute(_UPDATE_TENANT, _values_of(tenant))
    connection.execute(_INSERT_AUDIT, attrs.asdict(audit))
    if outbox is not None:
        if announced:
            connection.execute(_DRAW_LINE, (POSITION,))
        connection.execute(_INSERT_OUTBOX, attrs.asdict(outbox))


def note(connection: apsw.Connection, audit: AuditRecord) -> None:
    """Insert an audit row alone."""
    connection.execute(_INSERT_AUDIT, attrs.asdict(audit))


def purge(
    connection: apsw.Connection, tenant: Tenant, audit: AuditRecord, forget_audit: bool
) -> TenantPurged:
    """Delete all records of a tenant, and write that into the audit trail."""
    require_version(_version_of(connection, tenant.id), tenant, expected=tenant.version)
    # Few as a rule: Inbox.erase has removed the others in short transactions before.
    left = reads.of_tenant(connection, tenant.id, after=0, limit=_ALL)
    writes.erase(connection, tenant.id, left)
    writes.erase_evidence(connection, tenant.id, _ALL)
    connection.execute(_DELETE_NOTIFICATIONS, (tenant.id,))
    connection.execute("DELETE FROM outbox WHERE tenant_id = ?", (tenant.id,))
    outbox_rows = connection.changes()
    audit_rows = 0
    if forget_audit:
        # The trigger that keeps the audit trail lets the rows of this tenant go while this is here.
        connection.execute("INSERT INTO purging (tenant_id) VALUES (?)", (tenant.id,))
        connection.execute("DELETE FROM audit WHERE tenant_id = ?", (tenant.id,))
        audit_rows = connection.changes()
        connection.execute("DELETE FROM purging")
    connection.execute("DELETE FROM tenant WHERE id = ?", (tenant.id,))
    if tenant.organization_id is not None:
        connection.execute(_KEEP_MARK, (erasure_mark(tenant.organization_id), tenant.id))
    # Rows that were deleted here may have left copies in pages that were split; the wipe that
    # follows rewrites the database, also after a crash in between (ADR 37).
    connection.execute(MARK_AS_UNWIPED)
    connection.execute(_INSERT_AUDIT, attrs.asdict(audit))
    return TenantPurged(outbox_rows, audit_rows)


def _version_of(connection: apsw.Connection, tenant_id: str) -> int | None:
    found = connection.execute("SELECT version FROM tenant WHERE id = ?", (tenant_id,)).get
    return None if found is None else int(found)


def _refuse_taken(connection: apsw.Connection, tenant: Tenant, *, but: str) -> None:
    for column, value in (
        ("id", tenant.id),
        ("identifier", tenant.identifier),
        ("organization_id", tenant.organization_id),
    ):
        holder = connection.execute(
            f"SELECT identifier FROM tenant WHERE {column} = ? AND id <> ?",
            (value, but),
        ).get
        if holder is not None:
            raise taken(column, value, holder)


# -- looks -------------------------------------------------------------------------------------


def get(connection: apsw.Connection, column: str, value: str) -> Tenant | None:
    """Return the tenant with that value in ``column``, which is a unique one."""
    row = connection.execute(f"{_SELECT_TENANT} WHERE {column} = ?", (value,)).fetchone()
    return None if row is None else _tenant_of(row)


def owner_of(connection: apsw.Connection, organization_id: str) -> Tenant | str | None:
    """Return the tenant of an organization, or the id of the one that had it and was purged."""
    tenant = get(connection, "organization_id", organization_id)
    if tenant is not None:
        return tenant
    query = "SELECT value FROM checkpoint WHERE name = ?"
    erased: str | None = connection.execute(query, (erasure_mark(organization_id),)).get
    return erased


def holders(
    connection: apsw.Connection, sources: Sequence[CredentialSource], but: str
) -> Mapping[CredentialSource, Sequence[str]]:
    """Return the identifiers of the tenants that name each source."""
    return {
        source: [
            str(identifier)
            for (identifier,) in connection.execute(_HOLDERS, (source_to_text(source), but))
        ]
        for source in sources
    }


def page(
    connection: apsw.Connection, status: TenantStatus | None, after: str, limit: int
) -> Sequence[Tenant]:
    """List tenants by identifier."""
    chosen = "" if status is None else "status = :status AND "
    rows = connection.execute(
        f"{_SELECT_TENANT} WHERE {chosen}identifier > :after ORDER BY identifier LIMIT :limit",
        {"status": status, "after": after, "limit": limit},
    )
    return [_tenant_of(row) for row in rows]


def counts(connection: apsw.Connection) -> dict[TenantStatus, int]:
    """Return how many tenants are in each status."""
    found: dict[str, int] = dict(
        cast("Any", connection.execute("SELECT status, count(*) FROM tenant GROUP BY status"))
    )
    return {status: found.get(status, 0) for status in TenantStatus}


def audit_rows(
    connection: apsw.Connection, tenant_id: str | None, after_sequence: int, limit: int
) -> Sequence[AuditRecord]:
    """List audit rows, oldest first."""
    chosen = "" if tenant_id is None else "tenant_id = :tenant_id AND "
    rows = connection.execute(
        f"{_SELECT_AUDIT} WHERE {chosen}sequence > :after ORDER BY sequence LIMIT :limit",
        {"tenant_id": tenant_id, "after": after_sequence, "limit": limit},
    )
    return [_audit_of(row) for row in rows]


def outbox_rows(
    connection: apsw.Connection, after_sequence: int, limit: int
) -> Sequence[OutboxRecord]:
    """List transitions, oldest first."""
    rows = connection.execute(
        f"{_SELECT_OUTBOX} WHERE sequence > ? ORDER BY sequence LIMIT ?", (after_sequence, limit)
    )
    return [outbox_of(row) for row in rows]


def revision(connection: apsw.Connection) -> int:
    """Return the number of the last audit row: every change writes one."""
    return connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").get or 0


# -- rows and records --------------------------------------------------------------------------


def _values_of(tenant: Tenant) -> dict[str, Any]:
    values = {name: getattr(tenant, name) for name in _TENANT}
    values["credentials"] = credentials_to_text(tenant.credentials)
    return values


def _tenant_of(row: tuple[Any, ...]) -> Tenant:
    values = dict(zip(_TENANT, row, strict=True))
    values["status"] = TenantStatus(values["status"])
    values["site_manager_email_verified"] = bool(values["site_manager_email_verified"])
    values["credentials"] = credentials_from_text(values["credentials"])
    return Tenant(**values)


def _audit_of(row: tuple[Any, ...]) -> AuditRecord:
    values = dict(zip(_AUDIT, row, strict=True))
    values["action"] = AuditAction(values["action"])
    for name in ("previous_status", "new_status"):
        values[name] = None if values[name] is None else TenantStatus(values[name])
    return AuditRecord(**values)


def outbox_of(row: tuple[Any, ...]) -> OutboxRecord:
    """Return the record of a row of :data:`OUTBOX_COLUMNS`."""
    values = dict(zip(OUTBOX_COLUMNS, row, strict=True))
    values["transition"] = Transition(values["transition"])
    values["previous_status"] = TenantStatus(values["previous_status"])
    values["new_status"] = TenantStatus(values["new_status"])
    values["site_manager_email_verified"] = bool(values["site_manager_email_verified"])
    return OutboxRecord(**values)


class SqliteTenants:
    """:class:`TenantStore` in SQLite; :class:`SqliteInbox` owns the file.

    It reads through a connection of its own, so that a long listing of deliveries delays no
    look-up of a tenant. Cancellation is as in the inbox.
    """

    def __init__(self, file: str, committer: Committer) -> None:
        self._committer = committer
        self._queries = QueryRunner(file, committer)

    async def add(self, tenant: Tenant, audit: AuditRecord) -> None:
        """See :meth:`TenantStore.add`."""
        await self._committer.submit(lambda c: add(c, tenant, audit))

    async def change(
        self,
        tenant: Tenant,
        audit: AuditRecord,
        outbox: OutboxRecord | None = None,
        *,
        announced: bool = False,
    ) -> None:
        """See :meth:`TenantStore.change`."""
        await self._committer.submit(lambda c: change(c, tenant, audit, outbox, announced))

    async def note(self, audit: AuditRecord) -> None:
        """See :meth:`TenantStore.note`."""
        await self._committer.submit(lambda c: note(c, audit))

    async def purge(
        self, tenant: Tenant, audit: AuditRecord, *, forget_audit: bool = False
    ) -> TenantPurged:
        """See :meth:`TenantStore.purge`."""
        return await self._committer.submit(lambda c: purge(c, tenant, audit, forget_audit))

    async def get(self, tenant_id: str) -> Tenant | None:
        """See :meth:`TenantStore.get`."""
        return await self._look_up("id", tenant_id)

    async def find(self, identifier: str) -> Tenant | None:
        """See :meth:`TenantStore.find`."""
        return await self._look_up("identifier", identifier)

    async def owner_of(self, organization_id: str) -> Tenant | str | None:
        """See :meth:`TenantStore.owner_of`."""
        return await self._queries.run(
            lambda c: owner_of(c, organization_id), seconds=ANSWER_SECONDS
        )

    async def holders(
        self, sources: Sequence[CredentialSource], *, but: str
    ) -> Mapping[CredentialSource, Sequence[str]]:
        """See :meth:`TenantStore.holders`."""
        return await self._queries.run(lambda c: holders(c, sources, but))

    async def _look_up(self, column: str, value: str) -> Tenant | None:
        # A sender may wait for it, so it has a deadline.
        return await self._queries.run(lambda c: get(c, column, value), seconds=ANSWER_SECONDS)

    async def page(
        self, *, status: TenantStatus | None = None, after: str = "", limit: int = 100
    ) -> Sequence[Tenant]:
        """See :meth:`TenantStore.page`."""
        return await self._queries.run(lambda c: page(c, status, after, limit))

    async def counts(self) -> dict[TenantStatus, int]:
        """See :meth:`TenantStore.counts`."""
        return await self._queries.run(counts)

    async def audit(
        self, tenant_id: str | None = None, *, after_sequence: int = 0, limit: int = 100
    ) -> Sequence[AuditRecord]:
        """See :meth:`TenantStore.audit`."""
        return await self._queries.run(lambda c: audit_rows(c, tenant_id, after_sequence, limit))

    async def outbox(self, *, after_sequence: int = 0, limit: int = 100) -> Sequence[OutboxRecord]:
        """See :meth:`TenantStore.outbox`."""
        return await self._queries.run(lambda c: outbox_rows(c, after_sequence, limit))

    async def revision(self) -> int:
        """See :meth:`TenantStore.revision`."""
        return await self._queries.run(revision)

    async def close(self) -> None:
        """Close the reading connection; the inbox closes the committer."""
        await self._queries.close()
