"""Unawaited claims of the store in SQLite, and which keys are certainly new."""

import shutil
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
import trio.testing
from msgspec.structs import replace
from support.keyed import ByKey

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import (
    Admission,
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Released,
    Retry,
)
from sdk_trio.storage import known_keys as known_keys_module
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.claims_file import read_claims
from sdk_trio.storage.known_keys import KnownKeys
from sdk_trio.storage.sqlite_inbox import SqliteInbox


def delivery(webhook_id: str, **fields: object) -> NewDelivery:
    return replace(NewDelivery(webhook_id, "order.paid", b"{}", 7, 1000.0), **fields)


async def open_inbox(directory: Path, owner: str = "one", *, claims: bool = True) -> Any:
    return ByKey(
        await SqliteInbox.open(
            directory / "inbox.db",
            LeaseTerms(owner=owner, lease_seconds=10, dedup_seconds=100, payload_seconds=40),
            claims=directory / "inbox.claims" if claims else None,
        )
    )


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[SqliteInbox]:
    inbox = await open_inbox(tmp_path)
    yield inbox
    await inbox.close()


async def learned(inbox: SqliteInbox) -> None:
    """Wait until claims need not be awaited, and the preparation for that has finished."""
    with trio.fail_after(60):
        number = 0
        while not inbox.claim_unawaited(delivery(f"learned-{number}")):
            number += 1
            await trio.sleep(0.001)
        await inbox.finish(f"learned-{number}", Done(), now=1000.0)


async def transactions(inbox: SqliteInbox) -> list[str]:
    """A list that grows by each COMMIT of the store from now on."""
    commits: list[str] = []

    def trace(event: dict[str, str]) -> None:
        if event["sql"] == "COMMIT":
            commits.append(event["sql"])

    await inbox._commits.submit(lambda tx: tx.connection.trace_v2(apsw.SQLITE_TRACE_STMT, trace))
    commits.clear()
    return commits


OUTCOMES = [
    (Done(), DeliveryState.DONE, 1),
    (Retry(None, "failed"), DeliveryState.RETRYING, 1),
    (Dead("failed"), DeliveryState.DEAD, 1),
    (Released(), DeliveryState.RECEIVED, 0),
]


@pytest.mark.parametrize(("outcome", "state", "attempts"), OUTCOMES)
async def test_a_run_that_ends_at_once_is_one_transaction(inbox, outcome, state, attempts):
    await learned(inbox)
    commits = await transactions(inbox)
    assert inbox.claim_unawaited(delivery("m1"))
    await inbox.finish("m1", outcome, now=1001.0)
    assert len(commits) <= 2, "one, and that of the list itself"
    record = await inbox.get("m1")
    assert (record.state, record.attempts, record.queued) == (state, attempts, False)
    assert len(await inbox.attempts("m1")) == (
        state in (DeliveryState.RETRYING, DeliveryState.DEAD)
    )


@pytest.mark.parametrize(("outcome", "state", "attempts"), OUTCOMES)
async def test_both_ways_leave_the_same_record(tmp_path, outcome, state, attempts):
    records = []
    for name, waits in (("waited", True), ("at-once", False), ("later", False)):
        (tmp_path / name).mkdir()
        inbox = await open_inbox(tmp_path / name)
        await learned(inbox)
        if waits:
            await inbox.claim(delivery("m1", subject="s", tenant_id="t"))
        else:
            assert inbox.claim_unawaited(delivery("m1", subject="s", tenant_id="t"))
        if name == "later":
            await inbox.counts()
        await inbox.finish("m1", outcome, now=1001.0)
        records.append((await inbox.get("m1"), await inbox.attempts("m1")))
        await inbox.close()
    sequences = {record.sequence for record, _ in records}
    assert len(sequences) == 1
    assert records[0] == records[1] == records[2]


