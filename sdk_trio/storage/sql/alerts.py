"""Alerts and the messages about them.

Functions of a transaction; :class:`AlertStore` has them as methods.
"""

from collections.abc import Sequence
from typing import Any, Final

from ...records.alerts import Alert, AlertBook, AlertMessage, AlertName, MessageKind
from ...records.states import NotificationState
from .dialect import Row, SqlPart, SqlTransaction, on_reader
from .leases import require_term
from .schema import replayable, types_of

#: Retention of finished messages, in seconds: 90 days, as for those to site managers.
RETENTION_SECONDS: Final = 90 * 86_400.0

_ALERT = tuple(types_of("alert"))
_MESSAGE = tuple(types_of("alert_message"))


def _replace(table: str, columns: Sequence[str], keys: Sequence[str]) -> str:
    updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in keys)
    values = ", ".join(f":{name}" for name in columns)
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values}) "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {updates}"
    )


_SAVE_ALERT = _replace("alert", _ALERT, ("name",))
_SAVE_MESSAGE = _replace("alert_message", _MESSAGE, ("id", "channel"))

_ALERTS = f"SELECT {', '.join(_ALERT)} FROM alert ORDER BY name"
_MESSAGES = f"""
SELECT {", ".join(_MESSAGE)} FROM alert_message
WHERE finished_at IS NULL OR NOT CAST(:waiting_only AS boolean) ORDER BY created_at, id, channel
"""

_PURGE = "DELETE FROM alert_message WHERE finished_at < :before"

# The first condition lets it use the index `work_kept`.
_COUNT_DEAD = f"""
SELECT count(*) FROM work WHERE {replayable()} AND state = 'dead' AND finished_at >= :since
"""


def load(tx: SqlTransaction, *, waiting_only: bool = False) -> AlertBook:
    """Return every alert, and its messages, the oldest first.

    With ``waiting_only`` it returns only those messages that are still to be sent.
    """
    alerts = [_alert_of(row) for row in tx.all(_ALERTS)]
    rows = tx.all(_MESSAGES, waiting_only=waiting_only)
    return AlertBook(alerts, [_message_of(row) for row in rows])


def save(
    tx: SqlTransaction, alerts: Sequence[Alert], messages: Sequence[AlertMessage], now: float
) -> None:
    """Write rows in place of those with their names and ids, and remove old messages."""
    for alert in alerts:
        tx.run(_SAVE_ALERT, **_alert_values(alert))
    for message in messages:
        tx.run(_SAVE_MESSAGE, **_message_values(message))
    tx.run(_PURGE, before=now - RETENTION_SECONDS)


def count_dead_letters(tx: SqlTransaction, *, since: float) -> int:
    """Count the dead letters that became dead at ``since`` (Unix seconds) or later."""
    return int(tx.all(_COUNT_DEAD, since=since)[0][0])


def _alert_values(alert: Alert) -> dict[str, Any]:
    values = {name: getattr(alert, name) for name in _ALERT}
    # repr: the shortest text that reads as the same number.
    return values | {"name": str(alert.name), "sent": " ".join(map(repr, alert.sent))}


def _alert_of(row: Row) -> Alert:
    values = dict(zip(_ALERT, row, strict=True))
    values |= {
        "name": AlertName(values["name"]),
        "announced_open": bool(values["announced_open"]),
        "sent": tuple(map(float, values["sent"].split())),
    }
    return Alert(**values)


def _message_values(message: AlertMessage) -> dict[str, Any]:
    values = {name: getattr(message, name) for name in _MESSAGE}
    words = {name: str(values[name]) for name in ("alert", "kind", "state")}
    return values | words


def _message_of(row: Row) -> AlertMessage:
    values = dict(zip(_MESSAGE, row, strict=True))
    values |= {
        "alert": AlertName(values["alert"]),
        "kind": MessageKind(values["kind"]),
        "state": NotificationState(values["state"]),
        "is_last": bool(values["is_last"]),
    }
    return AlertMessage(**values)


class AlertStore(SqlPart):
    """Alerts and the messages about them; one row for each condition."""

    load: Final = on_reader(load)

    async def count_dead_letters(self, *, since: float) -> int:
        """See :func:`count_dead_letters`."""
        return await self._read(lambda tx: count_dead_letters(tx, since=since))

    async def save(
        self,
        alerts: Sequence[Alert],
        messages: Sequence[AlertMessage],
        *,
        now: float,
        term: int | None = None,
    ) -> None:
        """Write these rows in one transaction, in place of those with their names and ids.

        Messages that were finished long before ``now`` (Unix seconds) are removed. If ``term`` is
        given, the rows are written only while this host leads in that term.

        Raises:
            TermEndedError: another host may lead, and have changed the rows.
        """
        # Copied: the work runs in another thread.
        rows, texts, owner = tuple(alerts), tuple(messages), self._terms.owner

        def work(tx: SqlTransaction) -> None:
            if term is not None:
                require_term(tx, owner, term)
            save(tx, rows, texts, now)

        await self._commits.submit(work)
