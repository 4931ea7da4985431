"""Leases: claim, renew, give up and take over deliveries; leases of single tasks.

A lease is a token in the row of a delivery, with an owner and a deadline. Every claim writes a new
token (one that records the outcome of an ended run: that run's), and an outcome has to name it. A
renewal gives up every lease of its owner that the owner does not hold in memory, and a lease
without renewal expires. So an abandoned call, a late commit and a lost answer need no undo.

Functions of a transaction, described by :class:`storage.ports.Inbox`. A claim skips rows that
another process is claiming (``SKIP LOCKED``), so any number of processes claim at the same time. A
*lane* has the ordered deliveries of one subject: only its first unfinished one is claimed. If two
hosts claim at the same moment, a unique index of PostgreSQL ensures that. A *group* has deliveries
that a pause or a limit of their handler holds back (``policies``). A *suspect* is a delivery that
ran when a process ended.

The lease of a single task, such as leading, is a row of the table ``lease``. Its *term* counts the
changes of its owner.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from ...base import clock
from ...base.term import TermEndedError
from ...records.deliveries import (
    PROCESS_ENDED,
    DeliveryState,
    Due,
    Lease,
    Renewed,
)
from ...records.policies import NO_LIMITS, ClaimLimits
from ..admission import CLOCK_SLACK_SECONDS, LeaseTerms
from . import policies
from .admission import new_token
from .dialect import Row, SqlTransaction
from .reads import by_sequence
from .schema import MAY_HAVE_RUN, NO_LEASE, unfinished

#: The number of lanes that one poll reads: 2 ms of work.
LANES: Final = 200


# -- claiming ------------------------------------------------------------------------------------


# Written so that only the indexes of the lanes match: a planner without statistics would otherwise
# read the whole table. A later delivery of the lane may be leased already: it was claimed before
# the earlier one was put back, or before the arrival of the earlier one was committed.
def _is_first(this: str) -> str:
    """Return SQL that is true if the row of ``work`` with this alias is the first of its lane."""
    return f"""
({this}.lane IS NULL OR ({this}.sequence = (
    SELECT other.sequence FROM work AS other
    WHERE other.lane >= {this}.lane AND {unfinished("other")}
    ORDER BY other.lane, other.sequence LIMIT 1
) AND ({this}.lease_owner IS NOT NULL OR {this}.lane NOT IN (
    SELECT other.lane FROM work AS other
    WHERE other.lane IS NOT NULL AND other.queued AND other.lease_owner IS NOT NULL))))
"""


def _waiting(work: str) -> str:
    """Return SQL that is true if the row with this alias waits for a worker."""
    return (
        f"{work}.queued AND {work}.state = 'received' AND {work}.lease_owner IS NULL "
        f"AND {work}.held_group IS NULL"
    )


def _retrying(work: str) -> str:
    """Return SQL that is true if the row with this alias waits for the time of its retry."""
    return (
        f"{work}.queued AND {work}.state = 'retrying' AND {work}.lease_owner IS NULL "
        f"AND {work}.held_group IS NULL"
    )


def _expired(work: str) -> str:
    """Return SQL that is true if another owner's lease of the row with this alias has expired.

    A deadline further ahead than any lease lasts was written by a wrong clock. The owners are two
    ranges of an index: with an inequality each claim would read our own leases.
    """
    return f"""
{work}.lease_owner IS NOT NULL AND ({work}.lease_owner < :owner OR {work}.lease_owner > :owner)
    AND ({work}.lease_until <= clock()
        OR {work}.lease_until > clock() + :seconds + {CLOCK_SLACK_SECONDS})
