"""Runs of the queue that take long: reported, cancelled at their limit, and named by the drain."""

import threading
from functools import partial

import pytest
import trio
from support.deliveries import UNRETRIED, Bench, arrival
from support.replicating import said
from support.serving import registry

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.events import OrderCreatedEvent
from sdk_trio.records.deliveries import DeliveryState

queued = partial(registry, enqueue=True)

POLICY = {"Webhooks__Queue__Workers": 2, **UNRETRIED}


def bench_of(handlers, **keys):
    bench = Bench.of(handlers, **{**POLICY, **keys})
    bench.runner.invocations._stopwatch = trio.current_time
    return bench


async def hangs(event):
    if event.webhook_id.startswith("hangs"):
        await trio.sleep_forever()


async def accept(bench, *ids):
    for webhook_id in ids:
        await bench.queue.accept(arrival(webhook_id=webhook_id))


async def test_runs_that_hang_are_cancelled_at_the_limit_and_the_others_go_on(autojump_clock):
    bench = bench_of(queued(hangs))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "hangs-1", "hangs-2", "fine")
        await trio.sleep(899)
        assert (await bench.inbox.get("fine")).state is DeliveryState.RECEIVED
        await trio.sleep(3)
        assert (await bench.inbox.get("fine")).state is DeliveryState.DONE
        for webhook_id in ("hangs-1", "hangs-2"):
            record = await bench.inbox.get(webhook_id)
            assert (record.state, record.attempts) == (DeliveryState.RETRYING, 1)
            assert record.last_error == (
                "the handler hangs took longer than Queue:HandlerTimeoutSeconds (900 s)"
            )
        bench.queue.close()


async def test_without_a_limit_a_run_continues(autojump_clock):
    bench = bench_of(queued(hangs), Webhooks__Queue__HandlerTimeoutSeconds=None)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "hangs-1", "fine")
        await trio.sleep(2000)
        assert (await bench.inbox.get("hangs-1")).state is DeliveryState.RUNNING
        assert (await bench.inbox.get("fine")).state is DeliveryState.DONE
        nursery.cancel_scope.cancel()


async def test_a_long_run_is_reported_with_its_event_after_a_minute_and_then_less_often(
    autojump_clock, caplog
):
    bench = bench_of(queued(hangs))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "hangs-1")
        await trio.sleep(59)
        assert not said(caplog, "webhook.still_running")
        await trio.sleep(600)
        lines = said(caplog, "webhook.still_running")
        assert [round(line["seconds"], -1) for line in lines] == [60, 120, 240, 480]
        assert {(line["webhook_id"], line["handler"]) for line in lines} == {("hangs-1", "hangs")}
        nursery.cancel_scope.cancel()


async def test_all_workers_are_held_while_each_has_a_long_run(autojump_clock):
    bench = bench_of(queued(hangs))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "hangs-1", "hangs-2")
        await trio.sleep(59)
        assert bench.queue.long_runs == ()
        await trio.sleep(2)
        assert [run.webhook_id for run in bench.queue.long_runs] == ["hangs-1", "hangs-2"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", [ValueError, None])
async def test_a_handler_s_own_end_after_a_cancellation_counts(autojump_clock, error):
    async def handler(event):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if error is not None:
                raise error("gave up") from None

    bench = bench_of(queued(handler), Webhooks__Queue__HandlerTimeoutSeconds=5)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "a")
        await trio.sleep(8)
        record = await bench.inbox.get("a")
        assert record.attempts == 1
        if error is None:
            assert record.state is DeliveryState.DONE
        else:
            # It comes of the cancellation, so the limit is its cause.
            assert record.state is DeliveryState.RETRYING
            assert "HandlerTimeoutSeconds (5 s)" in record.last_error
        bench.queue.close()


