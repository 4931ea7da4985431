"""Synthetic events: made by this program from the upstream's current state, not delivered. Pure.

Their ``webhook-id`` has a prefix that no delivered event is stored with. It is made of the type,
the subject and the time of the subject's last change, so the same state always has the same id.
"""

import hashlib
from typing import Final

#: The prefix of the ``webhook-id`` of every synthetic event.
SYNTHETIC_PREFIX: Final = "sdkstate_"

#: The prefix that keeps the ``webhook-id`` of a delivery apart from those of synthetic events.
DELIVERED_PREFIX: Final = "delivered_"

#: Hexadecimal digits of the id after the prefix: 128 bits.
_DIGITS: Final = 32


def synthetic_id(event_type: str, subject: str, modified_at: str) -> str:
    """Return the ``webhook-id`` of the event for one state of a subject.

    Args:
        event_type: such as ``order.paid``.
        subject: ``data.id``.
        modified_at: the time of the last change, as the upstream wrote it.
    """
    # Separated by a character that no type contains, so two different triples never agree.
    text = f"{event_type}\0{subject}\0{modified_at}"
    return SYNTHETIC_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def is_synthetic(webhook_id: str) -> bool:
    """Return whether an event was made from the upstream's state."""
    return webhook_id.startswith(SYNTHETIC_PREFIX)


def delivered_id(webhook_id: str) -> str:
    """Return the id under which a delivery is stored: never that of a synthetic event.

    A sender may use the prefix, such as a receiver that forwards its own synthetic events.
    Otherwise its delivery could replace a synthetic event, which would then be lost.
    """
    return DELIVERED_PREFIX + webhook_id if is_synthetic(webhook_id) else webhook_id
