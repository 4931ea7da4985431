"""Queries of the inbox in SQLite: plain functions of a connection."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import apsw

from ...records.deliveries import AttemptRecord, DeliveryRecord, DeliveryState, EvidenceRecord
from .arrivals import sequence_of, signed_by_tenants
from .listing import INDEXED_OF_TENANT, NEWEST_OF_TENANT, search
from .schema import BLOCK_BITS, INDEXED, NOT_DONE, OWN_TABLES, UNFINISHED

#: The columns of a record, in the order of :class:`DeliveryRecord`, up to the body; the
#: body; and those after it.
COLUMNS = (
    "sequence, webhook_id, type, state, queued, attempts, received_at, timestamp, subject, "
    "ordered, next_attempt_at, started_at, finished_at, last_error"
)
RAW = "(SELECT raw FROM body WHERE body.sequence = inbox.sequence)"
LATER_COLUMNS = "tenant_id, process_ends, ran_alone, earlier_attempts, signer, generation"

_GET = f"SELECT {COLUMNS}, {RAW}, {LATER_COLUMNS} FROM inbox WHERE sequence = ?"

_ATTEMPTS = """
SELECT number, started_at, finished_at, error, place, traceback
FROM attempt WHERE sequence = ? ORDER BY id
"""

_EVIDENCE = """
SELECT received_at, address, raw, tenant_id FROM evidence WHERE sequence = ? ORDER BY id
"""

_CHECKPOINT = "SELECT value FROM checkpoint WHERE name = ?"

# One statement, so that all numbers are of one moment. No finished row is read: sequences have no
# gaps but the removed ones, and dead and parked deliveries are counted as they become so.
_COUNTS = f"""
SELECT state, count(*) FROM open INDEXED BY open_due WHERE {UNFINISHED} GROUP BY state
UNION ALL SELECT state, count(*) FROM fresh GROUP BY state
UNION ALL SELECT name, number FROM tally WHERE name IN ('dead', 'parked')
UNION ALL SELECT 'total', max(coalesce((SELECT max(sequence) FROM arrival), 0), last.number)
    - removed.number
FROM tally AS last, tally AS removed WHERE last.name = 'last' AND removed.name = 'removed'
"""

# The smallest sequence comes from the index alone; only its row is read.
_OLDEST_WAITING = f"""
SELECT min(received_at) FROM (
    SELECT received_at FROM arrival WHERE sequence = (
        SELECT min(sequence) FROM open INDEXED BY open_due
        WHERE {UNFINISHED} AND state IN ('received', 'running') AND queued = 1)
    UNION ALL SELECT received_at FROM fresh WHERE queued = 1)
"""

# A scan by key and not by time: an index on ``finished_at`` would hold every finished delivery, and
# each delivery would pay for it.
_OLD = """
SELECT sequence FROM inbox WHERE sequence > ? AND state = 'done' AND finished_at < ?
ORDER BY sequence LIMIT ?
"""

_OLD_WITH_BODY = """
SELECT sequence FROM inbox WHERE sequence > ? AND state = 'done' AND finished_at < ?
    AND EXISTS (SELECT 1 FROM body WHERE body.sequence = inbox.sequence)
ORDER BY sequence LIMIT ?
"""

_OLD_PARKED = """
SELECT sequence FROM open INDEXED BY open_aside
WHERE sequence > ? AND state IN ('dead', 'parked') AND state = 'parked'
    AND (SELECT received_at FROM arrival WHERE arrival.sequence = open.sequence) < ?
ORDER BY sequence LIMIT ?
"""


_TABLES = """
SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name
"""


def record_of(row: tuple[Any, ...]) -> DeliveryRecord:
    """Build a record from a row of :data:`COLUMNS`, the body and :data:`LATER_COLUMNS`."""
    sequence, webhook_id, type_, state, queued, *middle = row
    attempts, received_at, timestamp, subject, ordered, *rest = middle
    return DeliveryRecord(
        sequence,
        webhook_id,
        type_,
        DeliveryState(state),
        bool(queued),
        attempts,
        received_at,
        timestamp,
        subject,
        bool(ordered),
        *rest,
    )


def get(connection: apsw.Connection, key: str) -> DeliveryRecord | None:
    """Return one delivery with its body, or None."""
    return _get(connection, sequence_of(connection, key))


def _get(connection: apsw.Connection, sequence: int | None) -> DeliveryRecord | None:
    row = connection.execute(_GET, (sequence,)).fetchone()
    return None if row is None else record_of(row)


def find_by_id(
    connection: apsw.Connection, webhook_id: str, limit: int
) -> Sequence[DeliveryRecord]:
    """Return the deliveries of one id, whoever signed them, the host's first."""
    own = sequence_of(connection, webhook_id)
    others = signed_by_tenants(connection, webhook_id, limit)
    records = (_get(connection, sequence) for sequence in (own, *others))
    return [record for record in records if record is not None][:limit]


