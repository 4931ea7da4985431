"""The upgrade's requirements of a store, the same for every store."""

import threading

import msgspec
import pytest
import trio
import trio.testing
from support.postgres import running_server
from support.single_tenant import deliver

from sdk_trio.base.term import TermEndedError
from sdk_trio.config import Settings
from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.records.upgrades import UpgradeMarker, UpgradeState
from sdk_trio.storage import commit
from sdk_trio.storage.open import open_store
from sdk_trio.tenants.service import TenantService


@pytest.fixture(params=["Memory", "Sqlite", "Postgres"])
async def store(request, tmp_path, monkeypatch):
    if request.param == "Postgres":
        monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    settings = Settings.from_mapping(
        {"Storage:Backend": request.param, "Storage:Path": str(tmp_path)},
        standalone=True,
        receiver=False,
    )
    async with open_store(settings, owner="here") as opened:
        yield opened


MARKER = UpgradeMarker(state=UpgradeState.RUNNING, tenant_id="t", step="deliveries", started_at=1.5)


async def test_there_is_one_marker_and_the_last_one_counts(store):
    assert await store.upgrade.marker() is None
    await store.upgrade.save(MARKER)
    done = msgspec.structs.replace(MARKER, state=UpgradeState.DONE, position="7", finished_at=2.5)
    await store.upgrade.save(done)
    assert await store.upgrade.marker() == done


async def test_batches_pass_over_every_delivery_once_and_leave_those_of_other_tenants(store):
    await deliver(store, 10)
    other = NewDelivery("other", "order.paid", b"{}", 1, 1.0, tenant_id="another")
    await store.accept(other, leased=False)
    await deliver(store, 10, first=10)
    assert await store.upgrade.count_unassigned() == 20
    marker, rows, batches = MARKER, 0, 0
    while True:
        assigned = await store.upgrade.assign_batch(marker, limit=8)
        marker, rows, batches = assigned.marker, rows + assigned.rows, batches + 1
        assert await store.upgrade.marker() == marker
        assert await store.upgrade.count_unassigned() == 20 - rows
        if assigned.last:
            break
    assert (rows, batches) == (20, 3)
    records = await store.find(limit=50)
    assert {r.webhook_id for r in records if r.tenant_id != "t"} == {"other"}


async def test_a_delivery_that_is_removed_while_its_batch_is_saved_is_passed_over(monkeypatch):
    settings = Settings.from_mapping({"Storage:Backend": "Memory"}, standalone=True, receiver=False)
    async with open_store(settings, owner="here") as store:
        await store.park(NewDelivery("old", "order.paid", b"{}", 1, 1.0))
        await deliver(store, 1)
        upgrade = store.upgrade
        save = upgrade.save

        async def save_slowly(marker):
            await save(marker)
            assert (await store.purge(now=1e12)).parked == 1

        monkeypatch.setattr(upgrade, "save", save_slowly)
        assert (await upgrade.assign_batch(MARKER, limit=9)).rows == 1
        assert await upgrade.count_unassigned() == 0


async def test_a_batch_of_nothing_is_the_last_one(store):
    assigned = await store.upgrade.assign_batch(MARKER, limit=5)
    assert (assigned.rows, assigned.last, assigned.marker) == (0, True, MARKER)


async def test_deliveries_that_came_in_two_batches_exactly_end_with_an_empty_one(store):
    await deliver(store, 4)
    first = await store.upgrade.assign_batch(MARKER, limit=4)
    assert (first.rows, first.last) == (4, False)
    second = await store.upgrade.assign_batch(first.marker, limit=4)
    assert (second.rows, second.last) == (0, True)


async def test_a_cancelled_batch_is_whole_or_not_there(store):
    await deliver(store, 9)
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.upgrade.assign_batch(MARKER, limit=9)
    marker = await store.upgrade.marker()
    expected = 9 if marker is None else 0
    assert await store.upgrade.count_unassigned() == expected


async def test_a_host_whose_term_is_over_changes_nothing_of_the_upgrade(monkeypatch):
    monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    keys = {"Storage:Backend": "Postgres", "MultiTenant:Enabled": True}
    settings = Settings.from_mapping(keys, standalone=True, receiver=False)
    async with open_store(settings, owner="one") as one, open_store(settings, owner="two") as two:
        await deliver(one, 3)
        assert await one.upgrade.lead(seconds=60) == 1
        assert await two.upgrade.lead(seconds=60) is None
        assert await one.lead(seconds=60) == 1, "the lease of the leader is another one"
        with one.upgrade.fenced(1):
            await one.upgrade.save(MARKER)
            assert await one.upgrade.lead(seconds=0) == 1
            assert await two.upgrade.lead(seconds=60) == 2
            for write in (
                lambda: one.upgrade.save(msgspec.structs.replace(MARKER, position="9")),
                lambda: one.upgrade.assign_batch(MARKER, limit=9),
                lambda: TenantService(settings, one.tenants).add("default", name="Default"),
            ):
                with pytest.raises(TermEndedError, match="ran the upgrade in term 1, which is"):
                    await write()
        assert await two.upgrade.marker() == MARKER
        assert await two.upgrade.count_unassigned() == 3
        assert not list(await two.tenants.page())
        await one.upgrade.save(
            msgspec.structs.replace(MARKER, position="1")
        )  # the fence ends with its block


async def test_a_write_that_waits_for_the_lock_is_fenced_once_its_caller_has_left(
    monkeypatch,
):
    monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    monkeypatch.setattr(commit, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(commit, "ANSWER_SECONDS", 60)
    settings = Settings.from_mapping(
        {"Storage:Backend": "Postgres"}, standalone=True, receiver=False
    )
    go_on = threading.Event()
    async with open_store(settings, owner="one") as one, open_store(settings, owner="two") as two:
        assert await one.upgrade.lead(seconds=60) == 1
        assert await one.upgrade.lead(seconds=0) == 1
        async with trio.open_nursery() as nursery:
            # The server does not answer for a while: the write waits behind another one.
            nursery.start_soon(one._commits.submit, lambda _: go_on.wait(30))
            await trio.testing.wait_all_tasks_blocked()
            with one.upgrade.fenced(1), trio.move_on_after(0.05):
                await one.upgrade.save(MARKER)
            assert await two.upgrade.lead(seconds=60) == 2
            go_on.set()
        await one.write_checkpoint("later", "x")
        assert await two.upgrade.marker() is None