@pytest.mark.parametrize("gives_up", [False, True])
async def test_the_outcome_of_a_cancelled_run_is_kept_while_the_store_fails(
    autojump_clock, gives_up
):
    runs = []

    async def handler(event):
        runs.append(event.attempt)
        if event.attempt == 1:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                if gives_up:
                    raise

    bench = bench_of(queued(handler), Webhooks__Queue__HandlerTimeoutSeconds=5)
    real_finish, failures = bench.inbox.finish, [1, 2, 3]

    async def finish(*arguments, **keywords):
        if failures:
            failures.pop()
            raise StoreUnavailableError("disk full")
        await real_finish(*arguments, **keywords)

    bench.inbox.finish = finish
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "a")
        await trio.sleep(30)
        record = await bench.inbox.get("a")
        assert (runs, record.attempts) == ([1], 1)
        if gives_up:
            assert "HandlerTimeoutSeconds (5 s)" in record.last_error
        else:
            assert record.state is DeliveryState.DONE
        bench.queue.close()


async def test_a_stop_waits_only_a_bounded_time_for_the_outcome_of_a_cancelled_run(autojump_clock):
    bench = bench_of(queued(hangs), Webhooks__Queue__HandlerTimeoutSeconds=5)

    async def finish(*arguments, **keywords):
        raise StoreUnavailableError("disk full")

    bench.inbox.finish = finish
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "hangs-1")
        await trio.sleep(30)
        assert bench.queue.unfinished == 1
        with trio.fail_after(10):
            nursery.cancel_scope.cancel()
            await bench.queue.ended.wait()


async def test_a_worker_waits_no_longer_than_a_lease_for_the_outcome_of_a_cancelled_run(
    autojump_clock, caplog
):
    runs = []

    async def handler(event):
        runs.append(event.attempt)
        if len(runs) == 1:
            await trio.sleep_forever()

    bench = bench_of(queued(handler), Webhooks__Queue__HandlerTimeoutSeconds=5)
    real_finish, works = bench.inbox.finish, False

    async def finish(*arguments, **keywords):
        if not works:
            await trio.lowlevel.checkpoint()
            raise StoreUnavailableError("disk full")
        await real_finish(*arguments, **keywords)

    bench.inbox.finish = finish
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await accept(bench, "a")
        await trio.sleep(70)
        assert runs == [1], "its outcome is still to be recorded"
        await trio.sleep(40)
        assert runs == [1, 1], "its lease has ended, and the attempt does not count"
        works = True
        await trio.sleep(5)
        record = await bench.inbox.get("a")
        assert (record.state, record.attempts) == (DeliveryState.DONE, 1)
        assert not said(caplog, "webhook.failed"), "no failure is recorded"
        bench.queue.close()


async def test_the_hook_of_a_cancelled_run_is_not_called(autojump_clock, caplog):
    from sdk_trio.webhooks.registry import WebhookHandlerBase

    called = []

    class Handler(WebhookHandlerBase[OrderCreatedEvent]):
        async def handle_core(self, event):
            await trio.sleep_forever()

        async def on_error(self, event, error):
            called.append(error)

    bench = bench_of(
        registry(Handler, OrderCreatedEvent, enqueue=True),
        Webhooks__Queue__HandlerTimeoutSeconds=5,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival("order.created", webhook_id="a"))
        await trio.sleep(8)
        assert (await bench.inbox.get("a")).state is DeliveryState.RETRYING
        bench.queue.close()
    assert called == []


async def test_a_thread_is_reported_at_the_limit_and_its_own_end_counts(caplog):
    gate = threading.Event()
    begun = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def handler(event):
        token.run_sync_soon(begun.set)
        gate.wait()

    bench = Bench.of(queued(handler), Webhooks__Queue__HandlerTimeoutSeconds=0.05, **POLICY)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.queue.run)
            await accept(bench, "a")
            await begun.wait()
            try:
                while not said(caplog, "webhook.still_running"):
                    await trio.sleep(0.01)
                assert (await bench.inbox.get("a")).state is DeliveryState.RUNNING
            finally:
                gate.set()
            while (await bench.inbox.get("a")).state is DeliveryState.RUNNING:
                await trio.sleep(0.01)
            record = await bench.inbox.get("a")
            assert (record.state, record.attempts) == (DeliveryState.DONE, 1)
            # Its worker works on.
            await accept(bench, "b")
            while (await bench.inbox.get("b")).state is not DeliveryState.DONE:
                await trio.sleep(0.01)
            bench.queue.close()
    (line,) = said(caplog, "webhook.still_running")
    assert "cannot be stopped" in line["hint"]
