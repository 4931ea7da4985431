"""The email channel: EmailProviderA's ``mail/send``."""

import json

from ...base.logs import get_logger
from ...config.options.notifications import NotificationsOptions
from ...config.table import NOTIFICATIONS
from ...net.poster import PostAnswer
from ...records.tenants import OutboxRecord
from ..send import (
    Outcome,
    ProviderChannel,
    Request,
    Skipped,
    accepted,
    classify_response,
    credential,
    document_of,
    explained,
)
from ..templates import one_line, render, template_of

_log = get_logger("notifications")


class EmailSender(ProviderChannel):
    """Sends one email to the site manager."""

    repeatable = False

    def _prepare(self, record: OutboxRecord) -> Request | Skipped:
        options = self._options
        provider = options.email.email_provider_a
        recipient = record.site_manager_email
        if not options.enabled_channels.email:
            return Skipped(f"{NOTIFICATIONS}:EnabledChannels:Email is false")
        if not recipient:
            return Skipped("the tenant has no site manager's email address")
        if not (record.site_manager_email_verified or options.send_to_unverified_email):
            return Skipped(
                "the site manager's email address is not verified, and "
                f"{NOTIFICATIONS}:SendToUnverifiedEmail is false"
            )
        if not options.email.from_address:
            return Skipped(f"{NOTIFICATIONS}:Email:FromAddress is empty")
        key = credential(self._read_variable, provider.api_key_env_var)
        if isinstance(key, Skipped):
            return key
        return Request(
            url=f"{provider.base_url.rstrip('/')}/v3/mail/send",
            headers={
                "authorization": f"Bearer {key}",
                "content-type": "application/json",
                "accept": "application/json",
            },
            body=_document(options, record, recipient),
            timeout_seconds=options.email.timeout_seconds,
            classify=lambda answer: self._judge(answer, hidden=(key, recipient)),
        )

    def _judge(self, answer: PostAnswer, *, hidden: tuple[str, ...]) -> Outcome:
        # The provider queues a message with 202; 200 is its sandbox, which checks and sends nothing
        # (docs/adr/0013-notifications.md).
        if answer.status == 202:
            return accepted(answer, answer.headers.get("x-message-id"))
        if answer.status == 200:
            _log.warning("notification.not_queued", channel="email", status=200)
            return Skipped("the provider answered 200: sandbox mode, it checks and sends nothing")
        variable = self._options.email.email_provider_a.api_key_env_var
        return classify_response(
            answer,
            repeatable=self.repeatable,
            explanation=_explanation(answer, hidden),
            advice=f"check the key in the variable {variable}, its permission to send mail, and "
            f"that {NOTIFICATIONS}:Email:FromAddress is a verified sender",
            now=self._clock(),
        )


def _document(options: NotificationsOptions, record: OutboxRecord, recipient: str) -> bytes:
    message = render(template_of(options.templates, record.transition), record)
    sender = {"email": options.email.from_address}
    name = one_line(options.email.from_display_name)
    if name:
        sender["name"] = name
    document = {
        "personalizations": [
            {
                "to": [{"email": recipient}],
                # The provider's events repeat it, so a bounce can be matched to its transition.
                "custom_args": {"delivery_id": record.delivery_id},
            }
        ],
        "from": sender,
        "subject": message.email_subject,
        "content": [
            {"type": "text/plain", "value": message.email_text},
            {"type": "text/html", "value": message.email_html},
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def _explanation(answer: PostAnswer, hidden: tuple[str, ...]) -> str:
    errors = document_of(answer).get("errors")
    if not isinstance(errors, list):
        return ""
    # Three are enough to see the fault, and the reason is cut at 300 characters anyway.
    first = [error for error in errors[:3] if isinstance(error, dict)]
    texts = []
    for error in first:
        field = error.get("field")
        where = f" ({field})" if isinstance(field, str) and field else ""
        texts.append(f"{error.get('message', '')}{where}")
    return explained("; ".join(texts), hidden)
