"""States of deliveries, messages and tenants, which are choices of commands. Pure.

They stand apart from the records, so that ``--help`` offers them without loading a package.
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

    # The hash of the text, in C. Enum's own is a Python function, called at each look-up.
    __hash__ = str.__hash__


#: States from which the runtime itself will still do something.
UNFINISHED = frozenset({DeliveryState.RECEIVED, DeliveryState.RUNNING, DeliveryState.RETRYING})

#: States that a delivery can be replayed from.
REPLAYABLE = (DeliveryState.DEAD, DeliveryState.PARKED, DeliveryState.RETRYING)


class NotificationState(enum.StrEnum):
    """``pending -> sending -> sent | retrying -> sending ... | failed | skipped | unknown``.

    ``sending`` is committed before the first byte leaves the machine. So if a process ends in this
    state, the message may have been sent or not; in any other state that is known.
    """

    PENDING = "pending"
    SENDING = "sending"
    RETRYING = "retrying"
    SENT = "sent"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


#: States from which a message will still be sent without an operator.
OPEN = frozenset({NotificationState.PENDING, NotificationState.SENDING, NotificationState.RETRYING})

#: States from which an operator can have it sent again (``notify retry``).
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
    """The four named changes of a status."""

    SUSPENDED = "Suspended"
    REACTIVATED = "Reactivated"
    DEACTIVATED = "Deactivated"
    DELETED = "Deleted"
