"""A bell and a flag, for tasks that wait until something has changed."""

import trio


class Bell:
    """Wakes, at each :meth:`ring`, the tasks that wait at that moment.

    It remembers nothing: a task looks whether there is still something to wait for, and then waits
    for the next ring, without a checkpoint between the two. A task that has to await something
    between its look and its wait needs a :class:`Flag`.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        # Made by the first task that waits, so that a ring that nobody hears costs nothing.
        self._next: trio.Event | None = None

    def ring(self) -> None:
        """Wake every task that waits now."""
        event, self._next = self._next, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait for the next ring; what was rung before does not count."""
        if self._next is None:
            self._next = trio.Event()
        await self._next.wait()


class Flag:
    """Says "look again" to one task, and stays up until that task has seen it.

    However often it is raised meanwhile, the task looks once: it reads the present state and not
    the reasons, so nothing is lost.
    """

    __slots__ = ("_up",)

    def __init__(self) -> None:
        self._up = trio.Event()

    def up(self) -> None:
        """Raise it, and wake the task if it waits; raised already, it stays as it is."""
        self._up.set()

    async def wait(self) -> None:
        """Wait until it is up, and take it down. Cancelled, it is left as it is."""
        await self._up.wait()
        # An event of Trio's cannot be cleared, so the next one takes its place.
        self._up = trio.Event()
