"""A thread that runs Trio with an open client, and access to it from other threads.

A caller passes a coroutine and waits; it gets the result or the error as if it had awaited it. The
thread starts with the first call and ends when the client is closed or garbage collected.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar, cast

import outcome
import trio

from ..errors import only_member
from .client import Client

T = TypeVar("T")

#: Seconds for an interrupted call to end; it closes its connection meanwhile.
INTERRUPT_SECONDS = 5.0

#: Seconds for calls in progress to end while the client is being closed.
CLOSING_SECONDS = 5.0

_CLOSED = "the client is closed: create a new one"


class ClientClosedError(RuntimeError):
    """The client is closed; nothing was done."""


class _Job(Generic[T]):
    """One coroutine that the thread runs while its caller waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine
        # The caller's context variables, so that its trace and log fields apply to the call.
        self.context: Context = copy_context()
        self.scope = trio.CancelScope()
        self.has_begun = False
        self.value: T | None = None
        self.error: BaseException | None = RuntimeError(
            "the client was closed during this call; a write may have been executed"
        )
        # Locked until the job has ended: the cheapest primitive that Ctrl-C can interrupt.
        self.ended = threading.Lock()
        self.ended.acquire()


class _Loop:
    """Trio in a thread, with a client open in it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._jobs: set[_Job[Any]] = set()
        self._held: weakref.WeakSet[OpenContext[Any]] = weakref.WeakSet()
        self._nursery: trio.Nursery | None = None
        self._stop = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._begun = threading.Lock()
        self.process: int = os.getpid()
        self.thread: threading.Thread | None = None

    # -- called by other threads

    @property
    def is_open(self) -> bool:
        """Return whether :meth:`start` has finished."""
        return self._token is not None

    def start(self) -> None:
        """Start the thread and wait until the client is open; raise its error if it cannot open.

        Called again after an interrupt, it continues to wait.
        """
        # The thread itself takes the lock: after an interrupt two threads may be started here, and
        # the second one finds the lock taken and ends.
        if not self._begun.locked():
            # A daemon thread: a program that forgets to close its client must be able to end.
            threading.Thread(target=self._run, name="sdk-trio-client", daemon=True).start()
        self._opened.wait()
        if self._error is not None:
            raise self._error

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` in the thread; return its result or raise its error."""
        job = _Job(coroutine)
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._begin, job)
            job.ended.acquire()
        except trio.RunFinishedError:
            raise ClientClosedError(_CLOSED) from self._error
        except BaseException:  # an interrupt of the caller's thread
            # Ctrl-C also cancels the call in the thread, and waits until its connection is closed:
            # otherwise a write could still be sent after the program believes it stopped.
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._interrupt, job)
                job.ended.acquire(timeout=INTERRUPT_SECONDS)
            raise
        finally:
            if not job.has_begun:
                coroutine.close()  # avoids Python's "never awaited" warning
        if job.error is None:
            return cast("T", job.value)
        try:
            raise job.error
        finally:
            del job  # its error's traceback refers to this frame

    def stop(self) -> None:
        """Close the client and wait for the thread, unless the caller is that thread."""
        # A fork copies the memory, not the thread: in the child there is nothing to stop.
        if self._token is None or self.process != os.getpid():
            return
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        # Twice the time for calls in progress, because the client closes after them. The thread is
        # a daemon, so a longer hang cannot keep the process alive.
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(2 * CLOSING_SECONDS)

    # -- runs in the thread

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # an interrupted start was repeated before this thread ran
        self.thread = threading.current_thread()
        ended = outcome.capture(trio.run, self._live)
        if isinstance(ended, outcome.Error):
            self._error = only_member(ended.error)
        self._opened.set()
        # Callers of unfinished jobs must not wait forever.
        for job in self._jobs:
            job.ended.release()

    async def _live(self) -> None:
        # Closing the client ends the calls in progress with errors, as in a Trio program.
        async with trio.open_nursery() as nursery, self._client:
            self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
            self._opened.set()
            await self._stop.wait()
            self._nursery = None
            # Calls in progress may finish within this time; new ones are refused.
            nursery.cancel_scope.deadline = trio.current_time() + CLOSING_SECONDS
            for held in self._held:
                held.leaving.set()

    def _begin(self, job: _Job[Any]) -> None:
        # An exception here would end the loop.
        if self._nursery is None:
            job.error = ClientClosedError(_CLOSED)
            job.ended.release()
        else:
            self._jobs.add(job)
            job.context.run(self._nursery.start_soon, self._work, job)

    def _interrupt(self, job: _Job[Any]) -> None:
        job.scope.cancel()
        # If the job was not started, or has just ended, its caller does not wait.
        if job not in self._jobs and job.ended.locked():
            job.ended.release()

    async def _work(self, job: _Job[Any]) -> None:  # noqa: ASYNC910 - the job may have no checkpoint
        try:
            if self._nursery is None:
                raise ClientClosedError(_CLOSED)
            job.has_begun = True
            with job.scope:
                job.value = await job.coroutine
                job.error = None
        except trio.Cancelled:
            raise
        except BaseException as error:  # the error belongs to the caller
            job.error = error
        finally:
            self._jobs.discard(job)
            job.ended.release()

    async def enter(self, held: "OpenContext[T]") -> T:
        """Enter a context in its own task; Trio's scopes must be exited in the same task."""
        assert self._nursery is not None
        self._held.add(held)
        value: T = await self._nursery.start(held.live)
        return value


