"""Group commit: the work of all tasks, many units of it in one transaction.

While one transaction is being synced, further units queue up, and the next transaction takes all of
them. This is *natural batching*: a lone caller never waits for others, and many callers share the
cost of one sync (docs/adr/0002-group-commit.md).

The protocol of the event loop and the commit thread:

1. A caller adds its unit to ``_asked``, and waits.
2. At the end of the iteration the event loop moves ``_asked`` to the end of ``_queue``, and posts
   :meth:`GroupCommit._commit_next` to the thread.
3. The thread takes a batch from the front of ``_queue``, commits it, and adds it to ``_committed``.
   If a unit raises, the batch is rolled back and each unit runs in a transaction of its own, so
   that only the one that raises fails.
4. The event loop takes the batch from ``_committed``, and wakes its callers.

A unit that was handed over is always finished, and no caller takes it back. A cancelled caller
waits for it for :data:`STALL_SECONDS`, any other caller for :data:`ANSWER_SECONDS`, or without a
limit if it is ``patient``. A caller that stops waiting does not know the outcome. The store is
*stalled* from then on, and further callers are refused at once, until it answers.
"""

import math
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import outcome
import trio

from ..base import clock
from ..base.executor import start_worker
from ..base.logs import Outage, get_logger
from ..base.telemetry import Histogram, Sample
from ..errors import StoreLostError, StoreUnavailableError
from .engines import CommitUnknownError, Engine
from .sql.dialect import SqlTransaction, Version

T = TypeVar("T")

#: A unit of work: runs in the thread of the engine, within a transaction that it neither begins nor
#: ends. It may run again after a rollback.
Work = Callable[[SqlTransaction], T]

#: Does the work for many items of different keys by few statements; returns their results in order.
GroupedWork = Callable[[SqlTransaction, Sequence[Any]], Sequence[Any]]

#: The most units in one transaction. It bounds the work that is repeated when one of them fails,
#: and the time that the first unit waits for the last.
BATCH_LIMIT = 200

#: Time that a caller waits for a store that does not answer, in seconds. A sender of a webhook
#: gives up after 10, and its delivery needs time before and after the store.
ANSWER_SECONDS = 5.0

#: Time that a cancelled caller waits for it, in seconds. It is longer than any sync that ends; with
#: the clean-up behind it, it fits into the 5 s that a stop allows.
STALL_SECONDS = 2.0

#: Time between two checks of the waiting callers, in seconds.
WATCH_SECONDS = 0.5

#: A store whose callers have waited for longer, in seconds, is not prompt.
PROMPT_SECONDS = 0.1

#: Time for ``close`` to finish the queued units, in seconds.
CLOSE_SECONDS = 4.0

#: Further time for it to end once the engine was abandoned, in seconds: a call on a connection that
#: was cut ends at once, and an attempt to connect is not waited for. Together with
#: :data:`STALL_SECONDS` it is less than the time that a stop has after the drain.
ABANDON_SECONDS = 0.25

#: Upper ends of the buckets of ``sdk_store_commit_seconds``, in seconds.
COMMIT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_log = get_logger("storage")

_CRASHED = "the store's thread has failed; restart the process and report the traceback"

_IN_EFFECTS = (
    "the store {place} has not answered for {seconds:.0f} s: the effects of the event {key} run "
    "in its thread and do not return; SQL alone belongs there, no network and no sleep"
)


