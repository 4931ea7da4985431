"""Effects in the store's own database: applied with the event's end, or not at all."""

import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
from support.command_line import CommandLine
from support.keyed import ByKey
from support.postgres import open_inbox, pooled, running_server
from support.waiting import until

from sdk_trio import (
    MARKERS_SCHEMA,
    EffectError,
    EventTakenOverError,
    HandlerRegistry,
    NotSupportedError,
    OptionsValidationError,
    Services,
    StoreUnavailableError,
    Transaction,
    first_time,
)
from sdk_trio.events import Event, OrderCreatedEvent, OrderPaidEvent, RefundCreatedEvent
from sdk_trio.records.deliveries import DeliveryState, Done, NewDelivery
from sdk_trio.storage import commit
from sdk_trio.storage import sqlite_inbox as sqlite_effects
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.testing import AppUnderTest, running_app, settings_for_tests

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 100.0, "payload_seconds": 40.0}

#: One table for both engines. It accepts a second row of one event, because a constraint would hide
#: a repeated effect.
TABLE = "CREATE TABLE IF NOT EXISTS app_effect (event_key text)"


class Place:
    """A store of one engine, and the rows that handlers have written there."""

    def __init__(self, kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        self.directory = directory
        self.mark = "?" if kind == "sqlite" else "%s"
        if kind == "postgres":
            self.dsn = running_server().fresh()
            monkeypatch.setenv("SDK_POSTGRES_DSN", self.dsn)
            self.execute(f"{TABLE}; DELETE FROM app_effect")

    def settings(self, **more: Any) -> Any:
        backend = "Sqlite" if self.kind == "sqlite" else "Postgres"
        return settings_for_tests(
            {"Storage:Backend": backend, "Storage:Path": str(self.directory), **more}
        )

    async def open(self, owner: str) -> Any:
        if self.kind == "postgres":
            inbox = ByKey(await open_inbox(self.directory, owner=owner, **TERMS))
            self.dsn = running_server().database_of(self.directory)
            self.execute(f"{TABLE}; DELETE FROM app_effect")
            return inbox
        inbox = ByKey(
            await SqliteInbox.open(self.directory / "inbox.db", LeaseTerms(owner=owner, **TERMS))
        )
        self.execute(TABLE)
        return inbox

    def execute(self, statement: str) -> list[Any]:
        if self.kind == "sqlite":
            connection = apsw.Connection(str(self.directory / "inbox.db"))
            connection.set_busy_timeout(5000)
            try:
                return list(connection.execute(statement))
            finally:
                connection.close()
        import psycopg

        with psycopg.connect(self.dsn, autocommit=True) as server:
            cursor = server.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @property
    def applied(self) -> list[str]:
        self.execute(TABLE)
        return [key for (key,) in self.execute("SELECT event_key FROM app_effect ORDER BY 1")]

    def apply(self, transaction: Transaction, key: str) -> None:
        if self.kind == "sqlite":
            transaction.connection.execute(TABLE)
        transaction.connection.execute(f"INSERT INTO app_effect VALUES ({self.mark})", (key,))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(request.param, tmp_path, monkeypatch)


# -- services.finish ---------------------------------------------------------------------------


@pytest.mark.parametrize("enqueue", [True, False])
async def test_effects_and_the_end_are_committed_together(place: Place, enqueue: bool) -> None:
    handlers = HandlerRegistry()
    states: list[Any] = []

    @handlers.on(OrderPaidEvent, enqueue=enqueue)
    async def grant(event: OrderPaidEvent, services: Services) -> None:
        def save(transaction: Transaction) -> str:
            place.apply(transaction, event.key)
            return "saved"

        assert await services.finish(event, save) == "saved"
        record = await services.store.get(event.key)
        assert record is not None
        states.append(record.state)

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="done")
        assert delivered.record is not None
        assert delivered.record.attempts == 1
        again = await app.deliver(app.sign(OrderPaidEvent, webhook_id=delivered.webhook_id))
        assert again.status == 200
        assert place.applied == [delivered.webhook_id]
    assert states == [DeliveryState.DONE]


