"""The inbox in one SQLite file: durable, and the default.

:class:`SqliteInbox` adds to :class:`SqlInbox` what only SQLite has or lacks: unawaited claims
and ends (:mod:`storage.unawaited`), effects of handlers that run in the commit thread, and the
clearing of the write-ahead log.
"""

import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import apsw
import msgspec
import trio

from ..base import clock
from ..base.logs import get_logger
from ..errors import EffectError
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
from .commit import GroupCommit
from .effects import (
    SAVEPOINT,
    Effects,
    EffectsFailedError,
    apply,
    in_this_context,
    refuse_commit,
    require_ours,
)
from .engines.sqlite import CHECKPOINT_BYTES, SqliteEngine, SqliteReader
from .engines.sqlite_connection import (
    BUSY_SECONDS,
    SqliteTransaction,
    clear_log,
    overwrite_remnants,
    sync_log,
)
from .inbox import SqlInbox
from .known_keys import Version
from .readers import ReaderPool
from .sql import deliveries, reads
from .sql.deliveries import Answer, Arriving, RunEnd, new_token
from .sql.dialect import SqlTransaction
from .sql.schema import WIPED, prepare_sqlite
from .unawaited import SurelyNew, UnawaitedClaims, UnawaitedEnds, UnawaitedLease

T = TypeVar("T")

#: Time to wait for a reader that keeps the log from being cleared, in seconds. Deliveries wait,
#: too.
SHORT_SECONDS = 0.2

#: Size of the log, in bytes, above which it is copied during the retention. Its pages are all
#: different: copying 16 MB of them takes 15 ms of CPU, this 3.
PURGE_LOG_BYTES = 4 << 20

#: Time for a failed ``open`` to close the store again, in seconds.
CLOSE_SECONDS = 4.0

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
        self._version: Version | None = None
        self._unawaited = UnawaitedClaims(terms, commits, readers)
        self._ends = UnawaitedEnds(commits, self._pending_tokens)
        self._accepting_new = self._accept_new

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        owner: str,
        lease_seconds: float,
        dedup_seconds: float,
        payload_seconds: float,
        claims: str | os.PathLike[str] | None = None,
        write_lock: str | os.PathLike[str] | None = None,
        distrust_log: bool = False,
    ) -> "SqliteInbox":
        """Open the database file ``path``, creating its tables.

        Args:
            path: the file; its directory exists.
            owner: see :class:`LeaseTerms`, also for the next three.
            lease_seconds: above 0.
            dedup_seconds: 0 or more.
            payload_seconds: 0 or more.
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
        terms = LeaseTerms(
            owner=owner,
            lease_seconds=lease_seconds,
            dedup_seconds=dedup_seconds,
            payload_seconds=payload_seconds,
        )
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

    def accept(self, delivery: NewDelivery, *, leased: bool) -> Coroutine[Any, Any, Admitted]:
        version = self._unawaited.keys.note_new(delivery)
        if version is None:
            return super().accept(delivery, leased=leased)
        token = new_token() if leased and not delivery.ordered else None
        item = (Arriving(delivery, token), version)
        return self._admit(self._accepting_new, delivery.key, token, item)

    def _accept_new(self, tx: SqlTransaction, items: Sequence[SurelyNew]) -> Sequence[Answer]:
        are_new = self._unawaited.keys.are_new(tx, (version for _, version in items))
        arriving = [each for each, _ in items]
        return deliveries.accept_all(tx, self._terms, arriving, surely_new=are_new)

    async def claim(self, delivery: NewDelivery) -> Admitted:
        key, unawaited = delivery.key, self._unawaited
        unawaited.keys.add(key)
        if key in unawaited.leases:  # its run has ended without `finish`
            unawaited.drop(unawaited.leases[key])
        interrupted = unawaited.interrupted_run(key)
        # Not synced: no sender is answered because of a claim, so after a power cut the sender
        # delivers again.
        admitted = await super().claim(delivery)
        # If a different body was stored as evidence, its sender is answered at once, without a run
        # whose end would sync.
        if not admitted.same_body and admitted.admission is not Admission.NEW:
            await self._commits.submit(lambda tx: sync_log(_connection_of(tx)))
        if interrupted is not None:
            if admitted.admission is Admission.NEW and admitted.lease is not None:
                counted = await self._count_interrupted(interrupted, admitted.lease, delivery)
                admitted = msgspec.structs.replace(admitted, attempts=admitted.attempts + counted)
            unawaited.forget_interrupted(key)
        return admitted

    async def _count_interrupted(
        self, run: InterruptedRun, lease: Lease, delivery: NewDelivery
    ) -> int:
        """Count a run of the key during which an earlier process ended.

        Returns:
            How many ends were added; 0: they were counted already.
        """
        return await self._commits.submit(
            partial(
                deliveries.count_ends,
                sequence=lease.sequence,
                ends=run.process_ends,
                begun=run.begun,
                now=delivery.received_at,
                error=PROCESS_ENDED,
            ),
            durable=False,
        )

    def claim_unawaited(self, delivery: NewDelivery) -> Lease | None:
        return self._unawaited.claim(delivery)

    async def park(self, delivery: NewDelivery, reason: str | None = None) -> Admitted:
        self._unawaited.keys.add(delivery.key)
        return await super().park(delivery, reason)

    # -- runs ------------------------------------------------------------------------------------

    def end_unawaited(self, lease: Lease, *, now: float) -> bool:
        if not self._commits.prompt:
            return False
        started_at = self._take_back_start(lease)
        self._ends.post(lease.key, RunEnd(lease.sequence, lease.token, now, started_at))
        return True

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
                deliveries.start_all(tx, self._terms, [start.run])
            value = _apply_within_budget(tx, stored, attempt, inside)
            deliveries.finish(tx, stored, Done(), now)
            self._unawaited.keys.check(tx)
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

    async def renew(self, held: Collection[Lease], *, now: float) -> Renewed:
        self._unawaited.drop_others(held)
        self._ends.repeat_failed()
        return await super().renew(held, now=now)

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, query: Callable[[SqlTransaction], T]) -> T:
        """Run ``query`` after the commits of the unawaited claims and ends."""
        if not (self._unawaited.are_committed and self._ends.are_committed):
            await self._commits.submit(lambda _: None, durable=False)
        return await super()._read(query)

    async def changed_elsewhere(self) -> bool:
        # On the writing connection, because the number counts the changes of *other* connections.
        version = await self._commits.run_outside_transaction(
            lambda connection: (self._engine.connections, int(connection.pragma("data_version"))),
            patient=False,
        )
        before, self._version = self._version, version
        changed = before is not None and version != before
        self._unawaited.keys.catch_up(changed=changed)
        return changed

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
        self._engine.checkpoint_bytes = PURGE_LOG_BYTES
        try:
            purged = Purged(
                bodies=await self._delete(with_body, deliveries.delete_bodies, old_body),
                finished=await self._delete(reads.find_old_done, deliveries.delete_done, forgotten),
                parked=await self._delete(
                    reads.find_old_parked, deliveries.delete_parked, old_body
                ),
            )
        finally:
            self._engine.checkpoint_bytes = CHECKPOINT_BYTES
        # Deleted rows are in the log until it is cleared.
        if purged != Purged(0, 0, 0):
            await self._clear_log(SHORT_SECONDS)
        return purged

    def _erase(self, tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
        # The next wipe rewrites the database.
        deliveries.write_checkpoint(tx, WIPED, None)
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
        self._ends.repeat_failed()
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
_STEPS = 10_000

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
    connection.set_progress_handler(lambda: clock.monotonic() > deadline, _STEPS)
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
