"""The tenants of a running program: service, credentials, databases and clients in one object."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from ..base.logs import get_logger
from ..config import Secret, Settings
from ..errors import (
    NotInThisVersionError,
    NotRunningError,
    Problem,
    StoreUnavailableError,
    TenantCredentialsError,
    TenantNotActiveError,
    UnknownTenantError,
)
from ..records.tenants import Tenant
from .credentials import CredentialReader
from .databases import STALL_SECONDS, TenantDatabase, TenantDatabases, databases_directory
from .service import POLL_SECONDS, TenantService
from .status import TenantKey

if TYPE_CHECKING:
    from ..storage.sql.tenants import TenantStore

_log = get_logger("tenants")

#: A function that creates a client from settings with the token to use.
ClientFactory = Callable[[Settings], AbstractAsyncContextManager[Any]]

#: Time that an unused client stays open, in seconds: longer than a burst of events of one tenant,
#: so that its connections are used again.
IDLE_SECONDS = 120.0

#: The maximum number of clients that stay open, which limits their connections. Clients in use are
#: never closed, so there may be more at times.
MAX_OPEN = 64

# Tenants without a token of their own share one client with the host's.
_SHARED = ""


@attrs.define(eq=False)
class _Entry:
    """An open client, its task, the number of its users, and the number of its reload."""

    key: str
    token: Secret
    reloads: int
    client: Any = None
    users: int = 0
    idle_since: float = 0.0
    unused: trio.Event = attrs.Factory(trio.Event)


class ClientPool:
    """Provides clients to handlers; needs :meth:`run` in a separate task.

    Args:
        settings: validated settings; a client gets them with its tenant's token.
        credentials: reads tenants' tokens.
        factory: creates a client; None: clients of tenants are unavailable.
        idle_seconds: how long an unused client stays open.
        max_open: the maximum number of clients that stay open; clients in use are kept even above
            it.
    """

    def __init__(
        self,
        settings: Settings,
        credentials: CredentialReader,
        factory: ClientFactory | None,
        *,
        idle_seconds: float = IDLE_SECONDS,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._settings = settings
        self._reloads = 0
        self._credentials = credentials
        self._factory = factory
        self._idle_seconds = idle_seconds
        self._max_open = max_open
        self._entries: dict[str, _Entry] = {}
        self._locks: dict[str, tuple[trio.Lock, int]] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def open_count(self) -> int:
        """Return how many clients are open, except replaced ones that are still in use."""
        return len(self._entries)

    def prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Check ``settings`` and return a function that applies them, while each client keeps its
        token.

        Open clients with their own ``prepare_reload`` are changed in place. Others are replaced at
        the next use, if any client setting has changed.

        Raises:
            OptionsValidationError: a client cannot use them; nothing has changed.
        """
        changed = _of_clients(settings) != _of_clients(self._settings)
        commits: list[tuple[_Entry, Callable[[], None]]] = []
        for entry in self._entries.values() if changed else ():
            prepare = getattr(entry.client, "prepare_reload", None)
            if prepare is not None:
                commits.append(
                    (entry, prepare(msgspec.structs.replace(settings, access_token=entry.token)))
                )

        def commit() -> None:
            self._settings = settings
            self._reloads += changed
            for entry, commit_client in commits:
                commit_client()
                entry.reloads = self._reloads

        return commit

    @asynccontextmanager
    async def lease(self, tenant: Tenant) -> AsyncIterator[Any]:
        """Lend the tenant's client for the length of the block.

        Its token is read each time: after a rotation the next block gets a new client, and the old
        one is closed after the last block that uses it.

        Raises:
            TenantCredentialsError: there is no token.
            NotRunningError: :meth:`run` is not running.
        """
        entry = await self._enter(tenant)
        try:
            yield entry.client
        finally:
            self._leave(entry)

    async def _enter(self, tenant: Tenant) -> _Entry:
        token = await self._credentials.access_token(tenant)
        key = _SHARED if token is None else tenant.id
        token = token or self._settings.access_token
        if token is None or not token.reveal():
            raise TenantCredentialsError(
                f"the tenant {tenant.identifier!r} has no access token: configure one for it, or "
                "set Sdk:AccessToken"
            )
        # Opening a client waits. Without the lock two blocks would open one each, and the first
        # would be lost.
        async with self._alone(key):
            entry = self._entries.get(key)
            if entry is None or entry.token != token or entry.reloads != self._reloads:
                entry = await self._open(key, token)
            entry.users += 1
            return entry

    @asynccontextmanager
    async def _alone(self, key: str) -> AsyncIterator[None]:
        """Lock one key, so that two blocks do not open the same client twice.

        A lock exists only while a task holds it or waits for it.
        """
        lock, wanted = self._locks.get(key, (trio.Lock(), 0))
        self._locks[key] = (lock, wanted + 1)
        try:
            async with lock:
                yield
        finally:
            lock, wanted = self._locks[key]
            if wanted == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, wanted - 1)

    async def _open(self, key: str, token: Secret) -> _Entry:
        if self._nursery is None:
            raise NotRunningError("the runtime is not running, so tenants' clients are unavailable")
        replaced = self._entries.get(key)
        if replaced is not None:
            self._retire(replaced)
        self._free_slot()
        entry = _Entry(key, token, self._reloads)
        await self._nursery.start(self._hold, entry)
        self._entries[key] = entry
        return entry

    async def _hold(
        self, entry: _Entry, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep a client open until it is retired; a client is left in the task that entered it.

        It has a nursery, and Trio demands that a nursery is closed by the task that opened it. The
        blocks that use it are other tasks.
        """
        if self._factory is None:
            await trio.lowlevel.checkpoint()
            raise NotInThisVersionError(
                [
                    Problem(
                        "Sdk:MultiTenant",
                        "client_for needs the client, and this receiver has none",
                    )
                ]
            )
        started = False
        try:
            settings = msgspec.structs.replace(self._settings, access_token=entry.token)
            async with self._factory(settings) as entry.client:
                started = True
                task_status.started()
                await entry.unused.wait()
        except Exception as error:
            # No block has the client yet: raise the failure in the block that requested it.
            if not started:
                raise
            # A fault in one tenant's client must not end the program.
            _log.error("tenant.client_failed", tenant_id=entry.key or None, error=str(error))
            await trio.lowlevel.checkpoint()
        finally:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _leave(self, entry: _Entry) -> None:
        entry.users -= 1
        entry.idle_since = trio.current_time()
        if self._entries.get(entry.key) is not entry and not entry.users:
            entry.unused.set()

    def _retire(self, entry: _Entry) -> None:
        """Lend the entry to no further block, and close it when no block uses it."""
        del self._entries[entry.key]
        if not entry.users:
            entry.unused.set()

    def _free_slot(self) -> None:
        idle = sorted(
            (entry for entry in self._entries.values() if not entry.users),
            key=lambda entry: entry.idle_since,
        )
        surplus = len(self._entries) + 1 - self._max_open
        for entry in idle[: max(0, surplus)]:
            self._retire(entry)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep clients open and close unused ones until cancelled; then close them all."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                while True:
                    # A quarter of the time is exact enough: a client stays open for at most a
                    # quarter longer.
                    await trio.sleep(self._idle_seconds / 4)
                    self._close_idle(trio.current_time() - self._idle_seconds)
            finally:
                self._nursery = None

    def _close_idle(self, before: float) -> None:
        for entry in list(self._entries.values()):
            if not entry.users and entry.idle_since <= before:
                self._retire(entry)


def _of_clients(settings: Settings) -> tuple[object, ...]:
    """Return the settings that clients depend on, without the token."""
    return (
        settings.timeout_ms,
        settings.total_timeout_ms,
        settings.max_retries,
        settings.upstream,
        settings.resilience,
        settings.connection,
    )


#: Seconds for the databases to close: longer than their own wait for a disk, so that their error,
#: which names the cause, is raised.
CLOSE_SECONDS = STALL_SECONDS + 1.0


class TenantRuntime:
    """The tenants of a running program: service, credentials, databases, clients.

    Args:
        settings: validated settings.
        store: the tenants' side of the open store.
        clock: returns Unix seconds.
        client_factory: creates the client of a tenant; None: ``client_for`` is unavailable.
    """

    def __init__(
        self,
        settings: Settings,
        store: "TenantStore",
        *,
        clock: Callable[[], float],
        client_factory: ClientFactory | None = None,
    ) -> None:
        self.service: TenantService = TenantService(settings, store, clock=clock)
        self.credentials: CredentialReader = CredentialReader()
        self.databases: TenantDatabases = TenantDatabases(
            databases_directory(settings),
            replicated=settings.multi_tenant.file_db.replication.use_replication,
        )
        self.clients: ClientPool = ClientPool(settings, self.credentials, client_factory)

    @asynccontextmanager
    async def client_for(self, tenant: TenantKey) -> AsyncIterator[Any]:
        """Provide the client of an active tenant, read from the store now, for a block.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            UnknownTenantError: there is no such tenant.
            TenantCredentialsError: its access token cannot be read.
        """
        active = await self.service.require_active(tenant)
        async with self.clients.lease(active) as client:
            yield client

    @asynccontextmanager
    async def tenant_db(self, tenant: TenantKey) -> AsyncIterator[TenantDatabase]:
        """Open the database of an active tenant, read from the store now, for a block.

        A function that the block runs after the tenant has left Active is refused.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            UnknownTenantError: there is no such tenant.
        """
        active = await self.service.require_active(tenant)

        # Checked before each function of the block, not only at its start: a block may last long,
        # and a suspended tenant's data must not change.
        async def admit() -> None:
            found = await self.service.recall(active.id)
            if found is None:
                raise UnknownTenantError(f"the tenant {active.identifier!r} no longer exists")
            if not found.is_active:
                raise TenantNotActiveError(found.identifier, found.status)

        async with self.databases.open(active.id, admit=admit) as database:
            yield database

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the tenants and keep clients and databases until cancelled; then close them."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.service.run)
                await nursery.start(self._close_databases)
                await nursery.start(self.clients.run)
                task_status.started()
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await self.databases.close()

    async def _close_databases(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Close the database of each tenant that leaves Active, by anyone's change.

        A restore or a purge waits for that, and its new file is then opened.
        """
        # Otherwise a tenant whose function is still running would be closed once per wake-up.
        closing: set[str] = set()

        async def close(tenant_id: str) -> None:
            await trio.lowlevel.checkpoint()
            with suppress(StoreUnavailableError):  # all databases are being closed
                await self.databases.forget(tenant_id)
            closing.discard(tenant_id)

        with self.service.subscribe() as feed:
            task_status.started()
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        # Only tenants with an open database are read, so an idle program with
                        # thousands of tenants reads nothing.
                        for tenant_id in self.databases.in_use - closing:
                            tenant = await self.service.recall(tenant_id)
                            if tenant is None or not tenant.is_active:
                                closing.add(tenant_id)
                                nursery.start_soon(close, tenant_id)
                    except StoreUnavailableError:
                        await trio.sleep(POLL_SECONDS)  # the service logs the error
                    else:
                        await feed.wait()
