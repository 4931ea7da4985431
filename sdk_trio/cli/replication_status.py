"""``replication status``: the state of each tenant's replication, the worst first."""

import uuid
from argparse import Namespace
from collections.abc import Collection

import trio

from ..config import Settings
from ..errors import EXIT_FAILURE, EXIT_UNAVAILABLE
from ..replication.control_socket import control_socket_path
from ..replication.database_finder import find_databases
from ..replication.health import DatabaseHealth, HealthState, ReplicationHealth
from ..replication.health_checker import HealthChecker
from ..replication.lag_surveyor import LagSurveyor
from ..storage import open_store
from ..storage.tenant_records import TenantStatus
from ..tenants import TenantService
from ..tenants.database_opener import databases_directory
from .moments import moment_text
from .printer import Row, print_rows, say
from .replica_chooser import name_unset_variables
from .replication_run import require_replication
from .settings_reader import load
from .upgrade import require_tenants

COLUMNS = ("identifier", "state", "lag", "last_sync", "reason")

_PAGE = 500

#: How long to watch a replicator without a socket for reads of the databases, in seconds; it reads
#: each of them once a second.
_READING_SECONDS = 10.0

_LOOK_AGAIN_SECONDS = 0.5

_NOBODY = (
    "no replicator runs on this data directory, or this user may not ask it: start the daemon with "
    "Supervise, or 'replication run'; compare Sdk:Storage:Path and Sdk:MultiTenant:FileDb:Directory"
)


def show_status(arguments: Namespace) -> int:
    """Print the state of each tenant's database; 0 if all are healthy, 69 without an answer.

    Raises:
        SdkError: from the settings, or the store cannot be read.
    """
    settings = require_replication(load(arguments))
    require_tenants(settings)
    supervised = settings.multi_tenant.file_db.replication.supervise
    if not supervised:
        name_unset_variables(settings)
    health, identifiers = trio.run(_look, settings)
    # For a supervised replicator the daemon has the keys; this shell need not have them.
    if supervised and health.state is not HealthState.HEALTHY:
        name_unset_variables(settings)
    as_json = arguments.format == "json"
    rows = [_row(each, identifiers[each.path], as_json=as_json) for each in health.databases]
    print_rows(rows, COLUMNS, as_json=as_json)
    if not settings.multi_tenant.file_db.replication.health_check_enabled:
        say("HealthCheckEnabled is false: nobody looks at this but you")
    say(f"{health.state.value}: {health.reason}")
    if health.state is HealthState.HEALTHY:
        return 0
    if not health.reachable:
        say(_NOBODY)
    return EXIT_FAILURE if health.reachable else EXIT_UNAVAILABLE


async def _look(settings: Settings) -> tuple[ReplicationHealth, dict[str, str]]:
    directory = databases_directory(settings).absolute()
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        service = TenantService(settings, store.tenants)
        files = await find_databases(service, directory)
        identifiers = await _identifiers(service)

    async def wanted() -> Collection[str]:
        await trio.lowlevel.checkpoint()
        return [file.path for file in files]

    replication = settings.multi_tenant.file_db.replication
    surveyor = None if replication.supervise else LagSurveyor(settings)
    checker = HealthChecker(
        replication, control_socket_path(str(directory)), wanted=wanted, surveyor=surveyor
    )
    health = await checker.check(even_if_disabled=True)
    end = trio.current_time() + _READING_SECONDS
    while surveyor and surveyor.book.waits_for_reading() and trio.current_time() < end:
        await trio.sleep(_LOOK_AGAIN_SECONDS)
        health = await checker.check(even_if_disabled=True)
    return health, {file.path: identifiers[file.tenant_id] for file in files}


async def _identifiers(tenants: TenantService) -> dict[str, str]:
    """Return the identifier of each active tenant by its id."""
    found: dict[str, str] = {}
    after = ""
    while True:
        page = await tenants.list(status=TenantStatus.ACTIVE, after=after, limit=_PAGE)
        found |= {tenant.id: tenant.identifier for tenant in page}
        if len(page) < _PAGE:
            return found
        after = page[-1].identifier


def _row(health: DatabaseHealth, identifier: str, *, as_json: bool) -> Row:
    row = {"identifier": identifier, "state": health.state.value, "reason": health.reason or None}
    if as_json:
        return {
            **row,
            "path": health.path,
            "lag_seconds": health.lag_seconds,
            "last_sync_at": health.last_sync_at,
        }
    lag = None if health.lag_seconds is None else f"{health.lag_seconds:.1f} s"
    return {**row, "lag": lag, "last_sync": moment_text(health.last_sync_at)}
