"""Stall the store or the daemon under load, and measure how long acknowledged events wait.

    python tests/stalls.py --store sqlite --processes 2 --kind sigstop --seconds 6,12,30 --times 20

Senders deliver inline, enqueued and ordered events. Some hang up after a second; each delivers its
event until it is answered 200. Meanwhile the chosen part hangs repeatedly:

    sigstop     every process of one daemon gets SIGSTOP
    worker      one worker process of two gets SIGSTOP (SQLite with --processes 2)
    fsync       a sync of the disk does not return (SQLite)
    lock        another session locks the table of arrivals (PostgreSQL)
    backends    the server's sessions get SIGSTOP (PostgreSQL)
    blackhole   the connections to the server forward nothing (PostgreSQL)
    pgbouncer   PgBouncer gets SIGSTOP (PostgreSQL)

With PostgreSQL, --processes is the number of daemons on one database. Nothing is restarted. At the
end the ledgers of senders and handlers are compared. The exit status is 1 if an event that was
answered 200 has not been handled within --wait seconds after the last answer and the last stall,
ran beside itself, or ran out of the order of its lane.
"""

import argparse
import collections
import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import attrs
import trio
from support.deliveries import SECRET
from support.disk_faults import DiskFaults, hanging
from support.ledger import Account, Run, account, runs_of
from support.ports import free_port
from support.respawned import Respawned
from support.wire import Wire

from sdk_trio.testing import sample_body, sign_delivery

#: The handlers, and the two periods that the suite shortens so that a test need not wait for them.
APPLICATION = """
import os, time, trio, sdk_trio
from sdk_trio.events import *

if lease := os.environ.get("STALLS_LEASE"):
    from sdk_trio.storage import open as opening
    from sdk_trio.webhooks import queue
    opening.open_store.__wrapped__.__kwdefaults__["lease_seconds"] = float(lease)
    queue.LEASE_SECONDS, queue.RENEW_SECONDS = float(lease), float(lease) / 5

handlers = sdk_trio.HandlerRegistry()
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, event):
    line = f"{time.monotonic_ns()} {what} {event.webhook_id} {os.getpid()}\\n"
    os.write(ledger, line.encode())


async def run(event):
    note("start", event)
    try:
        await trio.sleep(0.005)
        if event.webhook_id.startswith("fails") and event.attempt == 1:
            raise RuntimeError("every such event fails once")
    except BaseException:
        note("stop", event)
        raise
    note("finish", event)


handlers.register(OrderCreatedEvent, run)
handlers.register(OrderPaidEvent, run, enqueue=True)
handlers.register(SubscriptionUpdatedEvent, run, enqueue=True, ordered=True)
"""
TYPES = {
    "inline": "order.created",
    "queued": "order.paid",
    "fails": "order.paid",
    "lane": "subscription.updated",
}
_HAPPENED = datetime(2026, 1, 1, tzinfo=UTC)
LANES = 10
TASKS = 50

#: Retries come soon, so that there is always something to fetch.
SETTINGS = {
    "Webhooks:GracefulDrainTimeoutSeconds": 5,
    "Webhooks:Queue:RetryBaseSeconds": 0.05,
    "Webhooks:Queue:RetryCapSeconds": 0.5,
}

#: A sender that hangs up does so after this time, any other after the second one, in seconds.
HASTY_SECONDS = 1.0
PATIENT_SECONDS = 10.0
#: Of ten deliveries so many are by a sender that hangs up.
HASTY_IN_TEN = 3

#: How long an event may take to be answered 200 after the last stall, in seconds.
ANSWER_SECONDS = 120.0

#: How long an acknowledged event may wait unless ``--wait`` says otherwise, in seconds.
WAIT_SECONDS = 75.0


