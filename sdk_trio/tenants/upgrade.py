"""The upgrade from a single tenant: its steps, their order, and its marker.

Pure decisions, and two classes that do I/O: :class:`SqliteTenantIds`, a ready-made step that fills
the empty tenant ids in a host's table, and :class:`DefaultTenantFinder`. The steps, in order:

``database``
    The single-tenant database becomes ``{tenant id}.db``. It is copied to a temporary file and
    checked *before* anything is written anywhere; only then are the default tenant and the marker
    stored, and the file renamed. A database that cannot be copied therefore leaves no trace.
``deliveries``
    Deliveries without a tenant get the default one, batch by batch.
``organization``
    The default tenant gets its organization, if it has none, so that later deliveries find it: the
    configured one, or the one that all of its stored deliveries name.
``host:NAME``
    Each step that the host has registered, batch by batch.

The marker has the current step, its position, and the finished steps. The next run starts there,
however the process ended: a batch of ``deliveries`` commits with its marker, and a host's batch may
run again. An unfinished step runs as soon as it is registered, even long after all others. A host
without data to move gets the marker, but no tenant.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import apsw
import attrs
import msgspec
import trio

from ..base.executor import run_in_thread
from ..base.opener import open_database
from ..config import Settings
from ..config.fields import DefaultTenantStrategy
from ..config.options.tenants import SingleTenantUpgradeOptions
from ..errors import DefaultTenantError, InvalidTenantError, NotSupportedError, UpgradeError
from ..records.tenants import Tenant
from ..records.upgrades import UpgradeMarker, UpgradeState
from .database_copy import is_open_elsewhere
from .databases import databases_directory
from .identity import check_identifier, check_name, is_organization_id
from .service import TenantService

if TYPE_CHECKING:
    from ..storage.sql.tenants import TenantStore

DATABASE = "database"
DELIVERIES = "deliveries"
ORGANIZATION = "organization"
HOST_PREFIX = "host:"

#: The name of the copy until it is complete and verified; no tenant's database has such a name.
PARTIAL_NAME = "single-tenant.partial"

#: The single-tenant database, unless ``SourceDatabase`` names another file.
SOURCE_NAME = "default.db"

#: The lock of the process that runs the upgrade, in the directory of the tenants' databases.
LOCK_NAME = "upgrade.lock"

KEY = "Sdk:MultiTenant:SingleTenantUpgrade"

#: The maximum number of organizations collected from deliveries. Two are enough to know that the
#: tenant cannot get one; the others show the operator whose deliveries they are.
MOST_ORGANIZATIONS = 10

_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: Rows per transaction: some milliseconds, so that the host's own processes never wait for long.
BATCH_ROWS = 5000

_BUSY_SECONDS = 3.0


@attrs.frozen
class StepBatch:
    """The result of one batch of a host's step.

    ``rows`` were changed; ``position`` is the start of the next batch, in the step's own terms;
    ``last``: there is no next batch.
    """

    rows: int
    position: str | None
    last: bool


class UpgradeStep(Protocol):
    """A step registered by the host, which assigns its own data to the tenant."""

    @property
    def name(self) -> str:
        """Return its name in the marker: letters, digits, ``.``, ``_`` and ``-``; never changed."""
        ...

    async def count(self) -> int:
        """Return how many rows are left to do, changing nothing."""
        ...

    async def run_batch(self, tenant: Tenant, position: str | None) -> StepBatch:
        """Do the next batch, from ``position`` on; None at the start.

        The position is stored after the batch, so after a kill in between the same batch runs once
        more. It must then change nothing, as with ``WHERE tenant_id IS NULL``.
        """
        ...


class DefaultTenantResolver(Protocol):
    """The host's choice of the default tenant under the strategy ``HostSupplied``."""

    async def resolve(self, tenants: "TenantService") -> Tenant | str:
        """Return the default tenant, its id or its identifier; it exists and is active.

        It may add the tenant. An interrupted run may call it again: the answer must be the same.
        """
        ...


