"""The default tenant of the upgrade, which takes the data of a single-tenant host."""

from typing import cast

import trio

from ..errors import DefaultTenantError
from ..records.tenants import Tenant
from ..storage.ports import TenantStore
from .service import TenantService
from .upgrade import HostTenant, NewTenant

#: The actor in the audit row of the tenant that the upgrade adds.
ACTOR = "upgrade"


class DefaultTenantFinder:
    """Finds or adds the default tenant as the settings choose it.

    Looking comes before adding, so that an upgrade that cannot succeed leaves no trace.
    """

    def __init__(self, store: TenantStore, tenants: TenantService) -> None:
        self._store = store
        self._tenants = tenants

    async def known(self, chosen: NewTenant | HostTenant) -> Tenant | None:
        """Return the tenant if it exists already and the host need not be asked, else None.

        Raises:
            DefaultTenantError: it exists and is not active.
        """
        if isinstance(chosen, HostTenant):
            await trio.lowlevel.checkpoint()
            return None
        found = await self._store.find(chosen.identifier)
        return None if found is None else _require_active(found)

    async def resolve(self, chosen: NewTenant | HostTenant) -> Tenant:
        """Add the tenant, or ask the host for it.

        Raises:
            DefaultTenantError: the host's resolver failed, or its answer cannot be used.
        """
        if isinstance(chosen, NewTenant):
            return await self._tenants.add(
                chosen.identifier,
                name=chosen.name,
                reason="upgrade from a single tenant",
                actor=ACTOR,
            )
        try:
            # The host's code may return anything, so its type is checked.
            answer = cast("object", await chosen.resolver.resolve(self._tenants))
            if not isinstance(answer, str | Tenant):
                raise TypeError(f"it returned {answer!r}, which is no tenant")
            return _require_active(await self._tenants.get(answer))
        except DefaultTenantError:
            raise
        except Exception as error:
            raise DefaultTenantError(
                f"the host's resolver of the default tenant failed: {type(error).__name__}: "
                f"{error}; it must return a tenant that exists and is active"
            ) from error

    async def stored(self, tenant_id: str) -> Tenant:
        """Return the tenant of the marker.

        Raises:
            DefaultTenantError: it was purged.
        """
        found = await self._store.get(tenant_id)
        if found is None:
            raise DefaultTenantError(
                f"the default tenant {tenant_id} was purged, so nobody can take what a step of the "
                "upgrade would move: start without that step"
            )
        return found

    async def give_organization(self, tenant: Tenant, organization_id: str) -> None:
        """Give the tenant, which has none, its organization.

        Raises:
            TenantExistsError: the organization is another tenant's.
            TenantConflictError: somebody else has changed the tenant; the step can be run again.
            InvalidTenantError: it cannot be an organization's id.
        """
        await self._tenants.change(
            tenant,
            organization_id=organization_id,
            actor=ACTOR,
            expected_version=tenant.version,
        )

    async def describe_stored(self, tenant_id: str) -> str:
        """Say in words which tenant this is."""
        found = await self._store.get(tenant_id)
        return f"{tenant_id} (purged)" if found is None else _shown(found)

    async def describe(self, chosen: NewTenant | HostTenant) -> str:
        """Say in words which tenant it will be, without calling the host or changing anything."""
        known = await self.known(chosen)
        if known is not None:
            return _shown(known)
        if isinstance(chosen, NewTenant):
            return f"{chosen.identifier} (will be created)"
        return "as the host's resolver says (it is not asked in a dry run)"


def _require_active(tenant: Tenant) -> Tenant:
    if tenant.is_active:
        return tenant
    raise DefaultTenantError(
        f"the default tenant {tenant.identifier!r} is {tenant.status}: reactivate it ('tenant "
        f"reactivate {tenant.identifier}'), or choose another one; nothing was changed"
    )


def _shown(tenant: Tenant) -> str:
    return f"{tenant.identifier} ({tenant.id})"
