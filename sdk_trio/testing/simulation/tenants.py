"""The operator of a simulation: adds tenants, suspends and reactivates them, replays events."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from ...errors import SdkError
from ...records.deliveries import DeliveryRecord, DeliveryState
from ...runtime import Runtime
from .audit import Auditor

#: The seconds that one change may take, and the wait before the operator tries again.
PATIENCE_SECONDS = 15.0
AGAIN_SECONDS = 0.5


def organization_of(tenant: int) -> str:
    """Return the organization of a tenant."""
    return f"org_{tenant}"


def identifier_of(tenant: int) -> str:
    """Return the identifier of a tenant."""
    return f"tenant-{tenant}"


class Operator:
    """Changes tenants through a serving runtime, and retries until that succeeds.

    Args:
        runtimes: returns the runtimes that serve.
        auditor: gets the suspensions.
    """

    def __init__(self, runtimes: Callable[[], Sequence[Runtime]], auditor: Auditor) -> None:
        self._runtimes = runtimes
        self._auditor = auditor
        self._suspensions: dict[int, int] = {}

    async def add(self, count: int) -> None:
        """Add the tenants."""
        for tenant in range(count):
            await _until_done(self._try_to_add, tenant)

    async def _try_to_add(self, tenant: int) -> bool:
        identifier = identifier_of(tenant)
        for runtime in self._runtimes():
            with trio.move_on_after(PATIENCE_SECONDS):
                service = runtime.receiver.tenancy.service
                try:
                    if await service.find_by_identifier(identifier) is None:
                        await service.add(
                            identifier,
                            name=identifier,
                            organization_id=organization_of(tenant),
                            # Without an email address a tenant cannot be suspended.
                            site_manager_email=f"{identifier}@example.com",
                            site_manager_email_verified=True,
                        )
                except SdkError:
                    return False
                return True
        await trio.lowlevel.checkpoint()
        return False

    async def suspend(self, tenant: int, seconds: float) -> None:
        """Suspend a tenant for ``seconds``; overlapping suspensions end together."""
        self._suspensions[tenant] = self._suspensions.get(tenant, 0) + 1
        self._auditor.may_park(identifier_of(tenant))
        if await self._change(tenant, active=False):
            self._auditor.suspend(identifier_of(tenant))
        await trio.sleep(seconds)
        self._suspensions[tenant] -= 1
        if not self._suspensions[tenant]:
            self._auditor.reactivate(identifier_of(tenant))
            await _until_done(self._reactivate, tenant)

    async def _reactivate(self, tenant: int) -> bool:
        return await self._change(tenant, active=True)

    async def _change(self, tenant: int, *, active: bool) -> bool:
        identifier = identifier_of(tenant)
        for runtime in self._runtimes():
            with trio.move_on_after(PATIENCE_SECONDS):
                service = runtime.receiver.tenancy.service
                try:
                    if (await service.get(identifier)).is_active is active:
                        return True
                    change = service.reactivate if active else service.suspend
                    await change(identifier, reason="the plan")
                except SdkError:
                    return False
                return True
        await trio.lowlevel.checkpoint()
        return False

    async def replay(self, records: Sequence[DeliveryRecord]) -> None:
        """Replay the parked events."""
        parked = [each.key for each in records if each.state is DeliveryState.PARKED]
        for runtime in self._runtimes()[:1] if parked else ():
            try:
                with trio.move_on_after(PATIENCE_SECONDS):
                    await runtime.receiver.store.replay(parked)
                    runtime.wake()
            except SdkError:
                return
        await trio.lowlevel.checkpoint()


async def _until_done(change: Callable[[int], Awaitable[bool]], tenant: int) -> None:
    while True:
        if await change(tenant):
            return
        await trio.sleep(AGAIN_SECONDS)
