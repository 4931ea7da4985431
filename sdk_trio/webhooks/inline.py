"""Inline runs: the sender waits for the handler, and the outcome decides the answer.

One run of a key is in flight at a time, and duplicates join it. The table of these runs also
protects a claim under this process's own lease (docs/adr/0003-lease-tokens.md).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import msgspec
import trio
from msgspec.structs import replace

from ..base.bell import Flag
from ..base.cells import Cells
from ..base.http import Expiry
from ..base.logs import Throttle, get_logger
from ..config import Settings
from ..errors import StoreUnavailableError
from ..records.deliveries import Admission, Dead, Done, Lease, NewDelivery, Retry
from ..storage.ports import Inbox
from . import answers
from .answers import Answer
from .arrival import VerifiedDelivery, resumed
from .bound import BoundHandler
from .clock_watch import ClockWatch
from .counters import Counters
from .invocation import Invocations
from .outcomes import Failure, after_inline_failure
from .recording import BUSY, DONE, STORE_RETRY_SECONDS, OutcomeRecorder
from .rejections import LINES, SECONDS
from .sharing import is_shared

if TYPE_CHECKING:
    from ..records.tenants import Tenant

_log = get_logger("webhooks")

#: The most ended runs in memory, and the most bytes of their bodies. There are few: each belongs to
#: a request that was being answered when the store failed.
MOST_UNRECORDED = 1000
MOST_UNRECORDED_BYTES = 64 << 20


class InFlight(msgspec.Struct):
    """An inline run in progress, and the deliveries of the same key that wait for it."""

    raw: bytes
    lease: Lease | None = None  # once it is claimed
    ended: trio.Event | None = None  # made by the first delivery that waits; most runs have none
    answer: Answer | None = None


class EndedRun(msgspec.Struct, eq=False):
    """A run that has ended, and whose outcome the store did not confirm.

    Its sender is answered 503, and the redelivery records the outcome instead of running the
    handler again. Nor need a success wait for that: its lease is renewed, and
    :meth:`InlineRuns.record_ended` records it once the store answers. ``seconds`` is the duration
    of the run.
    """

    lease: Lease
    arrival: VerifiedDelivery
    handler: BoundHandler
    outcome: Done | Dead
    seconds: float


class UnrecordedRuns:
    """The ended runs by key, the oldest first."""

    def __init__(self) -> None:
        #: Only :class:`UnrecordedRuns` changes it.
        self.by_key: dict[str, EndedRun] = {}
        #: Set when a success was added.
        self.added: Flag = Flag()
        self._body_bytes = 0

    @property
    def successes(self) -> Iterator[EndedRun]:
        """Return the runs that have succeeded."""
        return (run for run in self.by_key.values() if isinstance(run.outcome, Done))

    def add(self, run: EndedRun) -> list[str]:
        """Keep a run; older ones are dropped if there are too many. Return their keys."""
        self.remove(run.lease.key)
        self.by_key[run.lease.key] = run
        self._body_bytes += len(run.arrival.delivery.raw)
        dropped = []
        while len(self.by_key) > 1 and (
            len(self.by_key) > MOST_UNRECORDED or self._body_bytes > MOST_UNRECORDED_BYTES
        ):
            dropped.append(next(iter(self.by_key)))
            self.remove(dropped[-1])
        if isinstance(run.outcome, Done):
            self.added.set()
        return dropped

    def remove(self, key: str) -> None:
        """Remove the run of a key, if there is one."""
        run = self.by_key.pop(key, None)
        if run is not None:
            self._body_bytes -= len(run.arrival.delivery.raw)


class _ThreadedRun(msgspec.Struct):
    """An inline run of a plain function, and its result for the waiting request."""

    ended: trio.Event = msgspec.field(default_factory=trio.Event)
    answer: Answer | None = None
    error: Exception | None = None
    awaited: bool = True


class InlineRuns:
    """Runs handlers while their senders wait. Any number of tasks may call its methods."""

    def __init__(
        self,
        settings: Settings,
        inbox: Inbox,
        invocations: Invocations,
        recorder: OutcomeRecorder,
        counters: Counters,
        clock_watch: ClockWatch,
        *,
        clock: Callable[[], float],
    ) -> None:
        options = settings.webhooks
        self._seconds = options.inline_timeout_seconds
        self._max_attempts = options.inline_max_attempts
        self._inbox = inbox
        self._invocations = invocations
        self._recorder = recorder
        self._counters = counters
        self._clock_watch = clock_watch
        self._shares_store = is_shared(settings)
        self._clock = clock
        self._throttle = Throttle(lines=LINES, seconds=SECONDS)
        self._in_flight: dict[str, InFlight] = {}
        #: The runs whose outcomes could not be recorded.
        self.unrecorded: UnrecordedRuns = UnrecordedRuns()
        #: Tasks of plain functions, which may outlast their requests; None while the queue is not
        #: running: such runs are refused.
        self.tasks: Cells | None = None
        #: True while an event that may have ended the process runs alone. Deliveries are answered
        #: 503 meanwhile, so that nothing else can end the process.
        self.quarantined = False

    @property
    def leases(self) -> Iterator[Lease]:
        """Return the leases of the runs in flight, and of successes that are not recorded yet."""
        yield from (run.lease for run in self._in_flight.values() if run.lease is not None)
        yield from (run.lease for run in self.unrecorded.successes)

    async def run(
        self,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None" = None,
        *,
        expiry: Expiry | None = None,
    ) -> Answer:
        """Run ``handler`` before the sender is answered, and return the answer.

        A second delivery of a key whose run is in flight waits for that run's outcome. Cancellation
        during a run releases the claim, and the attempt does not count; a plain function continues
        in its thread, and its outcome is recorded.

        Args:
            arrival: the delivery.
            handler: the handler of its type.
            tenant: the tenant of the delivery, as it was on arrival.
            expiry: the server's own deadline, if it has one.

        Raises:
            StoreUnavailableError: the claim or the outcome cannot be recorded.
        """
        delivery = arrival.delivery
        # For the host's own deliveries the key is the id. A plain field costs less than the
        # property, and nearly all deliveries take this path.
        key = delivery.key if delivery.signer else delivery.webhook_id
        in_flight = self._in_flight.get(key)
        if in_flight is not None:
            return await self._join(in_flight, delivery)
        if self.unrecorded.by_key and key in self.unrecorded.by_key:
            return await self._answer_ended(self.unrecorded.by_key[key], delivery)
        if self.quarantined:
            return await self._refuse("quarantine", delivery)
        if handler.threads is not None:
            return await self._run_threaded(key, arrival, handler, tenant)
        # No await between the look-up and this call: two deliveries cannot both be the first.
        return await self._run_first(key, arrival, handler, tenant, expiry)

    async def wait_until_ended(self) -> None:
        """Wait until no run is in flight, so that each has recorded its outcome."""
        while self._in_flight:
            await self._end_of(next(iter(self._in_flight.values())))
        await trio.lowlevel.checkpoint()

    async def _run_first(
        self,
        key: str,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None",
        expiry: Expiry | None,
    ) -> Answer:
        """Claim the key, run the handler, record the outcome, and return the answer."""
        delivery = arrival.delivery
        in_flight = self._in_flight[key] = InFlight(delivery.raw)
        try:
            attempt = 1
            # The claim of a new key is not awaited; most handlers have ended before it is written.
            lease = in_flight.lease = self._inbox.claim_unawaited(delivery)
            if lease is None:
                until = self._clock_watch.take_expired_until() if self._shares_store else inf
                admitted = await self._inbox.claim(delivery, take_expired_until=until)
                lease = in_flight.lease = admitted.lease
                if lease is None:
                    in_flight.answer = self._recorder.answer_known(delivery, admitted)
                    return in_flight.answer
                if not admitted.same_body:
                    self._recorder.report_different_body(delivery)
                if admitted.earlier:
                    arrival = resumed(arrival, admitted)
                attempt += admitted.attempts
            ended = await self._invocations.run(
                arrival,
                handler,
                tenant,
                attempt,
                lease,
                handler.policy.timeout or self._seconds,
                expiry,
            )
            outcome: Done | Dead | Retry = DONE
            failure = None if ended.is_concluded else ended.failure
            if failure is not None:
                outcome = after_inline_failure(
                    failure,
                    attempts=attempt,
                    max_attempts=handler.policy.max_attempts or self._max_attempts,
                )
            if not ended.is_concluded:
                await self._record(lease, arrival, handler, outcome, ended.seconds)
            self._recorder.report(
                delivery, attempt, outcome, handler, ended.seconds, delivery.address
            )
            in_flight.answer = answers.OK
            if failure is not None and type(outcome) is Retry:
                in_flight.answer = _ask_again(failure)
            return in_flight.answer
        finally:
            self._end(key, in_flight)

    def _end(self, key: str, in_flight: InFlight) -> None:
        del self._in_flight[key]
        if in_flight.ended is not None:
            in_flight.ended.set()

    async def _record(
        self,
        lease: Lease,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        outcome: Done | Dead | Retry,
        seconds: float,
    ) -> None:
        """Record an outcome; keep a final one in memory if the store does not confirm it."""
        try:
            if not await self._recorder.record(lease, outcome):
                self._recorder.report_lost([lease.key])
        except (StoreUnavailableError, trio.Cancelled):
            # After a failure that is not final, the redelivery runs the handler again.
            if not isinstance(outcome, Retry):
                dropped = self.unrecorded.add(EndedRun(lease, arrival, handler, outcome, seconds))
                if dropped:
                    self._recorder.report_unrecorded(dropped)
            raise

    async def keep_recording(self) -> None:
        """Record successes that the store did not confirm, once it answers; until cancelled."""
        while True:
            await self.unrecorded.added.wait()
            while any(self.unrecorded.successes):
                await trio.sleep(STORE_RETRY_SECONDS)
                await self.record_ended()

    async def end(self) -> None:
        """Try a last time to record the ended runs, and wait for those in flight.

        Those that remain are logged, also if it is cancelled: their outcomes are lost with the
        process.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.record_ended)
                await self.wait_until_ended()
            await self.record_ended()
        finally:
            self.report_unrecorded()

    def report_unrecorded(self) -> None:
        """Log the ended runs whose outcomes are not recorded, before the process ends."""
        if self.unrecorded.by_key:
            self._recorder.report_unrecorded([*self.unrecorded.by_key])

    async def record_ended(self) -> None:
        """Try to record all successes that the store did not confirm."""
        async with trio.open_nursery() as nursery:
            for ended in [*self.unrecorded.successes]:
                nursery.start_soon(self._try_to_record, ended)

    async def _try_to_record(self, ended: EndedRun) -> None:
        key = ended.lease.key
        # Otherwise a redelivery records it, or has recorded it.
        if key not in self._in_flight and self.unrecorded.by_key.get(key) is ended:
            with suppress(StoreUnavailableError):
                await self._record_ended(ended)
        await trio.lowlevel.checkpoint()

    async def _record_ended(self, ended: EndedRun) -> InFlight:
        """Claim and record an ended run; deliveries of its key wait for that."""
        key = ended.lease.key
        in_flight = self._in_flight[key] = InFlight(ended.arrival.delivery.raw)
        try:
            await self._claim_and_record(ended, in_flight)
        finally:
            self._end(key, in_flight)
        return in_flight

    async def _claim_and_record(self, ended: EndedRun, in_flight: InFlight) -> None:
        """Claim an ended run as a redelivery would, record its outcome, and answer those who
        wait; an outcome that is obsolete, or that another process has replaced, is dropped."""
        key = ended.lease.key
        delivery = replace(ended.arrival.delivery, received_at=self._clock())
        admitted = await self._inbox.claim(
            delivery,
            take_expired_until=self._clock_watch.take_expired_until(),
            # If this claim is committed too late, the renewals of the run's lease keep it.
            token=ended.lease.token,
        )
        lease = in_flight.lease = admitted.lease
        if admitted.admission is Admission.RUNNING:
            return
        self.unrecorded.remove(key)
        if lease is not None and admitted.earlier != ended.arrival.earlier_attempts:
            # It was replayed since: the outcome is obsolete. A delivery that waits is answered 503,
            # and comes again.
            await self._recorder.release(lease)
            return
        attempt = admitted.attempts if lease is None else admitted.attempts + 1
        if lease is not None:
            await self._record(lease, ended.arrival, ended.handler, ended.outcome, ended.seconds)
        in_flight.answer = answers.OK
        is_done = admitted.admission is Admission.DONE and isinstance(ended.outcome, Done)
        if lease is None and not is_done:
            self._recorder.report_unrecorded([key])  # another process has it, or has ended it
            return
        # Without a lease it is done: the store has confirmed the outcome too late.
        self._recorder.report(
            delivery, attempt, ended.outcome, ended.handler, ended.seconds, delivery.address
        )

    def has_run_of(self, delivery: NewDelivery) -> bool:
        """Return whether a run of the delivery's key is in flight, or its outcome unrecorded."""
        if not (self._in_flight or self.unrecorded.by_key):
            return False
        return delivery.key in self._in_flight or delivery.key in self.unrecorded.by_key

    async def join(self, delivery: NewDelivery) -> Answer:
        """Return the answer of that run: wait for it, or record its outcome.

        Raises:
            StoreUnavailableError: the outcome cannot be recorded.
        """
        in_flight = self._in_flight.get(delivery.key)
        if in_flight is not None:
            return await self._join(in_flight, delivery)
        return await self._answer_ended(self.unrecorded.by_key[delivery.key], delivery)

    # -- deliveries that do not run ----------------------------------------------------------

    async def _join(self, in_flight: InFlight, delivery: NewDelivery) -> Answer:
        """Wait for the run in flight, as long as a sender does, and return its answer."""
        with trio.move_on_after(self._seconds):
            await self._end_of(in_flight)
        return await self._answer_duplicate(in_flight, delivery)

    async def _answer_ended(self, ended: EndedRun, delivery: NewDelivery) -> Answer:
        """Record the outcome of a run that has ended, instead of running the handler again."""
        return await self._answer_duplicate(await self._record_ended(ended), delivery)

    async def _answer_duplicate(self, in_flight: InFlight, delivery: NewDelivery) -> Answer:
        if delivery.raw != in_flight.raw:
            await self._inbox.keep_other(delivery)
            self._recorder.report_different_body(delivery)
        else:
            self._recorder.report_duplicate(delivery)
            await trio.lowlevel.checkpoint()
        self._counters.count("duplicate", signer=delivery.signer)
        return in_flight.answer or BUSY

    async def _end_of(self, in_flight: InFlight) -> None:
        if in_flight.ended is None:
            in_flight.ended = trio.Event()
        await in_flight.ended.wait()

    async def _refuse(self, cause: str, delivery: NewDelivery) -> Answer:
        self._counters.count("refused", signer=delivery.signer)
        extra = self._throttle.fields(cause)
        if extra is not None:
            _log.warning("webhook.refused", cause=cause, webhook_id=delivery.webhook_id, **extra)
        await trio.lowlevel.checkpoint()
        return BUSY

    # -- plain functions ---------------------------------------------------------------------

    async def _run_threaded(
        self, key: str, arrival: VerifiedDelivery, handler: BoundHandler, tenant: "Tenant | None"
    ) -> Answer:
        """Run a plain function in its own task, and wait for it as long as a sender does.

        A thread cannot be stopped, so the run may outlast the request. Its claim is held until it
        ends and its outcome is recorded; redeliveries find the claim or the outcome.
        """
        if self.tasks is None:
            return await self._refuse("draining", arrival.delivery)
        run = _ThreadedRun()
        self.tasks.start_soon(self._run_in_slot, run, key, arrival, handler, tenant)
        try:
            with trio.move_on_after(handler.policy.timeout or self._seconds):
                await run.ended.wait()
        finally:
            run.awaited = False
        if run.error is not None:
            raise run.error
        if run.answer is None:
            self._invocations.report_still_running(self._invocations.running.get(key))
        return run.answer or BUSY

    async def _run_in_slot(  # noqa: ASYNC910 - taking a slot is a checkpoint, or it raises
        self,
        run: _ThreadedRun,
        key: str,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None",
    ) -> None:
        """Run once a thread slot is free; nothing is claimed before."""
        assert handler.threads is not None
        delivery = arrival.delivery
        try:
            with trio.move_on_after(self._seconds) as patience:
                async with handler.threads:
                    patience.deadline = inf
                    # Another delivery of the key may have run while this one waited.
                    if self.has_run_of(delivery):
                        run.answer = await self.join(delivery)
                    elif self.quarantined:
                        run.answer = await self._refuse("quarantine", delivery)
                    else:
                        run.answer = await self._run_first(key, arrival, handler, tenant, None)
            if patience.cancelled_caught:
                run.answer = await self._refuse("threads", delivery)
        except Exception as error:
            # Raised again in the request's task, if it still waits.
            run.error = error
            if not run.awaited:
                if not isinstance(error, StoreUnavailableError):
                    raise
                _log.store_unavailable(error, webhook_id=delivery.webhook_id)
                await trio.lowlevel.checkpoint()
        finally:
            run.ended.set()


def _ask_again(failure: Failure) -> Answer:
    """Ask the sender to deliver again, after the delay that the handler requested."""
    asked = failure.retry_after
    return answers.HANDLER_FAILED if asked is None else answers.unavailable(asked)
