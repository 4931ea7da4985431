"""States of deliveries, messages and tenants; some commands accept them as choices. Pure.

They are separate from the records, so that ``--help`` can list them without loading a package.
"""

import enum


class DeliveryState(enum.StrEnum):
    """``received -> running -> done | retrying -> running ... | dead``, and ``parked``."""

    RECEIVED = "received"
    RUNNING = "running"
    RETRYING = "retrying"
    DONE = "done"
    DEAD = "dead"
    PARKED = "parked"

    # The text's hash, in C. Enum's own is a Python function, called at each dict access.
    __hash__ = str.__hash__


#: States in which the runtime still has work to do.
UNFINISHED = frozenset({DeliveryState.RECEIVED, DeliveryState.RUNNING, DeliveryState.RETRYING})

#: States from which a delivery can be replayed.
REPLAYABLE = (DeliveryState.DEAD, DeliveryState.PARKED, DeliveryState.RETRYING)


class NotificationState(enum.StrEnum):
    """``pending -> sending -> sent | retrying -> sending ... | failed | skipped | unknown``.

    ``sending`` is committed before the first byte is sent. If the process ends in this state, it is
    unknown whether the message was sent; in any other state it is known.
    """

    PENDING = "pending"
    SENDING = "sending"
    RETRYING = "retrying"
    SENT = "sent"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


#: States of messages that will still be sent without an operator.
OPEN = frozenset({NotificationState.PENDING, NotificationState.SENDING, NotificationState.RETRYING})

#: States in which an operator can resend a message (``notify retry``).
RETRIABLE = frozenset(
    {NotificationState.FAILED, NotificationState.SKIPPED, NotificationState.UNKNOWN}
)


class TenantStatus(enum.StrEnum):
    """The status of a tenant."""

    ACTIVE = "Active"
    SUSPENDED = "Suspended"
    DEACTIVATED = "Deactivated"
    DELETED = "Deleted"


class Transition(enum.StrEnum):
    """The four changes of a tenant's status."""

    SUSPENDED = "Suspended"
    REACTIVATED = "Reactivated"
    DEACTIVATED = "Deactivated"
    DELETED = "Deleted"
