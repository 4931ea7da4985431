"""Tenants, audit and outbox, and the upgrade from a single tenant.

Functions of a transaction; :class:`TenantStore` and :class:`UpgradeStore` have them as methods. A
tenant's row, its audit row and its outbox row are committed together or not at all. A change of
a tenant locks its row first: changes of one tenant by any number of processes run one after the
other, and changes of two tenants do not wait for each other. So on PostgreSQL a transition may be
committed after one with a higher number, and readers wait for it (:func:`settled`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import attrs
import msgspec

from ...base import clock
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
from ...records.upgrades import Assigned, StoredBody, UpgradeMarker, UpgradeState
from . import admission, arrivals, checkpoints, leases, reads
from .dialect import Row, SqlPart, SqlTransaction, committed, on_reader

T = TypeVar("T")

_TENANT_COLUMNS = tuple(field.name for field in attrs.fields(Tenant))
_AUDIT_COLUMNS = tuple(field.name for field in attrs.fields(AuditRecord))
TRANSITION_COLUMNS = tuple(field.name for field in attrs.fields(OutboxRecord))


def _insert(table: str, columns: Sequence[str]) -> str:
    marks = ", ".join(f":{name}" for name in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"


_INSERT_TENANT = _insert("tenant", _TENANT_COLUMNS)
_INSERT_AUDIT = _insert("audit", [name for name in _AUDIT_COLUMNS if name != "sequence"])
_INSERT_TRANSITION = (
    _insert("outbox", [name for name in TRANSITION_COLUMNS if name != "sequence"])
    .replace("(delivery_id", "(written_at, delivery_id")
    .replace("(:", "(clock(), :")
)
_UPDATE_TENANT = (
    f"UPDATE tenant SET {', '.join(f'{name} = :{name}' for name in _TENANT_COLUMNS[1:])} "
    "WHERE id = :id AND version = :version - 1"
)
_SELECT_TENANT = f"SELECT {', '.join(_TENANT_COLUMNS)} FROM tenant"
_SELECT_AUDIT = f"SELECT {', '.join(_AUDIT_COLUMNS)} FROM audit"
_NEXT_TRANSITIONS = f"""
SELECT sequence, clock() - written_at, {", ".join(TRANSITION_COLUMNS)} FROM outbox
WHERE sequence > :after ORDER BY sequence LIMIT :limit
"""

#: Time for a query that a sender may wait for, in seconds.
ANSWER_SECONDS = 5.0

#: More than any tenant has left.
_ALL = 2**31

_ADD_SOURCE = "INSERT INTO source (tenant_id, text) VALUES (:tenant_id, :text)"

#: Time after which a missing number below a transition is not waited for, in seconds. It is longer
#: than any transaction of the store lasts.
SETTLE_SECONDS = 60.0

# Sets the position to just before the first announced transition, unless it is set, or
# notifications are switched off.
_SET_FIRST_POSITION = """
INSERT INTO checkpoint (name, value) VALUES (:name, (SELECT coalesce(max(sequence), 0) FROM outbox))
ON CONFLICT (name) DO NOTHING
"""

_DELETE_NOTIFICATIONS = """
DELETE FROM notification
WHERE sequence IN (SELECT sequence FROM outbox WHERE tenant_id = :tenant_id)
"""

_TENANTS_OF_SOURCE = """
SELECT identifier FROM source JOIN tenant ON tenant.id = source.tenant_id
WHERE source.text = :text AND source.tenant_id <> :but ORDER BY identifier
"""


# -- changes -----------------------------------------------------------------------------------


def add(tx: SqlTransaction, tenant: Tenant, audit: AuditRecord) -> None:
    """Add a tenant that does not exist yet, with its first audit row.

    Raises:
        TenantExistsError: its id, identifier or organization id is taken; nothing is changed.
    """
    # Checked before the insert, because the error has to name the holder.
    _refuse_taken(tx, tenant, but="")
    tx.run(_INSERT_TENANT, **_values_of(tenant))
    _replace_sources(tx, tenant)
    add_audit(tx, audit)


def change(
    tx: SqlTransaction,
    tenant: Tenant,
    audit: AuditRecord,
    outbox: OutboxRecord | None = None,
    *,
    announced: bool = False,
) -> None:
    """Replace the tenant's row by ``tenant``, whose version is one above the stored one.

    ``announced``: the process that makes the change has notifications enabled. Its first transition
    sets the position of :func:`.notifications.create_messages` to just before itself, unless the
    position was set or notifications were switched off before. A command may make such a transition
    while the first daemon starts.

    Raises:
        TenantConflictError: the stored version is another one; nothing is changed.
        TenantExistsError: the organization id is taken; nothing is changed.
        UnknownTenantError: there is no tenant with this id.
    """
    require_version(_version_of(tx, tenant.id), tenant, expected=tenant.version - 1)
    _refuse_taken(tx, tenant, but=tenant.id)
    tx.run(_UPDATE_TENANT, **_values_of(tenant))
    _replace_sources(tx, tenant)
    add_audit(tx, audit)
    if outbox is not None:
        if announced:
            tx.run(_SET_FIRST_POSITION, name=POSITION)
        tx.run(_INSERT_TRANSITION, **attrs.asdict(outbox), now=outbox.occurred_at)


def purge(
    tx: SqlTransaction, tenant: Tenant, audit: AuditRecord, *, forget_audit: bool = False
) -> TenantPurged:
    """Remove the tenant's row, deliveries, messages and outbox rows; add ``audit``.

    With ``forget_audit`` its earlier audit rows are removed as well; nothing else removes any. The
    next :meth:`Inbox.wipe` overwrites remnants in unused parts of the store's files.

    Raises:
        TenantConflictError: the stored version is not that of ``tenant``.
        UnknownTenantError: there is no tenant with this id.
    """
    require_version(_version_of(tx, tenant.id), tenant, expected=tenant.version)
    # Usually few: Inbox.erase has already removed the others in short transactions.
    left = reads.of_tenant(tx, tenant.id, after=0, limit=_ALL)
    arrivals.erase(tx, left, tenant.id)
    arrivals.erase_evidence(tx, tenant.id, _ALL)
    tx.run(_DELETE_NOTIFICATIONS, tenant_id=tenant.id)
    removed = tx.run("DELETE FROM outbox WHERE tenant_id = :tenant_id", tenant_id=tenant.id)
    audits = 0
    if forget_audit:
        # The trigger that protects the audit trail lets rows of this tenant be deleted meanwhile.
        tx.run("INSERT INTO purging (tenant_id) VALUES (:tenant_id)", tenant_id=tenant.id)
        audits = tx.run("DELETE FROM audit WHERE tenant_id = :tenant_id", tenant_id=tenant.id)
        tx.run("DELETE FROM purging")
    tx.run("DELETE FROM source WHERE tenant_id = :tenant_id", tenant_id=tenant.id)
    tx.run("DELETE FROM tenant WHERE id = :tenant_id", tenant_id=tenant.id)
    if tenant.organization_id is not None:
        checkpoints.write_checkpoint(tx, erasure_mark(tenant.organization_id), tenant.id)
    add_audit(tx, audit)
    return TenantPurged(removed, audits)


def add_audit(tx: SqlTransaction, audit: AuditRecord) -> None:
    """Add an audit row without changing the tenant, for a transition that was refused."""
    tx.run(_INSERT_AUDIT, **attrs.asdict(audit))


def _replace_sources(tx: SqlTransaction, tenant: Tenant) -> None:
    texts = sorted({source_to_text(source) for source in tenant.credentials.sources})
    tx.run("DELETE FROM source WHERE tenant_id = :tenant_id", tenant_id=tenant.id)
    for text in texts:
        tx.run(_ADD_SOURCE, tenant_id=tenant.id, text=text)


def _version_of(tx: SqlTransaction, tenant_id: str) -> int | None:
    row = tx.one("SELECT version FROM tenant WHERE id = :id FOR UPDATE", id=tenant_id)
    return None if row is None else int(row[0])


def _refuse_taken(tx: SqlTransaction, tenant: Tenant, *, but: str) -> None:
    for column, value in (
        ("id", tenant.id),
        ("identifier", tenant.identifier),
        ("organization_id", tenant.organization_id),
    ):
        row = tx.one(
            f"SELECT identifier FROM tenant WHERE {column} = :value AND id <> :but",
            value=value,
            but=but,
        )
        if row is not None:
            raise taken(column, value, row[0])


# -- queries -----------------------------------------------------------------------------------


def get(tx: SqlTransaction, column: str, value: str) -> Tenant | None:
    """Return the tenant with that value in the unique ``column``."""
    row = tx.one(f"{_SELECT_TENANT} WHERE {column} = :value", value=value)
    return None if row is None else _tenant_of(row)


def owner_of(tx: SqlTransaction, organization_id: str) -> Tenant | str | None:
    """Return the tenant of this organization of the upstream, or None.

    If its tenant was purged, and it has none now, return the id of the purged one.
    """
    tenant = get(tx, "organization_id", organization_id)
    return tenant or checkpoints.read_checkpoint(tx, erasure_mark(organization_id))


def holders(
    tx: SqlTransaction, sources: Sequence[CredentialSource], *, but: str
) -> Mapping[CredentialSource, Sequence[str]]:
    """Return for each source the identifiers of the tenants that name it, but not of ``but``.

    The cost depends on the result's size only.
    """
    return {
        source: [row[0] for row in tx.all(_TENANTS_OF_SOURCE, text=source_to_text(source), but=but)]
        for source in sources
    }


def page(
    tx: SqlTransaction, *, status: TenantStatus | None = None, after: str = "", limit: int = 100
) -> Sequence[Tenant]:
    """List tenants by identifier, those whose identifier comes after ``after``."""
    rows = _after(tx, _SELECT_TENANT, "identifier", after, limit, status=status)
    return [_tenant_of(row) for row in rows]


def _after(
    tx: SqlTransaction, select: str, order: str, after: str | int, limit: int, **wanted: Any
) -> list[Row]:
    """Return the next rows by ``order`` whose columns have the ``wanted`` values, None: any."""
    chosen = "".join(f"{name} = :{name} AND " for name in wanted if wanted[name] is not None)
    statement = f"{select} WHERE {chosen}{order} > :after ORDER BY {order} LIMIT :limit"
    return tx.all(statement, after=after, limit=limit, **wanted)


def counts(tx: SqlTransaction) -> dict[TenantStatus, int]:
    """Return how many tenants are in each status; statuses without any are 0."""
    found = dict.fromkeys(TenantStatus, 0)
    for status, number in tx.all("SELECT status, count(*) FROM tenant GROUP BY status"):
        found[TenantStatus(status)] = number
    return found


def audit_rows(
    tx: SqlTransaction, tenant_id: str | None = None, *, after_sequence: int = 0, limit: int = 100
) -> Sequence[AuditRecord]:
    """List audit rows, oldest first: of one tenant, which may have been purged, or of all."""
    rows = _after(tx, _SELECT_AUDIT, "sequence", after_sequence, limit, tenant_id=tenant_id)
    return [_audit_of(row) for row in rows]


def transitions(
    tx: SqlTransaction, *, after_sequence: int = 0, limit: int = 100
) -> Sequence[OutboxRecord]:
    """List transitions, oldest first. Sequences are never reused, and they increase."""
    rows = tx.all(_NEXT_TRANSITIONS, after=after_sequence, limit=limit, now=clock.wall())
    return [transition_of(row[2:]) for row in settled(tx, rows, after_sequence)]


def settled(tx: SqlTransaction, rows: Sequence[Row], after: int) -> Sequence[Row]:
    """Return the next rows of the outbox, up to the first number that may still be committed.

    On PostgreSQL the transaction of a missing number may be in progress, until
    :data:`SETTLE_SECONDS` after the next number was written. Numbers are missing only where
    transitions are being written, where one was rolled back and where a tenant was purged.

    Args:
        tx: the transaction that has read them.
        rows: ascending; each begins with its number and the seconds since it was written.
        after: the number of the row before them.
    """
    if tx.dialect.is_sqlite:
        return rows
    for number, (sequence, age, *_) in enumerate(rows):
        if sequence != after + 1 and age < SETTLE_SECONDS:
            return rows[:number]
        after = sequence
    return rows


# A late transaction may commit a lower number than the highest, so the last rows are counted, too.
_REVISION = """
SELECT 1024 * coalesce(max(sequence), 0)
    + (SELECT count(*) FROM audit WHERE sequence > (SELECT max(sequence) FROM audit) - 1000)
