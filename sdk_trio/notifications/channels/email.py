"""The email channel: EmailProviderA's ``mail/send``."""

import json
from collections.abc import Callable, Sequence

import attrs

from ...base.logs import get_logger
from ...config.options.notifications import EmailOptions
from ...config.table import NOTIFICATIONS
from ...net.poster import PostAnswer
from ...records.tenants import OutboxRecord
from ..send import (
    Outcome,
    ProviderChannel,
    ReadVariable,
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
        message = render(template_of(options.templates, record.transition), record)
        provider = EmailAccount(
            options.email, NOTIFICATIONS, self._read_variable, self._clock, self.repeatable
        )
        return provider.prepare(
            [recipient],
            subject=message.email_subject,
            text=message.email_text,
            html=message.email_html,
            delivery_id=record.delivery_id,
        )


@attrs.frozen
class EmailAccount:
    """The provider's account of one section of the settings: its requests and its answers.

    Args:
        options: the channel's section.
        section: the key of the section that contains it.
        read_variable: reads the environment.
        clock: returns Unix seconds.
        repeatable: whether a message with an unknown outcome is sent again.
    """

    options: EmailOptions
    section: str
    read_variable: ReadVariable
    clock: Callable[[], float]
    repeatable: bool

    def prepare(
        self, recipients: Sequence[str], *, subject: str, text: str, html: str, delivery_id: str
    ) -> Request | Skipped:
        """Return the request that sends one email, or the reason to send none."""
        provider = self.options.email_provider_a
        if not self.options.from_address:
            return Skipped(f"{self.section}:Email:FromAddress is empty")
        key = credential(self.read_variable, provider.api_key_env_var)
        if isinstance(key, Skipped):
            return key
        document = {
            "personalizations": [
                {
                    "to": [{"email": recipient} for recipient in recipients],
                    # The provider's events repeat it, so a bounce can be matched to its message.
                    "custom_args": {"delivery_id": delivery_id},
                }
            ],
            "from": _sender(self.options),
            "subject": subject,
            "content": [
                {"type": "text/plain", "value": text},
                {"type": "text/html", "value": html},
            ],
        }
        return Request(
            url=f"{provider.base_url.rstrip('/')}/v3/mail/send",
            headers={
                "authorization": f"Bearer {key}",
                "content-type": "application/json",
                "accept": "application/json",
            },
            body=json.dumps(document, separators=(",", ":")).encode("ascii"),
            timeout_seconds=self.options.timeout_seconds,
            classify=lambda answer: self._judge(answer, hidden=(key, *recipients)),
            section=self.section,
        )

    def _judge(self, answer: PostAnswer, *, hidden: tuple[str, ...]) -> Outcome:
        # The provider queues a message with 202; 200 is its sandbox, which checks and sends nothing
        # (docs/adr/0013-notifications.md).
        if answer.status == 202:
            return accepted(answer, answer.headers.get("x-message-id"))
        if answer.status == 200:
            _log.warning("notification.not_queued", channel="email", status=200)
            return Skipped("the provider answered 200: sandbox mode, it checks and sends nothing")
        variable = self.options.email_provider_a.api_key_env_var
        return classify_response(
            answer,
            repeatable=self.repeatable,
            explanation=_explanation(answer, hidden),
            advice=f"check the key in the variable {variable}, its permission to send mail, and "
            f"that {self.section}:Email:FromAddress is a verified sender",
            now=self.clock(),
        )


def _sender(options: EmailOptions) -> dict[str, str]:
    sender = {"email": options.from_address}
    name = one_line(options.from_display_name)
    return {**sender, "name": name} if name else sender


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
