"""Tenants, audit and outbox in SQLite: plain functions of a connection.

Those that change something are jobs for the :class:`~.committer.Committer`: each runs within a
transaction that it neither begins nor ends. What they mean is said once, in
:class:`~.ports.TenantStore`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import apsw
import attrs

from . import sqlite_reader, sqlite_writer
from .notification_records import POSITION
from .sqlite_connector import MARK_AS_UNWIPED
from .tenant_credentials import credentials_from_text, credentials_to_text, source_to_text
from .tenant_records import (
    AuditAction,
    AuditRecord,
    CredentialSource,
    OutboxRecord,
    Tenant,
    TenantPurged,
    TenantStatus,
    Transition,
    erasure_mark,
)
from .tenant_rules import require_version, taken

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

# Before the first transition that is to be told, unless somebody has drawn or removed it.
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
    """Delete what is kept of a tenant, and say so in the audit trail."""
    require_version(_version_of(connection, tenant.id), tenant, expected=tenant.version)
    # Few, as a rule: the others have gone in short turns before.
    left = sqlite_reader.of_tenant(connection, tenant.id, after=0, limit=_ALL)
    sqlite_writer.erase(connection, tenant.id, left)
    sqlite_writer.erase_evidence(connection, tenant.id, _ALL)
    connection.execute(_DELETE_NOTIFICATIONS, (tenant.id,))
    connection.execute("DELETE FROM outbox WHERE tenant_id = ?", (tenant.id,))
    outbox_rows = connection.changes()
    audit_rows = 0
    if forget_audit:
        connection.execute("INSERT INTO purging (tenant_id) VALUES (?)", (tenant.id,))
        connection.execute("DELETE FROM audit WHERE tenant_id = ?", (tenant.id,))
        audit_rows = connection.changes()
        connection.execute("DELETE FROM purging")
    connection.execute("DELETE FROM tenant WHERE id = ?", (tenant.id,))
    if tenant.organization_id is not None:
        connection.execute(_KEEP_MARK, (erasure_mark(tenant.organization_id), tenant.id))
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
    """Return the tenant whose ``column``, one that is unique, has that value."""
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
