"""Checks of settings for tenants only: messages to site managers, and replication. Pure.

Ranges, forms and required values are in the metadata; the rules here go beyond single values.
"""

import ipaddress
from collections.abc import Iterator, Sequence

from ..base.public_addresses import names_local_address, url_host
from ..errors import Problem
from ..records.channels import CHANNELS
from .fields import Form, KeyDerivation, ReplicaTargetType, is_plain_loopback, pascal_case
from .options import Settings
from .options.notifications import (
    PLACEHOLDERS,
    NotificationsOptions,
    TemplateOptions,
    enabled_channels,
    measure_sms,
    substitute,
    unknown_placeholders,
)
from .secret import parse_secret
from .table import NOTIFICATIONS, REPLICATION, TRANSITIONS, bound_addresses, is_below, table

#: A longer SMS template is a warning: every segment of every message is billed.
USUAL_SEGMENTS = 3

#: Subjects are truncated to this; mail programs show about 60 characters.
MAX_SUBJECT_CHARACTERS = 200

WEBHOOK_URL = f"{NOTIFICATIONS}:Webhook:Url"
ALLOW_PRIVATE_ADDRESSES = f"{NOTIFICATIONS}:Webhook:AllowPrivateAddresses"

_NOTHING = dict.fromkeys(PLACEHOLDERS, "")


# -- notifications -------------------------------------------------------------------------------


def notification_problems(options: NotificationsOptions) -> Iterator[Problem]:
    """Report unknown placeholders."""
    if not options.enabled:
        return
    for key, text in _texts_in_use(options).items():
        yield from _unknown_words(key, text)


def _texts_in_use(options: NotificationsOptions) -> dict[str, str]:
    """Return the sent texts by their keys; a webhook's payload has all of them."""
    chosen = [CHANNELS[name] for name in enabled_channels(options)]
    in_use = {text for channel in chosen for text in (*channel.texts, *channel.quoted)}
    # By key, so that a problem names the text to change.
    texts = {}
    for transition in TRANSITIONS:
        template = getattr(options.templates, transition.lower())
        for field in TemplateOptions.__struct_fields__:
            name = pascal_case(field)
            if name in in_use:
                key = f"{NOTIFICATIONS}:Templates:{transition}:{name}"
                texts[key] = getattr(template, field)
    return texts


def notification_warnings(options: NotificationsOptions) -> Iterator[Problem]:
    """Warn of templates and addresses that probably do not work as intended."""
    if not options.enabled:
        return
    for key, text in _texts_in_use(options).items():
        yield from _lengths(key, text)
    webhook = options.webhook
    if not enabled_channels(options):
        yield Problem(
            f"{NOTIFICATIONS}:EnabledChannels",
            "has no channel, so transitions are never announced: enable "
            f"{_either([channel.key for channel in CHANNELS.values()])}",
        )
    if (
        options.enabled_channels.webhook
        and must_be_public(options)
        and names_local_address(webhook.url)
    ):
        yield Problem(
            WEBHOOK_URL,
            "names an address of this machine or a private network, and every message to it "
            f"will be refused: set {ALLOW_PRIVATE_ADDRESSES} to true if this is meant",
        )


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def must_be_public(options: NotificationsOptions) -> bool:
    """Return whether the webhook channel connects to public addresses only.

    Plain HTTP to this machine, which only Development allows, implies that it does not.
    """
    webhook = options.webhook
    return not (webhook.allow_private_addresses or is_plain_loopback(webhook.url))


def _unknown_words(key: str, text: str) -> Iterator[Problem]:
    unknown = unknown_placeholders(text)
    if unknown:
        # Five at most, shortened: the message is one line.
        words = ", ".join(f"{{{word[:40]}}}" for word in unknown[:5])
        known = ", ".join(f"{{{word}}}" for word in PLACEHOLDERS)
        yield Problem(key, f"contains {words}, which is not a placeholder: use one of {known}")


def _lengths(key: str, text: str) -> Iterator[Problem]:
    # Without names and reasons: a text that is too long then is too long for every tenant.
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
    """Return the problem of a signing secret that is set, or None; the secret is not quoted."""
    try:
        # Stripped, because a variable filled from a file has its line break.
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


#: Full copies kept per database; the defaults keep 720.
MANY_SNAPSHOTS = 1000

#: The replicator opens a database by a URL without escaping the path. It would cut the path at # or
#: ?, and create, replicate and report an empty database of the shorter name.
MISREAD_IN_PATHS = frozenset("#?%")

_ANY_HOST = frozenset({"", "0.0.0.0", "127.0.0.1", "localhost", "::", "[::]"})


# -- replication ---------------------------------------------------------------------------------


