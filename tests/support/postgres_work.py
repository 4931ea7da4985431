"""The daily work of a store on PostgreSQL, and the blocks that each of its statements reads."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sdk_trio.records.deliveries import (
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Parked,
    Released,
    Retry,
)
from sdk_trio.storage.sql.schema import DAY_BITS, attach_day

from .postgres import PostgresServer

#: When the first finished delivery has arrived; one comes each second.
BEGIN = 1_000_000.0

# Type and tenant of one in a thousand are rare, and so is the subject of each.
_FINISHED = """
WITH numbers AS (
    SELECT n, 'd' || md5(n::text) AS id, {begin} + n AS at
    FROM generate_series({first}, {last}) AS n
), fresh AS (
    INSERT INTO sdk_trio.arrival_key (delivery_key) SELECT id FROM numbers ORDER BY n
    RETURNING delivery_key, sequence
), arrived AS (
    INSERT INTO sdk_trio.arrival
        (sequence, delivery_key, signer, type, received_at, signed_at, subject, ordered,
        tenant_id, raw)
    SELECT sequence, id, '', CASE WHEN n % 1000 = 7 THEN 'rare' ELSE 'order.paid' END, at,
        at::bigint,
        'subject-' || n, false, CASE WHEN n % 1000 = 9 THEN 'tenant' END,
        convert_to(repeat(md5(n::text), {words}), 'UTF8')
    FROM numbers JOIN fresh ON delivery_key = id ORDER BY n RETURNING sequence, received_at
)
INSERT INTO sdk_trio.ended (sequence, queued, attempts, started_at, finished_at)
SELECT sequence, true, 1, received_at, received_at FROM arrived
"""


def add_finished(
    server: PostgresServer, database: str, first: int, last: int, words: int = 4
) -> None:
    """Add finished deliveries ``first`` to ``last``, with bodies of 32 bytes times ``words``."""
    server.execute(
        _FINISHED.format(first=first, last=last, begin=BEGIN, words=words).strip(), database
    )
    server.execute("VACUUM ANALYZE", database)


# Rows first, then the indexes, and nothing of it in the log: all in one transaction, with wal_level
# minimal.
_DAY = """
CREATE TABLE arrival_{number} (LIKE arrival INCLUDING DEFAULTS);
INSERT INTO arrival_{number}
SELECT {first} + n, 'd' || md5(({first} + n)::text), '',
    CASE WHEN n % 1000 = 7 THEN 'rare' ELSE 'order.paid' END, {at} + n / 1000000.0, 0,
    'subject-' || md5(n::text), false, NULL, convert_to(repeat(md5(n::text), {words}), 'UTF8')
