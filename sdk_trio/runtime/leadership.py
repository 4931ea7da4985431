"""Leadership: of several hosts on one store, one alone reconciles and replicates.

A host leads for a term, by a lease in the store. The lease is told by the store's clock, and its
holder gives the parts up by its own clock before the lease can end, counted from before it asked.
So two never act at once, however far the clocks of the hosts differ. A host that stood still for
longer wakes up in a term that is over: what it then writes names its term, and is refused.

On SQLite nothing of this is needed: the lock of the data directory ends with its holder
(docs/adr/0025-the-lock-of-the-directory.md).
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ..base.logs import get_logger
from ..errors import StoreUnavailableError
from ..storage.ports import Inbox

_log = get_logger("runtime")

#: The seconds that a term lasts without renewal, and those between two renewals.
TERM_SECONDS: Final = 20.0
RENEW_SECONDS: Final = 5.0

#: The seconds before the end of the term within which the parts have to end.
MARGIN_SECONDS: Final = 6.0

#: The seconds between two questions whether nobody leads.
ASK_SECONDS: Final = 5.0

#: The seconds for giving the lease up at the end.
LET_GO_SECONDS: Final = 2.0

#: Runs the parts of one term, whose number it gets, until it is cancelled.
Lead = Callable[[int], Awaitable[None]]


class Leadership:
    """Runs ``lead`` while this host leads, as often as it comes to lead.

    Args:
        inbox: the open store that all hosts share.
        lead: runs the parts of a term; cancelled, it ends within :data:`MARGIN_SECONDS`.
        hurry: is called before that, so that parts which take their time bound it.
    """

    def __init__(self, inbox: Inbox, lead: Lead, hurry: Callable[[], None]) -> None:
        self._inbox = inbox
        self._lead = lead
        self._hurry = hurry
        #: The number of the term in which this host leads; None: it does not.
        self.term: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask for the lease, lead, and ask again, until cancelled; then give the lease up."""
        task_status.started()
        try:
            while True:
                asked = trio.current_time()
                term = await self._ask()
                if term is None:
                    await trio.sleep(ASK_SECONDS)
                    continue
                self.term = term
                _log.info("runtime.leading", term=term)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._lead, term)
                        await self._keep(term, asked)
                        self._hurry()
                        nursery.cancel_scope.cancel()
                finally:
                    self.term = None
                _log.warning(
                    "runtime.leading_ended", term=term, hint="another host may lead from now on"
                )
        finally:
            with trio.move_on_after(LET_GO_SECONDS, shield=True):
                await self._ask(seconds=0.0)

    async def _keep(self, term: int, asked: float) -> None:
        """Renew the lease; return when it is another's, or ends before an answer may come."""
        while True:
            ends = asked + TERM_SECONDS - MARGIN_SECONDS
            with trio.move_on_at(ends):
                await trio.sleep(RENEW_SECONDS)
                # Counted from before the question: the store may have answered long ago.
                begun = trio.current_time()
                found = await self._ask()
                if found == term:
                    asked = begun
                elif found is not None:
                    return  # it had ended, and is ours anew: what ran meanwhile has no right to
            if trio.current_time() >= ends:
                return

    async def _ask(self, seconds: float = TERM_SECONDS) -> int | None:
        try:
            return await self._inbox.lead(seconds=seconds)
        except StoreUnavailableError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
            return None