FROM audit
"""


def revision(tx: SqlTransaction) -> int:
    """Return a number that grows with every change of any tenant, by any process."""
    row = tx.one(_REVISION)
    return 0 if row is None else int(row[0])


_LAST_NUMBER_ON_SQLITE = "SELECT seq FROM sqlite_sequence WHERE name = '{table}'"
_LAST_NUMBER = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {table}_sequence_seq"


def last_number(tx: SqlTransaction, table: str) -> int:
    """Return the highest number that ``audit`` or ``outbox`` has ever given, 0 before the first."""
    row = tx.one(
        (_LAST_NUMBER_ON_SQLITE if tx.dialect.is_sqlite else _LAST_NUMBER).format(table=table)
    )
    return 0 if row is None else int(row[0])


# -- rows and records --------------------------------------------------------------------------


def _values_of(tenant: Tenant) -> dict[str, Any]:
    values = {name: getattr(tenant, name) for name in _TENANT_COLUMNS}
    values["credentials"] = credentials_to_text(tenant.credentials)
    return values


def _tenant_of(row: tuple[Any, ...]) -> Tenant:
    values = dict(zip(_TENANT_COLUMNS, row, strict=True))
    values["status"] = TenantStatus(values["status"])
    values["site_manager_email_verified"] = bool(values["site_manager_email_verified"])
    values["credentials"] = credentials_from_text(values["credentials"])
    return Tenant(**values)


def _audit_of(row: tuple[Any, ...]) -> AuditRecord:
    values = dict(zip(_AUDIT_COLUMNS, row, strict=True))
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
    values["site_manager_email_verified"] = bool(values["site_manager_email_verified"])
    return OutboxRecord(**values)


class TenantStore(SqlPart):
    """The tenants of a store, with their audit trail and their outbox."""

    add: Final = committed(add)
    add_audit: Final = committed(add_audit)
    purge: Final = committed(purge)
    holders: Final = on_reader(holders)
    page: Final = on_reader(page)
    counts: Final = on_reader(counts)
    audit: Final = on_reader(audit_rows)
    outbox: Final = on_reader(transitions)
    revision: Final = on_reader(revision)

    async def change(
        self,
        tenant: Tenant,
        audit: AuditRecord,
        outbox: OutboxRecord | None = None,
        *,
        announced: bool = False,
    ) -> None:
        # Alone in its transaction: if another unit failed, the rollback would use up a number of
        # the outbox.
        await self._commits.submit(
            lambda tx: change(tx, tenant, audit, outbox, announced=announced),
            single=outbox is not None,
        )

    async def get(self, tenant_id: str) -> Tenant | None:
        return await self._answer(lambda tx: get(tx, "id", tenant_id))

    async def find(self, identifier: str) -> Tenant | None:
        return await self._answer(lambda tx: get(tx, "identifier", identifier))

    async def owner_of(self, organization_id: str) -> Tenant | str | None:
        return await self._answer(lambda tx: owner_of(tx, organization_id))

    async def _answer(self, query: Callable[[SqlTransaction], T]) -> T:
        # A sender may wait for this, so it has a time limit.
        return await self._readers.run(query, seconds=ANSWER_SECONDS)


# -- the upgrade from a single tenant ----------------------------------------------------------

_SAVE = """
INSERT INTO upgrade (id, state, tenant_id, step, position, started_at, finished_at)
VALUES (1, :state, :tenant_id, :step, :position, :started_at, :finished_at)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, tenant_id = excluded.tenant_id, step = excluded.step,
    position = excluded.position, started_at = excluded.started_at,
    finished_at = excluded.finished_at
