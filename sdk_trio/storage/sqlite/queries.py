"""Runs what only reads a SQLite file, beside the thread that commits."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import apsw
import trio

from ...errors import StoreLostError, StoreUnavailableError
from .committer import LOOK_AGAIN_SECONDS, Committer
from .connect import connect_reader, describe_failure
from .files import DAMAGE, may_pass

T = TypeVar("T")

#: How long ``close`` waits for a query that was interrupted, in seconds.
CLOSE_SECONDS = 0.5


class QueryRunner:
    """One reading connection to ``file`` in Trio's threads, one query at a time.

    It sees every change that was committed before the query began. Damage that it finds stops
    ``committer``, too, and what that has lost is not read any more.
    """

    def __init__(self, file: str, committer: Committer) -> None:
        self._file = file
        self._committer = committer
        self._connection: apsw.Connection | None = None
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._closed = False

    async def run(self, query: Callable[[apsw.Connection], T], *, seconds: float = math.inf) -> T:
        """Return what ``query`` returns; cancelled, it is abandoned.

        Args:
            query: runs in the thread, and only reads.
            seconds: how long it may take.

        Raises:
            StoreLostError: the store's files are not there any more, or are damaged.
            StoreUnavailableError: the file cannot be read, or not in time, or this is closed.
        """

        def read() -> T:
            # Within the limiter, so there is one thread here at a time, an abandoned one included.
            begun = time.monotonic()
            while True:
                if self._closed:
                    raise StoreUnavailableError("the store is closed")
                if self._committer.lost is not None:
                    raise StoreLostError(self._committer.lost)
                try:
                    if self._connection is None:
                        self._connection = connect_reader(self._file)
                    return query(self._connection)
                except DAMAGE as error:
                    if not may_pass(self._file, begun):
                        lost = StoreLostError(str(describe_failure(error, self._file)))
                        self._committer.lose(lost)
                        raise lost from error
                except apsw.Error as error:
                    raise describe_failure(error, self._file) from error
                time.sleep(LOOK_AGAIN_SECONDS)

        with trio.move_on_after(seconds):
            return await trio.to_thread.run_sync(
                read, abandon_on_cancel=True, limiter=self._one_at_a_time
            )
        raise StoreUnavailableError(
            f"the store {self._file} was not read within {seconds:g} s: its disk hangs, or a long "
            "listing holds it up; try again"
        )

    async def close(self) -> None:
        """Close the connection, after an end of the query in progress; again does nothing.

        Shielded from cancellation, for ``CLOSE_SECONDS`` at most.
        """
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            async with self._one_at_a_time:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
