"""Documented parts that this version does not contain. Pure.

Apart from ``rules.py``, so that a file which conforms to the specification can always be loaded;
the runtime refuses to start instead, with :class:`~sdk_trio.errors.NotInThisVersionError`.
"""

from ..errors import Problem
from .choices import StorageBackend
from .options import Settings
from .table import full_key


def missing_parts(settings: Settings) -> list[Problem]:
    """Return one problem for each part that is asked for and missing; empty when all are there."""
    replication = settings.multi_tenant.file_db.replication
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
        (
            replication.use_replication,
            ("MultiTenant", "FileDb", "Replication", "UseReplication"),
            "replication",
            "false",
        ),
    ]
    return [
        Problem(full_key(path), f"not in this version: {part}; remove the key or set it to {value}")
        for wanted, path, part, value in asked
        if wanted
    ]
