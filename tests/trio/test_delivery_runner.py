"""Running handlers: once for an id, guarded, within the deadline, with the outcome kept."""

from math import inf

import pytest
import trio
from msgspec.structs import replace
from support.deliveries import SECRET, Bench, arrival, memory_inbox, settings
from support.keyed import ByKey
from support.replicating import said
from support.serving import registry

from sdk_trio.base import clock
from sdk_trio.errors import HandlerAbortedError, RetryLater, StoreUnavailableError
from sdk_trio.events import OrderPaidEvent
from sdk_trio.records.deliveries import Dead, DeliveryState
from sdk_trio.storage.open import LEASE_SECONDS
from sdk_trio.webhooks.clock_watch import TAKE_SECONDS
from sdk_trio.webhooks.recording import HeldLease
from sdk_trio.webhooks.registry import WebhookHandlerBase


async def state_of(bench, webhook_id):
    record = await bench.inbox.get(webhook_id)
    return record and record.state


async def test_a_handler_that_returns_is_done_and_answered_200(autojump_clock):
    seen = []

    async def handler(event):
        seen.append((event.webhook_id, event.data.id, event.attempt))

    bench = Bench.of(registry(handler))
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert (answer.status, answer.body) == (200, b"{}")
    assert seen == [("a", "s1", 1)]
    assert await state_of(bench, "a") is DeliveryState.DONE


@pytest.mark.parametrize("tenant_id", [None, "t1"])
async def test_each_run_leaves_a_line_with_handler_seconds_and_tenant(
    autojump_clock, caplog, tenant_id
):
    failing = True

    async def handler(event):
        await trio.sleep(2)
        if failing:
            raise ValueError("no such product")

    bench = Bench.of(registry(handler))
    bench.runner.invocations._stopwatch = trio.current_time
    came = arrival(webhook_id="a")
    came = replace(came, delivery=replace(came.delivery, tenant_id=tenant_id))
    with caplog.at_level("INFO"):
        await bench.runner.inline.run(came, bench.handler())
        failing = False
        await bench.runner.inline.run(came, bench.handler())
    (failed,), (handled,) = said(caplog, "webhook.failed"), said(caplog, "webhook.handled")
    for line, attempt in ((failed, 1), (handled, 2)):
        assert (line["webhook_id"], line["type"], line["attempt"]) == ("a", "order.paid", attempt)
        assert line["handler"].endswith("handler")
        assert line["seconds"] == 2
        assert line.get("tenant_id") == tenant_id


async def test_a_finished_id_is_answered_200_and_not_run_again(autojump_clock):
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    bench = Bench.of(registry(handler))
    for _ in range(3):
        answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
        assert answer.status == 200
    assert runs == ["a"]
    assert bench.counters.values["duplicate"] == 2


async def test_fifty_simultaneous_deliveries_of_one_id_run_once(autojump_clock):
    runs, statuses = [], []

    async def handler(event):
        runs.append(event.webhook_id)
        await trio.sleep(1)

    bench = Bench.of(registry(handler))

    async def deliver():
        answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
        statuses.append(answer.status)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(deliver)
    assert runs == ["a"]
    assert statuses == [200] * 50


async def test_those_who_wait_get_the_failure_and_a_redelivery_runs_again(autojump_clock):
    attempts, statuses = [], []

    async def handler(event):
        attempts.append(event.attempt)
        await trio.sleep(1)
        if len(attempts) == 1:
            raise RuntimeError("first one fails")

    bench = Bench.of(registry(handler))

    async def deliver():
        answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
        statuses.append(answer.status)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(deliver)
    assert (attempts, statuses) == ([1], [500] * 50)
    await deliver()
    assert attempts == [1, 2]
    assert statuses[-1] == 200
    assert await state_of(bench, "a") is DeliveryState.DONE


async def test_waiting_for_another_run_ends_at_the_inline_deadline_with_503(autojump_clock):
    async def handler(event):
        with trio.CancelScope(shield=True):
            await trio.sleep(20)

    bench = Bench.of(registry(handler), Webhooks__InlineTimeoutSeconds=8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.runner.inline.run, arrival(webhook_id="a"), bench.handler())
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
        assert answer.status == 503
        assert trio.current_time() - started == 8
        assert dict(answer.headers)[b"retry-after"].isdigit()


