"""Virtual time and seeded randomness, instead of the system's."""

import gc
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import trio.testing

from ...base import clock
from ...storage.sql import admission
from .scheduler import Timers

#: The wall clock at the beginning of each simulation, in Unix seconds: 2026-01-01, midnight UTC.
BEGIN = 1_767_225_600.0

#: The process id in each simulation.
PROCESS_ID = 1000


class VirtualTime:
    """The time of one simulation. It advances only while every task waits.

    ``offset_of`` returns the error of the current host's wall clock, in seconds.
    """

    def __init__(self, offset_of: Callable[[], float]) -> None:
        self._timers = Timers()
        #: The clock for ``trio.run``.
        self.trio_clock: trio.testing.MockClock = self._timers.clock
        self._offset_of = offset_of
        self._system = clock.current()

    def now(self) -> float:
        """Return the virtual seconds since the beginning."""
        return self._timers.now

    def wall(self) -> float:
        """Return the wall clock of the current host, in Unix seconds."""
        return BEGIN + self._timers.now + self._offset_of()

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass while the caller blocks; no other task runs meanwhile.

        Another thread of the program, which the simulation does not know, sleeps for real.
        """
        if self._timers.run_here():
            self._timers.jump(max(0.0, seconds))
        else:
            self._system.sleep(seconds)

    def nanoseconds(self) -> int:
        """Return :meth:`now` in nanoseconds."""
        return int(self.now() * 1e9)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the clock of the package, and the functions of ``time``, for the block."""
        with ExitStack() as stack:
            stack.enter_context(self._timers.in_use())
            stack.enter_context(clock.use(clock.Clock(self.wall, self.now, self.sleep)))
            replaced: dict[str, Callable[..., Any]] = {
                "time": self.wall,
                "time_ns": lambda: int(self.wall() * 1e9),
                "sleep": self.sleep,
            }
            for name in ("monotonic", "perf_counter"):
                replaced |= {name: self.now, f"{name}_ns": self.nanoseconds}
            for name, function in replaced.items():
                stack.enter_context(patch.object(time, name, function))
            yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw all randomness of the process from ``seed`` within the block.

    That is ``random``, ``secrets``, ``os.urandom``, ``uuid.uuid4``, the tokens of leases, and the
    process id. The garbage collector is off meanwhile, because it would run finalizers at random
    moments.
    """
    source = random.Random(f"{seed}/urandom")

    def urandom(size: int) -> bytes:
        return source.randbytes(size)

    state = random.getstate()
    collected = gc.isenabled()
    with ExitStack() as stack:
        stack.enter_context(patch.object(os, "urandom", urandom))
        stack.enter_context(patch.object(random, "_urandom", urandom))
        stack.enter_context(
            patch.object(uuid, "uuid4", lambda: uuid.UUID(bytes=urandom(16), version=4))
        )
        stack.enter_context(patch.object(os, "getpid", lambda: PROCESS_ID))
        random.seed(f"{seed}/random")
        admission._tokens.seed(f"{seed}/tokens")
        gc.disable()
        try:
            yield
        finally:
            random.setstate(state)
            admission._tokens.seed()
            if collected:
                gc.enable()
