"""Lets a server whose work is counted do only little work of timers.

A program that observes a server makes it up to a hundred times slower. Each delivery would include
as much more work of timers. So Trio's clock becomes slow at the signal SIGUSR2.
"""

import signal
import sys
from contextlib import suppress
from types import FrameType

SLOWER = 1000

# A thread that waits for the interpreter asks for it after 5 ms of the real clock.
sys.setswitchinterval(0.005 * SLOWER)


def _slow_down(_number: int, _frame: FrameType | None) -> None:
    with suppress(ImportError):  # the peers do without Trio
        from trio._core._run import SystemClock

        real = SystemClock.current_time
        begun: dict[SystemClock, float] = {}

        def slow(self: SystemClock) -> float:
            now = real(self)
            begin = begun.setdefault(self, now)
            return begin + (now - begin) / SLOWER

        def to_sleep(self: SystemClock, deadline: float) -> float:
            return (deadline - slow(self)) * SLOWER

        SystemClock.current_time = slow  # type: ignore[method-assign]
        SystemClock.deadline_to_sleep_time = to_sleep  # type: ignore[method-assign]


signal.signal(signal.SIGUSR2, _slow_down)
