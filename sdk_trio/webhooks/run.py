"""Runs of handlers: one at a time for each key, with the outcome recorded in the inbox."""

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from ..base.cells import Cells, is_cell_cancelled
from ..base.http import Deadline, Expiry
from ..base.logs import Throttle, get_logger
from ..config import Settings
from ..errors import StoreLostError, StoreUnavailableError
from ..events import Drift, Event, decode_event
from ..records.deliveries import (
    Admission,
    Admitted,
    Dead,
    DeliveryRecord,
    Done,
    NewDelivery,
    Outcome,
    Parked,
    Postponed,
    Released,
    Renewed,
    Retry,
)
from ..storage.ports import Inbox
from . import answers
from .answers import Answer
from .arrival import VerifiedDelivery, resumed
from .counters import Counters
from .effects import Conclusions
from .invocation import Invocations, Run
from .outcomes import (
    DeliveryRetries,
    Failure,
    after_inline_failure,
    after_process_ends,
    after_queued_failure,
    must_run_alone,
    parked_reason,
    timeout_failure,
)
from .registry import BoundHandler, BoundHandlers
from .rejections import LINES, SECONDS

if TYPE_CHECKING:
    from ..records.tenants import Tenant
    from ..tenants.tenancy import TenantRuntime

_log = get_logger("webhooks")

T = TypeVar("T")

#: The seconds that a cancelled task may take to tell the store how its run ended: longer than a
#: slow disk's sync. If the store does not answer by then, the next start takes the delivery over.
CLEANUP_SECONDS = 5.0

#: The Retry-After, in seconds, while another delivery of the same key is still being handled.
BUSY_RETRY_SECONDS = 5.0

#: The seconds that the queue waits before it asks a failing store again.
STORE_RETRY_SECONDS = 1.0

#: The hint of ``runtime.left_behind``. An inline event that was released is its sender's to repeat,
#: as it is after any delivery without an answer.
LEFT_BEHIND = (
    "nothing ends these handlers; enqueued events are run again at the next start, inline ones "
    "when the sender delivers them again"
)

_STILL_THREADED = (
    "its thread cannot be stopped: the event stays claimed until it ends, and is not run beside it"
)
_STILL_RUNNING = "it holds a worker; set a timeout on each call that it makes"

#: The most events that one line of the log names.
_NAMED = 20

_DONE = Done()

_BUSY = answers.unavailable(BUSY_RETRY_SECONDS)


class _Flight(msgspec.Struct):
    """An inline run of one key, and the deliveries of the same key that wait for it."""

    raw: bytes
    settled: trio.Event | None = None  # made by the first delivery that waits: hardly any run does
    answer: Answer | None = None


class _Apart(msgspec.Struct):
    """An inline run in a task of its own, and how it ended for the request that waits."""

    ended: trio.Event = msgspec.field(default_factory=trio.Event)
    answer: Answer | None = None
    error: Exception | None = None
    awaited: bool = True


class _End(msgspec.Struct):
    """The end of a run, and whether the store is known to have it although it has failed.

    ``offset``: by how much the wall clock was ahead of the monotonic one then.
    """

    offset: float
    recorded: bool = False


class HeldLease(msgspec.Struct, eq=False):
    """One claim of a queued event: it waits in memory or runs.

    ``runs``: a worker has taken it. ``lost``: another process has taken the event over.
    """

    key: str
    since: float
    runs: bool = False
    lost: bool = False


