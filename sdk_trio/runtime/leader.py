"""Replication and reconciliation, which only one of the hosts with the same store may run.

Hosts with the same PostgreSQL store elect a leader by a lease
(:class:`~sdk_trio.base.term.Leadership`). Other stores have a single host.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ..config import StorageBackend
from ..webhooks.companion import Part, supervise
from .state import RuntimeState

if TYPE_CHECKING:
    from ..reconcile.gap_watch import GapWatch
    from ..reconcile.reconciler import Reconciler
    from ..records.tenants import Tenant


class LeaderParts:
    """The parts of ``runtime`` that only one host may run.

    Args:
        runtime: gets the parts as ``replication``, ``verification`` and ``leadership``.
        replicates: whether replication is enabled here.
        reconciles: whether reconciliation is enabled here.
        alerts: whether alerts are enabled here; they need to know who leads.
        may_end: whether a part may return without an error, as during the drain.
    """

    def __init__(
        self,
        runtime: RuntimeState,
        *,
        replicates: bool,
        reconciles: bool,
        alerts: bool,
        may_end: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._replicates = replicates
        self._reconciles = reconciles
        self._alerts = alerts
        self._may_end = may_end
        self._elects = runtime.settings.storage.backend is StorageBackend.POSTGRES
        # Reconciliation ends at the beginning of the drain, before the other parts.
        self._reconciling = trio.CancelScope()

    async def start(self, parts: trio.Nursery, name: str, part: Part) -> Any:
        """Start a part in a nursery; if it ends too early, the runtime ends with an error."""
        return await parts.start(partial(supervise, name, part, may_end=self._may_end))

    async def start_before_serving(self, parts: trio.Nursery) -> None:
        """Start replication, unless a leader must be elected first."""
        await trio.lowlevel.checkpoint()
        if self._replicates and not self._elects:
            await self._start_replication(parts)

    async def start_after_serving(self, parts: trio.Nursery) -> None:
        """Start the election, or without one the reconciliation.

        The server must accept deliveries: the first pass of reconciliation asks for redeliveries.
        """
        await trio.lowlevel.checkpoint()
        if self._elects and (self._replicates or self._reconciles or self._alerts):
            await self.start(parts, "leadership", self._lead)
        elif self._reconciles:
            await self.start(parts, "reconciliation", self._reconcile)

    def stop_reconciling(self) -> None:
        """End the reconciliation, whose redeliveries this process would no longer accept."""
        self._reconciling.cancel()

    async def _lead(  # noqa: ASYNC128 - the leadership calls it
        self, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Replicate and reconcile while this host is the leader."""
        from ..base.term import MARGIN_SECONDS, Leadership

        runtime = self._runtime

        async def lead(term: int) -> None:
            self._reconciling = trio.CancelScope()
            async with trio.open_nursery() as parts:
                if self._replicates:
                    await self._start_replication(parts, term)
                if self._reconciles and not runtime.draining:
                    await parts.start(partial(self._reconcile, term))

        def hurry() -> None:
            # The last sync of a supervised replicator must end before the term does.
            if runtime.replication is not None:
                runtime.replication.end_by(trio.current_time() + MARGIN_SECONDS / 2)

        runtime.leadership = Leadership(runtime.receiver.store, lead, hurry)
        await runtime.leadership.run(task_status=task_status)

    async def _start_replication(self, parts: trio.Nursery, term: int | None = None) -> None:
        from .replication import ReplicationOverseer, make_scheduler

        runtime = self._runtime
        tenants = runtime.receiver.tenancy.service
        runtime.replication = ReplicationOverseer(runtime.settings, tenants)
        runtime.verification = make_scheduler(
            runtime.settings, tenants, runtime.receiver.store, clock=runtime.clock, term=term
        )
        for name, part in runtime.replication.parts():
            await self.start(parts, name, part)
        await self.start(parts, "the verification of replicas", runtime.verification.run)

    async def _reconcile(
        self, term: int | None = None, *, task_status: trio.TaskStatus[None]
    ) -> None:
        from ..client.client import UpstreamDeliveries  # loads the client, which is optional
        from ..reconcile.reconciler import Reconciler

        runtime = self._runtime
        reconciler = Reconciler(
            UpstreamDeliveries(runtime.client),
            runtime.receiver.store,
            runtime.settings,
            clock=runtime.clock,
            term=term,
        )
        runtime.gap_watch = watch = self._make_gap_watch(reconciler, term)
        task_status.started()
        try:
            with self._reconciling:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reconciler.run)
                    nursery.start_soon(watch.run)
        finally:
            runtime.gap_watch = None

    def _make_gap_watch(self, reconciler: "Reconciler", term: int | None) -> "GapWatch":
        from ..client.client import UpstreamDeliveries
        from ..reconcile.gap_watch import GapWatch

        runtime = self._runtime
        tenancy = runtime.receiver.tenancy if runtime.settings.multi_tenant.enabled else None

        @asynccontextmanager
        async def open_upstream(tenant: "Tenant | None") -> AsyncIterator[UpstreamDeliveries]:
            await trio.lowlevel.checkpoint()
            if tenant is None or tenancy is None:
                yield UpstreamDeliveries(runtime.client)
                return
            async with tenancy.clients.lease(tenant) as client:
                yield UpstreamDeliveries(client)

        return GapWatch(
            runtime.receiver.store,
            runtime.settings,
            open_upstream,
            tenants=None if tenancy is None else tenancy.service,
            clock=runtime.clock,
            is_ready=lambda: runtime.ready,
            wake=runtime.wake,
            deliveries_first=reconciler.reconcile_and_wait,
            term=term,
        )
