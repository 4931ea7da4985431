"""Queued runs: one event of the queue, from its claim to its recorded outcome."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ..base.cells import Cells, is_cell_cancelled
from ..base.logs import get_logger
from ..config import Settings
from ..errors import StoreLostError
from ..events.coalescing import SUPERSEDED
from ..records.deliveries import (
    Dead,
    DeliveryRecord,
    Done,
    NewDelivery,
    Outcome,
    Released,
)
from ..records.synthetic import is_synthetic
from ..storage.open import LEASE_SECONDS
from ..storage.ports import Inbox
from ..storage.subjects import find_newer_handled, find_superseding
from .arrival import VerifiedDelivery
from .bound import BoundHandler, BoundHandlers
from .invocation import Invocations
from .outcomes import DeliveryRetries, after_process_ends, after_queued_failure, must_run_alone
from .parking import Parking
from .pauses import Pauses
from .recording import CLEANUP_SECONDS, DONE, HeldLease, OutcomeRecorder, retry_until_stored

if TYPE_CHECKING:
    from ..records.tenants import Tenant

_log = get_logger("webhooks")


class QueuedRuns:
    """Runs events of the queue. Each has a lease of this process.

    ``jitter`` returns a random number in [0, 1); ``clock`` Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: BoundHandlers,
        inbox: Inbox,
        invocations: Invocations,
        recorder: OutcomeRecorder,
        parking: Parking,
        pauses: Pauses,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        options = settings.webhooks
        self._handlers = handlers
        self._inbox = inbox
        self._invocations = invocations
        self._recorder = recorder
        self._parking = parking
        self._pauses = pauses
        self._clock = clock
        self._jitter = jitter
        self._inline_max_attempts = options.inline_max_attempts
        self._retries = DeliveryRetries.of_settings(settings)
        #: Tasks that record the outcomes of cancelled runs; None while the queue does not run.
        self.tasks: Cells | None = None

    async def run(
        self,
        arrival: VerifiedDelivery,
        held: HeldLease,
        *,
        attempt: int,
        is_first: bool = False,
        alone: bool = False,
    ) -> Outcome:
        """Run an event as run number ``attempt``; record and return its outcome.

        The start is durable before the handler runs, so that a run which kills the process is
        counted. Only the first run of an event, which certainly no process has started before, does
        not wait for that: see docs/adr/0047-unawaited-claims.md. If the store fails,
        the outcome stays in memory and is written once the store answers. Cancellation releases an
        unfinished event, and the attempt does not count; a plain function continues in its thread,
        and its outcome is recorded.

        Args:
            arrival: the event.
            held: its lease, which the caller drops afterwards.
            attempt: counted from 1.
            is_first: no run of it has started.
            alone: no other run is in progress.
        """
        delivery = arrival.delivery
        if self._pauses.active and self._pauses.holds(delivery.type, delivery.signer):
            # It was claimed before the pause. The next claim lets it wait in the store.
            return await self._end(delivery, held, attempt, Released())
        handler = self._handlers.find(delivery.type, delivery.raw, delivery.signer)
        # Check the route first: if it is paused, the store is written only once.
        gate = None if handler is None else handler.gate
        postponed = None if gate is None else gate.hold()
        if postponed is not None:
            return await self._end(delivery, held, attempt, postponed)
        threads = None if handler is None else handler.threads
        has_slot = has_started = False
        try:
            if threads is not None:
                await threads.acquire()  # before the run starts and counts
                has_slot = True
            if is_first:
                self._inbox.start_unawaited(held.lease, now=self._clock())
            elif not await self._start(held, alone=alone):
                has_started = True
                return Released()
            tenant = None
            if delivery.tenant_id is not None:
                # The current state of the tenant counts: it may have changed since the acceptance.
                tenant = await retry_until_stored(lambda: self._parking.tenant_of(delivery))
            if self._pauses.active and self._pauses.holds(delivery.type, delivery.signer):
                # The pause began while a thread or the start was awaited.
                await trio.lowlevel.checkpoint()
                return Released()
            has_started = True
            return await self._run_started(arrival, held, handler, tenant, attempt)
        except StoreLostError as error:  # the tenant cannot be looked up
            _log.store_unavailable(error, webhook_id=delivery.webhook_id)
            await trio.lowlevel.checkpoint()
            self._recorder.report(delivery, attempt, Released())
            return Released()
        finally:
            if not has_started:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._recorder.release(held.lease)
            if threads is not None and has_slot:
                threads.release()

    async def _start(self, held: HeldLease, *, alone: bool) -> bool:
        """Record the start of a run; False: its lease is stale.

        If the store is lost, the event runs anyway: no later start could find it.
        """
        try:
            is_started = await retry_until_stored(
                lambda: self._inbox.start(held.lease, now=self._clock(), alone=alone)
            )
        except StoreLostError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
            return True
        if not is_started:
            held.lost = True
            self._recorder.report_lost([held.key])
        return is_started

    async def _run_started(
        self,
        arrival: VerifiedDelivery,
        held: HeldLease,
        handler: BoundHandler | None,
        tenant: "Tenant | None",
        attempt: int,
    ) -> Outcome:
        """Run the handler of an event whose start is recorded; record and return the outcome."""
        delivery = arrival.delivery
        if delivery.tenant_id is not None and self._parking.is_orphan(delivery, tenant):
            reason = (
                f"its tenant {delivery.tenant_id} is unknown here: it was purged, and no other "
                "tenant may get its events"
            )
            return await self._end(delivery, held, attempt, Dead(reason))
        if handler is None or (
            tenant is not None and self._parking.is_suspended(handler, delivery, tenant)
        ):
            parked = self._parking.outcome(delivery, handler, tenant)
            return await self._end(delivery, held, attempt, parked)
        newer = None
        if is_synthetic(delivery.webhook_id):
            newer = await retry_until_stored(lambda: find_superseding(self._inbox, delivery))
        # One that was replayed after it had been superseded runs after all.
        elif handler.policy.coalesce and not arrival.generation:
            newer = await retry_until_stored(lambda: find_newer_handled(self._inbox, delivery))
        if newer is not None:
            superseded = Done(reason=f"{SUPERSEDED}{newer}")
            await self._recorder.record_until_stored(held, superseded)
            self._recorder.report_superseded([(delivery.key, newer)])
            return superseded
        ended = await self._invocations.run(arrival, handler, tenant, attempt, held.lease)
        outcome: Outcome = DONE
        if not ended.is_concluded:
            if ended.failure is not None:
                outcome = after_queued_failure(
                    ended.failure,
                    attempts=attempt,
                    policy=self._retries.of(handler.policy),
                    now=self._clock(),
                    fraction=self._jitter(),
                )
            elif handler.gate is not None:
                outcome = Done(handler.gate.take_answer(held.key))
            is_recorded = (
                outcome is DONE
                and not held.lost
                and self._inbox.end_unawaited(held.lease, now=self._clock())
            )
            if is_recorded:
                pass
            elif not is_cell_cancelled():
                await self._recorder.record_until_stored(held, outcome)
            elif not await self._record_outside_cell(held, outcome):
                outcome = Released()
        self._recorder.report(delivery, attempt, outcome, handler, ended.seconds)
        return outcome

    async def _end(
        self, delivery: NewDelivery, held: HeldLease, attempt: int, outcome: Outcome
    ) -> Outcome:
        """Record, report and return the outcome of an event whose handler does not run."""
        await self._recorder.record_until_stored(held, outcome)
        self._recorder.report(delivery, attempt, outcome)
        return outcome

    async def _record_outside_cell(self, held: HeldLease, outcome: Outcome) -> bool:
        """Record the outcome of a run whose cell was cancelled to end the handler.

        Inside the cell, a failing store could not be retried. A shutdown cancels the recording
        task. Returns False if the store has failed for longer than a lease lasts; the event is then
        claimed again.
        """
        assert self.tasks is not None  # a cell is within it
        recorded = trio.Event()
        recording = trio.CancelScope()

        async def record() -> None:
            try:
                with recording:
                    await self._recorder.record_until_stored(held, outcome)
            finally:
                recorded.set()

        self.tasks.start_soon(record)
        with trio.move_on_after(LEASE_SECONDS, shield=True) as patience:
            await recorded.wait()
        recording.cancel()
        return not patience.cancelled_caught

    # -- events that may have ended the process ----------------------------------------------

    def dead_letter_of(self, record: DeliveryRecord) -> Dead | None:
        """Return the dead letter of an event that ended the process; None: it may run again."""
        return after_process_ends(
            record.process_ends,
            ran_alone=record.ran_alone,
            attempts=record.attempts,
            max_attempts=self._max_attempts(record),
        )

    def must_run_alone(self, record: DeliveryRecord) -> bool:
        """Return whether the next run of an event must be alone in the process."""
        return must_run_alone(
            record.process_ends,
            attempts=record.attempts,
            max_attempts=self._max_attempts(record),
        )

    def _max_attempts(self, record: DeliveryRecord) -> int:
        handler = self._handlers.find(record.type, record.raw, record.signer)
        if handler is not None and handler.policy.max_attempts is not None:
            return handler.policy.max_attempts
        inline = handler is not None and not handler.enqueue
        return self._inline_max_attempts if inline else self._retries.max_attempts
