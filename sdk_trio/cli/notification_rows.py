"""Messages to site managers as rows of a table and objects of JSON. Pure.

JSON has stable names; a message's id is the sequence of its transition and its channel, ``17-sms``.
"""

from typing import Any

import attrs

from ..storage.notification_records import NotificationRecord
from .moments import moment_text

#: The columns of ``notify list``.
LIST_COLUMNS = ("id", "tenant", "transition", "occurred", "state", "attempts", "reason")


def listed(record: NotificationRecord) -> dict[str, Any]:
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


def table_row(record: NotificationRecord) -> dict[str, Any]:
    """Return the cells of ``LIST_COLUMNS``."""
    row = listed(record)
    return {
        **row,
        "tenant": row["tenant_identifier"],
        "occurred": moment_text(record.outbox.occurred_at),
    }


def shown(record: NotificationRecord) -> dict[str, Any]:
    """Return one whole message with its transition and its recipient."""
    transition = attrs.asdict(record.outbox)
    del transition["sequence"]
    return {**listed(record), "outbox": transition}
