"""Pauses of events, and claims of events with a group: paused ones, and those with limits.

1. A claim finds due events (:func:`~.leases.claim_due`) and asks ``ClaimLimits`` for the group of
   each: that of a pause, that of a handler with limits, or none.
2. An event with a group is *held back*: its group is written to ``work.held_group``. Claims do not
   find it among the other due events from then on, however many are held back.
3. :func:`choose_from_groups` then chooses events of each group, oldest first, as many as its
   limits allow. The claim leases these. A leased event keeps its group, so the runs of a group are
   its leased rows, and those of a killed process are free when its leases end.
4. With ``coalesce``, older states of a subject are ended before one of its events is chosen.
5. When a pause or a policy has ended, the events of its group lose the group.

A rate is a bucket of tokens. Each chosen event takes one; the bucket is refilled at the rate, up to
the burst. The row of the group in ``token_bucket`` has how many were ``missing`` from the full
bucket ``as_of`` a time of the store's clock. Its lock serializes two hosts that choose from one
group: the second one does not wait for it, and tries again after :data:`BUSY_SECONDS`.

Functions of a transaction.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import msgspec

from ...base.throttle import TokenBucket
from ...events.coalescing import SUPERSEDED, WaitingEvent, coalesce, time_of_state
from ...records.policies import ClaimLimits, EventPause, GroupLimit, burst_of
from ..admission import CLOCK_SLACK_SECONDS, LeaseTerms
from .admission import new_token
from .dialect import SqlTransaction
from .runs import RunEnd, end_all, note_reason
from .schema import NO_LEASE, unfinished

#: The most events whose group one claim finds or changes.
CHUNK = 1000

#: The seconds after which a claim tries a group again if another host was claiming from it.
BUSY_SECONDS = 0.05

#: The most events of a lane that are compared at a time to find its newest state.
_LANE_CHUNK = 200

#: The most rounds of one claim in one group; each round ends superseded events or regroups others.
_ROUNDS = 20

#: Returns the sequences of a group's next events, at most so many, locked.
Find = Callable[[str, int], list[int]]


class ChosenEvents(msgspec.Struct):
    """Events of groups that a claim leases, and its findings.

    ``superseded`` are the keys of events that were ended, each with that of the newer one.
    ``next_at`` is when a rate allows the next run, by the caller's clock. ``limited``: events of a
    group wait for a slot, a token or a worker. ``more``: another claim finds more at once.
    """

    sequences: list[int] = []
    superseded: list[tuple[str, str]] = []
    next_at: float | None = None
    limited: bool = False
    more: bool = False


# -- groups --------------------------------------------------------------------------------------

_READ_TYPES = "SELECT sequence, type, '', signer FROM arrival WHERE sequence IN ints(:sequences)"
_READ_BODIES = "SELECT sequence, type, raw, signer FROM arrival WHERE sequence IN ints(:sequences)"

_ASSIGN_GROUP = f"""
UPDATE work SET held_group = :group, {NO_LEASE},
    failed_at = CASE WHEN lease_owner IS NULL THEN failed_at ELSE coalesce(failed_at, 0) END
WHERE sequence IN ints(:sequences)
"""

# One step of an index for each group, however many events are held back in it. The group with the
# oldest event comes first: another order would let one group use all workers for as long as it has
# events.
_LIST_GROUPS = """
WITH RECURSIVE step (held_group) AS (
    SELECT (SELECT held_group FROM work WHERE held_group IS NOT NULL AND lease_owner IS NULL
        ORDER BY held_group LIMIT 1)
    UNION ALL SELECT (SELECT work.held_group FROM work
        WHERE work.held_group IS NOT NULL AND lease_owner IS NULL
            AND work.held_group > step.held_group
        ORDER BY work.held_group LIMIT 1)
    FROM step WHERE step.held_group IS NOT NULL
)
SELECT held_group FROM step WHERE held_group IS NOT NULL ORDER BY (
    SELECT sequence FROM work WHERE work.held_group = step.held_group AND lease_owner IS NULL
    ORDER BY work.held_group, sequence LIMIT 1)
"""

_END_GROUP = """
UPDATE work SET held_group = NULL WHERE sequence IN (
    SELECT sequence FROM work WHERE held_group = :group AND lease_owner IS NULL
    ORDER BY sequence LIMIT :limit FOR UPDATE SKIP LOCKED)
