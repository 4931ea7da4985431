"""One set of statements for two engines: what a statement may say, and how SQLite reads it.

Statements are PostgreSQL's, with ``:name`` for a parameter. A :class:`Dialect` translates each
once. Beside plain SQL that both engines understand, a statement may use:

===========================  =============================  =====================================
written                      PostgreSQL                     SQLite
===========================  =============================  =====================================
``:name``                    ``%(name)s``                   the same
``IN ints(:name)``           ``= ANY(... bigint[])``        ``IN (SELECT value FROM json_each())``
``IN texts(:name)``          ``= ANY(... text[])``          the same as for ints
``clock()``                  the server's time              ``:now``
``due(:at)``                 ``:at`` by the server's time   ``:at``
``local(column)``            a time by the caller's clock   ``column``
``FOR UPDATE``, all forms    the same                       nothing: one transaction writes
``, note_change(rows, 1)``   see "Whole units"              not allowed
===========================  =============================  =====================================

All times are Unix seconds. A statement with ``clock()``, ``due()`` or ``local()`` has a parameter
``now``, the caller's time. Hosts plan retries by their own clocks, and the server decides when they
are due: ``due(:at)`` is as far from the server's time as ``:at`` is from ``:now``.

Whole units: PostgreSQL commits a single statement by itself, which saves the round trips of
``BEGIN`` and ``COMMIT``. A unit of work allows that if one statement is all that it does:

1. It runs that by :meth:`SqlTransaction.run_whole_unit`, or by ``insert(whole_unit=True)``. If
   rows are returned, the unit changes nothing further. If not, nothing was changed, and other
   statements may follow.
2. Another statement cannot note the change for other processes, so this one has to do it:
   ``, note_change(rows, done)`` as the last part of its ``WITH`` does what
   :meth:`SqlTransaction.note_change` does, if the part ``rows`` has any row. ``done`` is 1 if each
   row is a delivery that was ended, else 0. The unit still calls ``note_change``, for engines and
   batches that need a transaction: there this part of the statement is left out.

A batch of one unit is tried so (``engines.postgres``). At the first other statement, before
anything was changed, it begins again in a transaction.

Methods of a store: ``get = on_reader(reads.get)`` in the body of a :class:`SqlPart` is the method
``get`` with the arguments of ``reads.get`` after the transaction; :func:`committed` and
:func:`committed_by_owner` are for functions that write. ``storage.ports`` describes the methods of
the inbox, and how all of them are cancelled. Arguments are read in another thread. ``on_reader``
copies lists (:func:`.storable`), the other two copy nothing: callers must not change a list
meanwhile. Where they may, the method is written out and copies it.
"""

import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from ...base.text import storable
from ..admission import LeaseTerms

P = ParamSpec("P")
T = TypeVar("T")

Row = tuple[Any, ...]

#: The number of the writing connection, and how often it has found other writes than those of its
#: transactions.
Version = tuple[int, int]

#: The sizes of multi-row statements on SQLite, largest first: it compiles each of them once.
ROWS_AT_ONCE = (32, 16, 8, 4, 2, 1)


class Statement(NamedTuple):
    """A translated statement, and the names of its parameters that are lists.

    ``noting``: its text as a whole unit, if it has a ``note_change`` of its own.
    """

    text: str
    lists: tuple[str, ...]
    noting: str | None = None


class Insert:
    """A statement that inserts many rows at once.

    Args:
        table: the table.
        columns: the types of its columns by name, as PostgreSQL calls them.
        end: what follows the rows, such as ``ON CONFLICT DO NOTHING RETURNING sequence``.
        instead: on PostgreSQL, the rest of a statement that begins with ``WITH given AS (the
            rows and their number),`` and replaces the insert.
    """

    __slots__ = ("columns", "end", "instead", "table")

    def __init__(
        self, table: str, columns: Mapping[str, str], end: str = "", *, instead: str = ""
    ) -> None:
        self.table: str = table
        self.columns: Mapping[str, str] = columns
        self.end: str = end
        self.instead: str = instead


