"""The inbox in one SQLite file: durable, and the default.

A claim that is not waited for (``storage.claims`` says when and why): :meth:`SqliteInbox.claim_new`
writes the key into the claims file and posts the claim. The end of the run takes back a claim that
was not handed over to the committing thread yet, and records both as one; otherwise it is an
ordinary end, under the lease of the claim.
"""

import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import apsw
import msgspec
import trio

from ..base import clock
from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..errors import EffectError
from ..records.deliveries import (
    PROCESS_ENDED,
    Admission,
    Admitted,
    Done,
    NewDelivery,
    Outcome,
    Purged,
    Renewed,
)
from .admission import LeaseTerms
from .claims import ClaimsFile, EndedRun, StoreKeys, Version, read_claims
from .commit import GroupCommit, PostedWork
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
from .readers import ReaderPool
from .sql import deliveries, reads
from .sql.deliveries import Answer, Arriving, Lease, Ran, RunEnd
from .sql.dialect import SqlTransaction
from .sql.leases import new_token
from .sql.schema import prepare_sqlite

T = TypeVar("T")

#: Time to wait for a reader that keeps the log from being cleared, in seconds. Deliveries wait too.
SHORT_SECONDS = 0.2

#: Size of the log, in bytes, from which on it is copied during the retention. Its pages are all
#: different ones: copying 16 MB of them takes 15 ms of CPU, this 3.
PURGE_LOG_BYTES = 4 << 20

#: Time for ``open`` to close again what it has opened, in seconds.
CLOSE_SECONDS = 4.0

_log = get_logger("storage")


#: A delivery, or a finished inline run of one, whose key was surely new at a version.
_New = tuple[Arriving, Version]
_Run = tuple[Ran, Version]


