"""Switches notifications off for a store whose settings do not enable them (spec 2.9, ADR 13)."""

import trio

from ..storage.ports import Store
from ..tenants.tenancy import Tenancy


class Silencer:
    """Has nobody told of what happens meanwhile; a :class:`~..webhooks.companion.Companion`."""

    def __init__(self) -> None:
        self._closed = trio.Event()

    async def run(
        self,
        store: Store,
        tenancy: Tenancy,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Switch them off until :meth:`close`; what they would have sent is not even written down.

        Raises:
            StoreUnavailableError: the store cannot do it at present.
        """
        await store.notifications.switch_off()
        task_status.started()
        await self._closed.wait()

    def close(self) -> None:
        """Let :meth:`run` return."""
        self._closed.set()
