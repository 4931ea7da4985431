"""Everything that changes the inbox in PostgreSQL: plain functions of a connection.

Each is a job for :class:`GroupCommit`: it runs within a transaction that it neither begins nor
ends. The functions whose names end in ``all`` do many jobs by one statement; a :data:`Group` is one
of them with its first arguments. Called with ``alone`` they run no second statement, so that one
round trip is the whole transaction. :class:`Inbox` describes what each means. Only a ``retrying``
row has ``next_attempt_at``.

Several processes write at once. A statement that decides by the state of a row and changes it is
one statement, or has locked the row before.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import psycopg

from ...records.deliveries import (
    MOST_EVIDENCE,
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
from .connect import StoreConnection
from .schema import UNFINISHED


@attrs.frozen(kw_only=True)
class SharedTerms:
    """The terms of a store that several processes may have open.

    ``server_clock``: leases are told by the database's clock, so that it does not matter how far
    the clocks of the hosts differ; otherwise by the ``now`` of each call. ``shared``: others may be
    alive, so only leases that have expired are taken away.
    """

    lease: LeaseTerms
    server_clock: bool = True
    shared: bool = True

    def values(self, now: float, **more: object) -> dict[str, Any]:
        """Return the parameters of a statement that has to do with leases."""
        return {
            "now": now,
            "server": self.server_clock,
            "owner": self.lease.owner,
            "seconds": self.lease.lease_seconds,
            **more,
        }


def lease_clock(now: str) -> str:
    """Return SQL of the time by which leases are told, where ``now`` is SQL of the caller's."""
    return f"(CASE WHEN %(server)s THEN extract(epoch FROM statement_timestamp()) ELSE {now} END)"


#: SQL of the time by which leases and retries are due.
CLOCK = lease_clock("%(now)s::float8")


def shifted(time: str, origin: str, to: str) -> str:
    """Return SQL of a time that is as far from ``to`` as ``time`` is from ``origin``.

    Hosts plan by their own clocks, and the database's clock says when it is time.
    """
    return f"(CASE WHEN %(server)s THEN {to} + ({time} - {origin}) ELSE {time} END)::float8"


# Deliveries of one subject of one tenant have the same lane, those that need no order have none. A
# digest, because a subject may be longer than an index takes in.
_LANE = """
CASE WHEN {ordered} THEN substring(sha256(convert_to(
    coalesce({tenant_id}, '') || chr(31) || {subject}, 'UTF8')) FOR 16) END
"""


def lane(ordered: str, tenant_id: str, subject: str) -> str:
    """Return SQL of the lane of a delivery, from SQL of its columns."""
    return _LANE.format(ordered=ordered, tenant_id=tenant_id, subject=subject)


#: SQL of a part of a statement that does many jobs: it tells the other nodes that something has
#: changed, and how many deliveries are done, so that no second statement has to.
COUNTED = """
counted AS (
    INSERT INTO node (id, changes, done) SELECT %(node)s, 1, {done} * number
    FROM (SELECT count(*) AS number FROM {rows}) AS changed WHERE number > 0
    ON CONFLICT (id) DO UPDATE SET changes = node.changes + 1, done = node.done + excluded.done,
        seen_at = now()
)
"""

#: The answer to a job that one statement alone could not do.
UNDECIDED = object()

# -- admission ---------------------------------------------------------------------------------

# A delivery that a tenant has signed and that came before signers were kept has a row under its id
# alone, and no second one.
_INSERT_ALL = f"""
WITH brought AS (
    SELECT * FROM unnest(%(keys)s::text[], %(ids)s::text[], %(signers)s::text[], %(types)s::text[],
        %(times)s::float8[], %(signed)s::bigint[], %(subjects)s::text[], %(tenants)s::text[],
        %(raws)b::bytea[], %(ordered)s::boolean[]
    ) WITH ORDINALITY AS each (delivery_key, webhook_id, signer, type, received_at, signed_at,
        subject, tenant_id, raw, ordered, number)
), kept AS (
    INSERT INTO arrival (delivery_key, webhook_id, signer, type, received_at, signed_at, subject,
        tenant_id, raw)
    SELECT delivery_key, webhook_id, signer, type, received_at, signed_at, subject, tenant_id, raw
    FROM brought WHERE NOT (brought.signer <> '' AND EXISTS (
        SELECT 1 FROM arrival AS old WHERE old.delivery_key = brought.webhook_id
            AND old.signer IS NULL AND old.tenant_id = brought.signer))
    ORDER BY number
    ON CONFLICT (delivery_key) DO NOTHING RETURNING sequence, delivery_key
), opened AS (
    INSERT INTO work (sequence, state, queued, ordered, lane, attempts, started_at, lease_owner,
        lease_until)
    SELECT kept.sequence, %(state)s, %(queued)s, brought.ordered,
        {lane("brought.ordered", "brought.tenant_id", "brought.subject")},
        %(running)s::int, CASE WHEN %(running)s = 1 THEN brought.received_at END,
        CASE WHEN %(leased)s THEN %(owner)s END,
        CASE WHEN %(leased)s THEN {lease_clock("brought.received_at")} + %(seconds)s END
    FROM kept JOIN brought USING (delivery_key)
), {COUNTED.format(done=0, rows="kept")}
SELECT delivery_key FROM kept
"""

