"""Promises of the store on PostgreSQL beyond the contract of every store."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
)
from functools import partial
from math import inf
from typing import Any

import attrs
import pytest
import trio
from support.keyed import ByKey
from support.ports import free_port
from support.postgres import PostgresServer, pooled, running_server
from support.postgres_work import add_finished, blocks, forget_blocks, work
from support.waiting import until

from sdk_trio.base import clock, term
from sdk_trio.errors import (
    OptionsValidationError,
    StoreLostError,
    StoreUnavailableError,
    StoreVersionError,
)
from sdk_trio.records.deliveries import Admission, Dead, DeliveryState, Done, NewDelivery, Retry
from sdk_trio.records.notifications import NotificationId, NotificationState, SendResult
from sdk_trio.records.tenants import AuditAction, AuditRecord

HOUR = 3600.0
TERMS = {"lease_seconds": 10.0, "dedup_seconds": 1e9, "payload_seconds": 1e9}


@attrs.frozen
class Database:
    """A database of the session's server."""

    server: PostgresServer
    dsn: str

    @property
    def name(self) -> str:
        return self.dsn.rpartition("=")[2]

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return self.server.execute(statement, self.name)

    def connections(self) -> list[tuple[Any, ...]]:
        """The process and the state of each connection of a store."""
        return self.server.execute(
            "SELECT pid, state FROM pg_stat_activity "
            f"WHERE datname = '{self.name}' AND application_name LIKE 'sdk_trio %'"
        )

    def end_connections(self) -> None:
        self.server.end_sessions(self.name)

    async def cut_commit(self, by: str = "pg_terminate_backend") -> None:
        """Wait for a commit that waits for a standby, and end it."""
        waiting = self.server.commits_that_wait()
        statement = f"SELECT {by}(pid) {waiting} AND datname = '{self.name}'"
        await until(lambda: self.execute(statement))

    @asynccontextmanager
    async def open(self, owner: str = "one", dsn: str = "", **terms: float) -> AsyncIterator[Any]:
        from sdk_trio.storage.admission import LeaseTerms
        from sdk_trio.storage.engines.postgres_address import PostgresAddress
        from sdk_trio.storage.postgres_inbox import PostgresInbox

        address = PostgresAddress(dsn=dsn or self.dsn)
        inbox = ByKey(
            await PostgresInbox.open(
                address, LeaseTerms(owner=owner, shared_by_hosts=True, **{**TERMS, **terms})
            )
        )
        try:
            yield inbox
        finally:
            with trio.move_on_after(30, shield=True):
                await inbox.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is given up because the machine is slow."""
    monkeypatch.setattr("sdk_trio.storage.commit.ANSWER_SECONDS", 60.0)


@pytest.fixture
def database() -> Database:
    server = running_server()
    return Database(server, server.fresh())


@pytest.fixture
def empty() -> Database:
    server = running_server()
    return Database(server, server.empty())


def delivery(webhook_id: str = "m1", *, at: float = 1000.0, **fields: Any) -> NewDelivery:
    return NewDelivery(webhook_id, "order.paid", b'{"type":"order.paid"}', 7, at, **fields)


# -- several hosts -----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-HOUR, HOUR])
async def test_leases_use_the_clock_of_the_database(database: Database, ahead: float) -> None:
    async with database.open("one") as one, database.open("two") as two:
        assert (await one.claim(delivery("inline", at=1000))).admission is Admission.NEW
        await one.accept(delivery("queued", at=1000), leased=True)
        await one.start("queued", now=1000)
        again = await two.claim(delivery("inline", at=1000 + ahead))
        assert again.admission is Admission.RUNNING
        await two.start("queued", now=1000 + ahead)
        assert not (await two.claim_due(limit=9, now=1000 + ahead)).records
        record = await two.get("queued")
        assert record.attempts == 1


async def test_a_step_of_a_hosts_clock_does_not_delay_its_take_over_of_expired_leases(
    database: Database,
) -> None:
    async with database.open("one", lease_seconds=0.1) as one, database.open("two") as two:
        await one.accept(delivery("m1"), leased=True)
        # As a host polls whose clock was set a moment ago.
        with trio.fail_after(30):
            while not (
                due := await two.claim_due(limit=9, now=1000 + HOUR, take_expired_until=-inf)
            ).records:
                await trio.sleep(0.05)
        assert [record.key for record in due.records] == ["m1"]
        await one.accept(delivery("m2"), leased=True)
        # As a poll does that has waited: its time is stale.
        late = clock.monotonic() - 1
        with trio.fail_after(30):
            while not (
                due := await two.claim_due(limit=9, now=1000 - HOUR, take_expired_until=late)
            ).records:
                await trio.sleep(0.05)
        assert [record.key for record in due.records] == ["m2"]


async def test_the_retention_goes_by_the_clock_of_the_database(database: Database) -> None:
    async with database.open(payload_seconds=HOUR, dedup_seconds=HOUR) as inbox:
        await inbox.park(delivery("m1", at=clock.wall()))
        assert (await inbox.purge(now=clock.wall() + 7 * 24 * HOUR)).parked == 0
        assert (await inbox.get("m1")).raw is not None


async def test_what_changes_no_message_wakes_no_other_host(database: Database) -> None:
    unknown = NotificationId(7, "email")
    async with database.open("one") as one, database.open("two") as two:
        await one.accept(delivery("m1"), leased=False)
        assert await two.changed_elsewhere()
        assert not await two.changed_elsewhere()
        assert not await one.notifications.retry([unknown])
        assert not await one.notifications.finish(
            unknown, SendResult(NotificationState.SENT), now=1001
        )
        assert not await two.changed_elsewhere()


async def test_one_host_leads_and_what_it_writes_after_its_term_is_refused(
    database: Database,
) -> None:
    async with database.open("one") as one, database.open("two") as two:
        assert await one.lead(seconds=60) == 1
        assert await two.lead(seconds=60) is None
        assert await one.lead(seconds=60) == 1, "renewed, it is the same term"
        await one.write_checkpoint("position", "of one", term=1)
        assert await one.lead(seconds=0) == 1
        assert await two.lead(seconds=60) == 2
        with pytest.raises(StoreUnavailableError, match="led the others in term 1, which is over"):
            await one.write_checkpoint("position", "too late", term=1)
        assert await two.read_checkpoint("position") == "of one"


async def test_two_hosts_never_lead_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"TERM_SECONDS": 1.5, "RENEW_SECONDS": 0.1, "MARGIN_SECONDS": 0.5, "ASK_SECONDS": 0.1}
    for name, seconds in times.items():
        monkeypatch.setattr(term, name, seconds)
    leading: list[tuple[str, int]] = []
    seen: list[tuple[str, int]] = []

    async with database.open("one") as one, database.open("two") as two:

        def host(name: str, inbox: Any) -> term.Leadership:
            async def lead(number: int) -> None:
                leading.append((name, number))
                seen.append((name, number))
                assert len(leading) == 1, "both lead"
                try:
                    await trio.sleep_forever()
                finally:
                    leading.remove((name, number))

            return term.Leadership(inbox, lead, lambda: None)

        async def away(*, seconds: float) -> int | None:
            raise StoreUnavailableError("the database does not answer")

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(host("one", one).run)
                await until(lambda: seen == [("one", 1)])
                await nursery.start(host("two", two).run)
                # The database is unavailable only to the leader: it stops leading before the other
                # begins.
                monkeypatch.setattr(one.raw, "lead", away)
                await until(lambda: seen == [("one", 1), ("two", 2)])
                monkeypatch.undo()
                nursery.cancel_scope.cancel()
        assert await one.lead(seconds=60) is not None, "an orderly end gives the lease up at once"


async def test_a_host_that_sees_another_lead_gives_up_before_its_own_term_is_over(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(term, "TERM_SECONDS", 600.0)
    monkeypatch.setattr(term, "RENEW_SECONDS", 0.05)
    begun, ended = trio.Event(), trio.Event()

    async def lead(number: int) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with database.open("one") as one:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(term.Leadership(one, lead, lambda: None).run)
                await begun.wait()
                # As if the host had been suspended for longer than its term, with its clock.
                database.execute(
                    "UPDATE sdk_trio.lease SET owner = 'two', term = 2, until = 1e11 "
                    "WHERE name = 'storage.leader'"
                )
                await ended.wait()
                nursery.cancel_scope.cancel()


async def test_a_host_that_starts_takes_nothing_from_one_that_lives(database: Database) -> None:
    async with database.open("one") as one:
        await one.accept(delivery("m1"), leased=True)
        await one.start("m1", now=1000)
        async with database.open("two") as two:
            assert await two.recover() == 0
        await one.finish("m1", Done(), now=1001)
        assert (await one.counts())[DeliveryState.DONE] == 1


async def test_a_start_takes_what_its_dead_predecessor_and_the_processes_of_that_held(
    database: Database,
) -> None:
    owners = ("dead", "dead.1", "dead.12", "deader", "other.dead.1")
    async with AsyncExitStack() as stack:
        for owner in owners:
            inbox = await stack.enter_async_context(database.open(owner))
            await inbox.accept(delivery(f"of {owner}"), leased=True)
        await inbox.start("of other.dead.1", now=1000)
        two = await stack.enter_async_context(database.open("two"))
        assert await two.recover() == 0
        assert await two.recover(dead="dead") == 3
        left = database.execute("SELECT lease_owner FROM sdk_trio.work ORDER BY lease_owner")
        assert [owner for (owner,) in left if owner] == ["deader", "other.dead.1"]


async def test_events_replayed_by_a_command_between_two_polls_are_noticed(
    database: Database,
) -> None:
    """The command opens the store, replays and closes, all between two polls of an idle host."""
    async with database.open("host") as host, database.open("third") as third:
        await host.accept(delivery("m1"), leased=True)
        await host.start("m1", now=1000)
        await host.finish("m1", Dead("no"), now=1001)
        for inbox in (host, third):
            await inbox.changed_elsewhere()
        for again in range(3):
            async with database.open(f"command-{again}") as command:
                assert await command.replay(["m1"]) == ["m1"]
            assert await third.changed_elsewhere()
            assert not await third.changed_elsewhere()
            assert await host.changed_elsewhere()
            (record,) = (await host.claim_due(limit=9, now=1002)).records
            await host.start(record.key, now=1002)
            await host.finish(record.key, Dead("no"), now=1003)
            for inbox in (host, third):
                await inbox.changed_elsewhere()
        await host.purge(now=1004)
        assert (await host.counts())[DeliveryState.DEAD] == 1


async def test_events_of_a_dead_host_are_noticed_and_run_by_another(database: Database) -> None:
    async with database.open("one", lease_seconds=0.2) as one, database.open("two") as two:
        await one.accept(delivery("m1"), leased=True)
        await one.start("m1", now=1000)
        await two.changed_elsewhere()
        with trio.fail_after(30):
            while not await two.changed_elsewhere():
                await trio.sleep(0.01)
        (record,) = (await two.claim_due(limit=9, now=1001)).records
        assert (record.state, record.process_ends) == (DeliveryState.RECEIVED, 1)
        # The first owner was not notified, and its late outcome changes nothing.
        await one.finish("m1", Done(), now=1002)
        assert (await two.get("m1")).state is DeliveryState.RECEIVED


@pytest.mark.parametrize("way", ["expires", "is recovered", "is taken over"])
async def test_a_start_is_waited_for_once_a_host_that_may_have_begun_it_is_gone(
    database: Database, way: str
) -> None:
    seconds = 1e3 if way == "is taken over" else 0.1
    async with database.open("one") as one, database.open("gone", lease_seconds=seconds) as gone:
        await one.accept(delivery("waits"), leased=False)
        await gone.accept(delivery("began"), leased=True)
        assert (await one.claim_due(limit=1, now=1001)).first_runs == {"waits"}
        await one.release(["waits"])
        again = await one.claim_due(limit=1, now=1001)
        assert again.first_runs == {"waits"}, "it was never begun, as its owner says"
        await one.start("waits", now=1001)
        await one.finish("waits", Retry(1e6, "E"), now=1002)
        with trio.fail_after(30):
            if way == "is taken over":
                assert await one.take_over("gone", successor="one", now=1002) == 1
            while way == "is recovered" and not await one.recover():
                await trio.sleep(0.01)
            while not (due := await one.claim_due(limit=9, now=1002)).records:
                await trio.sleep(0.01)
        assert ([record.key for record in due.records], due.first_runs) == (["began"], set())
        await one.release(["began"])
        database.execute(
            "UPDATE sdk_trio.work SET next_attempt_at = 0 WHERE next_attempt_at IS NOT NULL"
        )
        due = await one.claim_due(limit=9, now=1004)
        assert [record.key for record in due.records] == ["waits", "began"]
        assert not due.first_runs, "a later run, and one in doubt until it has run"


async def test_two_of_one_subject_that_two_hosts_keep_never_run_at_once(
    database: Database,
) -> None:
    async with database.open("one") as one, database.open("two") as two:
        for name in ("m1", "m2"):
            await one.accept(delivery(name, subject="s", ordered=True), leased=False)
        # As if the first had been committed after the second was taken.
        database.execute("UPDATE sdk_trio.work SET lane = NULL WHERE sequence = 1")
        database.execute("UPDATE sdk_trio.work SET lease_owner = 'x' WHERE sequence = 1")
        (record,) = (await two.claim_due(limit=9, now=1001)).records
        assert record.webhook_id == "m2"
        database.execute(
            "UPDATE sdk_trio.work SET lease_owner = NULL, "
            "lane = (SELECT lane FROM sdk_trio.work WHERE sequence = 2) WHERE sequence = 1"
        )
        assert not (await one.claim_due(limit=9, now=1001)).records
        await two.finish("m2", Done(), now=1002)
        (record,) = (await one.claim_due(limit=9, now=1003)).records
        assert record.webhook_id == "m1"


async def test_hosts_that_claim_in_the_same_lanes_at_once_keep_the_order(
    database: Database,
) -> None:
    """Both keep and claim all the time, so that they meet in a lane again and again."""
    lanes, rounds = 3, 60
    running: Counter[str] = Counter()
    begun: dict[str, list[str]] = {str(lane): [] for lane in range(lanes)}
    kept = 0

    async def bring(inbox: Any, name: str) -> None:
        nonlocal kept
        for number in range(rounds):
            for lane in begun:
                brought = delivery(f"{name}-{number:03}-{lane}", subject=lane, ordered=True)
                await inbox.accept(brought, leased=False)
                kept += 1

    async def run(inbox: Any, record: Any) -> None:
        running[record.subject] += 1
        assert running[record.subject] == 1, "beside another one of its lane"
        begun[record.subject].append(record.key)
        assert await inbox.start(record.key, now=1001)
        # The other host may claim the next one before this task hears of the commit.
        running[record.subject] -= 1
        await inbox.finish(record.key, Done(), now=1002)

    async def host(name: str) -> None:
        async with database.open(name) as inbox, trio.open_nursery() as nursery:
            nursery.start_soon(bring, inbox, name)
            while sum(map(len, begun.values())) < 2 * rounds * lanes:
                for record in (await inbox.claim_due(limit=9, now=1001)).records:
                    nursery.start_soon(run, inbox, record)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for name in ("one", "two"):
                nursery.start_soon(host, name)
    assert kept == 2 * rounds * lanes
    for keys in begun.values():
        for name in ("one", "two"):
            ours = [key for key in keys if key.startswith(name)]
            assert ours == sorted(ours), "in the order in which they were acknowledged"
    async with database.open() as inbox:
        assert (await inbox.counts())[DeliveryState.DONE] == kept


async def test_of_two_hosts_that_claim_in_one_lane_the_second_waits_and_finds_other_work(
    database: Database,
) -> None:
    """The one with the smaller sequence is committed when a host has just claimed the other."""
    from sdk_trio.storage.admission import LeaseTerms
    from sdk_trio.storage.engines.postgres import PostgresTransaction
    from sdk_trio.storage.engines.postgres_address import PostgresAddress
    from sdk_trio.storage.sql import admission, leases
    from sdk_trio.storage.sql.dialect import Dialect

    terms = LeaseTerms(owner="one", **TERMS)
    address = PostgresAddress(dsn=database.dsn)
    dialect = Dialect("postgresql", server_clock=True)

    def accept(connection: Any, key: str) -> None:
        incoming = delivery(key, subject="s", ordered=True)
        arriving = [admission.Arriving(incoming, None)]
        admission.accept_all(PostgresTransaction(connection, dialect), terms, arriving)

    async with database.open("two") as two:
        with ExitStack() as ending, ExitStack() as taking:
            first, second = (
                ending.enter_context(closing(address.connect(writer=True))) for _ in range(2)
            )
            with address.transaction(first):
                accept(first, "earlier")
                with address.transaction(second):
                    accept(second, "later")
                taking.enter_context(address.transaction(second))
                due, _ = leases.claim_due(
                    PostgresTransaction(second, dialect),
                    terms,
                    leases.PollCursor(),
                    limit=10,
                    now=1001.0,
                    take_expired=True,
                )
                assert [record.key for record in due.records] == ["later"]
            await two.accept(delivery("other"), leased=False)
            found: list[str] = []

            async def take() -> None:
                due = await two.claim_due(limit=10, now=1001)
                found.extend(record.key for record in due.records)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(take)
                waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
                await until(lambda: database.execute(waiting))
                taking.close()
        assert found == ["other"]


async def test_hosts_that_work_at_once_run_each_delivery_once(database: Database) -> None:
    runs: Counter[str] = Counter()

    async def host(name: str) -> None:
        async with database.open(name) as inbox:
            for number in range(40):
                # Half of them come to both.
                incoming = delivery(f"m{number if number % 2 else f'{name}{number}'}")
                await inbox.accept(incoming, leased=False)
            while records := (await inbox.claim_due(limit=7, now=1001)).records:
                for record in records:
                    await inbox.start(record.key, now=1001)
                    runs[record.key] += 1
                    await inbox.finish(record.key, Done(), now=1002)

    async with trio.open_nursery() as nursery:
        for name in ("one", "two", "three"):
            nursery.start_soon(host, name)
    assert set(runs.values()) == {1}
    async with database.open() as inbox:
        assert (await inbox.counts())[DeliveryState.DONE] == len(runs) == 80


# -- the schema --------------------------------------------------------------------------------


async def test_hosts_that_start_at_once_make_one_schema(empty: Database) -> None:
    async def open_one(number: int) -> None:
        async with empty.open(f"host {number}") as inbox:
            await inbox.accept(delivery(f"m{number}"), leased=False)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(open_one, number)
    async with empty.open() as inbox:
        assert (await inbox.counts())[DeliveryState.RECEIVED] == 5


async def test_a_schema_of_a_newer_version_is_refused(empty: Database) -> None:
    async with empty.open():
        pass
    empty.execute("UPDATE sdk_trio.store SET version = 999")
    with pytest.raises(StoreVersionError, match=r"version 999.*install the version"):
        async with empty.open():
            pass


async def test_a_schema_of_another_program_is_refused_and_left_alone(empty: Database) -> None:
    empty.execute("CREATE SCHEMA sdk_trio CREATE TABLE theirs (a int)")
    with pytest.raises(StoreVersionError, match=r"another program.*PostgresSchema"):
        async with empty.open():
            pass
    tables = empty.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'sdk_trio'")
    assert tables == [("theirs",)]


@pytest.fixture
def with_another_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has every store that is opened after its call migrate one version further."""

    def go_on() -> None:
        later = ("ALTER TABLE arrival ADD COLUMN another integer",)
        monkeypatch.setattr(
            "sdk_trio.storage.engines.postgres_migration.LATER_POSTGRESQL", (later,)
        )

    return go_on


