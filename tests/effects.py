"""Kill receivers while their handlers write, again and again, and count the effects of each event.

    python tests/effects.py [--engine sqlite|postgres] [--way WAY]... [--kills 200] [--seed 1]
        [--receivers N]

Receivers work on one store whose leases last a second; every 0.05 to 0.3 s one of them is killed
(SIGKILL) and another one takes its place. Handlers take about 10 ms, and one of fifty takes longer
than the lease. On PostgreSQL there are two of them, so runs that were taken over come back to an
event of another owner. On SQLite there is one, as its directory has one lock; of two (``--receivers
2``) each start takes everything away from the other, which is a harder trial of the fence than
anything real. The table of the effects has no unique column: an effect that comes twice is counted
twice.

The ways: ``two-commits`` (the effect first, then "done", as a handler does that knows no better),
``transaction`` (``transaction=True``), ``finish`` (``services.finish``) and ``marker``
(``first_time``). Without ``--way`` all of them, one after the other. It stops by itself; the exit
status is 1 if one of the last three has doubled or lost an effect.
"""

import argparse
import logging
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import attrs
import trio
from support.deliveries import SECRET
from support.keyed import ByKey

from sdk_trio import MARKERS_SCHEMA, HandlerRegistry, Settings, Transaction, first_time
from sdk_trio.events import OrderPaidEvent
from sdk_trio.records.deliveries import UNFINISHED, DeliveryState, NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.testing import sample_body
from sdk_trio.webhooks import WebhookReceiver

WAYS = ("two-commits", "transaction", "finish", "marker")

LEASE_SECONDS = 1.0

#: Events that are added for each kill.
EVENTS_FOR_KILL = 20

TABLE = "CREATE TABLE IF NOT EXISTS app_effect (event_key text NOT NULL)"


@attrs.frozen
class Place:
    """A store of one engine in ``directory``, or in the database of ``dsn``."""

    engine: str
    directory: Path
    dsn: str = ""

    @property
    def mark(self) -> str:
        return "?" if self.engine == "sqlite" else "%s"

    async def open(self, owner: str) -> Any:
        terms = {"lease_seconds": LEASE_SECONDS, "dedup_seconds": 1e6, "payload_seconds": 1e6}
        if self.engine == "sqlite":
            return ByKey(
                await SqliteInbox.open(
                    self.directory / "inbox.db", LeaseTerms(owner=owner, **terms)
                )
            )
        from sdk_trio.storage.engines.postgres_address import PostgresAddress
        from sdk_trio.storage.postgres_inbox import PostgresInbox

        return ByKey(
            await PostgresInbox.open(
                PostgresAddress(dsn=self.dsn),
                LeaseTerms(owner=owner, shared_by_hosts=True, **terms),
            )
        )

    @contextmanager
    def own_transaction(self) -> Iterator[Any]:
        """A transaction of the application's own, in a database that the store knows nothing of."""
        if self.engine == "sqlite":
            file = self.directory / "application.db"
            with closing(sqlite3.connect(file, timeout=60)) as connection, connection:
                yield connection
        else:
            import psycopg

            with psycopg.connect(self.dsn) as connection:
                yield connection

    def prepare(self, way: str) -> None:
        with self.own_transaction() as connection:
            connection.execute(TABLE)
            connection.execute(MARKERS_SCHEMA)
        if self.engine == "sqlite" and way in ("transaction", "finish"):
            with closing(apsw.Connection(str(self.directory / "inbox.db"))) as store:
                store.set_busy_timeout(60_000)
                store.execute(TABLE)

    def applied(self, way: str) -> list[str]:
        query = "SELECT event_key FROM app_effect"
        if self.engine == "sqlite" and way in ("transaction", "finish"):
            with closing(apsw.Connection(str(self.directory / "inbox.db"))) as store:
                return [key for (key,) in store.execute(query)]
        with self.own_transaction() as connection:
            return [key for (key,) in connection.execute(query)]

    def write(self, connection: Any, key: str) -> None:
        connection.execute(f"INSERT INTO app_effect VALUES ({self.mark})", (key,))


def handlers_of(way: str, place: Place) -> HandlerRegistry:
    """Return a handler that writes one effect in the given way."""
    handlers = HandlerRegistry()

    def pause() -> float:
        return random.uniform(1.0, 2.0) * LEASE_SECONDS if random.random() < 0.02 else 0.01

    def write_alone(event: OrderPaidEvent) -> None:
        with place.own_transaction() as connection:
            if way == "two-commits" or first_time(connection, event):
                place.write(connection, event.key)

    if way == "transaction":

        @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
        def grant(event: OrderPaidEvent, tx: Transaction) -> None:
            # On SQLite all deliveries wait for the handler, so it does not pause there.
            if place.engine == "postgres":
                time.sleep(pause())
            place.write(tx.connection, event.key)

    else:

        @handlers.on(OrderPaidEvent, enqueue=True)
        async def grant_later(event: OrderPaidEvent, services: Any) -> None:
            await trio.sleep(pause())
            if way == "finish":
                save = partial(_save, place, event.key)
                await services.finish(event, save)
            else:
                await trio.to_thread.run_sync(write_alone, event)

    return handlers


