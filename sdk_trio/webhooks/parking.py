"""Park deliveries that no handler runs at present, because of their type or their tenant."""

from typing import TYPE_CHECKING

import trio

from ..records.deliveries import Admission, NewDelivery, Parked
from ..storage.ports import Inbox
from . import answers
from .answers import Answer
from .bound import BoundHandler
from .outcomes import parked_reason
from .recording import OutcomeRecorder

if TYPE_CHECKING:
    from ..records.tenants import Tenant
    from ..tenants.tenancy import TenantRuntime


class Parking:
    """Decides which deliveries are parked, and parks them on arrival.

    Args:
        inbox: the open store.
        recorder: reports parked deliveries.
        tenancy: finds the tenants; None without tenants.
    """

    def __init__(
        self, inbox: Inbox, recorder: OutcomeRecorder, tenancy: "TenantRuntime | None"
    ) -> None:
        self._inbox = inbox
        self._recorder = recorder
        self._tenancy = tenancy

    async def tenant_of(self, delivery: NewDelivery) -> "Tenant | None":
        """Return the current tenant of a delivery, None when it has none.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        if self._tenancy is None or delivery.tenant_id is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self._tenancy.service.recall(delivery.tenant_id)

    def is_suspended(
        self, handler: BoundHandler, delivery: NewDelivery, tenant: "Tenant | None"
    ) -> bool:
        """Return whether the status of the delivery's tenant prevents the handler from running."""
        if tenant is None:
            return self.is_orphan(delivery, tenant)
        return tenant.is_deleted or not (handler.run_when_suspended or tenant.is_active)

    def is_orphan(self, delivery: NewDelivery, tenant: "Tenant | None") -> bool:
        """Return whether the delivery's tenant was removed: it must not run as an event without a
        tenant."""
        return self._tenancy is not None and delivery.tenant_id is not None and tenant is None

    def outcome(
        self, delivery: NewDelivery, handler: BoundHandler | None, tenant: "Tenant | None"
    ) -> Parked:
        """Return the outcome that parks a delivery, with its reason."""
        gone = delivery.tenant_id if self.is_orphan(delivery, tenant) else None
        return Parked(parked_reason(None if handler is None else tenant, gone))

    async def park(
        self,
        delivery: NewDelivery,
        handler: BoundHandler | None,
        tenant: "Tenant | None",
        *,
        take_expired_until: float,
    ) -> Answer:
        """Store a delivery that no handler can run at present, and answer 200.

        The sender has delivered correctly: an error would only make it repeat the delivery and
        finally disable the endpoint. ``handler`` is None if the type has none; otherwise ``tenant``
        is not active, or was removed. ``take_expired_until``: as for :meth:`.Inbox.claim_due`.
        """
        parked = self.outcome(delivery, handler, tenant)
        admitted = await self._inbox.park(
            delivery, parked.reason, take_expired_until=take_expired_until
        )
        if admitted.admission is not Admission.NEW:
            return self._recorder.answer_known(delivery, admitted)
        if not admitted.same_body:
            self._recorder.report_different_body(delivery)
        self._recorder.report(delivery, 0, parked, address=delivery.address)
        return answers.OK
