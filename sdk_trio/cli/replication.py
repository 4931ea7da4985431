"""``replication``: run the replicator, show its state and configuration, verify the replicas."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import (
    EXIT_FAILURE,
    EXIT_UNAVAILABLE,
    OptionsValidationError,
    Problem,
    ReplicationError,
)
from .parse import add_format, describing

if not describing():
    import trio

    from ..base import logs
    from ..base.private_files import create_data_directory, keep_files_private
    from ..config import Settings, unmet_needs
    from ..config.table import USE_REPLICATION
    from ..replication.child import find_replicator
    from ..replication.control import control_socket_path
    from ..replication.health import DatabaseHealth, HealthState, ReplicationHealth
    from ..replication.health_check import HealthChecker, LagSurveyor
    from ..replication.manifest import ManifestWriter, TenantDatabaseFile, unset_variables
    from ..replication.replica import ReplicaReader
    from ..replication.running_replicator import hold_pid_file
    from ..replication.supervisor import Supervisor
    from ..replication.verification import Verification, Verifier
    from ..replication.verification_schedule import VerificationKeeper
    from ..replication.watch import find_databases, render_for
    from ..tenants.databases import databases_directory
    from ..tenants.service import TenantService
    from .run import begin_logs
    from .settings import load, read
    from .store import open_store, open_tenants, require_tenants
    from .terminal import Progress, Row, print_list, say

    _log = logs.get_logger("cli")

T = TypeVar("T")

#: Added to a signal's number, as in a shell: the exit status of a command that it ended.
_SIGNAL_BASE = 128


def open_reader(settings: Settings) -> ReplicaReader:
    """Return a reader of these settings' replicas.

    Raises:
        OptionsValidationError: replication is disabled, so its section was not checked.
        ReplicatorError: the binary is missing.
    """
    _require_replicated(settings)
    binary = find_replicator(settings.multi_tenant.file_db.replication)
    name_unset_variables(settings)
    # Pass the whole environment: a provider's client reads roles and profiles from other variables.
    return ReplicaReader(settings, binary=binary, environ=os.environ)


def name_unset_variables(settings: Settings) -> None:
    """Warn about unset variables for the target's keys; a machine's role may replace them."""
    for each in unset_variables(settings.multi_tenant.file_db.replication, os.environ):
        say(f"warning: {each}: set it, unless this machine has a role that may use the target")


def run_until_signal(work: Callable[[], Awaitable[T]]) -> tuple[int, T | None]:
    """Run ``work`` and return 0 and its result, or 128 + signal if a signal cancelled it.

    A command that receives TERM thus cleans up as it does for an interrupt.
    """

    async def run() -> tuple[int, T | None]:
        result: T | None = None
        status = 0

        async def end_at_signal(*, task_status: trio.TaskStatus[None]) -> None:
            nonlocal status
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *_HANGUP) as signals:
                task_status.started()
                async for number in signals:
                    # Cancelled, not killed, so that a restore removes its temporary files.
                    status = _SIGNAL_BASE + number
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            await nursery.start(end_at_signal)
            result = await work()
            nursery.cancel_scope.cancel()
        return status, result

    return trio.run(run)


_HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()


def render_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``replication render``."""
    parser.add_argument(
        "--output", metavar="F", help="write this file atomically, mode 0600 (default: print)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if the file (default: ConfigOutputPath) is not current",
    )


def render(arguments: Namespace) -> int:
    """Print the configuration, write it, or report whether the file is current.

    Raises:
        OptionsValidationError: ``UseReplication`` is false, so the section was not checked.
        TenantsDisabledError: there are no tenants.
        StorageError: the store cannot be read.
        ReplicationError: the file cannot be written, or the replicator would misread a path.
    """
    settings = load(arguments)
    _require_replicated(settings)
    require_tenants(settings)
    databases = trio.run(_databases, settings)
    try:
        text = render_for(settings, databases)
    except ValueError as error:
        raise ReplicationError(str(error)) from error
    # The exit status shows a deployment or a cron job whether the file is stale.
    if arguments.check:
        path = settings.multi_tenant.file_db.replication.config_output_path
        return _check(Path(arguments.output or path), text)
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    # The writer does not touch a current file, so that its watchers are not woken.
    written = ManifestWriter(Path(arguments.output)).write(text)
    say(f"{arguments.output} {'written' if written else 'is current'}: {_count(databases)}")
    return 0


def _check(file: Path, text: str) -> int:
    if ManifestWriter(file).is_current(text):
        say(f"{file} is current")
        return 0
    say(
        f"{file} is not current: 'replication render --output {file}' writes it; then reload or "
        "restart the replicator"
    )
    return EXIT_FAILURE


