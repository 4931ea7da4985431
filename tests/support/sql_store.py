"""A store in SQLite without files, threads or a runtime, for tests of its statements."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw

from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines.sqlite_connection import (
    SQLITE,
    SqliteTransaction,
    configure,
)
from sdk_trio.storage.sql import runs
from sdk_trio.storage.sql.schema import statements

TERMS = LeaseTerms(owner="here", lease_seconds=10.0, dedup_seconds=30.0, payload_seconds=60.0)


def new_store() -> SqliteTransaction:
    """Return a transaction, which commits each statement, on an empty store in memory."""
    connection = apsw.Connection(":memory:")
    configure(connection)
    for statement in statements(SQLITE):
        connection.execute(statement)
    return SqliteTransaction(connection)


def value(tx: SqliteTransaction, query: str) -> Any:
    """Return the only value of ``query``."""
    ((found,),) = tx.all(query)
    return found


def add_done(tx: SqliteTransaction, incoming: Iterable[NewDelivery], *, at_once: int = 100) -> None:
    """Record deliveries together with their inline runs, which took a second."""
    done = [runs.Ran(each, 1, each.received_at + 1.0) for each in incoming]
    for first in range(0, len(done), at_once):
        runs.add_done(tx, TERMS, done[first : first + at_once])


def steps_of(tx: SqliteTransaction, work: Callable[[], object]) -> int:
    """Return the steps of SQLite's virtual machine for ``work``, which do not depend on load."""
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    tx.connection.set_progress_handler(count, 1)
    try:
        work()
    finally:
        tx.connection.set_progress_handler(None)
    return steps


@contextmanager
def plans(tx: SqliteTransaction) -> Iterator[dict[str, list[str]]]:
    """Collect the plan of each statement of the block, by the statement."""
    found: dict[str, list[str]] = {}

    def note(_cursor: object, statement: str, _bindings: object) -> bool:
        if re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", statement):
            found[statement] = []
        return True

    tx.connection.set_exec_trace(note)
    try:
        yield found
    finally:
        tx.connection.set_exec_trace(None)
    for statement, plan in found.items():
        names = re.findall(r"(?<![:\w]):(\w+)", statement)
        values: Any = dict.fromkeys(names) if names else (None,) * statement.count("?")
        explained = tx.connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)
        plan += [str(row[3]) for row in explained]
