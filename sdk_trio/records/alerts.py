"""Alerts as stored: plain records, without I/O. Times are Unix seconds.

An alert is one condition of the installation that an operator has to know about. It has one row,
however often it opens. Each message about it has one row for each channel.
"""

import enum
from collections.abc import Sequence
from typing import Any

import attrs

from .states import OPEN, NotificationState


class AlertName(enum.StrEnum):
    """The conditions that open an alert; each value is the name in lower case."""

    DEAD_LETTERS = enum.auto()
    ENDPOINT_DISABLED = enum.auto()
    SILENCE = enum.auto()
    OLDEST_WAITING = enum.auto()
    EVENTS_PAUSED = enum.auto()
    STORE_UNREACHABLE = enum.auto()
    SENDER_UNREACHABLE = enum.auto()
    REPLICATION_LAG = enum.auto()
    CERTIFICATE_EXPIRY = enum.auto()
    TOKEN_EXPIRY = enum.auto()
    CLOCK_OFFSET = enum.auto()
    SECRET_UNUSED = enum.auto()


class MessageKind(enum.StrEnum):
    """The occasion of a message."""

    OPENED = "opened"
    REMINDER = "reminder"
    CLOSED = "closed"
    TEST = "test"


@attrs.frozen(kw_only=True)
class Alert:
    """One alert in its current state.

    ``detail`` is the last description of the condition while it held. ``clear_since`` is the time
    since which the condition of an open alert does not hold; None while it holds. ``openings``
    counts how often it opened. ``announced_open`` is the state that the last message announced.
    ``sent`` are the times of its last messages, the oldest first.
    """

    name: AlertName
    detail: str
    opened_at: float
    closed_at: float | None = None
    clear_since: float | None = None
    openings: int = 1
    announced_open: bool = False
    sent: tuple[float, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the alert is open."""
        return self.closed_at is None


@attrs.frozen(kw_only=True)
class AlertMessage:
    """One message about an alert on one channel.

    ``id`` is the same on all channels. ``detail``, ``opened_at`` and ``closed_at`` are those of the
    alert at ``created_at``. ``is_last`` marks the last message that the limit of messages allows
    for now. ``attempts`` counts the started sendings, ``next_attempt_at`` is when a waiting
    message is due, and ``reason`` says why the last attempt failed.
    """

    id: str
    channel: str
    alert: AlertName
    kind: MessageKind
    detail: str
    opened_at: float
    closed_at: float | None
    created_at: float
    is_last: bool = False
    state: NotificationState = NotificationState.PENDING
    attempts: int = 0
    next_attempt_at: float | None = None
    finished_at: float | None = None
    reason: str | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the message has not been sent yet."""
        return self.state in OPEN


@attrs.frozen
class AlertBook:
    """The stored alerts, and messages about them, the oldest first."""

    alerts: Sequence[Alert] = ()
    messages: Sequence[AlertMessage] = ()


def listed_alert(alert: Alert, messages: Sequence[AlertMessage] = ()) -> dict[str, Any]:
    """Return an alert with the state of its last message on each channel."""
    last = {message.channel: str(message.state) for message in messages}
    return {
        "name": str(alert.name),
        "state": "open" if alert.is_open else "closed",
        "detail": alert.detail,
        "opened_at": alert.opened_at,
        "closed_at": alert.closed_at,
        "openings": alert.openings,
        "announced": "open" if alert.announced_open else "closed",
        "last_message_at": alert.sent[-1] if alert.sent else None,
        "messages": last,
    }


def listed_alerts(book: AlertBook) -> list[dict[str, Any]]:
    """Return every alert, the open ones first, then by their last opening."""
    rows = sorted(book.alerts, key=lambda alert: (not alert.is_open, -alert.opened_at))
    return [
        listed_alert(row, [each for each in book.messages if each.alert is row.name])
        for row in rows
    ]
