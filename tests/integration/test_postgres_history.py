"""The history on PostgreSQL: partitions of days that are created and dropped, and data that must
survive that."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from support.keyed import ByKey
from support.postgres import open_inbox, running_server
from support.waiting import until

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import Admission, Dead, DeliveryState, Done, NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines import postgres_days
from sdk_trio.storage.sql.admission import Arriving, accept_all
from sdk_trio.storage.sql.schema import DAY_BITS

DAY = 86_400.0
ROOT = Path(__file__).parents[2]


class Store:
    """A store whose first day begins at 0, by the clock of its callers."""

    def __init__(self, place: Path) -> None:
        from sdk_trio.storage.engines.postgres_address import PostgresAddress
        from sdk_trio.storage.engines.postgres_migration import migrate_postgres

        self.place = place
        # No other test gets it: its days are other ones afterwards.
        self.dsn = running_server().database_of(place, new=True)
        migrate_postgres(PostgresAddress(dsn=self.dsn))
        self.execute("UPDATE sdk_trio.day SET opened_at = 0 WHERE number = 0")

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return running_server().execute(statement, self.dsn.rpartition("=")[2])

    @property
    def days(self) -> list[tuple[int, int]]:
        """The first and the next day of each partition that is attached, by the catalog."""
        found = self.execute(
            "SELECT pg_get_expr(relpartbound, pg_class.oid) FROM pg_class JOIN pg_inherits "
            "ON inhrelid = pg_class.oid WHERE inhparent = 'sdk_trio.arrival'::regclass"
        )
        bounds = (re.findall(r"\d+", bound) for (bound,) in found)
        return sorted((int(first) >> DAY_BITS, int(end) >> DAY_BITS) for first, end in bounds)

    @asynccontextmanager
    async def open(self, owner: str = "one", **terms: float) -> AsyncIterator[Any]:
        terms = {"lease_seconds": 75.0, "dedup_seconds": DAY, "payload_seconds": 2 * DAY, **terms}
        inbox = ByKey(await open_inbox(self.place, owner=owner, **terms))
        try:
            yield inbox
        finally:
            with trio.move_on_after(30, shield=True):
                await inbox.close()

    def broken_rules(self) -> list[str]:
        from sdk_trio.storage.engines.postgres_address import PostgresAddress
        from sdk_trio.storage.examine_postgres import check_database

        results = check_database(PostgresAddress(dsn=self.dsn), lambda _: None)
        return [each.rule for each in results if each.found is not None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("sdk_trio.storage.commit.ANSWER_SECONDS", 60.0)
    monkeypatch.setattr("sdk_trio.storage.engines.postgres_days.PAUSE_SECONDS", 0.0)
    # A loaded machine may need longer for what is in progress.
    monkeypatch.setattr("sdk_trio.storage.engines.postgres_days.DROP_MILLISECONDS", 30_000)
    return Store(tmp_path)


def delivery(key: str, at: float, **fields: Any) -> NewDelivery:
    return NewDelivery(key, "order.paid", b'{"type":"order.paid"}', 7, at, **fields)


async def run(inbox: Any, key: str, at: float, outcome: Any = None) -> None:
    await inbox.accept(delivery(key, at), leased=True)
    await inbox.start(key, now=at)
    await inbox.finish(key, outcome or Done(), now=at)


async def days_of(inbox: Any, *keys: str) -> list[int]:
    return [(await inbox.get(key)).sequence >> DAY_BITS for key in keys]


async def keys_in(inbox: Any) -> list[str]:
    return [record.key for record in await inbox.find(limit=50)]


async def test_days_are_opened_and_dropped(store: Store) -> None:
    async with store.open() as inbox:
        for number in range(5):
            now = number * DAY + 100
            purged = await inbox.purge(now=now)
            await run(inbox, f"m{number}", now)
        assert (purged.bodies, purged.finished) == (1, 1)
        assert store.days == [(1, 2), (2, 3), (3, 4), (4, 5)]
        assert await days_of(inbox, "m1", "m2", "m3", "m4") == [1, 2, 3, 4]
        assert await keys_in(inbox) == ["m4", "m3", "m2", "m1"]
        assert await inbox.get("m0") is None
        assert (await inbox.counts())[DeliveryState.DONE] == 4
        assert store.broken_rules() == []
        assert (await inbox.accept(delivery("m0", now), leased=False)).admission is Admission.NEW


async def test_order_and_duplicates_across_midnight(store: Store) -> None:
    async with store.open() as inbox:
        for key, at in (("a", DAY - 1), ("b", DAY + 1)):
            await inbox.purge(now=at)
            await inbox.accept(delivery(key, at, subject="s", ordered=True), leased=False)
        assert await days_of(inbox, "a", "b") == [0, 1]
        for key in ("a", "b"):
            due = await inbox.claim_due(limit=9, now=DAY + 2)
            assert [record.key for record in due.records] == [key]
            await inbox.start(key, now=DAY + 2)
            await inbox.finish(key, Done(), now=DAY + 2)
        again = await inbox.claim(delivery("a", DAY + 3))
        assert again.admission is Admission.DONE
        assert await keys_in(inbox) == ["b", "a"]


async def test_retained_rows_of_old_days_are_in_one_partition(store: Store) -> None:
    async with store.open() as inbox:
        for number in range(3):
            now = number * DAY + 100
            await inbox.purge(now=now)
            await run(inbox, f"done-{number}", now)
            await run(inbox, f"dead-{number}", now, Dead("no"))
        await run(inbox, "late", now)
        # Replayed and done again: it is of day 1, and was done on the last day.
        await inbox.replay(["dead-1"])
        await inbox.claim_due(limit=9, now=5 * DAY)
        await inbox.start("dead-1", now=5 * DAY)
        await inbox.finish("dead-1", Done(), now=5 * DAY)
        for now in (3 * DAY + 100, 5 * DAY):
            purged = await inbox.purge(now=now)
        assert purged.finished == 2
        assert store.days == [(0, 2), (2, 3), (3, 4), (4, 5)]
        assert await keys_in(inbox) == ["late", "dead-2", "done-2", "dead-1", "dead-0"]
        dead = await inbox.get("dead-0")
        assert (dead.state, dead.raw) == (DeliveryState.DEAD, delivery("", 0).raw)
        assert len(await inbox.attempts("dead-0")) == 1
        assert store.broken_rules() == []
        # It can be replayed like any other event, and is removed when it is old.
        assert await inbox.replay(["dead-0"]) == ["dead-0"]
        await inbox.claim_due(limit=9, now=now)
        await inbox.start("dead-0", now=now)
        await inbox.finish("dead-0", Done(), now=now)
        await inbox.purge(now=now + 4 * DAY)
        assert await keys_in(inbox) == ["dead-2"]
        assert (await inbox.counts())[DeliveryState.DONE] == 0
        assert store.broken_rules() == []


async def test_a_day_that_leaves_too_much_loses_its_rows_one_by_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk_trio.storage.engines.postgres_days.MOST_LEFT", 1)
    async with store.open() as inbox:
        for number in range(2):
            await run(inbox, f"dead-{number}", 100, Dead("no"))
            await run(inbox, f"done-{number}", 100)
        for now in (DAY + 100, 4 * DAY):
            await inbox.purge(now=now)
        assert store.days[0] == (0, 1)
        assert await keys_in(inbox) == ["dead-1", "dead-0"]
        assert store.broken_rules() == []


async def test_bodies_go_before_the_ids(store: Store) -> None:
    async with store.open(dedup_seconds=9 * DAY, payload_seconds=2 * DAY) as inbox:
        for number in range(4):
            await inbox.purge(now=number * DAY + 100)
            await run(inbox, f"m{number}", number * DAY + 100)
        now = 3 * DAY + 200
        assert (await inbox.purge(now=now)).bodies == 1
        assert (await inbox.purge(now=now)).bodies == 0
        bodies = [(await inbox.get(f"m{number}")).raw is not None for number in range(4)]
        assert bodies == [False, False, True, True]
        assert (await inbox.claim(delivery("m0", now))).admission is Admission.DONE


async def test_a_clock_that_was_ahead_makes_no_later_pass_skip_bodies(store: Store) -> None:
    async with store.open(dedup_seconds=90 * DAY, payload_seconds=2 * DAY) as inbox:
        await inbox.purge(now=9 * DAY)
        await run(inbox, "m0", 4 * DAY)
        assert (await inbox.purge(now=5 * DAY)).bodies == 0
        assert (await inbox.purge(now=6 * DAY + 1)).bodies == 1


async def test_two_hosts_open_a_day_at_once(store: Store) -> None:
    async with store.open("one") as one, store.open("two") as two:
        for number in range(1, 4):
            now = number * DAY + 100
            async with trio.open_nursery() as nursery:
                for host, inbox in (("one", one), ("two", two)):
                    nursery.start_soon(_purge, inbox, now)
                    nursery.start_soon(run, inbox, f"{host}-{number}", now)
        keys = [f"{host}-{number}" for number in (1, 2, 3) for host in ("one", "two")]
        assert set(await keys_in(one)) == set(keys)
        assert store.days == [(0, 1), (1, 2), (2, 3), (3, 4)]
        assert store.broken_rules() == []


async def _purge(inbox: Any, now: float) -> None:
    await inbox.purge(now=now)


async def test_a_process_that_ends_while_it_opens_a_day(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partitions are committed, and the numbers do not begin with it yet."""

    def make(transactions: Any, now: float) -> None:
        transactions.run(postgres_days.make_next, now)

    async with store.open() as inbox:
        with monkeypatch.context() as patched:
            patched.setattr(postgres_days, "_open", make)
            await inbox.purge(now=DAY)
        assert store.days == [(0, 1), (1, 2)]
        await run(inbox, "before", 3 * DAY)
        # The day is opened late, so the one before lasted for all the time.
        await inbox.purge(now=3 * DAY)
        await run(inbox, "after", 3 * DAY)
        assert await days_of(inbox, "before", "after") == [0, 1]
        await inbox.purge(now=4 * DAY)
        assert await keys_in(inbox) == ["after", "before"]


