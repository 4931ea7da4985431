"""Metadata of settings: range, form, unit, and whether a reload applies it. Pure.

Binding, checks, JSON Schema and the reference page read it from the fields of the option classes,
so that a setting is described in one place.
"""

import enum
from typing import Any

import attrs

_METADATA_KEY = "sdk_trio.about"


class Form(enum.Enum):
    """The form of a text; ``check.py`` checks it, the schema and the reference page name it."""

    HTTPS_URL = "absolute HTTPS URL (HTTP to this machine is allowed in Development)"
    HOOK_URL = "absolute HTTPS URL, also with a query (HTTP to this machine in Development)"
    URL = "absolute HTTP or HTTPS URL"
    API_VERSION = "ISO date, YYYY-MM-DD or YYYY-MM"
    ROUTE = "path that starts with /"
    HEADER = "name of an HTTP header"
    ENVIRONMENT_NAME = "letters, digits, _ and -"
    ENV_VAR = "name of an environment variable, never its value"
    SLUG = "1-64 lowercase letters, digits and hyphens, no hyphen at either end"
    PHONE = "phone number in E.164 format, such as +15551234567"
    EMAIL = "email address"
    HEADER_TEXT = "one line without control characters"
    HOST = "host name without a port"
    BIND = "HOST:PORT, [IPv6]:PORT, unix:PATH, unix:PATH?mode=0660, fd:N or fd:NAME"
    CIDR = "CIDR block or address"
    PROXY = "CIDR block, address, or unix"
    ABSOLUTE_PATH = "absolute path"
    SIGNING = "whsec_..., whpk_..., or the text that the upstream signs with"


@attrs.frozen
class SettingMetadata:
    """Metadata of one setting.

    ``doc`` is one plain sentence; ``minimum`` and ``maximum`` are inclusive, in ``unit``;
    ``required`` means that it may not be blank while its section is in use. ``key`` replaces the
    name that is derived from the attribute. ``default_note`` says what a null default stands for.
    ``live`` means that a reload puts a change into force; others wait for the next start.
    ``masked`` means a URL whose path lets whoever knows it send: no more than its host is shown.
    """

    doc: str
    minimum: float | None = None
    maximum: float | None = None
    unit: str | None = None
    form: Form | None = None
    required: bool = False
    key: str | None = None
    default_note: str | None = None
    live: bool = False
    masked: bool = False


def about(doc: str, **details: Any) -> dict[str, SettingMetadata]:
    """Return field metadata that holds a :class:`SettingMetadata`.

    Args:
        doc: the meaning of the setting, one sentence.
        details: further fields of the record.
    """
    return {_METADATA_KEY: SettingMetadata(doc, **details)}


def about_field(field: "attrs.Attribute[Any]") -> SettingMetadata | None:
    """Return the :class:`SettingMetadata` of an attrs field, or None for a nested section."""
    found = field.metadata.get(_METADATA_KEY)
    return found if isinstance(found, SettingMetadata) else None


def pascal_case(name: str) -> str:
    """Return the key of an attribute: ``retry_base_seconds`` becomes ``RetryBaseSeconds``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
