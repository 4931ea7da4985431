"""What type checkers know of ``services.client``; checked by ``mypy tests/typing``, never run."""

from typing import assert_type

import sdk_trio
from sdk_trio.client.models import Order
from sdk_trio.client.operations.table import Orders
from sdk_trio.events import OrderPaidEvent
from sdk_trio.webhooks import Services

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent)
async def handle(event: OrderPaidEvent, services: sdk_trio.Services) -> None:
    """The public name says which client."""
    assert_type(services.client, sdk_trio.Client)
    assert_type(services.client.orders, Orders)
    assert_type(await services.client.orders.get("1"), Order)
    services.client.ordres  # type: ignore[attr-defined]  # noqa: B018 - no such resource


class Handler(sdk_trio.WebhookHandlerBase[OrderPaidEvent]):
    """A handler class that takes the services."""

    def __init__(self, services: sdk_trio.Services) -> None:
        self.orders = services.client.orders


handlers.register(OrderPaidEvent, Handler)


class MyClient:
    """Another client."""

    answer: int


def factory(services: Services[MyClient]) -> int:
    """With a client of one's own."""
    return services.client.answer


def check(runtime: sdk_trio.Runtime) -> None:
    """The runtime's client is the same class."""
    assert_type(runtime.client, sdk_trio.Client)
