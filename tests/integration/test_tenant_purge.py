"""``tenant purge``: what may be removed, what is left, and what a crash leaves behind."""

import attrs
import pytest
from support.single_tenant import host_settings, opened_host

from sdk_trio.errors import IllegalTransitionError, TenantConflictError
from sdk_trio.tenants.database_opener import TenantDatabases
from sdk_trio.tenants.purger import Purger
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
        purger = Purger(settings, host.store.tenants, databases=databases, clock=clock)
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


async def test_the_audit_trail_says_who_purged_and_keeps_the_past_unless_told_to_forget(bench):
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


async def test_a_tenant_that_came_back_after_the_dry_run_keeps_everything(bench):
    tenant_id = await bench.add("back")
    await bench.delete("back", days_ago=100)
    (candidate,) = await bench.purger.candidates()
    bench.clock.now -= 50 * DAY  # within the retention it may come back
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
    stranger.write_bytes(b"nobody knows whose this is")
    await bench.databases.forget(tenant_id)
    content = (bench.databases.directory / f"{tenant_id}.db").read_bytes()
    await purge_all(bench)
    (bench.databases.directory / f"{tenant_id}.db").write_bytes(content)
    (candidate,) = await bench.purger.candidates()
    assert candidate.tenant is None
    (removed,) = await purge_all(bench)
    assert removed.bytes == len(content)
    assert bench.files() == {stranger.name[:36]}
