"""The groups of rows that ``bench.py`` measures: which servers, which loads, which figures.

A group includes everything that its rows are compared with, measured in the same rounds. In each
round every server runs once, in a rotated order. Ratios are computed within a round, so a change of
the machine's speed does not affect them.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
import counted as work
from load import Measured
from peers import DURABLE, ENQUEUED, FASTAPI, FLOOR, HERE, INLINE, Server
from serving import DONE_SECONDS, Process, copied, generating, load_of, measured, send, serving
from stores import Certificate, expired_store, finished_store, waiting_store

#: Figures of one server in one round, by name.
Figures = dict[str, float | list[float]]
#: Figures of every round, by case and server.
Runs = dict[str, dict[str, list[Figures]]]

CONNECTIONS = 32


@attrs.frozen
class Scale:
    """The amount of measurements."""

    rounds: int
    warm_up: float
    seconds: float
    finished: int
    backlog: int
    expired: int
    some: int
    counted: int
    rates: tuple[int, ...] = (100, 500, 2000)
    ways: tuple[str, ...] = work.WAYS


WHOLE = Scale(
    rounds=5,
    warm_up=0.8,
    seconds=2.2,
    finished=1_000_000,
    backlog=30_000,
    expired=100_000,
    some=50_000,
    counted=256,
)
QUICK = Scale(
    rounds=1,
    warm_up=0.2,
    seconds=0.7,
    finished=30_000,
    backlog=3_000,
    expired=20_000,
    some=5_000,
    counted=32,
    ways=(INLINE, INLINE + work.FRESH),
)


@attrs.frozen
class Bench:
    """Servers by name, the directory of files, and the amount of measurements."""

    servers: Mapping[str, Server]
    directory: Path
    certificate: Certificate
    scale: Scale
    say: Callable[[str], None]

    def rounds(self, names: Sequence[str], most: int = 99) -> Iterator[tuple[int, Server]]:
        """Yield every participating server once a round, in a rotated order."""
        chosen = [self.servers[name] for name in names if name in self.servers]
        for number in range(min(most, self.scale.rounds)):
            turn = number % max(1, len(chosen))
            for server in chosen[turn:] + chosen[:turn]:
                self.say(f"round {number + 1}: {server.name}")
                yield number, server

    def serving(self, server: Server, data: Path | None = None):
        """Run a server; see :func:`serving.serving`."""
        return serving(server, directory=self.directory, data=data, certificate=self.certificate)


def everyday(bench: Bench) -> Runs:
    """Measure the default configuration at moderate loads, by the rate of arrivals."""
    runs: Runs = {str(rate): {} for rate in bench.scale.rates}
    for number, server in bench.rounds((INLINE, ENQUEUED, FASTAPI, DURABLE, FLOOR)):
        with bench.serving(server) as process:
            for rate in bench.scale.rates:
                process.settle()
                # Few arrivals need more time for a meaningful slowest one.
                seconds = bench.scale.seconds * (1.6 if rate < 200 else 1)
                sent = {"connections": CONNECTIONS, "warm_up": bench.scale.warm_up}
                found = send(process, rate=rate, seed=number, seconds=seconds, **sent)
                runs[str(rate)].setdefault(server.name, []).append(latencies(found))
    return runs


def fresh(bench: Bench) -> Runs:
    """Measure 500 deliveries a second, each over a connection of its own."""
    runs: Runs = {"500": {}}
    for number, server in bench.rounds((INLINE, ENQUEUED, FASTAPI, DURABLE, FLOOR)):
        with bench.serving(server) as process:
            process.settle()
            found = at_500(bench, process, number, fresh=True)
        runs["500"].setdefault(server.name, []).append(found)
    return runs


def history(bench: Bench) -> Runs:
    """Measure 500 deliveries a second with finished events in the store, beside an empty one."""
    scale = bench.scale
    counts = {"empty": 0, "some": scale.some, "many": scale.finished}
    stores = {case: finished_store(bench.directory, n) for case, n in counts.items() if n}
    runs: Runs = {case: {} for case in counts}
    server = bench.servers[INLINE]
    with ExitStack() as stack:
        copies = {
            case: stack.enter_context(copied(store, bench.directory))
            for case, store in stores.items()
        }
        for number in range(min(4, scale.rounds)):
            turn = number % len(counts)
            for case in [*counts][turn:] + [*counts][:turn]:
                bench.say(f"round {number + 1}: {case}")
                with bench.serving(server, copies.get(case)) as process:
                    process.settle()
                    found = at_500(bench, process, number)
                runs[case].setdefault(server.name, []).append(found)
    return runs


def after(bench: Bench) -> Runs:
    """Measure 500 deliveries a second before full load, one second after it, and after a rest."""
    runs: Runs = {"before": {}, "after": {}, "rested": {}}
    loaded = {"connections": CONNECTIONS, "warm_up": 0.0, "seconds": 3.0}
    for number, server in bench.rounds((INLINE, DURABLE), most=3):
        with bench.serving(server) as process:
            process.settle()
            for case in runs:
                if case == "after":
                    send(process, count=3 * server.most, **loaded)
                    time.sleep(1.0)
                elif case == "rested":
                    time.sleep(10.0)
                    process.settle()
                found = at_500(bench, process, number)
                runs[case].setdefault(server.name, []).append(found)
    return runs


def counted(bench: Bench) -> Runs:
    """Count the work of one delivery; one round, because counts repeat."""
    runs: Runs = {"kept": {}, "fresh": {}}
    for way in bench.scale.ways:
        name, _, fresh = way.partition(":")
        if name in bench.servers:
            bench.say(f"counting {way}")
            found = work.count(way, bench.servers, bench.scale.counted, bench.directory)
            figures: Figures = {"count": bench.scale.counted}
            figures |= {
                "instructions": found.instructions,
                "steps": found.steps,
                "calls": found.calls,
            }
            runs[fresh or "kept"][name] = [figures]
    return runs


def full(bench: Bench) -> Runs:
    """Measure the default configuration at full load."""
    return _closed(bench, (INLINE, "enqueued-open", FASTAPI, DURABLE))


def limit(bench: Bench) -> Runs:
    """Measure a store in memory, compared with a peer without a store and a minimal server."""
    return _closed(bench, ("memory", FASTAPI, "minimal"), most=4)


def log(bench: Bench) -> Runs:
    """Measure one log line for each delivery, compared with none."""
    return _closed(bench, (INLINE, "inline-silent", "memory-info", "memory"), most=3)


def tls(bench: Bench) -> Runs:
    """Measure the same load with and without TLS."""
    return _closed(bench, ("memory", "memory-tls", "fastapi-tls"), most=2)


def finished(bench: Bench) -> Runs:
    """Measure a store with finished events, compared with an empty one."""
    stored = finished_store(bench.directory, bench.scale.finished)
    runs: Runs = {"empty": {}, "full": {}}
    server = bench.servers["enqueued-open"]
    with copied(stored, bench.directory) as data:
        for number in range(min(4, bench.scale.rounds)):
            for case in ("empty", "full") if number % 2 == 0 else ("full", "empty"):
                bench.say(f"round {number + 1}: {case}")
                with bench.serving(server, data if case == "full" else None) as process:
                    process.settle()
                    found = load_closed(bench, process)
                runs[case].setdefault(server.name, []).append(found)
    return runs


def backlog(bench: Bench) -> Runs:
    """Measure the CPU time of an event from a backlog, compared with a new one."""
    stored = waiting_store(bench.directory, bench.scale.backlog)
    runs: Runs = {"waiting": {}, "fresh": {}}
    server = bench.servers["enqueued-open"]
    for number in range(min(3, bench.scale.rounds)):
        bench.say(f"round {number + 1}: fresh")
        with bench.serving(server) as process:
            process.settle()
            runs["fresh"].setdefault(server.name, []).append(load_closed(bench, process))
        bench.say(f"round {number + 1}: waiting")
        with copied(stored, bench.directory) as data, bench.serving(server, data) as process:
            runs["waiting"].setdefault(server.name, []).append(_process_backlog(bench, process))
    return runs


def retention(bench: Bench) -> Runs:
    """Measure latencies while the first pass of the retention removes expired events."""
    stored = expired_store(bench.directory, bench.scale.expired)
    runs: Runs = {"during": {}, "after": {}}
    server = bench.servers[ENQUEUED]
    seconds = 2 * bench.scale.seconds
    sent = {"rate": 500, "connections": CONNECTIONS, "seconds": seconds, "warm_up": 0.1}
    for number in range(min(3, bench.scale.rounds)):
        bench.say(f"round {number + 1}: retention")
        with copied(stored, bench.directory) as data, bench.serving(server, data) as process:
            begun = time.time()
            with generating(load_of(process, seed=number, **sent)) as generator:
                purged_at = _purged_at(process)
                found = measured(generator)
            process.settle()
            during = latencies(found, until=purged_at) | {"pass_seconds": purged_at - begun}
            runs["during"].setdefault(server.name, []).append(during)
            after = latencies(send(process, seed=number, **sent))
            runs["after"].setdefault(server.name, []).append(after)
    return runs


def queries(bench: Bench) -> Runs:
    """Measure the queries of ``events list`` and of the metrics on a store of finished events."""
    stored = finished_store(bench.directory, bench.scale.finished)
    bench.say("questions")
    # They do not write, so the store needs no copy.
    command = [sys.executable, str(HERE / "queries.py"), str(stored.parent)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    taken = json.loads(ran.stdout).items()
    return {name: {"store": [{"ms": one} for one in found]} for name, found in taken}


def start(bench: Bench) -> Runs:
    """Measure the time from exec to the first 200, and the memory of an idle server."""
    runs: Runs = {"all": {}}
    for _, server in bench.rounds((INLINE, FASTAPI, DURABLE)):
        with bench.serving(server) as process:
            used = process.settle()
            found: Figures = {
                "start_ms": process.start_ms,
                "start_cpu_ms": 1000 * used,
                "idle_mb": process.memory_mb(),
            }
        runs["all"].setdefault(server.name, []).append(found)
    return runs


GROUPS: Mapping[str, Callable[[Bench], Runs]] = {
    "everyday": everyday,
    "fresh": fresh,
    "history": history,
    "after": after,
    "counted": counted,
    "full": full,
    "start": start,
    "limit": limit,
    "log": log,
    "finished": finished,
    "backlog": backlog,
    "queries": queries,
    "retention": retention,
    "tls": tls,
}


def at_500(bench: Bench, process: Process, seed: int, *, fresh: bool = False) -> Figures:
    sent = {"warm_up": bench.scale.warm_up, "seconds": bench.scale.seconds, "fresh": fresh}
    return latencies(send(process, rate=500, seed=seed, connections=CONNECTIONS, **sent))


def _closed(bench: Bench, names: Sequence[str], most: int = 99) -> Runs:
    runs: Runs = {"all": {}}
    for _, server in bench.rounds(names, most):
        with bench.serving(server) as process:
            process.settle()
            runs["all"].setdefault(server.name, []).append(load_closed(bench, process))
    return runs


def load_closed(bench: Bench, process: Process) -> Figures:
    """Load a server fully; measure until the last response and the last end of an event."""
    scale = bench.scale
    found = send(
        process,
        connections=CONNECTIONS,
        warm_up=scale.warm_up,
        seconds=scale.seconds,
        count=int(process.server.most * (scale.warm_up + scale.seconds)),
    )
    figures = latencies(found)
    del figures["slowest_ms"]
    figures |= {
        "rate": len(found.latencies_us) / found.seconds,
        "used": found.cpu_seconds / found.seconds,
        "loaded_mb": process.memory_mb(),
    }
    if process.server.queues:
        handled, at = _wait_until_done(process)
        count = max(1, handled - found.handled_at_begin)
        used = process.settle() - found.cpu_at_begin
        figures |= {"done_rate": count / (at - found.began), "done_cpu_us": 1e6 * used / count}
    return figures


def _wait_until_done(process: Process) -> tuple[int, float]:
    """Wait until the count does not change; return it, and the time since then."""
    handled, at = process.handled(), time.time()
    deadline = at + DONE_SECONDS
    while at < deadline and time.time() - at < 0.3:
        time.sleep(0.02)
        now = process.handled()
        if now != handled:
            handled, at = now, time.time()
    return handled, at


def _process_backlog(bench: Bench, process: Process) -> Figures:
    """Let a server handle the events in its store; its start is not measured."""
    tenth = bench.scale.backlog // 10
    while process.handled() < tenth:
        time.sleep(0.002)
        if process.popen.poll() is not None:
            raise SystemExit(f"{process.server.name} ended:\n{process.log.read_text()}")
    first, first_at, used = process.handled(), time.time(), process.cpu_seconds()
    handled, at = _wait_until_done(process)
    count = max(1, handled - first)
    return {
        "done_rate": count / max(0.001, at - first_at),
        "done_cpu_us": 1e6 * (process.settle() - used) / count,
        "left": max(0, bench.scale.backlog - handled),
    }


def _purged_at(process: Process) -> float:
    """Return when the first pass of the retention ended, in Unix seconds."""
    deadline = time.time() + DONE_SECONDS
    while b"inbox.purged" not in process.log.read_bytes():
        if time.time() > deadline:
            raise SystemExit(f"the retention did not end:\n{process.log.read_text()[-2000:]}")
        time.sleep(0.01)
    return time.time()


def latencies(found: Measured, *, until: float = math.inf) -> Figures:
    """Return figures of the latencies of requests scheduled before ``until``.

    The slowest hundredth is kept in full, for quantiles over several rounds.
    """
    pairs = zip(found.scheduled_at, found.latencies_us, strict=True)
    taken = sorted(latency / 1000 for at, latency in pairs if at < until)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99} if taken else {}
    return {
        "count": len(taken),
        **{name: taken[int(share * len(taken))] for name, share in shares.items()},
        "slowest_ms": taken[::-1][: math.ceil(len(taken) / 100)],
        "cpu_us": 1e6 * found.cpu_seconds / max(1, found.answered),
        "errors": found.errors + found.dropped + found.unanswered,
        "generator_used": found.generator_used,
    }
