"""Effects in the application's database: transactions of handlers, on connections of their own.

A handler's transaction may last as long as the handler, so it cannot share the connection by which
everything else is committed. It locks the row of its event first; others pass a locked row over
when they look for work or renew their leases.
"""

from collections import deque
from contextlib import suppress
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
from ..records.deliveries import Done
from .admission import LeaseTerms
from .effects import (
    SAVEPOINT,
    Effects,
    EffectsFailedError,
    T,
    apply,
    in_this_context,
    refuse_commit,
    taken_over,
)
from .engines.postgres import (
    CONFLICT_LIMIT,
    PostgresEngine,
    PostgresTransaction,
    Redial,
    is_conflict,
)
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .sql import deliveries
from .sql.deliveries import Lease

#: The most transactions of handlers at once, each on a connection of its own.
CONNECTIONS = 16

#: Pause before a transaction is run again that another one has got in the way of, in seconds.
_PAUSE_SECONDS = 0.02

# The lock is that of an update, so that whoever takes or renews the lease of the row passes it
# over. The number of the run is the fence: a run that was taken over has a lower one.
_LOCK = """
SELECT 1 FROM work WHERE sequence = %s AND lease_token = %s AND state = 'running'
    AND earlier_attempts + attempts = %s
FOR NO KEY UPDATE
"""

_TO_HANDLER = sql.SQL("SET LOCAL search_path TO DEFAULT; SAVEPOINT {}").format(
    sql.Identifier(SAVEPOINT)
)


class EffectConnection(StoreConnection):
    """The connection that handlers get; it ends no transaction."""

    def commit(self) -> NoReturn:
        """Refuse: the event's end belongs to the same transaction."""
        raise EffectError(
            "commit() is the library's: the effects are committed with the event's end, when the "
            "handler returns"
        )

    def rollback(self) -> None:
        """Undo what the handler has done so far; the transaction goes on."""
        name = sql.Identifier(SAVEPOINT)
        self.execute(sql.SQL("ROLLBACK TO SAVEPOINT {}").format(name))


class EffectTransactions:
    """Runs transactions of handlers in threads, on up to :data:`CONNECTIONS` connections."""

    def __init__(self, address: PostgresAddress, engine: PostgresEngine, terms: LeaseTerms) -> None:
        self._address = address
        self._engine = engine
        self._terms = terms
        self._idle: deque[EffectConnection] = deque()
        self._in_use: set[EffectConnection] = set()
        self._limiter = trio.CapacityLimiter(CONNECTIONS)
        self._redial = Redial(address.outage)
        self._closed = False
        schema, savepoint = sql.Identifier(address.schema), sql.Identifier(SAVEPOINT)
        self._to_store = sql.SQL("SET LOCAL search_path TO {}, pg_temp").format(schema)
        self._from_handler = sql.SQL(
            "RELEASE SAVEPOINT {}; SET LOCAL search_path TO {}, pg_temp;"
            "SET LOCAL client_min_messages TO warning"
        ).format(savepoint, schema)

    async def conclude(
        self, key: str, lease: Lease, effects: Effects[T], *, attempt: int, now: float
    ) -> T:
        """See :meth:`Inbox.conclude`. Cancelled, it waits for the thread."""
        inside = in_this_context(effects)
        run = partial(self._run, key, lease, attempt, inside, now)
        # Returned and not raised: Trio's thread reads __traceback__ of what is raised in it, and
        # ends if a handler's exception refuses that.
        value, failure = await run_in_thread(catch, run, limiter=self._limiter)
        if failure is not None:
            raise failure
        return cast("T", value)

    def close(self) -> None:
        """Close the connections; those in use are cut, and closed by their threads."""
        self._closed = True
        self._drop_idle()
        for connection in tuple(self._in_use):
            connection.cut()

    def _drop_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    # -- in the thread -------------------------------------------------------------------------

    def _run(self, key: str, lease: Lease, attempt: int, effects: Effects[T], now: float) -> T:
        conflicts = 0
        fresh = False
        while True:
            connection = self._take()
            self._in_use.add(connection)
            # Until the row is locked, whatever goes wrong is the store's failure.
            locked = applied = False
            try:
                with self._address.transaction(connection) as last:
                    self._lock(connection, key, lease, attempt)
                    locked = True
                    value = self._apply(connection, effects)
                    applied = True
                    last += self._end(connection, lease, now)
            except EffectsFailedError as failed:
                if not (_is_conflict(failed.error) and conflicts < CONFLICT_LIMIT):
                    raise failed.error from None
                conflicts += 1
                clock.sleep(_PAUSE_SECONDS * conflicts)
            except Exception as error:  # of the store: a driver raises what it likes
                if _is_conflict(error) and conflicts < CONFLICT_LIMIT:
                    conflicts += 1
                    clock.sleep(_PAUSE_SECONDS * conflicts)
                    continue
                if applied and connection.useless:
                    raise StoreUnavailableError(
                        f"the connection to {self._address.place} broke during the commit of the "
                        f"effects of {key}: they and the event's end are either both committed or "
                        "neither is"
                    ) from error
                if locked or not isinstance(error, psycopg.Error):
                    raise
                # A connection from before a restart of the server tells so when it is used, and
                # the other ones are as old.
                if connection.useless and not fresh:
                    fresh = True
                    self._drop_idle()
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

    def _lock(self, connection: EffectConnection, key: str, lease: Lease, attempt: int) -> None:
        connection.row_factory = tuple_row  # the handler before may have set another one
        connection.execute(self._to_store)
        ours = connection.execute(_LOCK, (lease.sequence, lease.token, attempt))
        if ours.fetchone() is None:
            raise taken_over(key)
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
        transaction = PostgresTransaction(connection, self._engine.dialect)
        deliveries.finish(transaction, self._terms, lease, Done(), now)
        return self._engine.count(transaction)

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
    """Say whether a transaction has only to be run again; SQLAlchemy wraps the driver's error."""
    for part in () if error is None else causes_of(error):
        if is_a(part, psycopg.Error) and is_conflict(cast("psycopg.Error", part)):
            return True
    return False