async def test_a_run_that_lasts_is_seen_by_others_as_running(inbox, tmp_path):
    await learned(inbox)
    assert inbox.claim_unawaited(delivery("m1"))
    # Methods of this inbox read the writes of its other methods.
    assert (await inbox.get("m1")).state is DeliveryState.RUNNING
    other = await open_inbox(tmp_path, "two", claims=False)
    assert (await other.get("m1")).state is DeliveryState.RUNNING
    assert (await other.claim(delivery("m1"))).admission is Admission.RUNNING
    await inbox.finish("m1", Done(), now=1001.0)
    assert (await other.get("m1")).state is DeliveryState.DONE
    await other.close()


async def test_a_key_that_any_way_has_taken_is_not_new(inbox):
    await inbox.accept(delivery("of-before"), leased=False)
    await learned(inbox)
    await inbox.accept(delivery("accepted"), leased=False)
    await inbox.park(delivery("parked"))
    await inbox.claim(delivery("claimed"))
    assert inbox.claim_unawaited(delivery("begun"))
    for key in ("of-before", "accepted", "parked", "claimed", "begun"):
        assert not inbox.claim_unawaited(delivery(key)), key
    # Two signers may use one id.
    assert inbox.claim_unawaited(delivery("accepted", signer="tenant", tenant_id="tenant"))
    await inbox.finish("begun", Done(), now=1001.0)
    await inbox.finish("accepted.tenant", Done(), now=1001.0)


async def test_writes_of_another_process_are_read_before_a_key_counts_as_new(inbox, tmp_path):
    await learned(inbox)
    other = await open_inbox(tmp_path, "two", claims=False)
    await other.accept(delivery("theirs"), leased=False)
    # No process has noticed yet: the transaction itself finds it, and settles it.
    assert inbox.claim_unawaited(delivery("theirs"))
    await inbox.finish("theirs", Done(), now=1001.0)
    assert (await other.get("theirs")).state is DeliveryState.DONE
    assert (await other.claim_due(limit=9, now=1002.0)).records == []
    # Now it is noticed: nothing is surely new until what they have written is read.
    await other.accept(delivery("theirs, too"), leased=False)
    assert await inbox.changed_elsewhere()
    assert not inbox.claim_unawaited(delivery("ours"))
    await learned(inbox)
    assert not inbox.claim_unawaited(delivery("theirs, too"))
    await other.close()


async def test_writes_that_a_transaction_has_seen_are_read_before_a_key_counts_as_new(
    inbox, tmp_path
):
    """A worker may have run their event by then."""
    await learned(inbox)
    other = await open_inbox(tmp_path, "two", claims=False)
    await other.accept(delivery("theirs"), leased=False)
    await other.close()
    (record,) = (await inbox.claim_due(limit=9, now=1002.0)).records
    assert record.webhook_id == "theirs"
    assert not inbox.claim_unawaited(delivery("theirs"))
    assert not inbox.claim_unawaited(delivery("ours"))
    await learned(inbox)
    assert not inbox.claim_unawaited(delivery("theirs"))


async def test_keys_are_surely_new_again_after_the_store_was_rewritten(inbox):
    await learned(inbox)
    await inbox.write_checkpoint("storage.wiped", None)
    before = inbox._commits.version
    assert await inbox.wipe()
    await inbox.accept(delivery("next"), leased=False)
    assert inbox._commits.version != before
    version = inbox._commits.version
    await learned(inbox)
    # The rewrite counts as a write of others: the rows are read once, then nothing is looked up.
    assert inbox._unawaited.keys.note_new(delivery("new")) == inbox._commits.version == version


async def test_a_delivery_that_another_process_has_just_kept_is_not_kept_twice(inbox, tmp_path):
    await learned(inbox)
    other = await open_inbox(tmp_path, "two", claims=False)
    await other.accept(delivery("theirs"), leased=False)
    assert (await inbox.accept(delivery("theirs"), leased=True)).admission is Admission.QUEUED
    kept = [record.webhook_id for record in await other.find(limit=99)]
    assert [each for each in kept if "learned" not in each] == ["theirs"]
    await other.close()


