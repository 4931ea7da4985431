"""The webhook channel: a signed JSON document to the configured URL."""

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Protocol

from ...base.times import rfc3339
from ...config.check_tenants import must_be_public, signing_secret_problem
from ...config.options.notifications import NotificationsOptions
from ...config.table import NOTIFICATIONS
from ...net.poster import PostAnswer
from ...records.tenants import OutboxRecord
from ..send import (
    Outcome,
    Poster,
    ProviderChannel,
    ReadVariable,
    Request,
    Skipped,
    accepted,
    classify_response,
    credential,
)
from ..templates import Message, cut, lines, render, template_of

#: A longer reason is truncated: receivers limit bodies, commonly to 64 KiB to 1 MiB.
MAX_REASON_CHARACTERS = 10_000

SIGNATURE_HEADER = "x-sdk-signature"


def notification_type(record: OutboxRecord) -> str:
    """Return the event type of a transition, such as ``tenant.suspended``."""
    return f"tenant.{record.transition.lower()}"


def payload(record: OutboxRecord, message: Message) -> bytes:
    """Return the body: the same bytes for the same record and message.

    In addition to the flat members shown in docs/how-to/receive-notifications.md, it has those of
    the Standard Webhooks envelope (ADR 0013): ``type``, ``timestamp``, ``data.id``.
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

    The key is the UTF-8 form of the configured secret, including ``whsec_``.
    """
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


class Signer(Protocol):
    """Signs by the Standard Webhooks scheme; the runtime passes an instance."""

    def __call__(
        self, body: bytes, *, secret: str, webhook_id: str, timestamp: int
    ) -> Mapping[str, str]:
        """Return the headers of the signed delivery, the content type among them.

        Raises:
            ValueError: the secret cannot be used.
        """
        ...


class WebhookSender(ProviderChannel):
    """Posts one notification to the operator's URL.

    Args:
        options: as for :class:`ProviderChannel`.
        poster: as for :class:`ProviderChannel`.
        sign: makes the three headers of Standard Webhooks, with the delivery's id.
        read_variable: as for :class:`ProviderChannel`.
        clock: returns Unix seconds; each attempt is signed with its own time.
    """

    repeatable = True

    def __init__(
        self,
        options: NotificationsOptions,
        poster: Poster,
        *,
        sign: Signer,
        read_variable: ReadVariable,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(options, poster, read_variable=read_variable, clock=clock)
        self._sign = sign

    def _prepare(self, record: OutboxRecord) -> Request | Skipped:
        options, webhook = self._options, self._options.webhook
        if not options.enabled_channels.webhook:
            return Skipped(f"{NOTIFICATIONS}:EnabledChannels:Webhook is false")
        if not webhook.url:
            return Skipped(f"{NOTIFICATIONS}:Webhook:Url is empty")
        secret = credential(self._read_variable, webhook.signing_secret_env_var, for_header=False)
        if isinstance(secret, Skipped):
            return secret
        unusable = signing_secret_problem(options, secret)
        if unusable is not None:
            return Skipped(str(unusable))
        message = render(template_of(options.templates, record.transition), record)
        body = payload(record, message)
        headers = self._sign(
            body, secret=secret, webhook_id=record.delivery_id, timestamp=int(self._clock())
        )
        return Request(
            url=webhook.url,
            headers={**headers, SIGNATURE_HEADER: body_signature(secret, body)},
            body=body,
            timeout_seconds=webhook.timeout_seconds,
            classify=self._judge,
            public_only=must_be_public(options),
            # Only the status counts. Many receivers answer 200 and do their work before they end
            # the body: when we waited for it, the same message was sent eight times.
            wants_body=False,
        )

    def _judge(self, answer: PostAnswer) -> Outcome:
        # The receiver's explanation is not stored: it may contain secrets.
        if 200 <= answer.status < 300:
            return accepted(answer)
        return classify_response(
            answer,
            repeatable=self.repeatable,
            advice="check that the receiver has the same secret",
            now=self._clock(),
        )
