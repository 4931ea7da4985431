"""The settings of messages to site managers: channels, templates and their default texts. Pure.

The default texts are English, short, and in the 7-bit alphabet of SMS. They say what happened, why,
and what it means; nothing is asked for that a message could be imitated to get, such as a click or
a password.

A template is text with holes such as ``{TenantName}``, and no format string: ``str.format`` would
reach into objects (``{TenantName.__init__}``) and eat memory (``{TenantName:>100000000}``).

Each segment of an SMS is billed. A text of the GSM 03.38 alphabet takes 7 bits a character (14 for
the characters of its extension table), any other text 16 bits a unit of UTF-16. Several segments
lose the room of 7 and 3 characters in each to the header that joins them.
"""

import re
from collections.abc import Mapping

import attrs

from ...records.channels import CHANNELS
from ..fields import EmailProvider, Form, SmsProvider, about

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

# 140 octets a message (GSM 03.40): 160 characters of 7 bits, or 70 units of 16. The header that
# joins segments takes 6 octets of each.
_GSM7_ALONE, _GSM7_JOINED = 160, 153
_UCS2_ALONE, _UCS2_JOINED = 70, 67


@attrs.frozen
class TemplateTexts:
    """The three texts of one transition."""

    email_subject: str
    email_body: str
    sms_body: str


