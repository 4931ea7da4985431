"""Checks of the notification settings that go beyond single values. Pure."""

from collections.abc import Iterator, Sequence

import attrs

from ..base.public_addresses import names_local_address
from ..errors import Problem
from ..records.channels import CHANNELS
from .choices import KeyDerivation
from .metadata import pascal_case
from .options.notifications import NotificationsOptions, TemplateOptions, enabled_channels
from .secret import parse_secret
from .section_switches import NOTIFICATIONS, TRANSITIONS
from .template_text import PLACEHOLDERS, measure_sms, substitute, unknown_placeholders
from .text_formats import is_plain_loopback

#: Above this an SMS template is remarked on: every segment of every message is paid for.
USUAL_SEGMENTS = 3

#: Subjects are cut there; mail programs show about 60 characters.
MAX_SUBJECT_CHARACTERS = 200

WEBHOOK_URL = f"{NOTIFICATIONS}:Webhook:Url"
ALLOW_PRIVATE_ADDRESSES = f"{NOTIFICATIONS}:Webhook:AllowPrivateAddresses"

_NOTHING = dict.fromkeys(PLACEHOLDERS, "")


def notification_problems(options: NotificationsOptions) -> Iterator[Problem]:
    """Refuse placeholders that nothing stands for, and waits that contradict each other."""
    if not options.enabled:
        return
    if options.retry_cap_seconds < options.retry_base_seconds:
        yield Problem(
            f"{NOTIFICATIONS}:RetryCapSeconds",
            f"must be at least RetryBaseSeconds ({options.retry_base_seconds:g})",
        )
    for key, text in _texts_in_use(options).items():
        yield from _unknown_words(key, text)


def _texts_in_use(options: NotificationsOptions) -> dict[str, str]:
    """Return the texts that are sent, by their keys; a webhook's payload has all of them."""
    chosen = [CHANNELS[name] for name in enabled_channels(options)]
    in_use = {text for channel in chosen for text in (*channel.texts, *channel.quoted)}
    texts = {}
    for transition in TRANSITIONS:
        template = getattr(options.templates, transition.lower())
        for field in attrs.fields(TemplateOptions):
            name = pascal_case(field.name)
            if name in in_use:
                key = f"{NOTIFICATIONS}:Templates:{transition}:{name}"
                texts[key] = getattr(template, field.name)
    return texts


def notification_warnings(options: NotificationsOptions) -> Iterator[Problem]:
    """Remark on templates and addresses that will not do what was probably meant."""
    if not options.enabled:
        return
    for key, text in _texts_in_use(options).items():
        yield from _lengths(key, text)
    webhook = options.webhook
    if not enabled_channels(options):
        yield Problem(
            f"{NOTIFICATIONS}:EnabledChannels",
            "has no channel, so nobody is told of what happens now, not even later: enable "
            f"{_either([channel.key for channel in CHANNELS.values()])}",
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


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def must_be_public(options: NotificationsOptions) -> bool:
    """Say whether the webhook channel connects to addresses of the public internet only.

    Plain HTTP to this machine, which Development alone allows, can mean nothing else.
    """
    webhook = options.webhook
    return not (webhook.allow_private_addresses or is_plain_loopback(webhook.url))


def _unknown_words(key: str, text: str) -> Iterator[Problem]:
    unknown = unknown_placeholders(text)
    if unknown:
        words = ", ".join(f"{{{word[:40]}}}" for word in unknown[:5])
        known = ", ".join(f"{{{word}}}" for word in PLACEHOLDERS)
        yield Problem(key, f"holds {words}, which nothing stands for: use one of {known}")


def _lengths(key: str, text: str) -> Iterator[Problem]:
    # Measured without names and reasons: what is too long then is too long for every tenant.
    bare = substitute(text, _NOTHING)
    if key.endswith(":EmailSubject") and len(bare) > MAX_SUBJECT_CHARACTERS:
        yield Problem(key, f"is cut at {MAX_SUBJECT_CHARACTERS} characters: shorten it")
    size = measure_sms(bare) if key.endswith(":SmsBody") else None
    if size is not None and size.segments > USUAL_SEGMENTS:
        yield Problem(
            key,
            f"takes {size.segments} SMS segments ({size.encoding}) without any name or reason, and "
            "each is billed: shorten it",
        )


def signing_secret_problem(options: NotificationsOptions, value: str) -> Problem | None:
    """Return what is wrong with a signing secret that is set, None if nothing; it is not quoted."""
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
