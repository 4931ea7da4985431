"""Kill processes that run events under policies, and judge what they have done.

    python tests/policies_torture.py [--postgres] [--runs 10000] [--kills 60] [--seed 1]
        [--rate 100] [--seconds 600]

Two hosts with two processes each share a store: a SQLite file, or with ``--postgres`` a server of
its own. Another process puts events of four handlers there: one with a concurrency of two, one with
a rate, one that coalesces states which arrive in any order, and an ordered one that is paused and
resumed. At random moments a
process is killed (SIGKILL), and another one takes its place: half of them know the dead one, as a
supervisor does, the others wait for the end of its leases.

At the end every event is done. The exit status is 1 if more than two events of the first handler
ran at once, if a minute had five per cent more runs than the rate, if the newest event of a subject
was not handled last, if an event is neither handled nor superseded by a newer one, if a paused
event ran or used an attempt, or if an ordered one ran out of order. It is 2 if there was no end.
"""

import argparse
import collections
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from support.policy_host import (
    COALESCED,
    CONCURRENCY,
    LIMITED,
    PAUSED,
    RATED,
    open_store,
)

from sdk_trio.records.deliveries import DeliveryState, NewDelivery
from sdk_trio.storage.ports import Inbox
from sdk_trio.webhooks.recording import retry_until_stored

TESTS = Path(__file__).parent

#: The time in seconds after which a pause must be obeyed: a second, and what a loaded machine
#: needs to get a turn.
OBEYED_SECONDS = 3.0

#: The time in seconds without any event that ends before the story counts as stuck.
STUCK_SECONDS = 90.0

#: Events of one subject that arrive together, of the type that coalesces.
BURST = 3

#: An event: its id, its type, its subject, and the time of its state.
_Arriving = tuple[str, str, str, float]


@attrs.define
class Host:
    """A process of a host, under the name of its owner."""

    owner: str
    process: subprocess.Popen[bytes]

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()


@attrs.define
class Run:
    """A run of a handler; ``end`` is the death of its process if it has written none."""

    webhook_id: str
    start: int
    end: int
    finished: bool


@attrs.define
class Judged:
    """What has happened: how often, and what was wrong."""

    runs: int
    kills: int
    superseded: int
    pauses: int
    most_at_once: int
    most_in_a_minute: int
    rated_in_all: float
    wrong: list[str]

    def __str__(self) -> str:
        lines = [
            f"runs {self.runs}, kills {self.kills}, pauses {self.pauses}, "
            f"superseded {self.superseded}",
            f"most at once {self.most_at_once} of {CONCURRENCY}",
            f"most runs of a minute {self.most_in_a_minute}, in all {self.rated_in_all:.1%} of "
            "the rate",
            *(f"WRONG: {each}" for each in self.wrong),
        ]
        return "\n".join(lines)


