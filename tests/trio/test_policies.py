"""Policies of handlers and pauses, as a queue on its own clock obeys them."""

import itertools
from functools import partial

import pytest
import trio
from support.deliveries import Bench, arrival, memory_inbox
from support.serving import registry

from sdk_trio import Backoff, DeadLetter, Discard, HandlerRegistry
from sdk_trio.events import OrderPaidEvent, OrderUpdatedEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.records.policies import AFTER_PAUSED, PAUSED, handler_group, pause_group

queued = partial(registry, enqueue=True)


async def ended(bench, key="a"):
    """Return state, attempts and last error of an event."""
    record = await bench.inbox.get(key)
    return record.state, record.attempts, record.last_error


async def run_for(bench, seconds, *ids, **fields):
    """Accept events, and let the queue run for so long."""
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for webhook_id in ids:
            direct = not bench.handler().limited
            await bench.queue.accept(arrival(webhook_id=webhook_id, **fields), direct=direct)
        await trio.sleep(seconds)
        bench.queue.close()


# -- attempts, timeout, backoff --------------------------------------------------------------------


async def test_a_handler_has_its_own_attempts_and_backoff(autojump_clock):
    times = []

    async def handler(event):
        times.append(trio.current_time())
        raise RuntimeError("boom")

    bench = Bench.of(queued(handler, max_attempts=3, retry=Backoff(base=40, cap=60)))
    await run_for(bench, 300, "a")
    delays = [round(later - earlier, 6) for earlier, later in itertools.pairwise(times)]
    # Half of 40, and of 80, which is capped at 60: the bench's jitter is one half.
    assert delays == [20, 30]
    assert await ended(bench) == (DeliveryState.DEAD, 3, "RuntimeError: boom")


async def test_a_handler_has_its_own_timeout(autojump_clock):
    begun = []

    async def handler(event):
        begun.append(trio.current_time())
        await trio.sleep_forever()

    bench = Bench.of(queued(handler, timeout=5, max_attempts=1))
    await run_for(bench, 60, "a")
    state, attempts, error = await ended(bench)
    assert (state, attempts) == (DeliveryState.DEAD, 1)
    assert "took longer than its timeout (5 s)" in error


async def test_an_inline_handler_has_its_own_timeout_and_attempts(autojump_clock):
    async def handler(event):
        await trio.sleep_forever()

    bench = Bench.of(registry(handler, timeout=2, max_attempts=2))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        begun = trio.current_time()
        answers = [
            await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
            for _ in range(2)
        ]
        assert [answer.status for answer in answers] == [500, 200]
        assert trio.current_time() - begun == 4
        bench.queue.close()
    state, attempts, error = await ended(bench)
    assert (state, attempts) == (DeliveryState.DEAD, 2)
    assert "its timeout (2 s)" in error


# -- ending at once --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "state", "error"),
    [
        (Discard("a test order"), DeliveryState.DONE, "discarded: a test order"),
        (Discard(), DeliveryState.DONE, "discarded: no reason was given"),
        (DeadLetter("no such shop"), DeliveryState.DEAD, "DeadLetter: no such shop"),
        (
            ExceptionGroup("two", [DeadLetter("no such shop"), OSError("away")]),
            DeliveryState.DEAD,
            "DeadLetter: no such shop; OSError: away",
        ),
    ],
)
@pytest.mark.parametrize("enqueue", [True, False])
async def test_a_handler_ends_an_event_at_once(autojump_clock, raised, state, error, enqueue):
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)
        raise raised

    bench = Bench.of(registry(handler, enqueue=enqueue))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        if enqueue:
            await bench.queue.accept(arrival(webhook_id="a"))
        else:
            answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
            assert answer.status == 200
        await trio.sleep(1000)
        bench.queue.close()
    assert runs == ["a"]
    assert await ended(bench) == (state, 1, error)
    counted = "discarded" if state is DeliveryState.DONE else "dead"
    assert bench.counters.values[counted] == 1
    assert bench.counters.values["handled"] == 0


async def test_a_discard_beside_another_error_is_a_failure(autojump_clock):
    async def handler(event):
        raise ExceptionGroup("two", [Discard("useless"), OSError("away")])

    bench = Bench.of(queued(handler, max_attempts=1))
    await run_for(bench, 10, "a")
    assert (await ended(bench))[0] is DeliveryState.DEAD


# -- limits ----------------------------------------------------------------------------------------


