"""Kill the daemon and break its disk, again and again, and count what became of every event.

    python tests/torture.py [--kills 200] [--faults 200] [--seed 1] [--rate 100] [--keep DIRECTORY]
    python tests/torture.py --postgres [--kills 200]
    python tests/torture.py --crash-loops [--starts 12]

The daemon is ``python -m sdk_trio run`` with a store in SQLite, or with ``--postgres`` on a server
of its own, whose disk does not fail. Several tasks send it signed deliveries for handlers of every
kind. At random moments it is killed (SIGKILL) and started again,
its disk fails for a while, or both. Sender and handlers write down what they promised and did (see
support/ledger.py). At the end the daemon drains, is stopped, and both are compared with its store.

It stops by itself. The exit status is 1 if an acknowledged event is lost, was called done and never
was, ran beside itself, ran twice for no reason, or out of its order; 2 if it did not come to an
end. The schedule follows from the seed; what happens in between does not.

``--crash-loops`` is another experiment: events that end the process which handles them.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs
import httpx
import trio
from support.crash_loops import crash_loops
from support.deliveries import SECRET
from support.disk_faults import DiskFaults, Fault, broken, full, hanging, slow
from support.ledger import Account, account, by_process, runs_of
from support.respawned import Respawned
from support.wire import Wire

from sdk_trio.testing import sample_body, sign_delivery

#: One handler of each kind. The metadata of an event selects its handler.
APPLICATION = """
import os, time, trio, sdk_trio
from sdk_trio.events import *

handlers = sdk_trio.HandlerRegistry()
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, event):
    line = f"{time.monotonic_ns()} {what} {event.webhook_id} {os.getpid()}\\n"
    os.write(ledger, line.encode())


async def run(event):
    asked = event.data.metadata
    note("start", event)
    try:
        await trio.sleep(float(asked["seconds"]))
        if event.attempt <= int(asked["failures"]):
            raise RuntimeError("as the event asked for")
    except BaseException:
        note("stop", event)
        raise
    note("finish", event)


