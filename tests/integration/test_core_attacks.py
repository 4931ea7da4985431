"""Attacks on the store core: rare orders of calls that can do harm."""

import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from support.stores import Stores

from sdk_trio.records.deliveries import (
    Admission,
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Retry,
)
from sdk_trio.storage.engines.postgres import PostgresTransaction
from sdk_trio.storage.sql import admission, arrivals, runs
from sdk_trio.storage.sqlite_inbox import SqliteInbox


@pytest.fixture(params=["sqlite", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    stores = Stores(request.param, tmp_path)
    yield stores
    await stores.close()


on_every_store = pytest.mark.parametrize("stores", ["sqlite", "postgres", "memory"], indirect=True)


async def take(inbox: Any, *, now: float) -> list[str]:
    """Claim all due events, as the feeder does."""
    taken: list[str] = []
    while True:
        due = await inbox.claim_due(limit=9, now=now)
        taken += [record.key for record in due.records]
        if not due.more:
            return taken


def delivery(webhook_id: str = "m", *, at: float = 1000.0, **fields: Any) -> NewDelivery:
    return NewDelivery(webhook_id, "order.paid", b'{"type":"order.paid"}', 7, at, **fields)


@on_every_store
async def test_a_replayed_delivery_waits_for_the_later_one_of_its_lane_that_runs(
    stores: Stores,
) -> None:
    inbox = await stores.open()
    for name in ("first", "second"):
        await inbox.accept(delivery(name, subject="s", ordered=True), leased=False)
    assert await take(inbox, now=1001) == ["first"]
    await inbox.finish("first", Dead("boom"), now=1002)
    assert await take(inbox, now=1003) == ["second"]
    await inbox.start("second", now=1003)
    await inbox.replay(["first"])
    await inbox.accept(delivery("other"), leased=False)
    assert await take(inbox, now=1004) == ["other"]
    await inbox.finish("second", Done(), now=1005)
    assert await take(inbox, now=1006) == ["first"]


@on_every_store
async def test_an_expired_lease_does_not_block_an_earlier_delivery_of_its_lane(
    stores: Stores,
) -> None:
    dead, alive = await stores.open("dead"), await stores.open("alive")
    for name in ("first", "second"):
        await dead.accept(delivery(name, subject="s", ordered=True), leased=False)
    await dead.claim_due(limit=9, now=1001)
    await dead.finish("first", Dead("boom"), now=1002)
    await dead.claim_due(limit=9, now=1003)
    await dead.start("second", now=1003)
    await alive.replay(["first"])
    assert await take(alive, now=1004) == []
    assert await take(alive, now=1020) == ["first"]
    await alive.finish("first", Done(), now=1021)
    assert await take(alive, now=1022) == ["second"]
    record = await alive.get("second")
    assert (record.attempts, record.process_ends) == (1, 1), "its run was cut short"


async def test_a_failure_that_is_recorded_twice_counts_once(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=True)
    inbox.start_unawaited("m", now=1001)
    assert await inbox.finish("m", Retry(1010, "boom"), now=1002)
    # As after a commit whose answer was lost: the caller sends the outcome again.
    assert not await inbox.finish("m", Retry(1010, "boom"), now=1002)
    record = await inbox.get("m")
    assert (record.state, record.attempts) == (DeliveryState.RETRYING, 1)
    assert len(await inbox.attempts("m")) == 1


async def test_a_renewal_keeps_a_start_in_progress(stores: Stores) -> None:
    inbox, other = await stores.open(), await stores.open("other")
    await inbox.accept(delivery(), leased=True)
    started: list[bool] = []

    async def start() -> None:
        started.append(await inbox.start("m", now=1001))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        # Asked for later, and in the same transaction.
        while not inbox._commits._stall.callers:
            await trio.lowlevel.checkpoint()
        await inbox.renew(["m"], now=1001)
    assert started == [True]
    assert await take(other, now=1002) == []


async def test_a_key_with_a_nul_is_found_among_many_others(stores: Stores) -> None:
    inbox = await stores.open()
    incoming = delivery("a\0b", subject="s\0t")
    await inbox.accept(incoming, leased=False)
    async with trio.open_nursery() as nursery:
        for n in range(600):
            nursery.start_soon(lambda n=n: inbox.accept(delivery(f"m{n}"), leased=False))
    assert (await inbox.accept(incoming, leased=False)).admission is Admission.QUEUED
    assert [record.key for record in await inbox.find(subject="s\0t")] == ["a\0b"]


async def learned(inbox: SqliteInbox) -> None:
    """Wait until new keys are known to be new."""
    inbox.claim_unawaited(delivery("unused"))
    while not inbox._unawaited.keys._all_read:
        await trio.sleep(0.01)


async def test_a_claim_without_a_living_holder_is_given_up(tmp_path: Path) -> None:
    stores = Stores("sqlite", tmp_path)
    inbox = await stores.open(claims=tmp_path / "claims")
    other = await stores.open("other")
    await learned(inbox)
    assert inbox.claim_unawaited(delivery())
    await inbox.renew([], now=1001)
    assert (await other.claim(delivery(at=1002))).admission is Admission.NEW
    for each in stores.opened:
        await each.close()


async def test_the_store_goes_on_after_work_that_raises(stores: Stores) -> None:
    inbox = await stores.open()
    for n in range(10):  # as many as a driver needs to prepare the statements
        await inbox.accept(delivery(f"m{n}"), leased=False)
    with pytest.raises(ZeroDivisionError):
        await inbox._commits.submit(lambda tx: 1 // 0)
    assert (await inbox.accept(delivery("last"), leased=False)).admission is Admission.NEW


@pytest.mark.parametrize("work", ["repeat", "keep_other", "finish"])
async def test_nothing_is_left_of_what_is_erased_while_another_host_writes(
    tmp_path: Path, work: str
) -> None:
    stores = Stores("postgres", tmp_path)
    inbox = await stores.open()
    await inbox.accept(delivery(tenant_id="t"), leased=True)
    await inbox.start("m", now=1001)
    engine, lease = inbox._commits._engine, inbox.lease("m")
    if work != "finish":
        await inbox.finish("m", Done(), now=1002)

    def write(tx: Any) -> None:
        if work == "repeat":
            admission.repeat(tx, ["m"])
        elif work == "keep_other":
            other = NewDelivery("m", "order.paid", b"{}", 7, 1003, tenant_id="t")
            admission.keep_other(tx, other)
        else:
            runs.finish(tx, lease, Retry(1010, "boom"), 1002)

    def erase(connection: Any) -> None:
        with engine._address.transaction(connection):
            tx = PostgresTransaction(connection, engine.dialect)
            arrivals.erase(tx, [lease.sequence], "t")

    def both() -> dict[str, int]:
        one, two, watcher = (engine._address.connect() for _ in range(3))
        erasing = threading.Thread(target=erase, args=(two,))
        with engine._address.transaction(one):
            write(PostgresTransaction(one, engine.dialect))
            erasing.start()
            # It has come to its end, or waits for the other.
            waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
            pid = two.info.backend_pid
            while erasing.is_alive() and watcher.execute(waits, (pid,)).fetchone() != (True,):
                time.sleep(0.01)
        erasing.join()
        left = {}
        for table in ("arrival", "work", "ended", "attempt", "evidence"):
            ((left[table],),) = watcher.execute(f"SELECT count(*) FROM {table}").fetchall()
        for connection in (one, two, watcher):
            connection.close()
        return left

    assert not any((await trio.to_thread.run_sync(both)).values())
    await inbox.close()
