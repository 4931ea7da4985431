"""Binding of text and JSON to the types of settings: one value, then whole layers. Pure.

:func:`coerce` converts one value of a file, variable or argument. It raises ``ValueError`` with a
message that completes a sentence; it quotes a value only if it is too short to be a misplaced
secret. :func:`bind` merges the layers and collects every problem. Binding checks types only;
``check.py`` checks values.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from typing import Any

import attrs
import msgspec

from ..base.times import parse_short_span
from ..errors import Problem
from .fields import Choice, Form, Section
from .options import Settings
from .secret import HMAC_PREFIX, PUBLIC_KEY_PREFIX, Secret
from .sources import Entry, Layer, Pairs, printable, read_item
from .table import Setting, by_folded_path, fold, full_key, sections, table

#: The most days that the original type can hold: 2**63 units of 100 ns.
MAXIMUM_DAYS = 10_675_199

_FORM = re.compile(
    r"(?:(?P<days>[0-9]{1,8})\.)?"
    r"(?P<hours>[0-9]{2}):(?P<minutes>[0-9]{2}):(?P<seconds>[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,7}))?"
)

#: Shorter than any usable secret (16 bytes).
LONGEST_QUOTED = 12

#: Words for true and false in addition to msgspec's.
_WORDS = {"yes": True, "on": True, "no": False, "off": False}

#: The completion of "must be" for a value of each type.
_EXPECTED: Mapping[type, str] = {
    str: "text in quotes",
    Secret: "text in quotes",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    timedelta: "a time span in quotes, such as 30m, 2h or 00:30:00",
}

#: Items of these forms contain no comma, so a list may be written with commas.
_COMMA_FORMS = frozenset({Form.BIND, Form.CIDR, Form.EMAIL, Form.PROXY})

#: The beginning of the message about an unknown key.
UNKNOWN_KEY = "is not a known key"
IGNORED = "; it is ignored"

#: The least similarity of two names for a "did you mean", from 0 to 1 (difflib's ratio).
SIMILARITY = 0.7

#: Digits of the largest index of a list item.
LONGEST_INDEX = 4

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
    # Python counts microseconds, the original units of 100 ns.
    microseconds = int((match["fraction"] or "").ljust(6, "0")[:6])
    return timedelta(
        days=days, hours=hours, minutes=minutes, seconds=seconds, microseconds=microseconds
    )


def format_timespan(span: timedelta) -> str:
    """Format a time span; zero days and fractions are omitted.

    Raises:
        ValueError: the span is negative, which the form cannot express.
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

    Text from any source is converted. Empty text means null if the setting is nullable and not a
    secret.

    Raises:
        ValueError: the value has another type.
    """
    kind: Any = setting.kind
    is_text = kind in (str, Secret)
    # TOML has dates and times, and a program's mapping may have time spans.
    if isinstance(value, timedelta):
        value = format_timespan(value)
    elif isinstance(value, time) or type(value) is date:
        value = value.isoformat()
    # An environment variable cannot be null, so people set it empty. An empty secret is a
    # deployment error, and must not count as "none".
    is_empty = isinstance(value, str) and kind is not Secret and not value.strip()
    if setting.nullable and (value is None or is_empty):
        return None
    if isinstance(value, str) and not is_text:
        value = value.strip()
        if kind is timedelta:
            return parse_timespan(value)
        if kind is bool:
            value = _WORDS.get(value.casefold(), value)
    try:
        # A number in a file is neither a boolean nor a time span without a unit.
        strict = kind in (bool, timedelta) and not isinstance(value, str)
        converted: Any = msgspec.convert(value, kind, strict=strict, dec_hook=_secret)
        # Too many digits, or a huge exponent, convert to infinity.
        if kind is float and not math.isfinite(converted):
            raise msgspec.ValidationError
    except (msgspec.ValidationError, SystemError):  # the latter for 10**400, up to msgspec 0.20
        # msgspec's message may quote the value, which may be a misplaced secret.
        expected = _EXPECTED.get(kind) or f"one of {', '.join(kind)}"
        raise ValueError(f"must be {expected}, not {shown(value)}") from None
    return converted


def _secret(kind: type, value: Any) -> Secret:
    """Convert types that msgspec does not know; a program's mapping may contain secrets."""
    if kind is Secret and isinstance(value, Secret | str):
        return value if isinstance(value, Secret) else Secret(value)
    raise TypeError


