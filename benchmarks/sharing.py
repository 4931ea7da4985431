"""Measure what the sharing of work between hosts costs a host that has all of the work.

    python benchmarks/sharing.py [--sqlite] [--rounds 6] [--events 1500]

Each round starts one process for each mode, and the next round begins with another mode. The
process accepts events with 64 tasks and handles them with an empty handler, on a store of its own:

- ``off``: without the part that shares,
- ``on``: as it is, while no other host has asked for work,
- ``wanted``: another host has asked for work and takes none. The process then leases only as many
  events as it has free workers for, and the others wait in the store.

It prints the CPU time of the process for one event in microseconds and the events a second as
medians, and both as medians of the ratios to ``off`` of the same round. The store is a PostgreSQL
server, whose CPU time is not counted, or with ``--sqlite`` a file. It ends by itself: six rounds
take less than three minutes on an idle machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from policies_torture import database
from support.deliveries import Bench, arrival
from support.policy_host import open_store

from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent
from sdk_trio.webhooks import queue

MODES = ("off", "on", "wanted")
SENDERS = 64
WARM_UP = 256

#: The seconds for which the other host asks: longer than any run.
ASKED_SECONDS = 600.0


async def is_awaited(mode: str, inbox: Any) -> bool:
    """Return whether the request of the other host is still missing."""
    return mode == "wanted" and not await inbox.is_work_wanted(now=time.time())


async def measure(mode: str, store: str, events: int) -> None:
    """Accept and handle events; print the CPU seconds and the seconds."""
    handled, awaited = 0, 0
    are_handled = trio.Event()
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True)
    async def count(event: Any) -> None:
        nonlocal handled
        await trio.lowlevel.checkpoint()
        handled += 1
        if handled == awaited:
            are_handled.set()

    if mode == "off":
        queue.is_shared = lambda settings: False  # type: ignore[assignment]
    inbox, other = await open_store(store, f"one-{mode}"), await open_store(store, "two")
    bench = Bench.of(
        handlers,
        inbox,
        clock=time.time,
        Storage__Backend="Postgres" if "dbname=" in store else "Sqlite",
        Server__Processes=2,
        Webhooks__Queue__Capacity=4096,
    )

    async def ask() -> None:
        """Ask for work as another host; the store notes it only while this one has some left."""
        while not await other.is_work_wanted(now=time.time()):
            await other.ask_for_work(seconds=ASKED_SECONDS, now=time.time())
            await trio.sleep(0.01)

    async def send(first: int, end: int) -> None:
        for number in range(first, end, SENDERS):
            brought = arrival(webhook_id=f"{mode}_{number}_{os.getpid()}", now=time.time())
            answer = await bench.queue.accept(brought)
            if answer.status != 200:
                raise SystemExit(f"an event was answered {answer.status}")

    async def handle(first: int, end: int) -> None:
        nonlocal awaited, are_handled
        awaited, are_handled = end, trio.Event()
        async with trio.open_nursery() as senders:
            for sender in range(SENDERS):
                senders.start_soon(send, first + sender, end)
        await are_handled.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        if mode == "wanted":
            nursery.start_soon(ask)
        begun = 0
        while begun < WARM_UP or await is_awaited(mode, inbox):
            await handle(begun, begun + SENDERS)
            begun += SENDERS
        cpu, since = time.process_time(), time.perf_counter()
        await handle(begun, begun + events)
        spent = time.process_time() - cpu, time.perf_counter() - since
        if await inbox.is_work_wanted(now=time.time()) is not (mode == "wanted"):
            raise SystemExit(f"the mode {mode} was not in force")
        bench.queue.close()
    await inbox.close()
    await other.close()
    sys.stdout.write(f"{spent[0]} {spent[1]}\n")


def run_child(mode: str, store: str, events: int) -> tuple[float, float]:
    """Return the CPU seconds and the seconds of a process in this mode."""
    command = [sys.executable, __file__, "--child", mode, store, "--events", str(events)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    cpu, seconds = map(float, done.stdout.split())
    return cpu, seconds


def main() -> None:
    """Run the rounds and print the medians, or be one of their processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--events", type=int, default=1500)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        trio.run(measure, *given.child, given.events)
        return
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for number in range(given.rounds):
        first = number % len(MODES)
        for mode in (*MODES[first:], *MODES[:first]):
            with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
                file = str(Path(directory) / "inbox.db")
                with nullcontext(file) if given.sqlite else database() as store:
                    found[mode].append(run_child(mode, store, given.events))
    for mode, rows in found.items():
        pairs = list(zip(rows, found["off"], strict=True))
        cpu = statistics.median(row[0] for row in rows) / given.events * 1e6
        rate = given.events / statistics.median(row[1] for row in rows)
        ratios = [statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]
        sys.stdout.write(
            f"{mode:7} {cpu:7.0f} us CPU an event ({ratios[0]:.3f}), "
            f"{rate:7.0f} events a second ({1 / ratios[1]:.3f})\n"
        )


if __name__ == "__main__":
    main()
