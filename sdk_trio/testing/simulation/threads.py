"""The executor of a simulation: it runs the jobs of threads in the event loop's thread.

A job runs as one step. Its outcome is delivered as a separate step, at once or after a random
delay, and other tasks run in between. The delay represents a thread that waits for a processor or a
disk.

A job that commits a transaction can be two steps, with other tasks between its work and the commit.
Such a job has its own thread, which runs only while the event loop waits for it.
"""

import contextvars
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar, TypeVarTuple

import outcome
import trio

from ...base import executor
from ...base.executor import Deliver, Executor, Worker
from .disk import HostDownError, LockHeldError
from .machine import Machine
from .scheduler import loop_of_this_task

#: The seconds after which a job looks again for the lock of a file.
LOCK_SECONDS = 0.001

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Delay(NamedTuple):
    """The seconds that a job waits: before it, in the middle of a commit, and after it.

    ``within``: None: the job is one step.
    """

    before: float = 0.0
    within: float | None = None
    after: float = 0.0


NO_DELAY = Delay()


class _PausingJob(Generic[T]):
    """A job in a thread that runs only while :meth:`resume` waits for it."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = contextvars.copy_context().run, job
        self._loop = loop_of_this_task()
        self._may_run = threading.Semaphore(0)
        self._has_paused = threading.Semaphore(0)
        self._abandoned = False
        self.result: outcome.Outcome[T] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def resume(self) -> bool:
        """Run the job until it pauses or ends; return whether it has ended."""
        self._may_run.release()
        self._has_paused.acquire()
        return self.result is not None

    def abandon(self) -> None:
        """End the paused job by raising :class:`HostDownError` in it."""
        self._abandoned = True
        while self.result is None:
            self.resume()

    def pause(self) -> None:
        """Let other tasks run; called by the job."""
        if self._abandoned:
            raise HostDownError
        self._has_paused.release()
        self._may_run.acquire()
        if self._abandoned:
            raise HostDownError

    def _run(self) -> None:
        self._may_run.acquire()
        run, job = self._job
        with self._loop():
            self.result = outcome.capture(run, job)
        self._has_paused.release()


class InlineExecutor(Executor):
    """Runs the jobs of all hosts.

    Args:
        delay: returns the delays of the next job.
        machine: returns the current host's machine; jobs of a crashed one have no outcome.
    """

    def __init__(self, delay: Callable[[], Delay], machine: Callable[[], Machine | None]) -> None:
        self.delay = delay
        self._machine = machine
        self._pausing: _PausingJob[object] | None = None

    def pause(self) -> None:
        """Let other tasks run in the middle of a job, at random."""
        if self._pausing is not None:
            self._pausing.pause()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use this executor for the block."""
        with executor.use(self):
            yield

    async def run(
        self,
        function: Callable[[*Ts], T],
        *arguments: *Ts,
        limiter: trio.CapacityLimiter | None,
        abandon_on_cancel: bool,
        name: str | None,
    ) -> T:
        """See :func:`sdk_trio.base.executor.run_in_thread`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        borrower = object()
        if limiter is not None:
            await limiter.acquire_on_behalf_of(borrower)
        try:
            delay = self.delay()
            await self._pause(delay.before, shield=True)
            result = await self.perform(
                lambda: contextvars.copy_context().run(function, *arguments)
            )
            if _is_down(result) and _is_system_task():
                await trio.sleep_forever()  # an error of such a task would end Trio itself
            await self._pause(delay.after, shield=not abandon_on_cancel)
        finally:
            if limiter is not None:
                limiter.release_on_behalf_of(borrower)
        return result.unwrap()

    async def perform(
        self, job: Callable[[], T], within: float | None = None
    ) -> "outcome.Outcome[T]":
        """Run ``job``; if the host crashes in the middle, the job does not continue.

        A job that finds the lock of a file held begins again until it gets the lock.
        """
        while True:
            result: outcome.Outcome[T]
            if within is None:
                result = outcome.capture(job)
            else:
                result = await self._run_in_steps(job, within)
            machine = self._machine()
            if machine is not None and machine.down:
                await machine.discarded.wait()
                return outcome.Error(HostDownError(machine.name))
            if not (isinstance(result, outcome.Error) and isinstance(result.error, LockHeldError)):
                return result
            await trio.sleep(LOCK_SECONDS)

    async def _run_in_steps(self, job: Callable[[], T], within: float) -> "outcome.Outcome[T]":
        pausing = _PausingJob(job)
        try:
            while not self._resume(pausing):
                await trio.sleep(within)
                machine = self._machine()
                if machine is not None and machine.down:
                    await machine.discarded.wait()
                    break
        finally:
            pausing.abandon()
        assert pausing.result is not None
        return pausing.result

    def _resume(self, job: "_PausingJob[T]") -> bool:
        self._pausing = job  # type: ignore[assignment]
        try:
            return job.resume()
        finally:
            self._pausing = None

    async def _pause(self, seconds: float, *, shield: bool) -> None:
        if seconds:
            with trio.CancelScope(shield=shield):
                await trio.sleep(seconds)
        elif shield:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await trio.lowlevel.checkpoint()

    def start(self, job: Callable[[], T], deliver: Deliver[T], name: str) -> None:
        """See :func:`sdk_trio.base.executor.start_in_thread`."""
        worker = self.worker(name)
        worker.post(job, deliver)
        worker.close()

    def worker(self, name: str) -> Worker:
        """See :func:`sdk_trio.base.executor.start_worker`."""
        return _InlineWorker(self)

    def thread(self, function: Callable[[*Ts], object], *arguments: *Ts, name: str) -> None:
        """Start nothing: the threads of a process, such as the watchdog, run in real time."""

    def check_cancelled(self) -> None:
        """Do nothing: a job is one step, which nothing can cancel."""

    def call_loop(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call ``function``: this is the event loop's thread."""
        return function(*arguments)


def _is_down(result: "outcome.Outcome[T]") -> bool:
    return isinstance(result, outcome.Error) and isinstance(result.error, HostDownError)


def _is_system_task() -> bool:
    nursery = trio.lowlevel.current_task().parent_nursery
    return nursery is not None and nursery.parent_task is trio.lowlevel.current_root_task()


class _InlineWorker:
    """The worker of :class:`InlineExecutor`: a system task, which belongs to the host."""

    def __init__(self, owner: InlineExecutor) -> None:
        self._executor = owner
        self._send, self._receive = trio.open_memory_channel[
            tuple[Callable[[], object], Deliver[object]]
        ](math.inf)
        trio.lowlevel.spawn_system_task(self._run)

    def post(self, job: Callable[[], T], deliver: Deliver[T]) -> None:
        self._send.send_nowait((job, deliver))  # type: ignore[arg-type]

    def close(self) -> None:
        self._send.close()

    async def _run(self) -> None:
        owner = self._executor
        async for job, deliver in self._receive:
            delay = owner.delay()
            if delay.before:
                await trio.sleep(delay.before)
            result = await owner.perform(job, delay.within)
            await trio.sleep(delay.after)
            deliver(result)
