"""Days: the partitions of ``arrival`` and ``ended`` on PostgreSQL, which the retention drops.

A day is a range of sequences, ``number << DAY_BITS`` and up. The next day is opened in two
transactions: the first makes its partitions, and the second moves the numbering into its range.
Until then arrivals go into the current day, however long that takes. So sequences rise without
relying on a clock, and a host that writes during the change finds a partition for either range, if
need be when its transaction runs again.

A day whose last arrival is past its retention is closed. First the keys of its deliveries are
removed in batches: they are still listed and counted then, but cannot be changed, and the same id
counts as new. Then its partitions are dropped, but for the few rows that have to stay: these become
a *rest*, a partition that neighboring closed days share, with at most :data:`MOST_LEFT` rows. If a
close is interrupted, the next pass goes through the day again, finds no keys to remove, and
continues with the drop.

:func:`maintain` does both, on a connection of its own, so that no delivery waits for it. The other
functions run in a transaction.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import psycopg

from ...base import clock
from ...base.executor import check_cancelled
from ...base.logs import get_logger
from ..sql import arrivals
from ..sql.dialect import Dialect, Row, SqlTransaction
from ..sql.schema import DAY_BITS, PARTITIONED, attach_day, make_day
from .postgres import PostgresTransaction
from .postgres_address import PostgresAddress
from .postgres_connection import StoreConnection

P = ParamSpec("P")
T = TypeVar("T")

DAY_SECONDS = 86_400.0

#: The most rows that a closed day may leave. With more of them, its rows are deleted one by one.
MOST_LEFT = 10_000

#: Time after the opening of the next day until the last arrivals of a day are committed, and the
#: most by which the clocks of two hosts differ, in seconds.
SLACK_SECONDS = 3600.0

#: Time that a drop waits for the transactions in progress, in milliseconds. Others wait behind it.
DROP_MILLISECONDS = 200

#: Deliveries whose keys one transaction removes.
FORGET_CHUNK = 2_000

#: Before every time: all rows count as recent.
_EVER = float("-inf")

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


class Day(NamedTuple):
    """A pair of partitions: the days from ``number`` to before ``until``.

    ``opened_at`` is by the store's clock; None: no sequence of it was given yet. ``rest``: it has
    the remaining rows of closed days.
    """

    number: int
    until: int
    opened_at: float | None
    rest: bool

    @property
    def sequences(self) -> tuple[int, int]:
        """The first sequence, and the one after the last."""
        return self.number << DAY_BITS, self.until << DAY_BITS


class OldDays(NamedTuple):
    """The days that the retention closes, and the days whose old rows it deletes one by one."""

    close: Sequence[Day]
    by_rows: Sequence[Day]


_READ = "SELECT number, until, opened_at, rest FROM day {which} ORDER BY number"


def read(tx: SqlTransaction) -> list[Day]:
    """Return all days, oldest first."""
    return [Day(*row) for row in tx.all(_READ.format(which=""))]


def plan(days: Sequence[Day], before: float) -> OldDays:
    """Plan the retention: deliveries that were done before ``before`` may be removed.

    A day of usual length waits until all of its arrivals are so old. Old rows are deleted one by
    one in rests, in the current day, and in a day that was open for longer, because no process has
    opened the next one.
    """
    close, by_rows = [], []
    for day, later in zip(days, [*days[1:], None], strict=True):
        end = None if later is None else later.opened_at
        if day.rest or day.opened_at is None or end is None:
            by_rows.append(day)
        elif end + SLACK_SECONDS <= before:
            close.append(day)
        elif end - day.opened_at > 2 * DAY_SECONDS:
            by_rows.append(day)
    return OldDays(close, by_rows)


# -- opening -----------------------------------------------------------------------------------

_IS_OVER = f"""
SELECT number, floor(opened_at / {DAY_SECONDS}) < floor(clock() / {DAY_SECONDS})
FROM day ORDER BY number DESC LIMIT 1
"""

# If two hosts do this at once, the second waits here for the first, and then changes nothing.
_ADD_DAY = """
INSERT INTO day (number, until) VALUES (:number, :number + 1)
ON CONFLICT (number) DO NOTHING RETURNING number
"""


def make_next(tx: SqlTransaction, now: float) -> None:
    """Make the partitions of the next day if the current one began on an earlier date (UTC)."""
    number, is_over = tx.one(_IS_OVER, now=now) or (0, False)
    if is_over and tx.one(_ADD_DAY, number=number + 1) is not None:
        for statement in make_day(number + 1):
            tx.run(statement)


_UNOPENED = "SELECT number FROM day WHERE opened_at IS NULL ORDER BY number LIMIT 1 FOR UPDATE"
_OPEN_DAY = "UPDATE day SET opened_at = clock() WHERE number = :number"
_MOVE = "SELECT setval('arrival_key_sequence_seq', :last)"


def open_next(tx: SqlTransaction, now: float) -> None:
    """Move the numbering into the next day, whose partitions are committed.

    The numbering is moved behind the lock of the day's row, and only upwards: it must never give a
    number twice. A rollback does not move it back.
    """
    row = tx.one(_UNOPENED)
    if row is None:
        return
    (number,) = row
    tx.run(_OPEN_DAY, number=number, now=now)
    if arrivals.last_sequence(tx) < number << DAY_BITS:
        tx.one(_MOVE, last=number << DAY_BITS)


# -- closing -----------------------------------------------------------------------------------

_COUNT_LEFT = f"""
SELECT (SELECT count(*) FROM (SELECT 1 FROM work
        WHERE sequence >= :first AND sequence < :end LIMIT {MOST_LEFT + 1}) AS unfinished)
    + (SELECT count(*) FROM (SELECT 1 FROM ended
        WHERE sequence >= :first AND sequence < :end AND finished_at >= :before
        LIMIT {MOST_LEFT + 1}) AS recent)
