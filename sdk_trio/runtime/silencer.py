"""Marks notifications as off in the store, where the settings do not enable them.

Transitions go on writing outbox rows. The mark says that none of them will ever be announced, so
that whoever enables notifications later does not get a flood of old news (docs/adr/0013).
"""

import trio

from ..storage.ports import Store
from ..tenants.tenancy import Tenancy


class Silencer:
    """Marks notifications off while the store is open, as a ``webhooks.companion.Companion``."""

    def __init__(self) -> None:
        self._closed = trio.Event()

    async def run(
        self,
        store: Store,
        tenancy: Tenancy,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Mark notifications off, then wait for :meth:`close`; no message is recorded meanwhile.

        Raises:
            StoreUnavailableError: the store cannot do it at present.
        """
        await store.notifications.switch_off()
        task_status.started()
        await self._closed.wait()

    def close(self) -> None:
        """Let :meth:`run` return."""
        self._closed.set()
