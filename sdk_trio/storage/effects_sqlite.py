"""Effects in the store's own SQLite file: a job of the committing thread, in a transaction alone.

All deliveries wait meanwhile, so the handler's statements have a budget of time.
"""

from typing import cast

import apsw

from ..base import clock
from ..errors import EffectError
from .effects import SAVEPOINT, Effects, EffectsFailedError, T, apply, refuse_commit, taken_over
from .engines.sqlite import SqliteTransaction
from .sql.deliveries import Lease
from .sql.dialect import Transaction

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
SELECT 1 FROM work WHERE sequence = :sequence AND lease_token = :token AND state = 'running'
    AND earlier_attempts + attempts = :attempt
"""


def apply_within_budget(
    transaction: Transaction,
    key: str,
    lease: Lease | None,
    attempt: int,
    effects: Effects[T],
) -> T:
    """Apply ``effects``, if run number ``attempt`` of the event is still that of ``lease``.

    Raises:
        EventTakenOverError: the run is not ours.
        EffectsFailedError: the effects have failed; its ``error`` says why.
    """
    if lease is None or not transaction.one(_IS_OURS, **lease._asdict(), attempt=attempt):
        raise taken_over(key)
    connection = cast("SqliteTransaction", transaction).connection
    connection.execute(f"SAVEPOINT {SAVEPOINT}")
    value = _within_budget(connection, effects)
    try:
        connection.execute(f"RELEASE {SAVEPOINT}")
    except apsw.SQLError:  # there is no such savepoint any more
        refuse_commit()
    return value


def _within_budget(connection: apsw.Connection, effects: Effects[T]) -> T:
    deadline = clock.monotonic() + EFFECT_SECONDS
    connection.set_progress_handler(lambda: clock.monotonic() > deadline, _STEPS)
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
    if clock.monotonic() > deadline:
        raise EffectsFailedError(_too_slow())
    return value


def _too_slow() -> EffectError:
    return EffectError(
        f"the effects took longer than {EFFECT_SECONDS:g} s, and every delivery waits for them: do "
        "everything but the statements before, or use a database of your own and first_time"
    )
