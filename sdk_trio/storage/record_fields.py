"""Records of the inbox as objects of JSON: on the command line and the admin address. Pure.

Fields have the names of the records' attributes; that is a stable contract (contracts 9).
"""

import base64
from collections.abc import Sequence
from typing import Any

import attrs

from .records import AttemptRecord, DeliveryRecord, EvidenceRecord


def listed(record: DeliveryRecord) -> dict[str, Any]:
    """Return every attribute but the body, which listings leave out."""
    fields = attrs.asdict(record, filter=lambda field, _: field.name != "raw")
    return {**fields, "key": record.key}


def shown(
    record: DeliveryRecord,
    attempts: Sequence[AttemptRecord],
    evidence: Sequence[EvidenceRecord],
    *,
    body: bool = True,
) -> dict[str, Any]:
    """Return one event whole: its failed runs, the other bodies that came under its key.

    With ``body``, it and each of those has ``raw`` or ``raw_base64``.
    """
    failed = [attrs.asdict(attempt) for attempt in attempts]
    return {
        **listed(record),
        **(body_fields(record.raw) if body else {}),
        "failed_attempts": failed,
        "other_bodies": [
            {
                "received_at": other.received_at,
                "address": other.address,
                "tenant_id": other.tenant_id,
                **(body_fields(other.raw) if body else {}),
            }
            for other in evidence
        ],
    }


def body_fields(raw: bytes | None) -> dict[str, str | None]:
    """Return ``raw`` as text, ``raw_base64`` where it is not UTF-8, null if it is gone."""
    if raw is None:
        return {"raw": None}
    try:
        return {"raw": raw.decode()}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(raw).decode("ascii")}
