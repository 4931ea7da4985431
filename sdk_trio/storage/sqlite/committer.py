"""The commit thread: one thread commits the jobs of all tasks, many jobs in one transaction.

A job is a plain function of the connection. While one transaction is being synced to disk, further
jobs queue up, and the next transaction takes all of them. That is *natural batching*: a lone caller
never waits for company, and many callers share the price of one sync. Measured against a thread hop
for each write: 4 500 accepts a second with one task either way, but 71 400 instead of 4 700 with
100 tasks, and 12 us of CPU each instead of 150 (docs/adr/0002-own-commit-thread.md).

The loop hands jobs over in ``before_io_wait``, an instrument hook that Trio calls when every task
that could run has run. Woken for each job, the thread would take the interpreter's lock from the
loop for transactions of one or two jobs, which made a durable answer cost an eighth more CPU.

Cancellation. A job that was handed over is never abandoned: it will be committed, and its caller
gets ``Cancelled`` only after that. But a hanging disk must not make a task uncancellable: a
cancelled caller waits :data:`STALL_SECONDS` at most, then it is released with a warning, and the
write is finished without it when the disk answers. So a cancelled call was either never begun, or
is written.

A disk that does not answer. A caller waits :data:`ANSWER_SECONDS`, then it gets an error, while
there is still time to answer a sender. Further callers get the error at once until the disk answers
again. Their jobs are done nevertheless when it does.

A sync that failed. Nothing is committed any more until ``storage.engines.rewrite`` has written the
log again, with syncs that succeed: until then it may have a hole on the disk, and a commit behind
the hole would not survive a power cut. Callers get an error meanwhile.

A store that is lost. After each commit, and before its callers are told, ``storage.engines.files``
checks that the commit stands in the files that a restart will open. If it does not, or if SQLite
finds damage, nothing is written any more, and every call is refused until the process restarts.
"""

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

import apsw
import trio

try:
    import fcntl
except ImportError:  # Windows, where one process alone receives
    fcntl = None  # type: ignore[assignment]

from ...base.file_locks import lock_holder
from ...base.logs import Outage, get_logger
from ...errors import StoreLostError, StoreUnavailableError
from ..engines.files import DAMAGE, StoreFile, has_log, may_pass, report_cut_index
from ..engines.rewrite import rewrite_log, rewrite_pages
from .connect import connect_reader

T = TypeVar("T")

_log = get_logger("storage")

#: Name of the file, beside the database, by whose lock several processes write one after the other.
TURN_NAME = "inbox.turn"

#: The most jobs in one transaction. It bounds the work that is redone when one of them fails, and
#: the time that the first job waits for the last.
BATCH_LIMIT = 200

#: Time that a caller waits for a disk that does not answer, in seconds. A sender of a webhook gives
#: up after 10, and its delivery needs time before and after the store.
ANSWER_SECONDS = 5.0

#: Time that a cancelled caller waits for a disk that does not answer, in seconds. It is longer than
#: any sync that ends; with the clean-up behind it, it fits into the 5 s that a stop allows.
STALL_SECONDS = 2.0

#: Pause before a disk that refuses to read a commit back is asked again, in seconds.
LOOK_AGAIN_SECONDS = 0.05

#: Time for ``close`` to finish the queued jobs and to copy the log, in seconds.
CLOSE_SECONDS = 4.0

#: Time between two looks at the waiting callers, in seconds.
WATCH_SECONDS = 0.5

#: A store whose callers have waited for longer, in seconds, is not prompt: what needs not be waited
#: for is waited for then.
PROMPT_SECONDS = 0.1

#: Size of the write-ahead log, in bytes, from which on it is copied into the database. SQLite's
#: default is 1000 pages. Events come in bursts; a log of 16 MB copies each page of an index once
#: for many commits.
CHECKPOINT_BYTES = 16 << 20

#: Content of the file :data:`TURN_NAME` while a failed sync may have left a hole in the log. The
#: next process that writes rewrites the log first, also when the one with the failure has died.
UNPROVEN = b"1"

