"""A Trio application that receives webhooks in addition to its own work.

Run it with a secret in the environment, for example one from ``sdk-trio secrets new``::

    SDK__WEBHOOKS__SECRET=... SDK__WEBHOOKS__REQUIREHTTPS=false python examples/embedded.py
"""

import trio

import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
handlers.ignore()  # no warnings at the start about event types without a handler


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    print("paid:", event.data.id, event.data.total_amount, event.data.currency)


async def main() -> None:
    settings = sdk_trio.load_settings(overrides={"Sdk:Server:Bind": "127.0.0.1:0"}, standalone=True)
    runtime = sdk_trio.Runtime(settings, handlers)
    async with trio.open_nursery() as nursery:
        started = await nursery.start(runtime.run)
        print("receiving at", started.receiver[0] + settings.webhooks.path, flush=True)
        # Your application's own tasks run here, in the same nursery. This one ends after a minute.
        await trio.sleep(60)
        runtime.shut_down("the example ends")


if __name__ == "__main__":
    trio.run(main)
