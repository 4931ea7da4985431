"""The opening of the store that the settings name.

:func:`open_store` opens everything, :func:`open_inbox` the inbox without tenants;
``storage.ports`` says what they do.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ..errors import OptionsValidationError, Problem

if TYPE_CHECKING:
    from ..config import Settings
    from .engines.postgres_address import PostgresAddress
    from .memory.inbox import MemoryInbox
    from .ports import Inbox, Store
    from .postgres_inbox import PostgresInbox
    from .sqlite_inbox import SqliteInbox

#: Duration of a lease without renewal, in seconds, unless the caller gives another. It is longer
#: than most stalls of a store or of a process, after which its runs go on. The events of a process
#: that is gone wait for its end where no one knows that it is gone.
LEASE_SECONDS = 75.0

# Longer than the store's own waits for a hanging disk, so that the store words the error and not
# this scope. A shield without a deadline could never be ended.
_CLOSE_SECONDS = 60.0

__all__ = ["LEASE_SECONDS", "open_inbox", "open_store"]


@asynccontextmanager
async def open_store(
    settings: "Settings",
    *,
    owner: str,
    lease_seconds: float = LEASE_SECONDS,
    sole: bool = False,
    claims: bool = True,
    in_turn: bool = False,
) -> "AsyncIterator[Store]":
    """Open the store that ``settings.storage`` names, and close it at the end of the block.

    It does not take the lock of the data directory: the runtime does, and commands work beside a
    running daemon.

    Args:
        settings: validated settings; ``storage`` and the retentions of ``webhooks`` are used.
        owner: the name that holds the leases taken here; not empty, unique among living processes.
        lease_seconds: duration of a lease without renewal, in seconds; above 0.
        sole: the caller holds the lock of the data directory, so no other runtime uses the store.
        claims: with ``sole``, this process alone runs deliveries, so that the claim of a new key
            need not be waited for (docs/adr/0047-unawaited-claims.md).
        in_turn: several processes run deliveries on this store.

    Raises:
        OptionsValidationError: the extra of the backend or its connection string is missing.
        StoreVersionError: the store is of a newer version or of another program.
        StoreUnavailableError: it cannot be opened or written.

    Cancelled, what was begun is finished and closed; see :meth:`Inbox.close`.
    """
    from .ports import Store

    inbox = await _open(
        settings, owner, lease_seconds, sole=sole, claims=sole and claims, in_turn=in_turn
    )
    try:
        yield Store(inbox)
    finally:
        with trio.move_on_after(_CLOSE_SECONDS, shield=True):
            await inbox.close()


@asynccontextmanager
async def open_inbox(
    settings: "Settings", *, owner: str, lease_seconds: float = LEASE_SECONDS
) -> "AsyncIterator[Inbox]":
    """Open the inbox without tenants; otherwise as :func:`open_store`."""
    async with open_store(settings, owner=owner, lease_seconds=lease_seconds) as store:
        yield store.inbox


async def _open(
    settings: "Settings",
    owner: str,
    lease_seconds: float,
    *,
    sole: bool,
    claims: bool,
    in_turn: bool,
) -> "MemoryInbox | SqliteInbox | PostgresInbox":
    await trio.lowlevel.checkpoint()
    backend = str(settings.storage.backend)
    dedup_seconds = settings.webhooks.dedup_retention_hours * 3600.0
    payload_seconds = settings.webhooks.payload_retention_days * 86_400.0
    # Imported here, because SQLite takes 4 MB, which a store in memory does not need, and psycopg
    # is an extra.
    if backend == "Memory":
        from .memory.inbox import MemoryInbox

        await trio.lowlevel.checkpoint()
        return MemoryInbox(
            owner=owner,
            lease_seconds=lease_seconds,
            dedup_seconds=dedup_seconds,
            payload_seconds=payload_seconds,
        )
    if backend == "Sqlite":
        from ..base.private_files import create_data_directory
        from .claims import CLAIMS_NAME
        from .engines.sqlite import TURN_NAME
        from .sql.schema import DATABASE_NAME
        from .sqlite_inbox import SqliteInbox

        directory = create_data_directory(settings.storage.path)
        turn = directory / TURN_NAME
        return await SqliteInbox.open(
            directory / DATABASE_NAME,
            owner=owner,
            lease_seconds=lease_seconds,
            dedup_seconds=dedup_seconds,
            payload_seconds=payload_seconds,
            claims=directory / CLAIMS_NAME if claims else None,
            # A command that did not queue up would wait for a moment without a writer, which beside
            # several busy processes may not come.
            turn=turn if in_turn or (not sole and turn.exists()) else None,
            distrust_log=sole,
        )
    address = postgres_address(settings)
    from .postgres_inbox import PostgresInbox

    return await PostgresInbox.open(
        address,
        owner=owner,
        lease_seconds=lease_seconds,
        dedup_seconds=dedup_seconds,
        payload_seconds=payload_seconds,
    )


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
