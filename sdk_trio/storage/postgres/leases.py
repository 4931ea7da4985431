"""Leases of deliveries in PostgreSQL: taking, renewing, giving up and taking over.

Plain functions of a connection, jobs for :class:`GroupCommit`; :class:`Inbox` describes them. What
another process is just taking is passed over and not waited for (``SKIP LOCKED``), so any number of
processes take different deliveries at the same time.
"""

from collections.abc import Collection, Sequence

from ...records.deliveries import PROCESS_ENDED, DeliveryRecord, DeliveryState, Due, Renewed
from .. import backlog
from ..admission import CLOCK_SLACK_SECONDS
from ..backlog import BacklogWalk
from ..term import TermEndedError
from .connect import StoreConnection
from .reads import RECORD, by_sequence, record_of_row
from .schema import UNFINISHED
from .writes import CLOCK, COUNTED, SharedTerms, shifted

# The second condition is for two processes that keep two deliveries of one lane at once: the one
# with the smaller number may be committed later, when the other runs already. Both are written so
# that only one index fits, because the plan is made when the table is small: one entry of the lanes
# is read for each delivery, and once the live leases, of which there are few. To ask whether an
# earlier one *exists* in a lane of thousands may read the whole table.
_FIRST_IN_LANE = f"""
(this.lane IS NULL OR (this.sequence = (
    SELECT other.sequence FROM work AS other WHERE other.lane >= this.lane AND other.{UNFINISHED}
    ORDER BY other.lane, other.sequence LIMIT 1
) AND NOT (%(shared)s AND this.lane IN (
    SELECT coalesce(other.lane, '') FROM work AS other
    WHERE other.lease_owner > '' AND {{whose}} AND other.lease_until > {CLOCK}
        AND other.lease_until <= {CLOCK} + %(seconds)s + {CLOCK_SLACK_SECONDS}))))
"""


def _find(which: str, *, columns: str = "sequence", leased_by: str = "true") -> str:
    """Return SQL that finds and locks the first in their lanes of the rows for which ``which``."""
    first = _FIRST_IN_LANE.format(whose=leased_by)
    return (
        f"SELECT {columns} FROM work AS this WHERE {which} AND {first} "
        "ORDER BY sequence LIMIT %(limit)s FOR UPDATE SKIP LOCKED"
    )


# A deadline further ahead than any lease lasts was written by a wrong clock. The owners are two
# ranges of an index, because for an inequality each claim would read every lease of ours.
_HAS_EXPIRED = f"""
lease_owner IS NOT NULL AND (lease_owner < %(owner)s OR lease_owner > %(owner)s)
    AND (lease_until <= {CLOCK} OR lease_until > {CLOCK} + %(seconds)s + {CLOCK_SLACK_SECONDS})
"""

_IS_WAITING = "queued AND state = 'received' AND lease_owner IS NULL"

_WAITING = f"""
SELECT sequence FROM work WHERE {_IS_WAITING} AND sequence > %(passed)s ORDER BY sequence LIMIT
"""

_RECEIVED = _find(f"sequence = ANY(ARRAY({_WAITING} {backlog.WINDOW})) AND {_IS_WAITING}")

_PASSED_BY = _find(f"sequence = ANY(%(passed_by)s::bigint[]) AND {_IS_WAITING}")

# One step of an index for each lane, however many deliveries wait in it.
_FIRST_OF_LANE = f"""
SELECT lane, sequence FROM work WHERE lane IS NOT NULL AND {UNFINISHED} AND lane > {{after}}
ORDER BY lane, sequence LIMIT 1
"""

_FIRSTS = f"""
WITH RECURSIVE first AS (
    ({_FIRST_OF_LANE.format(after="%(lane)s")}) UNION ALL
    SELECT next.* FROM first
    CROSS JOIN LATERAL ({_FIRST_OF_LANE.format(after="first.lane")}) AS next
) SELECT lane, sequence FROM first LIMIT {backlog.LANES}
"""

_RETRYING = _find(
    f"queued AND state = 'retrying' AND lease_owner IS NULL AND next_attempt_at <= {CLOCK}"
)

