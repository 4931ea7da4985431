"""The queue: bounded, retried, in order where asked for, drained, and nothing lost."""

import itertools
import math
import threading
from functools import partial

import pytest
import trio
from msgspec.structs import replace
from support.deliveries import Bench, arrival, memory_inbox
from support.keyed import ByKey
from support.serving import registry

from sdk_trio import HandlerRegistry
from sdk_trio.client.errors import CircuitOpenError
from sdk_trio.errors import RetryLater, StoreUnavailableError
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent, OrderUpdatedEvent
from sdk_trio.records.deliveries import DeliveryState, Done, Retry
from sdk_trio.storage.open import LEASE_SECONDS
from sdk_trio.webhooks import arrival as arrival_module
from sdk_trio.webhooks import queue

queued = partial(registry, enqueue=True)


async def settled(bench):
    """Wait until nothing is in memory or runs; a retry is in the store, and not waited for."""
    await trio.testing.wait_all_tasks_blocked()
    while not bench.queue.idle:
        await trio.sleep(0.1)


async def states(bench):
    return {state: count for state, count in (await bench.inbox.counts()).items() if count}


async def test_an_accepted_event_is_answered_at_once_and_handled_by_a_worker(autojump_clock):
    handled = []

    async def handler(event):
        await trio.sleep(60)
        handled.append(event.webhook_id)

    bench = Bench.of(queued(handler))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        started = trio.current_time()
        answer = await bench.queue.accept(arrival(webhook_id="a"))
        assert (answer.status, trio.current_time() - started) == (200, 0)
        assert handled == []
        await settled(bench)
        assert handled == ["a"]
        bench.queue.close()
    assert await states(bench) == {DeliveryState.DONE: 1}


async def test_a_full_queue_refuses_with_503_and_keeps_nothing_of_it(autojump_clock):
    gate = trio.Event()

    async def handler(event):
        await gate.wait()

    bench = Bench.of(queued(handler), Webhooks__Queue__Capacity=2, Webhooks__Queue__Workers=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        statuses = []
        for number in range(5):
            answer = await bench.queue.accept(arrival(webhook_id=f"m{number}"))
            await trio.testing.wait_all_tasks_blocked()
            statuses.append(answer.status)
        # One runs, two wait.
        assert statuses == [200, 200, 200, 503, 503]
        assert dict(answer.headers)[b"retry-after"]
        assert await bench.inbox.get("m3") is None
        assert await bench.inbox.get("m4") is None
        gate.set()
        await settled(bench)
        assert (await bench.queue.accept(arrival(webhook_id="m4"))).status == 200
        await settled(bench)
        bench.queue.close()
    assert await states(bench) == {DeliveryState.DONE: 4}


async def test_simultaneous_arrivals_cannot_overfill_the_queue(autojump_clock):
    gate = trio.Event()

    async def handler(event):
        await gate.wait()

    bench = Bench.of(queued(handler), Webhooks__Queue__Capacity=5, Webhooks__Queue__Workers=1)
    statuses = []

    async def accept(number):
        statuses.append((await bench.queue.accept(arrival(webhook_id=f"m{number}"))).status)

    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as senders:
            for number in range(40):
                senders.start_soon(accept, number)
        kept = sum((await bench.inbox.counts()).values())
        assert statuses.count(200) == kept
        assert 5 <= kept <= 6
        gate.set()
        await settled(bench)
        bench.queue.close()
    assert await states(bench) == {DeliveryState.DONE: kept}


async def test_failures_are_retried_with_growing_jittered_delays_then_dead(autojump_clock):
    times = []

    async def handler(event):
        times.append(trio.current_time())
        raise RuntimeError(f"attempt {event.attempt}")

    bench = Bench.of(queued(handler), Webhooks__Queue__MaxAttempts=5)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(200)
        bench.queue.close()
    delays = [round(later - earlier, 6) for earlier, later in itertools.pairwise(times)]
    # Half of 1, 2, 4, 8 seconds: the bench's jitter is one half.
    assert delays == [0.5, 1, 2, 4]
    record = await bench.inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.DEAD, 5)
    assert record.last_error == "RuntimeError: attempt 5"


REFUSED = CircuitOpenError("refused", method="GET", path="/v1/orders/", retry_after=100.0)


