"""Group commit: the units of work of all tasks, many of them in one transaction.

While one transaction is being synced, further units queue up, and the next transaction takes all of
them. This is *natural batching*: a lone caller never waits for others, and many callers share the
cost of one sync (docs/adr/0002-group-commit.md).

The protocol of the event loop and the commit thread:

1. A caller adds its unit to ``_asked``, and waits.
2. At the end of the iteration the event loop moves ``_asked`` to the end of ``_queue``, and posts
   :meth:`GroupCommit._commit_next` to the thread.
3. The thread takes a batch from the front of ``_queue``, commits it, and adds it to ``_committed``.
4. The event loop takes the batch from ``_committed``, and wakes its callers.

A cancelled caller does not take its unit back; :mod:`storage.silence` has the limits of its wait.
"""

import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import outcome
import trio

from ..base.executor import start_worker
from ..base.logs import Outage, get_logger
from ..base.telemetry import Sample
from ..errors import StoreLostError, StoreUnavailableError
from . import silence
from .engines import Engine
from .silence import Silence
from .units import Batches, Kind, Unit, Work

T = TypeVar("T")

#: The most units in one transaction. It bounds the work that is repeated when one of them fails,
#: and the time that the first unit waits for the last.
BATCH_LIMIT = 200

#: Time for ``close`` to finish the queued units, in seconds.
CLOSE_SECONDS = 4.0

#: Further time for it to end once the engine was abandoned, in seconds.
ABANDON_SECONDS = 1.0

_log = get_logger("storage")

_CRASHED = "the store's thread has failed; restart the process and report the traceback"


