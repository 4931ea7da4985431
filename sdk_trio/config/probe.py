"""Checks of settings against the machine: files, directories and variables. Does I/O.

Files must exist, directories must be writable, and variables must be set. An SSH private key must
not be encrypted, because the replicator cannot ask for a passphrase.
"""

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import Problem
from .check import Findings, forward_secret_problem
from .check_tenants import database_path_fault, databases_setting, signing_secret_problem
from .fields import AlertChannel, Form, ReplicaTargetType, StorageBackend, check_form
from .options import Settings
from .sources import reason_of
from .table import (
    ALERTS,
    FORWARD,
    FORWARD_SECRET,
    NOTIFICATIONS,
    REPLICATION,
    is_below,
    used_settings,
)

#: No private key is longer.
_KEY_BYTES = 65_536

#: The first block of a PEM file; any text may precede it (RFC 7468, 2).
_PEM = re.compile(
    rb"^[ \t]*-----BEGIN (?P<label>[^\r\n]*)-----\s*$(?P<body>.*?)(?:^[ \t]*-----END|\Z)",
    re.MULTILINE | re.DOTALL,
)
_PROC_TYPE = re.compile(rb"^\s*Proc-Type:.*ENCRYPTED\s*$", re.MULTILINE)

#: The first field after the magic: its length in four bytes, then its bytes (RFC 4251, 5).
_OPENSSH_CIPHER = re.compile(rb"openssh-key-v1\0\0\0\0.(?P<name>[!-~]+)", re.DOTALL)

#: Values that the replicator reads unchanged in single quotes: no quote and no line break.
_QUOTABLE = re.compile(r"[ -&(-~]+")


def probe(settings: Settings, environ: Mapping[str, str]) -> Findings:
    """Check the files, directories and variables that valid settings refer to.

    Creates only the replica directory of target LocalDisk. An unset variable is a warning, never a
    failure: a channel without credentials skips its messages, and must not stop the receiver.
    """
    private_key = _private_key(settings)
    return Findings(
        problems=(
            *_files(settings),
            *_replication(settings),
            *private_key.problems,
            *_signing_secret(settings, environ),
            *_forward_secrets(settings, environ),
        ),
        warnings=(*_variables(settings, environ), *private_key.warnings),
    )


def _files(settings: Settings) -> Iterator[Problem]:
    replication = settings.multi_tenant.file_db.replication
    paths = [
        ("Sdk:Server:CertFile", settings.server.cert_file),
        ("Sdk:Server:KeyFile", settings.server.key_file),
        ("Sdk:Connection:CaFile", settings.connection.ca_file),
        ("Sdk:Connection:ClientCertFile", settings.connection.client_cert_file),
        ("Sdk:Connection:ClientKeyFile", settings.connection.client_key_file),
    ]
    if replication.use_replication:
        if replication.replica_target_type is ReplicaTargetType.CLOUD_STORAGE:
            credentials = replication.cloud_storage.credentials_json_path
            paths.append((f"{REPLICATION}:CloudStorage:CredentialsJsonPath", credentials))
        if replication.replica_target_type is ReplicaTargetType.SFTP:
            private_key = replication.sftp.private_key_path
            paths.append((f"{REPLICATION}:Sftp:PrivateKeyPath", private_key))
    for key, path in paths:
        if path:
            yield from _file(key, path)


def _file(key: str, path: str) -> Iterator[Problem]:
    try:
        # Opened, not just checked: permissions, mounts and links all affect the result.
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        yield Problem(
            key, f"cannot read {path!r}: {reason_of(error)}; put the file there or change the key"
        )


def _replication(settings: Settings) -> Iterator[Problem]:
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        return
    if options.auto_regenerate_on_tenant_change or options.supervise:
        file = options.config_output_path
        directory = os.path.dirname(file) or "."
        key = f"{REPLICATION}:ConfigOutputPath"
        # Users often give the directory instead of the file.
        if os.path.isdir(file):
            yield Problem(key, "is a directory: add the name of a file")
        elif not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
            yield Problem(
                key,
                f"cannot be written: {directory!r} is not a writable directory; create it, "
                "give this user the right to write, or choose another path",
            )
    key, databases = databases_setting(settings)
    # The start of a relative path is only known here; the rest was checked before.
    fault = database_path_fault(os.getcwd()) if not os.path.isabs(databases) else None
    if fault is not None:
        yield Problem(key, f"is relative to the current directory and {fault}")
    if options.replica_target_type is ReplicaTargetType.LOCAL_DISK:
        yield from _replica_directory(options.local_disk.path)


