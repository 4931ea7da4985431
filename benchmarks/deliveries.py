"""Deliveries a second and CPU per delivery, beside a peer, in one interleaved run.

    python benchmarks/deliveries.py [--rounds 5] [--seconds 4] [--connections 32]

Every round runs every server once, in a rotated order; ratios are taken within a round, so that a
machine whose speed drifts does not change them. Server and load generator have a core each where
the machine has two. Absolute figures say little about another machine; the ratios do.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PATH = "/hooks/sdk"
PEER = "fastapi"

#: A server that uses less of its core than this was waiting for somebody else.
SATURATED = 0.85


def servers(peer_python: str) -> dict[str, list[str]]:
    """The command of each server, without its port."""
    ours = [sys.executable, str(HERE / "servers" / "receiver.py")]
    return {
        PEER: [peer_python, str(HERE / "servers" / "fastapi_peer.py"), "PORT"],
        "inline": [*ours, "PORT", "inline"],
        "durable": [*ours, "PORT", "durable"],
    }


def peer_environment() -> str:
    """Install the peers once, beside the benchmarks, and return their interpreter."""
    directory = HERE / ".venv"
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    if not stamp.exists():
        venv.create(directory, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-r"]
        subprocess.run([*command, str(HERE / "requirements.txt")], check=True)
        stamp.touch()
    return str(python)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[int, int]]:
    """Run a server on a free port; yield its port and process id."""
    port = free_port()
    process = subprocess.Popen(
        [str(port) if part == "PORT" else part for part in command],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        preexec_fn=lambda: pin(0),
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit(f"the server did not start: {command}") from None
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=40)


def measure(command: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Load one server once."""
    with serving(command) as (port, pid):
        arguments = {
            "host": "127.0.0.1",
            "port": port,
            "path": PATH,
            "connections": options.connections,
            "warm_up": 1.0,
            "seconds": options.seconds,
            "rate": options.rate,
        }
        generator = subprocess.Popen(
            [sys.executable, str(HERE / "load.py"), json.dumps(arguments)],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: pin(1),
        )
        samples = []
        while generator.poll() is None:
            samples.append((time.time(), cpu_seconds(pid)))
            time.sleep(0.1)
        result = json.loads(generator.communicate()[0])
    inside = [(at, cpu) for at, cpu in samples if result["began"] <= at <= result["ended"]]
    (first_at, first_cpu), (last_at, last_cpu) = inside[0], inside[-1]
    used = (last_cpu - first_cpu) / (last_at - first_at)
    rate = result["deliveries"] / result["seconds"]
    return {
        "rate": rate,
        "cpu_us": 1e6 * used / rate,
        "used": used,
        "p50_ms": result["p50_ms"],
        "p99_ms": result["p99_ms"],
        "errors": result["errors"],
    }


def spread(values: list[float], digits: int = 2) -> str:
    """Median and range of a list of figures."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def report(results: dict[str, list[dict[str, float]]]) -> str:
    """A table: every figure as median and range, ratios taken round by round."""
    lines = [
        "| server | deliveries/s | ratio to FastAPI | CPU us each | p50 ms | p99 ms | core used |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        ratios = [run["rate"] / peer["rate"] for run, peer in zip(runs, results[PEER], strict=True)]
        columns = [
            name,
            spread([run["rate"] for run in runs], 0),
            spread(ratios),
            spread([run["cpu_us"] for run in runs], 0),
            spread([run["p50_ms"] for run in runs]),
            spread([run["p99_ms"] for run in runs]),
            spread([run["used"] for run in runs]),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=int, default=15_000, help="prepared deliveries a second")
    options = parser.parse_args()
    commands = servers(peer_environment())
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    names = list(commands)
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            results[name].append(measure(commands[name], options))
    print(report(results))
    problems = [
        f"{name}: {run['errors']:.0f} answers were not 200"
        for name, runs in results.items()
        for run in runs
        if run["errors"]
    ]
    problems += [
        f"{name}: the server was not the bottleneck (used {run['used']:.2f} of its core)"
        for name, runs in results.items()
        for run in runs
        if run["used"] < SATURATED and name != "durable"
    ]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
