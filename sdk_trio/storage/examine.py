"""Read-only examination of a store in SQLite for ``doctor``, also beside a running daemon."""

import time
from pathlib import Path

import apsw
import attrs

from ..records.deliveries import DeliveryState
from .sqlite.arrivals import sequence_of
from .sqlite.connect import connect_reader, describe_failure
from .sqlite.schema import APPLICATION_ID, NOT_DONE, UNFINISHED, VERSION

#: Instructions of SQLite's virtual machine between two looks at the clock.
_STEPS = 20_000

#: Events over which the growth is measured.
_SAMPLE = 10_000

_DAY = 86_400.0


@attrs.frozen(kw_only=True)
class Examination:
    """The findings; times are Unix seconds, sizes bytes.

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
    parked_types: dict[str, int] = attrs.field(factory=dict)
    growth_per_day: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is an inbox of this package."""
        return self.application_id == APPLICATION_ID

    @property
    def is_current(self) -> bool:
        """Whether it has the schema of this version."""
        return self.is_ours and self.version == VERSION


def examine(file: Path, *, now: float, check_seconds: float, besides: str = "") -> Examination:
    """Examine the store in ``file``; blocks.

    Args:
        file: the database, which exists.
        now: Unix seconds.
        check_seconds: time for the check for damage, in seconds.
        besides: the key of an event that is not counted, such as a probe's own.

    Raises:
        StoreUnavailableError: it cannot be opened or read.
    """
    try:
        connection = connect_reader(str(file))
        try:
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
            return _with_contents(connection, known, now, besides) if known.is_current else known
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


def _with_contents(
    connection: apsw.Connection, known: Examination, now: float, besides: str
) -> Examination:
    # Finished deliveries may be millions: they are not counted.
    sequence = sequence_of(connection, besides)
    states = connection.execute(
        f"SELECT state, count(*) FROM ({NOT_DONE}) WHERE sequence IS NOT ? GROUP BY state",
        (sequence,),
    ).fetchall()
    parked = connection.execute(
        "SELECT type, count(*) FROM open JOIN arrival USING (sequence) "
        "WHERE open.state = 'parked' AND sequence IS NOT ? "
        "GROUP BY type ORDER BY 2 DESC LIMIT 20",
        (sequence,),
    ).fetchall()
    oldest = connection.execute(
        "SELECT min(received_at) FROM arrival "
        f"WHERE sequence IN (SELECT sequence FROM ({NOT_DONE}) WHERE {UNFINISHED})"
    ).get
    return attrs.evolve(
        known,
        states={DeliveryState(str(state)): int(str(count)) for state, count in states},
        parked_types={str(name): int(str(count)) for name, count in parked},
        oldest_unfinished=oldest if isinstance(oldest, float) else None,
        growth_per_day=_growth(connection, known.file_size, now),
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