@pytest.mark.parametrize("enqueue", [True, False])
async def test_effects_that_fail_leave_nothing_and_the_event_is_tried_again(
    place: Place, enqueue: bool
) -> None:
    handlers = HandlerRegistry()
    fails = [True]

    @handlers.on(OrderPaidEvent, enqueue=enqueue)
    async def grant(event: OrderPaidEvent, services: Services) -> None:
        def save(transaction: Transaction) -> None:
            place.apply(transaction, event.key)
            if fails:
                raise LookupError("no such product")

        await services.finish(event, save)

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="retrying")
        assert delivered.error == "LookupError: no such product"
        assert isinstance(delivered.exception, LookupError)
        assert place.applied == []
        fails.clear()
        if enqueue:
            await app.retry(expect="done")
        else:
            again = app.sign(OrderPaidEvent, webhook_id=delivered.webhook_id)
            await app.deliver(again, expect="done")
        assert (await record_of(app, delivered.webhook_id)).attempts == 2
        assert place.applied == [delivered.webhook_id]


async def record_of(app: AppUnderTest, key: str) -> Any:
    record = await app.store.get(key)
    assert record is not None
    return record


async def test_nothing_that_follows_the_end_changes_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()
    refused: list[str] = []
    kept: list[Any] = []

    @handlers.on(OrderPaidEvent, enqueue=True)
    async def grant(event: OrderPaidEvent, services: Services) -> None:
        kept[:] = [event, services]
        await services.finish(event, lambda transaction: place.apply(transaction, event.key))
        with pytest.raises(EffectError) as caught:
            await services.finish(event, lambda transaction: place.apply(transaction, event.key))
        refused.append(str(caught.value))
        raise RuntimeError("after the end")

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="done")
        event, services = kept
        with pytest.raises(EffectError, match="is not being handled"):
            await services.finish(event, lambda transaction: None)
        assert place.applied == [delivered.webhook_id]
        (reported,) = (each for each in caplog.messages if "webhook.failed_after_done" in each)
        assert "RuntimeError: after the end" in reported
    assert "is already finished" in refused[0]


async def test_a_run_that_is_cancelled_after_its_end_is_done(place: Place) -> None:
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent)
    async def grant(event: OrderPaidEvent, services: Services) -> None:
        await services.finish(event, lambda transaction: place.apply(transaction, event.key))
        await trio.sleep_forever()

    settings = place.settings(**{"Webhooks:InlineTimeoutSeconds": 0.5})
    async with running_app(handlers, settings) as app:

        async def is_done() -> bool:
            # A run that was cancelled before its end, on a slow machine, has applied nothing.
            delivered = await app.deliver(app.sign(OrderPaidEvent, webhook_id="a"))
            return (delivered.status, delivered.state) == (200, "done")

        await until(is_done)
        assert place.applied == ["a"]


async def test_an_asynchronous_save_is_refused(place: Place) -> None:
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True)
    async def grant(event: OrderPaidEvent, services: Services) -> None:
        async def save(transaction: Transaction) -> None:
            place.apply(transaction, event.key)

        with pytest.raises(EffectError, match="plain function"):
            await services.finish(event, save)
        with pytest.raises(EffectError, match="plain function"):
            await services.finish(event, lambda transaction: save(transaction))

    async with running_app(handlers, place.settings()) as app:
        await app.deliver(OrderPaidEvent, expect="done")
        assert place.applied == []


# -- transaction=True --------------------------------------------------------------------------


