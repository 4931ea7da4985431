"""The inbox in a SQL store: what both engines do the same way.

All changes of this process go through one :class:`GroupCommit`, reads through :class:`ReaderPool`.
A read sees every change whose method has returned.

A caller holds the lease of each run. If the caller of a claim is cancelled, no one holds the lease,
so the next renewal gives it up.

Cancellation: a write that has begun is finished, see ``storage.commit``; a read is interrupted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import trio

from ..base.telemetry import Sample
from ..records.deliveries import (
    Admission,
    Admitted,
    Done,
    Due,
    Lease,
    NewDelivery,
    Outcome,
    Renewed,
)
from ..records.policies import ClaimLimits
from .admission import LeaseTerms
from .commit import CLOSE_SECONDS, GroupCommit, GroupedWork, Unit
from .effects import Effects
from .readers import ReaderPool
from .sql import admission, arrivals, checkpoints, leases, policies, reads, runs
from .sql.admission import Answer, Arriving, may_take_expired, new_token
from .sql.dialect import (
    Row,
    SqlPart,
    SqlTransaction,
    committed,
    committed_by_owner,
    on_reader,
)
from .sql.leases import PollCursor
from .sql.runs import RunEnd, RunStart

if TYPE_CHECKING:
    # Most receivers have no tenants, and start without these modules.
    from .sql.alerts import AlertStore
    from .sql.notifications import NotificationStore
    from .sql.tenants import TenantStore, UpgradeStore

T = TypeVar("T")

#: Deliveries that one transaction of the retention removes, for which a new delivery may have to
#: wait. A pass over a large store takes many such transactions.
PURGE_CHUNK = 50


class UnawaitedStart(NamedTuple):
    """The value of ``Lease.start``: a start that was posted, and may not be recorded yet.

    It is recorded again with the outcome; it counts once.
    """

    unit: Unit
    run: RunStart


class SqlInbox(SqlPart, ABC):
    """:class:`Store` on an engine, except for what each engine does in its own way.

    Args:
        terms: the owner and the periods.
        commits: commits the changes.
        readers: run the queries.
    """

    _commits: GroupCommit
    _readers: ReaderPool

    def __init__(self, terms: LeaseTerms, commits: GroupCommit, readers: ReaderPool) -> None:
        super().__init__(terms, commits, readers)
        self._poll_cursor = PollCursor()
        # Tokens that a renewal must not give up: those of claims whose callers wait (_admit), and
        # of ends that are not awaited (SqliteInbox).
        self._pending_tokens: set[int] = set()
        # Made once: the commit thread recognizes the same work by having the same object.
        self._accepting: GroupedWork = lambda tx, items: admission.accept_all(tx, terms, items)
        self._claiming: GroupedWork = lambda tx, items: admission.claim_all(tx, terms, items)
        self._starting: GroupedWork = lambda tx, items: runs.start_all(tx, terms, items)

    @cached_property
    def tenants(self) -> "TenantStore":
        """The tenants."""
        from .sql.tenants import TenantStore

        return TenantStore(self._terms, self._commits, self._readers)

    @cached_property
    def upgrade(self) -> "UpgradeStore":
        """The upgrade from a single tenant."""
        from .sql.tenants import UpgradeStore

        return UpgradeStore(self._terms, self._commits, self._readers)

    @cached_property
    def notifications(self) -> "NotificationStore":
        """The messages to site managers."""
        from .sql.notifications import NotificationStore

        return NotificationStore(self._terms, self._commits, self._readers)

    @cached_property
    def alerts(self) -> "AlertStore":
        """The alerts."""
        from .sql.alerts import AlertStore

        return AlertStore(self._terms, self._commits, self._readers)

    @property
    def lost(self) -> str | None:
        return self._commits.lost

    @property
    def failing(self) -> bool:
        return self._commits.failing

    def samples(self) -> Iterator[Sample]:
        yield from self._readers.samples()
        yield from self._commits.samples()

    # -- admission -------------------------------------------------------------------------------

    def accept(
        self, delivery: NewDelivery, *, leased: bool, take_expired_until: float = math.inf
    ) -> Coroutine[Any, Any, Admitted]:
        token = new_token() if leased and not delivery.ordered else None
        arriving = Arriving(delivery, token, take_expired_until=take_expired_until)
        return self._admit(arriving, self._commits.gather(self._accepting, delivery.key, arriving))

    async def claim(
        self,
        delivery: NewDelivery,
        *,
        take_expired_until: float = math.inf,
        token: int | None = None,
    ) -> Admitted:
        token = new_token() if token is None else token
        arriving = Arriving(delivery, token, take_expired_until=take_expired_until)
        answer = self._commits.gather(self._claiming, delivery.key, arriving, durable=False)
        return await self._admit(arriving, answer)

    async def _admit(self, arriving: Arriving, answer: Coroutine[Any, Any, Answer]) -> Admitted:
        """Wait for the answer to a delivery, and return it with its lease."""
        key, token = arriving.delivery.key, arriving.token
        if token is not None:
            self._pending_tokens.add(token)
        try:
            admitted, sequence = await answer
        finally:
            if token is not None:
                self._pending_tokens.discard(token)
        if token is None or sequence is None:
            return admitted
        lease = Lease(key, token, sequence)
        if admitted is admission.NEW:  # mostly; msgspec's replace takes longer
            return Admitted(Admission.NEW, lease=lease)
        return msgspec.structs.replace(admitted, lease=lease)

    park = committed_by_owner(admission.park)
    keep_other = committed(admission.keep_other)

    # -- runs ------------------------------------------------------------------------------------

    async def start(self, lease: Lease, *, now: float, alone: bool = False) -> bool:
        lease.start = None
        run = RunStart(lease.sequence, lease.token, now, alone)
        started: bool = await self._commits.gather(self._starting, lease.key, run)
        return started

    join = committed(runs.join)

    def start_unawaited(self, lease: Lease, *, now: float) -> None:
        run = RunStart(lease.sequence, lease.token, now)
        unit = self._commits.post(self._starting, lease.key, run)
        lease.start = UnawaitedStart(unit, run)

    def _take_back_start(self, lease: Lease) -> float | None:
        """Withdraw the start of a run whose end records it, too; return its time.

        None: the start was awaited. Most handlers end before their start is handed over, so both
        are one change then.
        """
        start: UnawaitedStart | None = lease.start
        if start is None:
            return None
        self._commits.withdraw(start.unit)
        return start.run.now

    async def finish(self, lease: Lease, outcome: Outcome, *, now: float) -> bool:
        # Checked first: if it is cancelled here, the posted start is not withdrawn.
        await trio.lowlevel.checkpoint_if_cancelled()
        is_ended: bool
        if isinstance(outcome, Done) and outcome.answer is None and outcome.reason is None:
            end = RunEnd(lease.sequence, lease.token, now, self._take_back_start(lease))
            is_ended = await self._commits.gather(runs.end_all, lease.key, end)
            return is_ended
        terms, start = self._terms, lease.start

        def work(tx: SqlTransaction) -> bool:
            if start is not None:
                runs.start_all(tx, terms, [start.run])
            return runs.finish(tx, lease, outcome, now)

        return await self._commits.submit(work)

    @abstractmethod
    async def conclude(
        self, lease: Lease, effects: Effects[T], *, attempt: int, now: float
    ) -> T: ...

    replay = committed(admission.replay)
    repeat = committed(admission.repeat)

    # -- leases ----------------------------------------------------------------------------------

    release = committed(leases.release)
    claim_suspects = committed_by_owner(leases.claim_suspects)

    async def claim_due(
        self,
        *,
        limit: int,
        now: float,
        take_expired_until: float = math.inf,
        limits: ClaimLimits | None = None,
    ) -> Due:
        terms, cursor = self._terms, self._poll_cursor

        def work(tx: SqlTransaction) -> tuple[Due, PollCursor]:
            return leases.claim_due(
                tx,
                terms,
                cursor,
                limit=limit,
                now=now,
                take_expired=may_take_expired(tx, take_expired_until),
                limits=limits,
            )

        due, self._poll_cursor = await self._commits.submit(work)
        return due

    async def renew(self, held: Collection[Lease], *, now: float) -> Renewed:
        terms, held, pending = self._terms, tuple(held), frozenset(self._pending_tokens)
        return await self._commits.submit(
            lambda tx: leases.renew(tx, terms, held, pending, now=now)
        )

    reschedule = committed(leases.reschedule)
    _recover = committed_by_owner(leases.recover)
    take_over = committed_by_owner(leases.take_over)

    async def recover(self, *, dead: str | None = None) -> int:
        return await self._recover(dead=dead)

    # -- reading ---------------------------------------------------------------------------------

    get = on_reader(reads.get)
    find_by_id = on_reader(reads.find_by_id)
    evidence = on_reader(reads.evidence)
    known = on_reader(reads.known)
    attempts = on_reader(reads.attempts)
    find = on_reader(reads.find)
    last_sequence = on_reader(arrivals.last_sequence)
    counts = on_reader(reads.counts)
    oldest_waiting = on_reader(reads.oldest_waiting)
    expired_leases = on_reader(reads.expired_leases)
    read_checkpoint = on_reader(checkpoints.read_checkpoint)
    holdings = on_reader(reads.holdings)
    unowned = on_reader(reads.unowned)

    # -- sharing ---------------------------------------------------------------------------------

    async def ask_for_work(self, *, seconds: float, now: float) -> None:
        """See :meth:`Inbox.ask_for_work`."""
        terms = self._terms
        if await self._read(lambda tx: leases.is_work_unbegun(tx, terms.owner)):
            await self._commits.submit(
                lambda tx: leases.ask_for_work(tx, terms, seconds=seconds, now=now)
            )

    is_work_wanted = on_reader(leases.is_work_wanted)

    # -- pauses ----------------------------------------------------------------------------------

    pauses = on_reader(policies.pauses)
    pause = committed(policies.pause)
    resume = committed(policies.resume)

    # -- checkpoints and the term ----------------------------------------------------

    async def write_checkpoint(
        self, name: str, value: str | None, *, term: int | None = None, once: bool = False
    ) -> None:
        owner = self._terms.owner

        def work(tx: SqlTransaction) -> None:
            if term is not None:
                leases.require_term(tx, owner, term)
            checkpoints.write_checkpoint(tx, name, value, once=once)

        await self._commits.submit(work)

    # -- retention and end -----------------------------------------------------------------------

    async def _delete(
        self,
        find: Callable[..., list[Row]],
        delete: Callable[..., int],
        before: float,
    ) -> int:
        """Delete what a reader finds, in many short transactions; return how much it was.

        Args:
            find: a function of a transaction and the last row that it has returned, None at first;
                rows begin with a sequence.
            delete: a function of a transaction that deletes the rows which have not changed since.
            before: the time that both get.
        """
        deleted = 0
        after: Row | None = None
        while True:
            found = await self._read(partial(find, after=after, before=before, limit=PURGE_CHUNK))
            if not found:
                return deleted
            after = found[-1]
            sequences = [row[0] for row in found]
            # Not synced: rows that a power cut brings back are deleted by the next pass.
            deleted += await self._commits.submit(
                partial(delete, sequences=sequences, before=before), durable=False
            )

    async def erase(self, tenant_id: str) -> int:
        erased = after = 0
        while found := await self._read(
            partial(reads.of_tenant, tenant_id=tenant_id, after=after, limit=PURGE_CHUNK)
        ):
            after = found[-1]
            erased += await self._commits.submit(
                partial(self._erase, sequences=found, tenant_id=tenant_id)
            )
        erase_evidence = partial(arrivals.erase_evidence, tenant_id=tenant_id, limit=PURGE_CHUNK)
        while await self._commits.submit(erase_evidence):
            pass
        await self._commits.submit(partial(checkpoints.erase_checkpoints, tenant_id=tenant_id))
        return erased

    def _erase(self, tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
        return arrivals.erase(tx, sequences, tenant_id)

    async def close(self) -> None:
        """See :meth:`Inbox.close`; tenants and messages are closed with it."""
        # Readers first: the last SQLite connection to go clears the write-ahead log, which one that
        # may only read cannot do.
        try:
            await self._readers.close()
        finally:
            # Its own time limit is shorter.
            with trio.move_on_after(2 * CLOSE_SECONDS, shield=True):
                await self._commits.close()
