"""The inbox in one SQLite file: durable, and the default."""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import apsw
import msgspec
import trio

from ...base.logs import get_logger
from ...records.deliveries import (
    Admission,
    Admitted,
    AttemptRecord,
    DeliveryRecord,
    DeliveryState,
    Done,
    Due,
    EvidenceRecord,
    NewDelivery,
    Outcome,
    Purged,
    Renewed,
)
from ..admission import LeaseTerms
from ..backlog import BacklogWalk
from ..effects import Effects, EffectsFailedError, in_this_context
from . import arrivals
from . import effects as effecting
from . import leases as leaser
from . import reads as reader
from . import writes as writer
from .arrivals import NewArrival, last_sequence
from .claims import ClaimsFile, read_claims
from .committer import (
    CHECKPOINT_BYTES,
    CLOSE_SECONDS,
    Committer,
    Group,
    GroupedJob,
    Posted,
    sync_log,
)
from .connect import BUSY_SECONDS, clear_log, connect_writer, describe_failure, overwrite_remnants
from .keys import StoreKeys, Version, read_keys
from .known import key_hash
from .queries import QueryRunner
from .upgrade import SqliteUpgrade

if TYPE_CHECKING:
    from .notifications import SqliteNotifications
    from .tenants import SqliteTenants

_Delete = Callable[[apsw.Connection, Sequence[int], DeliveryState, float], int]

#: Deliveries that one transaction of the retention removes, in 1 ms, for which a new delivery may
#: have to wait. A pass over a large store takes many such transactions.
PURGE_CHUNK = 20

#: Size of the write-ahead log, in bytes, from which on it is copied during a pass of the retention.
#: Its pages are all different ones: copying 16 MB of them takes 15 ms of CPU, this 3.
PURGE_LOG_BYTES = 4 << 20

#: Time to wait for a reader that keeps the log from being cleared, in seconds. Deliveries wait too.
SHORT_SECONDS = 0.2

#: The wait after which a poll for due deliveries takes over no expired leases, in seconds, because
#: it had to wait. The next one does.
LATE_SECONDS = 1.0

T = TypeVar("T")

_log = get_logger("storage")

_NEW = Admitted(Admission.NEW)


class _Unawaited(NamedTuple):
    """A run whose claim is not waited for.

    It has the delivery, its claim, its slot of the file, and when its key was noted as new.
    """

    delivery: NewDelivery
    claim: Posted
    slot: int
    version: Version


class _Arrival(GroupedJob[T]):
    """Adds what ``new`` returns, whose key was surely new at ``version``; results in ``value``.

    If another process has written since, ``known`` is done instead.
    """

    __slots__ = ("known", "new", "value", "version")

    def __init__(
        self,
        group: Group,
        key: str,
        version: Version,
        value: T,
        *,
        new: Callable[[], NewArrival],
        known: Callable[[apsw.Connection], T],
    ) -> None:
        self.group = group
        self.key = key
        self.version = version
        self.value = value
        self.new = new
        self.known = known


class _End(GroupedJob[None]):
    """Records a run that ended well."""

    __slots__ = ("run",)

    def __init__(self, group: Group, run: writer.RunEnd) -> None:
        self.group = group
        self.key = run.key
        self.run = run


