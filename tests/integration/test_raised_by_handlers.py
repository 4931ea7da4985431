"""Anything that a handler raises, returns or cancels becomes that handler's failure."""

import httpx
import pytest
import trio
from support.deliveries import settings
from support.odd_errors import ODD_ERRORS
from support.postgres import running_server
from support.waiting import PATIENCE_SECONDS

from sdk_trio.events import OrderPaidEvent, OrderUpdatedEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import running_app
from sdk_trio.webhooks import HandlerRegistry, WebhookHandlerBase

ATTEMPTS = 2
POLICY = {
    "Webhooks__Queue__MaxAttempts": ATTEMPTS,
    "Webhooks__InlineMaxAttempts": ATTEMPTS,
    "Webhooks__Queue__RetryBaseSeconds": 0,
    "Webhooks__Queue__RetryCapSeconds": 0,
}


def give(event):
    # Not of an id that the test itself uses.
    if event.webhook_id in ODD_ERRORS:
        raise ODD_ERRORS[event.webhook_id]()


async def coroutine(event):
    give(event)


async def in_a_nursery(event):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        give(event)
        nursery.cancel_scope.cancel()


def plain(event):
    give(event)


def writes(event, tx):
    give(event)


class Handler(WebhookHandlerBase[OrderPaidEvent]):
    async def handle_core(self, event):
        give(event)

    async def on_error(self, event, error):
        give(event)


def registered(function, **options):
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, function, **options)
    return handlers


def of_fallback():
    handlers = HandlerRegistry()
    handlers.fallback(coroutine, enqueue=True)
    return handlers


WAYS = {
    "inline": lambda: registered(coroutine),
    "queued": lambda: registered(coroutine, enqueue=True),
    "nursery": lambda: registered(in_a_nursery, enqueue=True),
    "plain inline": lambda: registered(plain),
    "plain queued": lambda: registered(plain, enqueue=True),
    "transaction": lambda: registered(writes, enqueue=True, transaction=True),
    "transaction on PostgreSQL": lambda: registered(writes, enqueue=True, transaction=True),
    "asyncio inline": lambda: registered(coroutine, asyncio=True),
    "asyncio queued": lambda: registered(coroutine, enqueue=True, asyncio=True),
    "class and hook inline": lambda: registered(Handler),
    "class and hook queued": lambda: registered(Handler, enqueue=True),
    "fallback": of_fallback,
}

#: trio.Nursery itself makes a text of what its body raised, and is damaged if that fails. It takes
#: a Cancelled for its own.
BEYOND_NURSERIES = {"repr-raises", "nested-5000", "leaked-cancelled"}


@pytest.mark.parametrize("environment", ["Development", "Production"])
@pytest.mark.parametrize("way", WAYS)
async def test_any_exception_of_a_handler_is_its_failure(tmp_path, monkeypatch, way, environment):
    keys = dict(POLICY, Environment=environment)
    if way == "transaction on PostgreSQL":
        monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
        keys |= {"Storage__Backend": "Postgres", "Storage__Path": str(tmp_path / "data")}
    if way == "transaction":
        keys |= {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(WAYS[way](), settings(**keys)) as app:
            names = [
                name for name in ODD_ERRORS if way != "nursery" or name not in BEYOND_NURSERIES
            ]
            for name in names:
                for _ in range(ATTEMPTS if "inline" in way else 1):
                    delivered = await app.deliver("order.paid", webhook_id=name, settle=False)
                assert delivered.status == 200, name
            await app.settle()
            for name in names:
                (record,) = await app.store.find_by_id(name)
                assert (record.state, record.attempts) == (DeliveryState.DEAD, ATTEMPTS), name
                assert record.last_error, name
            await app.deliver("order.paid", webhook_id="fine", expect="done")


async def cancels_its_task(event):
    if event.webhook_id != "fine":
        trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()
        await trio.sleep_forever()


def cancels_from_its_thread(event):
    if event.webhook_id != "fine":
        trio.from_thread.run(cancels_its_task, event)


@pytest.mark.parametrize("server", ["own", "hypercorn"])
@pytest.mark.parametrize("handler", [cancels_its_task, cancels_from_its_thread])
async def test_an_inline_handler_that_cancels_the_nursery_of_its_task_ends_only_its_own_run(
    handler, server
):
    begun, release = trio.Event(), trio.Event()

    async def waits(event):
        begun.set()
        await release.wait()

    handlers = registered(handler)
    handlers.register(OrderUpdatedEvent, waits)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            running_app(handlers, settings(**POLICY, Server__FastPath=server == "own")) as app,
            trio.open_nursery() as nursery,
        ):

            async def deliver_beside():
                await app.deliver("order.updated", webhook_id="beside", settle=False)

            nursery.start_soon(deliver_beside)
            await begun.wait()
            for state, attempts in (("retrying", 1), ("dead", ATTEMPTS)):
                delivered = await app.deliver("order.paid", webhook_id="odd", expect=state)
                assert delivered.record.attempts == attempts
                assert "the handler cancelled the task that runs it" in delivered.error
            await app.deliver("order.paid", webhook_id="fine", expect="done")
            release.set()
            await app.settle()
            (record,) = await app.store.find_by_id("beside")
            assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_the_answer_of_a_handler_that_cancels_its_nursery_is_the_last_of_its_connection():
    async def handler(event):
        trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()

    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            running_app(registered(handler), settings()) as app,
            httpx.AsyncClient() as client,
        ):
            for webhook_id in ("a", "b"):
                signed = app.sign("order.paid", webhook_id=webhook_id)
                answer = await client.post(app.url, content=signed.body, headers=signed.headers)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def test_a_handler_that_cancels_the_nursery_of_its_task_ends_only_its_own_run():
    release = trio.Event()

    async def handler(event):
        if event.webhook_id == "beside":
            await release.wait()
        else:
            await cancels_its_task(event)

    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(
            registered(handler, enqueue=True), settings(**POLICY, Webhooks__Queue__Workers=2)
        ) as app:
            await app.deliver("order.paid", webhook_id="beside", settle=False)
            delivered = await app.deliver("order.paid", webhook_id="odd", expect="dead")
            assert delivered.record.attempts == ATTEMPTS
            assert "the handler cancelled the task that runs it" in delivered.error
            await app.deliver("order.paid", webhook_id="fine", expect="done")
            release.set()
            await app.settle()
            (record,) = await app.store.find_by_id("beside")
            assert (record.state, record.attempts) == (DeliveryState.DONE, 1)
