"""The purge of deleted tenants: removal of all their data, after their retention or on demand.

It never runs automatically. First, deliveries are removed in short transactions. Then one
transaction removes the tenant's row and its other rows and writes the audit row; it fails if the
tenant has changed since it was read. Then its replica and its files are removed, once no process
has the database open. If a process is killed in between, rows or files without a tenant remain; the
next purge finds them by the audit trail and removes them. Last, :meth:`Purger.wipe` overwrites the
remnants in the store's own files, for all tenants at once.

Everything that cannot be removed is named in the result.
docs/adr/0037-purge.md has the alternatives.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import attrs
import trio

from ..base.clock import wall
from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..base.opener import open_file
from ..config import Settings
from ..errors import IllegalTransitionError, StoreUnavailableError, UnknownTenantError
from ..records.tenants import AuditAction, AuditRecord, Tenant, TenantStatus
from ..storage.data_directory import DATABASE_NAME
from ..storage.ports import Store
from . import upgrade
from .database_copy import remove_database
from .databases import SIDE_FILES, TenantDatabases, database_path, databases_directory
from .identity import is_tenant_id
from .service import audit_of
from .status import DAY_SECONDS, StatusPolicy, is_retained

_log = get_logger("tenants")

_PAGE = 200

#: The first bytes of every SQLite database, and the number of bytes of a file that are searched at
#: a time.
_MAGIC = b"SQLite format 3\x00"
_READ_BYTES = 1 << 20


@attrs.frozen(kw_only=True)
class ReplicaHoldings:
    """The location of a replica; ``files`` and ``bytes`` are None if only the target knows."""

    where: str
    files: int | None = None
    bytes: int | None = None


class Replicas(Protocol):
    """The replicas of the tenants' databases, and the processes that have the databases open."""

    def holdings(self, tenant_id: str, identifier: str | None) -> ReplicaHoldings | None:
        """Return the location of the tenant's replica, certain or possible, or None. Blocks.

        ``identifier`` is None if an earlier purge has removed it.
        """
        ...

    def ids(self) -> list[str]:
        """Return the ids of the tenants with replicas, as far as they can be listed. Blocks."""
        ...

    def released(self, file: Path) -> AbstractAsyncContextManager[str | None]:
        """Wait until no process has the database open and keep it so; yield None.

        If a process keeps it open too long, yield a description of that process.
        """
        ...

    async def remove(self, tenant_id: str, identifier: str | None) -> str | None:
        """Remove the tenant's replica; describe the part that could not be removed, or None."""
        ...


@attrs.frozen(kw_only=True)
class PurgeCandidate:
    """A tenant that may be removed, with a list of its data.

    ``tenant`` is None if an earlier purge was interrupted after the tenant's row. ``bytes`` is the
    size of ``files``, ``rows`` counts the store's rows by name (see :meth:`Inbox.holdings`).
    """

    tenant_id: str
    tenant: Tenant | None
    bytes: int
    files: Sequence[str] = ()
    rows: Mapping[str, int] = attrs.Factory(dict)
    replica: ReplicaHoldings | None = None


@attrs.frozen(kw_only=True)
class TenantRemoved:
    """The result of one purge: the bytes of removed files, and the numbers of removed rows.

    ``unreached`` describes the remaining data and its location.
    """

    tenant_id: str
    identifier: str | None
    bytes: int
    deliveries: int = 0
    outbox: int = 0
    audit: int = 0
    unreached: Sequence[str] = ()