async def test_an_inline_handler_is_cancelled_at_its_deadline_and_counts_as_failed(autojump_clock):
    cancelled = []

    async def handler(event):
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append(trio.current_time())

    bench = Bench.of(registry(handler), Webhooks__InlineTimeoutSeconds=8)
    started = trio.current_time()
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 500
    assert cancelled == [started + 8]
    record = await bench.inbox.get("a")
    assert record.state is DeliveryState.RETRYING
    assert "InlineTimeoutSeconds" in record.last_error


async def test_after_the_last_inline_attempt_it_is_200_and_a_dead_letter(autojump_clock):
    async def handler(event):
        raise ValueError("always")

    bench = Bench.of(registry(handler), Webhooks__InlineMaxAttempts=3)
    statuses = [
        (await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())).status
        for _ in range(3)
    ]
    assert statuses == [500, 500, 200]
    record = await bench.inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.DEAD, 3)
    assert [attempt.error for attempt in await bench.inbox.attempts("a")] == [
        "ValueError: always"
    ] * 3


async def test_retry_later_is_503_with_retry_after(autojump_clock):
    async def handler(event):
        raise RetryLater(17, "maintenance")

    bench = Bench.of(registry(handler))
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 503
    assert (b"retry-after", b"17") in answer.headers
    assert await state_of(bench, "a") is DeliveryState.RETRYING


@pytest.mark.parametrize("more", [[], [ValueError("bad")]], ids=["asked", "failed"])
async def test_a_handler_that_asks_for_a_later_run_has_answered_and_not_failed(
    autojump_clock, caplog, more
):
    async def handler(event):
        raise ExceptionGroup("parts", [RetryLater(17, "maintenance"), *more])

    bench = Bench.of(registry(handler))
    with caplog.at_level("INFO"):
        answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 503
    (attempt,) = await bench.inbox.attempts("a")
    asked, failed = said(caplog, "webhook.postponed"), said(caplog, "webhook.failed")
    (line,) = failed if more else asked
    assert (asked == []) == bool(more)
    assert "RetryLater: maintenance" in line["error"]
    assert (line["retry_in"], line["place"]) == ("redelivery", attempt.place)
    assert ("traceback" in line) == (attempt.traceback is not None) == bool(more)


async def test_retry_later_inside_a_handlers_own_nursery_is_found(autojump_clock):
    async def part():
        raise RetryLater(30)

    async def handler(event):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(part)

    bench = Bench.of(registry(handler))
    answer = await bench.runner.inline.run(arrival(), bench.handler())
    assert (b"retry-after", b"30") in answer.headers


async def test_cancelled_in_the_middle_it_is_released_and_the_attempt_does_not_count(
    autojump_clock,
):
    async def handler(event):
        await trio.sleep_forever()

    bench = Bench.of(registry(handler))
    with trio.move_on_after(1) as scope:
        await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert scope.cancelled_caught
    record = await bench.inbox.get("a")
    assert record.state in (DeliveryState.RECEIVED, DeliveryState.RETRYING)
    assert record.attempts == 0


async def test_an_error_that_meets_a_cancellation_does_not_swallow_it(autojump_clock):
    async def part():
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("while being cancelled")

    async def handler(event):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(part)
            nursery.start_soon(trio.sleep_forever)

    bench = Bench.of(registry(handler))
    reached = False
    with trio.move_on_after(1) as scope:
        await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
        reached = True
    # Whatever the race, the event is not lost: it failed, or it was released.
    record = await bench.inbox.get("a")
    assert scope.cancel_called
    assert record.state in (DeliveryState.RETRYING, DeliveryState.RECEIVED) or not reached


async def test_the_error_hook_is_called_and_its_own_error_changes_nothing(autojump_clock):
    reported = []

    class Handler(WebhookHandlerBase[OrderPaidEvent]):
        async def handle_core(self, event):
            raise KeyError("boom")

        async def on_error(self, event, error):
            reported.append((event.webhook_id, repr(error)))
            raise RuntimeError("the hook fails too")

    bench = Bench.of(registry(Handler))
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 500
    assert reported == [("a", "KeyError('boom')")]
    assert (await bench.inbox.get("a")).last_error == "KeyError: 'boom'"


async def test_an_error_hook_that_meets_a_cancellation_and_fails_lets_it_go_on(autojump_clock):
    class Handler(WebhookHandlerBase[OrderPaidEvent]):
        async def handle_core(self, event):
            raise KeyError("boom")

        async def on_error(self, event, error):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                try:
                    await trio.sleep_forever()
                finally:
                    nursery.start_soon(self.fail)

        async def fail(self):
            raise RuntimeError("the hook fails too")

    bench = Bench.of(registry(Handler))
    with trio.move_on_after(1) as scope:
        await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert scope.cancelled_caught


