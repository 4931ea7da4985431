"""Deliveries: admission, runs and their outcomes, replay, retention.

A delivery has a row in ``arrival``, from its admission until the retention removes it, and a row in
either ``work`` or ``ended``:

========  ======  =========================================  ===================================
state     table   columns                                    moved on by
========  ======  =========================================  ===================================
received  work    ``queued``; a lease if a process has       a worker's start (:func:`start_all`)
                  claimed it
running   work    a lease, ``started_at``; ``attempts``      its outcome (:func:`finish`), or the
                  counts this run                            end of its lease (``sql/leases.py``)
retrying  work    ``last_error``, ``failed_at``;             a worker's start when it is due; if
                  ``next_attempt_at`` if ``queued``          not ``queued``, a redelivery
dead      work    ``finished_at``, ``last_error``            :func:`replay`; a redelivery, unless
                                                             a process ended in one of its runs
parked    work    ``last_error``: the reason                 :func:`replay`, a redelivery, the
                                                             retention
done      ended   ``finished_at``; no column has the state   the retention, :func:`repeat`
========  ======  =========================================  ===================================

``queued`` decides who runs the delivery next. True: our workers do, so polls find it. False: the
request that brought it runs it (the inline path), or it is dead or parked; if its inline run
failed, the sender's redelivery is its retry. A ``running`` inline delivery whose process ended
becomes queued, because no sender may come again.

Functions of a transaction, described by :class:`Inbox`. A run is named by its :class:`Lease`: an
outcome changes nothing if the lease's token is not the one in the row. Only a ``retrying`` row has
``next_attempt_at``, and only a leased row has ``lease_owner``.

Several processes write at once to PostgreSQL. Each decision by the state of a row, and the change
that follows, are one statement, or the row was locked before.
"""

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ...base.text import storable
from ...records.deliveries import (
    MOST_EVIDENCE,
    Admission,
    Admitted,
    Dead,
    DeliveryState,
    Done,
    Lease,
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
    Readmission,
    existing_state,
    readmit,
)
from . import arrivals
from .dialect import Insert, Row, SqlTransaction, Version
from .schema import NO_LEASE, types_of, unfinished


class Arriving(msgspec.Struct, frozen=True, gc=False):
    """A delivery to be kept; ``token`` is that of its lease, None if it is not leased.

    ``new_in``: in this version of the store surely no row has its key, so that the key need not be
    looked up; None: it may be known.
    """

    delivery: NewDelivery
    token: int | None
    new_in: Version | None = None


#: The answer, and the sequence of a delivery that was stored or put back; with the caller's token,
#: that is its lease. None: the caller may not run it.
Answer = tuple[Admitted, int | None]

#: The answer for a new key.
NEW = Admitted(Admission.NEW)


def lane_of(delivery_ordered: bool, owner: str | None, subject: str | None) -> bytes | None:
    """Return the lane of a delivery, None without one. Deliveries of one lane run in order.

    A digest, because a subject may be longer than an index takes in.
    """
    if not delivery_ordered or subject is None:
        return None
    text = f"{owner or ''}\x1f{subject}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


_tokens = random.Random()  # noqa: S311 - tokens are not secrets
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_tokens.seed)


#: Returns a lease token that no other claim has; adding sequences to it gives further ones.
new_token = partial(_tokens.getrandbits, 61)


# -- admission ---------------------------------------------------------------------------------

_AS_WORK = arrivals.StateTable(
    "work",
    "state",
    "queued",
    "lane",
    "attempts",
    "started_at",
    "last_error",
    "lease_owner",
    "lease_token",
    "lease_until",
)

# An inline run of this owner that is claimed again was never begun, or its end could not be
# recorded: it does not count.
_KNOWN = """
SELECT coalesce(work.state, 'done'), coalesce(work.queued, ended.queued),
    coalesce(work.attempts, ended.attempts)
        - CASE WHEN work.state = 'running' AND NOT work.queued AND work.lease_owner = :owner
            THEN 1 ELSE 0 END,
    coalesce(work.finished_at, ended.finished_at),
    CASE WHEN work.lease_owner <> :owner THEN work.lease_until END,
    coalesce(work.process_ends, ended.process_ends),
    coalesce(work.earlier_attempts, ended.earlier_attempts),
    coalesce(work.generation, ended.generation),
    arrival.raw, arrival.tenant_id, arrival.subject, arrival.ordered, clock()
FROM arrival LEFT JOIN work ON work.sequence = arrival.sequence
    LEFT JOIN ended ON ended.sequence = arrival.sequence
WHERE arrival.sequence = :sequence
"""