class SqlTransaction(Protocol):
    """An open transaction; its methods block, and run in the thread of the engine.

    They raise the errors of the engine's driver, which the engine translates.
    """

    @property
    def dialect(self) -> "Dialect":
        """The dialect of the engine."""
        ...

    #: On SQLite the highest sequence that was ever given to an arrival; None: not known without a
    #: query.
    last_sequence: int | None

    @property
    def version(self) -> Version | None:
        """It changes when another connection has written, or this one outside of a transaction;
        None: the engine does not know that."""
        ...

    def all(self, statement: str, /, **values: Any) -> list[Row]:
        """Run a statement and return all of its rows."""
        ...

    def one(self, statement: str, /, **values: Any) -> Row | None:
        """Run a statement and return its first row, or None."""
        ...

    def run(self, statement: str, /, **values: Any) -> int:
        """Run a statement and return the number of rows that it has changed."""
        ...

    def each(self, statement: str, values: Iterable[Mapping[str, Any]], /) -> list[Row | None]:
        """Run a statement with ``RETURNING`` once for each of ``values``; return the first rows.

        On PostgreSQL all of them are one round trip.
        """
        ...

    def run_whole_unit(self, statement: str, /, **values: Any) -> list[Row]:
        """Run a statement that is all that its unit changes; return its rows.

        On PostgreSQL it may commit itself, see "Whole units" above.
        """
        ...

    def insert(
        self, insert: Insert, rows: Sequence[Sequence[Any]], /, *, whole_unit: bool = False
    ) -> list[Row]:
        """Insert ``rows``, in their order; return what the statement's ``RETURNING`` names.

        ``whole_unit``: as in :meth:`run_whole_unit`.
        """
        ...

    def note_change(self, *, done: int = 0) -> None:
        """Note that other processes must poll for work; ``done``: deliveries that were ended.

        ``done`` is below 0 where ended deliveries were removed or put back.
        """
        ...


class Writes(Protocol):
    """Commits what changes the store; :class:`~sdk_trio.storage.commit.GroupCommit` is one."""

    #: Runs before the work of each call, and raises if it must not be done.
    fence: Callable[[SqlTransaction], None] | None

    async def submit(self, work: Callable[[SqlTransaction], T], /, *, single: bool = False) -> T:
        """Run ``work`` in a transaction and return its result when that is committed.

        ``single``: no other work is in it, so that it does not run again because that has failed.
        """
        ...


class Reads(Protocol):
    """Runs queries; :class:`~sdk_trio.storage.readers.ReaderPool` is one."""

    async def run(self, query: Callable[[SqlTransaction], T], /, *, seconds: float = math.inf) -> T:
        """Run ``query`` and return its result, within so many seconds."""
        ...


_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_LIST = re.compile(r"IN (ints|texts)\(:(\w+)\)")
_LOCK_CLAUSE = re.compile(r"\s+FOR (?:NO KEY )?UPDATE(?: OF \w+)?(?: SKIP LOCKED)?")
_DUE_CALL = re.compile(r"\bdue\(([^()]+)\)")
_LOCAL_CALL = re.compile(r"\blocal\(([^()]+)\)")
_CLOCK_CALL = re.compile(r"\bclock\(\)")
_NOTE_CALL = re.compile(r",\s*note_change\((\w+), ([01])\)")

# The row of this open store, by which the other ones notice a change.
_NOTE = r""", noted AS (
    INSERT INTO node (id, changes, done) SELECT :node, 1, \2 * count(*) FROM \1 HAVING count(*) > 0
    ON CONFLICT (id) DO UPDATE SET changes = node.changes + 1, done = node.done + excluded.done,
        seen_at = now()
)"""

_ARRAYS = {"ints": "bigint[]", "texts": "text[]"}

#: SQL of the time of PostgreSQL's server, in Unix seconds.
SERVER_TIME = "CAST(extract(epoch FROM statement_timestamp()) AS float8)"
_CALLER_TIME = "CAST(:now AS float8)"


