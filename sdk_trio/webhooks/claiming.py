"""Claiming queued events from the store: due ones and suspects, decoded or dead-lettered."""

from collections.abc import Callable, Mapping, Sequence

import trio

from ..base.logs import get_logger
from ..errors import DeliveryDecodingError, StoreUnavailableError
from ..records.deliveries import Dead, DeliveryRecord, Due
from ..storage.ports import Inbox
from .arrival import VerifiedDelivery, arrival_of
from .recording import HeldLease
from .run import DeliveryRunner

_log = get_logger("webhooks")


class Claimer:
    """Claims events for the queue of this process, and holds their leases.

    Args:
        runner: knows the held leases, and decides about events that ended the process.
        inbox: the open store.
        clock: returns Unix seconds.
    """

    def __init__(self, runner: DeliveryRunner, inbox: Inbox, *, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._inbox = inbox
        self._clock = clock

    async def claim_due(self, *, limit: int, free_workers: int) -> tuple[Due, dict[str, HeldLease]]:
        """Claim at most ``limit`` due events; return them with the leases held, by key.

        An event without a held lease already runs in this process. Pauses and policies are obeyed;
        at most ``free_workers`` events of limited handlers are claimed.

        Cancellation waits for the store, at most ``storage.commit.ANSWER_SECONDS``: an abandoned
        claim leaves leases behind until the next renewal.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        async with self._runner.leases.lock:
            with trio.CancelScope(shield=True):
                due = await self._inbox.claim_due(
                    limit=limit,
                    now=self._clock(),
                    # Not asked before the lock is held: the clock may be set meanwhile.
                    take_expired_until=self._runner.clock_watch.take_expired_until(),
                    limits=self._runner.pauses.limits(free_workers=free_workers),
                )
            held = self._hold(due)
        return due, held

    async def claim_suspects(
        self, *, limit: int
    ) -> tuple[Sequence[DeliveryRecord], dict[str, HeldLease]]:
        """Claim at most ``limit`` events that may have ended an earlier process.

        Cancellation and errors are those of :meth:`claim_due`.
        """
        async with self._runner.leases.lock:
            with trio.CancelScope(shield=True):
                due = await self._inbox.claim_suspects(
                    limit=limit,
                    now=self._clock(),
                    limits=self._runner.pauses.limits(free_workers=limit),
                )
            held = self._hold(due)
        return due.records, held

    def _hold(self, due: Due) -> dict[str, HeldLease]:
        if due.superseded:
            self._runner.recorder.report_superseded(due.superseded)
        leases, now = self._runner.leases, self._clock()
        held = {key: leases.hold(lease, since=now) for key, lease in due.leases.items()}
        return {key: lease for key, lease in held.items() if lease is not None}

    async def decode(self, record: DeliveryRecord, held: HeldLease) -> VerifiedDelivery | None:
        """Return a claimed event ready to run; None if it was dead-lettered instead.

        An event is dead-lettered if it ended the process too often, or if its body cannot be
        decoded. The latter happens only in a damaged store, and such an event would fail at every
        fetch.

        Raises:
            StoreUnavailableError: the dead letter cannot be recorded.
        """
        try:
            arrival = await arrival_of(record)
        except DeliveryDecodingError as error:
            await self._inbox.finish(held.lease, Dead(str(error)), now=self._clock())
        else:
            dead = self._runner.queued.dead_letter_of(record) if record.process_ends else None
            if dead is None:
                return arrival
            await self._inbox.finish(held.lease, dead, now=self._clock())
            self._runner.recorder.report(arrival.delivery, record.attempts, dead)
        self._runner.leases.drop(held)
        return None

    async def release(self, waiting: Mapping[str, HeldLease]) -> None:
        """Release claimed events that do not run; a store that fails is logged."""
        for held in waiting.values():
            self._runner.leases.drop(held)
        try:
            await self._inbox.release([held.lease for held in waiting.values()])
        except StoreUnavailableError as error:
            # The next renewal gives them up, or they expire.
            _log.store_unavailable(error, ids=[*waiting])
            await trio.lowlevel.checkpoint()