_IS_EXPIRED = f"queued AND {UNFINISHED} AND {_HAS_EXPIRED}"

# Without an order in the inner one: a plan for any owner would go through the whole table in the
# order of its numbers, and hope to find enough early.
_EXPIRED = _find(
    f"sequence = ANY(ARRAY(SELECT sequence FROM work WHERE {_IS_EXPIRED})) AND {_IS_EXPIRED}",
    columns="sequence, state",
)

# One that is asked for may be ours already.
_SUSPECTS = _find(
    "process_ends > 0 AND state = 'received' AND queued "
    "AND (lease_owner IS NULL OR lease_owner = %(owner)s)",
    leased_by="other.lease_owner <> %(owner)s",
)

_LEASE = f"""
UPDATE work SET lease_owner = %(owner)s, lease_until = {CLOCK} + %(seconds)s
WHERE sequence = ANY(%(sequences)s::bigint[])
"""

_RELEASE = """
UPDATE work SET lease_owner = NULL, lease_until = NULL
FROM arrival WHERE arrival.sequence = work.sequence AND delivery_key = ANY(%s::text[])
    AND lease_owner = %s AND state IN ('received', 'retrying')
"""

# A handler whose effects are one transaction with the end of its event has locked the row, and
# no one else takes it. To wait for such a row would hold up every commit of this process.
_OURS = f"""
SELECT sequence, delivery_key FROM work JOIN arrival USING (sequence)
WHERE lease_owner = %(owner)s AND {UNFINISHED}
FOR NO KEY UPDATE OF work SKIP LOCKED
"""

# The run was never begun, or its end could not be recorded: the attempt does not count.
_GIVE_UP = """
UPDATE work SET attempts = attempts - (state = 'running')::int,
    started_at = CASE WHEN state = 'running' THEN NULL ELSE started_at END,
    state = CASE WHEN state = 'running' THEN 'received' ELSE state END,
    lease_owner = NULL, lease_until = NULL
WHERE sequence = ANY(%s::bigint[])
"""

_HELD_BY_OTHERS = f"""
SELECT delivery_key FROM arrival JOIN work USING (sequence)
WHERE delivery_key = ANY(%s::text[]) AND lease_owner <> %s AND {UNFINISHED}
"""

_HELD = f"""
SELECT sequence, state FROM work
WHERE {UNFINISHED} AND lease_owner IS NOT NULL AND lease_owner <> %(owner)s
    AND (NOT %(shared)s OR ({_HAS_EXPIRED}) OR lease_owner = %(dead)s
        OR starts_with(lease_owner, %(dead)s || '.'))
FOR UPDATE SKIP LOCKED
"""

_HELD_BY = f"""
SELECT sequence, state, process_ends FROM work WHERE {UNFINISHED} AND lease_owner = %s FOR UPDATE
"""

# The first start of a delivery is not waited for, so its process may have ended in that run without
# a trace. Whoever takes the lease of a process that is gone says so by a time of failure in 1970:
# that delivery's next start is waited for and counted (docs/adr/0011).
_LEAVE = f"""
UPDATE work SET lease_owner = %(heir)s, lease_until = {CLOCK} + %(seconds)s,
    failed_at = coalesce(failed_at, 0)
WHERE sequence = ANY(%(sequences)s::bigint[])
"""

_FREE = """
UPDATE work SET lease_owner = NULL, lease_until = NULL, failed_at = coalesce(failed_at, 0)
WHERE sequence = ANY(%s::bigint[])
"""

# The end of the run is taken from the last renewal of its lease, the last sign of life.
_RECORD_ENDS = """
INSERT INTO attempt (sequence, number, started_at, finished_at, error)
SELECT sequence, attempts, coalesce(started_at, received_at),
    greatest(coalesce(started_at, received_at), coalesce(lease_until, 0) - %(seconds)s), %(error)s
FROM work JOIN arrival USING (sequence)
WHERE sequence = ANY({sequences}::bigint[]) AND state = 'running'
"""

