"""Messages to site managers in PostgreSQL.

Plain functions of a connection; :class:`PostgresNotifications` runs the reading ones beside the
group commit and hands it the others. :class:`NotificationStore` says what each means. Only a
``retrying`` row has ``next_attempt_at``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from .commits import GroupCommit
from .connect import StoreConnection
from .queries import QueryPool
from .schema import NOTIFICATION_OPEN
from .tenants import TRANSITION_COLUMNS, transition_of
from .writes import CLOCK, KEEP_CHECKPOINT, SharedTerms, shifted

#: Messages that one transaction of the retention removes.
PURGE_CHUNK = 500

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
    {", ".join(f"outbox.{name}" for name in TRANSITION_COLUMNS)}
FROM notification JOIN outbox ON outbox.sequence = notification.sequence
"""

_ONE = "sequence = %(sequence)s AND channel = %(channel)s"

_IS_DUE = f"""
(lease_owner IS NULL AND (state = 'pending'
    OR (state = 'retrying' AND next_attempt_at <= {CLOCK}))
OR lease_owner IS NOT NULL AND lease_until <= {CLOCK})
"""

_DUE_CHANNELS = f"""
SELECT channel FROM unnest(%(channels)s::text[]) AS each (channel) WHERE EXISTS (
    SELECT 1 FROM notification
    WHERE {NOTIFICATION_OPEN} AND notification.channel = each.channel AND {_IS_DUE})
"""


def position(connection: StoreConnection, *, lock: bool = False) -> int | None:
    """Return the sequence of the last enlisted transition; None: not set, or switched off."""
    query = "SELECT value FROM checkpoint WHERE name = %s" + (" FOR UPDATE" if lock else "")
    (found,) = connection.execute(query, (POSITION,)).fetchone() or (None,)
    return None if found in (None, SILENT) else int(found)


def _newest(connection: StoreConnection) -> int:
    (newest,) = connection.execute("SELECT max(sequence) FROM outbox").fetchone() or (None,)
    return newest or 0


def look(
    connection: StoreConnection, terms: SharedTerms, channels: Sequence[str], now: float
) -> Lookout:
    """Return whether there are new transitions, and the channels with due messages."""
    reached = position(connection)
    newest = _newest(connection)
    due = connection.execute(_DUE_CHANNELS, terms.values(now, channels=list(channels)))
    return Lookout(reached is None or newest > reached, frozenset(name for (name,) in due))


def get(connection: StoreConnection, id: NotificationId) -> NotificationRecord | None:
    """Return one message with its transition."""
    row = connection.execute(
        f"{_SELECT} WHERE notification.sequence = %s AND channel = %s", (id.sequence, id.channel)
    ).fetchone()
    return None if row is None else _record_of(row)


