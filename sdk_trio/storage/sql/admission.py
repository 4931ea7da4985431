"""Admission: what becomes of a delivery that arrives, and of one that is put back.

A delivery has a row in ``arrival``, from its admission until the retention removes it, and a row in
either ``work`` or ``ended``:

========  ======  =========================================  ===================================
state     table   columns                                    moved on by
========  ======  =========================================  ===================================
received  work    a lease if a process has claimed it; not   a worker's start
                  ``queued`` after a released inline run     (:func:`.runs.start_all`); if not
                                                             ``queued``, a redelivery
running   work    a lease, ``started_at``; ``attempts``      its outcome (:func:`.runs.finish`), or
                  counts this run                            the end of its lease (``leases``)
retrying  work    ``last_error``, ``failed_at``;             a worker's start when it is due; if
                  ``next_attempt_at`` if ``queued``          not ``queued``, a redelivery;
                                                             :func:`replay`
dead      work    ``finished_at``, ``last_error``            :func:`replay`; a redelivery, unless
                                                             a process ended in one of its runs
parked    work    ``last_error``: the reason                 :func:`replay`, a redelivery, the
                                                             retention
done      ended   ``finished_at``; no column has the state   the retention, :func:`repeat`; a
                                                             redelivery after the key's retention
========  ======  =========================================  ===================================

``queued`` decides who runs the delivery next. True: our workers do, so polls find it. False: the
request that brought it runs it (the inline path), or it is dead or parked. If its inline run failed
or was released, the sender's redelivery runs it next. A ``running`` inline delivery whose process
ended becomes queued, because no sender may come again.

A delivery arrives with the token of a lease, if it may run at once (:class:`Arriving`). It gets an
:data:`Answer`, whose second part is the sequence if it may:

===============================================  =========================  ======================
the record of its key                            answer                     may run
===============================================  =========================  ======================
none; done longer ago than keys are remembered   ``NEW``                    if it has a token
failed inline, dead or parked: it is put back    ``NEW``, and the attempts  if it has a token
                                                 that count
parked, and this is a claim: it is put back      ``QUEUED``                 no: our workers run it
any other: nothing is changed                    ``QUEUED``, ``RUNNING``,   no
                                                 ``DONE``
===============================================  =========================  ======================

``storage.admission`` has the rules for known keys, for accepting, claiming and parking.
``SqlInbox._admit`` makes the :class:`.Lease` from the token and the sequence.

Functions of a transaction, described by :class:`Inbox`. Several processes write at once to
PostgreSQL. Each decision by the state of a row, and the change that follows, are one statement, or
the row was locked before.
"""

import hashlib
import math
import os
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from ...base import clock
from ...base.text import storable
from ...records.deliveries import (
    MOST_EVIDENCE,
    Admission,
    Admitted,
    DeliveryState,
    NewDelivery,
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
from .dialect import Insert, SqlTransaction, Version
from .schema import types_of


class Arriving(msgspec.Struct, frozen=True, gc=False):
    """A delivery to be kept; ``token`` is that of its lease, None if it is not leased.

    ``new_in``: in this version of the store surely no row has its key, so that the key need not be
    looked up; None: it may be known. ``take_expired_until``: as for :meth:`Inbox.claim_due`.
    """

    delivery: NewDelivery
    token: int | None
    new_in: Version | None = None
    take_expired_until: float = math.inf


def may_take_expired(tx: SqlTransaction, until: float) -> bool:
    """Return whether expired leases of others may be taken over, which the caller allows ``until``
    then; by the server's clock they may always."""
    return tx.dialect.server_clock or clock.monotonic() <= until


#: The answer, and the sequence of the delivery: with the token that it came with, its lease. None:
#: the caller may not run it.
Answer = tuple[Admitted, int | None]

#: The answer for a new key.
NEW = Admitted(Admission.NEW)


_tokens = random.Random()  # noqa: S311 - tokens are not secrets
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_tokens.seed)


#: Returns a lease token that no other claim has; adding sequences to it gives further ones.
new_token = partial(_tokens.getrandbits, 61)


def lane_of(ordered: bool, tenant: str | None, subject: str | None) -> bytes | None:
    """Return the lane of a delivery, None without one. Deliveries of one lane run in order.

    A digest, because a subject may be longer than an index takes in.
    """
    if not ordered or subject is None:
        return None
    text = f"{tenant or ''}\x1f{subject}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