async def test_a_transaction_handler_is_applied_once_and_a_failed_one_not_at_all(
    place: Place,
) -> None:
    handlers = HandlerRegistry()
    threads: set[int] = set()
    fails = [True]

    @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
    def grant(event: OrderPaidEvent, tx: Transaction) -> None:
        threads.add(threading.get_ident())
        place.apply(tx, event.key)
        if fails:
            raise LookupError("no such product")

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="retrying")
        assert delivered.error == "LookupError: no such product"
        assert (await app.store.attempts(delivered.webhook_id))[0].place is not None
        fails.clear()
        (record,) = await app.retry(expect="done")
        assert (record.key, record.attempts) == (delivered.webhook_id, 2)
        assert place.applied == [delivered.webhook_id]
        # A redelivery is not a second time; a deliberate replay of a done event is.
        await app.deliver(app.sign(OrderPaidEvent, webhook_id=delivered.webhook_id))
        assert place.applied == [delivered.webhook_id]
        await app.store.repeat([delivered.webhook_id])
        app.runtime.receiver.wake()
        await app.settle()
        assert place.applied == [delivered.webhook_id] * 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
async def test_a_handler_that_ends_the_transaction_itself_fails(
    place: Place, statement: str
) -> None:
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
    def grant(event: OrderPaidEvent, tx: Transaction) -> None:
        tx.connection.execute(statement)

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="retrying")
        assert delivered.error is not None
        assert "leave the commit to the library" in delivered.error
        # The store continues to work.
        await app.deliver(OrderPaidEvent, expect="retrying")


async def test_waiting_events_are_not_delayed_by_a_failing_database_of_a_handler(
    place: Place,
) -> None:
    """A statement that fails is the handler's failure, and no failure of the store."""
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
    def grant(event: OrderPaidEvent, tx: Transaction) -> None:
        tx.connection.execute("INSERT INTO no_such_table VALUES (1)")

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="retrying")
        assert not isinstance(delivered.exception, StoreUnavailableError)
        assert "no_such_table" in (delivered.error or "")


def test_a_store_without_transactions_refuses_the_start() -> None:
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
    def grant(event: OrderPaidEvent, tx: Transaction) -> None: ...

    async def start() -> None:
        async with running_app(handlers, settings_for_tests()):
            pass

    with pytest.raises(
        OptionsValidationError, match=r"Sdk:Storage:Backend.*grant.*Sqlite"
    ) as reported:
        trio.run(start)
    assert reported.value.exit_code == 78


async def test_the_kit_gives_such_handlers_a_store_with_transactions() -> None:
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
    def grant(event: OrderPaidEvent, tx: Transaction) -> None:
        assert tx.connection.execute("SELECT 1")

    async with running_app(handlers) as app:
        await app.deliver(OrderPaidEvent, expect="done")


# -- the stores --------------------------------------------------------------------------------


def delivery(webhook_id: str = "m1") -> NewDelivery:
    return NewDelivery(webhook_id, "order.paid", b'{"type":"order.paid"}', 7, 1000.0)


@pytest.fixture
async def two(place: Place) -> AsyncIterator[tuple[Any, Any]]:
    """Two open stores on one database; the first one runs the event m1."""
    first, second = await place.open("first"), await place.open("second")
    await first.accept(delivery(), leased=True)
    await first.start("m1", now=1000)
    yield first, second
    await first.close()
    await second.close()


async def test_a_run_that_was_taken_over_applies_nothing(
    place: Place, two: tuple[Any, Any]
) -> None:
    first, second = two
    (taken,) = (await second.claim_due(limit=1, now=1020)).records
    await second.start(taken.key, now=1020)

    def effects(transaction: Transaction) -> None:
        place.apply(transaction, "m1")

    with pytest.raises(EventTakenOverError):
        await first.conclude("m1", effects, attempt=1, now=1021)
    assert place.applied == []
    await second.conclude("m1", effects, attempt=2, now=1022)
    assert place.applied == ["m1"]
    # Neither a second end nor an earlier number changes anything.
    for inbox, attempt in ((first, 1), (second, 2)):
        with pytest.raises(EventTakenOverError):
            await inbox.conclude("m1", effects, attempt=attempt, now=1023)
    await first.finish("m1", Done(), now=1024)
    assert place.applied == ["m1"]
    record = await first.get("m1")
    assert (record.state, record.attempts, record.finished_at) == ("done", 2, 1022)


