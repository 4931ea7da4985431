"""A copy of a whole store, table by table, between files of SQLite and databases of PostgreSQL.

A :class:`Side` gives and takes the rows of the tables that both engines have, in the order of their
primary keys. What each engine derives from them is made at the end of the copy. The digest of a
table is over its rows, whatever the engine, so a copy is compared by digests.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import apsw
import msgspec

from ..base.opener import open_file, sync_path
from ..errors import StorageError
from .engines import sqlite_connection
from .engines.sqlite_connection import MARK_AS_WIPED, PAGE_BYTES, SqliteTransaction
from .sql import arrivals
from .sql.dialect import Row, SqlTransaction
from .sql.schema import FILLING, MOVED, TABLES, Table, prepare_sqlite, version_of_file

#: Rows between two calls of the report.
REPORT_ROWS = 1_000

# Rows that are of one file or of one server: the mark of a wiped file, and what hosts have noticed
# of failovers (storage.engines.postgres_failover).
_LEFT_OUT = {"checkpoint": "WHERE name NOT IN ('storage.wiped', 'storage.timeline')"}

#: Tables whose rows do not make a store one that is in use: each start writes them.
_WRITTEN_BY_STARTS = frozenset({"checkpoint", "lease", "counter", "purging"})

#: Takes the step in words, and the number of rows of the present table that are done.
Report = Callable[[str, int], None]


class TransferError(StorageError):
    """A store cannot be moved, backed up or restored; the message says why and what to do."""


class Copied(NamedTuple):
    """The number of a table's rows, and their digest."""

    rows: int
    digest: str


class Side(Protocol):
    """A store that rows are copied from or to, within a transaction that its owner began."""

    @property
    def place(self) -> str:
        """The store, in words."""
        ...

    @property
    def tx(self) -> SqlTransaction:
        """The transaction."""
        ...

    def rows(self, table: Table) -> Iterator[Row]:
        """Return the rows of ``table`` in the order of its primary key; flags are ``bool``."""
        ...

    def add(self, table: Table, rows: Iterable[Row]) -> None:
        """Add rows to ``table``, which has none of their keys."""
        ...


class SqliteSide:
    """A :class:`Side` in a SQLite file.

    Args:
        connection: one to the file.
        file: its path.
    """

    def __init__(self, connection: apsw.Connection, file: Path) -> None:
        self.connection = connection
        self.place = str(file)
        self.tx = SqliteTransaction(connection)

    def rows(self, table: Table) -> Iterator[Row]:
        """See :meth:`Side.rows`."""
        flags = [number for number, kind in enumerate(table.columns.values()) if kind == "boolean"]
        for row in self.connection.execute(select(table, table.keys)):
            if not flags:
                yield row
                continue
            values: list[Any] = list(row)
            for number in flags:
                values[number] = None if values[number] is None else bool(values[number])
            yield tuple(values)

    def add(self, table: Table, rows: Iterable[Row]) -> None:
        """See :meth:`Side.add`."""
        marks = ", ".join("?" * len(table.columns))
        names = ", ".join(table.columns)
        self.connection.executemany(
            f"INSERT INTO {table.name} ({names}) VALUES ({marks})", rows
        ).fetchall()


def select(table: Table, order: Iterable[str]) -> str:
    """Return SQL of the rows of ``table`` that are copied."""
    return (
        f"SELECT {', '.join(table.columns)} FROM {table.name} {_LEFT_OUT.get(table.name, '')} "
        f"ORDER BY {', '.join(order)}"
    )


# -- the copy ------------------------------------------------------------------------------------


def copy(source: Side, target: Side, report: Report) -> dict[str, Copied]:
    """Copy all rows from ``source`` to ``target``, which has none, and make what is derived.

    Returns:
        The rows and digests of the source, by table.
    """
    copied = {}
    for table in TABLES:
        tally = _Tally(f"copy {table.name}", report)
        target.add(table, tally.count(source.rows(table)))
        copied[table.name] = tally.result()
    _derive(target.tx, arrivals.last_sequence(source.tx))
    return copied


def digests(side: Side, report: Report) -> dict[str, Copied]:
    """Read every row of ``side``; return the rows and digests, by table."""
    found = {}
    for table in TABLES:
        tally = _Tally(f"compare {table.name}", report)
        for _ in tally.count(side.rows(table)):
            pass
        found[table.name] = tally.result()
    return found


def require_equal(source: Mapping[str, Copied], target: Mapping[str, Copied], place: str) -> None:
    """Raise TransferError if a table of the target has other rows than that of the source."""
    for name, copied in source.items():
        found = target[name]
        if found != copied:
            raise TransferError(
                f"the table {name} of {place} has {found.rows} rows with the digest "
                f"{found.digest[:16]}, and its source has {copied.rows} with {copied.digest[:16]}: "
                "check the disks of both (dmesg) and the source ('storage check'), then repeat this"
            )


class _Tally:
    """Counts rows and digests them while they pass."""

    def __init__(self, step: str, report: Report) -> None:
        self._step = step
        self._report = report
        self._rows = 0
        self._hash = hashlib.sha256()

    def count(self, rows: Iterator[Row]) -> Iterator[Row]:
        encode = msgspec.msgpack.Encoder().encode
        self._report(self._step, 0)
        for row in rows:
            self._hash.update(encode(row))
            self._rows += 1
            if self._rows % REPORT_ROWS == 0:
                self._report(self._step, self._rows)
            yield row

    def result(self) -> Copied:
        return Copied(self._rows, self._hash.hexdigest())


