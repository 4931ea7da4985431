"""All that a running program has of its tenants, and what handlers may use of it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from ..config import Settings
from ..storage.ports import TenantStore
from .client_pool import ClientFactory, ClientPool
from .credential_reader import CredentialReader
from .database_opener import TenantDatabase, TenantDatabases, databases_directory
from .ports import TenantKey
from .service import TenantService

#: How long the databases may take to close, in seconds: longer than they wait for a disk, because
#: they word the error.
CLOSE_SECONDS = 25.0


class Tenancy:
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
            UnknownTenantError: there is none.
            TenantCredentialsError: its access token cannot be read.
        """
        active = await self.service.require_active(tenant)
        async with self.clients.lease(active) as client:
            yield client

    @asynccontextmanager
    async def tenant_db(self, tenant: TenantKey) -> AsyncIterator[TenantDatabase]:
        """Open the database of an active tenant, which is looked up anew, for a block.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            UnknownTenantError: there is none.
        """
        active = await self.service.require_active(tenant)
        async with self.databases.open(active.id) as database:
            yield database

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the tenants and keep clients and databases until cancelled; then close them."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.service.run)
                await nursery.start(self.clients.run)
                task_status.started()
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await self.databases.close()
