"""Sharing of work between the processes and hosts of one store.

A process leases the events that it accepts and keeps them in memory. That is the fastest way while
all processes are busy. A process that has had free workers for a second, while others hold events
that they have not begun, *asks for work* in the store. The others notice within
:data:`POLL_SECONDS`. For :data:`SHARE_SECONDS` they lease only as many events as they have free
workers for, and in addition what their workers finish in :data:`PREFETCH_SECONDS`. They release the
other events that they have not begun: these wait in the store, where each process claims them.
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

import trio

from ..base.clock import wall
from ..base.logs import get_logger
from ..config import Settings, StorageBackend
from ..errors import StoreUnavailableError
from ..storage.ports import Inbox
from .recording import STORE_RETRY_SECONDS

_log = get_logger("webhooks")

#: The interval in seconds at which a process asks for work, or checks whether another one has.
POLL_SECONDS = 0.5

#: The seconds for which a process must have free workers before it asks for work.
IDLE_SECONDS = 1.0

#: The time in seconds for which work is shared after a process has asked.
SHARE_SECONDS = 60.0

#: The work that a process may lease in advance while it shares: what its workers finish in this
#: time, in seconds. Without any, each run of a fast handler needs a claim of its own.
PREFETCH_SECONDS = 0.1


class SharedPool(Protocol):
    """The part of the worker pool that sharing uses."""

    #: The number of runs that have ended since the start.
    ended_runs: int

    @property
    def has_spare_workers(self) -> bool:
        """Whether workers are free, and nothing waits for them in memory or in the store."""
        ...

    @property
    def depth(self) -> int:
        """The number of events that wait in memory."""
        ...

    async def release_waiting(self) -> int:
        """Release the events in memory that no worker has begun; return how many there were."""
        ...


def is_shared(settings: Settings) -> bool:
    """Return whether other processes may use the store of these settings."""
    return settings.storage.backend is StorageBackend.POSTGRES or settings.server.processes != 1


class Sharing:
    """Asks for work when this process has none, and shares its own when another one has asked.

    Args:
        inbox: the open store.
        pool: the workers of this process.
        clock: returns Unix seconds.
    """

    def __init__(
        self, inbox: Inbox, pool: SharedPool, *, clock: Callable[[], float] = wall
    ) -> None:
        self._inbox = inbox
        self._pool = pool
        self._clock = clock
        self._idle_since: float | None = None
        #: Whether a process has asked for work. It then shares its own events, as all other
        #: processes do.
        self.is_wanted: bool = False
        #: The number of events to lease beyond those that workers are free for.
        self.prefetch: int = 0
        self._polled_at = -inf
        self._ended_runs = 0

    async def run(self) -> None:
        """Poll until cancelled; retry after a failure of the store."""
        while True:
            await trio.sleep(POLL_SECONDS)
            try:
                await self.poll()
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
                await trio.sleep(STORE_RETRY_SECONDS)

    async def poll(self) -> None:
        """Ask for work, or share it, once.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        now = trio.current_time()
        was_wanted = self.is_wanted
        self._measure(now)
        self.is_wanted = await self._inbox.is_work_wanted(now=self._clock())
        if self._pool.has_spare_workers:
            if self._idle_since is None:
                self._idle_since = now
            if now - self._idle_since >= IDLE_SECONDS:
                await self._inbox.ask_for_work(seconds=SHARE_SECONDS, now=self._clock())
            return
        self._idle_since = None
        if not self.is_wanted or self._pool.depth <= self.prefetch:
            return
        if released := await self._pool.release_waiting():
            level = _log.debug if was_wanted else _log.info
            level("queue.shared", events=released)

    def _measure(self, now: float) -> None:
        ended = self._pool.ended_runs
        seconds = max(POLL_SECONDS, now - self._polled_at)
        self.prefetch = int((ended - self._ended_runs) / seconds * PREFETCH_SECONDS)
        self._polled_at, self._ended_runs = now, ended
