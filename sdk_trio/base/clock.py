"""The time: the wall clock, the monotonic clock, and the sleep of a thread.

No other module imports ``time``, so a simulation can replace all three with :func:`use`. Tasks wait
with ``trio.sleep`` and deadlines: their clock is the one passed to ``trio.run``.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Clock(NamedTuple):
    """Three functions, callable from any thread.

    Keep the function itself on a hot path, as in ``self._now = current().wall``: the call then
    costs no more than ``time.time()``.
    """

    #: Returns Unix seconds. The system clock can be set, so the value may jump or go back.
    wall: Callable[[], float] = time.time
    #: Returns seconds that never go back, from an unspecified start.
    monotonic: Callable[[], float] = time.monotonic
    #: Blocks the calling thread for some seconds; never called in the thread of the event loop.
    sleep: Callable[[float], None] = time.sleep


_current = Clock()


def current() -> Clock:
    """Return the clock in use. An object that keeps it does not see a later :func:`use`."""
    return _current


def wall() -> float:
    """Return the time in Unix seconds. It may go back or jump."""
    return _current.wall()


def monotonic() -> float:
    """Return seconds that never go back; only their differences mean something."""
    return _current.monotonic()


def sleep(seconds: float) -> None:
    """Block this thread, which must not be the event loop's, for ``seconds``."""
    _current.sleep(seconds)


@contextmanager
def use(clock: Clock) -> Iterator[None]:
    """Replace the clock of the whole process during the block, in all threads.

    Enter it before the runtime is created: objects keep references to the clock's functions.
    """
    global _current
    before, _current = _current, clock
    try:
        yield
    finally:
        _current = before