async def test_a_run_of_another_owner_is_not_ended_by_ours(inbox, tmp_path):
    await learned(inbox)
    other = await open_inbox(tmp_path, "two", claims=False)
    await other.claim(delivery("m1"))
    assert inbox.claim_unawaited(delivery("m1"))
    await inbox.finish("m1", Done(), now=1001.0)
    assert (await other.get("m1")).state is DeliveryState.RUNNING
    await other.close()


@pytest.mark.parametrize("lasts", [False, True], ids=["at-once", "lasting"])
async def test_a_claim_that_cannot_be_written_is_written_with_the_outcome(inbox, tmp_path, lasts):
    await learned(inbox)
    await inbox._commits.submit(lambda tx: tx.connection.set_busy_timeout(1))
    lock = apsw.Connection(str(tmp_path / "inbox.db"))
    lock.execute("BEGIN IMMEDIATE")
    assert inbox.claim_unawaited(delivery("m1"))
    if lasts:
        with pytest.raises(StoreUnavailableError):
            await inbox.get("m1")
        assert not inbox.claim_unawaited(delivery("m2")), "a store that fails is waited for"
        lock.execute("ROLLBACK")
        await inbox.finish("m1", Done(), now=1001.0)
        assert (await inbox.get("m1")).state is DeliveryState.DONE
    else:
        with pytest.raises(StoreUnavailableError):
            await inbox.finish("m1", Done(), now=1001.0)
        lock.execute("ROLLBACK")
        assert (await inbox.claim(delivery("m1"))).attempts == 0
    lock.close()
    await learned(inbox)


@pytest.mark.parametrize(("outcome", "state", "attempts"), OUTCOMES)
async def test_a_claim_whose_commit_has_failed_is_written_with_the_outcome(
    inbox, outcome, state, attempts
):
    await learned(inbox)
    commits = []

    def refuse() -> bool:
        commits.append(len(commits))
        return len(commits) == 2

    # The claim is written, and its commit fails, as on a disk that is full; the first commit is
    # that of the hook itself.
    await inbox._commits.submit(lambda tx: tx.connection.set_commit_hook(refuse))
    assert inbox.claim_unawaited(delivery("m1"))
    with trio.fail_after(60):
        while not inbox._unawaited.leases["m1"].claim.finished:
            await trio.sleep(0.001)
    assert commits == [0, 1]
    await inbox.finish("m1", outcome, now=1001.0)
    record = await inbox.get("m1")
    assert record is not None, "a sender gets 200, and nothing is stored"
    assert (record.state, record.attempts) == (state, attempts)