def _count(databases: list[TenantDatabaseFile]) -> str:
    return f"{len(databases)} database{'s' if len(databases) != 1 else ''}"


async def _databases(settings: Settings) -> list[TenantDatabaseFile]:
    async with open_tenants(settings) as tenants:
        return await find_databases(tenants, databases_directory(settings))


def run_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``replication run``."""
    parser.add_argument(
        "--pid-file",
        metavar="P",
        help="write the process id to this file, for SIGHUP (default: ReplicatorPidFilePath)",
    )


def run_replicator(arguments: Namespace) -> int:
    """Supervise the replicator until TERM or INT; return 0, or 128 + signal when forced.

    HUP makes it read the configuration again. The first TERM or INT lets it sync a last time; the
    second ends it at once.

    Raises:
        SdkError: it could not start.
    """
    keep_files_private()
    loaded = read(arguments)
    settings = require_replication(loaded.require())
    begin_logs(loaded)
    options = settings.multi_tenant.file_db.replication
    find_replicator(options)
    # Create it for this user only, before the replicator creates it with wider permissions.
    directory = create_data_directory(databases_directory(settings))
    supervisor = Supervisor(options, directory)
    path = arguments.pid_file or options.replicator_pid_file_path
    return trio.run(_serve, supervisor, path)


def require_replication(settings: Settings) -> Settings:
    """Return the settings if replication is enabled.

    Raises:
        OptionsValidationError: ``UseReplication`` is false, or tenants are disabled.
    """
    _require_replicated(settings)
    if unmet_needs(settings):
        raise OptionsValidationError(unmet_needs(settings))
    return settings


def _require_replicated(settings: Settings) -> None:
    if not settings.multi_tenant.file_db.replication.use_replication:
        raise OptionsValidationError(
            [Problem(USE_REPLICATION, "is false, so nothing is replicated: set it to true")]
        )


async def _serve(supervisor: Supervisor, pid_file: str) -> int:
    requests = _SignalRequests(supervisor)
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # The pid file is written before the configuration is first read, so that a process that
    # writes the configuration afterwards can signal this one.
    with trio.open_signal_receiver(*watched) as arriving, hold_pid_file(pid_file):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(requests.watch, arriving)
            await supervisor.run()
            nursery.cancel_scope.cancel()
    return 0 if requests.forced_by is None else 128 + requests.forced_by


class _SignalRequests:
    """Stop and reload requests that arrive as signals."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._stopped = False
        self.forced_by: int | None = None

    async def watch(self, arriving: AsyncIterator[int]) -> None:
        """Handle signals as they arrive, until cancelled."""
        async for number in arriving:
            if number == signal.SIGHUP:
                # Requests only: the supervisor reloads in its own task, one after the other.
                self._supervisor.request_reload()
            elif not self._stopped:
                self._stopped = True
                _log.info("replication.stopping", signal=signal.Signals(number).name)
                self._supervisor.stop()
            else:
                self.forced_by = number
                _log.warning("replication.forced", signal=signal.Signals(number).name)
                self._supervisor.force()


COLUMNS = ("identifier", "state", "lag_seconds", "last_sync_at", "reason")

#: The time for which a replicator without a socket is watched for reads of the databases, in
#: seconds. It reads each database once a second.
_READING_SECONDS = 10.0

_POLL_SECONDS = 0.5

_NO_REPLICATOR = (
    "no replicator runs on this data directory, or this user has no access: start the daemon with "
    "Supervise, or 'replication run'; compare Sdk:Storage:Path and Sdk:MultiTenant:FileDb:Directory"
)


