"""The inbox in PostgreSQL, which several processes and hosts may have open at the same time.

A handler's transaction may last as long as the handler, so it cannot use the connection that
commits everything else: :class:`EffectTransactions` has its own connections. Such a transaction
first locks the row of its event; claims and renewals skip locked rows.
"""

import uuid
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, cast

import psycopg
import trio
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from ..base import clock
from ..base.executor import run_in_thread
from ..base.foreign_errors import attempt as catch
from ..base.foreign_errors import causes_of, is_a
from ..errors import EffectError, StoreUnavailableError
from ..records.deliveries import Done, Lease, NewDelivery, Purged
from .admission import LeaseTerms
from .commit import ANSWER_SECONDS, CLOSE_SECONDS, GroupCommit
from .effects import (
    SAVEPOINT,
    Effects,
    EffectsFailedError,
    T,
    apply,
    in_this_context,
    refuse_commit,
    require_ours,
)
from .engines import postgres_days
from .engines.postgres import (
    CONFLICT_LIMIT,
    PostgresEngine,
    PostgresReader,
    PostgresTransaction,
    Redial,
    is_conflict,
)
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .engines.postgres_migration import migrate_postgres
from .inbox import SqlInbox
from .readers import ReaderPool, close_all
from .sql import arrivals, leases, reads, runs
from .sql.dialect import Dialect

#: The checkpoint with the Unix time of the last pass that removed bodies, if ids are remembered for
#: longer than bodies.
_BODIES_DELETED = "storage.bodies_deleted"

#: The most queries at once, each on a connection of its own.
READERS = 4

# The rows of stores that have noted no change for a day; most have ended without closing. Their
# counts move to the common row, and the next change of a store adds its row again.
_FORGET_NODES = """
WITH gone AS (
    DELETE FROM node WHERE id <> '' AND seen_at < now() - interval '1 day' RETURNING changes, done
), total AS (SELECT sum(changes) AS changes, sum(done) AS done FROM gone)
UPDATE node SET changes = node.changes + total.changes, done = node.done + total.done
FROM total WHERE id = '' AND total.done IS NOT NULL
"""


