"""Forwarding on a virtual clock: waiting events of an unavailable application, and their cost."""

from collections import Counter

import attrs
import pytest
import trio
from support.deliveries import Bench, arrival, memory_inbox, settings
from support.replicating import said

from sdk_trio.errors import AnswerLostError, NotSentError
from sdk_trio.net.poster import PostAnswer
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.webhooks import HandlerRegistry, forward
from sdk_trio.webhooks.bound import BoundHandlers
from sdk_trio.webhooks.counters import Counters
from sdk_trio.webhooks.forward import Forwarder
from sdk_trio.webhooks.queue import WorkerPool
from sdk_trio.webhooks.routes import Pause, checkpoint_of
from sdk_trio.webhooks.run import DeliveryRunner

SECRET = "whsec_TJ7sAxr3kVsS6yQd0Zf0fG3bA9UOe5Vh"  # a test value
DONE, DEAD, RETRYING = DeliveryState.DONE, DeliveryState.DEAD, DeliveryState.RETRYING


class Application:
    """Replaces the network: a real minute would take a minute of the suite."""

    def __init__(self, answer=200, seconds=0.0):
        self.answer = answer
        self.seconds = seconds
        self.posts = []
        self.taken = []
        self.together = self.most_together = 0

    async def post(self, url, *, headers, body, timeout_seconds, head_counts):
        self.posts.append((trio.current_time(), headers["webhook-id"], headers))
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            await trio.sleep(self.seconds)
        finally:
            self.together -= 1
        answer = self.answer(headers) if callable(self.answer) else self.answer
        if isinstance(answer, Exception):
            raise answer
        status, *more = answer if isinstance(answer, tuple) else (answer,)
        if 200 <= status < 300:
            self.taken.append(headers["webhook-id"])
        return PostAnswer(status, {}, b"a reason", *more)


REFUSED = NotSentError("[Errno 111] Connection refused")


@attrs.define
class Gateway(Bench):
    """A bench whose events go to routes."""

    forwarder: Forwarder = None

    @classmethod
    def to(cls, *applications, monkeypatch, inbox=None, **keys):
        monkeypatch.setenv("SDK_FORWARD_SECRET", SECRET)
        made = iter(applications)
        monkeypatch.setattr(forward, "_poster_of", lambda route, clock: next(made))
        if len(applications) == 1 and "Forward__Routes" not in keys:
            keys["Forward__Url"] = "http://127.0.0.1:3000/"
        options = settings(**keys)
        inbox = memory_inbox() if inbox is None else inbox
        counters, clock = Counters(), trio.current_time
        forwarder = Forwarder(options, inbox, clock=clock)
        handlers = BoundHandlers(HandlerRegistry().catalog, {}, None, forwarder.bound)
        runner = DeliveryRunner(options, handlers, inbox, counters, clock=clock, jitter=lambda: 0.5)
        queue = WorkerPool(options, runner, inbox, counters, clock=clock)
        return cls(inbox, runner, queue, counters, forwarder)

    async def begin(self, nursery):
        await nursery.start(self.queue.run)
        await nursery.start(self.forwarder.run)

    async def accept(self, *names, **options):
        for name in names:
            delivery = arrival(webhook_id=name, now=trio.current_time(), **options)
            ordered = options.get("ordered", False)
            assert delivery.delivery.ordered is ordered
            assert (await self.queue.accept(delivery)).status == 200

    async def states(self):
        return {state: count for state, count in (await self.inbox.counts()).items() if count}

    async def until(self, **expected):
        wanted = {DeliveryState[name.upper()]: count for name, count in expected.items()}
        with trio.fail_after(100_000):
            while await self.states() != wanted:
                await trio.sleep(0.25)


@pytest.fixture
def gateway(monkeypatch):
    def make(*applications, **keys):
        return Gateway.to(*applications, monkeypatch=monkeypatch, **keys)

    return make


async def test_a_minute_without_the_application_costs_no_attempts_and_loses_nothing(
    autojump_clock, gateway
):
    application = Application(REFUSED)
    bench = gateway(application)
    names = [f"m{number}" for number in range(300)]
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept(*names)
        await trio.sleep(60)
        assert await bench.states() == {RETRYING: 300}
        # Up to five fail at once, and then one probe each ten seconds.
        assert len(application.posts) <= 8 + 5 + 8
        record = await bench.inbox.get("m299")
        assert record.attempts == 0
        assert "cannot be reached" in record.last_error
        application.answer = 200
        await bench.until(done=300)
        nursery.cancel_scope.cancel()
    assert sorted(application.taken) == sorted(names)
    records = [await bench.inbox.get(name) for name in names]
    assert {record.attempts for record in records} == {1}


