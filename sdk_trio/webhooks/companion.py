"""Supervise the runtime's long-running tasks, and define the protocol of background tasks."""

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


async def supervise(  # noqa: ASYNC128 - the part calls task_status.started()
    name: str,
    part: Part,
    *,
    may_end: Callable[[], bool],
    task_status: "trio.TaskStatus[Any]",
) -> None:
    """Run a part, and raise an error if it returns while ``may_end`` returns False.

    If a part ended silently, the process would be worse off than after a crash: it would refuse
    deliveries forever, and no service manager would restart it.

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

        The receiver cancels this task at the end of the drain timeout, and keeps the store open
        until the task has ended.
        """
        ...

    def close(self) -> None:
        """Start no new work, because the drain has begun. A second call is a no-op."""
        ...
