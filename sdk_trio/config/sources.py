"""The sources of settings: files, directories of secrets, variables, arguments. Does I/O.

A layer is the list of entries of one source; each entry knows its origin. Keys are split at ``:``,
``__`` and, in mappings, ``.``, so that ``Webhooks:Path``, ``Webhooks__Path`` and nested objects
mean the same.

Each function reads one source and never raises because of its content. An unreadable file is a
problem of its layer, with line and column, so that one start reports all problems. Messages never
quote file contents, because a file may contain secrets.

:class:`KeyFileReader` detects changed files with secrets or certificates. Orchestrators replace
such files without a signal: Kubernetes swaps a symbolic link, others rename a new file over the old
one. The files are few and small, so each is read and its content compared.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from ..base.ownership import foreign_fault
from ..errors import Problem
from .options import Settings
from .table import ROOT, fold, full_key

#: Deeper values are kept whole and then reported: no setting is nested that deep.
MAXIMUM_DEPTH = 16

_SEPARATORS = re.compile(r":|__")
_MAPPING_SEPARATORS = re.compile(r":|__|\.")

ENVIRONMENT_VARIABLE = "SDK_ENVIRONMENT"
STATE_DIRECTORY_VARIABLE = "STATE_DIRECTORY"
CREDENTIALS_DIRECTORY_VARIABLE = "CREDENTIALS_DIRECTORY"

#: Longer integers fit no setting; Python refuses to convert those beyond 4300 digits.
_LONGEST_INTEGER = 30

SECRETS_DIRECTORY = "/run/secrets"

#: Larger than any file of secrets or certificates; of a larger file only this much is compared.
MAX_FILE_BYTES = 1024 * 1024

# Quotes and comments as in shells, but no substitution: a `$` in a secret is literal.
_DOTENV_LINE = re.compile(
    r"""(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.:-]*)\s*=\s*"""
    r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>[^'"\s#](?:.*?))?)"""
    r"""\s*(?:(?:^|(?<=\s))\#.*)?"""
)
_DOTENV_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@attrs.frozen
class Entry:
    """One value of one source. ``path`` is the key below the root, as written."""

    path: tuple[str, ...]
    value: Any = attrs.field(repr=False)  # it may be a secret
    origin: str | None

    @property
    def key(self) -> str:
        """Return the full key as written."""
        return printable(full_key(self.path))


