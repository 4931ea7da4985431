"""The services that a handler may use: settings, store, client, tenants."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import attrs

from ..config import Settings
from ..errors import NotRunningError, TenantsDisabledError
from ..events import Event
from ..storage.effects import Effects
from ..storage.ports import Inbox
from .effects import Conclusions

# Imported for type checkers only: the tenants' modules load SQLite, which a receiver without
# tenants may not need.
if TYPE_CHECKING:
    from ..tenants.databases import TenantDatabase
    from ..tenants.service import TenantService
    from ..tenants.status import TenantKey
    from ..tenants.tenancy import TenantRuntime

ClientType = TypeVar("ClientType")
T = TypeVar("T")


@attrs.frozen
class Services(Generic[ClientType]):
    """The argument of handler factories, and of handler functions with two parameters.

    ``settings`` are the validated settings, ``store`` is the inbox that holds the delivery.
    ``client`` is the client of the upstream API. The class is generic over the client's class,
    because this package must not import the client
    (docs/adr/0030-generated-types.md); ``sdk_trio.Services`` is the form whose
    client is a :class:`sdk_trio.Client`.
    """

    settings: Settings
    store: Inbox
    _client: ClientType | None = None

    @property
    def client(self) -> ClientType:
        """Return the client of the upstream API, which is open for as long as handlers run.

        Raises:
            NotRunningError: there is no client, because the receiver runs without the runtime.
        """
        if self._client is None:
            raise NotRunningError(
                "services.client: the receiver runs standalone, so there is no client; run the "
                "full stack, with Sdk:AccessToken and without standalone. In a test, use the "
                "fixture sdk_upstream"
            )
        return self._client

    _tenancy: "TenantRuntime | None" = attrs.field(default=None, repr=False)
    _conclusions: Conclusions | None = attrs.field(default=None, repr=False)

    async def finish(self, event: Event[Any], save: Effects[T]) -> T:
        """Apply effects in the store's own database and end the event, in one transaction.

        ``await services.finish(event, lambda tx: save(tx.connection, order))``, after everything
        else: network calls first, then this. Both are committed or neither is, so a process that
        dies applies nothing twice. Afterwards the event is done; a later exception of the handler
        is only logged.

        Args:
            event: the event that is being handled, in the queue or inline.
            save: a plain function of the :class:`~sdk_trio.Transaction`. It runs in another thread,
                writes through ``tx.connection`` and does nothing else: after a conflict it runs
                again. On SQLite it may take one second, because every delivery waits for it.

        Returns:
            the result of ``save``.

        Raises:
            EventTakenOverError: the lease was lost, and another process has claimed the event.
            EffectError: the event is finished, or not being handled; or ``save`` is asynchronous,
                commits, or takes too long.
            NotSupportedError: ``Sdk:Storage:Backend`` is ``Memory``.
            StoreUnavailableError: the store failed, or does not answer. If its message says that
                the connection broke during the commit, the effects and the event's end are both
                committed or both not. Let it propagate: the event is retried only if neither is
                committed.
            Exception: any exception of ``save``; nothing has then changed.

        Cancellation takes effect only after it has finished.
        """
        if self._conclusions is None:
            raise NotRunningError("services.finish: no running receiver has these services")
        return await self._conclusions.conclude(event, save)

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
        again; a block that has begun continues if the tenant is suspended meanwhile.

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
            raise TenantsDisabledError("there are no tenants: set Sdk:MultiTenant:Enabled to true")
        return self._tenancy
