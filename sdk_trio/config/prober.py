"""What only the machine can tell: files exist, directories are writable, variables are set.

Does I/O; the environment is an argument.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import Problem
from .about import Form
from .choices import ReplicaTargetType, StorageBackend
from .gates import REPLICATION, is_below, used_settings
from .notification_rules import signing_secret_problem
from .options import Settings
from .private_key import KeyForm, key_form
from .replication_rules import database_path_fault, databases_setting
from .rules import Findings
from .table import full_key

#: No private key is longer.
_KEY_BYTES = 65_536

#: What arrives unchanged where the replicator puts a variable between single quotes.
_QUOTABLE = re.compile(r"[ -&(-~]+")


def probe(settings: Settings, environ: Mapping[str, str]) -> Findings:
    """Look at the files, directories and variables that valid settings refer to.

    Creates the replica directory of target LocalDisk (spec 2.7), and nothing else. A variable that
    is not set is a warning, never a failure (the credentials policy of spec 2.7 and 2.9).
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
