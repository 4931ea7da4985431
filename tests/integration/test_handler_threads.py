"""Handlers written as plain functions: each run in a thread, of a real receiver.

Threads report by events that they set and wait for; each wait has a time limit.
"""

import asyncio
import contextvars
import threading
from contextlib import contextmanager, suppress

import pytest
import trio
import trio.testing
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from support.deliveries import SECRET, UNRETRIED, Bench, arrival, memory_inbox, settings
from support.serving import registry, serving, waiting_for_run_of, works
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.config import Secret
from sdk_trio.errors import RetryLater, StoreUnavailableError
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.runtime import Runtime
from sdk_trio.testing import AppUnderTest, running_app
from sdk_trio.webhooks import HandlerRegistry, WebhookHandlerBase, queue
from sdk_trio.webhooks.signed_request import DeliveryFailedError


class Held:
    """A plain function that is held in its thread until it is let go."""

    def __init__(self):
        self.gate = threading.Event()
        self.begun = []
        self.ended = []
        self._lock = threading.Lock()
        self.together = self.most = 0

    def __call__(self, event):
        with self._lock:
            self.begun.append(event.webhook_id)
            self.together += 1
            self.most = max(self.most, self.together)
        assert self.gate.wait(PATIENCE_SECONDS)
        with self._lock:
            self.together -= 1
            self.ended.append(event.webhook_id)


@pytest.fixture
def held():
    """It is let go at the latest when the test ends, so that no thread keeps the loop."""
    held = Held()
    yield held
    held.gate.set()


@pytest.fixture(params=["Memory", "Sqlite"])
def store(request, tmp_path):
    if request.param == "Memory":
        return {}
    return {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}


@pytest.fixture(params=[False, True], ids=["inline", "enqueued"])
def enqueue(request):
    return request.param


# -- where it runs ------------------------------------------------------------------------------


async def test_a_plain_function_runs_in_a_thread_and_its_event_is_done(store, enqueue):
    seen = []

    def grant(event, services):
        seen.append((threading.current_thread(), event.data.id, services.settings))

    async with serving(registry(grant, enqueue=enqueue), **store) as app:
        delivered = await app.deliver("order.paid", {"id": "o_1"})
        assert (delivered.status, delivered.state) == (200, DeliveryState.DONE)
        ((thread, subject, given),) = seen
        assert thread is not threading.current_thread()
        assert (subject, given) == ("o_1", app.settings)


async def test_a_failure_names_the_line_and_what_it_asks_for(store, enqueue):
    def grant(event):
        raise RetryLater(17, "maintenance")

    line = grant.__code__.co_firstlineno + 1
    async with serving(registry(grant, enqueue=enqueue), **store) as app:
        delivered = await app.deliver("order.paid")
        assert (delivered.status, delivered.state) == (
            200 if enqueue else 503,
            DeliveryState.RETRYING,
        )
        assert isinstance(delivered.exception, RetryLater)
        (attempt,) = await app.store.attempts(delivered.webhook_id)
        assert f"{__file__}:{line} in " in attempt.place


async def test_values_of_the_loop_can_be_read_from_the_thread(enqueue):
    def grant(event):
        assert trio.from_thread.run(later) == "said"

    async def later():
        await trio.lowlevel.checkpoint()
        return "said"

    async with serving(registry(grant, enqueue=enqueue)) as app:
        await app.deliver("order.paid", expect="done")


async def test_at_most_so_many_threads_run_at_once(held):
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, held, enqueue=True)
    handlers.register(OrderCreatedEvent, held)
    keys = {"Webhooks__Queue__Threads": 2, "Webhooks__Queue__Workers": 6}
    async with serving(handlers, **keys) as app, trio.open_nursery() as nursery:
        for _ in range(6):
            await app.deliver("order.paid", settle=False)
        nursery.start_soon(app.deliver, "order.created")
        await until(lambda: held.together == 2)
        # All runs that could begin have begun: four of six workers wait for a thread.
        threads = app.runtime.receiver._running.runner.handlers.find("order.paid").threads
        await until(lambda: threads.statistics().tasks_waiting == 5)
        assert len(held.begun) == 2
        held.gate.set()
        await until(lambda: len(held.ended) == 7)
    assert held.most == 2


