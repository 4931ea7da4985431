"""Effects: what a handler writes into the store's own database, together with the event's end.

Both are one transaction, so an effect is applied once however often the process dies and the event
is run again. The transaction first makes sure that the event is still ours, by the token of its
lease and the number of its run; on PostgreSQL that also locks the event's row, so no other process
takes it meanwhile.
"""

import inspect
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec

from ..errors import EffectError, EventTakenOverError

if TYPE_CHECKING:
    # Only type checkers know defaults of type variables before Python 3.13.
    from typing_extensions import TypeVar as TypeVarWithDefault

    from ..records.deliveries import Lease
    from .sql.dialect import SqlTransaction

    ConnectionT = TypeVarWithDefault("ConnectionT", default=Any)
else:
    ConnectionT = TypeVar("ConnectionT")

T = TypeVar("T")

#: The name of the savepoint around a handler's statements: if it is gone, they have committed.
SAVEPOINT = "sdk_trio_effects"


class Transaction(msgspec.Struct, Generic[ConnectionT], frozen=True):
    """The open transaction that a handler's effects belong to.

    ``connection`` is a ``psycopg.Connection`` where the store is in PostgreSQL, an
    ``apsw.Connection`` where it is in SQLite: annotate it as ``Transaction[psycopg.Connection]``
    for type checkers. The library commits; do not use the connection afterwards.
    """

    connection: ConnectionT


#: Writes the effects of an event with a transaction's connection; its result is returned.
Effects = Callable[[Transaction[Any]], T]


class EffectsFailedError(Exception):
    """Carries the exception of a handler's statements through the store's own code.

    The store's code reads class, truth and traceback of exceptions; a handler's exception may raise
    there.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def in_this_context(effects: Effects[T]) -> Effects[T]:
    """Return ``effects`` bound to the current context variables, for a call in another thread."""
    context = copy_context()
    return lambda transaction: context.run(effects, transaction)


def apply(effects: Effects[T], connection: object) -> T:
    """Call ``effects`` with a transaction on ``connection``.

    Raises:
        EffectError: it is asynchronous, so it would run after the transaction.
    """
    value = effects(Transaction(connection))
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise EffectError(
            "effects are applied by a plain function: write `def` instead of `async def`, and "
            "await everything else before"
        )
    return value


def refuse_commit() -> NoReturn:
    """Raise the error of a handler that has ended the transaction itself."""
    raise EffectError(
        "the handler has ended the transaction (COMMIT, ROLLBACK or BEGIN): its effects may be "
        "committed and the event is not done, so they would be applied again; leave the commit to "
        "the library"
    )


# On PostgreSQL this is the lock of an update, so claims and renewals skip the row. The token is the
# fence; the number makes sure that it is the run whose event the handler has.
_LOCK_RUN = """
SELECT 1 FROM work WHERE sequence = :sequence AND lease_token = :token AND state = 'running'
    AND earlier_attempts + attempts = :attempt FOR NO KEY UPDATE
"""


def require_ours(tx: "SqlTransaction", lease: "Lease", attempt: int) -> None:
    """Lock the event, if ``lease`` still holds its run number ``attempt``.

    Raises:
        EventTakenOverError: it does not.
    """
    if not tx.one(_LOCK_RUN, sequence=lease.sequence, token=lease.token, attempt=attempt):
        raise EventTakenOverError(
            f"the event {lease.key} no longer belongs to this run: another process has taken it "
            "over, or it is done; nothing was applied here"
        )
