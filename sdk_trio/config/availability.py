"""What keeps the runtime from starting with valid settings: parts that are missing. Pure.

Apart from ``rules.py``, so that a file which conforms to the specification can always be loaded;
the runtime refuses to start instead, with :class:`~sdk_trio.errors.NotInThisVersionError`.
"""

from ..errors import Problem
from .choices import StorageBackend
from .options import Settings
from .table import full_key


def missing_parts(settings: Settings) -> list[Problem]:
    """Return one problem for each part that is asked for and missing; empty when all are there."""
    asked: list[tuple[bool, tuple[str, ...], str, str]] = [
        (
            settings.storage.backend is StorageBackend.POSTGRES,
            ("Storage", "Backend"),
            "the PostgreSQL store",
            "Sqlite",
        ),
        (
            settings.server.processes > 1,
            ("Server", "Processes"),
            "more than one receiver process",
            "1",
        ),
        (settings.relay.enabled, ("Relay", "Enabled"), "the relay", "false"),
    ]
    return [
        Problem(full_key(path), f"not in this version: {part}; remove the key or set it to {value}")
        for wanted, path, part, value in asked
        if wanted
    ]


def unmet_needs(settings: Settings) -> list[Problem]:
    """Return one problem for each part that is asked for without what it works on."""
    multi_tenant = settings.multi_tenant
    if multi_tenant.enabled:
        return []
    asked: list[tuple[bool, tuple[str, ...], str]] = [
        (
            multi_tenant.file_db.replication.use_replication,
            ("FileDb", "Replication", "UseReplication"),
            "whose databases are replicated",
        ),
        (
            multi_tenant.notifications.enabled,
            ("Notifications", "Enabled"),
            "whose site managers are told",
        ),
    ]
    return [
        Problem(
            full_key(("MultiTenant", *path)),
            f"needs tenants, {why}: set Sdk:MultiTenant:Enabled to true, or remove the key",
        )
        for wanted, path, why in asked
        if wanted
    ]