"""

_LEAVE_GROUP = "UPDATE work SET held_group = NULL WHERE sequence IN ints(:sequences)"


def groups_of(
    tx: SqlTransaction, limits: ClaimLimits | None, sequences: Sequence[int]
) -> dict[int, str]:
    """Return the groups of those events that have one."""
    if limits is None or not (sequences and (limits.groups or limits.pauses)):
        return {}
    rows = tx.all(_READ_BODIES if limits.reads_bodies else _READ_TYPES, sequences=list(sequences))
    groups = ((row[0], limits.group_of(row[1], bytes(row[2] or b""), row[3])) for row in rows)
    return {sequence: group for sequence, group in groups if group is not None}


def assign_groups(tx: SqlTransaction, groups: Mapping[int, str]) -> None:
    """Write the groups of events to their rows; they have no lease, or an expired one."""
    for group in sorted({*groups.values()}):
        sequences = [sequence for sequence, each in groups.items() if each == group]
        tx.run(_ASSIGN_GROUP, group=group, sequences=sequences)


def choose_from_groups(
    tx: SqlTransaction,
    terms: LeaseTerms,
    limits: ClaimLimits | None,
    find: Find,
    *,
    now: float,
    live_only: bool = True,
) -> ChosenEvents:
    """Choose the events held back that may run now; the caller leases them in this transaction.

    A group whose pause or policy has ended is dissolved.

    Args:
        tx: the transaction.
        terms: the owner, and the duration of a lease.
        limits: those of this process; None: there are none, and no event has a group.
        find: finds the next events of a group.
        now: Unix seconds.
        live_only: leases that have expired use no slot.
    """
    chosen = ChosenEvents()
    if limits is None:
        return chosen
    choice = _Choice(tx, terms, limits, find, now, live_only, chosen, limits.free_workers)
    for (group,) in tx.all(_LIST_GROUPS):
        limit = limits.groups.get(group)
        if limit is not None:
            choice.choose(group, limit)
        elif group not in limits.pauses:
            chosen.more |= tx.run(_END_GROUP, group=group, limit=CHUNK) > 0
    return chosen


# -- choice --------------------------------------------------------------------------------------

_LOCK_GROUP = """
SELECT missing, as_of, clock() FROM token_bucket WHERE held_group = :group FOR UPDATE SKIP LOCKED
"""

_ADD_GROUP = """
INSERT INTO token_bucket (held_group, missing, as_of) VALUES (:group, 0, 0)
ON CONFLICT (held_group) DO NOTHING
"""

_SAVE_TOKENS = """
UPDATE token_bucket SET missing = :missing, as_of = :as_of WHERE held_group = :group
"""

_COUNT_RUNNING = """
SELECT count(*) FROM work WHERE held_group = :group AND lease_owner IS NOT NULL
    AND (lease_until > clock() OR NOT CAST(:live_only AS boolean))
