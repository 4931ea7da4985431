"""The operator of a simulation: adds tenants, suspends and reactivates them, pauses and replays
events."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from ...base.clock import wall
from ...errors import SdkError
from ...records.deliveries import DeliveryRecord, DeliveryState
from ...runtime import Runtime
from .audit import Auditor
from .plan import Arrival

K = TypeVar("K")

#: The seconds that one change may take, and the wait before the operator tries again.
PATIENCE_SECONDS = 15.0
AGAIN_SECONDS = 0.5


def organization_of(tenant: int) -> str:
    """Return the organization of a tenant."""
    return f"org_{tenant}"


def identifier_of(tenant: int) -> str:
    """Return the identifier of a tenant."""
    return f"tenant-{tenant}"


def tenant_of(arrival: Arrival) -> str | None:
    """Return the identifier of the tenant that an event belongs to, None without one."""
    return None if arrival.tenant is None else identifier_of(arrival.tenant)


class Operator:
    """Changes tenants and pauses through a serving runtime, and retries until that succeeds.

    Args:
        runtimes: returns the runtimes that serve.
        auditor: gets the suspensions and pauses.
    """

    def __init__(self, runtimes: Callable[[], Sequence[Runtime]], auditor: Auditor) -> None:
        self._runtimes = runtimes
        self._auditor = auditor
        # The suspensions and pauses in force, by tenant and by glob.
        self._suspensions: Counter[int] = Counter()
        self._pauses: Counter[str] = Counter()
        # One change at a time, so that an earlier one does not undo a later one.
        self._changing = trio.Lock()
        # Tenants with a change that may be made later: its result is not known.
        self._doubtful: set[int] = set()

    async def add(self, count: int) -> None:
        """Add the tenants."""
        for tenant in range(count):
            await _until_done(partial(self._try_to_add, tenant))

    async def _try_to_add(self, tenant: int) -> bool:
        identifier = identifier_of(tenant)
        for runtime in self._runtimes():
            with trio.move_on_after(PATIENCE_SECONDS):
                try:
                    service = runtime.receiver.tenancy.service
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
        self._suspensions[tenant] += 1
        self._auditor.may_park(identifier_of(tenant))
        async with self._changing:
            if await self._change(tenant, active=False) and tenant not in self._doubtful:
                self._auditor.suspend(identifier_of(tenant))
        await trio.sleep(seconds)
        self._suspensions[tenant] -= 1
        if not self._suspensions[tenant]:
            self._auditor.reactivate(identifier_of(tenant))
            await self._end(self._suspensions, tenant, lambda: self._change(tenant, active=True))

    async def _end(
        self, counts: Counter[K], name: K, change: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Repeat ``change`` until it is made; False: another suspension or pause has begun."""
        while True:
            async with self._changing:
                if counts[name]:
                    return False
                if await change():
                    return True
            await trio.sleep(AGAIN_SECONDS)

    async def _change(self, tenant: int, *, active: bool) -> bool:
        identifier = identifier_of(tenant)
        for runtime in self._runtimes():
            with trio.move_on_after(PATIENCE_SECONDS):
                try:
                    service = runtime.receiver.tenancy.service
                    if (await service.get(identifier)).is_active is active:
                        return True
                    self._doubtful.add(tenant)
                    change = service.reactivate if active else service.suspend
                    await change(identifier, reason="the plan")
                    self._doubtful.discard(tenant)
                except SdkError:
                    return False
                return True
        await trio.lowlevel.checkpoint()
        return False

    async def pause(self, glob: str, seconds: float) -> None:
        """Pause events for ``seconds``; overlapping pauses of one glob end together."""
        self._pauses[glob] += 1
        pause = self._auditor.may_pause(glob)
        async with self._changing:
            if await self._set_pause(glob, paused=True):
                self._auditor.pause(pause)
        await trio.sleep(seconds)
        self._pauses[glob] -= 1
        if not self._pauses[glob]:
            self._auditor.may_resume(glob)
            if await self._end(self._pauses, glob, lambda: self._set_pause(glob, paused=False)):
                self._auditor.resume(glob)

    async def _set_pause(self, glob: str, *, paused: bool) -> bool:
        for runtime in self._runtimes():
            with trio.move_on_after(PATIENCE_SECONDS):
                try:
                    store = runtime.receiver.store
                    if paused:
                        await store.pause(
                            glob, actor="operator", reason="the plan", until=None, now=wall()
                        )
                    else:
                        await store.resume(glob, actor="operator", now=wall())
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


async def _until_done(change: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await change():
            return
        await trio.sleep(AGAIN_SECONDS)
