"""The watchdog of the event loop: a thread that reports a blocked loop and the code that blocks it.

Twice a second the thread polls the loop and waits for its answer. A handler that computes or waits
without ``await`` blocks every other delivery, probe and deadline, and code in the loop itself could
report that only afterwards. The watchdog adds no cost to a delivery.
"""

import sys
import threading
from collections.abc import Callable, Iterator

import trio

from ..base.clock import monotonic
from ..base.executor import start_thread
from ..base.logs import get_logger
from ..base.telemetry import Sample
from ..webhooks.invocation import Run, run_in
from ..webhooks.outcomes import place_in

_log = get_logger("runtime")

#: Time between two polls of the loop, in seconds.
ASK_SECONDS = 0.5

#: Time for the loop to answer, in seconds. A sender waits for ten, a probe often for one.
BLOCKED_SECONDS = 1.0

#: If the thread itself wakes up later than this, in seconds, the whole process was stopped, for
#: example on a suspended machine, and the loop was not blocked.
LATE_SECONDS = 0.5


class Watchdog:
    """Watches the loop that runs the ``with`` block.

    Args:
        blocked_seconds: time for the loop to answer.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        blocked_seconds: float = BLOCKED_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._blocked_seconds = blocked_seconds
        self._clock = clock
        self._over = threading.Event()
        self._times = 0
        self._seconds = 0.0

    def __enter__(self) -> "Watchdog":
        token = trio.lowlevel.current_trio_token()
        # A daemon thread: the process can end even while the loop is blocked.
        start_thread(self._watch, token, threading.get_ident(), name="sdk_trio-watchdog")
        return self

    def __exit__(self, *_: object) -> None:
        # The thread ends within ASK_SECONDS; joining it would block the loop.
        self._over.set()

    def samples(self) -> Iterator[Sample]:
        """Yield how often and for how long the loop was blocked."""
        yield Sample("sdk_runtime_blocked_total", (), self._times)
        yield Sample("sdk_runtime_blocked_seconds_total", (), self._seconds)

    def _watch(self, token: trio.lowlevel.TrioToken, loop: int) -> None:
        while not self._over.wait(ASK_SECONDS):
            answered = threading.Event()
            asked = self._clock()
            try:
                token.run_sync_soon(answered.set)
            except trio.RunFinishedError:
                return
            if not self._answers(answered, asked):
                self._follow(answered, asked, loop)

    def _answers(self, answered: threading.Event, asked: float) -> bool:
        """Wait for the loop's answer; return False if none came within ``blocked_seconds``."""
        while not answered.wait(self._blocked_seconds):
            waited = self._clock() - asked
            if waited < self._blocked_seconds + LATE_SECONDS:
                return False
            asked += waited  # this thread was stopped as well: count from now on
        return True

    def _follow(self, answered: threading.Event, asked: float, loop: int) -> None:
        run, place = code_of(loop)
        _log.warning(
            "runtime.blocked",
            seconds=round(self._clock() - asked, 1),
            handler=None if run is None else run.handler,
            webhook_id=None if run is None else run.webhook_id,
            place=place,
            hint=(
                "nothing else can run meanwhile; write a blocking handler as a plain def, which "
                "runs in a thread: a coroutine must not block"
            ),
        )
        self._times += 1
        counted = 0.0
        while not answered.wait(ASK_SECONDS) and not self._over.is_set():
            counted = self._count(asked, counted)
        counted = self._count(asked, counted)
        _log.info("runtime.unblocked", seconds=round(counted, 1))

    def _count(self, asked: float, counted: float) -> float:
        blocked = self._clock() - asked
        self._seconds += blocked - counted
        return blocked


def code_of(thread: int) -> tuple[Run | None, str | None]:
    """Return the handler that a thread runs now, and the current line of the user's code."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    return run_in(frame for frame, _ in frames), place_in(frames)
