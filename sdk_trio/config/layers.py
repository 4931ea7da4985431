"""Nested mappings as flat entries, each of which knows where it came from. Pure.

A layer is the list of entries of one source. Keys are split at ``:``, ``__`` and, in mappings,
``.``, so that ``Webhooks:Path``, ``Webhooks__Path`` and nested objects mean the same.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..errors import Problem
from .table import ROOT, fold, full_key

#: Deeper values are kept whole and then reported: no setting lies that deep.
MAXIMUM_DEPTH = 16

_SEPARATORS = re.compile(r":|__")
_MAPPING_SEPARATORS = re.compile(r":|__|\.")


@attrs.frozen
class Entry:
    """One value of one source. ``path`` is below the root, as it was written."""

    path: tuple[str, ...]
    value: Any = attrs.field(repr=False)  # it may be a secret
    origin: str | None

    @property
    def key(self) -> str:
        """Return the full key as it was written."""
        return printable(full_key(self.path))


@attrs.frozen
class Layer:
    """The entries of one source, and what was wrong or odd about the source itself.

    ``file`` is the path of a file of settings that was there; None for every other source.
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
    """Split a key of a mapping into its parts; the specification writes some with a dot."""
    return tuple(_MAPPING_SEPARATORS.split(text))


def below_root(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the path without its root ``Sdk``, or None when it has another root."""
    return path[1:] if path and path[0].casefold() == ROOT.casefold() else None


def printable(text: str) -> str:
    """Return ``text`` with control characters and the like escaped, safe to print and to log."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def read_mapping(mapping: Mapping[Any, Any] | Pairs, origin: str | None) -> Layer:
    """Flatten what is under the root key ``Sdk``; other roots belong to others and are ignored."""
    found = _Flattening(origin)
    found.visit((), mapping, rooted=False)
    return found.layer()


def read_section(mapping: Mapping[Any, Any], origin: str | None) -> Layer:
    """Flatten a mapping that may leave out the root key."""
    found = _Flattening(origin)
    rooted = any(
        isinstance(key, str) and below_root(split_mapping_key(key)) is not None for key in mapping
    )
    found.visit((), mapping, rooted=not rooted)
    return found.layer()


def layer_of(entries: Iterable[Entry], origin: str) -> Layer:
    """Make a layer of separate entries, such as variables; ``origin`` names them together."""
    found = _Flattening(origin)
    for entry in entries:
        found.add(entry)
    return found.layer()


class _Flattening:
    """Collects the entries of one source and notices keys that are given twice."""

    def __init__(self, origin: str | None) -> None:
        self._origin = origin
        self._entries: list[Entry] = []
        self._seen: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._problems: dict[tuple[str, ...], Problem] = {}

    def layer(self) -> Layer:
        # The value of a whole list comes before those of single items.
        entries = sorted(self._entries, key=lambda entry: len(entry.path))
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
                below = below_root(split_mapping_key(key))
            if below is None:
                continue
            inner = (*path, *below)
            self._once(here, inner, self._origin)
            self._value(inner, value)

    def _value(self, path: tuple[str, ...], value: Any) -> None:
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
        spelled = "" if first == path else f", as {printable(full_key(first))} before"
        message = f"is given twice{spelled}: keys are case-insensitive, keep one of them"
        self._problem(path, message, origin)

    def _problem(self, path: tuple[str, ...], message: str, origin: str | None = None) -> None:
        key = printable(full_key(path))
        self._problems.setdefault(fold(path), Problem(key, message, origin or self._origin))
