"""Markers: rows that make the effects of an event apply once, in any database.

A marker is written in the caller's own transaction, beside the effects, so both are committed or
neither is. A second run of the same event, at any time, finds the marker of the first and applies
nothing. Markers are never removed automatically: they outlive the inbox's record of the event, so
even a delivery that is years late is harmless.
"""

import sys
from collections.abc import Sequence
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any

from ..base import clock
from ..errors import EffectError
from ..events import Event

#: The statement that creates the table of the markers, for PostgreSQL and SQLite; a no-op if it
#: exists. Give it to the tool that migrates the database.
MARKERS_SCHEMA = """\
CREATE TABLE IF NOT EXISTS sdk_trio_marker (
    event_key varchar(300) NOT NULL,
    generation integer NOT NULL,
    effect varchar(100) NOT NULL,
    applied_at double precision NOT NULL,
    PRIMARY KEY (event_key, generation, effect)
)"""

# Of two transactions that insert the same marker at once, PostgreSQL makes the second one wait
# until the first has ended; SQLite has only one writer.
_INSERT = """
INSERT INTO sdk_trio_marker (event_key, generation, effect, applied_at)
VALUES ({0}, {0}, {0}, {0}) ON CONFLICT DO NOTHING
"""

_DELETE = "DELETE FROM sdk_trio_marker WHERE applied_at < {0}"

_KNOWN_DATABASES = ("postgresql", "sqlite")

#: Placeholders by the ``paramstyle`` of a driver (PEP 249).
_PLACEHOLDERS = {"qmark": "?", "format": "%s", "pyformat": "%s"}

_NO_TRANSACTION = (
    "the connection commits each statement separately, so the marker would stay if the effects "
    "fail: begin a transaction first, {how}, and apply the effects in the same one"
)

_SAVEPOINT_COMMITS = (
    "sqlite3 begins no transaction before a savepoint, so the end of begin_nested() may commit "
    "the marker before the effects: call first_time before begin_nested(), or let SQLAlchemy "
    "begin transactions, as its documentation of SQLite shows"
)


def first_time(connection: Any, event: Event[Any], *, effect: str = "") -> bool:
    """Mark ``event`` as applied, in the caller's transaction; return whether this is the first
    time.

    ``if sdk_trio.first_time(session, event): session.add(Access(...))``, and the caller commits as
    usual. A retry, a redelivery and the replay of a dead event are the same event; a done event
    that is deliberately run again (``events replay --again``) is its next generation and is applied
    again. The table must exist: see :data:`MARKERS_SCHEMA`. Recipes: docs/how-to/exactly-once.md.

    Args:
        connection: a connection to the database with the effects, in a transaction: a connection of
            ``psycopg``, ``sqlite3`` or another driver of PEP 249, a ``Connection`` or ``Session``
            of SQLAlchemy, or ``django.db.connection``; for PostgreSQL or SQLite.
        event: the event that is being handled.
        effect: distinguishes several effects of one event that are committed separately; at most
            100 characters.

    Raises:
        EffectError: there is no transaction or no table, or the connection has another kind.
        Exception: an error of the driver; the transaction and the run then fail.

    Blocks for one statement. On PostgreSQL it waits for another transaction that is applying the
    same event.
    """
    values = (event.key, event.generation, effect, clock.wall())
    done = _execute(connection, _INSERT, values)
    if done not in (0, 1):
        raise EffectError(
            f"{type(connection).__qualname__} does not report whether the marker was written "
            f"(rowcount {done}): use it outside of a pipeline"
        )
    return bool(done)


def forget_markers(connection: Any, *, before: datetime) -> int:
    """Remove the markers that were written before that time; return their number.

    A later run of such an event applies its effects again: keep markers for longer than senders
    repeat deliveries and operators replay events. It reads the whole table.

    Args:
        connection: as for :func:`first_time`; the caller commits.
        before: an aware time.

    Raises:
        EffectError: as for :func:`first_time`.
    """
    return _execute(connection, _DELETE, (before.timestamp(),))


