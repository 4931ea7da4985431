"""Run blocking calls in threads, off the event loop.

A simulation replaces the :class:`Executor` with :func:`use` and runs the calls in its own thread.
Other modules start threads only to run an event loop or to monitor the process from outside the
loop; ``tests/unit/test_seams.py`` lists these exceptions.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, TypeVarTuple

import outcome
import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Deliver = Callable[[outcome.Outcome[T]], object]


class Worker(Protocol):
    """A thread that runs jobs one at a time, in the order posted."""

    def post(self, job: Callable[[], T], deliver: Deliver[T]) -> None:
        """Run ``job`` after all earlier jobs, then ``deliver`` its outcome.

        ``deliver`` runs in the thread of the event loop that created the worker, and must not
        raise. It is not called if that loop has ended. Callable from any thread; never blocks.
        """

    def close(self) -> None:
        """End the thread after the posted jobs; no job may be posted afterwards.

        Does not wait for the thread to end. A second call is a no-op.
        """


class Executor:
    """Runs blocking calls in threads: Trio's for single calls, its own for long-lived jobs.

    The functions of this module call its methods.
    """

    async def run(
        self,
        function: Callable[[*Ts], T],
        *arguments: *Ts,
        limiter: trio.CapacityLimiter | None,
        abandon_on_cancel: bool,
        name: str | None,
    ) -> T:
        """See :func:`run_in_thread`."""
        return await trio.to_thread.run_sync(
            function,
            *arguments,
            limiter=limiter,
            abandon_on_cancel=abandon_on_cancel,
            thread_name=name,
        )

    def start(self, job: Callable[[], T], deliver: Deliver[T], name: str) -> None:
        """See :func:`start_in_thread`."""
        token = trio.lowlevel.current_trio_token()
        trio.lowlevel.start_thread_soon(job, lambda result: _deliver(token, deliver, result), name)

    def worker(self, name: str) -> Worker:
        """See :func:`start_worker`."""
        return _Thread(name)

    def thread(self, function: Callable[[*Ts], object], *arguments: *Ts, name: str) -> None:
        """See :func:`start_thread`."""
        # A daemon thread: one that hangs on a failed disk or pipe must not keep the process alive.
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()

    def check_cancelled(self) -> None:
        """See :func:`check_cancelled`."""
        trio.from_thread.check_cancelled()

    def call_loop(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """See :func:`call_loop`."""
        return trio.from_thread.run_sync(function, *arguments)


class _Thread:
    """The worker of :class:`Executor`."""

    def __init__(self, name: str) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._posted: SimpleQueue[tuple[Callable[[], Any], Deliver[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, job: Callable[[], T], deliver: Deliver[T]) -> None:
        self._posted.put((job, deliver))

    def close(self) -> None:
        self._posted.put(None)

    def _run(self) -> None:
        while (posted := self._posted.get()) is not None:
            job, deliver = posted
            _deliver(self._token, deliver, outcome.capture(job))
            # While waiting for the next job, do not keep references from the last one.
            del posted, job, deliver


def _deliver(
    token: trio.lowlevel.TrioToken, deliver: Deliver[T], result: outcome.Outcome[T]
) -> None:
    # The event loop may have ended: then no task waits for the result.
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(deliver, result)


_current = Executor()


@contextmanager
def use(executor: Executor) -> Iterator[None]:
    """Replace the executor of the whole process during the block."""
    global _current
    before, _current = _current, executor
    try:
        yield
    finally:
        _current = before


async def run_in_thread(
    function: Callable[[*Ts], T],
    *arguments: *Ts,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
    name: str | None = None,
) -> T:
    """Run ``function`` in a thread, with the context variables of this task; return its result.

    Args:
        function: gets ``arguments``; its exceptions are raised here.
        limiter: caps the number of concurrent calls; None: Trio's default limiter.
        abandon_on_cancel: on cancellation, stop waiting and drop the result while the thread
            continues. Otherwise wait until the function ends; it can call :func:`check_cancelled`.
        name: the thread's name while the function runs.

    Raises:
        trio.Cancelled: cancelled before the start or, with ``abandon_on_cancel``, at any time.
    """
    return await _current.run(
        function, *arguments, limiter=limiter, abandon_on_cancel=abandon_on_cancel, name=name
    )


def start_in_thread(job: Callable[[], T], deliver: Deliver[T], *, name: str) -> None:
    """Run ``job`` in a thread, and call ``deliver`` with its outcome in the event loop's thread.

    No task waits for it and no limiter counts it. ``deliver`` must not raise, and is not called if
    the event loop has ended.

    Raises:
        RuntimeError: the system cannot start another thread; nothing has run.
    """
    _current.start(job, deliver, name)


def start_worker(name: str) -> Worker:
    """Return a dedicated thread for jobs that must run one at a time.

    Call it in the event loop's thread; outcomes are delivered there.

    Raises:
        RuntimeError: the system cannot start another thread.
    """
    return _current.worker(name)


def start_thread(function: Callable[[*Ts], object], *arguments: *Ts, name: str) -> None:
    """Run ``function`` in a dedicated daemon thread.

    For work that lasts as long as the process, such as the log writer. ``function`` must not raise.

    Raises:
        RuntimeError: the system cannot start another thread.
    """
    _current.thread(function, *arguments, name=name)


def check_cancelled() -> None:
    """Raise ``trio.Cancelled`` if the surrounding :func:`run_in_thread` was cancelled.

    Call it in such a thread, between the steps of long work.
    """
    _current.check_cancelled()


def call_loop(function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Call ``function`` in the event loop's thread, from within :func:`run_in_thread`.

    Returns:
        Its result; its exceptions are raised here.

    Raises:
        trio.Cancelled: the surrounding :func:`run_in_thread` was cancelled.
        trio.RunFinishedError: the event loop has ended.
    """
    return _current.call_loop(function, *arguments)
