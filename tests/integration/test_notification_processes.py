"""Two processes that send from one SQLite file: no message twice, and none lost when one dies."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from support.notified import transition
from support.waiting import PATIENCE_SECONDS

from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox

#: Short, so that the survivor takes over within the test's patience.
TERMS = {"lease_seconds": 5.0, "dedup_seconds": 100.0, "payload_seconds": 40.0}

SENDS = f"""
import os, random, sys
import trio
from sdk_trio.notifications.pump import ChannelLimits
from sdk_trio.notifications.pump import NotificationPump
from sdk_trio.notifications.send import Sent
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox

file, log, owner = sys.argv[1:]
lines = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

class Channel:
    def __init__(self, name, repeatable):
        self.name, self.repeatable = name, repeatable

    async def send(self, record):
        os.write(lines, f"{{owner}} {{record.sequence}}-{{self.name}}\\n".encode())
        await trio.sleep(random.random() * 0.02)
        return Sent()

async def main():
    inbox = await SqliteInbox.open(file, LeaseTerms(owner=owner, **{TERMS!r}))
    channels = {{"email": Channel("email", False), "webhook": Channel("webhook", True)}}
    limits = dict.fromkeys(channels, ChannelLimits(per_second=1000.0, burst=1000))
    pump = NotificationPump(channels, inbox.notifications, limits=limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(pump.run)
        print("ready", flush=True)

trio.run(main)
"""


@attrs.define
class Senders:
    """The processes, and what each of them has begun to send."""

    directory: Path
    processes: dict[str, subprocess.Popen[bytes]] = attrs.Factory(dict)

    @property
    def file(self) -> Path:
        return self.directory / "inbox.db"

    async def start(self, owner: str) -> None:
        words = [str(self.file), str(self.directory / "log"), owner]
        process = subprocess.Popen([sys.executable, "-c", SENDS, *words], stdout=subprocess.PIPE)
        self.processes[owner] = process
        assert process.stdout is not None
        assert await trio.to_thread.run_sync(process.stdout.readline) == b"ready\n"

    def kill(self, owner: str) -> None:
        process = self.processes.pop(owner)
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()

    def begun(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {owner: [] for owner in ("a", "b")}
        # Text after the last line break is still being written.
        for line in (self.directory / "log").read_text().split("\n")[:-1]:
            owner, id = line.split()
            found[owner].append(id)
        return found


@pytest.fixture
async def senders(tmp_path: Path) -> AsyncIterator[Senders]:
    (tmp_path / "log").touch()
    senders = Senders(tmp_path)
    yield senders
    for owner in list(senders.processes):
        senders.kill(owner)


async def test_two_processes_send_no_message_twice_and_one_continues_alone(
    senders: Senders,
) -> None:
    store: Any = await SqliteInbox.open(senders.file, LeaseTerms(owner="command", **TERMS))
    await store.notifications.create_messages({}, now=0.0, oldest=0.0)
    made = 0

    async def happen_until(enough: Any) -> None:
        nonlocal made
        while not enough():
            # No more than the processes can do, however little of the machine they get.
            if 2 * made - sum(map(len, senders.begun().values())) < 200:
                await transition(store, f"t{made % 7}", now=time.time())
                made += 1
            else:
                await trio.sleep(0.01)

    with trio.fail_after(2 * PATIENCE_SECONDS):
        await senders.start("a")
        await senders.start("b")
        # Both work at the same time: transitions continue until each process has sent its share.
        await happen_until(lambda: min(map(len, senders.begun().values())) >= 40)
        senders.kill("a")
        at_death = len(senders.begun()["b"])
        await happen_until(lambda: len(senders.begun()["b"]) >= at_death + 20)
        counts: dict[str, int] = {}
        while counts.get("sent", 0) + counts.get("unknown", 0) < 2 * made:
            await trio.sleep(0.05)
            counts = await store.notifications.counts()
    senders.kill("b")

    by_a, by_b = map(Counter, senders.begun().values())
    messages = {str(m.id): str(m.state) for m in await store.notifications.find(limit=10 * made)}
    await store.close()
    assert len(messages) == 2 * made
    sent = {id for id, state in messages.items() if state == "sent"}
    assert sent <= {*by_a, *by_b}
    assert {id for id in messages if id.endswith("webhook")} <= sent
    for id, number in (by_a + by_b).items():
        # A webhook that was being sent when its process died is sent again by the other one.
        assert number == 1 or (id.endswith("webhook") and number == 2 and id in by_a), id
