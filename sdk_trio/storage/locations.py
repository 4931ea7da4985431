"""Locations of stores that are copied: files of SQLite, and schemas of PostgreSQL.

A :class:`Location` has a store, or will have one. Its :class:`~.copying.Side` is the open store.
"""

import enum
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import apsw

from ..base import clock
from ..base.opener import open_file, sync_path
from ..errors import StoreLockedError
from .copying import Copied, Report, Side, TransferError, copy, digests, select
from .engines import sqlite_connection
from .engines.sqlite_connection import (
    PAGE_BYTES,
    SqliteTransaction,
    connect_writer,
    describe_failure,
)
from .sql.dialect import Row, SqlTransaction
from .sql.schema import TABLES, VERSION, Table, make_day
from .sql.versions import FILLING, MOVED, StoreState, prepare_sqlite, state_of_file

if TYPE_CHECKING:
    from .engines.postgres_address import PostgresAddress
    from .engines.postgres_connection import StoreConnection

#: Tables that may have rows although no event has come: the runtime writes them itself.
_WRITTEN_BY_STARTS = frozenset({"checkpoint", "lease", "purging"})

#: Time for which the server may still list connections of a program that has ended, in seconds.
ENDING_SECONDS = 1.0


class Fillable(enum.Enum):
    """Why a location may be filled."""

    EMPTY = enum.auto()
    """There is no store, or one without rows."""
    UNFINISHED = enum.auto()
    """An earlier copy to it was not completed: it is made again."""


class StoreSurvey(NamedTuple):
    """The findings at a location.

    ``used_table`` is a table whose rows show that the store is in use, None without one. ``remedy``
    is the advice if it is.
    """

    state: StoreState
    used_table: str | None
    remedy: str

    @classmethod
    def of(cls, side: Side, remedy: str) -> "StoreSurvey":
        """Survey an open store."""
        state = side.state
        if state.version == VERSION:
            for name in (table.name for table in TABLES if table.name not in _WRITTEN_BY_STARTS):
                if side.tx.one(f"SELECT 1 FROM {name} LIMIT 1") is not None:
                    return cls(state, name, remedy)
        return cls(state, None, remedy)

    def require_fillable(self, *, source_moved: bool = False) -> Fillable:
        """Return why a store may be copied to the location.

        Args:
            source_moved: the source is marked as moved, so only a target of that move is filled.

        Raises:
            TransferError: there are rows that are not from a copy, or the source was moved already.
            StoreVersionError: the store is of another version, or another program's.
        """
        state = self.state
        if state.version == FILLING:
            return Fillable.UNFINISHED
        if source_moved:
            raise TransferError(
                f"the source was moved already; set Sdk:Storage:Backend to {state.backend}"
            )
        if state.version == MOVED:
            raise TransferError(
                f"{state.place} holds a store that was moved to {state.other_engine}: {self.remedy}"
            )
        if state.known_version() is not None:
            state.require_current()
        if self.used_table is not None:
            raise TransferError(
                f"{state.place} is not empty (it has rows in {self.used_table}): {self.remedy}"
            )
        return Fillable.EMPTY


class Location(Protocol):
    """The location of a store that is moved, or of one that will be."""

    @property
    def place(self) -> str:
        """The location in words."""

    def reading(self) -> AbstractContextManager[Side]:
        """Read the store as it is at one moment."""

    def locked(self) -> AbstractContextManager[Side]:
        """Keep others from the store within the block; commit at its end.

        Raises:
            StoreLockedError: a program works on it.
            StoreVersionError: it is not a store of this version.
        """

    def survey(self) -> StoreSurvey:
        """Return what is there.

        Raises:
            StoreLockedError: a program works on the store.
            StoreUnavailableError: it cannot be read.
        """

    def fill(self, source: Side, report: Report) -> dict[str, Copied]:
        """Copy ``source`` here, as a store that is marked as being filled, and compare it.

        Raises:
            TransferError: it is not empty, or has other rows than the source afterwards.
            StoreLockedError: a program works on it.
            StorageError: it cannot be used.
            OSError: the disk failed, or is full.
        """

    def complete(self) -> None:
        """Remove the mark of a store that is being filled."""


def compare(location: Location, copied: Mapping[str, Copied], report: Report) -> None:
    """Raise TransferError if the store at ``location`` has other rows than ``copied``."""
    with location.reading() as side:
        found = digests(side, report)
    for name, source in copied.items():
        target = found[name]
        if target != source:
            raise TransferError(
                f"the table {name} of {location.place} has {target.rows} rows with the digest "
                f"{target.digest[:16]}, and its source has {source.rows} with "
                f"{source.digest[:16]}: check the disks of both (dmesg) and the source ('storage "
                "check'), then repeat this"
            )


# -- SQLite --------------------------------------------------------------------------------------


