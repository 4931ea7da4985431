"""Runs one server as a process of its own, and reads from the system what it costs."""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from load import SECRET, body, requests
from peers import HERE, SERVERS, Server

PATH = "/hooks/sdk"
START_SECONDS = 20.0
STOP_SECONDS = 40.0


@attrs.define
class Process:
    """A running server; the seconds it took to its first 200, and its memory then."""

    server: Server
    port: int
    pid: int
    handled_file: Path
    start_ms: float = 0.0
    idle_mb: float = 0.0
    stop_ms: float = 0.0

    def cpu_seconds(self) -> float:
        """User and system time so far, all threads and children included."""
        return sum(map(_cpu_seconds, _family(self.pid)))

    def memory_mb(self) -> float:
        """Resident memory, children included."""
        return sum(map(_resident_mb, _family(self.pid)))

    def handled(self) -> int:
        """How many events are done; 0 for a peer, whose answers say so."""
        count: int = struct.unpack("<Q", self.handled_file.read_bytes())[0]
        return count


@contextmanager
def serving(server: Server) -> Iterator[Process]:
    """Run ``server`` on a free port and core 0 until the end of the block."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as directory:
        handled = Path(directory) / "handled"
        handled.write_bytes(bytes(8))
        began = time.perf_counter()
        popen = subprocess.Popen(
            [str(port) if part == "PORT" else part for part in server.command],
            env={
                **os.environ,
                "PYTHONPATH": f"{HERE}:{SERVERS}",
                "BENCHMARK_SECRET": SECRET,
                "BENCHMARK_HANDLED": str(handled),
            },
            preexec_fn=lambda: pin(0),
        )
        process = Process(server, port, popen.pid, handled)
        try:
            _wait_for_answer(process, popen)
            process.start_ms = 1000 * (time.perf_counter() - began)
            process.idle_mb = process.memory_mb()
            yield process
        finally:
            told = time.perf_counter()
            popen.terminate()
            popen.wait(timeout=STOP_SECONDS)
            process.stop_ms = 1000 * (time.perf_counter() - told)


def _wait_for_answer(process: Process, popen: "subprocess.Popen[bytes]") -> None:
    """Deliver until the first 200."""
    deadline = time.monotonic() + START_SECONDS
    (delivery,) = requests(1, body(), "127.0.0.1", PATH, f"start{time.time_ns():x}_")
    while True:
        try:
            with socket.create_connection(("127.0.0.1", process.port), timeout=5) as connection:
                connection.sendall(delivery)
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                if answer.status == 200:
                    return
        except OSError:
            pass
        if time.monotonic() > deadline or popen.poll() is not None:
            raise SystemExit(f"{process.server.name} did not start: {process.server.command}")
        time.sleep(0.002)


def load(process: Process, *, connections: int, seconds: float, rate: int) -> dict[str, float]:
    """Load a running server once, from core 1, and return what was measured."""
    arguments = {
        "host": "127.0.0.1",
        "port": process.port,
        "path": PATH,
        "connections": connections,
        "warm_up": 1.0,
        "seconds": seconds,
        "rate": rate,
    }
    generator = subprocess.Popen(
        [sys.executable, str(HERE / "load.py"), json.dumps(arguments)],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: pin(1),
    )
    samples = []
    while generator.poll() is None:
        samples.append((time.time(), process.cpu_seconds(), process.handled()))
        time.sleep(0.1)
    result = json.loads(generator.communicate()[0])
    inside = [sample for sample in samples if result["began"] <= sample[0] <= result["ended"]]
    (first_at, first_cpu, first_handled), (last_at, last_cpu, _) = inside[0], inside[-1]
    used = (last_cpu - first_cpu) / (last_at - first_at)
    answered = result["deliveries"] / result["seconds"]
    figures = {
        "rate": answered,
        "cpu_us": 1e6 * used / answered,
        "used": used,
        "p50_ms": result["p50_ms"],
        "p99_ms": result["p99_ms"],
        "errors": result["errors"],
        "generator_used": result["generator_used"],
        "peak_mb": process.memory_mb(),
        "start_ms": process.start_ms,
        "idle_mb": process.idle_mb,
    }
    if process.server.durable:
        handled, at = _wait_until_done(process)
        figures["done_rate"] = (handled - first_handled) / (at - first_at)
        figures["done_cpu_us"] = (
            1e6 * (process.cpu_seconds() - first_cpu) / max(1, handled - first_handled)
        )
    return figures


def _wait_until_done(process: Process) -> tuple[int, float]:
    """Wait until the count stands still; return it, and since when it has been so."""
    handled, at = process.handled(), time.time()
    while time.time() - at < 0.3:
        time.sleep(0.02)
        now = process.handled()
        if now != handled:
            handled, at = now, time.time()
    return handled, at


def pin(core: int) -> None:
    """Bind this process to one of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _family(pid: int) -> list[int]:
    """The process and its children, which is where granian's worker is."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in _family(int(child)))]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