_CUT_SHORT = """
UPDATE work SET state = 'received', queued = true, process_ends = process_ends + 1,
    ran_alone = ran_alone OR %(sole)s, last_error = %(error)s
WHERE sequence = ANY(%(sequences)s::bigint[]) AND state = 'running'
"""

_RAN = "(SELECT array_agg(sequence) FROM due WHERE held = 'running')"

# All of a claim is one statement: seven of them took longer than the runs of a hundred events. The
# owner of an expired lease hangs or is gone, so a run of it (`held`) counts as one that ended the
# process. One more than wanted of each kind tells whether there are more. With nothing due there
# is one row, which has the last three columns alone.
_TAKE = f"""
WITH received AS ({_RECEIVED}), passed_by AS ({_PASSED_BY}), retrying AS ({_RETRYING}),
expired AS ({_EXPIRED}), found AS (
    SELECT sequence, NULL AS held FROM received UNION ALL SELECT sequence, NULL FROM passed_by
    UNION ALL SELECT sequence, NULL FROM retrying UNION ALL SELECT sequence, state FROM expired
), due AS (
    SELECT * FROM found ORDER BY sequence LIMIT %(limit)s - 1
), recorded AS (
    {_RECORD_ENDS.format(sequences=_RAN)}
), taken AS (
    UPDATE work SET lease_owner = %(owner)s, lease_until = {CLOCK} + %(seconds)s,
        state = CASE WHEN held = 'running' THEN 'received' ELSE state END,
        process_ends = process_ends + CASE WHEN held = 'running' THEN 1 ELSE 0 END,
        last_error = CASE WHEN held = 'running' THEN %(error)s ELSE last_error END,
        failed_at = CASE WHEN held IS NULL THEN failed_at ELSE coalesce(failed_at, 0) END
    FROM due WHERE work.sequence = due.sequence RETURNING work.*
), {COUNTED.format(done=0, rows="taken")}
SELECT {RECORD.format(raw="raw")}, failed_at IS NULL, (SELECT count(*) FROM found), (
    SELECT {shifted("min(next_attempt_at)", CLOCK, "%(now)s::float8")} FROM work
    WHERE queued AND state = 'retrying' AND lease_owner IS NULL AND next_attempt_at > {CLOCK}),
    CASE WHEN (SELECT count(*) FROM found) < %(limit)s
        THEN ({_WAITING} 1 OFFSET {backlog.WINDOW - 1}) END
FROM (VALUES (1)) AS always LEFT JOIN (taken JOIN arrival USING (sequence)) ON true
ORDER BY sequence
"""

# A look of another host does not see what this one takes until its commit, and an event that was
# kept before may become visible in between: each would take one of the same lane. So whoever takes
# from a lane holds its lock until the commit, and looks once more behind it. The first number keeps
# these locks apart from others.
_LOCK_LANES = """
SELECT pg_advisory_xact_lock(7301, lane) FROM (
    SELECT DISTINCT hashtext(encode(lane, 'hex')) AS lane FROM work
    WHERE sequence = ANY(%(sequences)s::bigint[]) AND lane IS NOT NULL ORDER BY 1) AS lanes
"""

_YIELD = f"""
UPDATE work SET lease_owner = NULL, lease_until = NULL
WHERE sequence = ANY(%(sequences)s::bigint[]) AND lane IN (
    SELECT coalesce(other.lane, '') FROM work AS other
    WHERE other.lease_owner > '' AND other.lease_owner <> %(owner)s
        AND other.lease_until > {CLOCK}
        AND other.lease_until <= {CLOCK} + %(seconds)s + {CLOCK_SLACK_SECONDS})
RETURNING sequence
"""

# A clock that was ahead when a retry was planned would make it wait for hours after it was set
# right.
_RESCHEDULE = f"""
UPDATE work SET next_attempt_at = {CLOCK}, failed_at = {CLOCK}
WHERE state = 'retrying' AND queued AND next_attempt_at > {CLOCK}
    AND coalesce(failed_at, started_at)
        > CASE WHEN %(server)s AND %(now)s = 0 THEN 0 ELSE {CLOCK} + {CLOCK_SLACK_SECONDS} END
"""