async def test_memory_has_no_transactions() -> None:
    inbox = ByKey(MemoryInbox(LeaseTerms(owner="one", **TERMS)))
    await inbox.claim(delivery())
    with pytest.raises(NotSupportedError, match="Sqlite or Postgres"):
        await inbox.conclude("m1", lambda transaction: None, attempt=1, now=1001)


async def test_cancelled_in_the_middle_it_is_finished_first(
    place: Place, two: tuple[Any, Any]
) -> None:
    first, _ = two
    reported = None
    with trio.CancelScope() as scope:

        def effects(transaction: Transaction) -> str:
            place.apply(transaction, "m1")
            trio.from_thread.run_sync(scope.cancel, trio_token=token)
            return "applied"

        token = trio.lowlevel.current_trio_token()
        reported = await first.conclude("m1", effects, attempt=1, now=1001)
    assert reported == "applied"
    assert place.applied == ["m1"]


async def test_statements_that_take_too_long_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("sqlite", tmp_path, monkeypatch)
    inbox = await place.open("one")
    await inbox.claim(delivery())

    def endless(transaction: Transaction) -> None:
        place.apply(transaction, "m1")
        transaction.connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
        ).fetchall()

    with monkeypatch.context() as hasty:
        hasty.setattr(sqlite_effects, "EFFECT_SECONDS", 0.1)
        with pytest.raises(EffectError, match=r"longer than 0\.1 s"):
            await inbox.conclude("m1", endless, attempt=1, now=1001)
    assert place.applied == []
    assert await inbox.conclude("m1", lambda transaction: 7, attempt=1, now=1002) == 7
    await inbox.close()


async def test_a_store_that_waits_for_effects_names_their_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(commit, "WATCH_SECONDS", 0.05)
    inbox = ByKey(await SqliteInbox.open(tmp_path / "inbox.db", LeaseTerms(owner="one", **TERMS)))
    await inbox.claim(delivery())
    goes_on = threading.Event()
    with pytest.raises(StoreUnavailableError, match="effects of the event m1 run in its thread"):
        await inbox.conclude("m1", lambda transaction: goes_on.wait(30), attempt=1, now=1001)
    with pytest.raises(StoreUnavailableError, match="effects of the event m1 run in its thread"):
        await inbox.accept(delivery("m2"), leased=False)
    goes_on.set()
    with trio.fail_after(30):
        while True:
            with suppress(StoreUnavailableError):
                await inbox.accept(delivery("m2"), leased=False)
                break
            await trio.sleep(0.01)
    await inbox.close()


async def test_a_statement_that_a_handler_leaves_open_keeps_no_log(tmp_path: Path) -> None:
    inbox = ByKey(await SqliteInbox.open(tmp_path / "inbox.db", LeaseTerms(owner="one", **TERMS)))
    await inbox.claim(delivery())
    kept: list[Any] = []

    def effects(transaction: Transaction) -> None:
        kept.append(transaction.connection.execute("SELECT * FROM sqlite_schema"))

    await inbox.conclude("m1", effects, attempt=1, now=1001)
    assert await inbox.wipe(), "nothing reads the write-ahead log"
    await inbox.close()


# -- PostgreSQL --------------------------------------------------------------------------------


async def test_a_long_transaction_delays_no_other_and_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("postgres", tmp_path, monkeypatch)
    first, second = await place.open("first"), await place.open("second")
    await first.accept(delivery(), leased=True)
    await first.start("m1", now=1000)
    inside, goes_on = threading.Event(), threading.Event()

    def effects(transaction: Transaction) -> None:
        place.apply(transaction, "m1")
        inside.set()
        assert goes_on.wait(30)

    async with trio.open_nursery() as nursery:

        async def conclude() -> None:
            await first.conclude("m1", effects, attempt=1, now=1001)

        nursery.start_soon(conclude)
        await trio.to_thread.run_sync(inside.wait, 30)
        # Past the end of its lease: the locked row is passed over, and not waited for.
        await first.renew(["m1"], now=1100)
        assert (await second.claim_due(limit=9, now=1100)).records == []
        assert await second.recover() == 0
        await first.accept(delivery("m2"), leased=True)
        goes_on.set()
    record = await second.get("m1")
    assert (record.state, record.process_ends) == ("done", 0)
    assert place.applied == ["m1"]
    await first.close()
    await second.close()