FROM generate_series(1, {rows}) AS n;
CREATE TABLE ended_{number} (LIKE ended INCLUDING DEFAULTS);
INSERT INTO ended_{number} (sequence, queued, attempts, started_at, finished_at)
SELECT sequence, true, 1, received_at, received_at FROM arrival_{number};
INSERT INTO arrival_key SELECT delivery_key, sequence FROM arrival_{number};
{attach_arrival}; {attach_ended};
INSERT INTO day VALUES ({number}, {number} + 1, {at})
"""

_AFTER_DAYS = """
ALTER TABLE arrival_key ADD PRIMARY KEY (delivery_key);
UPDATE node SET done = {days} * {rows} WHERE id = '';
SELECT setval('arrival_key_sequence_seq', {last})
"""


def add_days(
    server: PostgresServer, database: str, days: int, rows: int, now: float, words: int = 4
) -> None:
    """Add ``days`` days with done deliveries, and a day that begins ``now``.

    The first day of the store stays empty.
    """

    def add(number: int) -> None:
        statement = _DAY.format(
            number=number,
            first=number << DAY_BITS,
            at=now - (days + 1 - number) * 86_400.0,
            rows=rows if number <= days else 0,
            words=words,
            attach_arrival=attach_day("arrival", number, number + 1),
            attach_ended=attach_day("ended", number, number + 1),
        )
        server.execute(f"BEGIN; {path}; {statement}; COMMIT", database)

    path = "SET search_path TO sdk_trio; SET maintenance_work_mem TO '256MB'"
    server.execute(f"{path}; ALTER TABLE arrival_key DROP CONSTRAINT arrival_key_pkey", database)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add, range(1, days + 2)))
    last = (days + 1) << DAY_BITS
    server.execute(f"{path}; {_AFTER_DAYS.format(days=days, rows=rows, last=last)}", database)
    server.execute(
        f"UPDATE sdk_trio.day SET opened_at = {now - (days + 1) * 86_400} WHERE number = 0",
        database,
    )


async def work(inbox: Any, name: str, rounds: int, last: int) -> None:
    """Run the operations of receivers, workers, retention and people, several times.

    ``last`` is the number of finished deliveries that :func:`add_finished` has added.
    """
    now = BEGIN + last + 1000.0
    for number in range(rounds):
        keys = [f"{name}-{number}-{each}" for each in range(8)]
        for each, key in enumerate(keys):
            incoming = NewDelivery(key, "order.paid", b"{}", 7, now, f"s{each % 3}", each % 2 == 0)
            await inbox.accept(incoming, leased=False)
        inline = NewDelivery(f"{name}-{number}-inline", "order.paid", b"{}", 7, now)
        await inbox.claim(inline)
        await inbox.finish(inline.key, Done(), now=now)
        await inbox.accept(inline, leased=False)
        parked = NewDelivery(f"{name}-{number}-parked", "order.paid", b"{}", 7, now)
        await inbox.park(parked, "no taker")
        ends = (Done(), Retry(now + 5, "no"), Released(), Dead("never"), Parked("no handler"))
        for each, record in enumerate((await inbox.claim_due(limit=5, now=now)).records):
            await inbox.start(record.key, now=now)
            await inbox.finish(record.key, ends[each], now=now)
        for record in (await inbox.claim_due(limit=50, now=now + 9)).records:
            await inbox.start(record.key, now=now)
            await inbox.finish(record.key, Done(), now=now)
        await inbox.replay(keys)
        await inbox.claim_suspects(limit=5, now=now)
        await inbox.release(keys)
        await inbox.renew(keys[:1], now=now)
        await inbox.recover()
        await inbox.reschedule(now=now)
        await inbox.counts()
        await inbox.oldest_waiting()
        await inbox.changed_elsewhere()
        await inbox.purge(now=now)
        await look(inbox, keys, last)


async def look(inbox: Any, keys: list[str], last: int) -> None:
    """List and show deliveries as the console and the command line do."""
    await inbox.get(keys[0])
    await inbox.find_by_id(keys[1])
    await inbox.known(keys)
    await inbox.attempts(keys[2])
    await inbox.evidence(keys[2])
    await inbox.find(limit=20)
    for state in DeliveryState:
        await inbox.find(state=state, limit=20)
    await inbox.find(type="rare", limit=20)
    await inbox.find(type="none", limit=20)
    await inbox.find(tenant_id="tenant", limit=20)
    await inbox.find(tenant_id="none", limit=20)
    await inbox.find(subject="subject-77", limit=20)
    await inbox.find(subject="none", limit=20)
    for at in (BEGIN + last - 10, BEGIN + 10):
        await inbox.find(since=at, limit=20)
        await inbox.find(until=at, limit=20)
        await inbox.find(since=at, until=at + 5, limit=20)
        await inbox.find(since=at, until=at + 5, type="rare", limit=20)
    await inbox.find(after_sequence=last - 5, limit=20)
    await inbox.find(before_sequence=last - 5, limit=20)
    await inbox.find(type="rare", before_sequence=last - 5, limit=20)


def forget_blocks(server: PostgresServer) -> None:
    server.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    server.execute("SELECT pg_stat_statements_reset()")


def blocks(server: PostgresServer, database: str) -> dict[str, float]:
    """Return the blocks that each call of each statement has read, by its text."""
    rows = server.execute(
        "SELECT query, sum(shared_blks_hit + shared_blks_read)::float / sum(calls) "
        f"FROM pg_stat_statements JOIN pg_database ON oid = dbid WHERE datname = '{database}' "
        "AND query ~ '(arrival|work|ended|attempt|evidence|delivery|node)' GROUP BY query"
    )
    return {" ".join(query.split()): float(each) for query, each in rows}