"""


def count_left(tx: SqlTransaction, day: Day, before: float) -> int:
    """Return how many rows a close leaves; the count stops above :data:`MOST_LEFT`."""
    first, end = day.sequences
    (count,) = tx.one(_COUNT_LEFT, first=first, end=end, before=before) or (0,)
    return int(count)


_REST_BEFORE = """
SELECT number, until, opened_at, rest FROM day WHERE number < :number
ORDER BY number DESC LIMIT 1
"""


def rest_before(tx: SqlTransaction, day: Day, left: int) -> Day | None:
    """Return the rest just before a day if it can take the rows that the day leaves."""
    row = tx.one(_REST_BEFORE, number=day.number)
    if row is None or not (rest := Day(*row)).rest:
        return None
    return rest if count_left(tx, rest, _EVER) + left <= MOST_LEFT else None


# Locked, because a delivery that is being put back must keep its key.
_DONE_OF_DAY = """
SELECT sequence FROM ended
WHERE sequence > :after AND sequence < :end AND finished_at < :before
ORDER BY sequence LIMIT :limit FOR UPDATE
"""


def forget_keys(
    tx: SqlTransaction, day: Day, before: float, *, after: int | None, limit: int
) -> int | None:
    """Remove the keys of the next old deliveries of a day, with attempts and evidence.

    Args:
        tx: the transaction.
        day: the day.
        before: deliveries that were done before this Unix time go.
        after: the sequence that the last call has returned; None at first.
        limit: the most deliveries.

    Returns:
        The last sequence; None: there are no more.
    """
    first, end = day.sequences
    begin = first - 1 if after is None else after
    rows = tx.all(_DONE_OF_DAY, after=begin, end=end, before=before, limit=limit)
    if not rows:
        return None
    sequences = [sequence for (sequence,) in rows]
    arrivals.remove_keys(tx, sequences)
    arrivals.remove_attached(tx, sequences)
    return int(sequences[-1])


_COPY_DONE = """
INSERT INTO {rest} SELECT * FROM {table} WHERE finished_at >= :before
"""

_COPY_ARRIVALS = """
INSERT INTO {rest} SELECT {table}.* FROM (
    SELECT sequence FROM work WHERE sequence >= :first AND sequence < :end
    UNION SELECT sequence FROM {ended}
) AS kept JOIN {table} ON {table}.sequence = kept.sequence
"""

_COUNT_DONE = "UPDATE node SET done = done - :dropped, changes = changes + 1 WHERE id = ''"

_FORGET_DAYS = "DELETE FROM day WHERE number IN ints(:numbers)"
_ADD_REST = "INSERT INTO day VALUES (:number, :until, :opened_at, true)"


def drop(tx: SqlTransaction, day: Day, rest: Day | None, before: float) -> int:
    """Drop the partitions of a day, but for the rows that stay; return how many done went.

    In this order: check that no other host was faster; lock the partitions, which can be read but
    not written meanwhile; copy what stays into a new partition; lock the whole tables, for as long
    as it takes to change the catalog; swap the partitions; write the table ``day``, and correct the
    count of done deliveries.

    Args:
        tx: the transaction.
        day: a day whose keys are removed.
        rest: the days just before it, whose rows will share its partition. None: there are none.
        before: deliveries that were done before this Unix time go.

    Raises:
        psycopg.errors.LockNotAvailable: the tables are in use for longer than
            :data:`DROP_MILLISECONDS`; nothing has changed.
    """
    old = [day] if rest is None else [rest, day]
    numbers = [each.number for each in old]
    tx.run(f"SET LOCAL lock_timeout TO {DROP_MILLISECONDS}")
    tx.all("SELECT 1 FROM day WHERE number IN ints(:numbers) FOR UPDATE", numbers=numbers)
    found = tx.all(_READ.format(which="WHERE number IN ints(:numbers)"), numbers=numbers)
    if [Day(*row) for row in found] != old:
        return 0  # another host has dropped it
    tables = [f"{table}_{number}" for table in PARTITIONED for number in numbers]
    # Locked before the copy: a row that changed after it was copied would be lost with its table.
    tx.run(f"LOCK TABLE {', '.join(tables)} IN SHARE MODE")
    copied = _copy_what_stays(tx, old, before)
    tx.run(f"LOCK TABLE {', '.join(PARTITIONED)} IN ACCESS EXCLUSIVE MODE")
    for table in PARTITIONED:
        for number in numbers:
            tx.run(f"ALTER TABLE {table} DETACH PARTITION {table}_{number}")
            tx.run(f"DROP TABLE {table}_{number}")
        if copied.arrivals:
            tx.run(f"ALTER TABLE {_rest_table(table, old)} RENAME TO {table}_{numbers[0]}")
            tx.run(attach_day(table, numbers[0], day.until))
        else:
            tx.run(f"DROP TABLE {_rest_table(table, old)}")
    tx.run(_FORGET_DAYS, numbers=numbers)
    if copied.arrivals:
        opened_at = old[0].opened_at
        tx.run(_ADD_REST, number=numbers[0], until=day.until, opened_at=opened_at)
    dropped = copied.ended_before - copied.ended
    tx.run(_COUNT_DONE, dropped=dropped)
    return dropped


def _rest_table(table: str, old: Sequence[Day]) -> str:
    return f"{table}_{old[0].number}_rest"


class _Copied(NamedTuple):
    """The rows of ``ended`` before, and the rows of ``ended`` and of ``arrival`` that stay."""

    ended_before: int
    ended: int
    arrivals: int


def _copy_what_stays(tx: SqlTransaction, old: Sequence[Day], before: float) -> _Copied:
    for table in PARTITIONED:
        tx.run(f"CREATE TABLE {_rest_table(table, old)} (LIKE {table} INCLUDING ALL)")
    ended = kept = arrivals_kept = 0
    rest = _rest_table("ended", old)
    for each in old:
        table = f"ended_{each.number}"
        (count,) = tx.one(f"SELECT count(*) FROM {table}") or (0,)
        ended += count
        # All rows of the rest have keys: its old rows are deleted one by one.
        since = _EVER if each.rest else before
        kept += tx.run(_COPY_DONE.format(rest=rest, table=table), before=since)
    for each in old:
        first, end = each.sequences
        keep = _COPY_ARRIVALS.format(
            rest=_rest_table("arrival", old), table=f"arrival_{each.number}", ended=rest
        )
        arrivals_kept += tx.run(keep, first=first, end=end)
    return _Copied(ended, kept, arrivals_kept)


# -- old deliveries ------------------------------------------------------------------------------

# In the order of an index, so that no row is found twice, whether it was deleted or not.
_OLD = """
SELECT sequence, finished_at FROM ended
WHERE sequence >= :first AND sequence < :end AND finished_at < :before AND finished_at >= :at
    AND (finished_at > :at OR sequence > :after)