def known(connection: apsw.Connection, keys: Sequence[str]) -> frozenset[str]:
    """Return those of ``keys`` that have a row."""
    return frozenset(key for key in keys if sequence_of(connection, key) is not None)


def read_checkpoint(connection: apsw.Connection, name: str) -> str | None:
    """Return the value under ``name``, or None."""
    row = connection.execute(_CHECKPOINT, (name,)).fetchone()
    return None if row is None else str(row[0])


def attempts(connection: apsw.Connection, key: str) -> Sequence[AttemptRecord]:
    """Return the failed runs of one delivery, oldest first."""
    return [
        AttemptRecord(*row)
        for row in connection.execute(_ATTEMPTS, (sequence_of(connection, key),))
    ]


def evidence(connection: apsw.Connection, key: str) -> Sequence[EvidenceRecord]:
    """Return the other bodies that came under a key, oldest first."""
    rows: Any = connection.execute(_EVIDENCE, (sequence_of(connection, key),))
    return [EvidenceRecord(*row) for row in rows]


# Each repeats the condition of the index that it needs. Only what is received or runs may be fresh.
_OF_OPEN = "sequence IN (SELECT sequence FROM open WHERE state IN ({}) AND state = ?)"
_OF_ANY = f"sequence IN (SELECT sequence FROM ({NOT_DONE}) WHERE state = ?)"

_IN_STATE = {
    DeliveryState.RECEIVED: _OF_ANY,
    DeliveryState.RUNNING: _OF_ANY,
    DeliveryState.RETRYING: _OF_OPEN.format("'received', 'running', 'retrying'"),
    DeliveryState.DEAD: _OF_OPEN.format("'dead', 'parked'"),
    DeliveryState.PARKED: _OF_OPEN.format("'dead', 'parked'"),
}


def find(
    connection: apsw.Connection,
    *,
    type: str | None,
    state: DeliveryState | None,
    since: float | None,
    until: float | None,
    after_sequence: int | None,
    before_sequence: int | None,
    subject: str | None,
    tenant_id: str | None,
    oldest_first: bool | None,
    limit: int,
) -> tuple[list[DeliveryRecord], int | None]:
    """List deliveries without bodies; see :meth:`Inbox.find`.

    The second result is None, or the sequence behind which a further call goes on: many rows have
    been looked at, and there may be more that meet the conditions.
    """
    choices = {
        "type = ?": type,
        "state = ?": state,
        "received_at >= ?": since,
        "received_at < ?": until,
        "sequence > ?": after_sequence,
        "sequence < ?": before_sequence,
        "subject = ?": subject,
        "tenant_id = ?": tenant_id,
    }
    given: dict[str, object] = {text: value for text, value in choices.items() if value is not None}
    if oldest_first is None:
        oldest_first = after_sequence is not None
    if state is None or state is DeliveryState.DONE:
        columns = f"{COLUMNS}, NULL, {LATER_COLUMNS}"
        # One moment for all statements of the search.
        with connection:
            found, behind = search(
                connection, columns, given, oldest_first=oldest_first, limit=limit
            )
        return [record_of(row) for row in found], behind
    # Deliveries that are not done are fresh or in a table of their own; no other is read.
    given[_IN_STATE[state]] = state
    order = "ASC" if oldest_first else "DESC"
    statement = (
        f"SELECT {COLUMNS}, NULL, {LATER_COLUMNS} FROM inbox WHERE {' AND '.join(given)} "
        f"ORDER BY sequence {order} LIMIT ?"
    )
    rows = connection.execute(statement, (*given.values(), limit))
    return [record_of(row) for row in rows], None


def counts(connection: apsw.Connection) -> dict[DeliveryState, int]:
    """Return how many deliveries are in each state."""
    result = dict.fromkeys(DeliveryState, 0)
    total = 0
    for name, number in cast("Any", connection.execute(_COUNTS)):
        if name == "total":
            total = number
        else:
            result[DeliveryState(name)] += number
    result[DeliveryState.DONE] = total - sum(result.values())
    return result