@attrs.define
class Ledger:
    """When each event was answered 200, and when the stalls were; monotonic nanoseconds."""

    handled: Path
    acknowledged: dict[str, int] = attrs.Factory(dict)
    answers: dict[str, int] = attrs.Factory(dict)
    stalls: list[tuple[int, int]] = attrs.Factory(list)
    #: The last moment of processes that did not outlive their stall, by their pid.
    deaths: dict[int, int] = attrs.Factory(dict)

    def count(self, answer: str) -> None:
        self.answers[answer] = self.answers.get(answer, 0) + 1

    def runs(self) -> list[Run]:
        lines = self.handled.read_text().splitlines()
        return runs_of(lines, self.deaths, time.monotonic_ns())

    def first_runs(self) -> Mapping[str, int]:
        """Return when each event was handled first."""
        first: dict[str, int] = {}
        for run in self.runs():
            if run.finished:
                first.setdefault(run.webhook_id, run.end)
        return first

    def account(self, states: Mapping[str, str] | None = None) -> Account:
        """Compare both ledgers; the stalls are the faults.

        ``states`` are those of the store; None: what ran is done.
        """
        runs = self.runs()
        if states is None:
            states = {run.webhook_id: "done" for run in runs if run.finished}
        return account(self.acknowledged, runs, states, deaths=self.deaths, faults=self.stalls)

    def unhandled(self) -> list[str]:
        handled = self.first_runs()
        return sorted(one for one in self.acknowledged if one not in handled)

    def waits(self) -> list[float]:
        """Return how long each event waited for its run after it was answered 200, in seconds.

        The time of the stalls does not count: nothing need run then.
        """
        handled = self.first_runs()
        waits = []
        for webhook_id, at in self.acknowledged.items():
            if (ran := handled.get(webhook_id)) is not None:
                stalled = sum(max(0, min(ran, end) - max(at, begin)) for begin, end in self.stalls)
                waits.append(max(0.0, (ran - at - stalled) / 1e9))
        return waits


@attrs.define
class Senders:
    """Deliver until :attr:`stopped`, each event until it is answered 200."""

    urls: Sequence[str]
    ledger: Ledger
    dice: random.Random
    rate: float
    stopped: bool = False
    #: The next number of each lane, and under None that of all other events.
    numbers: Mapping[str | None, Iterator[int]] = attrs.field(
        factory=lambda: collections.defaultdict(itertools.count)
    )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(TASKS):
                lane = f"lane{number}" if number < LANES else None
                nursery.start_soon(self._send, lane)

    async def _send(self, lane: str | None) -> None:
        while not self.stopped:
            kind = lane or self.dice.choice(["inline", "queued", "queued", "fails"])
            webhook_id = f"{kind}_{next(self.numbers[lane])}"
            while not await self._deliver(webhook_id, lane):
                await trio.sleep(self.dice.uniform(0.2, 0.8))
            await trio.sleep(self.dice.uniform(0.5, 1.5) * TASKS / self.rate)

    async def _deliver(self, webhook_id: str, lane: str | None) -> bool:
        body = sample_body(
            TYPES[webhook_id.partition("_")[0].rstrip("0123456789")],
            now=_HAPPENED,
            overrides={"id": lane or webhook_id},
            seed=webhook_id,
        )
        signed = sign_delivery(body, secret=SECRET, webhook_id=webhook_id)
        hasty = self.dice.randrange(10) < HASTY_IN_TEN
        try:
            with trio.fail_after(HASTY_SECONDS if hasty else PATIENT_SECONDS):
                with await Wire.connect(self.dice.choice(self.urls)) as wire:
                    answer = await wire.post(signed)
        except trio.TooSlowError:
            self.ledger.count("hung up")
            return False
        except OSError:
            self.ledger.count("no connection")
            return False
        self.ledger.count(str(answer.status))
        if answer.status == 200:
            self.ledger.acknowledged[webhook_id] = time.monotonic_ns()
        return answer.status == 200


# -- what stalls -----------------------------------------------------------------------------------

#: Stalls something until it is left.
Stall = Callable[[], contextlib.AbstractContextManager[None]]


def _descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started, and theirs."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Hold processes by SIGSTOP."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def _stopped_worker(pid: int, deaths: dict[int, int]) -> Iterator[None]:
    """Hold a worker process; its supervisor may kill it meanwhile, as it says nothing."""
    with stopped([pid]):
        begin = time.monotonic_ns()
        yield
    if not Path(f"/proc/{pid}").exists():
        deaths[pid] = begin


@contextmanager
def _hung(disk: DiskFaults, data: Path) -> Iterator[None]:
    disk.set(hanging("sync", data))
    try:
        yield
    finally:
        disk.clear()


@contextmanager
def _locked(dsn: str) -> Iterator[None]:
    import psycopg

    with psycopg.connect(dsn) as connection:
        connection.execute("LOCK TABLE sdk_trio.arrival IN ACCESS EXCLUSIVE MODE")
        yield


class Proxy:
    """Forwards connections to the server's socket, unless it is :attr:`frozen`.

    It has threads of its own: the harness must not slow it down.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.port = free_port()
        self.flows = threading.Event()
        self.flows.set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Forward nothing; connections stay open, and new ones are accepted."""
        self.flows.clear()
        try:
            yield
        finally:
            self.flows.set()

    def close(self) -> None:
        """End all connections, and take no more."""
        self.flows.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.socket(socket.AF_UNIX)
            self._sockets += [client, server]
            server.connect(self.target)
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.flows.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@attrs.frozen
class Bench:
    """The daemons, and what stalls a part of them."""

    daemons: Sequence[Respawned]
    stall: Stall


