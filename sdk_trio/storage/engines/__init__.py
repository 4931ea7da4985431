"""The engines: how SQLite and PostgreSQL run and commit transactions.

An engine knows nothing of deliveries. ``storage.commit`` uses its connection that writes
(:class:`Engine`), ``storage.readers`` those that only read (:class:`Reader`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ...errors import StoreUnavailableError
from ..sql.dialect import SqlTransaction, Version

T = TypeVar("T")


class CommitUnknownError(StoreUnavailableError):
    """The outcome of the commit is unknown: the transaction is never run again."""


class ReadAgainError(StoreUnavailableError):
    """The query has to run again, because the failure may pass at once."""


class Engine(Protocol):
    """A connection that writes; the commit thread runs all but the properties and ``abandon``."""

    #: The place of the store in words: the file, or database and host.
    place: str
    #: The message of a store that does not answer, with the fields ``place`` and ``seconds``.
    stall_message: str
    #: Time that posted work, which no task awaits, waits for other work, in seconds.
    linger: float

    @property
    def version(self) -> Version | None:
        """That of the store in the last transaction (``SqlTransaction.version``), if it has one."""
        ...

    @property
    def lost(self) -> str | None:
        """The reason for which nothing can be written until a restart; None: all is in order."""
        ...

    def acquire(self) -> None:
        """Wait until this process may write; units that arrive meanwhile join the batch."""
        ...

    def transact(
        self, work: Callable[[SqlTransaction], None], *, durable: bool, is_one_unit: bool = False
    ) -> bool:
        """Run ``work`` in one transaction and commit it; it may run ``work`` again.

        Args:
            work: runs all units of a batch.
            durable: the commit must survive a power cut, not only the end of this process.
            is_one_unit: the batch is one grouped unit. If one statement is all of it, that may
                commit itself ("Whole units" in ``sql/dialect.py``).

        Returns:
            False: it had nothing to write, so its success does not prove that the store can write.

        Raises:
            CommitUnknownError: it may have been committed.
            StoreUnavailableError: the store failed; nothing was changed.
            StoreLostError: nothing is written until a restart. A commit may be in files that a
                restart does not open.
            Exception: what ``work`` has raised; nothing was changed.
        """
        ...

    def run_outside_transaction(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` with the driver's connection, outside of any transaction.

        Raises:
            as :meth:`transact`.
        """
        ...

    def release(self) -> bool:
        """Let other processes write; False: not yet, :meth:`upkeep` is due, which does it."""
        ...

    def upkeep(self) -> None:
        """Do maintenance after a commit, once its callers were answered, then :meth:`release`."""
        ...

    def abandon(self) -> bool:
        """Interrupt its wait, from any thread; afterwards only :meth:`close` works.

        Returns:
            False: it cannot be interrupted, and the write in progress may still change the store.
        """
        ...

    def close(self) -> None:
        """Close the connection; nothing is called afterwards."""
        ...


class Reader(Protocol):
    """A connection that only reads, for one thread at a time."""

    @property
    def is_usable(self) -> bool:
        """Whether a further query can use it."""
        ...

    def transaction(self) -> AbstractContextManager[SqlTransaction]:
        """Read in one transaction, which sees every change that was committed before it began.

        Raises:
            ReadAgainError: the failure may pass; it is raised a bounded number of times.
            StoreUnavailableError: the store cannot be read, or the query was interrupted.
        """
        ...

    def interrupt(self) -> None:
        """End the query in progress, or else the next one, with an error; it may block.

        Callable from any thread. The reader is closed afterwards.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