class Purger:
    """Finds and removes deleted tenants.

    Args:
        settings: validated settings; ``multi_tenant`` and ``storage.path`` are used.
        store: the open store.
        replicas: the replicas of the tenants' databases; None: there are none.
        databases: the tenants' databases of this process, which are closed before removal; None if
            the program has opened none.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        replicas: Replicas | None = None,
        databases: TenantDatabases | None = None,
        clock: Callable[[], float] = wall,
    ) -> None:
        self._policy = StatusPolicy.of(settings)
        self._directory = databases_directory(settings).absolute()
        self._data = Path(settings.storage.path).absolute()
        # The upgrade copied that file into the tenant's database and left it where it was
        # (docs/adr/0010-single-tenant-upgrade.md).
        self._named_source = settings.multi_tenant.single_tenant_upgrade.source_database
        self._inbox = store
        self._store = store.tenants
        self._upgrade = store.upgrade
        self._replicas = replicas
        self._databases = databases
        self._clock = clock

    async def candidates(self, *, orphans: bool = False) -> Sequence[PurgeCandidate]:
        """Return the tenants that :meth:`purge` may remove now; as a dry run, it changes nothing.

        Args:
            orphans: include data of unknown tenants. They may belong to another host that uses the
                same directory of replicas.

        Raises:
            StoreUnavailableError: the store or a directory cannot be read.
        """
        found = [
            await self._described(tenant.id, tenant)
            for tenant in await self._deleted()
            if not is_retained(tenant, self._policy, now=self._clock())
        ]
        return [*found, *await self._left_behind(orphans=orphans)]

    async def candidate(self, key: str, *, now: bool = False) -> PurgeCandidate:
        """Return one tenant, by its identifier or id; ``now``: also within its retention.

        Raises:
            UnknownTenantError: there is no such tenant, and no data of a purged one.
            IllegalTransitionError: it is not deleted, or within its retention without ``now``.
            StoreUnavailableError: as for :meth:`candidates`.
        """
        tenant = await (self._store.get(key) if is_tenant_id(key) else self._store.find(key))
        if tenant is not None:
            self._require_purgeable(tenant, now=now)
            return await self._described(tenant.id, tenant)
        left = {found.tenant_id: found for found in await self._left_behind()}
        if key in left:
            return left[key]
        # A purge within the retention removes the name first, and overwrites the store last. An
        # unknown name therefore does not prove that nothing remains.
        rest = f"rows or files of {', '.join(left)} remain" if left else "no rows or files remain"
        raise UnknownTenantError(
            f"there is no tenant {key!r}; {rest} from earlier purges; if one was interrupted, "
            "'tenant purge' without a name finishes it"
        )

    async def purge(
        self,
        candidate: PurgeCandidate,
        *,
        actor: str,
        reason: str | None = None,
        forget_audit: bool = False,
        now: bool = False,
    ) -> TenantRemoved:
        """Remove one tenant's rows, files and replica permanently; call :meth:`wipe` afterwards.

        Args:
            candidate: one of :meth:`candidates`, or of :meth:`candidate`.
            actor: the person or program, for the audit trail.
            reason: the reason in one line.
            forget_audit: also remove the tenant's earlier audit rows; the row of the purge stays.
            now: purge even within the retention, for example on a person's request. All earlier
                audit rows are then removed, and the purge's row names the tenant only by id.

        Raises:
            IllegalTransitionError: the tenant is not deleted, or not for long enough.
            TenantConflictError: it has changed since it was read; its row was not removed.
            UnknownTenantError: another process has removed it.
            StoreUnavailableError: the store failed, or a file cannot be removed; run it again.

        On cancellation, the current step is finished; another purge does the rest.
        """
        tenant = candidate.tenant
        identifier = None if tenant is None else tenant.identifier
        outbox = audit = 0
        if tenant is not None:
            self._require_purgeable(tenant, now=now)
            # Created before anything is removed: it counts the current files.
            row = self._record(tenant, candidate, actor, reason, erases=now)
        # Deliveries first: as long as the tenant's row exists, an interrupted purge is found by it.
        deliveries = await self._inbox.erase(candidate.tenant_id)
        if tenant is not None:
            # On a person's request the trail is removed as well: its rows name the tenant.
            purged = await self._store.purge(tenant, row, forget_audit=forget_audit or now)
            outbox, audit = purged.outbox, purged.audit
        freed, unreached = await self._remove_files(candidate.tenant_id, identifier)
        _log.info(
            "tenant.purged",
            # A log is kept elsewhere, and for longer than the tenant.
            tenant=None if now else identifier,
            tenant_id=candidate.tenant_id,
            bytes=freed,
            deliveries=deliveries,
            unreached=len(unreached),
            actor=actor,
        )
        return TenantRemoved(
            tenant_id=candidate.tenant_id,
            identifier=identifier,
            bytes=freed,
            deliveries=deliveries,
            outbox=outbox,
            audit=audit,
            unreached=unreached,
        )

    async def wipe(self) -> str | None:
        """Overwrite the remnants of removed rows in the store's files.

        After a purge it rewrites the store once; deliveries are answered 503 meanwhile. SQLite's
        ``secure_delete`` is not enough: when a page is split, the old page may keep copies of moved
        rows.

        Returns:
            a description of the remnants and why they remain, or None.
        """
        await trio.lowlevel.checkpoint()
        try:
            cleared = await self._inbox.wipe()
        except StoreUnavailableError as error:
            return f"unused parts of the store: {error}; run 'tenant purge' again"
        if cleared:
            return None
        return (
            "the store's write-ahead log: a reader (a backup, a shell) keeps it; end that reader, "
            "and run 'tenant purge' again"
        )

    # -- files -----------------------------------------------------------------------------------

    async def _remove_files(self, tenant_id: str, identifier: str | None) -> tuple[int, list[str]]:
        unreached: list[str] = []
        file = database_path(self._directory, tenant_id)
        # Our own connections first: they hold the lock that the next step waits for.
        if self._databases is not None:
            await self._databases.forget(tenant_id)
        waiting = nullcontext(None) if self._replicas is None else self._replicas.released(file)
        async with waiting as holder:
            if holder is not None:
                unreached.append(
                    f"the removed database {file.name} is still open in {holder}: until that ends, "
                    "its content is on the disk, and may be replicated; run 'tenant purge' then"
                )
            if self._replicas is not None:
                # Within the block: a replicator that still had the database open would recreate the
                # replica.
                left = await self._replicas.remove(tenant_id, identifier)
                unreached += [] if left is None else [left]
            files = await self._files_of(tenant_id)
            # Removed even if a process has it open: the name is free then, and the content is freed
            # when that process closes it.
            freed = await run_in_thread(_remove, file, files)
        named = self._named_source if await self._was_upgraded_to(tenant_id) else None
        if named is not None and await run_in_thread(Path(named).exists):
            unreached.append(f"the database that the upgrade copied: {named}; remove that file")
        # A backup next to the store contains the tenant as well, and is not ours to remove.
        copies = await run_in_thread(_copies, self._data, tenant_id)
        unreached += [f"{copy}: a database that names the tenant; a backup?" for copy in copies]
        return freed, unreached

    async def _files_of(self, tenant_id: str) -> list[Path]:
        files = await run_in_thread(_named_after, self._directory, tenant_id)
        if await self._was_upgraded_to(tenant_id) and self._named_source is None:
            source = self._directory / upgrade.SOURCE_NAME
            files += await run_in_thread(_database_files, source)
        return files

    async def _was_upgraded_to(self, tenant_id: str) -> bool:
        """Return whether the tenant got the single-tenant database in the upgrade."""
        marker = await self._upgrade.marker()
        return marker is not None and marker.tenant_id == tenant_id

    async def _described(self, tenant_id: str, tenant: Tenant | None) -> PurgeCandidate:
        files = await self._files_of(tenant_id)
        replica = None
        if self._replicas is not None:
            identifier = None if tenant is None else tenant.identifier
            replica = await run_in_thread(self._replicas.holdings, tenant_id, identifier)
        return PurgeCandidate(
            tenant_id=tenant_id,
            tenant=tenant,
            bytes=await run_in_thread(_size, files),
            files=[str(file) for file in files],
            rows=await self._inbox.holdings(tenant_id),
            replica=replica,
        )

    # -- tenants ---------------------------------------------------------------------------------

    def _record(
        self,
        tenant: Tenant,
        candidate: PurgeCandidate,
        actor: str,
        reason: str | None,
        *,
        erases: bool,
    ) -> AuditRecord:
        row = audit_of(tenant, AuditAction.PURGED, reason, actor, self._clock())
        counts = ", ".join(f"{number} {name}" for name, number in candidate.rows.items() if number)
        return attrs.evolve(
            row,
            previous_status=tenant.status,
            tenant_identifier=tenant.id if erases else row.tenant_identifier,
            details=counts or None,
        )

    def _require_purgeable(self, tenant: Tenant, *, now: bool) -> None:
        if tenant.status is TenantStatus.DELETED:
            if now or not is_retained(tenant, self._policy, now=self._clock()):
                return
            hint = "; purge it within that time with --now"
        else:
            hint = ""
        raise IllegalTransitionError(
            f"the tenant {tenant.identifier!r} is {tenant.status} and is not purged: only tenants "
            f"that were deleted more than {self._policy.retention_seconds / DAY_SECONDS:g} days "
            f"ago are (Sdk:MultiTenant:TenantStatus:DeletedTenantRetentionDays){hint}",
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

    async def _left_behind(self, *, orphans: bool = False) -> list[PurgeCandidate]:
        """Return the remaining data of purged tenants; with ``orphans``, also of unknown
        tenants."""
        ids = set(await run_in_thread(_tenant_ids, self._directory))
        ids.update(await self._inbox.unowned())
        replicated: set[str] = set()
        if self._replicas is not None:
            replicated.update(await run_in_thread(self._replicas.ids))
        return [
            await self._described(name, None)
            for name in sorted(ids | replicated)
            if await self._store.get(name) is None
            # Two hosts may share a directory of replicas, so replicas unknown to this store are
            # removed only on request.
            and ((orphans and name in replicated) or await self._was_purged(name))
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


def _tenant_ids(directory: Path) -> list[str]:
    """Return the ids of tenants with a database, or parts of one, in ``directory``."""
    try:
        # The names of side files and of the replicator's files begin with the database's name.
        names = {entry.name.partition(".db")[0] for entry in directory.iterdir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreUnavailableError(
            f"the directory {directory} cannot be read ({error.strerror}); make it readable for "
            "this user"
        ) from error
    return sorted(name for name in names if is_tenant_id(name))


def _named_after(directory: Path, tenant_id: str) -> list[Path]:
    """Return the tenant's database and the files beside it whose names begin with its name."""
    try:
        return sorted(entry for entry in directory.iterdir() if tenant_id in entry.name)
    except FileNotFoundError:
        return []


