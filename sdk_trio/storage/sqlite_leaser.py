"""Hands out what is due, and keeps, gives up and takes over leases: jobs for the committer.

What the functions mean is said once, in :class:`~.ports.Inbox`. Each statement names the index it
needs: should a change of schema or query ever lose it, SQLite refuses the statement at once,
where a silent scan of a million finished rows would only be noticed in production.
"""

from collections.abc import Sequence

import apsw

from .admission import Terms
from .records import DeliveryRecord, Due
from .schema import UNFINISHED
from .sqlite_reader import COLUMNS, record_of

# SQLite uses a partial index only for a query that repeats its condition.
_OPEN = "FROM inbox AS this INDEXED BY inbox_open WHERE state <> 'done' AND queued = 1"

_FIRST_IN_LINE = f"""
NOT (ordered = 1 AND EXISTS (
    SELECT 1 FROM inbox AS earlier INDEXED BY inbox_line
    WHERE earlier.ordered = 1 AND earlier.{UNFINISHED}
        AND earlier.subject = this.subject AND earlier.sequence < this.sequence))
"""  # noqa: S608 - only constants are put in

_RECEIVED = f"""
SELECT sequence {_OPEN} AND state = 'received' AND lease_owner IS NULL
    AND next_attempt_at IS NULL AND {_FIRST_IN_LINE}
ORDER BY sequence LIMIT :limit
"""

_RETRYING = f"""
SELECT sequence {_OPEN} AND state = 'retrying' AND lease_owner IS NULL
    AND next_attempt_at <= :now AND {_FIRST_IN_LINE}
ORDER BY sequence LIMIT :limit
"""

_EXPIRED = f"""
SELECT sequence {_OPEN} AND {UNFINISHED} AND lease_owner > ''
    AND lease_owner <> :owner AND lease_until <= :now AND {_FIRST_IN_LINE}
ORDER BY sequence LIMIT :limit
"""

_NEXT_DUE = f"""
SELECT min(next_attempt_at) {_OPEN} AND state = 'retrying' AND lease_owner IS NULL
    AND next_attempt_at > :now
"""

# What another owner was running when it lost its lease was cut short: it is received again.
_LEASE = """
UPDATE inbox SET lease_owner = ?, lease_until = ?,
    state = CASE state WHEN 'running' THEN 'received' ELSE state END
WHERE sequence = ?
"""

_LEASED_RECORD = f"""
SELECT {COLUMNS}, raw, tenant_id FROM inbox LEFT JOIN body USING (sequence) WHERE sequence = ?
"""  # noqa: S608 - only constants are put in

_RELEASE = """
UPDATE inbox SET lease_owner = NULL, lease_until = NULL
WHERE webhook_id = ? AND lease_owner = ? AND state IN ('received', 'retrying')
"""

_RENEW = f"""
UPDATE inbox INDEXED BY inbox_open SET lease_until = ?
WHERE state <> 'done' AND {UNFINISHED} AND queued IN (0, 1) AND lease_owner = ?
"""  # noqa: S608 - only constants are put in

_RECOVER = f"""
UPDATE inbox INDEXED BY inbox_open SET lease_owner = NULL, lease_until = NULL,
    queued = CASE state WHEN 'running' THEN 1 ELSE queued END,
    state = CASE state WHEN 'running' THEN 'received' ELSE state END
WHERE state <> 'done' AND {UNFINISHED} AND queued IN (0, 1)
    AND lease_owner > '' AND lease_owner <> ?
"""  # noqa: S608 - only constants are put in


def take_due(connection: apsw.Connection, terms: Terms, limit: int, now: float) -> Due:
    """Lease what is due, oldest arrival first."""
    bindings = {"limit": limit + 1, "now": now, "owner": terms.owner}
    found: list[int] = []
    for statement in (_RECEIVED, _RETRYING, _EXPIRED):
        found.extend(sequence for (sequence,) in connection.execute(statement, bindings))
    found.sort()
    records = [
        _lease(connection, sequence, terms.owner, now + terms.lease_seconds)
        for sequence in found[:limit]
    ]
    next_due_at = connection.execute(_NEXT_DUE, {"now": now}).get
    return Due(records, more=len(found) > limit, next_due_at=next_due_at)


def _lease(connection: apsw.Connection, sequence: int, owner: str, until: float) -> DeliveryRecord:
    connection.execute(_LEASE, (owner, until, sequence))
    (row,) = connection.execute(_LEASED_RECORD, (sequence,))
    return record_of(row)


def release(connection: apsw.Connection, terms: Terms, webhook_ids: Sequence[str]) -> None:
    """Give up leases of ours whose run was never started."""
    for webhook_id in webhook_ids:
        connection.execute(_RELEASE, (webhook_id, terms.owner))


def renew(connection: apsw.Connection, terms: Terms, now: float) -> None:
    """Extend all leases of ours."""
    connection.execute(_RENEW, (now + terms.lease_seconds, terms.owner))


def recover(connection: apsw.Connection, terms: Terms) -> int:
    """Take away the leases of all other owners; return how many."""
    connection.execute(_RECOVER, (terms.owner,))
    return connection.changes()
