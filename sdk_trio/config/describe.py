"""The settings as rows for people: key, value with secrets masked by type, and origin. Pure."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import attrs

from .options import Settings
from .secret import MASK
from .table import Setting, table
from .timespan import format_timespan

DEFAULT_ORIGIN = "default"


@attrs.frozen
class Row:
    """One setting as ``config show`` shows it."""

    key: str
    value: str
    origin: str


def describe(settings: Settings, origins: Mapping[str, str] | None = None) -> tuple[Row, ...]:
    """Return a row for each setting, in the order of the specification.

    Args:
        settings: the settings to show.
        origins: where each key came from (``Loaded.origins``); what is not in it is a default.
    """
    known = origins or {}
    return tuple(
        Row(setting.key, _shown(setting, settings), known.get(setting.key, DEFAULT_ORIGIN))
        for setting in table()
    )


def _shown(setting: Setting, settings: Settings) -> str:
    value = setting.of(settings)
    return masked_url(value) if setting.about.masked and value else shown_value(value)


def masked_url(url: str) -> str:
    """Return a URL with no more of it than its scheme and host: the rest may be a credential."""
    scheme, separator, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if not separator or "@" in host:
        return MASK
    shown = f"{scheme}{separator}{host}"
    return f"{shown}/{MASK}" if rest.removeprefix(host).lstrip("/") else url


def shown_value(value: Any) -> str:
    """Return a value as it would be written in a file; a secret is masked by its ``str``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(shown_value(item) for item in value)}]"
    if isinstance(value, timedelta):
        return format_timespan(value)
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value)