_LOCK_ARRIVAL = "SELECT 1 FROM arrival WHERE sequence = :sequence FOR NO KEY UPDATE"
_LOCK_WORK = "SELECT 1 FROM work WHERE sequence = :sequence FOR UPDATE"

_READMIT = """
UPDATE work SET state = :state, queued = :queued, attempts = :attempts,
    earlier_attempts = :earlier, lane = :lane, started_at = :started_at,
    lease_owner = CASE WHEN CAST(:token AS bigint) IS NOT NULL THEN CAST(:owner AS text) END,
    lease_token = :token,
    lease_until = CASE WHEN CAST(:token AS bigint) IS NOT NULL THEN clock() + :seconds END,
    next_attempt_at = NULL, finished_at = NULL, ran_alone = false,
    process_ends = CASE WHEN CAST(:restart AS boolean) THEN 0 ELSE process_ends END,
    last_error = CASE WHEN CAST(:reason AS text) IS NOT NULL THEN CAST(:reason AS text)
        WHEN CAST(:restart AS boolean) THEN NULL ELSE last_error END
WHERE sequence = :sequence
"""

_SET_ORDERED = "UPDATE arrival SET ordered = :ordered WHERE sequence = :sequence"

#: The most tries of an admission: the row may change in between.
_TRIES = 10
_CHANGED_TOO_OFTEN = f"the delivery changed in each of {_TRIES} tries"


def _admit_all(
    rules: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    tx: SqlTransaction,
    terms: LeaseTerms,
    arriving: Sequence[Arriving],
    *,
    reason: str | None = None,
) -> list[Answer]:
    """Admit deliveries of different keys: new ones get ``state``, for known ones ``rules`` decide.

    Args:
        rules: those of the verb.
        state: of a delivery that is kept or put back.
        tx: the transaction.
        terms: the owner and the periods.
        arriving: the deliveries.
        reason: why they are parked.
    """
    sequences = _insert_new(tx, terms, arriving, state, reason)
    return [
        _admit_known(tx, terms, each, rules, state, reason) if sequence is None else (NEW, sequence)
        for each, sequence in zip(arriving, sequences, strict=True)
    ]


#: Stores deliveries for our own workers.
accept_all = partial(_admit_all, ACCEPTING, DeliveryState.RECEIVED)

#: Claims deliveries for inline runs.
claim_all = partial(_admit_all, CLAIMING, DeliveryState.RUNNING)

_park_all = partial(_admit_all, PARKING, DeliveryState.PARKED)


def park(
    tx: SqlTransaction, terms: LeaseTerms, delivery: NewDelivery, reason: str | None = None
) -> Admitted:
    """Store ``delivery`` as parked, with the reason."""
    ((admitted, _),) = _park_all(tx, terms, [Arriving(delivery, None)], reason=reason)
    return admitted


def _insert_new(
    tx: SqlTransaction,
    terms: LeaseTerms,
    arriving: Sequence[Arriving],
    state: DeliveryState,
    reason: str | None,
) -> list[int | None]:
    """Add those deliveries that are new, with their rows in ``work``; return their sequences."""
    running = state is DeliveryState.RUNNING
    queued = state is DeliveryState.RECEIVED
    text = state.value
    by_server = tx.dialect.server_clock
    rows = []
    for each in arriving:
        delivery, token = each.delivery, each.token
        since = 0.0 if by_server else delivery.received_at
        rows.append(
            (
                text,
                queued,
                lane_of(True, delivery.owner, delivery.subject) if delivery.ordered else None,
                int(running),
                float(delivery.received_at) if running else None,
                reason,
                None if token is None else terms.owner,
                token,
                None if token is None else since + terms.lease_seconds,
            )
        )
    new = [each.delivery for each in arriving]
    leased = all(each.token is not None for each in arriving)
    sequences = arrivals.add(
        tx, new, _AS_WORK, rows, surely_new=_are_new(tx, arriving), whole_unit=leased
    )
    pairs = zip(arriving, sequences, strict=True)
    if any(sequence is not None and each.token is None for each, sequence in pairs):
        tx.note_change()
    return sequences


def _are_new(tx: SqlTransaction, arriving: "Sequence[Arriving | Ran]") -> bool:
    """Return whether no other process has written since all of these keys were surely new."""
    return tx.version is not None and all(each.new_in == tx.version for each in arriving)


