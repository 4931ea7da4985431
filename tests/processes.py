"""Kill processes of ``Server:Processes`` at random under load, and count what became of events.

    python tests/processes.py [--events 100000] [--processes 4] [--postgres] [--every 1.0]

Tasks deliver inline, enqueued and ordered events of two tenants, each until it is answered 200.
Meanwhile one process after the other, chosen at random, gets SIGKILL; its supervisor replaces it.
Senders and handlers write down what they promised and did (support/ledger.py). At the end all is
drained and compared with the store. The exit status is 1 if an acknowledged event is lost, if one
whose end was recorded ran again, ran beside itself, or ran out of the order of its tenant and
subject.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs
import trio
from support.daemon import clean_environment
from support.deliveries import SECRET
from support.ledger import Account, account, by_process, runs_of
from support.ports import free_port
from support.wire import Wire

from sdk_trio.config import Settings
from sdk_trio.records.deliveries import UNFINISHED
from sdk_trio.storage.open import open_inbox
from sdk_trio.testing import sample_body, sign_delivery

APPLICATION = """
import os, time, trio, sdk_trio
from sdk_trio.events import *

handlers = sdk_trio.HandlerRegistry()
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, event):
    line = f"{time.monotonic_ns()} {what} {event.webhook_id} {os.getpid()}\\n"
    os.write(ledger, line.encode())


async def run(event):
    note("start", event)
    await trio.sleep(0.002)
    note("finish", event)


