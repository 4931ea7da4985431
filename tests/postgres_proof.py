"""Long proofs of the store on PostgreSQL, each of which the suite has a small version of.

    python tests/postgres_proof.py plans [--finished 1000000]
    python tests/postgres_proof.py cancel [--seconds 60]
    python tests/postgres_proof.py bloat [--seconds 20]
    python tests/postgres_proof.py rates [--events 4000] [--rounds 4]
    python tests/postgres_proof.py history [--finished 20000000] [--days 20] [--directory PATH]
    python tests/postgres_proof.py wal [--finished 400000] [--events 4000]

Each starts servers of its own (Debian's package ``postgresql``), prints what it measured, stops by
itself, and ends with 1 if something is not as it should be.
"""

import argparse
import random
import re
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from support.keyed import ByKey
from support.postgres import PostgresServer, remove_server, running_server
from support.postgres_work import add_days, add_finished, blocks, forget_blocks, work

from sdk_trio.records.deliveries import DeliveryState, Done, NewDelivery, Retry
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines.postgres_address import PostgresAddress
from sdk_trio.storage.engines.postgres_migration import migrate_postgres
from sdk_trio.storage.ports import Inbox
from sdk_trio.storage.postgres_inbox import PostgresInbox
from sdk_trio.storage.sqlite_inbox import SqliteInbox

TERMS = {"lease_seconds": 75.0, "dedup_seconds": 1e9, "payload_seconds": 1e9}

#: The blocks of 8 KiB that a statement may read in addition with a hundred times the history: the
#: indexes have grown by a level or two, and a listing reads twenty rows.
MORE_BLOCKS = 200.0

#: The server shows statements prepared before it began to count as they were sent, and all others
#: with numbers instead of their constants.
_CONSTANT = re.compile(r"\$\d+|'[^']*'|\b\d+(?:\.\d+)?\b")

DONE = DeliveryState.DONE

#: The listings whose cost with a long history is measured.
LISTINGS: dict[str, dict[str, Any]] = {
    "newest": {},
    "of a rare type": {"type": "rare"},
    "of a type that none has": {"type": "none"},
    "of a subject": {"subject": "subject-7"},
    "that wait for a retry": {"state": DeliveryState.RETRYING},
}

#: Finished deliveries that are added by one statement.
CHUNK = 100_000


@asynccontextmanager
async def opened(dsn: str, owner: str) -> AsyncIterator[ByKey]:
    inbox = ByKey(
        await PostgresInbox.open(
            PostgresAddress(dsn=dsn), LeaseTerms(owner=owner, shared_by_hosts=True, **TERMS)
        )
    )
    try:
        yield inbox
    finally:
        with trio.move_on_after(30, shield=True):
            await inbox.close()


def incoming(key: str) -> NewDelivery:
    return NewDelivery(key, "order.paid", b"x" * 600, 7, time.time(), f"subject-{key}")


