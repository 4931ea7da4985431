"""The binding of text and JSON to the types of settings: one value, then whole layers. Pure.

:func:`coerce` converts one value of a file, variable or argument. It raises ``ValueError`` with a
message that completes a sentence, and quotes a value only when it is too short to be a secret that
was put under a wrong key. :func:`bind` lays the layers over each other and collects whatever does
not fit. Binding looks at types alone; ``check.py`` looks at values.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from enum import StrEnum
from typing import Any, cast

import attrs
import msgspec

from ..base.times import parse_short_span
from ..errors import Problem
from .fields import Form, Section
from .options import Settings
from .secret import HMAC_PREFIX, PUBLIC_KEY_PREFIX, Secret
from .sources import Entry, Layer, Pairs, printable, read_item
from .table import Setting, by_folded_path, fold, full_key, sections, table

#: The most days that the form's original can hold: 2**63 units of 100 ns.
MAXIMUM_DAYS = 10_675_199

_FORM = re.compile(
    r"(?:(?P<days>[0-9]{1,8})\.)?"
    r"(?P<hours>[0-9]{2}):(?P<minutes>[0-9]{2}):(?P<seconds>[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,7}))?"
)

#: Shorter than any usable secret (16 bytes).
LONGEST_QUOTED = 12

_INT = re.compile(r"[+-]?[0-9]{1,20}")
# Digits are bounded, because Python converts numbers of thousands of them slowly or not at all;
# `inf`, `nan` and `1_000` are no numbers of a settings file.
_FLOAT = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})

#: Items of these forms hold no comma, so that a list may be written with commas.
_COMMA_FORMS = frozenset({Form.BIND, Form.CIDR, Form.PROXY})

#: The beginning of the message about a key that no setting has.
UNKNOWN_KEY = "is not a known key"
IGNORED = "; it is ignored"

#: The least likeness of two names for a "did you mean", from 0 to 1 (difflib's ratio).
SIMILARITY = 0.7

#: Digits of the greatest index that a list item may have.
LONGEST_INDEX = 4

# No value of a setting, None included, can be taken for it.
_MISFIT = object()

_Merged = dict[tuple[str, ...], Entry]


def parse_timespan(text: str) -> timedelta:
    """Read a time span.

    Args:
        text: a whole number with a unit, such as ``90s``, ``30m``, ``2h`` or ``3d``; or days, then
            hours 00-23, minutes and seconds 00-59 in two digits each, then up to seven digits of
            a second, of which the seventh (100 ns) is dropped.

    Raises:
        ValueError: the text has another form; the message completes a sentence.
    """
    short = parse_short_span(text)
    if short is not None:
        if short > MAXIMUM_DAYS * 86_400:
            raise ValueError(f"has more than {MAXIMUM_DAYS} days")
        return timedelta(seconds=short)
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"must be a time span such as 30m, 2h or [d.]hh:mm:ss[.fffffff], not {shown(text)}"
        )
    days, hours = int(match["days"] or 0), int(match["hours"])
    minutes, seconds = int(match["minutes"]), int(match["seconds"])
    if hours > 23:
        raise ValueError("has more than 23 hours: write whole days in front, as in 1.06:00:00")
    if minutes > 59 or seconds > 59:
        raise ValueError("has more than 59 minutes or seconds: carry them over")
    if days > MAXIMUM_DAYS:
        raise ValueError(f"has more than {MAXIMUM_DAYS} days")
    # Python counts microseconds; the original counts units of 100 ns.
    microseconds = int((match["fraction"] or "").ljust(6, "0")[:6])
    return timedelta(
        days=days, hours=hours, minutes=minutes, seconds=seconds, microseconds=microseconds
    )


def format_timespan(span: timedelta) -> str:
    """Write a time span; days and the fraction are left out where they are zero.

    Raises:
        ValueError: the span is negative, which the form cannot say.
    """
    if span < timedelta(0):
        raise ValueError("a time span cannot be negative")
    minutes, seconds = divmod(span.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days = f"{span.days}." if span.days else ""
    fraction = f".{span.microseconds * 10:07d}" if span.microseconds else ""
    return f"{days}{hours:02d}:{minutes:02d}:{seconds:02d}{fraction}"


def coerce(setting: Setting, value: Any) -> Any:
    """Return ``value`` as the type of ``setting``, or of one of its items.

    Text is converted wherever it came from; an empty text stands for null where the setting is
    nullable and no secret.

    Raises:
        ValueError: the value is of another kind.
    """
    if setting.nullable:
        if value is None:
            return None
        # An environment variable cannot be null; an empty one is how people write it. An empty
        # secret is a mistake in the deployment, and must not count as "none".
        if setting.kind is not Secret and isinstance(value, str) and not value.strip():
            return None
    # A program's own mapping may hold secrets as such, with their mark.
    if setting.kind is Secret and isinstance(value, Secret):
        return value
    if setting.kind is Secret or setting.kind is str:
        text = _text(value)
        return Secret(text) if setting.kind is Secret else text
    if setting.kind is bool:
        return _bool(value)
    if setting.kind is int:
        return _int(value)
    if setting.kind is float:
        return _float(value)
    if setting.kind is timedelta:
        return _timespan(value)
    return _choice(cast("type[StrEnum]", setting.kind), value)


def split_list(setting: Setting, value: Any) -> list[Any]:
    """Return the items of a list that may be a list, a JSON array in text, or text with commas.

    Raises:
        ValueError: the value is none of these.
    """
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str):
        raise ValueError(f"must be a list of text, not {shown(value)}")
    if not value:
        return []
    array = _json_array(value)
    if array is not None:
        return array
    # Variables hold one text, and orchestrators write lists into them in both ways.
    parts = [part.strip() for part in value.split(",")]
    # Any other text may hold a comma of its own: a secret is one item, however it looks.
    if setting.about.form in _COMMA_FORMS or all(
        part.startswith((HMAC_PREFIX, PUBLIC_KEY_PREFIX)) for part in parts
    ):
        return parts
    return [value]


def shown(value: Any) -> str:
    """Return how a message names a wrong value: its kind, or the value itself when short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = len(value) <= LONGEST_QUOTED
        return f"'{printable(value)}'" if short else "this text"
    if isinstance(value, Mapping | Pairs):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int | float):
        text = repr(value)
        return text if len(text) <= LONGEST_QUOTED else "this number"
    return f"a value of type {type(value).__name__}"


