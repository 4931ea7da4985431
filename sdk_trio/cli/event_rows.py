"""Records of the inbox as rows of a table, and their bodies for people. Pure."""

import json
from typing import Any

from ..config.layers import printable
from ..storage.record_fields import listed
from ..storage.records import DeliveryRecord
from .moments import moment_text

#: The columns of ``events list``.
LIST_COLUMNS = ("received", "webhook_id", "type", "state", "attempts", "subject", "last_error")


def table_row(record: DeliveryRecord) -> dict[str, Any]:
    """Return the cells of ``LIST_COLUMNS``; an error is cut to its first line."""
    row = listed(record)
    row["webhook_id"] = record.key  # the argument of 'events show'
    row["received"] = moment_text(record.received_at)
    if record.last_error:
        row["last_error"] = record.last_error.splitlines()[0]
    return row


def readable_body(raw: bytes | None) -> str:
    """Return a body for people: JSON indented, anything else as text, safe for a terminal."""
    if raw is None:
        return "(not kept any more: see Sdk:Webhooks:PayloadRetentionDays)"
    try:
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = raw.decode("utf-8", "backslashreplace")
    return "\n".join(printable(line) for line in text.split("\n"))