# -- what surrounds it --------------------------------------------------------------------------

work = contextvars.ContextVar("work", default="nothing")


async def test_context_variables_come_along_and_do_not_go_back():
    """Of the task that runs the handler: what spans and log contexts are kept in."""
    seen = []

    def grant(event):
        seen.append(work.get())
        work.set("changed")

    bench = Bench.of(registry(grant))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        work.set("mine")
        await bench.runner.inline.run(arrival(), bench.handler())
        bench.queue.close()
    assert (seen, work.get()) == (["mine"], "mine")


async def test_the_span_of_the_run_is_the_current_one_in_its_thread(monkeypatch, enqueue):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
    names = []

    def grant(event):
        names.append(trace.get_current_span().name)

    async with serving(registry(grant, enqueue=enqueue)) as app:
        await app.deliver("order.paid", expect="done")
    assert names == ["handle order.paid"]


async def test_context_managers_stand_around_each_run_in_its_thread(enqueue):
    reported = []

    def grant(event):
        reported.append(("run", threading.get_ident()))
        if event.attempt == 1:
            raise ValueError("first")

    handlers = registry(grant, enqueue=enqueue)
    handlers.register(OrderCreatedEvent, works)

    @handlers.around_threads
    @contextmanager
    def outer(event):
        reported.append((f"outer {event.type} {event.attempt}", threading.get_ident()))
        try:
            yield
        except ValueError:
            reported.append(("seen", threading.get_ident()))
            raise
        finally:
            reported.append(("left", threading.get_ident()))

    @handlers.around_threads
    @contextmanager
    def inner(event):
        reported.append(("inner", threading.get_ident()))
        yield

    keys = {"Webhooks__Queue__RetryBaseSeconds": 0}
    async with serving(handlers, **keys) as app:
        await app.deliver("order.created", expect="done")
        assert reported == []  # a coroutine function has no thread
        delivery = app.sign("order.paid")
        await app.deliver(delivery)
        await app.deliver(delivery)
        await until(lambda: len(reported) == 9)
    assert [what for what, _ in reported] == [
        "outer order.paid 1",
        "inner",
        "run",
        "seen",
        "left",
        "outer order.paid 2",
        "inner",
        "run",
        "left",
    ]
    assert len({thread for _, thread in reported[:5]}) == 1
    assert threading.get_ident() not in {thread for _, thread in reported}


async def test_a_context_manager_that_cannot_be_entered_fails_the_run():
    handlers = registry(lambda event: None)

    @handlers.around_threads
    @contextmanager
    def connected(event):
        raise ConnectionError("no database")
        yield

    async with serving(handlers, **UNRETRIED) as app:
        delivered = await app.deliver("order.paid", expect="retrying")
    assert delivered.error == "ConnectionError: no database"


async def test_a_run_refused_for_its_result_fails_the_surrounding_context():
    async def work():
        """Do nothing; it is never awaited."""

    handlers = registry(lambda event: work())
    seen = []

    @handlers.around_threads
    @contextmanager
    def transaction(event):
        try:
            yield
        except TypeError:
            seen.append("rolled back")
            raise

    async with serving(handlers, **UNRETRIED) as app:
        await app.deliver("order.paid", expect="retrying")
    assert seen == ["rolled back"]


class Later(WebhookHandlerBase):
    async def handle_core(self, event):
        """Nothing."""


async def never_awaited(event):
    raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("prepared", "said"),
    [
        (lambda event: never_awaited(event), "write `async def`"),
        (lambda event: (yield_ for yield_ in ()), "returned a generator"),
        (lambda event: Later(), "returned a handler"),
    ],
)
async def test_work_that_was_only_prepared_is_a_failure(prepared, said):
    async with serving(registry(prepared), **UNRETRIED) as app:
        delivered = await app.deliver("order.paid", expect="retrying")
    assert said in delivered.error


# -- what cannot be stopped ---------------------------------------------------------------------


@pytest.fixture
def clock():
    """The time of a test that takes it, which goes on as it does, and which the test sets on."""
    return trio.testing.MockClock(rate=1)


