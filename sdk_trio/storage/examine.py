"""Read-only examination of a store in SQLite, also beside a running daemon.

:func:`examine` is for ``doctor``, :func:`sqlite_status` and :func:`check_sqlite` are for
``storage status`` and ``storage check``, as are their like in ``storage.postgres.examine``.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import attrs

from ..errors import StoreVersionError
from ..records.deliveries import DeliveryState
from .admission import TAKEN_OVER_SECONDS
from .sqlite.connect import connect_reader, describe_failure
from .sqlite.reads import expired_leases
from .sqlite.schema import (
    APPLICATION_ID,
    BUCKET_BITS,
    NOT_DONE,
    UNFINISHED,
    VERSION,
    plan_migration,
)

#: Instructions of SQLite's virtual machine between two looks at the clock.
_STEPS = 20_000

#: Events over which the growth is measured.
_SAMPLE = 10_000


@attrs.frozen(kw_only=True)
class Examination:
    """The findings; times are Unix seconds, sizes bytes. ``parked`` is by reason, then by type.

    ``damage`` is None when the check found none, or had no time to end (``checked`` is False
    then). What follows it is only looked at in a store of this version. ``growth_per_day`` is None
    for an inbox that is too young to tell.
    """

    file: str
    application_id: int
    version: int
    file_size: int
    wal_size: int
    checked: bool
    damage: str | None
    states: dict[DeliveryState, int] = attrs.field(factory=dict)
    oldest_unfinished: float | None = None
    parked: dict[str, dict[str, int]] = attrs.field(factory=dict)
    growth_per_day: float | None = None
    expired_leases: int = 0

    @property
    def is_ours(self) -> bool:
        """Whether it is an inbox of this package."""
        return self.application_id == APPLICATION_ID

    @property
    def is_current(self) -> bool:
        """Whether it has the schema of this version."""
        return self.is_ours and self.version == VERSION


def examine(file: Path, *, now: float, check_seconds: float) -> Examination:
    """Examine the store in ``file``; blocks.

    Args:
        file: the database, which exists.
        now: Unix seconds.
        check_seconds: time for the check for damage, in seconds.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
    """
    with _looking(file) as connection:
        checked, damage = _check(connection, check_seconds)
        known = Examination(
            file=str(file),
            application_id=connection.pragma("application_id"),
            version=connection.pragma("user_version"),
            file_size=file.stat().st_size,
            wal_size=_size(file.with_name(f"{file.name}-wal")),
            checked=checked,
            damage=damage,
        )
        return _with_contents(connection, known, now) if known.is_current else known


@contextmanager
def _looking(file: Path) -> Iterator[apsw.Connection]:
    try:
        connection = connect_reader(str(file))
        try:
            yield connection
        finally:
            connection.close()
    except apsw.Error as error:
        raise describe_failure(error, str(file)) from error


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _check(connection: apsw.Connection, seconds: float) -> tuple[bool, str | None]:
    """Return whether the check came to its end, and the damage that it found."""
    deadline = time.monotonic() + seconds
    # The check of a large store may take long, and people wait for ``doctor``.
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    try:
        answer = str(connection.execute("PRAGMA quick_check(1)").get)
    except apsw.InterruptError:
        return False, None
    finally:
        connection.set_progress_handler(None)
    return True, None if answer == "ok" else answer


def _with_contents(connection: apsw.Connection, known: Examination, now: float) -> Examination:
    # Finished deliveries may be millions: they are not counted.
    states = connection.execute(
        f"SELECT state, count(*) FROM ({NOT_DONE}) GROUP BY state"
    ).fetchall()
    parked: dict[str, dict[str, int]] = {}
    for name, reason, count in connection.execute(
        "SELECT type, open.last_error, count(*) FROM open JOIN arrival USING (sequence) "
        "WHERE open.state = 'parked' GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 20"
    ):
        parked.setdefault(str(reason or "the reason is not kept"), {})[str(name)] = int(str(count))
    oldest = connection.execute(
        "SELECT min(received_at) FROM arrival "
        f"WHERE sequence IN (SELECT sequence FROM ({NOT_DONE}) WHERE {UNFINISHED})"
    ).get
    return attrs.evolve(
        known,
        states={DeliveryState(str(state)): int(str(count)) for state, count in states},
        parked=parked,
        oldest_unfinished=oldest if isinstance(oldest, float) else None,
        growth_per_day=_growth(connection, known.file_size, now),
        expired_leases=expired_leases(connection, now - TAKEN_OVER_SECONDS),
    )


def _growth(connection: apsw.Connection, size: int, now: float) -> float | None:
    """Estimate the growth in bytes a day from the arrival times of the last events."""
    first = connection.execute("SELECT min(sequence) FROM arrival").get
    last = connection.execute("SELECT max(sequence) FROM arrival").get
    if not (isinstance(first, int) and isinstance(last, int)):
        return None
    start = max(first, last - _SAMPLE)
    since = connection.execute(
        "SELECT received_at FROM arrival WHERE sequence >= ? LIMIT 1", (start,)
    )
    hours = (now - float(str(since.get))) / 3600
    if hours < 1:
        return None
    return size * (last - start + 1) / (last - first + 1) / (hours / 24)


# -- storage status and storage check ------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StoreStatus:
    """The answer of ``storage status``; sizes are bytes.

    ``version`` is that of the schema (None: there is none yet), ``known_version`` that of this
    program; the next start brings it there by ``statements``, or is refused by ``refusal``.
    ``log_size`` is that of SQLite's write-ahead log, ``free`` the room in the file that is used
    again, ``dead_rows`` those that PostgreSQL's vacuum has yet to remove; None: not of this engine.
    """

    backend: str
    place: str
    engine: str
    version: int | None
    known_version: int
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


@attrs.frozen
class CheckResult:
    """A rule of ``storage check``, and what breaks it; None: nothing does."""

    rule: str
    found: str | None


def sqlite_status(file: Path) -> StoreStatus:
    """Return the version and the sizes of the store in ``file``, and count its rows; blocks.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
    """
    with _looking(file) as connection:
        names = [
            str(name)
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
                "ORDER BY name"
            )
        ]
        version = connection.pragma("user_version")
        try:
            statements = len(
                plan_migration(
                    application_id=connection.pragma("application_id"),
                    user_version=version,
                    empty=not names,
                    file=str(file),
                )
            )
            refusal = None
        except StoreVersionError as error:
            statements, refusal = 0, str(error)
        return StoreStatus(
            backend="Sqlite",
            place=str(file),
            engine=f"SQLite {apsw.sqlite_lib_version()}",
            version=version or None,
            known_version=VERSION,
            statements=statements,
            refusal=refusal,
            size=file.stat().st_size,
            log_size=_size(file.with_name(f"{file.name}-wal")),
            free=connection.pragma("freelist_count") * connection.pragma("page_size"),
            rows={name: _number(connection, f"SELECT count(*) FROM {name}") for name in names},
        )


def _number(connection: apsw.Connection, statement: str) -> int:
    return int(str(connection.execute(statement).get))


def _orphans(table: str, of: str) -> str:
    return (
        f"SELECT count(*) FROM {table} WHERE NOT EXISTS "
        f"(SELECT 1 FROM {of} WHERE {of}.sequence = {table}.sequence)"
    )


# Each counts rows that break a rule of the schema.
_RULES = {
    "what is open has arrived": _orphans("open", "arrival"),
    "what has ended has arrived": _orphans("outcome", "arrival"),
    "nothing is open and has ended": "SELECT count(*) FROM open JOIN outcome USING (sequence)",
    "each body belongs to a delivery": _orphans("body", "arrival"),
    "each attempt belongs to a delivery": _orphans("attempt", "arrival"),
    "each other body belongs to a delivery": _orphans("evidence", "arrival"),
    # One that leads nowhere belongs to a bucket that is about to be emptied. A missing one is a
    # redelivery that runs again.
    "each delivery is found by its key": f"""
