"""PostgreSQL as an engine: one connection that writes, and readers beside it.

If the server is unavailable, a transaction that has not reached its COMMIT runs again on a new
connection, once. If the connection breaks during the COMMIT, the outcome is unknown, and the
transaction is not run again. After a conflict it runs again, up to :data:`CONFLICT_LIMIT` times.
During the pauses between connection attempts, which double up to 5 s, calls are refused at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from ...base import clock
from ...base.logs import Outage, get_logger
from ...errors import StoreLostError, StoreUnavailableError
from ..sql.dialect import Dialect, Insert, Row, SqlTransaction
from . import CommitUnknownError, ReadAgainError
from .postgres_address import PostgresAddress
from .postgres_connection import StoreConnection
from .postgres_failover import note_timeline

T = TypeVar("T")

#: The most retries of a transaction after conflicts with others.
CONFLICT_LIMIT = 5

#: Time that a transaction waits for its locks after its batch has waited for one, in seconds. A
#: batch has up to 200 units, and the units that need no locked row should not wait for each lock.
HURRIED_SECONDS = 0.01

#: Time for the server to cancel a query, in seconds.
CANCEL_SECONDS = 2.0

#: The translation of statements for a server whose clock decides.
POSTGRESQL = Dialect("postgresql", server_clock=True)

# SQLSTATEs of a transaction that only has to run again: serialization failure and deadlock.
_CONFLICTS = frozenset({"40001", "40P01"})

# Two hosts have claimed two deliveries of one lane at the same moment, or given two tenants one
# name. The second runs again, and finds the first.
_TAKEN = ("work_lane_leased", "tenant_identifier_key", "tenant_organization_id_key", "tenant_pkey")

_HURRIED = f"SET LOCAL lock_timeout TO {HURRIED_SECONDS * 1000:.0f}"

_COUNT = """
INSERT INTO node (id, changes, done) VALUES ({}, %d, %d)
ON CONFLICT (id) DO UPDATE SET changes = node.changes + excluded.changes,
    done = node.done + excluded.done, seen_at = now()
