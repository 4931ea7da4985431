"""Read-only examination of a store, even while a daemon runs.

:func:`examine` is for ``doctor``, :func:`status_of_file` and :func:`check_file` are for ``storage
status`` and ``storage check``. They read SQLite; ``storage.examine_postgres`` is the same for
PostgreSQL, and imports the shared parts from here.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import apsw
import attrs

from ..base import clock
from ..records.deliveries import DeliveryState
from .admission import TAKEN_OVER_SECONDS
from .engines.sqlite_connection import SqliteTransaction, connected
from .sql.admission import lane_of
from .sql.arrivals import HIGHEST, INDEXED, SEGMENT_BITS
from .sql.dialect import SqlTransaction
from .sql.reads import TABLES_ON_SQLITE, counts, expired_leases
from .sql.schema import VERSION, pending_statements, replayable, unfinished
from .sql.versions import StoreState, state_of_file

#: Instructions of SQLite's virtual machine between two reads of the clock.
_INSTRUCTIONS = 20_000

#: Events over which the growth is measured.
_SAMPLE = 10_000

#: Rows of ``work`` whose lanes are compared at once.
_LANES = 5_000


@attrs.frozen(kw_only=True)
class Contents:
    """The contents of a store that need a person's attention.

    Times are Unix seconds. ``parked`` is by reason, then by type. ``growth_per_day`` is in bytes,
    None for an inbox that is too young, and if it is not measured.
    """

    states: Mapping[DeliveryState, int] = attrs.field(factory=dict)
    oldest_unfinished: float | None = None
    parked: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    expired_leases: int = 0
    growth_per_day: float | None = None


@attrs.frozen(kw_only=True)
class Examination:
    """The findings in a file; sizes are bytes.

    ``damage`` is None if the check found none, or ran out of time (``checked`` is then False).
    ``contents`` is None unless the store is of this version.
    """

    file: str
    state: StoreState
    file_size: int
    wal_size: int
    checked: bool
    damage: str | None
    contents: Contents | None = None


def examine(file: Path, *, now: float, check_seconds: float) -> Examination:
    """Examine the store in ``file``; blocks.

    Args:
        file: the database, which exists.
        now: Unix seconds.
        check_seconds: time for the check for damage, in seconds.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
    """
    with connected(str(file)) as connection:
        tx = SqliteTransaction(connection)
        checked, damage = _check(connection, check_seconds)
        known = Examination(
            file=str(file),
            state=state_of_file(connection, str(file)),
            file_size=file.stat().st_size,
            wal_size=_size(f"{file}-wal"),
            checked=checked,
            damage=damage,
        )
        if known.state.version != VERSION:
            return known
        contents = contents_of(tx, before=now - TAKEN_OVER_SECONDS)
        growth = _growth(tx, known.file_size, now)
        return attrs.evolve(known, contents=attrs.evolve(contents, growth_per_day=growth))


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except FileNotFoundError:
        return 0


def _check(connection: apsw.Connection, seconds: float) -> tuple[bool, str | None]:
    """Return whether the check was complete, and the damage that it found."""
    deadline = clock.monotonic() + seconds
    # The check of a large store may take long, and people wait for ``doctor``.
    connection.set_progress_handler(lambda: clock.monotonic() > deadline, _INSTRUCTIONS)
    try:
        answer = str(connection.execute("PRAGMA quick_check(1)").get)
    except apsw.InterruptError:
        return False, None
    finally:
        connection.set_progress_handler(None)
    return True, None if answer == "ok" else answer


_PARKED = f"""
SELECT type, work.last_error, count(*) FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE {replayable()} AND work.state = 'parked'
GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 20
"""

_OLDEST = f"""
SELECT min(received_at) FROM arrival
WHERE sequence IN (SELECT sequence FROM work WHERE {unfinished()})
"""


def contents_of(tx: SqlTransaction, *, before: float) -> Contents:
    """Return the contents; done deliveries may be millions and are not counted.

    Args:
        tx: a transaction on a store of this version.
        before: leases that expired before this Unix time are reported.
    """
    parked: dict[str, dict[str, int]] = {}
    for name, reason, count in tx.all(_PARKED):
        parked.setdefault(reason or "the reason is not kept", {})[name] = count
    (oldest,) = tx.one(_OLDEST) or (None,)
    return Contents(
        states={
            DeliveryState(state): count
            for state, count in tx.all("SELECT state, count(*) FROM work GROUP BY state")
        },
        oldest_unfinished=oldest,
        parked=parked,
        expired_leases=expired_leases(tx, before=before),
    )


# Every arrival has a row in one of these tables, whose rows are small.
_COUNT_SINCE = """
SELECT (SELECT count(*) FROM work WHERE sequence >= :start)
    + (SELECT count(*) FROM ended WHERE sequence >= :start)
