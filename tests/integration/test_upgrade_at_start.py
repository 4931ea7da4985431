"""The first start of a host that has become multi-tenant."""

import pytest
import trio
from support.single_tenant import (
    CountingStep,
    deliver,
    grants_in,
    host_settings,
    opened_host,
    write_database,
)
from support.waiting import until

from sdk_trio.errors import NotSupportedError, StoreLockedError, UpgradeTimedOutError
from sdk_trio.records.upgrades import UpgradeState
from sdk_trio.tenants.upgrade import HostUpgrade, Quiescence
from sdk_trio.webhooks import HandlerRegistry, WebhookReceiver


def receiver(settings, *steps):
    quiet = Quiescence()
    quiet.signal("test")
    return WebhookReceiver(
        settings, HandlerRegistry(), host_upgrade=HostUpgrade(steps=steps), quiescence=quiet
    )


async def state_of(settings):
    async with opened_host(settings) as host:
        marker = await host.store.upgrade.marker()
        tenants = await host.store.tenants.page()
        return marker, tenants, await host.store.upgrade.count_unassigned()


async def test_the_old_data_has_moved_before_the_first_delivery_is_accepted(tmp_path):
    settings = host_settings(tmp_path)
    write_database(tmp_path / "tenants" / "default.db", 12)
    async with opened_host(settings) as host:
        await deliver(host.store, 5)
    starting = receiver(settings)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(starting.run)
            tenant = await starting.tenancy.service.get("default")
            nursery.start_soon(starting.drain)
    marker, _, unassigned = await state_of(settings)
    assert marker is not None
    assert (marker.state, marker.tenant_id, unassigned) == (UpgradeState.DONE, tenant.id, 0)
    assert len(grants_in(tmp_path / "tenants" / f"{tenant.id}.db")) == 12


async def test_of_two_hosts_on_one_data_directory_the_second_is_refused_meanwhile(tmp_path):
    settings = host_settings(tmp_path)
    entered, go_on = trio.Event(), trio.Event()

    async def wait() -> None:
        entered.set()
        await go_on.wait()

    step = CountingStep(before=lambda n: wait() if n == 0 else None)
    one, other = receiver(settings, step), receiver(settings, step)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            await entered.wait()
            with pytest.raises(StoreLockedError, match="in use by process"):
                await other.run()
            go_on.set()
            await until(lambda: one.ready)
            await one.drain()
    assert step.ran == [0, 1, 2, 3, 4]


async def test_a_host_whose_upgrade_times_out_does_not_start_and_continues_next_time(tmp_path):
    settings = host_settings(tmp_path, seconds=2)
    step = CountingStep(before=lambda n: trio.Event().wait() if n == 2 else None)
    starting = receiver(settings, step)
    with pytest.raises(UpgradeTimedOutError):
        await starting.run()
    assert not starting.ready
    step.before = None
    again = receiver(host_settings(tmp_path), step)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            nursery.start_soon(again.drain)
    assert step.ran == [0, 1, 2, 3, 4]


async def test_a_host_with_the_strategy_that_is_not_supported_does_not_start(tmp_path):
    settings = host_settings(tmp_path, DefaultTenantStrategy="FirstUserOrganization")
    with pytest.raises(NotSupportedError):
        await receiver(settings).run()
    marker, tenants, _ = await state_of(settings)
    assert (marker, list(tenants)) == (None, [])