ORDER BY finished_at, sequence LIMIT :limit
"""


def find_old(
    tx: SqlTransaction, after: Row | None, *, days: Sequence[Day], before: float, since: float,
    limit: int,
) -> list[Row]:  # fmt: skip
    """Return sequences and end times of deliveries that were done from ``since`` to ``before``.

    ``after`` is the last row that the last call has returned, ``days`` are neighbors.
    """
    sequence, at = after or (-1, since)
    values: dict[str, Any] = {"first": days[0].sequences[0], "end": days[-1].sequences[1]}
    return tx.all(_OLD, **values, before=before, at=at, after=sequence, limit=limit)


# -- maintenance ---------------------------------------------------------------------------------


class Maintained(NamedTuple):
    """The done deliveries dropped with their days, and the days that may have old rows."""

    dropped: int
    by_rows: Sequence[Day]


def maintain(
    address: PostgresAddress, dialect: Dialect, now: float, forgotten: float
) -> Maintained:
    """Open the day that has begun, and close those that are over; blocks.

    A user who does not own the tables cannot do either. Deliveries then continue in the current
    day, and old ones are deleted one by one.

    Args:
        address: the store.
        dialect: that of its transactions.
        now: Unix seconds.
        forgotten: deliveries that were done before this Unix time may go.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        trio.Cancelled: between two transactions.
    """
    known: Sequence[Day] = ()
    with address.connected(patient=True) as connection:
        transactions = _Transactions(address, dialect, connection)
        try:
            known = transactions.run(read)
            _open(transactions, now)
            known = transactions.run(read)
            old = plan(known, forgotten)
            by_rows, dropped = [*old.by_rows], 0
            for day in old.close:
                closed = _close(transactions, day, forgotten)
                if closed is None:
                    by_rows.append(day)
                dropped += closed or 0
            return Maintained(dropped, by_rows)
        except psycopg.errors.InsufficientPrivilege as error:
            _log.warning(
                "store.history_not_partitioned",
                place=address.place,
                reason=str(error).strip(),
                hint="old deliveries are deleted one by one; connect as the owner of the schema",
            )
            return Maintained(0, known)


class _Transactions(NamedTuple):
    """Runs functions of a transaction on one connection."""

    address: PostgresAddress
    dialect: Dialect
    connection: StoreConnection

    def run(
        self,
        work: Callable[Concatenate[PostgresTransaction, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        check_cancelled()
        with self.address.transaction(self.connection):
            self.connection.execute("SET LOCAL statement_timeout TO 0")
            return work(PostgresTransaction(self.connection, self.dialect), *arguments, **options)


def _open(transactions: _Transactions, now: float) -> None:
    try:
        transactions.run(make_next, now)
        transactions.run(open_next, now)
    except _BUSY:
        return


def _forget(transactions: _Transactions, day: Day, before: float) -> None:
    after = None
    while True:
        after = transactions.run(forget_keys, day, before, after=after, limit=FORGET_CHUNK)
        if after is None:
            return


def _close(transactions: _Transactions, day: Day, before: float) -> int | None:
    """Drop a day; return how many done deliveries went. None: it leaves too many.

    0 also if others use the tables: the next pass tries again.
    """
    left = transactions.run(count_left, day, before)
    if left > MOST_LEFT:
        return None
    try:
        _forget(transactions, day, before)
    except _BUSY:
        # The deletion of single rows locks keys before the rows of `ended`, so that both may wait
        # for each other. The next pass forgets the remaining keys.
        return 0
    for _ in range(DROP_TRIES):
        try:
            # Read again: it changes with each day that is dropped.
            rest = transactions.run(rest_before, day, left)
            return transactions.run(drop, day, rest, before)
        except _BUSY:
            clock.sleep(PAUSE_SECONDS)
    return 0
