"""The latency of a FastAPI application's own route, alone and while handlers block.

    python benchmarks/beside.py [--rounds 5] [--seconds 2] [--rate 200]

Four applications run under uvicorn, each in its own process:

- one without deliveries
- one that verifies deliveries in its own route and handles them in the framework's threads
- one whose handlers block in our threads
- one whose handlers block Trio's loop, an error that must not affect the application

One after the other gets requests for ``/hello`` on one connection at fixed times; latency counts
from the scheduled time. All but the first also get deliveries whose handler blocks for 0.2 s. The
senders run in another process, so that their CPU time and their GIL are not measured, and they
start at different times.

It prints medians of the rounds, their ratio to the first application, and the additional CPU time
of the application's process for each delivery.
"""

import argparse
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from sdk_trio.testing import sign_delivery

SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"  # a test value
BLOCKED = 8
HANDLER_SECONDS = 0.2

ALONE = """
from fastapi import FastAPI

app = FastAPI()


@app.get("/hello")
async def hello():
    return {}
"""

BESIDE = """
import time
from fastapi import FastAPI
import sdk_trio, sdk_trio.asgi
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent)
%s blocks(event):
    time.sleep(0.2)


receiver = sdk_trio.asgi.Threaded(sdk_trio.load_settings(standalone=True), handlers)
app = FastAPI(lifespan=receiver.lifespan)
app.mount("/hooks", receiver)


@app.get("/hello")
async def hello():
    return {}
"""

PLAIN = """
import os, time
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from standardwebhooks import Webhook

app = FastAPI()
webhook = Webhook(os.environ["SDK__WEBHOOKS__SECRET"])


@app.post("/hooks/sdk")
async def hooks(request: Request):
    webhook.verify(await request.body(), dict(request.headers))
    await run_in_threadpool(time.sleep, 0.2)
    return {}


@app.get("/hello")
async def hello():
    return {}
"""

APPLICATIONS = {
    "alone": ALONE,
    "plain": PLAIN,
    "threads": BESIDE % "def",
    "blocked": BESIDE % "async def",
}


class Host:
    """One application under uvicorn."""

    def __init__(self, name: str, text: str, directory: Path) -> None:
        self.name = name
        directory.mkdir()
        (directory / "app.py").write_text(text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "SDK__WEBHOOKS__SECRET": SECRET,
            "SDK__WEBHOOKS__REQUIREHTTPS": "false",
            "SDK__WEBHOOKS__INLINETIMEOUTSECONDS": "60",
            "SDK__STORAGE__PATH": str(directory / "data"),
            "SDK__ADMIN__ENABLED": "false",
        }
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--no-access-log", "--log-level", "warning"], cwd=directory, env=environment
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def wait(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                connection = self.connect()
                connection.request("GET", "/hello")
                connection.getresponse().read()
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    @property
    def cpu(self) -> float:
        """Return the CPU seconds of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def delivered_to(self) -> Iterator[list[int]]:
        """Send deliveries from another process; after the block, the list has their number."""
        words = [sys.executable, __file__, "--deliver-to", str(self.port)]
        sender = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert sender.stdout is not None
        sender.stdout.readline()
        counted: list[int] = []
        try:
            yield counted
        finally:
            counted.append(int(sender.communicate()[0]))
        assert sender.returncode == 0

    def measure(self, seconds: float, rate: float) -> list[float]:
        """Return the latencies of a round, in seconds."""
        connection = self.connect()
        connection.connect()
        begun, latencies = time.perf_counter() + 0.1, []
        for number in range(int(seconds * rate)):
            due = begun + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.request("GET", "/hello")
            connection.getresponse().read()
            latencies.append(time.perf_counter() - due)
        return latencies


def deliver(port: int) -> None:
    """Deliver with several senders until standard input ends; print the number of 200s."""
    stop, counted = threading.Event(), list[int]()

    def send(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        time.sleep(number * HANDLER_SECONDS / BLOCKED)
        while not stop.is_set():
            signed = sign_delivery("order.paid", secret=SECRET)
            connection.request("POST", "/hooks/sdk", signed.body, signed.headers)
            answer = connection.getresponse()
            answer.read()
            counted.append(answer.status)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(BLOCKED)]
    for sender in senders:
        sender.start()
    time.sleep(2 * HANDLER_SECONDS)
    before = len(counted)
    print(flush=True)
    sys.stdin.read()
    print(len(counted) - before)
    stop.set()
    for sender in senders:
        sender.join()
    assert set(counted) == {200}, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--deliver-to", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.deliver_to is not None:
        deliver(arguments.deliver_to)
        return
    with tempfile.TemporaryDirectory() as place:
        hosts = [Host(name, text, Path(place) / name) for name, text in APPLICATIONS.items()]
        try:
            figures = measure(hosts, arguments)
        finally:
            for host in hosts:
                host.process.terminate()
            for host in hosts:
                host.process.wait()
    print(
        "| `/hello` | p50 ms | p99 ms | p50 to alone | p99 to alone (range) | deliveries | CPU ms |"
    )
    print("|---|---|---|---|---|---|---|")
    idle = statistics.median(each[3] for each in figures["alone"])
    for name, rounds in figures.items():
        p50, p99 = (statistics.median(each[i] for each in rounds) * 1000 for i in (0, 1))
        # Ratios within a round, in which the load of the machine was the same.
        pairs = list(zip(rounds, figures["alone"], strict=True))
        ratio50, ratios = (sorted(ours[i] / alone[i] for ours, alone in pairs) for i in (0, 1))
        # Ticks are 10 ms, so a few deliveries are not enough.
        costs = [(each[3] - idle) / each[2] * 1000 for each in rounds if each[2] > BLOCKED]
        print(
            f"| {name} | {p50:.2f} | {p99:.2f} | {statistics.median(ratio50):.2f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
            f"| {sum(each[2] for each in rounds):.0f} "
            f"| {statistics.median(costs) if costs else 0:.2f} |"
        )


Rounds = dict[str, list[tuple[float, float, float, float]]]


def measure(hosts: list[Host], arguments: argparse.Namespace) -> Rounds:
    """Return p50, p99, number of deliveries and CPU seconds of each round of each host."""
    for host in hosts:
        host.wait()
    rounds: Rounds = {host.name: [] for host in hosts}
    for number in range(arguments.rounds + 1):
        for host in hosts:
            with nullcontext([0]) if host.name == "alone" else host.delivered_to() as counted:
                before = host.cpu
                latencies = sorted(host.measure(arguments.seconds, arguments.rate))
                computed = host.cpu - before
            if number:  # the first round is the warm-up
                p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
                rounds[host.name].append((p50, p99, counted[0], computed))
    return rounds


if __name__ == "__main__":
    main()