handlers.register(OrderCreatedEvent, run)
handlers.register(OrderPaidEvent, run, enqueue=True)
handlers.register(SubscriptionUpdatedEvent, run, enqueue=True, ordered=True)
"""
_HAPPENED = datetime(2026, 1, 1, tzinfo=UTC)
INLINE, ENQUEUED, ORDERED, UNHANDLED = (
    "order.created",
    "order.paid",
    "subscription.updated",
    "product.created",
)

SETTINGS = {
    # Retries come soon, and there are enough of them that kills alone make nothing a dead letter.
    "Webhooks:Queue:RetryBaseSeconds": 0.05,
    "Webhooks:Queue:RetryCapSeconds": 0.5,
    "Webhooks:Queue:MaxAttempts": 20,
    "Webhooks:InlineMaxAttempts": 20,
    "Webhooks:GracefulDrainTimeoutSeconds": 20,
}
#: More than MaxAttempts and InlineMaxAttempts: such an event becomes a dead letter.
ALWAYS = 1000

#: What the upstream waits for an answer, in seconds.
SENDER_SECONDS = 10.0
#: An answer that takes longer shows that the disk is slow, in seconds.
SLOW_SECONDS = 0.15
LANES = 10

#: How long the daemon may take to answer again, or to drain, in seconds: many times what it needs,
#: also where ten other programs want each processor.
PATIENCE_SECONDS = 600.0


@attrs.frozen
class Kind:
    """One kind of events: how many in a hundred, of which type, and what its handler shall do."""

    name: str
    share: int
    type: str
    seconds: tuple[float, float] = (0.0, 0.01)
    failures: int = 0


KINDS = (
    Kind("inline", 25, INLINE),
    Kind("slowInline", 3, INLINE, seconds=(0.2, 1.0)),
    Kind("failsInline", 5, INLINE, failures=1),
    Kind("deadInline", 2, INLINE, failures=ALWAYS),
    Kind("queued", 45, ENQUEUED),
    Kind("slow", 5, ENQUEUED, seconds=(0.3, 1.5)),
    Kind("fails", 10, ENQUEUED, failures=2),
    Kind("dead", 2, ENQUEUED, failures=ALWAYS),
    Kind("unhandled", 3, UNHANDLED),
)

MakeFaults = Callable[[Path], Sequence[Fault]]
FAULTS: dict[str, MakeFaults] = {
    "EIO on sync": lambda data: [broken("sync", data)],
    "EIO on write": lambda data: [broken("write", data)],
    "EIO on every third write or sync": lambda data: [
        broken("write", data, percent=33),
        broken("sync", data, percent=33),
    ],
    "EIO on read": lambda data: [broken("read", data)],
    "half a write": lambda data: [Fault("short", "write", data, percent=50)],
    "disk full": lambda data: [full(data)],
    "sync takes 200 ms": lambda data: [slow("sync", data, 200)],
    "disk hangs": lambda data: [hanging("write", data), hanging("sync", data)],
}


@attrs.frozen
class Step:
    """One step: after ``pause`` seconds a fault for ``seconds``, a kill, or a kill during a fault.

    ``kill_after`` are seconds from the begin of the fault, or of the step without one.
    """

    pause: float
    fault: str | None = None
    seconds: float = 0.0
    kill_after: float | None = None


def schedule(kills: int, faults: int, dice: random.Random) -> list[Step]:
    """Return all steps in a random order; a quarter of them at most is a kill amid a fault."""
    names = list(itertools.islice(itertools.cycle(FAULTS), faults))
    dice.shuffle(names)
    both = min(kills, faults) // 4
    steps = []
    for number, name in enumerate(names):
        longest = 5.0 if name == "disk hangs" else 1.5
        seconds = dice.uniform(0.2, longest)
        kill = dice.uniform(0.0, seconds) if number < both else None
        steps.append(Step(dice.uniform(0.0, 0.8), name, seconds, kill))
    # From the middle of a start to a second and a half behind it.
    steps += [Step(0.0, kill_after=dice.uniform(0.0, 2.5)) for _ in range(kills - both)]
    dice.shuffle(steps)
    return steps


@attrs.define
class Senders:
    """Deliver until stopped, each id until it is answered 200; write each id to the ledger first.

    What has been delivered once is delivered until the end: an inline event that failed waits for
    its sender. One of each kind comes first, so that none is missing by chance.
    """

    url: str
    file: Path
    dice: random.Random
    rate: float
    tasks: int = 6
    answers: dict[str, int] = attrs.Factory(dict)
    slow: int = 0
    stopped: bool = False
    numbers: Iterator[int] = attrs.Factory(itertools.count)
    first: Iterator[Kind] = attrs.field(factory=lambda: iter(KINDS))
    acknowledged: int = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self.tasks):
                nursery.start_soon(self._send, self._mixed())
            for lane in range(LANES):
                nursery.start_soon(self._send, self._of_lane(lane))

    def _mixed(self) -> Iterator[tuple[Kind, str]]:
        shares = [kind.share for kind in KINDS]
        while True:
            kind = next(self.first, None) or self.dice.choices(KINDS, shares)[0]
            yield kind, f"{kind.name}_{next(self.numbers)}"

    def _of_lane(self, lane: int) -> Iterator[tuple[Kind, str]]:
        for number in itertools.count():
            failures = self.dice.choice([0, 0, 0, 1])
            kind = Kind(f"lane{lane}", 0, ORDERED, failures=failures)
            yield kind, f"lane{lane}_{number}"

    async def _send(self, events: Iterator[tuple[Kind, str]]) -> None:
        wire: Wire | None = None
        try:
            for kind, webhook_id in events:
                done = False
                while not done:
                    wire = wire or await self._connected()
                    if wire is not None:
                        done, wire = await self._deliver(wire, kind, webhook_id)
                    await trio.sleep(self.dice.uniform(0.5, 1.5) * (self.tasks + LANES) / self.rate)
                if self.stopped:
                    return
        finally:
            if wire is not None:
                wire.__exit__()

    async def _connected(self) -> Wire | None:
        try:
            with trio.fail_after(SENDER_SECONDS):
                return await Wire.connect(self.url)
        except (OSError, trio.TooSlowError):
            self._count("no connection")
            return None

    async def _deliver(self, wire: Wire, kind: Kind, webhook_id: str) -> tuple[bool, Wire | None]:
        """Deliver once; return whether it was acknowledged, and the connection if it is usable."""
        lane = webhook_id.partition("_")[0] if kind.type == ORDERED else None
        data = {
            "id": lane or webhook_id,
            "metadata": {
                "seconds": str(random.Random(webhook_id).uniform(*kind.seconds)),
                "failures": str(kind.failures),
            },
        }
        # The same bytes each time, as the upstream sends them.
        body = sample_body(kind.type, now=_HAPPENED, overrides=data, seed=webhook_id)
        delivery = sign_delivery(body, secret=SECRET, webhook_id=webhook_id)
        begin = time.monotonic()
        try:
            with trio.fail_after(SENDER_SECONDS):
                answer = await wire.post(delivery)
        except trio.TooSlowError:
            self._count("no answer in 10 s")
        except (OSError, trio.BrokenResourceError):
            self._count("connection lost")
        else:
            self._count(str(answer.status))
            if answer.status == 200:
                self._write_down(webhook_id)
            self.slow += time.monotonic() - begin > SLOW_SECONDS > kind.seconds[1]
            return answer.status == 200, wire
        wire.__exit__()
        return False, None

    def _write_down(self, webhook_id: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{webhook_id}\n")
        self.acknowledged += 1

    def _count(self, answer: str) -> None:
        self.answers[answer] = self.answers.get(answer, 0) + 1


@attrs.define
class Injector:
    """Injects kills and faults one after the other, and records their times."""

    daemon: Respawned
    disk: DiskFaults
    senders: Senders
    kills: list[int] = attrs.Factory(list)
    faults: list[tuple[int, int]] = attrs.Factory(list)
    #: How many of each kind there were, and how many a sender felt: refused, or kept waiting.
    felt: dict[str, list[int]] = attrs.Factory(dict)

    async def inject(self, steps: Sequence[Step]) -> None:
        for step in steps:
            await trio.sleep(step.pause)
            before = self._troubles()
            if step.fault is None:
                await self._kill(step.kill_after or 0.0)
            else:
                await self._fail(step.fault, step)
            await self._answers_again(step)
            if step.fault is not None:
                count = self.felt.setdefault(step.fault, [0, 0])
                count[0] += 1
                count[1] += self._troubles() > before

    async def _kill(self, after: float) -> None:
        await trio.sleep(after)
        while self.daemon.process is None or self.daemon.process.poll() is not None:
            await trio.sleep(0.01)
        self.kills.append(time.monotonic_ns())
        self.daemon.kill()

    async def _fail(self, name: str, step: Step) -> None:
        begin = time.monotonic_ns()
        self.disk.set(*FAULTS[name](self.daemon.data))
        try:
            with trio.move_on_after(step.seconds):
                if step.kill_after is not None:
                    await self._kill(step.kill_after)
                await trio.sleep_forever()
        finally:
            self.disk.clear()
            self.faults.append((begin, time.monotonic_ns()))

    def _troubles(self) -> int:
        answers = self.senders.answers.items()
        return self.senders.slow + sum(number for answer, number in answers if answer != "200")

    async def _answers_again(self, step: Step) -> None:
        """Wait until it acknowledges, unless the next kill is meant for the start."""
        if step.fault is None and (step.kill_after or 0.0) < 0.3:
            return
        wanted = self.senders.acknowledged + 5
        with trio.fail_after(PATIENCE_SECONDS):
            while self.senders.acknowledged < wanted:
                await trio.sleep(0.01)


@attrs.frozen
class Report:
    """What came out of one run."""

    seconds: float
    starts: int
    kills: int
    own_ends: dict[int, int]
    felt: dict[str, list[int]]
    answers: dict[str, int]
    runs: int
    unacknowledged: int
    innocent_dead: list[str]
    log: dict[str, int]
    account: Account

    def rows(self) -> list[tuple[str, object]]:
        """Return the report as pairs of a name and a value."""
        kept = self.account
        ends = ", ".join(f"{number} x status {status}" for status, number in self.own_ends.items())
        answers = ", ".join(f"{number} x {name}" for name, number in sorted(self.answers.items()))
        faults = [
            (f"{name}: times, felt by a sender", f"{times}, {felt}")
            for name, (times, felt) in sorted(self.felt.items())
        ]
        return [
            ("seconds", round(self.seconds)),
            ("starts", self.starts),
            ("kill -9", self.kills),
            ("ends of its own", ends),
            *faults,
            ("answers", answers),
            ("runs of handlers", self.runs),
            ("acknowledged", kept.acknowledged),
            ("their states", ", ".join(f"{n} {state}" for state, n in sorted(kept.states.items()))),
            ("lost", len(kept.lost)),
            ("called done, but never finished", len(kept.never_finished)),
            ("dead that would have succeeded", len(self.innocent_dead)),
            ("in the store without an acknowledgement", self.unacknowledged),
            ("ran again after a finished run", self._again()),
            ("ran again without kill and fault", len(kept.again_without_reason)),
            ("ran beside itself", len(kept.overlapping)),
            ("out of order in a lane", len(kept.out_of_order)),
            *((f"lines of the log with {word}", number) for word, number in self.log.items()),
        ]

    def _again(self) -> str:
        again = self.account.again
        faulty = sum(one.faulty for one in again)
        before = [one.before_death_ms for one in again if not one.faulty and one.before_death_ms]
        text = f"{len(again)}: {faulty} with a fault, {len(before)} with a kill alone"
        if before:
            median, longest = statistics.median(before), max(before)
            text += f", which came {median:.1f} ms (median), {longest:.1f} ms (longest) later"
        return text


async def torture(
    directory: Path,
    *,
    kills: int,
    faults: int,
    seed: int,
    rate: float,
    seconds: float,
    dsn: str | None = None,
) -> Report:
    """Do it all in ``directory``; TooSlowError after ``seconds``. ``dsn``: on PostgreSQL."""
    dice = random.Random(seed)
    (directory / "scratch").mkdir()
    disk = DiskFaults(directory / "scratch")
    ran, acknowledged = directory / "ran", directory / "acknowledged"
    environment = {**disk.environment, "LEDGER": str(ran)}
    settings = dict(SETTINGS)
    if dsn is not None:
        environment["SDK_POSTGRES_DSN"] = dsn
        settings["Storage:Backend"] = "Postgres"
    daemon = Respawned(directory, APPLICATION, settings, environment)
    senders = Senders(daemon.url, acknowledged, dice, rate)
    injector = Injector(daemon, disk, senders)
    started = time.monotonic()
    with trio.fail_after(seconds):
        async with trio.open_nursery() as nursery:
            await nursery.start(daemon.run)
            await daemon.accepting()
            async with trio.open_nursery() as sending:
                sending.start_soon(senders.run)
                await injector.inject(schedule(kills, faults, random.Random(seed)))
                senders.stopped = True
            await drained(daemon)
            daemon.stop()
    states = await states_of(daemon)
    own: dict[int, int] = {}
    for death in daemon.deaths:
        if death.status != -9:
            own[death.status] = own.get(death.status, 0) + 1
    lines, deaths = by_process(
        ran.read_text().splitlines(), [(death.pid, death.at_ns) for death in daemon.deaths]
    )
    runs = runs_of(lines, deaths, time.monotonic_ns())
    ids = set(acknowledged.read_text().split())
    hopeless = ("dead_", "deadInline_")
    return Report(
        time.monotonic() - started,
        daemon.starts,
        len(injector.kills),
        own,
        injector.felt,
        senders.answers,
        len(runs),
        len(states.keys() - ids),
        [one for one, state in states.items() if state == "dead" and not one.startswith(hopeless)],
        daemon.logged(["store.unavailable", "Traceback", '"level":"critical"']),
        account(ids, runs, states, deaths=deaths, faults=injector.faults),
    )


async def drained(daemon: Respawned) -> None:
    """Wait until the store holds nothing that is still to be done; :func:`torture` limits it."""
    async with httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                text = (await client.get(f"{daemon.admin}/metrics")).text
                left = [
                    line
                    for line in text.splitlines()
                    for state in ("received", "running", "retrying")
                    if line.startswith(f'sdk_inbox_events{{state="{state}"}}')
                    and float(line.split()[1])
                ]
                if "sdk_inbox_events" in text and not left:
                    return
            await trio.sleep(0.2)


async def states_of(daemon: Respawned) -> dict[str, str]:
    """The state of each id, as the command line lists them."""
    command = [sys.executable, "-m", "sdk_trio", "events", "list", "--format", "json"]
    command += ["--limit", "1000000", "--set", f"Sdk:Storage:Path={daemon.data}"]
    command += ["--set", f"Sdk:Storage:Backend={daemon.settings.get('Storage:Backend', 'Sqlite')}"]
    environment = {**os.environ, **daemon.environment, "SDK__WEBHOOKS__SECRET": SECRET}
    listed = await trio.run_process(command, capture_stdout=True, env=environment)
    return {record["webhook_id"]: record["state"] for record in json.loads(listed.stdout)}


async def _main(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = options.keep
            directory.mkdir(parents=True)
        if options.crash_loops:
            rows = await crash_loops(directory, starts=options.starts)
            print(*("| " + " | ".join(map(str, row)) + " |" for row in rows), sep="\n")
            return 0
        dsn = None
        if options.postgres:
            from support.postgres import remove_server, running_server

            dsn = running_server().fresh()
            stack.callback(remove_server)
        report: Report | None = None
        try:
            report = await torture(
                directory,
                kills=options.kills,
                faults=0 if options.postgres else options.faults,
                seed=options.seed,
                rate=options.rate,
                seconds=options.limit or 300 + 10 * (options.kills + options.faults),
                dsn=dsn,
            )
        except* trio.TooSlowError:
            print((directory / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
            print("it did not come to an end", file=sys.stderr)
        if report is None:
            return 2
        print(*(f"| {name} | {value} |" for name, value in report.rows()), sep="\n")
        return 1 if report.account.broken else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--kills", type=int, default=200)
    made.add_argument("--faults", type=int, default=200)
    made.add_argument("--postgres", action="store_true", help="kills alone, on PostgreSQL")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--rate", type=float, default=100.0, help="deliveries a second, about")
    made.add_argument("--limit", type=float, help="seconds until it is given up")
    made.add_argument("--keep", type=Path, help="a new directory for store, log and ledgers")
    made.add_argument("--crash-loops", action="store_true")
    made.add_argument("--starts", type=int, default=12, help="of a daemon in a crash loop, at most")
    return made


if __name__ == "__main__":
    sys.exit(trio.run(_main, _parser().parse_args()))
