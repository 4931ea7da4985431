# For: asyncio_loop
import asyncio

import trio

import sdk_trio
from sdk_trio.asgi import asyncio_loop
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True, asyncio=True)
async def grant_access(event: OrderPaidEvent) -> None:
    await asyncio.sleep(0)
    print("on asyncio:", event.data.id)


async def main() -> None:
    with asyncio_loop():
        async with running_app(handlers) as app:
            await app.deliver("order.paid", {"id": "ord_1"}, expect="done")


trio.run(main)
# Output: on asyncio: ord_1