# -- a delivery arrives --------------------------------------------------------------------------


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
    tx: SqlTransaction,
    terms: LeaseTerms,
    delivery: NewDelivery,
    reason: str | None = None,
    *,
    take_expired_until: float = math.inf,
) -> Admitted:
    """Store ``delivery`` as parked, with the reason."""
    arriving = Arriving(delivery, None, take_expired_until=take_expired_until)
    ((admitted, _),) = _park_all(tx, terms, [arriving], reason=reason)
    return admitted


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
                lane_of(True, delivery.tenant_or_signer, delivery.subject)
                if delivery.ordered
                else None,
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
        tx, new, _AS_WORK, rows, all_new=are_all_new(tx, arriving), whole_unit=leased
    )
    pairs = zip(arriving, sequences, strict=True)
    if any(sequence is not None and each.token is None for each, sequence in pairs):
        tx.note_change()
    return sequences


class _HasVersion(Protocol):
    @property
    def new_in(self) -> Version | None: ...


def are_all_new(tx: SqlTransaction, arriving: Sequence[_HasVersion]) -> bool:
    """Return whether all keys were surely new, and no other process has written since."""
    return tx.version is not None and all(each.new_in == tx.version for each in arriving)


# -- its key is known -----------------------------------------------------------------------------

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

#: The most tries of an admission. A row needs two, before and behind its locks. More are needed
#: only if other processes have removed the row, or stored the key again, between two statements.
_TRIES = 10


class _Stored(NamedTuple):
    """The record of a known key."""

    known: Known
    earlier_attempts: int
    generation: int
    raw: bytes | None
    tenant_id: str | None
    subject: str | None
    ordered: bool


def _read_stored(terms: LeaseTerms, row: Sequence[Any], *, take_expired: bool) -> _Stored:
    state, queued, attempts, finished_at, until, ends, *others, clock = row
    live_until = terms.live(until, now=clock) if take_expired else until
    known = Known(DeliveryState(state), bool(queued), attempts, finished_at, live_until, ends)
    return _Stored(known, *others)


def _admit_known(
    tx: SqlTransaction,
    terms: LeaseTerms,
    arriving: Arriving,
    rules: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    reason: str | None,
) -> Answer:
    """Decide on a delivery whose key is known.

    Most redeliveries change nothing, so the first decision is made without a lock. If a change is
    needed, it is decided again behind a lock.
    """
    delivery, now = arriving.delivery, arriving.delivery.received_at
    locked: int | None = None
    for _ in range(_TRIES):
        sequence = arrivals.find_one(tx, delivery.key) or 0
        row = tx.one(_KNOWN, sequence=sequence, owner=terms.owner, now=now)
        if row is None:
            # It was removed after the insert had found it. A key that is still there was left
            # behind: its delivery ended while its day was being dropped.
            arrivals.remove_key(tx, delivery.key, sequence)
            (added,) = _insert_new(tx, terms, [arriving], state, reason)
            if added is not None:
                return NEW, added
            continue
        take_expired = may_take_expired(tx, arriving.take_expired_until)
        stored = _read_stored(terms, row, take_expired=take_expired)
        rule = rules[existing_state(stored.known, now=now, dedup_seconds=terms.dedup_seconds)]
        if rule.change is not Change.NOTHING and sequence != locked:
            tx.one(_LOCK_ARRIVAL, sequence=sequence)
            tx.one(_LOCK_WORK, sequence=sequence)
            locked = sequence
        elif rule.change is Change.REPLACE:
            arrivals.remove(tx, [sequence])
            # `added` is not None: others cannot store the key before this transaction ends.
            (added,) = _insert_new(tx, terms, [arriving], state, reason)
            return NEW, added
        else:
            return _apply_rule(tx, terms, arriving, sequence, stored, rule, state, reason)
    raise AssertionError(f"the delivery changed in each of {_TRIES} tries")


def _apply_rule(
    tx: SqlTransaction,
    terms: LeaseTerms,
    arriving: Arriving,
    sequence: int,
    stored: _Stored,
    rule: AdmissionRule,
    state: DeliveryState,
    reason: str | None,
) -> Answer:
    """Answer a delivery by the record of its key; put that back if the rule does."""
    delivery, attempts = arriving.delivery, stored.known.attempts
    # After the payload retention there is no body to compare with, and no reason to suspect the
    # sender.
    same_body = stored.raw is None or stored.raw == delivery.raw
    if not same_body:
        _add_evidence(tx, sequence, delivery)
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


# -- putting back --------------------------------------------------------------------------------

# A delivery with a lease is about to run, so it is not put back. Nor is one whose body the
# retention has removed: it could not be run.
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
