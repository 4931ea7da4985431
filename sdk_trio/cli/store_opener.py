"""The inbox of a command, opened beside a daemon or without one."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ..config import Settings, StorageBackend
from ..errors import StoreUnavailableError
from ..storage.open import open_inbox
from ..storage.ports import Inbox
from ..storage.sqlite.schema import DATABASE_NAME


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Inbox]:
    """Open the existing inbox; a command that only reads creates nothing.

    Raises:
        StoreUnavailableError: there is none yet, it is in another process's memory, or it cannot
            be opened.
        StorageError: as of ``open_inbox``.
    """
    missing = why_unreachable(settings)
    if missing is not None:
        raise StoreUnavailableError(missing)
    async with open_inbox(settings, owner=f"command-{uuid.uuid4()}") as inbox:
        yield inbox


def why_unreachable(settings: Settings) -> str | None:
    """Return the reason why a command cannot reach the inbox, or None."""
    if settings.storage.backend is StorageBackend.MEMORY:
        return (
            "Sdk:Storage:Backend is Memory: the events are in the running process alone, where "
            "no command can reach them; use Sqlite"
        )
    file = Path(settings.storage.path) / DATABASE_NAME
    if settings.storage.backend is StorageBackend.SQLITE and not file.exists():
        return (
            f"there is no inbox at {file.absolute()}: start a receiver first (run, dev), or name "
            "its data directory with --set Sdk:Storage:Path=..."
        )
    return None
