"""The checks that need the machine: files exist, directories are writable, variables are set.

Does I/O; the environment is an argument. :func:`key_form` tells an encrypted SSH private key from a
plain one by its content, because the replicator has nobody who could type a passphrase.
"""

import base64
import binascii
import enum
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ..errors import Problem
from .check import Findings
from .check_notifications import signing_secret_problem
from .check_replication import database_path_fault, databases_setting
from .choices import ReplicaTargetType, StorageBackend
from .metadata import Form
from .options import Settings
from .section_switches import REPLICATION, is_below, used_settings
from .table import full_key

_OPENSSH_MAGIC: Final = b"openssh-key-v1\0"

#: No private key is longer.
_KEY_BYTES = 65_536

#: Values that the replicator reads unchanged between single quotes: no quote and no line break.
_QUOTABLE = re.compile(r"[ -&(-~]+")


class KeyForm(enum.Enum):
    """Whether a program that cannot ask for a passphrase can use a private key."""

    PLAIN = "plain"
    ENCRYPTED = "encrypted"
    UNKNOWN = "unknown"


def key_form(content: bytes) -> KeyForm:
    """Return the form of a private key in OpenSSH's or a PEM format; anything else is unknown."""
    lines = [line.strip() for line in content.splitlines()]
    begins = [i for i, line in enumerate(lines) if _label(line) is not None]
    if not begins:
        return KeyForm.UNKNOWN
    label = _label(lines[begins[0]])
    body = lines[begins[0] + 1 :]
    if label == b"OPENSSH PRIVATE KEY":
        return _openssh_form(body)
    if label == b"ENCRYPTED PRIVATE KEY":
        return KeyForm.ENCRYPTED
    if label is None or not label.endswith(b"PRIVATE KEY"):
        return KeyForm.UNKNOWN
    # The traditional PEM format says so in a header above the key.
    encrypted = any(line.startswith(b"Proc-Type:") and line.endswith(b"ENCRYPTED") for line in body)
    return KeyForm.ENCRYPTED if encrypted else KeyForm.PLAIN


def _label(line: bytes) -> bytes | None:
    if line.startswith(b"-----BEGIN ") and line.endswith(b"-----"):
        return line[len(b"-----BEGIN ") : -len(b"-----")]
    return None


def _openssh_form(body: list[bytes]) -> KeyForm:
    """Read the name of the cipher, which is the first field after the magic."""
    end = next((i for i, line in enumerate(body) if line.startswith(b"-----END")), len(body))
    try:
        blob = base64.b64decode(b"".join(body[:end]), validate=True)
    except binascii.Error:
        return KeyForm.UNKNOWN
    if not blob.startswith(_OPENSSH_MAGIC):
        return KeyForm.UNKNOWN
    rest = blob[len(_OPENSSH_MAGIC) :]
    length = int.from_bytes(rest[:4], "big")
    cipher = rest[4 : 4 + length]
    if len(rest) < 4 or len(cipher) < length or not cipher:
        return KeyForm.UNKNOWN
    return KeyForm.PLAIN if cipher == b"none" else KeyForm.ENCRYPTED


def probe(settings: Settings, environ: Mapping[str, str]) -> Findings:
    """Look at the files, directories and variables that valid settings refer to.

    Creates the replica directory of target LocalDisk, and nothing else. A variable that is not set
    is a warning, never a failure: a channel without its credentials skips its messages, and must
    not keep deliveries from being received.
    """
    return Findings(
        problems=(
            *_files(settings),
            *_replication(settings),
            *_encrypted_key(settings),
            *_signing_secret(settings, environ),
        ),
        warnings=(*_variables(settings, environ), *_unknown_key(settings)),
    )


