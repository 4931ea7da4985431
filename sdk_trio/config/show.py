"""The settings for readers: rows with their origins, and the JSON Schema of a file. Pure.

Secrets are masked by type. Both come from the metadata, so they cannot differ from the settings;
``make generate`` makes docs/reference/configuration.md from the same metadata.
"""

import re
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec

from .bind import format_timespan
from .fields import PATTERNS
from .options import Settings
from .secret import MASK, Secret
from .table import ROOT, Setting, rows, table

DEFAULT_ORIGIN = "default"

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_TIMESPAN = (
    r"^([0-9]{1,9}[smhd]|([0-9]{1,8}\.)?([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,7})?)$"
)
_JSON_TYPES: Mapping[type, str] = {int: "integer", float: "number", bool: "boolean"}


class SettingRow(msgspec.Struct, frozen=True):
    """One setting as ``config show`` shows it."""

    key: str
    value: str
    origin: str


def describe(
    settings: Settings, origins: Mapping[str, str] | None = None
) -> tuple[SettingRow, ...]:
    """Return a row for each setting, in the order of the configuration page.

    Args:
        settings: the settings to show.
        origins: where each key came from (``Loaded.origins``); missing keys have their defaults.
    """
    known = origins or {}
    return tuple(
        SettingRow(setting.key, _shown(setting, settings), known.get(setting.key, DEFAULT_ORIGIN))
        for setting in rows(settings)
    )


def _shown(setting: Setting, settings: Settings) -> str:
    value = setting.of(settings)
    return masked_url(value) if setting.about.masked and value else shown_value(value)


def masked_url(url: str) -> str:
    """Return a URL reduced to its scheme and host: the rest may be a credential."""
    scheme, separator, rest = url.partition("://")
    # Without a parser: an unparsable URL must be masked as well.
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    # A user or a password, or not a URL: show nothing of it.
    if not separator or "@" in host:
        return MASK
    shown = f"{scheme}{separator}{host}"
    return f"{shown}/{MASK}" if rest.removeprefix(host).lstrip("/") else url


def shown_value(value: Any) -> str:
    """Return a value as written in a file; a secret is masked by its ``str``."""
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


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole file; only keys outside ``Sdk`` may be unknown.

    No key is required in a file: any setting may come from a variable or a secret store.
    """
    root = _section("Settings of the webhook receiver and client.")
    for setting in table():
        section = root
        for part in setting.path[:-1]:
            # A section is created by its first key.
            section = section["properties"].setdefault(part, _section())
        section["properties"][setting.path[-1]] = _property(setting)
    return {
        "$schema": DIALECT,
        "title": "sdk_trio settings",
        "type": "object",
        "properties": {ROOT: root},
    }


def _section(description: str | None = None) -> dict[str, Any]:
    section: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    return section if description is None else {"description": description, **section}


def _property(setting: Setting) -> dict[str, Any]:
    value = _value(setting)
    if setting.many:
        value = {"type": "array", "items": value}
    elif setting.nullable:
        value = {**value, "type": [value["type"], "null"]}
    described = {"description": _description(setting), **value}
    # No default for a secret: it would be copied.
    if setting.kind is not Secret:
        described["default"] = _schema_default(setting.default)
    return described


def _value(setting: Setting) -> dict[str, Any]:
    if setting.is_section_list:
        section = _section()
        section["properties"] = {each.path[-1]: _property(each) for each in setting.item(0)}
        return section
    if issubclass(setting.kind, StrEnum):
        return {"type": "string", "enum": [member.value for member in setting.kind]}
    if setting.kind is timedelta:
        return {"type": "string", "pattern": _TIMESPAN}
    value: dict[str, Any] = {"type": _JSON_TYPES.get(setting.kind, "string")}
    if setting.kind in (int, float):
        least, greatest = setting.bounds
        value |= {} if least is None else {"minimum": least}
        value |= {} if greatest is None else {"maximum": greatest}
    elif setting.about.form in PATTERNS:
        pattern, _ = PATTERNS[setting.about.form]
        # Empty text is valid in a file if it is the default, or means null.
        value["pattern"] = f"^({pattern})?$" if setting.default in ("", None) else f"^{pattern}$"
    return value


def _description(setting: Setting) -> str:
    about = setting.about
    unit = f" In {about.unit}." if about.unit else ""
    form = f" Form: {about.form.value}." if about.form else ""
    return f"{about.doc}{unit}{form}"


def _schema_default(value: Any) -> Any:
    if isinstance(value, timedelta):
        return format_timespan(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, StrEnum) else value
