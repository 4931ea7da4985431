"""Runs one server with its processes, and reads from the system what it costs."""

import http.client
import json
import os
import shutil
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
from load import SECRET, body, requests
from peers import HERE, SERVERS, Server
from stores import Certificate

PATH = "/hooks/sdk"
START_SECONDS = 20.0
STOP_SECONDS = 40.0
WARM_UP_SECONDS = 1.0
DATABASE = "inbox.db"


@attrs.frozen
class Layout:
    """Which cores the server's processes share, and which one each generator has for itself."""

    servers: tuple[int, ...]
    generators: tuple[tuple[int, ...], ...]

    @property
    def crowded(self) -> bool:
        """Whether generators have to take part of the servers' cores."""
        return any(set(cores) & set(self.servers) for cores in self.generators)


def layout(processes: int) -> Layout:
    """Give every process and as many generators a core each, as far as the machine has them."""
    cores = sorted(os.sched_getaffinity(0))
    spare = cores[processes : 2 * processes]
    if not spare:
        return Layout(tuple(cores[:processes]), (tuple(cores),))
    return Layout(tuple(cores[:processes]), tuple((core,) for core in spare))


@attrs.define
class Process:
    """A running server; the seconds it took to its first 200, and its memory then."""

    server: Server
    port: int
    layout: Layout
    started: Sequence["subprocess.Popen[bytes]"]
    handled_files: Sequence[Path]
    certificate: Certificate | None
    start_ms: float = 0.0
    idle_mb: float = 0.0

    def cpu_seconds(self) -> float:
        """User and system time so far, all processes, threads and children included."""
        return sum(map(_cpu_seconds, self._members()))

    def memory_mb(self) -> float:
        """Resident memory, all processes and children included."""
        return sum(map(_resident_mb, self._members()))

    def handled(self) -> int:
        """How many events are done; 0 for a peer, whose answers say so."""
        return sum(struct.unpack("<Q", file.read_bytes())[0] for file in self.handled_files)

    @property
    def running(self) -> bool:
        """Whether a process of it has not ended."""
        return any(popen.poll() is None for popen in self.started)

    def stop(self) -> None:
        """Ask every process to end."""
        for popen in self.started:
            popen.terminate()

    def wait(self) -> None:
        """Wait until every process has ended."""
        for popen in self.started:
            popen.wait(timeout=STOP_SECONDS)

    def _members(self) -> list[int]:
        return [member for popen in self.started for member in _family(popen.pid)]


