"""``replication restore``: restore a tenant's database from its replica, to a file or in place."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..errors import ReplicatorError, RestoreError, StoreUnavailableError, UnknownTenantError
from .parse import (
    UsageError,
    add_bypass,
    add_format,
    add_moment,
    add_number,
    add_reason_and_actor,
    describing,
    moment_text,
)

if not describing():
    import trio

    from ..base import logs
    from ..base.private_files import create_data_directory
    from ..config import Settings
    from ..records.tenants import Tenant
    from ..replication.control import ControlClient, control_socket_path
    from ..replication.listing import find_replica
    from ..replication.manifest import replica_name, split_replica_name
    from ..replication.replica import ReplicaReader
    from ..replication.restore import (
        DEFAULT_WAIT_SECONDS,
        InPlaceRestorer,
        Report,
        Restored,
        RestoreProgress,
        Restorer,
        Wish,
    )
    from ..tenants.databases import database_path, databases_directory
    from .replication import open_reader, run_until_signal
    from .settings import load
    from .store import actor_of, open_tenants, why_unreachable
    from .terminal import ByteProgress, Row, print_json, print_text, say


def restore_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``replication restore``."""
    parser.add_argument(
        "--in-place",
        metavar="T",
        help="restore this tenant's own database: suspend it, wait until no process has it "
        "open, replace it, and reactivate the tenant if it was active",
    )
    parser.add_argument(
        "--tenant",
        metavar="T",
        help="the tenant; if it is unknown here, its replica is searched for at the target",
    )
    add_moment(parser, "--at", "the last state before it (default: the newest)")
    parser.add_argument("--output", metavar="F", help="the file to create, with --tenant")
    parser.add_argument("--force", action="store_true", help="replace --output if it exists")
    parser.add_argument(
        "--keep", metavar="F", help="with --in-place: a new file for the replaced database"
    )
    parser.add_argument(
        "--discard-newer",
        action="store_true",
        help="with --in-place: replace the database even if the replica lacks some of its data",
    )
    add_number(
        parser,
        "--wait",
        greatest=86_400,
        metavar="SECONDS",
        help="with --in-place: how long to wait for other processes to close it (default: 60)",
    )
    add_reason_and_actor(parser)
    add_bypass(parser)
    add_format(parser)


def restore(arguments: Namespace) -> int:
    """Restore a tenant's database to a file, of any status and even after a purge, or in place.

    Raises:
        UsageError: the arguments cannot be combined, or ``--at`` is not a time, or in the future.
        UnknownTenantError: there is no such tenant.
        TenantError: in place, and the tenant cannot be suspended.
        RestoreError: the output exists, a process has it open, or the replica does not hold the
            requested time.
        ReplicatorError: the binary is missing, or the target is unreachable.
    """
    _check_arguments(arguments)
    settings = load(arguments)
    logs.configure(level="Error", format=settings.logging.format)
    # Before querying the target, so that a mistyped time is reported at once.
    at = _past(arguments.at)
    reader = open_reader(settings)
    if arguments.in_place is not None:
        wish = Wish(
            at=at,
            discard_newer=arguments.discard_newer,
            keep=None if arguments.keep is None else Path(arguments.keep).absolute(),
            reason=arguments.reason,
            actor=actor_of(arguments),
            bypass_email_verification=arguments.bypass_email_verification,
            wait_seconds=arguments.wait or DEFAULT_WAIT_SECONDS,
        )
        work = partial(_restore_in_place, settings, reader, arguments.in_place, wish)
    else:
        work = partial(_restore_into, settings, reader, arguments, at)
    status, row = run_until_signal(work)
    if row is not None:
        _print(row, as_json=arguments.format == "json")
    return status


def _check_arguments(arguments: Namespace) -> None:
    if arguments.in_place is not None:
        others = {"--tenant": arguments.tenant, "--output": arguments.output}
        given = [name for name, value in others.items() if value is not None]
        # Both name a tenant; it must be certain which one is overwritten.
        if given:
            raise UsageError(
                f"{given[0]} cannot be used with --in-place, which restores that tenant's own "
                "database"
            )
        if arguments.discard_newer and arguments.at is not None:
            raise UsageError(
                "--discard-newer cannot be used with --at: data written after that time is "
                "dropped anyway"
            )
        return
    if arguments.tenant is None or arguments.output is None:
        raise UsageError("give --tenant T --output F, or --in-place T")
    # Refused, not ignored: the user of --keep or --reason expects that something is kept or
    # recorded.
    unused = {
        "--keep": arguments.keep,
        "--discard-newer": arguments.discard_newer or None,
        "--wait": arguments.wait,
        "--reason": arguments.reason,
        "--actor": arguments.actor,
        "--bypass-email-verification": arguments.bypass_email_verification or None,
    }
    for name, value in unused.items():
        if value is not None:
            raise UsageError(f"{name} can be used only with --in-place: --output changes no tenant")


async def _restore_into(
    settings: Settings, reader: ReplicaReader, arguments: Namespace, at: float | None
) -> Row:
    output = Path(arguments.output)
    tenant = await _find_tenant(settings, arguments.tenant)
    if tenant is not None:
        name = replica_name(tenant.identifier, tenant.id)
    else:
        options = settings.multi_tenant.file_db.replication
        name = await find_replica(options, reader, arguments.tenant)
    tenant_id = _tenant_id(name)
    # The replicator has the old file open and would not notice the new one.
    if _is_its_place(settings, tenant_id, tenant, output):
        await _refuse_replicated(settings, tenant_id, output)
    with _shown_progress() as report:
        restored = await Restorer(reader, report=report).restore(
            name, output, at=at, overwrite=arguments.force
        )
    return _row(restored)


