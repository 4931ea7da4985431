"""The runtime in a thread beside an asyncio loop, asked as an ASGI server asks it."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import sqlite3
import threading
import time

import attrs
import httpx
import pytest
import trio
import trio.testing
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.deliveries import settings
from support.serving import PATH, asgi_headers, registry, signed, works
from support.sources import BY_NAME, settings_of

from sdk_trio.asgi import Threaded, thread
from sdk_trio.errors import HandlerRegistrationError, NotRunningError, StoreLockedError
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent
from sdk_trio.webhooks import HandlerRegistry, WebhookHandlerBase, WebhookReceiver
from sdk_trio.webhooks.sources.signing import SourceDelivery

PATIENCE = 60


def on_asyncio(test):
    """Run a coroutine function as a test on asyncio's loop, with a net."""

    @functools.wraps(test)
    def run(*arguments, **options):
        async def main():
            async with asyncio.timeout(PATIENCE):
                await test(*arguments, **options)

        asyncio.run(main())

    del run.__wrapped__  # pytest-trio looks through it
    run.__signature__ = inspect.signature(test)
    return run


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


@attrs.define
class Request:
    """One request to an application, piece by piece; ``sent`` are the messages of the answer."""

    application: object
    messages: asyncio.Queue = attrs.Factory(asyncio.Queue)
    sent: list = attrs.Factory(list)
    taken: int = 0

    async def serve(self, headers=(), path=PATH, root_path="", method="POST"):
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": root_path,
            "headers": list(headers),
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 80),
        }

        async def receive():
            message = await self.messages.get()
            self.taken += 1
            return message

        async def send(message):
            self.sent.append(message)

        await self.application(scope, receive, send)
        return self.sent[0]["status"] if self.sent else None

    def body(self, piece, more=False):
        self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def leave(self):
        self.messages.put_nowait({"type": "http.disconnect"})


async def post(application, delivery=None, **options):
    delivery = delivery or signed()
    request = Request(application)
    request.body(delivery.body)
    return await request.serve(asgi_headers(delivery), **options)


def threaded(handlers=None, **keys):
    return Threaded(settings(**keys), handlers)


class Steps(trio.abc.Instrument):
    """Counts the steps of the tasks that serve deliveries: each is an iteration of the loop."""

    def __init__(self):
        self.count = 0

    def before_task_step(self, task):
        self.count += task.name.endswith(("_Exchange.serve", "_run_in_slot"))


@on_asyncio
async def test_a_delivery_takes_few_iterations_of_the_loop_and_each_delays_the_host():
    async def grant(event):
        pass

    def paid(event):
        pass

    handlers = registry(grant)
    handlers.register(OrderCreatedEvent, paid)
    receiver = threaded(handlers)
    turns = {}
    async with receiver.lifespan():
        steps = Steps()
        receiver._thread._token.run_sync_soon(trio.lowlevel.add_instrument, steps)
        for kind in ("order.paid", "order.created"):
            assert await post(receiver, signed(kind)) == 200  # begins a thread
            before = steps.count
            assert await post(receiver, signed(kind)) == 200
            turns[kind] = steps.count - before
    assert turns == {"order.paid": 1, "order.created": 5}


# -- life ---------------------------------------------------------------------------------------


@on_asyncio
async def test_it_serves_between_start_and_end_and_can_start_again():
    seen = []
    receiver = threaded(registry(lambda event: seen.append(event.webhook_id)))
    assert (await post(receiver), receiver.ready) == (503, False)
    for turn in ("a", "b"):
        async with receiver.lifespan():
            assert receiver.ready
            assert await post(receiver, signed(webhook_id=turn)) == 200
        assert (await post(receiver), receiver.ready) == (503, False)
    assert seen == ["a", "b"]


@on_asyncio
async def test_it_runs_once_at_a_time():
    receiver = threaded()
    async with receiver.lifespan():
        with pytest.raises(NotRunningError, match="already runs"):
            async with receiver.lifespan():
                raise AssertionError("it started twice")
        assert receiver.ready


