"""All settings in one list, read from the option classes, and which are in use. Pure.

Binding, checks, probing, JSON Schema and the reference page all use this list. A disabled section
is not validated.
"""

import functools
from collections.abc import Collection, Iterable
from typing import Any, get_args, get_origin

import msgspec

from ..records.channels import CHANNELS, NotificationChannel
from .fields import (
    AlertChannel,
    DefaultTenantStrategy,
    ReplicaTargetType,
    Section,
    SettingMetadata,
    fields_of,
    pascal_case,
)
from .options import Settings
from .options.notifications import TemplatesOptions, enabled_channels

ROOT = "Sdk"
SEPARATOR = ":"

#: The original's ``int`` has 32 bits; this bounds every integer without its own maximum.
GREATEST_INT = 2**31 - 1


class Setting(msgspec.Struct, frozen=True):
    """One setting: its key, its type, and its metadata.

    ``path`` are the parts of the key below the root, ``attributes`` the attribute names of the
    value, ``kind`` the type of the value or, with ``many``, of each item. Items may be sections
    (``is_section_list``): their settings are :meth:`item`'s.
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
        """Return the inclusive range of a number."""
        greatest = self.about.maximum
        if self.kind is int and greatest is None:
            greatest = GREATEST_INT
        return self.about.minimum, greatest

    @property
    def is_section_list(self) -> bool:
        """Return whether each item is a section with its own settings."""
        return issubclass(self.kind, Section)

    def item(self, index: int) -> tuple["Setting", ...]:
        """Return the settings of the item at ``index`` of a list of sections."""
        place = str(index)
        found = _walk(self.kind(), (*self.path, place), (*self.attributes, place))
        # A reload replaces the whole list.
        live = self.about.live
        return tuple(
            msgspec.structs.replace(each, about=msgspec.structs.replace(each.about, live=live))
            for each in found
        )

    def of(self, settings: Settings) -> Any:
        """Return this setting's value in ``settings``."""
        return functools.reduce(_part, self.attributes, settings)


def _part(value: Any, name: str) -> Any:
    return value[int(name)] if isinstance(value, tuple) else getattr(value, name)


def full_key(path: tuple[str, ...]) -> str:
    """Return the full key of a path below the root."""
    return SEPARATOR.join((ROOT, *path))