async def test_an_end_during_a_commit_of_its_claim_that_fails_is_recorded(inbox):
    await learned(inbox)
    commits = []
    committing, ended = threading.Event(), threading.Event()

    def refuse() -> bool:
        commits.append(len(commits))
        if len(commits) != 2:  # the first commit is that of the hook itself
            return False
        committing.set()
        ended.wait(60)
        return True

    await inbox._commits.submit(lambda tx: tx.connection.set_commit_hook(refuse))
    assert inbox.claim_unawaited(delivery("m1"))
    with trio.fail_after(60):
        while not committing.is_set():
            await trio.sleep(0.001)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(inbox.finish, "m1", Done(), now=1001.0))
            await trio.testing.wait_all_tasks_blocked(0.01)
            ended.set()
    assert len(commits) > 2
    record = await inbox.get("m1")
    assert record is not None, "the sender is answered 200, and nothing is stored"
    assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_an_end_that_only_the_claims_file_knows_is_counted_once(tmp_path):
    inbox = await open_inbox(tmp_path)
    await learned(inbox)
    assert inbox.claim_unawaited(delivery("m1"))
    # The process ends here: nothing is handed over, and the file stays unchanged.
    (tmp_path / "inbox.claims").rename(tmp_path / "kept")
    inbox._commits.withdraw(inbox._unawaited.leases["m1"].claim)
    await inbox.close()
    (tmp_path / "kept").rename(tmp_path / "inbox.claims")
    inbox = await open_inbox(tmp_path, "two")
    assert await inbox.get("m1") is None
    await learned(inbox)
    assert not inbox.claim_unawaited(delivery("m1"))
    # Given up while it is written, and claimed again: the end is the same one.
    lock = apsw.Connection(str(tmp_path / "inbox.db"))
    lock.execute("BEGIN IMMEDIATE")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.claim, delivery("m1"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        lock.close()
    assert (await inbox.claim(delivery("m1"))).attempts == 1
    await inbox.finish("m1", Released(), now=1001.0)
    assert (await inbox.claim(delivery("m1"))).attempts == 1
    record = await inbox.get("m1")
    assert (record.attempts, record.process_ends) == (2, 1)
    assert [one.error for one in await inbox.attempts("m1")] == ["the process ended while it ran"]
    await inbox.close()
    assert b"m1" not in (tmp_path / "inbox.claims").read_bytes()


async def test_a_rebuilt_filter_forgets_nothing(inbox, tmp_path, monkeypatch):
    monkeypatch.setattr(known_keys_module, "KEYS_BEFORE_REBUILD", 5)
    await learned(inbox)
    before = inbox._unawaited.keys.filter
    # A run whose claim has failed: the store does not know it before it has ended.
    await inbox._commits.submit(lambda tx: tx.connection.set_busy_timeout(1))
    lock = apsw.Connection(str(tmp_path / "inbox.db"))
    lock.execute("BEGIN IMMEDIATE")
    assert inbox.claim_unawaited(delivery("held"))
    with pytest.raises(StoreUnavailableError):
        await inbox.get("held")
    lock.close()
    number = 0
    with trio.fail_after(60):
        while inbox._unawaited.keys.filter is before:
            await inbox.accept(delivery(f"m{number}"), leased=False)
            await inbox.changed_elsewhere()
            number += 1
    await learned(inbox)
    for key in ("held", *(f"m{one}" for one in range(number))):
        assert not inbox.claim_unawaited(delivery(key)), key
    await inbox.finish("held", Done(), now=1001.0)


async def test_learning_reads_every_row_in_small_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(known_keys_module, "LEARNED_AT_ONCE", 3)
    inbox = await open_inbox(tmp_path)
    for number in range(20):
        await inbox.park(delivery(f"m{number}"))
    await learned(inbox)
    assert isinstance(inbox._unawaited.keys.filter, KnownKeys)
    assert not any(inbox.claim_unawaited(delivery(f"m{number}")) for number in range(20))
    await inbox.close()


async def statements(inbox: SqliteInbox) -> list[str]:
    """A list that grows by each statement of the store from now on."""
    seen: list[str] = []

    def trace(event: dict[str, str]) -> None:
        seen.append(event["sql"])

    await inbox._commits.submit(lambda tx: tx.connection.trace_v2(apsw.SQLITE_TRACE_STMT, trace))
    seen.clear()
    return seen


async def test_deliveries_of_one_batch_share_their_statements(inbox: SqliteInbox) -> None:
    await learned(inbox)
    seen = await statements(inbox)

    async def run(name: str) -> None:
        assert inbox.claim_unawaited(delivery(name))
        await inbox.finish(name, Done(), now=1001.0)

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(run, f"inline-{number}")
    # BEGIN, the number of others' writes, the last sequence, arrivals, bodies, COMMIT: before, each
    # delivery had two statements for itself.
    assert len(seen) <= 8

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(partial(inbox.accept, delivery(f"q-{number}"), leased=True))
    assert len(seen) <= 16
    seen.clear()

    async def run_queued(name: str) -> None:
        inbox.start_unawaited(name, now=1001.0)
        await inbox.finish(name, Done(), now=1002.0)

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(run_queued, f"q-{number}")
    assert len(seen) <= 8
    assert (await inbox.counts())[DeliveryState.DONE] == 65


async def accepted(inbox: SqliteInbox, *names: str) -> None:
    for name in names:
        await inbox.accept(delivery(name), leased=True)
        inbox.start_unawaited(name, now=1001.0)


async def test_the_end_of_a_queued_run_shares_the_commit_of_the_next_event(inbox):
    await learned(inbox)
    await accepted(inbox, "first")
    commits = await transactions(inbox)
    assert inbox.end_unawaited("first", now=1002.0)
    await inbox.accept(delivery("second"), leased=True)
    assert len(commits) <= 2, "one, and that of the list itself"
    record = await inbox.get("first")
    assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_the_end_of_a_queued_run_is_committed_soon_without_another_event(inbox, tmp_path):
    await accepted(inbox, "m1")
    assert inbox.end_unawaited("m1", now=1002.0)
    other = apsw.Connection(str(tmp_path / "inbox.db"))
    with trio.fail_after(60):
        while not other.execute("SELECT count(*) FROM ended").get:
            await trio.sleep(0.001)
    other.close()


async def test_an_ended_run_is_done_for_every_later_call(inbox):
    await accepted(inbox, "m1", "m2", "m3")
    assert inbox.end_unawaited("m1", now=1002.0)
    assert (await inbox.get("m1")).state is DeliveryState.DONE
    assert inbox.end_unawaited("m2", now=1002.0)
    assert (await inbox.accept(delivery("m2"), leased=True)).admission is Admission.DONE
    assert inbox.end_unawaited("m3", now=1002.0)
    # A renewal gives up the leases that it does not name.
    assert (await inbox.renew([], now=1003.0)).given_up == 0
    assert (await inbox.counts())[DeliveryState.DONE] == 3


async def test_an_orderly_close_keeps_the_end_of_a_run(tmp_path):
    first = await open_inbox(tmp_path)
    await accepted(first, "m1")
    assert first.end_unawaited("m1", now=1002.0)
    await first.close()
    second = await open_inbox(tmp_path)
    assert (await second.get("m1")).state is DeliveryState.DONE
    await second.close()


async def test_a_killed_process_leaves_no_interrupted_run_of_an_erased_tenant(inbox, tmp_path):
    await learned(inbox)
    lease = inbox.claim_unawaited(delivery("m1", tenant_id="acme"))
    assert lease
    await inbox.finish("m1", Done(), now=1001.0)
    assert await inbox.erase("acme") == 1
    # What the next start would find.
    assert "m1" not in {run.key for run in read_claims(tmp_path / "inbox.claims", is_new=False)}


@pytest.mark.parametrize("by", ["renewal", "close"])
async def test_an_end_that_the_store_has_failed_is_recorded_later(inbox, tmp_path, by):
    await accepted(inbox, "m1")
    await inbox.get("m1")
    await inbox._commits.submit(lambda tx: tx.connection.set_busy_timeout(1))
    lock = apsw.Connection(str(tmp_path / "inbox.db"))
    lock.execute("BEGIN IMMEDIATE")
    assert inbox.end_unawaited("m1", now=1002.0)
    with pytest.raises(StoreUnavailableError):
        await inbox.get("m1")
    assert not inbox.end_unawaited("m1", now=1002.0)
    lock.execute("ROLLBACK")
    lock.close()
    if by == "renewal":
        assert (await inbox.renew([], now=1003.0)).given_up == 0
    else:
        await inbox.close()
        inbox = await open_inbox(tmp_path)
    assert (await inbox.get("m1")).state is DeliveryState.DONE
    await inbox.close()


async def test_a_new_database_has_pages_for_three_bodies_and_an_old_one_keeps_its_own(
    tmp_path: Path,
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    small = apsw.Connection(str(old / "inbox.db"))
    small.execute("PRAGMA page_size = 4096")
    small.execute("CREATE TABLE t (x); DROP TABLE t")
    small.close()
    for directory, size in ((old, 4096), (tmp_path, 8192)):
        inbox = await open_inbox(directory)
        await learned(inbox)
        assert (await inbox.accept(delivery("m"), leased=False)).admission is Admission.NEW
        assert await inbox._commits.submit(lambda tx: tx.connection.pragma("page_size")) == size
        await inbox.wipe()
        assert await inbox._commits.submit(lambda tx: tx.connection.pragma("page_size")) == size
        await inbox.close()


@pytest.mark.parametrize("first", ["accept", "claim", "claim of a stored one", "another body"])
async def test_an_interrupted_run_is_counted_by_whatever_stores_its_key(tmp_path, first):
    inbox = await open_inbox(tmp_path)
    await learned(inbox)
    assert inbox.claim_unawaited(delivery("m1"))
    # The process ends here: nothing is handed over, and the file stays unchanged.
    (tmp_path / "inbox.claims").rename(tmp_path / "kept")
    inbox._commits.withdraw(inbox._unawaited.leases["m1"].claim)
    await inbox.close()
    (tmp_path / "kept").rename(tmp_path / "inbox.claims")
    inbox = await open_inbox(tmp_path, "two")
    if first == "accept":  # its handler is enqueued now, or paused
        admitted = await inbox.accept(delivery("m1"), leased=True)
        assert (admitted.admission, admitted.lease) == (Admission.NEW, None)
    elif first == "claim":
        assert (await inbox.claim(delivery("m1"))).attempts == 1
    else:
        other = await open_inbox(tmp_path, "other", claims=False)
        await other.accept(delivery("m1"), leased=False)
        await other.close()
        again = delivery("m1", raw=b"[]") if first == "another body" else delivery("m1")
        assert (await inbox.claim(again)).admission is Admission.QUEUED
    record = await inbox.get("m1")
    assert (record.attempts, record.process_ends) == (1 + (first == "claim"), 1)
    assert [one.error for one in await inbox.attempts("m1")] == ["the process ended while it ran"]
    # It is counted once, and the file no longer has a note of it.
    await inbox.claim(delivery("m1"))
    assert (await inbox.get("m1")).process_ends == 1
    await inbox.close()
    assert b"m1" not in (tmp_path / "inbox.claims").read_bytes()


async def test_a_run_beside_an_interrupted_one_was_not_alone(tmp_path):
    inbox = await open_inbox(tmp_path)
    await learned(inbox)
    await inbox.accept(delivery("beside"), leased=True)
    await inbox.start("beside", now=1000.0)
    assert inbox.claim_unawaited(delivery("m1")) is not None
    # Its claim never reaches the store, because the process is killed.
    shutil.copy(tmp_path / "inbox.db", tmp_path / "killed.db")
    shutil.copy(tmp_path / "inbox.db-wal", tmp_path / "killed.db-wal")
    shutil.copy(tmp_path / "inbox.claims", tmp_path / "killed.claims")
    await inbox.close()
    (tmp_path / "next").mkdir()
    for name in ("db", "db-wal", "claims"):
        shutil.move(tmp_path / f"killed.{name}", tmp_path / "next" / f"inbox.{name}")
    following = await open_inbox(tmp_path / "next", "two")
    assert await following.recover() == 1
    record = await following.get("beside")
    assert (record.process_ends, record.ran_alone) == (1, False)
    await following.close()


async def test_an_interrupted_run_is_not_counted_into_another_run_in_progress(tmp_path):
    inbox = await open_inbox(tmp_path)
    await learned(inbox)
    assert inbox.claim_unawaited(delivery("m1"))
    (tmp_path / "inbox.claims").rename(tmp_path / "kept")
    inbox._commits.withdraw(inbox._unawaited.leases["m1"].claim)
    await inbox.close()
    (tmp_path / "kept").rename(tmp_path / "inbox.claims")
    inbox = await open_inbox(tmp_path, "two")
    other = await open_inbox(tmp_path, "other", claims=False)
    await other.accept(delivery("m1"), leased=False)
    await other.close()
    (record,) = (await inbox.claim_due(limit=9, now=1002.0)).records
    assert await inbox.start("m1", now=1002.0)
    assert (await inbox.claim(delivery("m1"))).admission is Admission.QUEUED
    assert (await inbox.get("m1")).attempts == 1
    await inbox.finish("m1", Retry(1003.0, "boom"), now=1002.0)
    # It was not forgotten either.
    assert (await inbox.claim(delivery("m1"))).admission is Admission.QUEUED
    record = await inbox.get("m1")
    assert (record.attempts, record.process_ends) == (2, 1)
    await inbox.close()
