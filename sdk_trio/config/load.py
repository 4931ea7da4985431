"""The loading of settings: from all sources to validated settings.

Does I/O. Later sources win: defaults, ``$STATE_DIRECTORY``, files with their ``.{Environment}``
siblings, ``.env`` in Development, key-per-file directories, variables, arguments
(docs/reference/configuration.md).

:func:`probe` makes the checks that need the machine: files exist, directories are writable,
variables are set. :func:`key_form` tells an encrypted SSH private key from a plain one by its
content, because the replicator has nobody who could type a passphrase.
"""

import base64
import binascii
import enum
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from ..errors import OptionsValidationError, Problem
from .bind import bind
from .check import (
    USUAL_ENVIRONMENTS,
    Findings,
    admin_token_findings,
    check,
    forward_secret_problem,
    unmet_needs,
)
from .check_tenants import database_path_fault, databases_setting, signing_secret_problem
from .fields import Form, ReplicaTargetType, StorageBackend, check_form
from .options import DEVELOPMENT, Settings, environment_meant, validate_mappings_with
from .secret import Secret
from .sources import (
    CREDENTIALS_DIRECTORY_VARIABLE,
    SECRETS_DIRECTORY,
    Layer,
    read_directory,
    read_dotenv,
    read_environ,
    read_environment_name,
    read_file,
    read_overrides,
    read_section,
    read_state_directory,
    unread_dotenv,
)
from .table import (
    FORWARD,
    FORWARD_SECRET,
    REPLICATION,
    ROOT,
    fold,
    full_key,
    is_below,
    is_unused,
    used_settings,
)

#: Read from the working directory when no file is named.
DEFAULT_FILES = ("appsettings.json", "sdk.toml")


class Loaded(msgspec.Struct, frozen=True):
    """The result of reading the settings.

    ``settings`` is None when there are ``problems``. ``origins`` holds, for each full key that
    some source gave (items of lists included), the file, variable or argument it came from.
    ``files`` are the files of settings that were there, key files aside. ``is_development`` is
    known with problems, too. ``unmet`` are parts that are asked for without what they work on:
    only the start of a runtime refuses these.
    """

    settings: Settings | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    origins: Mapping[str, str]
    files: tuple[str, ...] = ()
    is_development: bool = False
    unmet: tuple[Problem, ...] = ()

    def require(self) -> Settings:
        """Return the settings.

        Raises:
            OptionsValidationError: there are problems; it holds all of them.
        """
        if self.settings is None:
            raise OptionsValidationError(self.problems, self.warnings)
        return self.settings


def load_settings(
    *files: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    standalone: bool = False,
    receiver: bool = True,
) -> Settings:
    """Read the settings from all their sources, log the warnings, and return what is valid.

    Args:
        files: JSON or TOML files, later ones win; without any, ``appsettings.json`` and
            ``sdk.toml`` of the working directory are read where they exist.
        overrides: arguments of the command line, such as ``{"Sdk:Mode": "Custom"}``.
        environ: the environment variables; default ``os.environ``.
        standalone: the receiver alone runs, so no AccessToken is needed.
        receiver: the receiver runs, so at least one webhook secret is needed.

    Raises:
        OptionsValidationError: with every problem there is.
    """
    loaded = read_settings(
        *files, overrides=overrides, environ=environ, standalone=standalone, receiver=receiver
    )
    _log(loaded.warnings)
    return loaded.require()


def read_settings(
    *files: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    standalone: bool = False,
    receiver: bool = True,
    directory: str | os.PathLike[str] = "",
    secrets_directory: str | os.PathLike[str] = SECRETS_DIRECTORY,
) -> Loaded:
    """Read the settings as :func:`load_settings` does, but return problems and warnings as data.

    Args:
        directory: where the files that nobody named are looked for, ``.env`` among them; default
            the working directory.
        secrets_directory: a directory with one file per key, read before the one that the
            variable ``CREDENTIALS_DIRECTORY`` names.
    """
    variables = os.environ if environ is None else environ
    layers = _layers(
        tuple(Path(file) for file in files),
        overrides=overrides or {},
        environ=variables,
        directory=Path(directory),
        secrets_directory=Path(secrets_directory),
    )
    return _validated(layers, standalone=standalone, receiver=receiver, environ=variables)


