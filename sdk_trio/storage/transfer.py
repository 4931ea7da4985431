"""The move of a whole store between SQLite and PostgreSQL: ``storage migrate``.

There are three steps, each synced before the next. First, the target is completed, and still marked
as being filled. Second, the source is marked as moved. Third, the target's mark is removed. So at
any moment at most one of the two stores can be opened. A killed move is repeated: it begins again
before the second step, and continues after it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw
import attrs

from ..base import clock
from ..errors import StorageError, StoreLockedError, StoreVersionError
from .copying import (
    Copied,
    Report,
    Side,
    SqliteSide,
    TransferError,
    check_target_file,
    copy,
    count_rows,
    digests,
    filled_table,
    filling_file,
    new_file,
    opened,
    put_in_place,
    require_equal,
    select,
)
from .engines import postgres_days
from .engines.postgres import POSTGRESQL, PostgresTransaction
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .engines.postgres_migration import find_version, read_version
from .engines.sqlite_connection import connect_writer, describe_failure
from .postgres_inbox import migrate
from .sql.dialect import Row, SqlTransaction
from .sql.reads import other_tables
from .sql.schema import APPLICATION_ID, FILLING, MOVED, TABLES, VERSION, Table, make_day

#: Time for which the server may still list connections of a program that has ended, in seconds.
ENDING_SECONDS = 1.0

_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
    AND split_part(application_name, ' ', 1)
        = split_part(current_setting('application_name'), ' ', 1)
    AND pid <> pg_backend_pid()
"""


# -- the side in PostgreSQL ----------------------------------------------------------------------


class PostgresSide:
    """A :class:`storage.copying.Side` in a database.

    Args:
        connection: one to the database.
        address: the database and the schema.
    """

    def __init__(self, connection: StoreConnection, address: PostgresAddress) -> None:
        self._connection = connection
        self._address = address
        self.place = f"{address.place}, schema {address.schema}"
        self.tx = PostgresTransaction(connection, POSTGRESQL)

    def rows(self, table: Table) -> Iterator[Row]:
        # In the order of SQLite, which compares bytes.
        order = (
            f'{key} COLLATE "C"' if table.columns[key] == "text" else key for key in table.keys
        )
        numbers = ("identity", "number")
        kinds = ["bigint" if kind in numbers else kind for kind in table.columns.values()]
        statement = f"COPY ({select(table, order)}) TO STDOUT".encode()
        with self._connection.cursor() as cursor, cursor.copy(statement) as rows:
            rows.set_types(kinds)
            yield from rows.rows()

    def add(self, table: Table, rows: Iterable[Row]) -> None:
        names = ", ".join(table.columns)
        statement = f"COPY {table.name} ({names}) FROM STDIN".encode()
        with self._connection.cursor() as cursor, cursor.copy(statement) as written:
            for row in rows:
                written.write_row(row)

    @property
    def version(self) -> int | None:
        """The version of the schema; None without one."""
        return find_version(self._connection)

    def set_version(self, version: int) -> None:
        """Write the version of the schema."""
        self._connection.execute("UPDATE store SET version = %s", (version,))

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

    def prepare(self, numbers: Iterable[int]) -> None:
        known = {day.number for day in postgres_days.read(self.tx)}
        for number in sorted(set(numbers) - known):
            for statement in make_day(number):
                self.tx.run(statement)
            self.tx.run(
                "INSERT INTO day (number, until) VALUES (:number, :until)",
                number=number,
                until=number + 1,
            )

    def empty(self) -> None:
        """Remove all rows: those that a start has written, and those of an earlier copy."""
        # The audit trail is append-only, except for tenants in `purging`.
        self._connection.execute("INSERT INTO purging SELECT DISTINCT tenant_id FROM audit")
        for name in ("arrival_key", *(table.name for table in TABLES)):
            self._connection.execute(f"DELETE FROM {name}".encode())

    def analyze(self) -> None:
        """Update the planner's statistics: the first queries would be planned for empty tables."""
        self._connection.execute("ANALYZE")


@contextmanager
def in_long_transaction(
    connection: StoreConnection, address: PostgresAddress, *, snapshot: bool = False
) -> Iterator[PostgresSide]:
    """Begin a transaction without a limit of time, and commit it at the end of the block.

    Args:
        connection: a patient one to the database.
        address: the same.
        snapshot: it only reads, and sees the state at its beginning.

    Raises:
        psycopg.Error: the server failed.
    """
    with address.transaction(connection, snapshot=snapshot):
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(f"SET LOCAL {name} TO 0".encode())
        yield PostgresSide(connection, address)


