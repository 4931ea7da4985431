"""Leases of deliveries in SQLite: taking, renewing, giving up and taking over; committer's jobs.

:class:`Inbox` describes the functions. Each statement names the index that it needs: if a change of
schema or query loses it, SQLite refuses the statement at once, while a silent scan of a million
finished rows would be noticed in production only.
"""

from collections.abc import Collection, Sequence
from typing import Any, cast

import apsw

from ...records.deliveries import PROCESS_ENDED, DeliveryRecord, DeliveryState, Due, Renewed
from .. import backlog
from ..admission import CLOCK_SLACK_SECONDS, LeaseTerms
from ..backlog import BacklogWalk
from . import arrivals
from .arrivals import placeholders
from .schema import UNFINISHED

# SQLite uses a partial index only for a query that repeats its condition.
_OPEN = f"FROM open AS this INDEXED BY open_due WHERE {UNFINISHED} AND queued = 1"

_FIRST_IN_LINE = f"""
NOT (this.subject IS NOT NULL AND EXISTS (
    SELECT 1 FROM open AS earlier INDEXED BY open_line
    WHERE earlier.subject IS NOT NULL AND earlier.{UNFINISHED}
        AND earlier.subject = this.subject AND earlier.tenant_id IS this.tenant_id
        AND earlier.sequence < this.sequence))
"""

_IS_WAITING = "state = 'received' AND lease_owner IS NULL AND next_attempt_at IS NULL"

# All four columns of the index are compared for equality, so rows come in the order of arrival
# without being sorted, and only so many are read as are wanted.
_WAITING = f"""
SELECT sequence, subject, tenant_id {_OPEN} AND {_IS_WAITING} AND sequence > :passed
ORDER BY sequence LIMIT {backlog.WINDOW}
"""

_RECEIVED = f"SELECT sequence FROM ({_WAITING}) AS this WHERE {_FIRST_IN_LINE} LIMIT :limit"

_LAST_SEEN = f"""
SELECT sequence {_OPEN} AND {_IS_WAITING} AND sequence > :passed
ORDER BY sequence LIMIT 1 OFFSET {backlog.WINDOW - 1}
"""

# The first of the next lane: of the same subject and another tenant (the one without a tenant comes
# before all), or of the next subject.
_NEXT_LINE = f"""
SELECT subject, tenant_id, sequence, queued = 1 AND {_IS_WAITING}
FROM open INDEXED BY open_line WHERE subject IS NOT NULL AND {UNFINISHED} AND {{which}}
ORDER BY subject, tenant_id, sequence LIMIT 1
"""

_FIRST_LINE = _NEXT_LINE.format(which="true")
_NEXT_TENANT = _NEXT_LINE.format(which="subject = ? AND tenant_id > ?")
_NEXT_SUBJECT = _NEXT_LINE.format(which="subject > ?")

_RETRYING = f"""
SELECT sequence {_OPEN} AND state = 'retrying' AND lease_owner IS NULL
    AND next_attempt_at <= :now AND {_FIRST_IN_LINE}
ORDER BY sequence LIMIT :limit
"""

_EXPIRED = f"""
SELECT sequence {_OPEN} AND lease_owner > ''
    AND lease_owner <> :owner AND (lease_until <= :now OR lease_until > :farthest)
    AND {_FIRST_IN_LINE}
ORDER BY sequence LIMIT :limit
"""

_SUSPECTS = f"""
SELECT sequence FROM open AS this INDEXED BY open_suspect
WHERE process_ends > 0 AND state = 'received' AND queued = 1
    AND (lease_owner IS NULL OR lease_owner = :owner) AND {_FIRST_IN_LINE}
ORDER BY sequence LIMIT :limit
"""

_NEXT_DUE = f"""
SELECT min(next_attempt_at) {_OPEN} AND state = 'retrying' AND lease_owner IS NULL
    AND next_attempt_at > :now
"""

