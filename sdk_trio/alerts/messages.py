"""The texts of messages about alerts. Pure.

They consist of the fixed texts here, the alert's detail (:mod:`sdk_trio.alerts.conditions`), times,
and the host's name.
"""

import json
from typing import Final

import attrs

from ..base.times import readable, rfc3339
from ..records.alerts import AlertMessage, AlertName, MessageKind

TITLES: Final = {
    AlertName.DEAD_LETTERS: "new dead letters",
    AlertName.ENDPOINT_DISABLED: "webhook endpoint disabled",
    AlertName.SILENCE: "no deliveries",
    AlertName.OLDEST_WAITING: "an event waits too long",
    AlertName.EVENTS_PAUSED: "events are paused",
    AlertName.STORE_UNREACHABLE: "store unreachable",
    AlertName.SENDER_UNREACHABLE: "upstream unreachable",
    AlertName.REPLICATION_LAG: "replication behind",
    AlertName.CERTIFICATE_EXPIRY: "certificate about to expire",
    AlertName.TOKEN_EXPIRY: "access token about to expire",
    AlertName.CLOCK_OFFSET: "clocks differ",
    AlertName.SECRET_UNUSED: "unused webhook secret",
}

_HEADINGS = {
    MessageKind.OPENED: "Alert",
    MessageKind.REMINDER: "Still open",
    MessageKind.CLOSED: "Closed",
    MessageKind.TEST: "Test",
}

#: The detail of a test message.
TEST_DETAIL: Final = "This is a test of alerts. Nothing has happened."


@attrs.frozen
class AlertText:
    """The text of one message."""

    subject: str
    text: str


def render(message: AlertMessage, *, host: str, repeat_hours: int) -> AlertText:
    """Return the text of a message.

    Args:
        message: the message.
        host: the name of the host that sends it.
        repeat_hours: the setting ``RepeatHours``, within which the number of messages is limited.
    """
    if message.kind is MessageKind.TEST:
        return AlertText(f"Test: alerts of {host}", TEST_DETAIL)
    subject = f"{_HEADINGS[message.kind]}: {TITLES[message.alert]} ({host})"
    opened = readable(message.opened_at)
    if message.closed_at is None:
        facts = [message.detail, f"Open since {opened}."]
    else:
        facts = [
            f"The condition no longer holds. It was open from {opened} to "
            f"{readable(message.closed_at)}.",
            f"It was: {message.detail}",
        ]
    if message.is_last:
        facts.append(
            "This alert has changed several times. Further changes are announced when fewer than "
            f"three messages about it were sent within {repeat_hours} hours. 'alerts list' shows "
            "its current state."
        )
    return AlertText(subject, "\n".join(facts))


def webhook_payload(message: AlertMessage, text: AlertText, *, host: str) -> bytes:
    """Return the body for the webhook channel: the same bytes for each attempt.

    It has the members of the Standard Webhooks envelope: ``type``, ``timestamp``, ``data.id``.
    """
    document = {
        "type": f"alert.{message.kind}",
        "timestamp": rfc3339(message.created_at, timespec="milliseconds"),
        "data": {"id": str(message.alert)},
        "deliveryId": message.id,
        "alert": None if message.kind is MessageKind.TEST else str(message.alert),
        "state": "closed" if message.closed_at is not None else "open",
        "detail": message.detail,
        "openedAt": rfc3339(message.opened_at, timespec="milliseconds"),
        "closedAt": (
            None
            if message.closed_at is None
            else rfc3339(message.closed_at, timespec="milliseconds")
        ),
        "host": host,
        "subject": text.subject,
        "text": text.text,
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def chat_payload(text: AlertText) -> bytes:
    """Return the body for an incoming webhook of a chat."""
    # Slack reads <, > and & as markup (its "Formatting text for app surfaces").
    shown = f"*{text.subject}*\n{text.text}"
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        shown = shown.replace(character, entity)
    return json.dumps({"text": shown}, separators=(",", ":")).encode("ascii")
