"""Switches notifications off for a store whose settings do not enable them (spec 2.9, ADR 13)."""

import trio

from ..storage.ports import Store
from ..tenants.tenancy import Tenancy


class Silencer:
    """Has nobody told of what happens meanwhile; a :class:`~..webhooks.companion.Companion`."""

    async def run(
        self,
        store: Store,
        tenancy: Tenancy,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Switch them off and return; what they would have sent is not even written down.

        Raises:
            StoreUnavailableError: the store cannot do it at present.
        """
        await store.notifications.switch_off()
        task_status.started()

    def close(self) -> None:
        """Do nothing: it has ended."""