"""


def _limited_and_locked(order: str = "sequence") -> str:
    return f"ORDER BY {order} LIMIT :limit FOR UPDATE SKIP LOCKED"


def _find_first(which: str, *, order: str = "sequence") -> str:
    """Return SQL that finds and locks the rows that are first in their lanes."""
    first = _is_first("this")
    return (
        f"SELECT sequence FROM work AS this WHERE {which} AND {first} {_limited_and_locked(order)}"
    )


# Not the order of the primary key: a planner would read all rows by that key, instead of sorting
# the few that an index finds.
_SORTED = "sequence + 0"


# Deliveries without a lane, which do not wait for others.
_FIND_WAITING = f"""
SELECT sequence FROM work WHERE {_waiting("work")} AND lane IS NULL
{_limited_and_locked("lane, sequence")}
"""
# Written so that the index of waiting rows does not match: PostgreSQL would read all of it, instead
# of finding each row by the primary key.
_FIND_IN_LANES = _find_first(
    "sequence IN ints(:firsts) AND queued AND state = 'received' AND coalesce(lease_owner, '') = ''"
)
_FIND_RETRYING = _find_first(f"{_retrying('this')} AND next_attempt_at <= clock()", order=_SORTED)
# Also deliveries that are not first: their expired leases block the first one.
_FIND_EXPIRED = f"""
SELECT sequence, state, {_is_first("this")} AS is_first FROM work AS this
WHERE {_expired("this")} AND queued AND {unfinished()} {_limited_and_locked(_SORTED)}
"""

# A suspect may be leased by us already.
_FIND_SUSPECTS = _find_first(
    "process_ends > 0 AND state = 'received' AND queued "
    "AND (lease_owner IS NULL OR lease_owner = :owner)"
)

# Deliveries of a group that wait for its limits, and those of them that are suspects.
_FIND_IN_GROUP = _find_first("held_group = :group AND lease_owner IS NULL")
_FIND_SUSPECTS_OF_GROUP = _find_first(
    "held_group = :group AND lease_owner IS NULL AND sequence IN ints(:suspects)"
)

# All kinds in one statement, to save round trips.
_FIND_DUE = f"""
WITH waiting AS ({_FIND_WAITING}), in_lanes AS ({_FIND_IN_LANES}), retrying AS ({_FIND_RETRYING}),
    expired AS ({_FIND_EXPIRED})
SELECT sequence, NULL, true FROM waiting UNION ALL SELECT sequence, NULL, true FROM in_lanes
UNION ALL SELECT sequence, NULL, true FROM retrying
UNION ALL SELECT sequence, state, is_first FROM expired
"""

# The next lanes with their first waiting deliveries: one step of an index for each lane, however
# many deliveries wait in it. The row without a lane has the time of the next retry, and
# whether deliveries wait in groups: another process may leave some at any time, and end.
_NEXT_LANES = f"""
WITH RECURSIVE step (lane, number) AS (
    SELECT (SELECT lane FROM work
        WHERE {_waiting("work")} AND lane > :lane ORDER BY lane LIMIT 1), 1
    UNION ALL SELECT (SELECT work.lane FROM work
        WHERE {_waiting("work")} AND work.lane > step.lane ORDER BY work.lane LIMIT 1), number + 1
    FROM step WHERE step.lane IS NOT NULL AND number < {LANES}
)
SELECT lane, (SELECT min(sequence) FROM work WHERE {_waiting("work")} AND work.lane = step.lane),
    CAST(NULL AS float8)
FROM step WHERE lane IS NOT NULL
UNION ALL SELECT NULL, (SELECT 1 FROM work WHERE held_group IS NOT NULL AND lease_owner IS NULL
    ORDER BY held_group LIMIT 1), (SELECT min(local(next_attempt_at)) FROM work
    WHERE {_retrying("work")} AND next_attempt_at > clock())
"""

_LEASE_DELIVERIES = """
UPDATE work SET lease_owner = :owner, lease_token = :token + sequence,
    lease_until = clock() + :seconds