async def test_a_backlog_costs_a_bounded_number_of_polls_a_second(autojump_clock, gateway):
    application = Application(REFUSED)
    bench = gateway(application, Webhooks__Queue__Capacity=5000)
    (handler,) = bench.forwarder.handlers
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept(*(f"m{number}" for number in range(600)))
        await trio.sleep(12)
        before = handler.counts["postponed"]
        await trio.sleep(12)
        assert handler.counts["postponed"] - before <= 12 * forward.RETURNS_PER_SECOND * 1.1
        nursery.cancel_scope.cancel()


async def test_the_order_of_a_subject_is_kept_through_an_outage(autojump_clock, gateway):
    application = Application()
    application.answer = lambda headers: REFUSED if 5 < trio.current_time() - began < 65 else 200
    began = trio.current_time()
    route = {"Url": "http://127.0.0.1:1/", "Ordered": True}
    bench = gateway(application, Forward__Routes=[route])
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        for number in range(60):
            await bench.accept(f"a{number}", subject="a", ordered=True)
            await bench.accept(f"b{number}", subject="b", ordered=True)
            await trio.sleep(1)
        await bench.until(done=120)
        nursery.cancel_scope.cancel()
    for subject in "ab":
        taken = [name for name in application.taken if name[0] == subject]
        assert taken == [f"{subject}{number}" for number in range(60)]


async def test_500_of_one_event_uses_its_attempts_up_and_stops_no_other(autojump_clock, gateway):
    application = Application(lambda headers: 500 if headers["webhook-id"] == "bad" else 200)
    bench = gateway(application, Webhooks__Queue__MaxAttempts=6)
    (handler,) = bench.forwarder.handlers
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept("bad")
        await bench.until(dead=1)
        assert handler.breaker.state == "closed"
        await bench.accept("good")
        await bench.until(dead=1, done=1)
        nursery.cancel_scope.cancel()
    attempts = await bench.inbox.attempts("bad")
    assert [attempt.number for attempt in attempts] == [1, 2, 3, 4, 5, 6]
    assert attempts[0].error == "answered 500"
    assert attempts[0].place == "answered 500: a reason"
    hints = [headers.get("sdk-will-retry-after") for _, name, headers in application.posts[:6]]
    assert hints == ["1", "2", "4", "8", "16", None]
    assert [headers["sdk-attempt"] for _, _, headers in application.posts[:6]] == list("123456")


@pytest.mark.parametrize(
    "answer", [500, 503, AnswerLostError("the connection ended")], ids=["500", "503", "lost"]
)
async def test_failures_of_different_events_open_the_breaker_and_the_rest_wait(
    autojump_clock, gateway, answer
):
    application = Application(answer)
    bench = gateway(application, Webhooks__Queue__Workers=1)
    (handler,) = bench.forwarder.handlers
    names = [f"m{number}" for number in range(50)]
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept(*names)
        await trio.sleep(120)
        assert handler.breaker.state != "closed"
        # The five that opened it have one failed attempt, and the others none.
        failed = Counter([len(await bench.inbox.attempts(name)) for name in names])
        assert failed == {0: 45, 1: 5}
        application.answer = 200
        await bench.until(done=50)
        nursery.cancel_scope.cancel()


async def test_410_pauses_the_route_until_it_is_resumed(autojump_clock, gateway):
    application = Application(410)
    inbox = memory_inbox()
    bench = gateway(application, inbox=inbox)
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept("a")
        await trio.sleep(60)
        await bench.accept("b")
        await trio.sleep(600)
        assert len(application.posts) == 1
        assert await bench.states() == {RETRYING: 2}
        record = await bench.inbox.get("b")
        assert "routes resume forward-to" in record.last_error
        assert record.attempts == 0
        nursery.cancel_scope.cancel()
    # It is still paused after a restart.
    application.answer = 200
    again = gateway(application, inbox=inbox)
    async with trio.open_nursery() as nursery:
        await again.begin(nursery)
        await trio.sleep(60)
        assert application.taken == []
        await inbox.write_checkpoint(checkpoint_of("forward-to"), None)
        await again.until(done=2)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("at", [0.9, 1.3], ids=["before the look", "during the look"])