@on_asyncio
async def test_before_its_start_the_log_names_the_missing_lifespan(caplog):
    assert await post(threaded()) == 503
    assert "lifespan=receiver.lifespan" in caplog.text


@on_asyncio
async def test_events_that_the_drain_does_not_finish_remain_for_the_next_start(tmp_path):
    begun = threading.Event()

    async def forever(event):
        begun.set()
        await trio.sleep_forever()

    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    handlers = registry(forever, enqueue=True)
    receiver = threaded(handlers, Webhooks__GracefulDrainTimeoutSeconds=0.1, **keys)
    async with receiver.lifespan():
        assert await post(receiver, signed(webhook_id="a")) == 200
        await until(begun.is_set)
        runtime = receiver.runtime
    assert (runtime.report.persisted, runtime.report.ids) == (1, ("a",))
    done = threading.Event()
    again = threaded(registry(lambda event: done.set(), enqueue=True), **keys)
    async with again.lifespan():
        await until(done.is_set)


@on_asyncio
async def test_a_thread_that_does_not_end_is_named_and_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(thread, "GRACE_SECONDS", 0.2)
    gate, begun = threading.Event(), threading.Event()

    def held(event):
        begun.set()
        gate.wait(PATIENCE)

    receiver = threaded(registry(held, enqueue=True), Webhooks__GracefulDrainTimeoutSeconds=0.1)
    async with receiver.lifespan():
        assert await post(receiver, signed(webhook_id="a")) == 200
        await until(begun.is_set)
        code_of = receiver._thread
    assert "runtime.left_behind" in caplog.text
    assert "'webhook_id': 'a'" in caplog.text
    gate.set()
    code_of._thread.join(PATIENCE)
    assert not code_of._thread.is_alive()


@on_asyncio
async def test_a_locked_directory_fails_the_start_and_names_workers(tmp_path):
    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    one, two = (threaded(**keys) for _ in range(2))
    async with one.lifespan():
        with pytest.raises(StoreLockedError, match="uvicorn --workers"):
            async with two.lifespan():
                raise AssertionError("it started")
        assert (one.ready, two.ready) == (True, False)


@on_asyncio
async def test_a_handler_that_cancels_the_nursery_of_its_task_leaves_the_runtime_alone():
    async def cancels(event):
        if event.webhook_id == "odd":
            trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()
            await trio.sleep_forever()

    receiver = threaded(registry(cancels), Webhooks__InlineMaxAttempts=2)
    async with receiver.lifespan():
        assert await post(receiver, signed(webhook_id="odd")) == 500
        assert await post(receiver, signed(webhook_id="odd")) == 200  # a dead letter
        assert await post(receiver, signed(webhook_id="fine")) == 200
        assert receiver.ready


@on_asyncio
async def test_after_the_death_of_its_thread_every_request_is_answered(caplog):
    begun = threading.Event()

    async def forever(event):
        begun.set()
        await trio.sleep_forever()

    receiver = threaded(registry(forever))
    async with receiver.lifespan():
        waiting = asyncio.create_task(post(receiver))
        await until(begun.is_set)

        def die():
            raise RuntimeError("the loop is broken")

        receiver._thread._token.run_sync_soon(die)
        assert await waiting == 503
        await until(lambda: "runtime.thread_ended" in caplog.text)
        assert not receiver.ready
        assert await post(receiver) == 503
        assert "its thread has ended" in caplog.text


@on_asyncio
async def test_a_request_that_the_dying_thread_never_saw_is_answered():
    gate = threading.Event()

    async def forever(event):  # it may be served in the very turn in which the loop breaks
        await trio.sleep_forever()

    receiver = threaded(registry(forever))
    async with receiver.lifespan():

        def die():
            raise RuntimeError("the loop is broken")

        token = receiver._thread._token
        token.run_sync_soon(gate.wait)
        token.run_sync_soon(die)
        waiting = asyncio.create_task(post(receiver))
        await until(lambda: receiver._thread._pending)
        gate.set()
        assert await waiting == 503


