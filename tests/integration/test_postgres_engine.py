"""The engine of PostgreSQL: transactions, values, and servers that are down, slow or hostile."""

import errno
import os
import random
import string
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import attrs
import pytest
from support.ports import free_port
from support.postgres import PostgresServer, pooled, running_server
from support.silent_proxy import SilentProxy, silent_proxy
from support.waiting import wait_until

from sdk_trio.errors import OptionsValidationError, StoreUnavailableError, StoreVersionError
from sdk_trio.storage.sql.dialect import Dialect, Insert

psycopg = pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")

from sdk_trio.storage.engines import (  # noqa: E402
    CommitUnknownError,
    ReadAgainError,
    postgres_address,
    postgres_connection,
)
from sdk_trio.storage.engines.postgres import (  # noqa: E402
    PostgresEngine,
    PostgresReader,
    Redial,
)
from sdk_trio.storage.engines.postgres_address import PostgresAddress  # noqa: E402
from sdk_trio.storage.engines.postgres_migration import migrate_postgres  # noqa: E402

VERSIONS = (
    (
        "CREATE TABLE checkpoint (name text PRIMARY KEY, value text NOT NULL)",
        "CREATE TABLE node (id text PRIMARY KEY, changes bigint NOT NULL, done bigint NOT NULL, "
        "seen_at timestamptz NOT NULL DEFAULT now())",
        "INSERT INTO node (id, changes, done) VALUES ('', 0, 0)",
        "CREATE TABLE item (number bigint GENERATED ALWAYS AS IDENTITY, key text PRIMARY KEY, "
        "body bytea, at float8, attempts integer, ordered boolean)",
    ),
)

ITEM = Insert(
    "item",
    {"key": "text", "body": "bytea", "at": "float8", "attempts": "integer", "ordered": "boolean"},
    "ON CONFLICT DO NOTHING RETURNING number, key",
)

PUT = "INSERT INTO item (key) VALUES (:key)"


@attrs.frozen
class Database:
    """A database of the session's server, and what tests open in it."""

    server: PostgresServer
    dsn: str
    opened: ExitStack
    addresses: dict[str, PostgresAddress] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        return self.dsn.rpartition("=")[2]

    def execute(self, statement: str) -> list[Any]:
        return self.server.execute(statement, self.name)

    def keys(self) -> list[str]:
        return [key for (key,) in self.execute("SELECT key FROM sdk_trio.item ORDER BY number")]

    def end_connections(self) -> None:
        self.server.end_sessions(self.name)

    def end(self, which: str, by: str = "pg_terminate_backend") -> None:
        """Wait for a session that matches ``which``, and end it or its statement."""
        statement = f"SELECT {by}(pid) FROM pg_stat_activity WHERE datname = '{self.name}'"
        wait_until(lambda: self.execute(f"{statement} AND {which}"))

    def address(self, dsn: str = "") -> PostgresAddress:
        return self.addresses.setdefault(dsn or self.dsn, PostgresAddress(dsn=dsn or self.dsn))

    def engine(self, node: str = "one", dsn: str = "") -> PostgresEngine:
        engine = PostgresEngine(self.address(dsn), Dialect("postgresql"), node)
        self.opened.callback(engine.close)
        return engine

    def reader(self, dsn: str = "") -> PostgresReader:
        reader = PostgresReader(self.address(dsn), Dialect("postgresql"))
        self.opened.callback(reader.close)
        return reader


def run(engine: PostgresEngine, work: Callable[[Any], Any]) -> Any:
    """Run ``work`` in one transaction and return its result."""
    results: list[Any] = []
    engine.transact(lambda transaction: results.append(work(transaction)), durable=True)
    return results[-1]


def put(engine: PostgresEngine, *keys: str) -> None:
    """Insert items by one transaction."""
    run(engine, lambda transaction: [transaction.run(PUT, key=key) for key in keys])


def migrate(dsn: str, versions: Any = VERSIONS) -> None:
    address = PostgresAddress(dsn=dsn)
    migrate_postgres(address, versions)


@pytest.fixture
def empty() -> Iterator[Database]:
    server = running_server()
    with ExitStack() as opened:
        yield Database(server, server.empty(), opened)


