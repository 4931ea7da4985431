"""The move of a whole store from SQLite to PostgreSQL: ``storage migrate``.

Rows are copied in batches, each with the position that it reaches in one transaction of the
target, so a move that was killed goes on where it was. The source is locked for writing meanwhile
and stays as it was; after the last batch one run reads every row of both again and compares. Until
then the version in the target is a negative number, with which no program opens it. At the end the
source is marked as moved, so that no start by mistake takes deliveries into it.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import apsw
import attrs
import psycopg
from psycopg import sql

from ..errors import StorageError, StoreLockedError, StoreVersionError
from .postgres.connect import PostgresAddress, StoreConnection
from .postgres.schema import VERSION
from .postgres.writes import KEEP_CHECKPOINT, lane
from .sqlite import schema as sqlite_schema
from .sqlite.connect import connect_reader, connect_writer, describe_failure

#: The most rows of a batch, and the bytes of bodies after which it ends: a body may have 100 MB.
BATCH = 2_000
BATCH_BYTES = 8 << 20

#: Time that connections of a program that has ended may still be listed, in seconds.
ENDING_SECONDS = 1.0

#: The checkpoint of the target that holds the position, until the move is done.
POSITION = "storage.transfer"

# Checkpoints of one file or of one move, which are not copied.
_OWN_CHECKPOINTS = ("storage.wiped", POSITION)

#: Columns that are 0 or 1 in SQLite.
_FLAGS = frozenset({"queued", "ordered", "ran_alone", "repeatable", "site_manager_email_verified"})

_DELIVERY = (
    *("sequence", "delivery_key", "webhook_id", "signer", "type", "received_at", "signed_at"),
    *("subject", "tenant_id", "raw", "state", "queued", "ordered", "attempts", "earlier_attempts"),
    *("process_ends", "ran_alone", "next_attempt_at", "failed_at", "started_at", "finished_at"),
    *("last_error", "lease_owner", "lease_until", "generation"),
)
_ARRIVAL = _DELIVERY[:10]
_ENDED = (
    *("sequence", "queued", "ordered", "attempts", "earlier_attempts", "process_ends"),
    *("ran_alone", "started_at", "finished_at", "last_error", "generation", "bare"),
)
_WORK = ("sequence", *_DELIVERY[10:])


class MovedTable(NamedTuple):
    """Rows that both stores have: under the same ``keys``, in the order of ``columns``.

    ``source`` and ``target`` are SQL of what they are read from, if it is not the table of that
    name; the columns of both have the names of ``columns``.
    """

    name: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    source: str = ""
    target: str = ""


#: The columns of a delivery in SQLite's view; a done one has no plans and no lease.
_SOURCE_DELIVERY = """(
SELECT inbox.*, timestamp AS signed_at, body.raw AS raw FROM inbox
LEFT JOIN body ON body.sequence = inbox.sequence)"""

_TARGET_DELIVERY = """(
SELECT delivery.*, work.failed_at FROM delivery
LEFT JOIN work ON work.sequence = delivery.sequence) AS delivery"""

_CHECKPOINTS = f"(SELECT * FROM checkpoint WHERE name NOT IN {_OWN_CHECKPOINTS}) AS checkpoint"

_TRANSITION = (
    *("sequence", "delivery_id", "tenant_id", "tenant_identifier", "tenant_name", "transition"),
    *("previous_status", "new_status", "reason", "actor", "occurred_at", "site_manager_email"),
    *("site_manager_email_verified", "site_manager_phone"),
)

#: All that a store holds.
TABLES = (
    MovedTable("delivery", ("sequence",), _DELIVERY, _SOURCE_DELIVERY, _TARGET_DELIVERY),
    MovedTable(
        "attempt",
        ("id",),
        (
            *("id", "sequence", "number", "started_at", "finished_at", "error", "place"),
            "traceback",
        ),
    ),
    MovedTable(
        "evidence",
        ("id",),
        ("id", "sequence", "digest", "received_at", "address", "raw", "tenant_id"),
    ),
    MovedTable("checkpoint", ("name",), ("name", "value"), _CHECKPOINTS, _CHECKPOINTS),
    MovedTable(
        "tenant",
        ("id",),
        (
            *("id", "identifier", "name", "status", "site_manager_email"),
            *("site_manager_email_verified", "site_manager_phone", "organization_id"),
            *("created_at", "deleted_at", "version", "credentials"),
        ),
    ),
    MovedTable("source", ("tenant_id", "text"), ("tenant_id", "text")),
    MovedTable(
        "audit",
        ("sequence",),
        (
            *("sequence", "tenant_id", "tenant_identifier", "action", "previous_status"),
            *("new_status", "actor", "reason", "relaxation", "details", "occurred_at"),
        ),
    ),
    MovedTable("outbox", ("sequence",), _TRANSITION),
    MovedTable(
        "upgrade",
        ("id",),
        ("id", "state", "tenant_id", "step", "position", "started_at", "finished_at"),
    ),
    MovedTable(
        "notification",
        ("sequence", "channel"),
        (
            *("sequence", "channel", "state", "repeatable", "attempts", "created_at"),
            *("next_attempt_at", "started_at", "finished_at", "provider_id", "reason"),
            *("lease_owner", "lease_until"),
        ),
    ),
)

Row = tuple[Any, ...]

#: Takes the step (``copy`` or ``compare``), the table, and how many of its rows are done of all.
Report = Callable[[str, str, int, int], None]


class TransferError(StorageError):
    """The move cannot begin, or its rows differ; the message names the row and what to do."""


@attrs.frozen(kw_only=True)
class TransferPlan:
    """The findings before a move.

    ``rows`` are those of the source, by table, ``left_behind`` an application's own tables in the
    file, which it has to move itself; ``copied`` says how far an earlier move has come, as
    words, None without one. ``refusal`` is the reason for which it cannot begin, None without one.
    """

    source: str
    target: str
    size: int
    rows: dict[str, int]
    left_behind: tuple[str, ...]
    copied: str | None = None
    refusal: str | None = None


@attrs.frozen(kw_only=True)
class Transferred:
    """The rows that were moved and compared, by table, and the tables that were left."""

    rows: dict[str, int]
    left_behind: tuple[str, ...]


def plan_transfer(file: Path, address: PostgresAddress) -> TransferPlan:
    """Look at both stores and change nothing; blocks.

    Raises:
        StorageError: one of them cannot be read.
    """
    with _opened(file, connect_reader) as source:
        older = 0 < source.pragma("user_version") < sqlite_schema.VERSION
        # An older one is brought up to date by the move itself; it has other tables.
        rows = {} if older else _count_rows(source)
        plan = TransferPlan(
            source=str(file),
            target=address.place,
            size=file.stat().st_size,
            rows=rows,
            left_behind=_tables_of_application(source),
        )
        with _dialled(address) as target:
            try:
                with address.transaction(target, reading=True):
                    copied = _look_at(source, target, address)
            except StorageError as error:
                return attrs.evolve(plan, refusal=str(error))
        return attrs.evolve(plan, copied=copied)


def transfer(file: Path, address: PostgresAddress, *, anew: bool, report: Report) -> Transferred:
    """Copy the store in ``file`` to ``address``, compare both, and mark the file as moved; blocks.

    The caller holds the lock of the data directory. Interrupted at any point, it goes on from there
    when it is called again.

    Args:
        file: the database of the source; one of an earlier version is brought up to date.
        address: the target, whose schema is made if it is missing. It is empty, or an earlier move
            has come to an end before it was done.
        anew: remove what an earlier move has copied, and begin again.
        report: called after each batch.

    Raises:
        TransferError: the target is not empty, or rows differ.
        StoreLockedError: a program works on the target.
        StorageError: one of the stores cannot be used.
    """
    with _opened(file, connect_reader) as looked_at:
        moved = looked_at.pragma("user_version") < 0
    # Marked as moved, it needs no more than to be read: the move has died at its very end.
    with _opened(file, connect_reader if moved else connect_writer) as source:
        # No command writes beside it: the rows that were copied stay as they were.
        source.execute("BEGIN" if moved else "BEGIN IMMEDIATE")
        with _dialled(address) as target:
            return _Move(source, target, address, report).run(anew=anew)


@contextmanager
def _opened(file: Path, connect: Callable[[str], apsw.Connection]) -> Iterator[apsw.Connection]:
    try:
        connection = connect(str(file))
        try:
            if connection.pragma("application_id") != sqlite_schema.APPLICATION_ID:
                raise StoreVersionError(f"{file} is a SQLite database of another program")
            yield connection
        finally:
            connection.close()
    except apsw.Error as error:
        raise describe_failure(error, str(file)) from error


@contextmanager
def _dialled(address: PostgresAddress) -> Iterator[StoreConnection]:
    connection = address.connect()
    try:
        yield connection
    except psycopg.Error as error:
        raise address.describe(error) from error
    finally:
        connection.close()


_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
    AND split_part(application_name, ' ', 1)
        = split_part(current_setting('application_name'), ' ', 1)
    AND pid <> pg_backend_pid()
"""


