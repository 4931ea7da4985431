"""The executor of a simulation: what would run in a thread runs in the event loop's thread.

A job runs as one step. Its outcome is delivered as an event of its own, so that other tasks run in
between, at once or after a delay of the dice: a thread that waits for its processor, or for a disk.
"""

import contextvars
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import outcome
import trio

from ...base import executor
from ...base.executor import Deliver, Executor, Worker
from .disk import HostDownError
from .machine import Machine

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class InlineExecutor(Executor):
    """Runs the jobs of all hosts.

    Args:
        delay: returns the seconds before and after the next job, by the name of its thread.
        machine: returns the current host's; jobs of one that has crashed have no outcome.
    """

    def __init__(
        self,
        delay: Callable[[str | None], tuple[float, float]],
        machine: Callable[[], Machine | None],
    ) -> None:
        self.delay = delay
        self._machine = machine

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
            before, after = self.delay(name)
            await self._pause(before, shield=True)
            result = await self.perform(
                lambda: contextvars.copy_context().run(function, *arguments)
            )
            if _is_down(result) and _is_system_task():
                await trio.sleep_forever()  # an error of such a task would end Trio itself
            await self._pause(after, shield=not abandon_on_cancel)
        finally:
            if limiter is not None:
                limiter.release_on_behalf_of(borrower)
        return result.unwrap()

    async def perform(self, job: Callable[[], T]) -> "outcome.Outcome[T]":
        """Run ``job``; a host that crashes in the middle of it does not go on."""
        result = outcome.capture(job)
        machine = self._machine()
        if machine is not None and machine.down:
            await machine.buried.wait()
            return outcome.Error(HostDownError(machine.name))
        return result

    async def _pause(self, seconds: float, *, shield: bool) -> None:
        with trio.CancelScope(shield=shield):
            await trio.sleep(seconds)

    def start(self, job: Callable[[], T], deliver: Deliver[T], name: str) -> None:
        """See :func:`sdk_trio.base.executor.start_in_thread`."""
        worker = self.worker(name)
        worker.post(job, deliver)
        worker.close()

    def worker(self, name: str) -> Worker:
        """See :func:`sdk_trio.base.executor.start_worker`."""
        return _InlineWorker(self, name)

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

    def __init__(self, owner: InlineExecutor, name: str) -> None:
        self._executor = owner
        self._name = name
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
            before, after = owner.delay(self._name)
            await trio.sleep(before)
            result = await owner.perform(job)
            await trio.sleep(after)
            deliver(result)