@attrs.frozen
class HostUpgrade:
    """The host's part of the upgrade: its resolver, and its steps in the order of running."""

    resolver: DefaultTenantResolver | None = None
    steps: Sequence[UpgradeStep] = ()


class Quiescence:
    """The host's signal that nothing writes its data: requests are refused, queues are empty.

    The host creates one, stops its work, calls :meth:`signal`, and passes the object to
    ``Runtime(quiescence=...)`` before the start. Any thread may signal or withdraw.
    """

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Return why the host is idle; None while it is not."""
        return self._reason

    @property
    def remedy(self) -> str:
        """Return how to make the upgrade possible, for the error that refuses it."""
        return (
            "stop everything that writes this host's data, call signal() of a Quiescence and pass "
            "it to Runtime(quiescence=...)"
        )

    def signal(self, reason: str) -> None:
        """Declare that the host is idle from now on; ``reason`` is logged."""
        self._reason = reason

    def withdraw(self) -> None:
        """Declare that the host is no longer idle; a running upgrade stops at its next batch."""
        self._reason = None

    def directory_locked(self, settings: Settings) -> None:
        """Do nothing: the lock of the data directory does not show what the host does.

        Called in a thread once this process holds that lock, before anything is served.
        """


class OwnedProcess(Quiescence):
    """The signal of a program that owns its process, as the daemon does.

    It runs no writing code before the upgrade has ended, so it may signal by itself if nothing else
    can write. That is: it holds the exclusive lock of the data directory, the single-tenant
    database is in that directory, and no other process has that database open.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_the_way = ""

    @property
    def remedy(self) -> str:
        """Return how to make the upgrade possible, for the error that refuses it."""
        return f"{self._in_the_way}; stop every process that uses it"

    def directory_locked(self, settings: Settings) -> None:
        """Signal, unless another process may write the single-tenant database."""
        source = source_database(settings)
        directory = Path(settings.storage.path).resolve()
        if source.exists():
            if not source.resolve().is_relative_to(directory):
                self._in_the_way = (
                    f"the single-tenant database {source} is outside of the data directory, so the "
                    "lock of that directory keeps no other process from writing it"
                )
                return
            if is_open_elsewhere(source):
                self._in_the_way = f"another process has the single-tenant database {source} open"
                return
        self.signal("the data directory is locked, and nothing is served yet")


def source_database(settings: Settings) -> Path:
    """Return where the single-tenant database is, or would be."""
    named = settings.multi_tenant.single_tenant_upgrade.source_database
    return databases_directory(settings) / SOURCE_NAME if named is None else Path(named)


@attrs.frozen
class NewTenant:
    """The default tenant is found by its identifier, or created."""

    identifier: str
    name: str


@attrs.frozen
class HostTenant:
    """The default tenant is the one that the host's resolver returns."""

    resolver: DefaultTenantResolver


def require_choice(options: SingleTenantUpgradeOptions, host: HostUpgrade | None) -> None:
    """Raise if a start with these settings could never choose the default tenant.

    Raises:
        NotSupportedError: the strategy is FirstUserOrganization.
        DefaultTenantError: slug, name or organization cannot be used, or there is no resolver.
        UpgradeError: the steps of the host have names that cannot be used.
    """
    host = host or HostUpgrade()
    step_names(host.steps)
    by_host = options.default_tenant_strategy is DefaultTenantStrategy.HOST_SUPPLIED
    # Without the automatic upgrade, only 'sdk-trio upgrade --host' calls the resolver.
    if not by_host or options.enable_automatic_upgrade:
        choose_tenant(options, host.resolver)


