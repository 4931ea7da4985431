"""What only the machine can tell: files exist, directories are writable, variables are set.

Does I/O; the environment is an argument.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import Problem
from .about import Form
from .choices import ReplicaTargetType, StorageBackend
from .gates import REPLICATION, used_settings
from .notification_rules import signing_secret_warning
from .options import Settings
from .rules import Findings
from .table import full_key


def probe(settings: Settings, environ: Mapping[str, str]) -> Findings:
    """Look at the files, directories and variables that valid settings refer to.

    Creates the replica directory of target LocalDisk (spec 2.7), and nothing else. A variable that
    is not set is a warning, never a failure (the credentials policy of spec 2.7 and 2.9).
    """
    return Findings(
        problems=(*_files(settings), *_replication(settings)),
        warnings=tuple(_variables(settings, environ)),
    )


def _files(settings: Settings) -> Iterator[Problem]:
    replication = settings.multi_tenant.file_db.replication
    paths = [
        (full_key(("Server", "CertFile")), settings.server.cert_file),
        (full_key(("Server", "KeyFile")), settings.server.key_file),
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
    if options.auto_regenerate_on_tenant_change:
        directory = Path(options.config_output_path).parent
        if not _is_writable(directory):
            yield Problem(
                f"{REPLICATION}:ConfigOutputPath",
                f"cannot be written: {str(directory)!r} is not a writable directory; create it, "
                "give this user the right to write, or choose another path",
            )
    if options.replica_target_type is ReplicaTargetType.LOCAL_DISK:
        yield from _replica_directory(options.local_disk.path)


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
    optional = {full_key(("Admin", "TokenEnvVar"))}  # a token is generated when it is unset
    if settings.storage.backend is not StorageBackend.POSTGRES:
        optional.add(full_key(("Storage", "PostgresDsnEnvVar")))
    for setting in used_settings(settings):
        if setting.about.form is Form.ENV_VAR and setting.key not in optional:
            name = setting.of(settings)
            if not environ.get(name):
                yield Problem(setting.key, f"names the variable {name}, which is not set: set it")
    notifications = settings.multi_tenant.notifications
    signing_secret = environ.get(notifications.webhook.signing_secret_env_var)
    if notifications.enabled and notifications.enabled_channels.webhook and signing_secret:
        unusable = signing_secret_warning(notifications, signing_secret)
        if unusable is not None:
            yield unusable