async def test_a_poll_that_overlaps_a_410_does_not_undo_its_pause(
    autojump_clock, gateway, monkeypatch, caplog, at
):
    inbox = memory_inbox()
    read, write = inbox.read_checkpoint, inbox.write_checkpoint

    async def read_slowly(name):
        found = await read(name)
        await trio.sleep(0.6)
        return found

    async def write_slowly(name, value):
        await trio.sleep(0.2)
        await write(name, value)

    bench = gateway(Application(410), inbox=inbox)
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        monkeypatch.setattr(inbox, "read_checkpoint", read_slowly)
        monkeypatch.setattr(inbox, "write_checkpoint", write_slowly)
        await trio.sleep(at)
        with caplog.at_level("INFO"):
            await bench.accept("a")
            await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert len(said(caplog, "forward.paused")) == 1
    assert said(caplog, "forward.resumed") == []


async def test_a_pause_by_command_is_noticed_and_ends_when_it_is_resumed(autojump_clock, gateway):
    application = Application()
    bench = gateway(application)
    name = checkpoint_of("forward-to")
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept("a")
        await bench.until(done=1)
        await bench.inbox.write_checkpoint(name, Pause("migration", 0.0, "kim").as_text())
        await trio.sleep(forward.POLL_SECONDS * 1.5)
        await bench.accept("b", "c")
        await trio.sleep(600)
        assert application.taken == ["a"]
        await bench.inbox.write_checkpoint(name, None)
        await bench.until(done=3)
        nursery.cancel_scope.cancel()


async def test_retry_after_of_429_delays_all_events_of_the_route_and_is_bounded(
    autojump_clock, gateway
):
    application = Application((429, 120.0))
    bench = gateway(application, Webhooks__Queue__Workers=1, Webhooks__Queue__RetryCapSeconds=60)
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        began = trio.current_time()
        await bench.accept(*(f"m{number}" for number in range(20)))
        await trio.sleep(59)
        assert len(application.posts) == 1
        application.answer = 200
        await bench.until(done=20)
        nursery.cancel_scope.cancel()
    waited = [when - began for when, _, _ in application.posts[1:]]
    assert min(waited) >= 60
    assert max(waited) < 100


@pytest.mark.parametrize("status", [400, 401, 404, 422, 301, 302])
async def test_an_event_that_the_application_refuses_is_dead_after_three_attempts(
    autojump_clock, gateway, status
):
    application = Application(status)
    bench = gateway(application)
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept(*(f"m{number}" for number in range(10)))
        await bench.until(dead=10)
        nursery.cancel_scope.cancel()
    assert len(application.posts) == 30
    assert bench.forwarder.handlers[0].breaker.state == "closed"


async def test_a_slow_route_leaves_workers_to_the_others(autojump_clock, gateway):
    slow, quick = Application(seconds=10.0), Application()
    routes = [
        {"Url": "http://127.0.0.1:1/", "Types": ["order.paid"], "Concurrency": 2},
        {"Url": "http://127.0.0.1:2/"},
    ]
    bench = gateway(slow, quick, Forward__Routes=routes)
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept(*(f"slow{number}" for number in range(20)))
        began = trio.current_time()
        await bench.accept(*(f"quick{n}" for n in range(40)), event_type="order.created")
        while len(quick.taken) < 40:
            await trio.sleep(0.01)
        assert trio.current_time() - began < 1
        await bench.until(done=60)
        # A free slot is used at once, although most events of the route wait in the store.
        assert trio.current_time() - began < 20 / 2 * 10 * 1.1
        nursery.cancel_scope.cancel()
    assert slow.most_together == 2


async def test_a_cancelled_run_frees_its_slot_and_uses_no_attempt(autojump_clock, gateway):
    application = Application(seconds=3600)
    inbox = memory_inbox()
    bench = gateway(application, inbox=inbox)
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept("a")
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    record = await inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.RECEIVED, 0)
    (handler,) = bench.forwarder.handlers
    assert handler._slots.borrowed_tokens == 0
    assert handler.breaker.state == "closed"


async def test_an_answer_is_kept_with_the_attempt_and_counted(autojump_clock, gateway):
    bench = gateway(Application())
    async with trio.open_nursery() as nursery:
        await bench.begin(nursery)
        await bench.accept("a")
        await bench.until(done=1)
        nursery.cancel_scope.cancel()
    (attempt,) = await bench.inbox.attempts("a")
    assert (attempt.number, attempt.error, attempt.place) == (1, "", "answered 200: a reason")
    samples = {
        (sample.name, *(value for _, value in sample.labels)): sample.value
        for sample in bench.forwarder.samples()
    }
    assert samples["sdk_forward_attempts_total", "forward-to", "done"] == 1
    assert samples["sdk_forward_route_state", "forward-to"] == 0
    assert samples["sdk_forward_seconds_count", "forward-to"] == 1