"""


def _growth(tx: SqlTransaction, size: int, now: float) -> float | None:
    """Estimate the growth in bytes a day from the arrival times of the last events."""
    (last,) = tx.one("SELECT max(sequence) FROM arrival") or (None,)
    if last is None:
        return None
    start = last - _SAMPLE
    # Counted: the sequences of a store that was moved from PostgreSQL have gaps between its days.
    (sample,) = tx.one(_COUNT_SINCE, start=start) or (0,)
    total = sum(counts(tx).values())
    since = tx.one(
        "SELECT received_at FROM arrival WHERE sequence >= :start ORDER BY sequence LIMIT 1",
        start=start,
    )
    hours = (now - (now if since is None else since[0])) / 3600
    if hours < 1:
        return None
    return float(size * sample / max(total, sample) / (hours / 24))


# -- storage status ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StoreStatus:
    """The answer of ``storage status``; sizes are bytes.

    ``version`` is that of the schema (None: there is none yet), ``known_version`` that of this
    program. The next start upgrades it with that many ``statements``, or is refused with
    ``refusal``. ``log_size`` is that of SQLite's write-ahead log, ``free`` the reusable space in
    the file, ``dead_rows`` the rows that PostgreSQL's vacuum has yet to remove; None: not of this
    engine.
    """

    backend: str
    place: str
    engine: str
    version: int | None
    known_version: int = VERSION
    statements: int
    refusal: str | None
    size: int
    rows: dict[str, int]
    log_size: int | None = None
    free: int | None = None
    dead_rows: int | None = None

    @property
    def next_start(self) -> str:
        """The effect of the next start on the schema, in words."""
        if self.refusal is not None:
            return f"is refused: {self.refusal}"
        if self.version == self.known_version:
            return "changes nothing"
        found = "makes the schema" if self.version is None else f"brings version {self.version}"
        return f"{found} to version {self.known_version} by {self.statements} statements"


def status_of_file(file: Path) -> StoreStatus:
    """Return the version and the sizes of the store in ``file``, and count its rows; blocks.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
    """
    with connected(str(file)) as connection:
        tx = SqliteTransaction(connection)
        rows = tx.all(TABLES_ON_SQLITE)
        state = state_of_file(connection, str(file))
        refusal = state.refusal()
        return StoreStatus(
            backend="Sqlite",
            place=str(file),
            engine=f"SQLite {apsw.sqlite_lib_version()}",
            version=state.version,
            statements=0 if refusal else pending_statements(tx.dialect, state.version),
            refusal=refusal,
            size=file.stat().st_size,
            log_size=_size(f"{file}-wal"),
            free=connection.pragma("freelist_count") * connection.pragma("page_size"),
            rows={name: _number(tx, f'SELECT count(*) FROM "{name}"') for (name,) in rows},
        )


def _number(tx: SqlTransaction, statement: str) -> int:
    (number,) = tx.one(statement) or (0,)
    return int(number or 0)


# -- storage check -------------------------------------------------------------------------------


@attrs.frozen
class CheckResult:
    """A rule of ``storage check``, and the violation; None: there is none."""

    rule: str
    found: str | None


def _orphans(table: str, of: str) -> str:
    return (
        f"SELECT count(*) FROM {table} LEFT JOIN {of} ON {of}.sequence = {table}.sequence "
        f"WHERE {of}.sequence IS NULL"
    )


# Each statement counts rows that violate a rule of the schema.
_RULES = {
    "each delivery is open or ended, and not both": """
SELECT count(*) FROM arrival LEFT JOIN work ON work.sequence = arrival.sequence
    LEFT JOIN ended ON ended.sequence = arrival.sequence
WHERE (work.sequence IS NULL) = (ended.sequence IS NULL)
""",
    "each open delivery has arrived": _orphans("work", "arrival"),
    "each ended delivery has arrived": _orphans("ended", "arrival"),
    "each attempt belongs to a delivery": _orphans("attempt", "arrival"),
    "each other body belongs to a delivery": _orphans("evidence", "arrival"),
    "each message belongs to a transition": _orphans("notification", "outbox"),
}

_SQLITE_RULES = {
    "numbers of audit and outbox lie ahead": """
SELECT count(*) FROM (SELECT 'audit' AS name, max(sequence) AS highest FROM audit
    UNION ALL SELECT 'outbox', max(sequence) FROM outbox) AS given