def fold(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path in the form used to compare keys."""
    return tuple(part.casefold() for part in path)


@functools.cache
def table() -> tuple[Setting, ...]:
    """Return every setting, in the order of the option classes."""
    # Read from an instance, because factories make some of the defaults.
    return tuple(_walk(Settings(), (), ()))


def rows(settings: Settings) -> tuple[Setting, ...]:
    """Return every setting; a list of sections is replaced by its items' settings."""
    found: list[Setting] = []
    for setting in table():
        if setting.is_section_list:
            # Known only with the settings: the list has as many sections as were written.
            items = range(len(setting.of(settings)))
            found += [row for index in items for row in setting.item(index)] or [setting]
        else:
            found.append(setting)
    return tuple(found)


@functools.cache
def by_folded_path() -> dict[tuple[str, ...], Setting]:
    """Return every setting under its folded path."""
    return {setting.folded: setting for setting in table()}


@functools.cache
def sections() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of all sections under their folded form; the root is ``()``."""
    paths = {s.path[:depth] for s in table() for depth in range(len(s.path))}
    return {fold(path): path for path in paths}


def _walk(section: Section, path: tuple[str, ...], attributes: tuple[str, ...]) -> list[Setting]:
    found: list[Setting] = []
    for name, annotation, known in fields_of(type(section)):
        default = getattr(section, name)
        where = ((*path, pascal_case(name)), (*attributes, name))
        if known is None:
            found += _walk(default, *where)
        else:
            kind, nullable, many = _shape(annotation)
            found.append(Setting(*where, kind, nullable, many, default, known))
    return found


def _shape(annotation: Any) -> tuple[type, bool, bool]:
    """Split ``X``, ``X | None`` and ``tuple[X, ...]`` into the type, nullable and many."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], False, True
    if isinstance(annotation, type):
        return annotation, False, False
    # The options use no other form; another one would raise here.
    (kind,) = (part for part in get_args(annotation) if part is not type(None))
    return kind, True, False


def bound_addresses(settings: Settings) -> list[tuple[str, str]]:
    """Return the addresses of the receiver and, if it is on, of the admin, with their keys."""
    addresses = [(f"Sdk:Server:Bind:{i}", bind) for i, bind in enumerate(settings.server.bind)]
    if settings.admin.enabled:
        addresses.append(("Sdk:Admin:Bind", settings.admin.bind))
    return addresses


# -- disabled sections --------------------------------------------------------------

REPLICATION = "Sdk:MultiTenant:FileDb:Replication"
SIMULATOR = "Sdk:Simulator"
FORWARD = "Sdk:Forward"
FORWARD_SECRET = f"{FORWARD}:SecretEnvVar"
NOTIFICATIONS = "Sdk:MultiTenant:Notifications"
ALERTS = "Sdk:Alerts"
UPGRADE = "Sdk:MultiTenant:SingleTenantUpgrade"

USE_REPLICATION = f"{REPLICATION}:UseReplication"
TARGET = f"{REPLICATION}:ReplicaTargetType"
NOTIFICATIONS_ENABLED = f"{NOTIFICATIONS}:Enabled"
ALERTS_ENABLED = f"{ALERTS}:Enabled"

#: The transitions that have templates, by their keys.
TRANSITIONS = tuple(map(pascal_case, TemplatesOptions.__struct_fields__))

STRATEGY = f"{UPGRADE}:DefaultTenantStrategy"


def _fold(key: str) -> str:
    return f"{key.casefold()}:"


#: The switches of whole sections, folded.
_GATES = tuple(map(_fold, (USE_REPLICATION, NOTIFICATIONS_ENABLED, ALERTS_ENABLED)))


def used_settings(settings: Settings, invalid: Collection[str] = ()) -> tuple[Setting, ...]:
    """Return the settings that no other setting disables.

    Args:
        settings: as bound.
        invalid: full keys that could not be bound. A section whose switch is among them counts as
            used, because it may have been meant to be on.
    """
    unused = _unused(settings, invalid)
    return tuple(row for row in rows(settings) if not _is_switched_off(row.key, unused))


def is_unused(key: str, settings: Settings, invalid: Collection[str] = ()) -> bool:
    """Return whether a key is in a disabled section, whatever its value."""
    return _is_switched_off(key, _unused(settings, invalid))


def is_below(key: str, prefix: str) -> bool:
    """Return whether ``key`` is ``prefix`` or below it, case-insensitively."""
    return _fold(key).startswith(_fold(prefix))


def _is_switched_off(key: str, unused: tuple[str, ...]) -> bool:
    folded = _fold(key)
    # The switches themselves are always checked: a typing error in one must not disable its
    # section.
    return folded.startswith(unused) and not folded.startswith(_GATES)


def _unused(settings: Settings, invalid: Collection[str]) -> tuple[str, ...]:
    """Return the folded prefixes of the keys that other settings disable."""
    replication = settings.multi_tenant.file_db.replication
    notifications = settings.multi_tenant.notifications
    enabled = enabled_channels(notifications)
    upgrade = settings.multi_tenant.single_tenant_upgrade
    # The simulator runs in Development only.
    prefixes: list[str] = [] if settings.is_development else [SIMULATOR]
    # Prefixes of keys: a section is disabled with everything in it.
    if not settings.forward.all_routes:
        prefixes.append(FORWARD_SECRET)
    if not replication.use_replication:
        prefixes.append(REPLICATION)
    prefixes += [
        f"{REPLICATION}:{target}"
        for target in ReplicaTargetType
        if TARGET in invalid or target is not replication.replica_target_type
    ]
    if not notifications.enabled:
        prefixes.append(NOTIFICATIONS)
    used: list[NotificationChannel] = []
    off: list[NotificationChannel] = []
    for channel in CHANNELS.values():
        is_known = f"{NOTIFICATIONS}:EnabledChannels:{channel.key}" not in invalid
        (used if is_known and channel.name in enabled else off).append(channel)
    prefixes += [f"{NOTIFICATIONS}:{channel.key}" for channel in off]
    prefixes += [
        f"{NOTIFICATIONS}:Templates:{transition}:{text}"
        for transition in TRANSITIONS
        for text in unused_texts(used, off)
    ]
    prefixes += _unused_of_alerts(settings, invalid)
    if (
        upgrade.default_tenant_strategy is not DefaultTenantStrategy.LITERAL_DEFAULT
        or STRATEGY in invalid
    ):
        prefixes += [f"{UPGRADE}:LiteralDefaultTenantSlug", f"{UPGRADE}:LiteralDefaultTenantName"]
    return tuple(map(_fold, prefixes))


def _unused_of_alerts(settings: Settings, invalid: Collection[str]) -> list[str]:
    alerts = settings.alerts
    if not alerts.enabled and ALERTS_ENABLED not in invalid:
        return [ALERTS]
    off = [channel for channel in AlertChannel if channel not in alerts.channels]
    recipients = [f"{ALERTS}:To"] if AlertChannel.EMAIL in off else []
    return [*(f"{ALERTS}:{channel}" for channel in off), *recipients]


def unused_texts(
    used: Iterable[NotificationChannel], off: Iterable[NotificationChannel]
) -> list[str]:
    """Return the texts that only disabled channels send; they are not checked."""
    needed = {text for channel in used for text in channel.texts}
    return sorted({text for channel in off for text in channel.texts} - needed)
