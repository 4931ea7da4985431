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
        from trio._core import _run

        real = _run.perf_counter
        begin = real()

        # As short as possible, because it counts: the event loop calls it in each iteration.
        def slow() -> float:
            return begin + (real() - begin) / SLOWER

        def to_sleep(self: _run.SystemClock, deadline: float) -> float:
            return (deadline - self.current_time()) * SLOWER

        _run.perf_counter = slow  # type: ignore[assignment]
        _run.SystemClock.deadline_to_sleep_time = to_sleep  # type: ignore[method-assign]


signal.signal(signal.SIGUSR2, _slow_down)
