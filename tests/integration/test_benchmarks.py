"""The benchmark's own instruments: its clock hides no wait, and its loads end by themselves."""

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STALL_SECONDS = 0.5
STALLED_REQUEST = 20


@pytest.fixture
def load(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.delitem(sys.modules, "load", raising=False)
    return importlib.import_module("load")


class StallingServer:
    """Answers one request after the other at once, except one, before which it stalls.

    ``stalled_at`` is the Unix time at which it came to that one.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.stalled_at = 0.0
        self._count = 0
        self._lock = threading.Lock()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            while line := lines.readline():
                length = 0
                while line.strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                    line = lines.readline()
                lines.read(length)
                with self._lock:
                    self._count += 1
                    if self._count == STALLED_REQUEST:
                        self.stalled_at = time.time()
                        time.sleep(STALL_SECONDS)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


@contextmanager
def stalling_server() -> Iterator[StallingServer]:
    server = StallingServer()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        thread.join(PATIENCE_SECONDS)


def generate(**load: object) -> dict:
    """Run the load generator as the benchmark does, and return its measurements."""
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "load.py"), json.dumps({"path": "/", **load})],
        input="go\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    ready, found = ran.stdout.splitlines()
    assert ready == "ready"
    return json.loads(found)


def test_an_open_loop_counts_the_wait_of_what_could_not_be_sent(load):
    rate, seconds, seed = 200.0, 1.0, 7
    moments = load.schedule(rate, seconds, seed)
    with stalling_server() as server:
        found = generate(
            port=server.port,
            connections=2,
            warm_up=0.0,
            seconds=seconds,
            rate=rate,
            seed=seed,
            spin=False,
        )
    assert len(found["latencies_us"]) == len(moments)
    assert found["errors"] == found["dropped"] == found["unanswered"] == 0
    # Two connections can have two requests under way: timed from when they were sent, only these
    # two would be late. By the schedule everything is late that was due while the server stood.
    late = [
        at + latency / 1e6
        for at, latency in zip(found["scheduled_at"], found["latencies_us"], strict=True)
        if server.stalled_at <= at < server.stalled_at + STALL_SECONDS / 2
    ]
    assert len(late) > 2 * 2
    assert min(late) >= server.stalled_at + STALL_SECONDS - 0.01


def test_a_closed_loop_ends_with_its_time_or_with_its_deliveries():
    with stalling_server() as server:
        sent = {"port": server.port, "connections": 2, "warm_up": 0.0, "spin": False}
        few = generate(count=50, seconds=PATIENCE_SECONDS, **sent)
        short = generate(count=100_000, seconds=1.0, **sent)
    assert few["answered"] <= 50
    assert few["errors"] == short["errors"] == 0
    assert 0 < short["answered"] < 100_000


def test_the_generator_reads_the_cpu_time_of_another_process(load):
    command = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    with subprocess.Popen(
        [sys.executable, "-c", f"{command}\nprint(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        assert load.cpu_seconds(process.pid) >= 0.2


def test_the_benchmark_ends_and_leaves_nothing_behind(tmp_path):
    rows = ["start", "everyday", "finished", "backlog", "queries", "retention"]
    small = {"seconds": 0.1, "warm-up": 0.05, "finished": 400, "backlog": 200, "expired": 400}
    output = tmp_path / "figures.json"
    ran = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "bench.py"),
            *("--quick", "--without-peers", "--directory", str(tmp_path), "--output", str(output)),
            *(word for name, value in small.items() for word in (f"--{name}", str(value))),
            *("--rows", *rows),
        ],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    groups = json.loads(output.read_text())["groups"]
    assert list(groups) == rows
    assert "| 500 | **sdk_trio, default, inline** |" in ran.stdout
    for rate in ("100", "500", "2000"):
        for server in ("inline", "enqueued"):
            (found,) = groups["everyday"]["runs"][rate][server]
            assert found["count"] > 0
            assert found["cpu_us"] > 0
            assert found["errors"] == 0
    (processed,) = groups["backlog"]["runs"]["waiting"]["enqueued-open"]
    assert processed["left"] == 0
    assert processes_of(tmp_path) == []
    kept = sorted(place.name.split("-")[0] for place in next(tmp_path.glob("sdk-*")).iterdir())
    assert kept == ["expired", "finished", "waiting"]


def processes_of(directory: Path) -> list[str]:
    """Running processes whose environment or arguments name a directory."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and int(process.name) != os.getpid():
                said = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                if str(directory).encode() in said:
                    found.append(process.name)
    return found
