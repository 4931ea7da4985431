"""The move of a whole store between SQLite and PostgreSQL: ``storage migrate``.

There are three steps, each synced before the next. First, the target is completed, and still marked
as being filled. Second, the source is marked as moved. Third, the target's mark is removed. So at
any moment at most one of the two stores can be opened. A killed move is repeated: it begins again
before the second step, and continues after it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import attrs

from ..base import clock
from ..errors import StorageError, StoreLockedError
from .copying import (
    Copied,
    Place,
    Report,
    Side,
    SqlitePlace,
    check_target,
    compare,
    copy,
    count_rows,
    digests,
    may_fill,
    new_file,
    opened,
    select,
    survey,
)
from .engines import postgres_days
from .engines.postgres import POSTGRESQL, PostgresTransaction
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .engines.postgres_migration import migrate_postgres, state_of_schema
from .sql.dialect import Row, SqlTransaction
from .sql.reads import other_tables
from .sql.schema import TABLES, VERSION, Table, make_day
from .sql.versions import FILLING, MOVED, StoreState

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
    """A :class:`.copying.Side` in a database.

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
    def state(self) -> StoreState:
        return state_of_schema(self._address, self._connection)

    def set_version(self, version: int) -> None:
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


class PostgresPlace:
    """The :class:`.copying.Place` of a store in PostgreSQL.

    Args:
        connection: a patient one to the database. It is the only one of this process there.
        address: the same.
    """

    remedy = "a store is moved into an empty one; name another schema in Sdk:Storage:PostgresSchema"

    def __init__(self, connection: StoreConnection, address: PostgresAddress) -> None:
        self._connection = connection
        self._address = address
        self.name = address.place

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
            # Checked again behind the lock: a move to this place may have begun meanwhile.
            side.state.require_current_or_moved()
            yield side
            side.require_alone()

    def survey(self) -> tuple[StoreState, str | None]:
        with self.reading() as side:
            side.require_alone()
            return survey(side)

    def fill(self, source: Side, report: Report) -> dict[str, Copied]:
        if not check_target(self):
            migrate_postgres(self._address)
        with self.transaction() as target:
            target.lock()
            # Checked again behind a lock: two moves may have been started at once.
            may_fill(*survey(target), self.remedy)
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


@contextmanager
def connected(address: PostgresAddress) -> Iterator[PostgresPlace]:
    """Connect to the place of a store within the block.

    Raises:
        StorageError: no server answers, it refuses, or it failed in the block.
    """
    with address.connected(patient=True) as connection:
        yield PostgresPlace(connection, address)


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


def plan(source: Place, target: Place) -> Transfer:
    """Look at both stores and change nothing; blocks.

    Raises:
        StorageError: the source cannot be read.
    """
    with source.reading() as side:
        side.state.require_current_or_moved()
        moved = side.state.version == MOVED
        found = _describe(side, target, count_rows(side.tx))
    try:
        source.survey()
        return attrs.evolve(found, begun=check_target(target, moved=moved))
    except StorageError as error:
        return attrs.evolve(found, refusal=str(error))


def move(source: Place, target: Place, *, report: Report) -> Transfer:
    """Move a store to another place; blocks. The caller holds the lock of the data directory.

    Args:
        source: the place of a store.
        target: an empty place, or that of an earlier move that was not completed.
        report: called again and again.

    Raises:
        TransferError: the target is not empty, or has other rows than the source.
        StoreLockedError: a program works on one of the stores.
        StorageError: one of them cannot be used.
        OSError: the disk of a SQLite file failed, or is full.
    """
    with source.locked() as side:
        if side.state.version == MOVED:
            check_target(target, moved=True)
            copied = digests(side, report)
            compare(target, copied, report)
        else:
            copied = target.fill(side, report)
        moved = _describe(side, target, {name: each.rows for name, each in copied.items()})
        side.set_version(MOVED)
    target.complete()
    return moved


def _describe(source: Side, target: Place, rows: Mapping[str, int]) -> Transfer:
    # In PostgreSQL, the application's tables are in schemas of its own.
    left = other_tables(source.tx) if source.tx.dialect.is_sqlite else ()
    return Transfer(source=source.place, target=target.name, rows=rows, left_behind=left)


# -- backups -------------------------------------------------------------------------------------


def copy_database(address: PostgresAddress, file: Path, report: Report) -> None:
    """Copy a snapshot of the store at ``address`` to the new file ``file``; blocks.

    Raises:
        TransferError: the copy has other rows.
        StorageError: the store cannot be read, or the file not be written.
        OSError: the file cannot be made.
    """
    with connected(address) as source, source.reading() as side:
        side.state.require_current()
        with new_file(file) as target:
            copied = copy(side, target, report)
    compare(SqlitePlace(file), copied, report)


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
    with connected(address) as target:
        with opened(file) as source:
            target.fill(source, report)
        target.complete(finish)
