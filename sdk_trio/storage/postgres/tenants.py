"""Tenants, audit and outbox in PostgreSQL.

Plain functions of a connection; :class:`PostgresTenants` hands them to the group commit of the
inbox, so that a tenant's row, its audit row and its outbox row are committed together or not at
all. Every change takes its audit number first, and holds the row of that counter until the commit:
changes of tenants by any number of processes come one after the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
from . import writes
from .commits import ANSWER_SECONDS, GroupCommit
from .connect import StoreConnection
from .queries import QueryPool

_TENANT = tuple(field.name for field in attrs.fields(Tenant))
_AUDIT = tuple(field.name for field in attrs.fields(AuditRecord))
TRANSITION_COLUMNS = tuple(field.name for field in attrs.fields(OutboxRecord))


def _insert(table: str, columns: Sequence[str]) -> str:
    places = ", ".join(f"%({name})s" for name in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"


_INSERT_TENANT = _insert("tenant", _TENANT)
_INSERT_AUDIT = _insert("audit", _AUDIT)
_INSERT_TRANSITION = _insert("outbox", TRANSITION_COLUMNS)
_UPDATE_TENANT = (
    f"UPDATE tenant SET {', '.join(f'{name} = %({name})s' for name in _TENANT[1:])} "
    "WHERE id = %(id)s AND version = %(version)s - 1"
)
_SELECT_TENANT = f"SELECT {', '.join(_TENANT)} FROM tenant"
_SELECT_AUDIT = f"SELECT {', '.join(_AUDIT)} FROM audit"
_SELECT_TRANSITION = f"SELECT {', '.join(TRANSITION_COLUMNS)} FROM outbox"

_NEXT = "UPDATE counter SET value = value + 1 WHERE name = %s RETURNING value"

# Sets the position to just before the first announced transition, unless it is set already or
# notifications are switched off.
_DRAW_LINE = """
INSERT INTO checkpoint (name, value) VALUES (%s, (SELECT coalesce(max(sequence), 0) FROM outbox))
ON CONFLICT (name) DO NOTHING
"""

_DELETE_NOTIFICATIONS = """
DELETE FROM notification WHERE sequence IN (SELECT sequence FROM outbox WHERE tenant_id = %s)
"""

_HOLDERS = """
SELECT identifier FROM source JOIN tenant ON tenant.id = source.tenant_id
WHERE source.text = %s AND source.tenant_id <> %s ORDER BY identifier
"""


# -- changes -----------------------------------------------------------------------------------


def add(connection: StoreConnection, tenant: Tenant, audit: AuditRecord) -> None:
    """Insert a tenant and its first audit row."""
    number = _next(connection, "audit")
    # Looked up before the insert: the message names the holder, which the server's does not.
    _refuse_taken(connection, tenant, but="")
    connection.write(_INSERT_TENANT, _values_of(tenant))
    _keep_sources(connection, tenant)
    _keep_audit(connection, audit, number)


def change(
    connection: StoreConnection,
    tenant: Tenant,
    audit: AuditRecord,
    transition: OutboxRecord | None,
    announced: bool,
) -> None:
    """Update a tenant from the version before its own, with its audit and outbox rows."""
    number = _next(connection, "audit")
    require_version(_version_of(connection, tenant.id), tenant, expected=tenant.version - 1)
    _refuse_taken(connection, tenant, but=tenant.id)
    connection.write(_UPDATE_TENANT, _values_of(tenant))
    _keep_sources(connection, tenant)
    _keep_audit(connection, audit, number)
    if transition is not None:
        if announced:
            connection.write(_DRAW_LINE, (POSITION,))
        values = {**attrs.asdict(transition), "sequence": _next(connection, "outbox")}
        connection.write(_INSERT_TRANSITION, values)


def note(connection: StoreConnection, audit: AuditRecord) -> None:
    """Insert an audit row alone."""
    _keep_audit(connection, audit, _next(connection, "audit"))


def purge(
    connection: StoreConnection, tenant: Tenant, audit: AuditRecord, forget_audit: bool
) -> TenantPurged:
    """Delete all records of a tenant, and write that into the audit trail."""
    number = _next(connection, "audit")
    require_version(_version_of(connection, tenant.id), tenant, expected=tenant.version)
    # Few as a rule: Inbox.erase has removed the others in short transactions before.
    writes.erase(connection, tenant.id, None)
    writes.erase_evidence(connection, tenant.id, None)
    connection.write(_DELETE_NOTIFICATIONS, (tenant.id,))
    removed = connection.write("DELETE FROM outbox WHERE tenant_id = %s", (tenant.id,)).rowcount
    audits = 0
    if forget_audit:
        # The trigger that keeps the audit trail lets the rows of this tenant go meanwhile.
        _let_go(connection, tenant.id)
        audits = connection.write("DELETE FROM audit WHERE tenant_id = %s", (tenant.id,)).rowcount
        _let_go(connection, "")
    connection.write("DELETE FROM source WHERE tenant_id = %s", (tenant.id,))
    connection.write("DELETE FROM tenant WHERE id = %s", (tenant.id,))
    if tenant.organization_id is not None:
        mark = (erasure_mark(tenant.organization_id), tenant.id)
        connection.write(writes.KEEP_CHECKPOINT, mark)
    _keep_audit(connection, audit, number)
    return TenantPurged(removed, audits)


def _next(connection: StoreConnection, name: str) -> int:
    (value,) = connection.write(_NEXT, (name,)).fetchone() or (0,)
    return int(value)


def _let_go(connection: StoreConnection, tenant_id: str) -> None:
    connection.execute("SELECT set_config('sdk_trio.purging', %s, true)", (tenant_id,))


def _keep_audit(connection: StoreConnection, audit: AuditRecord, number: int) -> None:
    connection.write(_INSERT_AUDIT, {**attrs.asdict(audit), "sequence": number})


def _keep_sources(connection: StoreConnection, tenant: Tenant) -> None:
    texts = sorted({source_to_text(source) for source in tenant.credentials.sources})
    connection.write("DELETE FROM source WHERE tenant_id = %s", (tenant.id,))
    for text in texts:
        connection.write("INSERT INTO source (tenant_id, text) VALUES (%s, %s)", (tenant.id, text))


def _version_of(connection: StoreConnection, tenant_id: str) -> int | None:
    row = connection.execute("SELECT version FROM tenant WHERE id = %s", (tenant_id,)).fetchone()
    return None if row is None else int(row[0])


def _refuse_taken(connection: StoreConnection, tenant: Tenant, *, but: str) -> None:
    for column, value in (
        ("id", tenant.id),
        ("identifier", tenant.identifier),
        ("organization_id", tenant.organization_id),
    ):
        row = connection.execute(
            f"SELECT identifier FROM tenant WHERE {column} = %s AND id <> %s", (value, but)
        ).fetchone()
        if row is not None:
            raise taken(column, value, row[0])


# -- looks -------------------------------------------------------------------------------------


def get(connection: StoreConnection, column: str, value: str) -> Tenant | None:
    """Return the tenant with that value in ``column``, which is a unique one."""
    row = connection.execute(f"{_SELECT_TENANT} WHERE {column} = %s", (value,)).fetchone()
    return None if row is None else _tenant_of(row)


def owner_of(connection: StoreConnection, organization_id: str) -> Tenant | str | None:
    """Return the tenant of an organization, or the id of the one that had it and was purged."""
    tenant = get(connection, "organization_id", organization_id)
    if tenant is not None:
        return tenant
    query = "SELECT value FROM checkpoint WHERE name = %s"
    row = connection.execute(query, (erasure_mark(organization_id),)).fetchone()
    return None if row is None else str(row[0])


def holders(
    connection: StoreConnection, sources: Sequence[CredentialSource], but: str
) -> Mapping[CredentialSource, Sequence[str]]:
    """Return the identifiers of the tenants that name each source."""
    return {
        source: [row[0] for row in connection.execute(_HOLDERS, (source_to_text(source), but))]
        for source in sources
    }


def page(
    connection: StoreConnection, status: TenantStatus | None, after: str, limit: int
) -> Sequence[Tenant]:
    """List tenants by identifier."""
    chosen = "" if status is None else "status = %(status)s AND "
    rows = connection.execute(
        f"{_SELECT_TENANT} WHERE {chosen}identifier > %(after)s ORDER BY identifier "
        "LIMIT %(limit)s",
        {"status": status, "after": after, "limit": limit},
    )
    return [_tenant_of(row) for row in rows]


def counts(connection: StoreConnection) -> dict[TenantStatus, int]:
    """Return how many tenants are in each status."""
    rows = connection.execute("SELECT status, count(*) FROM tenant GROUP BY status")
    found: dict[str, int] = dict(rows.fetchall())
    return {status: found.get(status, 0) for status in TenantStatus}


def audit_rows(
    connection: StoreConnection, tenant_id: str | None, after_sequence: int, limit: int
) -> Sequence[AuditRecord]:
    """List audit rows, oldest first."""
    chosen = "" if tenant_id is None else "tenant_id = %(tenant_id)s AND "
    rows = connection.execute(
        f"{_SELECT_AUDIT} WHERE {chosen}sequence > %(after)s ORDER BY sequence LIMIT %(limit)s",
        {"tenant_id": tenant_id, "after": after_sequence, "limit": limit},
    )
    return [_audit_of(row) for row in rows]


def transitions(
    connection: StoreConnection, after_sequence: int, limit: int
) -> Sequence[OutboxRecord]:
    """List transitions, oldest first."""
    rows = connection.execute(
        f"{_SELECT_TRANSITION} WHERE sequence > %s ORDER BY sequence LIMIT %s",
        (after_sequence, limit),
    )
    return [transition_of(row) for row in rows]


def revision(connection: StoreConnection) -> int:
    """Return the number of the last audit row: every change writes one."""
    row = connection.execute("SELECT value FROM counter WHERE name = 'audit'").fetchone()
    return 0 if row is None else int(row[0])


# -- rows and records --------------------------------------------------------------------------


def _values_of(tenant: Tenant) -> dict[str, Any]:
    values = {name: getattr(tenant, name) for name in _TENANT}
    values["credentials"] = credentials_to_text(tenant.credentials)
    return values


def _tenant_of(row: tuple[Any, ...]) -> Tenant:
    values = dict(zip(_TENANT, row, strict=True))
    values["status"] = TenantStatus(values["status"])
    values["credentials"] = credentials_from_text(values["credentials"])
    return Tenant(**values)


def _audit_of(row: tuple[Any, ...]) -> AuditRecord:
    values = dict(zip(_AUDIT, row, strict=True))
    values["action"] = AuditAction(values["action"])
    for name in ("previous_status", "new_status"):
        values[name] = None if values[name] is None else TenantStatus(values[name])
    return AuditRecord(**values)


def transition_of(row: tuple[Any, ...]) -> OutboxRecord:
    """Return the record of a row of :data:`TRANSITION_COLUMNS`."""
    values = dict(zip(TRANSITION_COLUMNS, row, strict=True))
    values["transition"] = Transition(values["transition"])
    values["previous_status"] = TenantStatus(values["previous_status"])
    values["new_status"] = TenantStatus(values["new_status"])
    return OutboxRecord(**values)


class PostgresTenants:
    """:class:`TenantStore` in PostgreSQL; cancellation is as in the inbox."""

    def __init__(self, commits: GroupCommit, queries: QueryPool) -> None:
        self._commits = commits
        self._queries = queries

    async def add(self, tenant: Tenant, audit: AuditRecord) -> None:
        """See :meth:`TenantStore.add`."""
        await self._commits.submit(lambda c: add(c, tenant, audit))

    async def change(
        self,
        tenant: Tenant,
        audit: AuditRecord,
        outbox: OutboxRecord | None = None,
        *,
        announced: bool = False,
    ) -> None:
        """See :meth:`TenantStore.change`."""
        await self._commits.submit(lambda c: change(c, tenant, audit, outbox, announced))

    async def note(self, audit: AuditRecord) -> None:
        """See :meth:`TenantStore.note`."""
        await self._commits.submit(lambda c: note(c, audit))

    async def purge(
        self, tenant: Tenant, audit: AuditRecord, *, forget_audit: bool = False
    ) -> TenantPurged:
        """See :meth:`TenantStore.purge`."""
        return await self._commits.submit(lambda c: purge(c, tenant, audit, forget_audit))

    async def get(self, tenant_id: str) -> Tenant | None:
        """See :meth:`TenantStore.get`."""
        return await self._look_up("id", tenant_id)

    async def find(self, identifier: str) -> Tenant | None:
        """See :meth:`TenantStore.find`."""
        return await self._look_up("identifier", identifier)

    async def _look_up(self, column: str, value: str) -> Tenant | None:
        # A sender may wait for it, so it has a deadline.
        return await self._queries.run(lambda c: get(c, column, value), seconds=ANSWER_SECONDS)

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
        return await self._queries.run(lambda c: transitions(c, after_sequence, limit))

    async def revision(self) -> int:
        """See :meth:`TenantStore.revision`."""
        return await self._queries.run(revision)