class GroupCommit(trio.abc.Instrument):
    """Commits the work of all tasks of this process through one :class:`Engine`.

    Make it in the event loop's thread. Batches are committed in the order of arrival. Within a
    batch, gathered items are done kind by kind, and those of one key in the order of arrival.

    Args:
        engine: belongs to the thread from now on.
        name: the thread's name.
        outage: counts the calls that fail while the store is unavailable; None: one of its own.
    """

    def __init__(self, engine: Engine, *, name: str, outage: Outage | None = None) -> None:
        # -- set once, read by both threads
        self._engine = engine
        self._worker = start_worker(name)
        self._batches = Batches(engine)
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
        self.fence: Work[None] | None = None
        self._outage = Outage(_log) if outage is None else outage
        self._silence = Silence(engine, self._batches, self._outage)
        self._asked: dict[Unit, None] = {}
        # The number of units in _asked that do not linger.
        self._urgent = 0
        self._lingers = False
        self._linger_seconds = 0.0
        self._someone_lingers = trio.Event()
        self._lingering = trio.CancelScope()
        self._refusal: str | None = None
        self._failing = False
        self._ended = trio.Event()
        trio.lowlevel.add_instrument(self)
        trio.lowlevel.spawn_system_task(self._linger)

    def submit(
        self,
        work: Work[T],
        *,
        patient: bool = False,
        single: bool = False,
        durable: bool = True,
        name: str | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run ``work`` in a transaction and return its result when that is committed.

        Args:
            patient: wait without the limit of :data:`.silence.ANSWER_SECONDS`, as for a new schema.
            single: run it in a transaction without other units: it runs code that is not ours, and
                whatever that does, no other unit has to run again; or it gives numbers, which a
                rollback for another unit would lose.
            durable: the change must survive a power cut, not only the end of this process.
            name: of a ``single`` unit: the key of the event whose effects it applies. Messages
                about a store that does not answer name it.

        Raises:
            StoreUnavailableError: the store failed, does not answer, or is closed.
            StoreLostError: the same, until a restart.
            Exception: what ``work`` has raised; its changes are rolled back.

        A cancellation does not take the unit back: it is committed, or fails, on its own.
        """
        unit = Unit()
        unit.work, unit.single, unit.durable, unit.name = work, single, durable, name
        if (fence := self.fence) is not None:
            unit.work = lambda transaction: (fence(transaction), work(transaction))[1]
        return self._commit_unit(unit, patient=patient)

    def run_outside_transaction(
        self, work: Callable[[Any], T], *, patient: bool = True
    ) -> Coroutine[Any, Any, T]:
        """Run ``work`` with the driver's connection, outside of any transaction; else as submit.

        Args:
            work: gets the connection; a question to it writes nothing, also not to prove the files.
            patient: wait without the limit of :data:`.silence.ANSWER_SECONDS`.
        """
        unit = Unit()
        unit.work, unit.single, unit.outside_transaction = work, True, True
        return self._commit_unit(unit, patient=patient)

    def gather(
        self, kind: Kind, key: str, item: Any, *, durable: bool = True
    ) -> Coroutine[Any, Any, Any]:
        """Run ``kind`` with this item and others of the same batch; otherwise as :meth:`submit`.

        Args:
            kind: always the same object for the same kind of work.
            key: items of the same key are done in the order of their arrival.
        """
        unit = Unit()
        unit.kind, unit.key, unit.item, unit.durable = kind, key, item, durable
        return self._commit_unit(unit)

    def post(
        self,
        kind: Kind,
        key: str,
        item: Any,
        *,
        durable: bool = False,
        linger: float | None = None,
    ) -> Unit:
        """Queue grouped work, before all later work, without waiting for it.

        An error is logged. Once the store is closed, nothing happens.

        Args:
            kind: as for :meth:`gather`.
            key: likewise.
            item: likewise.
            durable: as for :meth:`submit`.
            linger: the time that it may wait for other work to share its transaction, in seconds;
                None: that of the engine.
        """
        unit = Unit()
        unit.kind, unit.key, unit.item, unit.durable = kind, key, item, durable
        linger = self._engine.linger if linger is None else linger
        unit.posted, unit.lingers = True, linger > 0
        if self._refusal is None:
            self._asked[unit] = None
            if not unit.lingers:
                self._urgent += 1
            elif not self._lingers:
                self._lingers = True
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
        return self._batches.seconds.samples("sdk_store_commit_seconds")

    @property
    def lost(self) -> str | None:
        """The reason why nothing is written; None: the store is in order."""
        return self._engine.lost

    @property
    def failing(self) -> bool:
        """Whether the last writes failed, or wait for a store that does not answer."""
        return self._failing or self._silence.since is not None or self.lost is not None

    @property
    def prompt(self) -> bool:
        """Whether the store is in order and answers at once; after a failure, since a write."""
        # One expression, not three properties: each inline delivery asks twice.
        if (
            self._failing
            or self._silence.since is not None
            or self._engine.lost is not None
            or self._refusal is not None
        ):
            return False
        return self._silence.is_prompt

    async def close(self) -> None:
        """Finish the queued units, close the engine and end the thread.

        Shielded from cancellation for at most :data:`CLOSE_SECONDS`, and :data:`ABANDON_SECONDS`
        for an engine that is abandoned then. A second call waits for the end of the first.

        Raises:
            StoreUnavailableError: the store did not answer in that time, and its engine cannot be
                abandoned; the thread ends when the store answers.
        """
        if self._refusal is None:
            self._refusal = "the store is closed"
            self._urgent += 1
            self.before_io_wait(0)
            self._worker.post(self._finish, self._end)
        # Do not wait for a store that is already silent.
        patience = silence.WATCH_SECONDS if self._silence.since is not None else CLOSE_SECONDS
        with trio.move_on_after(patience, shield=True):
            await self._ended.wait()
        abandoned = not self._ended.is_set() and self._engine.abandon()
        if abandoned:
            with trio.move_on_after(ABANDON_SECONDS, shield=True):
                await self._ended.wait()
        await trio.lowlevel.checkpoint()
        if not self._ended.is_set() and not abandoned:
            raise StoreUnavailableError(
                f"the store {self._engine.place} did not close within {patience:g} s: it does not "
                "answer; no uncommitted delivery was acknowledged to its sender"
            )

    # -- in the event loop's thread ----------------------------------------------------------------

    # Its callers return its coroutine: one that awaits it is a frame more at each resumption.
    async def _commit_unit(self, unit: Unit, *, patient: bool = False) -> Any:
        # Only the test for cancellation, not a whole checkpoint: the wait below is one.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal or self._silence.since is not None or self._engine.lost:
            refusal = self._refuse()
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise refusal
        if not patient:
            self._silence.begin(unit)
        self._asked[unit] = None
        self._urgent += 1
        unit.task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(unit.abort)
        except trio.Cancelled:
            with trio.move_on_after(silence.STALL_SECONDS, shield=True) as patience:
                await self._silence.wait_again(unit)
            # The answer may have come in the iteration in which the patience ended: no other answer
            # would end the silence then.
            if patience.cancelled_caught and not unit.finished:
                self._silence.fall(silence.STALL_SECONDS)
            raise
        if unit.refused:
            raise StoreUnavailableError(self._silence.message(silence.ANSWER_SECONDS))
        if unit.error is not None:
            raise unit.error
        return unit.value

    def _refuse(self) -> StoreUnavailableError:
        self._outage.refuse()
        if self._refusal is not None:
            return StoreUnavailableError(self._refusal)
        if self._engine.lost is not None:
            return StoreLostError(self._engine.lost)
        return StoreUnavailableError(self._silence.message())

    def before_io_wait(self, timeout: float) -> None:
        """Hand over the units of this iteration; Trio calls it when every runnable task has run.

        Called for each unit, the thread would take the interpreter's lock from the event loop for
        transactions of one or two units: an acknowledged delivery then cost an eighth more CPU.
        """
        if self._asked and (self._urgent or not self._lingers):
            self._queue += self._asked
            self._asked, self._urgent = {}, 0
            if not self._called:
                self._called = True
                self._worker.post(self._commit_next, self._deliver)

    async def _linger(self) -> None:
        """End the time of lingering units: the next iteration hands them over."""
        with self._lingering:
            while True:
                await self._someone_lingers.wait()
                self._someone_lingers = trio.Event()
                await trio.sleep(self._linger_seconds)
                self._lingers = False

    def after_io_wait(self, timeout: float) -> None:
        """Wake the callers of committed units; Trio calls it when the event loop wakes up.

        The call that the thread has posted is run by a task of Trio, so its callers would go on one
        iteration of the event loop later.
        """
        while self._committed:
            self._answer(*self._committed.popleft())

    def _deliver(self, result: outcome.Outcome[None]) -> None:
        if isinstance(result, outcome.Error):
            self._crash(result.error)
        else:
            self.after_io_wait(0)

    def _answer(self, units: Sequence[Unit], wrote: bool) -> None:
        self._silence.end()
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
            self._silence.waiting.pop(unit, None)
            if unit.error is not None:
                failed += isinstance(unit.error, StoreUnavailableError)
                if unit.posted:
                    _log.store_unavailable(unit.error)
            if unit.task is not None:
                trio.lowlevel.reschedule(unit.task)
                unit.task = None
        return failed

    def _crash(self, error: BaseException) -> None:
        """Refuse every call from now on: the thread has met an unexpected error."""
        if self._ended.is_set():
            return
        if self._refusal is None:
            self._worker.post(self._engine.close, lambda _result: None)
        self._refusal = _CRASHED
        shown = "".join(traceback.format_exception(error))
        _log.error("store.thread_failed", traceback=shown, hint=_CRASHED)
        self._fail_rest()

    def _end(self, result: outcome.Outcome[bool]) -> None:
        if isinstance(result, outcome.Error):
            self._crash(result.error)
        elif result.unwrap() and not self._ended.is_set():
            self._fail_rest()

    def _fail_rest(self) -> None:
        """Fail the units that the thread has left behind, so that no caller waits without end."""
        self._worker.close()
        self._silence.stop()
        self._lingering.cancel()
        with suppress(KeyError):  # Trio removes an instrument that has raised
            trio.lowlevel.remove_instrument(self)
        left = dict.fromkeys((*self._batch, *self._queue, *self._asked, *self._silence.waiting))
        rest = [unit for unit in left if not unit.finished]
        self._queue.clear()
        self._asked.clear()
        for unit in rest:
            unit.error = StoreUnavailableError(self._refusal or _CRASHED)
        self._wake(rest)
        self._ended.set()

    # -- in the commit thread ----------------------------------------------------------------------

    def _commit_next(self) -> None:
        """Commit the units that wait, up to a limit."""
        if self._batch:
            return  # the batch before has crashed
        self._engine.acquire()
        self._called = False
        self._batch = batch = self._take()
        wrote = bool(batch) and self._batches.commit(batch)
        if self._engine.release():
            self._worker.post(self._engine.upkeep, self._note_upkeep)
        if self._queue and not self._called:
            self._called = True
            self._worker.post(self._commit_next, self._deliver)
        if batch:
            self._committed.append((batch, wrote))
        self._batch = ()

    def _take(self) -> Sequence[Unit]:
        batch: list[Unit] = []
        queue = self._queue
        while queue and len(batch) < BATCH_LIMIT:
            if queue[0].single:
                return batch or (queue.popleft(),)
            batch.append(queue.popleft())
        return batch

    def _finish(self) -> bool:
        """Close the engine if the queue is empty; otherwise run again after the next batch."""
        if self._queue:
            self._worker.post(self._finish, self._end)
            return False
        self._engine.close()
        return True

    def _note_upkeep(self, result: outcome.Outcome[None]) -> None:
        if isinstance(result, outcome.Error):
            self._crash(result.error)
