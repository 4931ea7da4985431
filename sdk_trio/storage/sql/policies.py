"""Policies as a claim obeys them: pauses, concurrency, rates, coalescing.

A due event that is paused or whose handler has limits gets the name of its *group* in
``work.policy``, and then waits in an index of its own: claims of other events do not see it,
however many there are. Claims allow events of a group as far as its limits allow. An allowed
event keeps the group for as long as it is leased. So the runs of a group are its rows with a live
lease, and those of a process that was killed are free when its leases end, or are taken away.

Functions of a transaction. Two hosts that allow events of one group at the same time are
serialised by the row of the group in ``policy``, which also has its token bucket.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ...base.throttle import TokenBucket
from ...records.policies import ClaimLimits, EventPause, GroupLimit, burst_of, may_coalesce
from ..admission import LeaseTerms
from .deliveries import RunEnd, end_all, note_reason
from .dialect import SqlTransaction
from .schema import unfinished

#: The most events whose group one claim finds or changes.
CHUNK = 1000

#: The seconds after which a group that another host is just claiming from is asked again.
BUSY_SECONDS = 0.05

#: The most events of a lane that are read to find the newest one of a type.
_LANE_CHUNK = 200

#: The most rounds of one claim in one group: each ends superseded events or moves paused ones.
_ROUNDS = 20

#: Returns the sequences of a group's next events, at most so many, locked.
Find = Callable[[str, int], list[int]]

#: Returns a token that no other claim has.
NewToken = Callable[[], int]


class Allowed(msgspec.Struct, frozen=True):
    """Events of groups that a claim may take, and what it has found.

    ``superseded`` are the keys of events that were ended, each with that of the newer one.
    ``next_at`` is when a rate allows the next run, by the caller's clock. ``waiting``: events of a
    group wait for a slot, a token or a worker. ``more``: another claim finds more at once.
    """

    sequences: Sequence[int] = ()
    superseded: Sequence[tuple[str, str]] = ()
    next_at: float | None = None
    waiting: bool = False
    more: bool = False


# -- groups --------------------------------------------------------------------------------------

_READ_TYPES = "SELECT sequence, type, '', signer FROM arrival WHERE sequence IN ints(:sequences)"
_READ_BODIES = "SELECT sequence, type, raw, signer FROM arrival WHERE sequence IN ints(:sequences)"

_HOLD_IN_GROUP = """
UPDATE work SET policy = :policy, lease_owner = NULL, lease_token = NULL, lease_until = NULL,
    failed_at = CASE WHEN lease_owner IS NULL THEN failed_at ELSE coalesce(failed_at, 0) END
WHERE sequence IN ints(:sequences)
"""

# One step of an index for each group, however many events wait in it.
_LIST_GROUPS = """
WITH RECURSIVE step (policy) AS (
    SELECT (SELECT policy FROM work WHERE policy IS NOT NULL AND lease_owner IS NULL
        ORDER BY policy LIMIT 1)
    UNION ALL SELECT (SELECT work.policy FROM work
        WHERE work.policy IS NOT NULL AND lease_owner IS NULL AND work.policy > step.policy
        ORDER BY work.policy LIMIT 1)
    FROM step WHERE step.policy IS NOT NULL
)
SELECT policy FROM step WHERE policy IS NOT NULL
"""

_LEAVE_GROUP = """
UPDATE work SET policy = NULL WHERE sequence IN (
    SELECT sequence FROM work WHERE policy = :policy AND lease_owner IS NULL
    ORDER BY sequence LIMIT :limit FOR UPDATE SKIP LOCKED)
"""


_LEAVE_GROUPS = "UPDATE work SET policy = NULL WHERE sequence IN ints(:sequences)"


def groups_of(tx: SqlTransaction, limits: ClaimLimits, sequences: Sequence[int]) -> dict[int, str]:
    """Return the groups of those events that have one."""
    if not (sequences and (limits.groups or limits.pauses)):
        return {}
    rows = tx.all(_READ_BODIES if limits.reads_bodies else _READ_TYPES, sequences=list(sequences))
    groups = ((row[0], limits.group_of(row[1], bytes(row[2] or b""), row[3])) for row in rows)
    return {sequence: group for sequence, group in groups if group is not None}


def hold(tx: SqlTransaction, groups: Mapping[int, str]) -> None:
    """Let unleased or expired events wait in their groups."""
    for group in sorted({*groups.values()}):
        sequences = [sequence for sequence, each in groups.items() if each == group]
        tx.run(_HOLD_IN_GROUP, policy=group, sequences=sequences)


def allow(
    tx: SqlTransaction,
    terms: LeaseTerms,
    limits: ClaimLimits,
    find: Find,
    new_token: NewToken,
    *,
    now: float,
    live_only: bool = True,
) -> Allowed:
    """Choose the events of groups that may run now; the caller leases them in this transaction.

    Events of a group that is none any more, because its pause or policy has ended, wait for
    nothing from now on.

    Args:
        tx: the transaction.
        terms: the owner, and the duration of a lease.
        limits: those of this process.
        find: finds the next events of a group.
        new_token: returns a token that no other claim has.
        now: Unix seconds.
        live_only: leases that have expired use no slot.
    """
    allowed = _Allowance(tx, terms, limits, find, new_token, now, live_only)
    for (group,) in tx.all(_LIST_GROUPS):
        limit = limits.groups.get(group)
        if limit is not None:
            allowed.allow(group, limit)
        elif group not in limits.pauses:
            allowed.more |= tx.run(_LEAVE_GROUP, policy=group, limit=CHUNK) > 0
    return allowed.result


# -- allowance -----------------------------------------------------------------------------------

_LOCK_GROUP = "SELECT missing, as_of, clock() FROM policy WHERE name = :name FOR UPDATE SKIP LOCKED"

_ADD_GROUP = """
INSERT INTO policy (name, missing, as_of) VALUES (:name, 0, 0) ON CONFLICT (name) DO NOTHING
"""

_SAVE_TOKENS = "UPDATE policy SET missing = :missing, as_of = :as_of WHERE name = :name"

_COUNT_RUNNING = """
SELECT count(*) FROM work WHERE policy = :policy AND lease_owner IS NOT NULL
    AND (lease_until > clock() OR NOT CAST(:live_only AS boolean))
