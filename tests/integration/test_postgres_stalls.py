"""The store on PostgreSQL under settings, stalls and clocks that are not its own."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import attrs
import pytest
import trio
from support.postgres import PostgresServer, pooled, running_server
from support.waiting import until

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import NewDelivery, Retry

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
        from sdk_trio.storage.postgres.connect import PostgresAddress
        from sdk_trio.storage.postgres.inbox import PostgresInbox

        address = PostgresAddress(dsn=dsn or self.dsn)
        inbox = await PostgresInbox.open(address, owner=owner, **{**TERMS, **terms})
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
    """Gives the role settings of its own for the length of a test."""
    given = []

    def give(setting: str, value: str) -> None:
        given.append(setting)
        database.execute(f"ALTER ROLE owner SET {setting} = {value}")

    yield give
    for setting in given:
        database.execute(f"ALTER ROLE owner RESET {setting}")


def delivery(webhook_id: str = "m1", *, at: float = 1000.0, **fields: Any) -> NewDelivery:
    return NewDelivery(webhook_id, "order.paid", b'{"type":"order.paid"}', 7, at, **fields)


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
        return await inbox._commits.submit(lambda c: c.execute(f"SHOW {name}").fetchone())

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


_ = closing
