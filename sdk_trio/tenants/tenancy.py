"""The tenants of a running program: service, credentials, databases and clients in one object."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio

from ..config import Settings
from ..errors import StoreUnavailableError, TenantNotActiveError, UnknownTenantError
from ..storage.ports import TenantStore
from .clients import ClientFactory, ClientPool
from .credentials import CredentialReader
from .databases import STALL_SECONDS, TenantDatabase, TenantDatabases, databases_directory
from .service import POLL_SECONDS, TenantService
from .status import TenantKey

#: How long the databases may take to close, in seconds: longer than their own wait for a disk, so
#: that their error is raised, which says what hangs.
CLOSE_SECONDS = STALL_SECONDS + 1.0


class TenantRuntime:
    """The tenants of a running program: service, credentials, databases, clients.

    Args:
        settings: validated settings.
        store: the tenants' side of the open store.
        clock: returns Unix seconds.
        client_factory: makes the client of a tenant; None: ``client_for`` is not possible.
    """

    def __init__(
        self,
        settings: Settings,
        store: TenantStore,
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
        """Lend the client of an active tenant, which is looked up anew, for a block.

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
        """Open the database of an active tenant, which is looked up anew, for a block.

        A function that the block runs after the tenant has left Active is refused.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            UnknownTenantError: there is none.
        """
        active = await self.service.require_active(tenant)

        # Asked before each function of the block, not only at its beginning: a block may last long,
        # and a suspended tenant's data must not change any more.
        async def admit() -> None:
            found = await self.service.recall(active.id)
            if found is None:
                raise UnknownTenantError(f"the tenant {active.identifier!r} is gone")
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
        """Close the database of each tenant that leaves Active, whoever changed it.

        A restore or a purge waits for that, and the file that it then puts there is opened anew.
        """
        # A tenant whose function goes on would be closed once for every wake-up otherwise.
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
                        # Only tenants with an open database are looked up, so a quiet program with
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