"""

# Prepared, because planning this statement for each transaction costs the server as much as an
# insert.
_PREPARE = b"PREPARE sdk_trio_count (bigint, bigint) AS "
_IS_PREPARED = "SELECT 1 FROM pg_prepared_statements WHERE name = 'sdk_trio_count'"
_COUNT_PREPARED = b"EXECUTE sdk_trio_count (%d, %d)"

# An engine that closes adds its counts to the common row. If the sum of changes became smaller,
# other processes would not notice an engine that opens, changes something and closes.
_LEAVE = """
WITH gone AS (DELETE FROM node WHERE id = %s RETURNING changes, done)
UPDATE node SET changes = node.changes + gone.changes, done = node.done + gone.done
FROM gone WHERE node.id = ''
"""

_log = get_logger("storage")


def is_conflict(error: psycopg.Error) -> bool:
    """Return whether a transaction only has to run again, because it met a conflict."""
    if isinstance(error, psycopg.errors.UniqueViolation):
        return error.diag.constraint_name in _TAKEN
    if isinstance(error, psycopg.errors.CheckViolation):
        # Without a constraint, this is the first row of a day whose partition was made after the
        # statement had begun.
        return error.diag.constraint_name is None
    return error.sqlstate in _CONFLICTS


@cache
def _insert_text(dialect: Dialect, insert: Insert) -> str:
    return dialect.insert_text(insert, 1)


def _insert(
    connection: StoreConnection, dialect: Dialect, insert: Insert, rows: Sequence[Sequence[Any]]
) -> list[Row]:
    columns = map(list, zip(*rows, strict=True))
    values = dict(zip(insert.columns, columns, strict=True))
    cursor = connection.execute(_insert_text(dialect, insert), values)
    return [] if cursor.description is None else cursor.fetchall()


class PostgresTransaction:
    """An open transaction; see :class:`storage.sql.dialect.SqlTransaction`."""

    __slots__ = ("_connection", "changes", "dialect", "done")

    version: None = None
    last_sequence: int | None = None

    def __init__(self, connection: StoreConnection, dialect: Dialect) -> None:
        self._connection = connection
        self.dialect: Dialect = dialect
        #: The calls of :meth:`note_change`.
        self.changes: int = 0
        #: The deliveries that were ended, minus the done ones that were removed.
        self.done: int = 0

    def all(self, statement: str, /, **values: Any) -> list[Row]:
        return self._connection.execute(self.dialect.translate(statement).text, values).fetchall()

    def one(self, statement: str, /, **values: Any) -> Row | None:
        return self._connection.execute(self.dialect.translate(statement).text, values).fetchone()

    def run(self, statement: str, /, **values: Any) -> int:
        cursor = self._connection.execute(self.dialect.translate(statement).text, values)
        return max(cursor.rowcount, 0)

    def each(self, statement: str, values: Iterable[Mapping[str, Any]], /) -> list[Row | None]:
        text = self.dialect.translate(statement).text
        connection = self._connection
        rows: list[Row | None] = []
        failure: psycopg.Error | None = None
        try:
            with connection.pipeline() if psycopg.Pipeline.is_supported() else nullcontext():
                try:
                    cursors = [connection.execute(text, each) for each in values]
                    rows = [cursor.fetchone() for cursor in cursors]
                except psycopg.Error as error:  # psycopg would log a warning about the others
                    failure = error
        except psycopg.Error as error:
            failure = failure or error
        if failure is not None:
            raise failure
        return rows

    run_whole_unit = all

    def insert(
        self, insert: Insert, rows: Sequence[Sequence[Any]], /, *, whole_unit: bool = False
    ) -> list[Row]:
        return _insert(self._connection, self.dialect, insert, rows) if rows else []

    def note_change(self, *, done: int = 0) -> None:
        """Note a change that other processes must see; ``done``: deliveries that were ended."""
        self.changes += 1
        self.done += done


class _NotWholeUnitError(Exception):
    """The unit needs more than one statement."""


class _WholeUnit:
    """The transaction of a unit of which one statement, which commits itself, is all.

    It saves the round trips of BEGIN and COMMIT. The engine offers it to each batch of one grouped
    unit, which may be whole (see ``sql/dialect.py``): it calls :meth:`run_whole_unit`, or
    :meth:`insert` with ``whole_unit``, and its statement notes the change itself. Any other method
    raises :class:`_NotWholeUnitError` before anything was changed, and the unit runs again in a
    transaction.
    """

    __slots__ = ("_connection", "_has_changed", "_has_noted", "_node", "dialect")

    version: None = None
    last_sequence: int | None = None

    def __init__(self, connection: StoreConnection, dialect: Dialect, node: str) -> None:
        self._connection = connection
        self._node = node
        self._has_changed = self._has_noted = False
        self.dialect: Dialect = dialect

    def run_whole_unit(self, statement: str, /, **values: Any) -> list[Row]:
        """Run the statement and commit it; return its rows."""
        self._require_unchanged()
        text, _, noting = self.dialect.translate(statement)
        rows = self._connection.execute(noting or text, {**values, "node": self._node}).fetchall()
        self._has_changed, self._has_noted = bool(rows), noting is not None
        return rows

    def insert(
        self, insert: Insert, rows: Sequence[Sequence[Any]], /, *, whole_unit: bool = False
    ) -> list[Row]:
        """Insert ``rows`` and commit that, if it is a whole unit."""
        if not whole_unit:
            self._need_transaction()
        self._require_unchanged()
        made = _insert(self._connection, self.dialect, insert, rows)
        self._has_changed = bool(made)
        return made

    def note_change(self, *, done: int = 0) -> None:
        """Require that the statement has noted its change; otherwise a transaction is needed."""
        if not (self._has_changed and self._has_noted):
            self._need_transaction()

    def _need_transaction(self, *_: Any, **__: Any) -> Any:
        self._require_unchanged()
        raise _NotWholeUnitError

    def _require_unchanged(self) -> None:
        assert not self._has_changed, "this statement was all that its unit changes"

    all = one = run = each = _need_transaction


class Redial:
    """The pause between attempts to reach an unavailable server: it doubles, up to 5 s.

    Args:
        outage: of the store. Connections that read and the one that writes have a pause of their
            own each, as a server may accept only one kind; the first that failed logs the end.
    """

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self._began = False
        self._failures = 0
        self._next_at = 0.0
        self._reason: str | None = None

    def require(self) -> None:
        """Raise the error of the last attempt while its pause lasts and the outage continues."""
        if self._reason is None or self._outage.since is None:
            return
        if clock.monotonic() < self._next_at:
            self._outage.refuse()
            raise StoreUnavailableError(self._reason)

    def failed(self, error: StoreUnavailableError) -> None:
        """Note an attempt that has failed."""
        pause = min(5.0, 0.1 * 2**self._failures)
        self._next_at = clock.monotonic() + pause
        self._failures = min(self._failures + 1, 10)
        begins = self._outage.fail(1)
        self._began = self._began or begins
        # Without an attempt since the previous outage, the reason is that outage's.
        if begins or self._reason is None:
            _log.store_unavailable(error)
        self._reason = str(error)

    def succeeded(self) -> None:
        """Note that the server answers."""
        if self._began:
            self._began = False
            self._outage.end()
        self._failures, self._next_at, self._reason = 0, 0.0, None


class _Dialled:
    """A connection that is opened when it is needed, and again when the server has ended it."""

    def __init__(self, outage: Outage, dial: Callable[[], StoreConnection]) -> None:
        self._redial = Redial(outage)
        self._dial = dial
        self.current: StoreConnection | None = None

    def get(self) -> StoreConnection:
        """Return the connection; open it if there is none.

        Raises:
            StoreUnavailableError: the server is unavailable.
            StoreLostError: the store was moved since this process opened it.
        """
        if (connection := self.current) is not None:
            connection.notice_end()
            if not connection.useless:
                return connection
        self.current = None
        self._redial.require()
        try:
            self.current = self._dial()
        except StoreUnavailableError as error:
            self._redial.failed(error)
            raise
        self._redial.succeeded()
        return self.current

    def close(self) -> None:
        if self.current is not None:
            self.current.close()


class PostgresEngine:
    """The connection that writes; see :class:`storage.engines.Engine`.

    Args:
        address: the store.
        dialect: one of PostgreSQL.
        node: the name of this open store in the table ``node``.
    """

    #: Most handlers end within this time, so that the start and the end of a run are one commit.
    linger: float = 0.01
    version: None = None
    stall_message: str = (
        "the database {place} has not answered for {seconds:.0f} s; it continues by itself when "
        "the server answers"
    )

    def __init__(self, address: PostgresAddress, dialect: Dialect, node: str) -> None:
        self.place: str = address.place
        self.dialect: Dialect = dialect
        #: See :attr:`Engine.lost`: the store was moved. An unavailable server is no reason, because
        #: it becomes available again.
        self.lost: str | None = None
        self._address = address
        self._node = node
        self._connection = _Dialled(address.outage, self._dial)
        self._hurried = False
        self._abandoned = False
        # The connection on which the statement of the counts is prepared.
        self._prepared: StoreConnection | None = None
        self._count = sql.SQL(_COUNT).format(node).as_bytes(None)

    def acquire(self) -> None:
        """Begin a batch: all hosts write at once, so there is nothing to wait for."""
        self._hurried = False

    def transact(
        self, work: Callable[[SqlTransaction], None], *, durable: bool, is_one_unit: bool = False
    ) -> bool:
        """See :meth:`Engine.transact`; it returns True.

        After a wait for a lock in vain, later calls wait only briefly for theirs, until
        :meth:`acquire`: they are the units of a batch that has waited already.
        """
        conflicts = 0
        redialled = False
        while True:
            connection = self._connection.get()
            try:
                # Behind a pooler, and for a shorter wait, settings must precede the statement.
                may_be_whole = is_one_unit and not connection.pooled and not self._hurried
                if not (may_be_whole and self._run_whole_unit(connection, work)):
                    self._attempt(connection, work)
            except psycopg.Error as error:
                if is_conflict(error) and conflicts < CONFLICT_LIMIT:
                    conflicts += 1
                elif connection.useless and not redialled:
                    # The server was restarted since the last transaction: this one has not reached
                    # its COMMIT.
                    redialled = True
                elif isinstance(error, psycopg.errors.LockNotAvailable):
                    self._hurried = True
                    raise self._address.describe_lock(connection) from error
                else:
                    raise self._address.describe(error) from error
            else:
                return True

    def _run_whole_unit(
        self, connection: StoreConnection, work: Callable[[SqlTransaction], None]
    ) -> bool:
        """Run ``work`` if it is one statement, which commits itself; False: it is not."""
        try:
            with self._address.committing(connection):
                work(_WholeUnit(connection, self.dialect, self._node))
        except _NotWholeUnitError:
            return False
        return True

    def _attempt(self, connection: StoreConnection, work: Callable[[SqlTransaction], None]) -> None:
        transaction = PostgresTransaction(connection, self.dialect)
        if self._prepared is not connection and not connection.pooled:
            self._prepare(connection)
        # At a ROLLBACK, psycopg may deallocate all prepared statements.
        self._prepared = None
        with self._address.transaction(connection) as last:
            if self._hurried:
                connection.execute(_HURRIED)
            work(transaction)
            last += self.count(transaction, prepared=not connection.pooled)
        self._prepared = connection

    def _prepare(self, connection: StoreConnection) -> None:
        if connection.execute(_IS_PREPARED, prepare=False).fetchone() is None:
            text = _PREPARE + self._count.replace(b"%d, %d", b"$1, $2")
            connection.execute(text, prepare=False)

    def count(self, transaction: PostgresTransaction, *, prepared: bool = False) -> list[bytes]:
        """Return the statement that writes the counts of ``transaction``, if it has any.

        Args:
            prepared: it runs on a direct connection of this engine.
        """
        if not transaction.changes:
            return []
        statement = _COUNT_PREPARED if prepared else self._count
        return [statement % (transaction.changes, transaction.done)]

    def _dial(self) -> StoreConnection:
        if self._abandoned:
            raise StoreUnavailableError(f"the store {self.place} is closed: it did not answer")
        try:
            connection = self._address.connect(writer=True, opened=True)
        except StoreLostError as error:
            if self.lost is None:
                self.lost = str(error)
                _log.error("store.lost", error=self.lost)
            raise
        try:
            try:
                note_timeline(self._address, connection)
            except psycopg.Error:
                # A managed server without that function handles failovers itself.
                if connection.useless:
                    raise
        except psycopg.Error as error:
            connection.close()
            raise self._address.describe(error) from error
        except CommitUnknownError as error:  # of our own notice, not of a caller's transaction
            connection.close()
            raise StoreUnavailableError(str(error)) from error
        return connection

    def run_outside_transaction(self, work: Callable[[StoreConnection], T]) -> T:
        """Run ``work`` with psycopg's connection, outside of any transaction; see the protocol."""
        connection = self._connection.get()
        try:
            return work(connection)
        except psycopg.Error as error:
            raise self._address.describe(error) from error

    def release(self) -> bool:
        """Do nothing and return True: all hosts write at once."""
        return True

    def upkeep(self) -> None:
        """Do nothing: the server maintains itself."""

    def abandon(self) -> bool:
        """Cut the connection and open no other one; return True."""
        self._abandoned = True
        if (connection := self._connection.current) is not None:
            connection.cut()
        return True

    def close(self) -> None:
        """Add the counts to the common row and close the connection."""
        connection = self._connection.current
        if connection is None:
            return
        connection.notice_end()
        if not connection.useless:
            try:
                with self._address.transaction(connection):
                    connection.execute(_LEAVE, (self._node,))
            except (psycopg.Error, StoreUnavailableError) as error:
                _log.store_unavailable(error)
        connection.close()