async def test_the_same_id_with_another_body_keeps_the_first_and_does_not_run(autojump_clock):
    async def handler(event):
        pass

    bench = Bench.of(registry(handler))
    await bench.runner.inline.run(arrival(webhook_id="a", subject="one"), bench.handler())
    answer = await bench.runner.inline.run(arrival(webhook_id="a", subject="two"), bench.handler())
    assert answer.status == 200
    assert (await bench.inbox.get("a")).subject == "one"


async def test_a_delivery_with_an_unrecorded_outcome_can_be_delivered_again(autojump_clock):
    """The store fails after the handler ran: the sender gets 503, and its next attempt works."""
    inbox = memory_inbox()
    real_finish, failures = inbox.finish, [True]

    async def finish(*arguments, **keywords):
        if failures:
            failures.pop()
            raise StoreUnavailableError("disk full")
        await real_finish(*arguments, **keywords)

    inbox.finish = finish

    async def handler(event):
        pass

    bench = Bench.of(registry(handler), inbox)
    with pytest.raises(StoreUnavailableError):
        await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 200
    assert await state_of(bench, "a") is DeliveryState.DONE


class FailingInbox:
    """An inbox whose ``finish`` fails until :attr:`works`; all other methods are unchanged."""

    def __init__(self, inbox):
        self._inbox = inbox
        self.works = False

    def __getattr__(self, name):
        return getattr(self._inbox, name)

    async def finish(self, *arguments, **keywords):
        if not self.works:
            await trio.lowlevel.checkpoint()
            raise StoreUnavailableError("disk full")
        return await self._inbox.finish(*arguments, **keywords)


async def deliver(bench, webhook_id="a"):
    return await bench.runner.inline.run(arrival(webhook_id=webhook_id), bench.handler())


async def test_a_finished_handler_is_not_run_again_because_the_store_failed_at_its_end(
    autojump_clock,
):
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    inbox = FailingInbox(memory_inbox())
    bench = Bench.of(registry(handler), inbox)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await deliver(bench)
    inbox.works = True
    assert [(await deliver(bench)).status for _ in range(2)] == [200, 200]
    assert runs == ["a"]
    assert await state_of(bench, "a") is DeliveryState.DONE
    assert bench.counters.values["handled"] == 1


async def test_expired_leases_count_only_if_the_clock_was_not_set_lately(autojump_clock):
    """A start counts as well: found by the simulator, seed 20000411."""
    steps = [0.0]

    async def handler(event):
        pass

    bench = Bench.of(registry(handler), clock=lambda: trio.current_time() + sum(steps))
    watch = bench.runner.clock_watch
    found = []

    def look():
        found.append(watch.take_expired_until() - clock.monotonic())

    for _ in range(2):
        look()
        await trio.sleep(LEASE_SECONDS - 1)
        look()
        await trio.sleep(1)
        look()
        steps.append(-3600.0)
    assert found == [-inf, -inf, pytest.approx(TAKE_SECONDS, abs=0.5)] * 2


async def test_the_last_failure_is_a_dead_letter_although_the_store_failed_at_first(autojump_clock):
    runs = []

    async def handler(event):
        runs.append(event.attempt)
        raise ValueError("no such product")

    inbox = FailingInbox(memory_inbox())
    bench = Bench.of(registry(handler), inbox, Webhooks__InlineMaxAttempts=1)
    with pytest.raises(StoreUnavailableError):
        await deliver(bench)
    inbox.works = True
    assert (await deliver(bench)).status == 200
    assert runs == [1]
    assert await state_of(bench, "a") is DeliveryState.DEAD


async def test_a_failed_handler_runs_again_after_the_store_failed_at_its_end(autojump_clock):
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)
        if len(runs) == 1:
            raise ValueError("no such product")

    inbox = FailingInbox(memory_inbox())
    bench = Bench.of(registry(handler), inbox)
    with pytest.raises(StoreUnavailableError):
        await deliver(bench)
    inbox.works = True
    assert (await deliver(bench)).status == 200
    assert runs == ["a", "a"]
    assert await state_of(bench, "a") is DeliveryState.DONE