async def _find_tenant(settings: Settings, key: str) -> Tenant | None:
    """Return the tenant of this identifier, id or name of a replica; None: it is not known here.

    It may have been purged, or the store may be lost. The target knows its replica then.
    """
    if why_unreachable(settings) is not None:
        await trio.lowlevel.checkpoint()
        return None
    _, tenant_id = split_replica_name(key) or ("", key)
    async with open_tenants(settings) as tenants:
        try:
            return await tenants.get(tenant_id)
        except UnknownTenantError:
            return None


def _tenant_id(name: str) -> str:
    parts = split_replica_name(name)
    assert parts is not None
    return parts[1]


async def _restore_in_place(settings: Settings, reader: ReplicaReader, key: str, wish: Wish) -> Row:
    missing = why_unreachable(settings)
    if missing is not None:
        raise StoreUnavailableError(
            f"{missing}; --in-place suspends the tenant there: without a store, use --output"
        )
    directory = create_data_directory(databases_directory(settings)).absolute()
    async with open_tenants(settings) as tenants:
        tenant = await tenants.get(key)
        with _shown_progress() as report:
            in_place = InPlaceRestorer(Restorer(reader, report=report), tenants, notice=say)
            done = await in_place.restore(tenant, database_path(directory, tenant.id), wish)
    return {
        **_row(done.restored),
        "reactivated": done.reactivated,
        "kept": os.fspath(wish.keep) if done.kept and wish.keep is not None else None,
    }


def _past(at: float | None) -> float | None:
    # A time in the future usually lacks its offset from UTC.
    if at is not None and at > time.time():
        raise UsageError(
            f"--at {moment_text(at)} is in the future; omit it for the newest state, or give a "
            "time with its offset from UTC, such as 2026-01-31T12:00Z"
        )
    return at


def _is_its_place(settings: Settings, tenant_id: str, tenant: Tenant | None, output: Path) -> bool:
    """Return whether the output is the tenant's own file.

    Raises:
        RestoreError: the runtime may have the file open.
    """
    # Resolve links: two spellings of one path are the same file.
    directory = databases_directory(settings).resolve()
    place = output.resolve()
    if place.parent != directory:
        # The store, its log and its lock are there; a database of that name might replace one of
        # them.
        if place.parent == Path(settings.storage.path).resolve():
            raise RestoreError(
                f"{output} would be in the data directory, among the runtime's own files: restore "
                "to another directory"
            )
        return False
    if place != database_path(directory, tenant_id).resolve():
        raise RestoreError(
            f"{output} would be among the tenants' databases under a name that is not this "
            f"tenant's: restore to another directory, or to {tenant_id}.db"
        )
    # While the tenant is active, the daemon may have the database open, and would keep using the
    # deleted file.
    if tenant is not None and tenant.is_active:
        raise RestoreError(
            f"{output} is the database of {tenant.identifier}, which is in use while the tenant is "
            f"active: restore to another file, or first 'tenant suspend {tenant.identifier}'"
        )
    return True


async def _refuse_replicated(settings: Settings, tenant_id: str, output: Path) -> None:
    """Raise if a running replicator has the tenant's database, which is the output."""
    directory = databases_directory(settings).absolute()
    try:
        client = ControlClient(control_socket_path(os.fspath(directory)))
        # No answer counts as "no": if no replicator runs, none has the file open.
        listed = await client.list_databases()
    except ReplicatorError:
        await trio.lowlevel.checkpoint()
        return
    if os.fspath(database_path(directory, tenant_id)) in {each.path for each in listed}:
        raise RestoreError(
            f"the replicator still uses {output}: wait until 'replication status' no longer lists "
            "the tenant"
        )


@contextmanager
def _shown_progress() -> Iterator[Report]:
    progress = ByteProgress()

    def report(done: RestoreProgress) -> None:
        progress.show(done.step, done.bytes)

    try:
        yield report
    finally:
        # Also after an error, whose message would otherwise be appended to the line.
        progress.end()


def _row(restored: Restored) -> Row:
    identifier, tenant_id = restored.replica.split(".")
    return {
        "tenant": identifier,
        "tenant_id": tenant_id,
        "output": restored.output,
        "txid": restored.txid,
        "as_of": restored.as_of,
        "bytes": restored.bytes,
        "seconds": round(restored.seconds, 3),
    }


def _print(row: Row, *, as_json: bool) -> None:
    if as_json:
        print_json(row)
        return
    # Only the path on standard output, for the next command of a script.
    print_text(str(row["output"]))
    say(
        f"{row['tenant']} as of {moment_text(row['as_of'])} (transaction {row['txid']}), "
        f"{row['bytes']} bytes in {row['seconds']:.1f} s; its integrity was checked"
    )
    if row.get("kept"):
        say(f"the previous database is in {row['kept']}")
    # Not for --output, which changes no tenant: there the key is missing.
    if row.get("reactivated") is False:
        say("the tenant was not active before, so it is not now")
