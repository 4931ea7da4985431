"""Everything that changes messages to site managers in SQLite: jobs for the committer.

What the functions mean is said once, in :class:`~.ports.NotificationStore`. Two invariants keep
``notification_open`` sorted: only a ``retrying`` row has ``next_attempt_at``, and only a leased
row has ``lease_owner``. As in the inbox, each statement names the index that it needs.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import apsw

from .admission import Terms
from .notification_records import (
    CUT_OFF,
    POSITION,
    SILENT,
    SWITCHED_OFF,
    DueNotifications,
    Ending,
    Enlisted,
    NotificationId,
    NotificationRecord,
    NotificationState,
    Recovered,
    too_old,
)
from .schema import NOTIFICATION_OPEN
from .sqlite_notification_reader import OPEN, get, position

# -- new messages ------------------------------------------------------------------------------

_NEXT_TRANSITIONS = """
SELECT sequence, occurred_at FROM outbox WHERE sequence > ? ORDER BY sequence LIMIT ?
"""

_INSERT = """
INSERT INTO notification
    (sequence, channel, state, repeatable, attempts, created_at, finished_at, reason)
VALUES (?, ?, ?, ?, 0, ?, ?, ?)
ON CONFLICT (sequence, channel) DO NOTHING
"""

_MOVE = """
INSERT INTO checkpoint (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""

_WAITING = f"""
SELECT sequence, channel {OPEN} AND state IN ('pending', 'retrying') AND lease_owner IS NULL
"""

_SKIP = """
UPDATE notification SET state = 'skipped', reason = ?, finished_at = ?, next_attempt_at = NULL
WHERE sequence = ? AND channel = ?
"""


def enlist(
    connection: apsw.Connection,
    channels: Mapping[str, bool],
    now: float,
    oldest: float,
    limit: int,
) -> Enlisted:
    """Give the next transitions their messages, and skip what waits on other channels."""
    skipped = _skip_others(connection, channels, now)
    reached = position(connection)
    if reached is None:
        reached = connection.execute("SELECT max(sequence) FROM outbox").get or 0
        connection.execute(_MOVE, (POSITION, str(reached)))
        return Enlisted(0, skipped, more=False)
    pending = 0
    rows = connection.execute(_NEXT_TRANSITIONS, (reached, limit)).fetchall()
    for sequence, occurred_at in cast("Sequence[tuple[int, float]]", rows):
        reached = sequence
        for channel, repeatable in channels.items():
            fresh = occurred_at >= oldest
            state, end = ("pending", None) if fresh else ("skipped", now)
            reason = None if fresh else too_old(now - occurred_at)
            connection.execute(
                _INSERT, (sequence, channel, state, int(repeatable), now, end, reason)
            )
            pending += fresh
            skipped += not fresh
    if rows:
        connection.execute(_MOVE, (POSITION, str(reached)))
    return Enlisted(pending, skipped, more=len(rows) == limit)


def switch_off(connection: apsw.Connection) -> None:
    """Forget which transition had its turn last, and keep that nobody is told."""
    connection.execute(_MOVE, (POSITION, SILENT))


def _skip_others(connection: apsw.Connection, channels: Mapping[str, bool], now: float) -> int:
    others = [row for row in connection.execute(_WAITING) if row[1] not in channels]
    connection.executemany(_SKIP, [(SWITCHED_OFF, now, *row) for row in others])
    return len(others)


# -- leases ------------------------------------------------------------------------------------

_PENDING = f"""
SELECT sequence {OPEN} AND channel = :channel AND state = 'pending' AND lease_owner IS NULL
    AND next_attempt_at IS NULL
ORDER BY sequence LIMIT :limit
"""

_RETRYING = f"""
SELECT sequence {OPEN} AND channel = :channel AND state = 'retrying' AND lease_owner IS NULL
    AND next_attempt_at <= :now
ORDER BY sequence LIMIT :limit
"""

_NEXT_DUE = f"""
SELECT min(next_attempt_at) {OPEN} AND channel = :channel AND state = 'retrying'
    AND lease_owner IS NULL AND next_attempt_at > :now
"""

_EXPIRED = f"""
SELECT sequence, channel {OPEN} AND channel = :channel AND lease_owner > ''
    AND lease_owner <> :owner AND lease_until <= :now
"""

_FOREIGN = f"""
SELECT sequence, channel {OPEN} AND lease_owner > '' AND lease_owner <> :owner
"""

_FREE = """
UPDATE notification SET lease_owner = NULL, lease_until = NULL, next_attempt_at = NULL,
    state = CASE WHEN state = 'sending' AND NOT repeatable THEN 'unknown' ELSE 'pending' END,
    finished_at = CASE WHEN state = 'sending' AND NOT repeatable THEN :now END,
    reason = CASE WHEN state = 'sending' AND NOT repeatable THEN :reason ELSE reason END
WHERE sequence = :sequence AND channel = :channel
RETURNING state
"""

_LEASE = """
UPDATE notification SET lease_owner = ?, lease_until = ?, next_attempt_at = NULL
WHERE sequence = ? AND channel = ?
"""

_RELEASE = f"""
UPDATE notification INDEXED BY notification_open SET lease_owner = NULL, lease_until = NULL,
    state = 'pending'
WHERE {NOTIFICATION_OPEN} AND state IN ('pending', 'retrying') AND lease_owner = ?
"""

_RENEW = f"""
UPDATE notification INDEXED BY notification_open SET lease_until = ?
WHERE {NOTIFICATION_OPEN} AND lease_owner = ?
"""


def take_due(
    connection: apsw.Connection, terms: Terms, channel: str, limit: int, now: float
) -> DueNotifications:
    """Lease what is due on one channel, oldest transition first."""
    bindings = {"channel": channel, "limit": limit + 1, "now": now, "owner": terms.owner}
    lost = _free(connection, connection.execute(_EXPIRED, bindings).fetchall(), now).lost
    found: list[int] = []
    for statement in (_PENDING, _RETRYING):
        found.extend(sequence for (sequence,) in connection.execute(statement, bindings))
    found.sort()
    records = []
    for sequence in found[:limit]:
        until = now + terms.lease_seconds
        connection.execute(_LEASE, (terms.owner, until, sequence, channel))
        records.append(_record(connection, NotificationId(sequence, channel)))
    return DueNotifications(
        records, lost, len(found) > limit, connection.execute(_NEXT_DUE, bindings).get
    )


def _free(connection: apsw.Connection, rows: Sequence[tuple[object, ...]], now: float) -> Recovered:
    lost = []
    for sequence, channel in cast("Sequence[tuple[int, str]]", rows):
        bindings = {"now": now, "reason": CUT_OFF, "sequence": sequence, "channel": channel}
        if connection.execute(_FREE, bindings).get == "unknown":
            lost.append(_record(connection, NotificationId(sequence, channel)))
    return Recovered(len(rows) - len(lost), lost)


def _record(connection: apsw.Connection, id: NotificationId) -> NotificationRecord:
    record = get(connection, id)
    if record is None:
        raise AssertionError("a message is removed together with its transition")
    return record


def release(connection: apsw.Connection, terms: Terms) -> None:
    """Give up leases of ours whose sending has not begun."""
    connection.execute(_RELEASE, (terms.owner,))


def recover(connection: apsw.Connection, terms: Terms, now: float) -> Recovered:
    """Take away the leases of all other owners."""
    rows = connection.execute(_FOREIGN, {"owner": terms.owner}).fetchall()
    return _free(connection, rows, now)


def renew(connection: apsw.Connection, terms: Terms, now: float) -> None:
    """Extend all leases of ours."""
    connection.execute(_RENEW, (now + terms.lease_seconds, terms.owner))


# -- attempts ----------------------------------------------------------------------------------

_START = """
UPDATE notification SET state = 'sending', attempts = attempts + 1, started_at = ?,
    lease_until = ?, next_attempt_at = NULL
WHERE sequence = ? AND channel = ? AND lease_owner = ? AND state IN ('pending', 'retrying')
"""

_FINISH = f"""
UPDATE notification SET state = :state, reason = :reason, provider_id = :provider_id,
    next_attempt_at = :next_attempt_at, finished_at = :finished_at,
    lease_owner = NULL, lease_until = NULL
WHERE sequence = :sequence AND channel = :channel AND lease_owner = :owner AND {NOTIFICATION_OPEN}
"""

_UNDO = f"""
UPDATE notification SET attempts = attempts - (state = 'sending'), state = 'pending',
    next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE sequence = :sequence AND channel = :channel AND lease_owner = :owner AND {NOTIFICATION_OPEN}
"""

_RETRY = """
UPDATE notification SET state = 'pending', attempts = 0, started_at = NULL, finished_at = NULL,
    provider_id = NULL, reason = NULL
WHERE sequence = ? AND channel = ? AND state IN ('failed', 'skipped', 'unknown')
"""

_PURGE = """
DELETE FROM notification WHERE (sequence, channel) IN (
    SELECT sequence, channel FROM notification INDEXED BY notification_finished
    WHERE finished_at IS NOT NULL AND finished_at < ? LIMIT ?)
"""


def start(connection: apsw.Connection, terms: Terms, id: NotificationId, now: float) -> bool:
    """Mark a message of ours as being sent."""
    until = now + terms.lease_seconds
    connection.execute(_START, (now, until, id.sequence, id.channel, terms.owner))
    return connection.changes() == 1


def finish(
    connection: apsw.Connection, terms: Terms, id: NotificationId, ending: Ending, now: float
) -> bool:
    """Record how an attempt ended."""
    key = {"sequence": id.sequence, "channel": id.channel, "owner": terms.owner}
    if ending.state is NotificationState.PENDING:
        connection.execute(_UNDO, key)
    else:
        connection.execute(
            _FINISH,
            {
                **key,
                "state": ending.state,
                "reason": ending.reason,
                "provider_id": ending.provider_id,
                "next_attempt_at": ending.next_attempt_at,
                "finished_at": None if ending.state is NotificationState.RETRYING else now,
            },
        )
    return connection.changes() == 1


def retry(connection: apsw.Connection, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
    """Put messages back that were not sent."""
    put_back = []
    for id in ids:
        connection.execute(_RETRY, (id.sequence, id.channel))
        if connection.changes():
            put_back.append(id)
    return put_back


def purge(connection: apsw.Connection, before: float, limit: int) -> int:
    """Remove up to ``limit`` messages that were finished before that time."""
    connection.execute(_PURGE, (before, limit))
    return connection.changes()
