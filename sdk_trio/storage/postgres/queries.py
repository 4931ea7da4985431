"""Read-only queries in Trio's threads, on a bounded number of connections."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import attrs
import psycopg
import trio

from ...errors import StoreUnavailableError
from .connect import PostgresAddress, Redial, StoreConnection

T = TypeVar("T")

#: The most queries at once, each on a connection of its own.
READERS = 4

#: Time for an interrupted query to end, in seconds.
CLOSE_SECONDS = 2.0


@attrs.define(eq=False)
class _Reading:
    """A query in progress, and whether its caller has left."""

    connection: StoreConnection | None = None
    abandoned: bool = False


class QueryPool:
    """Up to :data:`READERS` connections that only read.

    A query sees every change that was committed before it began. Each thread gives its connection
    back itself, also when its caller was cancelled, so none is ever lost.
    """

    def __init__(self, address: PostgresAddress) -> None:
        self._address = address
        self._idle: deque[StoreConnection] = deque()
        self._limiter = trio.CapacityLimiter(READERS)
        self._redial = Redial(address.outage)
        self._readings: set[_Reading] = set()
        self._closed = False

    async def run(self, query: Callable[[StoreConnection], T], *, seconds: float = math.inf) -> T:
        """Run ``query`` in a thread and return its result; if it is cancelled, it is interrupted.

        Args:
            query: runs in the thread, and only reads; it may run twice.
            seconds: time limit in seconds.

        Raises:
            StoreUnavailableError: the server failed, or not in time, or this is closed.
        """
        reading = _Reading()
        with trio.move_on_after(seconds):
            try:
                return await trio.to_thread.run_sync(
                    self._read, reading, query, abandon_on_cancel=True, limiter=self._limiter
                )
            except trio.Cancelled:
                reading.abandoned = True
                with trio.move_on_after(CLOSE_SECONDS, shield=True):
                    await _interrupt(reading)
                raise
        # They are as old, and may be half-open as well.
        self._drop_idle()
        raise StoreUnavailableError(
            f"the database {self._address.place} has not answered within {seconds:g} s; try again"
        )

    def _read(self, reading: _Reading, query: Callable[[StoreConnection], T]) -> T:
        again = False
        while True:
            if self._closed:
                raise StoreUnavailableError("the store is closed")
            connection = reading.connection = self._take()
            self._readings.add(reading)
            try:
                with self._address.transaction(connection, reading=True):
                    return query(connection)
            except psycopg.Error as error:
                # A connection from before a restart of the server tells so when it is used.
                if connection.useless and not again and not reading.abandoned:
                    again = True
                    continue
                raise self._address.describe(error) from error
            finally:
                self._readings.discard(reading)
                reading.connection = None
                if self._unusable(reading, connection):
                    connection.close()
                else:
                    self._idle.append(connection)

    def _unusable(self, reading: _Reading, connection: StoreConnection) -> bool:
        # The request to interrupt an abandoned query may be on its way still, and would meet the
        # next one.
        return reading.abandoned or self._closed or connection.useless

    def _drop_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _take(self) -> StoreConnection:
        try:
            return self._idle.pop()
        except IndexError:
            self._redial.require()
        try:
            connection = self._address.connect()
        except StoreUnavailableError as error:
            self._redial.failed(error)
            raise
        self._redial.succeeded()
        return connection

    async def close(self) -> None:
        """Interrupt the queries in progress and close the connections; a second call does nothing.

        It is shielded from cancellation, for ``CLOSE_SECONDS`` at most.
        """
        self._closed = True
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:
                for reading in tuple(self._readings):
                    nursery.start_soon(_interrupt, reading)
            # It is free when every thread has returned.
            self._limiter.total_tokens = 1
            async with self._limiter:
                pass
        await trio.lowlevel.checkpoint()
        self._drop_idle()


async def _interrupt(reading: _Reading) -> None:
    connection = reading.connection
    if connection is None or connection.useless:
        await trio.lowlevel.checkpoint()
        return

    def cancel() -> None:
        try:
            connection.cancel_safe(timeout=CLOSE_SECONDS)
        except psycopg.Error:
            return  # the server does not answer

    try:
        await trio.to_thread.run_sync(cancel, abandon_on_cancel=True)
    finally:
        # No later query gets this connection, and its thread goes on at once.
        connection.cut()
