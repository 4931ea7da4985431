"""The store on PostgreSQL under settings, stalls and clocks that are not its own."""

import errno
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from support.doctor import Doctor
from support.keyed import ByKey
from support.postgres import PostgresServer, pooled, running_server
from support.silent_proxy import SilentProxy, silent_proxy
from support.waiting import until

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import DeliveryState, Done, NewDelivery, Postponed, Retry

TERMS = {"lease_seconds": 60.0, "dedup_seconds": 1e9, "payload_seconds": 1e9}


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

    @asynccontextmanager
    async def open(self, owner: str = "one", dsn: str = "", **terms: Any) -> AsyncIterator[Any]:
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


@pytest.fixture
def database() -> Database:
    server = running_server()
    return Database(server, server.fresh())


@pytest.fixture
def pooler(database: Database) -> Iterator[str]:
    """PgBouncer in transaction mode with three connections to the server."""
    with pooled(database.server, database.dsn, connections=3) as dsn:
        yield dsn


@pytest.fixture(params=["direct", "pooled"])
def path(request: pytest.FixtureRequest, database: Database) -> str:
    """A connection string: straight to the server, or through PgBouncer."""
    if request.param == "direct":
        return database.dsn
    dsn: str = request.getfixturevalue("pooler")
    return dsn


@pytest.fixture
def role(database: Database) -> Iterator[Any]:
    """Set settings of the role for the length of a test."""
    given = []

    def give(setting: str, value: str) -> None:
        given.append(setting)
        database.execute(f"ALTER ROLE owner SET {setting} = {value}")

    yield give
    for setting in given:
        database.execute(f"ALTER ROLE owner RESET {setting}")


def delivery(webhook_id: str = "m1", *, at: float = 1000.0, **fields: Any) -> NewDelivery:
    return NewDelivery(webhook_id, "order.paid", b'{"type":"order.paid"}', 7, at, **fields)


def accept_by(connection: Any, incoming: NewDelivery) -> None:
    """Keep a delivery in the transaction of another host's connection."""
    from sdk_trio.storage.admission import LeaseTerms
    from sdk_trio.storage.engines.postgres import PostgresTransaction
    from sdk_trio.storage.sql.admission import Arriving, accept_all
    from sdk_trio.storage.sql.dialect import Dialect

    transaction = PostgresTransaction(connection, Dialect("postgresql", server_clock=True))
    accept_all(transaction, LeaseTerms(owner="other", **TERMS), [Arriving(incoming, None)])


# -- settings of the role --------------------------------------------------------------------------


async def test_a_role_that_hides_warnings_does_not_hide_a_commit_that_no_standby_has(
    database: Database, path: str, role: Any
) -> None:
    role("client_min_messages", "error")
    async with database.open(dsn=path) as inbox:
        await inbox.accept(delivery("before"), leased=False)
        with database.server.without_its_standby():
            async with trio.open_nursery() as nursery:

                async def fail() -> None:
                    with pytest.raises(StoreUnavailableError, match="no standby has confirmed"):
                        await inbox.accept(delivery(), leased=False)

                nursery.start_soon(fail)
                waiting = database.server.commits_that_wait()
                cut = f"SELECT pg_cancel_backend(pid) {waiting} AND datname = '{database.name}'"
                await until(lambda: database.execute(cut))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("client_min_messages", "error"),
        ("synchronous_commit", "off"),
        ("default_transaction_isolation", "serializable"),
        ("statement_timeout", "'1h'"),
        ("lock_timeout", "'1h'"),
        ("idle_in_transaction_session_timeout", "0"),
        ("standard_conforming_strings", "off"),
        ("extra_float_digits", "-15"),
        ("array_nulls", "off"),
        ("search_path", "nowhere"),
        ("DateStyle", "'German'"),
        ("TimeZone", "'Pacific/Chatham'"),
    ],
)
async def test_no_setting_of_the_role_reaches_a_transaction(
    database: Database, path: str, role: Any, setting: str, value: str
) -> None:
    # Which of them may differ without changing what a row holds: those of dates, which no
    # statement writes as text.
    kept = setting in {"DateStyle", "TimeZone"}

    async def shown(inbox: Any) -> Any:
        name = setting.replace("default_", "")
        return await inbox._commits.submit(lambda tx: tx.one(f"SHOW {name}"))

    async with database.open(dsn=database.dsn) as inbox:
        expected = await shown(inbox)
    role(setting, value)
    async with database.open("two", dsn=path) as inbox:
        assert kept or await shown(inbox) == expected
        exact = delivery("exact", at=1_700_000_000.123456)
        await inbox.accept(exact, leased=True)
        await inbox.start("exact", now=1001)
        await inbox.finish("exact", Retry(1_700_000_100.654321, "no\\'"), now=1_700_000_000.5)
        record = await inbox.get("exact")
        assert (record.received_at, record.subject, record.tenant_id) == (exact.received_at,) + (
            None,
        ) * 2
        assert record.last_error == "no\\'"