def _json_array(text: str) -> list[Any] | None:
    if not (text.startswith("[") and text.rstrip().endswith("]")):
        return None
    try:
        array = json.loads(text)
    except (ValueError, RecursionError):
        return None  # an address such as [::1] begins so, too
    return array if isinstance(array, list) else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Secret):
        return value.reveal()
    # datetime is a subclass of date, and a time of day is no ApiVersion.
    if type(value) is date:
        return value.isoformat()  # TOML has dates; ApiVersion is one
    raise ValueError(f"must be text in quotes, not {shown(value)}")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().casefold() if isinstance(value, str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"must be true or false, not {shown(value)}")


def _int(value: Any) -> int:
    # True is an int to Python, and "Workers: true" is a mistake to people.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INT.fullmatch(value.strip()):
        return int(value)
    raise ValueError(f"must be a whole number, not {shown(value)}")


def _float(value: Any) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    elif isinstance(value, str) and _FLOAT.fullmatch(value.strip()):
        number = float(value)
    if math.isfinite(number):
        return number
    raise ValueError(f"must be a number, not {shown(value)}")


def _timespan(value: Any) -> timedelta:
    if isinstance(value, str):
        return parse_timespan(value.strip())
    if isinstance(value, timedelta):
        # Through the text, so that an argument of a program is bounded as a file is.
        return parse_timespan(format_timespan(value))
    if isinstance(value, time):  # what TOML makes of 00:30:00 without quotes
        return parse_timespan(value.isoformat())
    raise ValueError(
        f"must be a time span in quotes, such as 30m, 2h or 00:30:00, not {shown(value)}"
    )


