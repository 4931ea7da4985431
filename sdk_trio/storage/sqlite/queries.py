"""Read-only queries of a SQLite file, in Trio's threads beside the commit thread."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import apsw
import trio

from ...errors import StoreLostError, StoreUnavailableError
from ..engines.files import DAMAGE, may_pass
from .committer import LOOK_AGAIN_SECONDS, Committer
from .connect import connect_reader, describe_failure

T = TypeVar("T")

#: Time for an interrupted query to end when the runner closes, in seconds.
CLOSE_SECONDS = 0.5


class QueryRunner:
    """One reading connection to ``file`` in Trio's threads, one query at a time.

    A query sees every change that was committed before it began. Damage that it finds stops
    ``committer``, too, and a store that the committer has lost is not read any more.
    """

    def __init__(self, file: str, committer: Committer) -> None:
        self._file = file
        self._committer = committer
        self._connection: apsw.Connection | None = None
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._closed = False

    async def run(self, query: Callable[[apsw.Connection], T], *, seconds: float = math.inf) -> T:
        """Run ``query`` in a thread and return its result; if it is cancelled, it is abandoned.

        Args:
            query: runs in the thread, and only reads.
            seconds: time limit in seconds.

        Raises:
            StoreLostError: the store's files are not there any more, or are damaged.
            StoreUnavailableError: the file cannot be read, or not in time, or this is closed.
        """

        def read() -> T:
            # The limiter counts abandoned threads, too: one thread at a time uses the connection.
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
        """Interrupt the query in progress and close the connection; a second call does nothing.

        It is shielded from cancellation, for ``CLOSE_SECONDS`` at most.
        """
        self._closed = True
        connection = self._connection
        if connection is not None:
            # A long listing would else hold up the close until it has read everything.
            connection.interrupt()
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            async with self._one_at_a_time:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
