"""Group commit on a SQLite file: batches, failures, cancellation, stalls, the end, processes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
import trio.lowlevel
import trio.testing

from sdk_trio.errors import StoreLostError, StoreUnavailableError
from sdk_trio.storage import commit as commit_module
from sdk_trio.storage.commit import BATCH_LIMIT, GroupCommit, GroupedWork
from sdk_trio.storage.engines import CommitUnknownError
from sdk_trio.storage.engines import files as files_module
from sdk_trio.storage.engines import sqlite as sqlite_module
from sdk_trio.storage.engines.sqlite import SqliteEngine, SqliteReader
from sdk_trio.storage.readers import ReaderPool
from sdk_trio.storage.sql.dialect import Insert, SqlTransaction

ROW = Insert("row", {"key": "text", "value": "bigint"}, "RETURNING id")


def prepare(connection: apsw.Connection) -> None:
    connection.execute(
        "CREATE TABLE IF NOT EXISTS row (id INTEGER PRIMARY KEY, key TEXT NOT NULL, value INTEGER)"
    )


def write(key: str, value: int = 0):  # type: ignore[no-untyped-def] # a unit of work
    def work(transaction: SqlTransaction) -> int:
        ((number,),) = transaction.insert(ROW, [(key, value)])
        return int(number)

    return work


def write_all(transaction: SqlTransaction, items: Sequence[tuple[str, int]]) -> list[int]:
    """A kind of work: items are rows."""
    return [number for (number,) in transaction.insert(ROW, items)]


def keys(transaction: SqlTransaction) -> list[str]:
    return [key for (key,) in transaction.all("SELECT key FROM row ORDER BY id")]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


@pytest.fixture
def engine(file: str) -> SqliteEngine:
    return SqliteEngine(file, prepare, write_lock=f"{file}.turn")


@pytest.fixture
async def store(engine: SqliteEngine) -> AsyncIterator[GroupCommit]:
    store = GroupCommit(engine, name="store")
    await store.submit(keys)
    yield store
    await store.close()


class Gate:
    """Keeps the store's thread busy, as a disk that does not answer would, until it is opened."""

    def __init__(self, store: GroupCommit) -> None:
        self.store = store
        self.opened = threading.Event()
        self.token = trio.lowlevel.current_trio_token()

    async def hold(
        self, *, effects_key: str | None = None, task_status: trio.TaskStatus[None]
    ) -> None:
        """Started when the thread has taken it: nothing later gets into its batch."""

        def wait(_: object) -> None:
            self.token.run_sync_soon(task_status.started)
            self.opened.wait(60)

        if effects_key is None:
            await self.store.run_outside_transaction(wait)  # it waits without a limit
            return
        with suppress(StoreUnavailableError):
            await self.store.submit(wait, single=True, effects_key=effects_key)


@pytest.fixture
def gate(store: GroupCommit) -> Iterator[Gate]:
    gate = Gate(store)
    yield gate
    gate.opened.set()


