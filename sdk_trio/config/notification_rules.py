"""What is odd about the settings of notifications, though it is allowed. Pure (spec 2.9)."""

from collections.abc import Iterator, Mapping

from ..errors import Problem
from .choices import KeyDerivation
from .forms import is_plain_loopback
from .gates import NOTIFICATIONS
from .notification_options import NotificationsOptions, enabled_channels
from .placeholders import PLACEHOLDERS, substitute, unknown_placeholders
from .public_addresses import names_local_address
from .secrets import parse_secret
from .segments import measure_sms

#: Above this an SMS template is remarked on: every segment of every message is paid for.
USUAL_SEGMENTS = 3

#: Subjects are cut there; mail programs show about 60 characters.
MAX_SUBJECT_CHARACTERS = 200

WEBHOOK_URL = f"{NOTIFICATIONS}:Webhook:Url"
ALLOW_PRIVATE_ADDRESSES = f"{NOTIFICATIONS}:Webhook:AllowPrivateAddresses"

_NOTHING = dict.fromkeys(PLACEHOLDERS, "")


def notification_warnings(options: NotificationsOptions) -> Iterator[Problem]:
    """Remark on templates and addresses that will not do what was probably meant."""
    if not options.enabled:
        return
    for transition in ("Suspended", "Reactivated", "Deactivated", "Deleted"):
        template = getattr(options.templates, transition.lower())
        key = f"{NOTIFICATIONS}:Templates:{transition}"
        texts = {
            f"{key}:EmailSubject": template.email_subject,
            f"{key}:EmailBody": template.email_body,
            f"{key}:SmsBody": template.sms_body,
        }
        yield from _unknown_words(texts)
        yield from _lengths(key, template.email_subject, template.sms_body)
    webhook = options.webhook
    if not enabled_channels(options):
        yield Problem(
            f"{NOTIFICATIONS}:EnabledChannels",
            "has no channel, so nobody is told of what happens now, not even later: enable Email, "
            "Sms or Webhook",
        )
    if (
        options.enabled_channels.webhook
        and must_be_public(options)
        and names_local_address(webhook.url)
    ):
        yield Problem(
            WEBHOOK_URL,
            "names an address of this machine or of a private network, and every message to it "
            f"will be refused: set {ALLOW_PRIVATE_ADDRESSES} to true if this is meant",
        )


def must_be_public(options: NotificationsOptions) -> bool:
    """Say whether the webhook channel connects to addresses of the public internet only.

    Plain HTTP to this machine, which Development alone allows, can mean nothing else.
    """
    webhook = options.webhook
    return not (webhook.allow_private_addresses or is_plain_loopback(webhook.url))


def _unknown_words(texts: Mapping[str, str]) -> Iterator[Problem]:
    for key, text in texts.items():
        unknown = unknown_placeholders(text)
        if unknown:
            words = ", ".join(f"{{{word[:40]}}}" for word in unknown[:5])
            known = ", ".join(f"{{{word}}}" for word in PLACEHOLDERS)
            yield Problem(key, f"holds {words}, which stays as it is; the placeholders are {known}")


def _lengths(key: str, subject: str, sms: str) -> Iterator[Problem]:
    if len(substitute(subject, _NOTHING)) > MAX_SUBJECT_CHARACTERS:
        yield Problem(
            f"{key}:EmailSubject", f"is cut at {MAX_SUBJECT_CHARACTERS} characters: shorten it"
        )
    size = measure_sms(substitute(sms, _NOTHING))
    if size.segments > USUAL_SEGMENTS:
        yield Problem(
            f"{key}:SmsBody",
            f"takes {size.segments} SMS segments ({size.encoding}) without any name or reason, and "
            "each is billed: shorten it",
        )


def signing_secret_warning(options: NotificationsOptions, value: str) -> Problem | None:
    """Remark on a signing secret that is set and cannot be used; it is not quoted."""
    try:
        keys = parse_secret(value.strip(), KeyDerivation.AUTO).hmac_keys
    except ValueError as error:
        wrong = str(error)
    else:
        if keys:
            return None
        wrong = "is a public key: this channel signs with a whsec_ secret"
    name = options.webhook.signing_secret_env_var
    return Problem(
        f"{NOTIFICATIONS}:Webhook:SigningSecretEnvVar",
        f"names the variable {name}, whose value {wrong}",
    )
