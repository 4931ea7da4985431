"""Messages to site managers as the store keeps them: plain records, without I/O.

A message tells of one transition on one channel. Times are Unix seconds as floats.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from .states import OPEN as OPEN
from .states import RETRIABLE as RETRIABLE
from .states import NotificationState as NotificationState
from .tenants import OutboxRecord

#: Name of the checkpoint that holds the sequence of the last transition whose messages were
#: enlisted, or SILENT while notifications are off. It is absent before the first of either.
POSITION = "notifications"
SILENT = "off"


#: Reason of a message that is ``unknown`` because its process ended while it was sending.
CUT_OFF = "the process ended while it was being sent: whether it arrived is not known"

#: Reason of a message that is ``skipped`` because its channel was switched off.
SWITCHED_OFF = "the channel is switched off"


def too_old(seconds: float) -> str:
    """Return the reason of a message that is skipped because its transition is so old."""
    return f"the transition was {seconds / 3600:.0f} hours old before anybody could be told"


@attrs.frozen(order=True)
class NotificationId:
    """The id of a message: the sequence of its transition in the outbox, and its channel.

    People type its text, such as ``17-email``.
    """

    sequence: int
    channel: str

    def __str__(self) -> str:
        return f"{self.sequence}-{self.channel}"


def parse_notification_id(text: str) -> NotificationId | None:
    """Return the id that ``text`` stands for; None if it is not one."""
    sequence, _, channel = text.strip().partition("-")
    # 18 digits fit into the integer of every store.
    digits = sequence.isascii() and sequence.isdigit() and len(sequence) <= 18
    if not digits or not (channel.isascii() and channel.isalpha()):
        return None
    return NotificationId(int(sequence), channel.lower())


@attrs.frozen(kw_only=True)
class NotificationRecord:
    """One message as the store holds it now, with the transition that it announces.

    ``attempts`` counts the sendings that were begun. ``reason`` says why the last one did not
    succeed, or why there was none. ``provider_id`` is the provider's name for a sent message.
    ``repeatable``: its receiver recognizes a repetition, so it may be sent again in doubt.
    """

    id: NotificationId
    state: NotificationState
    repeatable: bool
    attempts: int
    created_at: float
    next_attempt_at: float | None
    started_at: float | None
    finished_at: float | None
    provider_id: str | None
    reason: str | None
    outbox: OutboxRecord


@attrs.frozen
class Enlisted:
    """The result of one ``enlist``: messages to send, messages left out, and is there more."""

    pending: int
    skipped: int
    more: bool


@attrs.frozen
class Lookout:
    """Whether there are transitions without messages, and the channels with something to send."""

    new_transitions: bool
    due: frozenset[str]


@attrs.frozen
class DueNotifications:
    """The result of ``take_due``; the caller holds the lease of every record.

    ``lost`` are those that have become ``unknown``: another owner's lease expired in ``sending``.
    ``more`` says that further ones were due beyond the limit, ``next_due_at`` when the next retry
    is due, or None.
    """

    records: Sequence[NotificationRecord]
    lost: Sequence[NotificationRecord]
    more: bool
    next_due_at: float | None


@attrs.frozen
class Recovered:
    """The result of ``recover``: messages that will be sent again, and those now ``unknown``."""

    resumed: int
    lost: Sequence[NotificationRecord]


@attrs.frozen
class SendResult:
    """The end of an attempt: the state that the message is in now, and why.

    ``PENDING`` undoes an attempt that was claimed and surely sent nothing. ``next_attempt_at``
    belongs to ``RETRYING`` alone.
    """

    state: NotificationState
    reason: str | None = None
    provider_id: str | None = None
    next_attempt_at: float | None = None


def listed_notification(record: NotificationRecord) -> dict[str, Any]:
    """Return a message's stored fields, and those of its transition that identify it."""
    outbox = record.outbox
    return {
        "id": str(record.id),
        "channel": record.id.channel,
        "state": str(record.state),
        "attempts": record.attempts,
        "delivery_id": outbox.delivery_id,
        "tenant_id": outbox.tenant_id,
        "tenant_identifier": outbox.tenant_identifier,
        "transition": str(outbox.transition),
        "occurred_at": outbox.occurred_at,
        "created_at": record.created_at,
        "next_attempt_at": record.next_attempt_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "provider_id": record.provider_id,
        "reason": record.reason,
    }