@pytest.fixture
def hurried(store: GroupCommit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait a moment only, from now on."""
    monkeypatch.setattr(commit_module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(commit_module, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(commit_module, "WATCH_SECONDS", 0.01)


async def put(store: GroupCommit, key: str) -> None:
    await store.submit(write(key))


# -- batches -----------------------------------------------------------------------------------


async def test_units_of_one_iteration_share_a_transaction_and_get_their_own_results(
    store: GroupCommit, engine: SqliteEngine
) -> None:
    before = engine.transactions
    numbers: dict[int, int] = {}

    async def one(value: int) -> None:
        numbers[value] = await store.submit(write("k", value))

    async with trio.open_nursery() as nursery:
        for value in range(50):
            nursery.start_soon(one, value)
    assert engine.transactions == before + 1
    for value, number in numbers.items():
        found = await store.submit(
            lambda transaction, number=number: transaction.one(
                "SELECT value FROM row WHERE id = :number", number=number
            )
        )
        assert found == (value,)


async def test_items_queued_during_a_commit_are_one_transaction_in_order(
    store: GroupCommit, engine: SqliteEngine, gate: Gate
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        before = engine.transactions
        for key in "abc":
            nursery.start_soon(put, store, key)
            await trio.testing.wait_all_tasks_blocked()
        gate.opened.set()
    assert engine.transactions == before + 1
    assert await store.submit(keys) == ["a", "b", "c"]


async def test_thousands_of_callers_share_transactions_of_a_bounded_size(
    store: GroupCommit, engine: SqliteEngine
) -> None:
    before = engine.transactions
    numbers = set()

    async def one(value: int) -> None:
        numbers.add(await store.gather(write_all, str(value), (str(value), value)))

    async with trio.open_nursery() as nursery:
        for value in range(3000):
            nursery.start_soon(one, value)
    assert len(numbers) == 3000
    assert engine.transactions == before + 3000 // BATCH_LIMIT
    assert len(await store.submit(keys)) == 3000


async def test_items_of_a_kind_are_done_by_one_call_and_those_of_a_key_in_order(
    store: GroupCommit, gate: Gate
) -> None:
    calls = []

    def first(_transaction: SqlTransaction, items: Sequence[str]) -> Sequence[str]:
        calls.append(("first", list(items)))
        return items

    def second(_transaction: SqlTransaction, items: Sequence[str]) -> Sequence[str]:
        calls.append(("second", list(items)))
        return items

    async def ask(kind: GroupedWork, key: str, item: str) -> None:
        assert await store.gather(kind, key, item) == item

    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        for kind, key, item in (
            (first, "a", "a1"),
            (second, "b", "b1"),
            (first, "c", "c1"),
            (second, "a", "a2"),
            (first, "d", "d1"),
        ):
            nursery.start_soon(ask, kind, key, item)
            await trio.testing.wait_all_tasks_blocked()
        gate.opened.set()
    # The second item of key "a" flushes the items gathered before it.
    assert calls == [
        ("first", ["a1", "c1"]),
        ("second", ["b1"]),
        ("second", ["a2"]),
        ("first", ["d1"]),
    ]


async def test_a_single_unit_has_its_transaction_for_itself(
    store: GroupCommit, engine: SqliteEngine, gate: Gate
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        before = engine.transactions
        for key in "ab":
            nursery.start_soon(put, store, key)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(lambda: store.submit(write("s"), single=True))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(put, store, "c")
        await trio.testing.wait_all_tasks_blocked()
        gate.opened.set()
    assert engine.transactions == before + 3
    assert await store.submit(keys) == ["a", "b", "s", "c"]


async def test_only_commits_that_must_survive_a_power_cut_are_synced(
    store: GroupCommit, engine: SqliteEngine
) -> None:
    def synchronous(transaction: Any) -> int:
        return int(transaction.connection.pragma("synchronous"))

    assert await store.submit(synchronous) == 2
    assert await store.submit(synchronous, durable=False) == 1
    assert await store.submit(synchronous) == 2


async def test_work_alone_runs_outside_of_any_transaction(store: GroupCommit) -> None:
    assert (
        await store.run_outside_transaction(lambda connection: connection.in_transaction) is False
    )
    await store.run_outside_transaction(lambda connection: connection.execute("VACUUM").fetchall())


# -- failures ----------------------------------------------------------------------------------


async def test_a_unit_that_raises_fails_alone(store: GroupCommit) -> None:
    def fail(transaction: SqlTransaction) -> None:
        transaction.insert(ROW, [("undone", 0)])
        raise LookupError("mine")

    async def ask_for_failure() -> None:
        with pytest.raises(LookupError, match="mine"):
            await store.submit(fail)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, store, "a")
        nursery.start_soon(ask_for_failure)
        nursery.start_soon(put, store, "b")
        nursery.start_soon(ask_for_failure)
    assert sorted(await store.submit(keys)) == ["a", "b"]
    assert not store.failing


async def test_a_store_that_fails_gives_each_caller_an_error_of_its_own(
    store: GroupCommit, engine: SqliteEngine, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.run_outside_transaction(lambda connection: connection.set_busy_timeout(10))
    errors = []

    async def one() -> None:
        with pytest.raises(StoreUnavailableError, match="another process holds") as caught:
            await store.submit(write("k"))
        errors.append(caught.value)

    other = apsw.Connection(file)
    other.execute("BEGIN IMMEDIATE")
    asked = []
    transact = engine.transact

    def count(work: Any, **options: Any) -> bool:
        asked.append(work)
        return transact(work, **options)

    monkeypatch.setattr(engine, "transact", count)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one)
    assert len({id(error) for error in errors}) == 3
    assert len(asked) == 1, "each unit asked a store that takes no write"
    assert store.failing
    assert not store.prompt
    other.execute("ROLLBACK")
    other.close()
    await put(store, "k")
    assert not store.failing
    assert store.prompt


async def test_a_store_that_only_reads_is_still_failing(
    store: GroupCommit, engine: SqliteEngine
) -> None:
    def fill(connection: apsw.Connection) -> None:
        connection.execute(f"PRAGMA max_page_count = {connection.pragma('page_count')}")

    await store.run_outside_transaction(fill)
    with pytest.raises(StoreUnavailableError, match="is full"):
        await store.submit(
            lambda transaction: transaction.run("INSERT INTO row VALUES (1, :t, 0)", t="x" * 99_999)
        )
    assert store.failing
    assert await store.submit(keys) == []
    assert store.failing
    await store.run_outside_transaction(
        lambda connection: connection.execute("PRAGMA max_page_count = 9999")
    )
    assert store.failing, "work outside of a transaction may only have read"
    await put(store, "k")
    assert not store.failing


async def test_a_commit_that_may_have_been_made_is_not_made_again(store: GroupCommit) -> None:
    runs = []

    async def one(key: str) -> None:
        def work(_transaction: SqlTransaction) -> None:
            runs.append(key)
            if len(runs) == 2:
                raise CommitUnknownError("the answer was lost")

        with pytest.raises(CommitUnknownError):
            await store.submit(work)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "a")
        nursery.start_soon(one, "b")
    assert sorted(runs) == ["a", "b"]


async def test_a_crashed_thread_leaves_no_caller_waiting(
    store: GroupCommit, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(_transaction: SqlTransaction) -> None:
        raise SystemExit("a bug")

    async def refused(work: Any) -> None:
        with pytest.raises(StoreUnavailableError, match="restart the process"):
            await store.submit(work)

    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        nursery.start_soon(refused, crash)
        nursery.start_soon(refused, write("same batch"))
        await trio.testing.wait_all_tasks_blocked()
        gate.opened.set()
    await refused(write("later"))
    assert "a bug" in caplog.text
    await store.close()


# -- posted work -------------------------------------------------------------------------------


async def test_posted_work_is_done_before_what_is_asked_for_later(store: GroupCommit) -> None:
    posted = store.post(write_all, "k", ("posted", 1))
    assert not posted.finished
    number = await store.submit(write("later"))
    assert posted.finished
    assert posted.value == number - 1


async def test_posted_work_is_done_although_no_one_waits(store: GroupCommit) -> None:
    posted = store.post(write_all, "k", ("posted", 1))
    while not posted.finished:
        await trio.sleep(0.001)
    assert await store.submit(keys) == ["posted"]


async def test_posted_work_is_withdrawn_only_before_it_is_handed_over(store: GroupCommit) -> None:
    withdrawn = store.post(write_all, "k", ("withdrawn", 1))
    assert store.withdraw(withdrawn)
    assert not store.withdraw(withdrawn)
    late = store.post(write_all, "k", ("late", 1))
    await put(store, "later")
    assert not store.withdraw(late)
    assert await store.submit(keys) == ["late", "later"]


async def test_the_error_of_posted_work_is_logged(
    store: GroupCommit, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_transaction: SqlTransaction, _items: Sequence[object]) -> Sequence[object]:
        raise StoreUnavailableError("what was posted has failed")

    posted = store.post(fail, "k", None)
    await put(store, "k")
    assert isinstance(posted.error, StoreUnavailableError)
    assert "what was posted has failed" in caplog.text


async def test_posted_work_waits_a_moment_for_other_work(file: str) -> None:
    class Remote(SqliteEngine):
        linger = 0.05

    engine = Remote(file, prepare)
    store = GroupCommit(engine, name="store")
    await store.submit(keys)
    before = engine.transactions
    store.post(write_all, "a", ("a", 1))
    await trio.testing.wait_all_tasks_blocked()
    assert engine.transactions == before
    last = store.post(write_all, "b", ("b", 1))
    while not last.finished:
        await trio.sleep(0.001)
    assert engine.transactions == before + 1
    store.post(write_all, "c", ("c", 1))
    await trio.testing.wait_all_tasks_blocked()
    await put(store, "d")
    assert engine.transactions == before + 2, "a caller waited for posted work that lingers"
    await store.close()


# -- cancellation and stalls -------------------------------------------------------------------


async def test_an_answer_at_the_end_of_a_cancelled_callers_patience_leaves_no_stall(
    store: GroupCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "STALL_SECONDS", 0.05)

    async def ask(scope: trio.CancelScope, opened: threading.Event) -> None:
        with scope:
            await store.submit(lambda _: opened.wait(60))

    for number in range(8):  # Trio resumes the caller before or after the answer, at random
        scope, opened = trio.CancelScope(), threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, scope, opened)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            opened.set()
            # The event loop is blocked, as in a stopped process, until both are due.
            time.sleep(0.1)  # noqa: ASYNC251
        await put(store, f"after {number}")


async def test_a_call_that_is_cancelled_already_changes_nothing(store: GroupCommit) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await put(store, "never")
    assert scope.cancelled_caught
    assert await store.submit(keys) == []


async def test_a_cancelled_caller_waits_for_a_commit_that_was_handed_over(
    store: GroupCommit, gate: Gate
) -> None:
    left = trio.Event()
    scope = trio.CancelScope()

    async def caller() -> None:
        with scope:
            await put(store, "k")
        left.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        nursery.start_soon(caller)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        gate.opened.set()
        await left.wait()
    assert scope.cancelled_caught
    assert await store.submit(keys) == ["k"]


async def test_a_cancelled_caller_leaves_a_stalled_store_and_its_work_is_done(
    store: GroupCommit, gate: Gate, hurried: None
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        with trio.move_on_after(0.01) as scope:
            await store.submit(write("left"))
        assert scope.cancelled_caught
        assert not gate.opened.is_set()
        assert store.failing
        assert not store.prompt
        with pytest.raises(StoreUnavailableError, match="its disk hangs"):
            await put(store, "refused at once")
        gate.opened.set()
    while store.failing:
        await trio.sleep(0.001)
    assert await store.submit(keys) == ["left"]


async def test_a_caller_gets_an_error_in_time_and_its_work_is_done_later(
    store: GroupCommit, gate: Gate, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        insert = "INSERT INTO row (key) VALUES ('patient')"
        nursery.start_soon(store.run_outside_transaction, lambda one: one.execute(insert))
        with pytest.raises(StoreUnavailableError, match="has not answered for"):
            await put(store, "impatient")
        assert not gate.opened.is_set()
        assert "store.stalled" in caplog.text
        gate.opened.set()
    while store.failing:
        await trio.sleep(0.001)
    assert sorted(await store.submit(keys)) == ["impatient", "patient"]
    assert "store.answers" in caplog.text


async def test_a_time_in_which_the_process_did_not_run_does_not_count_against_the_store(
    store: GroupCommit, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(commit_module, "WATCH_SECONDS", 0.01)
    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        nursery.start_soon(put, store, "k")
        await trio.sleep(0.02)
        time.sleep(1)  # noqa: ASYNC251 # as a process that is stopped and continued
        # The watch looks first, and the store answers after it.
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        gate.opened.set()
    assert store.prompt
    assert await store.submit(keys) == ["k"]


async def test_effects_that_do_not_return_are_named(
    store: GroupCommit, gate: Gate, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(gate.hold, effects_key="evt_7"))
        with pytest.raises(StoreUnavailableError, match="the effects of the event evt_7"):
            await put(store, "k")
        assert "evt_7" in caplog.text
        gate.opened.set()
    while store.failing:
        await trio.sleep(0.001)
    other = Gate(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(other.hold)
        with pytest.raises(StoreUnavailableError, match="its disk hangs"):
            await put(store, "k")
        other.opened.set()


# -- the end -----------------------------------------------------------------------------------


async def test_closing_finishes_what_is_queued_and_refuses_the_rest(
    file: str, engine: SqliteEngine
) -> None:
    store = GroupCommit(engine, name="store-that-closes")
    await store.submit(keys)
    async with trio.open_nursery() as nursery:
        for value in range(2 * BATCH_LIMIT + 1):
            nursery.start_soon(put, store, str(value))
        await trio.testing.wait_all_tasks_blocked(0)
        posted = store.post(write_all, "k", ("posted", 1))
        nursery.start_soon(store.close)
        nursery.start_soon(store.close)
    with pytest.raises(StoreUnavailableError, match="the store is closed"):
        await put(store, "late")
    assert not store.prompt
    assert posted.finished
    connection = apsw.Connection(file)
    assert connection.execute("SELECT count(*) FROM row").get == 2 * BATCH_LIMIT + 2
    connection.close()
    while any(thread.name == "store-that-closes" for thread in threading.enumerate()):
        await trio.sleep(0.001)


async def test_closing_a_stalled_store_is_logged(
    store: GroupCommit, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "CLOSE_SECONDS", 0.05)
    async with trio.open_nursery() as nursery:
        await nursery.start(gate.hold)
        with pytest.raises(StoreUnavailableError, match="did not close within"):
            await store.close()
        gate.opened.set()


# -- the file ----------------------------------------------------------------------------------


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def _move_behind_a_link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("is_linked", [False, True])
async def test_a_file_is_missed_although_its_directory_had_not_changed_for_long(
    store: GroupCommit, file: str, suffix: str, is_linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if every earlier change of the directory were long ago.
    monkeypatch.setattr(files_module, "SETTLED_SECONDS", -1.0)
    path = Path(f"{file}{suffix}")
    await put(store, "before")
    if is_linked:  # the commits are still in the files that the names lead to
        _move_behind_a_link(path)
        path = path.resolve()
    await put(store, "settled")
    await put(store, "unchanged")
    _replace(path)
    with pytest.raises(StoreLostError, match="was replaced"):
        await put(store, "later")


async def test_a_replaced_file_is_missed_soon_although_its_directory_shows_no_change(
    store: GroupCommit, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_until_it_fails() -> None:
        while True:
            await put(store, "later")
            await trio.sleep(0.05)

    # As after a mount over the file, or on a file system that sets no times.
    unchanged = ((1, 2, 3), 0.0)
    monkeypatch.setattr(files_module.StoreFile, "_state_of_directory", lambda _file: unchanged)
    await put(store, "before")
    _replace(Path(file))
    with trio.fail_after(20), pytest.raises(StoreLostError, match="was replaced"):
        await put_until_it_fails()


async def test_a_store_whose_file_was_replaced_is_refused_until_a_restart(
    store: GroupCommit, engine: SqliteEngine, file: str
) -> None:
    pool = ReaderPool(lambda: SqliteReader(engine), place=file, limit=1)
    await put(store, "k")
    os.rename(file, f"{file}.moved")
    Path(file).write_bytes(b"")
    # It writes nothing, and is not acknowledged either.
    with pytest.raises(StoreLostError, match="was replaced"):
        await store.submit(keys)
    with pytest.raises(StoreLostError):
        await put(store, "later")
    with pytest.raises(StoreLostError):
        await pool.run(keys)
    assert store.lost is not None
    assert store.failing
    await pool.close()


async def test_a_log_that_was_cut_is_found_by_a_transaction_that_writes_nothing(
    store: GroupCommit, file: str
) -> None:
    await put(store, "k")
    os.truncate(f"{file}-wal", 0)
    with pytest.raises(StoreLostError, match="was cut short or overwritten"):
        await store.submit(lambda _transaction: None)


async def test_a_log_is_written_again_after_a_failed_sync(
    store: GroupCommit, engine: SqliteEngine, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def fail(_transaction: SqlTransaction) -> None:
        raise apsw.IOError("a sync")

    with pytest.raises(StoreUnavailableError, match="the disk reported an error"):
        await store.submit(fail)
    # Another process sees the mark as soon as this one lets it write.
    assert Path(f"{file}.turn").read_bytes() == sqlite_module.UNPROVEN
    await put(store, "k")
    assert "store.log_rewritten" in caplog.text
    assert Path(f"{file}.turn").read_bytes() == b""


async def test_a_long_log_is_copied_into_the_database(
    store: GroupCommit, engine: SqliteEngine, file: str, tmp_path: Path
) -> None:
    engine.log_bytes = 1
    await put(store, "k")
    await store.submit(keys)
    copy = tmp_path / "copy.db"
    copy.write_bytes(Path(file).read_bytes())
    connection = apsw.Connection(str(copy))
    assert connection.execute("SELECT key FROM row").get == "k"
    connection.close()


async def test_a_statement_that_a_handler_left_unfinished_costs_a_new_connection(
    store: GroupCommit, engine: SqliteEngine
) -> None:
    left = []

    def effects(transaction: Any) -> None:
        transaction.insert(ROW, [("a", 1), ("b", 2)])
        left.append(transaction.connection.execute("SELECT * FROM row"))

    await store.submit(effects, single=True)
    assert await store.submit(keys) == ["a", "b"]
    assert engine.connections == 2


# -- several processes -------------------------------------------------------------------------

_HOLD = """
import fcntl, os, sys
turn = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(turn, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


async def test_units_that_wait_for_another_process_join_one_transaction(
    store: GroupCommit, engine: SqliteEngine, file: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, f"{file}.turn"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        assert engine.write_lock_holder() in (other.pid, None)
        before = engine.transactions
        async with trio.open_nursery() as nursery:
            for key in "abc":
                nursery.start_soon(put, store, key)
                await trio.sleep(0.05)
            assert engine.transactions == before
            other.stdin.close()
    assert engine.transactions == before + 1


_COUNT = """
import sys, trio
from sdk_trio.storage.commit import GroupCommit
from sdk_trio.storage.engines.sqlite import SqliteEngine

def count(transaction):
    (value,) = transaction.one("SELECT value FROM row WHERE id = 1")
    transaction.run("UPDATE row SET value = :value WHERE id = 1", value=value + 1)

async def main(file):
    engine = SqliteEngine(file, lambda connection: None, write_lock=f"{file}.turn")
    engine.log_bytes = 20_000
    store = GroupCommit(engine, name="store")
    async def some():
        for _ in range(25):
            await store.submit(count)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(some)
    await store.close()

trio.run(main, sys.argv[1])
"""


async def test_processes_write_one_after_the_other(store: GroupCommit, file: str) -> None:
    await put(store, "counter")
    with ExitStack() as stack:
        others = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", _COUNT, file], stderr=subprocess.PIPE)
            )
            for _ in range(3)
        ]
        for other in others:
            _, errors = await trio.to_thread.run_sync(other.communicate)
            assert other.returncode == 0, errors
    found = await store.submit(lambda transaction: transaction.one("SELECT value FROM row"))
    assert found == (300,)


# -- readers -----------------------------------------------------------------------------------

_ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"


@pytest.fixture
async def pool(store: GroupCommit, engine: SqliteEngine, file: str) -> AsyncIterator[ReaderPool]:
    pool = ReaderPool(lambda: SqliteReader(engine), place=file, limit=1)
    yield pool
    await pool.close()


async def test_a_reader_sees_what_was_committed_before_it_began(
    store: GroupCommit, pool: ReaderPool
) -> None:
    for key in "ab":
        await put(store, key)
        assert (await pool.run(keys))[-1] == key
    found = await pool.run(
        lambda transaction: transaction.all(
            "SELECT key FROM row WHERE key IN texts(:keys)", keys=["b", "c"]
        )
    )
    assert found == [("b",)]


async def test_a_cancelled_query_is_interrupted_and_the_next_one_runs(pool: ReaderPool) -> None:
    with trio.move_on_after(0.05) as scope:
        await pool.run(lambda transaction: transaction.all(_ENDLESS))
    assert scope.cancelled_caught
    assert await pool.run(keys) == []


async def test_a_query_that_lasts_too_long_is_an_error(pool: ReaderPool) -> None:
    with pytest.raises(StoreUnavailableError, match="was not read within"):
        await pool.run(lambda transaction: transaction.all(_ENDLESS), seconds=0.05)
    assert await pool.run(keys) == []


async def test_closing_the_pool_ends_its_queries(pool: ReaderPool) -> None:
    began = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def endless(transaction: SqlTransaction) -> object:
        token.run_sync_soon(began.set)
        return transaction.all(_ENDLESS)

    async def read() -> None:
        with pytest.raises(StoreUnavailableError):
            await pool.run(endless)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await began.wait()
        await pool.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        await pool.run(keys)