@on_asyncio
async def test_the_end_of_the_drain_cancels_inline_handlers_and_releases_their_events(tmp_path):
    begun = threading.Event()

    async def forever(event):
        begun.set()
        await trio.sleep_forever()

    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    receiver = threaded(registry(forever), Webhooks__GracefulDrainTimeoutSeconds=0.1, **keys)
    async with receiver.lifespan():
        waiting = asyncio.create_task(post(receiver, signed(webhook_id="a")))
        await until(begun.is_set)
    assert await waiting == 503
    with contextlib.closing(sqlite3.connect(tmp_path / "inbox.db")) as store:
        assert store.execute("SELECT state, attempts FROM work").fetchall() == [("received", 0)]


@on_asyncio
async def test_a_start_that_is_cancelled_leaves_no_thread():
    receiver = threaded()
    starting = asyncio.create_task(receiver.lifespan().__aenter__())
    await asyncio.sleep(0)
    before = receiver._thread
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    before._thread.join(PATIENCE)
    assert not before._thread.is_alive()


# -- requests -----------------------------------------------------------------------------------


@on_asyncio
async def test_a_body_in_pieces_is_fetched_as_it_is_wanted_and_bounded():
    receiver = threaded(registry(works), Webhooks__MaxPayloadBytes=100_000)
    async with receiver.lifespan():
        delivery = signed()
        request = Request(receiver)
        middle = len(delivery.body) // 2
        request.body(delivery.body[:middle], more=True)
        request.body(delivery.body[middle:])
        assert await request.serve(asgi_headers(delivery)) == 200
        # Of a hundred pieces no more are taken than fit.
        endless = Request(receiver)
        for _ in range(100):
            endless.body(b"x" * 10_000, more=True)
        assert await endless.serve([(b"content-type", b"application/json")]) == 413
        assert endless.taken < 20


@on_asyncio
async def test_a_body_that_does_not_begin_or_does_not_go_on_is_408(monkeypatch):
    from sdk_trio.asgi import threaded as module
    from sdk_trio.webhooks import body

    monkeypatch.setattr(module, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.1)
    receiver = threaded(registry(works))
    headers = [(b"content-type", b"application/json")]
    async with receiver.lifespan():
        assert await Request(receiver).serve(headers) == 408
        begun = Request(receiver)
        begun.body(b"{", more=True)
        assert await begun.serve(headers) == 408
        await until(lambda: receiver.runtime.receiver.counters.values["refused"] == 2)


@on_asyncio
async def test_a_sender_that_leaves_before_its_body_is_whole_is_not_answered():
    receiver = threaded(registry(works))
    async with receiver.lifespan():
        for piece in (None, b"{"):
            request = Request(receiver)
            if piece is not None:
                request.body(piece, more=True)
            request.leave()
            assert await request.serve([(b"content-type", b"application/json")]) is None


@on_asyncio
async def test_a_cancelled_request_cancels_the_handler_and_releases_the_event():
    attempts, ended = [], threading.Event()

    async def handler(event):
        attempts.append(event.attempt)
        if len(attempts) == 1:
            try:
                await trio.sleep_forever()
            finally:
                ended.set()

    receiver = threaded(registry(handler))
    async with receiver.lifespan():
        delivery = signed(webhook_id="a")
        request = asyncio.create_task(post(receiver, delivery))
        await until(lambda: attempts)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(ended.is_set)
        # A delivery that came before the release would share the fate of the cancelled one.
        runner = receiver.runtime.receiver._running.runner
        await until(lambda: not runner.inline._in_flight)
        assert await post(receiver, delivery) == 200
    assert attempts == [1, 1]


@on_asyncio
async def test_a_mount_whose_host_cuts_the_path_is_served_as_well():
    receiver = threaded(registry(works))
    async with receiver.lifespan():
        assert await post(receiver, path="/sdk", root_path="/hooks") == 200
        assert await post(receiver, path="/hooks/sdk", root_path="/hooks") == 200
        assert await post(receiver, path="/sdk") == 404


