"""Queries of the inbox in PostgreSQL: plain functions of a connection."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...records.deliveries import AttemptRecord, DeliveryRecord, DeliveryState, EvidenceRecord
from .connect import StoreConnection

#: SQL of the columns of a record, in the order of DeliveryRecord.
RECORD = (
    "sequence, webhook_id, type, state, queued, attempts, received_at, signed_at, subject, ordered,"
    " next_attempt_at, started_at, finished_at, last_error, {raw}, tenant_id, process_ends,"
    " ran_alone, earlier_attempts, signer, generation"
)
_WHOLE = f"SELECT {RECORD.format(raw='raw')} FROM delivery"

_GET = f"{_WHOLE} WHERE delivery_key = %s"

_BY_SEQUENCE = f"{_WHOLE} WHERE sequence = ANY(%s::bigint[]) ORDER BY sequence"

# The keys of one id are the id itself and those that begin with the id and a dot. "/" is the
# character after the dot, so a range of the index has them all.
_OF_ID = f"""
{_WHOLE} WHERE delivery_key = %(id)s
    OR (delivery_key > %(id)s || '.' AND delivery_key < %(id)s || '/')
ORDER BY delivery_key LIMIT %(limit)s
"""

_ATTEMPTS = """
SELECT number, started_at, finished_at, error, place, traceback FROM attempt
WHERE sequence = (SELECT sequence FROM arrival WHERE delivery_key = %s) ORDER BY id
"""

_EVIDENCE = """
SELECT received_at, address, raw, tenant_id FROM evidence
WHERE sequence = (SELECT sequence FROM arrival WHERE delivery_key = %s) ORDER BY id
"""

_COUNTS = """
SELECT state, count(*) FROM work GROUP BY state UNION ALL SELECT 'done', sum(done) FROM node
"""

# Two looks, each of which an index answers.
_OLDEST_WAITING = """
SELECT received_at FROM arrival WHERE sequence = (SELECT least(
    (SELECT min(sequence) FROM work WHERE queued AND state = 'received' AND lease_owner IS NULL),
    (SELECT min(sequence) FROM work
        WHERE queued AND state IN ('received', 'running') AND lease_owner IS NOT NULL)))
"""

_HOLDINGS = """
SELECT
    (SELECT count(*) FROM arrival WHERE tenant_id = %(id)s),
    (SELECT count(*) FROM arrival WHERE tenant_id = %(id)s AND raw IS NOT NULL),
    (SELECT count(*) FROM attempt JOIN arrival USING (sequence) WHERE tenant_id = %(id)s),
    (SELECT count(*) FROM evidence JOIN arrival USING (sequence)
        WHERE arrival.tenant_id = %(id)s OR evidence.tenant_id = %(id)s),
    (SELECT count(*) FROM notification JOIN outbox USING (sequence) WHERE tenant_id = %(id)s),
    (SELECT count(*) FROM outbox WHERE tenant_id = %(id)s),
    (SELECT count(*) FROM audit WHERE tenant_id = %(id)s)
"""

# The ids that deliveries name, each found by one step in the index, however many deliveries name
# it.
_UNOWNED = """
WITH RECURSIVE named AS (
    (SELECT tenant_id FROM arrival WHERE tenant_id IS NOT NULL ORDER BY tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT arrival.tenant_id FROM arrival WHERE arrival.tenant_id > named.tenant_id
        ORDER BY arrival.tenant_id LIMIT 1)
    FROM named WHERE named.tenant_id IS NOT NULL)