WHERE sequence IN ints(:sequences) RETURNING sequence, failed_at IS NULL
"""

_NOTE_MAY_HAVE_RUN = f"UPDATE work SET {MAY_HAVE_RUN} WHERE sequence IN ints(:sequences)"


class PollCursor(msgspec.Struct, frozen=True):
    """The position at which a poll ended and the next one continues.

    ``lane`` is the last lane that was read; empty: the next poll begins with the first one.
    ``has_rest``: a poll since the first lane has found more than it claimed.
    """

    lane: bytes = b""
    has_rest: bool = False


def claim_due(
    tx: SqlTransaction,
    terms: LeaseTerms,
    cursor: PollCursor,
    *,
    limit: int,
    now: float,
    take_expired: bool,
    limits: ClaimLimits | None = None,
) -> tuple[Due, PollCursor]:
    """Claim due deliveries, oldest arrival first among those that this poll reads.

    An ordered delivery is due only when it is the first of its lane. Reading tens of thousands of
    lanes would take a second, so each poll reads the next :data:`LANES` lanes. ``more`` is true
    until polls have read all lanes and claimed all they found. Returns also where this poll ended.

    Args:
        tx: the transaction.
        terms: the owner, and the duration of a lease.
        cursor: where the previous poll ended.
        limit: the most deliveries.
        now: Unix seconds.
        take_expired: take over leases of others that have expired.
        limits: pauses and policies; None: this process has none.
    """
    lanes = _next_lanes(tx, cursor, now)
    if limits is None and lanes.is_anything_grouped:
        limits = NO_LIMITS
    # Only some of the events found may be free to be claimed: others belong to groups.
    most = limit if limits is None else max(limit, policies.CHUNK)
    found, blocking = _find_due(
        tx, terms, lanes, limit=most + 1, now=now, take_expired=take_expired
    )
    is_full, found = len(found) > most, found[:most]
    group_of = policies.groups_of(tx, limits, [each.sequence for each in found])
    of_groups = [each for each in found if each.sequence in group_of]
    of_no_group = [each for each in found if each.sequence not in group_of]
    taken = of_no_group[:limit]

    _end_expired(tx, terms, [*taken, *of_groups], blocking)
    policies.assign_groups(tx, group_of)
    find = partial(_find_in_group, tx)
    chosen = policies.choose_from_groups(tx, terms, limits, find, now=now, live_only=take_expired)
    due = _lease(tx, terms, [*(each.sequence for each in taken), *chosen.sequences], chosen, now)

    has_rest = cursor.has_rest or is_full or len(of_no_group) > limit
    more = has_rest or bool(lanes.end) or bool(blocking) or chosen.more
    times = [at for at in (lanes.next_retry_at, chosen.next_at) if at is not None]
    due = replace(due, more=more, next_due_at=min(times, default=None), limited=chosen.limited)
    return due, PollCursor(lanes.end, has_rest) if lanes.end else PollCursor()


class _Lanes(NamedTuple):
    """The first waiting delivery of each of the next lanes.

    ``end`` is the last of these lanes, empty: there are no further ones.
    """

    firsts: Collection[int]
    end: bytes
    next_retry_at: float | None
    is_anything_grouped: bool


def _next_lanes(tx: SqlTransaction, cursor: PollCursor, now: float) -> _Lanes:
    *rows, (_, is_grouped, next_retry_at) = sorted(
        tx.all(_NEXT_LANES, lane=cursor.lane, now=now), key=lambda row: row[0] is None
    )
    end = max(bytes(row[0]) for row in rows) if len(rows) == LANES else b""
    return _Lanes([row[1] for row in rows], end, next_retry_at, bool(is_grouped))


class _Found(NamedTuple):
    """A due delivery. ``expired_state`` is its state if its lease has expired, otherwise None."""

    sequence: int
    expired_state: str | None
    is_first: bool


def _find_due(
    tx: SqlTransaction,
    terms: LeaseTerms,
    lanes: _Lanes,
    *,
    limit: int,
    now: float,
    take_expired: bool,
) -> tuple[list[_Found], list[_Found]]:
    """Return due deliveries, oldest first, and those that only block the first one of their lane.

    At most ``limit`` of each kind: waiting without a lane, first of a lane, retrying, expired.
    """
    rows = tx.all(
        _FIND_DUE,
        limit=limit,
        firsts=[*lanes.firsts],
        owner=terms.owner,
        seconds=terms.lease_seconds,
        now=now,
    )
    found = [_Found(*row) for row in rows]
    if not take_expired:
        found = [each for each in found if each.expired_state is None]
    blocking = [each for each in found if not each.is_first]
    return sorted(each for each in found if each.is_first), blocking


def _end_expired(
    tx: SqlTransaction, terms: LeaseTerms, taken: Sequence[_Found], blocking: Sequence[_Found]
) -> None:
    """End the runs whose leases have expired; free the deliveries that only block their lane.

    The owner has not renewed the lease: its process hangs or has ended. So the run counts as one
    that ended the process.
    """
    running = [each.sequence for each in (*taken, *blocking) if each.expired_state == "running"]
    _cut_short(tx, terms, running, sole=False)
    if expired := [each.sequence for each in taken if each.expired_state is not None]:
        tx.run(_NOTE_MAY_HAVE_RUN, sequences=expired)
    if blocking:
        tx.run(_FREE_LEASES, sequences=[each.sequence for each in blocking])
        tx.note_change()


def _find_in_group(tx: SqlTransaction, group: str, limit: int) -> list[int]:
    return [sequence for (sequence,) in tx.all(_FIND_IN_GROUP, group=group, limit=limit)]


def _lease(
    tx: SqlTransaction,
    terms: LeaseTerms,
    sequences: Collection[int],
    chosen: policies.ChosenEvents,
    now: float,
) -> Due:
    """Lease deliveries, oldest arrival first; ``first_runs`` are those without a run that counts.

    A replayed dead letter is among them. Its start need not be awaited either: if a process ends in
    that run without a trace, the take-over of the lease notes it (`MAY_HAVE_RUN`).
    """
    if not sequences:
        return Due([], False, None, superseded=chosen.superseded)
    token = new_token()
    rows: dict[int, Any] = dict(
        tx.all(
            _LEASE_DELIVERIES,
            sequences=sorted(sequences),
            token=token,
            owner=terms.owner,
            seconds=terms.lease_seconds,
            now=now,
        )
    )
    records = by_sequence(tx, list(rows))
    first_runs = frozenset(
        record.key
        for record in records
        if rows[record.sequence] and not record.attempts and record.state is DeliveryState.RECEIVED
    )
    leases = {each.key: Lease(each.key, token + each.sequence, each.sequence) for each in records}
    return Due(records, False, None, first_runs, superseded=chosen.superseded, leases=leases)


def claim_suspects(
    tx: SqlTransaction,
    terms: LeaseTerms,
    *,
    limit: int,
    now: float,
    limits: ClaimLimits | None = None,
) -> Due:
    """Claim deliveries that ran when a process ended, oldest arrival first.

    Those that a pause or a limit holds stay behind, and are claimed as all others are.
    """
    found = [row[0] for row in tx.all(_FIND_SUSPECTS, limit=limit, owner=terms.owner)]
    group_of = policies.groups_of(tx, limits, found)

    def find(group: str, most: int) -> list[int]:
        rows = tx.all(_FIND_SUSPECTS_OF_GROUP, group=group, limit=most, suspects=list(group_of))
        return [sequence for (sequence,) in rows]

    policies.assign_groups(tx, group_of)
    chosen = policies.choose_from_groups(tx, terms, limits, find, now=now)
    of_no_group = [sequence for sequence in found if sequence not in group_of]
    return _lease(tx, terms, [*of_no_group, *chosen.sequences], chosen, now)


# -- renewing and giving up ----------------------------------------------------------------------

# A handler whose effects are in one transaction with the end of its event has locked the row.
# Waiting for such a row would delay every commit of this process.
_LEASED_BY_US = f"""
SELECT work.sequence, work.lease_token FROM work
WHERE lease_owner = :owner AND {unfinished()} FOR NO KEY UPDATE SKIP LOCKED
"""

_RENEW_LEASES = (
    "UPDATE work SET lease_until = clock() + :seconds WHERE sequence IN ints(:sequences)"
)

# The run was never begun, or its end could not be recorded: the attempt does not count.
_GIVE_UP = f"""
UPDATE work SET attempts = attempts - CASE WHEN state = 'running' THEN 1 ELSE 0 END,
    started_at = CASE WHEN state = 'running' THEN NULL ELSE started_at END,
    state = CASE WHEN state = 'running' THEN 'received' ELSE state END,
    {NO_LEASE}
