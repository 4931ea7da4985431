"""``storage``: show, check, back up and restore the store, or move it to another engine."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EXIT_FAILURE, StoreUnavailableError
from .parse import UsageError, add_format, describing

if not describing():
    import attrs
    import msgspec

    from ..base import logs
    from ..base.private_files import keep_files_private
    from ..config import Settings, StorageBackend
    from ..storage import backup
    from ..storage.data_directory import DATABASE_NAME, lock_data_directory
    from ..storage.examine import CheckResult, StoreStatus, check_file, status_of_file
    from ..storage.locations import PostgresLocation, SqliteLocation
    from ..storage.open import postgres_address
    from .settings import load
    from .store import why_unreachable
    from .terminal import ByteProgress, print_json, print_rows, say, size_text

if TYPE_CHECKING:
    from ..storage.backup import Manifest
    from ..storage.locations import Location
    from ..storage.transfer import Transfer

_ENGINES = ("sqlite", "postgres")


def status_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``storage status``."""
    add_format(parser)


def check_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``storage check``."""
    add_format(parser)


def migrate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``storage migrate``."""
    parser.add_argument(
        "--from", dest="from_engine", required=True, choices=_ENGINES, help="the current engine"
    )
    parser.add_argument(
        "--to", dest="to_engine", required=True, choices=_ENGINES, help="the new engine"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the rows to move")
    add_format(parser)


def backup_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``storage backup``."""
    parser.add_argument("file", metavar="FILE", help="the file to create")
    add_format(parser)


def restore_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``storage restore``."""
    parser.add_argument("file", metavar="FILE", help="the backup")
    add_format(parser)


def show_status(arguments: Namespace) -> int:
    """Print the version, the sizes and the rows of the store; change nothing.

    Raises:
        StorageError: there is none, or it cannot be read.
    """
    settings = load(arguments)
    _require_reachable(settings)
    if settings.storage.backend is StorageBackend.POSTGRES:
        address = postgres_address(settings)
        from ..storage.examine_postgres import status_of_database

        status = status_of_database(address)
    else:
        status = status_of_file(_file(settings))
    shown = {**attrs.asdict(status), "next_start": status.next_start}
    if arguments.format == "json":
        print_json(shown)
    else:
        print_rows(_status_rows(status), ("what", "value"), as_json=False)
    return 0 if status.refusal is None else EXIT_FAILURE


def _status_rows(status: StoreStatus) -> list[dict[str, Any]]:
    known = f"of this program: {status.known_version}"
    values: dict[str, Any] = {
        "store": status.place,
        "engine": status.engine,
        "version": f"{'none yet' if status.version is None else status.version} ({known})",
        "next start": status.next_start,
        "size": size_text(status.size),
    }
    if status.log_size is not None:
        values["write-ahead log"] = size_text(status.log_size)
    if status.free is not None:
        values["free in the file"] = size_text(status.free)
    if status.dead_rows is not None:
        values["dead rows, about"] = status.dead_rows
    about = "" if status.dead_rows is None else ", about"
    values |= {f"rows of {name}{about}": count for name, count in status.rows.items()}
    return [{"what": what, "value": value} for what, value in values.items()]


def check_store(arguments: Namespace) -> int:
    """Check the store, print each rule, and return 1 if one is broken; change nothing.

    Raises:
        StorageError: there is none of this version, or it cannot be read.
    """
    settings = load(arguments)
    _require_reachable(settings)
    progress = ByteProgress()
    try:
        if settings.storage.backend is StorageBackend.POSTGRES:
            address = postgres_address(settings)
            from ..storage.examine_postgres import check_database

            results = check_database(address, lambda rule: progress.show(rule, 0))
        else:
            results = check_file(_file(settings), lambda rule: progress.show(rule, 0))
    finally:
        progress.end()
    print_rows(
        [_checked(each) for each in results],
        ("check", "ok", "found"),
        as_json=arguments.format == "json",
    )
    broken = [each for each in results if each.found is not None]
    if broken:
        say("stop the receiver, move the store away, and restore a backup: 'storage restore FILE'")
    return EXIT_FAILURE if broken else 0


def _checked(result: CheckResult) -> dict[str, Any]:
    return {"check": result.rule, "ok": result.found is None, "found": result.found}


def migrate(arguments: Namespace) -> int:
    """Move the store from one engine to another, or with ``--dry-run`` show the rows to move.

    If it is killed at any point, repeat it. Every row is compared at the end.

    Raises:
        UsageError: both engines are the same.
        StoreLockedError: a runtime works on one of the stores.
        StorageError: one of them cannot be used, or the rows differ.
    """
    if arguments.from_engine == arguments.to_engine:
        raise UsageError("use --from sqlite --to postgres, or the reverse")
    keep_files_private()
    settings = load(arguments)
    logs.configure(level="Error", format=settings.logging.format)
    file, to_postgres = _file(settings), arguments.to_engine == "postgres"
    if to_postgres and not file.exists():
        raise StoreUnavailableError(
            f"there is no store at {file.absolute()}: name its data directory with "
            "--set Sdk:Storage:Path=..."
        )
    address = postgres_address(settings)
    from ..storage import transfer

    as_json = arguments.format == "json"
    # It proves that no receiver of this host uses either store.
    lock: AbstractContextManager[object] = (
        nullcontext() if arguments.dry_run else lock_data_directory(settings.storage.path)
    )
    with lock, PostgresLocation.connected(address) as database:
        here = SqliteLocation(file)
        ends: tuple[Location, Location] = (here, database) if to_postgres else (database, here)
        if arguments.dry_run:
            return _show_plan(transfer.plan(*ends), as_json=as_json)
        with _progress() as report:
            moved = transfer.move(*ends, report=report)
    print_rows(_table_rows(moved.rows), ("table", "rows"), as_json=as_json)
    say(f"moved to {moved.target}, and compared every row")
    _note_left(moved.left_behind)
    say(
        f"set Sdk:Storage:Backend to {'Postgres' if to_postgres else 'Sqlite'} before the next "
        "start; the source is kept, marked as moved"
    )
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    progress = ByteProgress()
    try:
        yield lambda step, rows: progress.show(f"{step}: {rows} rows" if rows else step, 0)
    finally:
        progress.end()


def _show_plan(plan: Transfer, *, as_json: bool) -> int:
    rows = _table_rows(plan.rows)
    if as_json:
        print_json({**attrs.asdict(plan), "rows": rows})
    else:
        print_rows(rows, ("table", "rows"), as_json=False)
        say(f"from {plan.source} to {plan.target}")
        if plan.begun:
            say("an earlier move was interrupted; this one finishes it, or starts over")
        _note_left(plan.left_behind)
        say("nothing was changed" if plan.refusal is None else f"refused: {plan.refusal}")
    return 0 if plan.refusal is None else EXIT_FAILURE


def back_up(arguments: Namespace) -> int:
    """Write a verified backup of the store to a new file, even while a receiver runs.

    Raises:
        StorageError: the store cannot be read, or the file cannot be written.
    """
    keep_files_private()
    settings = load(arguments)
    logs.configure(level="Error", format=settings.logging.format)
    _require_reachable(settings)
    if settings.storage.backend is StorageBackend.POSTGRES:
        address = postgres_address(settings)
        from ..storage import transfer

        make = partial(transfer.copy_database, address)
    else:
        make = partial(backup.copy_file, _file(settings))
    file = Path(arguments.file)
    with _progress() as report:
        manifest = backup.back_up(file, make, backend=str(settings.storage.backend), report=report)
    _print_manifest(manifest, as_json=arguments.format == "json")
    say(f"backed up to {file} ({size_text(file.stat().st_size)}), and verified by reading it")
    return 0


def restore(arguments: Namespace) -> int:
    """Restore a backup into the configured store, which is empty or not there yet.

    Raises:
        StoreUnavailableError: the store is in memory, or cannot be used.
        StoreLockedError: a runtime works on the store.
        StorageError: the backup is damaged, or the store is not empty.
    """
    keep_files_private()
    settings = load(arguments)
    logs.configure(level="Error", format=settings.logging.format)
    place = str(_file(settings))
    if settings.storage.backend is StorageBackend.MEMORY:
        _require_reachable(settings)
    if settings.storage.backend is StorageBackend.POSTGRES:
        address = postgres_address(settings)
        from ..storage import transfer

        place = address.place
        put = partial(transfer.restore_database, address)
    else:
        put = partial(backup.put_file, _file(settings))
    with lock_data_directory(settings.storage.path) as held, _progress() as report:
        manifest = backup.restore(Path(arguments.file), held.path, put, report=report)
    _print_manifest(manifest, as_json=arguments.format == "json")
    say(f"restored to {place}: the store has the state of {manifest.made_at}")
    if settings.storage.backend is StorageBackend.POSTGRES:
        _note_left(manifest.other_tables)
    say("start the receiver, and fetch later events: sdk-trio events reconcile")
    return 0


def _print_manifest(manifest: Manifest, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.structs.asdict(manifest))
    else:
        print_rows(_table_rows(manifest.rows), ("table", "rows"), as_json=False)


def _table_rows(counted: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"table": name, "rows": count} for name, count in counted.items()]


def _note_left(tables: Sequence[str]) -> None:
    if tables:
        say(f"not copied, because they belong to the application: the tables {', '.join(tables)}")


def _file(settings: Settings) -> Path:
    return Path(os.fspath(settings.storage.path)) / DATABASE_NAME


def _require_reachable(settings: Settings) -> None:
    missing = why_unreachable(settings)
    if missing is not None:
        raise StoreUnavailableError(missing)
