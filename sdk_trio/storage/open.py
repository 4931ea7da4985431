"""The opening of the store that the settings name.

:func:`open_store` opens everything, :func:`open_inbox` the inbox without tenants;
``storage.ports`` describes them.
"""

import enum
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ..errors import OptionsValidationError, Problem
from .admission import LeaseTerms

if TYPE_CHECKING:
    from ..config import Settings
    from .engines.postgres_address import PostgresAddress
    from .ports import Inbox, Store

#: Default duration of a lease without renewal, in seconds. It is longer than most stalls of a store
#: or of a process, after which the runs continue. The events of a process that ended wait for the
#: end of its leases, unless its end is noticed.
LEASE_SECONDS = 75.0

# Longer than the store's own waits for a hanging disk, so that the error comes from the store and
# not from this scope. A shield without a deadline could never be ended.
_STORE_CLOSE_SECONDS = 60.0

__all__ = ["LEASE_SECONDS", "StoreUse", "open_inbox", "open_store"]


class StoreUse(enum.Enum):
    """The role of this process among those that have the store of one data directory open."""

    COMMAND = enum.auto()
    """A command, with or without a running runtime."""
    RUNTIME = enum.auto()
    """The only process of a runtime: it holds the lock of the data directory and runs deliveries.
    It need not await the claim of a new key (docs/adr/0047-unawaited-claims.md)."""
    SUPERVISOR = enum.auto()
    """It holds the lock of the data directory; its worker processes run the deliveries."""
    WORKER = enum.auto()
    """One of several processes that run deliveries."""

    @property
    def holds_lock(self) -> bool:
        """Whether no other runtime uses the store: the process has the data directory's lock."""
        return self in (StoreUse.RUNTIME, StoreUse.SUPERVISOR)


@asynccontextmanager
async def open_store(
    settings: "Settings",
    *,
    owner: str,
    lease_seconds: float = LEASE_SECONDS,
    use: StoreUse = StoreUse.COMMAND,
) -> "AsyncIterator[Store]":
    """Open the store that ``settings.storage`` names, and close it at the end of the block.

    It does not take the lock of the data directory: the runtime does, and commands work while a
    daemon runs.

    Args:
        settings: validated settings; ``storage`` and the retentions of ``webhooks`` are used.
        owner: the name that holds the leases taken here; not empty, unique among living processes.
        lease_seconds: duration of a lease without renewal, in seconds; above 0.
        use: the role of this process.

    Raises:
        OptionsValidationError: the extra of the backend or its connection string is missing.
        StoreVersionError: the store is of a newer version or of another program.
        StoreUnavailableError: it cannot be opened or written.

    On cancellation, a started opening is finished and closed again; see :meth:`Inbox.close`.
    """
    store = await _open(settings, owner, lease_seconds, use)
    try:
        yield store
    finally:
        with trio.move_on_after(_STORE_CLOSE_SECONDS, shield=True):
            await store.close()


@asynccontextmanager
async def open_inbox(
    settings: "Settings", *, owner: str, lease_seconds: float = LEASE_SECONDS
) -> "AsyncIterator[Inbox]":
    """Open the inbox without tenants; otherwise as :func:`open_store`."""
    async with open_store(settings, owner=owner, lease_seconds=lease_seconds) as store:
        yield store


async def _open(settings: "Settings", owner: str, lease_seconds: float, use: StoreUse) -> "Store":
    await trio.lowlevel.checkpoint()
    backend = str(settings.storage.backend)
    terms = LeaseTerms(
        owner=owner,
        lease_seconds=lease_seconds,
        dedup_seconds=settings.webhooks.dedup_retention_hours * 3600.0,
        payload_seconds=settings.webhooks.payload_retention_days * 86_400.0,
        shared_by_hosts=backend == "Postgres",
    )
    # Imported here, because SQLite takes 4 MB, which a store in memory does not need, and psycopg
    # is an extra.
    if backend == "Memory":
        from .memory.inbox import MemoryInbox

        await trio.lowlevel.checkpoint()
        return MemoryInbox(terms)
    if backend == "Sqlite":
        from ..base.private_files import create_data_directory
        from .claims_file import CLAIMS_NAME
        from .data_directory import DATABASE_NAME
        from .engines.sqlite import WRITE_LOCK_NAME
        from .sqlite_inbox import SqliteInbox

        directory = create_data_directory(settings.storage.path)
        write_lock = directory / WRITE_LOCK_NAME
        # Without this lock, a command would wait for a moment without a writer, which may never
        # come while several processes are busy.
        needs_lock = use in (StoreUse.SUPERVISOR, StoreUse.WORKER) or (
            use is StoreUse.COMMAND and write_lock.exists()
        )
        return await SqliteInbox.open(
            directory / DATABASE_NAME,
            terms,
            claims=directory / CLAIMS_NAME if use is StoreUse.RUNTIME else None,
            write_lock=write_lock if needs_lock else None,
            distrust_log=use.holds_lock,
        )
    address = postgres_address(settings)
    from .postgres_inbox import PostgresInbox

    return await PostgresInbox.open(address, terms)


def postgres_address(
    settings: "Settings", environ: Mapping[str, str] = os.environ
) -> "PostgresAddress":
    """Return the database that the settings name, with the connection string of its variable.

    Raises:
        OptionsValidationError: the variable is not set, or the extra is not installed.
    """
    try:
        from .engines.postgres_address import PostgresAddress
    except ModuleNotFoundError as error:
        raise OptionsValidationError(
            [
                Problem(
                    "Sdk:Storage:Backend",
                    f"Postgres needs the module {error.name}: pip install 'sdk-trio[postgres]'",
                )
            ]
        ) from None

    variable = settings.storage.postgres_dsn_env_var
    dsn = environ.get(variable, "").strip()
    if not dsn:
        raise OptionsValidationError(
            [
                Problem(
                    "Sdk:Storage:PostgresDsnEnvVar",
                    f"names the variable {variable}, which is not set: set it to a connection "
                    "string, such as postgresql://USER:PASSWORD@HOST/DATABASE",
                )
            ]
        )
    return PostgresAddress(dsn=dsn, schema=settings.storage.postgres_schema)
