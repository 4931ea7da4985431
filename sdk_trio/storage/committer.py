"""One thread that commits what tasks hand it, many jobs in one transaction.

A job is a plain function of the connection. While one transaction is being synced to disk further
jobs queue up; the next transaction takes all of them. That is *natural batching*: a lone caller
never waits for company, and a crowd shares the price of a sync. Jobs are handed over when every
task that could run has run: waking the thread for each of them would make it take the
interpreter's lock from the loop for transactions of one job. Why this and not a thread hop per
write: docs/adr/0002-own-commit-thread.md.

Cancellation. A job that was handed over is never abandoned: it will be committed, and its caller
sees ``Cancelled`` only after that. A disk that hangs must not make a task uncancellable, though, so
a cancelled caller waits for its commit :data:`STALL_SECONDS` at most; then it is let go with a
warning, and the write is finished without it as soon as the disk answers. "Cancelled" therefore
means: untouched when the call had not begun, otherwise written.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import apsw
import trio

from ..errors import StoreUnavailableError
from ..logs import get_logger

T = TypeVar("T")

_log = get_logger("storage")

#: The most jobs in one transaction: bounds what is redone when one of them fails, and how long the
#: last one waits for the first.
BATCH_LIMIT = 200

#: How long a cancelled caller, or ``close``, waits for a disk that does not answer, in seconds.
#: Far above any sync that ends, below what service managers grant a stopping process.
STALL_SECONDS = 20.0


_CRASHED = "the store's thread has failed; restart the process and report the traceback"


class _Entry(Generic[T]):
    """One job on its way through the thread, and the task that waits for it, if one does."""

    __slots__ = ("error", "finished", "job", "posted", "task", "value")

    def __init__(self, job: Callable[[apsw.Connection], T], *, posted: bool = False) -> None:
        self.job = job
        self.posted = posted
        self.task: trio.lowlevel.Task | None = None
        self.finished = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self, connection: apsw.Connection) -> None:
        self.value = self.job(connection)


Posted = _Entry[Any]


class Committer(trio.abc.Instrument):
    """Runs jobs in the order of their arrival, each in a transaction, in a thread of its own.

    The thread is a daemon: it never keeps a process from ending. What that cuts off was not
    committed, and nobody has been told that it was.

    Args:
        connect: opens the connection, in the thread. It is called for the first job, and again
            after an error that left the connection unusable.
        translate: turns an error of SQLite into the exception that callers get.
        name: the thread's name.
    """

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        translate: Callable[[apsw.Error], Exception],
        *,
        name: str,
    ) -> None:
        self._connect = connect
        self._translate = translate
        # What the tasks of this turn of the loop ask for; what the thread is given; what it has
        # taken and not begun. None is the end.
        self._asked: list[_Entry[Any] | None] = []
        self._queue: queue.SimpleQueue[Sequence[_Entry[Any] | None]] = queue.SimpleQueue()
        self._taken: deque[_Entry[Any] | None] = deque()
        self._token = trio.lowlevel.current_trio_token()
        self._refusal: str | None = None
        self._ended = trio.Event()
        self._connection: apsw.Connection | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        trio.lowlevel.add_instrument(self)

    async def submit(self, job: Callable[[apsw.Connection], T]) -> T:
        """Run ``job`` in a transaction and return its result once that is durable.

        ``job`` runs in the thread, within a transaction that it neither begins nor ends. It may run
        twice: after a neighbour's failure its effects are rolled back and it is run again.

        Raises:
            StoreUnavailableError: the store failed, is closed, or the thread has ended.
            Exception: whatever else ``job`` raised; its effects are rolled back.

        Cancelled before the job is handed over, nothing happens. Cancelled later, the job is
        finished first; see the module's docstring for a disk that hangs.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise StoreUnavailableError(self._refusal)
        entry = _Entry(job)
        self._asked.append(entry)
        try:
            await self._wait_for(entry)
        except trio.Cancelled:
            with trio.move_on_after(STALL_SECONDS, shield=True) as patience:
                await self._wait_for(entry)
            if patience.cancelled_caught:
                _log.error(
                    "store.stalled",
                    waited_seconds=STALL_SECONDS,
                    hint="the disk does not answer; the write is finished when it does",
                )
            raise
        if entry.error is not None:
            raise entry.error
        return cast("T", entry.value)

    def post(self, job: Callable[[apsw.Connection], T]) -> Posted:
        """Have ``job`` run before every job that is submitted later, and do not wait for it.

        What it raises is logged. Nothing happens once the store is closed or its thread has ended.
        Returns what :meth:`withdraw` takes.
        """
        entry: Posted = _Entry(job, posted=True)
        if self._refusal is None:
            self._asked.append(entry)
        return entry

    def withdraw(self, posted: Posted) -> bool:
        """Take back a job that was posted; False when it has been handed over already."""
        try:
            self._asked.remove(posted)
        except ValueError:
            return False
        return True

    async def close(self) -> None:
        """Finish what is queued, close the connection and end the thread.

        Shielded from cancellation for at most :data:`STALL_SECONDS`. A second call waits for the
        first one's end.

        Raises:
            StoreUnavailableError: the disk did not answer in that time; the thread ends when it
                does.
        """
        if self._refusal is None:
            self._refusal = "the store is closed"
            self._asked.append(None)
        with trio.move_on_after(STALL_SECONDS, shield=True):
            await self._ended.wait()
        await trio.lowlevel.checkpoint()
        if not self._ended.is_set():
            raise StoreUnavailableError(
                f"the store did not close within {STALL_SECONDS:g} s: the disk does not answer; "
                "what was not committed by then was not acknowledged to any sender either"
            )

    def before_io_wait(self, timeout: float) -> None:
        """Hand over what has been asked for: every task that could run has run (Trio calls it)."""
        if self._asked:
            self._queue.put(self._asked)
            self._asked = []

    async def _wait_for(self, entry: _Entry[Any]) -> None:
        # What finishes an entry runs in this thread, so nothing happens between test and sleep.
        if entry.finished:
            await trio.lowlevel.checkpoint()
            return

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            entry.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        entry.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    # -- in Trio's thread, called by the committing one ------------------------------------------

    def _deliver(self, batch: Sequence[_Entry[Any]]) -> None:
        for entry in batch:
            entry.finished = True
            if entry.task is not None:
                trio.lowlevel.reschedule(entry.task)
                entry.task = None
            elif entry.posted and entry.error is not None:
                _log.error("store.unavailable", error=str(entry.error))

    def _end(self, crashed: bool) -> None:
        """Fail whatever the thread left behind: nobody waits for a thread that has ended."""
        if crashed:
            self._refusal = _CRASHED
            _log.error("store.thread_failed", hint="see the traceback on standard error")
        with suppress(KeyError):  # an instrument that has raised is removed by Trio
            trio.lowlevel.remove_instrument(self)
        while not self._queue.empty():
            self._taken += self._queue.get_nowait()
        left = [entry for entry in (*self._taken, *self._asked) if entry is not None]
        for entry in left:
            entry.error = StoreUnavailableError(self._refusal or _CRASHED)
        self._deliver(left)
        self._ended.set()

    # -- in the committing thread ----------------------------------------------------------------

    def _run(self) -> None:
        batch: list[_Entry[Any]] = []
        crashed = True
        try:
            last = False
            while not last:
                batch, last = self._take_batch()
                if batch:
                    self._commit(batch)
                    self._call(self._deliver, batch)
                batch = []
            crashed = False
        finally:
            for entry in batch:
                entry.error = StoreUnavailableError(_CRASHED)
            self._call(self._deliver, batch)
            self._disconnect()
            self._call(self._end, crashed)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            # The event loop has ended without closing the store: nobody is left to be told.
            self._queue.put([None])

    def _take_batch(self) -> tuple[list[_Entry[Any]], bool]:
        """Wait for a job, then take what else is there; True when it is the last batch."""
        taken = self._taken
        if not taken:
            taken += self._queue.get()
        while len(taken) < BATCH_LIMIT and not self._queue.empty():
            taken += self._queue.get_nowait()
        batch: list[_Entry[Any]] = []
        while taken and len(batch) < BATCH_LIMIT:
            entry = taken.popleft()
            if entry is None:
                return batch, True
            batch.append(entry)
        return batch, False

    def _commit(self, batch: Sequence[_Entry[Any]]) -> None:
        """Run ``batch`` in one transaction, or each job in its own when one of them raises."""
        try:
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
        except Exception as error:
            self._fail(batch, error)
            return
        try:
            for entry in batch:
                entry.run(connection)
        except Exception as error:
            self._roll_back()
            if len(batch) == 1:
                self._fail(batch, error)
                return
            for entry in batch:
                self._commit((entry,))
            return
        try:
            connection.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            self._fail(batch, error)

    def _fail(self, batch: Sequence[_Entry[Any]], error: Exception) -> None:
        for entry in batch:
            # One exception each: raised in several tasks, one would mix up their tracebacks.
            entry.error = self._translate(error) if isinstance(error, apsw.Error) else error

    def _connected(self) -> apsw.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _roll_back(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            # After a full disk or an I/O error SQLite may have rolled back by itself.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except apsw.Error as error:
                _log.error("store.close_failed", error=str(error))