@pytest.fixture
def database(empty: Database) -> Database:
    migrate(empty.dsn)
    return empty


@pytest.fixture(params=["direct", "pooled"])
def path(request: pytest.FixtureRequest, database: Database) -> Iterator[str]:
    """A connection string: straight to the server, or through PgBouncer."""
    if request.param == "direct":
        yield database.dsn
        return
    with pooled(database.server, database.dsn, connections=3) as dsn:
        yield dsn
        database.opened.close()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture
def role(database: Database) -> Iterator[Callable[[str, str], None]]:
    """Set settings of the role for the length of a test."""
    given = []

    def give(setting: str, value: str) -> None:
        given.append(setting)
        database.execute(f"ALTER ROLE owner SET {setting} = {value}")

    yield give
    for setting in given:
        database.execute(f"ALTER ROLE owner RESET {setting}")


# -- values ----------------------------------------------------------------------------------------

ROWS = [
    ("a", b"\0\xff'\\", 1_700_000_000.123456, 7, True),
    ("nul \0 sub \x1a, {quote\" '\\}", b"", -0.5, None, False),
    ("\u2603 NULL", None, None, 2**31 - 1, None),
]


def test_every_type_of_value_comes_back_as_it_was_written(database: Database, path: str) -> None:
    engine = database.engine(dsn=path)
    made = run(engine, lambda transaction: transaction.insert(ITEM, ROWS))
    assert [key for _, key in made] == [row[0] for row in ROWS]
    assert [number for number, _ in made] == sorted(number for number, _ in made)
    one = "SELECT key, body, at, attempts, ordered FROM item"
    with database.reader(path).transaction() as transaction:
        assert transaction.all(f"{one} ORDER BY number") == ROWS
        assert transaction.one(f"{one} WHERE key = :key", key=ROWS[1][0]) == ROWS[1]
        assert transaction.one(f"{one} WHERE key = :key", key="missing") is None
        found = transaction.all(
            f"{one} WHERE key IN texts(:keys) OR attempts IN ints(:numbers) ORDER BY number",
            keys=[ROWS[1][0], "x"],
            numbers=[7, 2**40],
        )
        assert found == ROWS[:2]
        assert transaction.one("SELECT '50%' WHERE CAST(:key AS text) IS NULL", key=None) == (
            "50%",
        )


def test_columns_without_any_value_and_empty_lists_are_taken(database: Database, path: str) -> None:
    engine = database.engine(dsn=path)

    def work(transaction: Any) -> None:
        assert transaction.insert(ITEM, []) == []
        assert transaction.each(f"{PUT} RETURNING key", []) == []
        rows = [("a", None, None, None, None), ("b", None, None, None, None)]
        assert len(transaction.insert(ITEM, rows)) == 2
        assert transaction.insert(ITEM, rows) == []
        assert transaction.all("SELECT 1 FROM item WHERE key IN texts(:keys)", keys=[]) == []
        assert transaction.all("SELECT 1 FROM item WHERE number IN ints(:ids)", ids=[]) == []

    run(engine, work)


def test_a_statement_for_each_returns_the_first_rows_in_order(
    database: Database, path: str
) -> None:
    engine = database.engine(dsn=path)

    def work(transaction: Any) -> None:
        keys = [{"key": key} for key in ("b", "a", "b", "c")]
        text = f"{PUT} ON CONFLICT DO NOTHING RETURNING key"
        assert transaction.each(text, iter(keys)) == [("b",), ("a",), None, ("c",)]
        text = "UPDATE item SET at = 1 WHERE key = :key RETURNING at"
        assert transaction.each(text, [*keys[:2], {"key": "missing"}]) == [(1.0,), (1.0,), None]
        assert transaction.run("UPDATE item SET at = 2 WHERE at = :at", at=1.0) == 2
        assert transaction.run("UPDATE item SET at = 2 WHERE at = :at", at=1.0) == 0

    run(engine, work)
    assert database.keys() == ["b", "a", "c"]


def test_a_large_batch_goes_through_a_pipeline(database: Database, path: str) -> None:
    engine = database.engine(dsn=path)
    bodies = [{"key": str(number), "body": b"x" * 100_000} for number in range(100)]
    text = "INSERT INTO item (key, body) VALUES (:key, :body) RETURNING key, body"
    rows = run(engine, lambda transaction: transaction.each(text, bodies))
    assert rows == [(each["key"], each["body"]) for each in bodies]


