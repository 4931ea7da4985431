"""The store in memory on Trio's own terms: checkpoints, and a size that stays bounded."""

import gc
import sys
import tracemalloc
from typing import Any

import pytest
import trio.testing
from support.keyed import ByKey

from sdk_trio.admin import replay
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import (
    Admission,
    Admitted,
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Retry,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory import inbox as memory_store
from sdk_trio.storage.memory import rows
from sdk_trio.storage.memory.inbox import MemoryInbox


def make() -> Any:
    return ByKey(
        MemoryInbox(
            LeaseTerms(owner="one", lease_seconds=10, dedup_seconds=100, payload_seconds=10_000)
        ),
        for_runner=True,
    )


async def deliver(inbox: Any, webhook_id: str, now: float) -> Admission:
    delivery = NewDelivery(webhook_id, "t", b"x", 7, now)
    admitted: Admitted = await inbox.accept(delivery, leased=True)
    if admitted.lease is not None:
        await inbox.finish(admitted.lease, Done(), now=now)
    return admitted.admission


async def test_finished_ids_are_forgotten_after_the_dedup_retention_without_a_janitor() -> None:
    inbox = make()
    for second in range(1000):
        assert await deliver(inbox, f"m{second}", second) is Admission.NEW
    counts = await inbox.counts()
    assert sum(counts.values()) == counts[DeliveryState.DONE] == 101
    assert await deliver(inbox, "m950", 1000) is Admission.DONE
    assert await deliver(inbox, "m10", 1000) is Admission.NEW


async def test_every_method_is_a_checkpoint() -> None:
    inbox = make()
    delivery = NewDelivery("m", "t", b"x", 7, 1.0)
    for call in (
        lambda: inbox.accept(delivery, leased=True),
        lambda: inbox.park(delivery),
        lambda: inbox.start("m", now=1),
        lambda: inbox.finish("m", Done(), now=1),
        lambda: inbox.release([]),
        lambda: inbox.claim_due(limit=1, now=1),
        inbox.recover,
        lambda: inbox.renew([], now=1),
        lambda: inbox.replay([]),
        lambda: inbox.get("m"),
        lambda: inbox.attempts("m"),
        inbox.find,
        inbox.counts,
        inbox.changed_elsewhere,
        lambda: inbox.purge(now=1),
        inbox.close,
    ):
        with trio.testing.assert_checkpoints():
            await call()


async def test_an_inline_run_is_exclusive() -> None:
    inbox = make()
    others: list[str] = []

    async def other() -> None:
        others.append("ran")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        admitted = await inbox.claim(NewDelivery("m", "t", b"x", 7, 1.0))
        await inbox.finish("m", Done(), now=2)
        assert others == []
    assert admitted.admission is Admission.NEW
    record = await inbox.get("m")
    assert record is not None
    assert record.state is DeliveryState.DONE


async def measure_growth(inbox: MemoryInbox, first: int, count: int, size: int) -> float:
    """Return the bytes that each of ``count`` further finished deliveries takes."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(first, first + count):
        delivery = NewDelivery(f"msg_{number:027}", "order.paid", b"x" * size, 7, 1.0)
        lease = (await inbox.claim(delivery)).lease
        assert lease is not None
        await inbox.finish(lease, Done(), now=number / 1000)
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / count


async def test_a_finished_delivery_costs_its_id_and_no_body() -> None:
    inbox = MemoryInbox(
        LeaseTerms(owner="one", lease_seconds=10, dedup_seconds=1e6, payload_seconds=1e6)
    )
    await measure_growth(inbox, 0, rows.RECENT_ROWS, 20)
    tracemalloc.start()
    try:
        small = await measure_growth(inbox, 10_000, 20_000, 20)
        large = await measure_growth(inbox, 30_000, 20_000, 4000)
    finally:
        tracemalloc.stop()
    assert max(small, large) <= 200
    assert await deliver(inbox, f"msg_{15_000:027}", 50) is Admission.DONE
    assert await inbox.known([f"msg_{15_000:027}", "other"]) == {f"msg_{15_000:027}"}
    assert (await inbox.counts())[DeliveryState.DONE] == rows.RECENT_ROWS + 40_000


@pytest.mark.parametrize("webhook_id", ["x" * 256, "\u2603" * 256, "\ud800" * 200])
async def test_a_long_id_is_remembered_at_the_same_price(
    monkeypatch: pytest.MonkeyPatch, webhook_id: str
) -> None:
    monkeypatch.setattr(rows, "RECENT_ROWS", 0)
    inbox = make()
    assert await deliver(inbox, webhook_id, 1) is Admission.NEW
    assert await deliver(inbox, webhook_id, 2) is Admission.DONE
    ((key, _),) = inbox._rows.remembered.items()
    assert sys.getsizeof(key) <= 64
    assert await deliver(inbox, webhook_id, 200) is Admission.NEW, "after the dedup retention"


async def test_the_oldest_finished_ids_go_first_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rows, "RECENT_ROWS", 2)
    monkeypatch.setattr(rows, "REMEMBERED_IDS", 3)
    inbox = make()
    for number in range(20):
        assert await deliver(inbox, f"m{number}", 1) is Admission.NEW
    assert await inbox.known([f"m{n}" for n in range(20)]) == {f"m{n}" for n in range(15, 20)}
    assert (await inbox.counts())[DeliveryState.DONE] == 5
    assert caplog.text.count("store.memory_full") == 1
    assert await deliver(inbox, "m16", 1) is Admission.DONE
    assert await deliver(inbox, "m1", 1) is Admission.NEW


async def test_parked_events_give_way_and_unfinished_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_store, "MOST_BYTES", 20_000)
    monkeypatch.setattr(rows, "MOST_BYTES", 20_000)
    inbox = make()

    def big(name: str) -> NewDelivery:
        return NewDelivery(name, "t", b"x" * 4000, 7, 1.0)

    await inbox.park(big("parked"))
    await inbox.claim(big("dead"))
    await inbox.finish("dead", Dead("boom"), now=1)
    await inbox.claim(big("failed"))
    await inbox.finish("failed", Retry(None, "boom"), now=1)
    for name in ("a", "b", "c", "d"):
        await inbox.accept(big(name), leased=False)
    assert {record.webhook_id for record in await inbox.find()} == {"a", "b", "c", "d"}
    with pytest.raises(StoreUnavailableError, match="full"):
        await inbox.accept(big("e"), leased=False)
    await inbox.claim_due(limit=1, now=1)
    await inbox.finish("a", Done(), now=1)
    assert (await inbox.accept(big("e"), leased=False)).admission is Admission.NEW


async def test_ids_of_an_erased_tenant_are_not_remembered(monkeypatch):
    monkeypatch.setattr(rows, "RECENT_ROWS", 0)
    inbox = make()
    for key, tenant in (("theirs", "gone"), ("ours", "stays"), ("host", None)):
        incoming = NewDelivery(key, "order.paid", b"{}", 1, 1000.0, tenant_id=tenant)
        assert (await inbox.claim(incoming)).admission is Admission.NEW
        await inbox.finish(key, Done(), now=1001.0)
    assert await inbox.erase("gone") == 1
    assert await inbox.known(["theirs", "ours", "host"]) == {"ours", "host"}
    assert (await inbox.counts())[DeliveryState.DONE] == 2


async def test_one_event_of_an_error_is_found_without_a_query_for_each_of_another_one() -> None:
    pages = []

    class Counting(MemoryInbox):
        async def find(self, **conditions):
            pages.append(conditions)
            return await super().find(**conditions)

    inbox = Counting(
        LeaseTerms(owner="one", lease_seconds=10, dedup_seconds=100, payload_seconds=100)
    )
    for number in range(20):
        key = f"m{number}"
        lease = (await inbox.claim(NewDelivery(key, "order.paid", b"{}", 1, 1000.0))).lease
        assert lease is not None
        await inbox.finish(lease, Dead("KeyError" if number < 18 else "ValueError"), now=1001.0)
    dead = DeliveryState.DEAD
    found = await replay.find_chosen(inbox, dead, error="ValueError", limit=1)
    assert [each.key for each in found] == ["m18"]
    assert len(pages) == 1
