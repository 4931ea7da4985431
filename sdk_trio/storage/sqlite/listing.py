"""Listings of deliveries in SQLite: what finds them beside their key, and how they are searched.

Whole blocks of arrivals are indexed, when the hashes of their keys are; the newest arrivals are
read one by one. So a listing by type, tenant, time or subject reads the blocks in which there may
be some, and an event costs no page of an index of its own on its way.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import apsw

from .schema import BLOCK_BITS, BUCKET_BITS, INDEXED

_NEWEST = f"FROM arrival WHERE sequence > {INDEXED}"

#: Statements that index the newest arrivals; the mark is moved afterwards.
INDEX = (
    f"""
INSERT INTO block (number, first_at, last_at)
SELECT sequence >> {BLOCK_BITS}, min(received_at), max(received_at) {_NEWEST} GROUP BY 1
ON CONFLICT (number) DO UPDATE SET
    first_at = min(first_at, excluded.first_at), last_at = max(last_at, excluded.last_at)
""",
    f"""
INSERT OR IGNORE INTO block_with (kind, value, block)
SELECT DISTINCT 'type', type, sequence >> {BLOCK_BITS} {_NEWEST}
UNION ALL
SELECT DISTINCT 'tenant', tenant_id, sequence >> {BLOCK_BITS} {_NEWEST} AND tenant_id IS NOT NULL
""",
    f"""
INSERT INTO subject_end (bucket, text, sequence)
SELECT sequence >> {BUCKET_BITS}, substr(subject, -8), sequence {_NEWEST} AND subject IS NOT NULL
ORDER BY 1, 2, 3
""",
)

_TENANT_ASSIGNED = f"""
INSERT OR IGNORE INTO block_with (kind, value, block)
SELECT DISTINCT 'tenant', tenant_id, sequence >> {BLOCK_BITS}
FROM arrival WHERE sequence > ? AND sequence <= ? AND sequence <= {INDEXED}
"""

#: SQL of the sequences of the tenant ``:id`` in its blocks, and among the newest arrivals.
INDEXED_OF_TENANT = f"""
SELECT arrival.sequence AS sequence FROM block_with CROSS JOIN arrival
WHERE kind = 'tenant' AND value = :id AND arrival.sequence >= block << {BLOCK_BITS}
    AND arrival.sequence < (block + 1) << {BLOCK_BITS} AND arrival.sequence <= {INDEXED}
    AND arrival.tenant_id = :id
"""
NEWEST_OF_TENANT = f"SELECT sequence {_NEWEST} AND tenant_id = :id"

_EMPTY_BLOCK = f"""
NOT EXISTS (SELECT 1 FROM arrival
    WHERE sequence >= ?1 << {BLOCK_BITS} AND sequence < (?1 + 1) << {BLOCK_BITS})
"""

_REMOVE_SUBJECT = """
DELETE FROM subject_end WHERE bucket = ? AND text = substr(?, -8) AND sequence = ?
"""

# Nothing says any more that a tenant had deliveries, once none of it are in a block.
_FORGET_TENANT = f"""
DELETE FROM block_with WHERE kind = 'tenant' AND value = ?1 AND NOT EXISTS (
    SELECT 1 FROM arrival WHERE tenant_id = ?1
        AND sequence >= block << {BLOCK_BITS} AND sequence < (block + 1) << {BLOCK_BITS})
