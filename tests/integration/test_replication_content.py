"""The comparison of two databases: differences that it notices, and parts that it omits."""

import threading

import apsw
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from sdk_trio.replication import live_database
from sdk_trio.replication.live_database import Snapshot, opened_snapshot

SCHEMA = """
CREATE TABLE grants (id INTEGER PRIMARY KEY, body, "odd "" name" REAL);
CREATE TABLE keyed (k TEXT PRIMARY KEY, v) WITHOUT ROWID;
CREATE INDEX by_body ON grants (body);
CREATE VIEW seen AS SELECT body FROM grants;
CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER);
INSERT INTO grants VALUES (1, 'a', 0.5), (2, x'00ff', NULL), (3, 7, 1e300);
INSERT INTO keyed VALUES ('x', 1), ('y', 'z');
"""


def database(file, *statements):
    connection = apsw.Connection(str(file))
    connection.pragma("journal_mode", "wal")
    for statement in (SCHEMA, *statements):
        connection.execute(statement)
    connection.close()
    return file


def read(file):
    with opened_snapshot(file) as snapshot:
        return snapshot.read(lambda: None)


@pytest.mark.parametrize(
    ("statement", "difference"),
    [
        ("INSERT INTO grants VALUES (4, 'b', 1)", "table grants (4 rows instead of 3)"),
        ("DELETE FROM keyed WHERE k = 'x'", "table keyed (1 rows instead of 2)"),
        ("UPDATE grants SET body = 'b' WHERE id = 1", "the content of table grants"),
        ("UPDATE grants SET body = x'61' WHERE id = 1", "the content of table grants"),
        ("UPDATE grants SET body = '7' WHERE id = 3", "the content of table grants"),
        ("UPDATE keyed SET v = NULL WHERE k = 'x'", "the content of table keyed"),
        ("UPDATE grants SET id = id + 10", "the content of table grants"),
        ("DROP INDEX by_body", "the schema"),
        ("CREATE TABLE further (a)", "the schema"),
        ("DROP VIEW seen", "the schema"),
        ("INSERT INTO _litestream_seq VALUES (1, 9)", None),
        (
            "DELETE FROM grants; INSERT INTO grants VALUES "
            "(3, 7, 1e300), (2, x'00ff', NULL), (1, 'a', 0.5)",
            None,
        ),
        ("VACUUM", None),
    ],
)
def test_differences_that_are_noticed(tmp_path, statement, difference):
    original = read(database(tmp_path / "a.db"))
    assert original.difference(read(database(tmp_path / "b.db", statement))) == difference


@settings(max_examples=25)
@given(text=st.binary(max_size=20))
def test_texts_that_are_no_text_are_compared_too(tmp_path_factory, text):
    """Texts written by a program need not be UTF-8."""
    root = tmp_path_factory.mktemp("texts")
    written = f"UPDATE grants SET body = CAST(x'{text.hex()}' AS TEXT) WHERE id = 1"
    a, b = (read(database(root / name, written)) for name in ("a.db", "b.db"))
    assert a.difference(b) is None
    other = read(database(root / "c.db", written, "UPDATE grants SET body = body || 'x'"))
    assert a.difference(other) is not None


def test_a_snapshot_stays_at_its_moment_and_leaves_the_log_alone(tmp_path):
    file = database(tmp_path / "a.db")
    before = read(file)
    writer = apsw.Connection(str(file))
    writer.pragma("wal_autocheckpoint", 0)
    writer.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    with opened_snapshot(file) as snapshot:
        writer.execute("INSERT INTO grants VALUES (9, 'later', 1)")
        writer.close()
        assert before.difference(snapshot.read(lambda: None)) is None
    log = file.with_name("a.db-wal")
    size = log.stat().st_size
    assert size > 0
    after = read(file)
    assert before.difference(after) == "table grants (4 rows instead of 3)"
    assert log.stat().st_size == size


async def test_a_long_comparison_can_be_cancelled(tmp_path):
    file = database(
        tmp_path / "a.db",
        "INSERT INTO keyed WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n "
        "WHERE i < 200000) SELECT 'key ' || i, i FROM n",
    )
    begun, cancelled = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def pause():
        token.run_sync_soon(begun.set)
        assert cancelled.wait(60)  # or it is through before anybody has cancelled it
        trio.from_thread.check_cancelled()

    def work():
        with opened_snapshot(file) as snapshot:
            return snapshot.read(pause)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, work)
            await begun.wait()
            nursery.cancel_scope.cancel()
            cancelled.set()
    assert nursery.cancel_scope.cancelled_caught


async def test_a_snapshot_has_the_commit_that_was_under_way_when_it_was_opened(tmp_path):
    file = database(tmp_path / "live.db")
    writer = apsw.Connection(str(file))
    writer.execute("BEGIN IMMEDIATE; INSERT INTO keyed VALUES ('under way', 1)")
    opened = []

    async def open_it():
        opened.append(await trio.to_thread.run_sync(Snapshot, file))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await trio.sleep(0.2)
            writer.execute("COMMIT")
    (snapshot,) = opened
    assert snapshot.settled
    assert snapshot.read(lambda: None).tables["keyed"].rows == 3
    snapshot.close()
    writer.close()


def test_a_snapshot_says_that_a_writer_did_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(live_database, "_BUSY_SECONDS", 0.1)
    file = database(tmp_path / "live.db")
    writer = apsw.Connection(str(file))
    writer.execute("BEGIN IMMEDIATE; INSERT INTO keyed VALUES ('under way', 1)")
    with opened_snapshot(file) as snapshot:
        assert not snapshot.settled
        assert snapshot.read(lambda: None).tables["keyed"].rows == 2
    writer.close()
