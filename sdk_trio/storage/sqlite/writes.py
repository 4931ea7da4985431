"""Everything that changes the inbox in SQLite: plain functions of a connection.

Each is a job for the :class:`Committer`: it runs within a transaction that it neither begins nor
ends, and may run again after a rollback. :class:`Inbox` describes the functions. Two invariants
keep ``inbox_open`` sorted by arrival: only a ``retrying`` row has ``next_attempt_at``, and only a
leased row has ``lease_owner``.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import apsw

from ...records.deliveries import (
    MOST_EVIDENCE,
    PROCESS_ENDED,
    Admission,
    Admitted,
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Outcome,
    Parked,
    Released,
    Retry,
)
from ..admission import (
    ACCEPTING,
    CLAIMING,
    PARKING,
    AdmissionRule,
    Change,
    ExistingState,
    Known,
    LeaseTerms,
    standing_of,
)
from .connect import MARK_AS_UNWIPED
from .schema import UNFINISHED

# -- admission ---------------------------------------------------------------------------------

_INSERT = """
INSERT INTO inbox (delivery_key, signer, type, state, queued, attempts, received_at, timestamp,
                   subject, ordered, tenant_id, started_at, lease_owner, lease_until)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (delivery_key) DO NOTHING
"""

_INSERT_DONE = """
INSERT INTO inbox (delivery_key, signer, type, state, queued, attempts, received_at, timestamp,
                   subject, ordered, tenant_id, started_at, finished_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (delivery_key) DO NOTHING
"""

_INSERT_BODY = "INSERT INTO body (sequence, raw) VALUES (?, ?)"

_KNOWN = """
SELECT sequence, state, queued, attempts, finished_at,
    CASE WHEN lease_owner <> ? THEN lease_until END, process_ends, earlier_attempts, raw
FROM inbox LEFT JOIN body USING (sequence) WHERE delivery_key = ?
"""

# A row from before signers were kept also counts as signed by its own tenant: a redelivery after
# the migration must not run a second time.
_OF_BEFORE = """
SELECT 1 FROM inbox WHERE delivery_key = ? AND signer IS NULL AND tenant_id = ?
"""

_READMIT = """
UPDATE inbox SET state = ?, queued = ?, attempts = ?, earlier_attempts = ?, ordered = ?,
    started_at = ?, lease_owner = ?, lease_until = ?, next_attempt_at = NULL, finished_at = NULL,
    ran_alone = 0, process_ends = CASE WHEN ?9 THEN 0 ELSE process_ends END,
    last_error = CASE WHEN ?9 THEN NULL ELSE last_error END, delivery_key = ?, signer = ?
WHERE sequence = ?
"""


_SAY_WHY = "UPDATE inbox SET last_error = ? WHERE delivery_key = ?"


def accept(
    connection: apsw.Connection, terms: LeaseTerms, delivery: NewDelivery, leased: bool
) -> Admitted:
    """Keep ``delivery`` for our own workers."""
    return _admit(connection, terms, delivery, ACCEPTING, DeliveryState.RECEIVED, leased)


def claim(connection: apsw.Connection, terms: LeaseTerms, delivery: NewDelivery) -> Admitted:
    """Claim ``delivery`` for an inline run."""
    return _admit(connection, terms, delivery, CLAIMING, DeliveryState.RUNNING, True)


def park(
    connection: apsw.Connection, terms: LeaseTerms, delivery: NewDelivery, reason: str | None
) -> Admitted:
    """Keep ``delivery`` without running it, and why."""
    admitted = _admit(connection, terms, delivery, PARKING, DeliveryState.PARKED, False)
    if admitted.admission is Admission.NEW and reason is not None:
        connection.execute(_SAY_WHY, (reason, delivery.key))
    return admitted


def _admit(
    connection: apsw.Connection,
    terms: LeaseTerms,
    delivery: NewDelivery,
    rulings: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    leased: bool,
) -> Admitted:
    key = delivery.key
    # A redelivery of what came before signers were kept must find its row, or it would run a second
    # time.
    if delivery.signer and _is_of_before(connection, delivery):
        key = delivery.webhook_id
    # The common case, an unknown key, costs two inserts and no query.
    elif _insert(connection, terms, delivery, state, leased):
        return Admitted(Admission.NEW)
    (row,) = connection.execute(_KNOWN, (terms.owner, key))
    sequence, known_state, queued, attempts, finished_at, until, ends, earlier, raw = cast(
        "Any", row
    )
    now = delivery.received_at
    held_until = terms.live(until, now=now)
    known = Known(DeliveryState(known_state), bool(queued), attempts, finished_at, held_until, ends)
    ruling = rulings[standing_of(known, now=now, dedup_seconds=terms.dedup_seconds)]
    if ruling.change is Change.REPLACE:
        _forget(connection, sequence)
        _insert(connection, terms, delivery, state, leased)
        return Admitted(Admission.NEW)
    # After the payload retention there is nothing to compare with, and no reason to suspect the
    # sender.
    same_body = raw is None or raw == delivery.raw
    if not same_body:
        _keep_other(connection, sequence, delivery)
    if ruling.change is Change.NOTHING:
        return Admitted(ruling.admission, attempts, same_body)
    restart = ruling.change is Change.RESTART
    # A record that was given up begins anew: its earlier attempts are kept apart, so that the
    # number of allowed ones is whole again.
    before = 0 if restart else attempts
    earlier += attempts - before
    running = state is DeliveryState.RUNNING
    connection.execute(
        _READMIT,
        (
            state,
            state is DeliveryState.RECEIVED,
            before + running,
            earlier,
            delivery.ordered,
            now if running else None,
            terms.owner if leased else None,
            now + terms.lease_seconds if leased else None,
            restart,
            delivery.key,
            delivery.signer,
            sequence,
        ),
    )
    return Admitted(ruling.admission, before, same_body, earlier)


def _is_of_before(connection: apsw.Connection, delivery: NewDelivery) -> bool:
    """Whether the delivery's signer has a row of this id from before signers were kept."""
    found = connection.execute(_OF_BEFORE, (delivery.webhook_id, delivery.signer))
    return found.fetchone() is not None


def _insert(
    connection: apsw.Connection,
    terms: LeaseTerms,
    delivery: NewDelivery,
    state: DeliveryState,
    leased: bool,
) -> bool:
    """Insert a delivery with its body; False when its key is known."""
    now = delivery.received_at
    running = state is DeliveryState.RUNNING
    connection.execute(
        _INSERT,
        (
            delivery.key,
            delivery.signer,
            delivery.type,
            state,
            state is DeliveryState.RECEIVED,
            running,
            now,
            delivery.timestamp,
            delivery.subject,
            delivery.ordered,
            delivery.tenant_id,
            now if running else None,
            terms.owner if leased else None,
            now + terms.lease_seconds if leased else None,
        ),
    )
    if not connection.changes():
        return False
    connection.execute(_INSERT_BODY, (connection.last_insert_rowid(), delivery.raw))
    return True


# -- other bodies under one key ----------------------------------------------------------------

# A sender decides how many bodies come under one key, so no more than a few are kept, and equal
# ones once.
_KEEP_OTHER = f"""
INSERT INTO evidence (sequence, digest, received_at, address, raw, tenant_id)
SELECT :sequence, :digest, :received_at, :address, :raw, :tenant_id
WHERE (SELECT count(*) FROM evidence WHERE sequence = :sequence) < {MOST_EVIDENCE}
ON CONFLICT DO NOTHING
"""

_FIRST_BODY = "SELECT sequence, raw FROM inbox JOIN body USING (sequence) WHERE delivery_key = ?"


def keep_other(connection: apsw.Connection, delivery: NewDelivery) -> None:
    """Keep the body of ``delivery`` beside the first one of its key, if it is another one."""
    for sequence, raw in connection.execute(_FIRST_BODY, (delivery.key,)).fetchall():
        if raw != delivery.raw:
            _keep_other(connection, cast("int", sequence), delivery)


def _keep_other(connection: apsw.Connection, sequence: int, delivery: NewDelivery) -> None:
    connection.execute(
        _KEEP_OTHER,
        {
            "sequence": sequence,
            "digest": hashlib.sha256(delivery.raw).digest(),
            "received_at": delivery.received_at,
            "address": delivery.address,
            "raw": delivery.raw,
            "tenant_id": delivery.tenant_id,
        },
    )


# -- runs and their ends -----------------------------------------------------------------------

_START = f"""
UPDATE inbox SET state = 'running', attempts = attempts + 1, started_at = :now,
    ran_alone = :alone, next_attempt_at = NULL, lease_owner = :owner, lease_until = :until
WHERE delivery_key = :key AND {UNFINISHED}
    AND (lease_owner IS NULL OR lease_owner = :owner OR lease_until <= :now)
"""

# A run that ended before its start was handed over is one statement instead of two (ADR 11).
_RUN = f"""
UPDATE inbox SET state = 'done', attempts = attempts + 1, started_at = :begun, finished_at = :now,
    next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE delivery_key = :key AND {UNFINISHED}
    AND (lease_owner IS NULL OR lease_owner = :owner OR lease_until <= :begun)
"""

# A run that has lost its lease to another owner changes nothing: the other one's run counts.
_OURS = f"delivery_key = ? AND lease_owner = ? AND {UNFINISHED}"

_FINISH = f"""
UPDATE inbox SET state = 'done', finished_at = ?, next_attempt_at = NULL,
    lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_FAIL = f"""
UPDATE inbox SET state = ?, queued = ?, next_attempt_at = ?, failed_at = ?, finished_at = ?,
    last_error = ?, lease_owner = NULL, lease_until = NULL
WHERE {_OURS} RETURNING sequence, attempts, started_at
"""

_CUT_SHORT = f"""
UPDATE inbox SET attempts = attempts - (state = 'running'), state = 'received',
    started_at = NULL, next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_SET_ASIDE = f"""
UPDATE inbox SET state = 'parked', queued = 0, next_attempt_at = NULL,
    last_error = coalesce(?, last_error), lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_JOIN = f"UPDATE inbox SET ran_alone = 0 WHERE {_OURS}"

_INSERT_ATTEMPT = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error, place, traceback)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""

# Nothing that another process holds is put back, and nothing whose body the retention has removed:
# it could not be run.
_REPLAY = """
UPDATE inbox SET state = 'received', queued = 1, earlier_attempts = earlier_attempts + attempts,
    attempts = 0, process_ends = 0, ran_alone = 0, next_attempt_at = NULL, started_at = NULL,
    finished_at = NULL, last_error = NULL
WHERE delivery_key = ? AND state IN ('dead', 'parked', 'retrying') AND lease_owner IS NULL
    AND EXISTS (SELECT 1 FROM body WHERE body.sequence = inbox.sequence)
"""


def start(
    connection: apsw.Connection, terms: LeaseTerms, key: str, now: float, alone: bool = False
) -> None:
    """Begin a run: one more attempt. Nothing when another owner holds a live lease."""
    until = now + terms.lease_seconds
    connection.execute(
        _START,
        {"key": key, "now": now, "owner": terms.owner, "until": until, "alone": alone},
    )


def join(connection: apsw.Connection, terms: LeaseTerms, key: str) -> None:
    """Note that a run of ours is not alone any more."""
    connection.execute(_JOIN, (key, terms.owner))


def run(connection: apsw.Connection, terms: LeaseTerms, key: str, begun: float, now: float) -> None:
    """Record a whole run that ended well: :func:`start` at ``begun`` and :func:`finish`, in one."""
    connection.execute(_RUN, {"key": key, "begun": begun, "now": now, "owner": terms.owner})


def record_run(
    connection: apsw.Connection,
    terms: LeaseTerms,
    delivery: NewDelivery,
    outcome: Outcome,
    now: float,
) -> None:
    """Record the first inline run of a new delivery, which has ended: claim and finish, in one.

    Should its key be known after all, because another process has just kept it, a run that ended
    well ends that record, unless another owner holds it.
    """
    done = isinstance(outcome, Done)
    of_before = delivery.signer and _is_of_before(connection, delivery)
    if done and not of_before and _insert_done(connection, delivery, now):
        return
    admitted = claim(connection, terms, delivery)
    if admitted.admission is Admission.NEW:
        finish(connection, terms, delivery.key, outcome, now)
    elif done:
        run(connection, terms, delivery.key, delivery.received_at, now)


def _insert_done(connection: apsw.Connection, delivery: NewDelivery, now: float) -> bool:
    """Insert a delivery as done, with its body; False when its key is known."""
    begun = delivery.received_at
    row = (delivery.key, delivery.signer, delivery.type, DeliveryState.DONE, False, 1, begun)
    more = (delivery.timestamp, delivery.subject, delivery.ordered, delivery.tenant_id, begun, now)
    connection.execute(_INSERT_DONE, row + more)
    if not connection.changes():
        return False
    connection.execute(_INSERT_BODY, (connection.last_insert_rowid(), delivery.raw))
    return True


_COUNT_ENDS = """
UPDATE inbox SET attempts = attempts + :ends, process_ends = process_ends + :ends
WHERE delivery_key = :key AND process_ends < :ends RETURNING sequence
"""


def count_ends(connection: apsw.Connection, key: str, ends: int, begun: float, now: float) -> int:
    """Count runs during which a process ended before the store knew of them; return how many.

    They are counted once: a second call changes nothing.
    """
    counted = connection.execute(_COUNT_ENDS, {"key": key, "ends": ends}).fetchall()
    for (sequence,) in counted:
        told = (PROCESS_ENDED, None, None)
        connection.execute(_INSERT_ATTEMPT, (sequence, ends, begun, max(begun, now), *told))
    return ends if counted else 0


def finish(
    connection: apsw.Connection, terms: LeaseTerms, key: str, outcome: Outcome, now: float
) -> None:
    """Record the outcome of a run of ours; do nothing if its lease is not ours any more."""
    ours = (key, terms.owner)
    match outcome:
        case Done():
            connection.execute(_FINISH, (now, *ours))
        case Retry(at):
            retrying = (DeliveryState.RETRYING, at is not None, at, now, None, outcome.error)
            _fail(connection, (*retrying, *ours), outcome, now)
        case Dead():
            dead = (DeliveryState.DEAD, False, None, None, now, outcome.error)
            _fail(connection, (*dead, *ours), outcome, now)
        case Released():
            connection.execute(_CUT_SHORT, ours)
        case Parked(reason):
            connection.execute(_SET_ASIDE, (reason, *ours))


def _fail(
    connection: apsw.Connection,
    bindings: tuple[str | float | None, ...],
    outcome: Retry | Dead,
    now: float,
) -> None:
    failed: list[Any] = connection.execute(_FAIL, bindings).fetchall()
    # Its last failed run was the end of a process, which recovery has recorded; a second record
    # would count it twice.
    if isinstance(outcome, Dead) and outcome.recorded:
        return
    told = (outcome.error, outcome.place, outcome.traceback)
    for sequence, attempts, started_at in failed:
        begun = now if started_at is None else started_at
        # A body that cannot be decoded is dead without a run; it is recorded as the first attempt.
        connection.execute(_INSERT_ATTEMPT, (sequence, max(attempts, 1), begun, now, *told))


def replay(connection: apsw.Connection, keys: Sequence[str]) -> Sequence[str]:
    """Put dead, parked and waiting deliveries back; return the keys that were."""
    put_back = []
    for key in keys:
        connection.execute(_REPLAY, (key,))
        if connection.changes():
            put_back.append(key)
    return put_back


# -- retention ---------------------------------------------------------------------------------

# The sequences were found by a reader: since then the delivery may have been put back.
_STILL_OLD = """
sequence = :sequence AND EXISTS (
    SELECT 1 FROM inbox AS old WHERE old.sequence = :sequence
        AND ((:state = 'done' AND old.state = 'done' AND old.finished_at < :before)
            OR (:state = 'parked' AND old.state = 'parked' AND old.received_at < :before)))
"""


def delete_bodies(
    connection: apsw.Connection, sequences: Sequence[int], state: DeliveryState, before: float
) -> int:
    """Delete the bodies of those ``sequences`` that are still in ``state`` and older; count them.

    A reader found them outside of this transaction, so state and age are checked again: one of them
    may have been replayed meanwhile. Other bodies under their keys are deleted with them.
    """
    _delete_old(connection, "evidence", sequences, state, before)
    return _delete_old(connection, "body", sequences, state, before)


def delete_deliveries(
    connection: apsw.Connection, sequences: Sequence[int], state: DeliveryState, before: float
) -> int:
    """Delete those ``sequences`` whole that are still in ``state`` and older; count them."""
    for table in ("body", "evidence", "attempt"):
        _delete_old(connection, table, sequences, state, before)
    return _delete_old(connection, "inbox", sequences, state, before)


def _delete_old(
    connection: apsw.Connection,
    table: str,
    sequences: Iterable[int],
    state: DeliveryState,
    before: float,
) -> int:
    statement = f"DELETE FROM {table} WHERE {_STILL_OLD}"
    deleted = 0
    for sequence in sequences:
        connection.execute(statement, {"sequence": sequence, "state": state, "before": before})
        deleted += connection.changes()
    return deleted


def erase(connection: apsw.Connection, tenant_id: str, sequences: Sequence[int]) -> int:
    """Delete those ``sequences`` whole that are the tenant's, whatever their state; count them.

    The next wipe rewrites the database.
    """
    owned = "SELECT count(*) FROM inbox WHERE sequence = ? AND tenant_id = ?"
    ours = [each for each in sequences if connection.execute(owned, (each, tenant_id)).get]
    for sequence in ours:
        _forget(connection, sequence)
    if ours:
        connection.execute(MARK_AS_UNWIPED)
    return len(ours)


_EVIDENCE_OF = (
    "DELETE FROM evidence WHERE id IN (SELECT id FROM evidence WHERE tenant_id = ? LIMIT ?)"
)


def erase_evidence(connection: apsw.Connection, tenant_id: str, limit: int) -> int:
    """Delete up to ``limit`` bodies of the tenant's that came under others' keys; count them.

    The next wipe rewrites the database.
    """
    connection.execute(_EVIDENCE_OF, (tenant_id, limit))
    deleted = connection.changes()
    if deleted:
        connection.execute(MARK_AS_UNWIPED)
    return deleted


def _forget(connection: apsw.Connection, sequence: int) -> None:
    for table in ("body", "evidence", "attempt", "inbox"):
        connection.execute(
            f"DELETE FROM {table} WHERE sequence = ?",
            (sequence,),
        )


# -- checkpoints -------------------------------------------------------------------------------

_FORGET_CHECKPOINT = "DELETE FROM checkpoint WHERE name = ?"

_KEEP_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""


def write_checkpoint(connection: apsw.Connection, name: str, value: str | None) -> None:
    """Keep ``value`` under ``name``; None forgets it."""
    if value is None:
        connection.execute(_FORGET_CHECKPOINT, (name,))
    else:
        connection.execute(_KEEP_CHECKPOINT, (name, value))