def take_due(
    connection: StoreConnection, terms: SharedTerms, walk: BacklogWalk, limit: int, now: float
) -> Due:
    """Lease due deliveries, oldest arrival first in each part of the backlog."""
    walk.begin(now)
    values = terms.values(
        now, limit=limit + 1, shared=terms.shared, error=PROCESS_ENDED, node=connection.node
    )
    values |= {"passed": walk.passed, "passed_by": _firsts(connection, walk)}
    rows = connection.execute(_TAKE, values).fetchall()
    found, next_due_at, last_seen = rows[0][-3:]
    if found <= limit:
        walk.end(last_seen, now=now)
    else:
        walk.stay(now=now)
    records = [record_of_row(row[:-4]) for row in rows if row[0] is not None]
    yielded = _yield_lanes(connection, terms, records, now)
    unbegun = frozenset(
        record.key
        for record, row in zip(records, rows, strict=False)
        if row[-4] and not record.attempts and record.state is DeliveryState.RECEIVED
    )
    more = found > limit or walk.more(last_seen)
    kept = [record for record in records if record.sequence not in yielded]
    return Due(kept, more, walk.until(next_due_at), unbegun)


def _yield_lanes(
    connection: StoreConnection,
    terms: SharedTerms,
    records: Sequence[DeliveryRecord],
    now: float,
) -> frozenset[int]:
    """Give back those of which another host runs one of the same lane; return their sequences."""
    ordered = [record.sequence for record in records if record.ordered]
    if not terms.shared or not ordered:
        return frozenset()
    values = terms.values(now, sequences=ordered)
    connection.execute(_LOCK_LANES, values)
    return frozenset(sequence for (sequence,) in connection.execute(_YIELD, values))


def _firsts(connection: StoreConnection, walk: BacklogWalk) -> list[int]:
    """Return the first deliveries of the next lanes, as far as the walk has passed them."""
    if walk.passed == 0:
        return []
    (lane,) = walk.lane or (b"",)
    rows = connection.execute(_FIRSTS, {"lane": lane}).fetchall()
    walk.lane = (rows[-1][0],) if len(rows) == backlog.LANES else None
    return [sequence for _, sequence in rows if sequence <= walk.passed]


def take_suspects(
    connection: StoreConnection, terms: SharedTerms, limit: int, now: float
) -> list[DeliveryRecord]:
    """Lease deliveries that ran when a process ended, oldest arrival first."""
    values = terms.values(now, limit=limit, shared=terms.shared)
    found = [sequence for (sequence,) in connection.execute(_SUSPECTS, values)]
    if not found:
        return []
    connection.write(_LEASE, terms.values(now, sequences=found))
    records = by_sequence(connection, found)
    yielded = _yield_lanes(connection, terms, records, now)
    return [record for record in records if record.sequence not in yielded]


def _cut_short(
    connection: StoreConnection, terms: SharedTerms, sequences: Sequence[int], *, sole: bool
) -> None:
    """Put runs of other owners back to ``received``, because their processes have ended."""
    if sequences:
        values = terms.values(0.0, sequences=list(sequences), error=PROCESS_ENDED, sole=sole)
        connection.write(_RECORD_ENDS.format(sequences="%(sequences)s"), values)
        connection.write(_CUT_SHORT, values)


def release(connection: StoreConnection, terms: SharedTerms, keys: Sequence[str]) -> None:
    """Give up leases of ours whose run was never started."""
    connection.write(_RELEASE, (list(keys), terms.lease.owner))


def renew(
    connection: StoreConnection, terms: SharedTerms, held: Collection[str], now: float
) -> Renewed:
    """Extend the leases of ours with the keys ``held``, and give up all others."""
    ours = connection.execute(_OURS, terms.values(now)).fetchall()
    kept = [sequence for sequence, key in ours if key in held]
    stray = [sequence for sequence, key in ours if key not in held]
    if kept:
        # Not a change that others have to look for.
        connection.execute(_LEASE, terms.values(now, sequences=kept))
    if stray:
        connection.write(_GIVE_UP, (stray,))
    missing = sorted(set(held).difference(key for _, key in ours))
    lost: list[str] = []
    if missing:
        found = connection.execute(_HELD_BY_OTHERS, (missing, terms.lease.owner))
        lost = [key for (key,) in found]
    return Renewed(frozenset(lost), given_up=len(stray))


