"""Which databases are ours, what makes them, and how statements are read by both engines."""

import re

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.errors import StoreVersionError
from sdk_trio.storage.sql.dialect import Dialect, Insert
from sdk_trio.storage.sql.schema import OWN_TABLES, TABLES, VERSION, statements
from sdk_trio.storage.sql.versions import APPLICATION_ID, prepare_sqlite

SQLITE, POSTGRESQL = Dialect("sqlite"), Dialect("postgresql", server_clock=True)

#: The tables that both engines have.
NAMES = {table.name for table in TABLES}


def prepared(application_id: int = 0, version: int = 0, before: str = "") -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.execute(before)
    connection.execute(f"PRAGMA application_id = {application_id}; PRAGMA user_version = {version}")
    prepare_sqlite(connection, "/data/inbox.db")
    return connection


def test_a_new_file_gets_all_tables_and_both_marks() -> None:
    connection = prepared()
    assert connection.pragma("application_id") == APPLICATION_ID
    assert connection.pragma("user_version") == VERSION
    tables = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    assert {name for (name,) in connection.execute(tables)} == OWN_TABLES
    assert NAMES < OWN_TABLES


def test_a_current_file_is_left_alone() -> None:
    connection = prepared()
    before = connection.pragma("schema_version")
    prepare_sqlite(connection, "/data/inbox.db")
    assert connection.pragma("schema_version") == before


@pytest.mark.parametrize(
    ("application_id", "version", "before"),
    [
        (0, 0, "CREATE TABLE bookmarks (url)"),
        (0, 3, ""),
        (12345, 0, ""),
        (12345, VERSION, "CREATE TABLE bookmarks (url)"),
    ],
)
def test_a_database_of_another_program_is_refused(
    application_id: int, version: int, before: str
) -> None:
    with pytest.raises(StoreVersionError, match=r"/data/inbox.db.*another program.*Storage:Path"):
        prepared(application_id, version, before)


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(StoreVersionError, match="install the version that wrote it"):
        prepared(APPLICATION_ID, VERSION + 1)


def test_a_file_that_was_moved_to_postgresql_is_refused_with_what_to_do() -> None:
    with pytest.raises(StoreVersionError, match=r"was moved to PostgreSQL.*Sdk:Storage:Backend"):
        prepared(APPLICATION_ID, -1)


def test_only_the_mark_of_a_move_means_that_a_file_was_moved() -> None:
    with pytest.raises(StoreVersionError, match=r"has version -3, and is not a store of this pro"):
        prepared(APPLICATION_ID, -3)


def test_both_engines_get_the_same_columns() -> None:
    """Except for their types: no statement names a type that only one engine has."""

    def columns(dialect: Dialect) -> dict[str, list[str]]:
        found = {}
        for statement in statements(dialect):
            made = re.match(r"\s*CREATE TABLE (\w+) \((.*)\)", statement, re.DOTALL)
            if made is not None and made[1] in NAMES:
                # One column stands on each line, or the names of all on one.
                body = re.sub(r"\([^()]*\)", "", made[2])
                names = [part.split()[0] for part in body.split(",") if part.split()]
                found[made[1]] = names
        return found

    assert columns(SQLITE) == columns(POSTGRESQL)
    assert set(columns(SQLITE)) == NAMES


# -- dialects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "sqlite", "postgresql"),
    [
        ("a = :b", "a = :b", "a = %(b)s"),
        ("CAST(a AS text)::text", "CAST(a AS text)::text", "CAST(a AS text)::text"),
        ("a LIKE 'b%'", "a LIKE 'b%'", "a LIKE 'b%%'"),
        (
            "a IN ints(:b)",
            "a IN (SELECT value FROM json_each(:b))",
            "a = ANY(CAST(%(b)s AS bigint[]))",
        ),
        (
            "a IN texts(:b)",
            "a IN (SELECT value FROM json_each(:b))",
            "a = ANY(CAST(%(b)s AS text[]))",
        ),
        ("SELECT 1 FOR UPDATE", "SELECT 1", "SELECT 1 FOR UPDATE"),
        ("SELECT 1 FOR NO KEY UPDATE", "SELECT 1", "SELECT 1 FOR NO KEY UPDATE"),
        (
            "SELECT 1 FROM work FOR UPDATE OF work SKIP LOCKED",
            "SELECT 1 FROM work",
            "SELECT 1 FROM work FOR UPDATE OF work SKIP LOCKED",
        ),
        ("local(a) < 1", "a < 1", None),
        ("a < clock()", "a < CAST(:now AS float8)", None),
    ],
)
def test_a_statement_is_read_by_both(written: str, sqlite: str, postgresql: str | None) -> None:
    assert SQLITE.translate(written).text == sqlite
    if postgresql is not None:
        assert POSTGRESQL.translate(written).text == postgresql


def test_times_are_those_of_the_server_only_where_it_has_a_clock() -> None:
    written = "UPDATE work SET lease_until = clock() + :seconds, next_attempt_at = due(:at)"
    with_server = POSTGRESQL.translate(written).text
    assert with_server.count("statement_timestamp()") == 2
    assert "%(now)s" in with_server, "the distance of the caller's time to its own clock"
    assert "statement_timestamp" not in SQLITE.translate(written).text


def test_lists_are_named_by_their_parameters() -> None:
    statement = "DELETE FROM work WHERE sequence IN ints(:one) AND lease_token IN ints(:other)"
    assert SQLITE.translate(statement).lists == ("one", "other")


ROW = st.tuples(st.text(), st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.binary())


@given(st.lists(ROW, max_size=100))
def test_rows_that_are_inserted_at_once_keep_values_and_order(rows) -> None:  # type: ignore[no-untyped-def] # rows
    from sdk_trio.storage.engines.sqlite_connection import SqliteTransaction

    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b INTEGER, c BLOB) STRICT")
    insert = Insert("t", {"a": "text", "b": "bigint", "c": "bytea"}, "RETURNING id")
    rows = [(a.replace("\0", ""), b, c) for a, b, c in rows]
    returned = SqliteTransaction(connection).insert(insert, rows)
    assert [number for (number,) in returned] == list(range(1, len(rows) + 1))
    assert connection.execute("SELECT a, b, c FROM t ORDER BY id").fetchall() == rows
