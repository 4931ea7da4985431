"""The latency of a FastAPI application's own route, alone and while handlers beside it block.

    python benchmarks/beside.py [--rounds 5] [--seconds 2] [--rate 200]

Three applications under uvicorn, each in a process of its own: one without a receiver, one whose
handlers wait in threads, and one whose handlers block Trio's loop (a fault, which must not be the
application's). In turn, each gets requests for ``/hello`` on a fixed schedule on one connection,
with the latency counted from the scheduled time; the two with a receiver get deliveries meanwhile
whose handlers block for 0.2 s. It prints medians of the rounds and their ratio to the first one.
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
from pathlib import Path

from sdk_trio.testing import sign_delivery

SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"  # a test value
BLOCKED = 8

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

APPLICATIONS = {"alone": ALONE, "threads": BESIDE % "def", "blocked": BESIDE % "async def"}


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

    def deliver(self, stop: threading.Event, counted: list[int]) -> None:
        connection = self.connect()
        while not stop.is_set():
            signed = sign_delivery("order.paid", secret=SECRET)
            connection.request("POST", "/hooks/sdk", signed.body, signed.headers)
            answer = connection.getresponse()
            answer.read()
            counted.append(answer.status)

    def measure(self, seconds: float, rate: float) -> list[float]:
        """The latencies of a round, in seconds."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=200.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        hosts = [Host(name, text, Path(place) / name) for name, text in APPLICATIONS.items()]
        try:
            figures = measure(hosts, arguments)
        finally:
            for host in hosts:
                host.process.terminate()
            for host in hosts:
                host.process.wait()
    print("| `/hello` | p50 ms | p99 ms | p50 to alone | p99 to alone (range) | deliveries |")
    print("|---|---|---|---|---|---|")
    for name, rounds in figures.items():
        p50, p99 = (statistics.median(each[i] for each in rounds) * 1000 for i in (0, 1))
        # Ratios within a round: its neighbours on the machine were the same.
        pairs = list(zip(rounds, figures["alone"], strict=True))
        ratio50, ratios = (sorted(ours[i] / alone[i] for ours, alone in pairs) for i in (0, 1))
        print(
            f"| {name} | {p50:.2f} | {p99:.2f} | {statistics.median(ratio50):.2f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
            f"| {sum(each[2] for each in rounds):.0f} |"
        )


Rounds = dict[str, list[tuple[float, float, float]]]


def measure(hosts: list[Host], arguments: argparse.Namespace) -> Rounds:
    """The p50, the p99 and the number of deliveries of each round of each host."""
    for host in hosts:
        host.wait()
    rounds: Rounds = {host.name: [] for host in hosts}
    for number in range(arguments.rounds + 1):
        for host in hosts:
            stop, counted = threading.Event(), list[int]()
            senders = [
                threading.Thread(target=host.deliver, args=(stop, counted))
                for _ in range(0 if host.name == "alone" else BLOCKED)
            ]
            for sender in senders:
                sender.start()
            latencies = sorted(host.measure(arguments.seconds, arguments.rate))
            stop.set()
            for sender in senders:
                sender.join()
            assert set(counted) <= {200}, counted
            if number:  # the first round warms up
                p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
                rounds[host.name].append((p50, p99, len(counted)))
    return rounds


if __name__ == "__main__":
    main()
