"""The loading of settings: from all sources to validated settings, and again after a change.

Does I/O. Later sources win: defaults, ``$STATE_DIRECTORY``, files with their ``.{Environment}``
siblings, ``.env`` in Development, key-per-file directories, variables, arguments
(docs/reference/configuration.md).

:class:`KeyFileReader` notices that a file with a secret or a certificate has another content.
Orchestrators replace such files without telling anybody: Kubernetes swaps a symbolic link, others
rename a new file over the old one. A look costs one ``stat`` a file; only a file that is another
one, or was written, is read, and only other content counts.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ..errors import OptionsValidationError, Problem
from .bind import bind
from .check import USUAL_ENVIRONMENTS, check
from .exposure import admin_token_findings
from .metadata import Form
from .options import DEVELOPMENT, Settings, environment_meant, validate_mappings_with
from .probe import probe
from .secret import Secret
from .section_switches import is_unused
from .sources import (
    CREDENTIALS_DIRECTORY_VARIABLE,
    Layer,
    is_key_file,
    read_directory,
    read_dotenv,
    read_environ,
    read_environment_name,
    read_file,
    read_overrides,
    read_section,
    read_state_directory,
)
from .table import ROOT, fold
from .text_formats import check_form

#: Read from the working directory when no file is named.
DEFAULT_FILES = ("appsettings.json", "sdk.toml")

SECRETS_DIRECTORY = "/run/secrets"

#: A file with secrets or certificates is smaller; of a larger one its beginning is compared.
MAX_FILE_BYTES = 1024 * 1024


@attrs.frozen
class Loaded:
    """The result of reading the settings.

    ``settings`` is None when there are ``problems``. ``origins`` holds, for each full key that
    some source gave (items of lists included), the file, variable or argument it came from.
    ``files`` are the files of settings that were there, key files aside. ``is_development`` is
    known with problems, too.
    """

    settings: Settings | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    origins: Mapping[str, str]
    files: tuple[str, ...] = ()
    is_development: bool = False

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
    above_files = [
        *directories,
        read_environment_name(environ),
        read_environ(environ),
        read_overrides(overrides),
    ]
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
    settings = bound.settings if environ is None else _with_simulator(bound.settings, environ)
    invalid = frozenset(problem.key for problem in bound.problems)
    problems = [p for p in bound.problems if not is_unused(p.key, settings, invalid)]
    findings = check(settings, standalone=standalone, receiver=receiver, invalid=invalid)
    warnings = [*bound.warnings, *findings.warnings]
    # What a source that could not be read would have set, nobody can call missing.
    unread = ROOT in invalid
    problems += [p for p in findings.problems if not unread or p.key in bound.origins]
    if environ is not None:
        token = environ.get(settings.admin.token_env_var, "").strip()
        weak, doubtful = admin_token_findings(settings, token)
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
    )


def _with_simulator(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return settings whose receiver accepts what the simulator signs, in Development alone."""
    name = settings.simulator.secret_env_var
    text = environ.get(name, "").strip() if name and settings.is_development else ""
    if not text:
        return settings
    webhooks = settings.webhooks
    secrets = (*webhooks.secrets, Secret(text, made_for_tests=True))
    return attrs.evolve(settings, webhooks=attrs.evolve(webhooks, secrets=secrets))


def _located(problems: Iterable[Problem], origins: Mapping[str, str]) -> tuple[Problem, ...]:
    """Add to each problem where the value came from, and leave out repetitions."""
    located = (
        problem if problem.origin else attrs.evolve(problem, origin=origins.get(problem.key))
        for problem in problems
    )
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


def key_directories(
    environ: Mapping[str, str], secrets_directory: str = SECRETS_DIRECTORY
) -> tuple[Path, ...]:
    """Return the directories with one file per key that settings are read from."""
    credentials = environ.get(CREDENTIALS_DIRECTORY_VARIABLE)
    return (Path(secrets_directory), *([Path(credentials)] if credentials else []))


def key_files(settings: Settings) -> tuple[Path, ...]:
    """Return the files that the settings name and a running receiver can take anew."""
    named = (settings.server.cert_file, settings.server.key_file)
    return tuple(Path(path) for path in named if path is not None)


@attrs.frozen
class _Seen:
    """A file as the last look found it: ``identity`` tells cheaply whether it may have changed."""

    identity: tuple[int, ...]
    digest: bytes = attrs.field(repr=False)


class KeyFileReader:
    """Compares files with what they were at the last look. Not for several threads at once."""

    def __init__(self) -> None:
        self._seen: dict[Path, _Seen | None] = {}
        self._places: frozenset[Path] = frozenset()

    def look(self, places: Iterable[Path]) -> tuple[str, ...]:
        """Return the files whose content is another than at the last look, with new and lost ones.

        Args:
            places: files, and directories of key files. What lies in a place that was not looked
                at before has not changed.
        """
        places = frozenset(places)
        known = {place for place in places if place in self._places}
        found = {path: self._see(path) for place in places for path in _files_of(place)}
        changed = [
            path
            for path in found.keys() | self._seen.keys()
            if (path in known or path.parent in known)
            and _digest(found.get(path)) != _digest(self._seen.get(path))
        ]
        self._seen = found
        self._places = places
        return tuple(sorted(map(str, changed)))

    def _see(self, path: Path) -> _Seen | None:
        """Return what the file is now; None if it cannot be read."""
        try:
            status = path.stat()
            # The inode shows a file that was renamed over the old one, size and time one that was
            # written in place.
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            before = self._seen.get(path)
            if before is not None and before.identity == identity:
                return before
            with path.open("rb") as file:
                return _Seen(identity, hashlib.sha256(file.read(MAX_FILE_BYTES)).digest())
        except (OSError, ValueError):
            return None


def _digest(seen: _Seen | None) -> bytes | None:
    return None if seen is None else seen.digest


def _files_of(place: Path) -> Iterator[Path]:
    try:
        names = os.listdir(place)
    except NotADirectoryError:
        yield place
    except (OSError, ValueError):
        return
    else:
        for name in names:
            path = place / name
            if is_key_file(name) and not path.is_dir():
                yield path