# The view would join three tables, which takes longer than these two statements.
_LEASE = {
    rows: f"UPDATE open SET lease_owner = ?, lease_until = ? WHERE sequence IN {placeholders(rows)}"
    for rows in arrivals.ROWS_AT_ONCE
}

_LEASED = {
    rows: f"""
SELECT open.sequence, delivery_key, type, open.state, queued, attempts, received_at, timestamp,
    arrival.subject, ordered, next_attempt_at, open.started_at, open.finished_at, last_error,
    (SELECT raw FROM body WHERE body.sequence = open.sequence), arrival.tenant_id, process_ends,
    ran_alone, earlier_attempts, signer, generation, failed_at IS NULL
FROM open JOIN arrival USING (sequence) WHERE open.sequence IN {placeholders(rows)}
ORDER BY open.sequence
"""
    for rows in arrivals.ROWS_AT_ONCE
}

_RELEASE = """
UPDATE open SET lease_owner = NULL, lease_until = NULL
WHERE sequence = ? AND lease_owner = ? AND state IN ('received', 'retrying')
"""

_OURS = f"""
SELECT sequence,
    (SELECT delivery_key FROM arrival WHERE arrival.sequence = open.sequence)
FROM open INDEXED BY open_due
WHERE {UNFINISHED} AND queued IN (0, 1) AND lease_owner = ?
"""

# The run was never begun, or its end could not be recorded: the attempt does not count.
_GIVE_UP = {
    rows: f"""
UPDATE open SET attempts = attempts - (state = 'running'), lease_owner = NULL, lease_until = NULL,
    started_at = CASE state WHEN 'running' THEN NULL ELSE started_at END,
    state = CASE state WHEN 'running' THEN 'received' ELSE state END
WHERE sequence IN {placeholders(rows)}
"""
    for rows in arrivals.ROWS_AT_ONCE
}

_HELD_BY_ANOTHER = f"""
SELECT 1 FROM open WHERE sequence = ? AND {UNFINISHED} AND lease_owner <> ?
"""

_OF_OTHERS = f"""
{UNFINISHED} AND queued IN (0, 1) AND lease_owner > '' AND lease_owner <> :owner
"""

_HELD = f"SELECT sequence, state FROM open INDEXED BY open_due WHERE {_OF_OTHERS}"

# The first start of a delivery is not waited for, so its process may have ended in that run without
# a trace. Whoever takes the lease of a process that is gone says so by a time of failure in 1970:
# that delivery's next start is waited for and counted (docs/adr/0011).
_TOUCH = "UPDATE open SET failed_at = coalesce(failed_at, 0)"

_RECOVER = f"""
UPDATE open INDEXED BY open_due SET lease_owner = NULL, lease_until = NULL,
    failed_at = coalesce(failed_at, 0)
WHERE {_OF_OTHERS}
"""

_HELD_BY = f"""
SELECT sequence, state, process_ends FROM open INDEXED BY open_due
WHERE {UNFINISHED} AND queued IN (0, 1) AND lease_owner = ?
"""

_LEAVE = "UPDATE open SET lease_owner = ?, lease_until = ? WHERE sequence = ?"

# The end of the run is taken from the last renewal of its lease, the last sign of life.
_RECORD_END = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error)
SELECT sequence, attempts, coalesce(started_at, received_at),
    max(coalesce(started_at, received_at), coalesce(lease_until, 0) - :lease_seconds), :error
FROM inbox WHERE sequence = :sequence
"""

_CUT_SHORT = """
UPDATE open SET state = 'received', queued = 1, process_ends = process_ends + 1,
    ran_alone = ran_alone OR :sole, last_error = :error
WHERE sequence = :sequence
"""

# A clock that was ahead when a retry was planned would make it wait for hours after it was set
# right.
_RESCHEDULE = f"""
UPDATE open INDEXED BY open_due SET next_attempt_at = :now, failed_at = :now
WHERE {UNFINISHED} AND state = 'retrying' AND queued = 1
    AND next_attempt_at > :now AND coalesce(failed_at, started_at) > :latest
