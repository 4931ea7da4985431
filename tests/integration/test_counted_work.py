"""What one delivery costs, in counted work: steps of trio, tasks, threads, calls of functions.

Seconds depend on the machine, counts do not: a change that makes a delivery more expensive fails
here on any machine. The numbers are those of today with a little room. When one of them falls, take
it down; when one has to rise, say in the commit what is bought for it.
"""

import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio
from support.deliveries import settings
from support.serving import PATH, signed

from sdk_trio.events import OrderPaidEvent
from sdk_trio.server.deadline import RequestDeadline
from sdk_trio.webhooks import HandlerRegistry, WebhookReceiver

DELIVERIES = 50
WARM_UP = 20
LOOKS = 20

#: What threads do meanwhile may make a delivery dearer once, but not each time.
ATTEMPTS = 4


@attrs.define
class Work:
    """Counted work of :data:`DELIVERIES` deliveries, each figure for one of them."""

    steps: float = 0
    tasks: float = 0
    calls: float = 0
    objects: float = 0


class Counter(trio.abc.Instrument):
    """Counts how often tasks ran and how many were made."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.tasks = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks += 1


class Direct:
    """What our own server offers beside ASGI, without the server."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.expiry = RequestDeadline(sweep_seconds=0.5)

    def take_body(self) -> bytes:
        return self._body

    async def answer(self, answer: Any) -> None:
        assert answer[0] == 200


def exchange(number: int) -> tuple[dict[str, Any], Callable[[], Awaitable[Any]]]:
    delivery = signed("order.paid", webhook_id=f"msg_{number}")
    headers = [
        (name.lower().encode(), value.encode())
        for name, value in {
            "host": "test",
            "content-type": "application/json",
            "content-length": str(len(delivery.body)),
            "webhook-id": delivery.webhook_id,
            "webhook-timestamp": str(delivery.timestamp),
            "webhook-signature": delivery.signature,
        }.items()
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "client": ("127.0.0.1", 1),
        "headers": headers,
        "extensions": {"sdk_trio.shortcut": Direct(delivery.body)},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": delivery.body, "more_body": False}

    return scope, receive


async def measure(backend: str, *, enqueue: bool, path: Any) -> tuple[Work, int]:
    """Deliver one after the other; return the work and how many threads it made."""
    handled = 0
    looks = 0

    async def handle(event: OrderPaidEvent) -> None:
        nonlocal handled
        handled += 1

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, handle, enqueue=enqueue)
    app = WebhookReceiver(
        settings(Storage__Backend=backend, Storage__Path=str(path / "data")), handlers
    )
    exchanges = [exchange(number) for number in range(WARM_UP + DELIVERIES)]
    counter = Counter()
    calls = 0.0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    async def look() -> None:
        """Wait for the threads of the store; what that costs is taken off the count."""
        nonlocal looks
        looks += 1
        await trio.sleep(0.01)

    async def deliver(few: list[Any]) -> None:
        wanted = handled + len(few)
        for scope, receive in few:
            await app(scope, receive, send)
        while not (app.idle and handled >= wanted):
            await look()

    async with trio.open_nursery() as nursery:
        await nursery.start(app.run)
        await deliver(exchanges[:WARM_UP])
        threads = set(threading.enumerate())
        gc.collect()
        gc.disable()
        before = sys.getallocatedblocks()
        trio.lowlevel.add_instrument(counter)
        sys.setprofile(count)
        try:
            for _ in range(LOOKS):
                await look()
                assert app.idle
            look_steps, look_calls = counter.steps / LOOKS, calls / LOOKS
            counter.steps = calls = looks = 0
            await deliver(exchanges[WARM_UP:])
            counter.steps -= looks * look_steps
            calls -= looks * look_calls
        finally:
            sys.setprofile(None)
            trio.lowlevel.remove_instrument(counter)
            objects = sys.getallocatedblocks() - before
            gc.enable()
        made = len(set(threading.enumerate()) - threads)
        nursery.cancel_scope.cancel()
    figures = (counter.steps, counter.tasks, calls, objects)
    return Work(*(figure / DELIVERIES for figure in figures)), made


# Steps of an enqueued delivery vary by how commits and tasks meet, so they have more room.
@pytest.mark.parametrize(
    ("backend", "enqueue", "most"),
    [
        pytest.param("Memory", False, Work(0.2, 0, 155, 12), id="inline"),
        pytest.param("Sqlite", True, Work(5.2, 0, 432, 8), id="enqueued"),
    ],
)
async def test_a_delivery_costs_no_more_than_it_did(backend, enqueue, most, tmp_path):
    dearer = {}
    for attempt in range(ATTEMPTS):
        work, threads = await measure(backend, enqueue=enqueue, path=tmp_path / f"{attempt}")
        assert threads == 0, "a delivery needs no thread of its own"
        assert work.tasks == 0, "a delivery needs no task of its own"
        dearer = {
            name: value for name, value in attrs.asdict(work).items() if value > getattr(most, name)
        }
        if not dearer:
            break
    assert dearer == {}, f"{work}, at most {most}"
