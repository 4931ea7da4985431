"""Messages to site managers in the SQLite file of the inbox.

Plain functions of a connection; :class:`SqliteNotifications` runs the reading ones beside the
committer and hands it the others. :class:`NotificationStore` says what each means.

Two invariants keep the index ``notification_open`` sorted: only a ``retrying`` row has
``next_attempt_at``, and only a leased row has ``lease_owner``. As in the inbox, each statement
names the index that it needs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import apsw

from ...records.notifications import (
    CUT_OFF,
    POSITION,
    SILENT,
    SWITCHED_OFF,
    DueNotifications,
    Enlisted,
    Lookout,
    NotificationId,
    NotificationRecord,
    NotificationState,
    Recovered,
    SendResult,
    too_old,
)
from ..admission import LeaseTerms
from .committer import Committer
from .queries import QueryRunner
from .schema import NOTIFICATION_OPEN
from .tenants import OUTBOX_COLUMNS, outbox_of

# SQLite uses a partial index only for a query that repeats its condition.
OPEN = f"FROM notification INDEXED BY notification_open WHERE {NOTIFICATION_OPEN}"

_COLUMNS = (
    "state",
    "repeatable",
    "attempts",
    "created_at",
    "next_attempt_at",
    "started_at",
    "finished_at",
    "provider_id",
    "reason",
)

_SELECT = f"""
SELECT notification.sequence, channel, {", ".join(f"notification.{name}" for name in _COLUMNS)},
    {", ".join(f"outbox.{name}" for name in OUTBOX_COLUMNS)}
FROM notification CROSS JOIN outbox ON outbox.sequence = notification.sequence
"""

_DUE = f"""
SELECT EXISTS (SELECT 1 {OPEN} AND channel = :channel AND state = 'pending'
    AND lease_owner IS NULL)
OR EXISTS (SELECT 1 {OPEN} AND channel = :channel AND state = 'retrying' AND lease_owner IS NULL
    AND next_attempt_at <= :now)
