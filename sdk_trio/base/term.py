"""Terms: only one of several hosts does a task, for as long as it renews a lease.

One host leads the others (:class:`Leadership`): it reconciles and replicates. One runs the upgrade
from a single tenant. SQLite does not need terms: the lock of the data directory ends with its
holder (docs/adr/0024-store-files.md).

The lease ends by the store's clock. Its holder stops earlier, by its own clock, counted from before
its request. So two hosts never act at once, however far their clocks differ. If a host was
suspended for longer, its term is over when it resumes: its writes name the term, and are refused.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from ..errors import StoreUnavailableError
from .logs import get_logger

_log = get_logger("storage")
_runtime_log = get_logger("runtime")

#: The seconds that a term lasts without renewal, and those between two renewals.
TERM_SECONDS: Final = 20.0
RENEW_SECONDS: Final = 5.0

#: The seconds before the end of the term in which the parts have to end.
MARGIN_SECONDS: Final = 6.0

#: The seconds between two requests for a lease that another host holds.
ASK_SECONDS: Final = 5.0

#: The time limit for giving the lease up at the end, in seconds.
LET_GO_SECONDS: Final = 2.0


#: Instead of a term, which is at least 1: the store did not answer.
_NO_ANSWER: Final = 0


class TermEndedError(StoreUnavailableError):
    """The term that the write names is over: another host may have the lease."""


class TermStore(Protocol):
    """A store with a lease that one owner at a time holds: the inbox, and that of the upgrade."""

    async def lead(self, *, seconds: float) -> int | None:
        """Take or renew the lease; return the term's number, None while another owner has it."""
        ...


async def request_term(store: TermStore, seconds: float | None = None) -> int | None:
    """Request the lease, for :data:`TERM_SECONDS` by default; None: refused, 0: no answer.

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
    """Renew the lease; return when another owner has it, or :data:`MARGIN_SECONDS` before its end.

    ``asked`` is the time of Trio's clock before this host requested the term.
    """
    while True:
        ends = asked + TERM_SECONDS - MARGIN_SECONDS
        with trio.move_on_at(ends):
            await trio.sleep(RENEW_SECONDS)
            # Counted from before the request: the store may have handled it long ago.
            begun = trio.current_time()
            try:
                found = await request_term(store)
            except TermEndedError:
                return
            if found == term:
                asked = begun
            elif found != _NO_ANSWER:
                # This host was suspended, maybe with its clock. Another host may have had the lease
                # meanwhile: the parts must not continue, even if the lease is ours again.
                return
        if trio.current_time() >= ends:
            return


#: Runs the parts of one term until it is cancelled; its argument is the term's number.
Parts = Callable[[int], Awaitable[None]]


class Leadership:
    """Runs ``parts`` whenever this host leads.

    Args:
        store: the open inbox, whose store all hosts share.
        parts: runs the parts of a term; when cancelled, it ends within :data:`MARGIN_SECONDS`.
        on_end_soon: called before that, so that slow parts limit their time.
    """

    def __init__(self, store: TermStore, parts: Parts, on_end_soon: Callable[[], None]) -> None:
        self._store = store
        self._parts = parts
        self._on_end_soon = on_end_soon
        #: The number of the term in which this host leads; None: it does not.
        self.term: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Request the lease, lead, and request it again, until cancelled; then give it up."""
        task_status.started()
        try:
            while True:
                asked = trio.current_time()
                term = await request_term(self._store)
                if not term:
                    await trio.sleep(ASK_SECONDS)
                    continue
                self.term = term
                _runtime_log.info("runtime.leading", term=term)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._parts, term)
                        await keep_term(self._store, term, asked)
                        self._on_end_soon()
                        nursery.cancel_scope.cancel()
                finally:
                    self.term = None
                _runtime_log.warning(
                    "runtime.leading_ended", term=term, hint="another host may lead from now on"
                )
        finally:
            with trio.move_on_after(LET_GO_SECONDS, shield=True):
                await request_term(self._store, seconds=0.0)
