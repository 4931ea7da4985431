"""One value of a file, variable or argument as the type that its setting has. Pure.

Every function raises ``ValueError`` with a message that completes a sentence. A value is quoted
only when it is too short to be a secret that was put under a wrong key.
"""

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time, timedelta
from enum import StrEnum
from typing import Any, cast

from .about import Form
from .layers import Pairs, printable
from .secret import Secret
from .secrets import HMAC_PREFIX, PUBLIC_KEY_PREFIX
from .table import Setting
from .timespan import format_timespan, parse_timespan

#: Shorter than any usable secret (16 bytes).
LONGEST_QUOTED = 12

_INT = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})

#: Items of these forms hold no comma, so that a list may be written with commas.
_COMMA_FORMS = frozenset({Form.BIND, Form.CIDR, Form.PROXY})


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
        if setting.kind is not Secret and isinstance(value, str) and not value.strip():
            return None
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
    parts = [part.strip() for part in value.split(",")]
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
        return "this number"
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
        return parse_timespan(format_timespan(value))
    if isinstance(value, time):  # what TOML makes of 00:30:00 without quotes
        return parse_timespan(value.isoformat())
    raise ValueError(f"must be a time span in quotes, [d.]hh:mm:ss, not {shown(value)}")


def _choice(kind: type[StrEnum], value: Any) -> StrEnum:
    word = value.strip().casefold() if isinstance(value, str) else None
    for member in kind:
        if member.value.casefold() == word:
            return member
    raise ValueError(f"must be one of {', '.join(kind)}, not {shown(value)}")
