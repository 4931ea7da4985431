"""Steps of the wall clock: correct leases and due times when the clock is set.

Due times are on the wall clock. If the clock is set back by an hour, every retry would otherwise be
an hour late.
"""

from collections.abc import Awaitable, Callable
from math import inf

import trio

from ..base import clock
from ..base.logs import get_logger
from ..errors import StoreUnavailableError
from ..storage.open import LEASE_SECONDS
from ..storage.ports import Inbox

_log = get_logger("webhooks")

#: The interval at which the two clocks of this host are compared, in seconds.
WATCH_SECONDS = 0.5

#: The smallest step of the wall clock against the monotonic one, in seconds, that counts as a clock
#: that was set. Time services correct smaller ones all the time.
STEP_SECONDS = 2.0

#: The interval at which this host's clock is compared with the store's, in seconds.
COMPARE_SECONDS = 20.0


#: The longest time from the comparison of the clocks to a takeover of expired leases, in seconds.
TAKE_SECONDS = 1.0


class ClockWatch:
    """Detects that the wall clock was set, and corrects leases and due times.

    Args:
        inbox: the open store.
        clock: returns Unix seconds.
        renew: renews the leases of this process.
    """

    def __init__(
        self, inbox: Inbox, *, clock: Callable[[], float], renew: Callable[[], Awaitable[object]]
    ) -> None:
        self._inbox = inbox
        self._clock = clock
        self._renew = renew
        # Seconds by which the wall clock is ahead of the monotonic clock; None before the start.
        self._offset: float | None = None
        self._set_at = -inf
        self._is_corrected = True
        self._logged_difference = 0.0

    def check(self) -> float:
        """Compare the clocks; return the seconds since the wall clock was set.

        The first call counts as such a time: the clock may have been set just before.
        """
        offset = self._clock() - trio.current_time()
        if self._offset is None:
            self._offset = offset
            self._set_at = trio.current_time()
        step = offset - self._offset
        if abs(step) >= STEP_SECONDS:
            self._offset = offset
            self._set_at = trio.current_time()
            self._is_corrected = False
            _log.warning("runtime.clock_stepped", seconds=round(step, 3))
        return trio.current_time() - self._set_at

    def take_expired_until(self) -> float:
        """Compare the clocks; return until when expired leases of others may be taken over.

        The time is one of ``base.clock.monotonic``: soon, because the clock may be set while the
        store is waited for. -inf for a while after a step of the clock, or after a start: leases
        may only look expired then, because the other processes may not have noticed the step.
        """
        return clock.monotonic() + TAKE_SECONDS if self.check() >= LEASE_SECONDS else -inf

    async def run(self, wake: Callable[[], None]) -> None:
        """Compare the clocks until cancelled, and correct the store after a step.

        ``wake`` makes the queue fetch events that are due by the new time.
        """
        self.check()
        compare_at = trio.current_time()
        while True:
            await trio.sleep(WATCH_SECONDS)
            if trio.current_time() >= compare_at:
                await self._compare_with_store()
                compare_at = trio.current_time() + COMPARE_SECONDS
            self.check()
            if not self._is_corrected:
                await self._correct(wake)

    async def _correct(self, wake: Callable[[], None]) -> None:
        self._is_corrected = True
        try:
            # Leases first: by the new time, ours may look expired, or as if they never ended.
            await self._renew()
            await self._inbox.reschedule(now=self._clock())
        except StoreUnavailableError as error:
            self._is_corrected = False
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
        else:
            wake()

    async def _compare_with_store(self) -> None:
        """Log when this host's clock begins or ceases to differ from the store's."""
        try:
            difference = await self._inbox.clock_offset()
        except StoreUnavailableError:
            await trio.lowlevel.checkpoint()  # other parts report that
            return
        if difference is None or abs(difference - self._logged_difference) < STEP_SECONDS:
            return
        self._logged_difference = difference
        if abs(difference) < STEP_SECONDS:
            _log.info("runtime.clock_agrees", seconds=round(difference, 3))
        else:
            _log.warning(
                "runtime.clock_differs",
                seconds=round(difference, 3),
                hint=(
                    "this host's clock is ahead of the database's by this many seconds (below 0: "
                    "behind); synchronize both (chrony, systemd-timesyncd)"
                ),
            )