def _choice(kind: type[StrEnum], value: Any) -> StrEnum:
    word = value.strip().casefold() if isinstance(value, str) else None
    for member in kind:
        if member.value.casefold() == word:
            return member
    raise ValueError(f"must be one of {', '.join(kind)}, not {shown(value)}")


class Bound(msgspec.Struct, frozen=True):
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
    # All problems are collected: whoever starts a receiver at night wants to mend them in one go.
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
                # A whole list replaces what earlier layers said of single items; what is left of
                # them would be mixed into it.
                for item in [known for known in merged if known[: len(path)] == path]:
                    del merged[item]
            # The last one wins; the order of the layers is that of precedence.
            merged[path] = entry
    return merged


class _Binding:
    """Takes entries out of the merged layers, setting by setting."""

    def __init__(self, merged: _Merged) -> None:
        self.problems: list[Problem] = []
        # The settings of the items of lists of sections, which are there as often as they are
        # written, and those of all others.
        self._known: dict[tuple[str, ...], Setting] = dict(by_folded_path())
        self._sections = dict(sections())
        self._lengths: dict[str, int] = {}
        for setting in table():
            if setting.is_section_list:
                merged = self._numbered(setting, merged)
        self._items: dict[tuple[str, ...], dict[str, Entry]] = {}
        for path, entry in merged.items():
            parent = self._known.get(path[:-1])
            if parent is not None and parent.many and not parent.is_section_list:
                self._items.setdefault(path[:-1], {})[path[-1]] = entry
        # Entries that nobody takes out belong to no setting, and are reported at the end.
        self._unused = dict(merged)
        self.warnings: list[Problem] = []
        self.origins: dict[str, str] = {}

    def _numbered(self, setting: Setting, merged: _Merged) -> _Merged:
        """Return ``merged`` with each item of a list of sections as entries of its own."""
        whole = merged.pop(setting.folded, None)
        written = {} if whole is None else self._entries_of(setting, whole)
        depth = len(setting.folded)
        below = [path for path in merged if path[:depth] == setting.folded and len(path) > depth]
        for path in below:
            if _is_index(path[depth]):
                written[path] = merged.pop(path)
        # Indexes may have gaps, which count for nothing.
        indexes = sorted({path[depth] for path in written}, key=int)
        places = {name: str(place) for place, name in enumerate(indexes)}
        for path, entry in written.items():
            place = places[path[depth]]
            named = (*entry.path[:depth], place, *entry.path[depth + 1 :])
            merged[*setting.folded, place, *path[depth + 1 :]] = attrs.evolve(entry, path=named)
        for number in range(len(indexes)):
            rows = setting.item(number)
            self._known |= {row.folded: row for row in rows}
            self._sections[rows[0].folded[:-1]] = rows[0].path[:-1]
        self._lengths[setting.key] = len(indexes)
        return merged

    def _entries_of(self, setting: Setting, whole: Entry) -> _Merged:
        try:
            items = split_list(setting, whole.value)
        except ValueError as error:
            self.problems.append(Problem(setting.key, str(error), whole.origin))
            return {}
        found: _Merged = {}
        for index, item in enumerate(items):
            path = (*setting.path, str(index))
            if not isinstance(item, Mapping | Pairs):
                message = f"must be an object with keys of its own, not {shown(item)}"
                self.problems.append(Problem(full_key(path), message, whole.origin))
                continue
            layer = read_item(path, item, whole.origin)
            self.problems += layer.problems
            found[fold(path)] = Entry(path, {}, whole.origin)
            found |= {fold(entry.path): entry for entry in layer.entries}
        return found

    def value(self, setting: Setting) -> Any:
        """Return the value of one setting: bound, or its default."""
        if setting.is_section_list:
            return tuple(
                self._section(setting.item(place)) for place in range(self._lengths[setting.key])
            )
        if setting.many:
            return self._list(setting)
        entry = self._unused.pop(setting.folded, None)
        if entry is None:
            return setting.default
        return self._coerced(setting, entry, setting.key, setting.default)

    def _section(self, rows: Sequence[Setting]) -> Any:
        depth = len(rows[0].attributes) - 1
        values = {row.attributes[depth:]: self.value(row) for row in rows}
        kind = by_folded_path()[rows[0].folded[: depth - 1]].kind
        return _build(kind(), (), values)

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
        # Indexes may have gaps, which count for nothing.
        for index in sorted(entries):
            entry = entries[index]
            value = self._coerced(setting, entry, f"{setting.key}:{index}", _MISFIT)
            if entry.origin is not None:
                origins.append(entry.origin)
            if value is not _MISFIT:
                if entry.origin is not None:
                    # By its place in the result, which is what messages about the list count by.
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
            if _is_index(name):
                # An item is used up; a name that is no number stays, and is reported as no item.
                del self._unused[*setting.folded, name]
                entries[int(name)] = entry
        return entries if entries or whole is not None else None

    def leftovers(self) -> None:
        """Report what belongs to no setting: wrong kinds as problems, unknown keys as warnings."""
        reported: set[tuple[str, ...]] = set()
        for path, entry in self._unused.items():
            # The longest part that is known says where the mistake begins.
            known = next(path[:n] for n in range(len(path), -1, -1) if self._knows(path[:n]))
            place = path[: len(known) + 1]
            # One warning for a mistyped section, not one for each of its keys.
            if place in reported:
                continue
            reported.add(place)
            if known == path:
                self._misplaced_section(entry)
            elif (setting := self._known.get(known)) is not None:
                self._below_a_value(setting, entry)
            else:
                self.warnings.append(self._unknown(known, entry))

    def _misplaced_section(self, entry: Entry) -> None:
        # An empty section is how a file says that there is nothing in it.
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

    def _knows(self, path: tuple[str, ...]) -> bool:
        return path in self._known or path in self._sections

    def _unknown(self, known: tuple[str, ...], entry: Entry) -> Problem:
        """Return the warning about a key of which ``known`` is the part that exists."""
        depth = len(known) + 1
        paths = [*self._sections.values(), *(setting.path for setting in self._known.values())]
        suggestion = _similar(paths, known, fold(entry.path)[depth - 1])
        advice = f": did you mean {suggestion}?" if suggestion else IGNORED
        key = Entry(entry.path[:depth], None, None).key
        return Problem(key, f"{UNKNOWN_KEY}{advice}", entry.origin)


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= LONGEST_INDEX


def _similar(paths: Sequence[tuple[str, ...]], known: tuple[str, ...], name: str) -> str | None:
    """Return the full key that was probably meant: a neighbour, else any key of such a name."""
    import difflib  # on the path of a mistake only

    neighbours = {path[-1].casefold(): path for path in paths if path and fold(path[:-1]) == known}
    anywhere = {path[-1].casefold(): path for path in reversed(paths) if path}
    # A name that lacks its unit, such as ToleranceSeconds without the seconds.
    begun = {key[: len(name)]: path for key, path in neighbours.items() if len(name) >= 6}
    for candidates in (neighbours, begun, anywhere):
        matches = difflib.get_close_matches(name, candidates, n=1, cutoff=SIMILARITY)
        if matches:
            return full_key(candidates[matches[0]])
    return None


def _build(
    section: Section, attributes: tuple[str, ...], values: Mapping[tuple[str, ...], Any]
) -> Any:
    """Return ``section`` with the bound values below ``attributes`` in place."""

    def changed(name: str) -> Any:
        inner = (*attributes, name)
        return values[inner] if inner in values else _build(getattr(section, name), inner, values)

    return type(section)(**{name: changed(name) for name in section.__struct_fields__})
