"""Effects in the store's own SQLite file: a job of the committing thread, in a transaction alone.

All deliveries wait meanwhile, so the handler's statements have a budget of time.
"""

import time

import apsw

from ...errors import EffectError
from ...records.deliveries import Done
from ..admission import LeaseTerms
from ..effects import SAVEPOINT, Effects, EffectsFailedError, T, apply, refuse_commit, taken_over
from . import arrivals, writes

#: Time for a handler's statements and the Python between them, in seconds. Every delivery waits
#: for them; a sender gives up after 10 s.
EFFECT_SECONDS = 1.0

#: Instructions of SQLite's virtual machine between two looks at the clock.
_STEPS = 10_000

# Not the handler's failure: the disk or the file is the cause, and no statement of ours would fare
# better.
_FAULTS = (
    apsw.BusyError,
    apsw.CantOpenError,
    apsw.CorruptError,
    apsw.FullError,
    apsw.IOError,
    apsw.NoMemError,
    apsw.NotADBError,
    apsw.ReadOnlyError,
)

_IS_OURS = """
SELECT 1 FROM open WHERE sequence = ? AND lease_owner = ? AND state = 'running'
    AND earlier_attempts + attempts = ?
"""


def conclude(
    connection: apsw.Connection,
    terms: LeaseTerms,
    key: str,
    attempt: int,
    effects: Effects[T],
    now: float,
) -> T:
    """Apply ``effects`` and record that run number ``attempt`` of ours ended well.

    Raises:
        EventTakenOverError: the run is not ours.
        EffectsFailedError: the effects have failed; its ``error`` says why.
    """
    sequence = arrivals.sequence_of(connection, key)
    if sequence is not None:
        # A delivery that was claimed on its arrival, a moment ago, has no row in `open` yet.
        arrivals.settle_one(connection, sequence)
    if connection.execute(_IS_OURS, (sequence, terms.owner, attempt)).fetchone() is None:
        raise taken_over(key)
    connection.execute(f"SAVEPOINT {SAVEPOINT}")
    value = _within_budget(connection, effects)
    try:
        connection.execute(f"RELEASE {SAVEPOINT}")
    except apsw.SQLError:  # there is no such savepoint any more
        refuse_commit()
    writes.finish(connection, terms, key, Done(), now)
    return value


def _within_budget(connection: apsw.Connection, effects: Effects[T]) -> T:
    deadline = time.monotonic() + EFFECT_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    try:
        value = apply(effects, connection)
    except _FAULTS:
        raise
    except apsw.InterruptError as error:
        raise EffectsFailedError(_too_slow()) from error
    except BaseException as error:  # the handler's own, whatever it is
        raise EffectsFailedError(error) from None  # noqa: ASYNC104 - no task runs in this thread
    finally:
        connection.set_progress_handler(None)
    if time.monotonic() > deadline:
        raise EffectsFailedError(_too_slow())
    return value


def _too_slow() -> EffectError:
    return EffectError(
        f"the effects took longer than {EFFECT_SECONDS:g} s, and every delivery waits for them: do "
        "everything but the statements before, or use a database of your own and first_time"
    )