WHERE sequence IN ints(:sequences)
"""

_HELD_BY_OTHERS = f"""
SELECT sequence FROM work
WHERE sequence IN ints(:sequences) AND lease_owner <> :owner AND {unfinished()}
"""

_RELEASE_LEASES = f"""
UPDATE work SET {NO_LEASE}
WHERE sequence IN ints(:sequences) AND lease_token IN ints(:tokens)
    AND state IN ('received', 'retrying')
"""


def renew(
    tx: SqlTransaction,
    terms: LeaseTerms,
    leases: Collection[Lease],
    pending: Collection[int],
    *,
    now: float,
) -> Renewed:
    """Extend this owner's ``leases`` and those of ``pending`` tokens, and give up its others.

    The keys of ``leases`` that another owner has taken over are reported as lost.
    """
    tokens = {lease.token for lease in leases}.union(pending)
    ours = tx.all(_LEASED_BY_US, owner=terms.owner)
    renewed = [sequence for sequence, token in ours if token in tokens]
    stray = [sequence for sequence, token in ours if token not in tokens]
    if renewed:
        # Other processes need not see this change.
        tx.run(_RENEW_LEASES, sequences=renewed, seconds=terms.lease_seconds, now=now)
    if stray:
        tx.run(_GIVE_UP, sequences=stray)
        tx.note_change()
    found = {sequence for sequence, _ in ours}
    missing = {each.sequence: each.key for each in leases if each.sequence not in found}
    lost: list[str] = []
    if missing:
        rows = tx.all(_HELD_BY_OTHERS, sequences=list(missing), owner=terms.owner)
        lost = [missing[sequence] for (sequence,) in rows]
    return Renewed(frozenset(lost), given_up=len(stray))


def release(tx: SqlTransaction, leases: Collection[Lease]) -> int:
    """Give up the leases whose run was never started; return how many."""
    sequences, tokens = [each.sequence for each in leases], [each.token for each in leases]
    released = tx.run(_RELEASE_LEASES, sequences=sequences, tokens=tokens)
    if released:
        tx.note_change()
    return released


# -- taking over ---------------------------------------------------------------------------------

# SQL that is true if a lease was not renewed for half of its duration.
_IS_STALE = "lease_until < clock() + :seconds / 2"

_LEASED_BY_OTHERS = f"""
SELECT sequence, state, {_IS_STALE} FROM work
WHERE {unfinished()} AND lease_owner IS NOT NULL AND lease_owner <> :owner
    AND (NOT CAST(:shared_by_hosts AS boolean) OR ({_expired("work")}) OR lease_owner = :dead
        OR substr(lease_owner, 1, length(:dead) + 1) = :dead || '.')