def has_another(database: Database) -> bool:
    return database.execute(
        "SELECT 1 FROM information_schema.columns "
        "WHERE table_schema = 'sdk_trio' AND table_name = 'arrival' AND column_name = 'another'"
    ) == [(1,)]


async def test_a_schema_of_an_older_version_is_migrated_beside_a_host_that_works(
    empty: Database, with_another_version: Callable[[], None]
) -> None:
    accepted = 0
    async with empty.open("old") as old:
        add_finished(empty.server, empty.name, 1, 2000)
        with_another_version()
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                nonlocal accepted
                while True:
                    await old.accept(delivery(f"m{accepted}"), leased=False)
                    accepted += 1

            async def open_one(name: str) -> None:
                async with empty.open(name):
                    assert has_another(empty)

            nursery.start_soon(accept)
            # Each waits for the other's work, and neither repeats it.
            async with trio.open_nursery() as starts:
                for name in ("one", "two"):
                    starts.start_soon(open_one, name)
            nursery.cancel_scope.cancel()
        # An accept that was cancelled may have been committed.
        assert (await old.counts())[DeliveryState.RECEIVED] in (accepted, accepted + 1)
    assert accepted


async def test_a_user_without_schema_privileges_gets_an_explanation(
    empty: Database, with_another_version: Callable[[], None]
) -> None:
    async with empty.open():
        pass
    with_another_version()
    user = f"user_of_{empty.name}"
    empty.execute(f"CREATE ROLE {user} LOGIN")
    try:
        empty.execute(f"GRANT USAGE ON SCHEMA sdk_trio TO {user}")
        empty.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA sdk_trio TO {user}")
        with pytest.raises(StoreUnavailableError, match="start it once as the owner of the schema"):
            async with empty.open(dsn=empty.dsn.replace("user=owner", f"user={user}")):
                pass
    finally:
        empty.execute(f"DROP OWNED BY {user}")
        empty.execute(f"DROP ROLE {user}")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sdk_trio.audit SET reason = 'another'",
        "DELETE FROM sdk_trio.audit",
        "TRUNCATE sdk_trio.audit",
    ],
)
async def test_the_audit_trail_is_immutable(database: Database, statement: str) -> None:
    import psycopg

    async with database.open() as inbox:
        row = AuditRecord(
            tenant_id="t",
            tenant_identifier="t",
            action=AuditAction.REFUSED,
            actor="a",
            occurred_at=1.0,
        )
        await inbox.tenants.add_audit(row)
        with pytest.raises(psycopg.Error, match="append-only"):
            database.execute(statement)
        (kept,) = await inbox.tenants.audit()
        assert attrs.evolve(kept, sequence=0) == row


