"""Notifications as an operator has them: a daemon, its settings, and ``notify`` in a shell."""

import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from support.command_forker import run_command
from support.deliveries import SECRET
from support.notifications import VARIABLES, fake_provider, http_answer, read_request
from support.notified import FakeChannel, stores_of, transition
from support.serving import running
from support.waiting import until

from sdk_trio.config import Settings
from sdk_trio.notifications.send import Ambiguous, Outcome, Sent
from sdk_trio.records.notifications import NotificationState, SendResult
from sdk_trio.runtime import Runtime

NOTIFICATIONS = "MultiTenant:Notifications"


class Shell:
    """Runs ``notify`` and ``tenant`` on one data directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *words: str, **keys: str) -> subprocess.CompletedProcess[str]:
        keys = {"Sdk:Storage:Path": str(self.directory), "Sdk:MultiTenant:Enabled": "true", **keys}
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        return run_command(
            (*words, *settings),
            environ={**os.environ, "NO_COLOR": "1"},
            directory=self.directory.parent,
            seconds=60,
        )

    def json(self, *words: str, status: int = 0) -> Any:
        done = self(*words, "--format", "json")
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "data").mkdir(mode=0o700)
    return Shell(tmp_path / "data")


async def seed(shell: Shell, *endings: NotificationState) -> None:
    """Put one message on ``email`` into each of these states, and one on ``sms`` that waits."""
    async with stores_of("sqlite", shell.directory) as stores:
        store = await stores.open("seed")
        notifications = store.notifications
        await notifications.create_messages({}, now=0.0, oldest=0.0)
        for number, state in enumerate(endings):
            now = time.time()
            await transition(store, f"t{number}", now=now)
            await notifications.create_messages({"email": False}, now=now, oldest=0.0)
            (record,) = (await notifications.claim_due("email", limit=9, now=now)).records
            await notifications.start(record.id, now=now)
            await notifications.finish(record.id, SendResult(state, "it is so"), now=now)


async def test_messages_are_listed_shown_and_put_back(shell: Shell) -> None:
    state = NotificationState
    await seed(shell, state.SENT, state.FAILED, state.SKIPPED, state.UNKNOWN, state.UNKNOWN)
    limited = shell("notify", "list", "--limit", "2")
    assert "stopped at 2; there are more: --limit N" in limited.stderr
    rows = shell.json("notify", "list")
    assert [(row["id"], row["state"]) for row in rows] == [
        ("5-email", "unknown"),
        ("4-email", "unknown"),
        ("3-email", "skipped"),
        ("2-email", "failed"),
        ("1-email", "sent"),
    ]
    assert (rows[0]["tenant_identifier"], rows[0]["reason"]) == ("t4", "it is so")
    listed = shell.json("notify", "list", "--state", "unknown", "--tenant", "t3")
    assert [row["id"] for row in listed] == ["4-email"]
    assert shell.json("notify", "list", "--channel", "sms") == []
    assert len(shell.json("notify", "list", "--limit", "2")) == 2

    shown = shell.json("notify", "show", "5-email")
    assert shown["outbox"]["site_manager_email"] == "m@example.com"
    assert shown["delivery_id"] == rows[0]["delivery_id"]
    table = shell("notify", "show", "4-EMAIL").stdout
    assert "Active -> Suspended (Suspended)" in table

    looked = shell.json("notify", "retry", "--state", "unknown", "--dry-run")
    assert [row["retried"] for row in looked] == [False, False]
    partly = shell.json("notify", "retry", "1-email", "2-email", "77-sms", status=1)
    assert [(row["id"], row["retried"]) for row in partly] == [
        ("1-email", False),
        ("2-email", True),
        ("77-sms", False),
    ]
    assert "is sent" in partly[0]["reason"]
    assert "no such message" in partly[2]["reason"]
    assert len(shell.json("notify", "retry", "--state", "unknown", "--yes")) == 2
    states = {row["id"]: row["state"] for row in shell.json("notify", "list")}
    assert states == {
        "1-email": "sent",
        "2-email": "pending",
        "3-email": "skipped",
        "4-email": "pending",
        "5-email": "pending",
    }


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("retry",), 2, "give the ids of messages, or --state"),
        (("retry", "1-email", "--state", "failed"), 2, "not both"),
        (
            ("retry", "1-email", "--channel", "email"),
            2,
            "--channel filters the messages of a --state",
        ),
        (("retry", "17"), 2, "'17' is not the id of a message"),
        (("show", "email-1"), 2, "not the id of a message"),
        (("show", "99-email"), 1, "there is no message 99-email"),
        (("list", "--limit", "no"), 2, "--limit"),
        (("list", "--tenant", "unknown"), 1, "no tenant 'unknown'"),
    ],
)
async def test_errors_are_reported_in_one_line(
    shell: Shell, words: tuple[str, ...], status: int, said: str
) -> None:
    await seed(shell, NotificationState.SENT)
    done = shell("notify", *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_store_or_tenants_it_reports_that(tmp_path: Path) -> None:
    nothing = Shell(tmp_path / "nothing")
    assert nothing("notify", "list").returncode == 69
    assert not nothing.directory.exists()
    disabled = nothing("notify", "list", **{"Sdk:MultiTenant:Enabled": "false"})
    assert (disabled.returncode, "MultiTenant:Enabled" in disabled.stderr) == (78, True)


def settings_of(directory: Path, **keys: Any) -> Settings:
    return Settings.from_mapping(
        {
            "Environment": "Development",
            "Storage:Path": str(directory),
            "Server:Bind": ["127.0.0.1:0"],
            "Admin:Bind": "127.0.0.1:0",
            "Webhooks:RequireHttps": False,
            "Webhooks:Secret": SECRET,
            "MultiTenant:Enabled": True,
            f"{NOTIFICATIONS}:Enabled": True,
            f"{NOTIFICATIONS}:Email:FromAddress": "platform@example.com",
            **keys,
        },
        standalone=True,
    )


@asynccontextmanager
async def announcing(settings: Settings, **options: Any) -> AsyncIterator[Runtime]:
    runtime = Runtime(settings, **options)
    async with running(runtime):
        yield runtime


async def notify(shell: Shell, *words: str) -> Any:
    return await trio.to_thread.run_sync(shell.json, "notify", *words)


async def test_a_running_daemon_announces_transitions_and_sends_what_a_command_requeued(
    shell: Shell,
) -> None:
    outcomes: list[Outcome] = [Ambiguous("no answer"), Sent("m2")]
    answers = iter(outcomes)

    async def behave(number: int) -> Outcome:
        await trio.lowlevel.checkpoint()
        return next(answers)

    channel = FakeChannel(behave=behave)
    settings = settings_of(shell.directory)
    async with announcing(settings, channels=lambda _: {"email": channel}) as runtime:
        tenants = runtime.receiver.tenancy.service
        verified = {"site_manager_email": "m@example.com", "site_manager_email_verified": True}
        await tenants.add("acme", name="Acme", **verified)
        done = await trio.to_thread.run_sync(lambda: shell("tenant", "suspend", "acme"))
        assert done.returncode == 0
        await until(lambda: channel.finished)
        with trio.fail_after(60):
            while [r["state"] for r in await notify(shell, "list")] != ["unknown"]:
                await trio.sleep(0.01)
        await trio.sleep(1)  # several looks of the pump, none of which sends it again
        assert len(channel.begun) == 1
        await notify(shell, "retry", "1-email")
        await until(lambda: len(channel.finished) == 2)

        def samples() -> dict[str, float]:
            return {dict(s.labels)["result"]: s.value for s in runtime.notification_samples}

        await until(lambda: samples()["sent"])
        # What has not happened is 0, so that its first time is an increase.
        assert samples() == {"sent": 1, "unknown": 1, "failed": 0, "retried": 0, "skipped": 0}
    assert [row["state"] for row in await notify(shell, "list")] == ["sent"]


async def test_while_it_is_not_enabled_nothing_is_written_or_sent(shell: Shell) -> None:
    channel = FakeChannel()
    settings = settings_of(shell.directory, **{f"{NOTIFICATIONS}:Enabled": False})
    async with announcing(settings, channels=lambda _: {"email": channel}) as runtime:
        tenants = runtime.receiver.tenancy.service
        await tenants.add("acme", name="Acme")
        await tenants.deactivate("acme")
        await trio.sleep(1.2)
        assert runtime.notification_samples == ()
    assert channel.begun == []
    assert await notify(shell, "list") == []
    # Enabling it later does not announce earlier transitions.
    settings = settings_of(shell.directory)
    async with announcing(settings, channels=lambda _: {"email": channel}) as runtime:
        await runtime.receiver.tenancy.service.reactivate("acme")
        await until(lambda: channel.finished)
    assert [row["transition"] for row in await notify(shell, "list")] == ["Reactivated"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_shutdown_finishes_what_was_begun_within_its_deadline(
    shell: Shell, hangs: bool
) -> None:
    async def slow(number: int) -> Outcome:
        await trio.sleep(600 if hangs else 0.5)
        return Sent()

    channel = FakeChannel(behave=slow)
    drain = {"Webhooks:GracefulDrainTimeoutSeconds": 3} if hangs else {}
    settings = settings_of(shell.directory, **drain)
    async with announcing(settings, channels=lambda _: {"email": channel}) as runtime:
        await runtime.receiver.tenancy.service.add("acme", name="Acme")
        await runtime.receiver.tenancy.service.deactivate("acme")
        await until(lambda: channel.begun)
    expected = "unknown" if hangs else "sent"
    assert [row["state"] for row in await notify(shell, "list")] == [expected]


async def test_without_its_variable_a_message_waits_for_it_and_a_retry(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMAIL_API_KEY", raising=False)

    async def accept(provider: Any, stream: Any) -> None:
        provider.requests.append(await read_request(stream))
        await stream.send_all(http_answer(202, X_Message_Id="m1"))

    async with fake_provider(behave=accept) as provider:
        base = f"{NOTIFICATIONS}:Email:EmailProviderA:BaseUrl"
        async with announcing(settings_of(shell.directory, **{base: provider.url})) as runtime:
            tenants = runtime.receiver.tenancy.service
            verified = {"site_manager_email": "m@example.com", "site_manager_email_verified": True}
            await tenants.add("acme", name="Acme", **verified)
            await tenants.suspend("acme")
            with trio.fail_after(60):
                while [r["state"] for r in await notify(shell, "list")] != ["skipped"]:
                    await trio.sleep(0.01)
            (row,) = await notify(shell, "list")
            assert "EMAIL_API_KEY is not set" in row["reason"]
            monkeypatch.setenv("EMAIL_API_KEY", VARIABLES["EMAIL_API_KEY"])
            await notify(shell, "retry", "--state", "skipped", "--yes")
            await until(lambda: provider.requests)
        (row,) = await notify(shell, "list")
        assert (row["state"], row["provider_id"]) == ("sent", "m1")


async def test_a_message_that_hangs_at_a_provider_is_unknown_after_the_shutdown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMAIL_API_KEY", VARIABLES["EMAIL_API_KEY"])

    async def hang(provider: Any, stream: Any) -> None:
        provider.requests.append(await read_request(stream))
        await trio.sleep_forever()

    async with fake_provider(behave=hang) as provider:
        keys = {
            f"{NOTIFICATIONS}:Email:EmailProviderA:BaseUrl": provider.url,
            "Webhooks:GracefulDrainTimeoutSeconds": 1,
        }
        async with announcing(settings_of(shell.directory, **keys)) as runtime:
            tenants = runtime.receiver.tenancy.service
            verified = {"site_manager_email": "m@example.com", "site_manager_email_verified": True}
            await tenants.add("acme", name="Acme", **verified)
            await tenants.suspend("acme")
            await until(lambda: provider.requests)
    (row,) = await notify(shell, "list")
    assert row["state"] == "unknown"
    assert "interrupted by a shutdown" in row["reason"]
