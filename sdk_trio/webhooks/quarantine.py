"""Quarantine after a crash: events that may have ended the process run alone, before all others.

If the process ends again, only one event can have caused it. Events that only ran at the same time
in the earlier process finish here, and are no longer suspects. docs/adr/0023-quarantine.md has the
reasons, and why one crash alone proves nothing.
"""

from collections.abc import Awaitable, Callable, Mapping

import trio

from ..base.cells import current_cell, run_in_cell
from ..base.logs import get_logger
from ..errors import StoreUnavailableError
from ..records.deliveries import DeliveryRecord
from ..storage.ports import Inbox
from .arrival import VerifiedDelivery
from .claiming import Claimer
from .recording import CLEANUP_SECONDS, HeldLease
from .run import DeliveryRunner

_log = get_logger("webhooks")

#: Seconds that other runs wait for a suspect that runs alone. A handler that ends the process
#: usually does so early, and one that never returns must not stop all others.
ALONE_SECONDS = 30.0

#: Seconds that all suspects together may run alone. Inline deliveries are refused meanwhile, and
#: senders disable an endpoint that refuses for long.
QUARANTINE_SECONDS = 60.0

#: The seconds that the remaining suspects wait for one that exceeds ``ALONE_SECONDS``. If it ends
#: the process, events that ran at the same time would be blamed. Its handler may never return, so
#: the wait is bounded.
BLOCKED_SECONDS = 600.0

#: The maximum number of suspects that run alone, one after the other; further ones run like all
#: other events.
SUSPECTS_LIMIT = 100


class Quarantine:
    """Runs suspects alone at the start of a queue.

    Args:
        runner: runs the events; inline runs are refused while a suspect runs alone.
        inbox: the open store.
        claimer: claims the suspects.
        running: maps the cell of each run to its event, while it runs.
        is_closed: returns whether the queue has been closed, so that no further run begins.
        wake: makes the queue fetch events from the store.
    """

    def __init__(
        self,
        runner: DeliveryRunner,
        inbox: Inbox,
        claimer: Claimer,
        running: dict[trio.Nursery, VerifiedDelivery],
        *,
        is_closed: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._claimer = claimer
        self._running = running
        self._is_closed = is_closed
        self._wake = wake
        # The rest of QUARANTINE_SECONDS.
        self._seconds_left = QUARANTINE_SECONDS
        # The suspects of the start, whose time alone is over.
        self._first: frozenset[str] = frozenset()

    async def run(self, workers: trio.Nursery, background: trio.Nursery) -> None:
        """Run suspects, one after the other, for at most ``QUARANTINE_SECONDS``.

        If a suspect takes too long, it continues in ``workers`` together with new events. A task in
        ``background`` then holds back the remaining suspects for ``BLOCKED_SECONDS``: they must not
        run together with it again. A failing store is logged. Cancellation releases the suspects.
        """
        waiting: dict[str, HeldLease] = {}
        blocking: trio.Event | None = None
        begun = trio.current_time()
        until = begun + self._seconds_left
        try:
            suspects, waiting = await self._claimer.claim_suspects(limit=SUSPECTS_LIMIT)
            self._first = frozenset(record.key for record in suspects)
            for record in suspects:
                if self._is_closed() or blocking is not None or trio.current_time() >= until:
                    break
                held = waiting[record.key]
                arrival = await self._claimer.decode(record, held)
                if arrival is not None:
                    if not self._runner.queued.must_run_alone(record):
                        continue  # one crash proves little: it runs like all other events
                    blocking = await self._isolate(record, arrival, held, workers)
                del waiting[record.key]
        except StoreUnavailableError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
        finally:
            self._runner.inline.quarantined = False
            self._seconds_left -= trio.current_time() - begun
            if waiting and blocking is None:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._claimer.release(waiting)
        if waiting and blocking is not None:
            background.start_soon(self._release_after, blocking, waiting)

    async def run_late(
        self,
        record: DeliveryRecord,
        arrival: VerifiedDelivery,
        held: HeldLease,
        workers: trio.Nursery,
        *,
        until_idle: Callable[[], Awaitable[None]],
    ) -> bool:
        """Run a suspect alone that a pause or a limit kept back at the start.

        Args:
            record: the suspect.
            arrival: its decoded event.
            held: its lease.
            workers: runs it.
            until_idle: waits until no queued event runs or waits in memory.

        Returns:
            False if no time is left for it, if the quarantine of the start had it, or if the other
            runs did not end: it runs like all others.
        """
        begun = trio.current_time()
        limit = min(ALONE_SECONDS, self._seconds_left)
        if limit <= 0.0 or record.key in self._first:
            await trio.lowlevel.checkpoint()
            return False
        self._runner.inline.quarantined = True
        try:
            with trio.move_on_after(limit) as waiting:
                await until_idle()
                await self._runner.inline.wait_until_ended()
            if waiting.cancelled_caught or self._is_closed():
                return False
            await self._isolate(record, arrival, held, workers)
            return True
        finally:
            self._runner.inline.quarantined = False
            self._seconds_left -= trio.current_time() - begun

    async def _release_after(self, blocking: trio.Event, waiting: Mapping[str, HeldLease]) -> None:
        """Release suspects once the one before them has ended, or after ``BLOCKED_SECONDS``."""
        try:
            with trio.move_on_after(BLOCKED_SECONDS):
                await blocking.wait()
        finally:
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._claimer.release(waiting)
        self._wake()

    async def _isolate(
        self,
        record: DeliveryRecord,
        arrival: VerifiedDelivery,
        held: HeldLease,
        workers: trio.Nursery,
    ) -> trio.Event | None:
        """Run one event alone, for at most ``ALONE_SECONDS``.

        Returns None if it has ended by then, otherwise an event that is set when it ends.
        """
        _log.warning(
            "webhook.quarantined",
            webhook_id=record.webhook_id,
            type=record.type,
            process_ends=record.process_ends,
            hint="the process ended while this event ran; it now runs alone, to find out whether "
            "it is the cause",
        )
        self._runner.inline.quarantined = True
        ended = trio.Event()
        workers.start_soon(run_in_cell, self._run, record, arrival, held, ended)
        with trio.move_on_after(ALONE_SECONDS):
            await ended.wait()
        if ended.is_set():
            return None
        # Other events run at the same time from now on: the store must not mark its run as alone.
        await self._inbox.join(held.lease)
        return ended

    async def _run(
        self,
        record: DeliveryRecord,
        arrival: VerifiedDelivery,
        held: HeldLease,
        ended: trio.Event,
    ) -> None:
        cell = current_cell()
        assert cell is not None
        held.runs = True
        self._running[cell] = arrival
        try:
            await self._runner.queued.run(arrival, held, attempt=record.attempts + 1, alone=True)
        finally:
            del self._running[cell]
            self._runner.leases.drop(held)
            ended.set()
        self._wake()
