"""The contract of every store for tenants, beyond the model: concurrency, atomicity,
cancellation."""

import itertools
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from support.deliveries import settings as settings_of
from support.postgres import open_inbox
from support.waiting import until

from sdk_trio.errors import (
    IllegalTransitionError,
    StoreUnavailableError,
    TenantConflictError,
    TenantExistsError,
    UnknownTenantError,
)
from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    EnvironmentVariable,
    Tenant,
    TenantCredentials,
    TenantStatus,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.storage.open import open_store
from sdk_trio.storage.readers import ReaderPool
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.tenants import TenantService, TransitionResult
from sdk_trio.tenants.service import CAPACITY

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 100.0, "payload_seconds": 40.0}
SETTINGS = settings_of(MultiTenant__Enabled=True)
VERBS = ("suspend", "deactivate", "delete")


@attrs.define
class Hosts:
    """Processes that share one store, each with its own service."""

    kind: str
    file: Path
    opened: list[Any] = attrs.Factory(list)

    async def service(self, **options: Any) -> TenantService:
        if self.kind == "memory":
            shares = self.opened[0] if self.opened else None
            self.opened.append(MemoryInbox(LeaseTerms(owner="o", **TERMS), shares=shares))
        elif self.kind == "postgres":
            self.opened.append(await open_inbox(self.file, owner="o", **TERMS))
        else:
            self.opened.append(await SqliteInbox.open(self.file, LeaseTerms(owner="o", **TERMS)))
        return TenantService(SETTINGS, self.opened[-1].tenants, **options)


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Hosts]:
    hosts = Hosts(request.param, tmp_path / "inbox.db")
    yield hosts
    for inbox in hosts.opened:
        await inbox.close()


async def add(service: TenantService, identifier: str = "acme", **values: Any) -> Tenant:
    return await service.add(
        identifier,
        name="Acme",
        **{
            "site_manager_email": "m@example.com",
            "site_manager_email_verified": True,
            **values,
        },
    )


async def trails(service: TenantService) -> tuple[int, int]:
    audit = len(await service.audit(limit=1000))
    reported = 0
    with service.subscribe() as feed:
        # A tenant that was only added has no transition to announce.
        with trio.move_on_after(0.05 if audit <= 1 else 60):
            reported = len(await feed.next(limit=1000))
    return audit, reported


async def all_at_once(calls: list[Callable[[], Any]]) -> tuple[list[Any], list[Exception]]:
    won: list[Any] = []
    lost: list[Exception] = []

    async def one(call: Callable[[], Any]) -> None:
        try:
            won.append(await call())
        except Exception as error:
            lost.append(error)

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(one, call)
    return won, lost


@pytest.mark.parametrize("pair", list(itertools.product(VERBS, VERBS)))
async def test_of_two_simultaneous_transitions_one_wins(hosts: Hosts, pair: Any) -> None:
    service = await hosts.service()
    for round_ in range(5):
        await add(service, f"t{round_}")
        before = await trails(service)
        won, lost = await all_at_once(
            [lambda verb=verb, n=round_: getattr(service, verb)(f"t{n}") for verb in pair]
        )
        assert ([type(w) for w in won], [type(e) for e in lost]) == (
            [TransitionResult],
            [TenantConflictError],
        )
        assert "changed by someone else" in str(lost[0])
        assert (await service.get(f"t{round_}")).status is won[0].new_status
        assert [n - b for n, b in zip(await trails(service), before, strict=True)] == [1, 1]