async def test_a_conflict_is_run_again_and_commit_and_texts_are_as_anywhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psycopg = pytest.importorskip("psycopg")
    place = Place("postgres", tmp_path, monkeypatch)
    inbox = await place.open("one")
    await inbox.accept(delivery(), leased=True)
    await inbox.start("m1", now=1000)
    tries: list[int] = []

    def effects(transaction: Transaction[Any]) -> None:
        connection = transaction.connection
        place.apply(transaction, "undone")
        connection.rollback()
        tries.append(1)
        if len(tries) < 3:
            code = ("40001", "40P01")[len(tries) - 1]
            connection.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$")
        with pytest.raises(EffectError, match="commit"):
            connection.commit()
        connection.execute("CREATE TEMP TABLE t (i int UNIQUE) ON COMMIT DROP")
        with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
            connection.execute("INSERT INTO t VALUES (1), (1)")
        place.apply(transaction, "a\x1ab")

    await inbox.conclude("m1", effects, attempt=1, now=1001)
    assert len(tries) == 3
    assert place.applied == ["a\x1ab"]
    await inbox.close()


async def test_connections_from_before_a_restart_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("postgres", tmp_path, monkeypatch)
    inbox = await place.open("one")
    for name in ("m1", "m2"):
        await inbox.accept(delivery(name), leased=True)
        await inbox.start(name, now=1000)
        effects = partial(place.apply, key=name)
        await inbox.conclude(name, effects, attempt=1, now=1001)
        running_server().end_sessions(place.dsn.rpartition("=")[2])
    assert place.applied == ["m1", "m2"]
    await inbox.close()


# -- tables of the application in the store's file -----------------------------------------------


def test_tables_of_handlers_outlive_checks_retention_and_purges(
    command_line: CommandLine,
) -> None:
    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"

    async def keep_house() -> None:
        inbox = ByKey(await SqliteInbox.open(file, LeaseTerms(owner="one", **TERMS)))
        handler = apsw.Connection(str(file))
        handler.execute(f"{TABLE}; INSERT INTO app_effect VALUES ('kept')")
        handler.close()
        await inbox.accept(delivery(), leased=True)
        await inbox.start("m1", now=1000)
        await inbox.finish("m1", Done(), now=1001)
        assert (await inbox.purge(now=1e9)).finished == 1
        assert await inbox.wipe()
        assert await inbox.other_tables() == ["app_effect"]
        await inbox.close()

    trio.run(keep_house)
    for words in (("status",), ("check",)):
        assert command_line("storage", *words).status == 0
    tenants = ("--set", "Sdk:MultiTenant:Enabled=true")
    for words in (("add", "acme", "--name", "Acme"), ("delete", "acme")):
        assert command_line("tenant", *words, *tenants).status == 0
    purged = command_line("tenant", "purge", "acme", "--now", "--yes", *tenants)
    assert purged.status == 0, purged.err
    assert "not checked: app_effect" in purged.err
    looked = apsw.Connection(str(file))
    assert list(looked.execute("SELECT * FROM app_effect")) == [("kept",)]
    looked.close()


# -- markers, through the runtime ----------------------------------------------------------------


