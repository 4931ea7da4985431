"""kill -9 at random points: every transition is announced or marked as unknown, none twice.

``SDK_TEST_NOTIFICATION_DISPATCHES=1000`` runs it in full; the suite runs a sample.
"""

import json
import logging
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import attrs
import pytest
import trio
from support.command_forker import Program, start_program
from support.deliveries import SECRET
from support.notifications import VARIABLES, FakeProvider, fake_provider, http_answer, read_request
from support.notified import transition
from support.waiting import until

from sdk_trio.records.notifications import NotificationRecord
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox

CHANNELS = ("email", "sms", "webhook")
DISPATCHES = int(os.environ.get("SDK_TEST_NOTIFICATION_DISPATCHES", "90"))
TRANSITIONS = -(-DISPATCHES // len(CHANNELS))

#: After at most so many arrivals the daemon is killed; each kill costs a start.
ARRIVALS_PER_KILL = 40

#: ``--log-cli-level=INFO`` shows them.
figures = logging.getLogger("figures")

NAME = re.compile(r"T\d{5}")


@attrs.define
class Providers:
    """All three receivers in one: counts what arrives, and says when the daemon is to die."""

    random: random.Random
    kill: Any = None
    until_kill: int = 10
    arrived: Counter[tuple[str, str]] = attrs.Factory(Counter)
    answered: Counter[tuple[str, str]] = attrs.Factory(Counter)

    async def __call__(self, provider: FakeProvider, stream: trio.SocketStream) -> None:
        request = await read_request(stream)
        if request is None:
            return
        channel, answer = "webhook", http_answer(200)
        if request.target.endswith("/mail/send"):
            channel, answer = "email", http_answer(202, X_Message_Id="m1")
        elif "/Messages" in request.target:
            channel, answer = "sms", http_answer(201, b'{"sid": "SM1", "status": "queued"}')
        found = NAME.search(unquote_plus(request.body.decode()))
        assert found, request.body
        message = (channel, found[0])
        self.arrived[message] += 1
        self.until_kill -= 1
        doomed = self.until_kill <= 0
        if doomed:
            self.until_kill = self.random.randint(1, ARRIVALS_PER_KILL)
        when = self.random.choice(("before", "within", "after"))
        if doomed and when == "before":
            self.kill()
        await trio.sleep(self.random.random() * 0.03)
        if doomed and when == "within":
            await stream.send_all(answer[:10])
            answer = answer[10:]
            self.kill()
        await stream.send_all(answer)
        self.answered[message] += 1
        if doomed and when == "after":
            await trio.sleep(self.random.random() * 0.01)
            self.kill()


@attrs.define
class Daemon:
    """``python -m sdk_trio run`` with every channel on the fake providers."""

    directory: Path
    url: str
    process: Program | None = None

    @property
    def settings(self) -> list[str]:
        notifications = "MultiTenant:Notifications"
        keys = {
            "Environment": "Development",
            "Storage:Path": str(self.directory / "data"),
            "Server:Bind": "127.0.0.1:0",
            "Webhooks:RequireHttps": "false",
            "MultiTenant:Enabled": "true",
            f"{notifications}:Enabled": "true",
            f"{notifications}:EnabledChannels:Sms": "true",
            f"{notifications}:EnabledChannels:Webhook": "true",
            f"{notifications}:Email:FromAddress": "platform@example.com",
            f"{notifications}:Email:EmailProviderA:BaseUrl": self.url,
            f"{notifications}:Sms:SmsProviderA:FromNumber": "+15550000000",
            f"{notifications}:Sms:SmsProviderA:BaseUrl": self.url,
            f"{notifications}:Webhook:Url": f"{self.url}/in",
        }
        return [part for key, value in keys.items() for part in ("--set", f"Sdk:{key}={value}")]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **VARIABLES, "SDK__WEBHOOKS__SECRET": SECRET, "NO_COLOR": "1"}

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = start_program(
                ["run", "--standalone", *self.settings],
                directory=self.directory,
                environ=self.environment,
                stdout=log,
                stderr=log,
            )

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)

    async def ended(self) -> int:
        process = self.process
        assert process is not None
        await until(lambda: process.poll() is not None)
        return int(process.returncode)

    async def notify(self, *words: str) -> Any:
        """Run a command beside the daemon, and return its JSON."""
        ran = await trio.run_process(
            [
                sys.executable,
                "-m",
                "sdk_trio",
                "notify",
                *words,
                "--format",
                "json",
                *self.settings,
            ],
            env=self.environment,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr.decode()
        return json.loads(ran.stdout)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[SqliteInbox]:
        (self.directory / "data").mkdir(mode=0o700, exist_ok=True)
        inbox = await SqliteInbox.open(
            self.directory / "data" / "inbox.db",
            LeaseTerms(owner="test", lease_seconds=75, dedup_seconds=3600, payload_seconds=3600),
        )
        try:
            yield inbox
        finally:
            await inbox.close()

    async def messages(self) -> list[NotificationRecord]:
        async with self.store() as inbox:
            return list(await inbox.notifications.find(limit=100_000))


@pytest.fixture
def daemon(tmp_path: Path) -> Any:
    daemon = Daemon(tmp_path, "")
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.process.kill()
        daemon.process.wait()


def key_of(record: NotificationRecord) -> tuple[str, str]:
    return record.id.channel, record.outbox.tenant_name


async def finished(daemon: Daemon) -> bool:
    async with daemon.store() as inbox:
        counts = await inbox.notifications.counts()
    done = counts["sent"] + counts["unknown"]
    return done == TRANSITIONS * len(CHANNELS)


async def test_kill_9_at_random_points_loses_nothing_and_repeats_nothing(daemon: Daemon) -> None:
    seed = random.randrange(2**32)
    figures.info("seed %s", seed)
    chance = random.Random(seed)
    providers = Providers(chance)
    async with fake_provider(behave=providers) as provider:
        daemon.url = provider.url
        providers.kill = lambda: daemon.send_signal(signal.SIGKILL)
        async with daemon.store() as inbox:
            # As an earlier start would have done: transitions from now on are announced.
            await inbox.notifications.create_messages({}, now=0.0, oldest=0.0)
            for number in range(TRANSITIONS):
                await transition(inbox, f"t{number:05}", now=time.time())
        kills = 0
        with trio.fail_after(120 + DISPATCHES):
            daemon.start()
            while not await finished(daemon):
                with trio.move_on_after(0.05 if kills < 3 else 0.5):
                    assert await daemon.ended() == -signal.SIGKILL, log_of(daemon)
                    kills += 1
                    daemon.start()
                    # Some kills come by the clock, in the middle of a start or between two sends.
                    if chance.random() < 0.3:
                        await trio.sleep(0.3 + chance.random())
                        daemon.send_signal(signal.SIGKILL)
        providers.kill = lambda: None
        daemon.send_signal(signal.SIGKILL)
        await daemon.ended()
        daemon.start()
        messages = {key_of(record): record for record in await daemon.messages()}
        assert len(messages) == TRANSITIONS * len(CHANNELS)
        unknown = {key for key, record in messages.items() if record.state == "unknown"}
        repeated = sum(count - 1 for count in providers.arrived.values())
        figures.info("kills %s, unknown %s, repeated %s", kills, len(unknown), repeated)
        assert kills >= 1
        assert not {key for key in unknown if key[0] == "webhook"}
        # Everything that is not unknown has arrived, and no email or SMS more than once.
        assert set(messages) - unknown <= set(providers.arrived)
        for key, count in providers.arrived.items():
            assert count == 1 or key[0] == "webhook", key
        listed = await daemon.notify("list", "--state", "unknown", "--limit", "100000")
        assert {(row["channel"], row["tenant_identifier"].title()) for row in listed} == unknown
        before = Counter(providers.arrived)
        retried = await daemon.notify("retry", "--state", "unknown", "--yes")
        assert {row["id"] for row in retried} == {row["id"] for row in listed}

        async def all_sent() -> bool:
            async with daemon.store() as inbox:
                return (await inbox.notifications.counts())["sent"] == len(messages)

        await until(all_sent, seconds=30 + len(unknown))
        assert Counter(providers.arrived) - before == Counter(dict.fromkeys(unknown, 1))
        daemon.send_signal(signal.SIGTERM)
        assert await daemon.ended() == 0


def log_of(daemon: Daemon) -> str:
    return (daemon.directory / "log").read_text()[-3000:]
