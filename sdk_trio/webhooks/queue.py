"""The bounded queue between the inbox and its workers, and its drain.

Committed events go through a memory channel of ``Queue:Capacity`` slots to ``Queue:Workers`` tasks.
A slot is reserved *before* the commit, so a committed event always has one, and a sender that finds
none is answered 503 before anything is stored. Retries, replayed events, events of an earlier
process and ordered events wait in the store. The feeder fetches them when they are due and a slot
is free.

Invariants: every event in the channel or in a worker has a lease of this process in the store, so
a crash loses nothing; only these leases are renewed, so no other one lasts; and ``_slots_used``
never exceeds the channel's size, so ``send_nowait`` cannot fail.
"""

from collections.abc import Callable
from math import inf

import trio

from ..base.bell import Bell
from ..base.cells import Cells, current_cell, run_in_cell
from ..base.clock import wall
from ..base.logs import Throttle, get_logger
from ..config import Settings
from ..errors import StoreLostError, StoreUnavailableError
from ..records.deliveries import Admission, DeliveryRecord, Postponed, Retry
from ..storage.open import LEASE_SECONDS
from ..storage.ports import Inbox
from . import answers
from .answers import Answer
from .arrival import VerifiedDelivery, resumed
from .claiming import Claimer
from .counters import Counters
from .invocation import Run
from .quarantine import Quarantine
from .recording import CLEANUP_SECONDS, STORE_RETRY_SECONDS, HeldLease
from .rejections import LINES, SECONDS
from .run import DeliveryRunner
from .run_watch import RunWatch
from .sharing import Sharing, is_shared

_log = get_logger("webhooks")

#: The interval at which the feeder polls for changes by other processes (``events replay``), in
#: seconds. It costs no disk access, because SQLite keeps a counter of changes in memory.
POLL_SECONDS = 0.5

#: The longest time between two fetches, in seconds. An expired lease gives no signal, and a signal
#: may be missed, so the store is polled without one.
FETCH_SECONDS = 5.0

#: The most records that the feeder fetches at once, which bounds the memory of their bodies.
FEED_LIMIT = 100

#: The Retry-After, in seconds, when the queue is full.
FULL_RETRY_SECONDS = 5.0

#: Seconds after which held leases are renewed, and others given up. A stall may last for
#: ``LEASE_SECONDS`` less this before another process takes running events over.
RENEW_SECONDS = 5.0

#: The longest wait of a due event after the store or this process was blocked, in seconds, if a
#: worker is free: a lease without a run is given up, and its event fetched.
PICK_UP_SECONDS = RENEW_SECONDS + FETCH_SECONDS

#: The same if the process that had the lease does not return.
TAKE_OVER_SECONDS = LEASE_SECONDS + FETCH_SECONDS


#: An event in the channel, the number of its next run, whether that is certainly its first run, and
#: its lease.
_Queued = tuple[VerifiedDelivery, int, bool, HeldLease]


