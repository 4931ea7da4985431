"""Cut the power at many moments of a run, and look for every acknowledged event.

    python tests/power_cuts.py [--moments 200] [--failed-syncs] [--processes 1] [--seconds 60]
                               [--seed 1] [--keep DIRECTORY]

The daemon is ``python -m sdk_trio run`` with a store in SQLite. A preloaded library records all its
writes and syncs (support/power_cut.py) while several senders deliver events: inline ones that end
at once, inline ones that last, so that their claims are committed without a sync, and enqueued
ones. Each answer 200 is noted with the length of the record at that time.

``--failed-syncs``: every second or so each fsync fails with EIO for 30 to 300 ms, and what it
should have written is lost unless it is written again, as on Linux.

Then the daemon is killed. For each of the moments, the files are made that a power cut would have
left, once with nothing but what was synced, once with some of the other pages as well. SQLite opens
them; the database must be sound and have every event that was acknowledged before that moment.

The exit status is 1 if an acknowledged event is missing or a database is damaged.
"""

import argparse
import contextlib
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import httpx
from support.deliveries import SECRET
from support.disk_faults import DiskFaults, broken
from support.power_cut import PowerCut, replay
from support.supervised import SIGKILL, Daemon, running
from support.tables import STATE_OF_EACH

from sdk_trio.testing import sign_delivery

#: Senders of each kind, and what their ids begin with. ``aside`` lasts for :data:`LASTING_SECONDS`.
KINDS = {"quick": "order.created", "aside": "order.created", "queued": "order.paid"}
SENDERS_OF_A_KIND = 2

#: Time that a lasting handler takes, in seconds: its claim is committed meanwhile.
LASTING_SECONDS = 0.02


@attrs.frozen
class Acknowledged:
    """An event whose sender got 200 when the record had the length ``at``."""

    at: int
    webhook_id: str

    @property
    def is_inline(self) -> bool:
        """Whether its handler had ended by then."""
        return not self.webhook_id.startswith("queued")


@attrs.define
class Report:
    """What was found; ``worst`` is the largest number of events missing at one moment."""

    acknowledged: int = 0
    refused: int = 0
    failed_syncs: int = 0
    moments: int = 0
    checks: int = 0
    moments_with_loss: int = 0
    lost: int = 0
    worst: str = ""
    damaged: int = 0

    @property
    def broken(self) -> bool:
        """Whether a promise was broken."""
        return bool(self.lost or self.damaged)

    def rows(self) -> Iterator[tuple[str, object]]:
        """Return names and values for people."""
        yield "events acknowledged", self.acknowledged
        yield "deliveries refused or not answered", self.refused
        yield "syncs that failed", self.failed_syncs
        yield "moments of a power cut", self.moments
        yield "checks of one event at one moment", self.checks
        yield "moments at which acknowledged events were lost", self.moments_with_loss
        yield "acknowledged events lost, most at one moment", self.worst or 0
        yield "databases damaged", self.damaged


class Senders:
    """Threads that deliver until they are stopped, and note what was acknowledged."""

    def __init__(self, daemon: Daemon, power: PowerCut) -> None:
        self._daemon = daemon
        self._power = power
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.acknowledged: list[Acknowledged] = []
        self.refused = 0

    def __enter__(self) -> "Senders":
        for kind in KINDS:
            for sender in range(SENDERS_OF_A_KIND):
                thread = threading.Thread(target=self._send, args=(kind, sender))
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, kind: str, sender: int) -> None:
        number = 0
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                number += 1
                webhook_id = f"{kind}-{sender}-{number}"
                signed = sign_delivery(KINDS[kind], secret=SECRET, webhook_id=webhook_id)
                try:
                    answer = client.post(
                        self._daemon.url, headers=signed.headers, content=signed.body
                    )
                except httpx.TransportError:
                    self.refused += 1
                    continue
                if answer.status_code == 200:
                    self.acknowledged.append(Acknowledged(self._power.recorded(), webhook_id))
                else:
                    self.refused += 1
                    self._over.wait(0.02)