SELECT count(*) FROM arrival WHERE sequence <= (SELECT number FROM tally WHERE name = 'indexed')
    AND NOT EXISTS (SELECT 1 FROM key WHERE key.bucket = arrival.sequence >> {BUCKET_BITS}
        AND key.hash = arrival.hash AND key.sequence = arrival.sequence)
""",
    "the count of deliveries is right": """
SELECT abs(max(coalesce((SELECT max(sequence) FROM arrival), 0),
               (SELECT number FROM tally WHERE name = 'last'))
    - (SELECT number FROM tally WHERE name = 'removed') - (SELECT count(*) FROM arrival))
""",
    "the counts of dead and parked deliveries are right": """
SELECT sum(number <> (SELECT count(*) FROM open WHERE state = name)) FROM tally
WHERE name IN ('dead', 'parked')
""",
    "each message belongs to a transition": _orphans("notification", "outbox"),
}


def check_sqlite(file: Path, tell: Callable[[str], None]) -> list[CheckResult]:
    """Look for damage of the file, and check the rules between its rows; blocks.

    It reads the whole file, so of a large one it takes as long as a copy would; deliveries go on.

    Args:
        file: the database.
        tell: called with what is looked at next.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
        StoreVersionError: it is no store of this version.
    """
    with _looking(file) as connection:
        version = connection.pragma("user_version")
        is_ours = connection.pragma("application_id") == APPLICATION_ID
        if not is_ours or abs(version) != VERSION:
            raise StoreVersionError(
                f"{file} is no store of version {VERSION}: 'storage status' shows what it is"
            )
        # One moment for all of them.
        connection.execute("BEGIN")
        tell("integrity_check")
        lines = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(5)")]
        damage = None if lines == ["ok"] else "; ".join(lines)
        results = [CheckResult("the file is whole", damage)]
        for rule, statement in _RULES.items():
            tell(rule)
            count = _number(connection, statement)
            results.append(CheckResult(rule, f"{count} rows break it" if count else None))
        return results
