"""``tenant purge``: removable tenants, remaining data, and remnants of a crash."""

import random

import attrs
import pytest
import trio
from msgspec import structs
from support.keyed import ByKey
from support.postgres import running_server
from support.single_tenant import host_settings, opened_host, write_database

from sdk_trio.config import Settings
from sdk_trio.errors import IllegalTransitionError, TenantConflictError, UnknownTenantError
from sdk_trio.records.deliveries import Dead, Done, NewDelivery
from sdk_trio.records.tenants import AuditAction, AuditRecord, Tenant
from sdk_trio.storage.open import open_store
from sdk_trio.tenants.databases import TenantDatabases
from sdk_trio.tenants.purge import Purger
from sdk_trio.tenants.service import TenantService

DAY = 86_400.0


@attrs.define
class Clock:
    now: float = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


@attrs.define
class Bench:
    host: object
    tenants: TenantService
    databases: TenantDatabases
    purger: Purger
    clock: Clock

    async def add(self, identifier: str) -> str:
        tenant = await self.tenants.add(identifier, name=identifier)
        await self.databases.run(tenant.id, lambda c: c.execute("CREATE TABLE grants (body)"))
        return tenant.id

    async def delete(self, identifier: str, *, days_ago: float) -> None:
        now, self.clock.now = self.clock.now, self.clock.now - days_ago * DAY
        await self.tenants.delete(identifier)
        self.clock.now = now

    def files(self) -> set[str]:
        return {file.name[:36] for file in self.databases.directory.iterdir()}


@pytest.fixture
async def bench(tmp_path):
    settings = host_settings(tmp_path)
    async with opened_host(settings) as host:
        clock = Clock()
        databases = TenantDatabases(host.directory)
        tenants = TenantService(settings, host.store.tenants, clock=clock)
        purger = Purger(settings, host.store, databases=databases, clock=clock)
        yield Bench(host, tenants, databases, purger, clock)
        await databases.close()


async def purge_all(bench, **options):
    found = await bench.purger.candidates()
    return [await bench.purger.purge(c, actor="test", **options) for c in found]


async def test_only_tenants_deleted_longer_ago_than_their_retention_are_removed(bench):
    ids = {name: await bench.add(name) for name in ("active", "fresh", "limit", "old")}
    await bench.delete("fresh", days_ago=1)
    await bench.delete("limit", days_ago=90)
    await bench.delete("old", days_ago=90.001)
    candidates = await bench.purger.candidates()
    assert [c.tenant_id for c in candidates] == [ids["old"]]
    assert candidates[0].bytes > 0
    assert bench.files() == set(ids.values()), "the dry run removed something"
    (removed,) = await purge_all(bench)
    assert removed.identifier == "old"
    assert removed.bytes > 0
    assert removed.outbox == 1
    assert bench.files() == set(ids.values()) - {ids["old"]}
    assert [t.identifier for t in await bench.tenants.list()] == ["active", "fresh", "limit"]
    assert await bench.purger.candidates() == []


async def test_the_audit_trail_names_who_purged_and_keeps_the_past_unless_asked_to_forget(bench):
    for name in ("one", "two"):
        await bench.add(name)
        await bench.delete(name, days_ago=100)
    one, two = await bench.purger.candidates()
    await bench.purger.purge(one, actor="ada", reason="asked for")
    await bench.purger.purge(two, actor="ada", forget_audit=True)
    rows = await bench.tenants.audit(one.tenant_id)
    assert [row.action for row in rows] == ["Created", "Deleted", "Purged"]
    assert (rows[-1].actor, rows[-1].reason) == ("ada", "asked for")
    assert [row.action for row in await bench.tenants.audit(two.tenant_id)] == ["Purged"]


async def test_a_tenant_reactivated_after_the_dry_run_keeps_everything(bench):
    tenant_id = await bench.add("back")
    await bench.delete("back", days_ago=100)
    (candidate,) = await bench.purger.candidates()
    bench.clock.now -= 50 * DAY  # within the retention it can be reactivated
    await bench.tenants.reactivate("back")
    bench.clock.now += 50 * DAY
    with pytest.raises(TenantConflictError):
        await bench.purger.purge(candidate, actor="test")
    assert bench.files() == {tenant_id}


