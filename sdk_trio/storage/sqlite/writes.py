"""Everything that changes the inbox in SQLite: plain functions of a connection.

Each is a job for the :class:`Committer`: it runs within a transaction that it neither begins nor
ends, and may run again after a rollback. :class:`Inbox` describes the functions. Two invariants
keep ``open_due`` sorted by arrival: only a ``retrying`` row has ``next_attempt_at``, and only a
leased row has ``lease_owner``.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import apsw
import msgspec

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
    Postponed,
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
from . import arrivals, listing
from .arrivals import NewArrival
from .connect import MARK_AS_UNWIPED
from .schema import UNFINISHED

# -- admission ---------------------------------------------------------------------------------

# An inline run of this owner's that is claimed once more was never begun, or its end could not be
# recorded: it does not count.
_KNOWN = """
SELECT state, queued, attempts - (state = 'running' AND queued = 0 AND lease_owner IS ?1),
    finished_at, CASE WHEN lease_owner <> ?1 THEN lease_until END,
    process_ends, earlier_attempts, generation,
    (SELECT raw FROM body WHERE body.sequence = inbox.sequence)
FROM inbox WHERE sequence = ?2
"""

_READMIT = """
UPDATE open SET state = ?, queued = ?, attempts = ?, earlier_attempts = ?, started_at = ?,
    lease_owner = ?, lease_until = ?, next_attempt_at = NULL, finished_at = NULL, ran_alone = 0,
    process_ends = CASE WHEN ?8 THEN 0 ELSE process_ends END,
    last_error = CASE WHEN ?8 THEN NULL ELSE last_error END,
    subject = (SELECT CASE WHEN ordered THEN arrival.subject END FROM arrival
        WHERE arrival.sequence = open.sequence)