def _require_alone(target: StoreConnection, address: PostgresAddress) -> None:
    """Raise StoreLockedError if another program works on the target.

    One that has just ended is waited for: the server lists its connections for a moment longer.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        (others,) = target.execute(_OTHERS).fetchone() or (0,)
        if not others:
            return
        if time.monotonic() >= deadline:
            raise StoreLockedError(
                f"{others} other connections of this program use {address.place}: stop every "
                "host's receiver, then repeat this"
            )
        time.sleep(0.05)
        # Within a transaction the server would show the same list once more.
        target.execute("SELECT pg_stat_clear_snapshot()")


def _look_at(
    source: apsw.Connection, target: StoreConnection, address: PostgresAddress
) -> str | None:
    """Return how far an earlier move has come, None without one.

    Raises:
        StoreLockedError: a program works on the target.
        TransferError: it holds rows that no move has brought.
        StoreVersionError: it is of another version, or another program's.
    """
    _require_alone(target, address)
    version = address.version(target)
    if version == -VERSION:
        position = _position(target)
        return "begun" if position is None else f"{position.step} of {position.table}"
    if source.pragma("user_version") < 0:
        raise TransferError("the source was moved already; set Sdk:Storage:Backend to Postgres")
    if version is not None and version != VERSION:
        raise StoreVersionError(
            f"the schema {address.schema} of {address.place} has version {version}, this version "
            f"of sdk_trio moves a store to {VERSION}"
        )
    if version is not None:
        for table in TABLES:
            name = "arrival" if table.name == "delivery" else table.name
            if target.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() is not None:
                raise TransferError(
                    f"the schema {address.schema} of {address.place} is not empty (it has rows in "
                    f"{name}): a store is moved into an empty one; name another schema in "
                    "Sdk:Storage:PostgresSchema"
                )
    return None


@attrs.frozen
class _Position:
    """The batch that was done last: its step, its table, its last key and its row's number."""

    step: str
    table: str
    key: tuple[Any, ...]
    done: int


