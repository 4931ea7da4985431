"""Our receiver as it is meant to be used: verification, typed event, handler.

Arguments: PORT, then ``inline`` (memory), or ``durable`` (SQLite, answered after the commit).
"""

import sys
import tempfile

import trio
from load import SECRET

import sdk_trio
from sdk_trio import logs
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
paid = 0


async def handle(event: OrderPaidEvent) -> None:
    global paid
    paid += event.data.total_amount or 0


async def main(port: str, mode: str) -> None:
    logs.configure(level="Error")
    durable = mode == "durable"
    handlers.register(OrderPaidEvent, handle, enqueue=durable)
    with tempfile.TemporaryDirectory() as directory:
        settings = sdk_trio.Settings.from_mapping(
            {
                "Server:Bind": [f"127.0.0.1:{port}"],
                "Storage:Backend": "Sqlite" if durable else "Memory",
                "Storage:Path": directory,
                "Webhooks:RequireHttps": False,
                "Webhooks:Secret": SECRET,
                "Webhooks:Queue:Capacity": 100_000,
            },
            standalone=True,
        )
        await sdk_trio.Runtime(settings, handlers).run()


trio.run(main, *sys.argv[1:])
