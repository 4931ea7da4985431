"""Supervision of parts that run side by side, and the protocol of the receiver's companion."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import PartEndedError

if TYPE_CHECKING:
    import trio

    from ..storage.ports import Store
    from ..tenants.tenancy import TenantRuntime


class Part(Protocol):
    """A task that runs for as long as the runtime does, and reports its start."""

    async def __call__(self, *, task_status: "trio.TaskStatus[Any]") -> None:
        """Run until asked to end."""
        ...


async def keep(  # noqa: ASYNC128 - the part calls it
    name: str,
    part: Part,
    *,
    may_end: Callable[[], bool],
    task_status: "trio.TaskStatus[Any]",
) -> None:
    """Run a part, and raise an error if it returns while ``may_end`` returns False.

    A process with a part that ended silently is worse than a crashed one: it refuses deliveries for
    ever, and no service manager restarts it.

    Raises:
        PartEndedError: it returned too early; the message names it.
    """
    await part(task_status=task_status)
    if not may_end():
        raise PartEndedError(
            f"{name} ended unexpectedly, so the runtime stops; this is a bug in sdk_trio: please "
            "report it with the last lines of the log"
        )


class BackgroundTask(Protocol):
    """A part that the runtime adds to a receiver with tenants, such as notifications."""

    async def run(
        self, store: "Store", tenancy: "TenantRuntime", *, task_status: "trio.TaskStatus[None]"
    ) -> None:
        """Work on the open store; return once :meth:`close` was called and the work is finished.

        The receiver cancels it when the time of the drain is over, and keeps the store open until
        it has ended.
        """
        ...

    def close(self) -> None:
        """Begin nothing new, because the drain has begun. A second call does nothing."""
        ...