"""


class _LockedGroup(NamedTuple):
    """The row of a group: how many tokens were ``missing`` at ``as_of``; and the time now."""

    missing: float
    as_of: float
    clock: float

    def bucket(self, rate_per_minute: float) -> TokenBucket:
        """Return the bucket of tokens for a rate."""
        return TokenBucket(
            per_second=rate_per_minute / 60.0,
            burst=burst_of(rate_per_minute),
            missing=self.missing,
            as_of=self.as_of,
        )


@attrs.define
class _Choice:
    """One call of :func:`choose_from_groups`, and its result so far.

    For each group: lock its row, count the runs that its limits allow, choose so many of its next
    events, and take their tokens.
    """

    _tx: SqlTransaction
    _terms: LeaseTerms
    _limits: ClaimLimits
    _find: Find
    _now: float
    _live_only: bool
    _chosen: ChosenEvents
    _free_workers: int

    def choose(self, group: str, limit: GroupLimit) -> None:
        """Choose events of one group, as many as its limits and the free workers allow."""
        self._chosen.limited = True
        if self._free_workers <= 0:
            return
        locked = self._lock(group)
        if locked is None:
            self._note_next(BUSY_SECONDS)
            return
        most = self._free_workers
        if limit.concurrency is not None:
            most = min(most, limit.concurrency - self._count_running(group))
        bucket = None
        if limit.rate_per_minute is not None:
            bucket = locked.bucket(limit.rate_per_minute)
            most = min(most, bucket.available(locked.clock))
        chosen = self._next_of(group, limit, most) if most > 0 else []
        self._chosen.sequences += chosen
        self._free_workers -= len(chosen)
        if bucket is not None:
            self._take_tokens(group, locked, bucket, len(chosen))

    def _lock(self, group: str) -> _LockedGroup | None:
        """Lock the row of a group; None: another host has locked it."""
        row = self._tx.one(_LOCK_GROUP, group=group, now=self._now)
        if row is None:
            self._tx.run(_ADD_GROUP, group=group)
            row = self._tx.one(_LOCK_GROUP, group=group, now=self._now)
        if row is None:
            return None
        missing, as_of, clock = map(float, row)
        # A claim that has waited for those of another process has an older time. The tokens that
        # came back since then were counted, and must not come back again.
        if as_of - CLOCK_SLACK_SECONDS < clock < as_of:
            clock = as_of
        return _LockedGroup(missing, as_of, clock)

    def _count_running(self, group: str) -> int:
        row = self._tx.one(_COUNT_RUNNING, group=group, live_only=self._live_only, now=self._now)
        return int(row[0]) if row else 0

    def _take_tokens(
        self, group: str, locked: _LockedGroup, bucket: TokenBucket, number: int
    ) -> None:
        """Take a token for each chosen event, and note when the rate allows the next one."""
        clock = locked.clock
        # A count from a clock that was ahead: refill the bucket from now on.
        if number or locked.as_of > clock:
            bucket.take(clock, number)
            missing = bucket.missing(clock)
            self._tx.run(_SAVE_TOKENS, group=group, missing=missing, as_of=clock)
        if (wait := bucket.wait(clock)) > 0.0:
            self._note_next(wait)

    def _note_next(self, seconds: float) -> None:
        at = self._now + seconds
        earliest = self._chosen.next_at
        self._chosen.next_at = at if earliest is None else min(at, earliest)

    def _next_of(self, group: str, limit: GroupLimit, most: int) -> list[int]:
        """Return the next events of a group, after it has been regrouped and coalesced."""
        for _ in range(_ROUNDS):
            found = self._find(group, most)
            if self._regroup(group, found):
                continue
            if not (limit.coalesce and self._supersede(group, found)):
                return found
        self._chosen.more = True
        return []

    def _regroup(self, group: str, found: Sequence[int]) -> bool:
        """Regroup events whose group has changed because a pause began; return whether any did."""
        groups = groups_of(self._tx, self._limits, found)
        if all(groups.get(sequence) == group for sequence in found):
            return False
        # If one is paused, the others of its type are, too.
        found = self._find(group, CHUNK)
        groups = groups_of(self._tx, self._limits, found)
        assign_groups(
            self._tx, {sequence: each for sequence, each in groups.items() if each != group}
        )
        free = [sequence for sequence in found if sequence not in groups]
        if free:
            self._tx.run(_LEAVE_GROUP, sequences=free)
            self._chosen.more = True
        return True

    def _supersede(self, group: str, found: Sequence[int]) -> bool:
        """End waiting events whose subject has a newer state; return whether there were any."""
        superseded: dict[int, tuple[str, str]] = {}
        for sequence in found:
            lane = self._waiting_in_lane_of(group, sequence)
            first = next((each for each in lane if each.sequence == sequence), None)
            if first is not None:
                newest, others = coalesce(first, lane)
                superseded |= {each.sequence: (each.key, newest.key) for each in others}
        if not superseded:
            return False
        self._end(superseded)
        self._chosen.more = True  # the next event of a lane is held back by the next claim
        return True

    def _waiting_in_lane_of(self, group: str, sequence: int) -> list[WaitingEvent]:
        rows = self._tx.all(_LIST_LANE, sequence=sequence, limit=_LANE_CHUNK)
        events = ((*row[:3], bytes(row[3] or b""), row[4]) for row in rows)
        return [
            WaitingEvent(number, key, kind, time_of_state(raw, self._now))
            for number, key, kind, raw, signer in events
            if self._limits.group_of(kind, raw, signer) == group
        ]

    def _end(self, superseded: Mapping[int, tuple[str, str]]) -> None:
        """Lease the superseded events, and end them as done without a run."""
        token = new_token()
        rows = self._tx.all(
            _LEASE_SUPERSEDED,
            sequences=list(superseded),
            owner=self._terms.owner,
            token=token,
        )
        runs = [RunEnd(number, token + number, self._now) for (number,) in rows]
        done = end_all(self._tx, runs)
        for run, is_done in zip(runs, done, strict=True):
            if is_done:
                key, newer = superseded[run.sequence]
                note_reason(self._tx, run.sequence, f"{SUPERSEDED}{newer}")
                self._chosen.superseded.append((key, newer))


# -- coalescing ----------------------------------------------------------------------------------

# A lane has the unfinished events of one subject, oldest first.
_LIST_LANE = f"""
SELECT work.sequence, arrival.delivery_key, arrival.type, arrival.raw, arrival.signer
FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE work.lane = (SELECT this.lane FROM work AS this WHERE this.sequence = :sequence)
    AND work.lane IS NOT NULL AND {unfinished("work")} AND work.queued AND work.lease_owner IS NULL