# An inline run of this owner's that is claimed once more was never begun, or its end could not be
# recorded: it does not count.
_KNOWN = f"""
SELECT sequence, state, queued, attempts
        - (state = 'running' AND NOT queued AND lease_owner IS NOT DISTINCT FROM %(owner)s)::int,
    finished_at,
    CASE WHEN lease_owner <> %(owner)s THEN lease_until END, process_ends, earlier_attempts,
    generation, raw, {CLOCK}::float8
FROM delivery WHERE delivery_key = %(key)s OR (%(signer)s <> '' AND delivery_key = %(id)s
    AND signer IS NULL AND tenant_id = %(signer)s)
ORDER BY delivery_key LIMIT 1
"""

_LOCK = "SELECT 1 FROM arrival WHERE sequence = %s FOR NO KEY UPDATE"
_LOCK_STATE = "SELECT 1 FROM work WHERE sequence = %s FOR UPDATE"

_READMIT = f"""
UPDATE work SET state = %(state)s, queued = %(queued)s, attempts = %(attempts)s,
    earlier_attempts = %(earlier)s, ordered = %(ordered)s,
    lane = {lane("%(ordered)s", "arrival.tenant_id", "arrival.subject")},
    started_at = %(started_at)s,
    lease_owner = CASE WHEN %(leased)s THEN %(owner)s END,
    lease_until = CASE WHEN %(leased)s THEN {CLOCK} + %(seconds)s END,
    next_attempt_at = NULL, finished_at = NULL, ran_alone = false,
    process_ends = CASE WHEN %(restart)s THEN 0 ELSE process_ends END,
    last_error = CASE WHEN %(restart)s THEN NULL ELSE last_error END
FROM arrival WHERE work.sequence = %(sequence)s AND arrival.sequence = %(sequence)s
"""

_SIGN = """
UPDATE arrival SET delivery_key = %(key)s, signer = %(signer)s
WHERE sequence = %(sequence)s AND (delivery_key <> %(key)s OR signer IS DISTINCT FROM %(signer)s)
"""

_SEQUENCE = "SELECT sequence FROM arrival WHERE delivery_key = %(key)s"

_SAY_WHY = f"UPDATE work SET last_error = %(reason)s WHERE sequence = ({_SEQUENCE})"

#: The most times that an admission is decided, as the row may change in between.
_TRIES = 10


def accept_all(
    terms: SharedTerms,
    leased: bool,
    connection: StoreConnection,
    brought: Sequence[NewDelivery],
    alone: bool,
) -> Iterable[Any]:
    """Keep deliveries of different keys for our own workers."""
    received = DeliveryState.RECEIVED
    return _admit_all(connection, terms, brought, ACCEPTING, received, leased, alone=alone)


def claim_all(
    terms: SharedTerms, connection: StoreConnection, brought: Sequence[NewDelivery], alone: bool
) -> Iterable[Any]:
    """Claim deliveries of different keys for inline runs."""
    running = DeliveryState.RUNNING
    return _admit_all(connection, terms, brought, CLAIMING, running, True, alone=alone)


def park(
    connection: StoreConnection, terms: SharedTerms, delivery: NewDelivery, reason: str | None
) -> Admitted:
    """Keep ``delivery`` without running it, and why."""
    parked = DeliveryState.PARKED
    admitted: Admitted
    (admitted,) = _admit_all(connection, terms, [delivery], PARKING, parked, False)
    if admitted.admission is Admission.NEW and reason is not None:
        connection.write(_SAY_WHY, {"reason": reason, "key": delivery.key})
    return admitted