WHERE sequence = ?
"""

_SET_ASIDE_ON_ARRIVAL = """
UPDATE open SET state = 'parked', queued = 0, last_error = ? WHERE sequence = ?
"""


def accept(
    connection: apsw.Connection, terms: LeaseTerms, delivery: NewDelivery, leased: bool
) -> Admitted:
    """Keep ``delivery`` for our own workers."""
    return _admit(connection, terms, delivery, ACCEPTING, DeliveryState.RECEIVED, leased)


def claim(connection: apsw.Connection, terms: LeaseTerms, delivery: NewDelivery) -> Admitted:
    """Claim ``delivery`` for an inline run."""
    return _admit(connection, terms, delivery, CLAIMING, DeliveryState.RUNNING, True)


def accepted(terms: LeaseTerms, delivery: NewDelivery, *, leased: bool) -> NewArrival:
    """Return what :func:`accept` adds where the key is new."""
    if not leased:
        return NewArrival(delivery, "received")
    until = delivery.received_at + terms.lease_seconds
    return NewArrival(delivery, "received", lease_owner=terms.owner, lease_until=until)


def claimed(terms: LeaseTerms, delivery: NewDelivery) -> NewArrival:
    """Return what :func:`claim` adds where the key is new."""
    now = delivery.received_at
    return NewArrival(delivery, "running", now, None, terms.owner, now + terms.lease_seconds)


def done_at_once(delivery: NewDelivery, now: float) -> NewArrival:
    """Return what :func:`record_run` adds for a run that ended well, where the key is new."""
    return NewArrival(delivery, "done", delivery.received_at, now)


def park(
    connection: apsw.Connection, terms: LeaseTerms, delivery: NewDelivery, reason: str | None
) -> Admitted:
    """Keep ``delivery`` without running it, and why."""
    return _admit(connection, terms, delivery, PARKING, DeliveryState.PARKED, False, reason)


def _admit(
    connection: apsw.Connection,
    terms: LeaseTerms,
    delivery: NewDelivery,
    rulings: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    leased: bool,
    reason: str | None = None,
) -> Admitted:
    sequence = _sequence_of(connection, delivery)
    if sequence is None:
        _add(connection, terms, delivery, state, leased, reason)
        return Admitted(Admission.NEW)
    (row,) = connection.execute(_KNOWN, (terms.owner, sequence))
    known_state, queued, attempts, finished_at, until, ends, *put_back, raw = cast("Any", row)
    earlier, generation = put_back
    now = delivery.received_at
    held_until = terms.live(until, now=now)
    known = Known(DeliveryState(known_state), bool(queued), attempts, finished_at, held_until, ends)
    ruling = rulings[standing_of(known, now=now, dedup_seconds=terms.dedup_seconds)]
    if ruling.change is Change.REPLACE:
        arrivals.remove(connection, (sequence,))
        _add(connection, terms, delivery, state, leased, reason)
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
    arrivals.settle_one(connection, sequence)
    arrivals.take_up(connection, sequence, delivery)
    connection.execute(
        _READMIT,
        (
            state,
            state is DeliveryState.RECEIVED,
            before + running,
            earlier,
            now if running else None,
            terms.owner if leased else None,
            now + terms.lease_seconds if leased else None,
            restart,
            sequence,
        ),
    )
    if reason is not None:
        connection.execute(_SET_ASIDE_ON_ARRIVAL, (reason, sequence))
    return Admitted(ruling.admission, before, same_body, earlier, generation)


def _sequence_of(connection: apsw.Connection, delivery: NewDelivery) -> int | None:
    key = delivery.key
    # A redelivery of what came before signers were kept must find its row, or it would run a second
    # time.
    if delivery.signer and arrivals.is_of_before(connection, delivery):
        key = delivery.webhook_id
    return arrivals.sequence_of(connection, key)


def _add(
    connection: apsw.Connection,
    terms: LeaseTerms,
    delivery: NewDelivery,
    state: DeliveryState,
    leased: bool,
    reason: str | None = None,
) -> None:
    """Add a delivery that is not known."""
    if state is DeliveryState.RUNNING:
        new = claimed(terms, delivery)
    else:
        new = accepted(terms, delivery, leased=leased)
    sequence = arrivals.add(connection, (new,))
    if state is DeliveryState.PARKED:
        arrivals.settle_one(connection, sequence)
        connection.execute(_SET_ASIDE_ON_ARRIVAL, (reason, sequence))


# -- other bodies under one key ----------------------------------------------------------------

# A sender decides how many bodies come under one key, so no more than a few are kept, and equal
# ones once.
_KEEP_OTHER = f"""
INSERT INTO evidence (sequence, digest, received_at, address, raw, tenant_id)
SELECT :sequence, :digest, :received_at, :address, :raw, :tenant_id
WHERE (SELECT count(*) FROM evidence WHERE sequence = :sequence) < {MOST_EVIDENCE}
ON CONFLICT DO NOTHING
"""

_FIRST_BODY = "SELECT raw FROM body WHERE sequence = ?"


def keep_other(connection: apsw.Connection, delivery: NewDelivery) -> None:
    """Keep the body of ``delivery`` beside the first one of its key, if it is another one."""
    sequence = arrivals.sequence_of(connection, delivery.key)
    for (raw,) in connection.execute(_FIRST_BODY, (sequence,)).fetchall():
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

# All that decides about a run of a delivery that came a moment ago, in one statement. Scalar
# subqueries: SQLite takes 1.3 us for them and 4.5 us for the same as a join.
_PLACE = """
SELECT sequence, state, started_at, state <> 'done' AND NOT EXISTS (SELECT 1 FROM open
        WHERE open.sequence = arrival.sequence) AND NOT EXISTS (SELECT 1 FROM outcome
        WHERE outcome.sequence = arrival.sequence) AS is_fresh, lease_owner, lease_until,
    delivery_key
FROM arrival WHERE
"""

_PLACES = {
    rows: f"{_PLACE} sequence IN {arrivals.placeholders(rows)}" for rows in arrivals.ROWS_AT_ONCE
}

_MAY_START = (
    f"{UNFINISHED} AND (lease_owner IS NULL OR lease_owner = :owner OR lease_until <= :now)"
)

# A start that is repeated, because nobody knows whether it was committed, counts once.
_COUNTED = "(state = 'running' AND lease_owner IS :owner)"

_START = f"""
UPDATE open SET state = 'running', attempts = attempts + 1 - {_COUNTED}, started_at = :now,
    ran_alone = :alone, next_attempt_at = NULL, lease_owner = :owner, lease_until = :until
WHERE sequence = :sequence AND {_MAY_START}
"""

_START_FRESH = f"""
INSERT INTO open (sequence, state, queued, attempts, started_at, lease_owner, lease_until,
                  ran_alone, subject, tenant_id)
