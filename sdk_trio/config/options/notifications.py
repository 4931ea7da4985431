"""The settings of messages to site managers: channels, accounts, templates. Pure."""

import attrs

from ...records.channels import CHANNELS
from ..choices import EmailProvider, SmsProvider
from ..metadata import Form, about
from ..template_text import DEACTIVATED, DELETED, REACTIVATED, SUSPENDED, TemplateTexts


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
    send_to_unverified_email: bool = attrs.field(
        default=False,
        metadata=about(
            "When false, the email channel skips recipients whose email is not verified."
        ),
    )
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
