"""A bounded cache of the tenants of the last deliveries. Pure."""

from typing import Final

from ..base.lru import Lru
from ..storage.tenant_records import Tenant

#: How many answers of the store are remembered, "there is none" included: two for each of 8000
#: tenants, which are some ten megabytes.
CAPACITY: Final = 16_384

#: What a question was answered with: a tenant, the id of one that was purged, or None.
Answer = Tenant | str | None


class Directory:
    """The store's last answers, such as the tenant of an organization.

    They are right until :meth:`forget_all`, which has to follow every change. An answer that was
    read before the change and arrives after it is not remembered: :meth:`remember` takes the
    :attr:`generation` at which the store was asked.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._known: Lru[str, Answer] = Lru(capacity)
        self.generation: int = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def recall(self, key: str) -> Answer:
        """Return the answer to a question that is remembered."""
        return self._known[key]

    def remember(self, key: str, answer: Answer, *, generation: int) -> None:
        """Remember an answer of the store, and forget the one that was not used for longest.

        A tenant is remembered by its id as well: a delivery asks for both, first whose it is, and
        then by its id how the tenant is now. All answers have one record of it.
        """
        if generation != self.generation:
            return
        if isinstance(answer, Tenant):
            known = self._known.get(own := f"id {answer.id}")
            answer = known if known == answer else answer
            self._known[own] = answer
        self._known[key] = answer

    def forget_all(self) -> None:
        """Forget every answer, because a tenant has changed."""
        self._known.clear()
        self.generation += 1
