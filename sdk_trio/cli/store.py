"""Open the store for a command, with or without a running daemon, and name its actor."""

import getpass
import os
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio

from ..admin.query import LONGEST_ACTOR, LONGEST_REASON, BadQueryError, check_line
from ..config import Settings, StorageBackend
from ..config.options.sources import SourceOptions
from ..errors import StoreUnavailableError, TenantsDisabledError
from ..storage import open as storage
from ..storage.data_directory import DATABASE_NAME
from ..storage.ports import Inbox, Store
from ..tenants.identity import is_tenant_id
from ..tenants.service import TenantService
from .parse import UsageError
from .settings import load
from .terminal import say

if TYPE_CHECKING:
    from ..storage.sql.alerts import AlertStore

T = TypeVar("T")


@asynccontextmanager
async def open_inbox(settings: Settings) -> AsyncIterator[Inbox]:
    """Open the existing inbox; a command that only reads creates nothing.

    Raises:
        StoreUnavailableError: the inbox does not exist yet, is in another process's memory, or
            cannot be opened.
        StorageError: see ``storage.open_inbox``.
    """
    missing = why_unreachable(settings)
    if missing is not None:
        raise StoreUnavailableError(missing)
    # A separate owner: leases of a command must not be confused with those of the daemon.
    async with storage.open_inbox(settings, owner=f"command-{uuid.uuid4()}") as inbox:
        yield inbox


@asynccontextmanager
async def open_alerts(settings: Settings) -> AsyncIterator["AlertStore"]:
    """Open the alerts of the existing store; errors are those of :func:`open_inbox`."""
    missing = why_unreachable(settings)
    if missing is not None:
        raise StoreUnavailableError(missing)
    async with _opened(settings) as store:
        yield store.alerts


def why_unreachable(settings: Settings) -> str | None:
    """Return the reason why a command cannot reach the inbox, or None."""
    if settings.storage.backend is StorageBackend.MEMORY:
        return (
            "Sdk:Storage:Backend is Memory: only the running process can read its data. Set it to "
            "Sqlite to use this command"
        )
    # A command that reads creates nothing: a mistyped path would create an empty store, which the
    # next command would use.
    file = Path(settings.storage.path) / DATABASE_NAME
    if settings.storage.backend is not StorageBackend.SQLITE:
        return None
    try:
        file.stat()
    except PermissionError:
        # Usually an operator's account, while the directory belongs to the receiver's user.
        return (
            f"this user may not read {file.parent.absolute()}: run the command as the receiver's "
            "user, for example with sudo -u USER"
        )
    except OSError:
        return (
            f"there is no store at {file.absolute()}: start a receiver first (run, dev), or name "
            "its data directory with --set Sdk:Storage:Path=..."
        )
    return None


def require_tenants(settings: Settings) -> None:
    """Raise if a command cannot work on the tenants of these settings.

    Raises:
        TenantsDisabledError: tenants are disabled.
        StoreUnavailableError: the store does not exist, or is in another process's memory.
    """
    if not settings.multi_tenant.enabled:
        raise TenantsDisabledError(
            "Sdk:MultiTenant:Enabled is false, so there are no tenants: set it to true"
        )
    missing = why_unreachable(settings)
    if missing is not None:
        raise StoreUnavailableError(missing)


def actor_of(arguments: Namespace) -> str:
    """Return the actor for the audit trail: ``--actor``, or ``cli:`` and the login name."""
    if arguments.actor is not None:
        return str(arguments.actor)
    try:
        # The prefix distinguishes a person at a shell from a program that uses the API.
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError, ImportError):  # a user id without a name, as in containers
        return f"cli:{os.getuid()}" if hasattr(os, "getuid") else "cli"


def checked_actor(arguments: Namespace) -> str:
    """Return the actor as :func:`actor_of`, checked as the API checks it; raise UsageError."""
    actor = actor_of(arguments)
    _check_line("actor", actor, LONGEST_ACTOR)
    return actor


def checked_reason(arguments: Namespace) -> str | None:
    """Return ``--reason``, checked as the API checks it; raise UsageError."""
    reason: str | None = arguments.reason
    _check_line("reason", reason, LONGEST_REASON)
    return reason


def _check_line(name: str, text: str | None, longest: int) -> None:
    try:
        check_line(name, text, longest)
    except BadQueryError as error:
        raise UsageError(f"--{error}") from None


def run_with_tenants(
    arguments: Namespace,
    use: Callable[[TenantService], Awaitable[T]],
    *,
    creates: bool = False,
) -> T:
    """Call ``use`` with the tenants of the configured store and return its result.

    Args:
        arguments: the parsed arguments.
        use: called with the tenants.
        creates: whether to create the store if it does not exist.

    Raises:
        OptionsValidationError: the settings are wrong.
        StorageError: the store cannot be opened, or there is none and ``creates`` is false.
    """
    settings = load(arguments)
    if creates and not settings.multi_tenant.enabled:
        # A note, not an error: tenants are often added before the setting is enabled.
        say("note: Sdk:MultiTenant:Enabled is false, so a runtime ignores tenants")

    async def work() -> T:
        async with open_tenants(settings, creates=creates) as service:
            return await use(service)

    return trio.run(work)


@asynccontextmanager
async def open_tenants(
    settings: Settings, *, creates: bool = False
) -> AsyncIterator[TenantService]:
    """Open the tenants; see :func:`run_with_tenants`."""
    missing = why_unreachable(settings)
    # A store in memory belongs to another process: there is nothing to create.
    in_memory = settings.storage.backend is StorageBackend.MEMORY
    if missing is not None and (in_memory or not creates):
        raise StoreUnavailableError(missing)
    if missing is not None:
        # Report it, because a mistyped directory creates a store that is never used.
        say(f"note: {missing.partition(':')[0]}, so a new one is created")
    async with _opened(settings) as store:
        yield TenantService(settings, store.tenants)


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Open the existing store of an installation with tenants, with or without a daemon.

    Raises:
        TenantsDisabledError: tenants are disabled.
        StorageError: the store does not exist, or cannot be opened.
    """
    require_tenants(settings)
    async with _opened(settings) as store:
        yield store


def _opened(settings: Settings) -> AbstractAsyncContextManager[Store]:
    # A separate owner: leases of a command must not be confused with those of the daemon.
    return storage.open_store(settings, owner=f"command-{uuid.uuid4()}")


def tenant_path(host: str, identifier: str) -> str:
    """Return the path of a tenant's address, given ``host``, the path of the host's address."""
    return f"{host.rstrip('/')}/{identifier}"


def source_named(settings: Settings, name: str) -> SourceOptions:
    """Return the source that ``--source`` names.

    Raises:
        UsageError: the settings have no source of this name.
    """
    found = next((each for each in settings.sources if each.name == name), None)
    if found is None:
        known = ", ".join(each.name for each in settings.sources) or "none"
        raise UsageError(f"Sdk:Sources has no source {name!r}; it has {known}")
    return found


async def tenant_id_of(settings: Settings, key: str | None) -> str | None:
    """Return the id of the tenant that ``--tenant`` names; None if ``key`` is None.

    An id is used unchanged: its tenant may have been purged.

    Raises:
        UnknownTenantError: no tenant has that name.
        StorageError: the store cannot be opened.
    """
    # An id is not looked up, so that the events of a purged tenant can still be listed.
    if key is None or is_tenant_id(key):
        await trio.lowlevel.checkpoint()
        return key
    async with open_tenants(settings) as service:
        return (await service.get(key)).id
