"""Counts the instructions, bytecode steps and system calls of one delivery.

No other load changes them.

    python benchmarks/counted.py [SERVER[:fresh] ...] [--deliveries 512] [--keep DIRECTORY]

A server handles deliveries one after the other: each is sent when all threads of the server sleep
again. Instructions are counted by callgrind, and system calls by strace, each in a run of its own.
The start and the first deliveries do not count, and neither does what timers do meanwhile: it is
measured without deliveries and subtracted. ``:fresh`` opens a connection for each delivery.
Steps are instructions of Python's bytecode, and their median is printed.

With ``--keep``, the profiles of callgrind stay in a directory, for ``callgrind_annotate``.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import attrs
from load import body, read_count, requests
from peers import DURABLE, ENQUEUED, FASTAPI, FLOOR, INLINE, Server, our_servers, peer_servers
from serving import PATH, Process, serving

from sdk_trio.storage.engines.files import SETTLED_SECONDS

#: The measured servers; FRESH: with a connection for each delivery.
FRESH = ":fresh"
KEPT = (INLINE, ENQUEUED, "memory", "minimal", FLOOR, FASTAPI, DURABLE)
WAYS = (*KEPT, *(name + FRESH for name in KEPT))

WARM_UP = 64
#: The seconds without deliveries in which the work of timers is measured.
QUIET_SECONDS = 3.0
#: The seconds in which a server under valgrind should answer or sleep again.
PATIENCE = 120.0
#: The readings, and the seconds between them, in which every thread has to sleep.
READINGS, PAUSE = 4, 0.0005


@attrs.frozen
class Counted:
    """Counts of one delivery: user instructions, bytecode steps, system calls, these by name."""

    instructions: float
    steps: float
    calls: float
    by_name: dict[str, float]


class Sender:
    """Sends deliveries one after the other, over one connection or a fresh one for each."""

    def __init__(self, process: Process, *, fresh: bool) -> None:
        self._process = process
        self._fresh = fresh
        self._body = body()
        self._connection: socket.socket | None = None

    def send(self, count: int, then: Callable[[], object] = lambda: None) -> None:
        """Send deliveries, and after each, when the server sleeps again, call ``then``."""
        for _ in range(count):
            if self._connection is None:
                address = ("127.0.0.1", self._process.port)
                self._connection = socket.create_connection(address, timeout=PATIENCE)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Signed now: on a busy machine the last delivery is sent minutes after the first.
            (signed,) = requests(1, self._body, f"127.0.0.1:{self._process.port}", PATH)
            self._connection.sendall(signed)
            answer = http.client.HTTPResponse(self._connection)
            answer.begin()
            answer.read()
            if answer.status != 200:
                raise SystemExit(f"{self._process.server.name} answered {answer.status}")
            if self._fresh:
                self.close()
            wait_until_asleep(self._process.pid)
            then()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def wait_until_asleep(pid: int) -> None:
    """Wait until every thread of a process sleeps, and waits for no disk and no tracer."""
    deadline = time.monotonic() + PATIENCE
    quiet = 0
    while quiet < READINGS:
        if time.monotonic() > deadline:
            raise SystemExit(f"process {pid} never slept")
        time.sleep(PAUSE)
        quiet = quiet + 1 if all(state == "S" for state in _states(pid)) else 0


def _states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield (task / "stat").read_text().rpartition(") ")[2][0]


def instructions(
    server: Server, deliveries: int, directory: Path, *, fresh: bool, keep: Path | None = None
) -> float:
    """Count the user instructions of one delivery with callgrind."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        profile = Path(place) / "profile"
        command = ("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no")
        under = (*command, f"--callgrind-out-file={profile}")
        with serving(server, directory=directory, under=under) as process:
            sender = Sender(process, fresh=fresh)
            _control(process, "--instr=on")
            sender.send(WARM_UP)
            _slow_down(process)
            _control(process, "--zero")
            begun = time.monotonic()
            sender.send(deliveries)
            seconds = time.monotonic() - begun
            _control(process, "--dump")
            time.sleep(QUIET_SECONDS)
            _control(process, "--dump")
            sender.close()
            of_all, of_timers = (_total(Path(f"{profile}.{number}")) for number in (1, 2))
        if keep is not None:
            name = f"{server.name}{'-fresh' if fresh else ''}.callgrind"
            shutil.copyfile(f"{profile}.1", keep / name)
    return (of_all - of_timers * seconds / QUIET_SECONDS) / deliveries