def _admit_known(
    tx: SqlTransaction,
    terms: LeaseTerms,
    arriving: Arriving,
    rules: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    reason: str | None,
) -> Answer:
    """Decide on a delivery whose key is known."""
    delivery = arriving.delivery
    for _ in range(_TRIES):
        if (decided := _decide(tx, terms, delivery, rules)) is not None:
            break
        # It was removed after the insert had found it.
        (added,) = _insert_new(tx, terms, [arriving], state, reason)
        if added is not None:
            return NEW, added
    else:
        raise AssertionError(_CHANGED_TOO_OFTEN)
    sequence, stored, rule = decided
    if rule.change is Change.REPLACE:
        arrivals.remove(tx, [sequence])
        (added,) = _insert_new(tx, terms, [arriving], state, reason)
        return NEW, added
    # After the payload retention there is no body to compare with, and no reason to suspect the
    # sender.
    same_body = stored.raw is None or stored.raw == delivery.raw
    if not same_body:
        _add_evidence(tx, sequence, delivery)
    attempts = stored.known.attempts
    if rule.change is Change.NOTHING:
        return Admitted(rule.admission, attempts, same_body), None
    again = readmit(rule.change, state, attempts=attempts, earlier_attempts=stored.earlier_attempts)
    may_run = rule.change is not Change.QUEUE
    token = arriving.token if may_run else None
    _readmit(tx, terms, delivery, sequence, stored, again, token, reason)
    admitted = Admitted(
        rule.admission, again.attempts, same_body, again.earlier_attempts, stored.generation
    )
    return admitted, sequence if may_run else None


class _Stored(NamedTuple):
    """The record of a known key."""

    known: Known
    earlier_attempts: int
    generation: int
    raw: bytes | None
    tenant_id: str | None
    subject: str | None
    ordered: bool


def _read_stored(terms: LeaseTerms, row: Sequence[Any]) -> _Stored:
    state, queued, attempts, finished_at, until, ends, *others, clock = row
    live_until = terms.live(until, now=clock)
    known = Known(DeliveryState(state), bool(queued), attempts, finished_at, live_until, ends)
    return _Stored(known, *others)


def _decide(
    tx: SqlTransaction,
    terms: LeaseTerms,
    delivery: NewDelivery,
    rules: Mapping[ExistingState, AdmissionRule],
) -> tuple[int, _Stored, AdmissionRule] | None:
    """Return the sequence of a known key, its record and the rule for it; None: it was removed.

    The first decision is made without a lock, because most redeliveries change nothing. If a change
    is needed, it is decided again behind a lock.
    """
    now = delivery.received_at
    locked: int | None = None
    for _ in range(_TRIES):
        sequence = arrivals.find_one(tx, delivery.key) or 0
        row = tx.one(_KNOWN, sequence=sequence, owner=terms.owner, now=now)
        if row is None:
            # A key that is still there was left behind: its delivery ended while its day was being
            # dropped.
            arrivals.remove_key(tx, delivery.key, sequence)
            return None
        stored = _read_stored(terms, row)
        rule = rules[existing_state(stored.known, now=now, dedup_seconds=terms.dedup_seconds)]
        if rule.change is Change.NOTHING or sequence == locked:
            return sequence, stored, rule
        tx.one(_LOCK_ARRIVAL, sequence=sequence)
        tx.one(_LOCK_WORK, sequence=sequence)
        locked = sequence
    raise AssertionError(_CHANGED_TOO_OFTEN)


def _readmit(
    tx: SqlTransaction,
    terms: LeaseTerms,
    delivery: NewDelivery,
    sequence: int,
    stored: _Stored,
    again: Readmission,
    token: int | None,
    reason: str | None,
) -> None:
    """Put a known delivery back to an unfinished state, leased if there is a ``token``."""
    running = again.state is DeliveryState.RUNNING
    tx.run(
        _READMIT,
        sequence=sequence,
        state=again.state.value,
        queued=again.state is DeliveryState.RECEIVED,
        attempts=again.attempts + running,
        earlier=again.earlier_attempts,
        lane=lane_of(delivery.ordered, stored.tenant_id, stored.subject),
        started_at=float(delivery.received_at) if running else None,
        owner=terms.owner,
        token=token,
        seconds=terms.lease_seconds,
        restart=again.restarts,
        reason=reason,
        now=delivery.received_at,
    )
    if bool(stored.ordered) != delivery.ordered:
        tx.run(_SET_ORDERED, sequence=sequence, ordered=delivery.ordered)
    tx.note_change()


# -- other bodies under one key ----------------------------------------------------------------

# A sender decides how many bodies come under one key, so only a few are kept, and equal ones once.
_ADD_EVIDENCE = f"""
INSERT INTO evidence (sequence, digest, received_at, address, raw, tenant_id)
SELECT :sequence, :digest, :received_at, :address, :raw, :tenant_id
FROM (SELECT 1 FROM arrival WHERE sequence = :sequence AND raw IS NOT NULL
    FOR NO KEY UPDATE) AS first
WHERE (SELECT count(*) FROM evidence WHERE sequence = :sequence) < {MOST_EVIDENCE}
ON CONFLICT DO NOTHING
"""