class PostgresInbox(SqlInbox):
    """:class:`Inbox` in PostgreSQL; open it with :meth:`open`, end with :meth:`close`."""

    #: See :attr:`Inbox.in_order`: a transaction takes its sequences before it commits.
    in_order = False

    def __init__(self, address: PostgresAddress, terms: LeaseTerms, *, server_clock: bool) -> None:
        dialect = Dialect("postgresql", server_clock=server_clock)
        self._node = str(uuid.uuid4())
        engine = PostgresEngine(address, dialect, self._node)
        commits = GroupCommit(engine, name="sdk_trio-inbox", outage=address.outage)
        connect = partial(PostgresReader, address, dialect)
        readers = ReaderPool(connect, place=address.place, limit=READERS)
        super().__init__(terms, commits, readers)
        self._effects = EffectTransactions(address, engine)
        self._address, self._dialect = address, dialect
        self._seen: tuple[int, int] | None = None

    @classmethod
    async def open(
        cls,
        address: PostgresAddress,
        terms: LeaseTerms,
        *,
        server_clock: bool = True,
    ) -> "PostgresInbox":
        """Open the store at ``address``, creating or migrating its schema.

        Args:
            address: the database and the schema.
            terms: the owner and the periods.
            server_clock: measure leases by the database's clock; False: by that of each call.

        Raises:
            StoreVersionError: the schema is of a newer version or of another program.
            StoreUnavailableError: no server answers, or it refuses.

        If it is cancelled, nothing stays open.
        """
        inbox = cls(address, terms, server_clock=server_clock)
        try:
            await run_in_thread(migrate_postgres, address)
            await inbox.changed_elsewhere()
        except BaseException:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await inbox.close()
            raise
        return inbox

    async def clock_offset(self) -> float | None:
        return await self._readers.run(reads.clock_offset, seconds=ANSWER_SECONDS)

    async def sync(self) -> None:
        """See :meth:`Inbox.sync`: a commit is visible once the server has synced it."""
        await trio.lowlevel.checkpoint()

    def writing_process(self) -> int | None:
        """See :meth:`Inbox.writing_process`: the server ends locks of clients that are gone."""
        return None

    def claim_unawaited(self, delivery: NewDelivery) -> Lease | None:
        """See :meth:`Inbox.claim_unawaited`: None, because several processes write."""
        return None

    def end_unawaited(self, lease: Lease, *, now: float) -> bool:
        """See :meth:`Inbox.end_unawaited`: False, because every end is awaited."""
        return False

    async def lead(self, *, seconds: float) -> int | None:
        owner, now = self._terms.owner, clock.wall()
        return await self._commits.submit(
            lambda tx: leases.lead(tx, owner, seconds=seconds, now=now)
        )

    async def conclude(self, lease: Lease, effects: Effects[T], *, attempt: int, now: float) -> T:
        if lease.start is not None:
            # The start may not be committed yet, and the transaction requires it.
            await self._commits.gather(self._starting, lease.key, lease.start.run)
            lease.start = None
        return await self._effects.conclude(lease, effects, attempt=attempt, now=now)

    async def changed_elsewhere(self) -> bool:
        terms = self._terms
        seen, expired = await self._readers.run(
            lambda tx: reads.changes_of_others(
                tx, node=self._node, owner=terms.owner, shared_by_hosts=terms.shared_by_hosts
            ),
            # The caller polls next, which uses another connection that may well answer.
            seconds=ANSWER_SECONDS,
        )
        before, self._seen = self._seen, seen
        return expired or (before is not None and seen != before)

    async def other_tables(self) -> Sequence[str]:
        """See :meth:`Inbox.other_tables`; the application's tables are in schemas of its own."""
        await trio.lowlevel.checkpoint()
        return []

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`.

        Done deliveries are dropped with their day, so a row and its body may stay for a day longer
        than on SQLite. Old rows are deleted one by one in the current day, in one that was open for
        too long or would leave too many rows, and in the rests of closed days.
        """
        terms = self._terms
        await self._commits.submit(lambda tx: tx.run(_FORGET_NODES))
        # A host's clock that is ahead must not remove what is not old yet.
        now = await self._read(partial(reads.current_time, now=now))
        old_body = now - terms.payload_seconds
        forgotten = now - max(terms.payload_seconds, terms.dedup_seconds)
        # Not waited for after a cancellation, because the server may be silent: it has a connection
        # of its own, and stops after the transaction in progress.
        found = await run_in_thread(
            postgres_days.maintain,
            self._address,
            self._dialect,
            now,
            forgotten,
            abandon_on_cancel=True,
        )
        bodies = await self._delete_bodies(old_body) if forgotten < old_body else None
        finished = found.dropped
        for day in found.by_rows:
            old = partial(postgres_days.find_old, days=[day], since=0.0)
            finished += await self._delete(old, arrivals.delete_done, forgotten)
        parked = await self._delete(reads.find_old_parked, arrivals.delete_parked, old_body)
        return Purged(finished if bodies is None else bodies, finished, parked)

    async def _delete_bodies(self, before: float) -> int:
        """Delete the bodies of deliveries that were done since the last pass; return how many."""
        looked = float(await self.read_checkpoint(_BODIES_DELETED) or 0.0)
        every = await self._read(postgres_days.read)
        old = partial(
            postgres_days.find_old, days=every, since=looked - postgres_days.SLACK_SECONDS
        )
        deleted = await self._delete(old, arrivals.delete_bodies, before)
        # Also if it is earlier: a clock was ahead, and later passes must not skip that time.
        await self.write_checkpoint(_BODIES_DELETED, str(before))
        return deleted

    async def wipe(self) -> bool:
        """See :meth:`Inbox.wipe`: no client can overwrite the server's pages and log files."""
        await trio.lowlevel.checkpoint()
        return True

    async def close(self) -> None:
        self._effects.close()
        await super().close()


# -- effects of handlers -----------------------------------------------------------------------

#: The most transactions of handlers at once, each on its own connection.
EFFECT_CONNECTIONS = 16

#: Pause before a transaction runs again after a conflict, in seconds.
_PAUSE_SECONDS = 0.02

_TO_HANDLER = sql.SQL("SET LOCAL search_path TO DEFAULT; SAVEPOINT {}").format(
    sql.Identifier(SAVEPOINT)
)


class EffectConnection(StoreConnection):
    """The connection that handlers get; it cannot end the transaction."""

    def commit(self) -> NoReturn:
        """Refuse: the same transaction also records the event's end."""
        raise EffectError(
            "commit() is the library's: the effects are committed with the event's end, when the "
            "handler returns"
        )

    def rollback(self) -> None:
        """Undo the handler's changes so far; the transaction continues."""
        name = sql.Identifier(SAVEPOINT)
        self.execute(sql.SQL("ROLLBACK TO SAVEPOINT {}").format(name))


class EffectTransactions:
    """Runs transactions of handlers in threads, on up to :data:`EFFECT_CONNECTIONS` connections."""

    def __init__(self, address: PostgresAddress, engine: PostgresEngine) -> None:
        self._address = address
        self._engine = engine
        self._idle: deque[EffectConnection] = deque()
        self._in_use: set[EffectConnection] = set()
        self._limiter = trio.CapacityLimiter(EFFECT_CONNECTIONS)
        self._redial = Redial(address.outage)
        self._closed = False
        schema, savepoint = sql.Identifier(address.schema), sql.Identifier(SAVEPOINT)
        self._to_store = sql.SQL("SET LOCAL search_path TO {}, pg_temp").format(schema)
        self._from_handler = sql.SQL(
            "RELEASE SAVEPOINT {}; SET LOCAL search_path TO {}, pg_temp;"
            "SET LOCAL client_min_messages TO warning"
        ).format(savepoint, schema)

    async def conclude(self, lease: Lease, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`. Cancelled, it waits for the thread."""
        inside = in_this_context(effects)
        run = partial(self._run, lease, attempt, inside, now)
        # Returned, not raised: Trio's thread reads __traceback__ of an exception that is raised in
        # it, and ends if a handler's exception raises there.
        value, failure = await run_in_thread(catch, run, limiter=self._limiter)
        if failure is not None:
            raise failure
        return cast("T", value)

    def close(self) -> None:
        """Close the connections; those in use are cut, and closed by their threads."""
        self._closed = True
        close_all(self._idle)
        for connection in tuple(self._in_use):
            connection.cut()

    # -- in the thread -------------------------------------------------------------------------

    def _run(self, lease: Lease, attempt: int, effects: Effects[T], now: float) -> T:
        """Run the transaction; again after a conflict, and once if our connection was a dead one.

        An error is the store's while the row is being locked. Later it is the handler's, whose
        statements may also fail at the COMMIT (a deferred constraint).
        """
        conflicts = 0
        is_redialled = False
        while True:
            connection = self._take()
            self._in_use.add(connection)
            stage = "lock"
            try:
                with self._address.transaction(connection) as last:
                    self._lock(connection, lease, attempt)
                    stage = "apply"
                    value = self._apply(connection, effects)
                    stage = "commit"
                    last += self._end(connection, lease, now)
            except Exception as error:  # the store's or the handler's: a driver may raise anything
                failure = error.error if isinstance(error, EffectsFailedError) else error
                if _is_conflict(failure) and conflicts < CONFLICT_LIMIT:
                    conflicts += 1
                    clock.sleep(_PAUSE_SECONDS * conflicts)
                    continue
                if failure is not error:
                    raise failure from None
                if stage == "commit" and connection.useless:
                    raise StoreUnavailableError(
                        f"the connection to {self._address.place} broke during the commit of the "
                        f"effects of {lease.key}: they and the event's end are either both "
                        "committed or neither is"
                    ) from error
                if stage != "lock" or not isinstance(error, psycopg.Error):
                    raise
                # A connection from before a restart of the server fails when it is used, and the
                # other idle ones are as old.
                if connection.useless and not is_redialled:
                    is_redialled = True
                    close_all(self._idle)
                    continue
                raise self._address.describe(error) from error
            else:
                return value
            finally:
                self._in_use.discard(connection)
                if self._closed or connection.useless:
                    connection.close()
                else:
                    self._idle.append(connection)

    def _lock(self, connection: EffectConnection, lease: Lease, attempt: int) -> None:
        connection.row_factory = tuple_row  # the handler before may have set another one
        connection.execute(self._to_store)
        require_ours(self._transaction(connection), lease, attempt)
        connection.execute(_TO_HANDLER)

    def _apply(self, connection: EffectConnection, effects: Effects[T]) -> T:
        value, failure = catch(lambda: apply(effects, connection))
        if failure is not None:
            raise EffectsFailedError(failure)
        if connection.info.transaction_status is TransactionStatus.IDLE:
            refuse_commit()
        try:
            connection.execute(self._from_handler)
        except psycopg.errors.InvalidSavepointSpecification:
            refuse_commit()
        return cast("T", value)

    def _end(self, connection: EffectConnection, lease: Lease, now: float) -> list[bytes]:
        transaction = self._transaction(connection)
        runs.finish(transaction, lease, Done(), now)
        return self._engine.count(transaction)

    def _transaction(self, connection: EffectConnection) -> PostgresTransaction:
        return PostgresTransaction(connection, self._engine.dialect)

    def _take(self) -> EffectConnection:
        if self._closed:
            raise StoreUnavailableError("the store is closed")
        try:
            return self._idle.pop()
        except IndexError:
            self._redial.require()
        try:
            connection = self._address.connect_for_handlers(EffectConnection)
        except StoreUnavailableError as error:
            self._redial.failed(error)
            raise
        self._redial.succeeded()
        return connection


def _is_conflict(error: BaseException | None) -> bool:
    """Return whether a transaction only has to run again; SQLAlchemy wraps the driver's error."""
    for part in () if error is None else causes_of(error):
        if is_a(part, psycopg.Error) and is_conflict(cast("psycopg.Error", part)):
            return True
    return False
