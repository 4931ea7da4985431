"""The settings of one command: its files, its ``--set`` arguments, and all other sources."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence

from ..config import Loaded, Secret, Settings, read_settings
from ..config.options import DEVELOPMENT, environment_meant
from ..config.sources import below_root, split_mapping_key
from ..config.table import Setting, by_folded_path, fold
from .parse import UsageError


def read(
    arguments: Namespace,
    *,
    standalone: bool = True,
    receiver: bool = False,
    defaults: Mapping[str, str] | None = None,
) -> Loaded:
    """Read the settings; problems and warnings are part of the result.

    Args:
        arguments: the parsed arguments; ``--config`` and ``--set`` are used.
        standalone: no AccessToken is needed.
        receiver: the receiver runs, so a webhook secret is needed.
        defaults: keys that the command sets; they win over files, a ``--set`` wins over them.

    Raises:
        UsageError: a ``--set`` has no ``=``, or holds a secret.
    """
    given = assignments(arguments.set)
    paths = {_folded(key) for key in given}
    own = {k: value for k, value in (defaults or {}).items() if _folded(k) not in paths}
    loaded = read_settings(
        *arguments.config, overrides={**own, **given}, standalone=standalone, receiver=receiver
    )
    arguments.development = loaded.is_development
    return loaded


def load(arguments: Namespace) -> Settings:
    """Read the settings for a command that runs no receiver, or raise all their problems.

    Raises:
        UsageError: from the arguments.
        OptionsValidationError: with every problem.
    """
    return read(arguments).require()


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` arguments as a mapping; a later one replaces an earlier one.

    Raises:
        UsageError: one has no key or no ``=``, or sets a secret: other users of the machine see
            the arguments of every process. No value is quoted.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        setting = _setting(key)
        if setting is not None and setting.kind is Secret:
            name = "__".join(("SDK", *(part.upper() for part in setting.path)))
            name += "__0" if setting.many else ""
            raise UsageError(
                f"--set {setting.key}: secrets are not taken from the command line, which other "
                f"users can read. Set the variable {name}, or put it into a file of that name in "
                "a directory of secrets ($CREDENTIALS_DIRECTORY)"
            )
        if not equals or not key.strip():
            raise UsageError(
                "--set takes KEY=VALUE, such as --set Sdk:Webhooks:Path=/hooks; "
                f"there is no {'value' if key.strip() else 'key'} in one of them"
            )
        for earlier in [k for k in found if _folded(k) == _folded(key)]:
            del found[earlier]
        found[key] = value
    return found


def is_development(arguments: Namespace) -> bool:
    """Say whether errors are shown in full, as far as it is known without valid settings."""
    known: bool | None = getattr(arguments, "development", None)
    if known is not None:
        return known
    chosen = os.environ.get("SDK__ENVIRONMENT") or os.environ.get("SDK_ENVIRONMENT", "")
    for text in getattr(arguments, "set", ()):
        key, _, value = text.partition("=")
        if _folded(key) == ("environment",):
            chosen = value
    return environment_meant(chosen) == DEVELOPMENT


def _folded(key: str) -> tuple[str, ...]:
    path = split_mapping_key(key.strip())
    below = below_root(path)
    return fold(path if below is None else below)


def _setting(key: str) -> Setting | None:
    """Return the setting of a key, or of the key of one item of its list."""
    path = _folded(key)
    return by_folded_path().get(path) or by_folded_path().get(path[:-1])
