"""The SQLite store when something is wrong: with the disk, the file, a job, or the thread."""

import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
import trio
import trio.testing
from support.keyed import ByKey

from sdk_trio.base import clock
from sdk_trio.errors import StoreLostError, StoreUnavailableError, StoreVersionError
from sdk_trio.records.deliveries import Admission, DeliveryState, Done, NewDelivery, Retry
from sdk_trio.storage import commit
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines.files import StoreFile
from sdk_trio.storage.inbox import PURGE_CHUNK
from sdk_trio.storage.sql import runs
from sdk_trio.storage.sql.dialect import SqlTransaction
from sdk_trio.storage.sql.schema import VERSION
from sdk_trio.storage.sql.versions import APPLICATION_ID
from sdk_trio.storage.sqlite_inbox import SqliteInbox

FILLING = LeaseTerms(owner="o", lease_seconds=9.0, dedup_seconds=9.0, payload_seconds=9.0)


async def open_inbox(file: Path) -> Any:
    return ByKey(
        await SqliteInbox.open(
            file, LeaseTerms(owner="one", lease_seconds=10, dedup_seconds=100, payload_seconds=40)
        )
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "inbox.db"


@pytest.fixture
async def inbox(file: Path) -> AsyncIterator[SqliteInbox]:
    inbox = await open_inbox(file)
    yield inbox
    await inbox.close()


def delivery(webhook_id: str, size: int = 20) -> NewDelivery:
    return NewDelivery(webhook_id, "order.paid", b"x" * size, 7, 1000.0)


def submit(inbox: SqliteInbox, statement: str):  # type: ignore[no-untyped-def] # an awaitable
    return inbox._commits.submit(lambda tx: tx.connection.execute(statement).get)


async def hold_up(
    inbox: SqliteInbox,
    gate: threading.Event,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the store's thread busy, as a slow disk would, until the gate opens.

    Started once the thread has taken it: nothing that is submitted later gets into its batch.
    """
    token = trio.lowlevel.current_trio_token()

    def wait(_tx: SqlTransaction) -> None:
        token.run_sync_soon(task_status.started)
        gate.wait(60)

    await inbox._commits.submit(wait)


async def accept(inbox: SqliteInbox, webhook_id: str) -> None:
    await inbox.accept(delivery(webhook_id), leased=True)


# -- another process ---------------------------------------------------------------------------

#: Locks belong to a process, so this must be another process.
_CUT = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
print(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
"""


async def test_a_log_that_another_process_cuts_between_commit_and_look_is_not_lost(
    inbox: SqliteInbox, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replicator, a backup or ``tenant purge`` do: their checkpoint waits for the look."""
    await accept(inbox, "first")
    cut: list[str] = []
    look = StoreFile.require_written

    def cut_and_look(self: StoreFile, frames: int) -> None:
        command = [sys.executable, "-c", _CUT, str(file)]
        cut.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        look(self, frames)

    with monkeypatch.context() as patch:
        patch.setattr(StoreFile, "require_written", cut_and_look)
        await accept(inbox, "second")
    assert cut == ["1\n"]  # busy
    await accept(inbox, "third")
    assert inbox.lost is None
    assert len(await inbox.find(limit=10)) == 3


# -- a full disk, a failing job ----------------------------------------------------------------


async def test_a_full_disk_refuses_and_works_again_once_there_is_space(
    inbox: SqliteInbox, file: Path
) -> None:
    await inbox.accept(delivery("before"), leased=True)
    await submit(inbox, f"PRAGMA max_page_count = {await submit(inbox, 'PRAGMA page_count')}")
    refused = []

    async def deliver(name: str) -> None:
        with pytest.raises(StoreUnavailableError, match="full") as caught:
            await inbox.accept(delivery(name, size=100_000), leased=True)
        refused.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        for n in range(10):
            nursery.start_soon(deliver, f"m{n}")
    assert len(refused) == 10
    assert all(str(file) in message for message in refused)
    assert (await inbox.counts())[DeliveryState.RECEIVED] == 1, "nothing of them is kept"
    await inbox.finish("before", Done(), now=1001)
    await submit(inbox, "PRAGMA max_page_count = 100000")
    assert (await inbox.accept(delivery("m0"), leased=True)).admission is Admission.NEW


async def test_one_failing_job_does_not_harm_its_neighbours(inbox: SqliteInbox) -> None:
    gate = threading.Event()
    outcomes: dict[str, object] = {}

    def poison(tx: SqlTransaction) -> None:
        tx.run("INSERT INTO checkpoint VALUES ('poison', '')")
        raise ZeroDivisionError("poisoned")

    async def work(label: str, name: str) -> None:
        outcomes[label] = (await inbox.accept(delivery(name), leased=True)).admission

    async def fail() -> None:
        with pytest.raises(ZeroDivisionError, match="poisoned"):
            await inbox._commits.submit(poison)
        outcomes["poison"] = "raised"

    async with trio.open_nursery() as nursery:
        await nursery.start(hold_up, inbox, gate)
        await trio.testing.wait_all_tasks_blocked()
        # All of these queue up behind the one that blocks, so they go into one transaction.
        for job in (("a", "a"), (), ("b", "b"), ("a again", "a")):
            nursery.start_soon(*((work, *job) if job else (fail,)))
            await trio.testing.wait_all_tasks_blocked()
        gate.set()
    new, queued = Admission.NEW, Admission.QUEUED
    assert outcomes == {"a": new, "poison": "raised", "b": new, "a again": queued}
    assert await inbox.read_checkpoint("poison") is None
    assert {record.webhook_id for record in await inbox.find()} == {"a", "b"}


async def test_jobs_that_wait_together_are_committed_together_and_in_order(
    inbox: SqliteInbox,
) -> None:
    gate = threading.Event()
    commits: list[int] = []

    def count_commits(tx: Any) -> None:
        tx.connection.set_commit_hook(lambda: bool(commits.append(1)))  # type: ignore[func-returns-value] # False lets it commit

    await inbox._commits.submit(count_commits)
    async with trio.open_nursery() as nursery:
        await nursery.start(hold_up, inbox, gate)
        await trio.testing.wait_all_tasks_blocked()
        for n in range(150):
            nursery.start_soon(accept, inbox, f"m{n}")
            await trio.testing.wait_all_tasks_blocked()
        commits.clear()
        gate.set()
    assert len(commits) == 2, "the job that held them up, and all of them"
    arrived = [record.webhook_id for record in await inbox.find(after_sequence=0, limit=200)]
    assert arrived == [f"m{n}" for n in range(150)]


async def test_an_error_of_one_batch_does_not_outlive_it(inbox: SqliteInbox) -> None:
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await submit(inbox, "INSERT INTO nowhere VALUES (1)")
        assert (await inbox.counts())[DeliveryState.DEAD] == 0
    assert (await inbox.accept(delivery("m"), leased=True)).admission is Admission.NEW


async def test_a_lock_held_by_another_is_reported_and_passes(
    inbox: SqliteInbox, file: Path
) -> None:
    await submit(inbox, "PRAGMA busy_timeout = 20")
    other = apsw.Connection(str(file))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match="another process holds its write lock"):
        await inbox.accept(delivery("m"), leased=True)
    other.execute("ROLLBACK")
    other.close()
    assert (await inbox.accept(delivery("m"), leased=True)).admission is Admission.NEW


def damage_every_page_but_the_first(file: Path) -> None:
    data = bytearray(file.read_bytes())
    page = int.from_bytes(data[16:18], "big")
    for start in range(page, len(data), page):
        data[start : start + 100] = b"\xff" * 100
    file.write_bytes(bytes(data))


async def open_and_list(file: Path) -> None:
    inbox = await open_inbox(file)
    try:
        await inbox.find()
    finally:
        with trio.move_on_after(5, shield=True):
            await inbox.close()


# -- the file ----------------------------------------------------------------------------------


async def test_a_file_that_is_no_database_is_refused_and_left_alone(file: Path) -> None:
    content = b"this is my diary, not a database\n" * 100
    await trio.Path(file).write_bytes(content)
    with pytest.raises(StoreUnavailableError, match="not a SQLite database") as caught:
        await open_inbox(file)
    assert str(file) in str(caught.value)
    assert await trio.Path(file).read_bytes() == content


async def test_a_damaged_page_is_reported_where_it_is_read(file: Path) -> None:
    inbox = await open_inbox(file)
    for n in range(100):
        await inbox.accept(delivery(f"m{n}", size=3000), leased=True)
    await inbox.close()
    damage_every_page_but_the_first(file)
    with pytest.raises(StoreUnavailableError, match="damaged"):
        await open_and_list(file)


async def test_damage_that_is_read_stops_what_is_written(file: Path) -> None:
    """The pages of the listing are damaged, those of a new delivery are not read from the disk."""
    inbox = await open_inbox(file)
    for n in range(100):
        await inbox.accept(delivery(f"m{n}", size=3000), leased=True)
    await inbox.wipe()
    damage_every_page_but_the_first(file)
    assert inbox.lost is None
    with pytest.raises(StoreLostError, match="damaged"):
        await inbox.find()
    with pytest.raises(StoreLostError, match="damaged"):
        await inbox.accept(delivery("later"), leased=True)
    assert str(file) in str(inbox.lost)
    await inbox.close()


async def test_a_read_error_that_passes_does_not_lose_the_store_between_transactions(
    file: Path,
) -> None:
    inbox = await open_inbox(file)
    # SQLite reports a page that the disk refuses to read as damage.
    errors = [apsw.CorruptError("refused"), apsw.CorruptError("refused")]

    def read(connection: apsw.Connection) -> int:
        if errors:
            raise errors.pop()
        return int(connection.pragma("data_version"))

    assert await inbox._commits.run_outside_transaction(read) > 0
    assert inbox.lost is None
    await inbox.accept(delivery("later"), leased=True)
    await inbox.close()


async def test_a_newer_schema_is_refused_with_what_to_do(file: Path) -> None:
    await (await open_inbox(file)).close()
    connection = apsw.Connection(str(file))
    connection.pragma("user_version", VERSION + 1)
    connection.close()
    with pytest.raises(StoreVersionError, match=f"schema version {VERSION + 1}.*install"):
        await open_inbox(file)


async def test_a_database_of_another_program_is_refused_and_left_alone(file: Path) -> None:
    connection = apsw.Connection(str(file))
    connection.execute("CREATE TABLE bookmarks (url)")
    with pytest.raises(StoreVersionError, match="another program"):
        await open_inbox(file)
    assert connection.execute("SELECT name FROM sqlite_schema").get == "bookmarks"
    connection.close()


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="directory exists"):
        await open_inbox(tmp_path / "nowhere" / "inbox.db")


async def test_a_new_file_carries_its_marks_and_syncs_every_commit(inbox: SqliteInbox) -> None:
    assert await submit(inbox, "PRAGMA application_id") == APPLICATION_ID
    assert await submit(inbox, "PRAGMA user_version") == VERSION
    assert await submit(inbox, "PRAGMA journal_mode") == "wal"
    assert await submit(inbox, "PRAGMA synchronous") == 2, "FULL: what was answered 200 is kept"


# -- the thread --------------------------------------------------------------------------------


class _Crash(BaseException):
    """An error that no code expects."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_crashed_thread_leaves_no_task_waiting(inbox: SqliteInbox) -> None:
    gate = threading.Event()
    failed = []

    def crash(_tx: SqlTransaction) -> None:
        gate.wait(60)
        raise _Crash

    async def suffer(job: object) -> None:
        with pytest.raises(StoreUnavailableError, match="thread has failed"):
            await inbox._commits.submit(job)  # type: ignore[arg-type] # jobs of any result
        failed.append(job)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(suffer, crash)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                nursery.start_soon(suffer, lambda tx: None)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert len(failed) == 4
        await suffer(lambda tx: None)


async def test_a_cancelled_caller_leaves_a_hanging_disk_and_the_write_is_finished(
    inbox: SqliteInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "STALL_SECONDS", 0.05)
    hang = threading.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(hold_up, inbox, hang)
            await trio.testing.wait_all_tasks_blocked()
            # Cancelled before it was handed over, it would be nothing.
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as impatient:
                    impatient.start_soon(accept, inbox, "m")
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            assert scope.cancelled_caught
            assert not hang.is_set(), "let go although the disk still hangs"
            hang.set()
        # In the order of arrival: when this one is through, so is the other.
        assert (await inbox.accept(delivery("m"), leased=True)).admission is Admission.QUEUED


async def test_closing_finishes_what_is_queued(file: Path) -> None:
    inbox = await open_inbox(file)
    gate = threading.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(hold_up, inbox, gate)
        await trio.testing.wait_all_tasks_blocked()
        for n in range(300):
            nursery.start_soon(accept, inbox, f"m{n}")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(inbox.close)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    again = await open_inbox(file)
    assert (await again.counts())[DeliveryState.RECEIVED] == 300
    await again.close()


async def test_closing_ends_the_thread(file: Path) -> None:
    before = set(threading.enumerate())
    inbox = await open_inbox(file)
    (thread,) = (each for each in set(threading.enumerate()) - before if "inbox" in each.name)
    await inbox.close()
    thread.join(60)
    assert not thread.is_alive()


async def test_many_finished_deliveries_do_not_slow_the_search_for_due_ones(
    inbox: SqliteInbox,
) -> None:
    """Counted in steps of SQLite's machine, which no load of this computer changes."""
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    async def search() -> int:
        nonlocal steps
        steps = 0
        assert len((await inbox.claim_due(limit=5, now=1001)).records) == 0
        await inbox.renew([f"m{n}" for n in range(5)], now=1001)
        await inbox.recover()
        return steps

    def fill(tx: SqlTransaction) -> None:
        for first in range(0, 20_000, 100):
            done = [
                NewDelivery(f"done-{n}", "t", b"{}", 1, 1.0, subject="s", ordered=True)
                for n in range(first, first + 100)
            ]
            runs.add_done(tx, FILLING, [runs.Ran(each, 1, 1.0) for each in done])

    await inbox._commits.submit(lambda tx: tx.connection.set_progress_handler(count, 1))
    for n in range(5):
        await inbox.accept(delivery(f"m{n}"), leased=True)
    empty = await search()
    await inbox._commits.submit(lambda tx: tx.connection.set_progress_handler(None))
    await inbox._commits.submit(fill)
    await inbox._commits.submit(lambda tx: tx.connection.set_progress_handler(count, 1))
    assert empty > 0
    assert await search() <= empty + 10


async def test_retention_leaves_neither_bodies_nor_attempts_behind(inbox: SqliteInbox) -> None:
    for name in ("done", "again"):
        await accept(inbox, name)
        await inbox.finish(name, Retry(1001, "boom"), now=1001)
        await inbox.claim_due(limit=1, now=1001)
        await inbox.start(name, now=1001)
        await inbox.finish(name, Done(), now=1002)
    # Known again after the dedup retention: what was kept of its first life is forgotten.
    later = NewDelivery("again", "order.paid", b"other bytes", 7, 1103.0)
    assert (await inbox.accept(later, leased=True)).admission is Admission.NEW
    await inbox.purge(now=1103)
    assert await submit(inbox, "SELECT count(*) FROM arrival") == 1
    assert await submit(inbox, "SELECT count(*) FROM attempt") == 0
    assert await submit(inbox, "SELECT raw FROM arrival") == b"other bytes"


async def test_the_database_and_its_log_are_readable_by_their_owner_alone(
    inbox: SqliteInbox, file: Path
) -> None:
    await inbox.accept(delivery("m"), leased=False)
    modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
    assert set(modes) == {"inbox.db", "inbox.db-wal", "inbox.db-shm"}
    assert set(modes.values()) == {0o600}


# -- what was deleted --------------------------------------------------------------------------

MARKERS = (b"marker-short", b"marker-long", b"marker-parked", b"marker-early")


def found_in(directory: Path) -> set[bytes]:
    """The markers that any file of the directory holds."""
    contents = [path.read_bytes() for path in directory.iterdir()]
    return {marker for marker in MARKERS if any(marker in content for content in contents)}


async def keep_bodies(inbox: SqliteInbox) -> None:
    short, long, parked, _ = MARKERS
    for number in range(20):
        for name, body in (("short", short), ("long", long * 2000)):
            incoming = NewDelivery(f"{name}-{number}", "order.paid", body, 7, 1000.0)
            await inbox.accept(incoming, leased=True)
            await inbox.finish(incoming.webhook_id, Done(), now=1001)
    await inbox.park(NewDelivery("parked", "order.paid", parked, 7, 1000.0))


async def test_data_removed_by_retention_is_gone_from_every_file(
    inbox: SqliteInbox, file: Path
) -> None:
    await keep_bodies(inbox)
    assert found_in(file.parent) == set(MARKERS[:3])
    purged = await inbox.purge(now=1050)
    assert (purged.bodies, purged.parked) == (40, 1)
    assert found_in(file.parent) == set()
    await inbox.close()
    assert found_in(file.parent) == set()


async def test_deliveries_wait_for_a_few_removed_ones_at_a_time(inbox: SqliteInbox) -> None:
    """Counted, because seconds depend on the disk: rows of a transaction, and whether it syncs."""
    for number in range(3 * PURGE_CHUNK):
        await accept(inbox, f"m{number}")
        await inbox.finish(f"m{number}", Done(), now=1001)
    steps: list[int] = []
    synced: list[str] = []

    def note(event: dict[str, Any]) -> None:
        statement = event["sql"]
        if statement.startswith("PRAGMA synchronous"):
            synced.append(statement)
        elif statement.startswith("BEGIN"):
            steps.append(0)

    def count(_kind: int, _database: str, table: str, _rowid: int) -> None:
        if table == "arrival":
            steps[-1] += 1

    def watch(tx: Any) -> None:
        tx.connection.trace_v2(apsw.SQLITE_TRACE_STMT, note)
        tx.connection.set_update_hook(count)

    await inbox._commits.submit(watch)
    purged = await inbox.purge(now=1200)
    assert (purged.bodies, purged.finished) == (3 * PURGE_CHUNK, 3 * PURGE_CHUNK)
    assert max(steps) == PURGE_CHUNK <= 50
    assert synced[0] == "PRAGMA synchronous = NORMAL"


async def test_deliveries_wait_for_a_short_log_to_be_copied_during_the_retention(
    inbox: SqliteInbox, file: Path
) -> None:
    """The size of the log shows how many pages one copy takes: without a bound, 10 MB here."""
    log = file.with_name(f"{file.name}-wal")
    events = 2500

    def fill(tx: SqlTransaction) -> None:
        for number in range(events):
            incoming = NewDelivery(f"m{number}", "order.paid", bytes(4000), 7, 1000.0)
            runs.add_done(tx, FILLING, [runs.Ran(incoming, 1, 1001.0)])

    await inbox._commits.submit(fill)
    assert await inbox._clear_log(10)
    assert log.stat().st_size == 0
    sizes = []
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while True:
                sizes.append(log.stat().st_size)  # it only grows
                await trio.sleep(0.005)

        nursery.start_soon(watch)
        purged = await inbox.purge(now=1200)
        nursery.cancel_scope.cancel()
    assert (purged.bodies, purged.finished) == (events, events)
    assert 2 << 20 < max(sizes) < 6 << 20


async def test_wiping_reaches_what_earlier_versions_left_behind(
    inbox: SqliteInbox, file: Path
) -> None:
    await submit(inbox, "DELETE FROM checkpoint WHERE name = 'storage.wiped'")
    other = apsw.Connection(str(file))
    other.execute("INSERT INTO checkpoint VALUES ('old', ?)", (MARKERS[3].decode() * 1000,))
    other.execute("DELETE FROM checkpoint WHERE name = 'old'")
    other.close()
    await inbox.accept(delivery("kept"), leased=True)
    assert found_in(file.parent) == {MARKERS[3]}
    assert await inbox.wipe()
    assert found_in(file.parent) == set()
    assert (await inbox.accept(delivery("kept"), leased=True)).admission is Admission.QUEUED


async def test_wiping_reports_a_reader_that_keeps_the_log(inbox: SqliteInbox, file: Path) -> None:
    other = apsw.Connection(str(file))
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM arrival").fetchall()
    await keep_bodies(inbox)
    await inbox.purge(now=1050)
    assert found_in(file.parent) == set(MARKERS[:3]), "it can still be read by the other one"
    other.execute("ROLLBACK")
    other.close()
    assert await inbox.wipe()
    assert found_in(file.parent) == set()


async def test_overwriting_costs_the_ordinary_way_of_a_delivery_no_page(tmp_path: Path) -> None:
    """Counted in pages of the log, which is what is written and synced."""
    pages = {}
    for mode in ("OFF", "ON"):
        inbox = await open_inbox(tmp_path / f"{mode}.db")
        await submit(inbox, f"PRAGMA secure_delete = {mode}")
        for number in range(100):
            incoming = delivery(f"m{number}", size=600 if number % 5 else 9000)
            await inbox.accept(incoming, leased=True)
            await inbox.start(incoming.webhook_id, now=1000)
            outcome = Done() if number % 3 else Retry(1001, "boom")
            await inbox.finish(incoming.webhook_id, outcome, now=1000)
        pages[mode] = (tmp_path / f"{mode}.db-wal").stat().st_size
        await inbox.close()
    assert pages["ON"] == pages["OFF"] > 0


async def test_a_poll_that_waited_or_may_not_take_over_claims_no_expired_lease(
    file: Path, inbox: SqliteInbox
) -> None:
    """By the clock of the caller, which was set meanwhile, a lease that is in force has expired."""
    other = await SqliteInbox.open(
        file, LeaseTerms(owner="other", lease_seconds=10, dedup_seconds=100, payload_seconds=40)
    )
    await other.accept(delivery("m1"), leased=True)
    for until in (-inf, clock.monotonic() - 0.001):
        due = await inbox.claim_due(limit=9, now=4600.0, take_expired_until=until)
        assert not due.records
    (record,) = (await inbox.claim_due(limit=9, now=4600.0)).records
    assert record.webhook_id == "m1"
    await other.close()


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
@pytest.mark.parametrize("verb", ["claim", "accept", "park"])
async def test_an_admission_that_may_not_take_over_finds_an_inline_run_in_progress(
    file: Path, inbox: SqliteInbox, verb: str, step: float
) -> None:
    admit = partial(inbox.accept, leased=False) if verb == "accept" else getattr(inbox, verb)
    other = await SqliteInbox.open(
        file, LeaseTerms(owner="other", lease_seconds=10, dedup_seconds=100, payload_seconds=40)
    )
    await other.claim(msgspec.structs.replace(delivery("m1"), received_at=5000.0))
    again = msgspec.structs.replace(delivery("m1"), received_at=5000.0 + step)
    for until in (-inf, clock.monotonic() - 0.001):  # a step, and a wait for the store
        assert (await admit(again, take_expired_until=until)).admission is Admission.RUNNING
    assert (await admit(again)).admission is Admission.NEW
    await other.close()
