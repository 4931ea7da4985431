"""The bounded queue between the inbox and its workers, and their drain.

Committed events go through a memory channel of ``Queue:Capacity`` places to ``Queue:Workers``
tasks. The place is reserved *before* the commit, so an event that was committed always has one,
and a sender that finds no place is answered 503 before anything is stored. Retries, replayed
events, events of an earlier process, and ordered events wait in the store; the feeder fetches them
when they are due and a place is free.

Invariants: every event in the channel or in a worker has a lease of this process in the store, so
nothing is lost by a crash; only these leases are renewed, so nothing else keeps one; and
``_places_taken`` never exceeds the channel's size, so that ``send_nowait`` cannot fail.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import trio

from ..base.bell import Bell
from ..base.cells import Cells, current_cell, run_in_cell
from ..base.clock import wall
from ..base.logs import Throttle, get_logger
from ..config import Settings
from ..errors import DeliveryDecodingError, StoreLostError, StoreUnavailableError
from ..records.deliveries import Admission, Dead, DeliveryRecord, Postponed, Retry
from ..storage.open import LEASE_SECONDS
from ..storage.ports import Inbox
from . import answers
from .answers import Answer
from .arrival import VerifiedDelivery, arrival_of, resumed
from .counters import Counters
from .invocation import Run
from .leases import HeldLease
from .recording import CLEANUP_SECONDS, STORE_RETRY_SECONDS
from .rejections import LINES, SECONDS
from .run import DeliveryRunner

_log = get_logger("webhooks")

#: The interval at which the feeder asks for changes of other processes (``events replay``), in
#: seconds. It costs no disk access, because SQLite keeps a counter of changes in memory.
POLL_SECONDS = 0.5

#: The longest time between two fetches, in seconds: whatever is due is found without any sign of
#: it. A lease that expires gives none, and a sign may be missed.
FETCH_SECONDS = 5.0

#: The most records that the feeder fetches at once, which bounds the memory of their bodies.
FEED_LIMIT = 100

#: The Retry-After, in seconds, when the queue is full.
FULL_RETRY_SECONDS = 5.0

#: The seconds after which held leases are renewed, and others given up. A stall may last for
#: ``LEASE_SECONDS`` less this before another process takes running events over.
RENEW_SECONDS = 5.0

#: The longest wait of a due event after a stall of the store or of this process, in seconds, where
#: a worker is free: a lease without a run is given up, and its event fetched.
PICK_UP_SECONDS = RENEW_SECONDS + FETCH_SECONDS

#: The same where the process that had the lease does not come back.
TAKE_OVER_SECONDS = LEASE_SECONDS + FETCH_SECONDS

#: The seconds that other runs wait for a suspect that runs alone. A handler that ends the process
#: does so early as a rule, and one that never returns must not hold up all others for ever.
ALONE_SECONDS = 30.0

#: The seconds that suspects run alone altogether: inline deliveries are refused meanwhile, and
#: senders disable an endpoint that refuses for long.
QUARANTINE_SECONDS = 60.0

#: The seconds that the remaining suspects wait for a suspect that takes longer than
#: ``ALONE_SECONDS``: beside it they would be blamed if it ended the process. The wait is bounded,
#: because that handler may never return.
APART_SECONDS = 600.0

#: The most suspects that run alone one after the other; further ones run like all other events.
SUSPECTS_LIMIT = 100

#: The seconds after which a run is reported as long, and its worker counts as held.
LONG_RUN_SECONDS = 60.0

#: The interval in seconds at which runs are compared with their limits.
WATCH_SECONDS = 1.0

#: The smallest step of the wall clock against the monotonic one, in seconds, that counts as a clock
#: that was set; time services correct smaller ones all the time.
STEP_SECONDS = 2.0

#: Pause between two comparisons of this host's clock with the store's, in seconds.
COMPARE_SECONDS = 20.0


#: An event in the channel, the number of its next run, whether that is surely its first, its lease.
_Queued = tuple[VerifiedDelivery, int, bool, HeldLease]


class WorkerPool:
    """Accepts events for later, runs them in workers, and drains until the channel is empty.

    Args:
        settings: ``Webhooks:Queue`` gives the number of places and of workers.
        runner: runs the events.
        inbox: the open store that keeps them.
        counters: counts accepted and refused events.
        clock: returns Unix seconds.
        after_crash: events of a process that did not end properly were found; those that may have
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
        self._places_taken = 0
        self._running = 0
        # The event that each worker runs, by the nursery of its task.
        self._held: dict[trio.Nursery, VerifiedDelivery] = {}
        self._time_limit = options.handler_timeout_seconds
        # When each long run is reported next, by its key.
        self._next_report: dict[str, float] = {}
        # True while events that are due may wait on disk. It begins as True, because the store of
        # an earlier process has not been looked at yet.
        self._behind = True
        self._next_due_at = inf
        self._logged_offset = 0.0
        # By how much the wall clock is ahead of the monotonic one, when it was set last, and
        # whether leases and due times are right since.
        self._offset = 0.0
        self._stepped_at = -inf
        self._corrected = True
        self._feed_wanted = trio.Event()
        self._place_freed = Bell()
        self._feeder_blocked = False
        self._closed = False
        # No deadline: it ends with the workers, for which Trio waits in any case, and as long as a
        # plain function is in its thread nobody else may take its event.
        self._renewing = trio.CancelScope(shield=True)
        self.ended: trio.Event = trio.Event()
        # Leases are taken from the store and compared with it one after the other.
        self._taking = trio.Lock()

    @property
    def depth(self) -> int:
        """Return how many events wait in the memory channel (``sdk_queue_depth``)."""
        return self._places_taken

    @property
    def capacity(self) -> int:
        """Return the bound of :attr:`depth`."""
        return self._capacity

    @property
    def unfinished(self) -> int:
        """Return how many events wait in memory or run in a worker."""
        return self._places_taken + self._running

    @property
    def long_runs(self) -> tuple[Run, ...]:
        """Return the runs of the queue that have lasted :data:`LONG_RUN_SECONDS`, or more."""
        seconds_of = self._runner.invocations.seconds_of
        return tuple(run for _, run in self._runs() if seconds_of(run) >= LONG_RUN_SECONDS)

    @property
    def workers(self) -> int:
        """Return how many events are run at once."""
        return self._workers

    @property
    def idle(self) -> bool:
        """Say whether no event waits in memory and no worker runs one."""
        return self._places_taken == 0 and self._running == 0

    # -- accepting ---------------------------------------------------------------------------

    async def accept(self, arrival: VerifiedDelivery) -> Answer:
        """Commit an event to the inbox, then queue it; answer 200, or 503 when there is no room.

        A refused event is not in the store. Cancellation does not undo a commit.
        """
        # While the feeder waits for a place, the older events on disk go first: otherwise a flood
        # of new events would take each place that becomes free, and the store would grow without
        # bound.
        if self._closed or self._feeder_blocked or self._places_taken >= self._capacity:
            await trio.lowlevel.checkpoint()
            return self._refuse(arrival)
        self._places_taken += 1
        # An ordered event takes its turn in the store, which knows the order also after a restart
        # (docs/adr/0003-lease-tokens.md). So does any event while older ones
        # wait on disk: it would overtake them.
        direct = not (arrival.delivery.ordered or self._behind)
        delivery, queued = arrival.delivery, False
        # A plain field costs less than the property, for the host's own deliveries.
        key = delivery.key if delivery.signer else delivery.webhook_id
        # Held from now on, so that a renewal in between does not give it up.
        lease = self._runner.leases.hold(key, since=delivery.received_at) if direct else None
        try:
            admitted = await self._inbox.accept(arrival.delivery, leased=direct)
            if admitted.admission is not Admission.NEW:
                return self._runner.recorder.answer_known(arrival.delivery, admitted)
            if not admitted.same_body:
                self._runner.recorder.report_different_body(arrival.delivery)
            self._counters.count("accepted")
            if direct and not self._closed:
                if admitted.earlier:
                    arrival = resumed(arrival, admitted)
                if lease is None:
                    lease = self._runner.leases.hold_claimed(key, since=self._clock())
                fresh, queued = admitted.attempts == 0, lease is not None
                if lease is not None:
                    self._send.send_nowait((arrival, admitted.attempts + 1, fresh, lease))
            return answers.OK
        finally:
            # A commit that was cancelled, or not confirmed in time, may still succeed; the sender
            # learns that from its redelivery. The next renewal gives our lease up then, and the
            # feeder finds the event. The place goes back in any case.
            if not queued:
                if lease is not None:
                    self._runner.leases.drop(lease)
                self._free_place()
                self._want_feed()

    def _refuse(self, arrival: VerifiedDelivery) -> Answer:
        self._counters.count("full")
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

        After a crash, events that may have caused it run first. Cancelled, the workers release
        their events; those in the channel stay in the store. A plain function in its thread is
        waited for, also after a cancellation: ``webhook.still_running`` names it then.
        """
        self._offset = self._clock() - trio.current_time()
        with self._receive, self._send:
            async with trio.open_nursery() as background:
                background.start_soon(self._keep_leases)
                background.start_soon(self._watch_clock)
                background.start_soon(self._watch_threads)
                background.start_soon(self._watch_runs)
                # Set before the start is reported, so that no inline delivery can run beside a
                # suspect.
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
        async with trio.open_nursery() as apart:
            tasks = Cells(apart)
            self._runner.use_tasks(tasks)
            try:
                task_status.started()
                async with trio.open_nursery() as workers:
                    if self._after_crash:
                        await self._run_suspects(workers, background)
                    background.start_soon(self._feed)
                    for _ in range(self._workers):
                        workers.start_soon(self._keep_working)
            finally:
                # In the body of its nursery, which so cannot have closed: nobody finds it closed.
                self._runner.use_tasks(None)
                tasks.close()

    @property
    def closed(self) -> bool:
        """Say whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Take nothing new; the workers finish the channel's events, then :meth:`run` returns."""
        self._closed = True
        self._send.close()

    # -- suspects ----------------------------------------------------------------------------

    async def _run_suspects(self, workers: trio.Nursery, background: trio.Nursery) -> None:
        """Run events that may have ended earlier processes, each alone, before all others.

        If the process ends now, only one event can have done it. Events that merely ran beside it
        earlier finish here, and are no suspects any more. If one takes too long, new events run
        beside it, but the remaining suspects wait (``APART_SECONDS``): if it ends the process after
        all, they must not have run beside it once more.
        docs/adr/0023-quarantine.md says why one crash alone proves nothing.
        """
        waiting: dict[str, HeldLease] = {}
        lasting: trio.Event | None = None
        until = trio.current_time() + QUARANTINE_SECONDS
        try:
            async with self._taking:
                with trio.CancelScope(shield=True):  # as for take_due
                    suspects = await self._inbox.take_suspects(
                        limit=SUSPECTS_LIMIT, now=self._clock()
                    )
                waiting = self._hold(suspects)
            for record in suspects:
                if self._closed or lasting is not None or trio.current_time() >= until:
                    break
                lease = waiting[record.key]
                if await self._dead_letter(record):
                    self._runner.leases.drop(lease)
                elif self._runner.queued.must_run_alone(record):
                    lasting = await self._isolate(record, lease, workers)
                else:
                    continue  # one crash proves little: it runs like all others
                del waiting[record.key]
        except StoreUnavailableError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
        finally:
            self._runner.inline.quarantined = False
            if waiting and lasting is None:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._release(waiting)
        if waiting and lasting is not None:
            background.start_soon(self._keep_apart, waiting, lasting)

    async def _keep_apart(self, waiting: Mapping[str, HeldLease], lasting: trio.Event) -> None:
        """Release ``waiting`` once the suspect before them has ended, or after the bound."""
        try:
            with trio.move_on_after(APART_SECONDS):
                await lasting.wait()
        finally:
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._release(waiting)
        self._want_feed()

    async def _dead_letter(self, record: DeliveryRecord) -> bool:
        """Dead-letter an event that must not run again; return whether it was one.

        It must not run if it ended the process too often, or if its body cannot be decoded.
        """
        dead = self._runner.queued.dead_letter_of(record)
        try:
            delivery = (await arrival_of(record)).delivery
        except DeliveryDecodingError as error:
            # Only a damaged store holds such a body. Operators see a dead letter, but not an event
            # that is fetched and fails again and again.
            await self._inbox.finish(record.key, Dead(str(error)), now=self._clock())
            return True
        if dead is None:
            await trio.lowlevel.checkpoint()
            return False
        await self._inbox.finish(record.key, dead, now=self._clock())
        self._runner.recorder.report(delivery, record.attempts, dead)
        return True

    async def _isolate(
        self, record: DeliveryRecord, lease: HeldLease, workers: trio.Nursery
    ) -> trio.Event | None:
        """Run one event alone, for ``ALONE_SECONDS`` at most.

        Returns None when it has ended, else an event that is set when it ends.
        """
        _log.warning(
            "webhook.quarantined",
            webhook_id=record.webhook_id,
            type=record.type,
            process_ends=record.process_ends,
            hint="it ran when the process ended; it runs alone now, to see whether it is the cause",
        )
        self._runner.inline.quarantined = True
        ended = trio.Event()
        workers.start_soon(run_in_cell, self._run_alone, record, lease, ended)
        with trio.move_on_after(ALONE_SECONDS):
            await ended.wait()
        if ended.is_set():
            return None
        # From here on other events run beside it; the store no longer marks its run as alone.
        await self._inbox.join(record.key)
        return ended

    async def _run_alone(self, record: DeliveryRecord, lease: HeldLease, ended: trio.Event) -> None:
        cell = current_cell()
        assert cell is not None
        self._running += 1
        lease.runs = True
        try:
            arrival = self._held[cell] = await arrival_of(record)
            await self._runner.queued.run(arrival, lease, attempt=record.attempts + 1, alone=True)
        finally:
            self._running -= 1
            self._held.pop(cell, None)
            self._runner.leases.drop(lease)
            ended.set()
        self._want_feed()

    # -- workers -----------------------------------------------------------------------------

    async def _keep_working(self) -> None:
        """Run a worker until the channel has ended, also after a run has been cancelled."""
        while await run_in_cell(self._work):
            pass

    async def _work(self) -> None:  # noqa: ASYNC910 - an async for over a channel is a checkpoint
        cell = current_cell()
        assert cell is not None
        async for arrival, attempt, fresh, lease in self._receive:
            self._running += 1
            self._held[cell] = arrival
            self._free_place()
            try:
                if lease.lost:
                    continue
                lease.runs = True
                # A lease that may have ended is tried first, by a start that is waited for.
                held = self._clock() - lease.since
                first = fresh and -LEASE_SECONDS < held < LEASE_SECONDS
                outcome = await self._runner.queued.run(
                    arrival, lease, attempt=attempt, fresh=first
                )
            finally:
                self._running -= 1
                del self._held[cell]
                self._runner.leases.drop(lease)
            # The next event of an ordered lane may run now, a retry has a due time that the feeder
            # must know, and a free place is of use only while events wait on disk.
            if arrival.delivery.ordered or self._behind or isinstance(outcome, Retry | Postponed):
                self._want_feed()

    # -- feeding -----------------------------------------------------------------------------

    async def _feed(self) -> None:
        while True:
            self._feed_wanted = trio.Event()
            await self._wait_for_place()
            if self._closed:
                return
            try:
                await self._fetch()
                await self._wait_for_work()
            except StoreLostError:
                return  # a lost store gives this process no more events
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
                await trio.sleep(STORE_RETRY_SECONDS)

    async def _wait_for_place(self) -> None:
        await trio.lowlevel.checkpoint()
        try:
            while self._places_taken >= self._capacity:
                await self._place_freed.wait()
        finally:
            self._feeder_blocked = False

    async def _fetch(self) -> None:
        async with self._taking:
            # Cancelled, it would leave leases behind. The bound is the store's for every caller:
            # storage.commit.ANSWER_SECONDS, in real time.
            with trio.CancelScope(shield=True):
                self._look_at_clock()
                # Other processes may not have seen yet that the clock was set.
                overdue = trio.current_time() - self._stepped_at >= LEASE_SECONDS
                due = await self._inbox.take_due(
                    limit=FEED_LIMIT, now=self._clock(), overdue=overdue
                )
            waiting = self._hold(due.records)
        self._next_due_at = inf if due.next_due_at is None else due.next_due_at
        try:
            for record in due.records:
                lease = waiting.get(record.key)
                if lease is None:
                    continue  # a run of it has its lease already
                if not await self._queue(record, lease, fresh=record.key in due.unbegun):
                    break
                del waiting[record.key]
        finally:
            if waiting:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._release(waiting)
        self._behind = due.more
        if due.more:
            self._want_feed()

    def _hold(self, records: Sequence[DeliveryRecord]) -> dict[str, HeldLease]:
        """Hold the leases of fetched events, except of those of which a run has them already."""
        leases, now = self._runner.leases, self._clock()
        held = {record.key: leases.hold_claimed(record.key, since=now) for record in records}
        return {key: lease for key, lease in held.items() if lease is not None}

    async def _queue(self, record: DeliveryRecord, lease: HeldLease, *, fresh: bool) -> bool:
        """Queue one fetched record when there is a place; False when the queue has closed."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return False
        try:
            arrival = await arrival_of(record)
        except DeliveryDecodingError:
            await self._dead_letter(record)
            self._runner.leases.drop(lease)
            return True
        if record.process_ends and await self._dead_letter(record):
            self._runner.leases.drop(lease)
            return True
        self._behind = self._feeder_blocked = self._places_taken >= self._capacity
        await self._wait_for_place()
        if self._closed:
            return False
        # No checkpoint from here on: the place would be somebody else's.
        self._places_taken += 1
        self._send.send_nowait((arrival, record.attempts + 1, fresh, lease))
        return True

    async def _release(self, leases: Mapping[str, HeldLease]) -> None:
        """Give up leases of events that do not run."""
        for lease in leases.values():
            self._runner.leases.drop(lease)
        try:
            await self._inbox.release([*leases])
        except StoreUnavailableError as error:
            # The next renewal gives them up, or they expire.
            _log.store_unavailable(error, ids=[*leases])
            await trio.lowlevel.checkpoint()

    async def _wait_for_work(self) -> None:
        """Wait until the feeder is woken, a retry is due, or another process wrote.

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
        """Have the feeder look into the store at once, after this process has put events there."""
        self._want_feed()

    def _want_feed(self) -> None:
        self._feed_wanted.set()

    def _free_place(self) -> None:
        self._places_taken -= 1
        self._place_freed.ring()

    async def _watch_clock(self) -> None:
        """Correct leases and due times when the wall clock is set.

        Due times are times of the wall clock. Set back by an hour, it would delay every retry by
        that hour.
        """
        compare_at = trio.current_time()
        while True:
            await trio.sleep(POLL_SECONDS)
            if trio.current_time() >= compare_at:
                await self._compare_clocks()
                compare_at = trio.current_time() + COMPARE_SECONDS
            self._look_at_clock()
            if self._corrected:
                continue
            self._corrected = True
            try:
                # Leases first: by the new time, ours may look expired, or as if they never ended.
                await self._renew()
                await self._inbox.reschedule(now=self._clock())
            except StoreUnavailableError as error:
                self._corrected = False
                _log.store_unavailable(error)
            else:
                self._want_feed()

    def _look_at_clock(self) -> None:
        """Note whether the wall clock was set since the last look."""
        step = self._clock() - trio.current_time() - self._offset
        if abs(step) < STEP_SECONDS:
            return
        self._offset += step
        self._stepped_at = trio.current_time()
        self._corrected = False
        _log.warning("runtime.clock_stepped", seconds=round(step, 3))

    async def _compare_clocks(self) -> None:
        """Log when this host's clock begins or ceases to differ from the store's."""
        try:
            offset = await self._inbox.clock_offset()
        except StoreUnavailableError:
            await trio.lowlevel.checkpoint()  # others report that
            return
        if offset is None or abs(offset - self._logged_offset) < STEP_SECONDS:
            return
        self._logged_offset = offset
        if abs(offset) < STEP_SECONDS:
            _log.info("runtime.clock_agrees", seconds=round(offset, 3))
        else:
            _log.warning(
                "runtime.clock_differs",
                seconds=round(offset, 3),
                hint="this host's clock is ahead of the database's by so much (below 0: behind); "
                "synchronize both (chrony, systemd-timesyncd)",
            )

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
        async with self._taking:
            renewed = await self._runner.renew()
        if renewed.given_up:
            self._want_feed()

    async def _watch_threads(self) -> None:
        """Name the plain functions that are still at work when the drain is cut short."""
        try:
            await trio.sleep_forever()
        finally:
            self._runner.invocations.report_threads()

    # -- runs that take long -----------------------------------------------------------------

    def _runs(self) -> list[tuple[trio.Nursery, Run]]:
        """Return the handlers that workers run, with the nursery of each worker's task."""
        at_work = self._runner.invocations.at_work
        pairs = ((cell, at_work.get(held.delivery.key)) for cell, held in self._held.items())
        return [(cell, run) for cell, run in pairs if run is not None]

    async def _watch_runs(self) -> None:
        """Cancel runs that outlast their limit, and log those that last long.

        Looking once a second costs a run nothing; a cancel scope around each would cost as much as
        checking its signature.
        """
        invocations = self._runner.invocations
        limit = inf if self._time_limit is None else self._time_limit
        while True:
            await trio.sleep(min(WATCH_SECONDS, limit / 2))
            for cell, run in self._runs():
                if invocations.seconds_of(run) >= limit and not cell.cancel_scope.cancel_called:
                    invocations.time_out(run, cell, limit)
                    if run.threaded:
                        invocations.report_still_running(run)
            self._report_long_runs()

    def _report_long_runs(self) -> None:
        """Log each run that has lasted a minute; then again each time that it has doubled."""
        reports: dict[str, float] = {}
        for run in self._runner.invocations.runs:
            due = self._next_report.get(run.key, LONG_RUN_SECONDS)
            if self._runner.invocations.seconds_of(run) >= due:
                self._runner.invocations.report_still_running(run)
                due *= 2
            if due > LONG_RUN_SECONDS:
                reports[run.key] = due
        self._next_report = reports