FOR UPDATE SKIP LOCKED
"""

_LEASED_BY_OWNER = f"""
SELECT sequence, state, {_IS_STALE}, process_ends FROM work
WHERE {unfinished()} AND lease_owner = :owner FOR UPDATE
"""

_FREE_LEASES = f"""
UPDATE work SET {NO_LEASE}, {MAY_HAVE_RUN}
WHERE sequence IN ints(:sequences)
"""

_LEAVE_TO_SUCCESSOR = f"""
UPDATE work SET lease_owner = :successor, lease_token = NULL, lease_until = clock() + :seconds,
    {MAY_HAVE_RUN}
WHERE sequence IN ints(:sequences)
"""

# The last renewal of the lease is taken as the end of the run.
_RECORD_ENDS = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error)
SELECT sequence, attempts, begun, CASE WHEN seen > begun THEN seen ELSE begun END, :error
FROM (
    SELECT work.sequence AS sequence, attempts, coalesce(started_at, received_at) AS begun,
        coalesce(lease_until, 0) - :seconds AS seen
    FROM work JOIN arrival ON arrival.sequence = work.sequence
    WHERE work.sequence IN ints(:sequences)
) AS ended_runs
"""

_CUT_SHORT = f"""
UPDATE work SET state = 'received', queued = true, process_ends = process_ends + 1,
    ran_alone = (ran_alone OR CAST(:sole AS boolean)), last_error = :error,
    {NO_LEASE}
WHERE sequence IN ints(:sequences)
"""