async def test_a_tenant_that_is_not_deleted_is_refused(bench):
    await bench.add("active")
    await bench.add("old")
    await bench.delete("old", days_ago=100)
    (candidate,) = await bench.purger.candidates()
    candidate = attrs.evolve(candidate, tenant=await bench.tenants.get("active"))
    with pytest.raises(IllegalTransitionError, match="'active' is Active and is not purged"):
        await bench.purger.purge(candidate, actor="test")
    assert len(bench.files()) == 2


async def test_files_that_a_killed_purge_left_are_found_and_those_of_others_are_not(bench):
    tenant_id = await bench.add("old")
    await bench.delete("old", days_ago=100)
    stranger = bench.databases.directory / "11111111-2222-4333-8444-555555555555.db"
    stranger.write_bytes(b"of an unknown owner")
    await bench.databases.forget(tenant_id)
    content = (bench.databases.directory / f"{tenant_id}.db").read_bytes()
    await purge_all(bench)
    (bench.databases.directory / f"{tenant_id}.db").write_bytes(content)
    (candidate,) = await bench.purger.candidates()
    assert candidate.tenant is None
    (removed,) = await purge_all(bench)
    assert removed.bytes == len(content)
    assert bench.files() == {stranger.name[:36]}


async def test_within_the_retention_only_on_demand_and_the_record_names_no_one(bench):
    tenant_id = await bench.add("jane-doe")
    with pytest.raises(IllegalTransitionError, match="is Active and is not purged"):
        await bench.purger.candidate("jane-doe", now=True)
    await bench.delete("jane-doe", days_ago=1)
    with pytest.raises(IllegalTransitionError, match="within that time with --now"):
        await bench.purger.candidate("jane-doe")
    candidate = await bench.purger.candidate("jane-doe", now=True)
    await bench.purger.purge(candidate, actor="dpo", now=True)
    (row,) = await bench.tenants.audit(tenant_id)
    assert (row.action, row.tenant_identifier, row.reason) == ("Purged", tenant_id, None)
    assert "jane" not in str(row)
    with pytest.raises(UnknownTenantError, match="no rows or files remain from earlier purges"):
        await bench.purger.candidate(tenant_id)


async def test_the_single_tenant_database_goes_with_the_tenant_that_took_it(tmp_path):
    settings = host_settings(tmp_path)
    write_database(tmp_path / "tenants" / "default.db", 5)
    async with opened_host(settings) as host:
        await host.upgrader().run()
        await host.tenants.delete("default")
        purger = Purger(settings, host.store)
        candidate = await purger.candidate("default", now=True)
        assert str(tmp_path / "tenants" / "default.db") in candidate.files
        await purger.purge(candidate, actor="test", now=True)
        left = {file.name for file in (tmp_path / "tenants").iterdir()}
        assert left == {"upgrade.lock"}


@pytest.fixture(params=["Memory", "Sqlite"])
async def store(request, tmp_path):
    keys = {"Storage:Backend": request.param, "Storage:Path": str(tmp_path)}
    settings = Settings.from_mapping(keys, standalone=True, receiver=False)
    async with open_store(settings, owner="here") as opened:
        yield ByKey(opened)


async def fill(store, tenant_id, *ids):
    for number, webhook_id in enumerate(ids):
        delivery = NewDelivery(webhook_id, "order.paid", b"{}", 1, 1.0, tenant_id=tenant_id)
        await store.accept(delivery, leased=True)
        if number % 3 == 0:
            await store.start(webhook_id, now=2.0)
            await store.finish(webhook_id, Done(), now=3.0)
        elif number % 3 == 1:
            await store.start(webhook_id, now=2.0)
            await store.finish(webhook_id, Dead("ValueError: no"), now=3.0)


async def test_deliveries_of_one_tenant_go_whatever_their_state_and_others_stay(store):
    await fill(store, "mine", "a", "b", "c", "d")
    await fill(store, "other", "e", "f", "g")
    await fill(store, None, "h")
    holdings = await store.holdings("mine")
    assert (holdings["deliveries"], holdings["attempts"], holdings["outbox"]) == (4, 1, 0)
    assert set(await store.unowned()) == {"mine", "other"}
    assert await store.erase("mine") == 4
    assert {r.webhook_id for r in await store.find(limit=50)} == {"e", "f", "g", "h"}
    assert set((await store.holdings("mine")).values()) == {0}
    assert sum((await store.counts()).values()) == 4
    # What is left of it is as if it had never been there: it can come again.
    await fill(store, "mine", "a")
    assert await store.erase("unknown") == 0
    # A run in progress ends without an error.
    await store.erase("other")
    await store.finish("g", Dead("ValueError: late"), now=9.0)
    assert (await store.holdings("other"))["attempts"] == 0


