"""The inbox in one SQLite file: durable, and the default.

:class:`SqliteInbox` adds to :class:`SqlInbox` what only SQLite has or lacks: unawaited claims
(:mod:`storage.unawaited`) and ends, effects of handlers that run in the commit thread, and the
clearing of the write-ahead log.

The success of a queued run acknowledges nothing, so it is not awaited, and waits for the next
commit to share its sync. So an enqueued event costs one sync instead of two. A run whose end is not
committed when the process is killed runs again.
"""

import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any, TypeVar, cast

import apsw
import msgspec
import trio

from ..base import clock
from ..base.logs import get_logger
from ..errors import EffectError, StoreLostError
from ..records.deliveries import (
    PROCESS_ENDED,
    Admission,
    Admitted,
    Done,
    Lease,
    NewDelivery,
    Outcome,
    Purged,
    Renewed,
)
from .admission import LeaseTerms
from .claims_file import InterruptedRun
from .commit import CLOSE_SECONDS, GroupCommit, Unit
from .effects import (
    SAVEPOINT,
    Effects,
    EffectsFailedError,
    apply,
    in_this_context,
    refuse_commit,
    require_ours,
)
from .engines.sqlite import LOG_BYTES, SqliteEngine, SqliteReader
from .engines.sqlite_connection import (
    BUSY_SECONDS,
    SqliteTransaction,
    clear_log,
    overwrite_remnants,
    sync_log,
)
from .inbox import SqlInbox
from .readers import ReaderPool
from .sql import admission, arrivals, checkpoints, reads, runs
from .sql.admission import Answer, Arriving, new_token
from .sql.dialect import SqlTransaction
from .sql.runs import RunEnd
from .sql.schema import WIPED
from .sql.versions import prepare_sqlite
from .unawaited import UnawaitedClaims, UnawaitedLease

T = TypeVar("T")

#: Time to wait for a reader that keeps the log from being cleared, in seconds. Deliveries wait,
#: too.
SHORT_SECONDS = 0.2

#: Size of the log, in bytes, above which it is copied during the retention. Its pages are all
#: different: copying 16 MB of them takes 15 ms of CPU, this 3.
PURGE_LOG_BYTES = 4 << 20

#: The longest time that the end of a run waits for other work, in seconds. At 100 events a second,
#: nine of ten ends share the commit of another event.
LINGER_SECONDS = 0.025

_log = get_logger("storage")


