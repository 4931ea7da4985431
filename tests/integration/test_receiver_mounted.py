"""The receiver alone, mounted in another application and server."""

import json
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from support.deliveries import settings
from support.serving import asgi_headers, ask, registry, running, signed, works

from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.runtime import Runtime
from sdk_trio.webhooks import WebhookReceiver


async def hello(request):
    return PlainTextResponse("hello")


@asynccontextmanager
async def served(application):
    """Serve an application with stock hypercorn; yields its address."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    ending = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(
                lambda task_status: serve(
                    application, config, shutdown_trigger=ending.wait, task_status=task_status
                )
            )
            yield address
            ending.set()


async def post(address, delivery, path="/hooks/sdk"):
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"{address}{path}", content=delivery.body, headers=delivery.headers
        )
    return answer.status_code, answer.content


@pytest.fixture
def sqlite(tmp_path):
    return {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}


async def test_the_lifespan_of_another_server_starts_and_drains_it(sqlite):
    handled = []

    async def handler(event):
        await trio.sleep(0.05)
        handled.append(event.webhook_id)

    receiver = WebhookReceiver(settings(**sqlite), registry(handler, enqueue=True))
    assert not receiver.ready
    async with served(receiver) as address:
        assert receiver.ready
        for name in ("a", "b", "c"):
            assert await post(address, signed(webhook_id=name)) == (200, b"{}")
        assert await post(address, signed(), "/elsewhere") == (404, b'{"error":"not found"}')
    assert sorted(handled) == ["a", "b", "c"]
    assert not receiver.ready
    assert receiver.report.persisted == 0


async def test_events_that_its_drain_does_not_finish_stay_in_the_store(sqlite):
    async def handler(event):
        await trio.sleep_forever()

    receiver = WebhookReceiver(
        settings(Webhooks__GracefulDrainTimeoutSeconds=0.1, **sqlite),
        registry(handler, enqueue=True),
    )
    async with served(receiver) as address:
        assert (await post(address, signed(webhook_id="a")))[0] == 200
    assert (receiver.report.persisted, receiver.report.ids) == (1, ("a",))


async def test_a_starlette_application_starts_and_drains_the_receiver_by_its_lifespan(sqlite):
    async def slow(event):
        await trio.sleep(0.1)

    receiver = WebhookReceiver(settings(**sqlite), registry(slow, enqueue=True))
    application = Starlette(
        routes=[Route("/hello", hello), Mount("/hooks", receiver)], lifespan=receiver.lifespan
    )
    async with served(application) as address:
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(f"{address}/hello")).text == "hello"
        assert await post(address, signed(webhook_id="a")) == (200, b"{}")
    assert (receiver.report.persisted, receiver.report.lost) == (0, 0)


async def test_a_mount_under_a_prefix_keeps_the_whole_path():
    """ASGI gives an application the full path, so Webhooks:Path is the whole one as well."""
    receiver = WebhookReceiver(settings(Webhooks__Path="/pay/hooks"), registry(works))
    application = Starlette(routes=[Mount("/pay", receiver)])
    async with trio.open_nursery() as nursery:
        await nursery.start(receiver.run)
        async with served(application) as address:
            assert await post(address, signed(), "/pay/hooks") == (200, b"{}")
        nursery.cancel_scope.cancel()


async def test_without_a_start_the_answer_is_503():
    receiver = WebhookReceiver(settings(), registry(works))
    application = Starlette(routes=[Route("/hooks/sdk", receiver, methods=["POST"])])
    async with served(application) as address:
        delivery = signed()
        status, body = await post(address, delivery)
        assert (status, json.loads(body)) == (503, {"error": "temporarily unavailable"})
        # Once the application starts it, the same delivery is accepted.
        async with trio.open_nursery() as nursery:
            await nursery.start(receiver.run)
            assert (await post(address, delivery))[0] == 200
            nursery.cancel_scope.cancel()


async def test_a_locked_store_is_a_lifespan_failure_with_its_reason(sqlite):
    runtime = Runtime(settings(**sqlite))
    receiver = WebhookReceiver(settings(**sqlite), registry(works))
    messages = []

    async def send(message):
        await trio.lowlevel.checkpoint()
        messages.append(message)

    async def receive():
        await trio.lowlevel.checkpoint()
        return {"type": "lifespan.startup"}

    async with running(runtime):
        with pytest.raises(ExceptionGroup) as raised:
            await receiver({"type": "lifespan"}, receive, send)
        # A real server gives up for the same reason.
        with pytest.raises(ExceptionGroup) as caught:
            await _serve_once(receiver)
    assert [message["type"] for message in messages] == ["lifespan.startup.failed"]
    assert sqlite["Storage__Path"] in messages[0]["message"]
    assert sqlite["Storage__Path"] in "".join(_messages(raised.value))
    assert sqlite["Storage__Path"] in "".join(_messages(caught.value))


async def _serve_once(application):
    async with served(application):
        pass


def _messages(error):
    if isinstance(error, BaseExceptionGroup):
        return [text for part in error.exceptions for text in _messages(part)]
    return [str(error)]


async def test_two_receivers_of_one_application_share_a_given_store():
    """An open inbox can be handed in; the receiver leaves it open."""
    from support.deliveries import memory_inbox

    inbox = memory_inbox()
    one, two = (WebhookReceiver(settings(), registry(works), inbox=inbox) for _ in range(2))
    async with served(one) as first:
        assert (await post(first, signed(webhook_id="a")))[0] == 200
    async with served(two) as second:
        assert (await post(second, signed(webhook_id="a")))[0] == 200
    assert (await inbox.get("a")).attempts == 1


@pytest.mark.parametrize("end", ["drain", "cancellation"])
async def test_an_inline_run_that_outlasts_the_receiver_is_recorded(sqlite, end):
    """Its handler shields work that must not be done twice: the next start must not repeat it."""
    begun = trio.Event()
    answers = []

    async def handler(event):
        with trio.CancelScope(shield=True):
            begun.set()
            await trio.sleep(0.5)

    async def deliver(receiver):
        delivery = signed(webhook_id="a")
        answers.append(await ask(receiver, delivery.body, asgi_headers(delivery)))

    receiver = WebhookReceiver(settings(**sqlite), registry(handler))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(receiver.run)
            nursery.start_soon(deliver, receiver)
            await begun.wait()
            if end == "drain":
                await receiver.drain()
            else:
                nursery.cancel_scope.cancel()
        assert [answer.status for answer in answers] == ([200] if end == "drain" else [])

        again = WebhookReceiver(settings(**sqlite), registry(handler))
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            record = await again.store.get("a")
            await again.drain()
    assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_a_drain_during_the_start_ends_it(sqlite):
    receiver = WebhookReceiver(settings(**sqlite), registry(works))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receiver.run)
            await trio.testing.wait_all_tasks_blocked()  # it waits for the thread of its store
            await receiver.drain()
    assert not receiver.ready
    assert receiver.report is not None