_FIRST_BODY = "SELECT raw FROM arrival WHERE sequence = :sequence AND raw IS NOT NULL"


def keep_other(tx: SqlTransaction, delivery: NewDelivery) -> None:
    """Store the body of ``delivery`` as evidence, if its key has a different body."""
    sequence = arrivals.find_one(tx, delivery.key) or 0
    row = tx.one(_FIRST_BODY, sequence=sequence)
    if row is not None and row[0] != delivery.raw:
        _add_evidence(tx, sequence, delivery)


def _add_evidence(tx: SqlTransaction, sequence: int, delivery: NewDelivery) -> None:
    tx.run(
        _ADD_EVIDENCE,
        sequence=sequence,
        digest=hashlib.sha256(delivery.raw).digest(),
        received_at=float(delivery.received_at),
        address=delivery.address,
        raw=delivery.raw,
        tenant_id=delivery.tenant_id,
    )


# -- runs and their outcomes -------------------------------------------------------------------

# A repeated start, whose first commit is unknown, counts once. A start that comes again with an
# outcome which is already recorded changes nothing: that outcome has ended the lease.
_START_RUN = f"""
UPDATE work SET attempts = attempts + CASE WHEN state = 'running' THEN 0 ELSE 1 END,
    state = 'running', started_at = :now, ran_alone = :alone, next_attempt_at = NULL,
    lease_until = clock() + :seconds
WHERE sequence = :sequence AND lease_token = :token AND {unfinished()}
RETURNING sequence
"""


class RunStart(msgspec.Struct, frozen=True, gc=False):
    """The start of a run: its delivery, the lease's token, the time, and whether it is alone."""

    sequence: int
    token: int
    now: float
    alone: bool = False


def start_all(tx: SqlTransaction, terms: LeaseTerms, starts: Sequence[RunStart]) -> list[bool]:
    """Start runs, one more attempt each. False: no change, we do not hold the lease."""
    values: list[dict[str, Any]] = [
        {
            "sequence": each.sequence,
            "token": each.token,
            "now": each.now,
            "alone": each.alone,
            "seconds": terms.lease_seconds,
        }
        for each in starts
    ]
    if len(values) == 1:
        return [bool(tx.run_whole_unit(_START_RUN, **values[0]))]
    return [row is not None for row in tx.each(_START_RUN, values)]


class RunEnd(msgspec.Struct, frozen=True, gc=False):
    """The success of a run: its lease, its end, and its start if that may be unrecorded."""

    sequence: int
    token: int
    finished_at: float
    begun: float | None = None


_ADD_ENDED = Insert("ended", types_of("ended"))

_ENDED = ", ".join(_ADD_ENDED.columns)

# The values of these columns, from a row of `work` with the run's end (`now`), its start (`begun`)
# and the number of its starts that are not counted yet (`uncounted`). Without a failed run, the
# last error is the reason why the delivery had waited, such as a paused route, and that is over.
_AS_ENDED = """
    sequence, queued, attempts + uncounted, earlier_attempts, process_ends, ran_alone, generation,
    CASE WHEN uncounted = 1 THEN begun ELSE started_at END, now,
    CASE WHEN attempts + uncounted > 1 THEN last_error END
"""
_UNCOUNTED = "CASE WHEN begun IS NULL OR state = 'running' THEN 0 ELSE 1 END"

# On SQLite, a lone run ends by these two. They need half of the instructions of the statements for
# many runs, for which SQLite makes three temporary tables: one for each list and for RETURNING.
_END_ONE = f"""
INSERT INTO ended ({_ENDED}) SELECT {_AS_ENDED} FROM (
    SELECT *, {_UNCOUNTED} AS uncounted FROM (
        SELECT work.*, :now AS now, :begun AS begun FROM work
        WHERE sequence = :sequence AND lease_token = :token AND {unfinished()}))
"""
_TAKE_OUT_ONE = "DELETE FROM work WHERE sequence = :sequence"

# A run that has lost its lease changes nothing. Tokens are unique, so the two lists need not be
# compared as pairs.
_TAKE_OUT = f"""
DELETE FROM work
WHERE sequence IN ints(:sequences) AND lease_token IN ints(:tokens) AND {unfinished()}
RETURNING sequence, state, queued, attempts, earlier_attempts, process_ends, ran_alone,
    generation, started_at, last_error
"""

