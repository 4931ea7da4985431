"""Text that every store and every encoder can hold."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]")


def storable(value: T) -> T:
    """Return ``value`` with U+FFFD for each half of a surrogate pair, at any depth.

    JSON and file names can bring such a half into a text, and UTF-8 cannot encode it.
    """
    return cast("T", _storable(value))


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_storable(name): _storable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value, **{name: _storable(each) for name, each in msgspec.structs.asdict(value).items()}
        )
    return value