async def test_the_checkpoints_of_a_purged_tenant_go_and_those_of_others_stay(store):
    names = ("catch_up.mine", "catch_up_command.mine", "catch_up", "catch_up.not-mine")
    for name in names:
        await store.write_checkpoint(name, "progress")
    await store.erase("mine")
    left = [name for name in names if await store.read_checkpoint(name) is not None]
    assert left == ["catch_up", "catch_up.not-mine"]


async def test_a_body_stored_under_another_tenant_s_key_is_purged_with_its_own_tenant(store):
    first = NewDelivery("m1", "order.paid", b"first", 1, 1.0, tenant_id="other")
    for body, tenant_id in ((b"first", "other"), (b"mine", "mine"), (b"host's", None)):
        incoming = structs.replace(first, raw=body, tenant_id=tenant_id)
        await store.accept(incoming, leased=False)
    assert (await store.holdings("mine"))["evidence"] == 1
    assert (await store.holdings("other"))["evidence"] == 2
    assert set(await store.unowned()) == {"mine", "other"}
    assert await store.erase("mine") == 0
    assert [other.raw for other in await store.evidence("m1")] == [b"host's"]
    assert await store.unowned() == ["other"]
    assert (await store.get("m1")).raw == b"first"


async def test_the_organization_of_a_purged_tenant_is_remembered_by_nothing_but_its_digest(store):
    audit = AuditRecord(
        tenant_id="t", tenant_identifier="t", action=AuditAction.PURGED, actor="x", occurred_at=1.0
    )
    tenant = Tenant(id="t", identifier="t", name="T", organization_id="org-1", created_at=1.0)
    await store.tenants.add(tenant, audit)
    assert await store.tenants.owner_of("org-1") == tenant
    await fill(store, "t", "late")
    await store.tenants.purge(tenant, audit)
    assert await store.tenants.owner_of("org-1") == "t"
    assert await store.tenants.owner_of("org-2") is None


async def fail_many(inbox, tenant_id, seed):
    """Store 3000 deliveries, each third the tenant's, in such an order that pages split."""
    chance = random.Random(seed)

    async def fail(delivery, error):
        lease = (await inbox.accept(delivery, leased=True)).lease
        assert lease is not None
        await inbox.start(lease, now=2.0)
        await inbox.finish(lease, Dead(error), now=3.0)

    async with trio.open_nursery() as nursery:
        for number in range(3000):
            mine = number % 3 == 0
            name = f"{chance.randrange(10**8):08}-{'Quillfeather' if mine else 'other'}"
            owner = tenant_id if mine else None
            raw = b"{}" * chance.randrange(1, 300)
            delivery = NewDelivery(name, "order.paid", raw, 1, 1.0, tenant_id=owner)
            text = "Quillfeather " if mine else "other"
            nursery.start_soon(fail, delivery, f"ValueError: {text * chance.randrange(1, 60)}")


async def test_no_page_of_the_store_keeps_a_row_that_was_moved_in_a_split(bench, tmp_path):
    """Overwriting deleted rows is not enough: rows that grow move to other pages."""
    tenant = await bench.tenants.add("split", name="Split")
    await bench.tenants.delete("split")
    key = "split"
    # The second time it is what came after the purge, when there is no tenant.
    for seed in (4, 5):
        await fail_many(bench.host.store, tenant.id, seed)
        candidate = await bench.purger.candidate(key, now=True)
        removed = await bench.purger.purge(candidate, actor="test", now=True)
        assert removed.deliveries == 1000
        assert await bench.purger.wipe() is None
        files = tmp_path.glob("inbox.db*")
        assert [file.name for file in files if b"Quillfeather" in file.read_bytes()] == []
        key = tenant.id


def test_a_purge_on_postgresql_succeeds_and_names_what_is_the_servers(command_line, monkeypatch):
    monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    more = ("--set", "Sdk:Storage:Backend=Postgres", "--set", "Sdk:MultiTenant:Enabled=true")
    assert command_line("tenant", "add", "acme", "--name", "Acme", *more).status == 0
    assert command_line("tenant", "delete", "acme", "--yes", *more).status == 0
    purged = command_line("tenant", "purge", "acme", "--now", "--yes", *more)
    assert purged.status == 0, purged.err
    assert "the server owns the pages" in purged.err
    assert "not reached" not in purged.err