def _execute(connection: Any, statement: str, values: Sequence[Any]) -> int:
    """Execute a statement on any kind of connection and return the number of changed rows."""
    packages = {each.__module__.partition(".")[0] for each in type(connection).__mro__}
    try:
        if "sqlalchemy" in packages:
            return _execute_by_sqlalchemy(connection, statement, values)
        if "django" in packages:
            return _execute_by_django(connection, statement, values)
        if "apsw" in packages:
            _require_transaction(connection)
            connection.execute(statement.format("?"), values)
            return int(connection.changes())
        modules = (sys.modules.get(package) for package in packages)
        styles = (getattr(module, "paramstyle", "") for module in modules)
        placeholder = next((_PLACEHOLDERS[each] for each in styles if each in _PLACEHOLDERS), None)
        asynchronous = iscoroutinefunction(getattr(connection, "execute", None))
        if placeholder is None or asynchronous or not hasattr(connection, "cursor"):
            raise _unknown(connection)
        _require_transaction(connection)
        return _execute_by_cursor(connection, statement.format(placeholder), values)
    except EffectError:
        raise
    except Exception as error:
        message = str(error)
        if "sdk_trio_marker" in message and ("no such table" in message or "not exist" in message):
            raise EffectError(
                "the database has no table sdk_trio_marker: execute sdk_trio.MARKERS_SCHEMA in it "
                "once, best as a step of its migrations"
            ) from error
        raise


def _execute_by_sqlalchemy(connection: Any, statement: str, values: Sequence[Any]) -> int:
    if ".asyncio" in type(connection).__module__:
        raise EffectError(
            f"{type(connection).__qualname__} is asynchronous: write `await "
            "session.run_sync(sdk_trio.first_time, event)`"
        )
    # A session has a method `connection`, a connection has an attribute of that name.
    if callable(getattr(connection, "connection", None)):
        connection = connection.connection()
    if not hasattr(connection, "exec_driver_sql"):
        raise _unknown(connection)
    dialect = connection.dialect
    _require_known(dialect.name)
    pooled = connection.connection
    # asyncpg itself lacks the methods that SQLAlchemy's adapter has.
    for driver in (pooled.driver_connection, pooled.dbapi_connection):
        _require_transaction(driver, "`with engine.begin()`")
    if connection.in_nested_transaction() and _begins_late(pooled.driver_connection):
        raise EffectError(_SAVEPOINT_COMMITS)
    placeholder = _PLACEHOLDERS.get(dialect.paramstyle)
    if placeholder is None:
        raise _unknown(connection)
    done: int = connection.exec_driver_sql(statement.format(placeholder), tuple(values)).rowcount
    return done


def _execute_by_django(connection: Any, statement: str, values: Sequence[Any]) -> int:
    if not hasattr(connection, "get_autocommit"):
        raise _unknown(connection)
    _require_known(connection.vendor)
    if connection.get_autocommit():
        raise EffectError(_NO_TRANSACTION.format(how="`with transaction.atomic()`"))
    # Its cursors take the same placeholder for every database.
    return _execute_by_cursor(connection, statement.format("%s"), values)


def _execute_by_cursor(connection: Any, statement: str, values: Sequence[Any]) -> int:
    cursor = connection.cursor()
    try:
        cursor.execute(statement, values)
        done: int = cursor.rowcount
    finally:
        cursor.close()
    return done


def _require_transaction(driver: Any, how: str = "`with connection.transaction()`") -> None:
    if hasattr(driver, "in_transaction"):  # sqlite3 and apsw
        by_itself = getattr(driver, "isolation_level", None) is None
        if not driver.in_transaction and (by_itself or getattr(driver, "autocommit", 0) is True):
            raise EffectError(_NO_TRANSACTION.format(how="by BEGIN"))
        return
    status = getattr(getattr(driver, "info", None), "transaction_status", 0)
    # 0 is libpq's number of a connection outside of a transaction.
    if getattr(driver, "autocommit", False) is True and status == 0:
        raise EffectError(_NO_TRANSACTION.format(how=how))


def _begins_late(driver: Any) -> bool:
    """Return whether it is a sqlite3 connection that begins a transaction only before a write."""
    by_itself = getattr(driver, "isolation_level", None) is None
    return hasattr(driver, "in_transaction") and not (
        by_itself or getattr(driver, "autocommit", -1) is False
    )


def _require_known(database: str) -> None:
    if database not in _KNOWN_DATABASES:
        raise EffectError(
            f"markers are written to {' and '.join(_KNOWN_DATABASES)}, and this is {database}"
        )


def _unknown(connection: object) -> EffectError:
    kind = type(connection)
    return EffectError(
        f"{kind.__module__}.{kind.__qualname__} is not a connection that first_time knows: give a "
        "blocking connection of psycopg, sqlite3 or another driver of PEP 249, a Connection or "
        "Session of SQLAlchemy, or django.db.connection"
    )