# On PostgreSQL, this and the insert are one statement.
_END = f"""
WITH given AS (
    SELECT * FROM unnest(CAST(:sequences AS bigint[]), CAST(:tokens AS bigint[]),
        CAST(:times AS float8[]), CAST(:begun AS float8[])) AS run (sequence, token, now, begun)
), taken AS (
    DELETE FROM work USING given
    WHERE work.sequence = given.sequence AND lease_token = given.token AND {unfinished()}
    RETURNING work.*, now, begun, {_UNCOUNTED} AS uncounted
), added AS (
    INSERT INTO ended ({_ENDED}) SELECT {_AS_ENDED} FROM taken
), note_change(taken, 1)
SELECT sequence FROM taken
"""

_AS_DONE = arrivals.StateTable("ended", "queued", "attempts", "started_at", "finished_at")


def end_all(tx: SqlTransaction, runs: Sequence[RunEnd]) -> list[bool]:
    """Record successful runs. False: no change, we do not hold the lease."""
    if not tx.dialect.is_sqlite:
        ended = {row[0] for row in tx.run_whole_unit(_END, **_columns_of(runs))}
        if ended:
            tx.note_change(done=len(ended))
        return [run.sequence in ended for run in runs]
    if len(runs) == 1:
        return [_end_one(tx, runs[0])]
    ends = {run.sequence: run for run in runs}
    taken_out = tx.all(_TAKE_OUT, sequences=list(ends), tokens=[run.token for run in runs])
    rows = []
    for sequence, state, queued, attempts, earlier, process_ends, alone, *rest in taken_out:
        generation, started_at, error = rest
        run = ends.pop(sequence)
        if run.begun is not None and state != "running":
            attempts, started_at = attempts + 1, run.begun
        error = error if attempts > 1 else None  # as in _AS_ENDED
        rows.append(
            (
                sequence,
                queued,
                attempts,
                earlier,
                process_ends,
                alone,
                generation,
                started_at,
                run.finished_at,
                error,
            )
        )
    if rows:
        tx.insert(_ADD_ENDED, rows)
        tx.note_change(done=len(rows))
    return [run.sequence not in ends for run in runs]


def _end_one(tx: SqlTransaction, run: RunEnd) -> bool:
    is_ours = tx.run(
        _END_ONE, sequence=run.sequence, token=run.token, now=run.finished_at, begun=run.begun
    )
    if is_ours:
        tx.run(_TAKE_OUT_ONE, sequence=run.sequence)
        tx.note_change(done=1)
    return bool(is_ours)


def _columns_of(runs: Sequence[RunEnd]) -> dict[str, list[Any]]:
    return {
        "sequences": [run.sequence for run in runs],
        "tokens": [run.token for run in runs],
        "times": [run.finished_at for run in runs],
        "begun": [run.begun for run in runs],
    }


class Ran(msgspec.Struct, frozen=True, gc=False):
    """The successful first inline run of a delivery; ``new_in`` as in :class:`Arriving`."""

    delivery: NewDelivery
    token: int
    finished_at: float
    new_in: Version | None = None


def add_done(tx: SqlTransaction, terms: LeaseTerms, runs: Sequence[Ran]) -> list[bool]:
    """Record deliveries of different keys together with their inline runs; False: no change.

    If a key is known after all, because another process has just stored it, the run ends that
    record, unless another owner holds its lease.
    """
    new = [run.delivery for run in runs]
    rows = [(False, 1, float(run.delivery.received_at), run.finished_at) for run in runs]
    sequences = arrivals.add(tx, new, _AS_DONE, rows, surely_new=_are_new(tx, runs))
    if added := sum(sequence is not None for sequence in sequences):
        tx.note_change(done=added)
    return [
        sequence is not None
        or record_run(tx, terms, run.delivery, run.token, Done(), run.finished_at)
        for run, sequence in zip(runs, sequences, strict=True)
    ]


# Take the lease of a waiting delivery, or an expired one, so that the run can end it.
_ADOPT = f"""
UPDATE work SET state = 'received', lease_owner = :owner, lease_token = :token
WHERE sequence = :sequence AND {unfinished()}
    AND (lease_owner IS NULL OR lease_owner = :owner OR lease_until <= clock())
"""


def record_run(
    tx: SqlTransaction,
    terms: LeaseTerms,
    delivery: NewDelivery,
    token: int,
    outcome: Outcome,
    now: float,
) -> bool:
    """Record the claim and the outcome of an inline run in one transaction.

    False: the outcome was not recorded, because the key is known. A parked delivery was put back.
    """
    ((admitted, sequence),) = claim_all(tx, terms, [Arriving(delivery, token)])
    if admitted.admission is Admission.NEW and sequence is not None:
        return finish(tx, Lease(delivery.key, token, sequence), outcome, now)
    known = arrivals.find_one(tx, delivery.key) if isinstance(outcome, Done) else None
    if known is None:
        return False
    tx.run(_ADOPT, sequence=known, token=token, owner=terms.owner, now=now)
    return end_all(tx, [RunEnd(known, token, now, delivery.received_at)]) == [True]