# -- plans and results ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class TransferPlan:
    """The findings before a move.

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


@attrs.frozen(kw_only=True)
class Transferred:
    """The rows that were moved and compared, by table, and the tables that were not moved."""

    target: str
    rows: Mapping[str, int]
    left_behind: Sequence[str]


# -- to PostgreSQL -------------------------------------------------------------------------------


def plan_to_postgres(file: Path, address: PostgresAddress) -> TransferPlan:
    """Look at both stores and change nothing; blocks.

    Raises:
        StorageError: one of them cannot be read.
    """
    with opened(file) as source:
        moved = _version_of_source(source) == MOVED
        plan = TransferPlan(
            source=source.place,
            target=address.place,
            rows=count_rows(source.tx),
            left_behind=other_tables(source.tx),
        )
        with address.connected(patient=True) as connection:
            try:
                begun = _check_target_database(connection, address, moved=moved)
            except StorageError as error:
                return attrs.evolve(plan, refusal=str(error))
        return attrs.evolve(plan, begun=begun)


def move_to_postgres(file: Path, address: PostgresAddress, *, report: Report) -> Transferred:
    """Move the store in ``file`` to ``address``; blocks. The caller holds the directory's lock.

    Args:
        file: the database of the source.
        address: the target, whose schema is created if it is missing. It is empty, or an earlier
            move was not completed.
        report: called again and again.

    Raises:
        TransferError: the target is not empty, or has other rows than the source.
        StoreLockedError: a program works on the target.
        StorageError: one of the stores cannot be used.
    """
    with _written(file) as source, address.connected(patient=True) as connection:
        moved = _version_of_source(source) == MOVED
        _check_target_database(connection, address, moved=moved)
        if moved:
            copied = digests(source, report)
            require_filled(connection, address, copied, report)
        else:
            copied = fill_database(source, connection, address, report)
        left_behind = other_tables(source.tx)
        source.connection.execute(f"PRAGMA user_version = {MOVED}")
        source.connection.execute("COMMIT")
        with in_long_transaction(connection, address) as target:
            target.set_version(VERSION)
        rows = {name: each.rows for name, each in copied.items()}
        return Transferred(target=address.place, rows=rows, left_behind=left_behind)


@contextmanager
def _written(file: Path) -> Iterator[SqliteSide]:
    """Open ``file``, and keep others from writing to it until the transaction ends."""
    try:
        connection = connect_writer(str(file), lambda _: None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield SqliteSide(connection, file)
        finally:
            connection.close()
    except apsw.Error as error:
        raise describe_failure(error, str(file)) from error


def _version_of_source(source: SqliteSide) -> int:
    version = int(source.connection.pragma("user_version"))
    if source.connection.pragma("application_id") != APPLICATION_ID:
        raise StoreVersionError(f"{source.place} is a SQLite database of another program")
    if version not in (VERSION, MOVED):
        raise StoreVersionError(
            f"{source.place} has version {version}, and a store of version {VERSION} is moved: "
            "'storage status' shows what the next start makes of it"
        )
    return version


def _check_target_database(
    connection: StoreConnection, address: PostgresAddress, *, moved: bool
) -> bool:
    """Return whether an earlier move to the database was not completed.

    Raises:
        StoreLockedError: a program works on it.
        TransferError: it holds rows that are not from a move, or the source was ``moved`` already.
        StoreVersionError: it is of another version, or another program's.
    """
    with in_long_transaction(connection, address, snapshot=True) as target:
        target.require_alone()
        version = target.version
        if version == FILLING:
            return True
        if moved:
            raise TransferError("the source was moved already; set Sdk:Storage:Backend to Postgres")
        _require_empty(target, address, version)
    if version is None:
        read_version(address, connection, VERSION)
    return False


def _require_empty(target: PostgresSide, address: PostgresAddress, version: int | None) -> None:
    place = f"the schema {address.schema} of {address.place}"
    remedy = "a store is moved into an empty one; name another schema in Sdk:Storage:PostgresSchema"
    if version == MOVED:
        raise TransferError(f"{place} holds a store that was moved to SQLite: {remedy}")
    if version is not None and version != VERSION:
        raise StoreVersionError(
            f"{place} has version {version}, this version of sdk_trio moves a store to {VERSION}"
        )
    if version is not None and (name := filled_table(target.tx)) is not None:
        raise TransferError(f"{place} is not empty (it has rows in {name}): {remedy}")


def fill_database(
    source: Side, connection: StoreConnection, address: PostgresAddress, report: Report
) -> dict[str, Copied]:
    """Copy ``source`` into an empty store of PostgreSQL, which is marked as being filled; blocks.

    Raises:
        TransferError: the store is not empty, or has other rows than the source afterwards.
        StoreLockedError: a program works on it.
        StorageError: it cannot be used.
    """
    if not _check_target_database(connection, address, moved=False):
        migrate(address)
    with in_long_transaction(connection, address) as target:
        target.lock()
        # Checked again behind a lock: two moves may have been started at once.
        if target.version != FILLING:
            _require_empty(target, address, target.version)
        target.set_version(FILLING)
    with in_long_transaction(connection, address) as target:
        target.lock()
        target.empty()
        copied = copy(source, target, report)
    with in_long_transaction(connection, address) as target:
        target.analyze()
    require_filled(connection, address, copied, report)
    return copied


def require_filled(
    connection: StoreConnection,
    address: PostgresAddress,
    copied: Mapping[str, Copied],
    report: Report,
) -> None:
    """Raise TransferError if the database has other rows than ``copied``; blocks."""
    with in_long_transaction(connection, address, snapshot=True) as target:
        require_equal(copied, digests(target, report), target.place)


# -- to SQLite -----------------------------------------------------------------------------------


def plan_to_sqlite(address: PostgresAddress, file: Path) -> TransferPlan:
    """Look at both stores and change nothing; blocks.

    Raises:
        StorageError: the source cannot be read.
    """
    with (
        address.connected(patient=True) as connection,
        in_long_transaction(connection, address, snapshot=True) as source,
    ):
        version = _version_of_database(source, address)
        plan = TransferPlan(
            source=source.place, target=str(file), rows=count_rows(source.tx), left_behind=()
        )
        try:
            begun = check_target_file(file, moved=version == MOVED)
            source.require_alone()
        except StorageError as error:
            return attrs.evolve(plan, refusal=str(error))
        return attrs.evolve(plan, begun=begun)


def move_to_sqlite(address: PostgresAddress, file: Path, *, report: Report) -> Transferred:
    """Move the store at ``address`` to ``file``; blocks. The caller holds the directory's lock.

    Args:
        address: the source.
        file: the database of the target: missing, an empty store, or of an earlier move that was
            not completed.
        report: called again and again.

    Raises:
        TransferError: the target is not empty, or has other rows than the source.
        StoreLockedError: a program works on the source.
        StorageError: one of the stores cannot be used.
        OSError: the target's disk failed, or is full.
    """
    with (
        address.connected(patient=True) as connection,
        in_long_transaction(connection, address) as source,
    ):
        moved = _version_of_database(source, address) == MOVED
        source.lock()
        check_target_file(file, moved=moved)
        copied = digests(source, report) if moved else _fill_file(source, file, report)
        with opened(file) as target:
            require_equal(copied, digests(target, report), target.place)
        source.require_alone()
        source.set_version(MOVED)
    with opened(file, apsw.SQLITE_OPEN_READWRITE) as target:
        target.connection.execute(f"PRAGMA user_version = {VERSION}")
    rows = {name: each.rows for name, each in copied.items()}
    return Transferred(target=str(file), rows=rows, left_behind=())


def _fill_file(source: Side, file: Path, report: Report) -> dict[str, Copied]:
    new = filling_file(file)
    with new_file(new) as target:
        copied = copy(source, target, report)
        target.connection.execute(f"PRAGMA user_version = {FILLING}")
    put_in_place(new, file)
    return copied


def _version_of_database(source: PostgresSide, address: PostgresAddress) -> int:
    version = source.version
    if version not in (VERSION, MOVED):
        found = "no schema" if version is None else f"version {version} in the schema"
        raise StoreVersionError(
            f"{address.place} has {found} {address.schema}, and a store of version {VERSION} is "
            "moved: 'storage status' shows what the next start makes of it"
        )
    return version


# -- backups -------------------------------------------------------------------------------------


def copy_database(address: PostgresAddress, file: Path, report: Report) -> None:
    """Copy a snapshot of the store at ``address`` to the new file ``file``; blocks.

    Raises:
        TransferError: the copy has other rows.
        StorageError: the store cannot be read, or the file not be written.
        OSError: the file cannot be made.
    """
    with (
        address.connected(patient=True) as connection,
        in_long_transaction(connection, address, snapshot=True) as source,
    ):
        if source.version != VERSION:
            _version_of_database(source, address)
            raise TransferError(f"{source.place} was moved to SQLite: back up that store")
        with new_file(file) as target:
            copied = copy(source, target, report)
    with opened(file) as target:
        require_equal(copied, digests(target, report), target.place)


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
    with address.connected(patient=True) as connection:
        with opened(file) as source:
            fill_database(source, connection, address, report)
        with in_long_transaction(connection, address) as target:
            finish(target.tx)
            target.set_version(VERSION)