class Dialect:
    """Translates the statements of this package for one engine.

    Args:
        name: ``sqlite`` or ``postgresql``.
        server_clock: ``clock()`` is the server's time, else the caller's.
    """

    def __init__(self, name: str, *, server_clock: bool = False) -> None:
        self.name: str = name
        self.server_clock: bool = server_clock
        self._translated: dict[str, Statement] = {}

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite, which has one writer and no clock of its own."""
        return self.name == "sqlite"

    def translate(self, statement: str) -> Statement:
        """Return ``statement`` as the engine reads it; each is translated once."""
        translated = self._translated.get(statement)
        if translated is None:
            lists = tuple(name for _, name in _LIST.findall(statement))
            text = self._with_times(statement)
            read = self._for_sqlite if self.is_sqlite else self._for_postgresql
            noting = read(_NOTE_CALL.sub(_NOTE, text)) if _NOTE_CALL.search(text) else None
            translated = Statement(read(_NOTE_CALL.sub("", text)), lists, noting)
            self._translated[statement] = translated
        return translated

    def _with_times(self, statement: str) -> str:
        if self.server_clock:
            shifted = rf"({SERVER_TIME} + (CAST(\1 AS float8) - {_CALLER_TIME}))"
            statement = _DUE_CALL.sub(shifted, statement)
            statement = _LOCAL_CALL.sub(rf"({_CALLER_TIME} + (\1 - {SERVER_TIME}))", statement)
            return _CLOCK_CALL.sub(SERVER_TIME, statement)
        statement = _LOCAL_CALL.sub(r"\1", _DUE_CALL.sub(r"CAST(\1 AS float8)", statement))
        return _CLOCK_CALL.sub(_CALLER_TIME, statement)

    def _for_sqlite(self, statement: str) -> str:
        statement = _LIST.sub(r"IN (SELECT value FROM json_each(:\2))", statement)
        return _LOCK_CLAUSE.sub("", statement)

    def _for_postgresql(self, statement: str) -> str:
        statement = _LIST.sub(
            lambda found: f"= ANY(CAST(:{found[2]} AS {_ARRAYS[found[1]]}))",
            statement.replace("%", "%%"),
        )
        return _PARAMETER.sub(r"%(\1)s", statement)

    def insert_text(self, insert: Insert, rows: int) -> str:
        """Return the text of an insert of ``rows`` rows.

        SQLite gets the values of all rows, one after the other; PostgreSQL gets an array for each
        column, under the name of the column, however many rows there are.
        """
        names = ", ".join(insert.columns)
        if self.is_sqlite:
            row = f"({', '.join('?' * len(insert.columns))})"
            values = ", ".join([row] * rows)
            return f"INSERT INTO {insert.table} ({names}) VALUES {values} {insert.end}"
        arrays = ", ".join(
            f"CAST(%({name}){'b' if kind == 'bytea' else 's'} AS {kind}[])"
            for name, kind in insert.columns.items()
        )
        given = f"FROM unnest({arrays}) WITH ORDINALITY AS given ({names}, number)"
        if insert.instead:
            return f"WITH given AS (SELECT * {given}), {insert.instead}"
        return (
            f"INSERT INTO {insert.table} ({names}) SELECT {names} {given} "
            f"ORDER BY number {insert.end}"
        )


# -- methods of a store --------------------------------------------------------------------------


class SqlPart:
    """A part of a SQL store.

    Args:
        terms: the owner and the periods.
        commits: commits the changes.
        readers: run the queries.
    """

    def __init__(self, terms: LeaseTerms, commits: Writes, readers: Reads) -> None:
        self._terms = terms
        self._commits = commits
        self._readers = readers

    async def _read(self, query: Callable[[SqlTransaction], T]) -> T:
        return await self._readers.run(query)


def on_reader(
    query: Callable[Concatenate[SqlTransaction, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method that runs ``query`` on a connection that reads."""

    @wraps(query)
    async def method(self: SqlPart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given: Any = storable([args, kwargs])
        return await self._read(lambda tx: query(tx, *given[0], **given[1]))

    return method


def committed(
    work: Callable[Concatenate[SqlTransaction, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method that runs ``work`` and returns its result when that is committed."""

    @wraps(work)
    async def method(self: SqlPart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._commits.submit(lambda tx: work(tx, *args, **kwargs))

    return method


def committed_by_owner(
    work: Callable[Concatenate[SqlTransaction, LeaseTerms, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method as :func:`committed` does; ``work`` gets the terms of the store, too."""

    @wraps(work)
    async def method(self: SqlPart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        terms = self._terms
        return await self._commits.submit(lambda tx: work(tx, terms, *args, **kwargs))

    return method
