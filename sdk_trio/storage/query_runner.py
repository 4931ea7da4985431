"""Runs what only reads a SQLite file, beside the thread that commits."""

from collections.abc import Callable
from typing import TypeVar

import apsw
import trio

from ..errors import StoreUnavailableError
from .committer import STALL_SECONDS
from .sqlite_connector import connect_reader, describe_failure

T = TypeVar("T")


class QueryRunner:
    """One reading connection to ``file`` in Trio's threads, one query at a time.

    It sees every change that was committed before the query began.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._connection: apsw.Connection | None = None
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._closed = False

    async def run(self, query: Callable[[apsw.Connection], T]) -> T:
        """Return what ``query`` returns; cancelled, it is abandoned.

        Raises:
            StoreUnavailableError: the file cannot be read, or this is closed.
        """

        def read() -> T:
            # Within the limiter, so there is one thread here at a time, an abandoned one included.
            if self._closed:
                raise StoreUnavailableError("the store is closed")
            try:
                if self._connection is None:
                    self._connection = connect_reader(self._file)
                return query(self._connection)
            except apsw.Error as error:
                raise describe_failure(error, self._file) from error

        return await trio.to_thread.run_sync(
            read, abandon_on_cancel=True, limiter=self._one_at_a_time
        )

    async def close(self) -> None:
        """Close the connection once the query in progress has ended; a second call does nothing.

        Shielded from cancellation, for ``STALL_SECONDS`` at most.
        """
        self._closed = True
        with trio.move_on_after(STALL_SECONDS, shield=True):
            async with self._one_at_a_time:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