def settings_from_mapping(
    mapping: Mapping[str, Any], *, standalone: bool, receiver: bool
) -> Settings:
    """Validate a mapping alone: what ``Settings.from_mapping`` does; see there."""
    layers = [read_section(mapping, None)]
    loaded = _validated(layers, standalone=standalone, receiver=receiver, environ=None)
    _log(loaded.warnings)
    return loaded.require()


validate_mappings_with(settings_from_mapping)


def _layers(
    files: tuple[Path, ...],
    *,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    directory: Path,
    secrets_directory: Path,
) -> list[Layer]:
    """Return the layers of all sources, in the order of precedence."""
    directories = [read_directory(secrets_directory)]
    if environ.get(CREDENTIALS_DIRECTORY_VARIABLE):
        directories.append(read_directory(Path(environ[CREDENTIALS_DIRECTORY_VARIABLE])))
    # These may name the Environment, which chooses the files below them.
    above_files = [
        *directories,
        read_environment_name(environ),
        read_environ(environ),
        read_overrides(overrides),
    ]
    # Named files replace the usual ones: a command that says --config means those and no others.
    paths = files or tuple(directory / name for name in DEFAULT_FILES)
    named = bool(files)
    bases = {path: read_file(path, optional=not named, named=named) for path in paths}
    # The name chooses further files, so it is read before they are; a sibling cannot change it.
    environment = _environment_name([*bases.values(), *above_files])
    below = [read_state_directory(environ)]
    for path in paths:
        sibling = path.with_name(f"{path.stem}.{environment}{path.suffix}")
        below += [bases[path], read_file(sibling, optional=True, named=named)]
    # A ``.env`` that was left behind on a server must not count in Production.
    if environment == DEVELOPMENT:
        below.append(read_dotenv(directory / ".env"))
    else:
        below.append(unread_dotenv(directory / ".env", [*below, *above_files]))
    return [*below, *above_files]


def _environment_name(layers: Iterable[Layer]) -> str:
    """Return the Environment that chooses the files, spelled as their names are."""
    name = Settings().environment
    for layer in layers:
        for entry in layer.entries:
            if fold(entry.path) == ("environment",) and isinstance(entry.value, str):
                name = entry.value
    if check_form(Form.ENVIRONMENT_NAME, name, development=False):
        return Settings().environment  # no part of a file name; the rules report it
    # Names of files have the usual spelling on systems where case counts.
    usual = {known.casefold(): known for known in USUAL_ENVIRONMENTS}
    return environment_meant(name) or usual.get(name.casefold(), name)


def _validated(
    layers: list[Layer],
    *,
    standalone: bool,
    receiver: bool,
    environ: Mapping[str, str] | None,
) -> Loaded:
    """Bind, check and, with ``environ``, probe."""
    bound = bind(layers)
    # Settings.from_mapping reads nothing but its mapping, and so has no variable to look for.
    settings = bound.settings if environ is None else _with_simulator(bound.settings, environ)
    invalid = frozenset(problem.key for problem in bound.problems)
    problems = [p for p in bound.problems if not is_unused(p.key, settings, invalid)]
    findings = check(settings, standalone=standalone, receiver=receiver, invalid=invalid)
    warnings = [*bound.warnings, *findings.warnings]
    # If a source could not be read, its keys may stand in it: they are not reported as missing.
    unread = ROOT in invalid
    problems += [p for p in findings.problems if not unread or p.key in bound.origins]
    if environ is not None:
        token = environ.get(settings.admin.token_env_var, "").strip()
        weak, doubtful = admin_token_findings(settings, token)
        # Only a receiver has an admin address; a client's settings may share its environment.
        problems += [weak] if weak and receiver else []
        warnings += [doubtful] if doubtful and receiver else []
    # Looking at files makes directories and costs time; with settings that are wrong it would
    # report what follows from them.
    if not problems and environ is not None:
        probed = probe(settings, environ)
        problems += probed.problems
        warnings += probed.warnings
    return Loaded(
        settings=None if problems else settings,
        problems=_located(problems, bound.origins),
        warnings=_located(warnings, bound.origins),
        origins=bound.origins,
        files=tuple(layer.file for layer in layers if layer.file is not None),
        is_development=settings.is_development,
        # Whatever else is wrong: who mends the one must not find the other at the next start.
        unmet=_located((p for p in unmet_needs(settings) if p.key not in invalid), bound.origins),
    )