@contextmanager
def serving(server: Server, *, processes: int, certificate: Certificate) -> Iterator[Process]:
    """Run ``server`` on a free port and cores of its own until the end of the block."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = directory / "data"
        data.mkdir()
        if server.store is not None:
            shutil.copyfile(server.store, data / DATABASE)
            os.sync()
        # Processes that share a port have to find it bound; others bind it themselves.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        port = int(listener.getsockname()[1])
        copies = processes if server.inherits else 1
        if not server.inherits:
            listener.close()
        place = layout(processes)
        handled = [directory / f"handled{number}" for number in range(copies)]
        began = time.perf_counter()
        started = []
        for file in handled:
            file.write_bytes(bytes(8))
            environment = {
                **os.environ,
                "PYTHONPATH": f"{HERE}:{SERVERS}",
                "BENCHMARK_SECRET": SECRET,
                "BENCHMARK_HANDLED": str(file),
                "BENCHMARK_DATA": str(data),
                "BENCHMARK_PROCESSES": str(processes),
            }
            if server.tls:
                environment |= {
                    "BENCHMARK_CERTIFICATE": str(certificate.chain),
                    "BENCHMARK_KEY": str(certificate.key),
                }
            words = {"PORT": str(port), "WORKERS": str(processes)}
            if server.inherits:
                words["ADDRESS"] = f"fd:{listener.fileno()}"
            started.append(
                subprocess.Popen(
                    [words.get(part, part) for part in server.command],
                    env=environment,
                    pass_fds=[listener.fileno()] if server.inherits else [],
                    preexec_fn=lambda: os.sched_setaffinity(0, place.servers),
                )
            )
        if server.inherits:
            listener.close()
        trusted = certificate if server.tls else None
        process = Process(server, port, place, started, handled, trusted)
        try:
            _wait_for_answer(process)
            process.start_ms = 1000 * (time.perf_counter() - began)
            _wait_for_all(process, processes)
            process.idle_mb = process.memory_mb()
            yield process
        finally:
            process.stop()
            process.wait()


def _wait_for_answer(process: Process) -> None:
    """Deliver until the first 200."""
    deadline = time.monotonic() + START_SECONDS
    while not _delivered(process):
        if time.monotonic() > deadline or not process.running:
            raise SystemExit(f"{process.server.name} did not start: {process.server.command}")
        time.sleep(0.002)


def _wait_for_all(process: Process, processes: int) -> None:
    """Give the other processes the time to start; one of them has answered."""
    if processes > 1:
        time.sleep(3.0)
        _wait_for_answer(process)


def _delivered(process: Process) -> bool:
    (delivery,) = requests(1, body(), "127.0.0.1", PATH)
    try:
        with socket.create_connection(("127.0.0.1", process.port), timeout=5) as plain:
            connection: socket.socket = plain
            if process.certificate is not None:
                context = ssl.create_default_context(cafile=str(process.certificate.authority))
                connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
            with connection:
                connection.sendall(delivery)
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


@attrs.define
class _Generators:
    """Load generators that have begun together."""

    processes: Sequence["subprocess.Popen[str]"]
    results: Sequence[Path]

    @property
    def running(self) -> bool:
        return any(popen.poll() is None for popen in self.processes)

    def wait_until_begun(self) -> None:
        """Wait until every connection is open and has sent its first request."""
        self._hear()

    def measured(self) -> list[dict[str, float | list[int]]]:
        if any(popen.wait() for popen in self.processes):
            raise SystemExit("a load generator failed, see above")
        return [json.loads(result.read_text()) for result in self.results]

    def begin(self) -> None:
        """Let all of them begin, once each has prepared its deliveries."""
        self._hear()
        for popen in self.processes:
            assert popen.stdin is not None
            popen.stdin.write("go\n")
            popen.stdin.close()

    def _hear(self) -> None:
        for popen in self.processes:
            assert popen.stdout is not None
            popen.stdout.readline()


@contextmanager
def _generating(
    process: Process, *, connections: int, warm_up: float, seconds: float, count: int
) -> Iterator[_Generators]:
    cores = process.layout.generators
    certificate = process.certificate
    with tempfile.TemporaryDirectory() as directory:
        results = [Path(directory) / f"{number}" for number in range(len(cores))]
        started = []
        for mine, result in zip(cores, results, strict=True):
            arguments = {
                "host": "127.0.0.1",
                "port": process.port,
                "path": PATH,
                "connections": connections // len(cores),
                "warm_up": warm_up,
                "seconds": seconds,
                "count": count,
                "growing": process.server.growing_ids,
                "authority": None if certificate is None else str(certificate.authority),
                "spin": not process.layout.crowded,
                "result": str(result),
            }
            popen = subprocess.Popen(
                [sys.executable, str(HERE / "load.py"), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda mine=mine: os.sched_setaffinity(0, mine),
            )
            started.append(popen)
        generators = _Generators(started, results)
        try:
            generators.begin()
            yield generators
        finally:
            for popen in started:
                popen.kill()
                popen.wait()
                assert popen.stdout is not None
                popen.stdout.close()


def load(process: Process, *, connections: int, seconds: float, rate: int) -> dict[str, float]:
    """Load a running server once, and return what was measured."""
    samples = []
    with _generating(
        process,
        connections=connections,
        warm_up=WARM_UP_SECONDS,
        seconds=seconds,
        count=int(rate * (WARM_UP_SECONDS + seconds)),
    ) as generators:
        while generators.running:
            samples.append((time.time(), process.cpu_seconds(), process.handled()))
            time.sleep(0.1)
        results = generators.measured()
    latencies = sorted(latency for result in results for latency in result["latencies_us"])
    first, last = (max(r["began"] for r in results), min(r["ended"] for r in results))
    inside = [sample for sample in samples if first <= sample[0] <= last]
    (first_at, first_cpu, first_handled), (last_at, last_cpu, _) = inside[0], inside[-1]
    used = (last_cpu - first_cpu) / (last_at - first_at)
    answered = sum(len(result["latencies_us"]) / result["seconds"] for result in results)
    figures = {
        "rate": answered,
        "cpu_us": 1e6 * used / answered,
        "used": used / len(process.layout.servers),
        "crowded": process.layout.crowded,
        "p50_ms": latencies[len(latencies) // 2] / 1000,
        "p99_ms": latencies[len(latencies) * 99 // 100] / 1000,
        "errors": sum(result["errors"] + result["dropped"] for result in results),
        "generator_used": statistics.mean(result["generator_used"] for result in results),
        "loaded_mb": process.memory_mb(),
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


def drain(process: Process, *, connections: int, rate: int) -> dict[str, float]:
    """End a server in the middle of load: how long that takes, and what it leaves unanswered.

    A request counts as unanswered when its connection was closed, and no answer before had said
    that it would be. ``rate`` is more than it can answer in a second.
    """
    with _generating(
        process, connections=connections, warm_up=0.0, seconds=STOP_SECONDS, count=rate
    ) as generators:
        generators.wait_until_begun()
        time.sleep(0.3)
        told = time.perf_counter()
        process.stop()
        process.wait()
        drain_ms = 1000 * (time.perf_counter() - told)
        results = generators.measured()
    return {"drain_ms": drain_ms, "dropped": sum(result["dropped"] for result in results)}


def _wait_until_done(process: Process) -> tuple[int, float]:
    """Wait until the count stands still; return it, and since when it has been so."""
    handled, at = process.handled(), time.time()
    while time.time() - at < 0.3:
        time.sleep(0.02)
        now = process.handled()
        if now != handled:
            handled, at = now, time.time()
    return handled, at


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