def _position(target: StoreConnection) -> _Position | None:
    row = target.execute("SELECT value FROM checkpoint WHERE name = %s", (POSITION,)).fetchone()
    if row is None:
        return None
    step, table, key, done = json.loads(row[0])
    return _Position(step, table, tuple(key), done)


def _count_rows(source: apsw.Connection) -> dict[str, int]:
    return {
        table.name: int(
            cast(
                "Any",
                source.execute(
                    "SELECT count(*) FROM arrival"
                    if table.name == "delivery"
                    else f"SELECT count(*) FROM {table.source or table.name}"
                ).get,
            )
        )
        for table in TABLES
    }


def _tables_of_application(source: apsw.Connection) -> tuple[str, ...]:
    """Return the tables that handlers of ``transaction=True`` keep in the store's file."""
    rows = source.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    names = {str(name) for (name,) in rows}
    return tuple(sorted(names - sqlite_schema.OWN_TABLES - {"inbox_before"}))


def _batch(table: MovedTable, source: str, mark: str, after: Sequence[Any], limit: int) -> str:
    """Return SQL of the next rows after a key, in the order of the keys."""
    keys = ", ".join(table.keys)
    marks = ", ".join([mark] * len(table.keys))
    where = f"WHERE ({keys}) > ({marks})" if after else ""
    return (
        f"SELECT {', '.join(table.columns)} FROM {source or table.name} {where} "
        f"ORDER BY {keys} LIMIT {limit}"
    )


