"""Loads settings: from all sources to validated settings.

Does I/O. Later sources win: defaults, ``$STATE_DIRECTORY``, files with their ``.{Environment}``
siblings, ``.env`` in Development, key-per-file directories, variables, arguments
(docs/reference/configuration.md).
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from ..errors import OptionsValidationError, Problem
from .bind import bind
from .check import USUAL_ENVIRONMENTS, admin_token_findings, check, unmet_needs
from .fields import Form, check_form
from .options import DEVELOPMENT, Settings, environment_meant, validate_mappings_with
from .probe import probe
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
from .table import ROOT, fold, is_unused

#: Read from the working directory when no file is named.
DEFAULT_FILES = ("appsettings.json", "sdk.toml")


class Loaded(msgspec.Struct, frozen=True):
    """The result of reading the settings.

    ``settings`` is None if there are ``problems``. ``origins`` holds the file, variable or argument
    of each full key that some source sets, list items included. ``files`` are the existing settings
    files, without key files. ``is_development`` is also known with problems. ``unmet`` are enabled
    parts whose prerequisite is disabled: only the start of a runtime refuses them.
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
            OptionsValidationError: lists all problems.
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
    """Read the settings from all sources, log the warnings, and return valid settings.

    Args:
        files: JSON or TOML files; later ones win. Without any, ``appsettings.json`` and
            ``sdk.toml`` of the working directory are read if they exist.
        overrides: arguments of the command line, such as ``{"Sdk:Mode": "Custom"}``.
        environ: the environment variables; default ``os.environ``.
        standalone: only the receiver runs, so no AccessToken is needed.
        receiver: the receiver runs, so at least one webhook secret is needed.

    Raises:
        OptionsValidationError: lists every problem.
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
        directory: where unnamed files are searched for, including ``.env``; default: the working
            directory.
        secrets_directory: a directory with one file per key, read before the one in the variable
            ``CREDENTIALS_DIRECTORY``.
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
    """Validate only a mapping; see ``Settings.from_mapping``."""
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
    # These may set the Environment, which selects files of lower precedence.
    above_files = [
        *directories,
        read_environment_name(environ),
        read_environ(environ),
        read_overrides(overrides),
    ]
    # Named files replace the usual ones: --config means only those files.
    paths = files or tuple(directory / name for name in DEFAULT_FILES)
    named = bool(files)
    bases = {path: read_file(path, optional=not named, named=named) for path in paths}
    # The name selects further files, so it is read first; a sibling file cannot change it.
    environment = _environment_name([*bases.values(), *above_files])
    below = [read_state_directory(environ)]
    for path in paths:
        sibling = path.with_name(f"{path.stem}.{environment}{path.suffix}")
        below += [bases[path], read_file(sibling, optional=True, named=named)]
    # A ``.env`` left behind on a server must be ignored in Production.
    if environment == DEVELOPMENT:
        below.append(read_dotenv(directory / ".env"))
    else:
        below.append(unread_dotenv(directory / ".env", [*below, *above_files]))
    return [*below, *above_files]


def _environment_name(layers: Iterable[Layer]) -> str:
    """Return the Environment that selects the files, in the spelling of their names."""
    name = Settings().environment
    for layer in layers:
        for entry in layer.entries:
            if fold(entry.path) == ("environment",) and isinstance(entry.value, str):
                name = entry.value
    if check_form(Form.ENVIRONMENT_NAME, name, development=False):
        return Settings().environment  # not valid in a file name; the rules report it
    # File names have the usual spelling where case matters.
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
    # Settings.from_mapping reads only its mapping, so it has no variables to check.
    settings = bound.settings
    if environ is not None:
        settings = _with_sources(_with_simulator(settings, environ), environ)
    invalid = frozenset(problem.key for problem in bound.problems)
    problems = [p for p in bound.problems if not is_unused(p.key, settings, invalid)]
    findings = check(settings, standalone=standalone, receiver=receiver, invalid=invalid)
    warnings = [*bound.warnings, *findings.warnings]
    # An unreadable source may contain the missing keys: they are not reported.
    unread = ROOT in invalid
    problems += [p for p in findings.problems if not unread or p.key in bound.origins]
    # Only a receiver has an admin address; a client may share its environment.
    if environ is not None and receiver:
        token = environ.get(settings.admin.token_env_var, "").strip()
        judged = admin_token_findings(settings, token)
        problems += judged.problems
        warnings += judged.warnings
    # Probing creates directories and takes time; with invalid settings it would report
    # consequential errors.
    if environ is not None and not problems:
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
        # Reported with other problems, so that one start reports everything to fix.
        unmet=_located((p for p in unmet_needs(settings) if p.key not in invalid), bound.origins),
    )


def _with_simulator(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return settings whose receiver accepts the simulator's signatures, in Development only."""
    name = settings.simulator.secret_env_var
    text = environ.get(name, "").strip() if name and settings.is_development else ""
    if not text:
        return settings
    webhooks = settings.webhooks
    secrets = (*webhooks.secrets, Secret(text, made_for_tests=True))
    return msgspec.structs.replace(
        settings, webhooks=msgspec.structs.replace(webhooks, secrets=secrets)
    )


def _with_sources(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return settings whose sources have the secrets of their variables."""
    sources = tuple(
        msgspec.structs.replace(
            source,
            secrets=(
                *source.secrets,
                *map(Secret, environ.get(source.secret_env_var or "", "").split()),
            ),
        )
        for source in settings.sources
    )
    return msgspec.structs.replace(settings, sources=sources) if sources else settings


def _located(problems: Iterable[Problem], origins: Mapping[str, str]) -> tuple[Problem, ...]:
    """Add each problem's origin, and remove duplicates."""
    located = (
        problem if problem.origin else attrs.evolve(problem, origin=origins.get(problem.key))
        for problem in problems
    )
    # Two rules, or two items of one list, may find the same fault.
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
