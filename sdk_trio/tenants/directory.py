"""Remembers which tenant an organization of the upstream belongs to, within a bound. Pure."""

from collections import OrderedDict

from ..storage.tenant_records import Tenant

#: How many organizations are remembered, unknown ones included: about 4 MB at most.
CAPACITY = 4096


class Directory:
    """The tenants of the organizations that were asked for last.

    What it remembers is right until :meth:`forget_all`, which has to follow every change. An
    answer that was on its way meanwhile is not remembered: :meth:`remember` takes the
    :attr:`generation` at which the store was asked.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, Tenant | None] = OrderedDict()
        self.generation = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, organization_id: str) -> bool:
        return organization_id in self._known

    def recall(self, organization_id: str) -> Tenant | None:
        """Return what is remembered of an organization that is known; None: it has no tenant."""
        self._known.move_to_end(organization_id)
        return self._known[organization_id]

    def remember(self, organization_id: str, tenant: Tenant | None, *, generation: int) -> None:
        """Remember an answer of the store, and forget the one that was not used for longest."""
        if generation != self.generation:
            return
        self._known[organization_id] = tenant
        self._known.move_to_end(organization_id)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def forget_all(self) -> None:
        """Forget everything: a tenant has changed."""
        self._known.clear()
        self.generation += 1
