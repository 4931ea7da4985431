"""The settings of alerts: their channels, and the thresholds of their conditions. Pure."""

from typing import Annotated

from ..fields import AlertChannel, Form, Section, about
from .notifications import EmailOptions, WebhookChannelOptions


class ChatOptions(Section, frozen=True, kw_only=True):
    """The chat channel: an incoming webhook of Slack, Mattermost or Discord."""

    # Anyone who knows the URL can post, so it is a credential.
    url_env_var: Annotated[
        str, about("Variable with the URL that takes the text.", form=Form.ENV_VAR, required=True)
    ] = "SDK_ALERTS_CHAT_URL"
    timeout_seconds: Annotated[
        int, about("Timeout of one POST.", between=(1, 300), unit="seconds")
    ] = 10


class AlertsOptions(Section, frozen=True, kw_only=True):
    """Alerts, gated by Enabled."""

    enabled: Annotated[bool, about("Master toggle; when false the section is ignored.")] = False
    channels: Annotated[
        tuple[AlertChannel, ...],
        about("How alerts are sent: any of Email, Webhook and Chat.", required=True),
    ] = ()
    to: Annotated[
        tuple[str, ...],
        about("Recipients of the channel Email.", form=Form.EMAIL, required=True),
    ] = ()
    dead_letters: Annotated[
        int,
        about("New dead letters within RepeatHours that open an alert.", minimum=1),
    ] = 1
    silence_minutes: Annotated[
        int | None,
        about(
            "Longest time without a delivery, once there was one.",
            minimum=1,
            unit="minutes",
            default_note="no alert",
        ),
    ] = None
    oldest_waiting_minutes: Annotated[
        int,
        about("Longest time that an event may wait for a worker.", minimum=1, unit="minutes"),
    ] = 15
    expiry_days: Annotated[
        int,
        about(
            "How long before its end an expiring certificate or token opens an alert.",
            minimum=1,
            unit="days",
        ),
    ] = 14
    close_after_seconds: Annotated[
        int,
        about(
            "How long a condition must not hold before its alert closes.",
            minimum=0,
            unit="seconds",
        ),
    ] = 60
    # A year: a longer interval means no reminder.
    repeat_hours: Annotated[
        int,
        about(
            "Interval of reminders of an open alert; at most three messages about one alert are "
            "sent in it.",
            between=(1, 8760),
            unit="hours",
        ),
    ] = 24
    email: EmailOptions = EmailOptions()
    webhook: WebhookChannelOptions = WebhookChannelOptions()
    chat: ChatOptions = ChatOptions()