def _admit_all(
    connection: StoreConnection,
    terms: SharedTerms,
    brought: Sequence[NewDelivery],
    rulings: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    leased: bool,
    *,
    alone: bool = False,
) -> Iterable[Any]:
    inserted = _insert_all(connection, terms, brought, state, leased)
    if alone:
        return _tell_new(inserted, brought)
    new = {key for (key,) in inserted}
    return [
        Admitted(Admission.NEW)
        if each.key in new
        else _admit_known(connection, terms, each, rulings, state, leased)
        for each in brought
    ]


def _tell_new(inserted: Iterable[tuple[str]], brought: Sequence[NewDelivery]) -> Iterator[Any]:
    # A generator: among several statements the answers come when all of them have been sent.
    new = {key for (key,) in inserted}
    for each in brought:
        yield Admitted(Admission.NEW) if each.key in new else UNDECIDED


def _insert_all(
    connection: StoreConnection,
    terms: SharedTerms,
    brought: Sequence[NewDelivery],
    state: DeliveryState,
    leased: bool,
) -> psycopg.Cursor[tuple[Any, ...]]:
    """Insert deliveries; answer with the keys of those that were not known."""
    return connection.execute(
        _INSERT_ALL,
        terms.values(
            0.0,
            node=connection.node,
            keys=[each.key for each in brought],
            ids=[each.webhook_id for each in brought],
            signers=[each.signer for each in brought],
            types=[each.type for each in brought],
            times=[float(each.received_at) for each in brought],
            signed=[each.timestamp for each in brought],
            subjects=[each.subject for each in brought],
            tenants=[each.tenant_id for each in brought],
            raws=[each.raw for each in brought],
            ordered=[each.ordered for each in brought],
            state=state,
            queued=state is DeliveryState.RECEIVED,
            running=int(state is DeliveryState.RUNNING),
            leased=leased,
        ),
    )


def _admit_known(
    connection: StoreConnection,
    terms: SharedTerms,
    delivery: NewDelivery,
    rulings: Mapping[ExistingState, AdmissionRule],
    state: DeliveryState,
    leased: bool,
) -> Admitted:
    """Decide on a delivery whose key is known.

    It is decided without a lock first, because most redeliveries change nothing, and once more
    behind a lock if something is to be changed.
    """
    values = terms.values(
        delivery.received_at, key=delivery.key, id=delivery.webhook_id, signer=delivery.signer
    )
    locked: int | None = None
    for _ in range(_TRIES):
        row = connection.execute(_KNOWN, values).fetchone()
        if row is None:
            # It was removed after the insert had met it.
            if _insert_all(connection, terms, [delivery], state, leased).rowcount:
                return Admitted(Admission.NEW)
            continue
        sequence, known_state, queued, attempts, finished_at, until, ends, *put_back, raw, clock = (
            row
        )
        earlier, generation = put_back
        known = Known(
            DeliveryState(known_state),
            queued,
            attempts,
            finished_at,
            terms.lease.live(until, now=clock),
            ends,
        )
        standing = standing_of(
            known, now=delivery.received_at, dedup_seconds=terms.lease.dedup_seconds
        )
        ruling = rulings[standing]
        if ruling.change is Change.NOTHING or sequence == locked:
            break
        connection.execute(_LOCK, (sequence,))
        connection.execute(_LOCK_STATE, (sequence,))
        locked = sequence
    else:
        raise AssertionError("a locked row does not change")
    if ruling.change is Change.REPLACE:
        forget(connection, [sequence])
        _insert_all(connection, terms, [delivery], state, leased)
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
    values.update(
        sequence=sequence,
        state=state,
        queued=state is DeliveryState.RECEIVED,
        attempts=before + running,
        earlier=earlier,
        ordered=delivery.ordered,
        started_at=delivery.received_at if running else None,
        leased=leased,
        restart=restart,
    )
    connection.write(_READMIT, values)
    connection.write(_SIGN, values)
    return Admitted(ruling.admission, before, same_body, earlier, generation)


# -- other bodies under one key ----------------------------------------------------------------