# Sequences have no other gaps than those that the number of removed ones accounts for.
_TALLY = """
UPDATE tally SET number = CASE name WHEN 'last' THEN :last
    WHEN 'removed' THEN :last - (SELECT count(*) FROM arrival) ELSE number END
"""

# A sequence begins at 1, and has not given it yet where the highest is 0.
_LAST_NUMBER = """
SELECT setval(pg_get_serial_sequence('{table}', '{column}'), greatest(highest, 1), highest > 0)
FROM (SELECT greatest(:last, (SELECT coalesce(max({column}), 0) FROM {table})) AS highest) AS found
"""


def _derive(tx: SqlTransaction, last: int) -> None:
    """Make what the engine derives from the rows; ``last`` is the highest sequence ever given."""
    if tx.dialect.is_sqlite:
        arrivals.index(tx, last)
        tx.run(_TALLY, last=last)
        tx.run(MARK_AS_WIPED)
        return
    for table, column, least in (
        ("arrival", "sequence", last),
        ("attempt", "id", 0),
        ("evidence", "id", 0),
    ):
        tx.one(_LAST_NUMBER.format(table=table, column=column), last=least)
    # Of stores that have ended without closing.
    tx.run("DELETE FROM node WHERE id <> ''")
    tx.run("UPDATE node SET done = (SELECT count(*) FROM ended) WHERE id = ''")


def filled_table(tx: SqlTransaction) -> str | None:
    """Return the name of a table whose rows show that the store is in use, or None."""
    for name in (table.name for table in TABLES if table.name not in _WRITTEN_BY_STARTS):
        if tx.one(f"SELECT 1 FROM {name} LIMIT 1") is not None:
            return name
    return None


def count_rows(tx: SqlTransaction) -> dict[str, int]:
    """Return the number of rows that a copy brings, by table."""
    counts = {}
    for table in TABLES:
        where = _LEFT_OUT.get(table.name, "")
        (counts[table.name],) = tx.one(f"SELECT count(*) FROM {table.name} {where}") or (0,)
    return counts


# -- files of SQLite -----------------------------------------------------------------------------


@contextmanager
def new_file(file: Path) -> Iterator[SqliteSide]:
    """Make a store in the new file ``file``, for this user alone, to be filled in the block.

    At the end of the block it is on the disk. If the block raises, it is removed.

    Raises:
        StoreUnavailableError: the disk failed, or is full.
        OSError: it cannot be made.
    """
    remove_file(file)
    os.close(open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with opened(file, apsw.SQLITE_OPEN_READWRITE) as side:
            execute = side.connection.execute
            # An unfinished file is never used, so that nothing has to be rolled back.
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
            execute("PRAGMA journal_mode = OFF").fetchall()
            execute("PRAGMA synchronous = OFF")
            prepare_sqlite(side.connection, side.place)
            for name in _WRITTEN_BY_STARTS:
                execute(f"DELETE FROM {name}")
            execute("BEGIN IMMEDIATE")
            yield side
            execute("COMMIT")
        sync_path(file)
    except BaseException:
        remove_file(file)
        raise


@contextmanager
def opened(file: Path, flags: int = apsw.SQLITE_OPEN_READONLY) -> Iterator[SqliteSide]:
    """Open the existing store in ``file``.

    Raises:
        StoreUnavailableError: SQLite or the disk failed in the block.
    """
    with sqlite_connection.opened(str(file), flags) as connection:
        yield SqliteSide(connection, file)


def put_in_place(new: Path, file: Path) -> None:
    """Give the complete store in ``new`` the name ``file``; one that stands there is replaced.

    Raises:
        OSError: the disk failed.
    """
    # The log of another file under this name would be taken for that of the new one.
    for suffix in ("-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            os.unlink(f"{file}{suffix}")
    os.replace(new, file)
    sync_path(file.parent)


def remove_file(file: Path) -> None:
    """Remove a database and the files that SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            os.unlink(f"{file}{suffix}")


def filling_file(file: Path) -> Path:
    """Return the name under which a store is made that will be ``file``."""
    return file.with_name(f"{file.name}.filling")


def look_at_file(file: Path, *, moved: bool = False) -> bool:
    """Return whether an earlier move to ``file`` has not come to its end; it may be replaced.

    Args:
        file: the database, which may not exist.
        moved: the source is marked as moved.

    Raises:
        TransferError: it holds rows that no move has brought, or the source was moved already.
        StoreVersionError: it is of another version, or another program's.
        StoreUnavailableError: it cannot be read.
    """
    if not file.exists():
        if moved:
            raise TransferError("the source was moved already; set Sdk:Storage:Backend to Sqlite")
        return False
    with opened(file) as target:
        if target.connection.pragma("user_version") == FILLING:
            return True
        if moved:
            raise TransferError("the source was moved already; set Sdk:Storage:Backend to Sqlite")
        remedy = (
            f"move it away, together with {file.name}-wal and {file.name}-shm if they are there, "
            "and repeat this"
        )
        if target.connection.pragma("user_version") == MOVED:
            raise TransferError(f"{file} is a store that was moved to PostgreSQL: {remedy}")
        version = version_of_file(target.connection, str(file))
        if version and (name := filled_table(target.tx)) is not None:
            raise TransferError(f"{file} is not empty (it has rows in {name}): {remedy}")
    return False
