"""``doctor`` reports whether the database can be used, and changes nothing in it."""

import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from support.doctor import Doctor
from support.postgres import running_server
from support.waiting import wait_until


@pytest.fixture
def doctor(command_line, monkeypatch):
    doctor = Doctor(command_line, monkeypatch)
    doctor.set("Storage__Backend", "Postgres")
    return doctor


def test_a_database_is_checked_and_left_unchanged(doctor, monkeypatch):
    server = running_server()
    dsn = server.empty()
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    found = doctor.alone()
    found.one("store", "note", "the next start upgrades the schema sdk_trio")
    # The tests' own server does not sync.
    found.one("store", "problem", "fsync = off")
    schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'sdk_trio'"
    assert server.execute(schemas, dsn.rpartition("=")[2]) == [(0,)]
    monkeypatch.setenv("SDK_POSTGRES_DSN", server.fresh())
    doctor.alone().one("store", "ok", "has the version of this program")


def test_an_unavailable_database_is_a_problem_without_the_password(doctor, monkeypatch):
    running_server()
    monkeypatch.setenv("SDK_POSTGRES_DSN", "postgresql://u:hunter2@127.0.0.1:1/db")
    found = doctor.alone()
    found.one("store", "problem", "127.0.0.1")
    assert "hunter2" not in found.text


def test_a_reader_that_keeps_dead_rows_is_named(doctor, monkeypatch):
    import psycopg

    server = running_server()
    dsn = server.fresh()
    database = dsn.rpartition("=")[2]
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    monkeypatch.setattr("sdk_trio.cli.doctor.store.LONG_READ_SECONDS", 0.0)
    with ExitStack() as stack:

        def connect(dsn, **options):
            return stack.enter_context(closing(psycopg.connect(dsn, **options)))

        # A vacuum and a reader of another database are older, and no vacuum waits for them.
        server.execute("CREATE TABLE public.large AS SELECT generate_series(1, 20000)", database)
        stack.callback(server.execute, "DROP TABLE public.large", database)
        vacuum = connect(dsn, autocommit=True)
        vacuum.execute("SET vacuum_cost_delay = 100")
        vacuum.execute("SET vacuum_cost_limit = 1")
        vacuum.pgconn.send_query(b"VACUUM public.large")
        stack.callback(server.execute, f"SELECT pg_cancel_backend({vacuum.info.backend_pid})")
        wait_until(lambda: server.execute("SELECT 1 FROM pg_stat_progress_vacuum", database))
        elsewhere = connect(server.fresh())
        reader = connect(dsn, application_name="report")
        for each in (elsewhere, reader):
            each.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            each.execute("SELECT count(*) FROM sdk_trio.work")
        doctor.alone().one("store", "warning", f"the session {reader.info.backend_pid} (report)")


def test_a_session_that_others_wait_for_is_named(doctor, monkeypatch):
    import psycopg

    server = running_server()
    dsn = server.fresh()
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    with ExitStack() as stack:
        holding, waiting = (
            stack.enter_context(closing(psycopg.connect(dsn, application_name=name)))
            for name in ("holds", "waits")
        )
        lock = "SELECT 1 FROM sdk_trio.store FOR UPDATE"
        holding.execute(lock)
        waiting.pgconn.send_query(lock.encode())
        stack.callback(server.execute, f"SELECT pg_cancel_backend({waiting.info.backend_pid})")
        wait_until(lambda: server.execute("SELECT 1 FROM pg_locks WHERE NOT granted"))
        found = doctor.alone().one("store", "warning", "waits for a lock of")
        assert "(waits)" in found["what"]
        assert f"session {holding.info.backend_pid} (holds)" in found["what"]


@pytest.mark.parametrize(("offset", "level"), [(-600.0, "problem"), (10.0, "warning")])
def test_a_clock_that_differs_from_the_databases_is_reported(doctor, monkeypatch, offset, level):
    monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    host = SimpleNamespace(wall=lambda: time.time() + offset)
    monkeypatch.setattr("sdk_trio.storage.sql.reads.clock", host)
    side = "ahead of" if offset > 0 else "behind"
    doctor.alone().one("store", level, f"this host's clock is {abs(offset):.0f} s {side}")
