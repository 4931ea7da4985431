"""The growth of a daemon's memory, seen from outside: it is bounded, whatever senders send."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.waiting import until
from support.wire import Wire

from sdk_trio.testing import sign_delivery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1024 * 1024

#: What the allocator keeps, and what connections and the program itself take besides.
SLACK = 48 * MIB

APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()

@handlers.on(OrderPaidEvent, enqueue=True)
async def paid(event):
    pass
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "application.py").write_text(APPLICATION)
    return Place(tmp_path)


def in_memory(place: Place):
    words = ("--app", "application:handlers", "--set", "Sdk:Storage:Backend=Memory")
    return place.daemon(*words)


def most(daemon: Daemon) -> int:
    """The most memory that the daemon has had until now, in bytes."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


async def deliver(daemon: Daemon, ids: range, size: int, type_: str = "order.paid") -> None:
    """Deliver events of that many bytes, on a few connections at once."""

    async def send(few: range) -> None:
        with await Wire.connect(daemon.receiver) as wire:
            for number in few:
                body = b'{"type":"%b","data":{"id":"o%d","x":"' % (type_.encode(), number)
                body += b"x" * (size - len(body) - 3) + b'"}}'
                signed = sign_delivery(body, secret=SECRET, webhook_id=f"msg_{number}")
                while (answer := await wire.post(signed)).status == 503:
                    await trio.sleep(0.05)  # its queue is full
                assert answer.status == 200, answer

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for first in range(4):
                nursery.start_soon(send, ids[first::4])


async def test_a_finished_delivery_leaves_its_id_behind_and_nothing_else(place):
    """With 8 KiB each, what was kept would be 35 MiB more."""
    with in_memory(place) as daemon:
        await deliver(daemon, range(1500), 8192)
        before = most(daemon)
        await deliver(daemon, range(2000, 6500), 8192)
        assert most(daemon) - before < 12 * MIB


async def test_unhandled_events_have_their_bound_in_memory(place):
    """400 MiB are parked, of which 256 MiB may be kept; the oldest give way."""
    with in_memory(place) as daemon:
        await deliver(daemon, range(10), MIB, "benefit.created")
        before = most(daemon)
        await deliver(daemon, range(10, 410), MIB, "benefit.created")
        assert most(daemon) - before < 256 * MIB + SLACK


def unread(daemon: Daemon) -> int:
    """How many bytes wait in the sockets of the daemon, unread."""
    port = f":{int(daemon.receiver.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[4].partition(":")[2], 16) for line in lines if line[1].endswith(port))


async def test_unfinished_bodies_of_strangers_have_a_budget_together(place):
    """400 connections, of two addresses, each with a body that lacks its last byte."""
    head = (
        b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nWebhook-Id: x\r\n\r\n" % MIB
    )
    with place.daemon("--app", "application:handlers") as daemon:
        await deliver(daemon, range(4), 1000)
        before = most(daemon)
        wires: list[Wire] = []

        async def begin(number: int) -> None:
            wire = await Wire.connect(daemon.receiver, f"127.0.0.{2 + number % 2}")
            wires.append(wire)
            with suppress(ConnectionError):  # it was refused
                await wire.send(head + bytes(MIB - 1))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(400):
                    nursery.start_soon(begin, number)
            await until(lambda: not unread(daemon))
        assert most(daemon) - before < 64 * MIB + SLACK
        # Others are served meanwhile, also those whose bodies come in parts.
        await deliver(daemon, range(4, 8), 300_000)
        for wire in wires:
            wire.__exit__()