@attrs.define
class Story:
    """Hosts, kills and pauses on one store.

    Args:
        store: the connection string or the file.
        directory: for the ledger and the logs.
        runs: how many events of the limited handler there are; half as many of the others.
        kills: how many processes are killed.
        rate: the runs in a minute of the rated handler.
        seconds: how long events of the rated handler come.
    """

    store: str
    directory: Path
    runs: int
    kills: int
    rate: float
    seconds: float
    random: random.Random
    hosts: list[Host] = attrs.Factory(list)
    deaths: dict[int, int] = attrs.Factory(dict)
    paused: list[tuple[int, int]] = attrs.Factory(list)
    killed: int = 0
    begun: int = 0
    _late: list[_Arriving] = attrs.Factory(list)
    _numbers: Iterator[int] = attrs.Factory(itertools.count)

    @property
    def ledger(self) -> Path:
        return self.directory / "ledger"

    def start(self, dead: str = "") -> Host:
        owner = f"host{next(self._numbers)}"
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "support.policy_host", self.store, owner),
                    *(str(self.ledger), str(self.rate), dead),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )
        return Host(owner, process)

    def kill_one(self) -> None:
        number = self.random.randrange(len(self.hosts))
        host = self.hosts[number]
        host.process.send_signal(signal.SIGKILL)
        host.process.wait()
        host.close()
        self.deaths[host.process.pid] = time.monotonic_ns()
        self.killed += 1
        self.hosts[number] = self.start(host.owner if self.random.random() < 0.5 else "")

    async def run(self) -> Judged:
        """Run the story to its end, and judge it.

        Raises:
            TimeoutError: nothing has ended for STUCK_SECONDS.
        """
        inbox = await open_store(self.store, "driver")
        self.hosts = [self.start() for _ in range(4)]
        self.begun = time.monotonic_ns()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, inbox)
                nursery.start_soon(self._pause, inbox)
                nursery.start_soon(self._kill)
            await self._wait_for_end(inbox)
            for host in self.hosts:
                host.process.communicate(timeout=60)
            return await self._judge(inbox)
        finally:
            for host in self.hosts:
                host.process.kill()
                host.process.wait()
                host.close()
            with trio.move_on_after(60, shield=True):
                await inbox.close()

    # -- what happens ----------------------------------------------------------------------------

    async def _send(self, inbox: Inbox) -> None:
        rated = int(self.rate * self.seconds / 60 * 1.2)
        kinds = [LIMITED] * self.runs + [COALESCED, PAUSED] * (self.runs // 4) + [RATED] * rated
        self.random.shuffle(kinds)
        counts: collections.Counter[str] = collections.Counter()
        pace = self.seconds / len(kinds)
        for number, kind in enumerate(kinds):
            subject = f"{kind}-{self.random.randrange(5)}"
            arriving: list[_Arriving] = []
            # Several at once, so that some wait while another one of the subject is claimed.
            for place in range(BURST if kind == COALESCED else 1):
                # Without dots, as the ids of a sender.
                name = f"{kind}_{subject}_{counts[subject]:06}".replace(".", "-")
                counts[subject] += 1
                # No two states of a subject have the same time.
                arriving.append((name, kind, subject, time.time() + place / 1000))
            if kind == COALESCED:
                arriving = self._disordered(arriving)
            await self._accept(inbox, arriving)
            late = self.begun / 1e9 + number * pace - time.monotonic()
            if late > 0:
                await trio.sleep(late)
        await self._accept(inbox, self._late)

    def _disordered(self, arriving: list[_Arriving]) -> list[_Arriving]:
        """Return the events of one subject in another order; a fifth of them comes later."""
        arriving += self._late
        self.random.shuffle(arriving)
        self._late = [each for each in arriving if self.random.random() < 0.2]
        return [each for each in arriving if each not in self._late]

    async def _accept(self, inbox: Inbox, arriving: Sequence[_Arriving]) -> None:
        for name, kind, subject, changed_at in arriving:
            data = {"id": subject, "modified_at": rfc3339_of(changed_at)}
            body = json.dumps({"type": kind, "data": data}).encode()
            ordered = kind in (COALESCED, PAUSED)
            now = time.time()
            brought = NewDelivery(name, kind, body, int(now), now, subject, ordered)
            await retry_until_stored(partial(inbox.accept, brought, leased=False))

    async def _pause(self, inbox: Inbox) -> None:
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            await trio.sleep(self.random.uniform(1, 5))
            order = partial(inbox.pause, PAUSED, actor="a", reason="", until=None, now=time.time())
            await retry_until_stored(order)
            begun = time.monotonic_ns()
            await trio.sleep(self.random.uniform(OBEYED_SECONDS + 1, 8))
            self.paused.append((begun, time.monotonic_ns()))
            resume = partial(inbox.resume, PAUSED, actor="a", now=time.time())
            await retry_until_stored(resume)

    async def _kill(self) -> None:
        for _ in range(self.kills):
            await trio.sleep(self.random.uniform(0.3, 1.7) * self.seconds / self.kills)
            await trio.to_thread.run_sync(self.kill_one)

    async def _wait_for_end(self, inbox: Inbox) -> None:
        left, since = -1, time.monotonic()
        while True:
            counts = await retry_until_stored(inbox.counts)
            unfinished = sum(n for state, n in counts.items() if state is not DeliveryState.DONE)
            if not unfinished:
                return
            if unfinished != left:
                left, since = unfinished, time.monotonic()
            if time.monotonic() - since > STUCK_SECONDS:
                raise TimeoutError(f"nothing has ended for {STUCK_SECONDS:g} s: {counts}")
            await trio.sleep(0.5)

    # -- the judgement ---------------------------------------------------------------------------

    def _runs(self) -> list[Run]:
        opened: dict[tuple[str, str], int] = {}
        runs = []
        for line in self.ledger.read_text().splitlines():
            at, what, webhook_id, pid = line.split()
            if what == "start":
                opened[webhook_id, pid] = int(at)
            else:
                start = opened.pop((webhook_id, pid))
                runs.append(Run(webhook_id, start, int(at), what == "finish"))
        for (webhook_id, pid), start in opened.items():
            runs.append(Run(webhook_id, start, self.deaths[int(pid)], False))
        return sorted(runs, key=lambda run: run.start)

    async def _judge(self, inbox: Inbox) -> Judged:
        runs = self._runs()
        by_kind: dict[str, list[Run]] = collections.defaultdict(list)
        for run in runs:
            by_kind[run.webhook_id.partition("_")[0].replace("-", ".")].append(run)
        records = await _all_records(inbox)
        wrong: list[str] = []
        at_once = _most_at_once(by_kind[LIMITED])
        if at_once > CONCURRENCY:
            wrong.append(f"{at_once} events of {LIMITED} ran at once")
        minute, share = self._judge_rate(by_kind[RATED], wrong)
        self._judge_pauses(by_kind[PAUSED], wrong)
        superseded = _judge_ends(records, runs, wrong)
        _judge_order(by_kind[PAUSED], wrong)
        _judge_order(by_kind[COALESCED], wrong)
        return Judged(
            len(runs),
            self.killed,
            superseded,
            len(self.paused),
            at_once,
            minute,
            share,
            wrong,
        )

    def _judge_rate(self, runs: Sequence[Run], wrong: list[str]) -> tuple[int, float]:
        starts = [run.start / 1e9 for run in runs]
        most = 0
        for number, start in enumerate(starts):
            within = sum(1 for each in itertools.islice(starts, number, None) if each < start + 60)
            most = max(most, within)
        if most > self.rate * 1.05 + 1:
            wrong.append(f"{most} runs in a minute, the rate is {self.rate:g}")
        lasted = starts[-1] - starts[0]
        return most, len(starts) / (self.rate * lasted / 60) if lasted else 1.0

    def _judge_pauses(self, runs: Sequence[Run], wrong: list[str]) -> None:
        for begun, ended in self.paused:
            obeyed = begun + int(OBEYED_SECONDS * 1e9)
            during = [run.webhook_id for run in runs if obeyed < run.start < ended]
            if during:
                wrong.append(f"ran while they were paused: {during[:3]}")


async def _all_records(inbox: Inbox) -> list[Any]:
    records: list[Any] = []
    after = 0
    while found := await inbox.find(after_sequence=after, limit=500):
        records += found
        after = found[-1].sequence
    return records


def rfc3339_of(seconds: float) -> str:
    """Return a time with microseconds: events of one burst have different ones."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _most_at_once(runs: Sequence[Run]) -> int:
    changes = sorted([(run.start, 1) for run in runs] + [(run.end, -1) for run in runs])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _judge_ends(records: Sequence[Any], runs: Sequence[Run], wrong: list[str]) -> int:
    """Compare each event with its runs; return how many were superseded."""
    ran = collections.Counter(run.webhook_id for run in runs)
    finished = {run.webhook_id for run in runs if run.finished}
    last_run = {run.webhook_id: run.start for run in runs if run.finished}
    superseded = 0
    newest: dict[str, str] = {}
    for record in records:
        name = record.webhook_id
        if (record.last_error or "").startswith("superseded by "):
            superseded += 1
            newer = record.last_error.removeprefix("superseded by ")
            if not newer > name:
                wrong.append(f"{name} was {record.last_error}")
        elif name not in finished:
            wrong.append(f"{name} is done and was never handled")
        elif record.attempts > ran[name] + record.process_ends:
            wrong.append(f"{name} used {record.attempts} attempts, and ran {ran[name]} times")
        if record.type == COALESCED:
            newest[record.subject] = max(name, newest.get(record.subject, ""))
    for name in newest.values():
        of_subject = [
            each for each in last_run if each.rpartition("_")[0] == name.rpartition("_")[0]
        ]
        if name not in last_run:
            wrong.append(f"the newest event {name} was not handled")
        elif max(of_subject, key=last_run.__getitem__) != name:
            wrong.append(f"the newest event {name} was not handled last")
    return superseded


def _judge_order(runs: Sequence[Run], wrong: list[str]) -> None:
    """Require that the events of a subject finished in the order of their ids."""
    last: dict[str, str] = {}
    for run in sorted((run for run in runs if run.finished), key=lambda run: run.end):
        subject = run.webhook_id.rpartition("_")[0]
        if run.webhook_id < last.get(subject, ""):
            wrong.append(f"{run.webhook_id} finished after {last[subject]}")
        last[subject] = run.webhook_id


@contextmanager
def database() -> Iterator[str]:
    """Yield the connection string of a database on a server of its own."""
    from support.postgres import remove_server, running_server

    try:
        yield running_server().empty()
    finally:
        remove_server()


def main() -> int:
    """Run one story; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory) / "inbox.db")
        with database() if given.postgres else nullcontext(file) as store:
            story = Story(
                store,
                Path(directory),
                given.runs,
                given.kills,
                given.rate,
                given.seconds,
                random.Random(given.seed),
            )
            try:
                judged = trio.run(story.run)
            except TimeoutError as error:
                log = (Path(directory) / "log").read_text()
                sys.stdout.write(f"{error}\n{log[-2000:]}\n")
                return 2
    sys.stdout.write(f"{judged}\n")
    return 1 if judged.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