class SlowToReturn:
    """A store whose ``change`` is committed for a while before its caller learns of it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.committed = trio.Event()
        self.go_on = trio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def change(self, *args: Any, **options: Any) -> None:
        await self._store.change(*args, **options)
        self.committed.set()
        await self.go_on.wait()


async def test_an_overlapping_transition_is_a_conflict(
    hosts: Hosts,
) -> None:
    tenant = await add(await hosts.service())
    store = SlowToReturn(hosts.opened[0].tenants)
    service = TenantService(SETTINGS, store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.suspend, tenant)
        await store.committed.wait()
        with pytest.raises(TenantConflictError), trio.fail_after(60):
            await service.delete(tenant)
        store.go_on.set()
    assert (await service.delete(tenant)).previous_status is TenantStatus.SUSPENDED


async def test_of_many_processes_that_saw_the_same_version_one_wins(hosts: Hosts) -> None:
    services = [await hosts.service() for _ in range(4)]
    tenant = await add(services[0])
    won, lost = await all_at_once(
        [
            lambda service=service, verb=verb: getattr(service, verb)(
                tenant, expected_version=tenant.version
            )
            for service in services
            for verb in VERBS
        ]
    )
    assert len(won) == 1
    assert {type(error) for error in lost} == {TenantConflictError}
    assert await trails(services[1]) == (2, 1)


async def test_of_many_processes_that_add_the_same_identifier_one_does(hosts: Hosts) -> None:
    services = [await hosts.service() for _ in range(4)]
    won, lost = await all_at_once([lambda s=s: add(s, organization_id="o") for s in services])
    assert len(won) == 1
    assert {type(error) for error in lost} == {TenantExistsError}
    assert len(await services[0].audit()) == 1


async def test_a_transition_is_written_whole_or_not_at_all_when_it_is_cancelled(
    hosts: Hosts,
) -> None:
    service = await hosts.service()
    tenant = await add(service)
    for number in range(30):
        verb = service.suspend if tenant.is_active else service.reactivate
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(verb, tenant)
                for _ in range(number % 6):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        now = await service.get(tenant)
        audit, reported = await trails(service)
        assert audit == now.version
        assert reported == now.version - 1
        tenant = now


async def test_subscribers_get_every_transition_in_order_and_hold_up_none(hosts: Hosts) -> None:
    service = await hosts.service()
    seen: dict[str, list[int]] = {"quick": [], "slow": [], "late": []}

    async def read(name: str, pause: float, after: int) -> None:
        with service.subscribe(after=after) as feed:
            while len(seen[name]) < 60 - after:
                records = await feed.next(limit=7)
                seen[name] += [record.sequence for record in records]
                await trio.sleep(pause)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, "quick", 0, 0)
            nursery.start_soon(read, "slow", 0.02, 0)
            with service.subscribe():  # one that never looks
                tenant = await add(service)
                for _ in range(30):
                    await service.suspend(tenant)
                    await service.reactivate(tenant)
            nursery.start_soon(read, "late", 0, 40)
    assert seen == {
        "quick": list(range(1, 61)),
        "slow": list(range(1, 61)),
        "late": list(range(41, 61)),
    }


async def test_changes_of_another_process_are_noticed(hosts: Hosts) -> None:
    ours, theirs = await hosts.service(), await hosts.service()
    await add(theirs, organization_id="o")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(ours.run)
            found = await ours.find_by_organization("o")
            assert found is not None
            with ours.subscribe() as feed:
                await theirs.suspend("acme", reason="r")
                (record,) = await feed.next()
                assert (record.tenant_identifier, record.reason) == ("acme", "r")
                while (await ours.find_by_organization("o")).status is TenantStatus.ACTIVE:  # type: ignore[union-attr] # it stays
                    await feed.wait()
            nursery.cancel_scope.cancel()


async def test_changes_of_this_process_are_seen_at_once(hosts: Hosts) -> None:
    service = await hosts.service()
    assert await service.find_by_organization("o") is None
    tenant = await add(service, organization_id="o")
    assert await service.find_by_organization("o") == tenant
    assert await service.recall(tenant.id) == tenant
    suspended = (await service.suspend(tenant)).tenant
    assert await service.find_by_organization("o") == suspended
    assert await service.recall(tenant.id) == suspended


async def test_a_purged_tenant_is_gone_and_its_names_are_free(hosts: Hosts) -> None:
    service = await hosts.service()
    store = hosts.opened[0].tenants
    gone = await add(service, organization_id="o")
    (created,) = await service.audit()
    purged = attrs.evolve(created, reason="retention")
    with pytest.raises(TenantConflictError):
        await store.purge(attrs.evolve(gone, version=7), purged)
    await store.purge(gone, purged)
    with pytest.raises(UnknownTenantError):
        await service.get("acme")
    with pytest.raises(UnknownTenantError):
        await store.purge(gone, purged)
    assert (await add(service, organization_id="o")).id != gone.id
    assert len(await service.audit(gone.id)) == 2


async def test_a_closed_store_raises_an_error(hosts: Hosts) -> None:
    service = await hosts.service()
    await hosts.opened[0].close()
    for call in (service.counts, service.list, lambda: service.suspend("a"), lambda: add(service)):
        with pytest.raises(StoreUnavailableError):
            await call()


# -- SQLite alone ----------------------------------------------------------------------------------


@pytest.fixture
async def sqlite_host(tmp_path: Path) -> AsyncIterator[Hosts]:
    hosts = Hosts("sqlite", tmp_path / "inbox.db")
    yield hosts
    for inbox in hosts.opened:
        await inbox.close()


async def execute(hosts: Hosts, statement: str) -> Any:
    return await hosts.opened[0]._commits.submit(lambda tx: tx.all(statement))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET reason = 'another'",
        "DELETE FROM audit",
        "DELETE FROM audit WHERE sequence = 1",
        "REPLACE INTO audit SELECT * FROM audit",
    ],
)
async def test_the_audit_trail_cannot_be_changed(sqlite_host: Hosts, statement: str) -> None:
    service = await sqlite_host.service()
    await service.suspend(await add(service))
    before = await service.audit()
    with pytest.raises(StoreUnavailableError, match="append-only"):
        await execute(sqlite_host, statement)
    assert await service.audit() == before


@pytest.mark.parametrize("table", ["audit", "outbox", "tenant"])
async def test_a_transition_whose_rows_cannot_all_be_written_writes_none(
    sqlite_host: Hosts, table: str
) -> None:
    service = await sqlite_host.service()
    tenant = await add(service)
    verb = "UPDATE" if table == "tenant" else "INSERT"
    await execute(
        sqlite_host,
        f"CREATE TRIGGER t BEFORE {verb} ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    with pytest.raises(StoreUnavailableError):
        await service.suspend(tenant)
    await execute(sqlite_host, "DROP TRIGGER t")
    assert await service.get(tenant) == tenant
    assert await trails(service) == (1, 0)
    assert (await service.suspend(tenant)).tenant.version == 2


async def test_deliveries_and_transitions_share_one_writer(tmp_path: Path) -> None:
    settings = settings_of(Storage__Backend="Sqlite", Storage__Path=str(tmp_path))
    async with open_store(settings, owner="one") as store:
        service = TenantService(SETTINGS, store.tenants)
        tenant = await add(service)
        async with trio.open_nursery() as nursery:
            for number in range(50):
                incoming = NewDelivery(f"m{number}", "t", b"x", 7, 1.0, tenant_id=tenant.id)
                nursery.start_soon(lambda incoming=incoming: store.accept(incoming, leased=False))
            nursery.start_soon(service.suspend, tenant)
        due = await store.claim_due(limit=100, now=2.0)
        assert {record.tenant_id for record in due.records} == {tenant.id}
        assert len(due.records) == 50
        kept = await store.get("m1")
        assert kept is not None
        assert kept.tenant_id == tenant.id
        assert (await service.get(tenant)).status is TenantStatus.SUSPENDED


async def test_a_refusal_that_repeats_itself_is_one_row_a_minute_with_a_count(
    hosts: Hosts,
) -> None:
    now = 0.0
    service = await hosts.service(stopwatch=lambda: now)
    await add(service)
    await service.delete("acme")

    async def ask(times: int, actor: str = "kim") -> None:
        for _ in range(times):
            with pytest.raises(IllegalTransitionError):
                await service.suspend("acme", actor=actor)

    await ask(50)
    await ask(1, "lee")
    now = 61.0
    await ask(2)
    rows = [row for row in await service.audit() if row.action is AuditAction.REFUSED]
    assert [row.actor for row in rows] == ["kim", "lee", "kim"]
    assert "more since" not in (rows[0].details or "")
    assert (rows[2].details or "").endswith("(49 more since the previous row)")


async def test_the_owner_of_an_organization_costs_one_query_until_a_tenant_changes(
    sqlite_host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tenant, of a purged tenant, of none: every delivery queries it."""
    service = await sqlite_host.service()
    other = await sqlite_host.service()
    there = await add(service, "there", organization_id="o1")
    gone = await add(service, "gone", organization_id="o2")
    await service.delete("gone")
    asked = []
    run = ReaderPool.run

    async def count(self: Any, query: Any, **options: Any) -> Any:
        asked.append(query)
        return await run(self, query, **options)

    async def whose(organization_id: str) -> tuple[str | None, str | None]:
        found = await service.find_by_organization(organization_id)
        erased = None if found else await service.find_erased(organization_id)
        return found and found.id, erased

    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await until(lambda: service._directory.generation >= 4)  # its first poll of the store
        with monkeypatch.context() as patch:
            patch.setattr(ReaderPool, "run", count)
            for _ in range(20):
                assert await whose("o1") == (there.id, None)
                assert await service.recall(there.id) == there
                assert await whose("o2") == (gone.id, None)
                assert await whose("unknown") == (None, None)
            asked = [query for query in asked if "revision" not in query.__name__]
            assert len(asked) == 3
        tenant = await other.get("gone")
        audit = AuditRecord(
            tenant_id=gone.id,
            tenant_identifier="gone",
            action=AuditAction.PURGED,
            actor="another process",
            occurred_at=1.0,
        )
        await sqlite_host.opened[1].tenants.purge(tenant, audit)

        async def is_known():
            return await whose("o2") == (None, gone.id)

        await until(is_known)
        nursery.cancel_scope.cancel()


