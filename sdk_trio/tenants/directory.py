"""A bounded cache of the tenants of the last deliveries. Pure."""

from collections import OrderedDict

from ..storage.tenant_records import Tenant

#: How many answers of the store are remembered: a few megabytes. "There is none" is an answer, too,
#: so that forged organizations cost no read each and no memory without a bound.
CAPACITY = 4096


class Directory:
    """The store's last answers, such as the tenant of an organization.

    They are right until :meth:`forget_all`, which has to follow every change. An answer that was
    read before the change and arrives after it is not remembered: :meth:`remember` takes the
    :attr:`generation` at which the store was asked.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, Tenant | None] = OrderedDict()
        self.generation: int = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def recall(self, key: str) -> Tenant | None:
        """Return the remembered answer for a key; None: there is no such tenant."""
        self._known.move_to_end(key)
        return self._known[key]

    def remember(self, key: str, tenant: Tenant | None, *, generation: int) -> None:
        """Remember an answer of the store, and forget the least recently used one."""
        if generation != self.generation:
            return
        self._known[key] = tenant
        self._known.move_to_end(key)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def forget_all(self) -> None:
        """Forget every answer, because a tenant has changed."""
        self._known.clear()
        self.generation += 1