@asynccontextmanager
async def _bench(directory: Path, options: "Options", ledger: Ledger) -> AsyncIterator[Bench]:
    """Start the daemons of an experiment; they end with the block."""
    environment = {"LEDGER": str(ledger.handled)}
    if options.lease:
        environment["STALLS_LEASE"] = str(options.lease)
    settings: dict[str, object] = dict(SETTINGS)
    with contextlib.ExitStack() as stack:
        if options.store == "postgres":
            dsn, through, freeze = _database(stack, options.kind)
            environment["SDK_STORAGE_POSTGRES_DSN"] = through
            settings |= {
                "Storage:Backend": "Postgres",
                "Storage:PostgresDsnEnvVar": "SDK_STORAGE_POSTGRES_DSN",
            }
            freezes: dict[str, Stall] = {options.kind: freeze, "lock": partial(_locked, dsn)}
            count = options.processes
        else:
            scratch = directory / "scratch"
            scratch.mkdir()
            disk = DiskFaults(scratch)
            environment |= disk.environment
            settings["Server:Processes"] = options.processes
            freezes = {"fsync": partial(_hung, disk, directory / "0" / "data")}
            count = 1
        daemons = []
        for number in range(count):
            (directory / str(number)).mkdir()
            daemon = Respawned(
                directory / str(number), APPLICATION, settings, environment, most_starts=1
            )
            daemons.append(daemon)

        def of_a_daemon() -> contextlib.AbstractContextManager[None]:
            process = options.dice.choice(daemons).process
            assert process is not None
            return stopped([process.pid, *_descendants(process.pid)])

        def of_a_worker() -> contextlib.AbstractContextManager[None]:
            process = daemons[0].process
            assert process is not None
            return _stopped_worker(options.dice.choice(_descendants(process.pid)), ledger.deaths)

        freezes |= {"sigstop": of_a_daemon, "worker": of_a_worker}
        async with trio.open_nursery() as nursery:
            for daemon in daemons:
                await nursery.start(daemon.run)
            with trio.fail_after(ANSWER_SECONDS):
                for daemon in daemons:
                    await daemon.accepting()
            yield Bench(daemons, freezes[options.kind])
            for daemon in daemons:
                daemon.stop()


def _database(stack: contextlib.ExitStack, kind: str) -> tuple[str, str, Stall]:
    """Return a database, the way to it that the daemons take, and what stalls that way."""
    from support.postgres import pooled, running_server

    server = running_server()
    dsn = server.fresh()
    if kind == "pgbouncer":
        before = _descendants(os.getpid())
        through = stack.enter_context(pooled(server, dsn, connections=20))
        pids = [pid for pid in _descendants(os.getpid()) if pid not in before]
        poolers = [pid for pid in pids if "pgbouncer" in Path(f"/proc/{pid}/comm").read_text()]
        return dsn, through, partial(stopped, poolers)
    if kind == "blackhole":
        proxy = Proxy(f"{server.directory}/.s.PGSQL.5432")
        stack.callback(proxy.close)
        database = dsn.rpartition("dbname=")[2]
        through = f"host=127.0.0.1 port={proxy.port} user=owner dbname={database}"
        return dsn, through, proxy.frozen

    def sessions() -> contextlib.AbstractContextManager[None]:
        database = dsn.rpartition("dbname=")[2]
        found = server.execute(
            f"SELECT pid FROM pg_stat_activity WHERE datname = '{database}' "
            "AND backend_type = 'client backend'"
        )
        return stopped([pid for (pid,) in found])

    return dsn, dsn, sessions


# -- one experiment --------------------------------------------------------------------------------


@attrs.define(kw_only=True)
class Options:
    """What is stalled, how often and how long; see the command line."""

    store: str
    processes: int
    kind: str
    seconds: Sequence[float]
    times: int
    seed: int = 1
    rate: float = 150.0
    wait: float = WAIT_SECONDS
    lease: float | None = None
    dice: random.Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dice = random.Random(self.seed)