@on_asyncio
async def test_the_routes_of_sources_are_served_in_front_of_an_application_and_mounted():
    seen = []
    handlers = registry(works)
    stripe = BY_NAME["stripe"]
    handlers.source("stripe").on(stripe.type)(lambda event: seen.append(event.key))
    receiver = threaded(handlers, Sources=settings_of())

    async def other(scope, receive, send):
        raise AssertionError("it is a delivery")

    def delivery(webhook_id):
        body = stripe.body(webhook_id)
        return SourceDelivery(webhook_id, stripe.headers(webhook_id, int(time.time()), body), body)

    async with receiver.lifespan():
        front = receiver.in_front_of(other)
        assert await post(front, delivery("evt_1"), path="/hooks/stripe") == 200
        cut = {"path": "/stripe", "root_path": "/hooks"}
        assert await post(receiver, delivery("evt_2"), **cut) == 200
        assert await post(receiver, delivery("evt_3"), path="/hooks/github") == 400
    assert seen == ["evt_1.@stripe", "evt_2.@stripe"]


@on_asyncio
async def test_context_variables_of_the_request_reach_an_inline_handler():
    number = contextvars.ContextVar("number")
    seen = []

    async def handler(event):
        seen.append(number.get(None))

    receiver = threaded(registry(handler))
    async with receiver.lifespan():
        number.set(7)
        assert await post(receiver) == 200
    assert seen == [7]


@on_asyncio
async def test_other_kinds_of_connections():
    receiver = threaded()
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    await receiver({"type": "websocket"}, receive, send)
    assert sent == [{"type": "websocket.close"}]
    with pytest.raises(NotRunningError, match="serves no thing"):
        await receiver({"type": "thing"}, receive, send)


# -- handlers on the server's loop --------------------------------------------------------------


@on_asyncio
async def test_asyncio_handlers_run_on_the_loop_of_the_server():
    here, seen = asyncio.get_running_loop(), []
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, asyncio=True)
    async def inline(event):
        await asyncio.sleep(0)
        seen.append(asyncio.get_running_loop())

    @handlers.on(OrderCreatedEvent, asyncio=True, enqueue=True)
    class Queued(WebhookHandlerBase):
        async def handle_core(self, event):
            await asyncio.sleep(0)
            seen.append(asyncio.get_running_loop())
            if event.attempt == 1:
                raise ValueError("first")

        async def on_error(self, event, error):
            await asyncio.sleep(0)
            seen.append(str(error))

    receiver = threaded(handlers, Webhooks__Queue__RetryBaseSeconds=0)
    async with receiver.lifespan():
        assert await post(receiver) == 200
        assert await post(receiver, signed("order.created")) == 200
        await until(lambda: len(seen) == 4)
    assert seen == [here, here, "first", here]


@on_asyncio
@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
async def test_an_exception_of_an_asyncio_handler_fails_its_run_and_not_the_server(error):
    async def fails(event):
        raise error("mine")

    receiver = threaded(registry(fails, asyncio=True))
    async with receiver.lifespan():
        assert await post(receiver) == 500
        assert receiver.ready


@pytest.fixture
def overrun(monkeypatch):
    """Let the time of the handler that runs be over: it can be called only once one does."""
    clock = trio.testing.MockClock(rate=1)
    monkeypatch.setattr(trio, "run", functools.partial(trio.run, clock=clock))

    def jump(receiver):
        seconds = receiver.settings.webhooks.inline_timeout_seconds
        receiver._thread._token.run_sync_soon(clock.jump, seconds)

    return jump


@on_asyncio
async def test_an_asyncio_handler_is_cancelled_at_its_deadline_and_waited_for(overrun):
    noted = []

    async def slow(event):
        overrun(receiver)
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            noted.append("cancelled")
            raise

    receiver = threaded(registry(slow, asyncio=True))
    async with receiver.lifespan():
        assert await post(receiver) == 500
        assert noted == ["cancelled"]


@on_asyncio
async def test_an_asyncio_handler_that_finishes_all_the_same_is_done(overrun):
    async def stubborn(event):
        overrun(receiver)
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            await asyncio.sleep(0)

    receiver = threaded(registry(stubborn, asyncio=True))
    async with receiver.lifespan():
        assert await post(receiver) == 200


