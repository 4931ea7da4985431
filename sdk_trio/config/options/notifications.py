"""The settings of messages to site managers: channels, templates and their default texts. Pure.

The default texts are English, short, and in the 7-bit alphabet of SMS. They state what happened,
why, and what it means. They never ask for a click or a password, so an imitated message gains
nothing.

A template is text with placeholders such as ``{TenantName}``, not a format string: ``str.format``
could access attributes (``{TenantName.__init__}``) and exhaust memory
(``{TenantName:>100000000}``).

Each SMS segment is billed. Text in the GSM 03.38 alphabet takes 7 bits per character (14 for its
extension table), any other text 16 bits per UTF-16 unit. In a message of several segments, each
loses 7 or 3 characters to the header that joins them.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ...records.channels import CHANNELS
from ..fields import EmailProvider, Form, Section, SmsProvider, about

# -- texts ---------------------------------------------------------------------------------------

PLACEHOLDERS = (
    "TenantName",
    "TenantIdentifier",
    "NewStatus",
    "PreviousStatus",
    "Reason",
    "OccurredAt",
)

_WORD = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")
_BRACES = re.compile(r"\{([^{}]*)\}")

_BASIC = frozenset(
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?¡"
    "ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_EXTENSION = frozenset("\f^{}\\[~]|€")

# 140 octets per message (GSM 03.40): 160 characters of 7 bits, or 70 units of 16. The joining
# header takes 6 octets of each.
_GSM7_ALONE, _GSM7_JOINED = 160, 153
_UCS2_ALONE, _UCS2_JOINED = 70, 67


def substitute(template: str, values: Mapping[str, str]) -> str:
    """Return ``template`` with each ``{Word}`` of ``values`` replaced; other text is unchanged.

    One pass: placeholders inside a value are not replaced.
    """
    return _WORD.sub(lambda found: values.get(found[1], found[0]), template)


def unknown_placeholders(template: str) -> tuple[str, ...]:
    """Return the unknown placeholders of a template, each once.

    Includes other template syntaxes: ``{0}``, ``{TenantName:>9}``.
    """
    found = dict.fromkeys(match[1] for match in _BRACES.finditer(template))
    return tuple(word for word in found if word not in PLACEHOLDERS)


class SmsSize(msgspec.Struct, frozen=True):
    """The size of one SMS: ``encoding`` is ``GSM-7`` or ``UCS-2``.

    ``units`` counts 7-bit or 16-bit units, ``segments`` the segments they need; 0 for empty text.
    """

    encoding: str
    units: int
    segments: int


def measure_sms(text: str) -> SmsSize:
    """Return the size of ``text`` as one SMS; any string is accepted."""
    if all(character in _BASIC or character in _EXTENSION for character in text):
        costs = [1 if character in _BASIC else 2 for character in text]
        return _size("GSM-7", costs, _GSM7_ALONE, _GSM7_JOINED)
    costs = [1 if ord(character) < 0x10000 else 2 for character in text]
    return _size("UCS-2", costs, _UCS2_ALONE, _UCS2_JOINED)


def _size(encoding: str, costs: list[int], alone: int, joined: int) -> SmsSize:
    units = sum(costs)
    if units <= alone:
        return SmsSize(encoding, units, 1 if units else 0)
    segments, left = 0, 0
    for cost in costs:
        if cost > left:  # a character is never split across segments
            segments, left = segments + 1, joined
        left -= cost
    return SmsSize(encoding, units, segments)


def cut_sms(text: str, segments: int) -> str:
    """Return ``text``, or its longest prefix that fits with ``...`` into ``segments``.

    Three dots, because the single ellipsis character is not in the 7-bit alphabet.
    """
    text = text[: segments * _GSM7_ALONE + 1]
    if measure_sms(text).segments <= segments:
        return text
    fits, fits_not = 0, len(text)
    while fits_not - fits > 1:
        middle = (fits + fits_not) // 2
        if measure_sms(text[:middle] + "...").segments <= segments:
            fits = middle
        else:
            fits_not = middle
    return text[:fits].rstrip() + "..."


# -- sections ------------------------------------------------------------------------------------


class EnabledChannelsOptions(Section, frozen=True, kw_only=True):
    """The channels that send messages."""

    email: Annotated[bool, about("Send by the email channel.")] = True
    sms: Annotated[bool, about("Send by the SMS channel.")] = False
    webhook: Annotated[bool, about("Send by the webhook channel.")] = False


class EmailProviderAOptions(Section, frozen=True, kw_only=True):
    """The email provider's account."""

    api_key_env_var: Annotated[
        str, about("Variable with the provider key.", form=Form.ENV_VAR, required=True)
    ] = "EMAIL_API_KEY"
    base_url: Annotated[
        str, about("Base address, for regions and tests.", form=Form.HTTPS_URL, required=True)
    ] = "https://api.sendgrid.com"


class EmailOptions(Section, frozen=True, kw_only=True):
    """The email channel."""

    provider: Annotated[EmailProvider, about("The only provider of v1.0.")] = (
        EmailProvider.EMAIL_PROVIDER_A
    )
    from_address: Annotated[
        str, about("From header of outgoing messages.", form=Form.EMAIL, required=True)
    ] = ""
    from_display_name: Annotated[
        str, about("Display name in the From header.", form=Form.HEADER_TEXT)
    ] = "Platform"
    timeout_seconds: Annotated[
        int, about("Timeout of one request to the provider.", between=(1, 300), unit="seconds")
    ] = 30
    email_provider_a: EmailProviderAOptions = EmailProviderAOptions()