class Unit:
    """A unit of work on its way through the thread, and the task that waits for it, if any.

    ==============================================  ============================  ===============
    made by                                         sets                          transaction
    ==============================================  ============================  ===============
    :meth:`GroupCommit.submit`                      work, durable                 shared or own
    the same, for the effects of an event           work, effects_key             own
    :meth:`GroupCommit.run_outside_transaction`     work                          none
    :meth:`GroupCommit.gather`                      grouped, key, item, durable   shared
    :meth:`GroupCommit.post`, which no task awaits  the same, lingers             shared
    ==============================================  ============================  ===============

    The event loop makes a unit and hands it over. From then on the commit thread alone writes
    ``value`` and ``error``, until it has returned the unit's batch; the other attributes stay the
    event loop's. ``value`` may be set before the commit, which may still fail.

    The class has the defaults: most units differ in few attributes, and each delivery has two.
    """

    work: Callable[[Any], Any] | None = None
    grouped: GroupedWork | None = None
    key: str = ""
    item: Any = None
    durable = True
    transaction: Literal["shared", "own", "none"] = "shared"
    #: The key of the event whose effects it applies.
    effects_key: str | None = None
    #: It may wait for other work to share its transaction.
    lingers = False
    #: The task that waits for it. Without one, its error is logged.
    task: trio.lowlevel.Task | None = None
    awaited = True
    #: The time at which its caller began to wait.
    asked_at = math.inf
    #: Its caller has waited too long, and gets the error that the store does not answer.
    timed_out = False
    #: It was taken back before it was handed over.
    withdrawn = False
    #: It was committed or has failed.
    finished = False
    value: Any = None
    error: BaseException | None = None

    def abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Let a cancelled caller stop waiting."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class GroupCommit(trio.abc.Instrument):
    """Commits the work of all tasks of this process through one :class:`Engine`.

    Make it in the event loop's thread. Batches are committed in the order of arrival. Within a
    batch, gathered items are done function by function, and those of one key in the order of
    arrival.

    Args:
        engine: belongs to the thread from now on.
        name: the thread's name.
        outage: counts the calls that fail while the store is unavailable; None: one of its own.
    """

    def __init__(self, engine: Engine, *, name: str, outage: Outage | None = None) -> None:
        # -- set once, read by both threads
        self._engine = engine
        self._worker = start_worker(name)
        self._now = clock.current().monotonic
        self._seconds = Histogram(COMMIT_BOUNDS)
        # -- shared by both threads; appending and taking from the left are atomic on a deque
        self._queue: deque[Unit] = deque()
        # _commit_next was posted and has not taken its batch yet. The thread clears the flag before
        # it reads _queue, and the event loop reads the flag after it has appended: no unit stays
        # behind. If both set it, one call finds nothing to do.
        self._called = False
        # Batches that are committed, and whether each has written.
        self._committed: deque[tuple[Sequence[Unit], bool]] = deque()
        # Being committed; the event loop reads it only when the thread has crashed or ended.
        self._batch: Sequence[Unit] = ()
        # -- of the event loop alone
        #: Runs before the work of each caller of :meth:`submit`, and raises if it must not be done.
        #: Work of :meth:`gather` and :meth:`post` is not fenced: arrivals, starts and successes.
        self.fence: Work[None] | None = None
        self._outage = Outage(_log) if outage is None else outage
        self._stall = StallWatch(engine, self._outage)
        self._asked: dict[Unit, None] = {}
        # The number of units in _asked that do not linger.
        self._urgent = 0
        # Units that linger are handed over after this time, which the first of them has set; 0:
        # with the end of this iteration.
        self._linger_seconds = 0.0
        self._someone_lingers = trio.Event()
        self._lingering = trio.CancelScope()
        # The error of each further call; None: the store is open.
        self._closed_reason: str | None = None
        self._failing = False
        self._thread_ended = trio.Event()
        trio.lowlevel.add_instrument(self)
        # A system task: it lives as long as the store, and no nursery of a caller does.
        trio.lowlevel.spawn_system_task(self._linger)

    def submit(
        self,
        work: Work[T],
        *,
        single: bool = False,
        durable: bool = True,
        effects_key: str | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run ``work`` in a transaction and return its result when that is committed.

        Args:
            work: the work.
            single: run it in a transaction without other units: it runs code that is not ours, and
                whatever that does, no other unit has to run again; or it gives numbers, which a
                rollback for another unit would lose.
            durable: the change must survive a power cut, not only the end of this process.
            effects_key: of a ``single`` unit: the key of the event whose effects it applies.
                Messages about a store that does not answer name it.

        Raises:
            StoreUnavailableError: the store failed, does not answer, or is closed.
            StoreLostError: the same, until a restart.
            Exception: what ``work`` has raised; its changes are rolled back.

        A cancellation does not take the unit back: it is committed, or fails, on its own.
        """
        unit = Unit()
        unit.work, unit.durable, unit.effects_key = work, durable, effects_key
        if single:
            unit.transaction = "own"
        if (fence := self.fence) is not None:
            unit.work = lambda transaction: (fence(transaction), work(transaction))[1]
        return self._await_commit(unit)

    def run_outside_transaction(
        self, work: Callable[[Any], T], *, patient: bool = True
    ) -> Coroutine[Any, Any, T]:
        """Run ``work`` with the driver's connection, outside of any transaction; else as submit.

        Args:
            work: gets the connection. Its success is no proof that the store can write, because
                most such work only reads.
            patient: wait without the limit of :data:`ANSWER_SECONDS`.
        """
        unit = Unit()
        unit.work, unit.transaction = work, "none"
        return self._await_commit(unit, patient=patient)

    def gather(
        self, grouped: GroupedWork, key: str, item: Any, *, durable: bool = True
    ) -> Coroutine[Any, Any, Any]:
        """Run ``grouped`` with this item and others of the same batch; otherwise as :meth:`submit`.

        Args:
            grouped: always the same object for the same work.
            key: items of the same key are done in the order of their arrival.
            item: what ``grouped`` gets.
            durable: as for :meth:`submit`.
        """
        unit = Unit()
        unit.grouped, unit.key, unit.item, unit.durable = grouped, key, item, durable
        return self._await_commit(unit)

    def post(
        self,
        grouped: GroupedWork,
        key: str,
        item: Any,
        *,
        durable: bool = False,
        linger: float | None = None,
    ) -> Unit:
        """Queue grouped work, before all later work, without waiting for it.

        An error is logged. Once the store is closed, nothing happens.

        Args:
            grouped: as for :meth:`gather`.
            key: likewise.
            item: likewise.
            durable: as for :meth:`submit`.
            linger: the most time that it may wait for other work to share its transaction, in
                seconds; None: that of the engine. It waits for less if a unit lingers already.
        """
        unit = Unit()
        unit.grouped, unit.key, unit.item, unit.durable = grouped, key, item, durable
        linger = self._engine.linger if linger is None else linger
        unit.awaited, unit.lingers = False, linger > 0
        if self._closed_reason is None:
            self._asked[unit] = None
            if not unit.lingers:
                self._urgent += 1
            elif not self._linger_seconds:
                self._linger_seconds = linger
                self._someone_lingers.set()
        return unit

    def withdraw(self, posted: Unit) -> bool:
        """Take back posted work; return False if it was handed over to the thread already."""
        posted.withdrawn = posted in self._asked
        if posted.withdrawn:
            del self._asked[posted]
            self._urgent -= not posted.lingers
        return posted.withdrawn

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of the transactions."""
        return self._seconds.samples("sdk_store_commit_seconds")

    @property
    def lost(self) -> str | None:
        """The reason why nothing is written; None: the store is in order."""
        return self._engine.lost

    @property
    def failing(self) -> bool:
        """Whether the last writes failed, or wait for a store that does not answer."""
        return self._failing or self._stall.since is not None or self.lost is not None

    @property
    def version(self) -> Version | None:
        """The version of the store in the last transaction, if it has one."""
        return self._engine.version

    @property
    def prompt(self) -> bool:
        """Whether the store is in order and answers at once; after a failure, since a write."""
        # One expression, not four properties: each delivery asks once or twice.
        stall = self._stall
        return not (
            self._failing
            or stall.since is not None
            or self._engine.lost is not None
            or self._closed_reason is not None
            or (stall.callers and self._now() - stall.answered_at >= PROMPT_SECONDS)
        )

    async def close(self) -> None:
        """Finish the queued units, close the engine and end the thread.

        Shielded from cancellation for at most :data:`CLOSE_SECONDS`, and :data:`ABANDON_SECONDS`
        for an engine that is abandoned then. A second call waits for the end of the first.

        Raises:
            StoreUnavailableError: the store did not answer in that time, and its engine cannot be
                abandoned; the thread ends when the store answers.
        """
        if self._closed_reason is None:
            self._closed_reason = "the store is closed"
            self._linger_seconds = 0.0  # no unit lingers from now on
            self.before_io_wait(0)
            self._worker.post(self._close_engine, self._on_close)
        # Do not wait for a store that is already stalled.
        patience = 0.0 if self._stall.since is not None else CLOSE_SECONDS
        with trio.move_on_after(patience, shield=True):
            await self._thread_ended.wait()
        abandoned = not self._thread_ended.is_set() and self._engine.abandon()
        with trio.move_on_after(ABANDON_SECONDS, shield=True):
            await self._thread_ended.wait()
        await trio.lowlevel.checkpoint()
        if not self._thread_ended.is_set() and not abandoned:
            raise StoreUnavailableError(
                f"the store {self._engine.place} did not close within "
                f"{patience + ABANDON_SECONDS:g} s: it does not answer; no uncommitted delivery "
                "was acknowledged to its sender"
            )

    # -- in the event loop's thread ----------------------------------------------------------------

    # Its callers return its coroutine: one that awaits it is a frame more at each resumption.
    async def _await_commit(self, unit: Unit, *, patient: bool = False) -> Any:
        # Only the test for cancellation, not a whole checkpoint: the wait below is one.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed_reason or self._stall.since is not None or self._engine.lost:
            error = self._refuse()
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise error
        if not patient:
            self._stall.begin(unit)
        self._asked[unit] = None
        self._urgent += 1
        unit.task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(unit.abort)
        except trio.Cancelled:
            with trio.move_on_after(STALL_SECONDS, shield=True) as patience:
                # No unit can finish between the test and the sleep: both are in the event loop.
                if unit.finished or unit.timed_out:
                    await trio.lowlevel.checkpoint()
                else:
                    unit.task = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(unit.abort)
            # The answer may have come in the iteration in which the patience ended: no other answer
            # would end the stall then.
            if patience.cancelled_caught and not unit.finished:
                self._stall.report(STALL_SECONDS)
            raise
        if unit.timed_out:
            raise StoreUnavailableError(self._stall.message(ANSWER_SECONDS))
        if unit.error is not None:
            raise unit.error
        return unit.value

    def _refuse(self) -> StoreUnavailableError:
        self._outage.refuse()
        if self._closed_reason is not None:
            return StoreUnavailableError(self._closed_reason)
        if self._engine.lost is not None:
            return StoreLostError(self._engine.lost)
        return StoreUnavailableError(self._stall.message())

    def before_io_wait(self, timeout: float) -> None:
        """Hand over the units of this iteration; Trio calls it when every runnable task has run.

        If each unit called the thread, the thread would interrupt the event loop for transactions
        of one or two units: an acknowledged delivery then cost an eighth more CPU.
        """
        if self._asked and (self._urgent or not self._linger_seconds):
            self._queue += self._asked
            self._asked, self._urgent = {}, 0
            if not self._called:
                self._called = True
                self._worker.post(self._commit_next, self._on_return)

    async def _linger(self) -> None:
        """Set the time of lingering units to 0: the end of the iteration then hands them over."""
        with self._lingering:
            while True:
                await self._someone_lingers.wait()
                self._someone_lingers = trio.Event()
                await trio.sleep(self._linger_seconds)
                self._linger_seconds = 0.0

    def after_io_wait(self, timeout: float) -> None:
        """Wake the callers of committed units; Trio calls it when the event loop wakes up.

        By :meth:`_on_return` alone they would go on one iteration later, because Trio runs a posted
        call in a task of its own.
        """
        while self._committed:
            units, wrote = self._committed.popleft()
            self._stall.end()
            failed = self._wake(units)
            # A transaction that had nothing to write succeeds on a disk that takes no write.
            if failed or wrote:
                self._failing = failed > 0
            if failed:
                self._outage.fail(failed)
            elif self._outage.since is not None and not self._failing:
                self._outage.end()

    def _wake(self, units: Sequence[Unit]) -> int:
        """Wake the callers of finished units; return how many units the store has failed."""
        failed = 0
        for unit in units:
            unit.finished = True
            self._stall.callers.pop(unit, None)
            if unit.error is not None:
                failed += isinstance(unit.error, StoreUnavailableError)
                if not unit.awaited:
                    _log.store_unavailable(unit.error)
            if unit.task is not None:
                trio.lowlevel.reschedule(unit.task)
                unit.task = None
        return failed

    def _on_return(self, result: outcome.Outcome[Any]) -> None:
        """Take the result of a call in the thread; an error there is unexpected and ends it."""
        if isinstance(result, outcome.Error):
            self._crash(result.error)
        else:
            self.after_io_wait(0)

    def _on_close(self, result: outcome.Outcome[bool]) -> None:
        """End the thread if its engine was closed."""
        self._on_return(result)
        if not self._thread_ended.is_set() and result.unwrap():
            self._end_thread()

    def _crash(self, error: BaseException) -> None:
        """Refuse every call from now on."""
        if self._thread_ended.is_set():
            return
        if self._closed_reason is None:
            self._worker.post(self._engine.close, lambda _result: None)
        self._closed_reason = _CRASHED
        shown = "".join(traceback.format_exception(error))
        _log.error("store.thread_failed", traceback=shown, hint=_CRASHED)
        self._end_thread()

    def _end_thread(self) -> None:
        """End the thread, and fail the units that it has left, so that no caller waits forever."""
        self._worker.close()
        self._stall.stop()
        self._lingering.cancel()
        with suppress(KeyError):  # Trio removes an instrument that has raised
            trio.lowlevel.remove_instrument(self)
        left = dict.fromkeys((*self._batch, *self._queue, *self._asked, *self._stall.callers))
        rest = [unit for unit in left if not unit.finished]
        self._queue.clear()
        self._asked.clear()
        for unit in rest:
            unit.error = StoreUnavailableError(self._closed_reason or _CRASHED)
        self._wake(rest)
        self._thread_ended.set()

    # -- in the commit thread ----------------------------------------------------------------------

    def _commit_next(self) -> None:
        """Commit the units that wait, up to a limit."""
        if self._batch:
            return  # the batch before has crashed
        self._engine.acquire()
        self._called = False
        self._batch = batch = self._take()
        wrote = bool(batch) and self._commit_batch(batch)
        if not self._engine.release():
            self._worker.post(self._engine.upkeep, self._on_return)
        if self._queue and not self._called:
            self._called = True
            self._worker.post(self._commit_next, self._on_return)
        if batch:
            self._committed.append((batch, wrote))
        self._batch = ()

    def _take(self) -> Sequence[Unit]:
        batch: list[Unit] = []
        queue = self._queue
        while queue and len(batch) < BATCH_LIMIT:
            if queue[0].transaction != "shared":
                return batch or (queue.popleft(),)
            batch.append(queue.popleft())
        return batch

    def _commit_batch(self, batch: Sequence[Unit]) -> bool:
        """Commit a batch, or each unit alone if one raises; return whether it has written."""
        in_work = False

        def work(transaction: SqlTransaction) -> None:
            nonlocal in_work
            in_work = True
            self._run(batch, transaction)
            in_work = False

        first = batch[0]
        try:
            if first.transaction == "none":
                assert first.work is not None
                first.value = self._engine.run_outside_transaction(first.work)
                return False  # it proves no write: a poll only reads
            durable = any(unit.durable for unit in batch)
            is_one_unit = len(batch) == 1 and first.grouped is not None
            begun = self._now()
            wrote = self._engine.transact(work, durable=durable, is_one_unit=is_one_unit)
        except Exception as error:  # each caller of the batch gets it
            # Only then may the units run again: no COMMIT was sent.
            if in_work and len(batch) > 1 and not isinstance(error, CommitUnknownError):
                return sum(self._commit_batch((unit,)) for unit in batch) > 0
            _fail(batch, error)
            return False
        if wrote:
            self._seconds.observe(self._now() - begun)
        return wrote

    def _run(self, batch: Sequence[Unit], transaction: SqlTransaction) -> None:
        """Do the work of a batch: one call for the items of a function whose keys differ."""
        gathered: dict[GroupedWork, list[Unit]] = {}
        keys: set[str] = set()
        for unit in batch:
            if unit.grouped is None or unit.key in keys:
                _run_gathered(gathered, transaction)
                keys.clear()
            if unit.grouped is not None:
                keys.add(unit.key)
                gathered.setdefault(unit.grouped, []).append(unit)
            elif unit.work is not None:
                self._stall.effects_key = unit.effects_key
                try:
                    unit.value = unit.work(transaction)
                finally:
                    self._stall.effects_key = None
        _run_gathered(gathered, transaction)

    def _close_engine(self) -> bool:
        """Close the engine if the queue is empty; otherwise run again after the next batch."""
        if self._queue:
            self._worker.post(self._close_engine, self._on_close)
            return False
        self._engine.close()
        return True


def _run_gathered(gathered: dict[GroupedWork, list[Unit]], transaction: SqlTransaction) -> None:
    for grouped, units in gathered.items():
        values = grouped(transaction, [unit.item for unit in units])
        for unit, value in zip(units, values, strict=True):
            unit.value = value
    gathered.clear()


def _fail(batch: Sequence[Unit], error: Exception) -> None:
    """Give each unit of a batch the error."""
    for unit in batch:
        # One object raised in several tasks would mix up their tracebacks.
        shared = len(batch) > 1 and isinstance(error, StoreUnavailableError)
        unit.error = type(error)(str(error)) if shared else error


class StallWatch:
    """The callers that wait for a store, and since when it has not answered.

    Everything here runs in the event loop; only ``effects_key`` is written by the commit thread.

    Args:
        engine: the store's.
        outage: counts the calls that fail.
    """

    def __init__(self, engine: Engine, outage: Outage) -> None:
        self._engine = engine
        self._outage = outage
        self._now = clock.current().monotonic
        #: In the order of their arrival.
        self.callers: dict[Unit, None] = {}
        #: None: the store answers.
        self.since: float | None = None
        #: The key of the event whose effects run, for messages.
        self.effects_key: str | None = None
        #: The time of the last answer, or since when callers wait for one.
        self.answered_at = 0.0
        self._someone_waits = trio.Event()
        self._watching = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._watch)

    def begin(self, unit: Unit) -> None:
        """Note that the caller of ``unit`` begins to wait, for :data:`ANSWER_SECONDS`."""
        unit.asked_at = self._now()
        if not self.callers:
            self.answered_at = unit.asked_at
            self._someone_waits.set()
        self.callers[unit] = None

    def report(self, seconds: float) -> None:
        """Note that the store has not answered for so many seconds."""
        if self.since is not None:
            return
        self.since = self._now() - seconds
        self._outage.fail(0, seconds=seconds)
        key = self.effects_key
        _log.error(
            "store.stalled",
            waited_seconds=seconds,
            hint="the store does not answer; writes in progress are finished when it does"
            if key is None
            else f"the effects of the event {key} run in the store's thread and do not return; all "
            "deliveries wait for them",
        )

    def end(self) -> None:
        """Note that the store has answered."""
        self.since = None
        self.answered_at = self._now()

    def stop(self) -> None:
        """Stop watching the callers."""
        self._watching.cancel()

    def message(self, seconds: float | None = None) -> str:
        """Return the error of a caller that is refused; ``seconds``: how long it has waited."""
        if seconds is None:
            now = self._now()
            seconds = now - (self.since or now)
        key = self.effects_key
        text = self._engine.stall_message if key is None else _IN_EFFECTS
        return text.format(place=self._engine.place, seconds=seconds, key=key)

    async def _watch(self) -> None:
        """Refuse the callers that have waited too long."""
        with self._watching:
            while True:
                await self._someone_waits.wait()
                looked_at = self._now()
                while self.callers:
                    await trio.sleep(WATCH_SECONDS)
                    # Real time: Trio's clock may run ahead of the disk in tests.
                    now = self._now()
                    self._discount(now - looked_at - 2 * WATCH_SECONDS, now)
                    self._refuse_late(now - ANSWER_SECONDS)
                    looked_at = now
                self._someone_waits = trio.Event()

    def _discount(self, seconds: float, now: float) -> None:
        """Do not blame the store for a time in which this process did not run.

        The store cannot answer a process that is stopped, or whose event loop is blocked.
        """
        if seconds > 0:
            for unit in self.callers:
                unit.asked_at = min(unit.asked_at + seconds, now)

    def _refuse_late(self, asked_before: float) -> None:
        late = [unit for unit in self.callers if unit.asked_at <= asked_before]
        if late:
            self.report(ANSWER_SECONDS)
            self._outage.fail(len(late))
        for unit in late:
            unit.timed_out = True
            self.callers.pop(unit, None)
            if unit.task is not None:
                trio.lowlevel.reschedule(unit.task)
                unit.task = None
