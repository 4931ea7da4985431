"""Wiring of the notification channels: senders, the HTTP transport, and the signing function."""

import os
import time
from collections.abc import Callable, Mapping

from ..config.choices import KeyDerivation
from ..config.notification_options import NotificationsOptions
from ..notifications.attempter import ReadVariable
from ..notifications.email_sender import EmailSender
from ..notifications.ports import Channel, Poster
from ..notifications.sms_sender import SmsSender
from ..notifications.webhook_sender import WebhookSender
from ..webhooks.sender import sign_body
from .poster import HttpPoster


def make_channels(
    options: NotificationsOptions,
    *,
    poster: Poster | None = None,
    read_variable: ReadVariable = os.environ.get,
    clock: Callable[[], float] = time.time,
) -> dict[str, Channel]:
    """Return every channel under its name: ``email``, ``sms``, ``webhook``.

    A channel that is not enabled is among them, too, and skips every message with that reason. No
    channel holds anything open, so nobody has to close them.

    Args:
        options: ``Sdk:MultiTenant:Notifications``.
        poster: sends requests; None: the project's own transport.
        read_variable: reads an environment variable, at each message.
        clock: returns Unix seconds.
    """
    poster = poster or HttpPoster(clock=clock)
    return {
        "email": EmailSender(options, poster, read_variable=read_variable, clock=clock),
        "sms": SmsSender(options, poster, read_variable=read_variable, clock=clock),
        "webhook": WebhookSender(
            options, poster, sign=_sign, read_variable=read_variable, clock=clock
        ),
    }


def _sign(body: bytes, *, secret: str, webhook_id: str, timestamp: int) -> Mapping[str, str]:
    # Auto: the decoded key of a secret that has one, else the text, as receivers of either kind do.
    return sign_body(
        body,
        secret=secret,
        webhook_id=webhook_id,
        timestamp=timestamp,
        derivation=KeyDerivation.AUTO,
    ).headers