def _cut_short(tx: SqlTransaction, terms: LeaseTerms, sequences: list[int], *, sole: bool) -> None:
    """Put runs of other owners back to ``received``, because their processes have ended."""
    if sequences:
        tx.run(_RECORD_ENDS, sequences=sequences, error=PROCESS_ENDED, seconds=terms.lease_seconds)
        tx.run(_CUT_SHORT, sequences=sequences, error=PROCESS_ENDED, sole=sole)


def _is_sole(leased: Sequence[Row], *, others_claim: bool) -> bool:
    """Return whether the only lease taken away was the only one that its owner held.

    Then this run has ended the process, and no quarantine has to prove that (ADR 23). It is not
    known of a stale lease if ``others_claim``: another lease of its owner may have expired, and may
    be taken already. An owner renews all of its leases every few seconds, so beside one that is not
    stale none has expired.

    Args:
        leased: the leases; the third value of a row is whether it is stale.
        others_claim: other owners claim deliveries meanwhile.
    """
    return len(leased) == 1 and not (others_claim and leased[0][2])


def recover(
    tx: SqlTransaction, terms: LeaseTerms, *, dead: str | None = None, others_ran: bool = False
) -> int:
    """Take away the leases of other owners; return how many.

    In a shared store, only expired leases, and those of ``dead`` and of its processes.
    ``others_ran``: a process has also ended during a run that the store does not know.
    """
    leased = tx.all(
        _LEASED_BY_OTHERS,
        owner=terms.owner,
        shared_by_hosts=terms.shared_by_hosts,
        dead=dead or "",
        seconds=terms.lease_seconds,
        now=clock.wall(),
    )
    running = [sequence for sequence, state, _ in leased if state == "running"]
    sole = not others_ran and _is_sole(leased, others_claim=terms.shared_by_hosts)
    _cut_short(tx, terms, running, sole=sole)
    if leased:
        tx.run(_FREE_LEASES, sequences=[sequence for sequence, *_ in leased])
        tx.note_change()
    return len(leased)


def take_over(
    tx: SqlTransaction, terms: LeaseTerms, owner: str, *, successor: str, now: float
) -> int:
    """Take away the leases of ``owner``; its runs are left to ``successor``. Return how many."""
    leased = tx.all(_LEASED_BY_OWNER, owner=owner, seconds=terms.lease_seconds, now=now)
    running = [sequence for sequence, state, *_ in leased if state == "running"]
    _cut_short(tx, terms, running, sole=_is_sole(leased, others_claim=True))
    # A suspect that the dead owner had inherited and not run yet passes to its successor.
    suspects = [row[0] for row in leased if row[1] == "running" or row[3]]
    others = [row[0] for row in leased if row[0] not in suspects]
    if others:
        tx.run(_FREE_LEASES, sequences=others)
    if suspects:
        tx.run(
            _LEAVE_TO_SUCCESSOR,
            sequences=suspects,
            successor=successor,
            seconds=terms.lease_seconds,
            now=now,
        )
    if leased:
        tx.note_change()
    return len(leased)


