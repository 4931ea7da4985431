"""Every setting in one list, read from the option classes. Pure.

Binding, checks, probing, JSON Schema and the reference page all walk this list.
"""

import functools
from typing import Any, get_args, get_origin

import attrs

from .metadata import SettingMetadata, about_field, pascal_case
from .options import Settings

ROOT = "Sdk"
SEPARATOR = ":"

#: The original's ``int`` has 32 bits; it bounds every whole number without a maximum of its own.
GREATEST_INT = 2**31 - 1


@attrs.frozen
class Setting:
    """One setting: where it stands, what it holds, and what is known about it.

    ``path`` are the parts of the key below the root, ``attributes`` the attribute names that lead
    to the value, ``kind`` the type of the value or, with ``many``, of each item.
    """

    path: tuple[str, ...]
    attributes: tuple[str, ...]
    kind: type
    nullable: bool
    many: bool
    default: Any
    about: SettingMetadata

    @property
    def key(self) -> str:
        """Return the full key, such as ``Sdk:Webhooks:Path``."""
        return full_key(self.path)

    @property
    def folded(self) -> tuple[str, ...]:
        """Return the path for comparison: keys are case-insensitive."""
        return fold(self.path)

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Return the inclusive range that a number must be in."""
        greatest = self.about.maximum
        if self.kind is int and greatest is None:
            greatest = GREATEST_INT
        return self.about.minimum, greatest

    def of(self, settings: Settings) -> Any:
        """Return this setting's value in ``settings``."""
        return functools.reduce(getattr, self.attributes, settings)


def full_key(path: tuple[str, ...]) -> str:
    """Return the full key of a path below the root."""
    return SEPARATOR.join((ROOT, *path))


def fold(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the form of a path in which keys are compared."""
    return tuple(part.casefold() for part in path)


@functools.cache
def table() -> tuple[Setting, ...]:
    """Return every setting, in the order of the option classes."""
    return tuple(_walk(Settings(), (), ()))


@functools.cache
def by_folded_path() -> dict[tuple[str, ...], Setting]:
    """Return every setting under its folded path."""
    return {setting.folded: setting for setting in table()}


@functools.cache
def sections() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of all sections under their folded form; the root is ``()``."""
    paths = {s.path[:depth] for s in table() for depth in range(len(s.path))}
    return {fold(path): path for path in paths}


def _walk(section: Any, path: tuple[str, ...], attributes: tuple[str, ...]) -> list[Setting]:
    found: list[Setting] = []
    for field in attrs.fields(type(section)):
        known = about_field(field)
        key = (known.key if known else None) or pascal_case(field.name)
        default = getattr(section, field.name)
        where = ((*path, key), (*attributes, field.name))
        if known is None:
            found += _walk(default, *where)
        else:
            kind, nullable, many = _shape(field.type)
            found.append(Setting(*where, kind, nullable, many, default, known))
    return found


def _shape(annotation: Any) -> tuple[type, bool, bool]:
    """Split ``X``, ``X | None`` and ``tuple[X, ...]`` into the type, nullable and many."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], False, True
    if isinstance(annotation, type):
        return annotation, False, False
    (kind,) = (part for part in get_args(annotation) if part is not type(None))
    return kind, True, False