async def test_no_more_run_at_once_than_the_concurrency(autojump_clock):
    running, most = set(), []

    async def handler(event):
        running.add(event.webhook_id)
        most.append(len(running))
        await trio.sleep(1)
        running.remove(event.webhook_id)

    inbox = memory_inbox()
    benches = [
        Bench.of(queued(handler, concurrency=3), shared)
        for shared in (inbox, memory_inbox(owner="there", shares=inbox))
    ]
    async with trio.open_nursery() as nursery:
        for bench in benches:
            await nursery.start(bench.queue.run)
        for number in range(30):
            bench = benches[number % 2]
            await bench.queue.accept(arrival(webhook_id=f"m{number}"), direct=False)
        await trio.sleep(60)
        for bench in benches:
            bench.queue.close()
    assert len(most) == 30
    assert max(most) == 3
    assert (await inbox.counts())[DeliveryState.DONE] == 30


async def test_runs_begin_at_the_rate(autojump_clock):
    times = []

    async def handler(event):
        times.append(trio.current_time())

    bench = Bench.of(queued(handler, rate_per_minute=60))
    await run_for(bench, 70, *(f"m{number}" for number in range(60)))
    assert len(times) == 60
    # Three at once, which is five per cent, then one each second.
    assert times[2] - times[0] < 0.1
    assert 56 < times[-1] - times[0] < 58


async def test_the_newest_event_of_a_subject_is_handled_last_and_once(autojump_clock):
    handled = []

    async def handler(event):
        await trio.sleep(1)
        handled.append(event.webhook_id)

    bench = Bench.of(queued(handler, coalesce=True))
    ids = [f"m{number}" for number in range(10)]
    await run_for(bench, 30, *ids, ordered=True)
    assert handled[-1] == "m9"
    assert len(handled) < 10
    superseded = [name for name in ids if name not in handled]
    assert bench.counters.values["superseded"] == len(superseded)
    for name in superseded:
        state, _, reason = await ended(bench, name)
        assert (state, reason.startswith("superseded by m")) == (DeliveryState.DONE, True)


# -- pauses ----------------------------------------------------------------------------------------


async def test_a_pause_uses_no_attempt_and_keeps_the_order(autojump_clock):
    handled = []

    async def handler(event):
        await trio.sleep(0.3)
        handled.append((event.webhook_id, event.attempt))

    bench = Bench.of(queued(handler, ordered=True))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.runner.pauses.run)
        await nursery.start(bench.queue.run)
        for number in range(20):
            await bench.queue.accept(arrival(webhook_id=f"m{number:02}", ordered=True))
        await trio.sleep(1)
        now = trio.current_time()
        await bench.inbox.pause("order.*", actor="me", reason="", until=None, now=now)
        await trio.sleep(2)
        before = len(handled)
        await trio.sleep(60)
        assert len(handled) == before < 20
        assert bench.runner.pauses.check().degraded
        assert bench.queue.idle
        now = trio.current_time()
        await bench.inbox.resume(None, actor="me", now=now)
        await trio.sleep(60)
        bench.queue.close()
        nursery.cancel_scope.cancel()
    assert handled == [(f"m{number:02}", 1) for number in range(20)]


async def test_a_pause_that_begins_while_a_start_is_recorded_holds_the_event(autojump_clock):
    attempts = []

    async def handler(event):
        attempts.append(event.attempt)

    bench = Bench.of(queued(handler))
    start = bench.inbox.start

    async def start_slowly(key, **given):
        started = await start(key, **given)
        now = trio.current_time()
        await bench.inbox.pause("order.*", actor="me", reason="", until=None, now=now)
        await bench.runner.pauses.poll()
        return started

    bench.inbox.start = start_slowly
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"))
        await trio.sleep(30)
        assert attempts == []
        assert (await ended(bench))[:2] == (DeliveryState.RECEIVED, 0)
        bench.inbox.start = start
        await bench.inbox.resume(None, actor="me", now=trio.current_time())
        await bench.runner.pauses.poll()
        await trio.sleep(30)
        bench.queue.close()
    assert attempts == [1]


async def test_a_pause_ends_at_its_time(autojump_clock):
    handled = []

    async def handler(event):
        handled.append(trio.current_time())

    bench = Bench.of(queued(handler))
    begun = trio.current_time()
    await bench.inbox.pause("*", actor="me", reason="", until=begun + 100, now=begun)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.runner.pauses.run)
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival(webhook_id="a"), direct=False)
        await trio.sleep(110)
        bench.queue.close()
        nursery.cancel_scope.cancel()
    assert 100 <= handled[0] - begun <= 102


