"""The inbox in PostgreSQL, which several processes and hosts may have open at the same time."""

import time
import uuid
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial

import attrs
import trio

from ...errors import StoreUnavailableError
from ...records.deliveries import (
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
from ..effects import Effects, T
from . import leases, reads, writes
from .commits import ANSWER_SECONDS, CLOSE_SECONDS, GroupCommit
from .connect import PostgresAddress, StoreConnection
from .effects import EffectTransactions
from .notifications import PostgresNotifications
from .queries import QueryPool
from .tenants import PostgresTenants
from .upgrade import PostgresUpgrade

#: Deliveries that one transaction of the retention removes. A pass over a large store takes many
#: short transactions, none of which holds a lock for long.
PURGE_CHUNK = 500


@attrs.define
class _Begun:
    """A start that was posted without waiting: its handle, its time, and whether it was ended.

    An end that failed may have been committed.
    """

    posted: Hashable
    at: float
    ended: bool = False


class PostgresInbox:
    """:class:`Inbox` in PostgreSQL; open it with :meth:`open`, end with :meth:`close`.

    All changes of this process go through one :class:`GroupCommit`, reads through a
    :class:`QueryPool`. A read sees every change whose method has returned.

    Cancellation: a write that has begun is finished, a read is interrupted.
    """

    #: A database that is away comes back; nothing of this process has to be started anew for it.
    lost: str | None = None

    #: See :attr:`Inbox.failing`: the supervisor writes to the same server and sees it itself.
    failing: bool = False

    #: See :attr:`Inbox.in_order`: a transaction takes its numbers before it commits.
    in_order: bool = False

    def __init__(self, address: PostgresAddress, terms: writes.SharedTerms) -> None:
        self._terms = terms
        self._node = str(uuid.uuid4())
        self._commits = GroupCommit(address, self._node)
        self._queries = QueryPool(address)
        self._effects = EffectTransactions(address, terms, self._node)
        self._seen: list[int] | None = None
        self._walk = BacklogWalk()
        self._begun: dict[str, _Begun] = {}
        # One object for each kind of job, by which those that go together are found.
        self._accept = {
            leased: partial(writes.accept_all, terms, leased) for leased in (True, False)
        }
        self._claim = partial(writes.claim_all, terms)
        self._start = partial(writes.start_all, terms)
        self._run = partial(writes.run_all, terms)
        self._finish = partial(writes.finish_all, terms)
        self.tenants: PostgresTenants = PostgresTenants(self._commits, self._queries)
        self.upgrade: PostgresUpgrade = PostgresUpgrade(
            self._commits, self._queries, terms.lease.owner
        )
        self.notifications: PostgresNotifications = PostgresNotifications(
            terms, self._commits, self._queries
        )

    @classmethod
    async def open(
        cls,
        address: PostgresAddress,
        *,
        owner: str,
        lease_seconds: float,
        dedup_seconds: float,
        payload_seconds: float,
        server_clock: bool = True,
        shared: bool = True,
    ) -> "PostgresInbox":
        """Open the store at ``address``, creating or migrating its schema.

        Args:
            address: the database and the schema.
            owner: the name that holds the leases taken here; not empty, unique among living
                processes of all hosts.
            lease_seconds: duration of a lease without renewal; above 0.
            dedup_seconds: time that a finished id is remembered; 0 or more.
            payload_seconds: time that bodies are kept; 0 or more.
            server_clock: tell leases by the database's clock; False: by that of each call.
            shared: others may be alive, so ``recover`` takes only expired leases away.

        Raises:
            StoreVersionError: the schema is of a newer version or of another program.
            StoreUnavailableError: no server answers, or it refuses.

        If it is cancelled, nothing stays open.
        """
        terms = LeaseTerms(
            owner=owner,
            lease_seconds=lease_seconds,
            dedup_seconds=dedup_seconds,
            payload_seconds=payload_seconds,
        )
        inbox = cls(
            address, writes.SharedTerms(lease=terms, server_clock=server_clock, shared=shared)
        )
        try:
            await trio.to_thread.run_sync(_migrate, address)
            await inbox.changed_elsewhere()
        except BaseException:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await inbox.close()
            raise
        return inbox

    async def clock_offset(self) -> float | None:
        """See :meth:`Inbox.clock_offset`."""
        return await self._queries.run(reads.clock_offset, seconds=ANSWER_SECONDS)

    # -- deliveries ------------------------------------------------------------------------------

    def writing_process(self) -> int | None:
        """See :meth:`Inbox.writing_process`: the server ends locks of clients that are gone."""
        return None

    async def accept(self, delivery: NewDelivery, *, leased: bool) -> Admitted:
        """See :meth:`Inbox.accept`."""
        admitted: Admitted = await self._commits.gather(
            self._accept[leased], delivery.key, delivery
        )
        return admitted

    async def claim(self, delivery: NewDelivery) -> Admitted:
        """See :meth:`Inbox.claim`."""
        admitted: Admitted = await self._commits.gather(self._claim, delivery.key, delivery)
        return admitted

    def claim_new(self, delivery: NewDelivery) -> bool:
        """See :meth:`Inbox.claim_new`; no process knows what the others have written meanwhile."""
        return False

    async def park(self, delivery: NewDelivery, reason: str | None = None) -> Admitted:
        """See :meth:`Inbox.park`."""
        terms = self._terms
        return await self._commits.submit(lambda c: writes.park(c, terms, delivery, reason))

    async def keep_other(self, delivery: NewDelivery) -> None:
        """See :meth:`Inbox.keep_other`."""
        await self._commits.submit(lambda c: writes.keep_other(c, delivery))

    # -- runs ------------------------------------------------------------------------------------

    async def start(self, key: str, *, now: float, alone: bool = False) -> bool:
        """See :meth:`Inbox.start`."""
        self._begun.pop(key, None)  # of a run before, whose end was made and never heard of
        started: bool = await self._commits.gather(self._start, key, (key, now, alone))
        return started

    async def join(self, key: str) -> None:
        """See :meth:`Inbox.join`."""
        terms = self._terms
        await self._commits.submit(lambda c: writes.join(c, terms, key))

    def begin(self, key: str, *, now: float) -> None:
        """See :meth:`Inbox.begin`."""
        self._begun[key] = _Begun(self._commits.post(self._start, key, (key, now, False)), now)

    async def finish(self, key: str, outcome: Outcome, *, now: float) -> None:
        """See :meth:`Inbox.finish`. Nothing when the lease is not ours any more."""
        # Checked first: if it is cancelled here, the posted start is not withdrawn.
        await trio.lowlevel.checkpoint_if_cancelled()
        begun = self._begun.pop(key, None)
        try:
            await self._finish_begun(key, begun, outcome, now)
        except StoreUnavailableError:
            if begun is not None:
                begun.ended = True
                self._begun[key] = begun
            raise

    async def _finish_begun(
        self, key: str, begun: _Begun | None, outcome: Outcome, now: float
    ) -> None:
        commits, terms = self._commits, self._terms
        if not isinstance(outcome, Done) or outcome.answer is not None:

            def job(connection: StoreConnection) -> None:
                self._start_lost(connection, key, begun)
                writes.finish(connection, terms, key, outcome, now)

            await commits.submit(job)
        elif begun is None or commits.has_made(begun.posted):
            await commits.gather(self._finish, key, (key, now))
        else:
            # The handler may have ended before its start was handed over: both are written by one
            # statement.
            again = not commits.withdraw(begun.posted) or begun.ended
            await commits.gather(self._run, key, (key, begun.at, now, again))

    def _start_lost(self, connection: StoreConnection, key: str, begun: _Begun | None) -> None:
        """Record a start that was posted, and of which nobody knows whether it was committed."""
        if begun is not None and self._commits.has_failed(begun.posted):
            writes.start_ours(connection, self._terms, key, begun.at)

    async def conclude(self, key: str, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`."""
        if (begun := self._begun.get(key)) is not None:
            # The start may be on its way still, and the row counts as ours only after it.
            await self._commits.submit(lambda c: self._start_lost(c, key, begun))
            self._begun.pop(key, None)
        return await self._effects.conclude(key, effects, attempt=attempt, now=now)

    async def replay(self, keys: Sequence[str]) -> Sequence[str]:
        """See :meth:`Inbox.replay`."""
        return await self._commits.submit(lambda c: writes.replay(c, tuple(dict.fromkeys(keys))))

    async def repeat(self, keys: Sequence[str]) -> Sequence[str]:
        """See :meth:`Inbox.repeat`."""
        return await self._commits.submit(lambda c: writes.repeat(c, tuple(dict.fromkeys(keys))))

    # -- leases ----------------------------------------------------------------------------------

    async def release(self, keys: Sequence[str]) -> None:
        """See :meth:`Inbox.release`."""
        terms, ids = self._terms, tuple(keys)
        await self._commits.submit(lambda c: leases.release(c, terms, ids))

    async def take_due(self, *, limit: int, now: float, overdue: bool = True) -> Due:
        """See :meth:`Inbox.take_due`. Leases end by the database's clock, whatever the host's."""
        terms, walk = self._terms, self._walk
        return await self._commits.submit(lambda c: leases.take_due(c, terms, walk, limit, now))

    async def take_suspects(self, *, limit: int, now: float) -> Sequence[DeliveryRecord]:
        """See :meth:`Inbox.take_suspects`."""
        terms = self._terms
        return await self._commits.submit(lambda c: leases.take_suspects(c, terms, limit, now))

    async def reschedule(self, *, now: float) -> int:
        """See :meth:`Inbox.reschedule`."""
        terms = self._terms
        return await self._commits.submit(lambda c: leases.reschedule(c, terms, now))

    async def recover(self, *, dead: str | None = None) -> int:
        """See :meth:`Inbox.recover`."""
        terms = self._terms
        return await self._commits.submit(lambda c: leases.recover(c, terms, dead))

    async def take_over(self, owner: str, *, heir: str, now: float) -> int:
        """See :meth:`Inbox.take_over`."""
        terms = self._terms
        return await self._commits.submit(lambda c: leases.take_over(c, terms, owner, heir, now))

    async def renew(self, keys: Collection[str], *, now: float) -> Renewed:
        """See :meth:`Inbox.renew`."""
        terms, held = self._terms, frozenset(keys)
        return await self._commits.submit(lambda c: leases.renew(c, terms, held, now))

    # -- reading ---------------------------------------------------------------------------------

    async def get(self, key: str) -> DeliveryRecord | None:
        """See :meth:`Inbox.get`."""
        return await self._queries.run(lambda c: reads.get(c, key))

    async def find_by_id(self, webhook_id: str, *, limit: int = 50) -> Sequence[DeliveryRecord]:
        """See :meth:`Inbox.find_by_id`."""
        return await self._queries.run(lambda c: reads.find_by_id(c, webhook_id, limit))

    async def evidence(self, key: str) -> Sequence[EvidenceRecord]:
        """See :meth:`Inbox.evidence`."""
        return await self._queries.run(lambda c: reads.evidence(c, key))

    async def known(self, keys: Sequence[str]) -> frozenset[str]:
        """See :meth:`Inbox.known`."""
        return await self._queries.run(lambda c: reads.known(c, tuple(keys)))

    async def attempts(self, key: str) -> Sequence[AttemptRecord]:
        """See :meth:`Inbox.attempts`."""
        return await self._queries.run(lambda c: reads.attempts(c, key))

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
        """See :meth:`Inbox.find`."""
        return await self._queries.run(
            lambda c: reads.find(
                c,
                type=type,
                state=state,
                since=since,
                until=until,
                after_sequence=after_sequence,
                before_sequence=before_sequence,
                subject=subject,
                tenant_id=tenant_id,
                oldest_first=oldest_first,
                limit=limit,
            )
        )

    async def last_sequence(self) -> int:
        """See :meth:`Inbox.last_sequence`."""
        return await self._queries.run(reads.last_sequence)

    async def counts(self) -> dict[DeliveryState, int]:
        """See :meth:`Inbox.counts`."""
        return await self._queries.run(reads.counts)

    async def oldest_waiting(self) -> float | None:
        """See :meth:`Inbox.oldest_waiting`."""
        return await self._queries.run(reads.oldest_waiting)

    async def expired_leases(self, *, before: float) -> int:
        """See :meth:`Inbox.expired_leases`."""
        ago = time.time() - before if self._terms.server_clock else None
        return await self._queries.run(lambda c: reads.expired_leases(c, before, ago))

    async def changed_elsewhere(self) -> bool:
        """See :meth:`Inbox.changed_elsewhere`."""
        owner, shared = self._terms.lease.owner, self._terms.shared
        *seen, expired = await self._queries.run(
            lambda c: reads.changes_of_others(c, self._node, owner, shared=shared),
            # Whoever asks fetches due events next, which another connection may well do.
            seconds=ANSWER_SECONDS,
        )
        before, self._seen = self._seen, seen
        return expired or (before is not None and seen != before)

    # -- what is remembered beside deliveries ----------------------------------------------------

    async def read_checkpoint(self, name: str) -> str | None:
        """See :meth:`Inbox.read_checkpoint`."""
        return await self._queries.run(lambda c: reads.read_checkpoint(c, name))

    async def write_checkpoint(
        self, name: str, value: str | None, *, term: int | None = None, once: bool = False
    ) -> None:
        """See :meth:`Inbox.write_checkpoint`."""
        owner = self._terms.lease.owner

        def job(connection: StoreConnection) -> None:
            if term is not None:
                leases.require_term(connection, owner, term)
            writes.write_checkpoint(connection, name, value, once=once)

        await self._commits.submit(job)

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`Inbox.lead`."""
        owner = self._terms.lease.owner
        return await self._commits.submit(lambda c: leases.lead(c, owner, seconds))

    # -- retention and end -----------------------------------------------------------------------

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`. Cancelled, it stops between two transactions."""
        lease = self._terms.lease
        old_body = now - lease.payload_seconds
        # A row goes when neither its body nor its id is needed any more.
        forgotten = now - max(lease.payload_seconds, lease.dedup_seconds)
        await self._commits.submit(writes.forget_nodes)
        delete = writes.delete_deliveries
        return Purged(
            bodies=await self._repeat(lambda c: writes.delete_bodies(c, old_body, PURGE_CHUNK)),
            finished=await self._repeat(
                lambda c: delete(c, DeliveryState.DONE, forgotten, PURGE_CHUNK)
            ),
            parked=await self._repeat(
                lambda c: delete(c, DeliveryState.PARKED, old_body, PURGE_CHUNK)
            ),
        )

    async def _repeat(self, job: Callable[[StoreConnection], tuple[int, int]]) -> int:
        """Repeat a job until it has found less than :data:`PURGE_CHUNK`; add up what it did."""
        total = 0
        while True:
            found, done = await self._commits.submit(job)
            total += done
            if found < PURGE_CHUNK:
                return total

    async def holdings(self, tenant_id: str) -> Mapping[str, int]:
        """See :meth:`Inbox.holdings`."""
        return await self._queries.run(lambda c: reads.holdings(c, tenant_id))

    async def unowned(self) -> Sequence[str]:
        """See :meth:`Inbox.unowned`."""
        return await self._queries.run(reads.unowned)

    async def other_tables(self) -> Sequence[str]:
        """See :meth:`Inbox.other_tables`; the application's tables are in schemas of its own."""
        await trio.lowlevel.checkpoint()
        return []

    async def erase(self, tenant_id: str) -> int:
        """See :meth:`Inbox.erase`."""
        erased = 0
        erase = partial(writes.erase, tenant_id=tenant_id, limit=PURGE_CHUNK)
        while chunk := await self._commits.submit(erase):
            erased += chunk
        erase_evidence = partial(writes.erase_evidence, tenant_id=tenant_id, limit=PURGE_CHUNK)
        while await self._commits.submit(erase_evidence):
            pass
        return erased

    async def wipe(self) -> bool:
        """See :meth:`Inbox.wipe`: pages and log files are the server's, and no client's."""
        await trio.lowlevel.checkpoint()
        return True

    async def close(self) -> None:
        """See :meth:`Inbox.close`."""
        await self._queries.close()
        self._effects.close()
        await self._commits.close()


def _migrate(address: PostgresAddress) -> None:
    connection = address.connect()
    try:
        address.migrate(connection)
    finally:
        connection.close()
