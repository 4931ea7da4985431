"""Removes what is kept of tenants that were deleted long ago; never by itself (contracts 5).

A tenant's rows go first, in one transaction that fails if the tenant has changed since it was
looked at, and that writes the audit row. Then its files go. A process that is killed in between
leaves files that belong to nobody; the next purge finds them by the audit trail and removes them.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import trio

from ..config import Settings
from ..errors import IllegalTransitionError, StoreUnavailableError
from ..logs import get_logger
from ..storage.ports import TenantStore
from ..storage.tenant_records import AuditAction, Tenant, TenantStatus
from .changes import audit_of
from .database_copier import remove_database
from .database_opener import SIDE_FILES, TenantDatabases, database_path, databases_directory
from .identity import is_tenant_id
from .status import DAY_SECONDS, StatusPolicy, is_retained

_log = get_logger("tenants")

_PAGE = 200


@attrs.frozen(kw_only=True)
class PurgeCandidate:
    """A tenant whose retention has passed, and how many bytes its files have.

    ``tenant`` is None where an earlier purge was cut short after the rows and before the files.
    """

    tenant_id: str
    tenant: Tenant | None
    bytes: int


@attrs.frozen(kw_only=True)
class TenantRemoved:
    """What was removed of one tenant: its files' bytes, and rows beside its own."""

    tenant_id: str
    identifier: str | None
    bytes: int
    outbox: int = 0
    audit: int = 0


class Purger:
    """Finds and removes tenants that were deleted longer ago than DeletedTenantRetentionDays.

    Args:
        settings: validated settings; ``multi_tenant`` and ``storage.path`` are used.
        store: the tenants' side of an open store.
        databases: the tenants' databases of this process, which are closed before they are
            removed; None in a program that has opened none.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        store: TenantStore,
        *,
        databases: TenantDatabases | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = StatusPolicy.of(settings)
        self._directory = databases_directory(settings)
        self._store = store
        self._databases = databases
        self._clock = clock

    async def candidates(self) -> Sequence[PurgeCandidate]:
        """Return what :meth:`purge` may remove now: this is the dry run, nothing is changed.

        Raises:
            StoreUnavailableError: the store or the directory cannot be read.
        """
        found = [
            PurgeCandidate(tenant_id=tenant.id, tenant=tenant, bytes=await self._size_of(tenant.id))
            for tenant in await self._deleted()
            if not is_retained(tenant, self._policy, now=self._clock())
        ]
        return [*found, *await self._left_behind()]

    async def purge(
        self,
        candidate: PurgeCandidate,
        *,
        actor: str,
        reason: str | None = None,
        forget_audit: bool = False,
    ) -> TenantRemoved:
        """Remove one tenant's rows and files for ever.

        Args:
            candidate: one of :meth:`candidates`.
            actor: who asks for it, for the audit trail.
            reason: why, one line.
            forget_audit: remove the tenant's earlier audit rows too; the one of the purge stays.

        Raises:
            IllegalTransitionError: the tenant is not deleted, or not for long enough.
            TenantConflictError: it has changed since it was looked at; nothing was removed.
            UnknownTenantError: somebody else has removed it.
            StoreUnavailableError: the store failed, or a file cannot be removed; run it again.

        Cancelled, what has begun is finished.
        """
        outbox = audit = 0
        tenant = candidate.tenant
        if tenant is not None:
            now = self._clock()
            self._require_expired(tenant, now)
            row = audit_of(tenant, AuditAction.PURGED, reason, actor, now)
            row = attrs.evolve(row, previous_status=tenant.status)
            purged = await self._store.purge(tenant, row, forget_audit=forget_audit)
            outbox, audit = purged.outbox, purged.audit
        if self._databases is not None:
            await self._databases.forget(candidate.tenant_id)
        file = database_path(self._directory, candidate.tenant_id)
        freed = await trio.to_thread.run_sync(_remove, file)
        identifier = None if tenant is None else tenant.identifier
        _log.info(
            "tenant.purged",
            tenant=identifier,
            tenant_id=candidate.tenant_id,
            bytes=freed,
            actor=actor,
        )
        return TenantRemoved(
            tenant_id=candidate.tenant_id,
            identifier=identifier,
            bytes=freed,
            outbox=outbox,
            audit=audit,
        )

    def _require_expired(self, tenant: Tenant, now: float) -> None:
        if tenant.status is TenantStatus.DELETED and not is_retained(tenant, self._policy, now=now):
            return
        raise IllegalTransitionError(
            f"the tenant {tenant.identifier!r} is {tenant.status} and is not purged: only tenants "
            f"that were deleted more than {self._policy.retention_seconds / DAY_SECONDS:g} days "
            "ago are (Sdk:MultiTenant:TenantStatus:DeletedTenantRetentionDays)",
            status=tenant.status,
            transition=AuditAction.PURGED,
        )

    async def _deleted(self) -> list[Tenant]:
        found: list[Tenant] = []
        while True:
            after = found[-1].identifier if found else ""
            page = await self._store.page(status=TenantStatus.DELETED, after=after, limit=_PAGE)
            found += page
            if len(page) < _PAGE:
                return found

    async def _left_behind(self) -> list[PurgeCandidate]:
        """Return the databases of tenants that were purged; those of unknown ids are let alone."""
        names = await trio.to_thread.run_sync(_tenant_ids, self._directory)
        return [
            PurgeCandidate(tenant_id=name, tenant=None, bytes=await self._size_of(name))
            for name in names
            if await self._store.get(name) is None and await self._was_purged(name)
        ]

    async def _was_purged(self, tenant_id: str) -> bool:
        after = 0
        while True:
            rows = await self._store.audit(tenant_id, after_sequence=after, limit=_PAGE)
            if any(row.action is AuditAction.PURGED for row in rows):
                return True
            if len(rows) < _PAGE:
                return False
            after = rows[-1].sequence

    async def _size_of(self, tenant_id: str) -> int:
        return await trio.to_thread.run_sync(_size, database_path(self._directory, tenant_id))


def _tenant_ids(directory: Path) -> list[str]:
    """Return the ids whose databases, or parts of them, are in ``directory``."""
    try:
        names = {entry.name.partition(".db")[0] for entry in directory.iterdir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreUnavailableError(
            f"the directory {directory} cannot be read ({error.strerror}); make it readable for "
            "this user"
        ) from error
    return sorted(name for name in names if is_tenant_id(name))


def _size(file: Path) -> int:
    total = 0
    for suffix in ("", *SIDE_FILES):
        found = file.with_name(file.name + suffix)
        if found.exists():
            total += found.stat().st_size
    return total


def _remove(file: Path) -> int:
    try:
        return remove_database(file)
    except OSError as error:
        raise StoreUnavailableError(
            f"{error.filename} cannot be removed ({error.strerror}); the tenant's rows are gone "
            "already: make the directory writable and run the purge again"
        ) from error
