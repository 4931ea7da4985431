"""Deliver events of six senders at once, kill the receiver, and count what became of each.

    python tests/sources_torture.py [--deliveries 10000] [--kills 40] [--seed 1] [--seconds 900]

The receiver is ``python -m sdk_trio run`` with a store in SQLite. Six senders, each signing as its
own library does, use the same ids for their events, and deliver each of them until it is answered
200: some twice, and some after a forgery of it. At random moments the receiver is killed (SIGKILL)
and started again. Its handlers write one row for each run, in one transaction with the event's end.

At the end every event is done. The exit status is 1 if an event was not handled exactly once, if
the inbox has another number of events, or if a forgery had another answer than the opaque 400. It
is 2 if there was no end.
"""

import argparse
import collections
import json
import random
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import attrs
import trio
from support.respawned import Respawned
from support.sources import SENDERS, Sender, settings_of
from support.wire import Wire, WireAnswer

#: Each handler writes the key of its event; equal rows would show a second run.
APPLICATION = f"""
from sdk_trio import HandlerRegistry

handlers = HandlerRegistry()


def handle(event, tx):
    tx.connection.execute("CREATE TABLE IF NOT EXISTS handled (key text, kind text)")
    tx.connection.execute("INSERT INTO handled VALUES (?, ?)", (event.key, event.type))


for source, kind in {[(sender.name, sender.type) for sender in SENDERS]!r}:
    handlers.source(source).on(kind, enqueue=True, transaction=True, max_attempts=1000)(handle)
"""

OPAQUE = b'{"error":"invalid webhook"}'

#: The share of events that are delivered twice, and that a forgery precedes.
TWICE, FORGED = 0.1, 0.1


@attrs.define
class Judged:
    """What has happened, and what was wrong."""

    handled: int
    kills: int
    deliveries: int
    forgeries: int
    lost_answers: int
    seconds: float
    wrong: list[str]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.handled} events of {len(SENDERS)} senders handled, {self.kills} kills, "
                f"{self.deliveries} deliveries answered 200, {self.forgeries} forgeries answered "
                f"400, {self.lost_answers} without an answer, {self.seconds:.0f} s",
                *(f"WRONG: {each}" for each in self.wrong),
            ]
        )


@attrs.define
class Story:
    """Six senders and one receiver that is killed.

    Args:
        directory: for the receiver.
        deliveries: how many events all senders have together.
        kills: how often the receiver is killed.
    """

    directory: Path
    deliveries: int
    kills: int
    random: random.Random
    accepted: collections.Counter[str] = attrs.Factory(collections.Counter)
    forgeries: int = 0
    lost: int = 0
    wrong: list[str] = attrs.Factory(list)

    async def run(self) -> Judged:
        """Deliver and kill to the end, and judge."""
        begun = time.monotonic()
        sources = {"Sdk": {"Sources": settings_of()}}
        (self.directory / "appsettings.json").write_text(json.dumps(sources))
        daemon = Respawned(self.directory, APPLICATION)
        async with trio.open_nursery() as nursery:
            await nursery.start(daemon.run)
            await daemon.accepting()
            async with trio.open_nursery() as sending:
                for sender in SENDERS:
                    ids = [f"evt_{number}" for number in range(self.deliveries // len(SENDERS))]
                    for share in (ids[::2], ids[1::2]):
                        sending.start_soon(self._send, daemon, sender, share)
                await self._kill(daemon)
            while await trio.to_thread.run_sync(self._unfinished):
                await trio.sleep(0.1)
            daemon.stop()
        killed = sum(death.status == -9 for death in daemon.deaths)
        return self._judge(killed, time.monotonic() - begun)

    async def _send(self, daemon: Respawned, sender: Sender, ids: list[str]) -> None:
        for number, webhook_id in enumerate(ids):
            body = sender.body(webhook_id, number)
            if self.random.random() < FORGED:
                forged = body.replace(b'"', b"'", 1)
                answer = await self._answer(daemon, sender, webhook_id, body, forged)
                self.forgeries += 1
                if (answer.status, answer.body) != (400, OPAQUE):
                    self.wrong.append(f"a forgery of {sender.name} was answered {answer.status}")
            for _ in range(1 + (self.random.random() < TWICE)):
                while (await self._answer(daemon, sender, webhook_id, body, body)).status != 200:
                    await trio.sleep(0.02)
                self.accepted[f"{webhook_id}.@{sender.name}"] += 1

    async def _answer(
        self, daemon: Respawned, sender: Sender, webhook_id: str, signed: bytes, body: bytes
    ) -> WireAnswer:
        """Post until there is an answer: a killed receiver gives none."""
        while True:
            headers = sender.headers(webhook_id, int(time.time()), signed)
            lines = [f"POST {sender.options.route} HTTP/1.1", "host: test"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
            try:
                with await Wire.connect(daemon.url) as wire:
                    await wire.send(head.encode() + body)
                    return await wire.answer()
            except OSError:
                self.lost += 1
                await trio.sleep(0.02)

    async def _kill(self, daemon: Respawned) -> None:
        """Kill the receiver at even shares of all deliveries, wherever it is then."""
        for number in range(self.kills):
            wanted = self.deliveries * (number + self.random.random()) / (self.kills + 1)
            while len(self.accepted) < wanted:
                await trio.sleep(0.005)
            daemon.kill()
            await trio.sleep(0.2)
            await daemon.accepting()

    def _unfinished(self) -> int:
        with sqlite3.connect(f"file:{self._store}?mode=ro", uri=True) as store:
            return int(store.execute("SELECT count(*) FROM work").fetchone()[0])

    @property
    def _store(self) -> Path:
        return self.directory / "data" / "inbox.db"

    def _judge(self, kills: int, seconds: float) -> Judged:
        with sqlite3.connect(f"file:{self._store}?mode=ro", uri=True) as store:
            handled = collections.Counter(
                key for (key,) in store.execute("SELECT key FROM handled")
            )
            (kept,) = store.execute("SELECT count(*) FROM arrival").fetchone()
        for name, found in (
            ("more than once", [key for key, runs in handled.items() if runs > 1]),
            ("never", sorted(self.accepted.keys() - handled.keys())),
            ("and never delivered", sorted(handled.keys() - self.accepted.keys())),
        ):
            if found:
                self.wrong.append(f"{len(found)} events were handled {name}: {found[:3]}")
        if kept != len(self.accepted):
            self.wrong.append(f"the inbox has {kept} events of {len(self.accepted)}")
        return Judged(
            sum(handled.values()),
            kills,
            self.accepted.total(),
            self.forgeries,
            self.lost,
            seconds,
            self.wrong,
        )


def main() -> int:
    """Run it as the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deliveries", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        dice = random.Random(asked.seed)
        story = Story(Path(directory), asked.deliveries, asked.kills, dice)

        async def bounded() -> Judged:
            with trio.fail_after(asked.seconds):
                return await story.run()

        try:
            judged = trio.run(bounded)
        except trio.TooSlowError:
            sys.stdout.write(f"no end within {asked.seconds:g} s\n")
            return 2
    sys.stdout.write(f"{judged}\n")
    return 1 if judged.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