def status_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``replication status``."""
    add_format(parser)


def show_status(arguments: Namespace) -> int:
    """Print each tenant database's state; return 0 if all are healthy, 69 without an answer.

    Raises:
        SdkError: the settings are invalid, or the store cannot be read.
    """
    settings = require_replication(load(arguments))
    require_tenants(settings)
    # Without supervision this command reads the replicas itself, with this shell's keys.
    supervised = settings.multi_tenant.file_db.replication.supervise
    if not supervised:
        name_unset_variables(settings)
    health, identifiers = trio.run(_health_now, settings)
    # For a supervised replicator the daemon has the keys; this shell need not have them.
    if supervised and health.state is not HealthState.HEALTHY:
        name_unset_variables(settings)
    print_list(
        arguments, [_row(each, identifiers[each.path]) for each in health.databases], COLUMNS
    )
    if not settings.multi_tenant.file_db.replication.health_check_enabled:
        say("HealthCheckEnabled is false: the runtime does not check replication")
    say(f"{health.state.value}: {health.reason}")
    if health.state is HealthState.HEALTHY:
        return 0
    if not health.reachable:
        say(_NO_REPLICATOR)
    return EXIT_FAILURE if health.reachable else EXIT_UNAVAILABLE


async def _health_now(settings: Settings) -> tuple[ReplicationHealth, dict[str, str]]:
    directory = databases_directory(settings).absolute()
    async with open_tenants(settings) as service:
        # The expected databases come from the tenants, not from the directory, so that a missing
        # one is noticed.
        names = {each.path: each.replica for each in await find_databases(service, directory)}

    async def wanted() -> Mapping[str, str]:
        await trio.lowlevel.checkpoint()
        return names

    replication = settings.multi_tenant.file_db.replication
    surveyor = None if replication.supervise else LagSurveyor(settings)
    checker = HealthChecker(
        replication, control_socket_path(str(directory)), wanted=wanted, surveyor=surveyor
    )
    health = await checker.check(even_if_disabled=True)
    # Without a socket, only its reads show that a replicator works: a single check may fall between
    # two reads.
    end = trio.current_time() + _READING_SECONDS
    while surveyor and surveyor.book.waits_for_reading() and trio.current_time() < end:
        await trio.sleep(_POLL_SECONDS)
        health = await checker.check(even_if_disabled=True)
    return health, {path: name.partition(".")[0] for path, name in names.items()}


def _row(health: DatabaseHealth, identifier: str) -> Row:
    return {
        "identifier": identifier,
        "state": health.state.value,
        "reason": health.reason or None,
        "path": health.path,
        "lag_seconds": health.lag_seconds,
        "last_sync_at": health.last_sync_at,
    }


VERIFICATION_COLUMNS = (
    "tenant",
    "result",
    "content",
    "as_of",
    "txid",
    "bytes",
    "seconds",
    "reason",
)


def verify_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``replication verify``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tenant", metavar="T", help="only this tenant, of any status")
    which.add_argument("--all", action="store_true", help="every active tenant (the default)")
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="accept replicas that do not reach back as far as before",
    )
    add_format(parser)


def verify(arguments: Namespace) -> int:
    """Verify one tenant's replica or those of all active tenants; return 1 if one is damaged.

    Raises:
        TenantsDisabledError: there are no tenants.
        UnknownTenantError: there is no such tenant.
        StoreLockedError: another verification runs.
        ReplicatorError: the binary is missing.
    """
    settings = load(arguments)
    require_tenants(settings)
    reader = open_reader(settings)
    # A tenant's row shows everything that its verification logs.
    logs.configure(level="Error", format=settings.logging.format)

    async def work() -> Sequence[Verification]:
        async with open_store(settings) as store:
            keeper = VerificationKeeper(Verifier(settings, reader), store)
            tenants = TenantService(settings, store.tenants)
            if arguments.tenant is not None:
                tenant = await tenants.get(arguments.tenant)
                return [await keeper.verify_one(tenant, accept_loss=arguments.accept_loss)]
            return await keeper.verify_active(
                tenants, accept_loss=arguments.accept_loss, report=_progress()
            )

    status, results = run_until_signal(work)
    if results is None:
        return status
    print_list(arguments, [_document(each) for each in results], VERIFICATION_COLUMNS)
    failed = sum(not each.ok for each in results)
    say(
        f"{failed} of {len(results)} replicas failed the verification"
        if failed
        else _summary(results)
    )
    return EXIT_FAILURE if failed else 0


def _summary(results: Sequence[Verification]) -> str:
    if not results:
        return "no active tenant"
    skipped = sum(each.skipped is not None for each in results)
    left = f", {skipped} without a database yet" if skipped else ""
    return f"{len(results) - skipped} verified{left}"


def _progress() -> Any:
    shown: list[Progress] = []

    def report(_result: Verification, _done: int, total: int) -> None:
        if not shown:
            # Created at the first result, because the number of tenants is known only then.
            shown.append(Progress("verified", total, quiet_below=2))
        shown[0].advance()

    return report


def _document(result: Verification) -> Row:
    return {
        "tenant": result.identifier,
        "tenant_id": result.tenant_id,
        # A tenant without a database is not a failure: there is nothing to lose.
        "result": ("skipped" if result.skipped else "good") if result.ok else "FAILED",
        "ok": result.ok,
        "problem": result.problem,
        "skipped": result.skipped,
        "reason": result.problem or result.skipped,
        "content": str(result.content),
        "txid": result.txid,
        "as_of": result.as_of,
        "begins_at": result.begins_at,
        "bytes": result.bytes,
        "seconds": result.seconds,
        "verified_at": result.verified_at,
    }