"""


class _Allowance:
    """One call of :func:`allow`."""

    def __init__(
        self,
        tx: SqlTransaction,
        terms: LeaseTerms,
        limits: ClaimLimits,
        find: Find,
        new_token: NewToken,
        now: float,
        live_only: bool,
    ) -> None:
        self._tx = tx
        self._terms = terms
        self._limits = limits
        self._find = find
        self._new_token = new_token
        self._now = now
        self._live_only = live_only
        self._free_workers = limits.free_workers
        self._sequences: list[int] = []
        self._superseded: list[tuple[str, str]] = []
        self._next_at: float | None = None
        self._waiting = False
        self.more = False

    @property
    def result(self) -> Allowed:
        return Allowed(
            self._sequences,
            self._superseded,
            self._next_at,
            self._waiting,
            self.more,
        )

    def allow(self, group: str, limit: GroupLimit) -> None:
        """Allow events of one group, as many as its limits and the free workers allow."""
        self._waiting = True
        if self._free_workers <= 0:
            return
        locked = self._lock(group)
        if locked is None:
            self._come_back(BUSY_SECONDS)
            return
        missing, as_of, clock = locked
        most = self._free_workers
        if limit.concurrency is not None:
            running = self._tx.one(
                _COUNT_RUNNING, policy=group, live_only=self._live_only, now=self._now
            )
            most = min(most, limit.concurrency - (int(running[0]) if running else 0))
        bucket = None
        if limit.rate_per_minute is not None:
            bucket = TokenBucket(
                per_second=limit.rate_per_minute / 60.0,
                burst=burst_of(limit.rate_per_minute),
                missing=missing,
                as_of=as_of,
            )
            most = min(most, bucket.available(clock))
        chosen = self._choose(group, limit, most) if most > 0 else []
        self._sequences += chosen
        self._free_workers -= len(chosen)
        if bucket is not None:
            # A count from a clock that was ahead: tokens come back from now on.
            if chosen or as_of > clock:
                bucket.take(clock, len(chosen))
                missing = bucket.missing(clock)
                self._tx.run(_SAVE_TOKENS, name=group, missing=missing, as_of=clock)
            if (wait := bucket.wait(clock)) > 0.0:
                self._come_back(wait)

    def _lock(self, group: str) -> tuple[float, float, float] | None:
        row = self._tx.one(_LOCK_GROUP, name=group, now=self._now)
        if row is None:
            self._tx.run(_ADD_GROUP, name=group)
            row = self._tx.one(_LOCK_GROUP, name=group, now=self._now)
        return None if row is None else (float(row[0]), float(row[1]), float(row[2]))

    def _come_back(self, seconds: float) -> None:
        at = self._now + seconds
        self._next_at = at if self._next_at is None else min(at, self._next_at)

    def _choose(self, group: str, limit: GroupLimit, most: int) -> list[int]:
        """Return the next events of a group; paused ones among them move, superseded ones end."""
        for _ in range(_ROUNDS):
            found = self._find(group, most)
            if self._move(group, found):
                continue
            if not (limit.coalesce and self._supersede(group, found)):
                return found
        self.more = True
        return []

    def _move(self, group: str, found: Sequence[int]) -> bool:
        """Move events that are of another group now, as a pause has begun; say if there were."""
        groups = groups_of(self._tx, self._limits, found)
        if all(groups.get(sequence) == group for sequence in found):
            return False
        # If one is paused, the others of its type are, too.
        found = self._find(group, CHUNK)
        groups = groups_of(self._tx, self._limits, found)
        hold(self._tx, {sequence: each for sequence, each in groups.items() if each != group})
        free = [sequence for sequence in found if sequence not in groups]
        if free:
            self._tx.run(_LEAVE_GROUPS, sequences=free)
            self.more = True
        return True

    def _supersede(self, group: str, found: Sequence[int]) -> bool:
        """End events of which a newer one of their subject and type waits; say if there were."""
        superseded: dict[int, tuple[str, str]] = {}
        for sequence in found:
            of_lane = self._waiting_in_lane_of(group, sequence)
            if len(of_lane) > 1:
                newest = of_lane[-1][1]
                superseded |= {number: (key, newest) for number, key in of_lane[:-1]}
        if not superseded:
            return False
        self._end(superseded)
        return True

    def _waiting_in_lane_of(self, group: str, sequence: int) -> list[tuple[int, str]]:
        listed = self._tx.all(_LIST_LANE, sequence=sequence, limit=_LANE_CHUNK)
        rows = [row for row in listed if may_coalesce(row[1])]
        own = next((row[2] for row in rows if row[0] == sequence), None)
        return [
            (number, key)
            for number, key, event_type, raw, signer in rows
            if event_type == own
            and self._limits.group_of(event_type, bytes(raw or b""), signer) == group
        ]

    def _end(self, superseded: Mapping[int, tuple[str, str]]) -> None:
        token = self._new_token()
        rows = self._tx.all(_MARK_SUPERSEDED, sequences=list(superseded), token=token)
        runs = [RunEnd(number, token + number, self._now) for (number,) in rows]
        done = end_all(self._tx, self._terms, runs)
        for run, is_done in zip(runs, done, strict=True):
            if is_done:
                key, newer = superseded[run.sequence]
                note_reason(self._tx, run.sequence, f"superseded by {newer}")
                self._superseded.append((key, newer))


# -- coalescing ----------------------------------------------------------------------------------

# A lane has the unfinished events of one subject, oldest first.
_LIST_LANE = f"""
SELECT work.sequence, arrival.delivery_key, arrival.type, arrival.raw, arrival.signer
FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE work.lane = (SELECT this.lane FROM work AS this WHERE this.sequence = :sequence)
    AND work.lane IS NOT NULL AND {unfinished("work")} AND work.queued AND work.lease_owner IS NULL
