"""Looks at messages to site managers in SQLite: plain functions of a connection."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import apsw

from .notification_records import (
    POSITION,
    SILENT,
    Lookout,
    NotificationId,
    NotificationRecord,
    NotificationState,
)
from .schema import NOTIFICATION_OPEN
from .sqlite_tenant_rows import OUTBOX_COLUMNS, outbox_of

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
    """Return the sequence of the last transition that had its turn; None: there is no line."""
    found = connection.execute("SELECT value FROM checkpoint WHERE name = ?", (POSITION,)).get
    return None if found in (None, SILENT) else int(found)


def look(connection: apsw.Connection, channels: Mapping[str, bool], now: float) -> Lookout:
    """Say what there is to do."""
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