# -- the connection ----------------------------------------------------------------------------


async def test_connections_that_the_server_has_ended_are_replaced_unnoticed(
    database: Database,
) -> None:
    async with database.open() as inbox:
        for number in range(3):
            await inbox.accept(delivery(f"m{number}"), leased=True)
            assert await inbox.get(f"m{number}") is not None
            database.end_connections()
        assert (await inbox.counts())[DeliveryState.RECEIVED] == 3


async def test_a_host_that_was_cut_off_while_its_store_was_moved_stores_nothing_more(
    empty: Database,
) -> None:
    stored = "SELECT version FROM sdk_trio.store UNION ALL SELECT count(*) FROM sdk_trio.arrival"
    message = "was moved to SQLite by 'storage migrate': set Sdk:Storage:Backend to Sqlite"
    async with empty.open() as inbox:
        await inbox.accept(delivery("running"), leased=True)
        await inbox.start("running", now=1000.0)
        await until(lambda: empty.execute("SELECT 1 FROM sdk_trio.work WHERE attempts = 1"))
        inbox.lease("running").start = None  # the store has it
        empty.execute("UPDATE sdk_trio.store SET version = -1")
        empty.end_connections()
        applied: list[Any] = []
        for call in (
            lambda: inbox.conclude("running", applied.append, attempt=1, now=1000.0),
            lambda: inbox.accept(delivery("after"), leased=True),
            lambda: inbox.accept(delivery("later"), leased=False),
            lambda: inbox.get("running"),
        ):
            with pytest.raises(StoreLostError, match=message):
                await call()
        assert inbox.lost is not None
        assert applied == []
        assert empty.execute(stored) == [(-1,), (1,)]