async def outlasted(clock, app, delivery, condition):
    """Deliver, let the time of inline runs be over once a condition holds; return the status."""
    answers = []

    async def send():
        answers.append(await app.deliver(delivery, settle=False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await until(condition)
        clock.jump(app.settings.webhooks.inline_timeout_seconds)
    return answers[0].status


async def test_a_run_that_outlasts_its_sender_is_not_run_beside_itself(store, held, caplog, clock):
    async with serving(registry(held), **store) as app:
        delivery = app.sign("order.paid", webhook_id="a")
        assert await outlasted(clock, app, delivery, lambda: held.begun) == 503
        assert await outlasted(clock, app, delivery, lambda: waiting_for_run_of(app, "a")) == 503
        (reported,) = [each for each in caplog.records if "webhook.still_running" in each.message]
        assert "webhook_id='a' handler='Held'" in reported.message
        record = await app.store.get("a")
        assert (record.state, record.attempts) == (DeliveryState.RUNNING, 1)
        assert (held.begun, held.ended) == (["a"], [])
        held.gate.set()
        # It has succeeded, if late: the sender's next attempt hears of that.
        await until(lambda: _state(app, "a", DeliveryState.DONE))
        assert (await app.deliver(delivery)).status == 200
        assert held.begun == ["a"]


async def _state(app, webhook_id, state):
    return (await app.store.get(webhook_id)).state is state


async def test_a_late_failure_counts_as_one_attempt_and_the_sender_repeats_it(held, clock):
    def grant(event):
        held(event)
        raise ValueError("late")

    async with serving(registry(grant)) as app:
        delivery = app.sign("order.paid", webhook_id="a")
        assert await outlasted(clock, app, delivery, lambda: held.begun) == 503
        held.gate.set()
        await until(lambda: _state(app, "a", DeliveryState.RETRYING))
        record = await app.store.get("a")
    assert (record.attempts, record.last_error) == (1, "ValueError: late")


async def test_a_function_that_asks_hears_of_its_deadline():
    asked = threading.Event()

    def grant(event):
        while True:
            trio.from_thread.check_cancelled()
            asked.wait(0.01)

    async with serving(registry(grant), Webhooks__InlineTimeoutSeconds=0.2) as app:
        delivered = await app.deliver("order.paid")
        assert delivered.status in (500, 503)
        await until(lambda: _state(app, delivered.webhook_id, DeliveryState.RETRYING))
        record = await app.store.get(delivered.webhook_id)
    assert "took longer than InlineTimeoutSeconds" in record.last_error


async def test_an_event_that_found_no_thread_has_not_run_and_is_not_kept(held, caplog):
    keys = {"Webhooks__InlineTimeoutSeconds": 0.2, "Webhooks__Queue__Threads": 1}
    async with serving(registry(held), **keys) as app:

        async def status(webhook_id):
            return (await app.deliver("order.paid", webhook_id=webhook_id, settle=False)).status

        async def begins():
            assert await status("a") == 503
            return held.begun

        # If threads start slowly, its time was over before it had one.
        await until(begins)
        assert await status("b") == 503
        await until(lambda: "webhook_id='b'" in caplog.text and "cause='threads'" in caplog.text)
        assert await app.store.get("b") is None
        assert held.begun == ["a"]
        held.gate.set()

        async def is_done():
            return await status("b") == 200

        await until(is_done)
        record = await app.store.get("b")
        assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_a_drain_that_is_cut_short_names_it_and_waits_for_the_thread(
    store, enqueue, held, caplog
):
    keys = {"Webhooks__GracefulDrainTimeoutSeconds": 0.1, **store}
    runtime = Runtime(settings(**keys), registry(held, enqueue=enqueue))
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            app = AppUnderTest(runtime)

            async def deliver():
                # The end of the drain's time leaves a sender that still waits without an answer.
                with suppress(DeliveryFailedError):
                    await app.deliver("order.paid", webhook_id="a", settle=False)

            nursery.start_soon(deliver)
            await until(lambda: held.begun)
            runtime.shut_down("the test wants it")
            await until(lambda: "webhook.still_running" in caplog.text)
            assert runtime.receiver.runs[0].threaded
            held.gate.set()
    # Its outcome is recorded, although it was cancelled in the meantime.
    assert (runtime.report.persisted, runtime.report.lost) == (0, 0)
    assert held.ended == ["a"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_leases_are_renewed_for_as_long_as_a_thread_runs(monkeypatch, held, cancelled):
    monkeypatch.setattr(queue, "RENEW_SECONDS", 0.01)
    inbox = memory_inbox()
    renewals = []
    renew = inbox.renew

    async def counted(keys, *, now):
        renewals.append(now)
        return await renew(keys, now=now)

    monkeypatch.setattr(inbox, "renew", counted)
    bench = Bench.of(registry(held, enqueue=True), inbox)
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.queue.run)
            await bench.queue.accept(arrival(webhook_id="a"))
            await until(lambda: held.begun)
            if cancelled:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    before = len(renewals)
                    await until(lambda: len(renewals) > before + 3)
            else:
                bench.queue.close()
                before = len(renewals)
                await until(lambda: len(renewals) > before + 3)
            held.gate.set()
        assert (await inbox.get("a")).state is DeliveryState.DONE


async def test_a_wait_for_a_thread_that_is_cancelled_releases_the_event(held):
    bench = Bench.of(registry(held, enqueue=True), Webhooks__Queue__Threads=1)
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.queue.run)
            for name in ("a", "b"):
                await bench.queue.accept(arrival(webhook_id=name))
            threads = bench.handler().threads
            await until(lambda: held.begun and threads.statistics().tasks_waiting)
            nursery.cancel_scope.cancel()
            held.gate.set()
    first, second = [await bench.inbox.get(name) for name in ("a", "b")]
    assert (first.state, second.state) == (DeliveryState.DONE, DeliveryState.RECEIVED)
    assert second.attempts == 0
    # Its lease is gone as well: the next poll may claim it.
    assert [record.webhook_id for record in await due_at(bench)] == ["b"]


async def due_at(bench):
    return (await bench.inbox.claim_due(limit=9, now=trio.current_time())).records


async def test_a_failing_store_is_reported_to_the_waiting_sender(monkeypatch):
    bench = Bench.of(registry(lambda event: None))

    async def fails(*arguments, **options):
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("the disk is full")

    monkeypatch.setattr(bench.inbox, "finish", fails)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        with pytest.raises(StoreUnavailableError):
            await bench.runner.inline.run(arrival(), bench.handler())
        bench.queue.close()


async def test_after_the_end_nothing_is_begun_in_a_thread(held):
    bench = Bench.of(registry(held))
    answer = await bench.runner.inline.run(arrival(), bench.handler())
    assert (answer.status, held.begun) == (503, [])


async def test_deliveries_of_one_id_share_one_run(held):
    async with serving(registry(held)) as app, trio.open_nursery() as nursery:
        delivery = app.sign("order.paid", webhook_id="a")
        answers = []

        async def deliver():
            answers.append((await app.deliver(delivery)).status)

        for _ in range(5):
            nursery.start_soon(deliver)
        await until(lambda: held.begun)
        held.gate.set()
        await until(lambda: len(answers) == 5)
        assert (answers, held.begun) == ([200] * 5, ["a"])


async def test_the_kit_of_the_tests_runs_them_too():
    seen = []
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True)
    def grant(event):
        seen.append(event.data.id)

    @handlers.on(OrderCreatedEvent, asyncio=True)
    async def note(event):
        await asyncio.sleep(0)
        seen.append(event.type)

    options = settings(Webhooks__Secret=Secret(SECRET, made_for_tests=True))
    async with running_app(handlers, options) as app:
        await app.deliver(OrderPaidEvent, {"id": "o_7"}, expect="done")
        await app.deliver(OrderCreatedEvent, expect="done")
    assert seen == ["o_7", "order.created"]


@pytest.fixture
def sdk_handlers():
    handlers = HandlerRegistry()

    @handlers.on(OrderCreatedEvent, asyncio=True, enqueue=True)
    async def slow(event):
        await asyncio.sleep(0.2)

    return handlers


async def test_the_fixture_of_the_kit_keeps_its_asyncio_loop_until_the_drain_has_ended(deliver):
    await deliver(OrderCreatedEvent, settle=False)