async def test_a_process_that_ends_while_it_drops_a_day(store: Store) -> None:
    import psycopg

    async with store.open() as inbox:
        await run(inbox, "m0", 100)
        await inbox.purge(now=DAY)
        await run(inbox, "m1", 3 * DAY)
        with psycopg.connect(store.dsn) as reader:
            reader.execute("SELECT count(*) FROM sdk_trio.arrival").fetchall()
            waiting = (
                "FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND query LIKE 'LOCK TABLE arrival, ended %' AND datname = current_database()"
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_purge_in_vain, inbox)
                await until(lambda: store.execute(f"SELECT pg_terminate_backend(pid) {waiting}"))
        assert store.days == [(0, 1), (1, 2), (2, 3)]
        # Its key is gone already: the next delivery is new, and stays.
        assert (await inbox.accept(delivery("m0", 4 * DAY), leased=False)).admission is (
            Admission.NEW
        )
        await inbox.purge(now=4 * DAY)
        assert await keys_in(inbox) == ["m0", "m1"]
        assert store.days == [(1, 2), (2, 3)]
        assert store.broken_rules() == []


async def test_a_deadlock_with_another_host_leaves_the_day_for_the_next_pass(store: Store) -> None:
    async with store.open() as inbox:
        await run(inbox, "m0", 100)
        await inbox.park(delivery("parked", 200))
        await inbox.purge(now=DAY)
        await run(inbox, "m1", 3 * DAY)
        # The server ends our transaction, and not the other one.
        store.execute(
            "CREATE FUNCTION sdk_trio.deadlock() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE SQLSTATE '40P01'; END $$"
        )
        store.execute(
            "CREATE TRIGGER deadlock BEFORE DELETE ON sdk_trio.arrival_key "
            "FOR EACH ROW WHEN (OLD.delivery_key = 'm0') EXECUTE FUNCTION sdk_trio.deadlock()"
        )
        # The rest of the pass is done.
        assert (await inbox.purge(now=4 * DAY)).parked == 1
        assert await keys_in(inbox) == ["m1", "m0"]
        store.execute("DROP FUNCTION sdk_trio.deadlock CASCADE")
        await inbox.purge(now=4 * DAY)
        assert await keys_in(inbox) == ["m1"]