async def test_asyncio_handlers_are_refused_where_there_is_no_such_loop():
    receiver = WebhookReceiver(settings(), registry(works, asyncio=True))
    with pytest.raises(HandlerRegistrationError, match=r"sdk_trio\.asgi\.Threaded"):
        await receiver.run()
    with pytest.raises(HandlerRegistrationError, match="is for `async def`"):
        registry(lambda event: None, asyncio=True)


# -- in front of an application -----------------------------------------------------------------


@on_asyncio
async def test_in_front_of_an_application_it_takes_its_path_and_its_lifespan():
    noted = []

    async def hello(request):
        return PlainTextResponse("hello")

    def within(app):
        return lifespan_of(noted)

    receiver = threaded(registry(works))
    inner = Starlette(routes=[Route("/hello", hello)], lifespan=within)
    application = receiver.in_front_of(inner)
    async with asgi_lifespan(application):
        assert (receiver.ready, noted) == (True, ["started"])
        assert await post(application) == 200
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(application), base_url="http://test"
        ) as client:
            assert (await client.get("/hello")).text == "hello"
    assert (receiver.ready, noted) == (False, ["started", "ended"])


@on_asyncio
async def test_in_front_of_an_application_without_a_lifespan():
    async def bare(scope, receive, send):
        raise ValueError(f"it serves no {scope['type']}")

    receiver = threaded(registry(works))
    application = receiver.in_front_of(bare)
    async with asgi_lifespan(application):
        assert await post(application) == 200
        with pytest.raises(ValueError, match="serves no http"):
            await post(application, path="/elsewhere")


@on_asyncio
async def test_a_failed_start_is_reported_to_the_server(tmp_path):
    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    one, two = (threaded(**keys) for _ in range(2))
    async with one.lifespan():
        sent = []
        with pytest.raises(StoreLockedError):
            async with asgi_lifespan(two, sent):
                raise AssertionError("it started")
        (failed,) = sent
        assert failed["type"] == "lifespan.startup.failed"
        assert "uvicorn --workers" in failed["message"]


class lifespan_of:  # noqa: N801 - a context manager
    def __init__(self, noted):
        self.noted = noted

    async def __aenter__(self):
        self.noted.append("started")

    async def __aexit__(self, *error):
        self.noted.append("ended")


class asgi_lifespan:  # noqa: N801 - a context manager
    """The lifespan of an application, as a server does it."""

    def __init__(self, application, sent=None):
        self.application = application
        self.sent = [] if sent is None else sent
        self.asked = asyncio.Queue()

    async def __aenter__(self):
        async def send(message):
            self.sent.append(message)

        self.asked.put_nowait({"type": "lifespan.startup"})
        self.task = asyncio.create_task(
            self.application({"type": "lifespan"}, self.asked.get, send)
        )
        await until(lambda: self.sent or self.task.done())
        if self.sent[0]["type"] == "lifespan.startup.failed":
            await self.task

    async def __aexit__(self, *error):
        self.asked.put_nowait({"type": "lifespan.shutdown"})
        await self.task
        assert self.sent[-1]["type"] == "lifespan.shutdown.complete"


# -- the plain receiver under asyncio -----------------------------------------------------------


@on_asyncio
async def test_the_plain_receiver_names_the_alternative_on_asyncio(caplog):
    receiver = WebhookReceiver(settings(), registry(works))
    request = Request(receiver)
    request.body(b"{}")
    assert await request.serve() == 503
    assert b"sdk_trio.asgi.Threaded" in request.sent[1]["body"]
    assert "sdk_trio.asgi.Threaded" in caplog.text
    sent = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message)

    await receiver({"type": "lifespan"}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "sdk_trio.asgi.Threaded" in sent[0]["message"]
    with pytest.raises(NotRunningError, match=r"sdk_trio\.asgi\.Threaded"):
        async with receiver.lifespan():
            raise AssertionError("it started")
