"""Group commit: the units of work of all tasks, many of them in one transaction.

STUB OF THE INTERFACE - to be implemented (see the task).
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..errors import StoreUnavailableError
from .sql.dialect import Dialect, Transaction

T = TypeVar("T")

ANSWER_SECONDS = 5.0

#: A unit of work: runs in the thread of the engine, within a transaction that it neither begins nor
#: ends. It may run again after a rollback.
Work = Callable[[Transaction], T]

#: Does the work for many items of different keys by few statements; returns their results in order.
Kind = Callable[[Transaction, Sequence[Any]], Sequence[Any]]


class CommitUnknownError(StoreUnavailableError):
    """Nobody knows whether the transaction was committed: it is never run again."""


class Engine(Protocol):
    """A connection that writes. Every method but the properties runs in the commit thread."""

    #: Its name for people: the file, or database and host.
    place: str
    dialect: Dialect
    #: Time that posted work, for which nobody waits, waits for other work to go with, in seconds.
    linger: float

    @property
    def lost(self) -> str | None:
        """The reason for which nothing can be written until a restart; None: all is in order."""
        ...

    def acquire(self) -> None:
        """Wait until this process may write; what is asked for meanwhile joins the batch."""
        ...

    def transact(self, work: Callable[[Transaction], None], *, durable: bool) -> None:
        """Run ``work`` in one transaction and commit it; it may run ``work`` again.

        Args:
            work: runs all units of a batch.
            durable: the commit must survive a power cut, not only the end of this process.

        Raises:
            CommitUnknownError: it may have been committed.
            StoreUnavailableError: the store failed; nothing was changed.
            StoreLostError: the same, until a restart.
            Exception: what ``work`` has raised; nothing was changed.
        """
        ...

    def run_alone(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` with the driver's connection, outside of any transaction.

        Raises:
            as :meth:`transact`.
        """
        ...

    def release(self) -> None:
        """Let other processes write, unless :meth:`upkeep` is due."""
        ...

    def upkeep(self) -> None:
        """Do what is due after a commit, when its callers were answered; then :meth:`release`."""
        ...

    def close(self) -> None:
        """Close the connection; nothing is called afterwards."""
        ...


class Posted(Protocol):
    """Work that nobody waits for."""

    value: Any
    error: BaseException | None
    #: Whether it was committed or has failed.
    finished: bool


class GroupCommit(Generic[T]):
    """Commits what all tasks of this process ask for, through one :class:`Engine`."""

    def __init__(self, engine: Engine, *, name: str) -> None: ...

    async def submit(
        self,
        work: Work[T],
        *,
        patient: bool = False,
        single: bool = False,
        durable: bool = True,
    ) -> T: ...

    async def run_alone(self, work: Callable[[Any], T]) -> T: ...

    async def gather(self, kind: Kind, key: str, item: Any, *, durable: bool = True) -> Any: ...

    def post(self, kind: Kind, key: str, item: Any, *, durable: bool = False) -> Posted: ...

    def withdraw(self, posted: Posted) -> bool: ...

    @property
    def lost(self) -> str | None: ...

    @property
    def failing(self) -> bool: ...

    @property
    def prompt(self) -> bool: ...

    async def close(self) -> None: ...