def plans(finished: int) -> bool:
    """Compare the blocks that each statement reads with few and with many finished deliveries."""
    server = running_server()
    dsn = server.fresh()
    database = dsn.rpartition("=")[2]

    async def measure(name: str, last: int) -> dict[str, float]:
        async with opened(dsn, name) as inbox:
            await work(inbox, f"{name}-before", 3, last)
            forget_blocks(server)
            await work(inbox, name, 10, last)
        return {_CONSTANT.sub("?", query): each for query, each in blocks(server, database).items()}

    few = max(1000, finished // 100)
    add_finished(server, database, 1, few, words=18)
    before = trio.run(measure, "few", few)
    for first in range(few + 1, finished + 1, CHUNK):
        add_finished(server, database, first, min(finished, first + CHUNK - 1), words=18)
    after = trio.run(measure, "many", finished)
    print(f"{len(after)} statements; blocks a call with {few} and with {finished} finished")
    for query in sorted(after, key=after.__getitem__, reverse=True)[:12]:
        print(f"{before.get(query, 0):8.1f} {after[query]:8.1f}  {query[:110]}")
    worst = max(after[query] - before.get(query, 0) for query in after)
    print(f"the most that one has grown by: {worst:.0f} blocks")
    return worst <= MORE_BLOCKS


def cancel(seconds: float) -> bool:
    """Cancel calls at random moments; then look for connections and transactions that are left."""
    server = running_server()
    dsn = server.fresh()
    database = dsn.rpartition("=")[2]
    dice = random.Random(7)
    sessions = (
        "SELECT count(*), count(*) FILTER (WHERE state <> 'idle') FROM pg_stat_activity "
        f"WHERE datname = '{database}' AND application_name LIKE 'sdk_trio %'"
    )
    calls = cancelled = 0

    async def one(inbox: Any, number: int) -> None:
        nonlocal calls, cancelled
        key = f"m{number % 97}"
        calls += 1
        with trio.move_on_after(dice.expovariate(100)) as scope:
            match number % 7:
                case 0:
                    await inbox.accept(incoming(key), leased=True)
                case 1:
                    await inbox.claim(incoming(key))
                case 2:
                    await inbox.start(key, now=time.time())
                case 3:
                    await inbox.finish(key, Retry(time.time(), "no"), now=time.time())
                case 4:
                    await inbox.claim_due(limit=5, now=time.time())
                case 5:
                    await inbox.find(limit=50)
                case 6:
                    await inbox.finish(key, Done(), now=time.time())
        cancelled += scope.cancelled_caught

    async def main() -> tuple[int, int]:
        async with opened(dsn, "one") as inbox:
            end, number = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                async with trio.open_nursery() as nursery:
                    for _ in range(40):
                        number += 1
                        nursery.start_soon(one, inbox, number)
            with trio.move_on_after(30):
                while server.execute(sessions)[0][1]:
                    await trio.sleep(0.05)
            left: tuple[int, int] = server.execute(sessions)[0]
            await inbox.accept(incoming("last"), leased=True)
            return left

    left, busy = trio.run(main)
    print(f"{calls} calls, {cancelled} cancelled in {seconds:g} s")
    print(f"connections at the end: {left}, of these in a transaction or a query: {busy}")
    return left <= 5 and not busy


def bloat(seconds: float) -> bool:
    """Work with an old snapshot held open and without; compare rates, dead rows and sizes."""
    import psycopg

    server = running_server()
    dsn = server.fresh()
    database = dsn.rpartition("=")[2]
    figures = (
        "SELECT sum(n_dead_tup), sum(pg_total_relation_size(relid)) / 1000000 "
        "FROM pg_stat_user_tables WHERE relname IN ('work', 'node')"
    )

    async def run(name: str) -> tuple[float, int]:
        done = 0
        async with opened(dsn, name) as inbox:
            end = time.monotonic() + seconds

            async def worker(each: int) -> None:
                nonlocal done
                number = 0
                while time.monotonic() < end:
                    key = f"{name}-{each}-{number}"
                    number += 1
                    await inbox.accept(incoming(key), leased=False)
                    for record in (await inbox.claim_due(limit=1, now=time.time())).records:
                        await inbox.start(record.key, now=time.time())
                        await inbox.finish(record.key, Done(), now=time.time())
                        done += 1

            async with trio.open_nursery() as nursery:
                for each in range(20):
                    nursery.start_soon(worker, each)
            forget_blocks(server)
            await inbox.claim_due(limit=1, now=time.time())
        looked = sum(each for query, each in blocks(server, database).items() if "work AS" in query)
        return done / seconds, int(looked)

    rows = []
    for name in ("without", "with"):
        reader = psycopg.connect(dsn)
        if name == "with":
            reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT count(*) FROM sdk_trio.work")
        rate, looked = trio.run(run, name)
        dead, size = server.execute(figures, database)[0]
        rows.append(looked)
        print(
            f"{name:8} an old snapshot: {rate:6.0f} events/s, {dead} dead rows, {size:.1f} MB, "
            f"{looked} blocks to look for due ones"
        )
        reader.close()
    server.execute("VACUUM", database)
    dead, size = server.execute(figures, database)[0]
    print(f"after its end and a vacuum: {dead} dead rows, {size:.1f} MB")
    return dead < 1000


def wal(finished: int, events: int) -> bool:
    """Measure the log (WAL) of a delivery on an empty store and on a full one.

    After a checkpoint the first change of each page is logged with an image of the page.
    """
    for compression in ("off", "on"):
        server = PostgresServer(running_server().programs)
        server.start(
            full_page_writes="on",
            shared_buffers="256MB",
            max_wal_size="8GB",
            checkpoint_timeout="1h",
            autovacuum="off",
            wal_compression=compression,
        )
        dsn = server.fresh()
        database = dsn.rpartition("=")[2]
        print(f"wal_compression {compression}; bytes a delivery, and images of pages")
        trio.run(_log_of, server, dsn, "empty", events)
        for first in range(1, finished + 1, CHUNK):
            add_finished(server, database, first, min(finished, first + CHUNK - 1), words=18)
        trio.run(_log_of, server, dsn, f"{finished} rows", events)
        server.remove()
    return True


async def _log_of(server: PostgresServer, dsn: str, name: str, events: int) -> None:
    async def go(inbox: Inbox, each: NewDelivery) -> None:
        # Senders choose random ids.
        await _go_through(inbox, incoming(f"msg_{uuid.uuid4().hex}"))

    figures = "SELECT pg_current_wal_insert_lsn() - '0/0', wal_fpi FROM pg_stat_wal"
    async with opened(dsn, name) as inbox:
        for tasks in (50, 1):
            count = events if tasks > 1 else events // 4
            await _each(inbox, 200, tasks, go)
            server.execute("CHECKPOINT")
            for part in range(3):
                await trio.sleep(1.5)  # the server's figures come late
                ((begin, images),) = server.execute(figures)
                await _each(inbox, count, tasks, go)
                await trio.sleep(1.5)
                ((end, later),) = server.execute(figures)
                which = f"{part * count + 1:6} to {(part + 1) * count:6} after a checkpoint"
                print(
                    f"{name:12} {tasks:2} tasks, deliveries {which}: {(end - begin) / count:6.0f} "
                    f"bytes, {(later - images) / count:.2f} images",
                    flush=True,
                )


@attrs.frozen
class Cost:
    """The cost of each event of one way, in seconds of wall clock and CPU, and in statements."""

    seconds: float
    process: float
    server: float
    statements: float


async def _accept(inbox: Inbox, incoming: NewDelivery) -> None:
    await inbox.accept(incoming, leased=True)


async def _go_through(inbox: Inbox, incoming: NewDelivery) -> None:
    await inbox.accept(incoming, leased=True)
    inbox.start_unawaited(incoming.key, now=time.time())
    await inbox.finish(incoming.key, Done(), now=time.time())


async def _arrive_and_end(inbox: Inbox, incoming: NewDelivery) -> None:
    await trio.sleep(random.uniform(0, 0.02))
    await inbox.accept(incoming, leased=True)
    inbox.start_unawaited(incoming.key, now=time.time())
    await trio.sleep(random.uniform(0, 0.02))
    await inbox.finish(incoming.key, Done(), now=time.time())


async def _wait_for_others(inbox: Inbox, incoming: NewDelivery) -> None:
    await inbox.accept(incoming, leased=False)


async def _each(inbox: Inbox, events: int, tasks: int, way: Any) -> None:
    deliveries = iter([incoming(f"{time.time_ns()}-{number}") for number in range(events)])

    async def go() -> None:
        for each in deliveries:
            await way(inbox, each)

    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(go)


async def _take(inbox: Inbox, tasks: int) -> None:
    """Run all that waits, as the queue's feeder and its workers do."""
    send, receive = trio.open_memory_channel[tuple[str, bool]](1000)

    async def work() -> None:
        async for key, fresh in receive:
            if fresh:
                inbox.start_unawaited(key, now=time.time())
            else:
                await inbox.start(key, now=time.time())
            await inbox.finish(key, Done(), now=time.time())

    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(work)
        more = True
        while more:
            due = await inbox.claim_due(limit=100, now=time.time())
            for record in due.records:
                await send.send((record.key, record.key in due.first_runs))
            more = due.more
        send.close()


WAYS = {
    "accept": _accept,
    "accept, end": _go_through,
    "accept, end, each after up to 20 ms": _arrive_and_end,
    "take, start, end": _wait_for_others,
}


def cpu_of(server: PostgresServer) -> dict[int, int]:
    """The processor time of each process of the server, in nanoseconds."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        with suppress(OSError):
            found[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return found


def history(finished: int, days: int, directory: str | None) -> bool:
    """Measure what a long history costs: with none, a twentieth of ``finished``, and all."""
    tempfile.tempdir = directory
    server = PostgresServer(running_server().programs)
    server.start(
        fsync="on",
        full_page_writes="on",
        shared_buffers="1GB",
        max_wal_size="4GB",
        wal_level="minimal",
        max_wal_senders="0",
    )
    retention = (days - 1.5) * 86_400.0
    terms = {"lease_seconds": 75.0, "dedup_seconds": retention, "payload_seconds": retention}
    kept_all = True

    async def cost(name: str, count: int, work: Callable[[], Awaitable[Any]]) -> Any:
        used, process, begun = cpu_of(server), time.process_time(), time.perf_counter()
        found = await work()
        seconds, process = time.perf_counter() - begun, time.process_time() - process
        spent = sum(at - used.get(pid, 0) for pid, at in cpu_of(server).items()) / 1e9
        each = 1e6 / max(count, 1)
        figures = [f"{each * used:.1f} us" for used in (process, spent, seconds)]
        print(f"| {' | '.join([name, *figures])} |", flush=True)
        return found

    async def measure(dsn: str, rows: int) -> None:
        nonlocal kept_all
        inbox = ByKey(
            await PostgresInbox.open(
                PostgresAddress(dsn=dsn), LeaseTerms(owner="history", shared_by_hosts=True, **terms)
            )
        )
        print(f"\n| {rows} rows | CPU, process | CPU, server | latency |\n|---|---|---|---|")
        try:
            for way, tasks in (("accept", 1), ("accept", 50), ("accept, end", 50)):
                count = 2000 if tasks > 1 else 300
                await _each(inbox, count // 4, tasks, WAYS[way])  # warm
                for _ in range(3):
                    name = f"{way}, {tasks} tasks"
                    await cost(name, count, partial(_each, inbox, count, tasks, WAYS[way]))
            for _ in range(2):
                await _each(inbox, 2000, 50, _wait_for_others)
                await cost("take, start, end, 50 tasks", 2000, partial(_take, inbox, 50))
            for name, given in LISTINGS.items():

                async def listed(given: dict[str, Any] = given) -> None:
                    for _ in range(50):
                        await inbox.find(limit=50, **given)

                await listed()
                await cost(f"listing, {name}", 50, listed)
            done = await inbox.counts()
            due = partial(inbox.purge, now=time.time())
            purged = await cost("retention, a day is due (each row)", rows // days, due)
            await cost("retention, nothing is due", 1, due)
            after = await inbox.counts()
            kept_all = kept_all and purged.finished == rows // days
            kept_all = kept_all and done[DONE] - after[DONE] == rows // days
            print(f"purged: {purged}", flush=True)
        finally:
            await inbox.close()

    try:
        for rows in (0, finished // 20, finished):
            dsn = server.empty()
            database = dsn.rpartition("=")[2]
            migrate_postgres(PostgresAddress(dsn=dsn))
            begun = time.monotonic()
            if rows:
                add_days(server, database, days, rows // days, time.time())
            server.execute("ANALYZE", database)
            ((size,),) = server.execute(f"SELECT pg_database_size('{database}') / 1000000")
            print(f"\n{rows} rows, {size} MB, filled in {time.monotonic() - begun:.0f} s")
            trio.run(measure, dsn, rows)
            server.execute(f"DROP DATABASE {database}")
    finally:
        server.remove()
    return kept_all


def rates(events: int, rounds: int) -> bool:
    """Measure what an event costs the process and the server, on each way, beside SQLite."""
    server = PostgresServer(running_server().programs)
    server.start(fsync="on", full_page_writes="on", shared_buffers="256MB")

    async def measure(inbox: Inbox, way: str, tasks: int) -> Cost:
        taken = WAYS[way] is _wait_for_others
        count = events if tasks > 1 else max(events // 20, 1)
        if taken:
            await _each(inbox, count, 50, WAYS[way])
        server.execute("CHECKPOINT")
        forget_blocks(server)
        used, process, begun = cpu_of(server), time.process_time(), time.perf_counter()
        await (_take(inbox, tasks) if taken else _each(inbox, count, tasks, WAYS[way]))
        seconds, process = time.perf_counter() - begun, time.process_time() - process
        spent = sum(at - used.get(pid, 0) for pid, at in cpu_of(server).items())
        ((calls,),) = server.execute(
            "SELECT sum(calls) FROM pg_stat_statements JOIN pg_database ON oid = dbid "
            "WHERE datname <> 'postgres'"
        )
        return Cost(seconds / count, process / count, spent / 1e9 / count, (calls or 0) / count)

    async def run(directory: Path) -> None:
        print("| way | store | events a second | CPU, process | CPU, server | statements |")
        print("|---|---|---|---|---|---|")
        async with opened(server.fresh(), "rates") as postgres:
            sqlite = ByKey(
                await SqliteInbox.open(directory / "inbox.db", LeaseTerms(owner="rates", **TERMS))
            )
            for way, tasks in [*((way, 50) for way in WAYS), ("accept", 1), ("accept, end", 1)]:
                found: dict[str, list[Cost]] = {"PostgreSQL": [], "SQLite": []}
                for _ in range(rounds):
                    for name, inbox in (("PostgreSQL", postgres), ("SQLite", sqlite)):
                        found[name].append(await measure(inbox, way, tasks))
                for name, costs in found.items():
                    best = [
                        min(getattr(cost, each.name) for cost in costs)
                        for each in attrs.fields(Cost)
                    ]
                    print(
                        f"| {way}, {tasks} tasks | {name} | {1 / best[0]:.0f} | "
                        f"{1e6 * best[1]:.0f} us | {1e6 * best[2]:.0f} us | {best[3]:.3f} |",
                        flush=True,
                    )
            await sqlite.close()

    try:
        with tempfile.TemporaryDirectory() as directory:
            trio.run(run, Path(directory))
    finally:
        server.remove()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="proof", required=True)
    commands.add_parser("plans").add_argument("--finished", type=int, default=1_000_000)
    commands.add_parser("cancel").add_argument("--seconds", type=float, default=60.0)
    commands.add_parser("bloat").add_argument("--seconds", type=float, default=20.0)
    costs = commands.add_parser("rates")
    costs.add_argument("--events", type=int, default=4000)
    costs.add_argument("--rounds", type=int, default=4)
    long = commands.add_parser("history")
    long.add_argument("--finished", type=int, default=20_000_000)
    long.add_argument("--days", type=int, default=20)
    long.add_argument("--directory", help="for the server's data, 1 KB for each row")
    log = commands.add_parser("wal")
    log.add_argument("--finished", type=int, default=400_000)
    log.add_argument("--events", type=int, default=4000)
    arguments = vars(parser.parse_args())
    proof = {
        "plans": plans,
        "cancel": cancel,
        "bloat": bloat,
        "history": history,
        "rates": rates,
        "wal": wal,
    }
    begun = time.monotonic()
    try:
        good = proof[arguments.pop("proof")](**arguments)
    finally:
        remove_server()
    print(f"{'fine' if good else 'NOT AS IT SHOULD BE'}, {time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
