"""A store in PostgreSQL as a side of a copy; see ``storage.copying``."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psycopg

from ..base import clock
from ..errors import StoreLockedError
from .copying import select
from .engines.postgres import PostgresTransaction
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .engines.postgres_migration import find_version
from .sql import days
from .sql.dialect import Dialect, Row
from .sql.schema import TABLES, Table, make_day

#: Time that connections of a program that has ended may still be listed, in seconds.
ENDING_SECONDS = 1.0

_DIALECT = Dialect("postgresql", server_clock=True)

_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
    AND split_part(application_name, ' ', 1)
        = split_part(current_setting('application_name'), ' ', 1)
    AND pid <> pg_backend_pid()
"""


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
        self.tx = PostgresTransaction(connection, _DIALECT)

    def rows(self, table: Table) -> Iterator[Row]:
        """See :meth:`storage.copying.Side.rows`."""
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
        """See :meth:`storage.copying.Side.add`."""
        names = ", ".join(table.columns)
        statement = f"COPY {table.name} ({names}) FROM STDIN".encode()
        with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)

    @property
    def version(self) -> int | None:
        """The version of the schema; None without one."""
        return find_version(self._connection)

    @version.setter
    def version(self, version: int | None) -> None:
        self._connection.execute("UPDATE store SET version = %s", (version,))

    def lock(self) -> None:
        """Keep others from the store until the transaction ends.

        Raises:
            StoreLockedError: a program works on it.
        """
        names = ", ".join(("arrival_key", *(table.name for table in TABLES)))
        # Each start reads the version first.
        self._connection.execute(b"LOCK TABLE store IN ACCESS EXCLUSIVE MODE")
        self.require_alone()
        self._connection.execute(f"LOCK TABLE {names} IN SHARE MODE".encode())

    def require_alone(self) -> None:
        """Raise StoreLockedError if another program works on the store.

        One that has just ended is waited for: the server lists its connections for a moment longer.
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
            # Within a transaction the server would show the same list once more.
            self._connection.execute("SELECT pg_stat_clear_snapshot()")

    def prepare(self, numbers: Iterable[int]) -> None:
        """See :meth:`storage.copying.Side.prepare`."""
        known = {day.number for day in days.read(self.tx)}
        for number in sorted(set(numbers) - known):
            for statement in make_day(number):
                self.tx.run(statement)
            self.tx.run("INSERT INTO day (number, until) VALUES (:number, :until)",
                number=number, until=number + 1)  # fmt: skip

    def empty(self) -> None:
        """Remove all rows: those of starts, and those that an earlier copy has brought."""
        # The audit trail is append-only, but for tenants that are purged.
        self._connection.execute("INSERT INTO purging SELECT DISTINCT tenant_id FROM audit")
        for name in ("arrival_key", *(table.name for table in TABLES)):
            self._connection.execute(f"DELETE FROM {name}".encode())

    def analyze(self) -> None:
        """Have the server count its tables: the first queries would be planned for empty ones."""
        self._connection.execute("ANALYZE")


@contextmanager
def dialled(address: PostgresAddress) -> Iterator[StoreConnection]:
    """Connect to ``address`` for a copy, which may take hours.

    Raises:
        StoreUnavailableError: no server answers, or it failed in the block.
    """
    connection = address.connect()
    connection.limit = math.inf
    try:
        yield connection
    except psycopg.Error as error:
        raise address.describe(error) from error
    finally:
        connection.close()


@contextmanager
def copying(
    connection: StoreConnection, address: PostgresAddress, *, snapshot: bool = False
) -> Iterator[PostgresSide]:
    """Begin a transaction without a limit of time, and commit it at the end of the block.

    Args:
        connection: that of :func:`dialled`.
        address: the same.
        snapshot: it only reads, and sees the moment at which it began.

    Raises:
        psycopg.Error: the server failed.
    """
    with address.transaction(connection, snapshot=snapshot):
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(f"SET LOCAL {name} TO 0".encode())
        yield PostgresSide(connection, address)
