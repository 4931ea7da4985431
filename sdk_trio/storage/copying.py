"""A copy of a whole store, table by table, between files of SQLite and databases of PostgreSQL.

A :class:`Side` is an open store: ``storage.locations`` has one for each engine. It gives and takes
the rows of the tables that both engines have, in the order of their primary keys. The tables that
each engine derives from them are filled at the end of the copy. The digest of a table covers its
rows and is the same on every engine, so a copy is compared by digests.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec

from ..errors import StorageError
from .sql import arrivals, tenants
from .sql.dialect import SERVER_TIME, Row, SqlTransaction
from .sql.schema import DAY_BITS, MARK_AS_WIPED, TABLES, Table
from .sql.versions import StoreState

#: Rows between two calls of the report.
REPORT_ROWS = 1_000

# Rows that concern one file or one server only: the mark of a wiped file, and the last known
# timeline (storage.engines.postgres_failover).
_LEFT_OUT = {"checkpoint": "WHERE name NOT IN ('storage.wiped', 'storage.timeline')"}

#: Tables whose numbers are never reused.
_NUMBERED = ("audit", "outbox")

#: Takes the step in words, and the number of finished rows of the current table.
Report = Callable[[str, int], None]


class TransferError(StorageError):
    """A store cannot be moved, backed up or restored; the message says why and what to do."""


class Copied(NamedTuple):
    """The number of a table's rows, and their digest."""

    rows: int
    digest: str


class Side(Protocol):
    """An open store, within a transaction."""

    @property
    def tx(self) -> SqlTransaction:
        """The transaction."""

    @property
    def state(self) -> StoreState:
        """The state of the store."""

    def set_version(self, version: int) -> None:
        """Write the version of the schema."""

    def rows(self, table: Table) -> Iterator[Row]:
        """Return the rows of ``table`` in the order of its primary key; flags are ``bool``."""

    def prepare(self, numbers: Iterable[int]) -> None:
        """Make the partitions of the days with these numbers (``DAY_BITS``)."""

    def add(self, table: Table, rows: Iterable[Row]) -> None:
        """Add rows to ``table``, which has none of their keys."""


def select(table: Table, order: Iterable[str]) -> str:
    """Return SQL of the rows of ``table`` that are copied."""
    return (
        f"SELECT {', '.join(table.columns)} FROM {table.name} {_LEFT_OUT.get(table.name, '')} "
        f"ORDER BY {', '.join(order)}"
    )


# -- the copy ------------------------------------------------------------------------------------


def copy(source: Side, target: Side, report: Report) -> dict[str, Copied]:
    """Copy all rows from ``source`` to ``target``, which has none, and derive the other tables.

    Returns:
        The rows and digests of the source, by table.
    """
    copied = {}
    last = arrivals.last_sequence(source.tx)
    target.prepare([*_days(source.tx), last >> DAY_BITS])
    for table in TABLES:
        tally = _Tally(f"copy {table.name}", report)
        target.add(table, tally.count(source.rows(table)))
        copied[table.name] = tally.result()
    _derive(target.tx, last, {name: tenants.last_number(source.tx, name) for name in _NUMBERED})
    return copied


_FIRST_FROM = "SELECT min(sequence) FROM arrival WHERE sequence >= :first"


def _days(tx: SqlTransaction) -> Iterator[int]:
    """Return the days that have arrivals; each is one step in an index."""
    number = 0
    while (found := (tx.one(_FIRST_FROM, first=number << DAY_BITS) or (None,))[0]) is not None:
        number = found >> DAY_BITS
        yield number
        number += 1


def digests(side: Side, report: Report) -> dict[str, Copied]:
    """Read every row of ``side``; return the rows and digests, by table."""
    found = {}
    for table in TABLES:
        tally = _Tally(f"compare {table.name}", report)
        for _ in tally.count(side.rows(table)):
            pass
        found[table.name] = tally.result()
    return found


class _Tally:
    """Counts rows and digests them while they pass."""

    def __init__(self, step: str, report: Report) -> None:
        self._step = step
        self._report = report
        self._rows = 0
        self._hash = hashlib.sha256()

    def count(self, rows: Iterator[Row]) -> Iterator[Row]:
        encode = msgspec.msgpack.Encoder().encode
        self._report(self._step, 0)
        for row in rows:
            self._hash.update(encode(row))
            self._rows += 1
            if self._rows % REPORT_ROWS == 0:
                self._report(self._step, self._rows)
            yield row

    def result(self) -> Copied:
        return Copied(self._rows, self._hash.hexdigest())


# The number of removed arrivals accounts for every gap in the sequences.
_TALLY = """
UPDATE tally SET number = CASE name WHEN 'last' THEN :last
    WHEN 'removed' THEN :last - (SELECT count(*) FROM arrival) ELSE number END
"""

# A sequence begins at 1; if the highest number is 0, it has given none yet.
_SET_LAST_NUMBER = """
SELECT setval(pg_get_serial_sequence('{table}', '{column}'), greatest(highest, 1), highest > 0)
FROM (SELECT greatest(:last, (SELECT coalesce(max({column}), 0) FROM {table})) AS highest) AS found
"""


# A day ends with its last known arrival. If two rows have one key, because a day is about to be
# dropped, the newer row keeps it.
_DERIVED = (
    """
INSERT INTO arrival_key (delivery_key, sequence)
SELECT delivery_key, sequence FROM arrival ORDER BY sequence DESC
ON CONFLICT (delivery_key) DO NOTHING
""",
    f"""
UPDATE day SET opened_at = coalesce(
    (SELECT max(received_at) FROM arrival WHERE sequence < number << {DAY_BITS}),
    (SELECT min(received_at) FROM arrival), {SERVER_TIME})
""",
    # Of stores that have ended without closing.
    "DELETE FROM node WHERE id <> ''",
    "UPDATE node SET done = (SELECT count(*) FROM ended) WHERE id = ''",
)


def _derive(tx: SqlTransaction, last: int, numbers: Mapping[str, int]) -> None:
    """Write the data that the engine derives from the rows.

    Args:
        tx: the transaction of the target.
        last: the highest sequence of an arrival that was ever given.
        numbers: the highest number that each of the tables :data:`_NUMBERED` has given.
    """
    if tx.dialect.is_sqlite:
        arrivals.index(tx, last)
        tx.run(_TALLY, last=last)
        for name, number in numbers.items():
            tx.run("DELETE FROM sqlite_sequence WHERE name = :name", name=name)
            tx.run("INSERT INTO sqlite_sequence VALUES (:name, :number)", name=name, number=number)
        tx.run(MARK_AS_WIPED)
        return
    for statement in _DERIVED:
        tx.run(statement)
    given = {name: ("sequence", number) for name, number in numbers.items()}
    given["arrival_key"] = ("sequence", last)
    given |= dict.fromkeys(("attempt", "evidence", "pause"), ("id", 0))
    for table, (column, least) in given.items():
        tx.one(_SET_LAST_NUMBER.format(table=table, column=column), last=least)


def count_rows(tx: SqlTransaction) -> dict[str, int]:
    """Return the number of rows that a copy brings, by table."""
    counts = {}
    for table in TABLES:
        where = _LEFT_OUT.get(table.name, "")
        (counts[table.name],) = tx.one(f"SELECT count(*) FROM {table.name} {where}") or (0,)
    return counts