def _texts(happened: str, meaning: str) -> TemplateTexts:
    return TemplateTexts(
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


SUSPENDED = _texts(
    "has been suspended",
    "Access is paused for now. Nothing has been removed, and everything is there again once it "
    "has been reactivated.",
)
REACTIVATED = _texts(
    "has been reactivated",
    "It is active, and everything can be used again. Thank you for your patience.",
)
DEACTIVATED = _texts(
    "has been deactivated",
    "It is switched off. Its data is kept, and it can be reactivated.",
)
DELETED = _texts(
    "has been deleted",
    "Its data is kept for a limited time, in which it can still be restored. After that it is "
    "removed for good. If you want it back, please tell us soon.",
)


def substitute(template: str, values: Mapping[str, str]) -> str:
    """Return ``template`` with each ``{Word}`` of ``values`` replaced; other text stays as it is.

    One pass: a value that holds a placeholder is not looked into.
    """
    return _WORD.sub(lambda found: values.get(found[1], found[0]), template)


def unknown_placeholders(template: str) -> tuple[str, ...]:
    """Return what stands between braces in a template and no value replaces, each text once.

    Also what other kinds of templates take for a placeholder: ``{0}``, ``{TenantName:>9}``.
    """
    found = dict.fromkeys(match[1] for match in _BRACES.finditer(template))
    return tuple(word for word in found if word not in PLACEHOLDERS)


@attrs.frozen
class SmsSize:
    """The size of one SMS: ``encoding`` is ``GSM-7`` or ``UCS-2``.

    ``units`` counts 7-bit or 16-bit units, ``segments`` what they fill; an empty text fills none.
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
    segments, room = 0, 0
    for cost in costs:
        if cost > room:  # the two halves of a character never lie in different segments
            segments, room = segments + 1, joined
        room -= cost
    return SmsSize(encoding, units, segments)


def cut_sms(text: str, segments: int) -> str:
    """Return ``text``, or the longest beginning of it that fits with ``...`` into ``segments``.

    The dots are three, because the one character that shows them would take the whole message out
    of the 7-bit alphabet.
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


@attrs.frozen(kw_only=True)
class EnabledChannelsOptions:
    """The channels that send messages."""

    email: bool = attrs.field(default=True, metadata=about("Email channel dispatches."))
    sms: bool = attrs.field(default=False, metadata=about("SMS channel dispatches."))
    webhook: bool = attrs.field(default=False, metadata=about("Webhook channel dispatches."))


@attrs.frozen(kw_only=True)
class EmailProviderAOptions:
    """The email provider's account."""

    api_key_env_var: str = attrs.field(
        default="EMAIL_API_KEY",
        metadata=about("Variable with the provider key.", form=Form.ENV_VAR, required=True),
    )
    base_url: str = attrs.field(
        default="https://api.sendgrid.com",
        metadata=about(
            "Base address, for regions and tests.",
            form=Form.HTTPS_URL,
            required=True,
        ),
    )


@attrs.frozen(kw_only=True)
class EmailOptions:
    """The email channel."""

    provider: EmailProvider = attrs.field(
        default=EmailProvider.EMAIL_PROVIDER_A,
        metadata=about("The only provider of v1.0."),
    )
    from_address: str = attrs.field(
        default="",
        metadata=about("From header of outgoing messages.", form=Form.EMAIL, required=True),
    )
    from_display_name: str = attrs.field(
        default="Platform",
        metadata=about("Display name in the From header.", form=Form.HEADER_TEXT),
    )
    timeout_seconds: int = attrs.field(
        default=30,
        metadata=about(
            "Timeout of one request to the provider.",
            minimum=1,
            maximum=300,
            unit="seconds",
        ),
    )
    email_provider_a: EmailProviderAOptions = attrs.field(factory=EmailProviderAOptions)


@attrs.frozen(kw_only=True)
class SmsProviderAOptions:
    """The SMS provider's account."""

    account_sid_env_var: str = attrs.field(
        default="SMS_ACCOUNT_SID",
        metadata=about("Variable with the account id.", form=Form.ENV_VAR, required=True),
    )
    auth_token_env_var: str = attrs.field(
        default="SMS_AUTH_TOKEN",
        metadata=about("Variable with the auth token.", form=Form.ENV_VAR, required=True),
    )
    from_number: str = attrs.field(
        default="",
        metadata=about("Sender number.", form=Form.PHONE, required=True),
    )
    base_url: str = attrs.field(
        default="https://api.twilio.com",
        metadata=about(
            "Base address, for regions and tests.",
            form=Form.HTTPS_URL,
            required=True,
        ),
    )


@attrs.frozen(kw_only=True)
class SmsOptions:
    """The SMS channel."""

    provider: SmsProvider = attrs.field(
        default=SmsProvider.SMS_PROVIDER_A,
        metadata=about("The only provider of v1.0."),
    )
    timeout_seconds: int = attrs.field(
        default=30,
        metadata=about(
            "Timeout of one request to the provider.",
            minimum=1,
            maximum=300,
            unit="seconds",
        ),
    )
    sms_provider_a: SmsProviderAOptions = attrs.field(factory=SmsProviderAOptions)


@attrs.frozen(kw_only=True)
class WebhookChannelOptions:
    """The webhook channel."""

    url: str = attrs.field(
        default="",
        metadata=about(
            "Receives the JSON payload by POST.",
            form=Form.HOOK_URL,
            required=True,
            masked=True,
        ),
    )
    signing_secret_env_var: str = attrs.field(
        default="SDK_WEBHOOK_SECRET",
        metadata=about(
            "Variable with the HMAC signing secret.",
            form=Form.ENV_VAR,
            required=True,
        ),
    )
    timeout_seconds: int = attrs.field(
        default=10,
        metadata=about("Timeout of one POST.", minimum=1, maximum=300, unit="seconds"),
    )
    # A customer may have chosen the URL, and must not reach the operator's network through us (ADR
    # 14).
    allow_private_addresses: bool = attrs.field(
        default=False,
        metadata=about(
            "Connect to loopback, private and link-local addresses too, when the name in Url "
            "resolves to one."
        ),
    )


@attrs.frozen(kw_only=True)
class TemplateOptions:
    """The texts of one transition; placeholders such as ``{TenantName}`` are substituted."""

    email_subject: str = attrs.field(
        metadata=about("Subject of the email.", form=Form.HEADER_TEXT, required=True, live=True)
    )
    email_body: str = attrs.field(
        metadata=about("Text of the email; its HTML form is made of it.", required=True, live=True)
    )
    sms_body: str = attrs.field(metadata=about("Text of the SMS.", required=True, live=True))


def _template(texts: TemplateTexts) -> TemplateOptions:
    return TemplateOptions(
        email_subject=texts.email_subject, email_body=texts.email_body, sms_body=texts.sms_body
    )


@attrs.frozen(kw_only=True)
class TemplatesOptions:
    """One template per status transition."""

    suspended: TemplateOptions = attrs.field(factory=lambda: _template(SUSPENDED))
    reactivated: TemplateOptions = attrs.field(factory=lambda: _template(REACTIVATED))
    deactivated: TemplateOptions = attrs.field(factory=lambda: _template(DEACTIVATED))
    deleted: TemplateOptions = attrs.field(factory=lambda: _template(DELETED))


@attrs.frozen(kw_only=True)
class NotificationsOptions:
    """Site-manager notifications, gated by Enabled."""

    enabled: bool = attrs.field(
        default=False,
        metadata=about("Master toggle; when false the section is ignored."),
    )
    enabled_channels: EnabledChannelsOptions = attrs.field(factory=EnabledChannelsOptions)
    # An address that was mistyped belongs to somebody else, who would learn of a tenant's
    # suspension.
    send_to_unverified_email: bool = attrs.field(
        default=False,
        metadata=about(
            "When false, the email channel skips recipients whose email is not verified."
        ),
    )
    # With the waits below, eight attempts take half an hour on average.
    max_attempts: int = attrs.field(
        default=8,
        metadata=about("Attempts of one message on one channel.", minimum=1),
    )
    retry_base_seconds: float = attrs.field(
        default=30.0,
        metadata=about(
            "Longest wait after the first failed attempt, doubled after each further one.",
            minimum=0,
            maximum=86_400,
            unit="seconds",
        ),
    )
    retry_cap_seconds: float = attrs.field(
        default=3600.0,
        metadata=about(
            "The wait between two attempts grows no longer than this.",
            minimum=0,
            maximum=86_400,
            unit="seconds",
            at_least="retry_base_seconds",
        ),
    )
    email: EmailOptions = attrs.field(factory=EmailOptions)
    sms: SmsOptions = attrs.field(factory=SmsOptions)
    webhook: WebhookChannelOptions = attrs.field(factory=WebhookChannelOptions)
    templates: TemplatesOptions = attrs.field(factory=TemplatesOptions)


def enabled_channels(options: NotificationsOptions) -> tuple[str, ...]:
    """Return the names of the channels that dispatch, such as ``email``."""
    chosen = options.enabled_channels
    return tuple(name for name in CHANNELS if getattr(chosen, name))