def choose_tenant(
    options: SingleTenantUpgradeOptions, resolver: DefaultTenantResolver | None
) -> NewTenant | HostTenant:
    """Return how the default tenant is resolved.

    Raises:
        NotSupportedError: the strategy is FirstUserOrganization.
        DefaultTenantError: slug, name or organization cannot be used, or there is no resolver.
    """
    strategy = options.default_tenant_strategy
    # Only the host knows its first user; the settings accept the name, and the error suggests a
    # solution.
    if strategy is DefaultTenantStrategy.FIRST_USER_ORGANIZATION:
        raise NotSupportedError(
            f"{KEY}:DefaultTenantStrategy: FirstUserOrganization is not supported; use "
            "LiteralDefault, or HostSupplied with a resolver of your own"
        )
    if strategy is DefaultTenantStrategy.HOST_SUPPLIED:
        if resolver is None:
            raise DefaultTenantError(
                f"{KEY}:DefaultTenantStrategy is HostSupplied, and no resolver is registered; "
                "register one (HostUpgrade(resolver=...); 'run --upgrade-host MODULE:ATTR', "
                "'upgrade --host MODULE:ATTR'), or use LiteralDefault"
            )
        return HostTenant(resolver)
    organization = options.literal_default_tenant_organization_id
    if organization is not None and not is_organization_id(organization):
        raise DefaultTenantError(
            f"{KEY}:LiteralDefaultTenantOrganizationId must be 1 to 128 visible ASCII characters"
        )
    slug, name = options.literal_default_tenant_slug, options.literal_default_tenant_name
    try:
        return NewTenant(check_identifier(slug), check_name(name))
    except InvalidTenantError as error:
        raise DefaultTenantError(
            f"{KEY}:LiteralDefaultTenantSlug or LiteralDefaultTenantName cannot be used: {error}"
        ) from None


def step_names(host_steps: Sequence[UpgradeStep]) -> tuple[str, ...]:
    """Return the names of all steps in their order.

    Raises:
        UpgradeError: two of the host's steps have one name, or a name cannot be used.
    """
    # The database first: a damaged one must be detected before anything is written
    # (docs/adr/0010-single-tenant-upgrade.md). The organization after the deliveries, which name
    # it.
    names = [DATABASE, DELIVERIES, ORGANIZATION]
    for step in host_steps:
        if not _STEP_NAME.fullmatch(step.name):
            raise UpgradeError(
                f"the upgrade step {step.name!r} must have a name of 1 to 64 letters, digits, "
                "'.', '_' and '-'"
            )
        # The prefix keeps a host's step from having the name of a step in a later version.
        name = f"{HOST_PREFIX}{step.name}"
        if name in names:
            raise UpgradeError(f"two upgrade steps have the name {step.name!r}: rename one")
        names.append(name)
    return tuple(names)


def finished_steps(marker: UpgradeMarker) -> tuple[str, ...]:
    """Return the steps that need not run again.

    The marker of an earlier version names only the last step. It proves that the package's own
    steps of that version are done, and the last step if the upgrade was finished. A host's earlier
    step runs again, which is harmless; skipping it forever could not be repaired.
    """
    if marker.finished is not None:
        return marker.finished
    if marker.state is UpgradeState.DONE:
        return tuple(dict.fromkeys((DATABASE, DELIVERIES, marker.step)))
    own = (DATABASE, DELIVERIES)
    return own[: own.index(marker.step)] if marker.step in own else own


def remaining_steps(steps: Sequence[str], marker: UpgradeMarker | None) -> Sequence[str]:
    """Return the remaining steps, the interrupted one first.

    Raises:
        UpgradeError: the interrupted step is not among ``steps``.
    """
    if marker is None:
        return steps
    finished = finished_steps(marker)
    left = [step for step in steps if step not in finished]
    if marker.state is UpgradeState.DONE or marker.step in finished:
        return left
    # Continuing without it would leave half of that step's rows without a tenant.
    if marker.step not in left:
        raise UpgradeError(
            f"the upgrade stopped in the step {marker.step!r}, which is not registered now; start "
            "it again with the same steps"
        )
    # A step that a newer version has put before it runs after it: finish the interrupted one first.
    left.remove(marker.step)
    return [marker.step, *left]


