"""``Notifications:Enabled`` false is silence: who switches them on again hears nothing of it."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from support.deliveries import settings
from support.notified import FakeChannel, answering
from support.serving import running
from support.waiting import until

from sdk_trio.config import Settings
from sdk_trio.notifications.send import Again, Sent
from sdk_trio.records.tenants import AuditAction
from sdk_trio.runtime import Runtime
from sdk_trio.storage.open import open_store
from sdk_trio.tenants import TenantService


def settings_of(root: Path, *, enabled: bool, backend: str = "Sqlite", **more: Any) -> Settings:
    return settings(
        **more,
        Storage__Backend=backend,
        Storage__Path=str(root / "data"),
        MultiTenant__Enabled=True,
        MultiTenant__TenantStatus__RequireVerifiedEmailForSuspension=False,
        MultiTenant__Notifications__Enabled=enabled,
        MultiTenant__Notifications__Email__FromAddress="noreply@platform.example",
    )


@asynccontextmanager
async def announcing(settings: Settings, channel: FakeChannel) -> AsyncIterator[TenantService]:
    runtime = Runtime(settings, channels=lambda _: {"email": channel})
    async with running(runtime):
        yield runtime.receiver.tenancy.service


async def by_command(settings: Settings, identifier: str) -> None:
    """Suspend a tenant as a command does."""
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        service = TenantService(settings, store.tenants)
        await service.suspend(identifier)


@pytest.mark.parametrize("first", ["announced", "silent"])
async def test_transitions_before_the_first_poll_of_the_first_daemon(
    tmp_path: Path, first: str
) -> None:
    on, off = (settings_of(tmp_path, enabled=enabled) for enabled in (True, False))
    async with open_store(on, owner="before") as store:
        for name in ("announced", "silent", "later"):
            await TenantService(on, store.tenants).add(name, name=name)
    # Commands, with no daemon yet: transitions while Enabled is false are never announced.
    if first == "silent":
        await by_command(off, "silent")
    await by_command(on, "announced")
    channel = FakeChannel()
    with trio.fail_after(60):
        async with announcing(on, channel) as tenants:
            await tenants.suspend("later")
            await until(lambda: len(channel.finished) >= 2)
    async with open_store(on, owner="test") as store:
        records = await store.notifications.find(limit=100)
        assert [record.outbox.tenant_identifier for record in records] == ["later", "announced"]


async def test_transitions_while_notifications_are_off_are_never_announced(tmp_path: Path) -> None:
    on, off = (settings_of(tmp_path, enabled=enabled) for enabled in (True, False))
    channel = FakeChannel()
    with trio.fail_after(60):
        async with announcing(on, channel) as tenants:
            for name in ("announced", "silent", "command", "between", "later"):
                await tenants.add(name, name=name)
            await tenants.suspend("announced")
            await until(lambda: len(channel.finished) >= 1)
        async with announcing(off, channel) as tenants:
            await tenants.suspend("silent")
            await by_command(on, "command")
        # The settings of the daemon decide, also while it is not running.
        await by_command(on, "between")
        async with announcing(on, channel) as tenants:
            await tenants.suspend("later")
            await until(lambda: len(channel.finished) >= 2)
        async with open_store(on, owner="test") as store:
            records = await store.notifications.find(limit=100)
            assert [record.outbox.tenant_identifier for record in records] == ["later", "announced"]
            audit = await store.tenants.audit(limit=100)
            assert sum(row.action is AuditAction.SUSPENDED for row in audit) == 5


async def test_how_long_is_waited_between_attempts_is_a_setting(tmp_path: Path) -> None:
    at_once = {"MultiTenant__Notifications__RetryBaseSeconds": 0}
    chosen = settings_of(tmp_path, enabled=True, backend="Memory", **at_once)
    # Seven waits of up to 30 s, doubled each time, would be a quarter of an hour.
    channel = FakeChannel(behave=answering(*[Again("busy")] * 7, Sent("id")))
    with trio.fail_after(60):
        async with announcing(chosen, channel) as tenants:
            await tenants.add("acme", name="Acme")
            await tenants.suspend("acme")
            await until(lambda: len(channel.finished) >= 8)