def oldest_waiting(connection: apsw.Connection) -> float | None:
    """Return the arrival time of the oldest queued delivery that waits or runs, or None."""
    row = connection.execute(_OLDEST_WAITING).fetchone()
    return None if row is None or row[0] is None else float(cast("float", row[0]))


_EXPIRED_LEASES = f"""
SELECT (SELECT count(*) FROM open INDEXED BY open_due WHERE {UNFINISHED} AND queued = 1
        AND lease_owner > '' AND lease_until <= :before)
    + (SELECT count(*) FROM fresh WHERE queued AND lease_until <= :before)
"""


def expired_leases(connection: apsw.Connection, before: float) -> int:
    """Return how many queued deliveries have a lease that expired before that time."""
    return int(connection.execute(_EXPIRED_LEASES, {"before": before}).get)


def find_old(
    connection: apsw.Connection,
    state: DeliveryState,
    before: float,
    *,
    with_body: bool,
    after: int,
    limit: int,
) -> Sequence[int]:
    """Return sequences above ``after`` of old deliveries: done before, or parked and arrived."""
    if state is DeliveryState.PARKED:
        statement = _OLD_PARKED
    else:
        statement = _OLD_WITH_BODY if with_body else _OLD
    return [sequence for (sequence,) in connection.execute(statement, (after, before, limit))]


_OF_TENANT = f"{INDEXED_OF_TENANT} UNION ALL {NEWEST_OF_TENANT}"

_HOLDINGS = f"""
SELECT
    (SELECT count(*) FROM ({_OF_TENANT})),
    (SELECT count(*) FROM ({_OF_TENANT}) JOIN body USING (sequence)),
    (SELECT count(*) FROM ({_OF_TENANT}) JOIN attempt USING (sequence)),
    (SELECT count(*) FROM evidence JOIN arrival USING (sequence)
        WHERE arrival.tenant_id = :id OR evidence.tenant_id = :id),
    (SELECT count(*) FROM notification JOIN outbox USING (sequence) WHERE tenant_id = :id),
    (SELECT count(*) FROM outbox WHERE tenant_id = :id),
    (SELECT count(*) FROM audit WHERE tenant_id = :id)
"""


def holdings(connection: apsw.Connection, tenant_id: str) -> Mapping[str, int]:
    """Count the records of a tenant beside its own row."""
    names = ("deliveries", "bodies", "attempts", "evidence", "messages", "outbox", "audit")
    counts = cast("Any", connection.execute(_HOLDINGS, {"id": tenant_id}).fetchone())
    return dict(zip(names, counts, strict=True))


# The index of blocks may name a tenant whose deliveries have been removed since.
_UNOWNED = f"""
SELECT id FROM (
    SELECT DISTINCT value AS id FROM block_with WHERE kind = 'tenant'
    UNION SELECT tenant_id FROM arrival WHERE sequence > {INDEXED} AND tenant_id IS NOT NULL
) AS named
WHERE id NOT IN (SELECT id FROM tenant) AND EXISTS ({_OF_TENANT.replace(":id", "named.id")})
UNION SELECT tenant_id FROM evidence
WHERE tenant_id IS NOT NULL AND tenant_id NOT IN (SELECT id FROM tenant)
"""


def other_tables(connection: apsw.Connection) -> Sequence[str]:
    """Return the names of the tables that no version of the store has made."""
    names: Any = connection.execute(_TABLES).fetchall()
    return [name for (name,) in names if name not in OWN_TABLES]


def unowned(connection: apsw.Connection) -> Sequence[str]:
    """Return the ids of tenants that deliveries or evidence name and that no tenant has."""
    return [tenant_id for (tenant_id,) in connection.execute(_UNOWNED)]


# In the order of the nested loops, so nothing is sorted: a tenant may have a million.
_NEXT_OF_TENANT = (
    f"{INDEXED_OF_TENANT} AND block >= :after >> {BLOCK_BITS} AND arrival.sequence > :after "
    "ORDER BY block, arrival.sequence LIMIT :limit",
    f"{NEWEST_OF_TENANT} AND sequence > :after ORDER BY sequence LIMIT :limit",
)


def of_tenant(
    connection: apsw.Connection, tenant_id: str, *, after: int, limit: int
) -> Sequence[int]:
    """Return the next sequences above ``after`` of a tenant's deliveries."""
    bindings = {"id": tenant_id, "after": after, "limit": limit}
    # One moment for both statements.
    with connection:
        found = [row for query in _NEXT_OF_TENANT for row in connection.execute(query, bindings)]
    return [cast("int", sequence) for (sequence,) in found[:limit]]
