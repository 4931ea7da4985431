"""Layers of entries become settings, and everything that does not fit is collected. Pure.

Binding looks at types alone; ``rules.py`` looks at values.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import Problem
from .coercion import coerce, shown, split_list
from .layers import Entry, Layer
from .options import Settings
from .table import Setting, by_folded_path, fold, full_key, sections, table

#: How alike two names must be for a "did you mean".
SIMILARITY = 0.7

#: Digits of the greatest index that a list item may have.
LONGEST_INDEX = 4

_MISFIT = object()

_Merged = dict[tuple[str, ...], Entry]


@attrs.frozen
class Bound:
    """The settings with what could be bound (else the default), and what could not.

    ``origins`` says for each full key that some layer gave where its value came from; items of
    lists have keys of their own.
    """

    settings: Settings
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    origins: Mapping[str, str]


def bind(layers: Iterable[Layer]) -> Bound:
    """Bind layers to settings; a later layer wins.

    A whole list replaces the one of the layers before; an indexed key (``Secrets:0``) replaces
    that item alone. Never raises on account of what the layers hold.
    """
    layers = list(layers)
    problems = [problem for layer in layers for problem in layer.problems]
    warnings = [warning for layer in layers for warning in layer.warnings]
    merged = merge(layer.entries for layer in layers)
    binding = _Binding(merged)
    values = {setting.attributes: binding.value(setting) for setting in table()}
    binding.leftovers()
    return Bound(
        settings=_build(Settings(), (), values),
        problems=(*problems, *binding.problems),
        warnings=(*warnings, *binding.warnings),
        origins=binding.origins,
    )


def merge(layers: Iterable[Sequence[Entry]]) -> _Merged:
    """Return the winning entry of each folded path."""
    merged: _Merged = {}
    for entries in layers:
        for entry in entries:
            path = fold(entry.path)
            setting = by_folded_path().get(path)
            if setting is not None and setting.many:
                for item in [known for known in merged if known[: len(path)] == path]:
                    del merged[item]
            merged[path] = entry
    return merged


class _Binding:
    """Takes entries out of the merged layers, setting by setting."""

    def __init__(self, merged: _Merged) -> None:
        self._items: dict[tuple[str, ...], dict[str, Entry]] = {}
        for path, entry in merged.items():
            parent = by_folded_path().get(path[:-1])
            if parent is not None and parent.many:
                self._items.setdefault(path[:-1], {})[path[-1]] = entry
        self._unused = dict(merged)
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.origins: dict[str, str] = {}

    def value(self, setting: Setting) -> Any:
        """Return the value of one setting: bound, or its default."""
        if setting.many:
            return self._list(setting)
        entry = self._unused.pop(setting.folded, None)
        if entry is None:
            return setting.default
        return self._coerced(setting, entry, setting.key, setting.default)

    def _coerced(self, setting: Setting, entry: Entry, key: str, otherwise: Any) -> Any:
        if entry.origin is not None:
            self.origins[setting.key] = entry.origin
        try:
            return coerce(setting, entry.value)
        except ValueError as error:
            self.problems.append(Problem(key, str(error), entry.origin))
            return otherwise

    def _list(self, setting: Setting) -> tuple[Any, ...]:
        entries = self._list_entries(setting)
        if entries is None:
            return tuple(setting.default)
        values: list[Any] = []
        origins: list[str] = []
        for index in sorted(entries):
            entry = entries[index]
            value = self._coerced(setting, entry, f"{setting.key}:{index}", _MISFIT)
            if entry.origin is not None:
                origins.append(entry.origin)
            if value is not _MISFIT:
                if entry.origin is not None:
                    self.origins[f"{setting.key}:{len(values)}"] = entry.origin
                values.append(value)
        if origins:
            self.origins[setting.key] = ", ".join(dict.fromkeys(origins))
        return tuple(values)

    def _list_entries(self, setting: Setting) -> dict[int, Entry] | None:
        """Return the items by index, or None when nothing sets the list."""
        entries: dict[int, Entry] = {}
        whole = self._unused.pop(setting.folded, None)
        if whole is not None:
            if whole.origin is not None:
                self.origins[setting.key] = whole.origin
            try:
                items = split_list(setting, whole.value)
            except ValueError as error:
                self.problems.append(Problem(setting.key, str(error), whole.origin))
                items = []
            entries = {i: Entry(setting.path, item, whole.origin) for i, item in enumerate(items)}
        for name, entry in self._items.get(setting.folded, {}).items():
            if name.isascii() and name.isdigit() and len(name) <= LONGEST_INDEX:
                del self._unused[*setting.folded, name]
                entries[int(name)] = entry
        return entries if entries or whole is not None else None

    def leftovers(self) -> None:
        """Report what belongs to no setting: wrong kinds as problems, unknown keys as warnings."""
        reported: set[tuple[str, ...]] = set()
        for path, entry in self._unused.items():
            known = next(path[:n] for n in range(len(path), -1, -1) if _is_known(path[:n]))
            place = path[: len(known) + 1]
            if place in reported:
                continue
            reported.add(place)
            if known == path:
                self._misplaced_section(entry)
            elif (setting := by_folded_path().get(known)) is not None:
                self._below_a_value(setting, entry)
            else:
                self.warnings.append(_unknown(known, entry))

    def _misplaced_section(self, entry: Entry) -> None:
        if entry.value is None or entry.value == {}:
            return
        message = f"is a section with keys of its own, not {shown(entry.value)}"
        self.problems.append(Problem(entry.key, message, entry.origin))

    def _below_a_value(self, setting: Setting, entry: Entry) -> None:
        message = (
            "is no item of the list: items are numbered from 0"
            if setting.many
            else f"has no place: {setting.key} is a single value, not an object"
        )
        self.problems.append(Problem(entry.key, message, entry.origin))


def _is_known(path: tuple[str, ...]) -> bool:
    return path in by_folded_path() or path in sections()


def _unknown(known: tuple[str, ...], entry: Entry) -> Problem:
    """Return the warning about a key of which ``known`` is the part that exists."""
    depth = len(known) + 1
    suggestion = _similar(known, fold(entry.path)[depth - 1])
    advice = f": did you mean {suggestion}?" if suggestion else "; it is ignored"
    key = Entry(entry.path[:depth], None, None).key
    return Problem(key, f"is not a known key{advice}", entry.origin)


def _similar(known: tuple[str, ...], name: str) -> str | None:
    """Return the full key that was probably meant: a neighbour, else any key of such a name."""
    import difflib  # on the path of a mistake only

    paths = [*sections().values(), *(setting.path for setting in table())]
    neighbours = {path[-1].casefold(): path for path in paths if path and fold(path[:-1]) == known}
    anywhere = {path[-1].casefold(): path for path in reversed(paths) if path}
    for candidates in (neighbours, anywhere):
        matches = difflib.get_close_matches(name, candidates, n=1, cutoff=SIMILARITY)
        if matches:
            return full_key(candidates[matches[0]])
    return None


def _build(section: Any, attributes: tuple[str, ...], values: Mapping[tuple[str, ...], Any]) -> Any:
    """Return ``section`` with the bound values below ``attributes`` in place."""

    def changed(name: str) -> Any:
        inner = (*attributes, name)
        return values[inner] if inner in values else _build(getattr(section, name), inner, values)

    names = [field.name for field in attrs.fields(type(section))]
    return attrs.evolve(section, **{name: changed(name) for name in names})