_HAS_LEASE = f"sequence = :sequence AND lease_token = :token AND {unfinished()}"

_FAIL = f"""
UPDATE work SET state = :state, queued = :queued, next_attempt_at = due(:at),
    failed_at = CASE WHEN CAST(:finished_at AS float8) IS NULL THEN clock() END,
    finished_at = :finished_at, last_error = :error, held_group = NULL,
    {NO_LEASE}
WHERE {_HAS_LEASE} RETURNING attempts, started_at
"""

_RELEASE_RUN = f"""
UPDATE work SET attempts = attempts - CASE WHEN state = 'running' THEN 1 ELSE 0 END,
    state = 'received', started_at = NULL, next_attempt_at = NULL,
    {NO_LEASE}
WHERE {_HAS_LEASE}
"""

_POSTPONE = f"""
UPDATE work SET attempts = attempts - CASE WHEN state = 'running' THEN 1 ELSE 0 END,
    state = 'retrying', queued = true, started_at = NULL, next_attempt_at = due(:at),
    failed_at = clock(), last_error = :reason, held_group = NULL,
    {NO_LEASE}
WHERE {_HAS_LEASE}
"""

_PARK = f"""
UPDATE work SET state = 'parked', queued = false, next_attempt_at = NULL, held_group = NULL,
    last_error = coalesce(:reason, last_error),
    {NO_LEASE}
WHERE {_HAS_LEASE}
"""

_JOIN = f"UPDATE work SET ran_alone = false WHERE {_HAS_LEASE}"

_RUN_OF = f"SELECT attempts, started_at FROM work WHERE {_HAS_LEASE} FOR UPDATE"

_ADD_ATTEMPT = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error, place, traceback)
VALUES (:sequence, :number, :started_at, :finished_at, :error, :place, :traceback)
"""


def join(tx: SqlTransaction, lease: Lease) -> bool:
    """Note that a run is now concurrent with others; False: no change, its lease is stale."""
    return tx.run(_JOIN, sequence=lease.sequence, token=lease.token) > 0


_NOTE_REASON = "UPDATE ended SET last_error = :reason WHERE sequence = :sequence"


def note_reason(tx: SqlTransaction, sequence: int, reason: str) -> None:
    """Store why a delivery is done without being handled."""
    tx.run(_NOTE_REASON, sequence=sequence, reason=reason)


def finish(tx: SqlTransaction, lease: Lease, outcome: Outcome, now: float) -> bool:
    """Record the outcome of a run; False: no change, its lease is stale."""
    ours = {"sequence": lease.sequence, "token": lease.token, "now": now}
    sequence = lease.sequence
    match outcome:
        case Done(answer, reason):
            if answer is not None:
                _add_attempt(tx, sequence, tx.one(_RUN_OF, **ours), now, "", answer)
            (is_ended,) = end_all(tx, [RunEnd(sequence, lease.token, now)])
            if reason is not None and is_ended:
                note_reason(tx, sequence, reason)
            return is_ended
        case Retry(at, error):
            queued = at is not None
            failed = {"state": "retrying", "queued": queued, "at": at, "finished_at": None}
            run = tx.one(_FAIL, **ours, **failed, error=error)
            is_ended = run is not None
            place = outcome.answer or outcome.place
            _add_attempt(tx, sequence, run, now, error, place, outcome.traceback)
        case Dead(error):
            failed = {"state": "dead", "queued": False, "at": None, "finished_at": now}
            run = tx.one(_FAIL, **ours, **failed, error=error)
            is_ended = run is not None
            # If its last failed run was the end of a process, recovery has recorded it; a second
            # record would count it twice.
            if not outcome.recorded:
                place = outcome.answer or outcome.place
                _add_attempt(tx, sequence, run, now, error, place, outcome.traceback)
        case Released():
            is_ended = tx.run(_RELEASE_RUN, **ours) > 0
        case Postponed(at, reason):
            is_ended = tx.run(_POSTPONE, **ours, at=at, reason=reason) > 0
        case Parked(reason):
            is_ended = tx.run(_PARK, **ours, reason=reason) > 0
    if is_ended:
        tx.note_change()
    return is_ended


def _add_attempt(
    tx: SqlTransaction,
    sequence: int,
    run: Row | None,
    now: float,
    error: str,
    place: str | None = None,
    traceback: str | None = None,
) -> None:
    """Record a run, by its number and its start; None: there was none under the lease."""
    if run is None:
        return
    attempts, started_at = run
    tx.run(
        _ADD_ATTEMPT,
        sequence=sequence,
        # A body that cannot be decoded is dead without a run; this is recorded as the first
        # attempt.
        number=max(attempts, 1),
        started_at=now if started_at is None else started_at,
        finished_at=now,
        error=error,
        place=place,
        traceback=traceback,
    )


_COUNT_ENDS = """
UPDATE work SET attempts = attempts + :ends, process_ends = process_ends + :ends
WHERE sequence = :sequence AND process_ends < :ends
    AND (state <> 'running' OR lease_token = :token)