def begin(
    tenant_id: str, *, step: str, now: float, finished: tuple[str, ...] = ()
) -> UpgradeMarker:
    """Return the first marker with a tenant: ``pending -> running``."""
    return UpgradeMarker(
        state=UpgradeState.RUNNING,
        tenant_id=tenant_id,
        step=step,
        started_at=now,
        finished=finished,
    )


def nothing_to_move(
    marker: UpgradeMarker | None, steps: Sequence[str], *, now: float
) -> UpgradeMarker:
    """Return the marker of a host that has nothing to move: ``done``, without a tenant."""
    return UpgradeMarker(
        state=UpgradeState.DONE,
        tenant_id=None,
        step=steps[-1],
        started_at=now if marker is None else marker.started_at,
        finished_at=now,
        finished=tuple(dict.fromkeys((*(finished_steps(marker) if marker else ()), *steps))),
    )


def enter(marker: UpgradeMarker, step: str) -> UpgradeMarker:
    """Return the marker at the start of ``step``; an interrupted ``step`` keeps its position."""
    # Interrupted in this step: continue at its position.
    if marker.step == step and marker.state is UpgradeState.RUNNING:
        return marker
    return msgspec.structs.replace(
        marker, state=UpgradeState.RUNNING, step=step, position=None, finished_at=None
    )


def leave(marker: UpgradeMarker) -> UpgradeMarker:
    """Return the marker after the end of its step."""
    finished = tuple(dict.fromkeys((*finished_steps(marker), marker.step)))
    return msgspec.structs.replace(marker, position=None, finished=finished)


def finish(marker: UpgradeMarker, *, now: float) -> UpgradeMarker:
    """Return the marker of a finished upgrade: ``running -> done``."""
    return msgspec.structs.replace(marker, state=UpgradeState.DONE, position=None, finished_at=now)


@attrs.frozen
class KnownOrganizations:
    """The organizations that the deliveries up to ``after`` name, in their order of arrival."""

    after: int = 0
    seen: tuple[str, ...] = ()

    @classmethod
    def at(cls, position: str | None) -> "KnownOrganizations":
        """Read a :attr:`position`."""
        if position is None:
            return cls()
        after, seen = json.loads(position)
        return cls(after, tuple(seen))

    @property
    def position(self) -> str:
        """Return the text stored in the marker."""
        return json.dumps([self.after, self.seen])

    @property
    def only(self) -> str | None:
        """Return the organization if there is exactly one."""
        return self.seen[0] if len(self.seen) == 1 else None

    def with_next(self, after: int, organization: str | None) -> "KnownOrganizations":
        """Return the record with one more delivery and the organization that it names."""
        if organization is None or organization in self.seen:
            return KnownOrganizations(after, self.seen)
        return KnownOrganizations(after, (*self.seen, organization))


@attrs.frozen
class UpgradeProgress:
    """The progress of a step: ``done`` of ``total`` in ``unit``, counted from this run's start."""

    step: str
    done: int
    total: int
    unit: str = "rows"


Report = Callable[[UpgradeProgress], None]


@attrs.frozen(kw_only=True)
class PlannedStep:
    """The work of a remaining step: its rows, and a remark for people."""

    step: str
    rows: int
    remark: str = ""


@attrs.frozen(kw_only=True)
class UpgradePlan:
    """The work of a run that would begin now; planning changes nothing.

    ``tenant`` describes the tenant that gets the data, ``state`` the progress of the upgrade.
    """

    state: UpgradeState
    tenant: str | None
    steps: Sequence[PlannedStep]