# A sender decides how many bodies come under one key, so no more than a few are kept, and equal
# ones once.
_KEEP_OTHER = f"""
INSERT INTO evidence (sequence, digest, received_at, address, raw, tenant_id)
SELECT %(sequence)s, %(digest)s, %(received_at)s, %(address)s, %(raw)s, %(tenant_id)s
WHERE (SELECT count(*) FROM evidence WHERE sequence = %(sequence)s) < {MOST_EVIDENCE}
ON CONFLICT DO NOTHING
"""

_FIRST_BODY = "SELECT sequence, raw FROM arrival WHERE delivery_key = %s AND raw IS NOT NULL"


def keep_other(connection: StoreConnection, delivery: NewDelivery) -> None:
    """Keep the body of ``delivery`` beside the first one of its key, if it is another one."""
    for sequence, raw in connection.execute(_FIRST_BODY, (delivery.key,)).fetchall():
        if raw != delivery.raw:
            _keep_other(connection, sequence, delivery)


def _keep_other(connection: StoreConnection, sequence: int, delivery: NewDelivery) -> None:
    connection.write(
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

_FREE_FOR_US = f"""
work.{UNFINISHED} AND (work.lease_owner IS NULL OR work.lease_owner = %(owner)s
    OR work.lease_until <= {{clock}})
"""

# A start that is repeated, because nobody knows whether it was committed, counts once.
_IS_OURS_RUNNING = "(work.state = 'running' AND work.lease_owner = %(owner)s)"

_START_ALL = f"""
WITH started AS (
UPDATE work SET state = 'running', attempts = work.attempts
        + CASE WHEN {_IS_OURS_RUNNING} THEN 0 ELSE 1 END, started_at = each.now,
    ran_alone = each.alone, next_attempt_at = NULL, lease_owner = %(owner)s,
    lease_until = {lease_clock("each.now")} + %(seconds)s
FROM unnest(%(keys)s::text[], %(times)s::float8[], %(alone)s::boolean[])
    AS each (delivery_key, now, alone) JOIN arrival USING (delivery_key)
WHERE work.sequence = arrival.sequence AND {_FREE_FOR_US.format(clock=lease_clock("each.now"))}
RETURNING each.delivery_key
), {COUNTED.format(done=0, rows="started")}
SELECT delivery_key FROM started
"""

_STATE = (
    "sequence, queued, ordered, attempts, earlier_attempts, process_ends, ran_alone, started_at, "
    "finished_at, last_error, generation"
)

# Without a failed run, the last error of a delivery that ends well is the reason for which it had
# waited, such as a paused route, and that is over.
_ERROR = "CASE WHEN attempts > {counted} THEN last_error END"

# A run that ended before its start was handed over is one statement instead of two (ADR 11). One
# whose start or whose end may have been committed before (`again`) counts once, and ends nothing
# that is not ours: it may be done and put back by now.
_RUN_ALL = f"""
WITH gone AS (
    DELETE FROM work USING unnest(%(keys)s::text[], %(begun)s::float8[], %(times)s::float8[],
        %(again)s::boolean[])
        AS each (delivery_key, begun, now, again) JOIN arrival USING (delivery_key)
    WHERE work.sequence = arrival.sequence
        AND {_FREE_FOR_US.format(clock=lease_clock("each.begun"))}
        AND (NOT each.again OR work.lease_owner = %(owner)s)
    RETURNING work.*, each.begun, each.now,
        {_IS_OURS_RUNNING}::int AS counted
), {COUNTED.format(done=1, rows="gone")}
INSERT INTO ended ({_STATE})
SELECT sequence, queued, ordered, attempts + 1 - counted, earlier_attempts, process_ends,
    ran_alone, begun, now, {_ERROR.format(counted="counted")}, generation FROM gone
"""

# A run that has lost its lease to another owner changes nothing: the other one's run counts.
_FINISH_ALL = f"""
WITH gone AS (
    DELETE FROM work USING unnest(%(keys)s::text[], %(times)s::float8[])
        AS each (delivery_key, now) JOIN arrival USING (delivery_key)
    WHERE work.sequence = arrival.sequence AND work.lease_owner = %(owner)s AND work.{UNFINISHED}
    RETURNING work.*, each.now
), {COUNTED.format(done=1, rows="gone")}
INSERT INTO ended ({_STATE})
SELECT sequence, queued, ordered, attempts, earlier_attempts, process_ends, ran_alone, started_at,
    now, {_ERROR.format(counted=1)}, generation FROM gone
"""

_OURS = f"sequence = ({_SEQUENCE}) AND lease_owner = %(owner)s AND {UNFINISHED}"

_START_OURS = f"""
UPDATE work SET state = 'running', attempts = attempts + 1, started_at = %(now)s,
    ran_alone = false, next_attempt_at = NULL
WHERE {_OURS} AND state <> 'running'
"""

_DUE = shifted("%(at)s::float8", "%(now)s::float8", CLOCK)

_FAIL = f"""
UPDATE work SET state = %(state)s, queued = %(queued)s, next_attempt_at = {_DUE},
    failed_at = CASE WHEN %(retrying)s THEN {CLOCK} END, finished_at = %(finished_at)s,
    last_error = %(error)s, lease_owner = NULL, lease_until = NULL
WHERE {_OURS} RETURNING sequence, attempts, started_at
"""

_CUT_SHORT = f"""
UPDATE work SET attempts = attempts - (state = 'running')::int, state = 'received',
    started_at = NULL, next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_PUT_OFF = f"""
UPDATE work SET attempts = attempts - (state = 'running')::int, state = 'retrying',
    queued = true, started_at = NULL, next_attempt_at = {_DUE}, failed_at = {CLOCK},
    last_error = %(reason)s, lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_KEEP_ANSWER = f"""
INSERT INTO attempt (sequence, number, started_at, finished_at, error, place)
SELECT sequence, greatest(attempts, 1), coalesce(started_at, %(now)s), %(now)s, '', %(answer)s
FROM work WHERE {_OURS}
"""

_SET_ASIDE = f"""
UPDATE work SET state = 'parked', queued = false, next_attempt_at = NULL,
    last_error = coalesce(%(reason)s, last_error), lease_owner = NULL, lease_until = NULL
WHERE {_OURS}
"""

_JOIN = f"UPDATE work SET ran_alone = false WHERE {_OURS}"

_INSERT_ATTEMPT = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error, place, traceback)
VALUES (%s, %s, %s, %s, %s, %s, %s)
"""

# Nothing that another process holds is put back, and nothing whose body the retention has removed:
# it could not be run.
_REPLAY = """
UPDATE work SET state = 'received', queued = true,
    earlier_attempts = earlier_attempts + attempts, attempts = 0, process_ends = 0,
    ran_alone = false, next_attempt_at = NULL, started_at = NULL, finished_at = NULL,
    last_error = NULL
