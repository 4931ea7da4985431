"""A process that runs events of a shared store under policies, until it is killed or stopped.

    python -m support.policy_host STORE OWNER LEDGER [DEAD]

``STORE`` is the connection string of a PostgreSQL database or the path of a SQLite file. ``DEAD``
is an owner that is known to be dead: its leases are taken away at once. Each run writes a line at
its begin and at its end. The process stops at the end of its standard input.
"""

import os
import sys
import time
from functools import partial
from typing import Any

import trio

from sdk_trio import HandlerRegistry
from sdk_trio.events import (
    Event,
    OrderCreatedEvent,
    OrderPaidEvent,
    OrderRefundedEvent,
    OrderUpdatedEvent,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines.postgres_address import PostgresAddress
from sdk_trio.storage.postgres_inbox import PostgresInbox
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.webhooks import queue

#: Leases are short, so that the slots of a killed process are free soon.
LEASE_SECONDS = 20.0

CONCURRENCY = 2

#: The types of events by their policies.
LIMITED, RATED, COALESCED, PAUSED = (
    "order.created",
    "order.paid",
    "order.updated",
    "order.refunded",
)


def handlers_of(note: Any, *, rate: float) -> HandlerRegistry:
    """Return handlers of each policy, which note their runs."""
    handlers = HandlerRegistry()

    async def run(event: Event[Any], seconds: float) -> None:
        note("start", event)
        try:
            await trio.sleep(seconds)
        except BaseException:
            note("stop", event)
            raise
        note("finish", event)

    def register(event_class: Any, seconds: float, **policy: Any) -> None:
        async def handle(event: Event[Any]) -> None:
            await run(event, seconds)

        handlers.register(event_class, handle, enqueue=True, max_attempts=1000, **policy)

    register(OrderCreatedEvent, 0.002, concurrency=CONCURRENCY)
    register(OrderPaidEvent, 0.0, rate_per_minute=rate)
    register(OrderUpdatedEvent, 0.01, coalesce=True)
    register(OrderRefundedEvent, 0.005, ordered=True)
    return handlers


async def open_store(store: str, owner: str) -> Any:
    """Open the store as one of several processes."""
    terms = {"lease_seconds": LEASE_SECONDS, "dedup_seconds": 1e6, "payload_seconds": 1e6}
    if "dbname=" in store:
        return await PostgresInbox.open(
            PostgresAddress(dsn=store), LeaseTerms(owner=owner, shared_by_hosts=True, **terms)
        )
    return await SqliteInbox.open(
        store, LeaseTerms(owner=owner, **terms), write_lock=f"{store}.turn"
    )


async def serve(store: str, owner: str, ledger: int, rate: float, dead: str | None) -> None:
    """Run events until standard input ends."""
    from support.deliveries import Bench

    def note(what: str, event: Event[Any]) -> None:
        line = f"{time.monotonic_ns()} {what} {event.webhook_id} {os.getpid()}\n"
        os.write(ledger, line.encode())

    queue.RENEW_SECONDS = 1.0  # type: ignore[misc]
    inbox = await open_store(store, owner)
    backend = "Postgres" if "dbname=" in store else "Sqlite"
    bench = Bench.of(
        handlers_of(note, rate=rate),
        inbox,
        clock=time.time,
        Storage__Backend=backend,
        Server__Processes=2,
    )
    if dead:
        await inbox.take_over(dead, successor=owner, now=time.time())
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.runner.pauses.run)
        await nursery.start(bench.queue.run)
        await trio.to_thread.run_sync(sys.stdin.read)
        bench.queue.close()
        await bench.queue.ended.wait()
        nursery.cancel_scope.cancel()
    await inbox.close()


def main(store: str, owner: str, file: str, rate: str, dead: str = "") -> None:
    """Serve."""
    ledger = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trio.run(partial(serve, store, owner, ledger, float(rate), dead or None))


if __name__ == "__main__":
    main(*sys.argv[1:])