@pytest.mark.parametrize(
    "error", [RetryLater(100), REFUSED, ExceptionGroup("two", [REFUSED, ValueError()])], ids=repr
)
async def test_a_retry_is_never_earlier_than_asked(autojump_clock, error):
    times = []

    async def handler(event):
        times.append(trio.current_time())
        if len(times) == 1:
            raise error

    bench = Bench.of(queued(handler))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(300)
        bench.queue.close()
    assert times[1] - times[0] >= 100
    assert await states(bench) == {DeliveryState.DONE: 1}


async def test_ordered_events_of_a_subject_run_one_at_a_time_in_order(autojump_clock):
    log, running = [], set()

    async def handler(event):
        assert event.data.id not in running
        running.add(event.data.id)
        await trio.sleep(1)
        running.discard(event.data.id)
        if event.webhook_id == "a0" and event.attempt == 1:
            raise RuntimeError("the first one fails once")
        log.append(event.webhook_id)

    bench = Bench.of(queued(handler, ordered=True))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for number in range(4):
            for subject in "ab":
                await bench.queue.accept(
                    arrival(webhook_id=f"{subject}{number}", subject=subject, ordered=True)
                )
        await trio.sleep(60)
        bench.queue.close()
    assert [name for name in log if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [name for name in log if name[0] == "b"] == ["b0", "b1", "b2", "b3"]
    # Two subjects side by side, not one after the other.
    assert log.index("b3") < log.index("a3")


async def test_a_duplicate_of_a_queued_event_is_200_at_once_and_runs_once(autojump_clock):
    runs = []

    async def handler(event):
        await trio.sleep(5)
        runs.append(event.webhook_id)

    bench = Bench.of(queued(handler))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for _ in range(3):
            assert (await bench.queue.accept(arrival(webhook_id="a"))).status == 200
        await settled(bench)
        assert (await bench.queue.accept(arrival(webhook_id="a"))).status == 200
        await settled(bench)
        bench.queue.close()
    assert runs == ["a"]


async def test_a_drain_finishes_queued_events(autojump_clock):
    handled = []

    async def handler(event):
        await trio.sleep(1)
        handled.append(event.webhook_id)

    bench = Bench.of(queued(handler), Webhooks__Queue__Workers=2)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(10):
            await bench.queue.accept(arrival(webhook_id=f"m{number}"))
        bench.queue.close()
        assert (await bench.queue.accept(arrival())).status == 503
    assert len(handled) == 10


async def test_cancelled_workers_release_and_the_next_owner_runs_everything_once(autojump_clock):
    done = []

    async def slow(event):
        await trio.sleep_forever()

    async def quick(event):
        done.append((event.webhook_id, event.attempt))

    inbox = ByKey(memory_inbox(), for_runner=True)
    bench = Bench.of(queued(slow), inbox, Webhooks__Queue__Workers=3)
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.queue.run)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(10):
                await bench.queue.accept(arrival(webhook_id=f"m{number}"))
            await trio.sleep_forever()
    assert (await states(bench)).keys() <= {DeliveryState.RECEIVED, DeliveryState.RETRYING}

    # Events in the channel keep their leases: a restarted process would take them away.
    await inbox.release([f"m{number}" for number in range(10)])
    again = Bench.of(queued(quick), inbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(again.queue.run)
        await settled(again)
        await trio.sleep(1)
        again.queue.close()
    assert sorted(done) == [(f"m{number}", 1) for number in range(10)]


async def test_replayed_dead_letters_run_again_and_go_on_counting(autojump_clock):
    broken = [True]
    seen = []

    async def handler(event):
        seen.append((event.webhook_id, event.attempt))
        if broken:
            raise RuntimeError("not yet")

    bench = Bench.of(queued(handler), Webhooks__Queue__MaxAttempts=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(5)
        assert await states(bench) == {DeliveryState.DEAD: 1}
        broken.clear()
        assert list(await bench.inbox.replay(["a"])) == ["a"]
        await bench.queue.accept(arrival(webhook_id="b", ordered=True))
        await trio.sleep(5)
        bench.queue.close()
    assert await states(bench) == {DeliveryState.DONE: 2}
    assert sorted(seen) == [("a", 1), ("a", 2), ("b", 1)]


async def test_a_retrying_event_can_be_replayed_at_once(autojump_clock):
    seen = []

    async def handler(event):
        seen.append((trio.current_time() - begun, event.attempt))
        if len(seen) == 1:
            raise RetryLater(3600)

    bench = Bench.of(queued(handler))
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(5)
        assert await states(bench) == {DeliveryState.RETRYING: 1}
        assert list(await bench.inbox.replay(["a"])) == ["a"]
        bench.queue.wake()
        await trio.sleep(5)
        bench.queue.close()
    assert [attempt for _, attempt in seen] == [1, 2]
    assert seen[1][0] < 10
    assert (await bench.inbox.get("a")).state is DeliveryState.DONE


class SetClock:
    """A wall clock that can be set while the loop's clock continues."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return trio.current_time() + self.ahead


@pytest.mark.parametrize("asked", [None, 600.0])
async def test_a_clock_that_goes_back_delays_no_retry_and_no_ordered_lane(
    autojump_clock, caplog, asked
):
    """It was two hours fast when the event failed, and is put right then."""
    clock = SetClock()
    clock.ahead = 7200.0
    ran = []

    async def handler(event):
        ran.append((event.webhook_id, trio.current_time()))
        if len(ran) == 1:
            raise RetryLater(asked) if asked else RuntimeError("once")

    bench = Bench.of(
        queued(handler, ordered=True),
        clock=clock,
        Webhooks__Queue__RetryBaseSeconds=3,
        Webhooks__Queue__RetryCapSeconds=3,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for name in ("first", "second"):
            await bench.queue.accept(arrival(webhook_id=name, ordered=True, now=clock()))
        while not ran:
            await trio.sleep(0.1)
        await trio.sleep(0.1)
        clock.ahead = 0.0
        await trio.sleep(60)
        bench.queue.close()
    assert [name for name, _ in ran] == ["first", "first", "second"]
    assert ran[2][1] - ran[0][1] < 10
    (stepped,) = [r for r in caplog.records if "runtime.clock_stepped" in r.message]
    assert stepped.sdk[1]["seconds"] == pytest.approx(-7200, abs=1)


async def test_a_clock_that_goes_back_while_the_store_fails_delays_no_retry(autojump_clock):
    clock = SetClock()
    clock.ahead = 7200.0
    ran = []

    async def handler(event):
        ran.append(trio.current_time())
        if len(ran) == 1:
            raise RetryLater(20)

    inbox = memory_inbox()
    real_renew, failing = inbox.renew, [True]

    async def renew(*arguments, **keywords):
        if failing:
            raise StoreUnavailableError("the disk hangs")
        return await real_renew(*arguments, **keywords)

    inbox.renew = renew
    bench = Bench.of(queued(handler), inbox, clock=clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a", now=clock()))
        await trio.sleep(1)
        clock.ahead = 0.0
        await trio.sleep(5)
        failing.clear()
        await trio.sleep(60)
        bench.queue.close()
    assert len(ran) == 2


async def test_a_retry_that_the_store_learns_of_after_a_clock_step_is_not_delayed(autojump_clock):
    clock = SetClock()
    clock.ahead = 7200.0
    ran = []

    async def handler(event):
        ran.append(trio.current_time())
        if len(ran) == 1:
            raise RetryLater(20)

    inbox = memory_inbox()
    real_finish, failing = inbox.finish, [True]

    async def finish(*arguments, **keywords):
        if failing:
            raise StoreUnavailableError("disk full")
        return await real_finish(*arguments, **keywords)

    inbox.finish = finish
    bench = Bench.of(queued(handler), inbox, clock=clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a", now=clock()))
        await trio.sleep(1)
        clock.ahead = 0.0
        await trio.sleep(5)
        failing.clear()
        await trio.sleep(60)
        bench.queue.close()
    assert len(ran) == 2
    assert ran[1] - ran[0] == pytest.approx(20, abs=1)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_a_clock_that_is_set_ends_no_lease_of_another_process(autojump_clock, step):
    """By the new time it looks expired, or written by a wrong clock, until it is renewed."""
    clock = SetClock()
    ran = []

    async def handler(event):
        ran.append(event.webhook_id)
        await trio.sleep(20)

    inbox = memory_inbox(owner="one")
    one = Bench.of(queued(handler), inbox, clock=clock)
    two = Bench.of(queued(handler), memory_inbox(owner="two", shares=inbox), clock=clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(one.queue.run)
        await nursery.start(two.queue.run)
        await trio.sleep(10)
        await one.queue.accept(arrival(webhook_id="a", now=clock()))
        await trio.sleep(1.1)
        clock.ahead = step
        two.queue.wake()
        await trio.sleep(60)
        one.queue.close()
        two.queue.close()
    assert ran == ["a"]
    assert (await inbox.get("a")).process_ends == 0


async def test_a_small_correction_of_the_clock_makes_nothing_due_early(autojump_clock, caplog):
    clock = SetClock()
    ran = []

    async def handler(event):
        ran.append(trio.current_time())
        if len(ran) == 1:
            raise RetryLater(100)

    bench = Bench.of(queued(handler), clock=clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(1)
        clock.ahead = -1.0
        await trio.sleep(200)
        bench.queue.close()
    assert ran[1] - ran[0] >= 100
    assert not [r for r in caplog.records if "runtime.clock_stepped" in r.message]


async def test_an_event_that_lost_its_handler_is_parked_by_the_worker(autojump_clock):
    async def handler(event):
        raise AssertionError("never called")

    bench = Bench.of(queued(handler))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(OrderCreatedEvent.wire_type, webhook_id="a"))
        await settled(bench)
        bench.queue.close()
    assert await states(bench) == {DeliveryState.PARKED: 1}


async def test_a_failing_store_delays_the_outcome_but_does_not_lose_it(autojump_clock):
    runs = []

    async def handler(event):
        runs.append(event.attempt)

    inbox = memory_inbox()
    real_finish, failures = inbox.finish, [1, 2, 3]

    async def finish(*arguments, **keywords):
        if failures:
            failures.pop()
            raise StoreUnavailableError("disk full")
        return await real_finish(*arguments, **keywords)

    inbox.finish = finish
    bench = Bench.of(queued(handler), inbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(30)
        bench.queue.close()
    assert runs == [1]
    assert await states(bench) == {DeliveryState.DONE: 1}


async def test_an_unconfirmed_outcome_does_not_end_the_next_run(
    autojump_clock,
):
    """The commit is made and its answer lost; the retry begins before the end is repeated."""
    runs, at_once = [], []

    async def handler(event):
        runs.append(event.attempt)
        at_once.append(event.attempt)
        try:
            if event.attempt == 1:
                raise RuntimeError("first one fails")
            assert at_once == [2]
            await trio.sleep(5)
        finally:
            at_once.remove(event.attempt)

    inbox = memory_inbox()
    real_finish, failures = inbox.finish, [1]

    async def finish(*arguments, **keywords):
        is_recorded = await real_finish(*arguments, **keywords)
        if failures:
            failures.pop()
            bench.queue.wake()
            raise StoreUnavailableError("the connection broke during a commit")
        return is_recorded

    inbox.finish = finish
    bench = Bench.of(queued(handler), inbox, Webhooks__Queue__RetryBaseSeconds=0)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(60)
        bench.queue.close()
    assert runs == [1, 2]
    record = await inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.DONE, 2)
    assert [attempt.number for attempt in await inbox.attempts("a")] == [1]


async def test_a_store_that_refuses_the_commit_leaves_the_queue_usable(autojump_clock):
    async def handler(event):
        pass

    inbox = memory_inbox()
    real_accept, failures = inbox.accept, [1]

    async def accept(*arguments, **keywords):
        if failures:
            failures.pop()
            raise StoreUnavailableError("disk full")
        return await real_accept(*arguments, **keywords)

    inbox.accept = accept
    bench = Bench.of(queued(handler), inbox, Webhooks__Queue__Capacity=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StoreUnavailableError):
            await bench.queue.accept(arrival(webhook_id="a"))
        assert bench.queue.depth == 0
        assert (await bench.queue.accept(arrival(webhook_id="a"))).status == 200
        await settled(bench)
        bench.queue.close()
    assert await states(bench) == {DeliveryState.DONE: 1}


async def test_cancelling_an_accept_at_every_await_never_leaks_a_slot(autojump_clock):
    async def handler(event):
        pass

    bench = Bench.of(queued(handler), Webhooks__Queue__Capacity=3)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        for when in range(1, 8):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as race:

                    async def cancel(scope=scope, when=when):
                        for _ in range(when):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    race.start_soon(cancel)
                    race.start_soon(bench.queue.accept, arrival(webhook_id=f"m{when}"))
        await settled(bench)
        await trio.sleep(1)
        assert bench.queue.depth == 0
        bench.queue.close()
    left = await states(bench)
    assert set(left) <= {DeliveryState.DONE}


async def test_a_store_that_cannot_be_read_for_a_while_is_asked_again(autojump_clock):
    handled = []

    async def handler(event):
        handled.append(event.webhook_id)

    inbox = memory_inbox()
    await inbox.accept(arrival(webhook_id="left behind").delivery, leased=False)
    real_take, failures = inbox.claim_due, [1, 2]

    async def claim_due(**keywords):
        if failures:
            failures.pop()
            raise StoreUnavailableError("the disk is gone")
        return await real_take(**keywords)

    inbox.claim_due = claim_due
    bench = Bench.of(queued(handler), inbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(10)
        bench.queue.close()
    assert handled == ["left behind"]


async def test_a_damaged_record_becomes_a_dead_letter_and_blocks_nothing(autojump_clock):
    handled = []

    async def handler(event):
        handled.append(event.webhook_id)

    inbox = memory_inbox()
    broken = replace(arrival(webhook_id="broken").delivery, raw=b"\xff no event")
    await inbox.accept(broken, leased=False)
    await inbox.accept(arrival(webhook_id="whole").delivery, leased=False)
    bench = Bench.of(queued(handler), inbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(10)
        bench.queue.close()
    assert handled == ["whole"]
    assert await states(bench) == {DeliveryState.DEAD: 1, DeliveryState.DONE: 1}


@pytest.mark.parametrize(("size", "aside"), [(300_000, True), (3000, False)])
async def test_large_bodies_with_surprises_are_looked_at_beside_the_loop_at_retries_too(
    size, aside, monkeypatch
):
    looking, handled = [], trio.Event()
    real = arrival_module.decode_envelope

    def decode_envelope(raw):
        looking.append(threading.current_thread() is not threading.main_thread())
        return real(raw)

    monkeypatch.setattr(arrival_module, "decode_envelope", decode_envelope)

    async def handler(event):
        assert len(event.raw) > size
        if event.attempt == 1:
            raise RetryLater(0)
        handled.set()

    raw = b'{"type":"order.paid","data":{"id":"o","x":NaN,"y":"%b"}}' % (b"y" * size)
    odd = replace(arrival(), delivery=replace(arrival().delivery, raw=raw), envelope=real(raw))
    bench = Bench.of(queued(handler), Webhooks__Queue__RetryBaseSeconds=0.01)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        assert (await bench.queue.accept(odd)).status == 200
        with trio.fail_after(60):
            await handled.wait()
        bench.queue.close()
    assert set(looking) == {aside}


async def test_a_backlog_larger_than_the_queue_runs_before_new_events(
    autojump_clock,
):
    handled = []

    async def handler(event):
        await trio.sleep(1)
        handled.append(event.webhook_id)

    inbox = memory_inbox()
    for number in range(10):
        await inbox.accept(arrival(webhook_id=f"old{number}").delivery, leased=False)
    bench = Bench.of(
        queued(handler), inbox, Webhooks__Queue__Capacity=2, Webhooks__Queue__Workers=1
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        # The queue is full of older events: a new event is refused, and does not overtake them.
        assert (await bench.queue.accept(arrival(webhook_id="new"))).status == 503
        await trio.sleep(60)
        assert (await bench.queue.accept(arrival(webhook_id="new"))).status == 200
        await settled(bench)
        bench.queue.close()
    assert handled == [*(f"old{number}" for number in range(10)), "new"]


async def test_cancelled_while_it_feeds_a_backlog_it_gives_the_rest_back(autojump_clock):
    async def handler(event):
        await trio.sleep_forever()

    inbox = memory_inbox()
    for number in range(10):
        await inbox.accept(arrival(webhook_id=f"m{number}").delivery, leased=False)
    bench = Bench.of(
        queued(handler), inbox, Webhooks__Queue__Capacity=2, Webhooks__Queue__Workers=1
    )
    with trio.move_on_after(5):
        await bench.queue.run()
    due = await inbox.claim_due(limit=100, now=trio.current_time())
    # All but the two in the channel, whose leases end with the process.
    assert len(due.records) == 8


# -- after an event has ended the process ------------------------------------------------------


async def after_ends(handlers, *ids, ends=2, **keys):
    """A bench that starts after the process has ended ``ends`` times while all ``ids`` ran."""
    inbox = memory_inbox(owner="0")
    for webhook_id in ids:
        await inbox.accept(arrival(webhook_id=webhook_id).delivery, leased=False)
    for owner in range(ends):
        inbox = memory_inbox(owner=f"{owner}", shares=inbox)
        due = await inbox.claim_due(limit=99, now=trio.current_time())
        for webhook_id in ids:
            await inbox.start(due.leases[webhook_id], now=trio.current_time())
        inbox = memory_inbox(owner=f"{owner + 1}", shares=inbox)
        await inbox.recover()
    keys["Webhooks__Queue__MaxAttempts"] = ends + 1
    return Bench.of(handlers, inbox, after_crash=True, **keys)


@pytest.mark.parametrize("lasts", [45, math.inf])
async def test_a_suspect_runs_beside_no_other_suspect(autojump_clock, lasts):
    """If it ends the process now, they are not the cause; and they are not kept forever."""
    begun = {}

    async def handler(event):
        begun[event.webhook_id] = trio.current_time()
        if event.webhook_id == "lasting":
            await trio.sleep(lasts)

    bench = await after_ends(queued(handler), "lasting", "beside", "further")
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(40)
        assert set(begun) == {"lasting"}
        await bench.queue.accept(arrival(webhook_id="new"))
        await trio.sleep(1)
        assert set(begun) == {"lasting", "new"}
        lasting, beside = await bench.inbox.get("lasting"), await bench.inbox.get("beside")
        assert (lasting.attempts, lasting.ran_alone) == (3, False)
        assert (beside.attempts, beside.ran_alone) == (2, False)
        await trio.sleep(700)
        assert begun["beside"] - started == pytest.approx(min(lasts, 630), abs=1)
        assert "further" in begun
        nursery.cancel_scope.cancel()


async def test_a_limited_event_does_not_wait_for_a_suspect_that_lasts(autojump_clock):
    handled = []

    async def lasting(event):
        await trio.sleep(1000)

    async def limited(event):
        handled.append(event.webhook_id)

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, lasting, enqueue=True)
    handlers.register(OrderUpdatedEvent, limited, enqueue=True, concurrency=1)
    bench = await after_ends(handlers, "lasting", Webhooks__Queue__Workers=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(40)
        await bench.queue.accept(arrival("order.updated", webhook_id="a"), direct=False)
        await trio.sleep(30)
        assert handled == ["a"]
        nursery.cancel_scope.cancel()


async def test_a_quarantine_is_bounded_altogether(autojump_clock):
    """Inline deliveries are refused meanwhile."""
    begun = {}

    async def handler(event):
        begun[event.webhook_id] = trio.current_time()
        await trio.sleep(25)

    ids = [f"suspect-{number}" for number in range(8)]
    bench = await after_ends(queued(handler), *ids)
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        assert bench.runner.inline.quarantined
        await trio.sleep(70)
        assert [begun[one] - started for one in ids[:3]] == [0, 25, 50]
        await trio.sleep(15)
        assert not bench.runner.inline.quarantined
        assert {begun[one] - started for one in ids[3:]} == {75}
        await settled(bench)
        bench.queue.close()
    assert await states(bench) == {DeliveryState.DONE: 8}


async def test_a_suspect_that_waited_for_a_pause_runs_alone_after_it(autojump_clock):
    running, beside = set(), {}

    async def handler(event):
        running.add(event.webhook_id)
        beside[event.webhook_id] = running - {event.webhook_id}
        await trio.sleep(5)
        running.discard(event.webhook_id)
        for others in running:
            beside[others] |= {event.webhook_id}

    bench = await after_ends(queued(handler), "suspect")
    await bench.inbox.pause("order.*", actor="ann", reason="", until=None, now=trio.current_time())
    await bench.runner.pauses.poll()
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(10)
        assert beside == {}
        await bench.inbox.resume("order.*", actor="ann", now=trio.current_time())
        await bench.runner.pauses.poll()
        # Others run when it is claimed, and further ones arrive meanwhile.
        for number in range(4):
            event = arrival(webhook_id=f"m{number}", subject=f"s{number}")
            assert (await bench.queue.accept(event)).status == 200
            await trio.sleep(2)
        await settled(bench)
        bench.queue.close()
    assert beside["suspect"] == set()
    assert not [each for each, others in beside.items() if "suspect" in others]
    record = await bench.inbox.get("suspect")
    assert (record.state, record.attempts) == (DeliveryState.DONE, 3)
    assert not bench.runner.inline.quarantined


@pytest.mark.parametrize("call", ["accept", "claim_due"])
async def test_an_event_that_an_abandoned_call_has_leased_is_run_after_the_next_renewal(
    autojump_clock, monkeypatch, call
):
    """The commit comes after its caller has given up: 503, and 200 for the redelivery."""
    handled = []

    async def handle(event):
        handled.append((event.webhook_id, trio.current_time(), event.attempt))

    inbox = memory_inbox()
    bench = Bench.of(registry(handle, enqueue=True), inbox)
    original = getattr(inbox, call)
    late = [True]

    async def committed_late(*arguments, **options):
        result = await original(*arguments, **options)
        if late:
            late.clear()
            raise StoreUnavailableError("the store has not answered for 5 s")
        return result

    if call == "claim_due":
        await inbox.accept(arrival(webhook_id="a").delivery, leased=False)
    monkeypatch.setattr(inbox, call, committed_late)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        if call == "accept":
            with pytest.raises(StoreUnavailableError):
                await bench.queue.accept(arrival(webhook_id="a"))
            # The event is in the store, so its redelivery is acknowledged.
            assert (await bench.queue.accept(arrival(webhook_id="a"))).status == 200
        begun = trio.current_time()
        with trio.move_on_after(2 * queue.PICK_UP_SECONDS):
            while not handled:
                await trio.sleep(0.1)
        bench.queue.close()
    ((webhook_id, at, attempt),) = handled
    assert (webhook_id, attempt) == ("a", 1)
    assert at - begun <= queue.PICK_UP_SECONDS
    assert not [*bench.runner.leases], "no lease is held"


async def test_a_lane_goes_on_behind_an_event_that_an_abandoned_call_has_leased(autojump_clock):
    handled = []

    async def handle(event):
        handled.append(event.webhook_id)

    inbox = memory_inbox()
    bench = Bench.of(registry(handle, enqueue=True, ordered=True), inbox)
    for name in ("first", "second"):
        await inbox.accept(arrival(webhook_id=name, ordered=True).delivery, leased=False)
    await inbox.claim_due(limit=1, now=0.0)  # an abandoned call
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        with trio.fail_after(2 * queue.PICK_UP_SECONDS):
            while len(handled) < 2:
                await trio.sleep(0.1)
        assert trio.current_time() <= queue.PICK_UP_SECONDS
        bench.queue.close()
    assert handled == ["first", "second"]


async def test_events_that_become_due_without_a_signal_are_fetched(autojump_clock, monkeypatch):
    """A notification only shortens the wait for the next poll."""
    handled = []

    async def handle(event):
        handled.append(event.webhook_id)

    inbox = memory_inbox()
    other = memory_inbox(owner="other", shares=inbox)

    async def silent():
        await trio.lowlevel.checkpoint()
        return False

    monkeypatch.setattr(inbox, "changed_elsewhere", silent)
    bench = Bench.of(registry(handle, enqueue=True), inbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(1)
        await other.accept(arrival(webhook_id="a").delivery, leased=False)
        # And one whose process is paused: an expired lease notifies no one.
        leased = arrival(webhook_id="b", now=bench.queue._clock())
        await other.accept(leased.delivery, leased=True)
        with trio.fail_after(2 * queue.TAKE_OVER_SECONDS + 75):
            while len(handled) < 2:
                await trio.sleep(0.1)
        bench.queue.close()
    assert handled == ["a", "b"]


async def test_a_clock_that_is_set_while_a_fetch_waits_ends_no_lease_of_others(autojump_clock):
    """The fetch waits for a renewal, which waits for the disk."""
    handled, steps = [], [0.0]

    async def handle(event):
        handled.append(event.webhook_id)

    def clock():
        return trio.current_time() + sum(steps)

    inbox = memory_inbox()
    other = ByKey(memory_inbox(owner="other", shares=inbox))
    bench = Bench.of(queued(handle), inbox, clock=clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(LEASE_SECONDS)
        await other.accept(arrival(webhook_id="a", now=clock()).delivery, leased=True)
        async with bench.runner.leases.lock:
            bench.queue.wake()
            await trio.sleep(0.1)
            steps.append(3600.0)
        await trio.sleep(LEASE_SECONDS / 2)
        assert handled == []
        await trio.sleep(LEASE_SECONDS)
        assert handled == ["a"], "its lease has expired since"
        bench.queue.close()


async def test_an_event_that_comes_back_does_not_run_beside_its_run_that_was_taken_over(
    autojump_clock,
):
    """Both runs would have this process's lease, so the end of the first would free the second."""
    handled = []
    goes_on = trio.Event()

    async def handle(event):
        handled.append(event.webhook_id)
        await goes_on.wait()
        raise RuntimeError("the first run ends late, and badly")

    inbox = memory_inbox(lease_seconds=3)
    other = ByKey(memory_inbox(owner="other", shares=inbox, lease_seconds=60))
    bench = Bench.of(queued(handle), inbox)
    clock = bench.queue._clock
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(1)
        await bench.queue.accept(arrival(webhook_id="a", now=clock()))
        await trio.sleep(3.5)  # past the lease, and before the next renewal
        assert len((await other.claim_due(limit=9, now=clock())).records) == 1
        await trio.sleep(queue.RENEW_SECONDS)
        assert not list(bench.queue._runner.leases), "it was lost"
        assert await other.start("a", now=clock())
        await other.finish("a", Retry(clock(), "failed there"), now=clock())
        await trio.sleep(queue.PICK_UP_SECONDS)
        renewed = [lease.key for lease in bench.queue._runner.leases]
        assert renewed == ["a"], "it came back, and is renewed again"
        assert handled == ["a"]
        goes_on.set()
        bench.queue.close()
    record = await inbox.get("a")
    assert record is not None
    assert (record.state, "ends late" in record.last_error) == (DeliveryState.RETRYING, True)
    assert handled == ["a"]


@pytest.mark.parametrize("noticed", ["at the renewal", "at the start"])
async def test_an_event_that_another_process_has_taken_over_is_not_run(
    autojump_clock, monkeypatch, caplog, noticed
):
    """This process was paused for longer than a lease while an event waited in its memory."""
    handled = []
    goes_on = trio.Event()

    async def handle(event):
        handled.append(event.webhook_id)
        await goes_on.wait()

    inbox = memory_inbox(lease_seconds=3)
    other = ByKey(memory_inbox(owner="other", shares=inbox, lease_seconds=60))
    bench = Bench.of(queued(handle), inbox, Webhooks__Queue__Workers=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(1)
        for name in ("runs", "waits"):
            await bench.queue.accept(arrival(webhook_id=name, now=trio.current_time()))
        await trio.sleep(3.5)  # past the lease, and before the next renewal
        taken = (await other.claim_due(limit=9, now=trio.current_time())).records
        assert [record.key for record in taken] == ["runs", "waits"]
        if noticed == "at the renewal":
            await trio.sleep(queue.RENEW_SECONDS)
        else:
            monkeypatch.setattr(queue, "LEASE_SECONDS", 0.0)  # it may have ended, so it is tried
        goes_on.set()
        bench.queue.close()
    assert handled == ["runs"]
    assert any("webhook.lease_lost" in record.message for record in caplog.records)
    for name in ("runs", "waits"):
        assert await other.start(name, now=11.0)
        await other.finish(name, Done(), now=12.0)
    assert (await inbox.counts())[DeliveryState.DONE] == 2