# -- a host that is frozen, and a connection that is half-open ------------------------------------


async def test_a_frozen_host_keeps_only_its_own_keys_and_is_named(
    database: Database, path: str
) -> None:
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    address = PostgresAddress(dsn=f"{path} application_name=the-frozen-host")
    with closing(address.connect(writer=True)) as frozen:
        transaction = address.transaction(frozen)
        transaction.__enter__()
        # From here on it sends nothing: SIGSTOP came between a statement and the COMMIT.
        accept_by(frozen, delivery("shared"))
        async with database.open(dsn=path) as inbox:
            with pytest.raises(StoreUnavailableError, match="a lock was not free") as caught:
                await inbox.accept(delivery("shared"), leased=False)
            assert "the-frozen-host" in str(caught.value)
            async with trio.open_nursery() as nursery:

                async def blocked() -> None:
                    with suppress(StoreUnavailableError):
                        await inbox.accept(delivery("shared"), leased=False)

                nursery.start_soon(blocked)
                for number in range(5):
                    await inbox.accept(delivery(f"other-{number}"), leased=False)

            async def is_accepted() -> bool:
                with suppress(StoreUnavailableError):
                    await inbox.accept(delivery("shared"), leased=False)
                    return True
                return False

            # The server ends the frozen host's transaction by itself.
            await until(is_accepted)
        import psycopg

        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            transaction.__exit__(None, None, None)


async def test_locked_rows_hold_up_no_other_job_for_longer_than_one_wait(
    database: Database, path: str
) -> None:
    """Without the limit, each locked row of a batch costs a separate wait, and all other callers
    leave."""
    import psycopg

    keys = [f"locked-{number}" for number in range(4)]
    refused: list[str] = []
    async with database.open(dsn=path) as inbox:
        for key in keys:
            await inbox.accept(delivery(key), leased=True)
            await inbox.start(key, now=1001)
        with psycopg.connect(database.dsn) as another:
            another.execute("SELECT 1 FROM sdk_trio.work FOR UPDATE")

            async def finish(key: str) -> None:
                try:
                    await inbox.finish(key, Done(), now=1002)
                except StoreUnavailableError as error:
                    refused.append(str(error))

            async with trio.open_nursery() as nursery:
                for key in keys:
                    nursery.start_soon(finish, key)
                for number in range(20):
                    nursery.start_soon(partial(inbox.accept, delivery(f"{number}"), leased=False))
        assert len(refused) == len(keys)
        assert all("a lock was not free" in each for each in refused)
        for key in keys:
            await inbox.finish(key, Done(), now=1003)
        counts = await inbox.counts()
        assert (counts[DeliveryState.DONE], counts[DeliveryState.RECEIVED]) == (4, 20)


@pytest.mark.parametrize(
    "lock", ["LOCK TABLE sdk_trio.work", "SELECT FROM sdk_trio.work FOR UPDATE"]
)
async def test_the_session_that_holds_a_lock_is_named_and_no_other(
    database: Database, path: str, lock: str
) -> None:
    import psycopg

    async with database.open(dsn=path) as inbox:
        await inbox.accept(delivery(), leased=True)
        with (
            psycopg.connect(database.dsn, application_name="innocent") as innocent,
            psycopg.connect(database.dsn, application_name="the-holder") as holder,
        ):
            # It writes for longer, to tables of the application.
            innocent.execute("CREATE TABLE public.theirs ()")
            holder.execute(lock)
            with pytest.raises(StoreUnavailableError, match=r"holder is the session \d+ \(the-h"):
                await inbox.finish("m1", Done(), now=1002)
            innocent.rollback()  # another test gets this database


