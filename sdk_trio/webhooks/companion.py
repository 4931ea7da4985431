"""A part that works on the receiver's store beside its queue, and ends with it. Pure."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import trio

    from ..storage.ports import Store
    from ..tenants.tenancy import Tenancy


class Companion(Protocol):
    """What the runtime adds to a receiver that has tenants, such as notifications."""

    async def run(
        self, store: "Store", tenancy: "Tenancy", *, task_status: "trio.TaskStatus[None]"
    ) -> None:
        """Work on the open store; return once :meth:`close` was called and all is finished.

        Cancelled when the time of the drain is over. The store stays open until the end.
        """
        ...

    def close(self) -> None:
        """Begin nothing new: the drain has begun. A second call does nothing."""
        ...
