"""A copy of a whole store, table by table, between files of SQLite and databases of PostgreSQL.

A :class:`Place` is where a store is or will be, and a :class:`Side` is one that is open. A side
gives and takes the rows of the tables that both engines have, in the order of their primary keys.
The tables that each engine derives from them are filled at the end of the copy. The digest of a
table covers its rows and is the same on every engine, so a copy is compared by digests.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import apsw
import msgspec

from ..base.opener import open_file, sync_path
from ..errors import StorageError
from .engines import sqlite_connection
from .engines.sqlite_connection import (
    PAGE_BYTES,
    SqliteTransaction,
    connect_writer,
    describe_failure,
)
from .sql import arrivals, tenants
from .sql.dialect import SERVER_TIME, Row, SqlTransaction
from .sql.schema import DAY_BITS, MARK_AS_WIPED, TABLES, VERSION, Table
from .sql.versions import FILLING, MOVED, StoreState, prepare_sqlite, state_of_file

#: Rows between two calls of the report.
REPORT_ROWS = 1_000

# Rows that concern one file or one server only: the mark of a wiped file, and the last known
# timeline (storage.engines.postgres_failover).
_LEFT_OUT = {"checkpoint": "WHERE name NOT IN ('storage.wiped', 'storage.timeline')"}

#: Tables whose numbers are never reused.
_NUMBERED = ("audit", "outbox")

#: Tables with rows in an unused store, too: each start writes them.
_WRITTEN_BY_STARTS = frozenset({"checkpoint", "lease", "purging"})

#: Takes the step in words, and the number of finished rows of the current table.
Report = Callable[[str, int], None]


class TransferError(StorageError):
    """A store cannot be moved, backed up or restored; the message says why and what to do."""


class Copied(NamedTuple):
    """The number of a table's rows, and their digest."""

    rows: int
    digest: str


class Side(Protocol):
    """An open store, within a transaction."""

    @property
    def place(self) -> str:
        """The store, in words."""

    @property
    def tx(self) -> SqlTransaction:
        """The transaction."""

    @property
    def state(self) -> StoreState:
        """The state of the store."""

    def set_version(self, version: int) -> None:
        """Write the version of the schema."""

    def rows(self, table: Table) -> Iterator[Row]:
        """Return the rows of ``table`` in the order of its primary key; flags are ``bool``."""

    def prepare(self, numbers: Iterable[int]) -> None:
        """Make the partitions of the days with these numbers (``DAY_BITS``)."""

    def add(self, table: Table, rows: Iterable[Row]) -> None:
        """Add rows to ``table``, which has none of their keys."""


class Place(Protocol):
    """The place of a store that is moved, or of one that will be."""

    @property
    def name(self) -> str:
        """Its name for people."""

    @property
    def remedy(self) -> str:
        """The advice if another store is there."""

    def reading(self) -> AbstractContextManager[Side]:
        """Read the store as it is at one moment."""

    def locked(self) -> AbstractContextManager[Side]:
        """Keep others from the store within the block; commit at its end.

        Raises:
            StoreLockedError: a program works on it.
            StoreVersionError: it is not a store of this version.
        """

    def survey(self) -> tuple[StoreState, str | None]:
        """See :func:`survey`; StoreLockedError: a program works on the store."""

    def fill(self, source: Side, report: Report) -> dict[str, Copied]:
        """Copy ``source`` to this place, as a store that is marked as being filled, and compare it.

        Raises:
            TransferError: it is not empty, or has other rows than the source afterwards.
            StoreLockedError: a program works on it.
            StorageError: it cannot be used.
            OSError: the disk failed, or is full.
        """

    def complete(self) -> None:
        """Remove the mark of a store that is being filled."""


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

    @property
    def state(self) -> StoreState:
        return state_of_file(self.connection, self.place)

    def set_version(self, version: int) -> None:
        self.connection.execute(f"PRAGMA user_version = {version}")

    def rows(self, table: Table) -> Iterator[Row]:
        flags = [number for number, kind in enumerate(table.columns.values()) if kind == "boolean"]
        for row in self.connection.execute(select(table, table.keys)):
            if not flags:
                yield row
                continue
            values: list[Any] = list(row)
            for number in flags:
                values[number] = None if values[number] is None else bool(values[number])
            yield tuple(values)

    def prepare(self, numbers: Iterable[int]) -> None:
        """See :meth:`Side.prepare`: a file has one table for all."""

    def add(self, table: Table, rows: Iterable[Row]) -> None:
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
    """Copy all rows from ``source`` to ``target``, which has none, and derive the other tables.

    Returns:
        The rows and digests of the source, by table.
    """
    copied = {}
    last = arrivals.last_sequence(source.tx)
    target.prepare([*_days(source.tx), last >> DAY_BITS])
    for table in TABLES:
        tally = _Tally(f"copy {table.name}", report)
        target.add(table, tally.count(source.rows(table)))
        copied[table.name] = tally.result()
    _derive(target.tx, last, {name: tenants.last_number(source.tx, name) for name in _NUMBERED})
    return copied


_FIRST_FROM = "SELECT min(sequence) FROM arrival WHERE sequence >= :first"


def _days(tx: SqlTransaction) -> Iterator[int]:
    """Return the days that have arrivals; each is one step in an index."""
    number = 0
    while (found := (tx.one(_FIRST_FROM, first=number << DAY_BITS) or (None,))[0]) is not None:
        number = found >> DAY_BITS
        yield number
        number += 1


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


# The number of removed arrivals accounts for every gap in the sequences.
_TALLY = """
UPDATE tally SET number = CASE name WHEN 'last' THEN :last
    WHEN 'removed' THEN :last - (SELECT count(*) FROM arrival) ELSE number END
"""

