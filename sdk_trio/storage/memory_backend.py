"""What a store in memory has beside its inbox, made for the first who asks.

Most receivers have no tenants, and start without what is known of them.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from .admission import Terms
from .memory_rows import Deliveries

if TYPE_CHECKING:
    from .memory_notifications import MemoryNotifications
    from .memory_tenants import MemoryTenants
    from .memory_upgrade import MemoryUpgrade


class MemoryBackend:
    """The tenants, their upgrade and their notifications, on the rows of one store.

    ``shares`` is another backend on the same rows, whose tenants and upgrade are used.
    """

    def __init__(
        self, terms: Terms, rows: Deliveries, shares: "MemoryBackend | None" = None
    ) -> None:
        self._terms = terms
        self._rows = rows
        self._shares = shares

    @cached_property
    def tenants(self) -> "MemoryTenants":
        """The tenants."""
        from .memory_tenants import MemoryTenants

        return MemoryTenants() if self._shares is None else self._shares.tenants

    @cached_property
    def upgrade(self) -> "MemoryUpgrade":
        """The upgrade from a single tenant."""
        from .memory_upgrade import MemoryUpgrade

        return MemoryUpgrade(self._rows) if self._shares is None else self._shares.upgrade

    @cached_property
    def notifications(self) -> "MemoryNotifications":
        """Who is told what of tenants."""
        from .memory_notifications import MemoryNotifications

        return MemoryNotifications(self._terms, self.tenants)