RETURNING sequence
"""


def count_ends(
    tx: SqlTransaction,
    sequence: int,
    token: int | None,
    ends: int,
    begun: float,
    now: float,
    error: str,
) -> int:
    """Count runs during which a process ended before the store knew of them; return how many.

    They are counted once: a second call changes nothing. Nor are they counted while another run
    than that of the lease ``token`` is in progress, whose number they would change.
    """
    if tx.one(_COUNT_ENDS, sequence=sequence, token=token, ends=ends) is None:
        return 0
    _add_attempt(tx, sequence, (ends, begun), max(begun, now), error)
    return ends


# -- putting back --------------------------------------------------------------------------------

# A delivery under another process's lease is not put back, nor one whose body the retention has
# removed: it could not be run.
_REPLAY = """
UPDATE work SET state = 'received', queued = true,
    earlier_attempts = earlier_attempts + attempts, attempts = 0, process_ends = 0,
    ran_alone = false, next_attempt_at = NULL, started_at = NULL, finished_at = NULL,
    last_error = NULL
WHERE sequence IN ints(:sequences) AND state IN ('dead', 'parked', 'retrying')
    AND lease_owner IS NULL
    AND EXISTS (SELECT 1 FROM arrival WHERE arrival.sequence = work.sequence AND raw IS NOT NULL)
RETURNING sequence
"""

# Locked first, because a delivery that is being removed must not come back.
_LOCK_ARRIVALS = """
SELECT sequence FROM arrival WHERE sequence IN ints(:sequences) ORDER BY sequence
FOR NO KEY UPDATE
"""

_LOCK_ENDED = "SELECT sequence FROM ended WHERE sequence IN ints(:sequences) FOR UPDATE"

_REPEAT = """
DELETE FROM ended WHERE sequence IN ints(:sequences)
    AND EXISTS (SELECT 1 FROM arrival WHERE arrival.sequence = ended.sequence AND raw IS NOT NULL)
