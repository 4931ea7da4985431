"""Group commit: the jobs of all tasks go through one connection, many jobs in one transaction.

While one transaction is on its way, further jobs queue up, and the next one takes all of them. A
lone caller never waits for company; many callers share the round trips and the sync to disk. Jobs
of one kind (arrivals, starts, ends) that concern different deliveries are one statement together,
and statements of several kinds are one round trip.

Cancellation. A job that was handed over is finished, and its caller gets ``Cancelled`` after that.
But a server that does not answer must not make a task uncancellable: a cancelled caller waits
:data:`STALL_SECONDS` at most, any other :data:`ANSWER_SECONDS`.

A server that is away. A transaction that has not reached its COMMIT is run again on a new
connection, once. If the connection breaks during the COMMIT, or during a statement that commits
itself, it is unknown whether it was made: the callers get an error, so that their senders deliver
again, and the next renewal gives up the leases that it may have taken. Until the server answers,
calls are refused at once, and it is asked again after pauses that double up to 5 s.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import psycopg
import trio

from ...base.logs import get_logger
from ...errors import StoreUnavailableError
from ..term import TermEndedError
from .connect import (
    CONFLICTS,
    READ_ONLY,
    PostgresAddress,
    Redial,
    StoreConnection,
    UnreplicatedError,
)
from .failover import note_timeline
from .writes import UNDECIDED

T = TypeVar("T")

Job = Callable[[StoreConnection], T]

#: Does many jobs of one kind by one statement: takes their arguments, returns their results. With
#: ``alone`` it runs this statement only, reads what the server has answered as its results are
#: asked for, and answers ``UNDECIDED`` to a job that needs more.
Group = Callable[[StoreConnection, Sequence[Any], bool], Iterable[Any]]

#: The most jobs in one transaction.
BATCH_LIMIT = 200

#: Time that a caller waits for a server that does not answer, in seconds. A sender of a webhook
#: gives up after 10.
ANSWER_SECONDS = 5.0

#: Time that a cancelled caller waits for it, in seconds.
STALL_SECONDS = 2.0

#: Time for ``close`` to finish the queued jobs, in seconds.
CLOSE_SECONDS = 4.0

#: Time for ``close`` after it has cut a connection that does not answer, in seconds.
CUT_SECONDS = 1.0

#: Pause between two checks for connections that do not answer, in seconds.
WATCH_SECONDS = 1.0

#: Time that a posted job, for which nobody waits, waits for others to go with, in seconds. Most
#: handlers end within it, so that the start and the end of a run are one statement.
COMPANY_SECONDS = 0.01

#: The most times that a transaction is run again, where another one has got in its way.
CONFLICT_LIMIT = 5

#: Time that a job waits for its lock after its batch has waited for one, in seconds. A batch has
#: up to :data:`BATCH_LIMIT` jobs, and one for which nothing is locked may be the last of them.
HURRIED_SECONDS = 0.01

_log = get_logger("storage")

_HURRIED = f"SET LOCAL lock_timeout TO {HURRIED_SECONDS * 1000:.0f}"

_COUNT = """
INSERT INTO node (id, changes, done) VALUES (%s, 1, %s)
ON CONFLICT (id) DO UPDATE SET changes = node.changes + 1, done = node.done + excluded.done,
    seen_at = now()