class Layer(msgspec.Struct, frozen=True):
    """The entries of one source, and the problems and warnings of the source itself.

    ``file`` is the path of an existing settings file; None for every other source.
    """

    entries: tuple[Entry, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    file: str | None = None


@attrs.frozen
class Pairs:
    """A JSON object that keeps its duplicate keys."""

    pairs: tuple[tuple[Any, Any], ...] = attrs.field(repr=False)


def split_key(text: str) -> tuple[str, ...]:
    """Split a key from an environment variable or a file name into its parts."""
    return tuple(_SEPARATORS.split(text))


def split_mapping_key(text: str) -> tuple[str, ...]:
    """Split a key of a mapping at ``:``, ``__`` or a dot into its parts."""
    return tuple(_MAPPING_SEPARATORS.split(text))


def below_root(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the path without its root ``Sdk``, or None if it has another root."""
    return path[1:] if path and path[0].casefold() == ROOT.casefold() else None


def printable(text: str) -> str:
    """Return ``text`` with control characters and the like escaped, safe to print and to log."""
    # Messages quote keys of files, and their control characters would affect the terminal.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def read_mapping(mapping: Mapping[Any, Any] | Pairs, origin: str | None) -> Layer:
    """Flatten the settings under the root key ``Sdk``; other roots are ignored."""
    found = _Flattening(origin)
    found.visit((), mapping, rooted=False)
    return found.layer()


def read_section(mapping: Mapping[Any, Any], origin: str | None) -> Layer:
    """Flatten a mapping that may omit the root key."""
    found = _Flattening(origin)
    # One key with the root shows that the author uses it.
    rooted = any(
        isinstance(key, str) and below_root(split_mapping_key(key)) is not None for key in mapping
    )
    found.visit((), mapping, rooted=not rooted)
    return found.layer()


def read_item(path: tuple[str, ...], value: Any, origin: str | None) -> Layer:
    """Flatten one item of a list of sections at ``path``."""
    found = _Flattening(origin)
    found.place(path, value)
    return found.layer()


def layer_of(entries: Iterable[Entry], origin: str) -> Layer:
    """Make a layer of separate entries, such as variables; ``origin`` names them together."""
    found = _Flattening(origin)
    for entry in entries:
        found.add(entry)
    return found.layer()


class _Flattening:
    """Collects the entries of one source and reports duplicate keys."""

    def __init__(self, origin: str | None) -> None:
        self._origin = origin
        self._entries: list[Entry] = []
        self._seen: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._problems: dict[tuple[str, ...], Problem] = {}

    def layer(self) -> Layer:
        # A whole list must come before single items of it.
        entries = sorted(self._entries, key=lambda entry: len(entry.path))
        # The sort is stable: entries of one depth keep the order of the file.
        return Layer(tuple(entries), tuple(self._problems.values()))

    def add(self, entry: Entry) -> None:
        self._once(self._seen, entry.path, entry.origin)
        self._entries.append(entry)

    def visit(
        self, path: tuple[str, ...], mapping: Mapping[Any, Any] | Pairs, *, rooted: bool
    ) -> None:
        here: dict[tuple[str, ...], tuple[str, ...]] = {}
        for key, value in mapping.pairs if isinstance(mapping, Pairs) else mapping.items():
            if not isinstance(key, str):
                self._problem(path, f"has a key that is not text but {type(key).__name__}")
                continue
            below: tuple[str, ...] | None = split_mapping_key(key)
            if not path and not rooted:
                # A file may contain the settings of other programs outside of ``Sdk``.
                below = below_root(split_mapping_key(key))
            if below is None:
                continue
            inner = (*path, *below)
            self._once(here, inner, self._origin)
            self.place(inner, value)

    def place(self, path: tuple[str, ...], value: Any) -> None:
        """Add the value at ``path``: one entry, or those of a mapping."""
        if isinstance(value, Mapping | Pairs) and len(path) < MAXIMUM_DEPTH:
            if value.pairs if isinstance(value, Pairs) else value:
                self.visit(path, value, rooted=True)
                return
            value = {}
        self.add(Entry(path, value, self._origin))

    def _once(
        self,
        seen: dict[tuple[str, ...], tuple[str, ...]],
        path: tuple[str, ...],
        origin: str | None,
    ) -> None:
        first = seen.get(fold(path))
        if first is None:
            seen[fold(path)] = path
            return
        # Two spellings of one key look like different keys, so the message shows both.
        spelled = "" if first == path else f", as {printable(full_key(first))} before"
        message = f"is given twice{spelled}: keys are case-insensitive, keep one of them"
        self._problem(path, message, origin)

    def _problem(self, path: tuple[str, ...], message: str, origin: str | None = None) -> None:
        key = printable(full_key(path))
        # Report only the first duplicate of a key.
        self._problems.setdefault(fold(path), Problem(key, message, origin or self._origin))


def read_file(path: Path, *, optional: bool = False, named: bool = True) -> Layer:
    """Read a JSON or TOML file, chosen by its suffix; with ``optional`` it may be missing.

    A file that is not ``named`` must belong to this user.
    """
    name = str(path)
    text, problem = _read_text(path, optional=optional, named=named)
    if text is None:
        return Layer(problems=(problem,) if problem else ())
    content: Mapping[str, Any] | Pairs | None
    # By suffix, not by content: a broken JSON file must not be reported as broken TOML.
    if path.suffix.lower() == ".json":
        content, message = _parse_json(text)
    elif path.suffix.lower() == ".toml":
        content, message = _parse_toml(text)
    else:
        content, message = None, "has an unknown kind: name the file .json or .toml"
    if content is None:
        return Layer(problems=(Problem(ROOT, message, name),), file=name)
    layer = read_mapping(content, name)
    warnings = layer.warnings
    if not (layer.entries or layer.problems or _has_root(content)):
        # A file without the root usually has its settings at the top level, where they would be
        # ignored silently.
        warnings = (Problem(ROOT, f"the file has no key {ROOT}: put the settings below it", name),)
    return Layer(layer.entries, layer.problems, warnings, file=name)


def read_dotenv(path: Path) -> Layer:
    """Read the ``SDK__...=value`` lines of a ``.env`` file, if it exists; ignore other lines."""
    text, problem = _read_text(path, optional=True, named=False)
    problems = [problem] if problem else []
    entries: list[Entry] = []
    for number, line in enumerate((text or "").splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        # Line by line: values of several lines would hide a forgotten closing quote.
        match = _DOTENV_LINE.fullmatch(stripped)
        if match is None:
            message = f"cannot be read at line {number}: write NAME=value, with quotes if needed"
            problems.append(Problem(ROOT, message, str(path)))
            continue
        below = _path_of(match["name"])
        if below is not None:
            entries.append(Entry(below, _dotenv_value(match), f"{path}:{number}"))
    layer = layer_of(entries, str(path))
    file = None if text is None else str(path)
    return Layer(layer.entries, (*problems, *layer.problems), file=file)


def unread_dotenv(path: Path, layers: Iterable[Layer]) -> Layer:
    """Warn of a ``.env`` file that is not read although it sets keys that no layer sets.

    No warning if its variables are set already, as ``docker compose`` does.
    """
    known = {fold(entry.path) for layer in layers for entry in layer.entries}
    lost = [entry.key for entry in read_dotenv(path).entries if fold(entry.path) not in known]
    if not lost:
        return Layer()
    some = ", ".join(lost[:3]) + (", ..." if lost[3:] else "")
    message = (
        f"the file has {some}, and is read in the Development environment only: set the variables "
        "themselves, or run 'dev'"
    )
    return Layer(warnings=(Problem(ROOT, message, str(path)),))


def read_directory(directory: Path) -> Layer:
    """Read a directory with one file per key, such as ``Sdk__Webhooks__Secret``.

    One line break at the end of a file is not part of the value. Other files are ignored; the
    directory may be missing.
    """
    try:
        files = sorted(path for path in directory.iterdir() if is_key_file(path.name))
    # /run/secrets exists only in containers.
    except (FileNotFoundError, NotADirectoryError):
        return Layer()
    except OSError as error:
        message = f"the directory cannot be read: {error.strerror}"
        return Layer(warnings=(Problem(ROOT, message, str(directory)),))
    entries: list[Entry] = []
    problems: list[Problem] = []
    for path in files:
        # A directory of that name is not a value.
        if path.is_dir():
            continue
        text, problem = _read_text(path)
        if problem is not None:
            problems.append(problem)
        below = _path_of(path.name)
        if text is not None and below is not None:
            entries.append(Entry(below, _without_line_break(text), str(path)))
    layer = layer_of(entries, str(directory))
    return Layer(layer.entries, (*problems, *layer.problems))


def is_key_file(name: str) -> bool:
    """Return whether :func:`read_directory` reads a file of this name."""
    return _path_of(name) is not None


def read_state_directory(environ: Mapping[str, str]) -> Layer:
    """Read the default of Storage:Path from the service manager, which may name several."""
    # systemd separates several directories by colons, in the unit's order.
    first = environ.get(STATE_DIRECTORY_VARIABLE, "").split(":")[0]
    return _variable(("Storage", "Path"), first, STATE_DIRECTORY_VARIABLE)


def read_environment_name(environ: Mapping[str, str]) -> Layer:
    """Read Environment from ``SDK_ENVIRONMENT``."""
    name = environ.get(ENVIRONMENT_VARIABLE, "")
    return _variable(("Environment",), name, ENVIRONMENT_VARIABLE)


def read_environ(environ: Mapping[str, str]) -> Layer:
    """Read the variables ``SDK__...``, such as ``SDK__WEBHOOKS__SECRETS__0``."""
    # Case-insensitive: on Windows all names are in upper case.
    found = ((below, name) for name in environ if (below := _path_of(name)) is not None)
    entries = [Entry(below, environ[name], _variable_origin(name)) for below, name in found]
    layer = layer_of(entries, "the environment")
    # SDK_ENVIRONMENT and SDK_ADMIN_TOKEN have no second double underscore: they are not keys.
    slips = [name for name in environ if name.upper().startswith("SDK_") and "__" in name[4:]]
    meant = {name: f"{name[:4]}_{name[4:]}" for name in map(printable, slips) if name[4] != "_"}
    # Only these are certainly meant for us: others may belong to an application.
    meant |= {name: _SINGLE[name.upper()] for name in environ if name.upper() in _SINGLE}
    warnings = tuple(
        Problem(ROOT, f"the variable is not read: write {right}", name)
        for name, right in meant.items()
    )
    return Layer(layer.entries, layer.problems, (*layer.warnings, *warnings))


#: Names that miss the double underscore between sections.
_SINGLE = {
    "SDK_WEBHOOKS_SECRET": "SDK__WEBHOOKS__SECRET",
    "SDK_WEBHOOK_SECRET": "SDK__WEBHOOKS__SECRET",
    "SDK_ACCESS_TOKEN": "SDK__ACCESSTOKEN",
    "SDK_ACCESSTOKEN": "SDK__ACCESSTOKEN",
}


def read_overrides(overrides: Mapping[str, Any]) -> Layer:
    """Read keys such as ``Sdk:Mode`` from the command line; each may omit the root."""
    rooted = {
        key if below_root(split_mapping_key(key)) is not None else f"{ROOT}:{key}": value
        for key, value in overrides.items()
    }
    layer = read_section(rooted, "arguments")
    # One origin per key, because all arguments together would be one.
    entries = (Entry(e.path, e.value, f"argument {e.key}") for e in layer.entries)
    return Layer(tuple(entries), layer.problems)


def _variable(path: tuple[str, ...], value: str, name: str) -> Layer:
    return Layer((Entry(path, value, _variable_origin(name)),)) if value else Layer()


def _variable_origin(name: str) -> str:
    return f"variable {printable(name)}"


def _path_of(name: str) -> tuple[str, ...] | None:
    """Return the path that a variable or file name stands for, or None if it is not ours."""
    return below_root(split_key(name)) or None


def reason_of(error: OSError | ValueError) -> str | None:
    """Return why a file cannot be opened; an invalid path raises ``ValueError``."""
    return error.strerror if isinstance(error, OSError) else "not a path"


def _without_line_break(text: str) -> str:
    # Only one, as `echo` and editors write it; another belongs to the value and fails its check.
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _read_text(
    path: Path, *, optional: bool = False, named: bool = True
) -> tuple[str | None, Problem | None]:
    """Return the text of a file, or its problem; neither if an optional file is missing."""
    try:
        with path.open("rb") as file:
            # Check the open file, not its name: the file could be replaced between check and open.
            fault = None if named else foreign_fault(path, os.fstat(file.fileno()))
            if fault is not None:
                return None, Problem(ROOT, f"the file {fault}", str(path))
            content = file.read()
    except FileNotFoundError:
        message = "the file does not exist: check its path"
        return None, None if optional else Problem(ROOT, message, str(path))
    except (OSError, ValueError) as error:
        return None, Problem(ROOT, f"the file cannot be read: {reason_of(error)}", str(path))
    try:
        # Editors on Windows write a byte order mark before UTF-8; it is not part of the first key.
        return content.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        before = content[: error.start]
        # Only the line number: the line may contain a secret.
        line = before.count(b"\n") + 1
        column = error.start - before.rfind(b"\n")
        message = f"the file is not UTF-8 text at line {line}, byte {column}: save it as UTF-8"
        return None, Problem(ROOT, message, str(path))


def _parse_json(text: str) -> tuple[Pairs | None, str]:
    """Return the object in ``text``, or None and the fault."""
    try:
        # Python silently keeps the last of two equal keys; the pairs show both. Numbers of
        # thousands of digits would raise an error without a line.
        content = json.loads(text, object_pairs_hook=_pairs, parse_int=_parse_integer)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        # Two usual mistakes of people used to other formats; the parser does not name them.
        extra = text[error.pos : error.pos + 1] in tuple("/#}]") or "trailing" in error.msg
        hint = "; JSON has no comments and no comma after the last value, TOML has both"
        return None, f"the file is not valid JSON at {where}: {error.msg}{hint if extra else ''}"
    except RecursionError:
        return None, "the file is nested too deeply"
    if isinstance(content, Pairs):
        return content, ""
    return None, "the file must hold a JSON object at line 1, column 1"


def _parse_toml(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return the table in ``text``, or None and the fault."""
    import tomllib  # most installations have no TOML file

    try:
        return tomllib.loads(text), ""
    except tomllib.TOMLDecodeError as error:
        # The parser's message ends with line and column.
        return None, f"the file is not valid TOML: {error}"
    except (RecursionError, ValueError):
        return None, "the file is nested too deeply, or holds a number that is too long"


def _pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    return Pairs(tuple(pairs))


def _parse_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)


def _has_root(content: Mapping[str, Any] | Pairs) -> bool:
    pairs: Iterable[tuple[Any, Any]] = (
        content.pairs if isinstance(content, Pairs) else content.items()
    )
    return any(below_root((key,)) is not None for key, _ in pairs)


def _dotenv_value(match: re.Match[str]) -> str:
    if match["single"] is not None:
        return match["single"]
    if match["double"] is not None:
        return re.sub(
            r"\\(.)", lambda found: _DOTENV_ESCAPES.get(found[1], found[1]), match["double"]
        )
    return match["plain"] or ""


# -- key files, watched --------------------------------------------------------------------------


def key_directories(
    environ: Mapping[str, str], secrets_directory: str = SECRETS_DIRECTORY
) -> tuple[Path, ...]:
    """Return the directories with one file per key that settings are read from."""
    credentials = environ.get(CREDENTIALS_DIRECTORY_VARIABLE)
    return (Path(secrets_directory), *([Path(credentials)] if credentials else []))


def key_files(settings: Settings) -> tuple[Path, ...]:
    """Return the configured key files that a running receiver can reload."""
    named = (settings.server.cert_file, settings.server.key_file)
    return tuple(Path(path) for path in named if path is not None)


class KeyFileReader:
    """Compares files with what they were when last read. Not for several threads at once."""

    def __init__(self) -> None:
        self._digests: dict[Path, bytes | None] = {}
        self._places: frozenset[Path] = frozenset()

    def read(self, places: Iterable[Path]) -> tuple[str, ...]:
        """Return the files whose content has changed since the last call, new and lost ones too.

        Args:
            places: files, and directories of key files. The files of a place that the last call
                did not name have not changed.
        """
        places = frozenset(places)
        before, known = self._digests, self._places & places
        self._places = places
        self._digests = {path: _digest(path) for place in places for path in _files_of(place)}
        changed = [
            path
            for path in self._digests.keys() | before.keys()
            if (path in known or path.parent in known)
            and self._digests.get(path) != before.get(path)
        ]
        return tuple(sorted(map(str, changed)))


def _digest(path: Path) -> bytes | None:
    """Return the digest of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            # A digest, so that a secret is in memory once less.
            return hashlib.sha256(file.read(MAX_FILE_BYTES)).digest()
    except (OSError, ValueError):
        return None


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
            # As in read_directory: other files are not settings.
            if is_key_file(name) and not path.is_dir():
                yield path
