"""Measure throughput and cost of several processes at one address, compared with one.

    python benchmarks/processes.py [--processes 1 2 4] [--postgres] [--seconds 4] [--rounds 3]

Each round starts ``sdk_trio run`` with each number of processes and empty handlers, and sends
deliveries over 32 connections, one after the other on each. It prints, for inline and enqueued
events, deliveries a second and the CPU time of all processes for one delivery in microseconds:
medians, and CPU time and rate as ratios to the first number. The generator uses the same cores, so
its CPU time is subtracted: a rate is that of processes that have all of the cores, or a core each
if they are fewer. It needs an otherwise idle machine. With ``--postgres`` the store is a
separate server, whose CPU time is not counted. It ends by itself.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.deliveries import SECRET
from support.ports import free_port
from support.wire import Wire

from sdk_trio.testing import sign_delivery

APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderCreatedEvent)
async def inline(event):
    pass


@handlers.on(OrderPaidEvent, enqueue=True)
async def enqueued(event):
    pass
"""

CONNECTIONS = 32
TYPES = {"inline": "order.created", "enqueued": "order.paid"}


@contextmanager
def running(processes: int, dsn: str | None) -> Iterator[tuple[int, int]]:
    """Run the program; yield its port and process id."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        (Path(directory) / "app.py").write_text(APPLICATION)
        port = free_port()
        keys = {
            "Server:Bind": f"127.0.0.1:{port}",
            "Server:Processes": str(processes),
            "Admin:Enabled": "false",
            "Webhooks:RequireHttps": "false",
            "Webhooks:RateLimitPerMinute": "10000000",
            "Storage:Path": f"{directory}/data",
        }
        environment = {**os.environ, "SDK__WEBHOOKS__SECRET": SECRET}
        if dsn is not None:
            keys["Storage:Backend"] = "Postgres"
            environment["SDK_POSTGRES_DSN"] = dsn
        command = [sys.executable, "-m", "sdk_trio", "run", "--standalone", "--app", "app:handlers"]
        for key, value in keys.items():
            command += ["--set", f"Sdk:{key}={value}"]
        with (Path(directory) / "log").open("w") as log:
            program = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=log, stderr=log
            )
            try:
                yield port, program.pid
            finally:
                program.terminate()
                program.wait(60)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_of(int(child)) for child in children)


async def answering(port: int) -> None:
    """Wait until the program accepts connections."""
    with trio.fail_after(60):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                return
            except OSError:
                await trio.sleep(0.1)


async def load(port: int, kind: str, seconds: float) -> int:
    """Return how many deliveries were answered 200 in ``seconds``."""
    until = trio.current_time() + seconds
    taken = 0

    async def send() -> None:
        nonlocal taken
        with await Wire.connect(f"http://127.0.0.1:{port}") as wire:
            while trio.current_time() < until:
                answer = await wire.post(sign_delivery(TYPES[kind], secret=SECRET))
                taken += answer.status == 200

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(send)
    return taken


def share_of_cores(processes: int, generated: float, seconds: float) -> float:
    """Return the factor from the rate beside the generator to the rate without it."""
    cores = len(os.sched_getaffinity(0))
    used = min(processes, cores)
    return used * seconds / min(used * seconds, cores * seconds - generated)


async def measure(processes: int, dsn: str | None, seconds: float) -> dict[str, list[float]]:
    """Return deliveries a second and microseconds of CPU for each kind."""
    found = {}
    with running(processes, dsn) as (port, pid):
        await answering(port)
        await load(port, "inline", 1.0)
        for kind in TYPES:
            before = cpu_of(pid)
            generated = time.process_time()
            taken = await load(port, kind, seconds)
            rate = (
                taken
                / seconds
                * share_of_cores(processes, time.process_time() - generated, seconds)
            )
            found[kind] = [rate, (cpu_of(pid) - before) / taken * 1e6]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rounds: dict[tuple[int, str], list[list[float]]] = {}
    with ExitStack() as stack:
        server = None
        if given.postgres:
            from support.postgres import remove_server, running_server

            server = running_server()
            stack.callback(remove_server)
        for _ in range(given.rounds):
            for processes in given.processes:
                dsn = None if server is None else server.fresh()
                for kind, one in trio.run(measure, processes, dsn, given.seconds).items():
                    rounds.setdefault((processes, kind), []).append(one)
    for (processes, kind), found in rounds.items():
        beside = rounds[given.processes[0], kind]
        ratios = [one[1] / first[1] for one, first in zip(found, beside, strict=True)]
        gained = statistics.median(
            one[0] / first[0] for one, first in zip(found, beside, strict=True)
        )
        rate, cpu = (statistics.median(each) for each in zip(*found, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(
            f"{processes} {kind}: {rate:.0f}/s, {cpu:.0f} us; "
            f"to the first: CPU {spread}, rate {gained:.2f}"
        )


if __name__ == "__main__":
    main()