class OpenContext(Generic[T]):
    """An asynchronous context that is open in the thread."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self.leaving: trio.Event = trio.Event()
        self._context = context
        self._left = trio.Event()
        self._error: Exception | None = None

    async def live(self, *, task_status: trio.TaskStatus[T]) -> None:
        """Enter the context, and leave it once ``leaving`` is set."""
        await trio.lowlevel.checkpoint()
        try:
            async with self._context as value:
                task_status.started(value)
                await self.leaving.wait()
        except Exception as error:
            # Until it is entered, its error is raised in the entering task by ``nursery.start``.
            if not self.leaving.is_set():
                raise
            self._error = error
        finally:
            self._left.set()

    async def leave(self) -> None:
        """Exit the context, and raise the error of exiting it, if any."""
        self.leaving.set()
        await self._left.wait()
        if self._error is not None:
            raise self._error


class Portal:
    """Access to the client's thread from any other; the first call starts the thread.

    It is closed when garbage collected.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._loop: _Loop | None = None
        self._lock = threading.RLock()  # a signal handler may close it during opening
        self._is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` in the client's thread; return its result or raise its error.

        Raises:
            RuntimeError: the client is closed, was opened before a fork, or this is its own thread.
        """
        try:
            loop = self.opened()
        except BaseException:
            coroutine.close()
            raise
        return loop.do(coroutine)

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the client's thread, so that it may read Trio's time."""

        async def call() -> T:
            await trio.lowlevel.checkpoint()
            return function()

        return self.run(call())

    def enter(self, held: OpenContext[T]) -> T:
        """Enter a context in the client's thread; return its value."""
        loop = self.opened()
        return loop.do(loop.enter(held))

    def opened(self) -> _Loop:
        """Return the loop, started if necessary."""
        loop = self._loop
        if loop is None or not loop.is_open:
            loop = self._open()
        if self._is_closed:
            raise ClientClosedError(_CLOSED)
        self._check_process(loop)
        if loop.thread is threading.current_thread():
            raise RuntimeError(
                "this is the client's own thread (in a hook), which cannot wait for itself"
            )
        return loop

    def _open(self) -> _Loop:
        # Before taking the lock: in a forked process, a thread that does not exist there may hold
        # it.
        self._check_process(self._loop)
        with self._lock:
            if self._is_closed:
                raise ClientClosedError(_CLOSED)
            loop = self._loop
            if loop is None:
                loop = self._loop = _Loop(self.client)
                # A client that is dropped without close() also ends its thread: the thread refers
                # only to the loop, and only clients and their views refer to the portal.
                weakref.finalize(self, loop.stop)
            try:
                loop.start()
            except Exception:
                # The next call tries again: a missing file may exist by then.
                self._loop = None
                raise
            if self._is_closed:
                loop.stop()
            return loop

    def _check_process(self, loop: _Loop | None) -> None:
        if loop is not None and loop.process != os.getpid():
            raise RuntimeError(
                f"this client was opened in process {loop.process}, and its thread and connections "
                f"do not exist in process {os.getpid()}, which was forked from it: open a client "
                "in each process, for instance at its first use"
            )

    def close(self) -> None:
        """Close the client and end the thread; a second call is a no-op."""
        self._is_closed = True
        loop = self._loop
        if loop is None or loop.process != os.getpid():
            return
        with self._lock:  # waits for a thread that is opening it
            loop.stop()
