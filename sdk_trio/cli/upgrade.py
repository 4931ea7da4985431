"""``upgrade``: the one-time upgrade from a single tenant, in a maintenance window."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from .parse import REFERENCE, add_format, describing

if not describing():
    import trio

    from ..base import logs
    from ..base.private_files import keep_files_private
    from ..config import Settings
    from ..storage.data_directory import lock_data_directory
    from ..tenants.service import TenantService
    from ..tenants.upgrade import (
        DATABASE,
        HostUpgrade,
        Quiescence,
        Report,
        UpgradePlan,
        UpgradeProgress,
        UpgradeResult,
    )
    from ..tenants.upgrade_run import Upgrader
    from .application import import_part
    from .settings import load
    from .store import open_store, require_tenants
    from .terminal import ByteProgress, print_json, print_rows, say

COLUMNS = ("step", "rows", "remark")


def upgrade_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``upgrade``."""
    parser.add_argument("--dry-run", action="store_true", help="show the planned steps")
    parser.add_argument(
        "--host",
        metavar=REFERENCE,
        help="the application's HostUpgrade: its resolver of the default tenant, its own steps",
    )
    add_format(parser)


def run_upgrade(arguments: Namespace) -> int:
    """Run the remaining steps of the upgrade, or print them with ``--dry-run``.

    Raises:
        TenantsDisabledError: ``MultiTenant:Enabled`` is false.
        StoreLockedError: a runtime works on the data directory.
        UpgradeError: it could not be finished; the next run continues it.
    """
    keep_files_private()
    settings = load(arguments)
    require_tenants(settings)
    # Without --host the application has no steps, and the settings choose the default tenant.
    host = HostUpgrade()
    if arguments.host:
        host = import_part("--host", arguments.host, HostUpgrade, example="app:upgrade")
    # The command's final error says why the upgrade stopped; the log would repeat it.
    logs.configure(level="Error", format=settings.logging.format)
    as_json = arguments.format == "json"
    if arguments.dry_run:
        _print_plan(trio.run(_plan, settings, host), as_json=as_json)
        return 0
    quiescence = Quiescence()
    with _quiet(settings, quiescence), _shown_progress() as report:
        result = trio.run(_run, settings, host, quiescence, report)
    _print_result(result, as_json=as_json)
    return 0


@contextmanager
def _quiet(settings: Settings, quiescence: Quiescence) -> Iterator[None]:
    """Hold the lock of the data directory, which proves that no other process uses it."""
    if not settings.multi_tenant.single_tenant_upgrade.require_graceful_quiescence:
        yield
        return
    # The lock proves that no receiver accepts deliveries meanwhile, which could end up in the old
    # store.
    with lock_data_directory(settings.storage.path):
        quiescence.signal("the data directory is locked for the upgrade")
        yield


async def _plan(settings: Settings, host: HostUpgrade) -> UpgradePlan:
    async with open_store(settings) as store:
        tenants = TenantService(settings, store.tenants)
        return await Upgrader(settings, store, tenants, quiescence=Quiescence(), host=host).plan()


async def _run(
    settings: Settings, host: HostUpgrade, quiescence: Quiescence, report: Report
) -> UpgradeResult:
    async with open_store(settings) as store:
        tenants = TenantService(settings, store.tenants)
        upgrader = Upgrader(
            settings, store, tenants, quiescence=quiescence, host=host, report=report
        )
        return await upgrader.run()


# -- output --------------------------------------------------------------------------------------


@contextmanager
def _shown_progress() -> Iterator[Report]:
    """Show the step on a terminal's standard error; without a terminal do nothing."""
    line = ByteProgress()

    def report(progress: UpgradeProgress) -> None:
        line.show(f"{progress.step}: {progress.done} of {progress.total} {progress.unit}", 0)

    try:
        yield report
    finally:
        line.end()


def _print_plan(plan: UpgradePlan, *, as_json: bool) -> None:
    rows = [{"step": s.step, "rows": s.rows, "remark": s.remark or None} for s in plan.steps]
    if as_json:
        print_json({"state": str(plan.state), "tenant": plan.tenant, "steps": rows})
        return
    print_rows(rows, COLUMNS, as_json=False)
    if plan.steps:
        say(f"the upgrade is {plan.state}; its rows would go to the tenant {plan.tenant}")
        say("nothing was changed")
    elif plan.tenant is None:
        say(f"the upgrade is {plan.state}; there is nothing to move, so no tenant is needed")
    else:
        say(f"the upgrade is {plan.state}; the default tenant is {plan.tenant}")


def _print_result(result: UpgradeResult, *, as_json: bool) -> None:
    rows = [
        # SQLite's backup counts pages; rows are known only for tables.
        {"step": step, "done": count, "unit": "pages" if step == DATABASE else "rows"}
        for step, count in result.done.items()
    ]
    if as_json:
        print_json(
            {
                "state": "done",
                "already_done": result.already_done,
                "tenant_id": result.tenant_id,
                "organizations": list(result.organizations),
                "seconds": round(result.seconds, 3),
                "steps": rows,
            }
        )
        return
    tenant = result.tenant_id or "not needed: nothing had to be moved"
    if result.already_done:
        say(f"the upgrade was done already; the default tenant is {tenant}")
        return
    print_rows(rows, ("step", "done", "unit"), as_json=False)
    say(f"the upgrade took {result.seconds:.1f} s; the default tenant is {tenant}")
    if result.organizations:
        say(
            "the tenant has no organization, because its deliveries name several: "
            f"{', '.join(result.organizations)}; until it gets one, it receives no later "
            "deliveries"
        )
    if DATABASE in result.done:
        say("the old database is still there: remove it when you no longer need it")
