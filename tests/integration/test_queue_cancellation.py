"""Cancelling a delivery while its commit runs, on the real store."""

import pytest
import trio
from support.deliveries import Bench, arrival
from support.waiting import until

from sdk_trio.events import OrderPaidEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.webhooks.recording import HeldLease
from sdk_trio.webhooks.registry import HandlerRegistry


@pytest.fixture
def handled():
    return []


@pytest.fixture
def handlers(handled):
    registry = HandlerRegistry()

    @registry.on(OrderPaidEvent, enqueue=True)
    async def handle(event):
        handled.append(event.webhook_id)

    return registry


async def open_inbox(directory):
    return await SqliteInbox.open(
        directory / "inbox.db",
        LeaseTerms(owner="here", lease_seconds=75, dedup_seconds=3600, payload_seconds=3600),
    )


async def test_an_event_committed_despite_a_cancelled_request_is_handled(
    tmp_path, handlers, handled
):
    """A cancelled sender delivers again and gets 200, so the event must be in the queue."""
    inbox = await open_inbox(tmp_path)
    bench = Bench.of(handlers, inbox)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.queue.run)
            await trio.sleep(0.05)  # lets the feeder see that nothing is left from before
            for number in range(40):
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as race:
                        race.start_soon(bench.queue.accept, arrival(webhook_id=f"m{number}"))
                        for _ in range(number % 4):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()
            answers = [
                await bench.queue.accept(arrival(webhook_id=f"m{number}")) for number in range(40)
            ]
            assert {answer.status for answer in answers} == {200}
            await until(lambda: len(handled) >= 40)
            assert bench.queue.depth == 0
            bench.queue.close()
        counts = await inbox.counts()
        await inbox.close()
    assert counts[DeliveryState.DONE] == 40
    assert sorted(handled) == sorted(f"m{number}" for number in range(40))


@pytest.mark.parametrize("enqueue", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_run_that_ends_although_it_was_cancelled_is_not_forgotten(tmp_path, enqueue, fails):
    """Its handler shields work that must not be done twice: the next start must not repeat it."""
    begun, cancelled = trio.Event(), trio.Event()

    async def handle(event):
        with trio.CancelScope(shield=True):
            begun.set()
            await cancelled.wait()
        if fails:
            raise ValueError("refused")

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, handle, enqueue=enqueue)
    inbox = await open_inbox(tmp_path)
    bench = Bench.of(handlers, inbox)
    delivery = arrival(webhook_id="a")

    async def run():
        if enqueue:
            admitted = await inbox.accept(delivery.delivery, leased=True)
            held = HeldLease(admitted.lease, 0.0)
            await bench.runner.queued.run(delivery, held, attempt=1)
        else:
            await bench.runner.inline.run(delivery, bench.handler())

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await begun.wait()
            nursery.cancel_scope.cancel()
            cancelled.set()
        record = await inbox.get("a")
        await inbox.close()
    assert record.state is (DeliveryState.RETRYING if fails else DeliveryState.DONE)
    assert record.last_error == ("ValueError: refused" if fails else None)
    assert bench.counters.values["failed" if fails else "handled"] == 1