async def test_metrics_show_queries_that_have_a_connection_and_those_that_wait_for_one(
    database: Database,
) -> None:
    import psycopg

    from sdk_trio.storage.postgres_inbox import READERS

    async with database.open() as inbox:

        def readers() -> dict[str, float]:
            return {
                sample.labels[0][1]: sample.value
                for sample in inbox.samples()
                if sample.name == "sdk_store_readers"
            }

        assert readers() == {"in_use": 0, "waiting": 0}
        with psycopg.connect(database.dsn) as other:
            other.execute("LOCK TABLE sdk_trio.work")
            async with trio.open_nursery() as nursery:
                for _ in range(READERS + 2):
                    nursery.start_soon(inbox.counts)
                await until(lambda: readers() == {"in_use": READERS, "waiting": 2})
                nursery.cancel_scope.cancel()
        await until(lambda: readers() == {"in_use": 0, "waiting": 0})


@pytest.mark.parametrize("call", ["accept", "claim"])
async def test_a_lease_whose_commit_was_not_confirmed_is_given_up_at_the_next_renewal(
    database: Database, call: str
) -> None:
    async with database.open() as inbox:
        # The commit is made, and its answer does not come.
        with database.server.without_its_standby():
            async with trio.open_nursery() as nursery:

                async def fail() -> None:
                    calls = {"accept": partial(inbox.accept, leased=True), "claim": inbox.claim}
                    with pytest.raises(StoreUnavailableError, match="during a commit"):
                        await calls[call](delivery())

                nursery.start_soon(fail)
                await database.cut_commit()
        kept = await inbox.get("m1")
        assert kept is not None
        await inbox.renew([], now=1000)
        async with database.open("two") as two:
            if call == "accept":
                (record,) = (await two.claim_due(limit=9, now=1001)).records
                assert record.key == "m1"
            else:
                assert (await two.claim(delivery())).admission is not Admission.RUNNING


