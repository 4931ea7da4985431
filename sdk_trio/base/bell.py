"""Wake-up signals for tasks that wait for a change: a bell and a flag."""

import trio


class Bell:
    """Wakes all tasks that are waiting when :meth:`ring` is called.

    It has no memory: a task checks its condition, then waits for the next ring, without a
    checkpoint in between. A task that must await something in between needs a :class:`Flag`.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        # Created by the first waiting task: a ring without waiting tasks costs nothing.
        self._next: trio.Event | None = None

    def ring(self) -> None:
        """Wake every waiting task."""
        event, self._next = self._next, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait for the next ring; earlier rings do not count."""
        if self._next is None:
            self._next = trio.Event()
        await self._next.wait()


class Flag:
    """A signal to one task that remembers it was set until the task has seen it.

    Several calls of :meth:`set` while the task is busy wake it once. The task reads the current
    state, so nothing is lost.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Set the flag and wake the waiting task; a no-op if it is already set."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until the flag is set, then clear it. On cancellation the flag is unchanged."""
        await self._event.wait()
        # A trio.Event cannot be cleared, so it is replaced.
        self._event = trio.Event()
