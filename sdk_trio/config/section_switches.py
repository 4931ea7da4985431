"""The settings that count: a section that is switched off is not validated. Pure."""

from collections.abc import Collection, Iterable

import attrs

from ..records.channels import CHANNELS, NotificationChannel
from .choices import DefaultTenantStrategy, ReplicaTargetType
from .metadata import pascal_case
from .options import Settings
from .options.notifications import TemplatesOptions, enabled_channels
from .table import Setting, full_key, table

REPLICATION = full_key(("MultiTenant", "FileDb", "Replication"))
SIMULATOR = full_key(("Simulator",))
NOTIFICATIONS = full_key(("MultiTenant", "Notifications"))
UPGRADE = full_key(("MultiTenant", "SingleTenantUpgrade"))

USE_REPLICATION = f"{REPLICATION}:UseReplication"
TARGET = f"{REPLICATION}:ReplicaTargetType"
NOTIFICATIONS_ENABLED = f"{NOTIFICATIONS}:Enabled"

#: The transitions that have templates, by their keys.
TRANSITIONS = tuple(pascal_case(field.name) for field in attrs.fields(TemplatesOptions))

STRATEGY = f"{UPGRADE}:DefaultTenantStrategy"


def used_settings(settings: Settings, invalid: Collection[str] = ()) -> tuple[Setting, ...]:
    """Return the settings that the others do not switch off.

    Args:
        settings: what was bound.
        invalid: full keys that could not be bound; a section behind such a key is left alone,
            because nobody can tell whether it was meant to be on.
    """
    unused = _unused(settings, invalid)
    return tuple(setting for setting in table() if not _is_switched_off(setting.key, unused))


def is_unused(key: str, settings: Settings, invalid: Collection[str] = ()) -> bool:
    """Return whether a key lies in a section that is switched off, whatever it holds."""
    return _is_switched_off(key, _unused(settings, invalid))


def is_below(key: str, prefix: str) -> bool:
    """Return whether ``key`` is ``prefix`` or lies under it, without regard to case."""
    return f"{key.casefold()}:".startswith(f"{prefix.casefold()}:")


def _is_switched_off(key: str, unused: list[str]) -> bool:
    # The switches themselves are checked always: a typing error in one must not switch its section
    # off.
    if any(is_below(key, gate) for gate in (USE_REPLICATION, NOTIFICATIONS_ENABLED)):
        return False
    return any(is_below(key, prefix) for prefix in unused)


def _unused(settings: Settings, invalid: Collection[str]) -> list[str]:
    replication = settings.multi_tenant.file_db.replication
    notifications = settings.multi_tenant.notifications
    enabled = enabled_channels(notifications)
    upgrade = settings.multi_tenant.single_tenant_upgrade
    prefixes: list[str] = [] if settings.is_development else [SIMULATOR]
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
    if (
        upgrade.default_tenant_strategy is not DefaultTenantStrategy.LITERAL_DEFAULT
        or STRATEGY in invalid
    ):
        prefixes += [f"{UPGRADE}:LiteralDefaultTenantSlug", f"{UPGRADE}:LiteralDefaultTenantName"]
    return prefixes


def unused_texts(
    used: Iterable[NotificationChannel], off: Iterable[NotificationChannel]
) -> list[str]:
    """Return the texts that only channels send which are off; nobody needs them to be right."""
    needed = {text for channel in used for text in channel.texts}
    return sorted({text for channel in off for text in channel.texts} - needed)
