"""Kill the receiver and two listeners again and again, and compare what each was posted.

    python tests/relay.py [--events 2000] [--seconds 120] [--seed 1] [--rate 40] [--postgres]

The receiver is ``python -m sdk_trio run``; two listeners, ``listen``, post to a server here, where
the reference library of Standard Webhooks verifies each delivery. At random moments the receiver or
a listener is killed (SIGKILL) and started again, or the server here goes away for a while. A
listener that is killed between its post and its position posts that delivery again: as many repeats
as kills are allowed, each right behind the first. The exit status is 1 if anything else came twice,
was left out, came out of order, or was forged.
"""

import argparse
import itertools
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from e2e.test_listen import LocalServer
from support.admin import TOKEN
from support.daemon import Place
from support.deliveries import SECRET
from support.ports import free_port
from support.postgres import remove_server, running_server

from sdk_trio.testing import sign_delivery

PATHS = ("/a", "/b")


class Program:
    """A command that is started again after each kill."""

    def __init__(self, place: Place, name: str, words: list[str]) -> None:
        self.place = place
        self.name = name
        self.kills = 0
        self.words = words
        self._log = (place.directory / name).open("a")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sdk_trio", *self.words],
            cwd=self.place.directory,
            env=self.place.environ,
            stdout=self._log,
            stderr=self._log,
        )

    def start_if_ended(self) -> None:
        """Restart a listener that ended because the receiver was down when it started."""
        if self.process.poll() is not None:
            self.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.kills += 1


def deliver(url: str, numbers: "itertools.count[int]", last: int, pause: float) -> None:
    """Post events one after the other, each until it is accepted."""
    with httpx.Client(timeout=30) as client:
        for number in numbers:
            if number >= last:
                return
            signed = sign_delivery("order.paid", secret=SECRET, webhook_id=f"msg_{number}")
            while True:
                try:
                    if client.post(url, content=signed.body, headers=signed.headers).is_success:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
            time.sleep(pause)


def arrived(place: Place) -> list[str]:
    """The ids in the order of their sequences, as the store has them."""
    if "SDK_POSTGRES_DSN" in place.environ:
        import psycopg

        statement = "SELECT delivery_key FROM sdk_trio.arrival ORDER BY sequence"
        with psycopg.connect(place.environ["SDK_POSTGRES_DSN"]) as connection:
            return [name for (name,) in connection.execute(statement)]
    with sqlite3.connect(place.data / "inbox.db") as connection:
        rows = connection.execute("SELECT delivery_key FROM arrival ORDER BY sequence")
        return [name for (name,) in rows]


def judge(path: str, seen: list[str], expected: list[str], kills: int) -> list[str]:
    """What is wrong with the ids that one listener has posted."""
    once = [name for name, _ in itertools.groupby(seen)]
    repeats = len(seen) - len(once)
    print(f"{path}: {len(once)} of {len(expected)}, {repeats} again after {kills} kills")
    wrong = []
    if once != expected:
        place = next(
            (n for n, pair in enumerate(zip(once, expected, strict=False)) if pair[0] != pair[1]),
            min(len(once), len(expected)),
        )
        wrong.append(f"{path}: not what the store holds, from place {place} on")
    if repeats > kills:
        wrong.append(f"{path}: {repeats} deliveries came twice, after {kills} kills")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=40)
    parser.add_argument("--postgres", action="store_true")
    given = parser.parse_args()
    dice = random.Random(given.seed)
    place = Place(Path(tempfile.mkdtemp(prefix="relay-")))
    admin, receiver = (f"127.0.0.1:{free_port()}" for _ in range(2))
    place.environ.update({"SDK_ADMIN_TOKEN": TOKEN, "SDK__ADMIN__BIND": admin})
    place.environ.update({"SDK__SERVER__BIND": receiver, "XDG_STATE_HOME": str(place.directory)})
    if given.postgres:
        dsn = running_server().empty()
        place.environ.update({"SDK__STORAGE__BACKEND": "Postgres", "SDK_POSTGRES_DSN": dsn})
    local = LocalServer()
    local.start()
    server = Program(place, "receiver.log", ["run", "--standalone"])
    listeners = [
        Program(
            place,
            f"listener{path[1:]}.log",
            [
                *("listen", "--format", "json", "--from", f"ws://{admin}", "--after", "0"),
                *("--forward-to", f"http://127.0.0.1:{local.port}{path}"),
            ],
        )
        for path in PATHS
    ]
    # The position of the first start is given, and kept from then on.
    while len(list(place.directory.glob("sdk_trio/listen-*.json"))) < len(listeners):
        time.sleep(0.5)
        for listener in listeners:
            listener.start_if_ended()
    for listener in listeners:
        listener.words = [word for word in listener.words if word not in ("--after", "0")]
    numbers = itertools.count()
    url = f"http://{receiver}/hooks/sdk"
    senders = [
        threading.Thread(target=deliver, args=(url, numbers, given.events, 4 / given.rate))
        for _ in range(4)
    ]
    for sender in senders:
        sender.start()
    programs = [server, *listeners]
    absences = 0
    end = time.monotonic() + given.seconds
    while time.monotonic() < end or any(sender.is_alive() for sender in senders):
        time.sleep(dice.uniform(0.2, 4))
        if time.monotonic() < end:
            victim = dice.choice([*programs, local])
            if victim is local:
                local.stop()
                absences += 1
            else:
                victim.kill()
            time.sleep(dice.uniform(0, 0.5))
            victim.start()
        for listener in listeners:
            listener.start_if_ended()
    expected = arrived(place)
    net = time.monotonic() + 120
    while time.monotonic() < net and any(
        len(set(local.seen.get(path, ()))) < len(expected) for path in PATHS
    ):
        time.sleep(0.2)
        for listener in listeners:
            listener.start_if_ended()
    time.sleep(2)
    for program in programs:
        program.kill()
        program.kills -= 1
    remove_server()
    print(f"{server.kills} kills of the receiver, {absences} absences of the local server")
    wrong = [f"{local.forged} forged"] if local.forged else []
    for path, listener in zip(PATHS, listeners, strict=True):
        wrong += judge(path, local.seen.get(path, []), expected, listener.kills)
    print(json.dumps({"wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
