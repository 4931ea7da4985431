"""Deterministic scheduling in Trio, and hosts whose tasks can be frozen.

Trio has no public interface for either. Only this file uses Trio's private parts;
:func:`require_trio` raises if a release of Trio has changed them.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import trio
import trio.testing
from trio._core import _run

from ...errors import NotSupportedError

#: The names of the private parts of Trio in use, by the object that has them.
_PRIVATE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_run, ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r", "GLOBAL_RUN_CONTEXT", "Runner", "Task")),
    (_run.Runner, ("reschedule", "runq")),
    (_run.Deadlines, ("expire", "next_deadline")),
    (trio.testing.MockClock, ("_autojump",)),
    (_run.Task, ("_abort_func", "_next_send_fn", "_counter")),
)


_SLEEP_UNTIL = trio.sleep_until

#: After this many rounds of the scheduler at one virtual time, tasks are considered livelocked.
MOST_ROUNDS = 20_000


def require_trio() -> None:
    """Raise :class:`NotSupportedError` if this release of Trio cannot be simulated."""
    missing = [name for owner, names in _PRIVATE for name in names if not hasattr(owner, name)]
    if missing:
        raise NotSupportedError(
            f"a simulation needs private parts of Trio, and Trio {trio.__version__} does not have "
            f"{', '.join(missing)}: use another release of Trio"
        )


def loop_of_this_task() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which code of another thread runs as part of this task.

    The event loop must wait meanwhile.
    """
    here = vars(_run.GLOBAL_RUN_CONTEXT).copy()

    @contextmanager
    def borrowed() -> Iterator[None]:
        vars(_run.GLOBAL_RUN_CONTEXT).update(here)
        yield

    return borrowed


