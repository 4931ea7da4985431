"""Creates the schema of PostgreSQL, and brings it up to date."""

from collections.abc import Sequence

import psycopg
from psycopg import sql

from ...base import clock
from ...base.logs import get_logger
from ...errors import StoreUnavailableError
from ..sql.schema import LATER_POSTGRESQL, statements
from ..sql.versions import StoreState
from .postgres import POSTGRESQL
from .postgres_address import PostgresAddress
from .postgres_connection import StoreConnection

#: Time for which a step waits for a lock before it lets others pass, in seconds. While a step waits
#: for the lock of a table, later statements wait behind it, so a long reader would stop every
#: delivery.
LOCK_SECONDS = 1.0

#: Time after which a start gives up a migration that cannot get its locks, in seconds.
MIGRATION_SECONDS = 600.0

# Errors of a step while another host runs the same step, or any session holds a lock that it needs.
_OTHERS = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.DuplicateSchema,
    psycopg.errors.DuplicateTable,
    psycopg.errors.UniqueViolation,
)

_log = get_logger("storage")


def migrate_postgres(
    address: PostgresAddress, versions: Sequence[Sequence[str]] | None = None
) -> None:
    """Create the tables or bring them up to date, one process at a time; blocks.

    Hosts of the previous version continue to work meanwhile, so a step must not break what that
    version reads and writes. Each step is one transaction, and stays if a later one fails. To add
    an index to a large table, run CREATE INDEX CONCURRENTLY IF NOT EXISTS outside of a transaction
    before the step, and drop it first if it is invalid in pg_index.

    Args:
        address: the store.
        versions: the statements that create version 1, those from 1 to 2, and so on; None: those
            of this package.

    Raises:
        StoreVersionError: the schema is newer, or another program's, or being filled.
        StoreUnavailableError: others have held its tables for :data:`MIGRATION_SECONDS`, or the
            server refuses.
    """
    if versions is None:
        versions = (statements(POSTGRESQL), *LATER_POSTGRESQL)
    deadline = clock.monotonic() + MIGRATION_SECONDS
    newest = len(versions)
    # Patient, because a step may change a large table.
    with address.connected(patient=True) as connection:
        # Most starts find the schema up to date, and must not wait for a lock.
        while (version := read_state(address, connection).known_version(newest)) != newest:
            try:
                _step(address, connection, version, versions[version or 0])
            except _OTHERS:
                if clock.monotonic() > deadline:
                    raise
                clock.sleep(LOCK_SECONDS)


def _step(
    address: PostgresAddress,
    connection: StoreConnection,
    version: int | None,
    statements: Sequence[str],
) -> None:
    with address.transaction(connection):
        connection.execute("SET LOCAL statement_timeout TO 0")
        connection.execute(f"SET LOCAL lock_timeout TO {LOCK_SECONDS * 1000:.0f}".encode())
        if version is None:
            # Another host that creates them waits here, and then fails as a duplicate.
            _make_schema(address, connection)
            connection.execute(
                "CREATE TABLE store "
                "(id integer PRIMARY KEY CHECK (id = 1), version integer NOT NULL)"
            )
            connection.execute("INSERT INTO store VALUES (1, 0)")
        else:
            schema = address.schema
            _log.info("store.migrating", schema=schema, before=version, after=version + 1)
            locked = connection.execute("SELECT version FROM store FOR UPDATE").fetchone()
            if locked != (version,):
                return  # another host has run the step meanwhile
        for statement in statements:
            connection.execute(statement.encode())
        connection.execute("UPDATE store SET version = %s", ((version or 0) + 1,))


def _make_schema(address: PostgresAddress, connection: StoreConnection) -> None:
    # Checked first: CREATE SCHEMA IF NOT EXISTS needs the privilege even if the schema exists.
    query = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
    if connection.execute(query, (address.schema,)).fetchone() is None:
        schema = sql.Identifier(address.schema)
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))


_SCHEMA_STATE = """
SELECT (SELECT count(*) FROM pg_tables WHERE schemaname = %s),
    (SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s),
    to_regclass('store') IS NOT NULL
"""


def state_of_schema(address: PostgresAddress, connection: StoreConnection) -> StoreState:
    """Return what is in the schema of a store; within a transaction.

    Raises:
        StoreUnavailableError: the user may not use the schema.
        psycopg.Error: the server failed.
    """
    place = address.schema_place
    names = (address.schema, address.schema)
    found = connection.execute(_SCHEMA_STATE, names).fetchone() or (0, True, False)
    tables, usable, has_version = found
    if usable is False:
        # Tables of a schema without USAGE seem absent.
        raise StoreUnavailableError(
            f"the database {address.place}: the user may not use the schema {address.schema}"
            f"{address.grants()}"
        )
    if has_version:
        (version,) = connection.execute("SELECT version FROM store").fetchone() or (0,)
        return StoreState(place, "PostgreSQL", int(version))
    foreign = "holds tables of another program" if tables else None
    return StoreState(place, "PostgreSQL", None, foreign)


def read_state(address: PostgresAddress, connection: StoreConnection) -> StoreState:
    """Return what is in the schema of a store, in a transaction; see :func:`state_of_schema`."""
    with address.transaction(connection, reading=True):
        return state_of_schema(address, connection)
