"""Receives webhooks and calls the upstream: the handler looks up the order that was paid.

It needs the upstream's access token and a webhook secret in the environment::

    SDK__ACCESSTOKEN=... SDK__WEBHOOKS__SECRET=... SDK__WEBHOOKS__REQUIREHTTPS=false \\
        python examples/full_stack.py
"""

import trio

import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
handlers.ignore()  # no warnings at the start about event types without a handler


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent, services: sdk_trio.Services) -> None:
    try:
        order = await services.client.orders.get(event.data.id)
    except sdk_trio.NotFoundError:
        print("no such order:", event.data.id, flush=True)
        return  # other errors are raised, so the event is retried later
    print("paid:", order.id, order.status, flush=True)


async def main() -> None:
    settings = sdk_trio.load_settings(overrides={"Sdk:Server:Bind": "127.0.0.1:0"})
    runtime = sdk_trio.Runtime(settings, handlers)
    async with trio.open_nursery() as nursery:
        started = await nursery.start(runtime.run)
        print("receiving at", started.receiver[0] + settings.webhooks.path, flush=True)
        # Your code can use the same client, such as runtime.client.orders.list().
        await trio.sleep(60)
        runtime.shut_down("the example ends")


if __name__ == "__main__":
    trio.run(main)