class Timers:
    """The virtual time, and the sleeping tasks.

    A third of the CPU time of a simulation was that of Trio's mock clock and of ``trio.sleep``,
    which makes a cancel scope, cancels it and catches the exception. These timers only wake a task.
    """

    def __init__(self) -> None:
        #: The virtual seconds since the beginning.
        self.now: float = 0.0
        self._sleeping: list[tuple[float, int, trio.lowlevel.Task]] = []
        self._awake: set[int] = set()
        self._numbers = itertools.count()
        #: Advances the time when every task waits.
        self.clock: trio.testing.MockClock = trio.testing.MockClock(autojump_threshold=0.0)
        clock = self.clock
        replaced = {
            "current_time": lambda: self.now,
            "deadline_to_sleep_time": lambda deadline: 0 if deadline <= self.now else 1e9,
            "jump": self.jump,
            "_autojump": self._jump_to_next,
        }
        vars(clock).update(replaced)

    def run_here(self) -> bool:
        """Return whether the caller belongs to the simulation, and to no other thread."""
        runner = getattr(_run.GLOBAL_RUN_CONTEXT, "runner", None)
        return runner is not None and runner.clock is self.clock

    def jump(self, seconds: float) -> None:
        """Let ``seconds`` pass; 0 or more."""
        self.now += seconds
        self._wake()

    def _jump_to_next(self) -> None:
        deadlines = _run.GLOBAL_RUN_CONTEXT.runner.deadlines
        sleeping = self._sleeping
        while sleeping and sleeping[0][1] in self._awake:
            self._awake.discard(heapq.heappop(sleeping)[1])
        at = min(deadlines.next_deadline(), sleeping[0][0] if sleeping else math.inf)
        if self.now < at < math.inf:
            self.now = at
            # Also in this round, so that neither kind of deadline always comes first.
            deadlines.expire(at)
            self._wake()

    def _wake(self) -> None:
        sleeping = self._sleeping
        while sleeping and sleeping[0][0] <= self.now:
            _, number, task = heapq.heappop(sleeping)
            if number in self._awake:
                self._awake.discard(number)
            else:
                trio.lowlevel.reschedule(task)

    async def sleep_until(self, deadline: float) -> None:
        """See ``trio.sleep_until``."""
        if not self.run_here():
            await _SLEEP_UNTIL(deadline)
            return
        if math.isnan(deadline):
            raise ValueError("deadline must not be NaN")
        if deadline <= self.now:
            await trio.lowlevel.checkpoint()
            return
        number = next(self._numbers)
        heapq.heappush(self._sleeping, (deadline, number, trio.lowlevel.current_task()))

        def abort(_: object) -> trio.lowlevel.Abort:
            self._awake.add(number)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def sleep(self, seconds: float) -> None:
        """See ``trio.sleep``."""
        if seconds < 0:
            raise ValueError("`seconds` must be non-negative")
        await self.sleep_until(trio.current_time() + seconds)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the functions of Trio for the block."""
        with (
            patch.object(trio, "sleep", self.sleep),
            patch.object(trio, "sleep_until", self.sleep_until),
        ):
            yield


class Hosts(trio.abc.Instrument):
    """Knows the host of each task, and freezes hosts: their tasks take no further step.

    A task belongs to the host of the task that has started it, system tasks included. A frozen
    host does not notice anything: it runs no ``finally``, as after ``kill -9`` or ``SIGSTOP``.

    Args:
        now: returns the virtual time.
        livelocked: called when tasks keep running while the virtual time does not advance.
    """

    def __init__(self, now: Callable[[], float], livelocked: Callable[[], object]) -> None:
        self._now = now
        self._livelocked = livelocked
        self._instant = 0.0
        self._rounds = 0
        self._host_of: dict[trio.lowlevel.Task, Hashable] = {}
        self._frozen: dict[Hashable, list[tuple[trio.lowlevel.Task, Any]]] = {}
        self._to_freeze: list[tuple[tuple[Hashable, ...], Callable[[], object]]] = []

    def current(self) -> Hashable:
        """Return the host of the task that runs now; None: the world itself."""
        task = getattr(_run.GLOBAL_RUN_CONTEXT, "task", None)
        return None if task is None else self._host_of.get(task)

    def enter(self, host: Hashable) -> None:
        """Make the current task, and all that it starts, tasks of ``host``."""
        self._host_of[trio.lowlevel.current_task()] = host

    def is_frozen(self, host: Hashable) -> bool:
        """Return whether the tasks of ``host`` are frozen."""
        return host in self._frozen

    def freeze(self, hosts: Iterable[Hashable], then: Callable[[], object]) -> None:
        """Freeze ``hosts`` before the next round of the scheduler, then call ``then()``."""
        self._to_freeze.append((tuple(hosts), then))

    def thaw(self, host: Hashable) -> None:
        """Let the tasks of ``host`` continue."""
        for task, value in self._frozen.pop(host, ()):
            trio.lowlevel.reschedule(task, value)

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``."""
        if (host := self.current()) is not None:
            self._host_of[task] = host

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``."""
        self._host_of.pop(task, None)

    def before_io_wait(self, timeout: float) -> None:
        """Freeze hosts between two rounds, when no task is in the middle of one."""
        self._rounds += 1
        if (now := self._now()) != self._instant:
            self._instant, self._rounds = now, 0
        elif self._rounds == MOST_ROUNDS:
            self._livelocked()
        if not self._to_freeze:
            return
        asked, self._to_freeze = self._to_freeze, []
        for hosts, then in asked:
            for host in hosts:
                if host not in self._frozen:
                    self._hold(host)
            then()

    def _hold(self, host: Hashable) -> None:
        held = self._frozen[host] = []
        queue = _run.GLOBAL_RUN_CONTEXT.runner.runq
        for task in [task for task in queue if self._host_of.get(task) == host]:
            queue.remove(task)
            held.append((task, task._next_send))
            task._next_send_fn = task._next_send = None

    def hold_back(self, task: trio.lowlevel.Task, value: Any) -> bool:
        """Keep the wake-up of a frozen host's task until the host is thawed."""
        held = self._frozen.get(self._host_of.get(task)) if self._frozen else None
        if held is None:
            return False
        task._abort_func = None
        held.append((task, value))
        return True


@contextmanager
def deterministic(seed: int, hosts: Hosts) -> Iterator[None]:
    """Make each ``trio.run`` within the block schedule its tasks in an order drawn from ``seed``.

    Raises:
        NotSupportedError: this release of Trio cannot be simulated.
    """
    require_trio()
    reschedule = _run.Runner.reschedule
    state, allowed = _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING

    def held_back(self: Any, task: Any, next_send: Any = _run._NO_SEND) -> None:
        if not hosts.hold_back(task, next_send):
            reschedule(self, task, next_send)

    _run._r.seed(seed)
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run.Runner.reschedule = held_back  # type: ignore[method-assign]
    try:
        yield
    finally:
        _run.Runner.reschedule = reschedule  # type: ignore[method-assign]
        _run._ALLOW_DETERMINISTIC_SCHEDULING = allowed  # type: ignore[misc]
        _run._r.setstate(state)
