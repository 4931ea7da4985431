"""The channels of alerts: each sends one message in one request.

Email and webhook use the senders of the messages to site managers, with the sections
``Sdk:Alerts:Email`` and ``Sdk:Alerts:Webhook``. Chat posts ``{"text"}`` to an incoming webhook.
"""

from collections.abc import Callable, Mapping

import attrs

from ..config.fields import AlertChannel, Form, check_form
from ..config.options.alerts import AlertsOptions
from ..config.table import ALERTS
from ..net.poster import PostAnswer
from ..notifications.channels.email import EmailAccount
from ..notifications.channels.webhook import Signer, WebhookTarget
from ..notifications.send import (
    Outcome,
    Poster,
    ReadVariable,
    Request,
    Skipped,
    accepted,
    attempt,
    classify_response,
    credential,
)
from ..notifications.templates import html_of
from ..records.alerts import AlertMessage
from .messages import AlertText, chat_payload, render, webhook_payload

#: Turns a message into its request, or the reason to send none.
Prepare = Callable[[AlertMessage, AlertText], Request | Skipped]


@attrs.frozen
class AlertSender:
    """Sends the messages of one channel."""

    prepare: Prepare
    poster: Poster
    options: AlertsOptions
    host: str

    async def send(self, message: AlertMessage) -> Outcome:
        """Try once to send a message.

        It raises nothing but ``Cancelled``; whether the message arrived is then unknown.
        """
        text = render(message, host=self.host, repeat_hours=self.options.repeat_hours)
        return await attempt(self.poster, lambda: self.prepare(message, text))


def make_senders(
    options: AlertsOptions,
    poster: Poster,
    *,
    sign: Signer,
    read_variable: ReadVariable,
    clock: Callable[[], float],
    host: str,
) -> Mapping[str, AlertSender]:
    """Return the senders of the configured channels by name, such as ``email``.

    Args:
        options: ``Sdk:Alerts``.
        poster: sends requests.
        sign: makes the three headers of Standard Webhooks.
        read_variable: reads the environment at each message, so that a changed credential counts.
        clock: returns Unix seconds.
        host: the name of this host, for the texts.
    """
    # Repeated if in doubt: an alert that arrives twice does no harm, a lost one does.
    email = EmailAccount(options.email, ALERTS, read_variable, clock, repeatable=True)
    webhook = WebhookTarget(options.webhook, ALERTS, sign, read_variable, clock)

    def prepare_email(message: AlertMessage, text: AlertText) -> Request | Skipped:
        return email.prepare(
            options.to,
            subject=text.subject,
            text=text.text,
            html=html_of(text.subject, text.text),
            delivery_id=message.id,
        )

    def prepare_webhook(message: AlertMessage, text: AlertText) -> Request | Skipped:
        return webhook.prepare(webhook_payload(message, text, host=host), delivery_id=message.id)

    def prepare_chat(message: AlertMessage, text: AlertText) -> Request | Skipped:
        return _chat_request(options, text, read_variable, clock)

    prepared: Mapping[AlertChannel, Prepare] = {
        AlertChannel.EMAIL: prepare_email,
        AlertChannel.WEBHOOK: prepare_webhook,
        AlertChannel.CHAT: prepare_chat,
    }
    return {
        name_of(channel): AlertSender(prepared[channel], poster, options, host)
        for channel in dict.fromkeys(options.channels)
    }


def name_of(channel: AlertChannel) -> str:
    """Return the name of a channel in commands, in the store and in metrics."""
    return channel.lower()


def _chat_request(
    options: AlertsOptions,
    text: AlertText,
    read_variable: ReadVariable,
    clock: Callable[[], float],
) -> Request | Skipped:
    url = credential(read_variable, options.chat.url_env_var)
    if isinstance(url, Skipped):
        return url
    # The receiver does not start with such a URL, but a command may read another environment.
    wrong = check_form(Form.HOOK_URL, url, development=True)
    if wrong is not None:  # without the URL, which is a credential
        return Skipped(f"the value of the variable {options.chat.url_env_var} {wrong}")

    def classify(answer: PostAnswer) -> Outcome:
        # The text of the response is not stored: it may quote the URL, which is a credential.
        if 200 <= answer.status < 300:
            return accepted(answer)
        return classify_response(
            answer,
            repeatable=True,
            advice=f"check the URL in the variable {options.chat.url_env_var}",
            now=clock(),
        )

    return Request(
        url=url,
        headers={"content-type": "application/json"},
        body=chat_payload(text),
        timeout_seconds=options.chat.timeout_seconds,
        classify=classify,
        wants_body=False,
        section=ALERTS,
    )