class _Move:
    """One move, from the position at which an earlier one has ended."""

    def __init__(
        self,
        source: apsw.Connection,
        target: StoreConnection,
        address: PostgresAddress,
        report: Report,
    ) -> None:
        self._source = source
        self._target = target
        self._address = address
        self._report = report
        self._rows = _count_rows(source)

    def run(self, *, anew: bool) -> Transferred:
        target = self._target
        with self._address.transaction(target, reading=True):
            begun = _look_at(self._source, target, self._address) is not None
        if not begun:
            self._address.migrate(target)
        with self._address.transaction(target):
            # Looked at again behind a lock: two moves may have been started at once.
            target.execute("LOCK TABLE store IN SHARE ROW EXCLUSIVE MODE")
            _look_at(self._source, target, self._address)
            if anew:
                _empty(target)
            target.execute("UPDATE store SET version = %s", (-VERSION,))
            reached = _position(target)
        steps = [(step, table) for step in ("copy", "compare") for table in TABLES]
        first = 0
        if reached is not None and reached.step == "compare":
            # From the beginning: a receiver may have worked on the source since.
            first, reached = len(TABLES), None
        elif reached is not None:
            first = [table.name for table in TABLES].index(reached.table)
        for number, (step, table) in enumerate(steps[first:]):
            self._do(step, table, reached if number == 0 else None)
        self._end()
        return Transferred(rows=self._rows, left_behind=_tables_of_application(self._source))

    def _do(self, step: str, table: MovedTable, reached: _Position | None) -> None:
        key = () if reached is None else reached.key
        done = 0 if reached is None else reached.done
        while True:
            with self._address.transaction(self._target):
                rows = self._read(table, key)
                if step == "compare":
                    self._compare(table, key, rows)
                elif rows:
                    self._copy(table, rows)
                if rows:
                    names = table.columns
                    key = tuple(rows[-1][names.index(name)] for name in table.keys)
                done += len(rows)
                value = json.dumps([step, table.name, key, done])
                self._target.execute(KEEP_CHECKPOINT, (POSITION, value))
            self._report(step, table.name, done, self._rows[table.name])
            if not rows:
                return

    def _read(self, table: MovedTable, key: Sequence[Any]) -> list[Row]:
        statement = _batch(table, table.source, "?", key, BATCH)
        flags = [column in _FLAGS for column in table.columns]
        rows: list[Row] = []
        size = 0
        cursor = self._source.execute(statement, tuple(key))
        for row in cast("Iterable[Row]", cursor):
            rows.append(
                tuple(
                    bool(v) if flag and v is not None else v
                    for v, flag in zip(row, flags, strict=True)
                )
            )
            size += sum(len(value) for value in row if isinstance(value, bytes))
            if size >= BATCH_BYTES:
                break
        cursor.close()
        return rows

    def _copy(self, table: MovedTable, rows: Sequence[Row]) -> None:
        if table.name != "delivery":
            _copy_into(self._target, table.name, table.columns, rows)
            return
        names = table.columns
        done = [row for row in rows if row[names.index("state")] == "done"]
        open_ = [row for row in rows if row[names.index("state")] != "done"]
        _copy_into(self._target, "arrival", _ARRIVAL, (row[: len(_ARRIVAL)] for row in rows))
        _copy_into(self._target, "work", _WORK, ((row[0], *row[len(_ARRIVAL) :]) for row in open_))
        raw = names.index("raw")
        chosen = [names.index(name) for name in _ENDED[:-1]]
        ended = ((*(row[index] for index in chosen), row[raw] is None) for row in done)
        _copy_into(self._target, "ended", _ENDED, ended)
        self._target.execute(_MOVE_LANES, (rows[0][0], rows[-1][0]))

    def _compare(self, table: MovedTable, key: Sequence[Any], rows: Sequence[Row]) -> None:
        # After the last row of the source, there may be none in the target either.
        statement = _batch(table, table.target, "%s", key, max(len(rows), 1))
        found = self._target.execute(statement, tuple(key)).fetchall()
        for ours, theirs in zip(rows, found, strict=False):
            if ours != theirs:
                raise self._differs(table, ours)
        if len(rows) != len(found):
            longer = rows if len(rows) > len(found) else found
            raise self._differs(table, longer[min(len(rows), len(found))])

    def _differs(self, table: MovedTable, row: Row) -> TransferError:
        key = ", ".join(f"{name} {row[table.columns.index(name)]}" for name in table.keys)
        return TransferError(
            f"the row {key} of {table.name} is another one in {self._address.place}: the source "
            "has been written to since its rows were copied; repeat this with --anew, which "
            "begins again"
        )

    def _end(self) -> None:
        """Set the numbers that rows get, open the target, and mark the source."""
        last = self._source.execute(_LAST).get
        numbers = dict(cast("Any", self._source.execute(_NUMBERS).fetchall()))
        execute = self._target.execute
        with self._address.transaction(self._target):
            execute("SET LOCAL statement_timeout TO 0")
            # Without it the first queries would be planned for empty tables.
            execute("ANALYZE")
        with self._address.transaction(self._target):
            execute("SET LOCAL statement_timeout TO 0")
            for table, column, least in (
                ("arrival", "sequence", last),
                ("attempt", "id", 0),
                ("evidence", "id", 0),
            ):
                execute(_NEXT_NUMBER.format(table=table, column=column), (least,))
            for name in ("audit", "outbox"):
                execute(_COUNTER.format(name=name), (numbers.get(name, 0),))
            execute("UPDATE node SET done = (SELECT count(*) FROM ended) WHERE id = ''")
            execute("DELETE FROM checkpoint WHERE name = %s", (POSITION,))
            execute("UPDATE store SET version = %s", (VERSION,))
            # Before the target can be opened: of two crashes, the one in between leaves a source
            # that is marked and a move that ends when it is repeated.
            if self._source.pragma("user_version") > 0:
                self._source.execute(f"PRAGMA user_version = {-sqlite_schema.VERSION}")
            self._source.execute("COMMIT")