async def test_a_delivery_whose_day_could_not_be_dropped_runs_once_more_and_not_twice(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is removed and its row is not, so the redelivery adds a second row of the key."""
    from sdk_trio.storage import transfer
    from sdk_trio.storage.engines.postgres_address import PostgresAddress
    from sdk_trio.storage.sqlite_inbox import SqliteInbox

    async with store.open() as inbox:
        await run(inbox, "m0", 100)
        await inbox.purge(now=DAY)
        monkeypatch.setattr("sdk_trio.storage.engines.postgres_days.DROP_MILLISECONDS", 10)
        with psycopg.connect(store.dsn) as reader:
            reader.execute("SELECT count(*) FROM sdk_trio.arrival").fetchall()
            await inbox.purge(now=4 * DAY)
        assert store.days == [(0, 1), (1, 2), (2, 3)]
        await run(inbox, "m0", 4 * DAY)
        again = delivery("m0", 4 * DAY + 1)
        assert (await inbox.claim(again)).admission is Admission.DONE
        assert [record.sequence >> DAY_BITS for record in await inbox.find()] == [2, 0]
        assert [each.received_at for each in await inbox.find_by_id("m0")] == [4 * DAY]
        assert store.broken_rules() == []
        file = tmp_path / "copy.db"
        transfer.copy_database(PostgresAddress(dsn=store.dsn), file, lambda *_: None)
        monkeypatch.setattr("sdk_trio.storage.engines.postgres_days.DROP_MILLISECONDS", 30_000)
        await inbox.purge(now=4 * DAY + 2)
        assert await days_of(inbox, "m0") == [2]
        assert len(await inbox.find()) == 1
    terms = {"lease_seconds": 75.0, "dedup_seconds": DAY, "payload_seconds": 2 * DAY}
    copied = await SqliteInbox.open(file, LeaseTerms(owner="one", **terms))
    assert (await copied.claim(again)).admission is Admission.DONE
    await copied.purge(now=4 * DAY + 2)
    assert (await copied.claim(again)).admission is Admission.DONE
    assert len(await copied.find()) == 1
    await copied.close()


async def test_a_key_that_was_left_without_its_delivery_is_new_again(store: Store) -> None:
    """A delivery that ends while its day is dropped can leave its key behind."""
    async with store.open() as inbox:
        store.execute("INSERT INTO sdk_trio.arrival_key (delivery_key) VALUES ('m1')")
        assert (await inbox.claim(delivery("m1", 100))).admission is Admission.NEW
        assert (await inbox.accept(delivery("m1", 101), leased=True)).admission is Admission.NEW
        await inbox.finish("m1", Done(), now=102)
        assert (await inbox.claim(delivery("m1", 103))).admission is Admission.DONE
        assert store.broken_rules() == []


async def _purge_in_vain(inbox: Any) -> None:
    with pytest.raises(StoreUnavailableError):
        await inbox.purge(now=4 * DAY)


async def test_a_statement_that_began_before_the_partition_was_made(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a number of a day that it does not know, and is run again."""
    import psycopg

    monkeypatch.setattr("sdk_trio.storage.engines.postgres_address.LOCK_WAIT_SECONDS", 60.0)
    blocked = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND query LIKE 'WITH given%' AND datname = current_database()"
    )
    both = [Arriving(delivery(key, DAY), None) for key in ("waits", "comes after it")]
    async with store.open("one") as inbox, store.open("two") as two:
        accept = partial(accept_all, terms=inbox._terms, arriving=both)
        with psycopg.connect(store.dsn) as slow:
            slow.execute("INSERT INTO sdk_trio.arrival_key (delivery_key) VALUES ('waits')")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(inbox._commits.submit, accept)
                await until(lambda: store.execute(blocked))
                await two.purge(now=DAY)
                slow.rollback()
        assert await days_of(inbox, "waits", "comes after it") == [1, 1]


