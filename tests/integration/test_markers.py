"""``first_time``: one marker for each event, in the caller's transaction, on any connection."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest
from support.postgres import running_server

from sdk_trio import MARKERS_SCHEMA, EffectError, first_time, forget_markers
from sdk_trio.events import OrderPaidEvent
from sdk_trio.events.payloads import Order

Transaction = Callable[[], Any]


def event(webhook_id: str = "msg_1", **members: Any) -> OrderPaidEvent:
    now = datetime.now(UTC)
    return OrderPaidEvent(webhook_id, "order.paid", now, Order(id="o1"), b"{}", 1, now, **members)


@contextmanager
def of_sqlite3(file: Path, **options: Any) -> Iterator[Any]:
    with closing(sqlite3.connect(file, **options)) as connection:
        if options.get("isolation_level", "") is None:
            connection.execute("BEGIN")
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()


@contextmanager
def of_apsw(file: Path) -> Iterator[Any]:
    with closing(apsw.Connection(str(file))) as connection, connection:
        yield connection


@contextmanager
def of_psycopg(dsn: str) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(dsn) as connection:
        yield connection


@contextmanager
def of_psycopg_autocommit(dsn: str) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
        yield connection


@contextmanager
def of_sqlalchemy(url: str, *, session: bool, **options: Any) -> Iterator[Any]:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm = pytest.importorskip("sqlalchemy.orm")
    engine = sqlalchemy.create_engine(url, **options)
    try:
        if session:
            with orm.Session(engine) as opened, opened.begin():
                yield opened
        else:
            with engine.begin() as connection:
                yield connection
    finally:
        engine.dispose()


KINDS = (
    "sqlite3",
    "sqlite3 begun by hand",
    "apsw",
    "psycopg",
    "psycopg autocommit",
    "connection on SQLite",
    "session on SQLite",
    "connection on PostgreSQL",
    "session on PostgreSQL",
)


@pytest.fixture(params=KINDS)
def transaction(request: pytest.FixtureRequest, tmp_path: Path) -> Transaction:
    """Makes a transaction on one kind of connection; the table of markers is there."""
    kind = request.param
    if kind.startswith("psycopg") or kind.endswith("PostgreSQL"):
        import psycopg

        dsn = running_server().empty()
        with psycopg.connect(dsn) as made:
            made.execute(MARKERS_SCHEMA)
        url = "postgresql+psycopg://"
        options: dict[str, Any] = {"creator": lambda: psycopg.connect(dsn)}
    else:
        file = tmp_path / "app.db"
        with closing(sqlite3.connect(file)) as made_too:
            made_too.execute(MARKERS_SCHEMA)
        url, options = f"sqlite:///{file}", {}
    match kind:
        case "sqlite3":
            return lambda: of_sqlite3(file)
        case "sqlite3 begun by hand":
            return lambda: of_sqlite3(file, isolation_level=None)
        case "apsw":
            return lambda: of_apsw(file)
        case "psycopg":
            return lambda: of_psycopg(dsn)
        case "psycopg autocommit":
            return lambda: of_psycopg_autocommit(dsn)
    return lambda: of_sqlalchemy(url, session=kind.startswith("session"), **options)


def test_an_event_is_new_until_a_transaction_with_its_marker_is_committed(
    transaction: Transaction,
) -> None:
    with transaction() as connection:
        assert first_time(connection, event())
        assert not first_time(connection, event())
    with transaction() as connection:
        assert not first_time(connection, event())

    def fail() -> None:
        with transaction() as connection:
            assert first_time(connection, event("msg_2"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with transaction() as connection:
        assert first_time(connection, event("msg_2"))


def test_another_sender_generation_or_effect_is_another_one(transaction: Transaction) -> None:
    others = (event(key="msg_1.t1"), event(generation=1), event("msg_2"))
    with transaction() as connection:
        assert first_time(connection, event())
        assert all(first_time(connection, other) for other in others)
        assert first_time(connection, event(), effect="mail")
    with transaction() as connection:
        assert not first_time(connection, event(tenant="t9"))
        assert not any(first_time(connection, other) for other in others)
        assert not first_time(connection, event(), effect="mail")


def test_old_markers_are_deleted_on_request(transaction: Transaction) -> None:
    with transaction() as connection:
        first_time(connection, event())
        assert forget_markers(connection, before=datetime.now(UTC) - timedelta(days=1)) == 0
    with transaction() as connection:
        assert forget_markers(connection, before=datetime.now(UTC) + timedelta(days=1)) == 1
        assert first_time(connection, event())


def test_a_marker_that_would_be_committed_alone_is_refused(tmp_path: Path) -> None:
    psycopg = pytest.importorskip("psycopg")
    sqlalchemy = pytest.importorskip("sqlalchemy")
    file = tmp_path / "app.db"
    dsn = running_server().empty()
    alone = sqlalchemy.create_engine(f"sqlite:///{file}").execution_options(
        isolation_level="AUTOCOMMIT"
    )
    with (
        closing(sqlite3.connect(file, isolation_level=None)) as plain,
        closing(apsw.Connection(str(file))) as other,
        psycopg.connect(dsn, autocommit=True) as server,
        alone.connect() as core,
    ):
        plain.execute(MARKERS_SCHEMA)
        for connection in (plain, other, server, core):
            with pytest.raises(EffectError, match="begin a transaction first"):
                first_time(connection, event())
        assert plain.execute("SELECT count(*) FROM sdk_trio_marker").fetchone() == (0,)
    alone.dispose()


def test_a_savepoint_whose_end_would_commit_the_marker_is_refused(tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm = pytest.importorskip("sqlalchemy.orm")
    file = tmp_path / "app.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{file}")

    def handle() -> None:
        with orm.Session(engine) as session, session.begin():
            with session.begin_nested():
                first_time(session, event())
            raise RuntimeError("the effects fail")

    with closing(sqlite3.connect(file)) as plain:
        plain.execute(MARKERS_SCHEMA)
        with pytest.raises(EffectError, match="before begin_nested"):
            handle()
        assert plain.execute("SELECT count(*) FROM sdk_trio_marker").fetchone() == (0,)

    # Where a transaction is begun before the savepoint, it is no more than a savepoint.
    @sqlalchemy.event.listens_for(engine, "connect")
    def let_us_begin(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    engine.dispose()
    with engine.begin() as core, core.begin_nested():
        assert first_time(core, event())
    with engine.begin() as core, core.begin_nested():
        assert not first_time(core, event())
    engine.dispose()


def test_an_adapter_for_a_driver_that_commits_each_statement_is_refused(tmp_path: Path) -> None:
    """As SQLAlchemy's connection for asyncpg does; asyncpg itself does not show it."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.dialects.postgresql import asyncpg

    file = tmp_path / "app.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{file}")
    with engine.connect() as core:
        adapter = asyncpg.AsyncAdapt_asyncpg_connection.__new__(
            asyncpg.AsyncAdapt_asyncpg_connection
        )
        adapter.isolation_level = "autocommit"
        adapter._connection = object()
        fairy = core.connection
        real, fairy.dbapi_connection = fairy.dbapi_connection, adapter
        try:
            with pytest.raises(EffectError, match="begin a transaction first"):
                first_time(core, event())
        finally:
            fairy.dbapi_connection = real
    engine.dispose()