SELECT tenant_id FROM named WHERE tenant_id IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM tenant WHERE tenant.id = named.tenant_id)
UNION SELECT tenant_id FROM evidence WHERE tenant_id IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM tenant WHERE tenant.id = evidence.tenant_id)
"""

_OF_TENANT = """
SELECT sequence FROM arrival WHERE tenant_id = %s AND sequence > %s ORDER BY sequence LIMIT %s
"""


def record_of_row(row: tuple[Any, ...]) -> DeliveryRecord:
    """Build a record from a row of the columns above."""
    told: list[Any] = [*row[:3], DeliveryState(row[3]), *row[4:]]
    return DeliveryRecord(*told)


def get(connection: StoreConnection, key: str) -> DeliveryRecord | None:
    """Return one delivery with its body, or None."""
    row = connection.execute(_GET, (key,)).fetchone()
    return None if row is None else record_of_row(row)


def by_sequence(connection: StoreConnection, sequences: Sequence[int]) -> list[DeliveryRecord]:
    """Return the deliveries with these numbers with their bodies, oldest first."""
    return [record_of_row(row) for row in connection.execute(_BY_SEQUENCE, (list(sequences),))]


def find_by_id(
    connection: StoreConnection, webhook_id: str, limit: int
) -> Sequence[DeliveryRecord]:
    """Return the deliveries of one id, whoever signed them, the host's first."""
    rows = connection.execute(_OF_ID, {"id": webhook_id, "limit": limit})
    return [record_of_row(row) for row in rows]


def known(connection: StoreConnection, keys: Sequence[str]) -> frozenset[str]:
    """Return those of ``keys`` that have a row."""
    statement = "SELECT delivery_key FROM arrival WHERE delivery_key = ANY(%s::text[])"
    return frozenset(key for (key,) in connection.execute(statement, (list(keys),)))


def read_checkpoint(connection: StoreConnection, name: str) -> str | None:
    """Return the value under ``name``, or None."""
    row = connection.execute("SELECT value FROM checkpoint WHERE name = %s", (name,)).fetchone()
    return None if row is None else str(row[0])


def attempts(connection: StoreConnection, key: str) -> Sequence[AttemptRecord]:
    """Return the failed runs of one delivery, oldest first."""
    return [AttemptRecord(*row) for row in connection.execute(_ATTEMPTS, (key,))]


def evidence(connection: StoreConnection, key: str) -> Sequence[EvidenceRecord]:
    """Return the other bodies that came under a key, oldest first."""
    return [EvidenceRecord(*row) for row in connection.execute(_EVIDENCE, (key,))]


#: The most by which the clocks of two hosts are expected to differ, in seconds. A listing by time
#: looks at the sequences between two arrivals that lie further outside than this, and so not at all
#: that has ever come; a host whose clock is off by more may be missing from it.
_SKEW_SECONDS = 3600.0

# The numbers of what is in one state come from the table that holds this state alone. Type and
# subject have indexes of their hashes.
_CONDITIONS = {
    "type": "hashtextextended(type, 0) = hashtextextended(%(type)s, 0) AND type = %(type)s",
    "subject": "hashtextextended(subject, 0) = hashtextextended(%(subject)s, 0) "
    "AND subject = %(subject)s",
    "since": "received_at >= %(since)s AND sequence > coalesce((SELECT sequence FROM arrival "
    f"WHERE received_at < %(since)s - {_SKEW_SECONDS} ORDER BY received_at DESC LIMIT 1), 0)",
    "until": "received_at < %(until)s AND sequence < coalesce((SELECT sequence FROM arrival "
    f"WHERE received_at > %(until)s + {_SKEW_SECONDS} ORDER BY received_at LIMIT 1), {2**62})",
    "after": "sequence > %(after)s",
    "before": "sequence < %(before)s",
    "tenant": "tenant_id = %(tenant)s",
    "state": "sequence IN (SELECT work.sequence FROM work WHERE work.state = %(state)s)",
}

_IS_DONE = "EXISTS (SELECT 1 FROM ended WHERE ended.sequence = delivery.sequence)"


def find(
    connection: StoreConnection,
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
) -> Sequence[DeliveryRecord]:
    """List deliveries without bodies; see :meth:`Inbox.find`."""
    done = state is DeliveryState.DONE
    values = {
        "type": type,
        "since": since,
        "until": until,
        "after": after_sequence,
        "before": before_sequence,
        "subject": subject,
        "tenant": tenant_id,
        "state": state,
    }
    conditions = [
        text
        for name, text in _CONDITIONS.items()
        if values[name] is not None and not (name == "state" and done)
    ]
    if done:
        conditions.append(_IS_DONE)
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    if oldest_first is None:
        oldest_first = after_sequence is not None
    order = "ASC" if oldest_first else "DESC"
    statement = (
        f"SELECT {RECORD.format(raw='NULL')} FROM delivery {where} "
        f"ORDER BY sequence {order} LIMIT %(limit)s"
    )
    rows = connection.execute(statement, {**values, "limit": limit})
    return [record_of_row(row) for row in rows]