"""

# A store that closes leaves its counts to the common row. The sum of the changes must not become
# smaller: a store that opens, changes something and closes would be noticed by no one.
_LEAVE = """
WITH gone AS (DELETE FROM node WHERE id = %s RETURNING changes, done)
UPDATE node SET changes = node.changes + gone.changes, done = node.done + gone.done
FROM gone WHERE node.id = ''
"""


@attrs.define(eq=False)
class _Entry:
    """One job on its way, and the event that its caller waits for, if anybody does."""

    job: Job[Any] | None = None
    group: Group | None = None
    key: Hashable = None
    argument: Any = None
    fence: Job[None] | None = None
    posted: bool = False
    handed_over: bool = False
    value: Any = None
    error: BaseException | None = None
    committed: bool = False
    finished: trio.Event = attrs.field(factory=trio.Event)


class _CommitUnknownError(Exception):
    """The connection broke while the server was making the commit, or no standby has it."""


class GroupCommit:
    """Runs jobs in the order of their arrival on one connection, in a thread of Trio's.

    Args:
        address: the store.
        node: the name of this open store in the table ``node``.
    """

    def __init__(self, address: PostgresAddress, node: str) -> None:
        self._address = address
        self._node = node
        self._asked: deque[_Entry] = deque()
        self._work = trio.Event()
        self._awaited = trio.Event()
        self._limiter = trio.CapacityLimiter(1)
        self._connection: StoreConnection | None = None
        self._redial = Redial(address.outage)
        #: Runs at the beginning of the transaction of each job that is submitted from now on, and
        #: raises if it must not be made. A job keeps it, whenever its turn comes.
        self.fence: Job[None] | None = None
        self._closed = False
        self._cut = False
        self._ended = trio.Event()
        # System tasks: they live as long as the open store, and no nursery of a caller does.
        trio.lowlevel.spawn_system_task(self._run)
        trio.lowlevel.spawn_system_task(self._watch)

    async def submit(self, job: Job[T], *, patient: bool = False) -> T:
        """Run ``job`` in a transaction, and return its result once that is committed.

        Args:
            job: runs in a thread, within a transaction that it neither begins nor ends; it may run
                twice, the first time without effect.
            patient: wait without the limit of :data:`ANSWER_SECONDS`.

        Raises:
            StoreUnavailableError: the server failed, does not answer, or the store is closed.
            Exception: any other error of ``job``; its effects are rolled back.

        If it is cancelled before the job is handed over, nothing happens; later, the job is
        finished first.
        """
        return cast("T", await self._submit(_Entry(job=job), patient=patient))

    async def gather(self, group: Group, key: Hashable, argument: object) -> Any:
        """Run ``group`` with this and other arguments; otherwise as :meth:`submit`.

        Args:
            group: always the same object for the same kind of job.
            key: jobs of the same key run in the order of their arrival.
            argument: one of those that ``group`` gets.
        """
        return await self._submit(_Entry(group=group, key=key, argument=argument))

    def post(self, group: Group, key: Hashable, argument: object) -> Hashable:
        """Have a grouped job done without waiting; an error is logged. Returns its handle."""
        entry = _Entry(group=group, key=key, argument=argument, posted=True)
        if not self._closed:
            self._asked.append(entry)
            self._work.set()
        return entry

    def withdraw(self, posted: Hashable) -> bool:
        """Take back a posted job; return False if it has been handed to the thread already."""
        entry = cast("_Entry", posted)
        if entry.handed_over or self._closed:
            return False
        # It stays in its place, where nothing is left to do: to look for it would cost more the
        # longer the queue is.
        entry.group = None
        return True

    def has_made(self, posted: Hashable) -> bool:
        """Say whether a posted job is known to be committed."""
        return cast("_Entry", posted).committed

    def has_failed(self, posted: Hashable) -> bool:
        """Say whether a posted job has failed, so that nobody knows whether it was committed."""
        return cast("_Entry", posted).error is not None

    async def _submit(self, entry: _Entry, *, patient: bool = False) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise StoreUnavailableError("the store is closed")
        entry.fence = self.fence
        self._ask(entry)
        try:
            answered = await _wait(entry.finished, math.inf if patient else ANSWER_SECONDS)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                # It ends by itself, because _wait has a deadline.
                await _wait(entry.finished, STALL_SECONDS)
            raise
        if not answered:
            raise StoreUnavailableError(
                f"the database {self._address.place} has not answered for {ANSWER_SECONDS:g} s; "
                "it goes on by itself when the server answers"
            )
        if entry.error is not None:
            raise entry.error
        return entry.value

    def _ask(self, entry: _Entry) -> None:
        self._asked.append(entry)
        self._work.set()
        self._awaited.set()

    async def close(self) -> None:
        """Finish what is queued and close the connection; a second call waits for the first.

        Shielded from cancellation for at most :data:`CLOSE_SECONDS`.
        """
        self._closed = True
        self._work.set()
        self._awaited.set()
        with trio.CancelScope(shield=True):
            # It ends by itself, because _wait has a deadline.
            if not await _wait(self._ended, CLOSE_SECONDS):
                self._cut = True
                if (connection := self._connection) is not None:
                    connection.cut()
                await _wait(self._ended, CUT_SECONDS)
        await trio.lowlevel.checkpoint()

    # -- the task that hands batches over ------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            with trio.move_on_after(COMPANY_SECONDS):
                await self._awaited.wait()
            self._work, self._awaited = trio.Event(), trio.Event()
            while batch := self._next_batch():
                await self._in_thread(partial(self._commit, batch))
                for entry in batch:
                    if entry.posted and entry.error is not None:
                        _log.store_unavailable(entry.error)
                    entry.finished.set()
            if self._closed:
                break
        await self._in_thread(self._leave)
        self._ended.set()

    async def _watch(self) -> None:
        """Cut connections whose server does not answer, so that their threads go on."""
        while True:
            await trio.sleep(WATCH_SECONDS)
            if self._ended.is_set():
                return
            self._address.cut_silent()

    def _next_batch(self) -> Sequence[_Entry]:
        batch: list[_Entry] = []
        while self._asked and len(batch) < BATCH_LIMIT:
            entry = self._asked.popleft()
            if entry.job is not None or entry.group is not None:
                entry.handed_over = True
                batch.append(entry)
        return batch

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(function, limiter=self._limiter, abandon_on_cancel=True)

    # -- in the thread -------------------------------------------------------------------------

    def _commit(self, batch: Sequence[_Entry], *, hurried: bool = False) -> None:
        """Run ``batch`` in one transaction, or each job in its own when one of them raises.

        ``hurried``: a lock was waited for already, so each job waits briefly for its own.
        """
        if not hurried and not (batch := self._in_one_trip(batch)):
            return
        fresh = conflicts = 0
        while True:
            error = self._try(batch, hurried=hurried)
            if error is None:
                return
            if isinstance(error, psycopg.Error):
                if error.sqlstate in CONFLICTS and conflicts < CONFLICT_LIMIT:
                    conflicts += 1
                    if len(batch) == 1:
                        continue
                elif self._connection is None and not fresh:
                    # The server was restarted since the last transaction: nothing of this one has
                    # reached its commit.
                    fresh = 1
                    continue
            # A batch that may have been committed is not run again.
            if (
                len(batch) == 1
                or isinstance(error, _CommitUnknownError)
                or self._connection is None
            ):
                break
            self._commit_each(batch, error)
            return
        self._fail(batch, error)

    def _commit_each(self, batch: Sequence[_Entry], error: Exception) -> None:
        """Run each job in a transaction of its own, after ``error`` has undone that of all.

        If the error is a lock that was not free, the other jobs have waited long enough.
        """
        for entry in batch:
            self._commit((entry,), hurried=isinstance(error, psycopg.errors.LockNotAvailable))

    def _in_one_trip(self, batch: Sequence[_Entry]) -> Sequence[_Entry]:
        """Run grouped jobs by statements that commit together; return what is left to do.

        BEGIN, the count of changes and COMMIT would be three more round trips, each of which costs
        as much as a statement. A lone statement commits itself. Several are sent one behind the
        other, and are one transaction to the server until it is asked to answer.
        """
        groups = {entry.group for entry in batch}
        keys = {entry.key for entry in batch}
        fenced = any(entry.fence is not None for entry in batch)
        if None in groups or fenced or len(keys) < len(batch):
            return batch
        if len(groups) > 1 and not psycopg.Pipeline.is_supported():
            return batch
        try:
            connection = self._connected()
        except Exception:
            return batch  # the transaction says why
        if connection.pooled:
            return batch
        try:
            with self._address.statement(connection):
                if len(groups) > 1:
                    with connection.pipeline():
                        answers = _send(connection, batch)
                else:
                    answers = _send(connection, batch)
                answered = [
                    (entry, value)
                    for entries, values in answers
                    for entry, value in zip(entries, values, strict=True)
                ]
        except UnreplicatedError as error:
            self._fail(batch, _CommitUnknownError(str(error)))
            return ()
        except psycopg.Error as error:
            if not connection.useless:
                if not isinstance(error, psycopg.errors.LockNotAvailable):
                    return batch
                if len(batch) > 1:
                    self._commit_each(batch, error)
                else:
                    self._fail(batch, self._address.describe_lock(connection))
                return ()
            self._connection = None
            if error.sqlstate == READ_ONLY:
                return batch
            self._fail(batch, self._unknown())
            return ()
        except Exception:
            return batch  # a value that cannot be sent: each job is tried alone
        left = []
        for entry, value in answered:
            if value is UNDECIDED:
                left.append(entry)
            else:
                entry.value, entry.committed = value, True
        return left

    def _unknown(self) -> _CommitUnknownError:
        return _CommitUnknownError(
            f"the connection to {self._address.place} broke during a commit; it goes on by itself "
            "when the server answers"
        )

    def _fail(self, batch: Sequence[_Entry], error: Exception) -> None:
        if isinstance(error, psycopg.Error):
            error = self._address.describe(error)
        kind = TermEndedError if isinstance(error, TermEndedError) else StoreUnavailableError
        for entry in batch:
            # One exception for each caller: one object raised in several tasks would mix up their
            # tracebacks.
            entry.error = (
                kind(str(error))
                if isinstance(error, StoreUnavailableError | _CommitUnknownError)
                else error
            )

    def _try(self, batch: Sequence[_Entry], *, hurried: bool) -> Exception | None:
        """Return the error for which ``batch`` was rolled back; None if each job has its result."""
        try:
            connection = self._connected()
        except Exception as error:  # each caller of the batch gets it
            return error
        committing = False
        try:
            with self._address.transaction(connection):
                connection.changed, connection.done = False, 0
                if hurried:
                    connection.execute(_HURRIED)
                for fence in {entry.fence for entry in batch if entry.fence is not None}:
                    fence(connection)
                _perform(connection, batch)
                if connection.changed:
                    connection.execute(_COUNT, (self._node, connection.done))
                committing = True
        except UnreplicatedError as error:
            return _CommitUnknownError(str(error))
        except Exception as error:  # a job may raise anything of its own
            if connection.useless:
                self._connection = None
                if committing:
                    return self._unknown()
            elif isinstance(error, psycopg.errors.LockNotAvailable) and len(batch) == 1:
                return self._address.describe_lock(connection)
            return error
        for entry in batch:
            entry.committed = True
        return None

    def _connected(self) -> StoreConnection:
        if self._connection is not None:
            self._connection.notice_end()
            if not self._connection.useless:
                return self._connection
            self._connection = None
        if self._cut:
            raise StoreUnavailableError("the store is closed")
        self._redial.require()
        try:
            self._connection = self._address.connect(writer=True)
            self._connection.node = self._node
            self._note_timeline(self._connection)
        except StoreUnavailableError as error:
            self._redial.failed(error)
            raise
        self._redial.succeeded()
        return self._connection

    def _note_timeline(self, connection: StoreConnection) -> None:
        try:
            note_timeline(self._address, connection)
        except psycopg.Error as error:
            if connection.useless:
                self._connection = None
                raise self._address.describe(error) from error
            # A server without that function has failovers of its own kind.

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with self._address.transaction(connection):
                connection.execute(_LEAVE, (self._node,))
        except psycopg.Error as error:
            _log.store_unavailable(error)
        connection.close()


def _send(
    connection: StoreConnection, batch: Sequence[_Entry]
) -> list[tuple[list[_Entry], Iterable[Any]]]:
    """Run one statement for each group of jobs; return the jobs, and their results to be read."""
    gathered: dict[Group, list[_Entry]] = {}
    for entry in batch:
        if entry.group is not None:
            gathered.setdefault(entry.group, []).append(entry)
    return [
        (entries, group(connection, [each.argument for each in entries], True))
        for group, entries in gathered.items()
    ]


def _perform(connection: StoreConnection, batch: Sequence[_Entry]) -> None:
    """Do the jobs; those of one group together, as long as the keys are different ones."""
    gathered: dict[Group, list[_Entry]] = {}
    keys: set[Hashable] = set()
    for entry in (*batch, _Entry()):
        if gathered and (entry.group is None or entry.key in keys):
            for group, entries in gathered.items():
                values = group(connection, [each.argument for each in entries], False)
                for each, value in zip(entries, values, strict=True):
                    each.value = value
            gathered, keys = {}, set()
        if entry.group is not None:
            gathered.setdefault(entry.group, []).append(entry)
            keys.add(entry.key)
        elif entry.job is not None:
            entry.value = entry.job(connection)


async def _wait(event: trio.Event, seconds: float) -> bool:
    """Wait for ``event``; False: it was not set in time.

    Real time and not Trio's clock: in tests that clock may run ahead of the server.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    deadline = time.monotonic() + seconds
    while not event.is_set():
        left = deadline - time.monotonic()
        if left <= 0:
            break
        with trio.move_on_after(left):
            await event.wait()
    await trio.lowlevel.cancel_shielded_checkpoint()
    return event.is_set()