def find(
    connection: StoreConnection,
    *,
    state: NotificationState | None,
    channel: str | None,
    tenant_id: str | None,
    before: NotificationId | None,
    limit: int,
) -> Sequence[NotificationRecord]:
    """List messages, the newest transition first."""
    conditions = {
        "state = %(state)s": state,
        "channel = %(channel)s": channel,
        "tenant_id = %(tenant_id)s": tenant_id,
        "(notification.sequence, channel) < (%(sequence)s, %(last)s)": before,
    }
    chosen = [text for text, wanted in conditions.items() if wanted is not None]
    where = f"WHERE {' AND '.join(chosen)}" if chosen else ""
    rows = connection.execute(
        f"{_SELECT} {where} ORDER BY notification.sequence DESC, channel DESC LIMIT %(limit)s",
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


def counts(connection: StoreConnection) -> dict[NotificationState, int]:
    """Return how many messages are in each state."""
    rows = connection.execute("SELECT state, count(*) FROM notification GROUP BY state")
    found: dict[str, int] = dict(rows.fetchall())
    return {state: found.get(state, 0) for state in NotificationState}


def _record_of(row: tuple[Any, ...]) -> NotificationRecord:
    end = 2 + len(_COLUMNS)
    values = dict(zip(_COLUMNS, row[2:end], strict=True))
    values["state"] = NotificationState(values["state"])
    return NotificationRecord(
        id=NotificationId(row[0], row[1]), outbox=transition_of(row[end:]), **values
    )


# -- new messages ------------------------------------------------------------------------------

_NEXT_TRANSITIONS = """
SELECT sequence, occurred_at FROM outbox WHERE sequence > %s ORDER BY sequence LIMIT %s
"""

_INSERT = """
INSERT INTO notification
    (sequence, channel, state, repeatable, attempts, created_at, finished_at, reason)
VALUES (%s, %s, %s, %s, 0, %s, %s, %s)
ON CONFLICT (sequence, channel) DO NOTHING
"""

_SKIP_OTHERS = f"""
UPDATE notification SET state = 'skipped', reason = %(reason)s, finished_at = %(now)s,
    next_attempt_at = NULL
WHERE {NOTIFICATION_OPEN} AND state IN ('pending', 'retrying') AND lease_owner IS NULL
    AND channel <> ALL(%(channels)s::text[])
"""


def enlist(
    connection: StoreConnection,
    channels: Mapping[str, bool],
    now: float,
    oldest: float,
    limit: int,
) -> Enlisted:
    """Give the next transitions their messages, and skip messages that wait on other channels."""
    skipped = connection.write(
        _SKIP_OTHERS, {"reason": SWITCHED_OFF, "now": now, "channels": list(channels)}
    ).rowcount
    # Locked, so that of two processes one enlists a transition, and the position only grows.
    reached = position(connection, lock=True)
    # The first look ever only draws the line: nobody wants messages about transitions of before
    # (ADR 13).
    if reached is None:
        connection.write(KEEP_CHECKPOINT, (POSITION, str(_newest(connection))))
        return Enlisted(0, skipped, more=False)
    pending = 0
    rows = connection.execute(_NEXT_TRANSITIONS, (reached, limit)).fetchall()
    for sequence, occurred_at in rows:
        reached = sequence
        for channel, repeatable in channels.items():
            fresh = occurred_at >= oldest
            state, end = ("pending", None) if fresh else ("skipped", now)
            reason = None if fresh else too_old(now - occurred_at)
            connection.write(_INSERT, (sequence, channel, state, repeatable, now, end, reason))
            pending += fresh
            skipped += not fresh
    if rows:
        connection.write(KEEP_CHECKPOINT, (POSITION, str(reached)))
    return Enlisted(pending, skipped, more=len(rows) == limit)


def switch_off(connection: StoreConnection) -> None:
    """Replace the position by the mark that notifications are off."""
    connection.write(KEEP_CHECKPOINT, (POSITION, SILENT))


# -- leases ------------------------------------------------------------------------------------

_TAKE = f"""
SELECT sequence FROM notification
WHERE {NOTIFICATION_OPEN} AND channel = %(channel)s AND lease_owner IS NULL
    AND (state = 'pending' OR (state = 'retrying' AND next_attempt_at <= {CLOCK}))
ORDER BY sequence LIMIT %(limit)s FOR UPDATE SKIP LOCKED
"""

_NEXT_DUE = f"""
SELECT {shifted("min(next_attempt_at)", CLOCK, "%(now)s::float8")} FROM notification
WHERE {NOTIFICATION_OPEN} AND channel = %(channel)s AND state = 'retrying'
    AND lease_owner IS NULL AND next_attempt_at > {CLOCK}
"""

_EXPIRED = f"lease_owner IS NOT NULL AND lease_owner <> %(owner)s AND lease_until <= {CLOCK}"

_FOREIGN = f"""
lease_owner IS NOT NULL AND lease_owner <> %(owner)s
    AND (NOT %(shared)s OR lease_until <= {CLOCK})
"""

# A message that was being sent may have arrived. It is sent again only where its receiver can tell
# a repetition; else people decide.
_FREE = f"""
UPDATE notification SET lease_owner = NULL, lease_until = NULL, next_attempt_at = NULL,
    state = CASE WHEN state = 'sending' AND NOT repeatable THEN 'unknown' ELSE 'pending' END,
    finished_at = CASE WHEN state = 'sending' AND NOT repeatable THEN %(now)s::float8 END,
    reason = CASE WHEN state = 'sending' AND NOT repeatable THEN %(reason)s ELSE reason END
WHERE (sequence, channel) IN (
    SELECT sequence, channel FROM notification WHERE {NOTIFICATION_OPEN} AND {{which}}
    FOR UPDATE SKIP LOCKED)
RETURNING sequence, channel, state
"""

_LEASE = f"""
UPDATE notification SET lease_owner = %(owner)s, lease_until = {CLOCK} + %(seconds)s,
    next_attempt_at = NULL
WHERE {_ONE}
"""

_RELEASE = f"""
UPDATE notification SET lease_owner = NULL, lease_until = NULL, state = 'pending'
WHERE {NOTIFICATION_OPEN} AND state IN ('pending', 'retrying') AND lease_owner = %s
"""

_RENEW = f"""
UPDATE notification SET lease_until = {CLOCK} + %(seconds)s
WHERE {NOTIFICATION_OPEN} AND lease_owner = %(owner)s AND (sequence, channel) IN (
    SELECT * FROM unnest(%(sequences)s::bigint[], %(channels)s::text[]))
"""


def take_due(
    connection: StoreConnection, terms: SharedTerms, channel: str, limit: int, now: float
) -> DueNotifications:
    """Lease due messages of one channel, oldest transition first."""
    values = terms.values(now, channel=channel, limit=limit + 1, reason=CUT_OFF)
    expired = f"channel = %(channel)s AND {_EXPIRED}"
    lost = _free(connection, expired, values).lost
    found = [sequence for (sequence,) in connection.execute(_TAKE, values)]
    records = []
    for sequence in found[:limit]:
        connection.write(_LEASE, {**values, "sequence": sequence})
        records.append(_record(connection, NotificationId(sequence, channel)))
    (next_due_at,) = connection.execute(_NEXT_DUE, values).fetchone() or (None,)
    return DueNotifications(records, lost, len(found) > limit, next_due_at)


def _free(connection: StoreConnection, which: str, values: Mapping[str, object]) -> Recovered:
    rows = connection.write(_FREE.format(which=which), values).fetchall()
    lost = [
        _record(connection, NotificationId(sequence, channel))
        for sequence, channel, state in sorted(rows)
        if state == "unknown"
    ]
    return Recovered(len(rows) - len(lost), lost)


def _record(connection: StoreConnection, id: NotificationId) -> NotificationRecord:
    record = get(connection, id)
    if record is None:
        raise AssertionError("a message is removed together with its transition")
    return record


def release(connection: StoreConnection, terms: SharedTerms) -> None:
    """Give up leases of ours whose sending has not begun."""
    connection.write(_RELEASE, (terms.lease.owner,))


def recover(connection: StoreConnection, terms: SharedTerms, now: float) -> Recovered:
    """Take away the leases of other owners, in a shared store the expired ones."""
    return _free(connection, _FOREIGN, terms.values(now, shared=terms.shared, reason=CUT_OFF))


_NOT_HELD = """
lease_owner = %(owner)s AND (sequence, channel) NOT IN (
    SELECT * FROM unnest(%(sequences)s::bigint[], %(channels)s::text[]))
"""


def renew(
    connection: StoreConnection, terms: SharedTerms, held: Collection[NotificationId], now: float
) -> Recovered:
    """Extend the leases of ours that are ``held``, and give up all others."""
    values = terms.values(
        now,
        reason=CUT_OFF,
        sequences=[id.sequence for id in held],
        channels=[id.channel for id in held],
    )
    connection.execute(_RENEW, values)
    return _free(connection, _NOT_HELD, values)


# -- attempts ----------------------------------------------------------------------------------

_START = f"""
UPDATE notification SET state = 'sending', attempts = attempts + 1, started_at = %(now)s,
    lease_until = {CLOCK} + %(seconds)s, next_attempt_at = NULL
WHERE {_ONE} AND lease_owner = %(owner)s AND state IN ('pending', 'retrying')
"""

_DUE = shifted("%(next_attempt_at)s::float8", "%(now)s::float8", CLOCK)

_FINISH = f"""
UPDATE notification SET state = %(state)s, reason = %(reason)s, provider_id = %(provider_id)s,
    next_attempt_at = {_DUE}, finished_at = %(finished_at)s,
    lease_owner = NULL, lease_until = NULL
WHERE {_ONE} AND lease_owner = %(owner)s AND {NOTIFICATION_OPEN}
"""

# The attempt was claimed and sent nothing, so it does not count.
_UNDO = f"""
UPDATE notification SET attempts = attempts - (state = 'sending')::int, state = 'pending',
    next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE {_ONE} AND lease_owner = %(owner)s AND {NOTIFICATION_OPEN}
"""

_RETRY = f"""
UPDATE notification SET state = 'pending', attempts = 0, started_at = NULL, finished_at = NULL,
    provider_id = NULL, reason = NULL
WHERE {_ONE} AND state IN ('failed', 'skipped', 'unknown')
"""

_PURGE = """
DELETE FROM notification WHERE (sequence, channel) IN (
    SELECT sequence, channel FROM notification
    WHERE finished_at IS NOT NULL AND finished_at < %s ORDER BY finished_at LIMIT %s)
"""


def _key(id: NotificationId) -> dict[str, object]:
    return {"sequence": id.sequence, "channel": id.channel}


def start(connection: StoreConnection, terms: SharedTerms, id: NotificationId, now: float) -> bool:
    """Mark a message of ours as being sent."""
    return connection.write(_START, terms.values(now, **_key(id))).rowcount == 1


def finish(
    connection: StoreConnection,
    terms: SharedTerms,
    id: NotificationId,
    ending: SendResult,
    now: float,
) -> bool:
    """Record the end of an attempt."""
    values = terms.values(now, **_key(id))
    if ending.state is NotificationState.PENDING:
        return connection.write(_UNDO, values).rowcount == 1
    values.update(
        state=ending.state,
        reason=ending.reason,
        provider_id=ending.provider_id,
        next_attempt_at=ending.next_attempt_at,
        finished_at=None if ending.state is NotificationState.RETRYING else now,
    )
    return connection.write(_FINISH, values).rowcount == 1


def retry(connection: StoreConnection, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
    """Put messages back that were not sent."""
    return [id for id in ids if connection.write(_RETRY, _key(id)).rowcount]


def purge(connection: StoreConnection, before: float, limit: int) -> int:
    """Remove up to ``limit`` messages that were finished before that time."""
    return connection.write(_PURGE, (before, limit)).rowcount


class PostgresNotifications:
    """:class:`NotificationStore` in PostgreSQL; cancellation is as in the inbox."""

    def __init__(self, terms: SharedTerms, commits: GroupCommit, queries: QueryPool) -> None:
        self._terms = terms
        self._commits = commits
        self._queries = queries

    async def enlist(
        self, channels: Mapping[str, bool], *, now: float, oldest: float, limit: int = 500
    ) -> Enlisted:
        """See :meth:`NotificationStore.enlist`."""
        chosen = dict(channels)
        return await self._commits.submit(lambda c: enlist(c, chosen, now, oldest, limit))

    async def switch_off(self) -> None:
        """See :meth:`NotificationStore.switch_off`."""
        await self._commits.submit(switch_off)

    async def look(self, channels: Mapping[str, bool], *, now: float) -> Lookout:
        """See :meth:`NotificationStore.look`."""
        terms, chosen = self._terms, tuple(channels)
        return await self._queries.run(lambda c: look(c, terms, chosen, now))

    async def take_due(self, channel: str, *, limit: int, now: float) -> DueNotifications:
        """See :meth:`NotificationStore.take_due`."""
        terms = self._terms
        return await self._commits.submit(lambda c: take_due(c, terms, channel, limit, now))

    async def start(self, id: NotificationId, *, now: float) -> bool:
        """See :meth:`NotificationStore.start`."""
        terms = self._terms
        return await self._commits.submit(lambda c: start(c, terms, id, now))

    async def finish(self, id: NotificationId, ending: SendResult, *, now: float) -> bool:
        """See :meth:`NotificationStore.finish`."""
        terms = self._terms
        return await self._commits.submit(lambda c: finish(c, terms, id, ending, now))

    async def release(self) -> None:
        """See :meth:`NotificationStore.release`."""
        terms = self._terms
        await self._commits.submit(lambda c: release(c, terms))

    async def recover(self, *, now: float) -> Recovered:
        """See :meth:`NotificationStore.recover`; in a shared store expired leases are taken."""
        terms = self._terms
        return await self._commits.submit(lambda c: recover(c, terms, now))

    async def renew(self, ids: Collection[NotificationId], *, now: float) -> Recovered:
        """See :meth:`NotificationStore.renew`."""
        terms, held = self._terms, tuple(ids)
        return await self._commits.submit(lambda c: renew(c, terms, held, now))

    async def retry(self, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
        """See :meth:`NotificationStore.retry`."""
        chosen = tuple(ids)
        return await self._commits.submit(lambda c: retry(c, chosen))

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
            chunk = await self._commits.submit(lambda c: purge(c, before, PURGE_CHUNK))
            removed += chunk
            if chunk < PURGE_CHUNK:
                return removed
