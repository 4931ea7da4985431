"""Only the receiver, as an ASGI application in a server that you already have.

Any ASGI server on Trio can serve it; here hypercorn, at the path of ``Sdk:Webhooks:Path``::

    SDK__WEBHOOKS__SECRET=... python examples/standalone.py

The server's lifespan starts the queue and drains it at the end.
"""

import os
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
handlers.ignore()  # no warnings at the start about event types without a handler


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    print("paid:", event.data.id, flush=True)


def build() -> sdk_trio.WebhookReceiver:
    settings = sdk_trio.load_settings(
        overrides={"Sdk:Webhooks:RequireHttps": "false"}, standalone=True
    )
    return sdk_trio.WebhookReceiver(settings, handlers)


if __name__ == "__main__":
    config = Config()
    config.bind = [f"127.0.0.1:{os.environ.get('PORT', '8090')}"]
    trio.run(partial(serve, build(), config))