FROM arrival WHERE arrival.sequence = work.sequence
    AND arrival.delivery_key = ANY(%s::text[]) AND arrival.raw IS NOT NULL
    AND state IN ('dead', 'parked', 'retrying') AND lease_owner IS NULL
RETURNING arrival.delivery_key
"""

_REPEAT = f"""
WITH gone AS (
    DELETE FROM ended USING arrival WHERE arrival.sequence = ended.sequence
        AND arrival.delivery_key = ANY(%s::text[]) AND arrival.raw IS NOT NULL
    RETURNING ended.*, arrival.delivery_key, arrival.tenant_id, arrival.subject
), opened AS (
    INSERT INTO work (sequence, state, queued, ordered, lane, attempts, earlier_attempts,
        generation)
    SELECT sequence, 'received', true, ordered, {lane("ordered", "tenant_id", "subject")}, 0,
        earlier_attempts + attempts, generation + 1
    FROM gone
)
SELECT delivery_key FROM gone
"""

#: A start: the key, the time and whether no other run is beside it.
Start = tuple[str, float, bool]

#: A whole run that ended well: the key, the times of its start and its end, and whether one of the
#: two may have been committed before.
Run = tuple[str, float, float, bool]


def start_all(
    terms: SharedTerms, connection: StoreConnection, starts: Sequence[Start], alone: bool
) -> Iterable[bool]:
    """Begin runs: one more attempt. False: nothing has changed, the run is not ours."""
    keys, times, without_others = (list(column) for column in zip(*starts, strict=True))
    values = terms.values(0.0, keys=keys, times=times, alone=without_others, node=connection.node)
    return _tell_started(connection.execute(_START_ALL, values), keys)


def _tell_started(started: Iterable[tuple[Any, ...]], keys: Sequence[str]) -> Iterator[bool]:
    # A generator, as for arrivals.
    ours = {key for (key,) in started}
    for key in keys:
        yield key in ours


def run_all(
    terms: SharedTerms, connection: StoreConnection, runs: Sequence[Run], alone: bool
) -> list[None]:
    """Record whole runs that ended well."""
    keys, begun, times, again = (list(column) for column in zip(*runs, strict=True))
    values = terms.values(
        0.0, keys=keys, begun=begun, times=times, again=again, node=connection.node
    )
    connection.execute(_RUN_ALL, values)
    return [None] * len(runs)


def finish_all(
    terms: SharedTerms,
    connection: StoreConnection,
    ends: Sequence[tuple[str, float]],
    alone: bool = False,
) -> list[None]:
    """Record that runs of ours ended well; nothing where the lease is not ours any more."""
    keys, times = (list(column) for column in zip(*ends, strict=True))
    values = terms.values(0.0, keys=keys, times=times, node=connection.node)
    connection.execute(_FINISH_ALL, values)
    return [None] * len(ends)


def start_ours(connection: StoreConnection, terms: SharedTerms, key: str, now: float) -> None:
    """Begin a run whose start may have been committed before; nothing if it was."""
    connection.write(_START_OURS, {"key": key, "owner": terms.lease.owner, "now": now})


def join(connection: StoreConnection, terms: SharedTerms, key: str) -> None:
    """Note that a run of ours is not alone any more."""
    connection.write(_JOIN, {"key": key, "owner": terms.lease.owner})


def finish(
    connection: StoreConnection, terms: SharedTerms, key: str, outcome: Outcome, now: float
) -> None:
    """Record the outcome of a run of ours; do nothing if its lease is not ours any more."""
    ours = terms.values(now, key=key)
    match outcome:
        case Done(answer):
            if answer is not None:
                connection.write(_KEEP_ANSWER, {**ours, "answer": answer})
            finish_all(terms, connection, [(key, now)])
        case Retry(at):
            retrying = {"state": DeliveryState.RETRYING, "queued": at is not None, "at": at}
            _fail(connection, {**ours, **retrying, "finished_at": None}, outcome, now)
        case Dead():
            dead = {"state": DeliveryState.DEAD, "queued": False, "at": None}
            _fail(connection, {**ours, **dead, "finished_at": now}, outcome, now)
        case Released():
            connection.write(_CUT_SHORT, ours)
        case Postponed(at, reason):
            connection.write(_PUT_OFF, {**ours, "at": at, "reason": reason})
        case Parked(reason):
            connection.write(_SET_ASIDE, {**ours, "reason": reason})


def _fail(
    connection: StoreConnection, values: Mapping[str, object], outcome: Retry | Dead, now: float
) -> None:
    retrying = isinstance(outcome, Retry)
    failed = connection.write(
        _FAIL, {**values, "retrying": retrying, "error": outcome.error}
    ).fetchall()
    # Its last failed run was the end of a process, which recovery has recorded; a second record
    # would count it twice.
    if isinstance(outcome, Dead) and outcome.recorded:
        return
    told = (outcome.error, outcome.answer or outcome.place, outcome.traceback)
    for sequence, attempts, started_at in failed:
        begun = now if started_at is None else started_at
        # A body that cannot be decoded is dead without a run; it is recorded as the first attempt.
        connection.write(_INSERT_ATTEMPT, (sequence, max(attempts, 1), begun, now, *told))


def replay(connection: StoreConnection, keys: Sequence[str]) -> Sequence[str]:
    """Put dead, parked and waiting deliveries back; return the keys that were."""
    put_back = {key for (key,) in connection.write(_REPLAY, (list(keys),))}
    return [key for key in keys if key in put_back]


def repeat(connection: StoreConnection, keys: Sequence[str]) -> Sequence[str]:
    """Put done deliveries back, each as its next generation; return the keys that were."""
    put_back = {key for (key,) in connection.write(_REPEAT, (list(keys),))}
    connection.done -= len(put_back)
    return [key for key in keys if key in put_back]


# -- retention ---------------------------------------------------------------------------------

# Each condition is that of an index.
_OLD = """
SELECT sequence FROM ended WHERE {which} AND finished_at < %s ORDER BY finished_at LIMIT %s
FOR UPDATE SKIP LOCKED
"""

_OLD_WHOLE, _OLD_BARE = _OLD.format(which="NOT bare"), _OLD.format(which="bare")

_OLD_PARKED = """
SELECT work.sequence FROM work JOIN arrival USING (sequence)
WHERE state = 'parked' AND received_at < %s LIMIT %s FOR UPDATE OF work SKIP LOCKED
"""

_DROP_BODIES = """
UPDATE arrival SET raw = NULL WHERE sequence = ANY(%s::bigint[]) AND raw IS NOT NULL
"""


def delete_bodies(connection: StoreConnection, before: float, limit: int) -> tuple[int, int]:
    """Delete bodies of deliveries that were done before that time.

    Returns the number of deliveries that were looked at, up to ``limit``, and that of the bodies.
    """
    sequences = [row[0] for row in connection.execute(_OLD_WHOLE, (before, limit))]
    if not sequences:
        return 0, 0
    connection.write("DELETE FROM evidence WHERE sequence = ANY(%s::bigint[])", (sequences,))
    connection.write(
        "UPDATE ended SET bare = true WHERE sequence = ANY(%s::bigint[])", (sequences,)
    )
    return len(sequences), connection.write(_DROP_BODIES, (sequences,)).rowcount


def delete_deliveries(
    connection: StoreConnection, state: DeliveryState, before: float, limit: int
) -> tuple[int, int]:
    """Delete deliveries whole that were done, or are parked and arrived, before that time."""
    old = (_OLD_WHOLE, _OLD_BARE) if state is DeliveryState.DONE else (_OLD_PARKED,)
    sequences: list[int] = []
    for statement in old:
        rows = connection.execute(statement, (before, limit - len(sequences)))
        sequences += [sequence for (sequence,) in rows]
    forget(connection, sequences)
    return len(sequences), len(sequences)


def forget(connection: StoreConnection, sequences: Sequence[int]) -> None:
    """Delete deliveries whole, whatever their state."""
    if not sequences:
        return
    numbers = (list(sequences),)
    for table in ("evidence", "attempt", "work", "arrival"):
        connection.write(f"DELETE FROM {table} WHERE sequence = ANY(%s::bigint[])", numbers)
    gone = connection.write("DELETE FROM ended WHERE sequence = ANY(%s::bigint[])", numbers)
    connection.done -= gone.rowcount


_OF_TENANT = """
SELECT sequence FROM arrival WHERE tenant_id = %s ORDER BY sequence LIMIT %s FOR UPDATE
"""


def erase(connection: StoreConnection, tenant_id: str, limit: int | None) -> int:
    """Delete up to ``limit`` deliveries of a tenant whole; count them."""
    rows = connection.execute(_OF_TENANT, (tenant_id, limit))
    sequences = [sequence for (sequence,) in rows]
    forget(connection, sequences)
    return len(sequences)


_EVIDENCE_OF = (
    "DELETE FROM evidence WHERE id IN (SELECT id FROM evidence WHERE tenant_id = %s LIMIT %s)"
)


def erase_evidence(connection: StoreConnection, tenant_id: str, limit: int | None) -> int:
    """Delete up to ``limit`` bodies of the tenant's that came under others' keys; count them."""
    return connection.write(_EVIDENCE_OF, (tenant_id, limit)).rowcount


_LEFT_LONG_AGO = """
WITH gone AS (
    DELETE FROM node WHERE id <> '' AND seen_at < now() - interval '1 day' RETURNING changes, done
), total AS (SELECT sum(changes) AS changes, sum(done) AS done FROM gone)
UPDATE node SET changes = node.changes + total.changes, done = node.done + total.done
FROM total WHERE id = '' AND total.done IS NOT NULL
"""


def forget_nodes(connection: StoreConnection) -> None:
    """Remove the rows of stores that ended without closing, and keep what they have counted."""
    connection.execute(_LEFT_LONG_AGO)


# -- checkpoints -------------------------------------------------------------------------------

#: Keeps a value under a name.
KEEP_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (%s, %s)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""


_KEEP_FIRST_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (%s, %s) ON CONFLICT (name) DO NOTHING
"""


def write_checkpoint(
    connection: StoreConnection, name: str, value: str | None, *, once: bool = False
) -> None:
    """Keep ``value`` under ``name``, with ``once`` unless one is kept there; None forgets it."""
    if value is None:
        connection.write("DELETE FROM checkpoint WHERE name = %s", (name,))
    elif once:
        connection.write(_KEEP_FIRST_CHECKPOINT, (name, value))
    else:
        connection.write(KEEP_CHECKPOINT, (name, value))
