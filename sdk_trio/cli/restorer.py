"""``replication restore``: a tenant's database out of its replica (contracts 7 and 9)."""

import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from .. import logs
from ..config import Settings
from ..errors import ReplicatorError, RestoreError
from ..replication.control_client import ControlClient
from ..replication.control_socket import control_socket_path
from ..replication.restorer import Report, Restored, RestoreProgress, Restorer
from ..storage.tenant_records import Tenant
from ..tenants.database_opener import database_path, databases_directory
from .moments import moment_text, parse_since
from .printer import ByteProgress, print_json, print_text, say
from .replica_chooser import find_tenant, open_reader, run_until_signal
from .settings_reader import load
from .usage import UsageError


def restore(arguments: Namespace) -> int:
    """Restore a tenant's database into a file, of any status and even after a purge.

    Raises:
        UsageError: ``--at`` is no time, or one in the future.
        UnknownTenantError: there is no such tenant.
        RestoreError: the output exists, or the replica does not have what is asked for.
        ReplicatorError: there is no binary, or the target cannot be reached.
    """
    settings = load(arguments)
    logs.configure(level="Error", format=settings.logging.format)
    at = None if arguments.at is None else _moment(arguments.at)
    reader = open_reader(settings)
    output = Path(arguments.output)

    async def work() -> tuple[str, Restored]:
        tenant_id, tenant = await find_tenant(settings, arguments.tenant)
        if _is_its_place(settings, tenant_id, tenant, output):
            await _refuse_replicated(settings, tenant_id, output)
        with _shown_progress() as report:
            restored = await Restorer(reader, report=report).restore(
                tenant_id, output, at=at, overwrite=arguments.force
            )
        return tenant.identifier if tenant else tenant_id, restored

    status, result = run_until_signal(work)
    if result is not None:
        _print(*result, as_json=arguments.format == "json")
    return status


def _moment(text: str) -> float:
    now = time.time()
    at = parse_since(text, now=now, option="--at")
    if at > now:
        raise UsageError(
            f"--at {text} is in the future; leave it out for the newest state, and give a time "
            "with its offset from UTC, such as 2026-01-31T12:00Z"
        )
    return at


def _is_its_place(settings: Settings, tenant_id: str, tenant: Tenant | None, output: Path) -> bool:
    """Return whether the output is the tenant's own file.

    Raises:
        RestoreError: it is one that the runtime may have open at this moment.
    """
    directory = databases_directory(settings).resolve()
    place = output.resolve()
    if place.parent != directory:
        if place.parent == Path(settings.storage.path).resolve():
            raise RestoreError(
                f"{output} would lie in the data directory, among the runtime's own files: restore "
                "to another directory"
            )
        return False
    if place != database_path(directory, tenant_id).resolve():
        raise RestoreError(
            f"{output} would lie among the tenants' databases under a name that is not this "
            f"tenant's: restore to another directory, or to {tenant_id}.db"
        )
    if tenant is not None and tenant.is_active:
        raise RestoreError(
            f"{output} is the database of {tenant.identifier}, which is in use while the tenant is "
            f"active: restore to another file, or first 'tenant suspend {tenant.identifier}'"
        )
    return True


async def _refuse_replicated(settings: Settings, tenant_id: str, output: Path) -> None:
    """Raise if a replicator says that it has the tenant's database, which is the output."""
    directory = databases_directory(settings).absolute()
    try:
        client = ControlClient(control_socket_path(os.fspath(directory)))
        listed = await client.list_databases()
    except ReplicatorError:
        await trio.lowlevel.checkpoint()
        return
    if os.fspath(database_path(directory, tenant_id)) in {each.path for each in listed}:
        raise RestoreError(
            f"{output} is still in the replicator's hands: wait until 'replication status' no "
            "longer lists the tenant"
        )


@contextmanager
def _shown_progress() -> Iterator[Report]:
    progress = ByteProgress()

    def report(done: RestoreProgress) -> None:
        progress.show(done.step, done.bytes)

    try:
        yield report
    finally:
        progress.end()


def _print(name: str, restored: Restored, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "tenant": name,
                "tenant_id": restored.tenant_id,
                "output": restored.output,
                "txid": restored.txid,
                "as_of": restored.as_of,
                "bytes": restored.bytes,
                "seconds": round(restored.seconds, 3),
            }
        )
        return
    print_text(restored.output)
    say(
        f"{name} as of {moment_text(restored.as_of)} (transaction {restored.txid}), "
        f"{restored.bytes} bytes in {restored.seconds:.1f} s; its integrity was checked"
    )