async def test_an_outcome_in_memory_is_not_that_of_a_run_after_a_replay(autojump_clock):
    """The store had the outcome, although it failed; then an operator replays the event."""
    runs = []

    async def handler(event):
        runs.append(event.attempt)
        raise ValueError("no such product")

    inbox = FailingInbox(ByKey(memory_inbox(), for_runner=True))
    once = {"Webhooks__InlineMaxAttempts": 1, "Webhooks__Queue__MaxAttempts": 1}
    bench = Bench.of(registry(handler), inbox, **once)
    with pytest.raises(StoreUnavailableError):
        await deliver(bench)
    inbox.works = True
    await inbox.finish("a", Dead("no such product"), now=trio.current_time())
    assert await inbox.replay(["a"]) == ["a"]
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(10)
        bench.queue.close()
    assert await state_of(bench, "a") is DeliveryState.DEAD
    # The first redelivery only drops the obsolete outcome.
    assert [(await deliver(bench)).status for _ in range(2)] == [503, 200]
    assert len(runs) == 3


async def test_outcomes_in_memory_are_bounded_and_the_oldest_goes_first(
    autojump_clock, monkeypatch
):
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    monkeypatch.setattr("sdk_trio.webhooks.inline.MOST_UNRECORDED", 2)
    inbox = FailingInbox(memory_inbox())
    bench = Bench.of(registry(handler), inbox)
    for webhook_id in "abc":
        with pytest.raises(StoreUnavailableError):
            await deliver(bench, webhook_id)
    inbox.works = True
    for webhook_id in "abc":
        assert (await deliver(bench, webhook_id)).status == 200
    assert runs == ["a", "b", "c", "a"]


@pytest.mark.parametrize("when", range(1, 12))
async def test_cancelled_at_every_await_nothing_is_lost(when):
    """Cancel at the n-th checkpoint; then a redelivery must be handled exactly as a new one."""
    finished = []

    async def handler(event):
        await trio.lowlevel.checkpoint()
        finished.append(event.webhook_id)

    bench = Bench.of(registry(handler))
    scope = trio.CancelScope()

    async def cancel_later():
        for _ in range(when):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_later)
        with scope:
            await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 200
    assert await state_of(bench, "a") is DeliveryState.DONE
    assert finished


async def test_secrets_that_a_handler_quotes_are_masked_also_those_replaced_by_a_reload():
    changed = "whsec_" + "A" * 32

    async def quote(event):
        raise ValueError(f"{SECRET} and {changed}, code tok")

    bench = Bench.of(registry(quote), AccessToken="tok")
    await bench.runner.inline.run(arrival(webhook_id="m1"), bench.handler())
    bench.runner.invocations.use(settings(Webhooks__Secret=f"v1,{changed}"))
    await bench.runner.inline.run(arrival(webhook_id="m2"), bench.handler())
    errors = [(await bench.inbox.get(name)).last_error for name in ("m1", "m2")]
    # Masking texts that are too short to be secrets would only garble messages.
    assert errors == [
        f"ValueError: ******** and {changed}, code tok",
        "ValueError: ******** and ********, code tok",
    ]


async def test_of_a_group_our_cancellation_goes_on_and_the_rest_is_logged(autojump_clock, caplog):
    async def part():
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("beside it")

    async def handler(event):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(part)
            nursery.start_soon(trio.sleep_forever)

    bench = Bench.of(registry(handler, enqueue=True))
    delivery = arrival(webhook_id="a")
    admitted = await bench.inbox.accept(delivery.delivery, leased=True)
    with trio.move_on_after(1) as scope:
        await bench.runner.queued.run(delivery, HeldLease(admitted.lease, 0.0), attempt=1)
    assert scope.cancelled_caught
    record = await bench.inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.RECEIVED, 0)


async def test_a_hook_that_ends_programs_is_logged_and_gets_what_was_raised_as_a_cause(
    autojump_clock, caplog
):
    reported = []

    class Handler(WebhookHandlerBase[OrderPaidEvent]):
        async def handle_core(self, event):
            raise SystemExit(3)

        async def on_error(self, event, error):
            reported.append(error)
            raise SystemExit(4)

    bench = Bench.of(registry(Handler))
    answer = await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler())
    assert answer.status == 500
    (error,) = reported
    assert isinstance(error, HandlerAbortedError)
    assert isinstance(error.__cause__, SystemExit)
    assert (await bench.inbox.get("a")).last_error == "SystemExit: 3"
    assert "webhook.error_hook_failed" in caplog.text