class _Unawaited(NamedTuple):
    """A run whose claim is not waited for: its delivery, claim, token, slot and version."""

    delivery: NewDelivery
    claim: PostedWork
    token: int
    slot: int
    version: Version


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
        # For claims that are not waited for; without the file every claim is waited for.
        self._claims: ClaimsFile | None = None
        self._claimed: dict[str, _Unawaited] = {}
        self._keys = StoreKeys(self._commits, self._readers, self._claimed)
        self._accepting_new = self._accept_new
        self._claiming_new = self._claim_new
        self._recording = self._record

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
        turn: str | os.PathLike[str] | None = None,
        distrust_log: bool = False,
    ) -> "SqliteInbox":
        """Open the database file ``path``, creating its tables.

        Args:
            path: the file; its directory exists.
            owner: the name that holds the leases taken here; not empty, unique among living
                processes.
            lease_seconds: duration of a lease without renewal; above 0.
            dedup_seconds: time that a finished id is remembered; 0 or more.
            payload_seconds: time that bodies are kept; 0 or more.
            claims: the claims file, for the one process that runs deliveries: :meth:`claim_new`
                needs it. None: every claim is waited for.
            turn: the file by whose lock several processes that run deliveries write one after the
                other; None: this is the only one.
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
            turn=None if turn is None else os.fspath(turn),
            distrust_log=distrust_log,
        )
        inbox = cls(file, terms, engine)
        try:
            # The first unit connects, and makes the tables of a new file.
            await inbox._commits.run_alone(lambda _: None)
            await inbox.changed_elsewhere()
            if claims is not None:
                await inbox._open_claims(claims)
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
        """See :meth:`Inbox.writing_process`."""
        return self._engine.turn_holder()

    # -- admission -------------------------------------------------------------------------------

    def accept(self, delivery: NewDelivery, *, leased: bool) -> Coroutine[Any, Any, Admitted]:
        """See :meth:`Inbox.accept`."""
        keys = self._keys
        if keys.filter is None and self._claims is not None:
            keys.begin()
        if not keys.note_new(delivery):
            return super().accept(delivery, leased=leased)
        token = new_token() if leased and not delivery.ordered else None
        item = (Arriving(delivery, token), keys.version)
        return self._admit(self._accepting_new, delivery.key, token, item)

    async def claim(self, delivery: NewDelivery) -> Admitted:
        """See :meth:`Inbox.claim`."""
        key = delivery.key
        if self._keys.filter is not None:
            self._keys.filter.add(hash(key))
        if (stale := self._claimed.pop(key, None)) is not None:
            self._give_back(stale)  # its end could not be recorded
        ended = None if self._claims is None else self._claims.ended.get(key)
        # No sender is told of a claim: after a power cut it delivers again.
        admitted = await super().claim(delivery)
        # But one whose other body was kept is told that now, and is not run, which would sync.
        if not admitted.same_body and admitted.admission is not Admission.NEW:
            await self._commits.submit(lambda tx: sync_log(_connection_of(tx)))
        if ended is not None and self._claims is not None:
            lease = self._leases.get(key)
            if admitted.admission is Admission.NEW and lease is not None:
                admitted = await self._count_end(lease, delivery, admitted, ended)
            self._claims.counted(key)
        return admitted

    async def _count_end(
        self, lease: Lease, delivery: NewDelivery, admitted: Admitted, ended: EndedRun
    ) -> Admitted:
        """Count a run of the key that has ended an earlier process, unless that was done."""
        counted = await self._commits.submit(
            partial(
                deliveries.count_ends,
                sequence=lease.sequence,
                ends=ended.ends,
                begun=ended.begun,
                now=delivery.received_at,
                error=PROCESS_ENDED,
            ),
            durable=False,
        )
        return msgspec.structs.replace(admitted, attempts=admitted.attempts + counted)

    def claim_new(self, delivery: NewDelivery) -> bool:
        """See :meth:`Inbox.claim_new`."""
        claims = self._claims
        if claims is None or not self._commits.prompt:
            return False
        keys = self._keys
        if keys.filter is None:
            keys.begin()
            return False
        key = delivery.key
        if not keys.note_new(delivery) or key in claims.ended:
            return False
        slot = claims.take(key, delivery.received_at)
        if slot is None:
            return False
        token, version = new_token(), keys.version
        claim = self._commits.post(self._claiming_new, key, (Arriving(delivery, token), version))
        self._claimed[key] = _Unawaited(delivery, claim, token, slot, version)
        self._pending.add(token)
        return True

    def _accept_new(self, tx: SqlTransaction, items: Sequence[_New]) -> Sequence[Answer]:
        arriving = [each for each, _ in items]
        new = self._are_new(tx, items)
        return deliveries.accept_all(tx, self._terms, arriving, surely_new=new)

    def _claim_new(self, tx: SqlTransaction, items: Sequence[_New]) -> Sequence[Answer]:
        arriving = [each for each, _ in items]
        new = self._are_new(tx, items)
        return deliveries.claim_all(tx, self._terms, arriving, surely_new=new)

    def _are_new(self, tx: SqlTransaction, items: Sequence[Any]) -> bool:
        """Return whether no other process has written since the keys were found to be new."""
        keys = self._keys
        return all(keys.is_still(tx, version) for version in {version for _, version in items})

    async def park(self, delivery: NewDelivery, reason: str | None = None) -> Admitted:
        """See :meth:`Inbox.park`."""
        if self._keys.filter is not None:
            self._keys.filter.add(hash(delivery.key))
        return await super().park(delivery, reason)

    # -- runs ------------------------------------------------------------------------------------

    def finish(self, key: str, outcome: Outcome, *, now: float) -> Coroutine[Any, Any, None]:
        """See :meth:`Inbox.finish`."""
        claimed = self._claimed.get(key)
        if claimed is None:
            return super().finish(key, outcome, now=now)
        return self._finish_unawaited(key, claimed, outcome, now)

    async def _finish_unawaited(
        self, key: str, claimed: _Unawaited, outcome: Outcome, now: float
    ) -> None:
        """Record the end of a run whose claim was not waited for."""
        # Checked first: if it is cancelled here, the claim is not withdrawn.
        await trio.lowlevel.checkpoint_if_cancelled()
        del self._claimed[key]
        commits = self._commits
        plain = isinstance(outcome, Done) and outcome.answer is None and outcome.reason is None
        withdrawn = commits.withdraw(claimed.claim)
        lease = None if withdrawn else _lease_of(claimed)
        try:
            if plain and withdrawn:
                # Most handlers end before their claim is handed over: both are one record then.
                run = Ran(claimed.delivery, claimed.token, now)
                await commits.gather(self._recording, key, (run, claimed.version))
            elif plain and lease is not None:
                end = RunEnd(lease.sequence, lease.token, now)
                if not await commits.gather(self._ending, key, end):
                    # The lease was read while its claim was being committed, and the commit failed.
                    await commits.submit(partial(self._end_unawaited, claimed, outcome, now))
            else:
                await commits.submit(partial(self._end_unawaited, claimed, outcome, now))
        finally:
            self._give_back(claimed)

    def _end_unawaited(
        self, claimed: _Unawaited, outcome: Outcome, now: float, tx: SqlTransaction
    ) -> None:
        self._keys.check(tx)
        # A claim that was handed over before this is committed by now, or has failed.
        lease = _lease_of(claimed)
        if lease is not None:
            deliveries.finish(tx, self._terms, lease, outcome, now)
        else:
            delivery, token = claimed.delivery, claimed.token
            deliveries.record_run(tx, self._terms, delivery, token, outcome, now)

    def _record(self, tx: SqlTransaction, items: Sequence[_Run]) -> Sequence[None]:
        runs = [run for run, _ in items]
        return deliveries.add_done(tx, self._terms, runs, surely_new=self._are_new(tx, items))

    def _give_back(self, claimed: _Unawaited) -> None:
        self._pending.discard(claimed.token)
        claims = self._claims
        if claims is not None and self._commits.prompt:
            claims.clear(claimed.slot)
        elif claims is not None:
            claims.clear_later(claimed.slot)
        self._keys.catch_up()

    async def conclude(self, key: str, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`. The effects run in the committing thread."""
        await trio.lowlevel.checkpoint_if_cancelled()
        claimed, begun = self._claimed.get(key), self._begun.pop(key, None)
        inside = in_this_context(effects)

        def work(tx: SqlTransaction) -> T:
            lease = self._leases.get(key) if claimed is None else _lease_of(claimed)
            if begun is not None and lease is not None:
                start = deliveries.RunStart(lease.sequence, lease.token, begun[1], brought=True)
                deliveries.start_all(tx, self._terms, [start])
            value = _apply_within_budget(tx, key, lease, attempt, inside)
            if lease is not None:
                deliveries.finish(tx, self._terms, lease, Done(), now)
            self._keys.check(tx)
            return value

        is_done = False
        try:
            # Whoever is cancelled has to know nevertheless whether the event is done. The bound is
            # that of every caller: storage.commit.ANSWER_SECONDS, in real time.
            with trio.CancelScope(shield=True):
                value = await self._commits.submit(work, single=True, name=key)
            is_done = True
        except EffectsFailedError as failed:
            raise failed.error from None
        finally:
            # Otherwise nothing was changed, and the next outcome has to bring the start again.
            if not is_done and begun is not None:
                self._begun[key] = begun
        self._leases.pop(key, None)
        if (claimed := self._claimed.pop(key, None)) is not None:
            self._give_back(claimed)
        return value

    async def renew(self, keys: Collection[str], *, now: float) -> Renewed:
        """See :meth:`Inbox.renew`."""
        held = frozenset(keys)
        for key in [key for key in self._claimed if key not in held]:
            self._give_back(self._claimed.pop(key))
        return await super().renew(held, now=now)

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, query: Callable[[SqlTransaction], T]) -> T:
        """Run ``query`` after the claims that nobody has waited for."""
        if any(not claimed.claim.finished for claimed in self._claimed.values()):
            await self._commits.submit(lambda _: None, durable=False)
        return await super()._read(query)

    async def changed_elsewhere(self) -> bool:
        """See :meth:`Inbox.changed_elsewhere`."""
        # On the writing connection, because the number counts the changes of all *others*.
        version = await self._commits.run_alone(
            lambda connection: (self._engine.connections, int(connection.pragma("data_version"))),
            patient=False,
        )
        before, self._version = self._version, version
        changed = before is not None and version != before
        self._keys.catch_up(changed=changed)
        return changed

    async def other_tables(self) -> Sequence[str]:
        """See :meth:`Inbox.other_tables`."""
        return await self._read(reads.other_tables)

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`Inbox.lead`; the lock of the data directory has one holder."""
        await trio.lowlevel.checkpoint()
        return 1

    # -- retention and end -----------------------------------------------------------------------

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`."""
        self._engine.checkpoint_bytes = PURGE_LOG_BYTES
        try:
            purged = await super().purge(now=now)
        finally:
            self._engine.checkpoint_bytes = CHECKPOINT_BYTES
        # Deleted rows are still in the log until that is cleared.
        if purged != Purged(0, 0, 0):
            await self._clear_log(SHORT_SECONDS)
        return purged

    def _erase(self, tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
        deliveries.write_checkpoint(tx, "storage.wiped", None)
        return super()._erase(tx, sequences, tenant_id)

    async def wipe(self) -> bool:
        """See :meth:`Inbox.wipe`."""
        await self._commits.run_alone(overwrite_remnants)
        return await self._clear_log(BUSY_SECONDS)

    async def _clear_log(self, seconds: float) -> bool:
        """Remove deleted data from the write-ahead log, too, and warn if a reader prevents it."""
        cleared = await self._commits.run_alone(partial(clear_log, seconds=seconds))
        if not cleared:
            _log.warning(
                "store.log_kept",
                hint="deleted bodies stay in the write-ahead log until the reader that needs it "
                "(a backup, the replicator, an sqlite3 shell) has ended, and it is written anew",
            )
        return cleared

    async def _open_claims(self, path: str | os.PathLike[str]) -> None:
        """Open the claims file, and begin to learn the keys of the store.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """

        is_new = await self.last_sequence() == 0
        try:
            left = await run_in_thread(partial(read_claims, path, is_new=is_new))
            committed = await self.known([run.key for run in left])
            lost = [run for run in left if run.key not in committed]
            self._claims = await run_in_thread(ClaimsFile, path, lost)
        except OSError as error:
            _log.warning(
                "store.claims_unused",
                file=os.fspath(path),
                error=str(error),
                hint="the start of each inline run is waited for, which costs it a commit",
            )
            await trio.lowlevel.checkpoint()
            return
        # A system task, as it lives as long as the store and no nursery of a caller does.
        trio.lowlevel.spawn_system_task(self._keys.run)

    async def close(self) -> None:
        """See :meth:`Inbox.close`."""
        self._keys.stop()
        try:
            await super().close()
        finally:
            if self._claims is not None:
                self._claims.close()


def _lease_of(claimed: _Unawaited) -> Lease | None:
    """Return the lease of a claim that was committed as a new one."""
    claim = claimed.claim
    if claim.error is not None or claim.value is None:
        return None
    admitted, sequence = claim.value
    is_new = admitted.admission is Admission.NEW and sequence is not None
    return Lease(sequence, claimed.token) if is_new else None


def _connection_of(transaction: SqlTransaction) -> apsw.Connection:
    return cast("SqliteTransaction", transaction).connection


# -- effects ---------------------------------------------------------------------------------------

#: Time for a handler's statements and the Python between them, in seconds. Every delivery waits
#: for them; a sender gives up after 10 s.
EFFECT_SECONDS = 1.0

#: Instructions of SQLite's virtual machine between two looks at the clock.
_STEPS = 10_000

# Not the handler's failure: the disk or the file is the cause, and no statement of ours would fare
# better.
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
    transaction: SqlTransaction,
    key: str,
    lease: Lease | None,
    attempt: int,
    effects: Effects[T],
) -> T:
    """Apply ``effects``, if run number ``attempt`` of the event is still that of ``lease``.

    Raises:
        EventTakenOverError: the run is not ours.
        EffectsFailedError: the effects have failed; its ``error`` says why.
    """
    require_ours(transaction, key, lease, attempt)
    connection = _connection_of(transaction)
    connection.execute(f"SAVEPOINT {SAVEPOINT}")
    value = _within_budget(connection, effects)
    try:
        connection.execute(f"RELEASE {SAVEPOINT}")
    except apsw.SQLError:  # there is no such savepoint any more
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
    except BaseException as error:  # the handler's own, whatever it is
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
