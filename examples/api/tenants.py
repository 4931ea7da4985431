# For: TenantService, TenantStatusService, Tenant, TenantStatus, TransitionResult
import trio

import sdk_trio
from sdk_trio.events import SubscriptionRevokedEvent
from sdk_trio.testing import running_app, settings_for_tests

handlers = sdk_trio.HandlerRegistry()


@handlers.on(SubscriptionRevokedEvent, enqueue=True)
async def suspend_tenant(event: SubscriptionRevokedEvent, services: sdk_trio.Services) -> None:
    tenants: sdk_trio.TenantService = services.tenants
    acme: sdk_trio.Tenant = await tenants.add(
        "acme",
        name="Acme",
        site_manager_email="manager@acme.example",
        site_manager_email_verified=True,
    )
    done: sdk_trio.TransitionResult = await tenants.suspend(acme, reason="no subscription")
    print(done.tenant.status, done.tenant.status is sdk_trio.TenantStatus.SUSPENDED)


async def main() -> None:
    settings = settings_for_tests({"MultiTenant:Enabled": True})
    async with running_app(handlers, settings) as app:
        await app.deliver("subscription.revoked", expect="done")


trio.run(main)
# Output: Suspended True