class SmsProviderAOptions(Section, frozen=True, kw_only=True):
    """The SMS provider's account."""

    account_sid_env_var: Annotated[
        str, about("Variable with the account id.", form=Form.ENV_VAR, required=True)
    ] = "SMS_ACCOUNT_SID"
    auth_token_env_var: Annotated[
        str, about("Variable with the auth token.", form=Form.ENV_VAR, required=True)
    ] = "SMS_AUTH_TOKEN"
    from_number: Annotated[str, about("Sender number.", form=Form.PHONE, required=True)] = ""
    base_url: Annotated[
        str, about("Base address, for regions and tests.", form=Form.HTTPS_URL, required=True)
    ] = "https://api.twilio.com"


class SmsOptions(Section, frozen=True, kw_only=True):
    """The SMS channel."""

    provider: Annotated[SmsProvider, about("The only provider of v1.0.")] = (
        SmsProvider.SMS_PROVIDER_A
    )
    timeout_seconds: Annotated[
        int, about("Timeout of one request to the provider.", between=(1, 300), unit="seconds")
    ] = 30
    sms_provider_a: SmsProviderAOptions = SmsProviderAOptions()


class WebhookChannelOptions(Section, frozen=True, kw_only=True):
    """The webhook channel."""

    url: Annotated[
        str,
        about("Receives the JSON payload by POST.", form=Form.HOOK_URL, required=True, masked=True),
    ] = ""
    signing_secret_env_var: Annotated[
        str, about("Variable with the HMAC signing secret.", form=Form.ENV_VAR, required=True)
    ] = "SDK_WEBHOOK_SECRET"
    timeout_seconds: Annotated[
        int, about("Timeout of one POST.", between=(1, 300), unit="seconds")
    ] = 10
    # A customer may have chosen the URL; it must not give access to the operator's network (ADR
    # 14).
    allow_private_addresses: Annotated[
        bool,
        about(
            "Connect to loopback, private and link-local addresses too, when the name in Url "
            "resolves to one."
        ),
    ] = False


class TemplateOptions(Section, frozen=True, kw_only=True):
    """The texts of one transition; placeholders such as ``{TenantName}`` are substituted."""

    email_subject: Annotated[
        str, about("Subject of the email.", form=Form.HEADER_TEXT, required=True, live=True)
    ]
    email_body: Annotated[
        str,
        about("Text of the email; its HTML form is generated from it.", required=True, live=True),
    ]
    sms_body: Annotated[str, about("Text of the SMS.", required=True, live=True)]


def _template(happened: str, meaning: str) -> TemplateOptions:
    return TemplateOptions(
        email_subject=f"{{TenantName}} {happened}",
        email_body=(
            "Hello,\n"
            "\n"
            f"{{TenantName}} ({{TenantIdentifier}}) {happened}.\n"
            "\n"
            "Reason: {Reason}\n"
            "When: {OccurredAt}\n"
            "Status: {NewStatus} (it was {PreviousStatus})\n"
            "\n"
            f"{meaning}\n"
            "\n"
            "You receive this message because you are the site manager. If you did not expect it, "
            "please get in touch with us.\n"
        ),
        sms_body=f"{{TenantName}} {happened}. Reason: {{Reason}}",
    )


class TemplatesOptions(Section, frozen=True, kw_only=True):
    """One template per status transition."""

    suspended: TemplateOptions = _template(
        "has been suspended",
        "Access is paused for now. Nothing has been removed, and everything will be available "
        "again once it has been reactivated.",
    )
    reactivated: TemplateOptions = _template(
        "has been reactivated",
        "It is active, and everything can be used again. Thank you for your patience.",
    )
    deactivated: TemplateOptions = _template(
        "has been deactivated", "It is switched off. Its data is kept, and it can be reactivated."
    )
    deleted: TemplateOptions = _template(
        "has been deleted",
        "Its data is kept for a limited time, in which it can still be restored. After that it is "
        "removed for good. If you want it back, please contact us soon.",
    )


class NotificationsOptions(Section, frozen=True, kw_only=True):
    """Site-manager notifications, gated by Enabled."""

    enabled: Annotated[bool, about("Master toggle; when false the section is ignored.")] = False
    enabled_channels: EnabledChannelsOptions = EnabledChannelsOptions()
    # A mistyped address belongs to someone else, who would learn of a tenant's suspension.
    send_to_unverified_email: Annotated[
        bool, about("When false, the email channel skips recipients whose email is not verified.")
    ] = False
    # With the waits below, eight attempts take half an hour on average.
    max_attempts: Annotated[int, about("Attempts of one message on one channel.", minimum=1)] = 8
    retry_base_seconds: Annotated[
        float,
        about(
            "Longest wait after the first failed attempt, doubled after each further one.",
            between=(0, 86_400),
            unit="seconds",
        ),
    ] = 30.0
    retry_cap_seconds: Annotated[
        float,
        about(
            "Longest wait between two attempts.",
            between=(0, 86_400),
            unit="seconds",
            at_least="retry_base_seconds",
        ),
    ] = 3600.0
    email: EmailOptions = EmailOptions()
    sms: SmsOptions = SmsOptions()
    webhook: WebhookChannelOptions = WebhookChannelOptions()
    templates: TemplatesOptions = TemplatesOptions()


def enabled_channels(options: NotificationsOptions) -> tuple[str, ...]:
    """Return the names of the enabled channels, such as ``email``."""
    chosen = options.enabled_channels
    return tuple(name for name in CHANNELS if getattr(chosen, name))