# A write that nobody reads. If it is found in the log, writes still arrive in the right files. The
# value changes each time, because SQLite writes no page for a row that stays the same.
_PROOF = """
INSERT INTO checkpoint VALUES ('storage.proof', '')
ON CONFLICT DO UPDATE SET value = CASE value WHEN '' THEN '1' ELSE '' END
"""


def sync_log(connection: apsw.Connection) -> None:
    """Write something of no meaning: a job whose commit syncs all that was not synced before it."""
    connection.execute(_PROOF)


def open_turn(file: str) -> int:
    """Open the file whose lock says which process writes; it is empty, and stays.

    Raises:
        OSError: it cannot be made, or is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(file, flags, 0o600)


_CRASHED = "the store's thread has failed; restart the process and report the traceback"
_GUEST = (
    "the store {file} has not answered for {seconds:.0f} s: the effects of the event {guest} run "
    "in its thread and do not return; SQL alone belongs there, no network and no sleep"
)
_SILENT = (
    "the store {file} has not answered for {seconds:.0f} s: its disk hangs, or another process "
    "keeps it busy; look at the disk (dmesg, iostat); it goes on by itself when the disk answers"
)


class _Entry(Generic[T]):
    """One job on its way through the thread, and the task that waits for it, if any.

    What an entry does not set is the class's: most entries differ in nothing but their job, and
    there are two of them for each delivery.
    """

    #: Nobody waits.
    posted = False
    #: A sender will be answered on its result.
    told = False
    #: It runs outside of any transaction.
    alone = False
    #: No other job is in its batch.
    single = False
    #: Its change must survive a power cut.
    synced = True
    #: The time at which its caller began to wait; infinite for one that waits without a limit.
    asked_at = math.inf
    #: Its caller was released because the disk hangs.
    silent = False
    task: trio.lowlevel.Task | None = None
    finished = False
    value: Any = None
    error: BaseException | None = None

    def __init__(self, job: Callable[[apsw.Connection], T]) -> None:
        self.job = job


Posted = _Entry[Any]

#: Does many jobs of one kind together and returns their results.
Group = Callable[[apsw.Connection, Sequence[Any]], Sequence[Any]]


class GroupedJob(Generic[T]):
    """A job that is done together with others of its kind, by fewer statements than alone.

    Each statement releases the interpreter's lock and takes it again, for which the loop and the
    thread wait for each other.

    Attributes:
        group: always the same object for the same kind of job; it gets jobs of different keys.
        key: jobs of the same key are done in the order of their arrival.
    """

    __slots__ = ("group", "key")

    group: Group
    key: str

    def __call__(self, connection: apsw.Connection) -> T:
        """Do this job alone."""
        (value,) = self.group(connection, (self,))
        return cast("T", value)


def _perform(connection: apsw.Connection, batch: Sequence[_Entry[Any]]) -> None:
    """Do the jobs; those of one group together, as long as their keys are different ones."""
    gathered: dict[Group, list[_Entry[Any]]] = {}
    keys: set[str] = set()
    for entry in batch:
        job = entry.job
        if isinstance(job, GroupedJob):
            if job.key in keys:
                _perform_groups(connection, gathered)
                keys.clear()
            keys.add(job.key)
            gathered.setdefault(job.group, []).append(entry)
        else:
            _perform_groups(connection, gathered)
            keys.clear()
            entry.value = job(connection)
    _perform_groups(connection, gathered)


def _perform_groups(connection: apsw.Connection, gathered: dict[Group, list[_Entry[Any]]]) -> None:
    for group, entries in gathered.items():
        values = group(connection, [entry.job for entry in entries])
        for entry, value in zip(entries, values, strict=True):
            entry.value = value
    gathered.clear()


class Committer(trio.abc.Instrument):
    """Runs jobs in the order of their arrival, each in a transaction, in a thread of its own.

    The thread is a daemon thread, so it never keeps a process from ending. A job that is cut off so
    was not committed, and no sender was told that it was.

    Args:
        file: the database.
        connect: opens the connection, in the thread. It is called for the first job, and again
            after an error that left the connection unusable.
        translate: turns an error of SQLite into the exception that callers get.
        name: the thread's name.
        turn: a file by whose lock several such threads, each in a process of its own, write one
            after the other; None: there is no other.
        distrust_log: a log that is there already may have a hole, because its writer may have been
            killed after a sync that failed. True for the process that holds the directory's lock.
    """

    def __init__(
        self,
        file: str,
        connect: Callable[[], apsw.Connection],
        translate: Callable[[apsw.Error], StoreUnavailableError],
        *,
        name: str,
        turn: str | None = None,
        distrust_log: bool = False,
    ) -> None:
        self._turn = None if turn is None else open_turn(turn)
        self._has_turn = False
        if distrust_log:
            report_cut_index(file)
        # Whether all that the log has is on the disk, or will be with the next sync.
        self._log_proven = not (distrust_log and has_log(file))
        self._file = file
        self._connect = connect
        self._translate = translate
        # Jobs move through three stages: asked for in this turn of the loop, in that order; handed
        # to the thread; taken by the thread and not begun. None marks the end.
        self._asked: dict[_Entry[Any] | None, None] = {}
        self._queue: queue.SimpleQueue[Sequence[_Entry[Any] | None]] = queue.SimpleQueue()
        self._taken: deque[_Entry[Any] | None] = deque()
        self._token = trio.lowlevel.current_trio_token()
        self._refusal: str | None = None
        #: The reason for which nothing is written any more; None while the store is in order.
        self.lost: str | None = None
        #: The key of the event whose effects a handler is writing; set by the thread.
        self.guest: str | None = None
        self._waiting: set[_Entry[Any]] = set()
        self._someone_waits = trio.Event()
        self._silent_since: float | None = None
        self._outage = Outage(_log)
        # Since when nothing was answered although callers wait; whether the last batch has failed.
        self._answered_at = 0.0
        self._failing = False
        # Whether the batch in the thread has written anything.
        self._wrote = False
        self._ended = trio.Event()
        self._watching = trio.CancelScope()
        self._connection: apsw.Connection | None = None
        #: The size of the log, in bytes, from which on it is copied after a commit.
        self.checkpoint_bytes: int = CHECKPOINT_BYTES
        #: The numbers of connections that it has opened, and of transactions that it has begun.
        self.connections: int = 0
        self.transactions: int = 0
        # Whether its transactions are synced now; a new connection syncs them.
        self._synced = True
        # Holds a read transaction during each commit, which keeps other processes from clearing
        # the log before the commit was looked for there.
        self._reader: apsw.Connection | None = None
        self._opened: StoreFile | None = None
        # Number of frames in the log after the commit in progress, 0 if it has written nothing;
        # and after the last commit that has written, for the checkpoints.
        self._frames = self._log_frames = 0
        # A daemon thread: one that hangs on a dead disk must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        trio.lowlevel.add_instrument(self)
        # A system task, because it lives as long as the thread and no nursery of a caller does.
        trio.lowlevel.spawn_system_task(self._watch)

    async def submit(
        self,
        job: Callable[[apsw.Connection], T],
        *,
        told: bool = False,
        patient: bool = False,
        alone: bool = False,
        single: bool = False,
        synced: bool = True,
    ) -> T:
        """Run ``job`` in a transaction and return its result once that is durable.

        Args:
            job: runs in the thread, within a transaction that it neither begins nor ends. It may
                run twice: if another job of the batch fails, its effects are rolled back and it
                runs again.
            told: a sender will be answered on the result, so the store is checked even if ``job``
                finds the delivery there and writes nothing.
            patient: wait without the limit of :data:`ANSWER_SECONDS`, as for a change of the
                schema.
            alone: run ``job`` outside of any transaction, as ``VACUUM`` needs it.
            single: run ``job`` in a transaction without other jobs, because it runs code that is
                not ours: whatever that does, no other job has to be run again for it.
            synced: False for a change that must survive this process and not a power cut, because
                no sender is answered on it: its transaction is not synced, unless it shares one.

        Raises:
            StoreUnavailableError: the store failed, does not answer, is closed, or the thread has
                ended.
            StoreLostError: its files are not there any more, or are damaged.
            Exception: any other error of ``job``; its effects are rolled back.

        If it is cancelled before the job is handed over, nothing happens. Later, the job is
        finished first; see the module's docstring for a disk that hangs.
        """
        # Only the test, not a whole checkpoint: the wait for the commit below is one, and each
        # would be one more turn of the loop.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal or self.lost or self._silent_since is not None:
            self._outage.refuse()
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise self._refuse()
        entry = _Entry(job)
        entry.told, entry.alone, entry.single = told, alone, single or alone
        entry.synced = synced
        if not patient:
            entry.asked_at = time.monotonic()
            if not self._waiting:
                self._answered_at = entry.asked_at
            self._waiting.add(entry)
            self._someone_waits.set()
        self._asked[entry] = None
        try:
            await self._wait_for(entry)
        except trio.Cancelled:
            # Without the shield the caller would leave a write behind whose outcome nobody knows;
            # without the deadline a hung disk would keep it for ever.
            with trio.move_on_after(STALL_SECONDS, shield=True) as patience:
                await self._wait_for(entry)
            if patience.cancelled_caught:
                self._fall_silent(STALL_SECONDS)
            raise
        if entry.silent:
            raise StoreUnavailableError(self._silence(ANSWER_SECONDS))
        if entry.error is not None:
            raise entry.error
        value: T = entry.value
        return value

    @property
    def prompt(self) -> bool:
        """Say whether the store is in order and answers at once.

        After a failure it is so again when a commit has written something.
        """
        if self._failing or self._silent_since is not None:
            return False
        if self.lost is not None or self._refusal is not None:
            return False
        return not self._waiting or time.monotonic() - self._answered_at < PROMPT_SECONDS

    @property
    def failing(self) -> bool:
        """Say whether the last writes failed, or wait for a store that does not answer."""
        return self._failing or self._silent_since is not None or self.lost is not None

    def turn_holder(self) -> int | None:
        """Return the id of the process that holds the lock of ``turn``.

        None if there is no such file or holder, or the system does not say (Linux does).
        """
        return None if self._turn is None else lock_holder(os.fstat(self._turn).st_ino)

    def _silence(self, seconds: float) -> str:
        told = _SILENT if self.guest is None else _GUEST
        return told.format(file=self._file, seconds=seconds, guest=self.guest)

    def _refuse(self) -> StoreUnavailableError:
        if self._refusal is not None:
            return StoreUnavailableError(self._refusal)
        if self.lost is not None:
            return StoreLostError(self.lost)
        since = time.monotonic() if self._silent_since is None else self._silent_since
        return StoreUnavailableError(self._silence(time.monotonic() - since))

    def lose(self, error: StoreLostError) -> None:
        """Refuse every call from now on; the first ``error`` counts. Callable from any thread."""
        if self.lost is None:
            self.lost = str(error)
            self._call(partial(_log.error, "store.lost", error=str(error)))

    def post(self, job: Callable[[apsw.Connection], T], *, synced: bool = True) -> Posted:
        """Run ``job`` before every job that is submitted later, without waiting for it.

        An error of it is logged. Once the store is closed or its thread has ended, nothing happens.
        ``synced`` is that of :meth:`submit`.

        Returns:
            a handle for :meth:`withdraw`.
        """
        entry: Posted = _Entry(job)
        entry.posted, entry.synced = True, synced
        if self._refusal is None:
            self._asked[entry] = None
        return entry

    def withdraw(self, posted: Posted) -> bool:
        """Take back a posted job; return False if it has been handed to the thread already."""
        return self._asked.pop(posted, posted) is None

    async def close(self) -> None:
        """Finish what is queued, close the connection and end the thread.

        Shielded from cancellation for at most :data:`CLOSE_SECONDS`. A second call waits for the
        first one's end.

        Raises:
            StoreUnavailableError: the disk did not answer in that time; the thread ends when it
                does.
        """
        if self._refusal is None:
            self._refusal = "the store is closed"
            self._asked[None] = None
        # A disk that hangs already gets no further patience.
        patience = WATCH_SECONDS if self._silent_since is not None else CLOSE_SECONDS
        with trio.move_on_after(patience, shield=True):
            await self._ended.wait()
        await trio.lowlevel.checkpoint()
        if not self._ended.is_set():
            raise StoreUnavailableError(
                f"the store did not close within {patience:g} s: the disk does not answer; "
                "what was not committed by then was not acknowledged to any sender either"
            )

    def before_io_wait(self, timeout: float) -> None:
        """Hand this turn's jobs to the thread; Trio calls it when every runnable task has run."""
        if self._asked:
            # One wake of the thread for all jobs of this turn. Woken for each, it takes the
            # interpreter's lock from the loop for transactions of one or two jobs: a durable answer
            # then cost an eighth more CPU (ADR 2).
            self._queue.put(tuple(self._asked))
            self._asked.clear()

    async def _wait_for(self, entry: _Entry[Any]) -> None:
        # _deliver runs in this thread, too, so no entry can finish between the test and the sleep.
        if entry.finished or entry.silent:
            await trio.lowlevel.checkpoint()
            return

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            entry.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        entry.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _watch(self) -> None:
        with self._watching:
            while True:
                await self._someone_waits.wait()
                while self._waiting:
                    await trio.sleep(WATCH_SECONDS)
                    # Real time and not Trio's clock: in tests that clock may run ahead of the disk.
                    self._release_impatient(time.monotonic() - ANSWER_SECONDS)
                self._someone_waits = trio.Event()

    def _release_impatient(self, asked_before: float) -> None:
        """Wake the callers that have waited since then or longer; they get the error of a stall."""
        late = [entry for entry in self._waiting if entry.asked_at <= asked_before]
        if late:
            self._fall_silent(ANSWER_SECONDS)
            self._outage.fail(len(late))
        for entry in late:
            entry.silent = True
            self._waiting.discard(entry)
            if entry.task is not None:
                trio.lowlevel.reschedule(entry.task)
                entry.task = None

    def _fall_silent(self, seconds: float) -> None:
        if self._silent_since is None:
            self._silent_since = time.monotonic() - seconds
            self._outage.fail(0, seconds=seconds)
            _log.error(
                "store.stalled",
                waited_seconds=seconds,
                hint="the disk does not answer; what was written is finished when it does"
                if self.guest is None
                else f"the effects of the event {self.guest} run in the store's thread and do not "
                "return; all deliveries wait for them",
            )

    # -- in Trio's thread, called by the committing one ------------------------------------------

    def _deliver(self, batch: Sequence[_Entry[Any]], wrote: bool = False) -> None:
        if batch:
            self._silent_since = None
        self._answered_at = time.monotonic()
        failed = 0
        for entry in batch:
            if entry.error is not None and isinstance(entry.error, StoreUnavailableError):
                failed += 1
            entry.finished = True
            self._waiting.discard(entry)
            if entry.task is not None:
                trio.lowlevel.reschedule(entry.task)
                entry.task = None
            elif entry.posted and entry.error is not None:
                _log.store_unavailable(entry.error)
        # A transaction that had nothing to write succeeds on a disk that takes no write.
        if failed or wrote:
            self._failing = failed > 0
        if failed:
            self._outage.fail(failed)
        elif self._outage.since is not None and batch and not self._failing:
            self._outage.end()

    def _end(self, crashed: bool) -> None:
        """Fail the jobs that the thread left behind, so that no caller waits for ever."""
        if crashed:
            self._refusal = _CRASHED
            _log.error("store.thread_failed", hint="see the traceback on standard error")
        with suppress(KeyError):  # an instrument that has raised is removed by Trio
            trio.lowlevel.remove_instrument(self)
        self._watching.cancel()
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
                    self._wrote = False
                    self._commit(batch)
                    if not self._is_log_long():
                        self._end_turn()
                    self._call(self._deliver, batch, self._wrote)
                    # After the callers have been released, and within the turn: a sync of it that
                    # fails must be known before another process commits.
                    if self._is_log_long():
                        self._checkpoint()
                    self._end_turn()
                batch = []
            crashed = False
        finally:
            self._end_turn()
            for entry in batch:
                entry.error = StoreUnavailableError(_CRASHED)
            self._call(self._deliver, batch)
            self._disconnect()
            if self._opened is not None:
                self._opened.close()
            if self._turn is not None:
                os.close(self._turn)
            self._call(self._end, crashed)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            # The event loop has ended without closing the store, and every caller with it.
            self._queue.put([None])

    def _take_batch(self) -> tuple[list[_Entry[Any]], bool]:
        """Wait for a job, then take all that have queued up; True: it is the last batch."""
        taken = self._taken
        if not taken:
            taken += self._queue.get()
        self._take_turn()
        while len(taken) < BATCH_LIMIT and not self._queue.empty():
            taken += self._queue.get_nowait()
        batch: list[_Entry[Any]] = []
        while taken and len(batch) < BATCH_LIMIT:
            if batch and (taken[0] is None or taken[0].single):
                break
            entry = taken.popleft()
            if entry is None:
                return batch, True
            batch.append(entry)
            if entry.single:
                break
        return batch, False

    def _take_turn(self) -> None:
        """Wait until no other process writes; what arrives meanwhile joins the batch.

        SQLite's own wait for its write lock sleeps and asks again, which is unfair and takes a
        batch that was chosen before.
        """
        if self._turn is not None:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            self._has_turn = True
            try:
                self._log_proven &= os.pread(self._turn, 1, 0) != UNPROVEN
            except OSError:
                self._log_proven = False

    def _end_turn(self) -> None:
        if self._turn is not None and self._has_turn:
            if not self._log_proven:
                self._mark(UNPROVEN)
            self._has_turn = False
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _mark(self, content: bytes) -> None:
        """Write the mark of the turn, again and again: no process may write without it."""
        while self._turn is not None:
            try:
                if os.pread(self._turn, 1, 0) == content:
                    return
                os.ftruncate(self._turn, 0)
                os.pwrite(self._turn, content, 0)
            except OSError:
                time.sleep(LOOK_AGAIN_SECONDS)

    def _commit(self, batch: Sequence[_Entry[Any]]) -> None:
        """Run ``batch`` in one transaction, or each job in its own when one of them raises.

        SQLite reports a page that the disk refuses to read as damage. So damage is believed only if
        it stays; until then the batch is run again, which callers see as a disk that hangs.
        """
        begun = time.monotonic()
        error = self._try(batch)
        # SQLite calls a page damaged that the disk refuses to read. A disk that comes back must not
        # end the store for good.
        while isinstance(error, DAMAGE) and not batch[0].alone and self._opened is not None:
            if not may_pass(self._file, begun):
                break
            time.sleep(LOOK_AGAIN_SECONDS)
            error = self._try(batch)
        if error is not None:
            self._fail(batch, error)

    def _try(self, batch: Sequence[_Entry[Any]]) -> Exception | None:
        """Return the error for which ``batch`` was rolled back; None if each job has its result."""
        alone = batch[0].alone
        try:
            connection = self._connected()
            if not self._log_proven:
                self._prove_log(connection)
            if not alone:
                self._sync(connection, any(entry.synced for entry in batch))
                # The write lock is taken first: a transaction that reads and then asks for it can
                # fail in the middle, when another process has written in between.
                connection.execute("BEGIN IMMEDIATE")
                self.transactions += 1
        except Exception as error:  # each caller of the batch gets it
            self._roll_back()
            return error
        try:
            _perform(connection, batch)
        except Exception as error:  # a job may raise anything of its own
            self._roll_back()
            # One bad job must not fail the others: each gets a transaction of its own.
            if len(batch) == 1:
                return error
            for entry in batch:
                self._commit((entry,))
            return None
        try:
            if alone:
                self._confirm(connection, told=False)
            else:
                with self._log_kept():
                    connection.execute("COMMIT")
                    self._confirm(connection, told=any(entry.told for entry in batch))
        except Exception as error:  # each caller of the batch gets it
            self._roll_back()
            return error
        if batch[0].single and connection.txn_state():
            # Code that is not ours has left a statement unfinished, and a reader that never ends
            # keeps the log from being cleared. Only a new connection is surely without it.
            self._disconnect()
        return None

    def _sync(self, connection: apsw.Connection, synced: bool) -> None:
        """Choose whether the next transaction is synced; SQLite changes that only between two.

        A commit that is not synced stands in the page cache, which survives this process. The next
        synced one takes it to the disk, because a sync is that of the whole log. After a power cut
        before that, SQLite reads the log up to the first frame whose checksum fails, so what is
        lost is the end of the log and never something before a synced commit (docs/adr/0047). This
        holds as long as no sync has failed; see :meth:`_prove_log`.
        """
        if synced is not self._synced:
            connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._synced = synced

    def _prove_log(self, connection: apsw.Connection) -> None:
        """Put everything that the log has on the disk again, after a sync that failed.

        Raises:
            apsw.Error: the disk still fails.
            StoreUnavailableError: the same.
            StoreLostError: the log cannot be read back.
        """
        opened = self._opened
        assert opened is not None
        self._sync(connection, True)
        # A commit of no meaning shows whether the disk syncs again, and how long the log is.
        connection.execute("BEGIN IMMEDIATE")
        sync_log(connection)
        connection.execute("COMMIT")
        frames, self._frames = self._frames, 0
        connection.execute("BEGIN IMMEDIATE")
        try:
            pages = rewrite_log(connection.filename_wal, frames)
        except OSError as error:
            raise StoreUnavailableError(
                f"the store {self._file} failed: its log cannot be written and synced "
                f"({error.strerror}); check the disk (dmesg)"
            ) from error
        rewrite_pages(self._file, pages, opened.page_size)
        connection.execute("ROLLBACK")
        self._log_proven = True
        self._mark(b"")
        self._call(partial(_log.info, "store.log_rewritten", file=self._file, frames=frames))

    def _confirm(self, connection: apsw.Connection, *, told: bool) -> None:
        """Raise :class:`StoreLostError` unless the commit is in the files that a restart opens.

        With ``told`` it also proves that earlier commits are, which a sender is about to hear.
        """
        opened = self._opened
        if opened is None:
            return
        frames, self._frames = self._frames, 0
        if frames:
            self._look(partial(opened.require_written, frames))
            self._wrote = True
        elif not self._look(opened.is_unchanged) and told:
            # The log was begun anew: by a checkpoint, or by somebody who cut it. Write and see.
            sync_log(connection)
            frames, self._frames = self._frames, 0
            self._look(partial(opened.require_written, frames))

    def _look(self, look: Callable[[], T]) -> T:
        """Return the result of ``look``, retried while the disk refuses to read.

        A commit cannot be taken back, and must not be answered before it was seen. So the thread
        waits for the disk here, and callers get the error of a hanging disk in time.
        """
        refused = False
        while True:
            try:
                return look()
            except StoreLostError:
                raise
            except (apsw.IOError, StoreUnavailableError) as error:
                if not refused:
                    refused = True
                    told = self._translate(error) if isinstance(error, apsw.Error) else error
                    self._call(partial(_log.store_unavailable, told))
                time.sleep(LOOK_AGAIN_SECONDS)

    @contextmanager
    def _log_kept(self) -> Iterator[None]:
        """Keep the commit that is made inside in the log until it has been looked for there.

        As soon as our write lock is free, another process may checkpoint the log and begin it anew,
        which looks the same as a log that somebody has cut. SQLite's checkpoint waits for readers
        that began before the commit, so a reader of ours begins before and ends after the look.
        """
        with ExitStack() as kept:
            if self._reader is not None:
                # If it cannot read, the look that follows finds out why.
                with suppress(apsw.Error):
                    # A read lasts until its statement has been stepped to the end, or is closed.
                    reading = self._reader.execute("SELECT 1 FROM sqlite_schema")
                    kept.enter_context(closing(reading))
            yield

    def _is_log_long(self) -> bool:
        opened = self._opened
        if self._connection is None or opened is None or self.lost or not self._log_proven:
            return False
        return self._log_frames * opened.page_size >= self.checkpoint_bytes

    def _checkpoint(self) -> None:
        """Copy a long log into the database."""
        self._log_frames = 0
        # As SQLite's own checkpoints do: one that fails is tried again after a further commit.
        try:
            cast("apsw.Connection", self._connection).wal_checkpoint(
                mode=apsw.SQLITE_CHECKPOINT_PASSIVE
            )
        except apsw.Error as error:
            self._note_failed_sync(error)

    def _note_failed_sync(self, error: Exception) -> None:
        """Distrust the log after an error of the disk, which may be that of a sync.

        What a sync failed to write may be commits that were not synced before, here or in another
        process, or pages that a checkpoint copied.
        """
        if isinstance(error, apsw.IOError) and self._log_proven:
            self._log_proven = False
            self._call(
                partial(
                    _log.error,
                    "store.log_distrusted",
                    error=str(error),
                    hint="nothing is acknowledged before the log is written again and synced; it "
                    "goes on by itself; check the disk (dmesg)",
                )
            )

    def _note_frames(self, _connection: apsw.Connection, _database: str, frames: int) -> int:
        """Remember the length of the log; SQLite calls it after each commit that has written."""
        self._frames = self._log_frames = frames
        return apsw.SQLITE_OK

    def _fail(self, batch: Sequence[_Entry[Any]], error: Exception) -> None:
        self._note_failed_sync(error)
        if self._opened is not None and isinstance(error, DAMAGE):
            error = StoreLostError(str(self._translate(error)))
        if isinstance(error, StoreLostError):
            self.lose(error)
        for entry in batch:
            # One exception for each caller: one object raised in several tasks would mix up their
            # tracebacks.
            if isinstance(error, StoreUnavailableError):
                entry.error = type(error)(str(error))
            else:
                entry.error = self._translate(error) if isinstance(error, apsw.Error) else error

    def _connected(self) -> apsw.Connection:
        if self.lost is not None:
            raise StoreLostError(self.lost)
        if self._connection is not None:
            return self._connection
        if self._opened is not None:
            # SQLite would silently open, or create, the file that stands in its place by now.
            self._opened.require_same()
            self._opened.close()
        connection = self._connect()
        try:
            self._opened = StoreFile(self._file, connection)
            self._reader = connect_reader(self._file)
            # It replaces SQLite's own hook, which checkpoints inside the commit, while senders
            # wait.
            connection.set_wal_hook(self._note_frames)
            self._synced = True
            self.connections += 1
        except BaseException:
            self._connection = connection
            self._disconnect()
            raise
        self._connection = connection
        return connection

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
        reader, self._reader = self._reader, None
        if reader is not None:
            # First, because the last connection to close copies the log into the database, which
            # a read-only one cannot do.
            reader.close()
        if connection is not None:
            try:
                if self.lost is not None:
                    # Other files may stand in the place of ours: write nothing to them.
                    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close()
            except apsw.Error as error:
                _log.error("store.close_failed", error=str(error))
