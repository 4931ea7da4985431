"""A run that leaves work which no one awaits has failed: its effect would be lost."""

import gc
import importlib
import sys

import apsw
import pytest
import trio
from support.deliveries import UNRETRIED, settings
from support.waiting import PATIENCE_SECONDS

from sdk_trio.events import OrderPaidEvent, OrderUpdatedEvent
from sdk_trio.testing import running_app
from sdk_trio.webhooks import HandlerRegistry, Services, WebhookHandlerBase

HERE = __file__

# Python's own warning stays beside the failure.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


async def refund():
    """A coroutine function, like an operation of a client."""


def registered(function, **options):
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, function, **options)
    return handlers


async def forgets(event):
    refund()  # LINE forgets


async def forgets_in_a_variable(event):
    refunded = refund()
    assert refunded is not None


async def forgets_in_a_child_task(event):
    async def child():
        refund()  # LINE child

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)


def forgets_in_a_thread(event):
    refund()  # LINE thread


def forgets_in_a_transaction(event, tx):
    tx.connection.execute("CREATE TABLE IF NOT EXISTS refunds (id TEXT)")
    refund()  # LINE transaction


async def forgets_before_the_finish(event, services: Services):
    refund()  # LINE finish
    await services.finish(event, lambda tx: None)


async def forgets_the_finish(event, services: Services):
    services.finish(event, lambda tx: None)  # LINE services


class Forgets(WebhookHandlerBase[OrderPaidEvent]):
    async def handle_core(self, event):
        refund()  # LINE class


def line_of(name):
    with open(HERE) as file:
        for number, line in enumerate(file, 1):
            if line.rstrip().endswith(f"# LINE {name}"):
                return f"{HERE}:{number}"
    raise LookupError(name)


FORGETTING = {
    "async": (forgets, {}, "forgets"),
    "async queued": (forgets, {"enqueue": True}, "forgets"),
    "variable": (forgets_in_a_variable, {}, None),
    "child task": (forgets_in_a_child_task, {"enqueue": True}, "child"),
    "thread": (forgets_in_a_thread, {"enqueue": True}, "thread"),
    "thread inline": (forgets_in_a_thread, {}, "thread"),
    "transaction": (
        forgets_in_a_transaction,
        {"enqueue": True, "transaction": True},
        "transaction",
    ),
    "finish": (forgets_before_the_finish, {"enqueue": True}, "finish"),
    "finish itself": (forgets_the_finish, {"enqueue": True}, "services"),
    "asyncio": (forgets, {"asyncio": True}, "forgets"),
    "class": (Forgets, {}, "class"),
}


@pytest.mark.parametrize("environment", ["Development", "Production"])
@pytest.mark.parametrize("case", FORGETTING)
async def test_a_forgotten_await_fails_the_run_and_names_the_line(tmp_path, case, environment):
    function, options, line = FORGETTING[case]
    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(
            registered(function, **options), settings(Environment=environment, **keys, **UNRETRIED)
        ) as app:
            delivered = await app.deliver("order.paid", expect="retrying")
            (failed,) = await app.store.attempts(delivered.record.key)
    assert delivered.error.startswith("NotAwaitedError: ")
    assert "without await" in delivered.error
    assert failed.place.startswith(line_of(line) if line else HERE)
    if case == "transaction":
        tables = apsw.Connection(str(tmp_path / "inbox.db"))
        assert not list(tables.execute("SELECT 1 FROM sqlite_master WHERE name = 'refunds'"))
        tables.close()


async def returns_a_coroutine(event):
    return refund()


def returns_a_coroutine_in_a_thread(event):
    return refund()


def returns_a_coroutine_in_a_transaction(event, tx):
    return refund()


async def returns_a_generator(event):
    return (each for each in "abc")


async def returns_an_async_generator(event):
    async def generator():
        yield 1

    return generator()


class Awaitable:
    def __await__(self):
        yield


def returns_an_awaitable(event):
    return Awaitable()


class ReturnsACoroutine(WebhookHandlerBase[OrderPaidEvent]):
    async def handle_core(self, event):
        return refund()


RETURNING = {
    "coroutine": (returns_a_coroutine, {}),
    "coroutine of a thread": (returns_a_coroutine_in_a_thread, {"enqueue": True}),
    "coroutine of a transaction": (
        returns_a_coroutine_in_a_transaction,
        {"enqueue": True, "transaction": True},
    ),
    "generator": (returns_a_generator, {}),
    "async generator": (returns_an_async_generator, {"enqueue": True}),
    "awaitable": (returns_an_awaitable, {"enqueue": True}),
    "asyncio": (returns_a_coroutine, {"asyncio": True}),
    "class": (ReturnsACoroutine, {}),
}


@pytest.mark.parametrize("case", RETURNING)
async def test_a_returned_awaitable_fails_the_run_and_names_the_handler(tmp_path, case):
    function, options = RETURNING[case]
    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path)}
    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(
            registered(function, **options), settings(**keys, **UNRETRIED)
        ) as app:
            delivered = await app.deliver("order.paid", expect="retrying")
            (failed,) = await app.store.attempts(delivered.record.key)
    assert delivered.error.startswith("NotAwaitedError: ")
    assert function.__qualname__ in delivered.error
    code = getattr(function, "handle_core", function).__code__
    assert failed.place.startswith(f"{HERE}:{code.co_firstlineno} in ")


async def test_awaited_coroutines_and_those_of_other_tasks_are_no_failure(tmp_path):
    async def handler(event):
        await refund()
        return "sent"

    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(registered(handler), settings()) as app:
            await app.deliver("order.paid", expect="done")
            refund()
            await app.deliver("order.paid", expect="done")


def leave_in_a_cycle():
    cycle = [refund()]
    cycle.append(cycle)


async def test_coroutines_freed_by_the_garbage_collector_do_not_count_for_the_run():
    async def innocent(event):
        gc.collect()

    async def leaves(event):
        leave_in_a_cycle()

    handlers = registered(innocent)
    handlers.register(OrderUpdatedEvent, leaves)
    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(handlers, settings()) as app:
            gc.disable()
            try:
                await app.deliver("order.updated", settle=False)
                leave_in_a_cycle()
                await app.deliver("order.paid", expect="done")
            finally:
                gc.enable()


LIBRARY = """
async def work():
    pass

def drop():
    work()

async def handle(event):
    work()

def handle_in_a_thread(event):
    work()
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package that is installed."""
    directory = tmp_path / "site-packages"
    (directory / "some_library").mkdir(parents=True)
    (directory / "some_library" / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(directory))
    yield importlib.import_module("some_library")
    sys.modules.pop("some_library")


async def test_a_coroutine_that_a_library_drops_itself_is_no_failure(library):
    async def handler(event):
        library.drop()

    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(registered(handler), settings()) as app:
            await app.deliver("order.paid", expect="done")


async def test_a_coroutine_of_a_library_dropped_by_a_handler_is_a_failure(library):
    async def handler(event):
        library.work()

    for function in (handler, library.handle, library.handle_in_a_thread):
        with trio.fail_after(PATIENCE_SECONDS):
            async with running_app(registered(function), settings(**UNRETRIED)) as app:
                delivered = await app.deliver("order.paid", expect="retrying")
        assert "called work without await" in delivered.error