def recover(connection: StoreConnection, terms: SharedTerms, dead: str | None) -> int:
    """Take away the leases of other owners, and count them.

    In a shared store those that have expired, and those of ``dead`` and of its processes.
    """
    values = terms.values(0.0, shared=terms.shared, dead=dead)
    held = connection.execute(_HELD, values).fetchall()
    sequences = [sequence for sequence, _ in held]
    # If the dead process held nothing else, this run has ended it, and needs no quarantine to prove
    # that (ADR 23).
    _cut_short(connection, terms, sequences, sole=len(held) == 1)
    connection.write(_FREE, (sequences,))
    return len(held)


def take_over(
    connection: StoreConnection, terms: SharedTerms, owner: str, heir: str, now: float
) -> int:
    """Take away the leases of ``owner``; its runs are left to ``heir``. Return how many."""
    held = connection.execute(_HELD_BY, (owner,)).fetchall()
    running = [sequence for sequence, state, _ in held if state == "running"]
    # Before the lease goes: the end of the run is computed from it.
    _cut_short(connection, terms, running, sole=len(held) == 1)
    # One that the dead owner was left itself, and has not tried yet, goes on to its heir.
    suspects = [row[0] for row in held if row[1] == "running" or row[2]]
    connection.write(_FREE, (sorted({row[0] for row in held}.difference(suspects)),))
    connection.write(_LEAVE, terms.values(now, heir=heir, sequences=suspects))
    return len(held)


# A row of the checkpoints, as there is one such lease: owner, term and end.
_LEAD = """
INSERT INTO checkpoint AS held (name, value)
VALUES (%(name)s, json_build_object('owner', %(owner)s::text, 'term', 1, 'until', {until})::text)
ON CONFLICT (name) DO UPDATE SET value = json_build_object('owner', %(owner)s::text,
    'term', (held.value::json ->> 'term')::bigint
        + CASE WHEN held.value::json ->> 'owner' = %(owner)s THEN 0 ELSE 1 END,
    'until', {until})::text
WHERE held.value::json ->> 'owner' = %(owner)s
    OR (held.value::json ->> 'until')::float8 <= {now}
RETURNING (value::json ->> 'term')::bigint
""".format(
    now="extract(epoch FROM statement_timestamp())::float8",
    until="extract(epoch FROM statement_timestamp())::float8 + %(seconds)s::float8",
)

# Locked until the commit, so that no other owner begins a term in between.
_TERM = "SELECT value::json ->> 'owner', (value::json ->> 'term')::bigint FROM checkpoint"

#: The lease of the host that leads the others, and of the one that upgrades from a single tenant.
LEADER = "storage.leader"
UPGRADER = "upgrade.lease"


def lead(
    connection: StoreConnection, owner: str, seconds: float, *, name: str = LEADER
) -> int | None:
    """Take or renew a lease of the whole store; return its term, None while another holds it."""
    values = {"name": name, "owner": owner, "seconds": seconds}
    # Not a change that others have to look for.
    row = connection.execute(_LEAD, values).fetchone()
    return None if row is None else int(row[0])


def require_term(connection: StoreConnection, owner: str, term: int, *, name: str = LEADER) -> None:
    """Raise TermEndedError unless ``owner`` still holds that lease in this term."""
    row = connection.execute(f"{_TERM} WHERE name = %s FOR UPDATE", (name,)).fetchone()
    if row is None or tuple(row) != (owner, term):
        did = "led the others" if name == LEADER else "ran the upgrade"
        raise TermEndedError(
            f"this host {did} in term {term}, which is over: another one may go on"
        )


def reschedule(connection: StoreConnection, terms: SharedTerms, now: float) -> int:
    """Make due the retries that were decided in the future; return their number."""
    return connection.write(_RESCHEDULE, terms.values(now)).rowcount