def _database_files(database: Path) -> list[Path]:
    paths = (database.with_name(database.name + suffix) for suffix in ("", *SIDE_FILES))
    return [path for path in paths if path.exists()]


def _size(paths: Sequence[Path]) -> int:
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file())


def _remove(database: Path, files: Sequence[Path]) -> int:
    freed = _size(files)
    try:
        remove_database(database)
        for path in files:
            # A link is removed and not followed: its target is not the tenant's.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnavailableError(
            f"{error.filename} cannot be removed ({error.strerror}); the tenant's rows have "
            "already been removed: make the directory writable and run the purge again"
        ) from error
    return freed


def _copies(data: Path, tenant_id: str) -> list[Path]:
    """Return the databases in the data directory that name the tenant, except the store.

    The store's audit trail still names it; a copy of the store also has its deliveries.
    """
    found = []
    for path in sorted(data.rglob("*")):
        is_tenants = is_tenant_id(path.name.partition(".")[0])
        if path.name == DATABASE_NAME or is_tenants or not path.is_file() or path.is_symlink():
            continue
        try:
            if _is_database_with(path, tenant_id.encode()):
                found.append(path)
        except OSError:
            continue  # a file that this user cannot read is not theirs to purge
    return found


def _is_database_with(path: Path, wanted: bytes) -> bool:
    with open(path, "rb", opener=open_file) as file:
        chunk = file.read(_READ_BYTES)
        if not chunk.startswith(_MAGIC):
            return False
        while chunk:
            if wanted in chunk:
                return True
            # The id may be split across two chunks.
            tail = chunk[-len(wanted) :]
            more = file.read(_READ_BYTES)
            chunk = tail + more if more else b""
    return False