RETURNING sequence, attempts, earlier_attempts, generation
"""

_LANES_OF = """
SELECT sequence, tenant_id, subject FROM arrival WHERE ordered AND sequence IN ints(:sequences)
"""

_REPEATED = ("sequence", "state", "queued", "lane", "attempts", "earlier_attempts", "generation")
_ADD_REPEATED = Insert("work", types_of("work", *_REPEATED))


def replay(tx: SqlTransaction, keys: Sequence[str]) -> list[str]:
    """Put dead, parked and retrying deliveries back; return their keys, each once."""
    keys = storable([*dict.fromkeys(keys)])
    sequences = arrivals.find(tx, keys)
    found = {sequence for (sequence,) in tx.all(_REPLAY, sequences=list(sequences.values()))}
    tx.note_change()
    return [key for key in keys if sequences.get(key) in found]


def repeat(tx: SqlTransaction, keys: Sequence[str]) -> list[str]:
    """Put done deliveries back, each as its next generation; return their keys."""
    keys = storable([*dict.fromkeys(keys)])
    sequences = arrivals.find(tx, keys)
    locked = [row[0] for row in tx.all(_LOCK_ARRIVALS, sequences=list(sequences.values()))]
    locked = [row[0] for row in tx.all(_LOCK_ENDED, sequences=locked)]
    # Again, behind the locks: the retention removes the keys of a day before its rows.
    sequences = arrivals.find(tx, keys)
    gone = tx.all(_REPEAT, sequences=list(set(locked).intersection(sequences.values())))
    numbers = [row[0] for row in gone]
    lanes = {
        sequence: lane_of(True, tenant_id, subject)
        for sequence, tenant_id, subject in tx.all(_LANES_OF, sequences=numbers)
    }
    rows = [
        (sequence, "received", True, lanes.get(sequence), 0, earlier + attempts, generation + 1)
        for sequence, attempts, earlier, generation in gone
    ]
    if rows:
        tx.insert(_ADD_REPEATED, rows)
        tx.note_change(done=-len(rows))
    return [key for key in keys if sequences.get(key) in set(numbers)]


# -- retention ---------------------------------------------------------------------------------

# Like redelivery and replay, the retention locks the row of `arrival` before any other. It skips
# rows that they have locked: those are no longer old, or the next pass finds them.
_LOCK_FREE_ARRIVALS = """
SELECT sequence FROM arrival WHERE sequence IN ints(:sequences) ORDER BY sequence
FOR UPDATE SKIP LOCKED
"""

_STILL_DONE = """
SELECT sequence FROM ended WHERE sequence IN ints(:sequences) AND finished_at < :before
FOR UPDATE SKIP LOCKED
"""

_STILL_PARKED = """
SELECT sequence FROM work WHERE sequence IN ints(:sequences) AND state = 'parked'
FOR UPDATE SKIP LOCKED
"""

_DROP_BODIES = """
UPDATE arrival SET raw = NULL WHERE sequence IN ints(:sequences) AND raw IS NOT NULL
"""


def delete_bodies(tx: SqlTransaction, sequences: Sequence[int], before: float) -> int:
    """Delete the bodies of deliveries that are still done and ended before that time; count them.

    A reader found them outside of this transaction, so some may have been put back meanwhile. Their
    evidence is deleted, too.
    """
    old = _lock_old(tx, sequences, _STILL_DONE, before=before)
    dropped = tx.run(_DROP_BODIES, sequences=old)
    tx.run("DELETE FROM evidence WHERE sequence IN ints(:sequences)", sequences=old)
    return dropped


def delete_done(tx: SqlTransaction, sequences: Sequence[int], before: float) -> int:
    """Delete deliveries that are still done and ended before that time; count them."""
    return arrivals.remove(tx, _lock_old(tx, sequences, _STILL_DONE, before=before))


def delete_parked(tx: SqlTransaction, sequences: Sequence[int], before: float) -> int:
    """Delete deliveries that are still parked; count them. The reader has checked ``before``."""
    return arrivals.remove(tx, _lock_old(tx, sequences, _STILL_PARKED))


def _lock_old(tx: SqlTransaction, sequences: Sequence[int], still: str, **values: Any) -> list[int]:
    numbers = list(sequences)
    if not tx.dialect.is_sqlite:
        numbers = [row[0] for row in tx.all(_LOCK_FREE_ARRIVALS, sequences=numbers)]
    # A separate statement: it sees changes that were committed before the locks were taken.
    return [row[0] for row in tx.all(still, sequences=numbers, **values)]


_STILL_OWNED = """
SELECT sequence FROM arrival WHERE sequence IN ints(:sequences) AND tenant_id = :tenant_id
ORDER BY sequence FOR UPDATE
"""

_EVIDENCE_OF = """
DELETE FROM evidence WHERE id IN (SELECT id FROM evidence WHERE tenant_id = :tenant_id LIMIT :limit)
"""


def erase(tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
    """Delete those deliveries that are the tenant's, in any state; count them."""
    rows = tx.all(_STILL_OWNED, sequences=list(sequences), tenant_id=tenant_id)
    return arrivals.remove(tx, [sequence for (sequence,) in rows])


def erase_evidence(tx: SqlTransaction, tenant_id: str, limit: int) -> int:
    """Delete up to ``limit`` of the tenant's bodies under keys of other deliveries; count them."""
    return tx.run(_EVIDENCE_OF, tenant_id=tenant_id, limit=limit)


# -- checkpoints -------------------------------------------------------------------------------

_SET_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""

_SET_FIRST_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (:name, :value) ON CONFLICT (name) DO NOTHING
"""

_FORGET_CHECKPOINT = "DELETE FROM checkpoint WHERE name = :name"

# Not LIKE: an id may have characters that it gives a meaning to.
_ERASE_CHECKPOINTS = """
DELETE FROM checkpoint WHERE substr(name, length(name) - length(:tenant_id)) = '.' || :tenant_id
"""


def write_checkpoint(
    tx: SqlTransaction, name: str, value: str | None, *, once: bool = False
) -> None:
    """Store ``value`` under ``name``, with ``once`` only if there is none; None removes it."""
    if value is None:
        tx.run(_FORGET_CHECKPOINT, name=name)
    else:
        tx.run(_SET_FIRST_CHECKPOINT if once else _SET_CHECKPOINT, name=name, value=value)


def erase_checkpoints(tx: SqlTransaction, tenant_id: str) -> None:
    """Delete the tenant's checkpoints, whose names end in a dot and its id."""
    tx.run(_ERASE_CHECKPOINTS, tenant_id=tenant_id)
