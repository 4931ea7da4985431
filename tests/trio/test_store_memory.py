"""The store in memory on Trio's own terms: checkpoints, and a size that stays bounded."""

import trio.testing

from sdk_trio.storage.memory_store import MemoryInbox
from sdk_trio.storage.records import Admission, DeliveryState, Done, NewDelivery


def make() -> MemoryInbox:
    return MemoryInbox(owner="one", lease_seconds=10, dedup_seconds=100, payload_seconds=10_000)


async def deliver(inbox: MemoryInbox, webhook_id: str, now: float) -> Admission:
    delivery = NewDelivery(webhook_id, "t", b"x", 7, now)
    admitted = await inbox.accept(delivery, leased=True)
    if admitted.admission is Admission.NEW:
        await inbox.finish(webhook_id, Done(), now=now)
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
        lambda: inbox.take_due(limit=1, now=1),
        inbox.recover,
        lambda: inbox.renew(now=1),
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


async def test_an_inline_run_is_kept_without_a_checkpoint() -> None:
    inbox = make()
    with trio.testing.assert_no_checkpoints():
        admitted = await inbox.claim(NewDelivery("m", "t", b"x", 7, 1.0))
        await inbox.finish("m", Done(), now=2)
    assert admitted.admission is Admission.NEW
    record = await inbox.get("m")
    assert record is not None
    assert record.state is DeliveryState.DONE
