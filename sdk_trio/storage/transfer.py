"""The move of a whole store between SQLite and PostgreSQL: ``storage migrate``.

There are three steps, each synced before the next. First, the target is completed, and still marked
as being filled. Second, the source is marked as moved. Third, the target's mark is removed. So at
any moment at most one of the two stores can be opened. A killed move is repeated: it begins again
before the second step, and continues after it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ..errors import StorageError
from .copying import Report, Side, copy, count_rows, digests
from .engines.postgres_address import PostgresAddress
from .locations import (
    Fillable,
    Location,
    PostgresLocation,
    SqliteLocation,
    SqliteSide,
    compare,
    new_file,
)
from .sql.dialect import SqlTransaction
from .sql.reads import other_tables
from .sql.versions import MOVED

# -- moves ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Transfer:
    """A move, or the plan of one.

    ``rows`` are the source's, by table. ``left_behind`` are an application's own tables in the
    file, which it has to move itself. ``begun``: an earlier move was not completed. ``refusal`` is
    the reason why the move cannot begin, None without one.
    """

    source: str
    target: str
    rows: Mapping[str, int]
    left_behind: Sequence[str]
    begun: bool = False
    refusal: str | None = None


def plan(source: Location, target: Location) -> Transfer:
    """Look at both stores and change nothing; blocks.

    Raises:
        StorageError: the source cannot be read.
    """
    with source.reading() as side:
        side.state.require_current_or_moved()
        moved = side.state.version == MOVED
        found = _describe(source, side, target, count_rows(side.tx))
    try:
        source.survey()
        why = target.survey().require_fillable(source_moved=moved)
        return attrs.evolve(found, begun=why is Fillable.UNFINISHED)
    except StorageError as error:
        return attrs.evolve(found, refusal=str(error))


def move(source: Location, target: Location, *, report: Report) -> Transfer:
    """Move a store to another location; blocks. The caller holds the lock of the data directory.

    Args:
        source: the location of a store.
        target: an empty location, or that of an earlier move that was not completed.
        report: called again and again.

    Raises:
        TransferError: the target is not empty, or has other rows than the source.
        StoreLockedError: a program works on one of the stores.
        StorageError: one of them cannot be used.
        OSError: the disk of a SQLite file failed, or is full.
    """
    with source.locked() as side:
        if side.state.version == MOVED:
            target.survey().require_fillable(source_moved=True)
            copied = digests(side, report)
            compare(target, copied, report)
        else:
            copied = target.fill(side, report)
        moved = _describe(source, side, target, {name: each.rows for name, each in copied.items()})
        side.set_version(MOVED)
    target.complete()
    return moved


def _describe(source: Location, side: Side, target: Location, rows: Mapping[str, int]) -> Transfer:
    # In PostgreSQL, the application's tables are in schemas of its own.
    left = other_tables(side.tx) if side.tx.dialect.is_sqlite else ()
    return Transfer(source=source.place, target=target.place, rows=rows, left_behind=left)


# -- backups -------------------------------------------------------------------------------------


def copy_database(address: PostgresAddress, file: Path, report: Report) -> None:
    """Copy a snapshot of the store at ``address`` to the new file ``file``; blocks.

    Raises:
        TransferError: the copy has other rows.
        StorageError: the store cannot be read, or the file not be written.
        OSError: the file cannot be made.
    """
    with PostgresLocation.connected(address) as source, source.reading() as side:
        side.state.require_current()
        with new_file(file) as target:
            copied = copy(side, target, report)
    compare(SqliteLocation(file), copied, report)


def restore_database(
    address: PostgresAddress, file: Path, finish: Callable[[SqlTransaction], None], report: Report
) -> None:
    """Copy the store in ``file`` into the empty store at ``address``; blocks.

    If it is killed, repeat it: it begins again, and no program opens the store until then.

    Args:
        address: the target, whose schema is made if it is missing.
        file: the database of the source, which no process writes to.
        finish: called before the store can be opened.
        report: called again and again.

    Raises:
        TransferError: the store is not empty, or has other rows afterwards.
        StoreLockedError: a program works on it.
        StorageError: one of the stores cannot be used.
    """
    with PostgresLocation.connected(address) as target:
        with SqliteSide.connected(file) as source:
            target.fill(source, report)
        target.complete(finish)