def test_a_missing_table_and_an_unknown_connection_are_reported_with_the_remedy(
    tmp_path: Path,
) -> None:
    psycopg = pytest.importorskip("psycopg")
    asyncio = pytest.importorskip("sqlalchemy.ext.asyncio")
    with (
        of_sqlite3(tmp_path / "app.db") as connection,
        pytest.raises(EffectError, match="MARKERS_SCHEMA"),
    ):
        first_time(connection, event())
    with (
        psycopg.connect(running_server().empty()) as server,
        pytest.raises(EffectError, match="MARKERS_SCHEMA"),
    ):
        first_time(server, event())
    with (
        psycopg.connect(running_server().empty()) as server,
        server.cursor() as cursor,
        pytest.raises(EffectError, match=r"psycopg\.Cursor is not a connection"),
    ):
        first_time(cursor, event())
    with pytest.raises(EffectError, match="not a connection that first_time knows"):
        first_time(object(), event())
    with pytest.raises(EffectError, match="run_sync"):
        first_time(asyncio.AsyncSession.__new__(asyncio.AsyncSession), event())
    with pytest.raises(EffectError, match="AsyncConnection is not a connection"):
        first_time(psycopg.AsyncConnection.__new__(psycopg.AsyncConnection), event())


def test_of_two_transactions_with_one_event_one_applies_it() -> None:
    psycopg = pytest.importorskip("psycopg")
    dsn = running_server().empty()
    with psycopg.connect(dsn, autocommit=True) as made:
        made.execute(MARKERS_SCHEMA)
    answers: list[bool] = []

    def second() -> None:
        with psycopg.connect(dsn) as connection:
            answers.append(first_time(connection, event()))

    with psycopg.connect(dsn) as connection, psycopg.connect(dsn, autocommit=True) as looks:
        assert first_time(connection, event())
        thread = threading.Thread(target=second)
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while looks.execute(waits).fetchone() == (0,):
            assert thread.is_alive(), "the second transaction has to wait for the first"
        connection.commit()
        thread.join(30)
    assert answers == [False]
