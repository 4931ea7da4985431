"""The services that a handler may use: settings, store, client, tenants."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import attrs

from ..config import Settings
from ..errors import NotRunningError, TenantsDisabledError
from ..storage.ports import Inbox

# Imported for type checkers only: the tenants' modules load SQLite, which a receiver without
# tenants may not need.
if TYPE_CHECKING:
    from ..tenants.databases import TenantDatabase
    from ..tenants.service import TenantService
    from ..tenants.status import TenantKey
    from ..tenants.tenancy import TenantRuntime

ClientType = TypeVar("ClientType")


@attrs.frozen
class Services(Generic[ClientType]):
    """The argument of handler factories, and of handler functions with two parameters.

    ``settings`` are the validated settings, ``store`` is the inbox that holds the delivery.
    ``client`` is the client of the upstream API. The class is generic over the client's class,
    because this package must not import the client
    (docs/adr/0006-services-generic-over-the-client.md); ``sdk_trio.Services`` is the form whose
    client is a :class:`sdk_trio.Client`.
    """

    settings: Settings
    store: Inbox
    _client: ClientType | None = None

    @property
    def client(self) -> ClientType:
        """Return the client of the upstream API, which is open for as long as handlers run.

        Raises:
            NotRunningError: there is none, because the receiver runs without the runtime.
        """
        if self._client is None:
            raise NotRunningError(
                "services.client: the receiver runs standalone, so there is no client; run the "
                "full stack, with Sdk:AccessToken and without standalone"
            )
        return self._client

    _tenancy: "TenantRuntime | None" = attrs.field(default=None, repr=False)

    @property
    def tenants(self) -> "TenantService":
        """Return the service that finds, adds and changes tenants.

        Raises:
            TenantsDisabledError: ``Sdk:MultiTenant:Enabled`` is false.
        """
        return self._require_tenancy().service

    def client_for(self, tenant: "TenantKey") -> AbstractAsyncContextManager[ClientType]:
        """Return a block with the client of an active tenant, which uses the tenant's own token.

        ``async with services.client_for(event.tenant) as client: ...``. The tenant is looked up
        anew; a block that has begun goes on when the tenant is suspended meanwhile.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            TenantError: there is no such tenant, or its token cannot be read.
        """
        # The runtime makes the tenants' clients as it makes its own, so all are of one type.
        return cast(
            "AbstractAsyncContextManager[ClientType]", self._require_tenancy().client_for(tenant)
        )

    def tenant_db(self, tenant: "TenantKey") -> "AbstractAsyncContextManager[TenantDatabase]":
        """Return a block with the database of an active tenant.

        ``async with services.tenant_db(event.tenant) as database: await database.run(function)``.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            UnknownTenantError: there is no such tenant.
        """
        return self._require_tenancy().tenant_db(tenant)

    def _require_tenancy(self) -> "TenantRuntime":
        if self._tenancy is None:
            raise TenantsDisabledError(
                "there are no tenants: set Sdk:MultiTenant:Enabled to true to have them"
            )
        return self._tenancy