class SqliteSide:
    """A :class:`Side` in a SQLite file.

    Args:
        connection: one to the file.
        file: its path.
    """

    def __init__(self, connection: apsw.Connection, file: Path) -> None:
        self.connection = connection
        self._file = str(file)
        self.tx = SqliteTransaction(connection)

    @classmethod
    @contextmanager
    def connected(
        cls, file: Path, flags: int = apsw.SQLITE_OPEN_READONLY
    ) -> Iterator["SqliteSide"]:
        """Connect to the existing store in ``file`` for the block.

        Raises:
            StoreUnavailableError: SQLite or the disk failed in the block.
        """
        with sqlite_connection.connected(str(file), flags) as connection:
            yield cls(connection, file)

    @property
    def state(self) -> StoreState:
        return state_of_file(self.connection, self._file)

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
        with SqliteSide.connected(file, apsw.SQLITE_OPEN_READWRITE) as side:
            execute = side.connection.execute
            # An unfinished file is never used, so that nothing has to be rolled back.
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
            execute("PRAGMA journal_mode = OFF").fetchall()
            execute("PRAGMA synchronous = OFF")
            prepare_sqlite(side.connection, str(file))
            for name in _WRITTEN_BY_STARTS:
                execute(f"DELETE FROM {name}")
            execute("BEGIN IMMEDIATE")
            yield side
            execute("COMMIT")
        sync_path(file)
    except BaseException:
        remove_file(file)
        raise


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


class SqliteLocation:
    """The :class:`Location` of a SQLite file; the caller holds the lock of its directory.

    Args:
        file: the database, which may not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.place = str(file)
        self._remedy = (
            f"move it away, together with {file.name}-wal and {file.name}-shm if they are there, "
            "and repeat this"
        )

    def reading(self) -> AbstractContextManager[SqliteSide]:
        return SqliteSide.connected(self._file)

    @contextmanager
    def locked(self) -> Iterator[SqliteSide]:
        try:
            connection = connect_writer(self.place, lambda _: None)
            try:
                connection.execute("BEGIN IMMEDIATE")
                side = SqliteSide(connection, self._file)
                side.state.require_current_or_moved()
                yield side
                connection.execute("COMMIT")
            finally:
                connection.close()
        except apsw.Error as error:
            raise describe_failure(error, self.place) from error

    def survey(self) -> StoreSurvey:
        if not self._file.exists():
            return StoreSurvey(StoreState(self.place, "SQLite", None), None, self._remedy)
        with self.reading() as side:
            return StoreSurvey.of(side, self._remedy)

    def fill(self, source: Side, report: Report) -> dict[str, Copied]:
        self.survey().require_fillable()
        new = filling_file(self._file)
        with new_file(new) as target:
            copied = copy(source, target, report)
            target.set_version(FILLING)
        put_in_place(new, self._file)
        compare(self, copied, report)
        return copied

    def complete(self) -> None:
        with SqliteSide.connected(self._file, apsw.SQLITE_OPEN_READWRITE) as side:
            side.set_version(VERSION)


# -- PostgreSQL ----------------------------------------------------------------------------------

_REMEDY = "a store is moved into an empty one; name another schema in Sdk:Storage:PostgresSchema"

_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
    AND split_part(application_name, ' ', 1)
        = split_part(current_setting('application_name'), ' ', 1)
    AND pid <> pg_backend_pid()
"""