class HeldLeases:
    """The leases of queued events that this process holds.

    What the store has leased to this process and is not in here, or an inline run, has no run: the
    call that took it was abandoned. It is given up at the next renewal, and fetched again.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, HeldLease] = {}

    def hold(self, key: str, *, since: float, again: bool = False) -> HeldLease | None:
        """Hold the lease of an event; None: a run of it holds one already.

        Args:
            key: the event's.
            since: when the lease began, in Unix seconds.
            again: the end of that run is in the store, so this is another claim.
        """
        if key in self._by_key and not again:
            return None
        lease = self._by_key[key] = HeldLease(key, since)
        return lease

    def drop(self, lease: HeldLease) -> None:
        """Stop renewing a lease; a later one of the same event is kept."""
        if self._by_key.get(lease.key) is lease:
            del self._by_key[lease.key]

    def lose(self, keys: Iterable[str]) -> list[str]:
        """Stop renewing leases that others have taken over; return the keys that were held.

        A run in progress keeps its lease, so that no other run of the event begins beside it here.
        """
        lost = [lease for key in keys if (lease := self._by_key.get(key)) is not None]
        for lease in lost:
            lease.lost = True
            if not lease.runs:
                self.drop(lease)
        return [lease.key for lease in lost]

    def regain(self, key: str) -> None:
        """Renew a lease again that was lost, because the store has given its event out anew."""
        if (lease := self._by_key.get(key)) is not None:
            lease.lost = False

    def __iter__(self) -> Iterator[str]:
        return (key for key, lease in self._by_key.items() if not lease.lost)


class RunPolicy(msgspec.Struct, frozen=True):
    """The differences between a run for a sender that waits and a run of the queue.

    Args:
        seconds: how long the handler may take; ``inf``: no scope is made for it. The queue ends
            runs by :meth:`Invocations.time_out`.
        after: decides what follows a failed run, of which the number is given.
        insists: a failing store is asked again until it has the outcome, because nobody delivers
            the event again. A sender that waits is told to do that.
    """

    seconds: float
    after: Callable[[Failure, int], Retry | Dead | Postponed]
    insists: bool


class _NoDeadline:
    """The deadline of a run that has none."""

    cancel_called = False
    cancelled_caught = False

    def __enter__(self) -> "_NoDeadline":
        return self

    def __exit__(self, *error: object) -> None:
        pass


_NO_DEADLINE = _NoDeadline()


def inline_deadline(seconds: float, expiry: Expiry | None) -> AbstractContextManager[Deadline]:
    """Limit a handler to ``seconds``, with the server's own deadline where it has one.

    The server's deadline spares the run a cancel scope, which would cost more than the check of its
    signature.
    """
    if expiry is None:
        return trio.CancelScope(relative_deadline=seconds)
    # Until the outcome has been recorded, the answer is that nothing is known of it.
    return expiry.move_on_after(seconds, _BUSY)


class DeliveryRunner:
    """Runs the handlers of verified deliveries and records how each run ended.

    One runner serves one inbox, because its table of runs in progress is what protects a claim
    under this process's own lease (docs/adr/0003-lease-tokens.md). Any number of
    tasks may call its methods.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: BoundHandlers,
        inbox: Inbox,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        stopwatch: Callable[[], float] = time.perf_counter,
        tenancy: "TenantRuntime | None" = None,
        conclusions: Conclusions | None = None,
        invocations: Invocations | None = None,
    ) -> None:
        options = settings.webhooks
        self.handlers = handlers
        self._inbox = inbox
        self._counters = counters
        self._throttle = Throttle(lines=LINES, seconds=SECONDS)
        self._clock = clock
        self._jitter = jitter
        self._stopwatch = stopwatch
        self._tenancy = tenancy
        self._inline_max_attempts = options.inline_max_attempts
        self._retries = DeliveryRetries(
            max_attempts=options.queue.max_attempts,
            base_seconds=options.queue.retry_base_seconds,
            cap_seconds=options.queue.retry_cap_seconds,
        )
        self._inline = RunPolicy(options.inline_timeout_seconds, self._after_inline, insists=False)
        self._queued = RunPolicy(inf, self._after_queued, insists=True)
        self._flights: dict[str, _Flight] = {}
        self.invocations = invocations or Invocations(settings)
        #: Inline runs of plain functions, which may outlast their requests, and outcomes of runs
        #: that were cancelled; None while the queue does not run: the former are refused.
        self.apart: Cells | None = None
        self._conclusions = conclusions or Conclusions(inbox)
        self._conclusions.runs = self.invocations.at_work
        #: True while an event that may have ended the process runs alone; inline deliveries are
        #: answered 503 meanwhile, so that nothing else can end the process.
        self.quarantined = False
        self._drifted: set[str] = set()
        # Ends that the store is asked to record, by key; it may have recorded them already.
        self._unsure: dict[str, _End] = {}
        #: The leases of the queue's events.
        self.leases: HeldLeases = HeldLeases()

    # -- inline ------------------------------------------------------------------------------

    async def run_inline(
        self,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None" = None,
        *,
        expiry: Expiry | None = None,
        placed: bool = False,
    ) -> Answer:
        """Run ``handler`` before the sender is answered, and return the answer.

        A second delivery of a key whose first is still running waits for that one's outcome.
        Cancelled in the middle of a run, it releases the claim and the attempt does not count; a
        plain function goes on in its thread, and its outcome is recorded. ``tenant`` is the
        delivery's as it was on its arrival, ``expiry`` the server's own deadline, where it has one.
        ``placed``: a plain function has its place among the threads.
        """
        delivery = arrival.delivery
        # For the host's own deliveries the key is the id. A plain field costs less than the
        # property, on the path that nearly all deliveries take.
        key = delivery.key if delivery.signer else delivery.webhook_id
        flight = self._flights.get(key)
        if flight is not None:
            return await self._wait_for(flight, delivery)
        if self.quarantined:
            return await self._refuse("quarantine", delivery)
        if handler.threads is not None and not placed:
            return await self._run_apart(arrival, handler, tenant)
        # No await between the look-up and this line: two deliveries cannot both be the first.
        flight = self._flights[key] = _Flight(delivery.raw)
        try:
            attempt = 1
            # A claim of a new key is not waited for; most handlers have ended before it is written.
            if not self._inbox.claim_new(delivery):
                admitted = await self._inbox.claim(delivery)
                if admitted.admission is not Admission.NEW:
                    flight.answer = self.answer_known(delivery, admitted)
                    return flight.answer
                if not admitted.same_body:
                    self.note_other_body(delivery)
                if admitted.earlier:
                    arrival = resumed(arrival, admitted)
                attempt += admitted.attempts
            outcome, failure = await self.run(
                arrival, handler, tenant, attempt, self._inline, expiry
            )
            flight.answer = _ask_again(failure) if isinstance(outcome, Retry) else answers.OK
            return flight.answer
        finally:
            del self._flights[key]
            if flight.settled is not None:
                flight.settled.set()

    async def _refuse(self, cause: str, delivery: NewDelivery) -> Answer:
        self._counters.count("refused")
        extra = self._throttle.fields(cause)
        if extra is not None:
            _log.warning("webhook.refused", cause=cause, webhook_id=delivery.webhook_id, **extra)
        await trio.lowlevel.checkpoint()
        return _BUSY

    async def _run_apart(
        self, arrival: VerifiedDelivery, handler: BoundHandler, tenant: "Tenant | None"
    ) -> Answer:
        """Run a plain function in a task of its own, and wait for it as long as a sender does.

        A thread cannot be stopped, so the run may outlast the request: its claim stands until it
        ends, and its outcome is recorded then. Redeliveries find the one or the other.
        """
        if self.apart is None:
            return await self._refuse("draining", arrival.delivery)
        run = _Apart()
        self.apart.start_soon(self._run_placed, run, arrival, handler, tenant)
        try:
            with trio.move_on_after(self._inline.seconds):
                await run.ended.wait()
        finally:
            run.awaited = False
        if run.error is not None:
            raise run.error
        if run.answer is None:
            self.report_still_running(self.invocations.at_work.get(arrival.delivery.key))
        return run.answer or _BUSY

    async def _run_placed(  # noqa: ASYNC910 - taking a place is a checkpoint, or it raises
        self,
        run: "_Apart",
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None",
    ) -> None:
        """Run inline once there is a place among the threads; without one nothing is claimed."""
        assert handler.threads is not None
        try:
            with trio.move_on_after(self._inline.seconds) as patience:
                async with handler.threads:
                    patience.deadline = inf
                    run.answer = await self.run_inline(arrival, handler, tenant, placed=True)
            if patience.cancelled_caught:
                run.answer = await self._refuse("threads", arrival.delivery)
        except Exception as error:
            # The request answers for it, as it does for a run in its own task.
            run.error = error
            if not run.awaited:
                if not isinstance(error, StoreUnavailableError):
                    raise
                _log.store_unavailable(error, webhook_id=arrival.delivery.webhook_id)
                await trio.lowlevel.checkpoint()
        finally:
            run.ended.set()

    def report_threads(self) -> None:
        """Log each plain function that is at work; at the end of a drain nothing can stop it."""
        for run in self.invocations.runs:
            if run.threaded:
                self.report_still_running(run)

    def report_still_running(self, run: Run | None) -> None:
        """Log that a handler is still at work, and what follows from that."""
        if run is not None:
            _log.warning(
                "webhook.still_running",
                **run.described(self._stopwatch()),
                hint=_STILL_THREADED if run.threaded else _STILL_RUNNING,
            )

    def seconds_of(self, run: Run) -> float:
        """Return how long a handler has been at work."""
        return self._stopwatch() - run.begun

    async def land(self) -> None:
        """Wait until no inline run is in progress, so that each has recorded how it ended."""
        while self._flights:
            await self._end_of(next(iter(self._flights.values())))
        await trio.lowlevel.checkpoint()

    async def _end_of(self, flight: _Flight) -> None:
        if flight.settled is None:
            flight.settled = trio.Event()
        await flight.settled.wait()

    async def _wait_for(self, flight: _Flight, delivery: NewDelivery) -> Answer:
        with trio.move_on_after(self._inline.seconds):
            await self._end_of(flight)
        if delivery.raw != flight.raw:
            await self._inbox.keep_other(delivery)
            self.note_other_body(delivery)
        self._counters.count("duplicate")
        return flight.answer or _BUSY

    def answer_known(self, delivery: NewDelivery, admitted: Admitted) -> Answer:
        """Answer a delivery whose key the inbox knows: 200, or 503 while the first one runs."""
        if not admitted.same_body:
            self.note_other_body(delivery)
        else:
            _log.info("webhook.duplicate", **_names_of(delivery), type=delivery.type)
        self._counters.count("duplicate")
        if admitted.admission is Admission.RUNNING:
            return _BUSY
        return answers.OK

    def note_other_body(self, delivery: NewDelivery) -> None:
        """Count and log a known key that came with another body; the inbox has kept both."""
        self._counters.count("different_body")
        _log.warning(
            "webhook.duplicate",
            **_names_of(delivery),
            type=delivery.type,
            address=delivery.address,
            different_body=True,
            hint="same signer and webhook-id, other bytes: the first ones stay, these are kept "
            "beside them ('events show' has both)",
        )

    # -- queued ------------------------------------------------------------------------------

    async def run_queued(
        self,
        arrival: VerifiedDelivery,
        *,
        attempt: int,
        fresh: bool = False,
        alone: bool = False,
        placed: bool = False,
    ) -> Outcome:
        """Run an event of the queue as run number ``attempt``; record and return its outcome.

        The start is durable before the handler runs, so that a run which kills the process is
        counted. Only the first run of a ``fresh`` event, which surely no process has begun before,
        does not wait for that: see docs/adr/0047-unawaited-claims.md. When the store
        fails, the outcome is held in memory and written once the store answers. Cancelled, it
        releases an unfinished event, and the attempt does not count; a plain function goes on in
        its thread, and its outcome is recorded. ``alone`` says that no other run is in progress,
        ``placed`` that a plain function has its place among the threads.
        """
        delivery = arrival.delivery
        handler = self.handlers.find(delivery.type, delivery.raw)
        # A route that cannot take it now is asked first, so that the store is written once.
        gate = None if handler is None else handler.gate
        held = None if gate is None else gate.hold()
        if held is not None:
            await self._end(delivery, attempt, held, self._queued)
            return held
        if handler is not None and handler.threads is not None and not placed:
            await self._take_place(handler.threads, delivery)
            try:
                return await self.run_queued(
                    arrival, attempt=attempt, fresh=fresh, alone=alone, placed=True
                )
            finally:
                handler.threads.release()
        outcome: Outcome = Released()
        try:
            ours, tenant = await self._start(delivery, fresh=fresh, alone=alone)
        except StoreLostError as error:  # it cannot be known whose event it is
            _log.store_unavailable(error, webhook_id=delivery.webhook_id)
            await trio.lowlevel.checkpoint()
            self._report(delivery, attempt, outcome)
            return outcome
        if not ours:
            self._note_lost([delivery.key])
            return outcome
        # The tenant counts as it is now: time has passed since the event was accepted.
        if delivery.tenant_id is not None and self._is_orphan(delivery, tenant):
            outcome = Dead(
                f"its tenant {delivery.tenant_id} is not known here: it was purged, and "
                "nobody else may have its events"
            )
        elif handler is None or (tenant is not None and self.is_held(handler, delivery, tenant)):
            outcome = Parked(self._reason_to_park(delivery, handler, tenant))
        else:
            outcome, _ = await self.run(arrival, handler, tenant, attempt, self._queued)
            return outcome
        await self._end(delivery, attempt, outcome, self._queued)
        return outcome

    async def _take_place(self, threads: trio.CapacityLimiter, delivery: NewDelivery) -> None:
        """Wait for a place among the threads before the run begins and counts."""
        placed = False
        try:
            await threads.acquire()
            placed = True
        finally:
            if not placed:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._release(delivery.key)

    async def _start(
        self, delivery: NewDelivery, *, fresh: bool, alone: bool
    ) -> "tuple[bool, Tenant | None]":
        """Record that a run of a queued event begins.

        Returns whether the event is still this process's, and its tenant as it is now.

        Raises:
            StoreLostError: the store cannot say whose it is, and never will; it is released.
        """
        started = False
        ours: bool | None = True
        tenant = None
        try:
            if fresh:
                self._inbox.begin(delivery.key, now=self._clock())
            else:
                ours = await self._keep(
                    lambda: self._inbox.start(delivery.key, now=self._clock(), alone=alone)
                )
            if ours is not False and delivery.tenant_id is not None:
                tenant = await self._retry_until_stored(lambda: self.tenant_of(delivery))
            started = True
        finally:
            if not started:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._release(delivery.key)
        return ours is not False, tenant  # noqa: ASYNC910 - the run that follows is a checkpoint

    async def _keep(self, write: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat ``write`` as :meth:`_retry_until_stored` does; None when the store is lost.

        A lost store has no later start that would find this event, so it is handled nevertheless.
        """
        try:
            return await self._retry_until_stored(write)
        except StoreLostError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
            return None

    async def _retry_until_stored(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``ask`` until the store answers, so that no run is forgotten.

        Raises:
            StoreLostError: the store will never answer again.
        """
        while True:
            try:
                return await ask()
            except StoreLostError:
                raise
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
                await trio.sleep(STORE_RETRY_SECONDS)

    # -- one run -----------------------------------------------------------------------------

    async def run(
        self,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None",
        attempt: int,
        policy: "RunPolicy",
        expiry: Expiry | None = None,
    ) -> tuple[Outcome, Failure | None]:
        """Run an event that is claimed for this: the handler, what follows, its record and report.

        Returns the outcome, and the failure that has led to it. Cancelled while the handler runs,
        it releases the event, and the attempt does not count.

        Raises:
            StoreUnavailableError: the outcome cannot be recorded, and ``policy`` does not insist.
        """
        delivery = arrival.delivery
        failure: Failure | None = None
        ended = False
        seconds = 0.0
        try:
            event = self._decode(arrival, attempt, tenant)
            begun = self._stopwatch()
            with (
                _NO_DEADLINE if policy.seconds == inf else inline_deadline(policy.seconds, expiry)
            ) as deadline:
                try:
                    failure = await self.invocations.call(handler, event, begun)
                finally:
                    seconds = round(self._stopwatch() - begun, 6)
                    self._counters.observe(event.type, seconds, handler.enqueue)
            if deadline.cancelled_caught:
                failure = timeout_failure(handler.name, policy.seconds)
            elif failure is not None and failure.cut_short and not deadline.cancel_called:
                # A handler that failed because we were cancelled, not because of its time, has not
                # failed by itself: our own Cancelled is raised here, and the event released below.
                await trio.lowlevel.checkpoint_if_cancelled()
            ended = True
        finally:
            if not ended:
                if self._conclusions.forget(delivery.key):
                    self._report(delivery, attempt, _DONE, handler, seconds)
                else:
                    with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                        await self._release(delivery.key)
        if self._conclusions.ended and self._conclusions.forget(delivery.key):
            self._note_late_failure(handler, delivery, failure)
            self._report(delivery, attempt, _DONE, handler, seconds)
            return _DONE, None
        outcome: Outcome = _DONE if failure is None else policy.after(failure, attempt)
        if failure is None and handler.gate is not None:
            outcome = Done(handler.gate.take_answer(event.key))
        if policy.insists and is_cell_cancelled():
            await self._outside_of_cell(
                partial(self._end, delivery, attempt, outcome, policy, handler, seconds)
            )
        else:
            await self._end(delivery, attempt, outcome, policy, handler, seconds)
        return outcome, failure

    async def _outside_of_cell(self, end: Callable[[], Awaitable[None]]) -> None:
        """Record the end of a run whose cell is cancelled: that was for the handler alone.

        Within the cell, a failing store could not be asked again.
        """
        assert self.apart is not None  # a cell is within it
        ended = trio.Event()

        async def record() -> None:
            try:
                await end()
            finally:
                ended.set()

        self.apart.start_soon(record)
        # It ends by itself: a stop cancels the task that is waited for.
        with trio.CancelScope(shield=True):
            await ended.wait()

    def _note_late_failure(
        self, handler: BoundHandler, delivery: NewDelivery, failure: Failure | None
    ) -> None:
        """Log a failure that changes nothing, because the handler has ended its event before."""
        if failure is not None:
            _log.error(
                "webhook.failed_after_done",
                **_names_of(delivery),
                type=delivery.type,
                handler=handler.name,
                error=failure.error,
                place=failure.place,
                hint="the handler had finished the event before; it is done and is not run again",
            )

    async def _end(
        self,
        delivery: NewDelivery,
        attempt: int,
        outcome: Outcome,
        policy: "RunPolicy",
        handler: BoundHandler | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Record and report how run number ``attempt`` ended, which took ``seconds``."""
        key = delivery.key if delivery.signer else delivery.webhook_id
        if policy.insists:
            end = _End(self._clock() - trio.current_time())
            await self._keep(partial(self._insist, key, outcome, end))
        else:
            await self._finish(key, outcome)
        self._report(delivery, attempt, outcome, handler, seconds)

    async def _insist(self, key: str, outcome: Outcome, end: "_End") -> None:
        """Record how a run ended, unless the store is known to have it from an earlier try."""
        if end.recorded:
            await trio.lowlevel.checkpoint()
            return
        self._unsure[key] = end
        if isinstance(outcome, Retry | Postponed) and outcome.at is not None:
            # The clock may have been set since the last try: due times are corrected in the store,
            # which does not have this one.
            step = self._clock() - trio.current_time() - end.offset
            outcome = msgspec.structs.replace(outcome, at=outcome.at + step)
        await self._finish(key, outcome)
        if self._unsure.get(key) is end:
            del self._unsure[key]

    def hold(self, key: str) -> HeldLease | None:
        """Hold the lease of an event that the store has given out; None: it has a run already.

        If a run of it is being recorded, the store has the end of that run, although this process
        has not heard of it yet. Recorded once more, that end would be the next run's.
        """
        end = self._unsure.pop(key, None)
        if end is not None:
            end.recorded = True
        self.leases.regain(key)
        return self.leases.hold(key, since=self._clock(), again=end is not None)

    def _note_lost(self, keys: Sequence[str]) -> None:
        self._counters.count("lease_lost", len(keys))
        _log.warning(
            "webhook.lease_lost",
            keys=keys[:_NAMED],
            events=len(keys),
            hint="another process has taken these events over, because this one stood still for "
            "longer than a lease; outcomes of their runs in this process are not recorded",
        )

    async def renew(self) -> Renewed:
        """Renew the leases of the events that wait in memory or run, and give up all others.

        No call that fetches events is in progress meanwhile: nothing names its events yet.

        Raises:
            StoreUnavailableError: the store cannot do it at present.
        """
        renewed = await self._inbox.renew([*self._flights, *self.leases], now=self._clock())
        lost = self.leases.lose(renewed.lost)
        if lost:
            self._note_lost(lost)
        if renewed.given_up:
            self._counters.count("lease_given_up", renewed.given_up)
            _log.warning(
                "webhook.lease_given_up",
                events=renewed.given_up,
                hint="the store did not answer in time when this process accepted or fetched these "
                "events; they are due again",
            )
        return renewed

    def _after_inline(self, failure: Failure, attempt: int) -> Retry | Dead:
        return after_inline_failure(
            failure, attempts=attempt, max_attempts=self._inline_max_attempts
        )

    def _after_queued(self, failure: Failure, attempt: int) -> Retry | Dead | Postponed:
        return after_queued_failure(
            failure,
            attempts=attempt,
            policy=self._retries,
            now=self._clock(),
            fraction=self._jitter(),
        )

    async def _release(self, key: str) -> None:
        try:
            await self._inbox.finish(key, Released(), now=self._clock())
        except StoreUnavailableError as error:
            # Its lease stays with this process, so the next start takes the delivery over.
            _log.store_unavailable(error, key=key)
            await trio.lowlevel.checkpoint()

    # -- tenant and handler ------------------------------------------------------------------

    async def tenant_of(self, delivery: NewDelivery) -> "Tenant | None":
        """Return the tenant of a delivery as it is now, None when it has none.

        Raises:
            StoreUnavailableError: the store cannot say.
        """
        if self._tenancy is None or delivery.tenant_id is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self._tenancy.service.recall(delivery.tenant_id)

    def is_held(
        self, handler: BoundHandler, delivery: NewDelivery, tenant: "Tenant | None"
    ) -> bool:
        """Say whether the handler does not run for the delivery's tenant at present."""
        if tenant is None:
            return self._is_orphan(delivery, tenant)
        return tenant.is_deleted or not (handler.run_when_suspended or tenant.is_active)

    def _is_orphan(self, delivery: NewDelivery, tenant: "Tenant | None") -> bool:
        """Say whether the delivery's tenant is gone: it must not run as an event without tenant."""
        return self._tenancy is not None and delivery.tenant_id is not None and tenant is None

    def _reason_to_park(
        self, delivery: NewDelivery, handler: BoundHandler | None, tenant: "Tenant | None"
    ) -> str:
        gone = delivery.tenant_id if self._is_orphan(delivery, tenant) else None
        return parked_reason(None if handler is None else tenant, gone)

    async def park(
        self, delivery: NewDelivery, handler: BoundHandler | None, tenant: "Tenant | None"
    ) -> Answer:
        """Keep a delivery that no handler runs at present, and answer 200.

        The sender has delivered correctly: an error would only make it repeat the delivery and in
        the end disable the endpoint. ``handler`` is None where the type has none; else ``tenant``
        is not active, or gone.
        """
        parked = Parked(self._reason_to_park(delivery, handler, tenant))
        admitted = await self._inbox.park(delivery, parked.reason)
        if admitted.admission is not Admission.NEW:
            return self.answer_known(delivery, admitted)
        if not admitted.same_body:
            self.note_other_body(delivery)
        self._report(delivery, 0, parked)
        return answers.OK

    def _decode(
        self, arrival: VerifiedDelivery, attempt: int, tenant: "Tenant | None" = None
    ) -> Event[Any]:
        """Build the typed event; count values that do not fit, and log the first of each type."""
        delivery = arrival.delivery
        drifts: list[Drift] = []
        event = decode_event(
            arrival.envelope,
            webhook_id=delivery.webhook_id,
            key=delivery.key if delivery.signer else delivery.webhook_id,
            raw=delivery.raw,
            header_timestamp=delivery.timestamp,
            received_at=delivery.received_at,
            attempt=arrival.earlier_attempts + attempt,
            generation=arrival.generation,
            catalog=self.handlers.catalog,
            on_drift=drifts.append,
            tenant=tenant,
        )
        if drifts:
            self._note_drift(drifts[0])
        return event

    def _note_drift(self, drift: Drift) -> None:
        self._counters.count("drift")
        if drift.type not in self._drifted:
            self._drifted.add(drift.type)
            _log.warning(
                "webhook.drifted",
                type=drift.type,
                path=drift.path,
                error=drift.message,
                hint="the payload differs from the typed class; event.data holds what fits",
            )

    async def _finish(self, key: str, outcome: Outcome) -> None:
        """Record the outcome of a run, also if the run ended after it was cancelled."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:  # noqa: ASYNC103 - whatever waits next is cancelled
            # Outside a shield the store's call would be cancelled before it writes, and the handler
            # would run again although it has finished.
            with trio.move_on_after(CLEANUP_SECONDS, shield=True) as patience:
                await self._inbox.finish(key, outcome, now=self._clock())
            if patience.cancelled_caught:
                raise
        else:
            await self._inbox.finish(key, outcome, now=self._clock())

    async def leave(self) -> None:
        """Release the events of all handlers at work, because the process ends without them.

        An event whose effects are being written is left to the end of its transaction: on
        PostgreSQL its row is locked, and a release that waits for it would keep all others.
        """
        for run in self.invocations.runs:
            if not self._conclusions.is_under_way(run.key):
                await self._release(run.key)
        await trio.lowlevel.checkpoint()

    # -- what ended the process --------------------------------------------------------------

    def condemn(self, record: DeliveryRecord) -> Dead | None:
        """Decide whether an event that ended the process is dead without another run."""
        return after_process_ends(
            record.process_ends,
            ran_alone=record.ran_alone,
            attempts=record.attempts,
            max_attempts=self._max_attempts(record),
        )

    def isolates(self, record: DeliveryRecord) -> bool:
        """Decide whether the next run of an event must be alone in the process."""
        return must_run_alone(
            record.process_ends,
            attempts=record.attempts,
            max_attempts=self._max_attempts(record),
        )

    def bury(self, delivery: NewDelivery, attempts: int, outcome: Dead) -> None:
        """Report an event that is dead without another run."""
        self._report(delivery, attempts, outcome)

    def _max_attempts(self, record: DeliveryRecord) -> int:
        handler = self.handlers.find(record.type, record.raw)
        inline = handler is not None and not handler.enqueue
        return self._inline_max_attempts if inline else self._retries.max_attempts

    def _report(
        self,
        delivery: NewDelivery,
        attempt: int,
        outcome: Outcome,
        handler: BoundHandler | None = None,
        seconds: float = 0.0,
    ) -> None:
        if isinstance(outcome, Done):
            self._counters.count("handled")
            if delivery.tenant_id is None and handler is not None:
                # Nearly always: no dictionary is made, which would be thrown away by a log that is
                # off.
                _log.info(
                    "webhook.handled",
                    webhook_id=delivery.webhook_id,
                    type=delivery.type,
                    attempt=attempt,
                    handler=handler.name,
                    seconds=seconds,
                )
                return
        fields = {**_names_of(delivery), "type": delivery.type, "attempt": attempt}
        if handler is not None:
            fields |= {"handler": handler.name, "seconds": seconds}
        match outcome:
            case Done():
                _log.info("webhook.handled", **fields)
            case Retry(at):
                self._counters.count("failed")
                wait = "redelivery" if at is None else round(at - self._clock(), 3)
                told = fields | self._failure_fields(delivery, outcome) | {"retry_in": wait}
                if outcome.asked:
                    _log.info("webhook.postponed", **told)
                else:
                    _log.warning("webhook.failed", **told)
            case Dead():
                self._counters.count("dead")
                _log.error("webhook.dead", **(fields | self._failure_fields(delivery, outcome)))
            case Parked(reason):
                self._counters.count("parked")
                _log.warning("webhook.parked", **fields, hint=reason)
            case Postponed(at, reason):
                wait = round(at - self._clock(), 3)
                _log.debug("webhook.postponed", **fields, reason=reason, retry_in=wait)
            case Released():
                _log.info("webhook.released", **fields)

    def _failure_fields(self, delivery: NewDelivery, outcome: Retry | Dead) -> dict[str, str]:
        handler = self.handlers.find(delivery.type, delivery.raw)
        fields = {
            "handler": None if handler is None else handler.name,
            "error": outcome.error,
            "place": outcome.place,
            "traceback": outcome.traceback,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _ask_again(failure: Failure | None) -> Answer:
    """Ask the sender to deliver again, after the delay that the handler asked for."""
    asked = None if failure is None else failure.retry_after
    return answers.HANDLER_FAILED if asked is None else answers.unavailable(asked)


def _names_of(delivery: NewDelivery) -> dict[str, Any]:
    """Return the log fields that name a delivery: its id, and its tenant if it has one."""
    if delivery.tenant_id is None:
        return {"webhook_id": delivery.webhook_id}
    return {"webhook_id": delivery.webhook_id, "tenant_id": delivery.tenant_id}