async def lose(database: Database, made: bool, change: Callable[[], Awaitable[None]]) -> None:
    """End the connection that makes a change: behind its commit if ``made``, or before it."""
    import psycopg

    with ExitStack() as stack:
        if made:
            stack.enter_context(database.server.without_its_standby())
        else:
            other = stack.enter_context(closing(psycopg.connect(database.dsn)))
            other.execute("SELECT 1 FROM sdk_trio.work FOR UPDATE")
        which = "wait_event = 'SyncRep'" if made else "wait_event_type = 'Lock'"
        end = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{database.name}' AND {which}"
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            await until(lambda: database.execute(end))
            stack.close()


@pytest.mark.parametrize("made", [True, False])
async def test_a_start_with_an_unknown_commit_counts_once(database: Database, made: bool) -> None:
    outcomes = {"m1": Done(), "m2": Done("answered"), "m3": Retry(1100, "no")}
    async with database.open() as inbox:
        for key in (*outcomes, "m4"):
            await inbox.accept(delivery(key), leased=True)

        async def begin() -> None:
            for key in (*outcomes, "m4"):
                inbox.start_unawaited(key, now=1001)

        await lose(database, made, begin)
        for key, outcome in outcomes.items():
            await inbox.finish(key, outcome, now=1002)
        await inbox.conclude("m4", lambda _transaction: None, attempt=1, now=1002)
        for key in (*outcomes, "m4"):
            record = await inbox.get(key)
            assert (record.attempts, record.started_at) == (1, 1001)
            assert record.state is (DeliveryState.RETRYING if key == "m3" else DeliveryState.DONE)


