# For: WebhookHandlerBase, Services
import trio

import sdk_trio
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
class GrantAccess(sdk_trio.WebhookHandlerBase[OrderPaidEvent]):
    def __init__(self, services: sdk_trio.Services) -> None:
        self.services = services

    async def handle_core(self, event: OrderPaidEvent) -> None:
        print("paid:", event.data.id, "in", self.services.settings.environment)


async def main() -> None:
    async with running_app(handlers) as app:
        await app.deliver("order.paid", {"id": "ord_1"}, expect="done")


trio.run(main)
# Output: paid: ord_1 in Development
