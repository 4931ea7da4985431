"""Our receiver as it is meant to be used: verification, typed event, handler.

Arguments: fd:N, then ``inline`` (memory), ``stock`` (the same without the fast path), or
``durable`` (SQLite, answered after the commit). The number of handled events is kept in the eight
bytes of the file that ``BENCHMARK_HANDLED`` names, for "durable to done".

One process is a :class:`sdk_trio.Runtime`. Several on one store cannot be: a runtime wants its data
directory for itself. They are what it would run in each of them: a receiver and a server.
"""

import mmap
import os
import struct
import sys
import uuid
from contextlib import AsyncExitStack

import trio
from load import SECRET

import sdk_trio
from sdk_trio.base import logs
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
paid = 0


async def handle(event: OrderPaidEvent) -> None:
    global paid
    paid += event.data.total_amount or 0


def shared_count() -> mmap.mmap:
    with open(os.environ["BENCHMARK_HANDLED"], "r+b") as file:
        return mmap.mmap(file.fileno(), 8)


async def publish(receiver: sdk_trio.webhooks.WebhookReceiver) -> None:
    """Let the benchmark see how many events are done."""
    with shared_count() as shared:
        while True:
            shared[:] = struct.pack("<Q", receiver.counters.values.get("handled", 0))
            await trio.sleep(0.05)


async def main(address: str, mode: str) -> None:
    logs.configure(level="Error")
    durable = mode == "durable"
    handlers.register(OrderPaidEvent, handle, enqueue=durable)
    tls = {
        "Server:CertFile": os.environ.get("BENCHMARK_CERTIFICATE"),
        "Server:KeyFile": os.environ.get("BENCHMARK_KEY"),
    }
    settings = sdk_trio.Settings.from_mapping(
        {
            **({key: file for key, file in tls.items() if file}),
            "Server:Bind": [address],
            "Admin:Enabled": False,
            "Server:FastPath": mode != "stock",
            "Storage:Backend": "Sqlite" if durable else "Memory",
            "Storage:Path": os.environ["BENCHMARK_DATA"],
            "Webhooks:RequireHttps": False,
            "Webhooks:Secret": SECRET,
            "Webhooks:Queue:Capacity": 1_000_000,
        },
        standalone=True,
    )
    if int(os.environ["BENCHMARK_PROCESSES"]) > 1:
        await run_one_of_several(settings)
    else:
        await run_alone(settings)


async def run_alone(settings: sdk_trio.Settings) -> None:
    runtime = sdk_trio.Runtime(settings, handlers)
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(15) as stops:
            nursery.start_soon(publish, runtime.receiver)
            nursery.start_soon(stop_at, stops, runtime)
            await runtime.run()
        nursery.cancel_scope.cancel()


async def stop_at(stops, runtime: sdk_trio.Runtime) -> None:
    async for _ in stops:
        runtime.shut_down("SIGTERM")


async def run_one_of_several(settings: sdk_trio.Settings) -> None:
    from sdk_trio.server.serve import Server
    from sdk_trio.storage.open import open_inbox

    async with AsyncExitStack() as stack:
        inbox = await stack.enter_async_context(open_inbox(settings, owner=str(uuid.uuid4())))
        receiver = sdk_trio.webhooks.WebhookReceiver(settings, handlers, inbox=inbox)
        server = Server(
            receiver,
            settings.server.bind,
            key="Sdk:Server:Bind",
            cert_file=settings.server.cert_file,
            key_file=settings.server.key_file,
            graceful_seconds=settings.webhooks.graceful_drain_timeout_seconds,
        )
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(15) as stops:
                nursery.start_soon(publish, receiver)
                await nursery.start(receiver.run)
                nursery.start_soon(server.run)
                async for _ in stops:
                    break
                server.stop()
                await server.ended.wait()
                await receiver.drain()
            nursery.cancel_scope.cancel()


trio.run(main, *sys.argv[1:])