def _slow_down(process: Process) -> None:
    """Wait for the work of the start, and slow Trio's clock.

    For some seconds after the start, each commit checks the names of the store's files.
    """
    process.settle()
    time.sleep(SETTLED_SECONDS)
    os.kill(process.pid, signal.SIGUSR2)
    wait_until_asleep(process.pid)


def _control(process: Process, what: str) -> None:
    subprocess.run(["callgrind_control", what, str(process.pid)], check=True, capture_output=True)


def _total(profile: Path) -> int:
    for line in profile.read_text().splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise SystemExit(f"{profile} has no total")


def system_calls(
    server: Server, deliveries: int, directory: Path, *, fresh: bool
) -> dict[str, float]:
    """Count the system calls of one delivery with strace, by name."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        trace = Path(place) / "trace"
        under = ("strace", "-D", "-f", "-qq", "-ttt", "-e", "signal=none", "-o", str(trace))
        with serving(server, directory=directory, under=under) as process:
            sender = Sender(process, fresh=fresh)
            sender.send(WARM_UP)
            _slow_down(process)
            moments = [time.time()]
            sender.send(deliveries)
            moments.append(time.time())
            time.sleep(QUIET_SECONDS)
            moments.append(time.time())
            sender.close()
        of_all, of_timers = (_names(trace, begin, end) for begin, end in pairwise(moments))
    share = (moments[1] - moments[0]) / QUIET_SECONDS
    found = {name: n - share * of_timers.get(name, 0) for name, n in of_all.items()}
    return {name: n / deliveries for name, n in sorted(found.items(), key=lambda one: -one[1])}


def _names(trace: Path, begin: float, end: float) -> dict[str, int]:
    """Count the calls by name that began between two moments."""
    found: dict[str, int] = {}
    for line in trace.read_text(errors="replace").splitlines():
        _, moment, call = line.split(None, 2)
        name, bracket, _ = call.partition("(")
        if bracket and not call.startswith("<...") and begin <= float(moment) < end:
            found[name] = found.get(name, 0) + 1
    return found


def bytecode_steps(server: Server, deliveries: int, directory: Path, *, fresh: bool) -> float:
    """Count the steps of Python's bytecode of one delivery; return the median."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        counter = Path(place) / "steps"
        with serving(server, directory=directory, steps=counter) as process:
            sender = Sender(process, fresh=fresh)
            sender.send(WARM_UP)
            _slow_down(process)
            sender.send(1)
            readings = [read_count(str(counter))]
            sender.send(deliveries, lambda: readings.append(read_count(str(counter))))
            sender.close()
    return statistics.median(after - before for before, after in pairwise(readings))


def count(
    way: str, servers: dict[str, Server], deliveries: int, directory: Path, keep: Path | None = None
) -> Counted:
    """Count one way: the name of a server, and ``:fresh`` for fresh connections."""
    server, fresh = servers[way.removesuffix(FRESH)], way.endswith(FRESH)
    calls = system_calls(server, deliveries, directory, fresh=fresh)
    steps = bytecode_steps(server, deliveries, directory, fresh=fresh)
    counted = instructions(server, deliveries, directory, fresh=fresh, keep=keep)
    return Counted(counted, steps, sum(calls.values()), calls)


def _cheap(way: str, servers: dict[str, Server], options: argparse.Namespace) -> dict[str, object]:
    """Count what needs no valgrind."""
    server, fresh = servers[way.removesuffix(FRESH)], way.endswith(FRESH)
    counted = options.deliveries, options.directory
    return {
        "calls": system_calls(server, *counted, fresh=fresh),
        "steps": bytecode_steps(server, *counted, fresh=fresh),
    }


def main() -> int:
    """Print the counts of the named ways."""
    options = _parser().parse_args()
    servers = our_servers()
    if any(way.startswith("fastapi") for way in options.ways):
        servers |= peer_servers()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    if options.cheap:
        print(json.dumps({way: _cheap(way, servers, options) for way in options.ways}))
        return 0
    print(f"{'':24} instructions  steps  system calls")
    for way in options.ways:
        found = count(way, servers, options.deliveries, options.directory, options.keep)
        names = " ".join(f"{k} {n:.1f}" for k, n in found.by_name.items() if n >= 0.05)
        counts = f"{found.instructions:12.0f} {found.steps:6.0f}  {found.calls:5.1f}"
        print(f"{way:24} {counts}: {names}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("ways", nargs="*", metavar="SERVER[:fresh]", default=WAYS)
    made.add_argument("--deliveries", type=int, default=512)
    made.add_argument("--cheap", action="store_true", help="all but instructions, as JSON")
    made.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    made.add_argument("--keep", type=Path, help="a directory for the profiles of callgrind")
    return made


if __name__ == "__main__":
    sys.exit(main())