def _private_key(settings: Settings) -> Findings:
    """Check the private key in use; ``_files`` reports an unreadable one."""
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication or options.replica_target_type is not ReplicaTargetType.SFTP:
        return Findings()
    try:
        with open(options.sftp.private_key_path, "rb") as file:
            encrypted = is_encrypted_key(file.read(_KEY_BYTES))
    except (OSError, ValueError):
        return Findings()
    key = f"{REPLICATION}:Sftp:PrivateKeyPath"
    if encrypted is None:
        unknown = (
            "does not look like a private key in OpenSSH's or a PEM format: the replicator reads "
            "no other"
        )
        return Findings(warnings=(Problem(key, unknown),))
    if not encrypted:
        return Findings()
    locked = (
        "is encrypted with a passphrase, which the replicator cannot ask for: use a separate key "
        "without one (ssh-keygen -N '')"
    )
    return Findings(problems=(Problem(key, locked),))


def is_encrypted_key(content: bytes) -> bool | None:
    """Return whether a private key has a passphrase; None if it is not OpenSSH or PEM."""
    found = _PEM.search(content)
    if found is None or not found["label"].endswith(b"PRIVATE KEY"):
        return None
    if found["label"] != b"OPENSSH PRIVATE KEY":
        # In the traditional PEM format, a header above the key marks it.
        return found["label"].startswith(b"ENCRYPTED") or bool(_PROC_TYPE.search(found["body"]))
    try:
        blob = base64.b64decode(b"".join(found["body"].split()), validate=True)
    except binascii.Error:
        return None
    cipher = _OPENSSH_CIPHER.match(blob)
    return None if cipher is None else cipher["name"] != b"none"


def _replica_directory(path: str) -> Iterator[Problem]:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        yield Problem(
            f"{REPLICATION}:LocalDisk:Path",
            f"cannot create the directory {path!r}: {reason_of(error)}; choose another path",
        )


def _variables(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Warn of each unset or empty variable that an enabled part refers to."""
    optional = {
        "Sdk:Admin:TokenEnvVar",  # a token is generated when it is unset
        "Sdk:Connection:ProxyCredentialsEnvVar",  # most proxies require none
    }
    if settings.storage.backend is not StorageBackend.POSTGRES:
        optional.add("Sdk:Storage:PostgresDsnEnvVar")
    for setting in used_settings(settings):
        if is_below(setting.key, FORWARD):
            continue  # a missing signing secret is a problem: see _forward_secrets
        if setting.about.form is Form.ENV_VAR and setting.key not in optional:
            name = setting.of(settings)
            if name is None:
                continue
            value = environ.get(name)
            # An orchestrator sets an empty variable for a missing secret.
            if not (value and value.strip()):
                yield Problem(setting.key, f"names the variable {name}, which is not set: set it")
            # The replicator gets the value in its configuration file, not in its environment.
            elif is_below(setting.key, REPLICATION) and not _QUOTABLE.fullmatch(value):
                yield Problem(
                    setting.key,
                    f"names the variable {name}, whose value holds a quote, a line break or "
                    "another character that the replicator's configuration cannot contain: set it "
                    "to the key only",
                )


def _forward_secrets(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Refuse forwarding without a signing secret: the application would refuse every event."""
    for index, route in enumerate(settings.forward.all_routes):
        own = index < len(settings.forward.routes) and settings.forward.routes[index].secret_env_var
        name = route.secret_env_var or ""
        wrong = forward_secret_problem(environ.get(name, ""))
        if wrong is not None:
            key = f"{FORWARD}:Routes:{index}:SecretEnvVar" if own else FORWARD_SECRET
            yield Problem(key, f"names the variable {name}, which {wrong}")


def alert_credential_problems(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield why channels of alerts cannot send, which prevents a start.

    Otherwise it would first show when an alert is lost. Commands that start nothing only warn.
    """
    for setting in used_settings(settings):
        if setting.about.form is not Form.ENV_VAR or not is_below(setting.key, ALERTS):
            continue
        name = setting.of(settings)
        value = environ.get(name, "").strip()
        if not value:
            yield Problem(
                setting.key,
                f"names the variable {name}, which is not set: set it, or remove its channel from "
                f"{ALERTS}:Channels",
            )
        elif is_below(setting.key, f"{ALERTS}:Chat"):
            wrong = check_form(Form.HOOK_URL, value, development=settings.is_development)
            if wrong is not None:  # without the URL, which is a credential
                yield Problem(setting.key, f"names the variable {name}, whose value {wrong}")


def _signing_secret(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Report a secret that is set but cannot sign."""
    notifications, alerts = settings.multi_tenant.notifications, settings.alerts
    used = {
        NOTIFICATIONS: (
            notifications.webhook,
            notifications.enabled and notifications.enabled_channels.webhook,
        ),
        ALERTS: (alerts.webhook, alerts.enabled and AlertChannel.WEBHOOK in alerts.channels),
    }
    for section, (webhook, is_used) in used.items():
        secret = environ.get(webhook.signing_secret_env_var, "").strip()
        unusable = signing_secret_problem(webhook, secret, section) if is_used and secret else None
        if unusable is not None:
            yield unusable
