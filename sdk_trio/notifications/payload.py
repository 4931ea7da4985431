"""The JSON document and the headers of a notification webhook. Pure (contracts 6, spec 5)."""

import hashlib
import hmac
import json

from ..base.times import rfc3339
from ..storage.tenant_records import OutboxRecord
from .templates import Message, cut, lines

#: A longer reason is cut: receivers bound what they read, commonly at 64 KiB to 1 MiB.
MAX_REASON_CHARACTERS = 10_000

SIGNATURE_HEADER = "x-sdk-signature"


def notification_type(record: OutboxRecord) -> str:
    """Return the event type of a transition, such as ``tenant.suspended``."""
    return f"tenant.{record.transition.lower()}"


def payload(record: OutboxRecord, message: Message) -> bytes:
    """Return the body: the same bytes for the same record and message.

    Beside the members of contracts 6 stand the three of the Standard Webhooks envelope, which
    receivers of that scheme ask for (ADR 0014): ``type``, ``timestamp``, ``data.id``.
    """
    occurred_at = rfc3339(record.occurred_at, timespec="milliseconds")
    reason = None if record.reason is None else cut(lines(record.reason), MAX_REASON_CHARACTERS)
    document = {
        "type": notification_type(record),
        "timestamp": occurred_at,
        "data": {"id": record.tenant_id},
        "deliveryId": record.delivery_id,
        "tenantId": record.tenant_id,
        "tenantIdentifier": record.tenant_identifier,
        "tenantName": lines(record.tenant_name),
        "previousStatus": str(record.previous_status),
        "newStatus": str(record.new_status),
        "transition": str(record.transition),
        "reason": reason,
        "actor": lines(record.actor),
        "occurredAt": occurred_at,
        "email": {"subject": message.email_subject, "body": message.email_text},
        "sms": {"body": message.sms_text},
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def body_signature(secret: str, body: bytes) -> str:
    """Return the value of ``X-Sdk-Signature``: ``sha256=`` and hex HMAC-SHA256 over ``body``.

    The key is the UTF-8 form of the secret as it is configured, ``whsec_`` included (spec 5).
    """
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
