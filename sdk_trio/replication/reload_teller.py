"""Takes requests for a reload, many as one, and tells whoever asked how it ended."""

from collections.abc import Callable

import trio

from ..base.bell import Bell


class ReloadTeller:
    """Stands between those who want a reload and the one task that does it.

    A request is a number. Settling one settles all before it: they wanted the same, the
    configuration as it is.
    """

    def __init__(self) -> None:
        self._asked = self._settled = 0
        self._applied = False
        self._bell = Bell()
        self._outcome = Bell()

    @property
    def newest(self) -> int:
        """The last request; 0: nobody has asked yet."""
        return self._asked

    def ask(self) -> int:
        """Ask for a reload, and return the request."""
        self._asked += 1
        self.wake()
        return self._asked

    def wake(self) -> None:
        """Have :meth:`wait_asked` look again whether it should go on waiting."""
        self._bell.ring()

    async def wait_asked(self, *, unless: Callable[[], bool]) -> None:
        """Wait until there is a request that is not settled, or ``unless`` says True."""
        await trio.lowlevel.checkpoint()
        while not unless() and self._settled >= self._asked:
            await self._bell.wait()

    def settle(self, *, applied: bool, up_to: int | None = None) -> None:
        """Say how the requests up to one, or all, have ended."""
        self._settled = self._asked if up_to is None else up_to
        self._applied = applied
        self._outcome.ring()

    async def wait_settled(self, request: int, *, unless: Callable[[], bool]) -> bool:
        """Wait for the end of a request, or until ``unless`` says True, which is no success."""
        await trio.lowlevel.checkpoint()
        while not unless():
            if self._settled >= request:
                return self._applied
            await self._outcome.wait()
        return False