async def test_ten_thousand_tenants_are_found_without_reading_them_all(
    sqlite_host: Hosts,
) -> None:
    service = await sqlite_host.service()
    store = sqlite_host.opened[0]
    await add(service, "t", organization_id="o")
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000) "
    await execute(
        sqlite_host,
        f"{numbers} INSERT INTO tenant SELECT 'id' || i, 'n' || i, 'N', 'Active', NULL, 0, NULL, "
        "'o' || i, 0.0, NULL, 1, json_object('access_token', NULL, 'webhook_secrets', "
        "json_array('env:SECRET_' || i)) FROM n",
    )
    await execute(
        sqlite_host, f"{numbers} INSERT INTO source SELECT 'id' || i, 'env:SECRET_' || i FROM n"
    )
    steps: list[int] = []

    def count(tx: Any) -> None:
        tx.connection.set_progress_handler(lambda: bool(steps.append(1)), 1)  # type: ignore[func-returns-value] # False lets it go on

    await store._readers.run(count)
    await service.counts()  # the first query reads the schema
    for look in (
        lambda: service.get("n9999"),
        lambda: store.tenants.get("id9999"),
        lambda: store.tenants.owner_of("o9999"),
        lambda: service.list(after="n5000", limit=1),
        lambda: service.list(status=TenantStatus.SUSPENDED, limit=1),
        lambda: service.audit("id9999"),
        lambda: store.tenants.holders(
            [EnvironmentVariable("SECRET_7"), EnvironmentVariable("UNRELATED")], but="id1"
        ),
    ):
        steps.clear()
        await look()
        assert len(steps) < 100, "steps of SQLite's machine; a scan takes tens of thousands"
    sources = [EnvironmentVariable("SECRET_7")]
    assert await store.tenants.holders(sources, but="id1") == {sources[0]: ["n7"]}
    # The same of those that write: they read and touch a few rows, however many there are.
    await store._commits.submit(count)
    secret = TenantCredentials(webhook_secrets=(EnvironmentVariable("SECRET_7"),))
    await add(service, "first-statements-are-prepared")
    for change in (
        lambda: add(service, "one-more", organization_id="o-more", credentials=secret),
        lambda: service.change("one-more", name="Other"),
        lambda: service.change("one-more", credentials=TenantCredentials()),
        lambda: service.suspend("one-more"),
        lambda: service.reactivate("one-more"),
        lambda: service.delete("n9998"),
    ):
        steps.clear()
        await change()
        assert 0 < len(steps) < 1000
    tracemalloc.start()
    for number in range(1, 10_001):
        await service.find_by_organization(f"o{number}")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(service._directory) == CAPACITY
    assert kept < 16 * 1024 * 1024