def replication_problems(settings: Settings) -> Iterator[Problem]:
    """Yield settings that prevent the replicator from working."""
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        return
    if options.auto_regenerate_on_tenant_change:
        paths = (
            ("ConfigOutputPath", options.config_output_path),
            ("ReplicatorPidFilePath", options.replicator_pid_file_path),
        )
        for name, value in paths:
            if not value.strip():
                yield Problem(
                    f"{REPLICATION}:{name}",
                    "is required when AutoRegenerateOnTenantChange is true: set a path",
                )
        # The watcher would overwrite the pid of the process that it must signal.
        if len({value for _, value in paths}) == 1 and options.config_output_path.strip():
            yield Problem(
                f"{REPLICATION}:ReplicatorPidFilePath",
                "is the same file as ConfigOutputPath: choose another path",
            )
    # The supervised child needs a configuration too, but no pid file: the daemon knows its process.
    elif options.supervise and not options.config_output_path.strip():
        yield Problem(
            f"{REPLICATION}:ConfigOutputPath",
            "is required when Supervise is true: set a path",
        )
    # The path is written into the replicator's configuration, which has its own syntax.
    key, directory = databases_setting(settings)
    fault = database_path_fault(directory)
    if fault is not None:
        yield Problem(key, fault)
    for key, value in _written(settings):
        fault = _text_fault(value)
        if fault is not None:
            yield Problem(key, fault)
        # The replicator treats a path with a scheme as the address of another target type.
        if key.endswith((":Path", ":PathPrefix")) and "://" in value:
            yield Problem(key, "is an address: it must be a path without a scheme")
    if options.replica_target_type is ReplicaTargetType.SFTP:
        fault = _host_fault(options.sftp.host)
        if fault is not None:
            yield Problem(f"{REPLICATION}:Sftp:Host", fault)
    yield from _metrics_port(settings)


def replication_warnings(settings: Settings) -> Iterator[Problem]:
    """Yield settings that work, but probably not as intended."""
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        return
    sync, lag = options.sync_interval_seconds, options.health_check_max_lag_seconds
    if options.health_check_enabled and lag < sync:
        yield Problem(
            f"{REPLICATION}:HealthCheckMaxLagSeconds",
            f"is below SyncIntervalSeconds ({sync}): lag is counted from the time a sync is due, "
            "so up "
            f"to {sync} seconds more may be missing from the replica while it is Healthy",
        )
    snapshots = options.retention_days * 1440 // max(1, options.snapshot_interval_minutes)
    if snapshots > MANY_SNAPSHOTS:
        yield Problem(
            f"{REPLICATION}:SnapshotIntervalMinutes",
            f"keeps up to {snapshots} full copies of each database for RetentionDays "
            f"({options.retention_days}): a longer interval needs less space, and the points in "
            "time that can be restored stay the same",
        )
    store = options.object_store
    if (
        options.replica_target_type is ReplicaTargetType.OBJECT_STORE
        and not store.force_path_style
        and _has_bare_name(store.endpoint_url)
    ):
        yield Problem(
            f"{REPLICATION}:ObjectStore:ForcePathStyle",
            "is false, so the bucket's name becomes a subdomain of the host, and a name without "
            "a dot, as in EndpointUrl, seldom has subdomains: set it to true",
        )
    if options.replica_target_type is ReplicaTargetType.SFTP and not options.sftp.host_key:
        yield Problem(
            f"{REPLICATION}:Sftp:HostKey",
            "is not set, so every host that answers is trusted: set it to the host's public key, "
            "such as ssh-ed25519 AAAA...",
        )


def databases_setting(settings: Settings) -> tuple[str, str]:
    """Return key and value of the setting with the directory of the tenants' databases."""
    directory = settings.multi_tenant.file_db.directory
    if directory is None:
        return "Sdk:Storage:Path", settings.storage.path
    return "Sdk:MultiTenant:FileDb:Directory", directory


def database_path_fault(path: str) -> str | None:
    """Return why the replicator cannot open a database below this path, or None."""
    if not MISREAD_IN_PATHS.isdisjoint(path):
        return (
            "gives a path with # ? or %, which makes the replicator open "
            "another file: choose another path"
        )
    return _text_fault(path)


def _written(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the target's texts that go into the replicator's configuration."""
    target = settings.multi_tenant.file_db.replication.replica_target_type
    for setting in table():
        # For variables their values; the path of credentials is one of the texts.
        is_text = setting.kind is str and setting.about.form is not Form.ENV_VAR
        if is_below(setting.key, f"{REPLICATION}:{target}") and is_text:
            value = setting.of(settings)
            if value is not None and setting.path[-1] != "CredentialsJsonPath":
                yield setting.key, value


def _text_fault(text: str) -> str | None:
    # The replicator expands ``$NAME`` in the whole file before parsing it, even in quotes.
    if "$" in text:
        return (
            "holds a $: variables are not expanded in settings, and the replicator would expand "
            "it; write the value itself"
        )
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        return "holds a line break or another control character: remove it"
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        return "holds bytes that are not UTF-8, which the replicator cannot read: rename it"
    return None


def _host_fault(host: str) -> str | None:
    # With and without brackets, because users write both.
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError:
            return "must be only a host's name or address: set the port with Port"
    if any(character in host for character in "/@ "):
        return "must be only a host's name or address: set User and Path separately"
    return None


def _metrics_port(settings: Settings) -> Iterator[Problem]:
    """Check the metrics port: if it is in use, the replicator only logs that."""
    port = settings.multi_tenant.file_db.replication.metrics_port
    for key, address in bound_addresses(settings):
        host, _, number = address.rpartition(":")
        if number == str(port) and host.casefold() in _ANY_HOST:
            yield Problem(f"{REPLICATION}:MetricsPort", f"is the port of {key}: choose another one")


def _has_bare_name(url: str | None) -> bool:
    """Return whether a URL's host is a bare name such as localhost; IP addresses get no bucket."""
    host = url_host(url or "")
    return bool(host) and "." not in host and ":" not in host