def split_list(setting: Setting, value: Any) -> list[Any]:
    """Return the items of a list, a JSON array in text, or text with commas.

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
    # A variable holds one text, and orchestrators write lists both ways.
    parts = [part.strip() for part in value.split(",")]
    # Any other text may contain a comma: a secret is one item, whatever it looks like.
    if (
        setting.about.form in _COMMA_FORMS
        or issubclass(setting.kind, Choice)
        or all(part.startswith((HMAC_PREFIX, PUBLIC_KEY_PREFIX)) for part in parts)
    ):
        return parts
    return [value]


def shown(value: Any) -> str:
    """Return how a message names a wrong value: its type, or the value itself if short."""
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
        return None  # an address such as [::1] starts like this
    return array if isinstance(array, list) else None


class Bound(msgspec.Struct, frozen=True):
    """The settings with all bound values (otherwise defaults), and the problems.

    ``origins`` has the origin of each full key that some layer sets; items of lists have their own
    keys.
    """

    settings: Settings
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    origins: Mapping[str, str]


def bind(layers: Iterable[Layer]) -> Bound:
    """Bind layers to settings; later layers win.

    A whole list replaces that of earlier layers; an indexed key (``Secrets:0``) replaces only that
    item. Never raises because of the layers' content.
    """
    layers = list(layers)
    binding = _Binding(_merge(layers))
    settings = binding.section(Settings(), (), table())
    binding.report_unused()
    # Collect all problems, so that one start reports everything to fix.
    return Bound(
        settings=settings,
        problems=(*(p for layer in layers for p in layer.problems), *binding.problems),
        warnings=(*(w for layer in layers for w in layer.warnings), *binding.warnings),
        origins=binding.origins,
    )


def _merge(layers: Iterable[Layer]) -> _Merged:
    """Return the winning entry of each folded path: that of the last layer."""
    merged: _Merged = {}
    for entry in (entry for layer in layers for entry in layer.entries):
        path = fold(entry.path)
        setting = by_folded_path().get(path)
        if setting is not None and setting.many:
            # A whole list replaces single items of earlier layers.
            for item in [known for known in merged if known[: len(path)] == path]:
                del merged[item]
        merged[path] = entry
    return merged


class _Binding:
    """Takes entries from the merged layers, setting by setting."""

    def __init__(self, merged: _Merged) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.origins: dict[str, str] = {}
        # Entries that no setting takes are reported at the end.
        self._unused = merged
        self._known: dict[tuple[str, ...], Setting] = dict(by_folded_path())
        self._sections = dict(sections())

    def section(self, section: Any, attributes: tuple[str, ...], rows: Iterable[Setting]) -> Any:
        """Return ``section`` with its bound values.

        Args:
            section: the defaults.
            attributes: the attribute names of the section.
            rows: its settings, including those of nested sections.
        """
        values = {
            row.attributes: (
                self._list(row) if row.many else self._value(row, row.path, row.default)
            )
            for row in rows
        }
        return _build(section, attributes, values)

    def _value(self, setting: Setting, path: tuple[str, ...], otherwise: Any) -> Any:
        entry = self._unused.pop(fold(path), None)
        if entry is None:
            return otherwise
        if entry.origin is not None:
            self.origins[full_key(path)] = entry.origin
        try:
            return coerce(setting, entry.value)
        except ValueError as error:
            self.problems.append(Problem(full_key(path), str(error), entry.origin))
            return otherwise

    def _list(self, setting: Setting) -> tuple[Any, ...]:
        whole = self._unused.pop(setting.folded, None)
        if whole is not None and whole.origin is not None:
            self.origins[setting.key] = whole.origin
        length = self._number_items(setting, whole)
        if whole is None and not length:
            return tuple(setting.default)
        if setting.is_section_list:
            return tuple(self._section_item(setting, place) for place in range(length))
        paths = [(*setting.path, str(place)) for place in range(length)]
        values = [self._value(setting, path, None) for path in paths]
        origins = [o for path in paths if (o := self.origins.get(full_key(path))) is not None]
        if origins:
            self.origins[setting.key] = ", ".join(dict.fromkeys(origins))
        return tuple(value for value in values if value is not None)

    def _section_item(self, setting: Setting, place: int) -> Any:
        rows = setting.item(place)
        self._known |= {row.folded: row for row in rows}
        self._sections[rows[0].folded[:-1]] = rows[0].path[:-1]
        return self.section(setting.kind(), (*setting.attributes, str(place)), rows)

    def _number_items(self, setting: Setting, whole: Entry | None) -> int:
        """Give each list item an entry under its index, and return their number.

        Indexes may have gaps, which are closed.
        """
        depth = len(setting.folded)
        items: _Merged = {}
        for entry in () if whole is None else self._items_of(setting, whole):
            items[fold(entry.path)] = entry
        for path in list(self._unused):
            at_depth = len(path) > depth if setting.is_section_list else len(path) == depth + 1
            if path[:depth] == setting.folded and at_depth and _is_index(path[depth]):
                items[path] = self._unused.pop(path)
        indexes = sorted({path[depth] for path in items}, key=int)
        places = {name: str(place) for place, name in enumerate(indexes)}
        for entry in items.values():
            named = (*setting.path, places[entry.path[depth]], *entry.path[depth + 1 :])
            self._unused[fold(named)] = attrs.evolve(entry, path=named)
        return len(indexes)

    def _items_of(self, setting: Setting, whole: Entry) -> Sequence[Entry]:
        """Return the entries of a list given as a whole."""
        try:
            items = split_list(setting, whole.value)
        except ValueError as error:
            self.problems.append(Problem(setting.key, str(error), whole.origin))
            return ()
        paths = [(*setting.path, str(index)) for index in range(len(items))]
        if not setting.is_section_list:
            return [Entry(*each, whole.origin) for each in zip(paths, items, strict=True)]
        layers = [read_item(*each, whole.origin) for each in zip(paths, items, strict=True)]
        self.problems += [problem for layer in layers for problem in layer.problems]
        return [entry for layer in layers for entry in layer.entries]

    def report_unused(self) -> None:
        """Report entries without a setting: wrong kinds as problems, unknown keys as warnings."""
        reported: set[tuple[str, ...]] = set()
        for path, entry in self._unused.items():
            # The longest known part shows where the mistake starts.
            known = next(path[:n] for n in range(len(path), -1, -1) if self._knows(path[:n]))
            place = path[: len(known) + 1]
            # One warning for a mistyped section, not one per key.
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
        # A file may contain an empty section.
        if entry.value is None or entry.value == {}:
            return
        message = f"is a section with keys of its own, not {shown(entry.value)}"
        self.problems.append(Problem(entry.key, message, entry.origin))

    def _below_a_value(self, setting: Setting, entry: Entry) -> None:
        message = (
            "is not an item of the list: items are numbered from 0"
            if setting.many
            else f"is not a setting: {setting.key} is a single value, not an object"
        )
        self.problems.append(Problem(entry.key, message, entry.origin))

    def _knows(self, path: tuple[str, ...]) -> bool:
        return path in self._known or path in self._sections

    def _unknown(self, known: tuple[str, ...], entry: Entry) -> Problem:
        """Return the warning about an unknown key, whose part ``known`` exists."""
        depth = len(known) + 1
        paths = [*self._sections.values(), *(setting.path for setting in self._known.values())]
        suggestion = _similar(paths, known, fold(entry.path)[depth - 1])
        advice = f": did you mean {suggestion}?" if suggestion else IGNORED
        key = Entry(entry.path[:depth], None, None).key
        return Problem(key, f"{UNKNOWN_KEY}{advice}", entry.origin)


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= LONGEST_INDEX


def _similar(paths: Sequence[tuple[str, ...]], known: tuple[str, ...], name: str) -> str | None:
    """Return the most similar key: a neighbour, or else any key of a similar name."""
    import difflib  # needed only for a mistake

    neighbours = {path[-1].casefold(): path for path in paths if path and fold(path[:-1]) == known}
    anywhere = {path[-1].casefold(): path for path in reversed(paths) if path}
    # A name without its unit, such as ToleranceSeconds without the seconds.
    begun = {key[: len(name)]: path for key, path in neighbours.items() if len(name) >= 6}
    for candidates in (neighbours, begun, anywhere):
        matches = difflib.get_close_matches(name, candidates, n=1, cutoff=SIMILARITY)
        if matches:
            return full_key(candidates[matches[0]])
    return None


def _build(
    section: Section, attributes: tuple[str, ...], values: Mapping[tuple[str, ...], Any]
) -> Any:
    """Return ``section`` with the bound values below ``attributes``."""

    def changed(name: str) -> Any:
        inner = (*attributes, name)
        return values[inner] if inner in values else _build(getattr(section, name), inner, values)

    return type(section)(**{name: changed(name) for name in section.__struct_fields__})