class SqliteInbox(SqlInbox):
    """:class:`Inbox` in a SQLite file; open it with :meth:`open`, end with :meth:`close`."""

    #: See :attr:`Inbox.in_order`: one writer gives the sequences and commits them.
    in_order = True

    def __init__(self, file: str, terms: LeaseTerms, engine: SqliteEngine) -> None:
        commits = GroupCommit(engine, name="sdk_trio-inbox")
        readers = ReaderPool(partial(SqliteReader, engine), place=file, limit=1)
        super().__init__(terms, commits, readers)
        self._file = file
        self._engine = engine
        # The number of the writing connection, and the last PRAGMA data_version of it.
        self._seen: tuple[int, int] | None = None
        self._unawaited = UnawaitedClaims(terms, commits, readers, self._claiming)
        # Ends of runs that are not awaited, by token, in the order in which they were posted.
        self._ends: dict[int, Unit] = {}

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        terms: LeaseTerms,
        *,
        claims: str | os.PathLike[str] | None = None,
        write_lock: str | os.PathLike[str] | None = None,
        distrust_log: bool = False,
    ) -> "SqliteInbox":
        """Open the database file ``path``, creating its tables.

        Args:
            path: the file; its directory exists.
            terms: the owner and the periods.
            claims: the claims file, if this is the only process that runs deliveries. None: every
                claim is awaited.
            write_lock: the file whose lock serializes several processes that run deliveries.
                None: this is the only such process.
            distrust_log: rewrite a log that an earlier process left behind.

        Raises:
            StoreVersionError: the file is of another version or of another program.
            StoreUnavailableError: it cannot be opened or written.

        If it is cancelled, nothing stays open.
        """
        file = os.fspath(path)
        engine = SqliteEngine(
            file,
            partial(prepare_sqlite, file=file),
            write_lock=None if write_lock is None else os.fspath(write_lock),
            distrust_log=distrust_log,
        )
        inbox = cls(file, terms, engine)
        try:
            # The first unit connects, and creates the tables of a new file.
            await inbox._commits.run_outside_transaction(lambda _: None)
            await inbox.changed_elsewhere()
            if claims is not None:
                await inbox._unawaited.open(claims)
        except BaseException:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await inbox.close()
            raise
        return inbox

    async def clock_offset(self) -> float | None:
        """See :meth:`Inbox.clock_offset`: the host's clock is the only one."""
        await trio.lowlevel.checkpoint()
        return None

    def writing_process(self) -> int | None:
        return self._engine.write_lock_holder()

    # -- admission -------------------------------------------------------------------------------

    def accept(
        self, delivery: NewDelivery, *, leased: bool, take_expired_until: float = inf
    ) -> Coroutine[Any, Any, Admitted]:
        new_in = self._unawaited.keys.note_new(delivery)
        if (run := self._unawaited.interrupted.get(delivery.key)) is not None:
            # Not leased: it is claimed from the store, which knows then that it must run alone.
            return self._admit_interrupted(run, admission.accept_all, Arriving(delivery, None))
        token = new_token() if leased and not delivery.ordered else None
        arriving = Arriving(delivery, token, new_in, take_expired_until)
        return self._admit(arriving, self._commits.gather(self._accepting, delivery.key, arriving))

    async def claim(
        self, delivery: NewDelivery, *, take_expired_until: float = inf, token: int | None = None
    ) -> Admitted:
        key, unawaited = delivery.key, self._unawaited
        unawaited.keys.add(key)
        if key in unawaited.leases:  # its run has ended without `finish`
            unawaited.drop(unawaited.leases[key])
        if (run := unawaited.interrupted.get(key)) is not None:
            arriving = Arriving(delivery, new_token())
            return await self._admit_interrupted(run, admission.claim_all, arriving)
        # Not synced: no sender is answered because of a claim, so after a power cut the sender
        # delivers again.
        admitted = await super().claim(delivery, take_expired_until=take_expired_until, token=token)
        # If a different body was stored as evidence, its sender is answered at once, without a run
        # whose end would sync.
        if not admitted.same_body and admitted.admission is not Admission.NEW:
            await self.sync()
        return admitted

    async def _admit_interrupted(
        self, run: InterruptedRun, admit: Callable[..., list[Answer]], arriving: Arriving
    ) -> Admitted:
        """Admit a delivery and count its run during which a process ended, in one transaction.

        While a worker runs it, it cannot be counted; a later delivery counts it then.
        """
        counted = 0

        def work(tx: SqlTransaction) -> Answer:
            ((admitted, sequence),) = admit(tx, self._terms, [arriving])
            nonlocal counted
            known = arrivals.find_one(tx, run.key) if sequence is None else sequence
            counted = runs.count_ends(
                tx,
                sequence=known or 0,
                token=arriving.token,
                ends=run.process_ends,
                begun=run.begun,
                now=arriving.delivery.received_at,
                error=PROCESS_ENDED,
            )
            return msgspec.structs.replace(admitted, attempts=admitted.attempts + counted), sequence

        admitted = await self._admit(arriving, self._commits.submit(work))
        if counted or admitted.admission is not Admission.QUEUED:
            self._unawaited.forget_interrupted(run.key)
        return admitted

    def claim_unawaited(self, delivery: NewDelivery) -> Lease | None:
        return self._unawaited.claim(delivery)

    async def park(
        self, delivery: NewDelivery, reason: str | None = None, *, take_expired_until: float = inf
    ) -> Admitted:
        self._unawaited.keys.add(delivery.key)
        return await super().park(delivery, reason, take_expired_until=take_expired_until)

    # -- runs ------------------------------------------------------------------------------------

    def end_unawaited(self, lease: Lease, *, now: float) -> bool:
        if not self._commits.prompt:
            return False
        started_at = self._take_back_start(lease)
        self._post_end(lease.key, RunEnd(lease.sequence, lease.token, now, started_at))
        return True

    def _post_end(self, key: str, run: RunEnd) -> None:
        # Each call forgets two committed ends at most, so that none makes the event loop wait.
        for end in list(islice(self._ends.values(), 2)):
            if end.finished and end.error is None:
                self._forget_end(end)
        self._pending_tokens.add(run.token)
        self._ends[run.token] = self._commits.post(
            runs.end_all, key, run, durable=True, linger=LINGER_SECONDS
        )

    def _forget_end(self, end: Unit) -> None:
        # `_post_end` may have forgotten it while `_repeat_failed_ends` was on its way through them.
        self._ends.pop(end.item.token, None)
        self._pending_tokens.discard(end.item.token)

    def _repeat_failed_ends(self) -> None:
        """Post again what the store has failed; the next commit of any caller takes it along.

        The ends of a lost store are forgotten.
        """
        for end in list(self._ends.values()):
            if end.finished:
                self._forget_end(end)
                if end.error is not None and not isinstance(end.error, StoreLostError):
                    self._post_end(end.key, end.item)

    def finish(self, lease: Lease, outcome: Outcome, *, now: float) -> Coroutine[Any, Any, bool]:
        if isinstance(lease, UnawaitedLease) and self._unawaited.leases.get(lease.key) is lease:
            return self._unawaited.finish(lease, outcome, now=now)
        return super().finish(lease, outcome, now=now)

    async def conclude(self, lease: Lease, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`. The effects run in the committing thread."""
        await trio.lowlevel.checkpoint_if_cancelled()
        inside, start = in_this_context(effects), lease.start

        def work(tx: SqlTransaction) -> T:
            stored = (lease.stored() if isinstance(lease, UnawaitedLease) else None) or lease
            if start is not None:
                runs.start_all(tx, self._terms, [start.run])
            value = _apply_within_budget(tx, stored, attempt, inside)
            runs.finish(tx, stored, Done(), now)
            return value

        try:
            # Even a cancelled caller has to know whether the event is done. The wait is bounded by
            # storage.commit.ANSWER_SECONDS of real time, as for every caller.
            with trio.CancelScope(shield=True):
                value = await self._commits.submit(work, single=True, effects_key=lease.key)
        except EffectsFailedError as failed:
            raise failed.error from None
        self._unawaited.drop(lease)
        return value

    async def recover(self, *, dead: str | None = None) -> int:
        return await self._recover(dead=dead, others_ran=bool(self._unawaited.interrupted))

    async def renew(self, held: Collection[Lease], *, now: float) -> Renewed:
        self._unawaited.drop_others(held)
        self._repeat_failed_ends()
        return await super().renew(held, now=now)

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, query: Callable[[SqlTransaction], T]) -> T:
        """Run ``query`` after the commits of the unawaited claims and ends."""
        ends_committed = all(end.finished for end in self._ends.values())
        if not (self._unawaited.are_committed and ends_committed):
            await self._commits.submit(lambda _: None, durable=False)
        return await super()._read(query)

    async def changed_elsewhere(self) -> bool:
        # On the writing connection, because the number counts the changes of *other* connections.
        seen = await self._commits.run_outside_transaction(
            lambda connection: (self._engine.connections, int(connection.pragma("data_version"))),
            patient=False,
        )
        before, self._seen = self._seen, seen
        changed = before is not None and seen != before
        self._unawaited.keys.catch_up(changed=changed)
        return changed

    async def sync(self) -> None:
        await self._commits.submit(lambda tx: sync_log(_connection_of(tx)))

    async def other_tables(self) -> Sequence[str]:
        return await self._read(reads.other_tables)

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`Inbox.lead`; the lock of the data directory has one holder."""
        await trio.lowlevel.checkpoint()
        return 1

    # -- retention and end -----------------------------------------------------------------------

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`. Cancelled, it stops between two transactions."""
        self._unawaited.clear_recorded()
        terms = self._terms
        old_body = now - terms.payload_seconds
        # A row is removed when neither its body nor its id is needed.
        forgotten = now - max(terms.payload_seconds, terms.dedup_seconds)
        with_body = partial(reads.find_old_done, with_body=True)
        self._engine.log_bytes = PURGE_LOG_BYTES
        try:
            purged = Purged(
                bodies=await self._delete(with_body, arrivals.delete_bodies, old_body),
                finished=await self._delete(reads.find_old_done, arrivals.delete_done, forgotten),
                parked=await self._delete(reads.find_old_parked, arrivals.delete_parked, old_body),
            )
        finally:
            self._engine.log_bytes = LOG_BYTES
        # Deleted rows are in the log until it is cleared.
        if purged != Purged(0, 0, 0):
            await self._clear_log(SHORT_SECONDS)
        return purged

    async def erase(self, tenant_id: str) -> int:
        # Otherwise a start would take an erased key in the claims file for an interrupted run's.
        self._unawaited.clear_recorded()
        return await super().erase(tenant_id)

    def _erase(self, tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
        # The next wipe rewrites the database.
        checkpoints.write_checkpoint(tx, WIPED, None)
        return super()._erase(tx, sequences, tenant_id)

    async def wipe(self) -> bool:
        await self._commits.run_outside_transaction(overwrite_remnants)
        return await self._clear_log(BUSY_SECONDS)

    async def _clear_log(self, seconds: float) -> bool:
        """Remove deleted data from the write-ahead log; warn if a reader prevents it."""
        cleared = await self._commits.run_outside_transaction(partial(clear_log, seconds=seconds))
        if not cleared:
            _log.warning(
                "store.log_kept",
                hint="deleted bodies stay in the write-ahead log until the reader that needs it "
                "(a backup, the replicator, an sqlite3 shell) has ended",
            )
        return cleared

    async def close(self) -> None:
        self._unawaited.keys.stop()
        self._repeat_failed_ends()
        try:
            await super().close()
        finally:
            self._unawaited.close()


def _connection_of(transaction: SqlTransaction) -> apsw.Connection:
    return cast("SqliteTransaction", transaction).connection


# -- effects ---------------------------------------------------------------------------------------

#: Time for a handler's statements and the Python between them, in seconds. Every delivery waits
#: for them; a sender gives up after 10 s.
EFFECT_SECONDS = 1.0

#: Instructions of SQLite's virtual machine between two reads of the clock.
_INSTRUCTIONS = 10_000

# Not the handler's failures: the disk or the file is the cause, and our own statements would fail,
# too.
_FAULTS = (
    apsw.BusyError,
    apsw.CantOpenError,
    apsw.CorruptError,
    apsw.FullError,
    apsw.IOError,
    apsw.NoMemError,
    apsw.NotADBError,
    apsw.ReadOnlyError,
)


def _apply_within_budget(
    transaction: SqlTransaction, lease: Lease, attempt: int, effects: Effects[T]
) -> T:
    """Apply ``effects``, if run number ``attempt`` of the event is still that of ``lease``.

    Raises:
        EventTakenOverError: the run is not ours.
        EffectsFailedError: the effects have failed; its ``error`` is the reason.
    """
    require_ours(transaction, lease, attempt)
    connection = _connection_of(transaction)
    connection.execute(f"SAVEPOINT {SAVEPOINT}")
    value = _within_budget(connection, effects)
    try:
        connection.execute(f"RELEASE {SAVEPOINT}")
    except apsw.SQLError:  # the savepoint is gone
        refuse_commit()
    return value


def _within_budget(connection: apsw.Connection, effects: Effects[T]) -> T:
    deadline = clock.monotonic() + EFFECT_SECONDS
    connection.set_progress_handler(lambda: clock.monotonic() > deadline, _INSTRUCTIONS)
    try:
        value = apply(effects, connection)
    except _FAULTS:
        raise
    except apsw.InterruptError as error:
        raise EffectsFailedError(_too_slow()) from error
    except BaseException as error:  # raised by the handler
        raise EffectsFailedError(error) from None  # noqa: ASYNC104 - no task runs in this thread
    finally:
        connection.set_progress_handler(None)
    if clock.monotonic() > deadline:
        raise EffectsFailedError(_too_slow())
    return value


def _too_slow() -> EffectError:
    return EffectError(
        f"the effects took longer than {EFFECT_SECONDS:g} s, and every delivery waits for them: do "
        "everything but the statements before, or use a database of your own and first_time"
    )