async def test_a_retry_and_a_replay_apply_nothing_again_and_a_deliberate_one_does(
    tmp_path: Path,
) -> None:
    file = tmp_path / "app.db"
    with closing(sqlite3.connect(file)) as made:
        made.execute(MARKERS_SCHEMA)
        made.execute(TABLE)
    handlers = HandlerRegistry()
    fails = [True]
    generations: list[int] = []

    @handlers.on(OrderPaidEvent, enqueue=True)
    def grant(event: OrderPaidEvent) -> None:
        generations.append(event.generation)
        with closing(sqlite3.connect(file)) as connection, connection:
            if first_time(connection, event):
                connection.execute("INSERT INTO app_effect VALUES (?)", (event.key,))
        if fails:
            raise LookupError("after the commit")

    settings = settings_for_tests(
        {
            "Storage:Backend": "Sqlite",
            "Storage:Path": str(tmp_path),
            "Webhooks:Queue:MaxAttempts": 1,
        }
    )
    async with running_app(handlers, settings) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="dead")
        fails.clear()
        for put_back in (app.store.replay, app.store.repeat):
            assert list(await put_back([delivered.webhook_id])) == [delivered.webhook_id]
            app.runtime.receiver.wake()
            await app.settle()
            assert (await record_of(app, delivered.webhook_id)).state == "done"
    assert generations == [0, 0, 1]
    with closing(sqlite3.connect(file)) as looked:
        assert looked.execute("SELECT count(*) FROM app_effect").fetchone() == (2,)


async def test_a_plain_function_finishes_its_event_from_its_thread(place: Place) -> None:
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True)
    def grant(event: OrderPaidEvent, services: Services) -> None:
        def save(transaction: Transaction) -> None:
            place.apply(transaction, event.key)

        trio.from_thread.run(services.finish, event, save)

    async with running_app(handlers, place.settings()) as app:
        delivered = await app.deliver(OrderPaidEvent, expect="done")
        assert place.applied == [delivered.webhook_id]


# -- a pooler in between -----------------------------------------------------------------------


async def test_effects_are_applied_once_behind_a_pooler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("postgres", tmp_path, monkeypatch)
    place.execute(MARKERS_SCHEMA)
    handlers = HandlerRegistry()
    fails = set[str]()
    pools: list[bool] = []

    def apply(transaction: Transaction, event: Event[Any], kind: str) -> None:
        pools.append(transaction.connection.pooled)
        place.apply(transaction, f"{kind} {event.key}")
        if event.key not in fails:  # every event fails once, after its effects
            fails.add(event.key)
            raise LookupError(event.key)

    @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
    def in_transaction(event: OrderPaidEvent, transaction: Transaction) -> None:
        apply(transaction, event, "transaction")

    @handlers.on(OrderCreatedEvent, enqueue=True)
    async def finish(event: OrderCreatedEvent, services: Services) -> None:
        await services.finish(event, lambda transaction: apply(transaction, event, "finish"))

    @handlers.on(RefundCreatedEvent, enqueue=True)
    def mark(event: RefundCreatedEvent) -> None:
        import psycopg

        with psycopg.connect(pooler, prepare_threshold=None) as connection:
            if first_time(connection, event):
                connection.execute("INSERT INTO app_effect VALUES (%s)", (f"mark {event.key}",))
        if event.key not in fails:  # after the commit: the second run applies nothing
            fails.add(event.key)
            raise LookupError(event.key)

    # Fewer connections than handlers at once: they and the store take turns in the pooler.
    with pooled(running_server(), place.dsn, connections=2) as pooler:
        monkeypatch.setenv("SDK_POSTGRES_DSN", pooler)
        await until(partial(answers, pooler))
        settings = place.settings(**{"Webhooks:Queue:RetryBaseSeconds": 0.05})
        async with running_app(handlers, settings) as app:
            kinds = {"transaction": OrderPaidEvent, "finish": OrderCreatedEvent}
            wanted = []
            for kind, type_ in {**kinds, "mark": RefundCreatedEvent}.items():
                for number in range(4):
                    sent = app.sign(type_, webhook_id=f"{kind}-{number}")
                    assert (await app.deliver(sent, settle=False)).status == 200
                    wanted.append(f"{kind} {kind}-{number}")
            with trio.fail_after(60):
                while (await app.store.counts())[DeliveryState.DONE] < len(wanted):
                    await trio.sleep(0.02)
            assert place.applied == sorted(wanted)
    assert pools == [True] * 16


def answers(dsn: str) -> bool:
    import psycopg

    with suppress(psycopg.OperationalError), psycopg.connect(dsn):
        return True
    return False