class PostgresSide:
    """A :class:`Side` in a database.

    Args:
        connection: one to the database.
        address: the database and the schema.
    """

    def __init__(self, connection: "StoreConnection", address: "PostgresAddress") -> None:
        from .engines.postgres import POSTGRESQL, PostgresTransaction

        self._connection = connection
        self._address = address
        self.tx = PostgresTransaction(connection, POSTGRESQL)

    @property
    def state(self) -> StoreState:
        from .engines.postgres_migration import state_of_schema

        return state_of_schema(self._address, self._connection)

    def set_version(self, version: int) -> None:
        self._connection.execute("UPDATE store SET version = %s", (version,))

    def rows(self, table: Table) -> Iterator[Row]:
        # In the order of SQLite, which compares bytes.
        order = (
            f'{key} COLLATE "C"' if table.columns[key] == "text" else key for key in table.keys
        )
        statement = f"COPY ({select(table, order)}) TO STDOUT".encode()
        with self._connection.cursor() as cursor, cursor.copy(statement) as rows:
            rows.set_types(list(table.columns.values()))
            yield from rows.rows()

    def prepare(self, numbers: Iterable[int]) -> None:
        known = {number for (number,) in self.tx.all("SELECT number FROM day")}
        for number in sorted(set(numbers) - known):
            for statement in make_day(number):
                self.tx.run(statement)
            self.tx.run(
                "INSERT INTO day (number, until) VALUES (:number, :until)",
                number=number,
                until=number + 1,
            )

    def add(self, table: Table, rows: Iterable[Row]) -> None:
        names = ", ".join(table.columns)
        statement = f"COPY {table.name} ({names}) FROM STDIN".encode()
        with self._connection.cursor() as cursor, cursor.copy(statement) as written:
            for row in rows:
                written.write_row(row)

    def lock(self) -> None:
        """Keep others from the store until the transaction ends.

        Raises:
            StoreLockedError: a program works on it.
        """
        names = ", ".join(("arrival_key", *(table.name for table in TABLES)))
        # Each start reads the version first, and waits for this lock.
        self._connection.execute(b"LOCK TABLE store IN ACCESS EXCLUSIVE MODE")
        self.require_alone()
        self._connection.execute(f"LOCK TABLE {names} IN SHARE MODE".encode())

    def require_alone(self) -> None:
        """Raise StoreLockedError if another program works on the store.

        The server lists connections of a program that has just ended for a moment longer, so this
        waits.
        """
        deadline = clock.monotonic() + ENDING_SECONDS
        while True:
            (others,) = self._connection.execute(_OTHERS).fetchone() or (0,)
            if not others:
                return
            if clock.monotonic() >= deadline:
                raise StoreLockedError(
                    f"{others} other connections of this program use {self._address.place}: stop "
                    "every host's receiver, then repeat this"
                )
            clock.sleep(0.05)
            # Within a transaction the server would show the same list again.
            self._connection.execute("SELECT pg_stat_clear_snapshot()")

    def empty(self) -> None:
        """Remove all rows: those that a start has written, and those of an earlier copy."""
        # The audit trail is append-only, except for tenants in `purging`.
        self._connection.execute("INSERT INTO purging SELECT DISTINCT tenant_id FROM audit")
        for name in ("arrival_key", *(table.name for table in TABLES)):
            self._connection.execute(f"DELETE FROM {name}".encode())

    def analyze(self) -> None:
        """Update the planner's statistics: the first queries would be planned for empty tables."""
        self._connection.execute("ANALYZE")


class PostgresLocation:
    """The :class:`Location` of a store in PostgreSQL.

    Args:
        connection: a patient one to the database. It is the only one of this process there.
        address: the same.
    """

    def __init__(self, connection: "StoreConnection", address: "PostgresAddress") -> None:
        self._connection = connection
        self._address = address
        self.place = f"{address.place}, schema {address.schema}"

    @classmethod
    @contextmanager
    def connected(cls, address: "PostgresAddress") -> Iterator["PostgresLocation"]:
        """Connect to the database for the block.

        Raises:
            StorageError: no server answers, it refuses, or it failed in the block.
        """
        with address.connected(patient=True) as connection:
            yield cls(connection, address)

    @contextmanager
    def transaction(self, *, snapshot: bool = False) -> Iterator[PostgresSide]:
        """Begin a transaction without a limit of time, and commit it at the end of the block.

        Args:
            snapshot: it only reads, and sees the state at its beginning.

        Raises:
            psycopg.Error: the server failed.
        """
        with self._address.transaction(self._connection, snapshot=snapshot):
            for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
                self._connection.execute(f"SET LOCAL {name} TO 0".encode())
            yield PostgresSide(self._connection, self._address)

    def reading(self) -> AbstractContextManager[PostgresSide]:
        return self.transaction(snapshot=True)

    @contextmanager
    def locked(self) -> Iterator[PostgresSide]:
        with self.transaction() as side:
            side.state.require_current_or_moved()
            side.lock()
            # Checked again behind the lock: a move to this location may have begun meanwhile.
            side.state.require_current_or_moved()
            yield side
            side.require_alone()

    def survey(self) -> StoreSurvey:
        with self.reading() as side:
            side.require_alone()
            return StoreSurvey.of(side, _REMEDY)

    def fill(self, source: Side, report: Report) -> dict[str, Copied]:
        from .engines.postgres_migration import migrate_postgres

        if self.survey().require_fillable() is Fillable.EMPTY:
            migrate_postgres(self._address)
        with self.transaction() as target:
            target.lock()
            # Checked again behind a lock: two moves may have been started at once.
            StoreSurvey.of(target, _REMEDY).require_fillable()
            target.set_version(FILLING)
        with self.transaction() as target:
            target.lock()
            target.empty()
            copied = copy(source, target, report)
        with self.transaction() as target:
            target.analyze()
        compare(self, copied, report)
        return copied

    def complete(self, finish: Callable[[SqlTransaction], None] = lambda _: None) -> None:
        """Remove the mark of a store that is being filled, after ``finish``."""
        with self.transaction() as side:
            finish(side.tx)
            side.set_version(VERSION)