# The name is PostgreSQL's own, of the table and the column.
_LAST_SEQUENCE = """
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM arrival_sequence_seq
"""


def last_sequence(connection: StoreConnection) -> int:
    """Return the highest sequence that was ever given, 0 before the first one."""
    (last,) = connection.execute(_LAST_SEQUENCE).fetchone() or (0,)
    return int(last)


def counts(connection: StoreConnection) -> dict[DeliveryState, int]:
    """Return how many deliveries are in each state."""
    found = {str(state): int(number) for state, number in connection.execute(_COUNTS)}
    return {state: found.get(state, 0) for state in DeliveryState}


def oldest_waiting(connection: StoreConnection) -> float | None:
    """Return the arrival time of the oldest queued delivery that waits or runs, or None."""
    row = connection.execute(_OLDEST_WAITING).fetchone()
    return None if row is None else float(row[0])


def holdings(connection: StoreConnection, tenant_id: str) -> Mapping[str, int]:
    """Count the records of a tenant beside its own row."""
    names = ("deliveries", "bodies", "attempts", "evidence", "messages", "outbox", "audit")
    counted = connection.execute(_HOLDINGS, {"id": tenant_id}).fetchone() or ()
    return dict(zip(names, counted, strict=True))


def unowned(connection: StoreConnection) -> Sequence[str]:
    """Return the ids of tenants that deliveries or evidence name and that no tenant has."""
    return [tenant_id for (tenant_id,) in connection.execute(_UNOWNED)]


def of_tenant(
    connection: StoreConnection, tenant_id: str, *, after: int, limit: int | None
) -> Sequence[int]:
    """Return the next sequences above ``after`` of a tenant's deliveries."""
    rows = connection.execute(_OF_TENANT, (tenant_id, after, limit))
    return [sequence for (sequence,) in rows]


def clock_offset(connection: StoreConnection) -> float:
    """Return the seconds by which this host's clock is ahead of the server's.

    What may be the answer's way is not counted as an offset.
    """
    asked = time.time()
    query = "SELECT extract(epoch FROM clock_timestamp())::float8"
    server: float
    (server,) = connection.execute(query).fetchone() or (asked,)
    answered = time.time()
    return max(0.0, asked - server) + min(0.0, answered - server)


_EXPIRED_LEASES = """
SELECT count(*) FROM work WHERE lease_owner IS NOT NULL AND queued
    AND state IN ('received', 'running', 'retrying')
    AND lease_until <= coalesce(extract(epoch FROM statement_timestamp()) - %(ago)s, %(before)s)
"""


def expired_leases(connection: StoreConnection, before: float, ago: float | None) -> int:
    """Return how many leases expired before that time, or ``ago`` seconds by the server's clock."""
    row = connection.execute(_EXPIRED_LEASES, {"before": before, "ago": ago}).fetchone()
    return 0 if row is None else int(row[0])


_CHANGES = """
SELECT coalesce(sum(changes), 0), count(*),
    %(shared)s AND EXISTS (SELECT 1 FROM work WHERE lease_owner IS NOT NULL
        AND lease_owner <> %(owner)s AND queued AND state IN ('received', 'running', 'retrying')
        AND lease_until <= extract(epoch FROM statement_timestamp()))
FROM node WHERE id <> %(node)s
"""


def changes_of_others(
    connection: StoreConnection, node: str, owner: str, *, shared: bool
) -> tuple[int, int, bool]:
    """Return numbers of which one changes with every transaction of another node.

    The last one says whether a lease of another owner has expired, if the store is ``shared``: a
    process that ended writes nothing that would tell of it.
    """
    values = {"node": node, "owner": owner, "shared": shared}
    changes, nodes, expired = connection.execute(_CHANGES, values).fetchone() or (0, 0, False)
    return int(changes), int(nodes), bool(expired)
