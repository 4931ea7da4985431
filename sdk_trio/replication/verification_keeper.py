"""Verifies all active tenants, or one, and remembers the outcome in the store (contracts 7)."""

import time
from collections.abc import Callable

from ..storage.ports import Inbox
from ..storage.tenant_records import Tenant, TenantStatus
from .database_finder import TenantList
from .verification import CHECKPOINT, Verification, VerificationState, state_from_text
from .verifier import Verifier

#: Tenants that are read at once.
_PAGE = 200

Report = Callable[[Verification, int, int], None]


class VerificationKeeper:
    """Runs verifications and keeps their state beside the deliveries.

    Args:
        verifier: does the work.
        inbox: keeps the state.
        clock: returns Unix seconds.
    """

    def __init__(
        self, verifier: Verifier, inbox: Inbox, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._verifier = verifier
        self._inbox = inbox
        self._clock = clock

    async def read(self) -> VerificationState:
        """Return what is remembered, of other processes too.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        return state_from_text(await self._inbox.read_checkpoint(CHECKPOINT))

    async def verify_active(
        self,
        tenants: TenantList,
        *,
        accept_loss: bool = False,
        report: Report = lambda _result, _done, _total: None,
    ) -> list[Verification]:
        """Verify every active tenant, one after the other, and remember the outcome.

        Args:
            tenants: where the tenants are.
            accept_loss: replicas that begin later than they did are good.
            report: called after each with its result, how many are done, and how many there are.

        Raises:
            StoreLockedError: another verification runs.
            StoreUnavailableError: the store cannot be read or written.

        Cancelled, it remembers nothing.
        """
        with self._verifier.alone():
            # The lock makes us the only writer of what is remembered.
            state = await self.read()
            chosen = await _active(tenants)
            results: list[Verification] = []
            for tenant in chosen:
                results.append(await self._verify(tenant, state, accept_loss))
                report(results[-1], len(results), len(chosen))
            state = state.after_run(results, now=self._clock(), accept_loss=accept_loss)
            await self._inbox.write_checkpoint(CHECKPOINT, state.to_text())
            return results

    async def verify_one(self, tenant: Tenant, *, accept_loss: bool = False) -> Verification:
        """Verify one tenant of any status, and remember the outcome if it is active.

        ``accept_loss`` is that of :meth:`verify_active`.

        Raises:
            StoreLockedError: another verification runs.
            StoreUnavailableError: the store cannot be read or written.
        """
        with self._verifier.alone():
            state = await self.read()
            result = await self._verify(tenant, state, accept_loss)
            if tenant.is_active:
                state = state.after_one(result, accept_loss=accept_loss)
                await self._inbox.write_checkpoint(CHECKPOINT, state.to_text())
            return result

    async def _verify(
        self, tenant: Tenant, state: VerificationState, accept_loss: bool
    ) -> Verification:
        result = await self._verifier.verify(tenant)
        if accept_loss:
            return result
        return state.compared(result, retention=self._verifier.retention)


async def _active(tenants: TenantList) -> list[Tenant]:
    found: list[Tenant] = []
    while True:
        after = found[-1].identifier if found else ""
        page = await tenants.list(status=TenantStatus.ACTIVE, after=after, limit=_PAGE)
        found += page
        if len(page) < _PAGE:
            return found