SELECT sequence, 'running', state = 'received', 1 + (state = 'running') - {_COUNTED}, :now, :owner,
    :until, :alone, CASE WHEN ordered THEN subject END, tenant_id
FROM arrival WHERE sequence = :sequence
"""

_DONE_FRESH = {
    rows: "INSERT INTO outcome (sequence, finished_at, started_at, queued, attempts) "
    f"VALUES {arrivals.values(5, rows)}"
    for rows in arrivals.ROWS_AT_ONCE
}

_DONE = {
    rows: "INSERT INTO outcome (sequence, finished_at, started_at, queued, attempts, "
    "earlier_attempts, process_ends, ran_alone, last_error, generation) "
    f"VALUES {arrivals.values(10, rows)}"
    for rows in arrivals.ROWS_AT_ONCE
}

# A run that has lost its lease to another owner changes nothing: the other one's run counts.
_OURS = f"sequence = ? AND lease_owner = ? AND {UNFINISHED}"

# Without a failed run, the last error of a delivery that ends well is the reason for which it had
# waited, such as a paused route, and that is over.
_STORY = (
    "queued, attempts, earlier_attempts, process_ends, ran_alone, "
    "CASE WHEN attempts > {counted} THEN last_error END, generation"
)

_END = {
    rows: f"""
DELETE FROM open WHERE sequence IN {arrivals.placeholders(rows)} AND lease_owner = ?
    AND {UNFINISHED} RETURNING sequence, started_at, {_STORY.format(counted=1)}
"""
    for rows in arrivals.ROWS_AT_ONCE
}

# A run that ended before its start was handed over is one step instead of two (ADR 11).
_RUN = f"""
DELETE FROM open WHERE sequence = :sequence AND {_MAY_START}
RETURNING {_STORY.format(counted=0)}
"""

_FAIL = f"""
UPDATE open SET state = ?, queued = ?, next_attempt_at = ?, failed_at = ?, finished_at = ?,
    last_error = ?, lease_owner = NULL, lease_until = NULL
WHERE {_OURS} RETURNING sequence, attempts, started_at
"""

_CUT_SHORT = f"""
UPDATE open SET attempts = attempts - (state = 'running'), state = 'received',
    started_at = NULL, next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_PUT_OFF = f"""
UPDATE open SET attempts = attempts - (state = 'running'), state = 'retrying', queued = 1,
    started_at = NULL, next_attempt_at = ?, failed_at = ?, last_error = ?, lease_owner = NULL,
    lease_until = NULL
WHERE {_OURS}
"""

_SET_ASIDE = f"""
UPDATE open SET state = 'parked', queued = 0, next_attempt_at = NULL,
    last_error = coalesce(?, last_error), lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_JOIN = f"UPDATE open SET ran_alone = 0 WHERE {_OURS}"

_INSERT_ATTEMPT = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error, place, traceback)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""

# Nothing that another process holds is put back, and nothing whose body the retention has removed:
# it could not be run.
_REPLAY = """
UPDATE open SET state = 'received', queued = 1, earlier_attempts = earlier_attempts + attempts,
    attempts = 0, process_ends = 0, ran_alone = 0, next_attempt_at = NULL, started_at = NULL,
    finished_at = NULL, last_error = NULL
WHERE sequence = ? AND state IN ('dead', 'parked', 'retrying') AND lease_owner IS NULL
    AND EXISTS (SELECT 1 FROM body WHERE body.sequence = open.sequence)
"""

# A run that is recorded with its arrival stays `done` there; the row in `open` goes before that.
_REPEAT = """
INSERT INTO open (sequence, state, queued, attempts, earlier_attempts, subject, tenant_id,
                  generation)
SELECT sequence, 'received', 1, 0, earlier_attempts + attempts, CASE WHEN ordered THEN subject END,
    tenant_id, generation + 1
FROM inbox WHERE sequence = ? AND state = 'done'
    AND EXISTS (SELECT 1 FROM body WHERE body.sequence = inbox.sequence)
