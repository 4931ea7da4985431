"""Records of the inbox as rows of a table and objects of JSON. Pure (contracts 9).

JSON has the names of the records' attributes; it is a stable contract.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import attrs

from ..config.layers import printable
from ..storage.records import AttemptRecord, DeliveryRecord
from .moments import moment_text

#: The columns of ``events list``.
LIST_COLUMNS = ("received", "webhook_id", "type", "state", "attempts", "subject", "last_error")


def listed(record: DeliveryRecord) -> dict[str, Any]:
    """Return every attribute but the body, which listings leave out."""
    return attrs.asdict(record, filter=lambda field, _: field.name != "raw")


def table_row(record: DeliveryRecord) -> dict[str, Any]:
    """Return the cells of ``LIST_COLUMNS``; an error is cut to its first line."""
    row = listed(record)
    row["received"] = moment_text(record.received_at)
    if record.last_error:
        row["last_error"] = record.last_error.splitlines()[0]
    return row


def shown(record: DeliveryRecord, attempts: Sequence[AttemptRecord]) -> dict[str, Any]:
    """Return one event whole: its body as ``raw`` or ``raw_base64``, its failed runs."""
    failed = [attrs.asdict(attempt) for attempt in attempts]
    return {**listed(record), **body_fields(record.raw), "failed_attempts": failed}


def body_fields(raw: bytes | None) -> dict[str, str | None]:
    """Return ``raw`` as text, ``raw_base64`` where it is not UTF-8, null if it is gone."""
    if raw is None:
        return {"raw": None}
    try:
        return {"raw": raw.decode()}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(raw).decode("ascii")}


def readable_body(raw: bytes | None) -> str:
    """Return a body for people: JSON indented, anything else as text, safe for a terminal."""
    if raw is None:
        return "(not kept any more: see Sdk:Webhooks:PayloadRetentionDays)"
    try:
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = raw.decode("utf-8", "backslashreplace")
    return "\n".join(printable(line) for line in text.split("\n"))
