"""Lets a server whose work is counted do only little work of timers, and counts its steps.

A program that observes a server makes it up to a hundred times slower. Each delivery would include
as much more work of timers. So Trio's clock becomes slow at the signal SIGUSR2.

With ``BENCHMARK_STEPS``, the instructions of Python's bytecode are counted from that signal on, in
all threads, and their number is in the file that the variable names.
"""

import mmap
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

SLOWER = 1000

# A thread that waits for the interpreter asks for it after 5 ms of the real clock.
sys.setswitchinterval(0.005 * SLOWER)


class _Steps:
    """Counts the instructions of bytecode in a file of eight bytes."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._count = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
        self._counts = False
        # Threads are traced from their start: nothing can trace one that runs.
        threading.settrace(self._enter)

    def begin(self, frame: FrameType | None) -> None:
        """Count from now on, also in the functions of this thread that run already."""
        self._counts = True
        sys.settrace(self._enter)
        while frame is not None:
            frame.f_trace_opcodes, frame.f_trace = True, self._step
            frame = frame.f_back

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode" and self._counts:
            self._count[0] += 1
        return self._step


_steps = _Steps(path) if (path := os.environ.get("BENCHMARK_STEPS")) else None


def _slow_down(_number: int, frame: FrameType | None) -> None:
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
    if _steps is not None:
        _steps.begin(frame)


signal.signal(signal.SIGUSR2, _slow_down)
