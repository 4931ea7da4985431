"""The life of an alert: opened, announced, closed. Pure.

Two rules keep a flapping condition from flooding anyone:

1. An alert closes only after its condition has not held for ``CloseAfterSeconds`` without a break.
2. At most :data:`MOST_MESSAGES` messages about one alert are sent within any ``RepeatHours``.
   Further changes are announced when the limit allows, by one message with the current state.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from ..config.options.alerts import AlertsOptions
from ..records.alerts import Alert, AlertName, MessageKind
from .conditions import AlertCondition

#: Messages about one alert within ``RepeatHours``: it opened, closed, and opened again.
MOST_MESSAGES: Final = 3


@attrs.frozen
class DueMessage:
    """A message to send about ``alert``, in its state after the message.

    ``is_last``: the limit allows no further message about it for a while.
    """

    alert: Alert
    kind: MessageKind
    is_last: bool


@attrs.frozen
class AlertChanges:
    """The alerts whose rows change, and the messages to send."""

    changed: tuple[Alert, ...]
    announcements: tuple[DueMessage, ...]


def advance(
    alerts: Mapping[AlertName, Alert],
    conditions: Iterable[AlertCondition],
    options: AlertsOptions,
    now: float,
) -> AlertChanges:
    """Apply conditions to alerts.

    Args:
        alerts: the current alerts, by name.
        conditions: of one moment.
        options: ``CloseAfterSeconds`` and ``RepeatHours`` apply.
        now: Unix seconds.
    """
    changed: list[Alert] = []
    announcements: list[DueMessage] = []
    for condition in conditions:
        known = alerts.get(condition.name)
        alert = _observe(known, condition, options.close_after_seconds, now)
        if alert is None or condition.holds is None:
            continue
        announcement = _announce(alert, options.repeat_hours * 3600.0, now)
        if announcement is not None:
            announcements.append(announcement)
            alert = announcement.alert
        if alert != known:
            changed.append(alert)
    return AlertChanges(tuple(changed), tuple(announcements))


def _observe(
    alert: Alert | None, condition: AlertCondition, close_after: float, now: float
) -> Alert | None:
    """Return the alert after a condition was evaluated; None if it never opened."""
    if condition.holds is None:
        return alert
    if alert is not None and any(at > now for at in alert.sent):
        # The clock was set back; that must not suppress messages about the alert.
        alert = attrs.evolve(alert, sent=tuple(min(at, now) for at in alert.sent))
    if condition.holds:
        if alert is None:
            return Alert(name=condition.name, detail=condition.detail, opened_at=now)
        if alert.is_open:
            return attrs.evolve(alert, detail=condition.detail, clear_since=None)
        return attrs.evolve(
            alert,
            detail=condition.detail,
            opened_at=now,
            closed_at=None,
            clear_since=None,
            openings=alert.openings + 1,
        )
    if alert is None or not alert.is_open:
        return alert
    # A time in the future was written before the clock was set back.
    since = now if alert.clear_since is None else min(alert.clear_since, now)
    closed_at = now if now - since >= close_after else None
    return attrs.evolve(alert, clear_since=since, closed_at=closed_at)


def _announce(alert: Alert, repeat: float, now: float) -> DueMessage | None:
    """Return the message that is due; None without one."""
    recent = [at for at in alert.sent if now - at < repeat]
    if alert.is_open != alert.announced_open:
        kind = MessageKind.OPENED if alert.is_open else MessageKind.CLOSED
    elif alert.is_open and not recent:
        kind = MessageKind.REMINDER
    else:
        return None
    if len(recent) >= MOST_MESSAGES:
        return None
    sent = (*alert.sent, now)[-MOST_MESSAGES:]
    announced = attrs.evolve(alert, announced_open=alert.is_open, sent=sent)
    return DueMessage(announced, kind, is_last=len(recent) + 1 == MOST_MESSAGES)