@pytest.mark.parametrize("made", [True, False])
async def test_a_run_with_an_unknown_commit_is_ended_once(database: Database, made: bool) -> None:
    async with database.open() as inbox:
        await inbox.accept(delivery(), leased=True)

        async def run() -> None:
            inbox.start_unawaited("m1", now=1001)
            with pytest.raises(StoreUnavailableError, match="during a commit"):
                await inbox.finish("m1", Done(), now=1002)

        await lose(database, made, run)
        if made:
            await inbox.repeat(["m1"])
        await inbox.finish("m1", Done(), now=1003)
        record = await inbox.get("m1")
        reported = (record.state, record.attempts, record.generation)
        # An event that was replayed meanwhile is not ended by the earlier run.
        assert reported == ((DeliveryState.RECEIVED, 0, 1) if made else (DeliveryState.DONE, 1, 0))


async def test_a_commit_whose_wait_for_the_standby_was_cancelled_is_not_acknowledged(
    database: Database,
) -> None:
    async with database.open() as inbox:
        with database.server.without_its_standby():
            async with trio.open_nursery() as nursery:

                async def fail(webhook_id: str) -> None:
                    with pytest.raises(StoreUnavailableError, match="no standby has confirmed"):
                        await inbox.accept(delivery(webhook_id), leased=True)

                # Both in one transaction.
                for webhook_id in ("m1", "m2"):
                    nursery.start_soon(fail, webhook_id)
                # As an operator does who wonders about a statement that takes so long: the server
                # answers that it has committed, and warns that no standby has it.
                await database.cut_commit("pg_cancel_backend")
        await inbox.renew([], now=1000)
        async with database.open("two") as two:
            assert len((await two.claim_due(limit=9, now=1001)).records) == 2


async def test_asynchronous_replication_loses_what_the_standby_had_not_got(
    standby: PostgresServer,
) -> None:
    primary = standby.primary
    name = primary.empty().rpartition("=")[2]
    database = Database(
        primary, f"host={primary.directory},{standby.directory} user=owner dbname={name}"
    )
    async with database.open() as inbox:
        await inbox.accept(delivery("early"), leased=False)
        reached = "SELECT pg_current_wal_lsn() <= replay_lsn FROM pg_stat_replication"
        await until(lambda: primary.execute(reached) == [(True,)])
        await trio.to_thread.run_sync(standby.stop)
        assert (await inbox.accept(delivery("late"), leased=False)).admission is Admission.NEW
        primary.kill()
        await trio.to_thread.run_sync(standby.start)
        await trio.to_thread.run_sync(standby.promote)
        with trio.fail_after(30):
            while True:
                try:
                    kept = await inbox.known(["early", "late"])
                    break
                except StoreUnavailableError:
                    await trio.sleep(0.05)
        assert kept == {"early"}


@pytest.mark.parametrize("setting", ["off", "local"])
async def test_commits_are_durable_where_the_server_would_not_make_them_so(
    empty: Database, setting: str
) -> None:
    empty.server.execute(f"ALTER DATABASE {empty.name} SET synchronous_commit = {setting}")
    async with empty.open() as inbox:
        shown = await inbox._commits.submit(lambda tx: tx.one("SHOW synchronous_commit"))
        assert shown == ("on",)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_texts_of_all_scripts_are_stored_under_any_client_encoding(
    database: Database, encoding: str
) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET client_encoding = {encoding}")
    try:
        async with database.open(dsn=f"{database.dsn} client_encoding={encoding}") as inbox:
            await inbox.accept(delivery(subject="\u2603"), leased=False)
            record = await inbox.get("m1")
            assert (record.state, record.subject) == (DeliveryState.RECEIVED, "\u2603")
    finally:
        database.execute(f"ALTER DATABASE {database.name} RESET client_encoding")


async def test_a_database_that_cannot_hold_every_text_is_refused(empty: Database) -> None:
    name = f"{empty.name}_latin"
    empty.server.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreVersionError, match=r"LATIN1.*ENCODING 'UTF8'"):
        async with empty.open(dsn=empty.server.dsn(name)):
            pass


