"""The secrets that commands sign and verify with.

None is taken from an argument: other users of the machine can read those of every process.
"""

import os
import re
import secrets
from argparse import Namespace
from pathlib import Path

from ..config import KeyDerivation, Secret, Settings, parse_secret
from ..config.secret import PUBLIC_KEY_PREFIX
from ..errors import EXIT_CONFIGURATION, SdkError
from ..webhooks.signature import NEW_SECRET_BYTES, new_secret
from .parse import UsageError

DEV_SECRET_NAME = "dev-secret"


_USUAL_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class NoSecretError(SdkError):
    """There is no secret to sign or verify with."""

    exit_code = EXIT_CONFIGURATION


def secret_of_variable(name: str) -> Secret:
    """Return the secret in the environment variable ``name``.

    Raises:
        UsageError: it is not set, or empty.
    """
    text = os.environ.get(name, "")
    if not text.strip():
        # People may write the secret in place of its name, so only a usual name is shown.
        shown = name if _USUAL_NAME.fullmatch(name) else "that was named"
        raise UsageError(
            f"--secret-env: the environment variable {shown} is not set; it takes the name of a "
            "variable, never the secret itself"
        )
    return Secret(text)


def chosen_secrets(arguments: Namespace, settings: Settings) -> tuple[Secret, ...]:
    """Return the secret that ``--secret-env`` names, or without it :func:`known_secrets`."""
    if arguments.secret_env is not None:
        return (secret_of_variable(arguments.secret_env),)
    return known_secrets(settings)


def known_secrets(settings: Settings) -> tuple[Secret, ...]:
    """Return the configured secrets, else the one that ``dev`` has generated.

    Raises:
        NoSecretError: there is no secret.
    """
    configured = settings.webhooks.all_secrets
    if configured:
        return configured
    generated = read_dev_secret(settings.storage.path)
    if generated is None:
        raise NoSecretError(
            "there is no webhook secret: set Sdk:Webhooks:Secret (variable SDK__WEBHOOKS__SECRET), "
            "name a variable with --secret-env where the command has it, or start 'dev', which "
            "generates one"
        )
    return (generated,)


def for_signing(secrets_: tuple[Secret, ...]) -> Secret:
    """Return the first secret that can sign, as public keys cannot; else the first one."""
    able = (s for s in secrets_ if not s.reveal().startswith(PUBLIC_KEY_PREFIX))
    return next(able, secrets_[0])


def read_dev_secret(directory: str) -> Secret | None:
    """Return the secret that ``dev`` keeps in the data directory, None if there is none.

    Raises:
        NoSecretError: the file cannot be read or holds no secret.
    """
    from ..storage.data_directory import read_private  # brings trio, which sign does without

    file = Path(directory) / DEV_SECRET_NAME
    try:
        text = read_private(file).strip()
        parse_secret(text, KeyDerivation.STANDARD)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or error
        raise NoSecretError(f"{file.absolute()} cannot be read: {reason}") from error
    except ValueError:
        raise NoSecretError(
            f"{file.absolute()} holds no webhook secret: delete it, 'dev' generates another one"
        ) from None
    return Secret(text, made_for_tests=True)


def provide_dev_secret(directory: str) -> Secret:
    """Return the secret of the data directory, generated at the first call (mode 0600)."""
    known = read_dev_secret(directory)
    if known is not None:
        return known
    from ..storage.data_directory import create_data_directory

    file = create_data_directory(directory) / DEV_SECRET_NAME
    text = new_secret(secrets.token_bytes(NEW_SECRET_BYTES))
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{text}\n")
    except OSError as error:
        raise NoSecretError(
            f"{file.absolute()} cannot be written ({error.strerror}): make the data directory "
            "writable, or set Sdk:Storage:Path to one that is"
        ) from error
    return Secret(text, made_for_tests=True)