# If a clock was ahead when a retry was planned, the retry would wait for hours after the clock was
# corrected. With `now` 0, every retry was decided in the future: a server's clock needs `all` then.
_RESCHEDULE = """
UPDATE work SET next_attempt_at = clock(), failed_at = clock()
WHERE state = 'retrying' AND queued AND next_attempt_at > clock()
    AND coalesce(failed_at, started_at) > CASE WHEN CAST(:all AS boolean) THEN 0
        ELSE clock() + :slack END
"""


def reschedule(tx: SqlTransaction, *, now: float) -> int:
    """Make the retries due that were decided in the future; return their number."""
    all_of_them = now == 0 and tx.dialect.server_clock
    changed = tx.run(_RESCHEDULE, now=now, all=all_of_them, slack=CLOCK_SLACK_SECONDS)
    if changed:
        tx.note_change()
    return changed


# -- leases of single tasks ----------------------------------------------------------------------

_LEAD = """
INSERT INTO lease AS old (name, owner, term, until)
VALUES (:name, :owner, 1, clock() + :seconds)
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, until = excluded.until,
    term = old.term + CASE WHEN old.owner = excluded.owner THEN 0 ELSE 1 END
WHERE old.owner = excluded.owner OR old.until <= clock()
RETURNING term
"""

# Locked until the commit, so that no other owner begins a term meanwhile.
_TERM = "SELECT owner, term FROM lease WHERE name = :name FOR UPDATE"

#: The lease of the host that leads the others, and of the one that upgrades from a single tenant.
LEADER = "storage.leader"
UPGRADER = "upgrade.lease"


def lead(
    tx: SqlTransaction, owner: str, *, seconds: float, now: float, name: str = LEADER
) -> int | None:
    """Take or renew a lease of the whole store; return its term, None while another holds it."""
    row = tx.one(_LEAD, name=name, owner=owner, seconds=float(seconds), now=now)
    return None if row is None else int(row[0])


def require_term(tx: SqlTransaction, owner: str, term: int, *, name: str = LEADER) -> None:
    """Raise TermEndedError unless ``owner`` still holds that lease in this term."""
    if tx.one(_TERM, name=name) != (owner, term):
        did = "led the others" if name == LEADER else "ran the upgrade"
        raise TermEndedError(
            f"this host {did} in term {term}, which is over: another host may have the lease"
        )


# -- sharing -------------------------------------------------------------------------------------

#: The name of the row with the last owner that asked for work, and the end of that request.
WANTED: Final = "work.wanted"

_HELD_UNBEGUN = """
SELECT 1 FROM work WHERE lease_owner IS NOT NULL AND (lease_owner < :owner OR lease_owner > :owner)
    AND queued AND state IN ('received', 'retrying') LIMIT 1
"""

_ASK_FOR_WORK = f"""
INSERT INTO lease (name, owner, term, until) VALUES ('{WANTED}', :owner, 0, clock() + :seconds)
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, until = excluded.until
"""

_IS_WORK_WANTED = f"""
SELECT 1 FROM lease WHERE name = '{WANTED}' AND until > clock()
"""


def is_work_unbegun(tx: SqlTransaction, owner: str) -> bool:
    """Return whether other owners have leased queued deliveries that they have not begun."""
    return tx.one(_HELD_UNBEGUN, owner=owner) is not None


def ask_for_work(tx: SqlTransaction, terms: LeaseTerms, *, seconds: float, now: float) -> None:
    """Ask other owners to share their work, for so many seconds."""
    tx.run(_ASK_FOR_WORK, owner=terms.owner, seconds=seconds, now=now)


def is_work_wanted(tx: SqlTransaction, *, now: float) -> bool:
    """Return whether an owner has asked for work and its request has not expired."""
    return tx.one(_IS_WORK_WANTED, now=now) is not None