WHERE highest > coalesce(
    (SELECT seq FROM sqlite_sequence WHERE sqlite_sequence.name = given.name), 0)
""",
    "each delivery is found by its key": f"""
SELECT count(*) FROM arrival WHERE sequence <= {INDEXED} AND NOT EXISTS (
    SELECT 1 FROM segment CROSS JOIN lookup
    WHERE segment.number = arrival.sequence >> {SEGMENT_BITS} AND lookup.segment = segment.number
        AND lookup.entry = 'k' || arrival.delivery_key AND lookup.sequence = arrival.sequence)
""",
    "the count of deliveries is right": f"""
SELECT abs({HIGHEST}
    - (SELECT number FROM tally WHERE name = 'removed') - (SELECT count(*) FROM arrival))
""",
}

_POSTGRESQL_RULES = {
    "numbers of audit and outbox lie ahead": """
SELECT count(*) FROM (SELECT max(sequence) AS highest,
        (SELECT last_value FROM audit_sequence_seq) AS given FROM audit
    UNION ALL SELECT max(sequence), (SELECT last_value FROM outbox_sequence_seq) FROM outbox
    UNION ALL SELECT max(sequence), (SELECT last_value FROM arrival_key_sequence_seq) FROM arrival
) AS numbers WHERE highest > given
""",
    "each key leads to a delivery": _orphans("arrival_key", "arrival"),
    # The keys of a day that is about to be dropped are removed already.
    "each open delivery is found by its key": """
SELECT count(*) FROM work JOIN arrival ON arrival.sequence = work.sequence
    LEFT JOIN arrival_key ON arrival_key.delivery_key = arrival.delivery_key
        AND arrival_key.sequence = arrival.sequence
WHERE arrival_key.sequence IS NULL
""",
    "each partition is known": """
SELECT count(*) FROM pg_inherits LEFT JOIN day
    ON inhrelid = to_regclass(quote_ident(CAST(inhparent::regclass AS text) || '_' || number))
WHERE inhparent IN (to_regclass('arrival'), to_regclass('ended')) AND number IS NULL
""",
    "the count of done deliveries is right": """
SELECT abs((SELECT count(*) FROM ended) - (SELECT sum(done) FROM node))
""",
    "every index is valid": """
SELECT count(*) FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
WHERE relnamespace = to_regnamespace(current_schema()::text) AND NOT indisvalid
""",
}

_IN_LANES = """
SELECT work.sequence, lane, ordered, tenant_id, subject
FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE work.sequence > :after ORDER BY work.sequence LIMIT :limit
"""


def check_rules(tx: SqlTransaction, report: Callable[[str], None]) -> list[CheckResult]:
    """Check the rules between the rows; every row is read once or twice.

    Args:
        tx: a transaction that sees one moment of the store.
        report: called with the name of the next check.
    """
    results = []
    for rule, statement in {
        **_RULES,
        **(_SQLITE_RULES if tx.dialect.is_sqlite else _POSTGRESQL_RULES),
    }.items():
        report(rule)
        results.append(_result(rule, _number(tx, statement)))
    rule = "ordered deliveries are in their lane"
    report(rule)
    results.append(_result(rule, _count_outside_lanes(tx)))
    return results


def _result(rule: str, count: int) -> CheckResult:
    return CheckResult(rule, f"{count} rows break it" if count else None)


def _count_outside_lanes(tx: SqlTransaction) -> int:
    count = last = 0
    while rows := tx.all(_IN_LANES, after=last, limit=_LANES):
        for _, lane, ordered, tenant_id, subject in rows:
            count += (None if lane is None else bytes(lane)) != lane_of(ordered, tenant_id, subject)
        last = rows[-1][0]
    return count


def check_file(file: Path, report: Callable[[str], None]) -> Sequence[CheckResult]:
    """Check the file for damage, and the rules between its rows; blocks.

    It reads the whole file, which takes as long as a copy of it; deliveries continue.

    Args:
        file: the database.
        report: called with the name of the next check.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
        StoreVersionError: it is not a store of this version.
    """
    with connected(str(file)) as connection:
        tx = SqliteTransaction(connection)
        state_of_file(connection, str(file)).require_current_or_moved()
        # One snapshot for all of them.
        connection.execute("BEGIN")
        report("integrity_check")
        lines = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(5)")]
        damage = None if lines == ["ok"] else "; ".join(lines)
        return [CheckResult("the file is whole", damage), *check_rules(tx, report)]
