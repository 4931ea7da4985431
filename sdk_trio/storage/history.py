"""Maintenance of the days on PostgreSQL; see :mod:`storage.sql.days`.

It uses its own connection, so that no delivery waits for it.
"""

from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import psycopg

from ..base import clock
from ..base.executor import check_cancelled
from ..base.logs import get_logger
from .engines.postgres import PostgresTransaction
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .sql import days
from .sql.days import Day
from .sql.dialect import Dialect

P = ParamSpec("P")
T = TypeVar("T")

#: Deliveries whose keys one transaction removes.
FORGET_CHUNK = 2_000

#: Tries of a drop while others use the tables, and the pause between two, in seconds. The next pass
#: tries again.
DROP_TRIES = 3
PAUSE_SECONDS = 1.0

# Another host is doing the same, or others use the tables.
_BUSY = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.DuplicateTable,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UniqueViolation,
)

_log = get_logger("storage")


class Kept(NamedTuple):
    """The number of done deliveries dropped with their days, and the other days with old rows."""

    dropped: int
    by_rows: Sequence[Day]


class History:
    """Opens the days of one store, and closes them.

    Args:
        address: the store.
        dialect: that of its transactions.
    """

    def __init__(self, address: PostgresAddress, dialect: Dialect) -> None:
        self._address = address
        self._dialect = dialect

    def keep(self, now: float, forgotten: float) -> Kept:
        """Open the day that has begun, and close those that are over; blocks.

        A user who does not own the tables cannot do either. Deliveries then continue in the current
        day, and old ones are deleted one by one.

        Args:
            now: Unix seconds.
            forgotten: deliveries that were done before this Unix time may go.

        Raises:
            StoreUnavailableError: no server answers, or it refuses.
            trio.Cancelled: between two transactions.
        """
        known: Sequence[Day] = ()
        with self._address.connected(patient=True) as connection:
            try:
                known = self._do(connection, days.read)
                self._open(connection, now)
                known = self._do(connection, days.read)
                plan = days.plan(known, forgotten)
                by_rows, dropped = [*plan.by_rows], 0
                for day in plan.close:
                    closed = self._close(connection, day, forgotten)
                    if closed is None:
                        by_rows.append(day)
                    dropped += closed or 0
                return Kept(dropped, by_rows)
            except psycopg.errors.InsufficientPrivilege as error:
                _log.warning(
                    "store.history_not_partitioned",
                    place=self._address.place,
                    reason=str(error).strip(),
                    hint="old deliveries are deleted one by one; connect as the owner of the "
                    "schema",
                )
                return Kept(0, known)

    def _do(
        self,
        connection: StoreConnection,
        work: Callable[Concatenate[PostgresTransaction, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        check_cancelled()
        with self._address.transaction(connection):
            connection.execute("SET LOCAL statement_timeout TO 0")
            return work(PostgresTransaction(connection, self._dialect), *arguments, **options)

    def _open(self, connection: StoreConnection, now: float) -> None:
        try:
            self._do(connection, days.make_next, now)
            self._do(connection, days.open_next, now)
        except _BUSY:
            return

    def _close(self, connection: StoreConnection, day: Day, before: float) -> int | None:
        """Drop a day; return how many done deliveries went. None: it leaves too many."""
        left = self._do(connection, days.count_left, day, before)
        if left > days.MOST_LEFT:
            return None
        after = None
        while True:
            after = self._do(
                connection, days.forget_keys, day, before, after=after, limit=FORGET_CHUNK
            )
            if after is None:
                break
        for _ in range(DROP_TRIES):
            try:
                # Read again: it changes with each day that is dropped.
                rest = self._do(connection, days.rest_before, day, left)
                return self._do(connection, days.drop, day, rest, before)
            except _BUSY:
                clock.sleep(PAUSE_SECONDS)
        return 0
