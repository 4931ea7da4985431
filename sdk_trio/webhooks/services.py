"""What a handler may use (contracts 4)."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import attrs

from ..config import Settings
from ..errors import TenantsDisabledError
from ..storage.ports import Inbox

# Without tenants, SQLite is loaded only by those who use it.
if TYPE_CHECKING:
    from ..tenants.database_opener import TenantDatabase
    from ..tenants.ports import TenantKey
    from ..tenants.service import TenantService
    from ..tenants.tenancy import Tenancy


@attrs.frozen
class Services:
    """Given to handler factories and to handler functions of two parameters.

    ``settings`` are the validated settings, ``store`` is the inbox that holds the delivery.
    """

    settings: Settings
    store: Inbox
    _tenancy: "Tenancy | None" = attrs.field(default=None, repr=False)

    @property
    def tenants(self) -> "TenantService":
        """The tenants: find them, add them, take them through their life.

        Raises:
            TenantsDisabledError: ``Sdk:MultiTenant:Enabled`` is false.
        """
        return self._require_tenancy().service

    def client_for(self, tenant: "TenantKey") -> AbstractAsyncContextManager[Any]:
        """Return a block with the client of an active tenant, which uses the tenant's own token.

        ``async with services.client_for(event.tenant) as client: ...``. The tenant is looked up
        anew; a block that has begun goes on when the tenant is suspended meanwhile.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            TenantError: there is no such tenant, or its token cannot be read.
        """
        return self._require_tenancy().client_for(tenant)

    def tenant_db(self, tenant: "TenantKey") -> "AbstractAsyncContextManager[TenantDatabase]":
        """Return a block with the database of an active tenant.

        ``async with services.tenant_db(event.tenant) as database: await database.run(function)``.

        Raises:
            TenantNotActiveError: the tenant is suspended, deactivated or deleted.
            UnknownTenantError: there is no such tenant.
        """
        return self._require_tenancy().tenant_db(tenant)

    def _require_tenancy(self) -> "Tenancy":
        if self._tenancy is None:
            raise TenantsDisabledError(
                "there are no tenants: set Sdk:MultiTenant:Enabled to true to have them"
            )
        return self._tenancy
