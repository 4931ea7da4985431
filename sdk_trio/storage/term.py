"""Terms: of several hosts on one store, one alone does a thing, for as long as it renews a lease.

One host leads the others (:class:`Leadership`): it reconciles and replicates. One runs the upgrade
from a single tenant. On SQLite nothing of this is needed: the lock of the data directory ends with
its holder (docs/adr/0024-store-files.md).

The lease is told by the store's clock, and its holder ends by its own clock before the lease can,
counted from before it asked. So two never act at once, however far the clocks of the hosts differ.
A host that stood still for longer wakes up in a term that is over: what it then writes names its
term, and is refused.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from ..base.logs import get_logger
from ..errors import StoreUnavailableError

_log = get_logger("storage")
_runtime_log = get_logger("runtime")

#: The seconds that a term lasts without renewal, and those between two renewals.
TERM_SECONDS: Final = 20.0
RENEW_SECONDS: Final = 5.0

#: The seconds before the end of the term within which the parts have to end.
MARGIN_SECONDS: Final = 6.0

#: The seconds between two questions whether nobody holds the lease.
ASK_SECONDS: Final = 5.0

#: The seconds for giving the lease up at the end.
LET_GO_SECONDS: Final = 2.0


#: In the place of a term, which is 1 at least: the store did not say whose the lease is.
_NO_ANSWER: Final = 0


class TermEndedError(StoreUnavailableError):
    """The term in which this was to be written is over: another host may have the lease."""


class TermStore(Protocol):
    """A store of which one owner at a time has a lease: the inbox, and that of the upgrade."""

    async def lead(self, *, seconds: float) -> int | None:
        """Take or renew the lease; return the number of the term, None while it is another's."""
        ...


async def ask(store: TermStore, seconds: float | None = None) -> int | None:
    """Ask for the lease, for :data:`TERM_SECONDS` by default; None: another's, 0: no answer.

    Raises:
        TermEndedError: the term that this host's writes name is over.
    """
    try:
        return await store.lead(seconds=TERM_SECONDS if seconds is None else seconds)
    except TermEndedError:
        raise
    except StoreUnavailableError as error:
        again = {"retry_in": RENEW_SECONDS} if seconds is None else {}
        _log.store_unavailable(error, **again)
        await trio.lowlevel.checkpoint()
        return _NO_ANSWER


async def keep_term(store: TermStore, term: int, asked: float) -> None:
    """Renew the lease; return when it is another's, or ends before an answer may come.

    ``asked`` is the time of Trio's clock before this host asked for the term.
    """
    while True:
        ends = asked + TERM_SECONDS - MARGIN_SECONDS
        with trio.move_on_at(ends):
            await trio.sleep(RENEW_SECONDS)
            # Counted from before the question: the store may have answered long ago.
            begun = trio.current_time()
            try:
                found = await ask(store)
            except TermEndedError:
                return
            if found == term:
                asked = begun
            elif found != _NO_ANSWER:
                # This host stood still, maybe with its clock. A lease that is ours anew was
                # another's meanwhile: what ran until now has no right to go on.
                return
        if trio.current_time() >= ends:
            return


#: Runs the parts of one term, whose number it gets, until it is cancelled.
Parts = Callable[[int], Awaitable[None]]


class Leadership:
    """Runs ``parts`` while this host leads, as often as it comes to lead.

    Args:
        store: the open inbox, whose store all hosts share.
        parts: runs those of a term; cancelled, it ends within :data:`MARGIN_SECONDS`.
        hurry: is called before that, so that parts which take their time bound it.
    """

    def __init__(self, store: TermStore, parts: Parts, hurry: Callable[[], None]) -> None:
        self._store = store
        self._parts = parts
        self._hurry = hurry
        #: The number of the term in which this host leads; None: it does not.
        self.term: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask for the lease, lead, and ask again, until cancelled; then give the lease up."""
        task_status.started()
        try:
            while True:
                asked = trio.current_time()
                term = await ask(self._store)
                if not term:
                    await trio.sleep(ASK_SECONDS)
                    continue
                self.term = term
                _runtime_log.info("runtime.leading", term=term)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._parts, term)
                        await keep_term(self._store, term, asked)
                        self._hurry()
                        nursery.cancel_scope.cancel()
                finally:
                    self.term = None
                _runtime_log.warning(
                    "runtime.leading_ended", term=term, hint="another host may lead from now on"
                )
        finally:
            with trio.move_on_after(LET_GO_SECONDS, shield=True):
                await ask(self._store, seconds=0.0)