async def test_a_descriptor_that_cannot_be_duplicated_is_an_error_of_the_store(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    async with database.open() as inbox:
        database.execute(f"{end} AND datname = current_database()")
        with monkeypatch.context() as patched:
            patched.setattr("sdk_trio.storage.engines.postgres_connection.os.dup", fail)
            with pytest.raises(StoreUnavailableError, match="Too many open files"):
                await inbox.counts()
        await until(lambda: _answers(inbox))


async def _answers(inbox: Any) -> bool:
    with suppress(StoreUnavailableError):
        await inbox.counts()
        return True
    return False


@pytest.mark.parametrize("host", ["h" * 90, "\u00e4" * 60, "odd\udcff", "it's \\ odd"])
async def test_a_host_may_have_any_name(
    database: Database, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    monkeypatch.setattr("socket.gethostname", lambda: host)
    with closing(PostgresAddress(dsn=database.dsn).connect()) as connection:
        (name,) = connection.execute("SHOW application_name").fetchone() or ("",)
    assert name.startswith("sdk_trio ")
    assert name.endswith(f":{os.getpid()}")


@pytest.fixture
def proxy(database: Database) -> Iterator[SilentProxy]:
    with silent_proxy(database.server.directory) as proxy:
        yield proxy


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits that half-open connections run into, shortened."""
    engines = "sdk_trio.storage.engines"
    monkeypatch.setattr(f"{engines}.postgres_address.WRITE_SECONDS", 2)
    monkeypatch.setattr(f"{engines}.postgres_address.STATEMENT_SECONDS", 2)
    monkeypatch.setattr(f"{engines}.postgres_connection.SILENCE_SECONDS", 0.5)


@pytest.mark.usefixtures("hasty")
async def test_half_open_connections_are_given_up_and_replaced(
    database: Database, proxy: SilentProxy
) -> None:
    dsn = f"host=127.0.0.1 port={proxy.port} user=owner dbname={database.name}"

    async def works(inbox: Any, key: str) -> bool:
        with suppress(StoreUnavailableError):
            await inbox.accept(delivery(key), leased=False)
            return await inbox.get(key) is not None
        return False

    async with database.open(dsn=dsn) as inbox:
        assert await works(inbox, "before")
        proxy.fall_silent()
        await until(lambda: works(inbox, "after"))


async def test_half_open_readers_keep_no_one_from_fetching_due_events(
    database: Database, proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feeder asks for changes by a reader; the server has 60 s for a statement of those."""
    monkeypatch.setattr("sdk_trio.storage.postgres_inbox.ANSWER_SECONDS", 1.0)
    dsn = f"host=127.0.0.1 port={proxy.port} user=owner dbname={database.name}"
    async with database.open(dsn=dsn) as inbox:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(inbox.counts)
        assert len(inbox._readers._idle) > 1
        proxy.fall_silent()
        with pytest.raises(StoreUnavailableError, match="was not read within 1 s"):
            await inbox.changed_elsewhere()
        assert await inbox.changed_elsewhere() is False, "the others are not tried"


async def test_a_store_whose_connections_are_half_open_is_closed_all_the_same(
    database: Database, proxy: SilentProxy
) -> None:
    dsn = f"host=127.0.0.1 port={proxy.port} user=owner dbname={database.name}"

    async def use() -> None:
        async with database.open(dsn=dsn) as inbox:
            await inbox.accept(delivery("before"), leased=False)
            await inbox.counts()
            proxy.fall_silent(new=True)
            opened.append(inbox)
            async with trio.open_nursery() as nursery:
                for call in (partial(inbox.accept, delivery(), leased=False), inbox.counts):
                    nursery.start_soon(call)
                await trio.sleep(0.2)
                nursery.cancel_scope.cancel()

    opened: list[Any] = []
    await use()
    (inbox,) = opened
    # No thread is left waiting for the server.
    assert not inbox._readers._limiter.borrowed_tokens
    assert inbox._commits._thread_ended.is_set()


# -- clocks that differ ------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-600.0, 600.0])
async def test_a_retry_is_due_by_the_clock_of_the_database(
    database: Database, ahead: float
) -> None:
    async with database.open("right") as right, database.open("wrong") as wrong:
        now = time.time()
        off = now + ahead
        for inbox, key, at, begun in (
            (right, "later", now + 500, now),
            (wrong, "much-later", off + 900, off),
            (wrong, "due", off, off),
        ):
            await inbox.accept(delivery(key, at=begun), leased=True)
            await inbox.start(key, now=begun)
            await inbox.finish(key, Retry(at, "no"), now=begun)
        due = await wrong.claim_due(limit=9, now=off)
        assert [record.key for record in due.records] == ["due"]
        # In the time of the process that polls, because it waits by that clock.
        assert due.next_due_at == pytest.approx(off + 500, abs=60)
        await wrong.release(["due"])
        due = await right.claim_due(limit=9, now=now)
        assert [record.key for record in due.records] == ["due"]
        assert due.next_due_at == pytest.approx(now + 500, abs=60)
        await right.finish("due", Postponed(now + 300, "wait"), now=now)
        due = await wrong.claim_due(limit=9, now=off)
        assert not due.records
        assert due.next_due_at == pytest.approx(off + 300, abs=60)
        # Each was planned by a clock that agrees with the one that is asked now.
        assert await wrong.reschedule(now=off) == await right.reschedule(now=now) == 0


# -- what is committed late ----------------------------------------------------------------------


async def test_a_tail_misses_no_delivery_that_is_committed_behind_a_later_one(
    database: Database,
) -> None:
    from sdk_trio.cli.events import Tailer
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    address = PostgresAddress(dsn=database.dsn)
    async with database.open() as inbox, database.open("watching") as watching:
        with closing(address.connect()) as other:
            with address.transaction(other):
                accept_by(other, delivery("before-begin"))
                await inbox.accept(delivery("first"), leased=False)
                tailer = Tailer(watching, "order.paid")
                await tailer.begin()
            with address.transaction(other):
                accept_by(other, delivery("lower"))
                await inbox.accept(delivery("higher"), leased=False)
                found = {record.key for record in await tailer.changes()}
            await inbox.accept(delivery("last"), leased=False)
            await inbox.finish("last", Done(), now=1001)
            for key in ("before-begin", "lower"):
                # Done by the next poll, so the list of open events does not contain it.
                await inbox.start(key, now=1001)
                await inbox.finish(key, Done(), now=1001)
            found |= {record.key for record in await tailer.changes()}
        assert found == {"before-begin", "lower", "higher", "last"}
        assert not await tailer.changes(), "each is shown once"
        await inbox.accept(delivery("next"), leased=False)
        assert [record.key for record in await tailer.changes()] == ["next"]


@pytest.mark.parametrize("by", ["pg_terminate_backend", "pg_cancel_backend"])
async def test_effects_whose_commit_is_unknown_are_reported_as_such(
    database: Database, by: str
) -> None:
    database.execute("CREATE TABLE IF NOT EXISTS public.effect (key text)")

    def save(transaction: Any) -> None:
        transaction.connection.execute("INSERT INTO public.effect VALUES ('m1')")

    async with database.open() as inbox:
        await inbox.accept(delivery(), leased=True)
        await inbox.start("m1", now=1001)
        said = "broke during the commit" if by == "pg_terminate_backend" else "no standby"
        with database.server.without_its_standby():
            async with trio.open_nursery() as nursery:

                async def fail() -> None:
                    with pytest.raises(StoreUnavailableError, match=said):
                        await inbox.conclude("m1", save, attempt=1, now=1002)

                nursery.start_soon(fail)
                waiting = database.server.commits_that_wait()
                cut = f"SELECT {by}(pid) {waiting} AND datname = '{database.name}'"
                await until(lambda: database.execute(cut))
        # It was committed, with the end of the event.
        assert database.execute("SELECT key FROM public.effect") == [("m1",)]
        await inbox.finish("m1", Retry(1002, "unknown"), now=1002)
        assert (await inbox.get("m1")).state is DeliveryState.DONE
    database.execute("DROP TABLE public.effect")


# -- a failover ------------------------------------------------------------------------------------


async def test_a_failover_that_may_have_lost_deliveries_is_reported(
    standby: PostgresServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    command_line: Any,
) -> None:
    primary = standby.primary
    assert primary is not None
    name = primary.empty().rpartition("=")[2]
    both = f"host={primary.directory},{standby.directory} user=owner dbname={name}"
    monkeypatch.setenv("SDK_POSTGRES_DSN", both)
    monkeypatch.setenv("SDK__STORAGE__BACKEND", "Postgres")
    doctor = Doctor(command_line, monkeypatch)
    async with Database(primary, both).open() as inbox:
        await inbox.accept(delivery("early"), leased=False)
        reached = "SELECT pg_current_wal_lsn() <= replay_lsn FROM pg_stat_replication"
        await until(lambda: primary.execute(reached) == [(True,)])
        found = await trio.to_thread.run_sync(doctor.alone)
        found.one("store", "note", "replication to 1 standbys is asynchronous")
        primary.kill()
        await trio.to_thread.run_sync(standby.promote)

        async def works() -> bool:
            with suppress(StoreUnavailableError):
                await inbox.accept(delivery("late"), leased=False)
                return True
            return False

        await until(works)
        said = [each.getMessage() for each in caplog.records if "store.failed_over" in each.msg]
        assert len(said) == 1
        assert "may be missing" in said[0]
    found = await trio.to_thread.run_sync(doctor.alone)
    found.one("store", "warning", "acknowledged deliveries of the last moments may be missing")