async def test_a_backlog_of_other_handlers_does_not_keep_a_limited_event_out(autojump_clock):
    handled = []

    async def busy(event):
        await trio.sleep(0.1)

    async def limited(event):
        handled.append((event.webhook_id, trio.current_time()))

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, busy, enqueue=True)
    handlers.register(OrderUpdatedEvent, limited, enqueue=True, concurrency=1)
    bench = Bench.of(handlers, Webhooks__Queue__Workers=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for _ in range(20):
            await bench.queue.accept(arrival())
        for webhook_id in ("a", "b"):
            await bench.queue.accept(arrival("order.updated", webhook_id=webhook_id), direct=False)
        for _ in range(200):  # as many as are processed
            await bench.queue.accept(arrival())
            await trio.sleep(0.1)
        assert [webhook_id for webhook_id, _ in handled] == ["a", "b"]
        bench.queue.close()


async def test_a_full_memory_of_other_events_does_not_delay_limited_ones(autojump_clock):
    handled = []

    async def busy(event):
        await trio.sleep(1)

    async def limited(event):
        handled.append(trio.current_time())

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, busy, enqueue=True)
    handlers.register(OrderUpdatedEvent, limited, enqueue=True, rate_per_minute=60)
    bench = Bench.of(handlers, Webhooks__Queue__Workers=4)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for _ in range(400):
            await bench.queue.accept(arrival())
        for number in range(50):
            brought = arrival("order.updated", webhook_id=f"m{number}")
            await bench.queue.accept(brought, direct=False)
        await trio.sleep(60)
        assert len(handled) == 50
        assert (await bench.inbox.counts())[DeliveryState.RECEIVED] > 100
        nursery.cancel_scope.cancel()


async def test_limited_events_alone_do_not_wait_for_another_event(autojump_clock):
    handled = []

    async def limited(event):
        await trio.sleep(1)
        handled.append(event.webhook_id)

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, limited, enqueue=True, rate_per_minute=600)
    handlers.register(OrderUpdatedEvent, limited, enqueue=True, rate_per_minute=600)
    bench = Bench.of(handlers, Webhooks__Queue__Workers=1)
    ids = [f"m{number}" for number in range(5)]
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for webhook_id, kind in zip(ids, itertools.cycle(["order.paid", "order.updated"])):
            await bench.queue.accept(arrival(kind, webhook_id=webhook_id), direct=False)
        await trio.sleep(30)
        assert sorted(handled) == ids
        bench.queue.close()


async def test_a_limited_event_does_not_wait_for_a_run_that_is_cancelled(autojump_clock):
    handled = []

    async def ends_its_task(event):
        await trio.sleep(6)
        trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint()

    async def limited(event):
        handled.append(event.webhook_id)

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, ends_its_task, enqueue=True, max_attempts=1)
    handlers.register(OrderUpdatedEvent, limited, enqueue=True, concurrency=1)
    bench = Bench.of(handlers, Webhooks__Queue__Workers=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival())
        for webhook_id in ("a", "b"):
            await bench.queue.accept(arrival("order.updated", webhook_id=webhook_id), direct=False)
        await trio.sleep(4)
        assert handled == []
        await trio.sleep(10)
        assert handled == ["a", "b"]
        bench.queue.close()


async def test_a_limited_event_that_waits_for_a_worker_runs_in_the_drain(autojump_clock):
    handled = []

    async def busy(event):
        await trio.sleep(10)

    async def limited(event):
        handled.append(event.webhook_id)

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, busy, enqueue=True)
    handlers.register(OrderUpdatedEvent, limited, enqueue=True, concurrency=1)
    bench = Bench.of(handlers, Webhooks__Queue__Workers=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await bench.queue.accept(arrival())
        for webhook_id in ("a", "b"):
            await bench.queue.accept(arrival("order.updated", webhook_id=webhook_id), direct=False)
        await trio.sleep(6)
        assert bench.queue.depth == 1
        bench.queue.close()
    assert handled == ["a"]
    assert (await bench.inbox.get("b")).state is DeliveryState.RECEIVED


def test_no_name_of_a_type_makes_the_group_of_a_handler_that_of_a_pause():
    groups = [handler_group(name) for name in ("order.*", "pause:order.*", "", "\0")]
    assert pause_group("order.*") not in groups
    assert not [group for group in groups if PAUSED <= group < AFTER_PAUSED]