class PostgresReader:
    """A connection that only reads. One thread at a time uses it, and any may interrupt it.

    Args:
        address: the store.
        dialect: one of PostgreSQL.
    """

    def __init__(self, address: PostgresAddress, dialect: Dialect) -> None:
        self._address = address
        self._dialect = dialect
        self._connection = _Dialled(address.outage, partial(address.connect, opened=True))

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        """See :meth:`Reader.transaction`; a connection that the server ended is dialled again."""
        before = self._connection.current
        connection = self._connection.get()
        try:
            with self._address.transaction(connection, reading=True):
                yield PostgresTransaction(connection, self._dialect)
        except psycopg.Error as error:
            described = self._address.describe(error)
            if connection.useless and connection is before:
                raise ReadAgainError(str(described)) from error
            raise described from error

    def interrupt(self) -> None:
        """See :meth:`Reader.interrupt`; after :data:`CANCEL_SECONDS` the connection is cut."""
        connection = self._connection.current
        if connection is None or connection.useless:
            return
        connection.cut_at = clock.monotonic() + CANCEL_SECONDS
        with suppress(psycopg.Error):  # the server does not answer
            connection.cancel_safe(timeout=CANCEL_SECONDS)
        connection.cut()

    @property
    def is_usable(self) -> bool:
        """Whether it may run further queries.

        The request to cancel an interrupted query may still be on its way, and could cancel the
        next one.
        """
        connection = self._connection.current
        return connection is None or connection.cut_at == math.inf

    def close(self) -> None:
        """Close the connection; call nothing afterwards."""
        self._connection.close()