"""


def take_due(
    connection: apsw.Connection,
    terms: LeaseTerms,
    walk: BacklogWalk,
    limit: int,
    now: float,
    overdue: bool = True,
) -> Due:
    """Lease due deliveries, oldest arrival first in each part of the backlog."""
    arrivals.settle(connection)
    walk.begin(now)
    bindings = {
        # One more than wanted tells whether there are more.
        "limit": limit + 1,
        "now": now,
        "passed": walk.passed,
        "owner": terms.owner,
        "farthest": now + terms.lease_seconds + CLOCK_SLACK_SECONDS,
    }
    found = _passed_by(connection, walk, limit + 1)
    for statement in (_RECEIVED, _RETRYING):
        found.extend(sequence for (sequence,) in connection.execute(statement, bindings))
    last_seen = None
    if len(found) <= limit:
        last_seen = connection.execute(_LAST_SEEN, bindings).get
        walk.end(last_seen, now=now)
    else:
        walk.stay(now=now)
    expired: list[int] = []
    if overdue:
        expired = [sequence for (sequence,) in connection.execute(_EXPIRED, bindings)]
    found = sorted(found + expired)
    # The owner has not renewed its lease: its process hangs or is gone, so a run of it counts as
    # one that ended the process.
    for sequence in set(found[:limit]).intersection(expired):
        _cut_short(connection, terms, sequence, sole=False)
        connection.execute(f"{_TOUCH} WHERE sequence = ?", (sequence,))
    records, unbegun = _lease(connection, found[:limit], terms.owner, now + terms.lease_seconds)
    next_due_at = connection.execute(_NEXT_DUE, {"now": now}).get
    more = len(found) > limit or walk.more(last_seen)
    return Due(records, more, walk.until(next_due_at), unbegun)


def _passed_by(connection: apsw.Connection, walk: BacklogWalk, limit: int) -> list[int]:
    """Return the first deliveries of the next lanes, as far as the walk has passed them."""
    found: list[int] = []
    if walk.passed == 0:
        return found
    for _ in range(backlog.LANES):
        lane = walk.lane
        if lane is None:
            row = connection.execute(_FIRST_LINE).get
        else:
            row = (
                connection.execute(_NEXT_TENANT, lane).get
                or connection.execute(_NEXT_SUBJECT, lane[:1]).get
            )
        if row is None:
            walk.lane = None
            break
        subject, tenant_id, sequence, waits = row
        walk.lane = (subject, tenant_id or "")
        if waits and sequence <= walk.passed:
            found.append(sequence)
            if len(found) == limit:
                break
    return found


def take_suspects(
    connection: apsw.Connection, terms: LeaseTerms, limit: int, now: float
) -> list[DeliveryRecord]:
    """Lease deliveries that ran when a process ended, oldest arrival first."""
    arrivals.settle(connection)
    bindings = {"limit": limit, "owner": terms.owner}
    found = [sequence for (sequence,) in connection.execute(_SUSPECTS, bindings)]
    records, _ = _lease(connection, found, terms.owner, now + terms.lease_seconds)
    return records


def _cut_short(
    connection: apsw.Connection, terms: LeaseTerms, sequence: int, *, sole: bool
) -> None:
    """Put a run of another owner back to ``received``, because its process has ended."""
    (state,) = connection.execute(
        "SELECT state FROM open WHERE sequence = ?", (sequence,)
    ).fetchone() or ("",)
    if state == "running":
        bindings = {"sequence": sequence, "error": PROCESS_ENDED}
        connection.execute(_RECORD_END, {**bindings, "lease_seconds": terms.lease_seconds})
        connection.execute(_CUT_SHORT, {**bindings, "sole": sole})


def _lease(
    connection: apsw.Connection, sequences: Sequence[int], owner: str, until: float
) -> tuple[list[DeliveryRecord], frozenset[str]]:
    """Lease deliveries that have rows in ``open``; return them, and keys of those never begun."""
    records = []
    unbegun = set()
    for piece in arrivals.in_pieces(sequences):
        connection.execute(_LEASE[len(piece)], (owner, until, *piece))
        for row in cast("Any", connection.execute(_LEASED[len(piece)], piece)):
            sequence, key, type_, state, queued, attempts, at, sent, subject, ordered, *rest = row
            *rest, signer, generation, untouched = rest
            arrivals.remember(key, sequence)
            if untouched and not attempts and state == "received":
                unbegun.add(key)
            webhook_id = key[: -len(signer) - 1] if signer else key
            head = (sequence, webhook_id, type_, DeliveryState(state), bool(queued), attempts)
            told: list[Any] = [*head, at, sent, subject, bool(ordered), *rest, signer, generation]
            records.append(DeliveryRecord(*told))
    return records, frozenset(unbegun)


def release(connection: apsw.Connection, terms: LeaseTerms, keys: Sequence[str]) -> None:
    """Give up leases of ours whose run was never started."""
    arrivals.settle(connection)
    for key in keys:
        connection.execute(_RELEASE, (arrivals.sequence_of(connection, key), terms.owner))


def renew(
    connection: apsw.Connection, terms: LeaseTerms, held: Collection[str], now: float
) -> Renewed:
    """Extend the leases of ours with the keys ``held``, and give up all others."""
    arrivals.settle(connection)
    ours: list[Any] = connection.execute(_OURS, (terms.owner,)).fetchall()
    kept = [sequence for sequence, key in ours if key in held]
    stray = [sequence for sequence, key in ours if key not in held]
    for piece in arrivals.in_pieces(kept):
        connection.execute(_LEASE[len(piece)], (terms.owner, now + terms.lease_seconds, *piece))
    for piece in arrivals.in_pieces(stray):
        connection.execute(_GIVE_UP[len(piece)], piece)
    missing = set(held).difference(key for _, key in ours)
    lost = [key for key in missing if _is_of_another(connection, terms, key)]
    return Renewed(frozenset(lost), given_up=len(stray))


def _is_of_another(connection: apsw.Connection, terms: LeaseTerms, key: str) -> bool:
    place = (arrivals.sequence_of(connection, key), terms.owner)
    return connection.execute(_HELD_BY_ANOTHER, place).fetchone() is not None


def recover(connection: apsw.Connection, terms: LeaseTerms) -> int:
    """Take away the leases of all other owners; return how many."""
    arrivals.settle(connection)
    bindings = {"owner": terms.owner}
    held: list[Any] = connection.execute(_HELD, bindings).fetchall()
    for sequence, state in held:
        if state == "running":
            # If the dead process held nothing else, this run has ended it, and needs no quarantine
            # to prove that (ADR 23).
            _cut_short(connection, terms, sequence, sole=len(held) == 1)
    connection.execute(_RECOVER, bindings)
    return len(held)


def take_over(
    connection: apsw.Connection, terms: LeaseTerms, owner: str, heir: str, now: float
) -> int:
    """Take away the leases of ``owner``; its runs are left to ``heir``. Return how many."""
    arrivals.settle(connection)
    held: list[Any] = connection.execute(_HELD_BY, (owner,)).fetchall()
    until = now + terms.lease_seconds
    for sequence, state, process_ends in held:
        if state == "running":
            # Before the lease goes: the end of the run is computed from it.
            _cut_short(connection, terms, sequence, sole=len(held) == 1)
        # One that the dead owner was left itself, and has not tried yet, goes on to its heir.
        if state == "running" or process_ends:
            connection.execute(_LEAVE, (heir, until, sequence))
        else:
            connection.execute(_LEAVE, (None, None, sequence))
        connection.execute(f"{_TOUCH} WHERE sequence = ?", (sequence,))
    return len(held)


def reschedule(connection: apsw.Connection, now: float) -> int:
    """Make due the retries that were decided in the future; return their number."""
    connection.execute(_RESCHEDULE, {"now": now, "latest": now + CLOCK_SLACK_SECONDS})
    return connection.changes()
