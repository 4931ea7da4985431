"""The webhook channel: a signed JSON document to the configured URL (spec 2.9, 5, 6.2)."""

from collections.abc import Callable, Mapping
from typing import Protocol

from ..config.gates import NOTIFICATIONS
from ..config.notification_options import NotificationsOptions
from ..config.notification_rules import must_be_public, signing_secret_problem
from ..storage.tenant_records import OutboxRecord
from .answers import accepted, judge
from .attempter import ReadVariable, Request, credential
from .outcome import Outcome, Skipped
from .payload import SIGNATURE_HEADER, body_signature, payload
from .ports import Answer, Poster
from .sender import Sender
from .templates import render, template_of


class Signer(Protocol):
    """Signs as the Standard Webhooks scheme does; the runtime hands one over."""

    def __call__(
        self, body: bytes, *, secret: str, webhook_id: str, timestamp: int
    ) -> Mapping[str, str]:
        """Return the headers of the signed delivery, the content type among them.

        Raises:
            ValueError: the secret cannot be used.
        """
        ...


class WebhookSender(Sender):
    """Posts one notification to the operator's URL.

    Args:
        options: as of :class:`~.sender.Sender`.
        poster: as well.
        sign: makes the three headers of Standard Webhooks, with the delivery's id.
        read_variable: as well.
        clock: as well; each attempt is signed anew with its own time.
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
            judge=self._judge,
            public_only=must_be_public(options),
            # The status says it all, and what a receiver does with its body is its own affair.
            wants_body=False,
        )

    def _judge(self, answer: Answer) -> Outcome:
        # The receiver's words are not kept: nobody knows what they hold.
        if 200 <= answer.status < 300:
            return accepted(answer)
        return judge(
            answer,
            repeatable=self.repeatable,
            advice="check that the receiver has the same secret",
            now=self._clock(),
        )