ORDER BY work.sequence LIMIT :limit
"""

# Without a lane, as only one event of a lane may be leased. Their rows end with this transaction.
_LEASE_SUPERSEDED = """
UPDATE work SET lease_owner = :owner, lease_token = :token + sequence, lane = NULL
WHERE sequence IN ints(:sequences) AND lease_owner IS NULL RETURNING sequence
"""


# -- pauses --------------------------------------------------------------------------------------

# All hosts end a pause at the same moment, even if their clocks differ.
_LIST_PAUSES = """
SELECT glob, since, actor, reason, until, ended_at, ended_by FROM pause
WHERE CAST(:ended AS boolean) OR ended_at IS NULL AND (until IS NULL OR until > clock())
ORDER BY since, id
"""

# A second pause of a glob changes why and how long. It goes on from the first one, whose row stays
# as the record of who began it.
_REPLACE_PAUSE = """
UPDATE pause SET ended_at = clock(), ended_by = :actor
WHERE glob = :glob AND ended_at IS NULL AND (until IS NULL OR until > clock()) RETURNING since
"""

_END_OVERDUE_PAUSES = """
UPDATE pause SET ended_at = until, ended_by = '' WHERE ended_at IS NULL AND until <= clock()
"""

_ADD_PAUSE = """
INSERT INTO pause (glob, since, actor, reason, until)
VALUES (:glob, COALESCE(CAST(:since AS float8), clock()), :actor, :reason, due(:until))
"""

_END_PAUSES = """
UPDATE pause SET ended_at = clock(), ended_by = :actor
WHERE ended_at IS NULL AND (glob = :glob OR CAST(:glob AS text) IS NULL) RETURNING glob
"""


def pauses(tx: SqlTransaction, *, now: float, ended: bool = False) -> list[EventPause]:
    """Return the pauses that are in force; with ``ended`` all of them."""
    return [
        EventPause(glob, since, actor, reason, until, ended_at, ended_by or None)
        for glob, since, actor, reason, until, ended_at, ended_by in tx.all(
            _LIST_PAUSES, ended=ended, now=now
        )
    ]


def pause(
    tx: SqlTransaction, glob: str, *, actor: str, reason: str, until: float | None, now: float
) -> None:
    """Pause the events whose type matches ``glob``."""
    tx.run(_END_OVERDUE_PAUSES, now=now)
    replaced = tx.one(_REPLACE_PAUSE, glob=glob, actor=actor, now=now)
    since = None if replaced is None else replaced[0]
    tx.run(_ADD_PAUSE, glob=glob, since=since, actor=actor, reason=reason, until=until, now=now)
    tx.note_change()


def resume(tx: SqlTransaction, glob: str | None, *, actor: str, now: float) -> list[str]:
    """End the pause of ``glob``, None: of all; return the globs of those that were in force."""
    tx.run(_END_OVERDUE_PAUSES, now=now)
    ended = [row[0] for row in tx.all(_END_PAUSES, glob=glob, actor=actor, now=now)]
    tx.note_change()
    return ended
