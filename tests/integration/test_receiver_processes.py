"""Two receivers on one inherited socket and one store, which separates their work.

A runtime takes its data directory for itself (``test_runtime_life``), so these are its parts: a
receiver with an inbox, and a server. Several processes of one host rely on this.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import apsw
import pytest
import trio
from support.deliveries import SECRET
from support.waiting import PATIENCE_SECONDS
from support.wire import Wire

from sdk_trio.config import KeyDerivation
from sdk_trio.testing import SignedDelivery, sign_delivery

#: How many ids are sent, each :data:`REPEATS` times; a full-size run sets SDK_TEST_SHARED_IDS=2000.
IDS = int(os.environ.get("SDK_TEST_SHARED_IDS", "60"))
REPEATS = 4
SENDERS = 12

PROCESS = """
import os, sys, trio
import sdk_trio
from sdk_trio.base import logs
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent
from sdk_trio.server.serve import Server
from sdk_trio.storage.open import open_inbox
from sdk_trio.webhooks import WebhookReceiver

descriptor, directory, secret = sys.argv[1:]
log = os.open(os.path.join(directory, "handled"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
handlers = sdk_trio.HandlerRegistry()


async def handle(event):
    await trio.sleep(0.005)
    os.write(log, f"{os.getpid()} {event.webhook_id}\\n".encode())


handlers.register(OrderPaidEvent, handle, enqueue=True)
handlers.register(OrderCreatedEvent, handle)


async def main():
    settings = sdk_trio.Settings.from_mapping(
        {
            "Server:Bind": [f"fd:{descriptor}"],
            "Storage:Path": directory,
            "Webhooks:RequireHttps": False,
            "Webhooks:Secret": secret,
        },
        standalone=True,
    )
    async with open_inbox(settings, owner=str(os.getpid())) as inbox:
        receiver = WebhookReceiver(settings, handlers, inbox=inbox)
        server = Server(receiver, settings.server.bind, key="Sdk:Server:Bind", graceful_seconds=10)
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(15) as stops:
                await nursery.start(receiver.run)
                await nursery.start(server.run)
                print("ready", flush=True)
                async for _ in stops:
                    break
                server.stop()
                await server.ended.wait()
                await receiver.drain()
            nursery.cancel_scope.cancel()


logs.configure(level="Warning")
trio.run(main)
"""


@contextlib.contextmanager
def two_processes(directory: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Two receivers that are ready, and the address that both listen on."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        descriptor = listener.fileno()
        command = [sys.executable, "-c", PROCESS, str(descriptor), str(directory), SECRET]
        processes = []
        for _ in range(2):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[descriptor])
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", processes


def handled(directory: Path) -> list[tuple[str, str]]:
    """Process and id of every run of a handler, in their order."""
    file = directory / "handled"
    # Text after the last line break is still being written.
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(process, webhook_id) for process, webhook_id in map(str.split, lines)]


def signed_delivery(type_: str, webhook_id: str) -> SignedDelivery:
    return sign_delivery(
        type_, secret=SECRET, webhook_id=webhook_id, derivation=KeyDerivation.STANDARD
    )


async def deliver_until_accepted(url: str, delivery: SignedDelivery) -> None:
    """Deliver on new connections, like a sender that retries, until a 200."""
    while True:
        with await Wire.connect(url) as wire:
            status = (await wire.post(delivery)).status
        if status == 200:
            return
        # The other process runs it, so this one asks the sender to retry.
        assert status == 503
        await trio.sleep(0.02)


async def deliver_all(url: str, deliveries: Sequence[SignedDelivery]) -> None:
    for delivery in deliveries:
        await deliver_until_accepted(url, delivery)


@pytest.mark.skipif(sys.platform != "linux", reason="an inherited socket")
@pytest.mark.parametrize("type_", ["order.paid", "order.created"], ids=["enqueued", "inline"])
async def test_events_acknowledged_by_two_processes_are_handled_once(
    tmp_path: Path, type_: str
) -> None:
    with two_processes(tmp_path) as (url, processes):
        wanted: list[str] = []
        with trio.fail_after(PATIENCE_SECONDS):
            # Which process takes a connection is the kernel's choice: until both have had some.
            while len({process for process, _ in handled(tmp_path)}) < 2:
                ids = [f"msg_{len(wanted) + number}" for number in range(IDS)]
                wanted += ids
                deliveries = [signed_delivery(type_, webhook_id) for webhook_id in ids] * REPEATS
                random.shuffle(deliveries)
                async with trio.open_nursery() as nursery:
                    for number in range(SENDERS):
                        nursery.start_soon(deliver_all, url, deliveries[number::SENDERS])
                while not set(ids) <= {webhook_id for _, webhook_id in handled(tmp_path)}:
                    await trio.sleep(0.02)
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                assert await trio.to_thread.run_sync(process.wait) == 0
    assert Counter(webhook_id for _, webhook_id in handled(tmp_path)) == Counter(wanted)
    connection = apsw.Connection(str(tmp_path / "inbox.db"))
    attempts = connection.execute("SELECT DISTINCT attempts FROM ended").fetchall()
    unfinished = connection.execute("SELECT count(*) FROM work").get
    connection.close()
    assert (attempts, unfinished) == ([(1,)], 0)