def _save(place: Place, key: str, transaction: Transaction) -> None:
    place.write(transaction.connection, key)


async def work(place: Place, way: str) -> None:
    """Run a receiver until the process is killed."""
    settings = Settings.from_mapping(
        {
            "Storage:Backend": "Memory" if place.engine == "sqlite" else "Postgres",
            "Webhooks:Secret": SECRET,
            "Webhooks:Queue:Workers": 4,
            # Few events wait in a receiver's memory, where their short leases run out.
            "Webhooks:Queue:Capacity": 8,
            # Every kill counts as an attempt of the events that ran.
            "Webhooks:Queue:MaxAttempts": 1000,
            "Webhooks:Queue:RetryBaseSeconds": 1,
            "Webhooks:Queue:RetryCapSeconds": 1,
        },
        standalone=True,
    )
    inbox = await place.open(f"{os.getpid()}-{time.monotonic_ns()}")
    await WebhookReceiver(settings, handlers_of(way, place), inbox=inbox).run()


async def add(place: Place, orders: int) -> None:
    """Add events whenever the parent asks, until it closes the pipe."""
    inbox = await place.open("adds")
    number = 0
    body = sample_body(OrderPaidEvent.wire_type, now=datetime.now(UTC))
    while await trio.to_thread.run_sync(os.read, orders, 1):
        for _ in range(EVENTS_FOR_KILL):
            number += 1
            event = NewDelivery(f"msg_{number}", "order.paid", body, int(time.time()), time.time())
            await inbox.accept(event, leased=False)
    await inbox.close()


async def wait_for_end(place: Place, seconds: float) -> tuple[int, int]:
    """Wait until nothing is unfinished; return how many events are done, and how many are not."""
    inbox = await place.open("waits")
    with trio.move_on_after(seconds):
        while True:
            counts = await inbox.counts()
            if not any(counts[state] for state in UNFINISHED):
                break
            await trio.sleep(0.2)
    counts = await inbox.counts()
    await inbox.close()
    done = counts[DeliveryState.DONE]
    return done, sum(counts.values()) - done


def in_child(task: Callable[..., Any], *arguments: Any, without: int | None = None) -> int:
    """Run an asynchronous function in a process without this descriptor, and return its id."""
    # Forked: a new interpreter would take longer to start than it is left alive. Nothing runs in
    # this process that a fork could break.
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if without is not None:
            os.close(without)
        trio.run(task, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@attrs.frozen
class Report:
    """What became of the effects of one way."""

    engine: str
    way: str
    kills: int
    events: int
    left: int
    doubled: int
    lost: int

    @property
    def broken(self) -> bool:
        """Whether an effect is missing, or came twice although the way forbids that."""
        return bool(self.left or self.lost or (self.doubled and self.way != "two-commits"))

    def __str__(self) -> str:
        return (
            f"{self.engine:9} {self.way:12} kills {self.kills:4}  events {self.events:5}  "
            f"unfinished {self.left}  doubled {self.doubled:4}  lost {self.lost}"
        )


def experiment(place: Place, way: str, kills: int, seed: int, receivers: int) -> Report:
    """Kill receivers ``kills`` times, let the last ones finish, and count."""
    chance = random.Random(seed)
    asks, orders = os.pipe()
    # The schema is there before two processes would make it.
    os.waitpid(in_child(wait_for_end, place, 1), 0)
    place.prepare(way)
    adding = in_child(add, place, asks, without=orders)
    os.close(asks)
    start = partial(in_child, work, place, way, without=orders)
    workers = [start() for _ in range(receivers)]
    try:
        for _ in range(kills):
            os.write(orders, b".")
            time.sleep(chance.uniform(0.05, 0.3))
            victim = chance.randrange(receivers)
            end(workers[victim])
            workers[victim] = start()
        os.close(orders)
        os.waitpid(adding, 0)
        done, left = trio.run(wait_for_end, place, 120.0)
    finally:
        for worker in workers:
            end(worker)
    counts = Counter(place.applied(way))
    doubled = sum(count - 1 for count in counts.values())
    return Report(place.engine, way, kills, done + left, left, doubled, done - len(counts))


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=("sqlite", "postgres"))
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--receivers", type=int)
    chosen = parser.parse_args()
    logging.disable(logging.ERROR)
    broken = False
    engines = (chosen.engine,) if chosen.engine else ("sqlite", "postgres")
    for engine in engines:
        if engine == "postgres":
            from support.postgres import remove_server, running_server
        try:
            for way in chosen.way or WAYS:
                with tempfile.TemporaryDirectory() as directory:
                    dsn = running_server().empty() if engine == "postgres" else ""
                    place = Place(engine, Path(directory), dsn)
                    receivers = chosen.receivers or (1 if engine == "sqlite" else 2)
                    report = experiment(place, way, chosen.kills, chosen.seed, receivers)
                print(report, flush=True)
                broken = broken or report.broken
        finally:
            if engine == "postgres":
                remove_server()
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