# A sequence begins at 1; if the highest number is 0, it has given none yet.
_SET_LAST_NUMBER = """
SELECT setval(pg_get_serial_sequence('{table}', '{column}'), greatest(highest, 1), highest > 0)
FROM (SELECT greatest(:last, (SELECT coalesce(max({column}), 0) FROM {table})) AS highest) AS found
"""


# A day ends with its last known arrival. If two rows have one key, because a day is about to be
# dropped, the newer row keeps it.
_DERIVED = (
    """
INSERT INTO arrival_key (delivery_key, sequence)
SELECT delivery_key, sequence FROM arrival ORDER BY sequence DESC
ON CONFLICT (delivery_key) DO NOTHING
""",
    f"""
UPDATE day SET opened_at = coalesce(
    (SELECT max(received_at) FROM arrival WHERE sequence < number << {DAY_BITS}),
    (SELECT min(received_at) FROM arrival), {SERVER_TIME})
""",
    # Of stores that have ended without closing.
    "DELETE FROM node WHERE id <> ''",
    "UPDATE node SET done = (SELECT count(*) FROM ended) WHERE id = ''",
)


def _derive(tx: SqlTransaction, last: int, numbers: Mapping[str, int]) -> None:
    """Write the data that the engine derives from the rows.

    Args:
        tx: the transaction of the target.
        last: the highest sequence of an arrival that was ever given.
        numbers: the highest number that each of the tables :data:`_NUMBERED` has given.
    """
    if tx.dialect.is_sqlite:
        arrivals.index(tx, last)
        tx.run(_TALLY, last=last)
        for name, number in numbers.items():
            tx.run("DELETE FROM sqlite_sequence WHERE name = :name", name=name)
            tx.run("INSERT INTO sqlite_sequence VALUES (:name, :number)", name=name, number=number)
        tx.run(MARK_AS_WIPED)
        return
    for statement in _DERIVED:
        tx.run(statement)
    given = {name: ("sequence", number) for name, number in numbers.items()}
    given["arrival_key"] = ("sequence", last)
    given |= dict.fromkeys(("attempt", "evidence", "pause"), ("id", 0))
    for table, (column, least) in given.items():
        tx.one(_SET_LAST_NUMBER.format(table=table, column=column), last=least)


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
    """Give the complete store in ``new`` the name ``file``; an existing file is replaced.

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
    """Return the temporary name of a store that will be ``file``."""
    return file.with_name(f"{file.name}.filling")


# -- places --------------------------------------------------------------------------------------


def check_target(target: Place, *, moved: bool = False) -> bool:
    """Return whether an earlier move to ``target`` was not completed; it may be filled.

    Args:
        target: the place.
        moved: the source is marked as moved.

    Raises:
        TransferError: it holds rows that are not from a move, or the source was moved already.
        StoreLockedError: a program works on it.
        StoreVersionError: it is of another version, or another program's.
        StoreUnavailableError: it cannot be read.
    """
    state, filled = target.survey()
    if moved and state.version != FILLING:
        raise TransferError(
            f"the source was moved already; set Sdk:Storage:Backend to {state.backend}"
        )
    return may_fill(state, filled, target.remedy)


def may_fill(state: StoreState, filled: str | None, remedy: str) -> bool:
    """Decide for :func:`check_target` on what :func:`survey` has found."""
    if state.version == FILLING:
        return True
    if state.version == MOVED:
        raise TransferError(
            f"{state.name} holds a store that was moved to {state.other_engine}: {remedy}"
        )
    if state.known_version() is not None:
        state.require_current()
    if filled is not None:
        raise TransferError(f"{state.name} is not empty (it has rows in {filled}): {remedy}")
    return False


def survey(side: Side) -> tuple[StoreState, str | None]:
    """Return the state of a store, and the name of a table whose rows show that it is in use."""
    state = side.state
    if state.version == VERSION:
        for name in (table.name for table in TABLES if table.name not in _WRITTEN_BY_STARTS):
            if side.tx.one(f"SELECT 1 FROM {name} LIMIT 1") is not None:
                return state, name
    return state, None


class SqlitePlace:
    """The :class:`Place` of a SQLite file; the caller holds the lock of its directory.

    Args:
        file: the database, which may not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.name = str(file)
        self.remedy = (
            f"move it away, together with {file.name}-wal and {file.name}-shm if they are there, "
            "and repeat this"
        )

    def reading(self) -> AbstractContextManager[SqliteSide]:
        return opened(self._file)

    @contextmanager
    def locked(self) -> Iterator[SqliteSide]:
        try:
            connection = connect_writer(self.name, lambda _: None)
            try:
                connection.execute("BEGIN IMMEDIATE")
                side = SqliteSide(connection, self._file)
                side.state.require_current_or_moved()
                yield side
                connection.execute("COMMIT")
            finally:
                connection.close()
        except apsw.Error as error:
            raise describe_failure(error, self.name) from error

    def survey(self) -> tuple[StoreState, str | None]:
        if not self._file.exists():
            return StoreState(self.name, "SQLite", None), None
        with self.reading() as side:
            return survey(side)

    def fill(self, source: Side, report: Report) -> dict[str, Copied]:
        check_target(self)
        new = filling_file(self._file)
        with new_file(new) as target:
            copied = copy(source, target, report)
            target.set_version(FILLING)
        put_in_place(new, self._file)
        compare(self, copied, report)
        return copied

    def complete(self) -> None:
        with opened(self._file, apsw.SQLITE_OPEN_READWRITE) as side:
            side.set_version(VERSION)


def compare(place: Place, copied: Mapping[str, Copied], report: Report) -> None:
    """Raise TransferError if the store at ``place`` has other rows than ``copied``."""
    with place.reading() as side:
        require_equal(copied, digests(side, report), side.place)