"""

_FINISHED = "upgrade.finished"

_MARKER = """
SELECT state, tenant_id, step, position, started_at, finished_at,
       (SELECT value FROM checkpoint WHERE name = :name)
FROM upgrade
"""

_BODIES = """
SELECT sequence, type, raw FROM arrival
WHERE sequence > :after AND tenant_id IS NOT DISTINCT FROM :tenant_id AND raw IS NOT NULL
ORDER BY sequence LIMIT :limit
"""

# Batches are ranges of sequences, so the position also moves past rows that have a tenant.
_BATCH = """
SELECT sequence, tenant_id FROM arrival WHERE sequence > :after ORDER BY sequence LIMIT :limit
"""

_IN_LANES_OF_BATCH = """
SELECT work.sequence, arrival.tenant_id, arrival.subject
FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE work.lane IS NOT NULL AND work.sequence IN ints(:sequences)
"""

_MOVE_LANE = "UPDATE work SET lane = :lane WHERE sequence = :sequence"


def _count_unassigned(tx: SqlTransaction) -> int:
    """Return how many deliveries have no tenant."""
    (count,) = tx.one("SELECT count(*) FROM arrival WHERE tenant_id IS NULL") or (0,)
    return int(count)


def _bodies(
    tx: SqlTransaction, tenant_id: str | None, *, after: int, limit: int
) -> Sequence[StoredBody]:
    """Return the next ``limit`` bodies of a tenant's deliveries, None: of those without one.

    They have sequences above ``after``; bodies that the retention has removed are skipped.
    """
    rows = tx.all(_BODIES, after=after, tenant_id=tenant_id, limit=limit)
    return [StoredBody(*row) for row in rows]


def _save(tx: SqlTransaction, marker: UpgradeMarker) -> None:
    """Replace the marker."""
    tx.run(
        _SAVE,
        state=marker.state,
        tenant_id=marker.tenant_id or "",
        step=marker.step,
        position=marker.position,
        started_at=marker.started_at,
        finished_at=marker.finished_at,
    )
    finished = None if marker.finished is None else json.dumps(marker.finished)
    checkpoints.write_checkpoint(tx, _FINISHED, finished)


def _marker(tx: SqlTransaction) -> UpgradeMarker | None:
    """Return the marker; None while the upgrade is pending."""
    row = tx.one(_MARKER, name=_FINISHED)
    if row is None:
        return None
    state, tenant_id, step, position, started_at, finished_at, finished = row
    return UpgradeMarker(
        state=UpgradeState(state),
        tenant_id=tenant_id or None,
        step=step,
        position=position,
        started_at=started_at,
        finished_at=finished_at,
        finished=None if finished is None else tuple(json.loads(finished)),
    )


def _assign(tx: SqlTransaction, marker: UpgradeMarker, *, limit: int) -> Assigned:
    """Give the default tenant to those of the next ``limit`` deliveries that have none.

    They have sequences above the marker's position. The marker moves in the same transaction, so no
    delivery is skipped or counted twice, whenever the process ends.
    """
    batch = tx.all(_BATCH, after=int(marker.position or 0), limit=limit)
    if not batch:
        return Assigned(0, marker, last=True)
    sequences = [sequence for sequence, tenant_id in batch if tenant_id is None]
    assigned = arrivals.assign(tx, sequences, marker.tenant_id or "")
    for sequence, tenant_id, subject in tx.all(_IN_LANES_OF_BATCH, sequences=sequences):
        tx.run(_MOVE_LANE, lane=admission.lane_of(True, tenant_id, subject), sequence=sequence)
    moved = msgspec.structs.replace(marker, position=str(batch[-1][0]))
    _save(tx, moved)
    tx.note_change()
    return Assigned(assigned, moved, last=len(batch) < limit)


class UpgradeStore(SqlPart):
    """The progress of the upgrade from a single tenant, and its batches.

    One upgrade runs at a time. In a shared store, the host that has the lease runs it; on one
    machine, the caller holds a lock.
    """

    marker: Final = on_reader(_marker)
    save: Final = committed(_save)

    async def count_unassigned(self) -> int:
        """See :func:`_count_unassigned`."""
        return await self._read(_count_unassigned)

    async def bodies(
        self, tenant_id: str | None, *, after: int, limit: int
    ) -> Sequence[StoredBody]:
        """See :func:`_bodies`."""
        return await self._read(lambda tx: _bodies(tx, tenant_id, after=after, limit=limit))

    async def assign_batch(self, marker: UpgradeMarker, *, limit: int) -> Assigned:
        """See :func:`_assign`."""
        return await self._commits.submit(lambda tx: _assign(tx, marker, limit=limit))

    async def lead(self, *, seconds: float) -> int | None:
        """Take or renew the lease of the host that upgrades; otherwise as :meth:`Inbox.lead`."""
        owner, now = self._terms.owner, clock.wall()
        return await self._commits.submit(
            lambda tx: leases.lead(tx, owner, seconds=seconds, now=now, name=leases.UPGRADER)
        )

    @contextmanager
    def fenced(self, term: int) -> Iterator[None]:
        """Refuse writes of this open store within the block once ``term`` has ended.

        They then raise TermEndedError and change nothing: writes of tenants, markers, batches,
        messages and checkpoints, and also polls, renewals, releases and failed outcomes of
        deliveries. Arrivals, starts and successes are not refused: leases fence them.
        """
        owner = self._terms.owner
        self._commits.fence = lambda tx: leases.require_term(tx, owner, term, name=leases.UPGRADER)
        try:
            yield
        finally:
            self._commits.fence = None
