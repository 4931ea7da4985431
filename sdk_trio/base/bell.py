"""A bell that may ring many times, for tasks that wait until something has changed."""

import trio


class Bell:
    """Wakes, at each :meth:`ring`, the tasks that wait at that moment.

    It remembers nothing: a task looks whether there is still something to wait for, and then waits
    for the next ring, without a checkpoint between the two. A flag that stays up until somebody
    takes it down is a :class:`trio.Event` that is replaced.
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