@attrs.frozen(kw_only=True)
class UpgradeResult:
    """The result of a run.

    ``done`` counts the work of each step in this run: pages of the copied database, rows of every
    other step. ``already_done``: the upgrade had finished before. ``seconds`` is the duration of
    this run. ``tenant_id`` is None if there was nothing to move. ``organizations`` are those of the
    deliveries if there are several, in which case the tenant got none.
    """

    tenant_id: str | None
    done: Mapping[str, int]
    seconds: float
    already_done: bool = False
    organizations: Sequence[str] = ()


class SqliteTenantIds:
    """An :class:`~UpgradeStep` over one table of a SQLite file.

    Args:
        file: the database; it exists.
        table: a table with row ids (not ``WITHOUT ROWID``).
        column: its column for the tenant's id; only rows where it is NULL are changed.
        batch_rows: rows per transaction; 1 or more.

    No other copy of SQLite (the standard library's ``sqlite3``) may have the file open in this
    process. On cancellation, the current batch is finished first.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        table: str,
        *,
        column: str = "tenant_id",
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        # The marker keeps it, so it must be the same at every start: the directory may be mounted
        # elsewhere then, and is omitted.
        self.name: str = f"{Path(file).stem}.{table}.{column}"
        self._file = Path(file)
        self._table = _quoted(table)
        self._column = _quoted(column)
        self._batch_rows = batch_rows

    async def count(self) -> int:
        """Return how many rows have no tenant."""
        return await run_in_thread(self._count)

    async def run_batch(self, tenant: Tenant, position: str | None) -> StepBatch:
        """Fill the next rows; ``position`` is the last row id that was read.

        Raises:
            UpgradeError: the file cannot be written, or has no such table or column.
        """
        return await run_in_thread(self._fill, tenant.id, position)

    def _count(self) -> int:
        # S608: both names are quoted above. The column is qualified by its table: SQLite reads a
        # quoted name that is not a column as text, which is never NULL, so a misspelt column would
        # count as finished.
        column = f"{self._table}.{self._column}"
        query = f"SELECT count(*) FROM {self._table} WHERE {column} IS NULL"
        with _Opened(self._file) as connection:
            return int(connection.execute(query).get)

    def _fill(self, tenant_id: str, position: str | None) -> StepBatch:
        end_of_batch = (
            f"SELECT max(rowid), count(*) FROM (SELECT rowid FROM {self._table} "
            "WHERE rowid > ? ORDER BY rowid LIMIT ?)"
        )
        fill = (
            f"UPDATE {self._table} SET {self._column} = ? "
            f"WHERE rowid > ? AND rowid <= ? AND {self._column} IS NULL"
        )
        # Row ids may be negative: a host can have set them itself.
        after = -(2**63) if position is None else int(position)
        with _Opened(self._file) as connection:
            # The lock at the beginning: a read that became a write could meet SQLITE_BUSY, which no
            # waiting resolves.
            connection.execute("BEGIN IMMEDIATE")
            end, read_rows = connection.execute(end_of_batch, (after, self._batch_rows)).get
            if end is None:
                return StepBatch(0, position, last=True)
            connection.execute(fill, (tenant_id, after, end))
            # The end is by row id and not by the number of changed rows, so that a stretch in which
            # all have a tenant already is passed in one batch.
            changed = connection.changes()
            connection.execute("COMMIT")
            return StepBatch(changed, str(end), last=read_rows < self._batch_rows)


class _Opened:
    """A connection for one batch; closing it rolls back an uncommitted batch."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: apsw.Connection | None = None

    def __enter__(self) -> apsw.Connection:
        try:
            connection = open_database(self._file, flags=apsw.SQLITE_OPEN_READWRITE)
        except apsw.Error as error:
            raise self._error(error) from error
        connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
        self._connection = connection
        return connection

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if self._connection is not None:
            self._connection.close()
        if isinstance(error, apsw.Error):
            raise self._error(error) from error

    def _error(self, error: apsw.Error) -> UpgradeError:
        return UpgradeError(f"the tenant ids in {self._file} cannot be filled: {error}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


#: The actor in the audit row of the tenant that the upgrade adds.
ACTOR = "upgrade"


class DefaultTenantFinder:
    """Finds or adds the default tenant as the settings choose it.

    It checks before it adds, so that an upgrade that cannot succeed leaves no trace.
    """

    def __init__(self, store: "TenantStore", tenants: TenantService) -> None:
        self._store = store
        self._tenants = tenants

    async def known(self, chosen: NewTenant | HostTenant) -> Tenant | None:
        """Return the tenant if it exists and the host need not be called, otherwise None.

        Raises:
            DefaultTenantError: it exists and is not active.
        """
        # The host's resolver may add the tenant, and this method must not.
        if isinstance(chosen, HostTenant):
            await trio.lowlevel.checkpoint()
            return None
        found = await self._store.find(chosen.identifier)
        return None if found is None else _require_active(found)

    async def resolve(self, chosen: NewTenant | HostTenant) -> Tenant:
        """Add the tenant, or call the host's resolver.

        Raises:
            DefaultTenantError: the host's resolver failed, or its answer cannot be used.
        """
        if isinstance(chosen, NewTenant):
            return await self._tenants.add(
                chosen.identifier,
                name=chosen.name,
                reason="upgrade from a single tenant",
                actor=ACTOR,
            )
        try:
            # The host's code may return anything, so its type is checked.
            answer = cast("object", await chosen.resolver.resolve(self._tenants))
            if not isinstance(answer, str | Tenant):
                raise TypeError(f"it returned {answer!r}, which is not a tenant")
            return _require_active(await self._tenants.get(answer))
        except DefaultTenantError:
            raise
        except Exception as error:  # the host's own code may raise anything
            raise DefaultTenantError(
                f"the host's resolver of the default tenant failed: {type(error).__name__}: "
                f"{error}; it must return a tenant that exists and is active"
            ) from error

    async def stored(self, tenant_id: str) -> Tenant:
        """Return the tenant of the marker.

        Raises:
            DefaultTenantError: the tenant was purged.
        """
        found = await self._store.get(tenant_id)
        if found is None:
            raise DefaultTenantError(
                f"the default tenant {tenant_id} was purged, so it cannot take the data that a "
                "step of the upgrade would move: start without that step"
            )
        return found

    async def give_organization(self, tenant: Tenant, organization_id: str) -> None:
        """Give the tenant, which has none, its organization.

        Raises:
            TenantExistsError: another tenant has the organization.
            TenantConflictError: someone else has changed the tenant; the step can be repeated.
            InvalidTenantError: it cannot be an organization's id.
        """
        await self._tenants.change(
            tenant,
            organization_id=organization_id,
            actor=ACTOR,
            # An operator may set the organization at the same time; theirs takes precedence.
            expected_version=tenant.version,
        )

    async def describe_stored(self, tenant_id: str) -> str:
        """Describe the tenant in words."""
        found = await self._store.get(tenant_id)
        return f"{tenant_id} (purged)" if found is None else _shown(found)

    async def describe(self, chosen: NewTenant | HostTenant) -> str:
        """Describe the future tenant in words, without calling the host or changing anything."""
        known = await self.known(chosen)
        if known is not None:
            return _shown(known)
        if isinstance(chosen, NewTenant):
            return f"{chosen.identifier} (will be created)"
        return "chosen by the host's resolver (not called in a dry run)"


def _require_active(tenant: Tenant) -> Tenant:
    if tenant.is_active:
        return tenant
    raise DefaultTenantError(
        f"the default tenant {tenant.identifier!r} is {tenant.status}: reactivate it ('tenant "
        f"reactivate {tenant.identifier}'), or choose another one; nothing was changed"
    )


def _shown(tenant: Tenant) -> str:
    return f"{tenant.identifier} ({tenant.id})"
