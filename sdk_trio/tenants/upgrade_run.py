"""Run the upgrade from a single tenant; ``upgrade.py`` has its steps and their order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import filelock
import msgspec
import trio

from ..base import term
from ..base.clock import wall
from ..base.executor import call_loop, check_cancelled, run_in_thread
from ..base.logs import get_logger
from ..base.private_files import create_data_directory
from ..config import Settings
from ..config.fields import DefaultTenantStrategy
from ..errors import (
    DefaultTenantError,
    NotQuiescentError,
    SdkError,
    SourceDatabaseError,
    TenantExistsError,
    UpgradeError,
    UpgradeInProgressError,
    UpgradeTimedOutError,
)
from ..events import organization_of, plain_envelope
from ..records.tenants import Tenant
from ..records.upgrades import UpgradeMarker, UpgradeState
from ..storage.ports import Store
from . import upgrade
from .database_copy import copy_database, count_source, install, refuse_existing, remove_database
from .databases import database_path, databases_directory
from .identity import is_organization_id
from .service import TenantService
from .upgrade import (
    DATABASE,
    DELIVERIES,
    HOST_PREFIX,
    KEY,
    MOST_ORGANIZATIONS,
    ORGANIZATION,
    DefaultTenantFinder,
    HostTenant,
    HostUpgrade,
    KnownOrganizations,
    NewTenant,
    PlannedStep,
    Quiescence,
    Report,
    StepBatch,
    UpgradePlan,
    UpgradeProgress,
    UpgradeResult,
    UpgradeStep,
)

T = TypeVar("T")

_log = get_logger("tenants")

#: The number of deliveries that get their tenant in one transaction: some milliseconds of the
#: store's writer.
BATCH_DELIVERIES = 1000

#: The number of bodies that are read at once to find their organizations: 64 of the largest are 64
#: MiB.
BATCH_BODIES = 64

#: The number of these batches after which the position is stored.
_BATCHES_A_POSITION = 50


def _ignore(_progress: UpgradeProgress) -> None:
    """Ignore the progress."""


class Upgrader:
    """Moves the data of a single-tenant host to the default tenant, once.

    Args:
        settings: validated settings; ``multi_tenant`` and ``storage.path`` are used.
        store: the open store.
        tenants: the tenants of that store.
        quiescence: the host's signal; it counts while ``RequireGracefulQuiescence`` is true.
        host: the host's resolver and its own steps.
        report: called with the progress, often, in Trio's thread.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        tenants: TenantService,
        *,
        quiescence: Quiescence,
        host: HostUpgrade | None = None,
        report: Report = _ignore,
        clock: Callable[[], float] = wall,
    ) -> None:
        self._options = settings.multi_tenant.single_tenant_upgrade
        self._directory = databases_directory(settings)
        self._source_path = upgrade.source_database(settings)
        self._partial = self._directory / upgrade.PARTIAL_NAME
        self._store = store
        self._tenants = tenants
        self._finder = DefaultTenantFinder(store.tenants, tenants)
        self._quiescence = quiescence
        self._host = host or HostUpgrade()
        self._report = report
        self._clock = clock
        # The copy and the checks work on the same files, one at a time; a separate limiter leaves
        # the default one to deliveries.
        self._one_thread = trio.CapacityLimiter(1)
        #: The current step, or None. Readable from any thread.
        self.step: str | None = None

    async def run_at_start(self) -> UpgradeResult | None:
        """Run the remaining steps at a multi-tenant start, as :meth:`run` does.

        If ``EnableAutomaticUpgrade`` is false, only log a warning with the pending steps, and
        return None.
        """
        if self._options.enable_automatic_upgrade:
            return await self.run()
        marker = await self._store.upgrade.marker()
        left = upgrade.remaining_steps(upgrade.step_names(self._host.steps), marker)
        if left:
            _log.warning(
                "upgrade.pending",
                steps=list(left),
                hint=f"{KEY}:EnableAutomaticUpgrade is false: run 'sdk-trio upgrade' in a "
                "maintenance window",
            )
        return None

    async def run(self) -> UpgradeResult:
        """Run the remaining steps of the upgrade; do nothing when all of them are done.

        Of several hosts on one store, one runs the steps and the others wait. If it dies, or stalls
        for longer than its lease, another one continues.

        Raises:
            NotQuiescentError: the host has not signalled quiescence, or has withdrawn it.
            NotSupportedError: the strategy is FirstUserOrganization.
            DefaultTenantError: no default tenant can be resolved.
            SourceDatabaseError: the single-tenant database cannot be copied; nothing was changed.
            UpgradeInProgressError: another process of this machine is running it, or another host
                has been running it for ``MaxRunDuration``.
            UpgradeTimedOutError: ``MaxRunDuration`` has passed; the position is saved.
            UpgradeError: a step failed; the position is saved.
            StorageError: the store failed; the position is saved.

        On cancellation, the batch in progress is finished and the position is saved; a copy in
        progress is deleted.
        """
        names = upgrade.step_names(self._host.steps)
        marker = await self._store.upgrade.marker()
        if (done := _done_before(names, marker)) is not None:
            return done
        chosen = self._choose(marker)
        run = _Run(trio.current_time())
        with trio.move_on_after(self._options.max_run_duration.total_seconds()):
            return await self._run_exclusively(run, chosen, names)
        if run.waits:
            raise UpgradeInProgressError(
                f"another host has been running the upgrade for {KEY}:MaxRunDuration "
                f"({self._options.max_run_duration}): check its log, then start again"
            )
        # A cancelled batch is finished anyway, so the position is read from the store.
        run.marker = await self._store.upgrade.marker()
        raise self._timed_out(run)

    async def _run_exclusively(
        self, run: "_Run", chosen: NewTenant | HostTenant | None, names: tuple[str, ...]
    ) -> UpgradeResult:
        """Run the upgrade while this host has its lease; wait while another one has it."""
        store = self._store.upgrade
        try:
            while True:
                asked = trio.current_time()
                # A failing store ends the start of this host; a waiting host retries.
                number = await (
                    term.request_term(store) if run.waits else store.lead(seconds=term.TERM_SECONDS)
                )
                if number:
                    run.waits = False
                    result = await self._run_term(run, number, asked, chosen, names)
                    if result is not None:
                        return result
                    _log.warning(
                        "upgrade.lease_lost", **run.place, hint="another host may continue it"
                    )
                elif not run.waits:
                    _log.info("upgrade.waiting", hint="another host runs the upgrade")
                run.waits = True
                await trio.sleep(term.ASK_SECONDS)
        finally:
            # Also if it waited: it may be cancelled after the store has granted it the lease.
            with trio.move_on_after(term.LET_GO_SECONDS, shield=True):
                await term.request_term(store, seconds=0.0)

    async def _run_term(
        self,
        run: "_Run",
        number: int,
        asked: float,
        chosen: NewTenant | HostTenant | None,
        names: tuple[str, ...],
    ) -> UpgradeResult | None:
        """Run the remaining steps in one term of the lease; return None if the term ends before."""
        store = self._store.upgrade
        result: UpgradeResult | None = None
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:

            async def upgrade() -> None:
                nonlocal result, failure
                try:
                    with store.fenced(number), self._lock():
                        result = await self._run(run, chosen, names)
                except term.TermEndedError:
                    pass  # another host continues it
                except Exception as error:  # raised below, outside of the nursery
                    failure = error
                except BaseException as error:
                    _log_interrupted(run, error)
                    raise
                finally:
                    self.step = None
                nursery.cancel_scope.cancel()

            nursery.start_soon(upgrade)
            await term.keep_term(store, number, asked)
            nursery.cancel_scope.cancel()
        if failure is not None:
            _log_interrupted(run, failure)
            raise failure
        return result

    async def plan(self) -> UpgradePlan:
        """Return the work that :meth:`run` would do now, with counts; change nothing.

        Raises:
            SdkError: the error with which :meth:`run` would refuse, except for quiescence.
        """
        marker = await self._store.upgrade.marker()
        names = upgrade.step_names(self._host.steps)
        left = upgrade.remaining_steps(names, marker)
        chosen = self._choose(marker) if left else None
        steps = []
        for name in left:
            planned = await self._plan_step(name, marker)
            if planned is not None:
                steps.append(planned)
        state = UpgradeState.PENDING if marker is None else marker.state
        if marker is not None and marker.tenant_id is not None:
            tenant = await self._finder.describe_stored(marker.tenant_id)
            return UpgradePlan(state=state, tenant=tenant, steps=steps)
        if chosen is None or not await self._has_something_to_move(left):
            return UpgradePlan(state=state, tenant=None, steps=())
        return UpgradePlan(state=state, tenant=await self._finder.describe(chosen), steps=steps)

    def _choose(self, marker: UpgradeMarker | None) -> NewTenant | HostTenant | None:
        """Return how the tenant is resolved; None if it has already been resolved."""
        if marker is not None and marker.tenant_id and marker.state is UpgradeState.DONE:
            return None
        return upgrade.choose_tenant(self._options, self._host.resolver)

    # -- the run ---------------------------------------------------------------------------------

    async def _run(
        self, run: "_Run", chosen: NewTenant | HostTenant | None, names: tuple[str, ...]
    ) -> UpgradeResult:
        # Read again in the term, because another host may have finished the upgrade since.
        marker = await self._store.upgrade.marker()
        if (done := _done_before(names, marker)) is not None:
            return done
        run.marker = marker
        left = upgrade.remaining_steps(names, marker)
        if marker is None or marker.tenant_id is None:
            if chosen is None or not await self._has_something_to_move(left):
                return await self._end_with_nothing(run, marker, names)
            # Checked only if there is something to move: a new host need not be idle.
            self._require_quiet()
            marker = await self._begin(run, chosen, marker, left)
            left = upgrade.remaining_steps(names, marker)
        elif left:
            self._require_quiet()
            _log.info("upgrade.resumed", step=left[0], position=marker.position)
        tenant = await self._finder.stored(marker.tenant_id or "")
        for name in left:
            # The step is stored before it starts, so that after a kill the next run finds its
            # position.
            entered = upgrade.enter(marker, name)
            if entered != marker:
                await self._store.upgrade.save(entered)
            run.marker = marker = entered
            marker = upgrade.leave(await self._run_step(run, name, tenant, marker))
            await self._store.upgrade.save(marker)
            run.marker = marker
        marker = upgrade.finish(marker, now=self._clock())
        await self._store.upgrade.save(marker)
        seconds = trio.current_time() - run.started
        _log.info(
            "upgrade.finished",
            tenant=tenant.identifier,
            tenant_id=tenant.id,
            done=run.done,
            seconds=round(seconds, 3),
        )
        return UpgradeResult(
            tenant_id=tenant.id, done=run.done, seconds=seconds, organizations=run.organizations
        )

    async def _has_something_to_move(self, left: Sequence[str]) -> bool:
        """Return whether a single-tenant host left data; without data no tenant is created."""
        if DATABASE in left and (self._source() is not None or self._partial.exists()):
            return True
        if DELIVERIES in left and await self._store.upgrade.count_unassigned():
            return True
        for name in left:
            if name.startswith(HOST_PREFIX):
                self.step = name
                step = self._host_step(name)
                with _step_errors(step):
                    if await step.count():
                        return True
        return False

    async def _end_with_nothing(
        self, run: "_Run", marker: UpgradeMarker | None, names: tuple[str, ...]
    ) -> UpgradeResult:
        done = upgrade.nothing_to_move(marker, names, now=self._clock())
        await self._store.upgrade.save(done)
        _log.info("upgrade.finished", tenant=None, tenant_id=None, done={})
        return UpgradeResult(tenant_id=None, done={}, seconds=trio.current_time() - run.started)

    async def _begin(
        self,
        run: "_Run",
        chosen: NewTenant | HostTenant,
        before: UpgradeMarker | None,
        left: Sequence[str],
    ) -> UpgradeMarker:
        """Copy the database, then resolve the tenant, then write the marker.

        The copy is complete and verified before anything is stored, so a database that cannot be
        copied leaves no trace (docs/adr/0010-single-tenant-upgrade.md).
        """
        self.step = DATABASE
        _log.info("upgrade.started", quiescence=self._quiescence.reason)
        source = self._source() if DATABASE in left else None
        known = await self._finder.known(chosen)
        if source is None:
            remove_database(self._partial)
        else:
            # An existing tenant may have a database; check that before making the copy, which takes
            # long.
            if known is not None:
                refuse_existing(database_path(self._directory, known.id))
            run.done[DATABASE] = await self._copy(source)
        try:
            tenant = known or await self._finder.resolve(chosen)
            if source is not None:
                refuse_existing(database_path(self._directory, tenant.id))
        except Exception:
            remove_database(self._partial)
            raise
        finished = upgrade.finished_steps(before) if before is not None else ()
        if source is None:
            finished = tuple(dict.fromkeys((*finished, DATABASE)))
        step = next(name for name in left if name not in finished)
        marker = upgrade.begin(tenant.id, step=step, now=self._clock(), finished=finished)
        await self._store.upgrade.save(marker)
        return marker

    async def _run_step(
        self, run: "_Run", name: str, tenant: Tenant, marker: UpgradeMarker
    ) -> UpgradeMarker:
        self.step = name
        if name == DATABASE:
            await self._install(tenant, run)
            return marker
        if name == DELIVERIES:
            return await self._assign(run, marker)
        if name == ORGANIZATION:
            return await self._find_organization(run, tenant, marker)
        return await self._run_host_step(run, self._host_step(name), tenant, marker)

    async def _install(self, tenant: Tenant, run: "_Run") -> None:
        target = database_path(self._directory, tenant.id)
        if not self._partial.exists() and not target.exists():
            # The copy was removed between two runs. The source is still there, so it is copied
            # again.
            source = self._source()
            if source is None:
                raise SourceDatabaseError(
                    f"the copy {self._partial} and the single-tenant database are missing; "
                    "restore the database, or start the host that has it"
                )
            run.done[DATABASE] = await self._copy(source)
        await self._in_thread(install, self._partial, target)

    async def _assign(self, run: "_Run", marker: UpgradeMarker) -> UpgradeMarker:
        total, done, last = await self._store.upgrade.count_unassigned(), 0, False
        while not last:
            self._require_quiet()
            batch = await self._store.upgrade.assign_batch(marker, limit=BATCH_DELIVERIES)
            run.marker = marker = batch.marker
            last = batch.last
            done += batch.rows
            run.done[DELIVERIES] = done
            self._report(UpgradeProgress(DELIVERIES, done, total))
        return marker

    async def _find_organization(
        self, run: "_Run", tenant: Tenant, marker: UpgradeMarker
    ) -> UpgradeMarker:
        if not self._wants_organization(tenant):
            return marker
        named = self._options.literal_default_tenant_organization_id
        if named is not None:
            try:
                await self._finder.give_organization(tenant, named)
            except TenantExistsError as error:
                raise DefaultTenantError(
                    f"{KEY}:LiteralDefaultTenantOrganizationId: {error}"
                ) from error
            run.done[ORGANIZATION] = 1
            return marker
        found = KnownOrganizations.at(marker.position)
        batches = 0
        while True:
            further = await self._read_more(found, tenant.id)
            if further is None:
                break
            found, batches = further, batches + 1
            # Reading changes nothing and can be repeated; a commit after each batch would cost more
            # than the reading.
            if batches % _BATCHES_A_POSITION == 0:
                marker = msgspec.structs.replace(marker, position=found.position)
                await self._store.upgrade.save(marker)
                run.marker = marker
        if found.only is not None:
            try:
                await self._finder.give_organization(tenant, found.only)
            except TenantExistsError as error:
                _log.warning("upgrade.organization_taken", error=str(error))
            else:
                run.done[ORGANIZATION] = 1
        elif found.seen:
            run.organizations = found.seen
            _log.warning(
                "upgrade.organization_unclear",
                tenant=tenant.identifier,
                organizations=list(found.seen),
                hint="the deliveries name several, so later ones find no default tenant: give it "
                "its own ('tenant set --organization-id')",
            )
        return marker

    async def _read_more(
        self, found: KnownOrganizations, tenant_id: str | None
    ) -> KnownOrganizations | None:
        """Read the next bodies; return None when none are left or enough is known."""
        if len(found.seen) >= MOST_ORGANIZATIONS:
            return None
        bodies = await self._store.upgrade.bodies(tenant_id, after=found.after, limit=BATCH_BODIES)
        for body in bodies:
            # A body that the fast reader refuses is skipped; other deliveries of the same
            # organization will name it.
            envelope = plain_envelope(body.raw)
            named = None if envelope is None else organization_of(body.type, envelope.data_raw)
            usable = named if named is not None and is_organization_id(named) else None
            found = found.with_next(body.sequence, usable)
        return found if bodies else None

    def _wants_organization(self, tenant: Tenant | None) -> bool:
        """Return whether the upgrade sets the organization; a host's resolver sets its own."""
        literal = self._options.default_tenant_strategy is DefaultTenantStrategy.LITERAL_DEFAULT
        return literal and (tenant is None or tenant.organization_id is None)

    async def _run_host_step(
        self, run: "_Run", step: UpgradeStep, tenant: Tenant, marker: UpgradeMarker
    ) -> UpgradeMarker:
        name = marker.step
        with _step_errors(step):
            total = await step.count()
        done, last = 0, False
        while not last:
            self._require_quiet()
            with _step_errors(step):
                batch = await step.run_batch(tenant, marker.position)
            if not isinstance(batch, StepBatch):
                raise UpgradeError(
                    f"the upgrade step {step.name!r} returned {type(batch).__name__} instead of a "
                    "StepBatch; the position is kept"
                )
            # A host's step that does not advance would run forever.
            if not batch.last and batch.position == marker.position:
                raise UpgradeError(
                    f"the upgrade step {step.name!r} does not move on from {batch.position!r}: a "
                    "batch that is not the last one must return another position"
                )
            last = batch.last
            done += batch.rows
            run.done[name] = done
            marker = msgspec.structs.replace(marker, position=batch.position)
            await self._store.upgrade.save(marker)
            run.marker = marker
            self._report(UpgradeProgress(name, done, total))
        return marker

    # -- the database -------------------------------------------------------------

    def _source(self) -> Path | None:
        """Return the single-tenant database, or None if there is none.

        Raises:
            SourceDatabaseError: the settings name one, and it does not exist.
        """
        source = self._source_path
        if source.exists():
            return source
        if self._options.source_database is None:
            return None
        raise SourceDatabaseError(
            f"{KEY}:SourceDatabase: there is no file {source.absolute()}; correct the path, or "
            "remove the key if there is no database to copy; nothing was changed"
        )

    async def _copy(self, source: Path) -> int:
        def progress(done: int, total: int) -> None:
            update = UpgradeProgress(DATABASE, done, total, unit="pages")
            call_loop(self._report, update)

        pause = check_cancelled
        return await self._in_thread(copy_database, source, self._partial, pause, progress)

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await run_in_thread(function, *arguments, limiter=self._one_thread)

    # -- planning --------------------------------------------------------------------------------

    async def _plan_organization(self, marker: UpgradeMarker | None) -> PlannedStep | None:
        tenant_id = None if marker is None else marker.tenant_id
        tenant = None if tenant_id is None else await self._finder.stored(tenant_id)
        if not self._wants_organization(tenant):
            return None
        named = self._options.literal_default_tenant_organization_id
        if named is not None:
            return PlannedStep(step=ORGANIZATION, rows=1, remark=named)
        found = KnownOrganizations()
        # While deliveries are still to be moved, those without a tenant are counted.
        moved = marker is not None and DELIVERIES in upgrade.finished_steps(marker)
        while (further := await self._read_more(found, tenant_id if moved else None)) is not None:
            found = further
        if found.only is not None:
            return PlannedStep(step=ORGANIZATION, rows=1, remark=found.only)
        remark = (
            f"none: the deliveries name {', '.join(found.seen)}" if found.seen else "none named"
        )
        return PlannedStep(step=ORGANIZATION, rows=0, remark=remark)

    async def _plan_step(self, name: str, marker: UpgradeMarker | None) -> PlannedStep | None:
        if name == ORGANIZATION:
            return await self._plan_organization(marker)
        if name == DELIVERIES:
            return PlannedStep(step=name, rows=await self._store.upgrade.count_unassigned())
        if name != DATABASE:
            step = self._host_step(name)
            with _step_errors(step):
                return PlannedStep(step=name, rows=await step.count())
        source = self._source()
        if source is None:
            return None
        counts = await self._in_thread(count_source, source, check_cancelled)
        remark = f"{source}: {counts.tables} tables, {counts.bytes} bytes"
        return PlannedStep(step=name, rows=counts.rows, remark=remark)

    # -- conditions ------------------------------------------------------------------------------

    def _host_step(self, name: str) -> UpgradeStep:
        return next(s for s in self._host.steps if f"{HOST_PREFIX}{s.name}" == name)

    def _require_quiet(self) -> None:
        if self._options.require_graceful_quiescence and self._quiescence.reason is None:
            raise NotQuiescentError(
                "the upgrade needs an idle host, and this host has not signalled quiescence: "
                f"{self._quiescence.remedy}, run 'sdk-trio upgrade' while the host is stopped, or "
                f"set {KEY}:RequireGracefulQuiescence to false; the position is kept"
            )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        directory = create_data_directory(self._directory)
        lock = filelock.FileLock(directory / upgrade.LOCK_NAME, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UpgradeInProgressError(
                f"another process runs the upgrade in {directory}: wait until it has finished, "
                "then start again"
            ) from None
        except OSError as error:
            raise UpgradeError(
                f"{directory} cannot be locked ({error.strerror}); make it writable for this user"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _timed_out(self, run: "_Run") -> UpgradeTimedOutError:
        return UpgradeTimedOutError(
            f"the upgrade did not finish within {KEY}:MaxRunDuration "
            f"({self._options.max_run_duration}); it is at {run.described}. Start again to "
            "continue from there, with a longer MaxRunDuration if it stopped while copying the "
            "database"
        )


@attrs.define
class _Run:
    """The work that one run has done so far."""

    started: float
    marker: UpgradeMarker | None = None
    done: dict[str, int] = attrs.Factory(dict)
    organizations: Sequence[str] = ()
    waits: bool = False

    @property
    def place(self) -> dict[str, str | None]:
        if self.marker is None:
            return {"step": DATABASE, "position": None}
        return {"step": self.marker.step, "position": self.marker.position}

    @property
    def described(self) -> str:
        position = self.place["position"]
        at = "its beginning" if position is None else f"position {position}"
        return f"the step {self.place['step']!r}, {at}"


def _done_before(names: Sequence[str], marker: UpgradeMarker | None) -> UpgradeResult | None:
    """Return the result of an upgrade that an earlier run finished; None if steps remain."""
    if marker is None or marker.state is not UpgradeState.DONE:
        return None
    if upgrade.remaining_steps(names, marker):
        return None
    return UpgradeResult(tenant_id=marker.tenant_id, done={}, seconds=0, already_done=True)


def _log_interrupted(run: _Run, error: BaseException) -> None:
    _log.warning("upgrade.interrupted", **run.place, cause=type(error).__name__)


@contextmanager
def _step_errors(step: UpgradeStep) -> Iterator[None]:
    """Add the step's name to its exceptions; errors worded for people stay unchanged."""
    try:
        yield
    except SdkError:
        raise
    except Exception as error:  # steps call the host's own code
        raise UpgradeError(
            f"the upgrade step {step.name!r} failed: {type(error).__name__}: {error}; the position "
            "is kept"
        ) from error