class SqliteInbox:
    """:class:`Inbox` in a SQLite file; open it with :meth:`open`, end with :meth:`close`.

    All changes go through one :class:`Committer`, those of ``tenants`` as well. Reads have a
    connection of their own in Trio's threads, one read at a time, so that a long listing never
    delays a delivery. A read sees every change whose method has returned.

    Cancellation: a write that has begun is finished, see :class:`Committer`; a read is abandoned.
    """

    def __init__(self, file: str, terms: LeaseTerms, committer: Committer) -> None:
        self._file = file
        self._terms = terms
        self._committer = committer
        self._queries = QueryRunner(file, committer)
        self._data_version: int | None = None
        self._walk = BacklogWalk()
        # Starts of runs that were posted without waiting, by key, with the time of the start.
        self._begun: dict[str, tuple[Posted, float]] = {}
        # For claims that are not waited for; without the file every claim is waited for.
        self._claims: ClaimsFile | None = None
        self._claimed: dict[str, _Unawaited] = {}
        self._keys = StoreKeys(committer, self._queries, self._claimed)
        # Bound once: jobs of one group are known by having the same object.
        self._add_arrivals: Group = self._add
        self._end_runs: Group = self._end
        self.upgrade: SqliteUpgrade = SqliteUpgrade(committer, self._queries)

    @cached_property
    def tenants(self) -> "SqliteTenants":
        """The tenants; as in memory, most receivers start without what is known of them."""
        from .tenants import SqliteTenants

        return SqliteTenants(self._file, self._committer)

    @cached_property
    def notifications(self) -> "SqliteNotifications":
        """The messages to site managers."""
        from .notifications import SqliteNotifications

        return SqliteNotifications(self._terms, self._committer, self._queries)

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
        before_migration: Callable[[], None] | None = None,
        turn: str | os.PathLike[str] | None = None,
        distrust_log: bool = False,
    ) -> "SqliteInbox":
        """Open the database file ``path``, creating or migrating its tables.

        Args:
            path: the file; its directory exists.
            owner: the name that holds the leases taken here; not empty, unique among living
                processes.
            lease_seconds: duration of a lease without renewal; above 0.
            dedup_seconds: time that a finished id is remembered; 0 or more.
            payload_seconds: time that bodies are kept; 0 or more.
            claims: the claims file, for the one process that runs deliveries: :meth:`claim_new`
                needs it. None: every claim is waited for.
            before_migration: called, in a thread, before a file of an earlier version is changed.
            turn: the file by whose lock several processes that run deliveries write one after the
                other; None: this is the only one.
            distrust_log: rewrite a log that an earlier process left behind, see :class:`Committer`.

        Raises:
            StoreVersionError: the file is of a newer version or of another program.
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
        committer = Committer(
            file,
            partial(connect_writer, file, before_migration),
            partial(describe_failure, file=file),
            name="sdk_trio-inbox",
            turn=None if turn is None else os.fspath(turn),
            distrust_log=distrust_log,
        )
        inbox = cls(file, terms, committer)
        try:
            # The first job connects and migrates an older file, which may take minutes.
            await committer.submit(lambda _: None, patient=True)
            await inbox.changed_elsewhere()
            if claims is not None:
                await inbox._open_claims(claims)
        except BaseException:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await inbox.close()
            raise
        return inbox

    @property
    def in_order(self) -> bool:
        """See :attr:`Inbox.in_order`: one writer gives them and commits them."""
        return True

    @property
    def lost(self) -> str | None:
        """See :attr:`Inbox.lost`."""
        return self._committer.lost

    async def clock_offset(self) -> float | None:
        """See :meth:`Inbox.clock_offset`: the host's clock is the only one."""
        await trio.lowlevel.checkpoint()
        return None

    @property
    def failing(self) -> bool:
        """See :attr:`Inbox.failing`."""
        return self._committer.failing

    def writing_process(self) -> int | None:
        """See :meth:`Inbox.writing_process`."""
        return self._committer.turn_holder()

    # -- deliveries ------------------------------------------------------------------------------

    async def accept(self, delivery: NewDelivery, *, leased: bool) -> Admitted:
        """See :meth:`Inbox.accept`."""
        terms = self._terms
        keys = self._keys
        if keys.filter is None and self._claims is not None:
            keys.begin()

        def known(connection: apsw.Connection) -> Admitted:
            return writer.accept(connection, terms, delivery, leased)

        job: Callable[[apsw.Connection], Admitted] = known
        if keys.note_new(delivery):
            job = _Arrival(
                self._add_arrivals,
                delivery.key,
                keys.version,
                _NEW,
                new=lambda: writer.accepted(terms, delivery, leased=leased),
                known=known,
            )
        return await self._committer.submit(job, told=True)

    async def claim(self, delivery: NewDelivery) -> Admitted:
        """See :meth:`Inbox.claim`."""
        terms = self._terms
        key = delivery.key
        if self._keys.filter is not None:
            self._keys.filter.add(key_hash(key))
        if (stale := self._claimed.pop(key, None)) is not None:
            self._give_back(stale.slot)  # whoever has begun it, its end could not be recorded
        ended = None if self._claims is None else self._claims.ended.get(key)

        def job(connection: apsw.Connection) -> Admitted:
            admitted = writer.claim(connection, terms, delivery)
            if ended is None or admitted.admission is not Admission.NEW:
                return admitted
            now = delivery.received_at
            counted = writer.count_ends(connection, key, ended.ends, ended.begun, now)
            return msgspec.structs.replace(admitted, attempts=admitted.attempts + counted)

        # No sender is told of a claim: after a power cut it delivers again.
        admitted: Admitted = await self._committer.submit(job, told=True, synced=False)
        # But one whose other body was kept is told that now, and is not run, which would sync.
        if not admitted.same_body and admitted.admission is not Admission.NEW:
            await self._committer.submit(sync_log)
        if ended is not None and self._claims is not None:
            self._claims.counted(key)
        return admitted

    def claim_new(self, delivery: NewDelivery) -> bool:
        """See :meth:`Inbox.claim_new`."""
        claims = self._claims
        if claims is None or not self._committer.prompt:
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
        terms = self._terms
        job = _Arrival(
            self._add_arrivals,
            key,
            keys.version,
            _NEW,
            new=lambda: writer.claimed(terms, delivery),
            known=lambda connection: writer.claim(connection, terms, delivery),
        )
        claim = self._committer.post(job, synced=False)
        self._claimed[key] = _Unawaited(delivery, claim, slot, job.version)
        return True

    def _add(self, connection: apsw.Connection, jobs: Sequence["_Arrival[Any]"]) -> Sequence[Any]:
        keys = self._keys
        if all(keys.is_still(connection, version) for version in {job.version for job in jobs}):
            arrivals.add(connection, [job.new() for job in jobs])
            return [job.value for job in jobs]
        return [job.known(connection) for job in jobs]

    def _end(self, connection: apsw.Connection, jobs: Sequence["_End"]) -> Sequence[None]:
        writer.end_runs(connection, self._terms, [job.run for job in jobs])
        return [None] * len(jobs)

    async def park(self, delivery: NewDelivery, reason: str | None = None) -> Admitted:
        """See :meth:`Inbox.park`."""
        terms = self._terms
        if self._keys.filter is not None:
            self._keys.filter.add(key_hash(delivery.key))
        return await self._committer.submit(
            lambda c: writer.park(c, terms, delivery, reason), told=True
        )

    async def keep_other(self, delivery: NewDelivery) -> None:
        """See :meth:`Inbox.keep_other`."""
        await self._committer.submit(lambda c: writer.keep_other(c, delivery))

    # -- runs ------------------------------------------------------------------------------------

    async def start(self, key: str, *, now: float, alone: bool = False) -> bool:
        """See :meth:`Inbox.start`."""
        terms = self._terms
        return await self._committer.submit(lambda c: writer.start(c, terms, key, now, alone))

    async def join(self, key: str) -> None:
        """See :meth:`Inbox.join`."""
        terms = self._terms
        await self._committer.submit(lambda c: writer.join(c, terms, key))

    def begin(self, key: str, *, now: float) -> None:
        """See :meth:`Inbox.begin`."""
        terms = self._terms
        posted = self._committer.post(lambda c: writer.start(c, terms, key, now), synced=False)
        self._begun[key] = (posted, now)

    async def finish(self, key: str, outcome: Outcome, *, now: float) -> None:
        """See :meth:`Inbox.finish`. Nothing when the lease is not ours any more."""
        # Checked first: if it is cancelled here, the posted start is not withdrawn.
        await trio.lowlevel.checkpoint_if_cancelled()
        terms = self._terms
        if (claimed := self._claimed.pop(key, None)) is not None:
            await self._finish_claimed(claimed, outcome, now)
            return
        begun = self._begun.pop(key, None)
        # The handler ended within the turn of the loop in which it began, so the start was not
        # handed over yet: start and end are written by one statement.
        if isinstance(outcome, Done) and outcome.answer is None:
            started_at = begun[1] if begun and self._committer.withdraw(begun[0]) else None
            run = writer.RunEnd(key, now, started_at)
            await self._committer.submit(_End(self._end_runs, run))
            return
        await self._committer.submit(lambda c: writer.finish(c, terms, key, outcome, now))

    async def _finish_claimed(self, begun: _Unawaited, outcome: Outcome, now: float) -> None:
        """Record the end of a run whose claim was not waited for.

        Where the claim was not handed over yet, or has failed meanwhile, both are one transaction.
        """
        delivery, claim, slot, version = begun
        terms = self._terms
        plain = isinstance(outcome, Done) and outcome.answer is None

        def record(connection: apsw.Connection) -> None:
            writer.record_run(connection, terms, delivery, outcome, now)

        def finish(connection: apsw.Connection) -> None:
            if claim.error is None and _is_new(claim.value):
                writer.finish(connection, terms, delivery.key, outcome, now)
            else:
                record(connection)
            self._keys.check(connection)

        job: Callable[[apsw.Connection], None] = finish
        committed = claim.finished and claim.error is None and _is_new(claim.value)
        if committed and plain:
            job = _End(self._end_runs, writer.RunEnd(delivery.key, now))
        elif self._committer.withdraw(claim):
            job = record
            if plain:
                job = _Arrival(
                    self._add_arrivals,
                    delivery.key,
                    version,
                    None,
                    new=lambda: writer.done_at_once(delivery, now),
                    known=record,
                )
        try:
            await self._committer.submit(job)
        finally:
            self._give_back(slot)
            self._keys.catch_up()

    def _give_back(self, slot: int) -> None:
        claims = self._claims
        if claims is not None and self._committer.prompt:
            claims.clear(slot)
        elif claims is not None:
            claims.clear_later(slot)

    async def conclude(self, key: str, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`. The effects run in the committing thread."""
        await trio.lowlevel.checkpoint_if_cancelled()
        terms = self._terms
        inside = in_this_context(effects)

        def job(connection: apsw.Connection) -> T:
            self._committer.guest = key
            try:
                value = effecting.conclude(connection, terms, key, attempt, inside, now)
            finally:
                self._committer.guest = None
            self._keys.check(connection)
            return value

        try:
            # Whoever is cancelled has to know nevertheless whether the event is done. It ends by
            # itself, because the committer has a limit of time for its callers.
            with trio.CancelScope(shield=True):
                value = await self._committer.submit(job, single=True)
        except EffectsFailedError as failed:
            raise failed.error from None
        self._begun.pop(key, None)
        if (claimed := self._claimed.pop(key, None)) is not None:
            self._give_back(claimed.slot)
            self._keys.catch_up()
        return value

    async def replay(self, keys: Sequence[str]) -> Sequence[str]:
        """See :meth:`Inbox.replay`."""
        return await self._committer.submit(lambda c: writer.replay(c, keys))

    async def repeat(self, keys: Sequence[str]) -> Sequence[str]:
        """See :meth:`Inbox.repeat`."""
        return await self._committer.submit(lambda c: writer.repeat(c, keys))

    # -- leases ----------------------------------------------------------------------------------

    async def release(self, keys: Sequence[str]) -> None:
        """See :meth:`Inbox.release`."""
        terms, ids = self._terms, tuple(keys)
        await self._committer.submit(lambda c: leaser.release(c, terms, ids))

    async def take_due(self, *, limit: int, now: float, overdue: bool = True) -> Due:
        """See :meth:`Inbox.take_due`."""
        terms, walk = self._terms, self._walk
        asked_at = time.monotonic()

        def job(connection: apsw.Connection) -> Due:
            # After a stall ``now`` is old, and the clock may have been set since.
            late = time.monotonic() - asked_at > LATE_SECONDS
            return leaser.take_due(connection, terms, walk, limit, now, overdue and not late)

        return await self._committer.submit(job)

    async def take_suspects(self, *, limit: int, now: float) -> Sequence[DeliveryRecord]:
        """See :meth:`Inbox.take_suspects`."""
        terms = self._terms
        return await self._committer.submit(lambda c: leaser.take_suspects(c, terms, limit, now))

    async def reschedule(self, *, now: float) -> int:
        """See :meth:`Inbox.reschedule`."""
        return await self._committer.submit(lambda c: leaser.reschedule(c, now))

    async def recover(self, *, dead: str | None = None) -> int:
        """See :meth:`Inbox.recover`."""
        terms = self._terms
        return await self._committer.submit(lambda c: leaser.recover(c, terms))

    async def take_over(self, owner: str, *, heir: str, now: float) -> int:
        """See :meth:`Inbox.take_over`."""
        terms = self._terms
        return await self._committer.submit(lambda c: leaser.take_over(c, terms, owner, heir, now))

    async def renew(self, keys: Collection[str], *, now: float) -> Renewed:
        """See :meth:`Inbox.renew`."""
        terms, held = self._terms, frozenset(keys)
        return await self._committer.submit(lambda c: leaser.renew(c, terms, held, now))

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, query: Callable[[apsw.Connection], T]) -> T:
        """Run ``query`` after the claims that nobody has waited for."""
        if any(not begun.claim.finished for begun in self._claimed.values()):
            await self._committer.submit(lambda _: None, synced=False)
        return await self._queries.run(query)

    async def get(self, key: str) -> DeliveryRecord | None:
        """See :meth:`Inbox.get`."""
        return await self._read(lambda c: reader.get(c, key))

    async def find_by_id(self, webhook_id: str, *, limit: int = 50) -> Sequence[DeliveryRecord]:
        """See :meth:`Inbox.find_by_id`."""
        return await self._read(lambda c: reader.find_by_id(c, webhook_id, limit))

    async def evidence(self, key: str) -> Sequence[EvidenceRecord]:
        """See :meth:`Inbox.evidence`."""
        return await self._read(lambda c: reader.evidence(c, key))

    async def known(self, keys: Sequence[str]) -> frozenset[str]:
        """See :meth:`Inbox.known`."""
        return await self._read(lambda c: reader.known(c, tuple(keys)))

    async def attempts(self, key: str) -> Sequence[AttemptRecord]:
        """See :meth:`Inbox.attempts`."""
        return await self._read(lambda c: reader.attempts(c, key))

    async def find(
        self,
        *,
        type: str | None = None,
        state: DeliveryState | None = None,
        since: float | None = None,
        until: float | None = None,
        after_sequence: int | None = None,
        before_sequence: int | None = None,
        subject: str | None = None,
        tenant_id: str | None = None,
        oldest_first: bool | None = None,
        limit: int = 50,
    ) -> Sequence[DeliveryRecord]:
        """See :meth:`Inbox.find`. A long search is many short reads, between which others read."""
        if oldest_first is None:
            oldest_first = after_sequence is not None
        found: list[DeliveryRecord] = []
        while True:
            some, behind = await self._read(
                partial(
                    reader.find,
                    type=type,
                    state=state,
                    since=since,
                    until=until,
                    after_sequence=after_sequence,
                    before_sequence=before_sequence,
                    subject=subject,
                    tenant_id=tenant_id,
                    oldest_first=oldest_first,
                    limit=limit - len(found),
                )
            )
            found += some
            if behind is None:
                return found
            if oldest_first:
                after_sequence = behind
            else:
                before_sequence = behind

    async def last_sequence(self) -> int:
        """See :meth:`Inbox.last_sequence`."""
        return await self._read(last_sequence)

    async def counts(self) -> dict[DeliveryState, int]:
        """See :meth:`Inbox.counts`."""
        return await self._read(reader.counts)

    async def oldest_waiting(self) -> float | None:
        """See :meth:`Inbox.oldest_waiting`."""
        return await self._read(reader.oldest_waiting)

    async def expired_leases(self, *, before: float) -> int:
        """See :meth:`Inbox.expired_leases`."""
        return await self._read(lambda c: reader.expired_leases(c, before))

    async def changed_elsewhere(self) -> bool:
        """See :meth:`Inbox.changed_elsewhere`."""
        # On the writing connection, because the number counts the changes of all *others*.
        version = await self._committer.submit(lambda c: int(c.pragma("data_version")))
        before, self._data_version = self._data_version, version
        changed = before is not None and version != before
        self._keys.catch_up(changed=changed)
        return changed

    # -- what is known without asking --------------------------------------------------------------

    async def _open_claims(self, path: str | os.PathLike[str]) -> None:
        """Open the claims file, and begin to learn the keys of the store.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        is_new = not await self._queries.run(lambda c: read_keys(c, 0))
        try:
            left = await trio.to_thread.run_sync(partial(read_claims, path, is_new=is_new))
            committed = await self._queries.run(
                lambda c: reader.known(c, [run.key for run in left])
            )
            lost = [run for run in left if run.key not in committed]
            self._claims = await trio.to_thread.run_sync(ClaimsFile, path, lost)
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

    # -- what is remembered beside deliveries ----------------------------------------------------

    async def read_checkpoint(self, name: str) -> str | None:
        """See :meth:`Inbox.read_checkpoint`."""
        return await self._read(lambda c: reader.read_checkpoint(c, name))

    async def write_checkpoint(
        self, name: str, value: str | None, *, term: int | None = None, once: bool = False
    ) -> None:
        """See :meth:`Inbox.write_checkpoint`."""
        await self._committer.submit(lambda c: writer.write_checkpoint(c, name, value, once=once))

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`Inbox.lead`; the lock of the data directory has one holder."""
        await trio.lowlevel.checkpoint()
        return 1

    # -- retention and end -----------------------------------------------------------------------

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`. Cancelled, it stops between two transactions."""
        terms = self._terms
        old_body = now - terms.payload_seconds
        # A row goes when neither its body nor its id is needed any more.
        forgotten = now - max(terms.payload_seconds, terms.dedup_seconds)
        delete = writer.delete_deliveries
        self._committer.checkpoint_bytes = PURGE_LOG_BYTES
        try:
            purged = Purged(
                bodies=await self._delete(DeliveryState.DONE, old_body, writer.delete_bodies),
                finished=await self._delete(DeliveryState.DONE, forgotten, delete),
                parked=await self._delete(DeliveryState.PARKED, old_body, delete),
            )
        finally:
            self._committer.checkpoint_bytes = CHECKPOINT_BYTES
        # Deleted rows are still in the log until that is cleared.
        if purged != Purged(0, 0, 0):
            await self._clear_log(SHORT_SECONDS)
        return purged

    async def holdings(self, tenant_id: str) -> Mapping[str, int]:
        """See :meth:`Inbox.holdings`."""
        return await self._read(lambda c: reader.holdings(c, tenant_id))

    async def unowned(self) -> Sequence[str]:
        """See :meth:`Inbox.unowned`."""
        return await self._read(reader.unowned)

    async def other_tables(self) -> Sequence[str]:
        """See :meth:`Inbox.other_tables`."""
        return await self._read(reader.other_tables)

    async def erase(self, tenant_id: str) -> int:
        """See :meth:`Inbox.erase`."""
        erased = after = 0
        while True:
            find = partial(reader.of_tenant, tenant_id=tenant_id, after=after, limit=PURGE_CHUNK)
            # Found by the reading connection, so that the scan holds up no delivery; deleted in
            # short transactions.
            found = await self._read(find)
            if not found:
                break
            after = found[-1]
            erased += await self._committer.submit(
                partial(writer.erase, tenant_id=tenant_id, sequences=found)
            )
        erase_evidence = partial(writer.erase_evidence, tenant_id=tenant_id, limit=PURGE_CHUNK)
        while await self._committer.submit(erase_evidence):
            pass
        return erased

    async def wipe(self) -> bool:
        """See :meth:`Inbox.wipe`."""
        await self._committer.submit(overwrite_remnants, patient=True, alone=True)
        return await self._clear_log(BUSY_SECONDS)

    async def _clear_log(self, seconds: float) -> bool:
        """Remove deleted data from the write-ahead log, too, and warn if a reader prevents it."""
        cleared = await self._committer.submit(
            lambda c: clear_log(c, seconds), patient=True, alone=True
        )
        if not cleared:
            _log.warning(
                "store.log_kept",
                hint="deleted bodies stay in the write-ahead log until the reader that needs it "
                "(a backup, the replicator, an sqlite3 shell) has ended, and it is written anew",
            )
        return cleared

    async def _delete(
        self,
        state: DeliveryState,
        before: float,
        delete: _Delete,
    ) -> int:
        deleted = after = 0
        with_body = delete is writer.delete_bodies
        while True:
            found = await self._read(
                partial(
                    reader.find_old,
                    state=state,
                    before=before,
                    with_body=with_body,
                    after=after,
                    limit=PURGE_CHUNK,
                )
            )
            if not found:
                return deleted
            after = found[-1]
            # Nobody is told of it. A power cut leaves some of them, and the next pass takes them.
            deleted += await self._committer.submit(
                partial(_delete_chunk, delete, found, state, before), synced=False
            )

    async def close(self) -> None:
        """See :meth:`Inbox.close`; the tenants are closed with it."""
        # Readers first: the last connection to go clears the write-ahead log, which a connection
        # that may only read cannot do.
        self._keys.stop()
        if "tenants" in vars(self):
            await self.tenants.close()
        await self._queries.close()
        try:
            await self._committer.close()
        finally:
            if self._claims is not None:
                self._claims.close()


def _is_new(admitted: Admitted | None) -> bool:
    return admitted is not None and admitted.admission is Admission.NEW


def _delete_chunk(
    delete: _Delete,
    sequences: Sequence[int],
    state: DeliveryState,
    before: float,
    connection: apsw.Connection,
) -> int:
    return delete(connection, sequences, state, before)