"""


def note_tenants(connection: apsw.Connection, after: int, end: int) -> None:
    """Index the tenants of a range of arrivals that have got them later."""
    connection.execute(_TENANT_ASSIGNED, (after, end))


def forget_tenant(connection: apsw.Connection, tenant_id: str) -> None:
    """Remove a tenant from the index of the blocks that have no deliveries of it any more."""
    connection.execute(_FORGET_TENANT, (tenant_id,))


def remove_subject(connection: apsw.Connection, sequence: int, subject: str | None) -> None:
    """Remove what finds an indexed arrival by its subject."""
    if subject is not None:
        connection.execute(_REMOVE_SUBJECT, (sequence >> BUCKET_BITS, subject, sequence))


def remove_blocks(connection: apsw.Connection, sequences: Sequence[int]) -> None:
    """Remove the blocks of these removed arrivals from the indexes, where they are empty."""
    for block in {sequence >> BLOCK_BITS for sequence in sequences}:
        statement = f"DELETE FROM block WHERE number = ?1 AND {_EMPTY_BLOCK}"
        connection.execute(statement, (block,))
        if connection.changes():
            connection.execute("DELETE FROM block_with WHERE block = ?", (block,))


# Conditions on the sequence itself.
_BOUNDS = ("sequence > ?", "sequence < ?")


#: Rows that one step of a search looks at, in 6 ms. Conditions that are frequent and never meet are
#: a look at every row, and other readers would have to wait for the whole of it.
STEP_ROWS = 1 << 15


def search(
    connection: apsw.Connection,
    columns: str,
    conditions: Mapping[str, object],
    *,
    oldest_first: bool,
    limit: int,
) -> tuple[list[tuple[Any, ...]], int | None]:
    """Return up to ``limit`` rows of the view ``inbox`` that meet all conditions, in order.

    The second result is None at the end; otherwise it is a sequence behind which to go on, as
    :data:`STEP_ROWS` rows have been looked at.

    Args:
        connection: reads at one moment: the caller has begun a transaction.
        columns: SQL of the columns to return.
        conditions: SQL text with one placeholder, and its value, of the columns of ``inbox``.
        oldest_first: the order, by sequence.
        limit: most rows; above 0.
    """
    order = "ASC" if oldest_first else "DESC"
    where = " AND ".join((*conditions, "sequence >= ?", "sequence <= ?"))
    query = f"SELECT {columns} FROM inbox WHERE {where} ORDER BY sequence {order} LIMIT ?"
    # A cursor may be any number, and steps through what is not there would not end.
    newest = cast("int", connection.execute("SELECT ifnull(max(sequence), 0) FROM arrival").get)
    least = cast("int", conditions.get("sequence > ?", 0)) + 1
    most = min(newest, cast("int", conditions.get("sequence < ?", newest + 1)) - 1)
    rows: list[Any] = []
    left = STEP_ROWS
    for first, last in _ranges(connection, conditions, newest, oldest_first):
        low, high = max(first, least), min(last, most)
        while low <= high:
            if left <= 0:
                return rows, low - 1 if oldest_first else high + 1
            begin, end = low, high
            if high - low >= left:
                begin, end = (low, low + left - 1) if oldest_first else (high - left + 1, high)
            bindings = (*conditions.values(), begin, end, limit - len(rows))
            rows += connection.execute(query, bindings)
            if len(rows) >= limit:
                return rows, None
            left -= min(end - begin + 1, STEP_ROWS)
            low, high = (end + 1, high) if oldest_first else (low, begin - 1)
    return rows, None


def _ranges(
    connection: apsw.Connection, conditions: Mapping[str, object], last: int, oldest_first: bool
) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences in order, outside of which nothing meets the conditions."""
    indexed = cast("int", connection.execute(f"SELECT {INDEXED}").get)
    newest = (indexed + 1, last)
    if oldest_first:
        yield from _indexed_ranges(connection, conditions, indexed, "ASC")
        yield newest
    else:
        yield newest
        yield from _indexed_ranges(connection, conditions, indexed, "DESC")


def _indexed_ranges(
    connection: apsw.Connection, conditions: Mapping[str, object], indexed: int, order: str
) -> Iterator[tuple[int, int]]:
    clauses = {
        "type = ?": "number IN (SELECT block FROM block_with WHERE kind = 'type' AND value = ?)",
        "tenant_id = ?": "number IN (SELECT block FROM block_with "
        "WHERE kind = 'tenant' AND value = ?)",
        "received_at >= ?": "last_at >= ?",
        "received_at < ?": "first_at < ?",
    }
    given = {clauses[text]: value for text, value in conditions.items() if text in clauses}
    subject = conditions.get("subject = ?")
    if subject is not None:
        # Each is read by itself, and a subject may have many, so the other conditions are asked
        # first as far as they are known without the rows.
        bounds = {text: value for text, value in conditions.items() if text in _BOUNDS}
        within = "".join(f" AND {text}" for text in bounds)
        if given:
            meeting = f"SELECT number FROM block WHERE {' AND '.join(given)}"
            within += f" AND sequence >> {BLOCK_BITS} IN ({meeting})"
        query = (
            "SELECT sequence FROM subject_end WHERE bucket IN (SELECT number FROM bucket) "
            # The retention leaves what leads to deliveries that it has removed.
            "AND sequence >= (SELECT min(sequence) FROM arrival) "
            f"AND text = substr(?, -8){within} ORDER BY sequence {order}"
        )
        bindings = (subject, *bounds.values(), *given.values())
        for (sequence,) in cast("Any", connection.execute(query, bindings).fetchall()):
            yield sequence, sequence
        return
    if not given:
        yield 0, indexed
        return
    query = f"SELECT number FROM block WHERE {' AND '.join(given)} ORDER BY number {order}"
    blocks = [number for (number,) in cast("Any", connection.execute(query, (*given.values(),)))]
    for first, last in _together(blocks):
        yield first << BLOCK_BITS, min(((last + 1) << BLOCK_BITS) - 1, indexed)


def _together(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of blocks that follow each other, in their order."""
    begin = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or abs(blocks[place] - blocks[place - 1]) != 1:
            yield min(blocks[begin], blocks[place - 1]), max(blocks[begin], blocks[place - 1])
            begin = place