ORDER BY work.sequence LIMIT :limit
"""

# A token without an owner is no lease: of a lane only one event is leased.
_MARK_SUPERSEDED = """
UPDATE work SET lease_token = :token + sequence
WHERE sequence IN ints(:sequences) AND lease_owner IS NULL RETURNING sequence
"""


# -- pauses --------------------------------------------------------------------------------------

_LIST_PAUSES = """
SELECT glob, since, actor, reason, until, ended_at, ended_by FROM pause
WHERE ended_at IS NULL OR CAST(:ended AS boolean) ORDER BY since, id
"""

# One that is there keeps its beginning: a second pause changes why and how long.
_CHANGE_PAUSE = """
UPDATE pause SET until = :until, reason = :reason, actor = :actor
WHERE glob = :glob AND ended_at IS NULL AND (until IS NULL OR until > :now) RETURNING id
"""

_END_OVERDUE_PAUSES = """
UPDATE pause SET ended_at = until, ended_by = '' WHERE ended_at IS NULL AND until <= :now
"""

_ADD_PAUSE = """
INSERT INTO pause (glob, since, actor, reason, until)
VALUES (:glob, :now, :actor, :reason, :until)
"""

_END_PAUSES = """
UPDATE pause SET ended_at = :now, ended_by = :actor
WHERE ended_at IS NULL AND (glob = :glob OR CAST(:glob AS text) IS NULL) RETURNING glob
"""


def pauses(tx: SqlTransaction, *, ended: bool = False) -> list[EventPause]:
    """Return the pauses that were not resumed; with ``ended`` all of them."""
    return [
        EventPause(glob, since, actor, reason, until, ended_at, ended_by or None)
        for glob, since, actor, reason, until, ended_at, ended_by in tx.all(
            _LIST_PAUSES, ended=ended
        )
    ]


def pause(
    tx: SqlTransaction, glob: str, *, actor: str, reason: str, until: float | None, now: float
) -> None:
    """Pause the events whose type matches ``glob``."""
    tx.run(_END_OVERDUE_PAUSES, now=now)
    given = {"glob": glob, "actor": actor, "reason": reason, "until": until, "now": now}
    if tx.one(_CHANGE_PAUSE, **given) is None:
        tx.run(_ADD_PAUSE, **given)
    tx.note_change()


def resume(tx: SqlTransaction, glob: str | None, *, actor: str, now: float) -> list[str]:
    """End the pause of ``glob``, None: of all; return the globs of those that were in force."""
    tx.run(_END_OVERDUE_PAUSES, now=now)
    ended = [row[0] for row in tx.all(_END_PAUSES, glob=glob, actor=actor, now=now)]
    tx.note_change()
    return ended