async def test_a_user_who_owns_nothing_keeps_one_day(store: Store) -> None:
    from sdk_trio.storage.engines.postgres_address import PostgresAddress
    from sdk_trio.storage.postgres_inbox import PostgresInbox

    user = f"user_{store.dsn.rpartition('=')[2]}"
    store.execute(f"CREATE ROLE {user} LOGIN")
    try:
        store.execute(f"GRANT USAGE ON SCHEMA sdk_trio TO {user}")
        store.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA sdk_trio TO {user}")
        store.execute(f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA sdk_trio TO {user}")
        inbox = await PostgresInbox.open(
            PostgresAddress(dsn=store.dsn.replace("user=owner", f"user={user}")),
            LeaseTerms(
                owner="one",
                shared_by_hosts=True,
                lease_seconds=75.0,
                dedup_seconds=DAY,
                payload_seconds=DAY,
            ),
            server_clock=False,
        )
        await run(ByKey(inbox), "old", 100)
        await run(ByKey(inbox), "new", 4 * DAY)
        assert (await inbox.purge(now=4 * DAY)).finished == 1
        assert await keys_in(inbox) == ["new"]
        await inbox.close()
        assert store.days == [(0, 1)]
    finally:
        store.execute(f"DROP OWNED BY {user}")
        store.execute(f"DROP ROLE {user}")


async def test_days_are_backed_up_and_restored(store: Store, tmp_path: Path) -> None:
    from sdk_trio.storage import transfer
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    async with store.open() as inbox:
        for number in range(3):
            await inbox.purge(now=number * DAY + 100)
            await run(inbox, f"done-{number}", number * DAY + 100)
            await run(inbox, f"dead-{number}", number * DAY + 100, Dead("no"))
        before = await inbox.find(limit=50)
    file = tmp_path / "copy.db"
    transfer.copy_database(PostgresAddress(dsn=store.dsn), file, lambda *_: None)
    another = tmp_path / "another"
    target = running_server().database_of(another, new=True)
    address = PostgresAddress(dsn=target)
    transfer.restore_database(address, file, lambda _: None, lambda *_: None)
    dsn, store.dsn, store.place = store.dsn, target, another
    assert store.days == [(0, 1), (1, 2), (2, 3)]
    assert store.broken_rules() == []
    async with store.open() as restored:
        assert await restored.find(limit=50) == before
        # They are as old as they were.
        await restored.purge(now=4 * DAY)
        assert set(await keys_in(restored)) == {"done-2", "dead-0", "dead-1", "dead-2"}
        await run(restored, "new", 4 * DAY)
        assert (await restored.get("new")).sequence > before[0].sequence
    assert dsn != target


# -- transitions and audit -----------------------------------------------------------------------

_TRANSITION = """
INSERT INTO sdk_trio.outbox (written_at, delivery_id, tenant_id, tenant_identifier, tenant_name,
    transition, previous_status, new_status, actor, occurred_at, site_manager_email_verified)
VALUES (extract(epoch FROM clock_timestamp()), '{id}', '{id}', '{id}', '{id}', 'Suspended',
    'Active', 'Suspended', 'a', 1, false)
"""
_AUDIT = """
INSERT INTO sdk_trio.audit (tenant_id, tenant_identifier, action, actor, occurred_at)
VALUES ('{id}', '{id}', 'Refused', 'a', 1)
"""


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_reader_of_transitions_waits_for_a_number_that_is_being_written(
    store: Store, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    async with store.open() as inbox:
        with psycopg.connect(store.dsn) as slow:
            slow.execute(_TRANSITION.format(id="one"))
            # It does not wait for the other tenant.
            store.execute(_TRANSITION.format(id="two"))
            assert await inbox.tenants.outbox() == []
            getattr(slow, end)()
            if end == "rollback":
                assert await inbox.tenants.outbox() == []
                monkeypatch.setattr("sdk_trio.storage.sql.tenants.SETTLE_SECONDS", 0.0)
        names = [row.tenant_id for row in await inbox.tenants.outbox()]
        assert names == (["one", "two"] if end == "commit" else ["two"])


async def test_a_message_is_written_for_each_transition_whatever_the_order(store: Store) -> None:
    import psycopg

    store.execute("INSERT INTO sdk_trio.checkpoint VALUES ('notifications', '0')")
    channels = {"email": True}
    async with store.open() as inbox:
        with psycopg.connect(store.dsn) as slow:
            slow.execute(_TRANSITION.format(id="one"))
            store.execute(_TRANSITION.format(id="two"))
            for _ in range(2):
                await inbox.notifications.create_messages(channels, now=2.0, oldest=0.0)
                slow.commit()
        messages = await inbox.notifications.find()
        assert [each.outbox.tenant_id for each in messages] == ["two", "one"]


async def test_a_change_that_is_committed_late_is_noticed(store: Store) -> None:
    import psycopg

    async with store.open() as inbox:
        with psycopg.connect(store.dsn) as slow:
            slow.execute(_AUDIT.format(id="one"))
            store.execute(_AUDIT.format(id="two"))
            before = await inbox.tenants.revision()
            slow.commit()
        assert await inbox.tenants.revision() != before


#: Features that other engines with PostgreSQL's protocol lack, or that have no meaning on several
#: servers.
_LACKING = re.compile(
    r"pg_(try_)?advisory|\bLISTEN\b|pg_notify|snapshot_xmin|\bctid\b|\bxmin\b|LOCK TABLE"
)


def test_no_statement_of_the_daily_work_is_peculiar_to_one_server() -> None:
    storage = ROOT / "sdk_trio" / "storage"
    files = [
        *(storage / "sql").glob("*.py"),
        storage / "engines" / "postgres.py",
        storage / "postgres_inbox.py",
        storage / "inbox.py",
    ]
    text = {file.name: file.read_text() for file in files}
    found = {name: _LACKING.findall(re.sub(r"(?m)#.*$", "", each)) for name, each in text.items()}
    assert {name for name, each in found.items() if each} == set()


async def test_retention_skips_a_delivery_that_a_redelivery_has_locked(store: Store) -> None:
    async with store.open(payload_seconds=50, dedup_seconds=50) as inbox:
        for key in ("held", "free"):
            await inbox.park(delivery(key, 100))
        # A redelivery locks the row of `arrival` first. The retention has locked that of `work`
        # if it waits here, and both wait for each other.
        with psycopg.connect(store.dsn) as redelivery:
            redelivery.execute(
                "SELECT 1 FROM sdk_trio.arrival WHERE delivery_key = 'held' FOR NO KEY UPDATE"
            )
            assert (await inbox.purge(now=1000)).parked == 1
        assert await keys_in(inbox) == ["held"]
        assert (await inbox.purge(now=1000)).parked == 1