async def test_a_user_with_read_only_transactions_gets_an_explanation(empty: Database) -> None:
    empty.server.execute(f"ALTER DATABASE {empty.name} SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailableError, match="default_transaction_read_only"):
        async with empty.open():
            pass


async def test_a_temporary_table_that_a_handler_leaves_hides_none_of_the_stores(
    database: Database,
) -> None:
    def apply(transaction: Any) -> None:
        transaction.connection.execute("CREATE TEMPORARY TABLE IF NOT EXISTS work (note text)")

    async with database.open() as inbox:
        for name in ("m1", "m2"):
            await inbox.accept(delivery(name), leased=True)
            await inbox.start(name, now=1001.0)
            await inbox.conclude(name, apply, attempt=1, now=1002.0)
            assert (await inbox.get(name)).state is DeliveryState.DONE


@pytest.mark.parametrize(
    "dsn",
    [
        "host=/nowhere passwort=hunter2 dbname=x",
        "hunter2",
        "postgresql://u:hunter2@[/x",
        # Passwords with @ and with /, which end before that for libpq.
        "postgresql://u:p@hunter2@localhost:1/x",
        "postgresql://u:p/hunter2@localhost:1/x",
        "postgresql://u:1/hunter2@localhost",
        "host=/nowhere dbname=postgresql://u:hunter2@localhost:1/x",
    ],
)
async def test_a_connection_string_that_cannot_be_used_is_not_quoted(
    database: Database, dsn: str
) -> None:
    with pytest.raises((OptionsValidationError, StoreUnavailableError)) as caught:
        async with database.open(dsn=dsn):
            pass
    assert "hunter2" not in str(caught.value)


async def test_a_password_is_in_no_message_and_no_repr(database: Database) -> None:
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    dsn = f"postgresql://user:hunter2@127.0.0.1:{free_port()}/db"
    assert "hunter2" not in repr(PostgresAddress(dsn=dsn))
    with pytest.raises(StoreUnavailableError, match=r"db on 127\.0\.0\.1") as caught:
        async with database.open(dsn=dsn):
            pass
    assert "hunter2" not in str(caught.value)


async def test_cancelling_at_random_leaves_no_connection_and_no_open_transaction(
    database: Database,
) -> None:
    dice = random.Random(7)
    async with database.open() as inbox:

        async def call(number: int) -> None:
            key = f"m{number % 50}"
            with trio.move_on_after(dice.random() * 0.02):
                match number % 5:
                    case 0:
                        await inbox.accept(delivery(key), leased=True)
                    case 1:
                        await inbox.start(key, now=1000)
                    case 2:
                        await inbox.finish(key, Retry(1001, "no"), now=1000)
                    case 3:
                        await inbox.claim_due(limit=5, now=1002)
                    case 4:
                        await inbox.find(limit=50)

        for round_ in range(30):
            async with trio.open_nursery() as nursery:
                for number in range(round_, round_ + 40):
                    nursery.start_soon(call, number)

        def are_at_rest() -> bool:
            sessions = database.connections()
            # One writes, and at most four read. The server notices the end of others in its time.
            return len(sessions) <= 5 and all(state == "idle" for _, state in sessions)

        await until(are_at_rest)
        await inbox.accept(delivery("last"), leased=True)
        assert await inbox.get("last") is not None
    await until(lambda: not database.connections())


async def finish_and_accept(inbox: Any, ended: str, brought: NewDelivery) -> None:
    """Have the end of one delivery and the arrival of another committed together."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(inbox.finish, ended, Done(), now=1001))
        nursery.start_soon(partial(inbox.accept, brought, leased=True))


async def test_of_jobs_that_are_sent_together_only_the_one_that_cannot_be_done_fails(
    database: Database,
) -> None:
    async with database.open() as inbox:
        for name in ("m1", "m2"):
            await inbox.claim(delivery(name))
        bad = NewDelivery("bad", "order.paid", b"{}", 2**70, 1000.0)
        with pytest.raises(ExceptionGroup) as raised:
            await finish_and_accept(inbox, "m1", bad)
        assert raised.group_contains(StoreUnavailableError, match="out of range")
        # A key that is known takes one more look, which the other job does not wait for.
        await finish_and_accept(inbox, "m2", delivery("m1"))
        counts = await inbox.counts()
        assert (counts[DeliveryState.DONE], sum(counts.values())) == (2, 2)


async def test_jobs_that_are_sent_together_are_made_together_or_not_at_all(
    database: Database,
) -> None:
    async with database.open() as inbox:
        await inbox.claim(delivery("m1"))
        with database.server.without_its_standby():
            async with trio.open_nursery() as nursery:

                async def fail() -> None:
                    with pytest.raises(ExceptionGroup) as raised:
                        await finish_and_accept(inbox, "m1", delivery("m2"))
                    assert len(raised.value.exceptions) == 2
                    assert raised.group_contains(StoreUnavailableError, match="during a commit")

                nursery.start_soon(fail)
                # The one commit of both has begun, and its answer never comes.
                await database.cut_commit()
        await inbox.renew([], now=1000)
        async with database.open("two") as two:
            (record,) = (await two.claim_due(limit=9, now=1001)).records
            assert record.key == "m2", "the lease that no one holds was given up"
            assert (await two.get("m1")).state is DeliveryState.DONE


# -- costs -------------------------------------------------------------------------------------


async def test_no_work_and_no_listing_reads_the_finished_deliveries(database: Database) -> None:
    server, last = database.server, 30_000
    add_finished(server, database.name, 1, last, words=18)
    async with database.open() as inbox:
        await work(inbox, "before", 2, last)
        forget_blocks(server)
        await work(inbox, "one", 4, last)
    used = blocks(server, database.name)
    assert len(used) > 40
    # The table has more than three thousand.
    most = max(used, key=used.__getitem__)
    assert used[most] < 500, f"{used[most]:.0f} blocks a call: {most}"


async def test_a_claim_reads_no_lease_of_its_own_host(database: Database) -> None:
    server = database.server
    async with database.open("one") as inbox:
        server.execute(
            "INSERT INTO sdk_trio.work (sequence, state, queued, attempts, lease_owner, "
            "lease_token, lease_until) SELECT n, 'running', true, 1, 'one', n, 1e11 "
            "FROM generate_series(1, 20000) AS n",
            database.name,
        )
        server.execute("VACUUM ANALYZE sdk_trio.work", database.name)
        forget_blocks(server)
        for _ in range(8):
            assert not (await inbox.claim_due(limit=9, now=1001)).records
    used = blocks(server, database.name)
    claim = next(statement for statement in used if "expired AS" in statement)
    # The table has more than two hundred.
    assert used[claim] < 60


_BLOCKED = """
WITH numbers AS (
    SELECT n, 'k' || n AS id, (n % 4)::text AS subject FROM generate_series({first}, {last}) AS n
), arrived AS (
    INSERT INTO sdk_trio.arrival (sequence, delivery_key, signer, type, received_at, signed_at,
        subject, ordered, raw)
    SELECT n, id, '', 'order.paid', 1000, 7, subject, true, '{{}}' FROM numbers
)
INSERT INTO sdk_trio.work (sequence, state, queued, lane, attempts)
SELECT n, 'received', true, sha256(subject::bytea), 0 FROM numbers
"""


async def test_no_look_reads_more_where_more_waits_behind_others(database: Database) -> None:
    server = database.server
    walking: list[float] = []
    afterwards: list[float] = []

    def read_by_a_poll() -> float:
        used = blocks(server, database.name)
        looks = [used[each] for each in used if "expired AS" in each or "lane > " in each]
        assert looks
        return sum(looks)

    async with database.open() as inbox:
        for ended, first, last in ((0, 1, 2000), (4, 2001, 8000)):
            server.execute(_BLOCKED.format(first=first, last=last).strip(), database.name)
            server.execute("VACUUM ANALYZE", database.name)
            forget_blocks(server)
            with trio.fail_after(60):
                while (await inbox.claim_due(limit=100, now=1001)).more:
                    pass
            walking.append(read_by_a_poll())
            forget_blocks(server)
            for number in range(ended + 1, ended + 5):
                await inbox.start(f"k{number}", now=1001)
                await inbox.finish(f"k{number}", Done(), now=1001)
                (record,) = (await inbox.claim_due(limit=100, now=1001)).records
                assert record.webhook_id == f"k{number + 4}"
            afterwards.append(read_by_a_poll())
    assert walking[1] <= 2 * walking[0], walking
    assert afterwards[1] <= 1.5 * afterwards[0], afterwards


def statements(database: Database, which: str = "(INSERT|UPDATE|DELETE)") -> dict[str, int]:
    """How often each statement was called since they were forgotten."""
    called = database.server.execute(
        "SELECT query, calls FROM pg_stat_statements JOIN pg_database ON oid = dbid "
        f"WHERE datname = '{database.name}' AND query ~ '{which}'"
    )
    return {" ".join(query.split()): calls for query, calls in called}


async def test_the_backlog_costs_few_statements_for_a_claim_and_for_runs_that_end_together(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A loaded machine may take its time between the start and the end of a run.
    monkeypatch.setattr("sdk_trio.storage.engines.postgres.PostgresEngine.linger", 30.0)
    async with database.open() as inbox:
        for number in range(20):
            await inbox.accept(delivery(f"m{number}"), leased=False)
        forget_blocks(database.server)
        due = await inbox.claim_due(limit=20, now=1001)
        assert due.first_runs == {f"m{number}" for number in range(20)}
        # One finds and locks them, one takes them.
        assert list(statements(database).values()) == [1, 1]

        async def run(key: str) -> None:
            inbox.start_unawaited(key, now=1001)
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            await inbox.finish(key, Done(), now=1002)

        forget_blocks(database.server)
        async with trio.open_nursery() as nursery:
            for record in due.records:
                nursery.start_soon(run, record.key)
        # One operation ends them all, another counts the change. The first one may run alone.
        assert sum(statements(database).values()) <= 3
        assert (await inbox.counts())[DeliveryState.DONE] == 20


async def test_jobs_of_different_kinds_need_no_more_than_their_own_statements(
    database: Database,
) -> None:
    async with database.open() as inbox:
        await inbox.claim(delivery("m1"))
        forget_blocks(database.server)
        await finish_and_accept(inbox, "m1", delivery("m2"))
        called = statements(database, "(BEGIN|COMMIT|INSERT|UPDATE|DELETE)")
        assert len(called) == 5, "BEGIN, one accepts, one ends, the count of the changes, COMMIT"
        assert set(called.values()) == {1}


async def test_an_unawaited_start_is_soon_seen_by_others(database: Database) -> None:
    async with database.open("one") as one, database.open("two") as two:
        await one.accept(delivery(), leased=True)
        one.start_unawaited("m1", now=1001)
        with trio.fail_after(30):
            while (await two.get("m1")).state is not DeliveryState.RUNNING:
                await trio.sleep(0.01)


async def test_no_statement_of_a_delivery_is_planned_for_its_values(database: Database) -> None:
    async with database.open() as inbox:
        for number in range(12):
            await inbox.accept(delivery(f"m{number}"), leased=True)
            await inbox.finish(f"m{number}", Done(), now=1001)
        plans = "SELECT sum(custom_plans), sum(generic_plans) FROM pg_prepared_statements"
        ((each_time, once),) = await inbox._commits.submit(lambda tx: tx.all(plans))
        assert (each_time, once > 0) == (0, True)


# -- a pooler in between -----------------------------------------------------------------------


@pytest.fixture
def pooler(database: Database) -> Iterator[str]:
    """PgBouncer in transaction mode with two connections to the server; its connection string."""
    with pooled(database.server, database.dsn, connections=2) as dsn:
        yield dsn


async def test_a_pooler_that_changes_connections_changes_nothing(
    database: Database, pooler: str
) -> None:
    async def opened(name: str) -> None:
        with trio.fail_after(60):
            while True:
                try:
                    async with database.open(name, dsn=pooler) as inbox:
                        await work(name, inbox)
                        return
                except StoreUnavailableError:  # it starts yet
                    await trio.sleep(0.05)

    async def work(name: str, inbox: Any) -> None:
        assert await inbox._commits.run_outside_transaction(lambda c: c.pooled)
        for number in range(15):
            key = f"{name}-{number}"
            await inbox.accept(delivery(key), leased=True)
            await inbox.start(key, now=1000)
            assert (await inbox.get(key)).attempts == 1
            await inbox.finish(key, Done(), now=1001)

    async with trio.open_nursery() as nursery:
        for name in ("one", "two", "three"):
            nursery.start_soon(opened, name)
    async with database.open() as inbox:
        assert (await inbox.counts())[DeliveryState.DONE] == 45


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ('FATAL:  password authentication failed for user "a"', "check the connection string"),
        ('FATAL:  database "b" does not exist', "check the connection string"),
        ("Connection refused", "a running receiver continues by itself when the server answers"),
    ],
)
def test_a_refusing_server_is_distinguished_from_an_unreachable_one(said: str, hint: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    reported = PostgresAddress(dsn="postgresql://db.example/b").describe(
        psycopg.OperationalError(said)
    )
    assert hint in str(reported)