handlers.register(OrderCreatedEvent, run)
handlers.register(OrderPaidEvent, run, enqueue=True)
handlers.register(SubscriptionUpdatedEvent, run, enqueue=True, ordered=True)
"""

ORGANIZATIONS = (
    "1a7e3f30-0000-4000-8000-000000000001",
    "1a7e3f30-0000-4000-8000-000000000002",
)

#: Of each tenant; the same subjects for both, which are different lanes.
SUBJECTS = 6

#: A body of each type, to be made an event's own: the samples cost more than the signatures.
BODIES = {
    type_: sample_body(
        type_,
        now=datetime(2026, 1, 1, tzinfo=UTC),
        overrides={"id": "THE-ID", "organization_id": "THE-ORGANIZATION"},
    )
    for type_ in ("order.created", "order.paid", "subscription.updated")
}

#: The senders of events without an order.
TASKS = 16

SENDER_SECONDS = 10.0


@attrs.frozen
class Killed:
    """What came out: how long it took, how often a process was killed, and the comparison."""

    seconds: float
    kills: int
    replaced: int
    answers: dict[str, int]
    runs: int
    processes: int
    status: int
    cpu_seconds: float
    account: Account

    @property
    def broken(self) -> bool:
        """Whether a promise was broken."""
        kept = self.account
        return bool(kept.broken or self.status or set(kept.states) - {"done"})

    def rows(self) -> list[tuple[str, object]]:
        """Return the report as pairs of a name and a value."""
        kept = self.account
        before = sorted(again.before_death_ms or 0.0 for again in kept.again)
        again = f"{len(before)}" + (
            f", {before[-1]:.1f} ms before a kill at most" if before else ""
        )
        return [
            ("seconds", round(self.seconds)),
            ("kill -9", self.kills),
            ("processes replaced", self.replaced),
            ("processes that ran handlers", self.processes),
            ("answers", ", ".join(f"{n} x {name}" for name, n in sorted(self.answers.items()))),
            ("acknowledged", kept.acknowledged),
            ("acknowledged a second", round(kept.acknowledged / self.seconds)),
            ("their states", ", ".join(f"{n} {state}" for state, n in sorted(kept.states.items()))),
            ("runs of handlers", self.runs),
            ("lost", len(kept.lost)),
            ("called done, but never finished", len(kept.never_finished)),
            ("ran again, as their process was killed before their end was recorded", again),
            ("ran again without a kill", len(kept.again_without_reason)),
            ("ran beside itself", len(kept.overlapping)),
            ("out of order of tenant and subject", len(kept.out_of_order)),
            ("CPU of all processes, seconds", round(self.cpu_seconds)),
            ("exit status of the supervisor", self.status),
        ]


@attrs.define
class Senders:
    """Deliver events until there were enough and a kill, each until it is answered 200."""

    port: int
    file: Path
    events: int
    dice: random.Random
    deaths: dict[int, int]
    answers: dict[str, int] = attrs.Factory(dict)
    acknowledged: int = 0
    _numbers: Iterator[int] = attrs.Factory(itertools.count)

    async def run(self) -> None:
        with self.file.open("a", buffering=1) as file:
            async with trio.open_nursery() as nursery:
                for _ in range(TASKS):
                    nursery.start_soon(self._send, self._mixed(), file)
                for tenant, subject in itertools.product(range(2), range(SUBJECTS)):
                    nursery.start_soon(self._send, self._of_lane(tenant, subject), file)

    def _goes_on(self) -> bool:
        return next(self._numbers) < self.events or not self.deaths

    def _mixed(self) -> Iterator[tuple[str, str, str, str]]:
        while self._goes_on():
            type_ = self.dice.choice(["order.created", "order.paid", "order.paid"])
            name = f"{type_.replace('.', '')}{self.dice.getrandbits(48):x}"
            yield type_, name, name, self.dice.choice(ORGANIZATIONS)

    def _of_lane(self, tenant: int, subject: int) -> Iterator[tuple[str, str, str, str]]:
        for number in itertools.count():
            if not self._goes_on():
                return
            name = f"lane{tenant}{subject:02}_{number}"
            yield "subscription.updated", name, f"subject{subject}", ORGANIZATIONS[tenant]

    async def _send(self, events: Iterator[tuple[str, str, str, str]], file: object) -> None:
        wire: Wire | None = None
        for type_, webhook_id, subject, organization in events:
            body = BODIES[type_].replace(b"THE-ID", subject.encode())
            body = body.replace(b"THE-ORGANIZATION", organization.encode())
            delivery = sign_delivery(body, secret=SECRET, webhook_id=webhook_id)
            while True:
                answer = "no connection"
                try:
                    with trio.fail_after(SENDER_SECONDS):
                        wire = wire or await Wire.connect(f"http://127.0.0.1:{self.port}")
                        answer = "connection lost"
                        answer = str((await wire.post(delivery)).status)
                except (OSError, trio.BrokenResourceError, trio.TooSlowError):
                    if wire is not None:
                        wire.__exit__()
                    wire = None
                self.answers[answer] = self.answers.get(answer, 0) + 1
                if answer == "200":
                    break
                await trio.sleep(self.dice.uniform(0.02, 0.1))
            file.write(f"{webhook_id}\n")  # type: ignore[attr-defined] # an open file
            self.acknowledged += 1
        if wire is not None:
            wire.__exit__()


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started and that live."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


async def _serving(admin: int) -> int:
    """Return how many processes serve, as the admin address says."""
    with contextlib.suppress(OSError, trio.BrokenResourceError):
        with await Wire.connect(f"http://127.0.0.1:{admin}") as wire:
            await wire.send(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            text = (await wire.answer()).body.decode()
        found = text.partition('sdk_processes{state="serving"} ')[2].split()
        return int(found[0]) if found else 0
    return 0


async def _kill(
    supervisor: "subprocess.Popen[bytes]",
    admin: int,
    every: float,
    dice: random.Random,
    deaths: dict[int, int],
) -> None:
    seen: dict[int, float] = {}
    while True:
        await trio.sleep(every * dice.uniform(0.5, 1.5))
        assert supervisor.poll() is None, "the supervisor has ended"
        living = [pid for pid in children_of(supervisor.pid) if pid not in deaths]
        now = time.monotonic()
        grown = [pid for pid in living if now - seen.setdefault(pid, now) > 2.0]
        # Mostly one that works, sometimes one that has just begun. Where none is left that serves,
        # the supervisor would be right to give up.
        if await _serving(admin) > 1:
            victim = dice.choice(grown if grown and dice.random() < 0.8 else living)
            os.kill(victim, signal.SIGKILL)
            deaths[victim] = time.monotonic_ns()


async def kill_processes(
    directory: Path,
    *,
    events: int,
    processes: int,
    every: float,
    seed: int,
    dsn: str | None = None,
    seconds: float = 3600.0,
) -> Killed:
    """Do it all in ``directory``; TooSlowError after ``seconds``. ``dsn``: on PostgreSQL."""
    dice = random.Random(seed)
    (directory / "application.py").write_text(APPLICATION)
    port, admin = free_port(), free_port()
    keys = {
        "Server": {"Bind": [f"127.0.0.1:{port}"], "Processes": processes},
        "Admin": {"Bind": f"127.0.0.1:{admin}"},
        "Storage": {"Path": str(directory / "data"), "Backend": "Postgres" if dsn else "Sqlite"},
        "MultiTenant": {"Enabled": True},
        "Webhooks": {
            "RequireHttps": False,
            "InlineMaxAttempts": 50,
            "Queue": {"MaxAttempts": 50, "RetryBaseSeconds": 0.05, "RetryCapSeconds": 0.5},
        },
        "Logging": {"Level": "Warning"},
    }
    (directory / "settings.json").write_text(json.dumps({"Sdk": keys}))
    environment = {
        **clean_environment(),
        "SDK__WEBHOOKS__SECRET": SECRET,
        "LEDGER": str(directory / "ran"),
        **({"SDK_POSTGRES_DSN": dsn} if dsn else {}),
    }
    program = [sys.executable, "-m", "sdk_trio"]
    for number, organization in enumerate(ORGANIZATIONS):
        add = ["tenant", "add", f"t{number}", "--name", "T", "--organization-id", organization]
        command = [*program, *add, "--config", "settings.json"]
        await trio.run_process(command, cwd=directory, env=environment, capture_stdout=True)
    deaths: dict[int, int] = {}
    senders = Senders(port, directory / "acknowledged", events, dice, deaths)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (directory / "log").open("w") as log:
        run = ["run", "--standalone", "--app", "application:handlers", "--config", "settings.json"]
        supervisor = subprocess.Popen(
            [*program, *run], cwd=directory, env=environment, stdout=log, stderr=log
        )
    try:
        with trio.fail_after(seconds):
            while await _serving(admin) < processes:
                assert supervisor.poll() is None, (directory / "log").read_text()
                await trio.sleep(0.05)
            begun = time.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_kill, supervisor, admin, every, dice, deaths)
                await senders.run()
                nursery.cancel_scope.cancel()
            took = time.monotonic() - begun
            states: dict[str, str] = {}
            settings = Settings.from_mapping(
                {"Sdk": {**keys, "Webhooks": {"Secret": SECRET}}}, standalone=True
            )
            if dsn:
                os.environ["SDK_POSTGRES_DSN"] = dsn
            while not states or set(states.values()) - {"done", "dead", "parked"}:
                assert supervisor.poll() is None, (directory / "log").read_text()
                await trio.sleep(1)
                states = await _states(settings)
            supervisor.send_signal(signal.SIGTERM)
            status = await trio.to_thread.run_sync(supervisor.wait)
    finally:
        supervisor.kill()
        supervisor.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines, died = by_process((directory / "ran").read_text().splitlines(), deaths.items())
    runs = runs_of(lines, died, time.monotonic_ns())
    acknowledged = (directory / "acknowledged").read_text().split()
    return Killed(
        seconds=took,
        kills=len(deaths),
        replaced=(directory / "log").read_text().count('"process.ended"'),
        answers=senders.answers,
        runs=len(runs),
        processes=len({run.pid for run in runs}),
        status=status,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        account=account(set(acknowledged), runs, states, deaths=died, faults=()),
    )


async def _states(settings: Settings) -> dict[str, str]:
    states: dict[str, str] = {}
    async with open_inbox(settings, owner="the judge") as inbox:
        counts = await inbox.counts()
        if any(counts[state] for state in UNFINISHED):
            return {"unfinished": "received"}
        after = 0
        while found := await inbox.find(after_sequence=after, limit=1000):
            states |= {record.webhook_id: str(record.state) for record in found}
            after = found[-1].sequence
    return states


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--postgres", action="store_true", help="on a server of its own")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave everything in this new directory")
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        if given.keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        else:
            directory = given.keep
            directory.mkdir(mode=0o700)
        dsn = None
        if given.postgres:
            from support.postgres import remove_server, running_server

            dsn = running_server().fresh()
            stack.callback(remove_server)
        report = trio.run(
            lambda: kill_processes(
                directory,
                events=given.events,
                processes=given.processes,
                every=given.every,
                seed=given.seed,
                dsn=dsn,
            )
        )
    for name, value in report.rows():
        print(f"{name}: {value}")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