def power_cuts(
    directory: Path,
    *,
    moments: int,
    failed_syncs: bool,
    seconds: float,
    seed: int,
    processes: int = 1,
) -> Report:
    """Run the daemon for some seconds, then check what power cuts would have left."""
    chance = random.Random(seed)
    daemon = Daemon(directory)
    power = PowerCut(directory / "data", directory / "kept")
    faults = DiskFaults(directory)
    daemon.environment |= power.environment | faults.environment
    # The recorder first: it has to see what the other one refuses.
    daemon.environment["LD_PRELOAD"] = " ".join(
        made.environment["LD_PRELOAD"] for made in (power, faults)
    )
    daemon.environment["ASIDE"] = str(LASTING_SECONDS)
    daemon.settings["Server:Processes"] = str(processes)
    with running(daemon), Senders(daemon, power) as senders:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.3, 1.2))
            if failed_syncs:
                percent = chance.choice((100, 50))
                faults.set(broken("sync", directory / "data", percent=percent))
                time.sleep(chance.uniform(0.03, 0.3))
                faults.clear()
        daemon.signal(SIGKILL)
        daemon.ended()
    report = Report(acknowledged=len(senders.acknowledged), refused=senders.refused)
    acknowledged = sorted(senders.acknowledged, key=lambda event: event.at)
    _check(report, power, acknowledged, moments, chance, directory)
    return report


def _check(
    report: Report,
    power: PowerCut,
    acknowledged: Sequence[Acknowledged],
    moments: int,
    chance: random.Random,
    directory: Path,
) -> None:
    # Half of them just after an answer, before the system has written anything by itself.
    wanted = [chance.choice(acknowledged).at for _ in range(moments // 2)]
    wanted += [chance.randrange(power.recorded()) for _ in range(moments - len(wanted))]
    wanted.sort(reverse=True)
    for disk in replay(power.journal, power.base):
        report.failed_syncs = disk.failed_syncs
        while wanted and disk.at >= wanted[-1]:
            wanted.pop()
            report.moments += 1
            before = [event for event in acknowledged if event.at <= disk.at]
            lost = 0
            for some_pages in (None, chance):
                with tempfile.TemporaryDirectory(dir=directory) as name:
                    disk.cut(Path(name), some_pages)
                    found = _events_in(Path(name) / "inbox.db")
                if found is None:
                    report.damaged += 1
                    continue
                report.checks += len(before)
                missing = [event for event in before if not _is_kept(event, found)]
                lost = max(lost, len(missing))
            report.moments_with_loss += lost > 0
            if lost > report.lost:
                report.lost, report.worst = lost, f"{lost} of {len(before)}"


def _events_in(file: Path) -> dict[str, str] | None:
    """Return the states of the events; None if the database is damaged."""
    connection = sqlite3.connect(file)
    try:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            return None
        if not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            return {}
        return dict(connection.execute(STATE_OF_EACH))
    except sqlite3.DatabaseError:
        return None
    finally:
        connection.close()


def _is_kept(event: Acknowledged, found: dict[str, str]) -> bool:
    state = found.get(event.webhook_id)
    return state == "done" if event.is_inline else state is not None


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--moments", type=int, default=200)
    made.add_argument("--failed-syncs", action="store_true", help="let fsync fail now and then")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--seconds", type=float, default=60, help="of the load")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--keep", type=Path, help="a new directory for store, log and records")
    return made


def _main(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = options.keep
            directory.mkdir(parents=True)
        report = power_cuts(
            directory,
            moments=options.moments,
            failed_syncs=options.failed_syncs,
            seconds=options.seconds,
            seed=options.seed,
            processes=options.processes,
        )
    print(*(f"| {name} | {value} |" for name, value in report.rows()), sep="\n")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(_main(_parser().parse_args()))