"""


class _Place(NamedTuple):
    """The row of a delivery; its lease is as it arrived, and counts while it is fresh."""

    sequence: int
    state: str
    started_at: float | None
    is_fresh: int
    lease_owner: str | None
    lease_until: float | None

    def may_start(self, owner: str, now: float) -> bool:
        """Whether ``owner`` may run it, as far as its arrival says."""
        until = self.lease_until
        return self.lease_owner in (None, owner) or (until is not None and until <= now)


def _place_of(connection: apsw.Connection, key: str) -> _Place | None:
    place = _places_of(connection, (key,)).get(key)
    if place is None and (sequence := arrivals.sequence_of(connection, key)) is not None:
        for *found, _ in cast("Any", connection.execute(_PLACES[1], (sequence,)).fetchall()):
            place = _Place(*found)
    return place


def _places_of(connection: apsw.Connection, keys: Sequence[str]) -> dict[str, _Place]:
    """Return the rows by key of those whose sequences are remembered."""
    probable = {sequence: key for key in keys if (sequence := arrivals.remembered(key)) is not None}
    found: dict[str, _Place] = {}
    for piece in arrivals.in_pieces([*probable]):
        for *place, key in cast("Any", connection.execute(_PLACES[len(piece)], piece)):
            # A remembered sequence may be of another store, or rolled back.
            if probable[place[0]] == key:
                found[key] = _Place(*place)
    return found


def _open_row_of(connection: apsw.Connection, key: str) -> int | None:
    """Return the sequence of the delivery with this key, which has a row in ``open`` if any."""
    place = _place_of(connection, key)
    if place is None:
        return None
    if place.is_fresh:
        arrivals.settle_one(connection, place.sequence)
    return place.sequence


def start(
    connection: apsw.Connection, terms: LeaseTerms, key: str, now: float, alone: bool = False
) -> bool:
    """Begin a run: one more attempt. False: nothing has changed, the run is not ours."""
    place = _place_of(connection, key)
    if place is None or (place.is_fresh and not place.may_start(terms.owner, now)):
        return False
    connection.execute(
        _START_FRESH if place.is_fresh else _START,
        {
            "sequence": place.sequence,
            "now": now,
            "owner": terms.owner,
            "until": now + terms.lease_seconds,
            "alone": alone,
        },
    )
    return connection.changes() > 0


def join(connection: apsw.Connection, terms: LeaseTerms, key: str) -> None:
    """Note that a run of ours is not alone any more."""
    connection.execute(_JOIN, (_open_row_of(connection, key), terms.owner))


class RunEnd(msgspec.Struct):
    """A run that ended well: of which key, when, and when it began if its start is not recorded."""

    key: str
    finished_at: float
    begun: float | None = None


def end_runs(connection: apsw.Connection, terms: LeaseTerms, runs: Sequence[RunEnd]) -> None:
    """Record runs of different keys that ended well: the outcome, and the start where it is asked.

    Nothing for one whose lease another owner holds.
    """
    outcomes: list[_Outcome] = []
    in_open: dict[int, RunEnd] = {}
    places = _places_of(connection, [run.key for run in runs])
    for run in runs:
        place = places.get(run.key) or _place_of(connection, run.key)
        arrivals.forget(run.key)
        if place is None:
            continue
        if not place.is_fresh:
            in_open[place.sequence] = run
        elif run.begun is None:
            if place.lease_owner == terms.owner:
                outcomes.append(_outcome_of(place, run.finished_at, place.started_at))
        elif place.may_start(terms.owner, run.begun):
            outcomes.append(_outcome_of(place, run.finished_at, run.begun, runs=1))
    for piece in arrivals.in_pieces(outcomes):
        connection.execute(_DONE_FRESH[len(piece)], [*chain.from_iterable(piece)])
    for rows in arrivals.in_pieces(_end_open(connection, terms, in_open)):
        connection.execute(_DONE[len(rows)], [*chain.from_iterable(rows)])


_Outcome = tuple[int, float, float | None, bool, int]


def _outcome_of(place: _Place, now: float, started_at: float | None, *, runs: int = 0) -> _Outcome:
    """Return the row that makes a fresh delivery done; ``runs``: those since it arrived."""
    queued, running = place.state == "received", place.state == "running"
    return place.sequence, now, started_at, queued, running + runs


def _end_open(
    connection: apsw.Connection, terms: LeaseTerms, runs: dict[int, RunEnd]
) -> list[tuple[Any, ...]]:
    """Remove the rows in ``open`` of runs that ended well, and return their outcomes."""
    outcomes = []

    def add(
        sequence: int, started_at: float | None, queued: int, attempts: int, *rest: Any
    ) -> None:
        run = runs.pop(sequence)
        if run.begun is not None:
            started_at, attempts = run.begun, attempts + 1
        outcomes.append((sequence, run.finished_at, started_at, queued, attempts, *rest))

    for piece in arrivals.in_pieces([*runs]):
        for row in connection.execute(_END[len(piece)], (*piece, terms.owner)).fetchall():
            add(*cast("Any", row))
    for sequence, run in [*runs.items()]:
        if run.begun is not None:
            bindings = {"sequence": sequence, "now": run.begun, "owner": terms.owner}
            for row in connection.execute(_RUN, bindings).fetchall():
                add(sequence, None, *cast("Any", row))
    return outcomes


def record_run(
    connection: apsw.Connection,
    terms: LeaseTerms,
    delivery: NewDelivery,
    outcome: Outcome,
    now: float,
) -> None:
    """Record the first inline run of a new delivery, which has ended: claim and finish, in one.

    Should it be known after all, because another process has just kept it, a run that ended well
    ends that record, unless another owner holds it.
    """
    done = isinstance(outcome, Done)
    plain = isinstance(outcome, Done) and outcome.answer is None
    if plain and _sequence_of(connection, delivery) is None:
        arrivals.add(connection, (done_at_once(delivery, now),))
        return
    admitted = claim(connection, terms, delivery)
    if admitted.admission is Admission.NEW:
        finish(connection, terms, delivery.key, outcome, now)
    elif done:
        end_runs(connection, terms, (RunEnd(delivery.key, now, delivery.received_at),))


_COUNT_ENDS = """
UPDATE open SET attempts = attempts + :ends, process_ends = process_ends + :ends
WHERE sequence = :sequence AND process_ends < :ends RETURNING sequence
"""


def count_ends(connection: apsw.Connection, key: str, ends: int, begun: float, now: float) -> int:
    """Count runs during which a process ended before the store knew of them; return how many.

    They are counted once: a second call changes nothing.
    """
    bindings = {"sequence": _open_row_of(connection, key), "ends": ends}
    counted = connection.execute(_COUNT_ENDS, bindings).fetchall()
    for (sequence,) in counted:
        told = (PROCESS_ENDED, None, None)
        connection.execute(_INSERT_ATTEMPT, (sequence, ends, begun, max(begun, now), *told))
    return ends if counted else 0


def finish(
    connection: apsw.Connection, terms: LeaseTerms, key: str, outcome: Outcome, now: float
) -> None:
    """Record the outcome of a run of ours; do nothing if its lease is not ours any more."""
    if isinstance(outcome, Done):
        if outcome.answer is not None:
            _keep_answer(connection, terms, key, outcome.answer, now)
        end_runs(connection, terms, (RunEnd(key, now),))
        return
    place = _place_of(connection, key)
    arrivals.forget(key)
    if place is None or (place.is_fresh and place.lease_owner != terms.owner):
        return
    ours = (place.sequence, terms.owner)
    if place.is_fresh:
        arrivals.settle_one(connection, place.sequence)
    match outcome:
        case Retry(at):
            retrying = (DeliveryState.RETRYING, at is not None, at, now, None, outcome.error)
            _fail(connection, (*retrying, *ours), outcome, now)
        case Dead():
            dead = (DeliveryState.DEAD, False, None, None, now, outcome.error)
            _fail(connection, (*dead, *ours), outcome, now)
        case Released():
            connection.execute(_CUT_SHORT, ours)
        case Postponed(at, reason):
            connection.execute(_PUT_OFF, (at, now, reason, *ours))
        case Parked(reason):
            connection.execute(_SET_ASIDE, (reason, *ours))


_RUNNING = f"SELECT attempts, started_at FROM open WHERE {_OURS}"


def _keep_answer(
    connection: apsw.Connection, terms: LeaseTerms, key: str, answer: str, now: float
) -> None:
    """Record the run of a forwarded event that ended well, with what was answered."""
    place = _place_of(connection, key)
    if place is None or (place.is_fresh and place.lease_owner != terms.owner):
        return
    row: Any = (1, place.started_at)
    if not place.is_fresh:
        row = connection.execute(_RUNNING, (place.sequence, terms.owner)).fetchone()
    if row is not None:
        attempts, begun = row
        told = ("", answer, None)
        connection.execute(
            _INSERT_ATTEMPT, (place.sequence, max(attempts, 1), begun or now, now, *told)
        )


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
    told = (outcome.error, outcome.answer or outcome.place, outcome.traceback)
    for sequence, attempts, started_at in failed:
        begun = now if started_at is None else started_at
        # A body that cannot be decoded is dead without a run; it is recorded as the first attempt.
        connection.execute(_INSERT_ATTEMPT, (sequence, max(attempts, 1), begun, now, *told))


def replay(connection: apsw.Connection, keys: Sequence[str]) -> Sequence[str]:
    """Put dead, parked and waiting deliveries back; return the keys that were."""
    put_back = []
    for key in keys:
        connection.execute(_REPLAY, (arrivals.sequence_of(connection, key),))
        if connection.changes():
            put_back.append(key)
    return put_back


def repeat(connection: apsw.Connection, keys: Sequence[str]) -> Sequence[str]:
    """Put done deliveries back, each as its next generation; return the keys that were."""
    put_back = []
    for key in keys:
        sequence = arrivals.sequence_of(connection, key)
        connection.execute(_REPEAT, (sequence,))
        if connection.changes():
            connection.execute("DELETE FROM outcome WHERE sequence = ?", (sequence,))
            put_back.append(key)
    return put_back


# -- retention ---------------------------------------------------------------------------------

_STILL_OLD = {
    DeliveryState.DONE: "SELECT 1 FROM inbox WHERE sequence = ? AND state = 'done' "
    "AND finished_at < ?",
    DeliveryState.PARKED: "SELECT 1 FROM inbox WHERE sequence = ? AND state = 'parked' "
    "AND received_at < ?",
}


def _still_old(
    connection: apsw.Connection, sequences: Iterable[int], state: DeliveryState, before: float
) -> list[int]:
    # The sequences were found by a reader: since then the delivery may have been put back.
    query = _STILL_OLD[state]
    return [each for each in sequences if connection.execute(query, (each, before)).fetchone()]


def delete_bodies(
    connection: apsw.Connection, sequences: Sequence[int], state: DeliveryState, before: float
) -> int:
    """Delete the bodies of those ``sequences`` that are still in ``state`` and older; count them.

    A reader found them outside of this transaction, so state and age are checked again: one of them
    may have been replayed meanwhile. Other bodies under their keys are deleted with them.
    """
    deleted = 0
    for sequence in _still_old(connection, sequences, state, before):
        connection.execute("DELETE FROM evidence WHERE sequence = ?", (sequence,))
        connection.execute("DELETE FROM body WHERE sequence = ?", (sequence,))
        deleted += connection.changes()
    return deleted


def delete_deliveries(
    connection: apsw.Connection, sequences: Sequence[int], state: DeliveryState, before: float
) -> int:
    """Delete those ``sequences`` whole that are still in ``state`` and older; count them."""
    arrivals.empty_buckets(connection)
    old = _still_old(connection, sequences, state, before)
    return arrivals.remove(connection, old, keep_hashes=True)


def erase(connection: apsw.Connection, tenant_id: str, sequences: Sequence[int]) -> int:
    """Delete those ``sequences`` whole that are the tenant's, whatever their state; count them.

    The next wipe rewrites the database.
    """
    owned = "SELECT count(*) FROM arrival WHERE sequence = ? AND tenant_id = ?"
    ours = [each for each in sequences if connection.execute(owned, (each, tenant_id)).get]
    if ours:
        arrivals.remove(connection, ours)
        listing.forget_tenant(connection, tenant_id)
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


# -- checkpoints -------------------------------------------------------------------------------

_FORGET_CHECKPOINT = "DELETE FROM checkpoint WHERE name = ?"

_KEEP_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""

_KEEP_FIRST_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING
"""


def write_checkpoint(
    connection: apsw.Connection, name: str, value: str | None, *, once: bool = False
) -> None:
    """Keep ``value`` under ``name``, with ``once`` unless one is kept there; None forgets it."""
    if value is None:
        connection.execute(_FORGET_CHECKPOINT, (name,))
    elif once:
        connection.execute(_KEEP_FIRST_CHECKPOINT, (name, value))
    else:
        connection.execute(_KEEP_CHECKPOINT, (name, value))