def _with_simulator(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return settings whose receiver accepts what the simulator signs, in Development alone."""
    name = settings.simulator.secret_env_var
    text = environ.get(name, "").strip() if name and settings.is_development else ""
    if not text:
        return settings
    webhooks = settings.webhooks
    secrets = (*webhooks.secrets, Secret(text, made_for_tests=True))
    return msgspec.structs.replace(
        settings, webhooks=msgspec.structs.replace(webhooks, secrets=secrets)
    )


def _located(problems: Iterable[Problem], origins: Mapping[str, str]) -> tuple[Problem, ...]:
    """Add to each problem where the value came from, and leave out repetitions."""
    located = (
        problem if problem.origin else attrs.evolve(problem, origin=origins.get(problem.key))
        for problem in problems
    )
    # Two rules may find the same fault, as may two items of one list.
    return tuple(dict.fromkeys(located))


def _log(warnings: Iterable[Problem]) -> None:
    if not warnings:
        return
    from ..base.logs import get_logger

    logger = get_logger("config")
    for warning in warnings:
        logger.warning(
            "config.warning", key=warning.key, message=warning.message, origin=warning.origin
        )


# -- checks that need the machine ----------------------------------------------------------------

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
    # PEM files may have any text before the first marker (RFC 7468, 2).
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
    # A string of the SSH protocol: its length in four bytes, then its bytes (RFC 4251, 5).
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
            *_forward_secrets(settings, environ),
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
        # Opened, and not asked whether it may be: rights, mounts and links are all in the answer.
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
        # The path of a directory is what people give who think of a place for the file.
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
    # Only here is the beginning of a relative path known; the rest has been checked.
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
        if is_below(setting.key, FORWARD):
            continue  # an event that cannot be signed is a problem: see _forward_secrets
        if setting.about.form is Form.ENV_VAR and setting.key not in optional:
            name = setting.of(settings)
            if name is None:
                continue
            value = environ.get(name)
            # An empty variable is what a missing secret of an orchestrator looks like.
            if not (value and value.strip()):
                yield Problem(setting.key, f"names the variable {name}, which is not set: set it")
            # The replicator gets the value in its configuration file, and not by its environment.
            elif is_below(setting.key, REPLICATION) and not _QUOTABLE.fullmatch(value):
                yield Problem(
                    setting.key,
                    f"names the variable {name}, whose value holds a quote, a line break or "
                    "another character that the replicator's configuration cannot take in: set it "
                    "to the key alone",
                )


def _forward_secrets(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Refuse to forward what could not be signed: the application would refuse every event."""
    for index, route in enumerate(settings.forward.all_routes):
        own = index < len(settings.forward.routes) and settings.forward.routes[index].secret_env_var
        name = route.secret_env_var or ""
        wrong = forward_secret_problem(environ.get(name, ""))
        if wrong is not None:
            key = f"{FORWARD}:Routes:{index}:SecretEnvVar" if own else FORWARD_SECRET
            yield Problem(key, f"names the variable {name}, which {wrong}")


def _signing_secret(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Refuse a secret that is set and that nothing could be signed with."""
    notifications = settings.multi_tenant.notifications
    secret = environ.get(notifications.webhook.signing_secret_env_var, "").strip()
    if notifications.enabled and notifications.enabled_channels.webhook and secret:
        unusable = signing_secret_problem(notifications, secret)
        if unusable is not None:
            yield unusable