_MOVE_LANES = f"""
UPDATE work SET lane = {lane("work.ordered", "arrival.tenant_id", "arrival.subject")}
FROM arrival WHERE arrival.sequence = work.sequence AND work.ordered
    AND work.sequence BETWEEN %s AND %s
"""

# The highest sequence ever, also where its row has been removed.
_LAST = """
SELECT max(coalesce((SELECT max(sequence) FROM arrival), 0),
           (SELECT number FROM tally WHERE name = 'last'))
"""

_NUMBERS = "SELECT name, seq FROM sqlite_sequence WHERE name IN ('audit', 'outbox')"

_NEXT_NUMBER = """
SELECT setval(pg_get_serial_sequence('{table}', '{column}'),
    greatest(%s, (SELECT coalesce(max({column}), 0) FROM {table})) + 1, false)
"""

_COUNTER = "UPDATE counter SET value = greatest(value, %s) WHERE name = '{name}'"


def _copy_into(target: StoreConnection, table: str, columns: Sequence[str], rows: Any) -> None:
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
        sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    with target.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _empty(target: StoreConnection) -> None:
    """Remove what a move has copied; never the rows of a store that was in use."""
    # No trigger of the audit trail is asked: the rows are copies of those in the source.
    target.execute("ALTER TABLE audit DISABLE TRIGGER audit_not_emptied")
    names = ["arrival", "work", "ended", *(table.name for table in TABLES[1:])]
    target.execute(f"TRUNCATE {', '.join(names)}")
    target.execute("ALTER TABLE audit ENABLE TRIGGER audit_not_emptied")