OR EXISTS (SELECT 1 {OPEN} AND channel = :channel AND lease_owner > '' AND lease_until <= :now)
"""


def position(connection: apsw.Connection) -> int | None:
    """Return the sequence of the last enlisted transition; None: not set, or switched off."""
    found = connection.execute("SELECT value FROM checkpoint WHERE name = ?", (POSITION,)).get
    return None if found in (None, SILENT) else int(found)


def look(connection: apsw.Connection, channels: Mapping[str, bool], now: float) -> Lookout:
    """Return whether there are new transitions, and the channels with due messages."""
    reached = position(connection)
    newest = connection.execute("SELECT max(sequence) FROM outbox").get or 0
    due = [
        channel
        for channel in channels
        if connection.execute(_DUE, {"channel": channel, "now": now}).get
    ]
    return Lookout(reached is None or newest > reached, frozenset(due))


def get(connection: apsw.Connection, id: NotificationId) -> NotificationRecord | None:
    """Return one message with its transition."""
    row = connection.execute(
        f"{_SELECT} WHERE notification.sequence = ? AND channel = ?", (id.sequence, id.channel)
    ).fetchone()
    return None if row is None else _record_of(row)


def find(
    connection: apsw.Connection,
    *,
    state: NotificationState | None,
    channel: str | None,
    tenant_id: str | None,
    before: NotificationId | None,
    limit: int,
) -> Sequence[NotificationRecord]:
    """List messages, the newest transition first."""
    conditions = {
        "state = :state": state,
        "channel = :channel": channel,
        "tenant_id = :tenant_id": tenant_id,
        "(notification.sequence, channel) < (:sequence, :last)": before,
    }
    chosen = [text for text, wanted in conditions.items() if wanted is not None]
    where = f"WHERE {' AND '.join(chosen)}" if chosen else ""
    rows = connection.execute(
        f"{_SELECT} {where} ORDER BY notification.sequence DESC, channel DESC LIMIT :limit",
        {
            "state": state,
            "channel": channel,
            "tenant_id": tenant_id,
            "sequence": before and before.sequence,
            "last": before and before.channel,
            "limit": limit,
        },
    )
    return [_record_of(row) for row in rows]


def counts(connection: apsw.Connection) -> dict[NotificationState, int]:
    """Return how many messages are in each state."""
    found: dict[str, int] = dict(
        cast("Any", connection.execute("SELECT state, count(*) FROM notification GROUP BY state"))
    )
    return {state: found.get(state, 0) for state in NotificationState}


def _record_of(row: tuple[Any, ...]) -> NotificationRecord:
    end = 2 + len(_COLUMNS)
    values = dict(zip(_COLUMNS, row[2:end], strict=True))
    values["state"] = NotificationState(values["state"])
    values["repeatable"] = bool(values["repeatable"])
    return NotificationRecord(
        id=NotificationId(row[0], row[1]), outbox=outbox_of(row[end:]), **values
    )


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
    """Give the next transitions their messages, and skip messages that wait on other channels."""
    skipped = _skip_others(connection, channels, now)
    reached = position(connection)
    # The first look ever only draws the line: nobody wants messages about transitions of before
    # (ADR 13).
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
    """Replace the position by the mark that notifications are off."""
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

# A message that was being sent may have arrived. It is sent again only where its receiver can tell
# a repetition; else people decide.
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

_OURS = f"SELECT sequence, channel {OPEN} AND lease_owner = ?"

_RENEW = "UPDATE notification SET lease_until = ? WHERE sequence = ? AND channel = ?"


def take_due(
    connection: apsw.Connection, terms: LeaseTerms, channel: str, limit: int, now: float
) -> DueNotifications:
    """Lease due messages of one channel, oldest transition first."""
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


def release(connection: apsw.Connection, terms: LeaseTerms) -> None:
    """Give up leases of ours whose sending has not begun."""
    connection.execute(_RELEASE, (terms.owner,))


def recover(connection: apsw.Connection, terms: LeaseTerms, now: float) -> Recovered:
    """Take away the leases of all other owners."""
    rows = connection.execute(_FOREIGN, {"owner": terms.owner}).fetchall()
    return _free(connection, rows, now)


def renew(
    connection: apsw.Connection, terms: LeaseTerms, held: Collection[NotificationId], now: float
) -> Recovered:
    """Extend the leases of ours that are ``held``, and give up all others."""
    stray = []
    for row in connection.execute(_OURS, (terms.owner,)).fetchall():
        if NotificationId(*cast("tuple[int, str]", row)) in held:
            connection.execute(_RENEW, (now + terms.lease_seconds, *row))
        else:
            stray.append(row)
    return _free(connection, stray, now)


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

# The attempt was claimed and sent nothing, so it does not count.
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


def start(connection: apsw.Connection, terms: LeaseTerms, id: NotificationId, now: float) -> bool:
    """Mark a message of ours as being sent."""
    until = now + terms.lease_seconds
    connection.execute(_START, (now, until, id.sequence, id.channel, terms.owner))
    return connection.changes() == 1


def finish(
    connection: apsw.Connection,
    terms: LeaseTerms,
    id: NotificationId,
    ending: SendResult,
    now: float,
) -> bool:
    """Record the end of an attempt."""
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


#: Messages that one transaction of the retention removes; deliveries go on in between.
PURGE_CHUNK = 500


class SqliteNotifications:
    """:class:`NotificationStore` in SQLite; cancellation is as in the inbox."""

    def __init__(self, terms: LeaseTerms, committer: Committer, queries: QueryRunner) -> None:
        self._terms = terms
        self._committer = committer
        self._queries = queries

    async def enlist(
        self, channels: Mapping[str, bool], *, now: float, oldest: float, limit: int = 500
    ) -> Enlisted:
        """See :meth:`NotificationStore.enlist`."""
        chosen = dict(channels)
        return await self._committer.submit(lambda c: enlist(c, chosen, now, oldest, limit))

    async def switch_off(self) -> None:
        """See :meth:`NotificationStore.switch_off`."""
        await self._committer.submit(switch_off)

    async def look(self, channels: Mapping[str, bool], *, now: float) -> Lookout:
        """See :meth:`NotificationStore.look`."""
        return await self._queries.run(lambda c: look(c, channels, now))

    async def take_due(self, channel: str, *, limit: int, now: float) -> DueNotifications:
        """See :meth:`NotificationStore.take_due`."""
        terms = self._terms
        return await self._committer.submit(lambda c: take_due(c, terms, channel, limit, now))

    async def start(self, id: NotificationId, *, now: float) -> bool:
        """See :meth:`NotificationStore.start`."""
        terms = self._terms
        return await self._committer.submit(lambda c: start(c, terms, id, now))

    async def finish(self, id: NotificationId, ending: SendResult, *, now: float) -> bool:
        """See :meth:`NotificationStore.finish`."""
        terms = self._terms
        return await self._committer.submit(lambda c: finish(c, terms, id, ending, now))

    async def release(self) -> None:
        """See :meth:`NotificationStore.release`."""
        terms = self._terms
        await self._committer.submit(lambda c: release(c, terms))

    async def recover(self, *, now: float) -> Recovered:
        """See :meth:`NotificationStore.recover`."""
        terms = self._terms
        return await self._committer.submit(lambda c: recover(c, terms, now))

    async def renew(self, ids: Collection[NotificationId], *, now: float) -> Recovered:
        """See :meth:`NotificationStore.renew`."""
        terms, held = self._terms, frozenset(ids)
        return await self._committer.submit(lambda c: renew(c, terms, held, now))

    async def retry(self, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
        """See :meth:`NotificationStore.retry`."""
        chosen = tuple(ids)
        return await self._committer.submit(lambda c: retry(c, chosen))

    async def get(self, id: NotificationId) -> NotificationRecord | None:
        """See :meth:`NotificationStore.get`."""
        return await self._queries.run(lambda c: get(c, id))

    async def find(
        self,
        *,
        state: NotificationState | None = None,
        channel: str | None = None,
        tenant_id: str | None = None,
        before: NotificationId | None = None,
        limit: int = 50,
    ) -> Sequence[NotificationRecord]:
        """See :meth:`NotificationStore.find`."""
        return await self._queries.run(
            lambda c: find(
                c, state=state, channel=channel, tenant_id=tenant_id, before=before, limit=limit
            )
        )

    async def counts(self) -> dict[NotificationState, int]:
        """See :meth:`NotificationStore.counts`."""
        return await self._queries.run(counts)

    async def purge(self, *, before: float) -> int:
        """See :meth:`NotificationStore.purge`. Cancelled, it stops between transactions."""
        removed = 0
        while True:
            chunk = await self._committer.submit(lambda c: purge(c, before, PURGE_CHUNK))
            removed += chunk
            if chunk < PURGE_CHUNK:
                return removed