# -- transactions ----------------------------------------------------------------------------------


def test_a_unit_that_raises_changes_nothing(database: Database, path: str) -> None:
    engine = database.engine(dsn=path)

    def fail(transaction: Any) -> None:
        transaction.run(PUT, key="lost")
        transaction.note_change(done=1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(engine, fail)
    with pytest.raises(ZeroDivisionError):  # before it has sent anything
        run(engine, lambda _: 1 // 0)
    put(engine, "kept")
    assert database.keys() == ["kept"]


@pytest.mark.parametrize("call", ["run", "each", "insert"])
def test_a_refused_statement_fails_alone_with_the_reason(
    database: Database, path: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = database.engine(dsn=path)
    put(engine, "taken")
    plain = Insert("item", {"key": "text"})
    calls: dict[str, Callable[[Any], Any]] = {
        "run": lambda transaction: transaction.run(PUT, key="taken"),
        "each": lambda transaction: transaction.each(
            f"{PUT} RETURNING key", [{"key": "new"}, {"key": "taken"}, *[{"key": "more"}] * 100]
        ),
        # Nothing waits for its answer before the COMMIT.
        "insert": lambda transaction: transaction.insert(plain, [("taken",)]),
    }
    with pytest.raises(StoreUnavailableError, match="duplicate key value") as caught:
        run(engine, calls[call])
    assert not isinstance(caught.value, CommitUnknownError)
    put(engine, "next")
    assert database.keys() == ["taken", "next"]
    assert not caplog.records


def test_changes_are_counted_for_the_other_hosts_and_outlive_the_engine(
    database: Database, path: str
) -> None:
    counts = "SELECT id <> '', changes, done FROM sdk_trio.node WHERE changes > 0"
    engine = database.engine("mine", path)

    def work(transaction: Any) -> None:
        transaction.note_change(done=3)
        transaction.note_change(done=-1)

    run(engine, work)
    put(engine, "uncounted")
    assert database.execute(counts) == [(True, 2, 2)]
    engine.close()
    assert database.execute(counts) == [(False, 2, 2)]


@pytest.mark.parametrize("is_one_unit", [True, False])
def test_a_whole_unit_is_committed_and_noted_once(
    database: Database, path: str, is_one_unit: bool
) -> None:
    engine = database.engine("mine", path)
    text = f"WITH made AS ({PUT} ON CONFLICT DO NOTHING RETURNING key), note_change(made, 1) "
    text += "SELECT key FROM made"

    def work(transaction: Any, key: str) -> None:
        # A transaction that has changed nothing may continue.
        rows = transaction.run_whole_unit(text, key=key) or transaction.all(
            f"{PUT} RETURNING key", key=f"not {key}"
        )
        transaction.note_change(done=len(rows))

    for key in ("a", "b", "a"):
        engine.transact(
            lambda transaction, key=key: work(transaction, key),
            durable=True,
            is_one_unit=is_one_unit,
        )
    assert database.keys() == ["a", "b", "not a"]
    counts = "SELECT changes, done FROM sdk_trio.node WHERE id = 'mine'"
    assert database.execute(counts) == [(3, 3)]


@pytest.mark.parametrize("is_one_unit", [True, False])
def test_an_insert_as_a_whole_unit_of_what_is_known_changes_nothing(
    database: Database, path: str, is_one_unit: bool
) -> None:
    engine = database.engine(dsn=path)
    row = ("a", b"body", 1.0, 2, None)
    made: list[Any] = []
    for _ in range(2):
        engine.transact(
            lambda transaction: made.append(transaction.insert(ITEM, [row], whole_unit=True)),
            durable=True,
            is_one_unit=is_one_unit,
        )
    assert [len(rows) for rows in made] == [1, 0]
    assert database.keys() == ["a"]


def test_a_lone_unit_that_raises_before_its_statement_changes_nothing(database: Database) -> None:
    engine = database.engine()
    for work in (lambda _: 1 // 0, lambda transaction: (transaction.run(PUT, key="a"), 1 // 0)):
        with pytest.raises(ZeroDivisionError):
            engine.transact(work, durable=True, is_one_unit=True)
    assert database.keys() == []


@pytest.mark.parametrize("limit", ["within", "beyond"])
def test_a_conflict_with_another_transaction_is_tried_again(
    database: Database, path: str, limit: str
) -> None:
    engine = database.engine(dsn=path)
    failures = 5 if limit == "within" else 6
    tried = []

    def work(transaction: Any) -> None:
        tried.append(1)
        transaction.run(PUT, key=f"{len(tried)}")
        if len(tried) <= failures:
            transaction.run("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40P01'; END $$")

    if limit == "within":
        engine.transact(work, durable=True)
        assert database.keys() == ["6"]
    else:
        with pytest.raises(StoreUnavailableError, match="no"):
            engine.transact(work, durable=True)
        assert database.keys() == []
    assert len(tried) == 6


def test_work_outside_of_a_transaction_gets_the_connection(database: Database) -> None:
    engine = database.engine()
    made = engine.run_outside_transaction(
        lambda connection: connection.execute("SELECT 7").fetchone()
    )
    assert made == (7,)
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        engine.run_outside_transaction(lambda connection: connection.execute("SELECT nothing"))


def test_a_statement_is_planned_once_whatever_its_values(database: Database) -> None:
    engine = database.engine()
    text = "UPDATE item SET attempts = :number WHERE number = :number"
    for exponent in range(60):
        run(engine, lambda transaction, n=2**exponent: transaction.run(text, number=n - n % 2))
    plans = "SELECT custom_plans, generic_plans > 0 FROM pg_prepared_statements WHERE statement "
    plans += "LIKE 'UPDATE item%%'"
    shown = engine.run_outside_transaction(lambda connection: connection.execute(plans).fetchall())
    assert shown == [(0, True)]


# -- an unavailable server, and commits with an unknown outcome -------------------------------


def test_connections_that_the_server_has_ended_are_replaced_unnoticed(database: Database) -> None:
    engine, reader = database.engine(), database.reader()
    for number in range(3):
        put(engine, f"{number}")
        with reader.transaction() as transaction:
            assert transaction.one("SELECT count(*) FROM item") == (number + 1,)
        database.end_connections()


def test_a_transaction_that_broke_before_its_commit_runs_again_once(
    database: Database, path: str
) -> None:
    engine = database.engine(dsn=path)
    put(engine, "before")
    ended: list[int] = []

    def work(transaction: Any, times: int) -> None:
        transaction.run(PUT, key=f"{times}-{len(ended)}")
        if len(ended) < times:
            ended.append(1)
            database.end_connections()
        transaction.one("SELECT 1")

    engine.transact(lambda transaction: work(transaction, 1), durable=True)
    assert database.keys() == ["before", "1-1"]
    ended.clear()
    with pytest.raises(StoreUnavailableError) as caught:
        engine.transact(lambda transaction: work(transaction, 3), durable=True)
    assert not isinstance(caught.value, CommitUnknownError)
    assert database.keys() == ["before", "1-1"]


@pytest.mark.parametrize("is_one_unit", [True, False])
@pytest.mark.parametrize(
    ("by", "message"),
    [("pg_terminate_backend", "broke during a commit"), ("pg_cancel_backend", "no standby has")],
)
def test_a_commit_whose_end_is_unknown_is_reported_and_not_run_again(
    database: Database,
    thread: ThreadPoolExecutor,
    path: str,
    by: str,
    message: str,
    role: Any,
    is_one_unit: bool,
) -> None:
    role("client_min_messages", "error")  # which hides the warning
    engine = database.engine(dsn=path)
    put(engine, "before")
    ran = []

    def work(transaction: Any) -> None:
        ran.append(1)
        transaction.run_whole_unit(f"{PUT} RETURNING key", key="unknown")
        if not is_one_unit:
            transaction.note_change()

    with database.server.without_its_standby():
        committing = thread.submit(engine.transact, work, durable=True, is_one_unit=is_one_unit)
        database.end("wait_event = 'SyncRep'", by)
        with pytest.raises(CommitUnknownError, match=message):
            committing.result(60)
    assert (len(ran), database.keys()) == (1, ["before", "unknown"])
    put(engine, "after")


def test_an_unavailable_server_is_dialled_after_pauses_until_it_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dials: list[str] = []
    connect = psycopg.Connection.connect.__func__

    def count(kind: Any, conninfo: str, **options: Any) -> Any:
        dials.append(conninfo)
        return connect(kind, conninfo, **options)

    monkeypatch.setattr(postgres_connection.StoreConnection, "connect", classmethod(count))
    server = PostgresServer(running_server().programs)
    server.start()
    try:
        with ExitStack() as opened, caplog.at_level("INFO", logger="sdk_trio"):
            database = Database(server, server.dsn(), opened)
            migrate(database.dsn)
            engine, reader = database.engine(), database.reader()
            put(engine, "before")
            server.stop()
            for _ in range(100):
                with pytest.raises(StoreUnavailableError, match="continues by itself"):
                    put(engine, "away")
            assert len(dials) < 50, "each pause is twice as long as the one before"
            with pytest.raises(StoreUnavailableError), reader.transaction():
                pass
            server.start()
            wait_until(lambda: _succeeds(lambda: put(engine, "after")))
            assert database.keys() == ["before", "after"]
        logged = [record.getMessage() for record in caplog.records]
        events = [each.split()[0] for each in logged]
        assert events == ["store.unavailable"] * 2 + ["store.answers"], "one for each connection"
        failed = int(logged[-1].rpartition("failed=")[2].split()[0])
        assert failed > 100, "each refused call is counted"
    finally:
        server.remove()


def _succeeds(call: Callable[[], object]) -> bool:
    with suppress(StoreUnavailableError):
        call()
        return True
    return False


def test_each_outage_is_logged_also_by_a_part_that_has_not_dialled_since_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = PostgresAddress(dsn="host=/nowhere").outage
    commits, effects = Redial(outage), Redial(outage)
    with caplog.at_level("INFO", logger="sdk_trio"):
        commits.failed(StoreUnavailableError("restart"))
        effects.failed(StoreUnavailableError("restart"))
        commits.succeeded()
        effects.failed(StoreUnavailableError("no slot for another connection"))
        effects.succeeded()
    logged = [record.getMessage().split()[0] for record in caplog.records]
    away, answers = "store.unavailable", "store.answers"
    assert logged == [away, away, answers, away, answers]


def test_a_read_only_database_is_unavailable_until_it_writes_again(database: Database) -> None:
    engine = database.engine()
    put(engine, "before")
    database.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    database.end_connections()
    with pytest.raises(StoreUnavailableError, match=r"read-only.*default_transaction_read_only"):
        put(engine, "refused")
    database.server.execute(f"ALTER DATABASE {database.name} RESET default_transaction_read_only")
    wait_until(lambda: _succeeds(lambda: put(engine, "after")))
    assert database.keys() == ["before", "after"]


def test_a_connection_to_a_server_that_has_become_a_standby_is_replaced(database: Database) -> None:
    engine = database.engine()
    put(engine, "before")
    engine.run_outside_transaction(
        lambda connection: connection.execute("SET default_transaction_read_only = on")
    )
    put(engine, "after")
    assert database.keys() == ["before", "after"]


# -- locks -----------------------------------------------------------------------------------------


@contextmanager
def holding(database: Database, statement: str, name: str = "the-holder") -> Iterator[None]:
    with psycopg.connect(database.dsn, application_name=name) as another:
        another.execute(statement)
        yield


@pytest.mark.parametrize(
    "lock", ["LOCK TABLE sdk_trio.item", "SELECT FROM sdk_trio.item FOR UPDATE"]
)
def test_the_session_that_holds_a_lock_is_named_and_no_other(
    database: Database, path: str, lock: str
) -> None:
    engine = database.engine(dsn=path)
    put(engine, "a")
    touch = "UPDATE item SET at = 1 WHERE key = :key"
    database.execute("CREATE TABLE public.theirs ()")
    with (
        # It has begun before, and holds tables of the application.
        holding(database, "LOCK TABLE public.theirs", "innocent"),
        holding(database, lock),
        pytest.raises(StoreUnavailableError, match=r"holder is the session \d+ \(the-h"),
    ):
        run(engine, lambda transaction: transaction.run(touch, key="a"))
    assert run(engine, lambda transaction: transaction.run(touch, key="a")) == 1


def test_units_of_a_batch_that_has_waited_for_a_lock_wait_briefly(
    database: Database, path: str
) -> None:
    engine = database.engine(dsn=path)
    put(engine, "a")
    limits: list[str] = []

    def work(transaction: Any) -> None:
        limits.append(transaction.one("SHOW lock_timeout")[0])
        transaction.run("UPDATE item SET at = 1")

    with holding(database, "SELECT FROM sdk_trio.item FOR UPDATE"):
        engine.acquire()
        for _ in range(3):
            with pytest.raises(StoreUnavailableError, match="a lock was not free within 2 s"):
                engine.transact(work, durable=True)
        engine.acquire()
    engine.transact(work, durable=True)
    assert limits == ["2s", "10ms", "10ms", "2s"]


# -- settings of the role --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("client_min_messages", "error"),
        ("synchronous_commit", "off"),
        ("synchronous_commit", "local"),
        ("default_transaction_isolation", "serializable"),
        ("statement_timeout", "'1h'"),
        ("lock_timeout", "'1h'"),
        ("idle_in_transaction_session_timeout", "0"),
        ("standard_conforming_strings", "off"),
        ("extra_float_digits", "-15"),
        ("array_nulls", "off"),
        ("search_path", "nowhere"),
    ],
)
def test_no_setting_of_the_role_reaches_a_transaction(
    database: Database, path: str, role: Any, setting: str, value: str
) -> None:
    show = f"SHOW {setting.replace('default_', '')}"
    expected = run(database.engine(), lambda transaction: transaction.one(show))
    role(setting, value)
    engine = database.engine("two", path)
    assert run(engine, lambda transaction: transaction.one(show)) == expected
    run(engine, lambda transaction: transaction.insert(ITEM, ROWS))
    with database.reader(path).transaction() as transaction:
        items = "SELECT key, body, at, attempts, ordered FROM item ORDER BY number"
        assert transaction.all(items) == ROWS


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_texts_of_all_scripts_are_stored_under_any_client_encoding(
    database: Database, encoding: str
) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET client_encoding = {encoding}")
    put(database.engine(dsn=f"{database.dsn} client_encoding={encoding}"), "\u2603")
    database.execute(f"ALTER DATABASE {database.name} RESET client_encoding")
    assert database.keys() == ["\u2603"]


def test_a_database_that_cannot_hold_every_text_is_refused(empty: Database) -> None:
    name = f"{empty.name}_latin"
    empty.server.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreVersionError, match=r"LATIN1.*ENCODING 'UTF8'"):
        PostgresAddress(dsn=empty.server.dsn(name)).connect()


def test_a_reader_changes_nothing(database: Database) -> None:
    with (
        pytest.raises(StoreUnavailableError, match="read-only transaction"),
        database.reader().transaction() as transaction,
    ):
        transaction.run(PUT, key="a")


# -- a pooler in between ---------------------------------------------------------------------------


def test_a_pooler_that_changes_connections_changes_nothing(
    database: Database, thread: ThreadPoolExecutor
) -> None:
    with pooled(database.server, database.dsn, connections=2) as dsn:

        def work(name: str) -> None:
            engine, reader = database.engine(name, dsn), database.reader(dsn)
            for number in range(15):
                put(engine, f"{name}-{number}")
                with reader.transaction() as transaction:
                    rows = transaction.all(
                        "SELECT key FROM item WHERE key LIKE :key", key=f"{name}-%"
                    )
                assert len(rows) == number + 1

        for each in [thread.submit(work, name) for name in string.ascii_lowercase[:3]]:
            each.result(60)
        assert len(database.keys()) == 45
        database.opened.close()


# -- connections -----------------------------------------------------------------------------------


@pytest.fixture
def proxy(database: Database) -> Iterator[SilentProxy]:
    with silent_proxy(database.server.directory) as proxy:
        yield proxy


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the limits that half-open connections run into."""
    monkeypatch.setattr(postgres_address, "WRITE_SECONDS", 1)
    monkeypatch.setattr(postgres_address, "STATEMENT_SECONDS", 1)
    monkeypatch.setattr(postgres_connection, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(postgres_connection, "WATCH_SECONDS", 0.1)


@pytest.mark.usefixtures("_hasty")
def test_a_half_open_connection_is_closed_and_replaced(
    database: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = f"host=127.0.0.1 port={proxy.port} user=owner dbname={database.name}"
    engine, reader = database.engine(dsn=dsn), database.reader(dsn)
    put(engine, "before")
    with reader.transaction() as transaction:
        assert transaction.one("SELECT 1") == (1,)
    proxy.fall_silent()
    put(engine, "after")
    assert "store.connection_cut" in caplog.text
    assert database.name in caplog.text
    with pytest.raises(ReadAgainError), reader.transaction() as transaction:
        transaction.one("SELECT 1")
    with reader.transaction() as transaction:
        assert transaction.one("SELECT count(*) FROM item") == (2,)


@pytest.mark.parametrize("server", ["answers", "silent", "takes no request"])
def test_a_query_that_is_interrupted_ends_and_its_connection_is_not_used_again(
    database: Database,
    proxy: SilentProxy,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
) -> None:
    dsn = f"host=127.0.0.1 port={proxy.port} user=owner dbname={database.name}"
    reader = database.reader(dsn)

    def query() -> None:
        with reader.transaction() as transaction:
            transaction.one("SELECT pg_sleep(3600)")

    running: Future[None] = thread.submit(query)
    sleeping = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = '{}'"
    wait_until(lambda: database.execute(sleeping.format(database.name)))
    assert reader.is_usable
    ended = threading.Event()
    if server == "takes no request":  # an older libpq waits for it without a limit
        monkeypatch.setattr(
            postgres_connection.StoreConnection, "cancel_safe", lambda *_, **__: ended.wait(60)
        )
    if server != "answers":
        proxy.fall_silent(new=True)
    interrupting = thread.submit(reader.interrupt)
    with pytest.raises(StoreUnavailableError):
        running.result(30)
    assert not reader.is_usable
    ended.set()
    interrupting.result(30)
    if server == "answers":
        assert not database.execute(sleeping.format(database.name)), "the server has gone on"
    database.end_connections()


def test_a_descriptor_that_cannot_be_duplicated_is_an_error_of_the_store(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    engine = database.engine()
    with monkeypatch.context() as patched:
        patched.setattr("os.dup", fail)
        with pytest.raises(StoreUnavailableError, match="Too many open files"):
            put(engine, "a")
    wait_until(lambda: _succeeds(lambda: put(engine, "a")))


def test_the_thread_that_watches_connections_ends_with_the_last_of_them(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connection, "WATCH_SECONDS", 0.01)

    def watches() -> bool:
        return any(each.name == "sdk-postgres-watch" for each in threading.enumerate())

    for _ in range(2):
        engine = database.engine()
        put(engine, random.randbytes(8).hex())
        assert watches()
        engine.close()
        wait_until(lambda: not watches())


@pytest.mark.parametrize("host", ["h" * 90, "\u00e4" * 60, "odd\udcff", "it's \\ odd"])
def test_a_host_may_have_any_name(
    database: Database, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    with closing(PostgresAddress(dsn=database.dsn).connect()) as connection:
        (name,) = connection.execute("SHOW application_name").fetchone() or ("",)
    assert name.startswith("sdk_trio ")
    assert name.endswith(f":{os.getpid()}")


@pytest.mark.parametrize(
    "dsn",
    [
        "host=/nowhere passwort=hunter2 dbname=x",
        "hunter2",
        "postgresql://u:hunter2@[/x",
        # Passwords with @ and with /, which end before that for libpq.
        "postgresql://u:p@hunter2@localhost:1/x",
        "postgresql://u:p/hunter2@localhost:1/x",
        "postgresql://u:1/hunter2@localhost",
        "host=/nowhere dbname=postgresql://u:hunter2@localhost:1/x",
    ],
)
def test_a_connection_string_that_cannot_be_used_is_not_quoted(dsn: str) -> None:
    with pytest.raises((OptionsValidationError, StoreUnavailableError)) as caught:
        PostgresAddress(dsn=dsn).connect()
    assert "hunter2" not in str(caught.value)


def test_a_password_is_in_no_message_and_no_repr() -> None:
    address = PostgresAddress(dsn=f"postgresql://user:hunter2@127.0.0.1:{free_port()}/db")
    assert "hunter2" not in repr(address)
    with pytest.raises(StoreUnavailableError, match=r"db on 127\.0\.0\.1") as caught:
        address.connect()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ('FATAL:  password authentication failed for user "a"', "check the connection string"),
        ('FATAL:  database "b" does not exist', "check the connection string"),
        ("Connection refused", "a running receiver continues by itself when the server answers"),
    ],
)
def test_a_refusing_server_is_distinguished_from_an_unreachable_one(reason: str, hint: str) -> None:
    address = PostgresAddress(dsn="postgresql://db.example/b")
    assert hint in str(address.describe(psycopg.OperationalError(reason)))


# -- the schema ------------------------------------------------------------------------------------


def test_hosts_that_start_at_once_make_one_schema(
    empty: Database, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk_trio.storage.engines.postgres_migration.LOCK_SECONDS", 0.05)
    versions = (*VERSIONS, ("ALTER TABLE item ADD COLUMN more text",))
    for each in [thread.submit(migrate, empty.dsn, versions) for _ in range(6)]:
        each.result(60)
    assert empty.execute("SELECT * FROM sdk_trio.store") == [(1, 2)]
    assert empty.execute("SELECT count(more) FROM sdk_trio.item") == [(0,)]


def test_a_later_version_waits_for_a_reader_without_holding_up_others_and_is_made_once(
    database: Database, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk_trio.storage.engines.postgres_migration.LOCK_SECONDS", 0.05)
    engine = database.engine()
    versions = (*VERSIONS, ("ALTER TABLE item ADD COLUMN more text",))
    with holding(database, "SELECT FROM sdk_trio.item"):
        migrating = [thread.submit(migrate, database.dsn, versions) for _ in range(2)]
        database.end("wait_event_type = 'Lock'", "pg_backend_pid() +")
        put(engine, "meanwhile")
        assert not any(each.done() for each in migrating)
    for each in migrating:
        each.result(60)
    assert database.execute("SELECT version FROM sdk_trio.store") == [(2,)]
    put(engine, "afterwards")


def test_a_version_that_fails_leaves_the_one_before_and_is_made_later(empty: Database) -> None:
    failing = (*VERSIONS, ("CREATE TABLE more ()", "SELECT 1 / 0"))
    with pytest.raises(StoreUnavailableError, match="division by zero"):
        migrate(empty.dsn, failing)
    assert empty.execute("SELECT version FROM sdk_trio.store") == [(1,)]
    migrate(empty.dsn, (*VERSIONS, ("CREATE TABLE more ()",)))
    assert empty.execute("SELECT version FROM sdk_trio.store") == [(2,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE sdk_trio.store SET version = 9", "has schema version 9.*knows up to 1"),
        ("UPDATE sdk_trio.store SET version = -1", "was moved to SQLite by 'storage migrate'"),
        ("UPDATE sdk_trio.store SET version = -2", "is being filled by 'storage migrate'"),
        ("DROP TABLE sdk_trio.store", "holds tables of another program"),
    ],
)
def test_a_schema_that_is_not_ours_is_refused_and_left_alone(
    database: Database, change: str, message: str
) -> None:
    database.execute(change)
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'sdk_trio' ORDER BY 1"
    before = database.execute(tables)
    with pytest.raises(StoreVersionError, match=message):
        migrate(database.dsn)
    assert database.execute(tables) == before


def test_a_user_without_privileges_gets_the_statements_that_grant_them(database: Database) -> None:
    user = f"user_of_{database.name}"
    database.execute(f"CREATE ROLE {user} LOGIN")
    try:
        dsn = database.dsn.replace("user=owner", f"user={user}")
        for grant, message in (
            ("SELECT 1", f"GRANT USAGE ON SCHEMA sdk_trio TO {user}"),
            (f"GRANT USAGE ON SCHEMA sdk_trio TO {user}", "GRANT SELECT, INSERT, UPDATE, DELETE"),
        ):
            database.execute(grant)
            with pytest.raises(StoreUnavailableError, match=message):
                migrate(dsn)
    finally:
        database.execute(f"DROP OWNED BY {user}")
        database.execute(f"DROP ROLE {user}")
