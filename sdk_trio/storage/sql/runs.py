"""Runs: their start, and the outcomes by which they end.

A run is named by its :class:`.Lease`: nothing is changed if the token of the lease is not that of
the row. Only a ``retrying`` row has ``next_attempt_at``, and only a leased row has ``lease_owner``.
``sql/admission.py`` describes the states.

Functions of a transaction, described by :class:`Inbox`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...records.deliveries import (
    Admission,
    Dead,
    Done,
    Lease,
    NewDelivery,
    Outcome,
    Parked,
    Postponed,
    Released,
    Retry,
)
from ..admission import LeaseTerms
from . import arrivals
from .admission import Arriving, are_all_new, claim_all
from .dialect import Insert, Row, SqlTransaction, Version
from .schema import NO_LEASE, types_of, unfinished

# -- start ---------------------------------------------------------------------------------------

_HAS_LEASE = f"sequence = :sequence AND lease_token = :token AND {unfinished()}"

# A repeated start, whose first commit is unknown, counts once. A start that comes again with an
# outcome which is already recorded changes nothing: that outcome has ended the lease.
_START_RUN = f"""
UPDATE work SET attempts = attempts + CASE WHEN state = 'running' THEN 0 ELSE 1 END,
    state = 'running', started_at = :now, ran_alone = :alone, next_attempt_at = NULL,
    lease_until = clock() + :seconds
WHERE {_HAS_LEASE}
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


_JOIN = f"UPDATE work SET ran_alone = false WHERE {_HAS_LEASE}"


def join(tx: SqlTransaction, lease: Lease) -> bool:
    """Note that a run is now concurrent with others; False: no change, its lease is stale."""
    return tx.run(_JOIN, sequence=lease.sequence, token=lease.token) > 0


# -- success --------------------------------------------------------------------------------------


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
        WHERE {_HAS_LEASE}))
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
    for sequence, state, queued, attempts, *others, started_at, error in taken_out:
        run = ends.pop(sequence)
        if run.begun is not None and state != "running":
            attempts, started_at = attempts + 1, run.begun
        error = error if attempts > 1 else None  # as in _AS_ENDED
        rows.append((sequence, queued, attempts, *others, started_at, run.finished_at, error))
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


_AS_DONE = arrivals.StateTable("ended", "queued", "attempts", "started_at", "finished_at")


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
    sequences = arrivals.add(tx, new, _AS_DONE, rows, all_new=are_all_new(tx, runs))
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


# -- any outcome ----------------------------------------------------------------------------------

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

_RUN_OF = f"SELECT attempts, started_at FROM work WHERE {_HAS_LEASE} FOR UPDATE"

_ADD_ATTEMPT = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error, place, traceback)
VALUES (:sequence, :number, :started_at, :finished_at, :error, :place, :traceback)
"""


_NOTE_REASON = "UPDATE ended SET last_error = :reason WHERE sequence = :sequence"


def note_reason(tx: SqlTransaction, sequence: int, reason: str) -> None:
    """Store why a delivery is done without being handled."""
    tx.run(_NOTE_REASON, sequence=sequence, reason=reason)


def finish(tx: SqlTransaction, lease: Lease, outcome: Outcome, now: float) -> bool:
    """Record the outcome of a run; False: no change, its lease is stale.

    Not for a grouped unit, which may be a whole unit: a reason is noted after ``end_all``.
    """
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
