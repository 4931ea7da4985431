"""What type checkers say of effects; checked by ``mypy tests/typing``, never run."""

from typing import Any, assert_type

import apsw
import psycopg

import sdk_trio
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
def of_any_store(event: OrderPaidEvent, tx: sdk_trio.Transaction) -> None:
    """Without an argument the connection is not checked."""
    assert_type(tx.connection, Any)


@handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
def of_postgres(event: OrderPaidEvent, tx: sdk_trio.Transaction[psycopg.Connection]) -> None:
    """The connection of a store in PostgreSQL."""
    tx.connection.execute("SELECT %s", (event.data.id,))


@handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
def of_sqlite(event: OrderPaidEvent, tx: sdk_trio.Transaction[apsw.Connection]) -> None:
    """The connection of a store in SQLite."""
    assert_type(tx.connection, apsw.Connection)


@handlers.on(OrderPaidEvent, enqueue=True, transaction=True)  # type: ignore[arg-type]
async def awaits(event: OrderPaidEvent, tx: sdk_trio.Transaction) -> None:
    """Nothing is awaited in a transaction."""


@handlers.on(OrderPaidEvent, enqueue=True, transaction=True)  # type: ignore[arg-type]
def of_another_event(event: OrderCreatedEvent, tx: sdk_trio.Transaction) -> None:
    """The event is that of the registration."""


@handlers.on(OrderPaidEvent, transaction=True)  # type: ignore[call-overload, untyped-decorator, unused-ignore]
def inline(event: OrderPaidEvent, tx: sdk_trio.Transaction) -> None:
    """The transaction ends a run of the queue."""


@handlers.on(OrderPaidEvent, enqueue=True)
async def finishes(event: OrderPaidEvent, services: sdk_trio.Services) -> None:
    """It returns what the function returns."""
    assert_type(await services.finish(event, lambda tx: 7), int)

    def save(tx: sdk_trio.Transaction[psycopg.Connection]) -> str:
        return tx.connection.info.dbname

    assert_type(await services.finish(event, save), str)


def marks(connection: psycopg.Connection, event: OrderPaidEvent) -> None:
    """Check the type of a marker's result."""
    assert_type(sdk_trio.first_time(connection, event), bool)