@attrs.frozen
class Report:
    """What came out of one experiment."""

    options: Options
    answers: Mapping[str, int]
    account: Account
    longest: Sequence[float]
    took: float

    def row(self) -> str:
        """Return the report as a row of :data:`HEAD`."""
        kind = self.options
        answers = ", ".join(f"{number} x {name}" for name, number in sorted(self.answers.items()))
        longest = " ".join(f"{wait:.1f}" for wait in self.longest)
        cells = (
            f"{kind.store} {kind.processes}",
            kind.kind,
            f"{kind.times} x {'/'.join(f'{each:g}' for each in kind.seconds)} s",
            self.account.acknowledged,
            len(self.account.lost),
            len(self.account.again),
            len(self.account.overlapping),
            len(self.account.out_of_order),
            longest,
            answers,
            f"{self.took:.0f} s",
        )
        return f"| {' | '.join(map(str, cells))} |"


HEAD = """\
| store, processes | stall | times | 200 | not run | ran again | beside itself | out of order | \
longest waits (s) | answers | |
|---|---|---|---|---|---|---|---|---|---|---|"""


async def experiment(directory: Path, options: Options) -> Report:
    """Run one experiment in ``directory``, which is empty."""
    begun = time.monotonic()
    ledger = Ledger(directory / "handled")
    ledger.handled.write_text("")
    async with _bench(directory, options, ledger) as bench:
        urls = [daemon.url for daemon in bench.daemons]
        senders = Senders(urls, ledger, options.dice, options.rate)
        lengths = itertools.islice(itertools.cycle(options.seconds), options.times)
        async with trio.open_nursery() as sending:
            sending.start_soon(senders.run)
            for seconds in lengths:
                await trio.sleep(options.dice.uniform(1.0, 2.0))
                begin = time.monotonic_ns()
                with await trio.to_thread.run_sync(_entered, bench.stall) as stall:
                    await trio.sleep(seconds)
                    ledger.stalls.append((begin, time.monotonic_ns()))
                    stall.close()
                await acknowledges(ledger)
            senders.stopped = True
            sending.cancel_scope.deadline = trio.current_time() + ANSWER_SECONDS
        with trio.move_on_after(options.wait):
            while ledger.unhandled():
                await trio.sleep(0.1)
        return Report(
            options,
            ledger.answers,
            ledger.account(),
            sorted(ledger.waits(), reverse=True)[:4],
            time.monotonic() - begun,
        )


def _entered(stall: Stall) -> contextlib.ExitStack:
    """Begin a stall; where it has to wait for a lock, the senders go on meanwhile."""
    stack = contextlib.ExitStack()
    stack.enter_context(stall())
    return stack


async def acknowledges(ledger: Ledger) -> None:
    """Wait until deliveries are answered 200 again."""
    wanted = len(ledger.acknowledged) + 5
    with trio.fail_after(ANSWER_SECONDS):
        while len(ledger.acknowledged) < wanted:
            await trio.sleep(0.05)


async def _main(options: Options, keep: Path | None) -> int:
    with contextlib.ExitStack() as stack:
        if keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = keep
            directory.mkdir(parents=True)
        if options.store == "postgres":
            from support.postgres import remove_server

            stack.callback(remove_server)
        report = await experiment(directory, options)
        print(HEAD, report.row(), sep="\n")
        found = report.account
        again = [each.webhook_id for each in found.again]
        for what, ids in (
            ("not handled", found.lost),
            ("ran again", again),
            ("beside itself", found.overlapping),
            ("out of order", found.out_of_order),
        ):
            if ids:
                print(f"{what}:", " ".join(ids[:20]))
        return 1 if found.lost or found.overlapping or found.out_of_order else 0


def _parser() -> argparse.ArgumentParser:
    kinds = ["sigstop", "worker", "fsync", "lock", "backends", "blackhole", "pgbouncer"]
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    made.add_argument("--processes", type=int, default=1, help="with PostgreSQL: of daemons")
    made.add_argument("--kind", choices=kinds, default="sigstop")
    made.add_argument("--seconds", default="6,12,30", help="how long the stalls last, in turn")
    made.add_argument("--times", type=int, default=6)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--rate", type=float, default=150.0, help="deliveries a second, about")
    made.add_argument("--wait", type=float, default=WAIT_SECONDS, help="seconds until it is lost")
    made.add_argument("--lease", type=float, help="seconds of a lease instead of the default")
    made.add_argument("--keep", type=Path, help="a new directory for stores, logs and ledgers")
    return made


if __name__ == "__main__":
    given = vars(_parser().parse_args())
    kept = given.pop("keep")
    given["seconds"] = [float(each) for each in given["seconds"].split(",")]
    sys.exit(trio.run(_main, Options(**given), kept))