class WorkerPool:
    """Accepts events for later, runs them in workers, and drains until the channel is empty.

    Args:
        settings: ``Webhooks:Queue`` gives the number of slots and of workers.
        runner: runs the events.
        inbox: the open store that keeps them.
        counters: counts accepted and refused events.
        clock: returns Unix seconds.
        after_crash: there are events of a process that did not end properly; those that may have
            ended it run alone first.
    """

    def __init__(
        self,
        settings: Settings,
        runner: DeliveryRunner,
        inbox: Inbox,
        counters: Counters,
        *,
        clock: Callable[[], float] = wall,
        after_crash: bool = False,
    ) -> None:
        options = settings.webhooks.queue
        self._runner = runner
        self._inbox = inbox
        self._counters = counters
        self._clock = clock
        self._after_crash = after_crash
        self._throttle = Throttle(lines=LINES, seconds=SECONDS)
        self._capacity = options.capacity
        self._workers = options.workers
        self._send: trio.MemorySendChannel[_Queued]
        self._receive: trio.MemoryReceiveChannel[_Queued]
        self._send, self._receive = trio.open_memory_channel(options.capacity)
        self._slots_used = 0
        # The event that each worker runs, by the nursery of its task.
        self._running: dict[trio.Nursery, VerifiedDelivery] = {}
        # True while due events may wait in the store: also at the start, because the store of an
        # earlier process has not been polled yet.
        self._store_has_due = True
        self._next_due_at = inf
        # True while events wait for a limit of their handler: a worker that gets free lets one in.
        self._limited_waits = False
        # The limited event that was claimed although no worker was free. The next worker that has
        # ended a run takes it, before those in the channel: otherwise a backlog of other handlers
        # would keep limited events out. One at a time, because it uses a token of its rate, and a
        # slot, while it waits. It is set only while no worker waits for the channel.
        self._ahead: _Queued | None = None
        self._feed_wanted = trio.Event()
        self._slot_freed = Bell()
        self._run_ended = Bell()
        self._feeder_blocked = False
        self._closed = False
        #: The number of workers' runs that have ended since the start.
        self.ended_runs = 0
        # No deadline: it ends with the workers, for which Trio waits in any case. While a plain
        # function runs in its thread, no other process may claim its event.
        self._renewing = trio.CancelScope(shield=True)
        self.ended: trio.Event = trio.Event()
        self._claimer = Claimer(runner, inbox, clock=clock)
        self._quarantine = Quarantine(
            runner,
            inbox,
            self._claimer,
            self._running,
            is_closed=lambda: self._closed,
            wake=self.wake,
        )
        runner.pauses.on_change = self.wake
        self._sharing = Sharing(inbox, self, clock=clock) if is_shared(settings) else None
        self._run_watch = RunWatch(
            runner.invocations,
            self._running,
            options.handler_timeout_seconds,
            runner.handlers.timeouts,
        )

    @property
    def depth(self) -> int:
        """Return how many events wait in the memory channel (``sdk_queue_depth``)."""
        return self._slots_used

    @property
    def capacity(self) -> int:
        """Return the upper limit of :attr:`depth`."""
        return self._capacity

    @property
    def unfinished(self) -> int:
        """Return how many events wait in memory or run in a worker."""
        return self._slots_used + len(self._running)

    @property
    def long_runs(self) -> tuple[Run, ...]:
        """Return the queued runs that have lasted :data:`~.run_watch.LONG_RUN_SECONDS` or more."""
        return self._run_watch.long_runs

    @property
    def workers(self) -> int:
        """Return the maximum number of concurrent runs."""
        return self._workers

    @property
    def _free_workers(self) -> int:
        """The number of events that may be claimed and that a worker begins at once."""
        return self._workers - len(self._running) - self._slots_used

    @property
    def _claimable(self) -> float:
        """The number of events this process may still lease; infinite while it shares none."""
        if self._sharing is None or not self._sharing.is_wanted:
            return inf
        return self._free_workers + self._sharing.prefetch

    @property
    def has_spare_workers(self) -> bool:
        """Return whether workers are free, and nothing waits for them in memory or in the store."""
        return self._free_workers > 0 and self._slots_used == 0 and not self._store_has_due

    @property
    def idle(self) -> bool:
        """Return whether no event waits in memory and no worker runs one."""
        return self._slots_used == 0 and not self._running

    # -- accepting ---------------------------------------------------------------------------

    async def accept(self, arrival: VerifiedDelivery, *, direct: bool = True) -> Answer:
        """Commit an event to the inbox, then queue it; answer 200, or 503 when the queue is full.

        A refused event is not in the store. Cancellation does not undo a commit. An event that is
        not ``direct`` stays in the store, and is claimed as its pause or its handler's limits
        allow.
        """
        # While the feeder waits for a slot, older events in the store take precedence. Otherwise a
        # flood of new events would take every slot, and the store would grow without bound.
        if self._closed or self._feeder_blocked or self._slots_used >= self._capacity:
            await trio.lowlevel.checkpoint()
            return self._refuse(arrival)
        self._slots_used += 1
        # An ordered event is claimed from the store, which knows the order even after a restart
        # (docs/adr/0003-lease-tokens.md). So is any event while older ones wait in the store: it
        # would overtake them.
        direct = direct and not (arrival.delivery.ordered or self._store_has_due)
        if direct and self._sharing is not None:
            direct = self._claimable >= 0  # this event has a slot already
        delivery, queued = arrival.delivery, False
        try:
            # Nearly all stores have one process, so that is checked without a call.
            clock_watch = self._runner.clock_watch
            until = inf if self._sharing is None else clock_watch.take_expired_until()
            admitted = await self._inbox.accept(delivery, leased=direct, take_expired_until=until)
            if admitted.admission is not Admission.NEW:
                return self._runner.recorder.answer_known(arrival.delivery, admitted)
            if not admitted.same_body:
                self._runner.recorder.report_different_body(arrival.delivery)
            self._runner.recorder.report_received(delivery)
            if admitted.lease is not None and not self._closed:
                if admitted.earlier:
                    arrival = resumed(arrival, admitted)
                held = self._runner.leases.hold(admitted.lease, since=delivery.received_at)
                if held is not None:
                    queued = True
                    is_first = admitted.attempts == 0
                    self._send.send_nowait((arrival, admitted.attempts + 1, is_first, held))
            return answers.OK
        finally:
            # A commit that was cancelled, or not confirmed in time, may still succeed; the answer
            # to the sender's redelivery shows that. The next renewal then gives the lease up, and
            # the feeder finds the event. The slot is freed in any case.
            if not queued:
                self._free_slot()
                self.wake()

    def _refuse(self, arrival: VerifiedDelivery) -> Answer:
        self._counters.count("full", signer=arrival.delivery.signer)
        extra = self._throttle.fields(self._closed)
        if extra is not None:
            _log.warning(
                "queue.full",
                webhook_id=arrival.delivery.webhook_id,
                capacity=self._capacity,
                draining=self._closed,
                **extra,
            )
        return answers.unavailable(FULL_RETRY_SECONDS)

    # -- running -----------------------------------------------------------------------------

    async def run(  # noqa: ASYNC128 - _run_workers calls it
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run workers, feeder and lease renewal until :meth:`close` and the channel is empty.

        After a crash, events that may have caused it run first. On cancellation, the workers
        release their events; those in the channel stay in the store. It waits for a plain function
        in its thread even then, and ``webhook.still_running`` names it.
        """
        with self._receive, self._send:
            async with trio.open_nursery() as background:
                background.start_soon(self._keep_leases)
                background.start_soon(self._runner.clock_watch.run, self.wake)
                background.start_soon(self._runner.inline.keep_recording)
                background.start_soon(self._run_watch.run)
                if self._sharing is not None:
                    background.start_soon(self._sharing.run)
                # Set before the start is reported, so that no inline delivery can run concurrently
                # with a suspect.
                self._runner.inline.quarantined = self._after_crash
                try:
                    await self._run_workers(background, task_status=task_status)
                finally:
                    self._renewing.cancel()
                background.cancel_scope.cancel()
        self.ended.set()

    async def _run_workers(
        self, background: trio.Nursery, *, task_status: trio.TaskStatus[None]
    ) -> None:
        async with trio.open_nursery() as lasting:
            tasks = Cells(lasting)
            self._runner.use_tasks(tasks)
            try:
                task_status.started()
                async with trio.open_nursery() as workers:
                    if self._after_crash:
                        await self._quarantine.run(workers, background)
                    background.start_soon(self._feed, workers)
                    for _ in range(self._workers):
                        workers.start_soon(self._keep_working)
            finally:
                # Inside the nursery, while it is still open: no task can be started in a closed
                # one.
                self._runner.use_tasks(None)
                tasks.close()

    @property
    def closed(self) -> bool:
        """Return whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Accept nothing new; the workers finish the channel's events, then :meth:`run` returns."""
        self._closed = True
        self._send.close()

    # -- workers -----------------------------------------------------------------------------

    async def _keep_working(self) -> None:
        """Run a worker until the channel has ended, even if a run has been cancelled."""
        while await run_in_cell(self._work):
            pass

    async def _work(self) -> None:
        cell = current_cell()
        assert cell is not None
        while True:
            while (ahead := self._take_ahead()) is not None:
                await self._run(cell, ahead)
                if self._receive.statistics().current_buffer_used:
                    break  # an event of another handler is next
            try:
                queued = await self._receive.receive()
            except trio.EndOfChannel:
                return  # noqa: ASYNC910 - receive() is a checkpoint
            await self._run(cell, queued)

    def _take_ahead(self) -> _Queued | None:
        queued, self._ahead = self._ahead, None
        if queued is not None:
            self.wake()  # the feeder claims the next one
        return queued

    async def _run(self, cell: trio.Nursery, queued: _Queued) -> None:
        """Run an event in the cell of a worker."""
        arrival, attempt, is_first, held = queued
        self._running[cell] = arrival
        self._free_slot()
        try:
            if held.lost:
                await trio.lowlevel.checkpoint()
                return
            held.runs = True
            # The start of a run whose lease may have expired is awaited: it fails if another
            # process has claimed the event.
            age = self._clock() - held.since
            is_first = is_first and -LEASE_SECONDS < age < LEASE_SECONDS
            outcome = await self._runner.queued.run(
                arrival, held, attempt=attempt, is_first=is_first
            )
        finally:
            del self._running[cell]
            self.ended_runs += 1
            self._runner.leases.drop(held)
            self._run_ended.ring()
        # The next event of an ordered lane may run now, the feeder must know the due time of a
        # retry, and a free slot matters only while events wait in the store.
        if (
            arrival.delivery.ordered
            or self._store_has_due
            or self._limited_waits
            or isinstance(outcome, Retry | Postponed)
        ):
            self.wake()

    # -- feeding -----------------------------------------------------------------------------

    async def _feed(self, workers: trio.Nursery) -> None:
        while True:
            self._feed_wanted = trio.Event()
            await self._wait_for_slot()
            if self._closed:
                return
            try:
                await self._fetch(workers)
                await self._wait_for_work()
            except StoreLostError:
                return  # a lost store gives this process no more events
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
                await trio.sleep(STORE_RETRY_SECONDS)

    async def _wait_for_slot(self) -> None:
        await trio.lowlevel.checkpoint()
        try:
            while self._slots_used >= self._capacity:
                await self._slot_freed.wait()
        finally:
            self._feeder_blocked = False

    async def release_waiting(self) -> int:
        """Release the events in memory that no worker has begun; return how many there were.

        They wait in the store then, where other processes claim them. No attempt is used.
        """
        queued = [] if self._ahead is None else [self._ahead]
        self._ahead = None
        buffered = self._receive.statistics().current_buffer_used
        queued.extend(self._receive.receive_nowait() for _ in range(buffered))
        waiting: dict[str, HeldLease] = {}
        for *_, held in queued:
            self._free_slot()
            if not held.lost:
                waiting[held.key] = held
        self._store_has_due = self._store_has_due or bool(waiting)
        if waiting:
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._claimer.release(waiting)
        await trio.lowlevel.checkpoint()
        return len(waiting)

    async def _fetch(self, workers: trio.Nursery) -> None:
        free_workers = self._free_workers
        claimable = self._claimable
        # Not before half of what was leased in advance has begun: few claims of many events.
        if claimable <= (0 if self._sharing is None else self._sharing.prefetch // 2):
            # Each worker that gets free wakes the feeder while the store has due events.
            self._store_has_due, self._next_due_at = True, inf
            await trio.lowlevel.checkpoint()
            return
        if self._limited_waits and free_workers <= 0 and self._ahead is None:
            free_workers = 1
        due, waiting = await self._claimer.claim_due(
            limit=int(min(FEED_LIMIT, claimable)),
            free_workers=free_workers,
        )
        self._limited_waits = due.limited
        self._next_due_at = inf if due.next_due_at is None else due.next_due_at
        try:
            for record in due.records:
                held = waiting.get(record.key)
                if held is None:
                    continue  # a run already has its lease
                is_first = record.key in due.first_runs
                if not await self._queue(record, held, workers, is_first=is_first):
                    break
                del waiting[record.key]
        finally:
            if waiting:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._claimer.release(waiting)
        self._store_has_due = due.more
        if due.more:
            self.wake()

    async def _queue(
        self, record: DeliveryRecord, held: HeldLease, workers: trio.Nursery, *, is_first: bool
    ) -> bool:
        """Queue one fetched record once a slot is free; return False if the queue has closed."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return False
        arrival = await self._claimer.decode(record, held)
        if arrival is None:
            return True
        if record.process_ends and self._runner.queued.must_run_alone(record):
            # A pause or a limit has kept it from the quarantine. New events go to the store
            # meanwhile, so that the others end.
            self._store_has_due = True
            self.wake()
            if await self._quarantine.run_late(
                record, arrival, held, workers, until_idle=self._wait_until_idle
            ):
                return True
        self._store_has_due = self._feeder_blocked = self._slots_used >= self._capacity
        await self._wait_for_slot()
        if self._closed:
            return False
        # No checkpoint from here on, during which the slot could be used for another event.
        queued = (arrival, record.attempts + 1, is_first, held)
        is_busy = not self._receive.statistics().tasks_waiting_receive
        goes_ahead = is_busy and self._ahead is None and self._is_limited(arrival)
        self._slots_used += 1
        if goes_ahead:
            self._ahead = queued
        else:
            self._send.send_nowait(queued)
        return True

    async def _wait_until_idle(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self.idle:
            await self._run_ended.wait()

    def _is_limited(self, arrival: VerifiedDelivery) -> bool:
        delivery = arrival.delivery
        handler = self._runner.handlers.find(delivery.type, delivery.raw, delivery.signer)
        return handler is not None and handler.limited

    async def _wait_for_work(self) -> None:
        """Wait until the feeder is woken, a retry is due, or another process has written.

        At most ``FETCH_SECONDS``.
        """
        latest = trio.current_time() + FETCH_SECONDS
        while True:
            pause = min(POLL_SECONDS, max(0.0, self._next_due_at - self._clock()))
            with trio.move_on_after(pause) as scope:
                await self._feed_wanted.wait()
            if not scope.cancelled_caught or self._clock() >= self._next_due_at:
                return
            if trio.current_time() >= latest:
                return
            if await self._inbox.changed_elsewhere():
                return

    def wake(self) -> None:
        """Make the feeder poll the store at once, after this process has added events."""
        self._feed_wanted.set()

    def _free_slot(self) -> None:
        self._slots_used -= 1
        self._slot_freed.ring()

    # -- leases ------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        with self._renewing:
            pause = RENEW_SECONDS
            while True:
                await trio.sleep(pause)
                pause = RENEW_SECONDS
                try:
                    await self._renew()
                except StoreUnavailableError as error:
                    pause = STORE_RETRY_SECONDS
                    _log.store_unavailable(error, retry_in=pause)

    async def _renew(self) -> None:
        renewed = await self._runner.renew()
        if renewed.given_up:
            self.wake()
