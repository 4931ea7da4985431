"""Read-only queries in threads, on a bounded number of connections."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import trio

from ..base.executor import run_in_thread
from ..base.telemetry import Sample
from ..errors import StoreUnavailableError
from .engines import ReadAgainError, Reader
from .sql.dialect import SqlTransaction

T = TypeVar("T")

#: Time for an interrupted query to end, in seconds.
READER_CLOSE_SECONDS = 2.0


def close_all(idle: "deque[Any]") -> None:
    """Close the connections that no thread uses; other threads may add and take some meanwhile."""
    with suppress(IndexError):
        while True:
            idle.pop().close()


class _Reading:
    """A query in progress, and whether its caller has left."""

    reader: Reader | None = None
    abandoned: bool = False


class ReaderPool:
    """Up to ``limit`` connections that only read.

    Each thread gives its connection back itself, also when its caller was cancelled.

    Args:
        connect: opens a connection, in a thread; it raises a
            :class:`~sdk_trio.errors.StoreUnavailableError`.
        place: where the store is, in words.
        limit: the most queries at once, each on a connection of its own.
    """

    def __init__(self, connect: Callable[[], Reader], *, place: str, limit: int) -> None:
        self._connect = connect
        self._place = place
        self._limit = limit
        self._idle: deque[Reader] = deque()
        self._limiter = trio.CapacityLimiter(limit)
        self._readings: set[_Reading] = set()
        self._closed = False

    async def run(self, query: Callable[[SqlTransaction], T], *, seconds: float = math.inf) -> T:
        """Run ``query`` in a thread and return its result; if it is cancelled, it is interrupted.

        Args:
            query: runs in the thread, and only reads; it may run again.
            seconds: time limit in seconds.

        Raises:
            StoreLostError: the store's files are gone or damaged.
            StoreUnavailableError: the store cannot be read, or not in time, or this is closed.
        """
        reading = _Reading()
        with trio.move_on_after(seconds):
            try:
                return await run_in_thread(
                    self._read, reading, query, abandon_on_cancel=True, limiter=self._limiter
                )
            except trio.Cancelled:
                reading.abandoned = True
                with trio.move_on_after(READER_CLOSE_SECONDS, shield=True):
                    await _interrupt(reading)
                raise
        # The other connections are as old, and may be half-open as well.
        close_all(self._idle)
        raise StoreUnavailableError(
            f"the store {self._place} was not read within {seconds:g} s: it does not answer, or a "
            "long listing holds it up; try again"
        )

    def samples(self) -> Iterator[Sample]:
        """Return how many queries have a connection, and how many wait for one."""
        now = self._limiter.statistics()
        yield Sample("sdk_store_readers", (("state", "in_use"),), now.borrowed_tokens)
        yield Sample("sdk_store_readers", (("state", "waiting"),), now.tasks_waiting)

    def _read(self, reading: _Reading, query: Callable[[SqlTransaction], T]) -> T:
        while True:
            self._require_wanted(reading)
            reader = reading.reader = self._take()
            self._readings.add(reading)
            try:
                # Again: before this, there was no query to interrupt.
                self._require_wanted(reading)
                with reader.transaction() as transaction:
                    return query(transaction)
            except ReadAgainError:
                continue
            finally:
                self._readings.discard(reading)
                reading.reader = None
                if self._can_reuse(reading, reader):
                    self._idle.append(reader)
                else:
                    reader.close()

    def _require_wanted(self, reading: _Reading) -> None:
        if self._closed or reading.abandoned:
            raise StoreUnavailableError("the store is closed")

    def _can_reuse(self, reading: _Reading, reader: Reader) -> bool:
        # The request to interrupt an abandoned query may still be on its way, and could interrupt
        # the next one.
        return reader.is_usable and not self._closed and not reading.abandoned

    def _take(self) -> Reader:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    async def close(self) -> None:
        """Interrupt the queries in progress and close the connections; a second call does nothing.

        It is shielded from cancellation, for :data:`READER_CLOSE_SECONDS` at most.
        """
        self._closed = True
        with trio.move_on_after(READER_CLOSE_SECONDS, shield=True):
            await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:
                for reading in tuple(self._readings):
                    nursery.start_soon(_interrupt, reading)
            # It is free when every thread has returned.
            self._limiter.total_tokens = 1
            async with self._limiter:
                pass
        close_all(self._idle)
        await trio.lowlevel.checkpoint()


async def _interrupt(reading: _Reading) -> None:
    reader = reading.reader
    if reader is None or not reader.is_usable:
        await trio.lowlevel.checkpoint()
        return
    await run_in_thread(reader.interrupt, abandon_on_cancel=True)
