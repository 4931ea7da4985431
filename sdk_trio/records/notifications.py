"""Messages to site managers as stored: plain records, without I/O.

A message announces one transition on one channel. Times are Unix seconds as floats.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from .states import OPEN as OPEN
from .states import RETRIABLE as RETRIABLE
from .states import NotificationState as NotificationState
from .tenants import OutboxRecord

#: The checkpoint with the sequence of the last transition whose messages were created, or SILENT
#: while notifications are off. It does not exist before the first of either.
POSITION = "notifications"
SILENT = "off"


#: Reason of an ``unknown`` message whose process ended during the sending.
CUT_OFF = "the process ended while sending it: it is unknown whether it arrived"

#: Reason of a ``skipped`` message whose channel was disabled.
SWITCHED_OFF = "the channel is disabled"


def too_old(seconds: float) -> str:
    """Return the reason of a message skipped because its transition is too old."""
    return f"the transition was {seconds / 3600:.0f} hours old before the message could be sent"


@attrs.frozen(order=True)
class NotificationId:
    """The id of a message: its transition's sequence in the outbox, and its channel.

    Its text form is ``17-email``.
    """

    sequence: int
    channel: str

    def __str__(self) -> str:
        return f"{self.sequence}-{self.channel}"


def parse_notification_id(text: str) -> NotificationId | None:
    """Return the id that ``text`` names; None if it is not one."""
    sequence, _, channel = text.strip().partition("-")
    # 18 digits fit into every store's integers.
    digits = sequence.isascii() and sequence.isdigit() and len(sequence) <= 18
    if not digits or not (channel.isascii() and channel.isalpha()):
        return None
    return NotificationId(int(sequence), channel.lower())


@attrs.frozen(kw_only=True)
class NotificationRecord:
    """One message in its current stored state, with the transition that it announces.

    ``attempts`` counts the started sendings. ``reason`` says why the last one failed, or why there
    was none. ``provider_id`` is the provider's name for a sent message.
    ``repeatable``: its receiver recognizes repetitions, so it may be resent if in doubt.
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
class CreatedMessages:
    """The result of ``create_messages``: new and skipped messages, and whether more remain."""

    pending: int
    skipped: int
    more: bool


@attrs.frozen
class OutboxPoll:
    """Whether there are transitions without messages, and the channels with messages to send."""

    new_transitions: bool
    due: frozenset[str]


@attrs.frozen
class DueNotifications:
    """The result of ``claim_due``; the caller holds the lease of every record.

    ``lost`` became ``unknown``: another owner's lease expired in ``sending``. ``more``: further
    messages were due beyond the limit. ``next_due_at`` is the time of the next retry, or None.
    """

    records: Sequence[NotificationRecord]
    lost: Sequence[NotificationRecord]
    more: bool
    next_due_at: float | None


@attrs.frozen
class Recovered:
    """The result of ``recover``: messages to be resent, and those now ``unknown``."""

    resumed: int
    lost: Sequence[NotificationRecord]


@attrs.frozen
class SendResult:
    """The end of an attempt: the new state of the message, and why.

    ``PENDING`` undoes a claimed attempt that certainly sent nothing. ``next_attempt_at`` is set for
    ``RETRYING`` only.
    """

    state: NotificationState
    reason: str | None = None
    provider_id: str | None = None
    next_attempt_at: float | None = None


def listed_notification(record: NotificationRecord) -> dict[str, Any]:
    """Return a message's stored fields, and the fields that identify its transition."""
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
