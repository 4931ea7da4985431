"""Our receiver as it is meant to be used: verification, typed event, handler.

Arguments: PORT, then ``inline`` (memory), ``stock`` (the same without the fast path), or
``durable`` (SQLite, answered after the commit). The number of handled events is kept in the eight
bytes of the file that ``BENCHMARK_HANDLED`` names, for "durable to done".
"""

import mmap
import os
import struct
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


def shared_count() -> mmap.mmap:
    with open(os.environ["BENCHMARK_HANDLED"], "r+b") as file:
        return mmap.mmap(file.fileno(), 8)


async def publish(runtime: sdk_trio.Runtime) -> None:
    """Let the benchmark see how many events are done."""
    with shared_count() as shared:
        while True:
            shared[:] = struct.pack("<Q", runtime.receiver.counters.values.get("handled", 0))
            await trio.sleep(0.05)


async def main(port: str, mode: str) -> None:
    logs.configure(level="Error")
    durable = mode == "durable"
    handlers.register(OrderPaidEvent, handle, enqueue=durable)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as directory:
        settings = sdk_trio.Settings.from_mapping(
            {
                "Server:Bind": [f"127.0.0.1:{port}"],
                "Admin:Enabled": False,
                "Server:FastPath": mode != "stock",
                "Storage:Backend": "Sqlite" if durable else "Memory",
                "Storage:Path": directory,
                "Webhooks:RequireHttps": False,
                "Webhooks:Secret": SECRET,
                "Webhooks:Queue:Capacity": 1_000_000,
            },
            standalone=True,
        )
        runtime = sdk_trio.Runtime(settings, handlers)
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(15) as stops:
                if "BENCHMARK_HANDLED" in os.environ:
                    nursery.start_soon(publish, runtime)
                nursery.start_soon(stop_at, stops, runtime)
                await runtime.run()
            nursery.cancel_scope.cancel()


async def stop_at(stops, runtime: sdk_trio.Runtime) -> None:
    async for _ in stops:
        runtime.shut_down("SIGTERM")


trio.run(main, *sys.argv[1:])