def _files(settings: Settings) -> Iterator[Problem]:
    replication = settings.multi_tenant.file_db.replication
    paths = [
        (full_key(("Server", "CertFile")), settings.server.cert_file),
        (full_key(("Server", "KeyFile")), settings.server.key_file),
        (full_key(("Connection", "CaFile")), settings.connection.ca_file),
        (full_key(("Connection", "ClientCertFile")), settings.connection.client_cert_file),
        (full_key(("Connection", "ClientKeyFile")), settings.connection.client_key_file),
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
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        yield Problem(key, f"cannot read {path!r}: {reason}; put the file there or change the key")


def _replication(settings: Settings) -> Iterator[Problem]:
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        return
    if options.auto_regenerate_on_tenant_change or options.supervise:
        file = Path(options.config_output_path)
        directory = file.parent
        if _is_directory(file):
            yield Problem(
                f"{REPLICATION}:ConfigOutputPath",
                "is a directory: add the name of a file",
            )
        elif not _is_writable(directory):
            yield Problem(
                f"{REPLICATION}:ConfigOutputPath",
                f"cannot be written: {str(directory)!r} is not a writable directory; create it, "
                "give this user the right to write, or choose another path",
            )
    key, databases = databases_setting(settings)
    # What a relative path starts with is known here alone; the rest has been checked.
    fault = database_path_fault(os.getcwd()) if not os.path.isabs(databases) else None
    if fault is not None:
        yield Problem(key, f"is relative to the current directory and {fault}")
    if options.replica_target_type is ReplicaTargetType.LOCAL_DISK:
        yield from _replica_directory(options.local_disk.path)


def _key_form(settings: Settings) -> KeyForm | None:
    """Return the form of the private key in use; None: there is none, or it cannot be read."""
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication or options.replica_target_type is not ReplicaTargetType.SFTP:
        return None
    try:
        with open(options.sftp.private_key_path, "rb") as file:
            return key_form(file.read(_KEY_BYTES))
    except (OSError, ValueError):
        return None  # told by _files


def _encrypted_key(settings: Settings) -> Iterator[Problem]:
    if _key_form(settings) is KeyForm.ENCRYPTED:
        yield Problem(
            f"{REPLICATION}:Sftp:PrivateKeyPath",
            "is encrypted with a passphrase, which the replicator cannot ask for: use a key of its "
            "own without one, as of ssh-keygen -N ''",
        )


def _unknown_key(settings: Settings) -> Iterator[Problem]:
    if _key_form(settings) is KeyForm.UNKNOWN:
        yield Problem(
            f"{REPLICATION}:Sftp:PrivateKeyPath",
            "does not look like a private key in OpenSSH's or a PEM format: the replicator reads "
            "no other",
        )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_writable(directory: Path) -> bool:
    try:
        return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
    except ValueError:
        return False  # a NUL in the path


def _replica_directory(path: str) -> Iterator[Problem]:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        yield Problem(
            f"{REPLICATION}:LocalDisk:Path",
            f"cannot create the directory {path!r}: {reason}; choose another path",
        )


def _variables(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Warn of each variable that something in use refers to and that is unset or empty."""
    optional = {
        full_key(("Admin", "TokenEnvVar")),  # a token is generated when it is unset
        full_key(("Connection", "ProxyCredentialsEnvVar")),  # most proxies want none
    }
    if settings.storage.backend is not StorageBackend.POSTGRES:
        optional.add(full_key(("Storage", "PostgresDsnEnvVar")))
    for setting in used_settings(settings):
        if setting.about.form is Form.ENV_VAR and setting.key not in optional:
            name = setting.of(settings)
            if name is None:
                continue
            value = environ.get(name)
            # An empty variable is what a missing secret of an orchestrator looks like.
            if not (value and value.strip()):
                yield Problem(setting.key, f"names the variable {name}, which is not set: set it")
            elif is_below(setting.key, REPLICATION) and not _QUOTABLE.fullmatch(value):
                yield Problem(
                    setting.key,
                    f"names the variable {name}, whose value holds a quote, a line break or "
                    "another character that the replicator's configuration cannot take in: set it "
                    "to the key alone",
                )


def _signing_secret(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Refuse a secret that is set and that nothing could be signed with."""
    notifications = settings.multi_tenant.notifications
    secret = environ.get(notifications.webhook.signing_secret_env_var, "").strip()
    if notifications.enabled and notifications.enabled_channels.webhook and secret:
        unusable = signing_secret_problem(notifications, secret)
        if unusable is not None:
            yield unusable
