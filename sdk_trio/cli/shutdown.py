"""Shut the daemon down within a bounded time, even if handlers do not stop.

A cancelled handler may keep running: in a thread, in a shielded scope, in a loop that swallows
``Cancelled``, or in a computation that blocks the event loop. Its event is in the store, so nothing
is lost: the log names the handler, the event is released, and the process exits without it.

There are three stages (docs/adr/0031-bounded-shutdown.md):

1. The event loop ends the process.
2. A thread ends it if the loop does not respond.
3. ``faulthandler``'s timer ends it if a handler holds the interpreter lock.
"""

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType

import msgspec
import trio

from ..base import logs
from ..errors import EXIT_FAILURE
from ..runtime import Runtime
from ..runtime.watchdog import code_of
from ..webhooks.run import LEFT_BEHIND

# The time limits add up to 5 seconds after the drain, and to 1 second after a second signal. ADR 31
# documents these totals, and operators configure service managers accordingly.
_log = logs.get_logger("runtime")

_Handler = Callable[[int, FrameType | None], object] | int | None

#: Seconds that cancelled handlers have to clean up, after the drain timeout or a second signal,
#: before the event loop abandons them.
GRACE_SECONDS = 2.5
FORCED_GRACE_SECONDS = 0.4

#: Seconds that the event loop then has to release the handlers' events and to log a report.
LEAVE_SECONDS = 1.5
FORCED_LEAVE_SECONDS = 0.4

#: Seconds after which a C timer ends the process without running any Python. It is for handlers
#: that hold the interpreter lock, such as a long regular expression match.
STUCK_SECONDS = 0.5

#: Seconds to wait at exit until the log has been read. This is less than STUCK_SECONDS, after which
#: faulthandler's timer ends the process.
FLUSH_SECONDS = 0.3

#: Maximum seconds that the main thread sleeps after a signal, so that the shutdown thread can
#: notice the signal. It usually notices at once.
GIVE_WAY_SECONDS = 1.0

#: Seconds that the application's non-daemon threads may run after the event loop has ended. Python
#: would wait for them without a limit.
THREADS_SECONDS = 1.0

#: The byte that wakes the thread without a signal; no signal has the number 0.
_WAKE = b"\0"


class Bounds(msgspec.Struct, frozen=True):
    """Time limits of the stages of a shutdown, in seconds; together less than the documented 5.

    ``grace`` is for cancelled handlers after the drain timeout, ``forced_grace`` after a second
    signal. ``leave`` is for the event loop to release their events and to log a report.
    """

    grace: float = GRACE_SECONDS
    leave: float = LEAVE_SECONDS
    forced_grace: float = FORCED_GRACE_SECONDS


#: Limits with several processes. A worker process must exit within WORKER_END_SECONDS of the drain
#: timeout, or WORKER_FORCED_END_SECONDS of a second signal; then its supervisor gives up on it.
WORKER_BOUNDS = Bounds(grace=1.5, leave=1.0, forced_grace=0.2)
WORKER_END_SECONDS = 3.2
WORKER_FORCED_END_SECONDS = 0.8
SUPERVISOR_BOUNDS = Bounds(grace=3.6, leave=0.5, forced_grace=0.9)


class BoundedShutdown:
    """Limits how long the shutdown of a daemon takes; a context manager around its event loop.

    ``ending`` holds the signals that request the shutdown of ``runtime``.
    """

    def __init__(
        self, runtime: Runtime, ending: Collection[int], bounds: "Bounds | None" = None
    ) -> None:
        self._runtime = runtime
        self._ending = ending
        self._bounds = bounds = bounds or Bounds()
        # A socket, not a pipe: signal.set_wakeup_fd needs a non-blocking descriptor, and select
        # works on sockets on every system.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._token: trio.lowlevel.TrioToken | None = None
        self._give_up = trio.Event()
        self._watching = trio.CancelScope(shield=True)
        # 1 unless a signal forces the shutdown: a daemon that abandons handlers has not shut down
        # cleanly.
        self._status = EXIT_FAILURE
        # The number of signals the main thread has handled, and how many our thread has seen.
        self._handled = 0
        self._signals = 0
        # The deadlines of the loop and the thread, by time.monotonic.
        self._deadlines: tuple[float, float] | None = None
        self._leave_seconds = bounds.leave
        self._gave_up = False
        self._ended = False
        self._finished = False
        # Threads that exist already belong to the host of the interpreter (a debugger, a test), not
        # to the application.
        self._host_threads = set(threading.enumerate())
        self._thread = threading.Thread(
            target=self._enforce_deadlines, name="sdk_trio-ending", daemon=True
        )
        # A descriptor of our own: a handler may close sys.stderr, or replace it with None.
        self._stderr: int | None = None
        with suppress(OSError):
            self._stderr = os.dup(2)

    # -- around the loop, in the main thread -----------------------------------------------------

    def __enter__(self) -> "BoundedShutdown":
        if self._stderr is not None and not faulthandler.is_enabled():
            # Print a traceback if the process crashes (SIGSEGV, or SIGBUS from a truncated file).
            faulthandler.enable(file=self._stderr)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Let the process exit normally, with a time limit for the application's threads."""
        # The loop has ended, so its timer must not end a process that only cleans up.
        faulthandler.cancel_dump_traceback_later()
        left = [
            thread.name
            for thread in threading.enumerate()
            if not thread.daemon and thread.is_alive() and thread not in self._host_threads
        ]
        if not left:
            self._finished = True
            # The end of the stream wakes the thread. Closing is not enough: a forked child may have
            # the descriptor, too.
            self._writer.shutdown(socket.SHUT_WR)
            self._thread.join()
            self._reader.close()
            self._writer.close()
            return
        _log.warning(
            "runtime.threads_left",
            threads=left,
            hint="Python would wait for these non-daemon threads, so they are abandoned; end them "
            "in your application's shutdown, or start them with daemon=True",
        )
        if error is not None:
            # main() would report the exception, but it never runs if the process ends here.
            self._status = getattr(error, "exit_code", EXIT_FAILURE)
        elif self._signals == 1:
            self._status = 0
        self._ended = True
        moment = time.monotonic() + THREADS_SECONDS
        # The thread ends the process itself: the event loop has ended.
        self._deadlines, self._gave_up = (moment, moment), True
        self._wake_thread()

    # -- in the loop -----------------------------------------------------------------------------

    @asynccontextmanager
    async def watching_signals(self) -> AsyncIterator[None]:
        """Watch for shutdown signals while the block runs."""
        self._token = trio.lowlevel.current_trio_token()
        # Python's C code writes each signal's number to this descriptor, even while the event loop
        # is blocked. Trio uses it to wake up on signals; the thread wakes Trio instead.
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Trio has installed its handlers by now; our handlers call them.
        handlers = {number: signal.getsignal(number) for number in self._ending}
        for number, handler in handlers.items():
            signal.signal(number, partial(self._yield_to_thread, handler))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._watching.cancel()

    def _yield_to_thread(self, handler: _Handler, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread by sleeping, so that the other thread can run.

        During a long regular expression match, signal handlers run but other threads do not.
        """
        if callable(handler):
            handler(number, frame)
        self._handled += 1
        until = time.monotonic() + GIVE_WAY_SECONDS
        # No lock: another signal may interrupt this.
        while self._signals < min(self._handled, 2) and time.monotonic() < until:
            time.sleep(0.001)

    async def watch(self) -> None:
        """Abandon handlers that exceed their time; runs until :meth:`watching_signals` is left."""
        with self._watching:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._note_drain)
                await self._give_up.wait()
                await self._abandon_runs()

    async def _note_drain(self) -> None:
        drained = await self._runtime.wait_draining()
        # After a second signal the shorter limits already apply.
        if self._signals < 2:
            self._set_deadlines(drained + self._bounds.grace, self._bounds.leave)
            self._wake_thread()

    async def _abandon_runs(self) -> None:
        self._log_left()
        # Reserve a part of the time for the exit itself, which must precede the thread's deadline.
        with trio.move_on_after(self._leave_seconds * 0.8):
            await self._runtime.leave()
        _exit(self._status)

    # -- in the thread ---------------------------------------------------------------------------

    def _enforce_deadlines(self) -> None:
        while not self._finished:
            deadlines = self._deadlines
            moment = None if deadlines is None else deadlines[1] if self._gave_up else deadlines[0]
            # Before the first signal there is no deadline, and the thread sleeps until it is woken.
            timeout = None if moment is None else max(0.0, moment - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], timeout)
            if ready:
                self._count_signals(self._reader.recv(64))
            elif self._gave_up:
                self._end()
            else:
                self._gave_up = True
                # The first deadline is the loop's: it can release events and log the abandoned
                # handlers. The second one is for a loop that did not.
                self._call(self._give_up.set)

    def _count_signals(self, numbers: bytes) -> None:
        for number in numbers:
            # The first signal starts the drain, the second one forces the end; further ones change
            # nothing.
            if number in self._ending:
                if self._signals == 0:
                    self._begin()
                elif self._signals == 1:
                    self._force(number)
                self._signals += 1
        self._call(_no_op)

    def _begin(self) -> None:
        """Start the time limits at the first signal, in case the loop never receives it."""
        settings = self._runtime.settings
        drain = settings.webhooks.graceful_drain_timeout_seconds
        delay = settings.server.shutdown_delay_seconds
        bounds = self._bounds
        self._set_deadlines(time.monotonic() + delay + drain + bounds.grace, bounds.leave)
        main = threading.main_thread().ident
        run, place = (None, None) if main is None else code_of(main)
        if run is not None:
            # Possibly the last chance to log anything: see STUCK_SECONDS.
            _log.info(
                "runtime.blocked_by_handler",
                handler=run.handler,
                webhook_id=run.webhook_id,
                place=place,
                hint="this handler blocked the event loop; the shutdown does not wait for it",
            )

    def _force(self, number: int) -> None:
        self._status = 128 + number
        self._gave_up = False
        self._set_deadlines(time.monotonic() + self._bounds.forced_grace, FORCED_LEAVE_SECONDS)

    def _set_deadlines(self, give_up: float, leave_seconds: float) -> None:
        self._leave_seconds = leave_seconds
        self._deadlines = (give_up, give_up + leave_seconds)
        # Restart the timer whenever the limits change: it cannot be read or adjusted.
        left = give_up + leave_seconds + STUCK_SECONDS - time.monotonic()
        if self._stderr is not None:
            # The timer of faulthandler is a C thread, which needs no interpreter lock.
            faulthandler.dump_traceback_later(max(left, 0.1), file=self._stderr, exit=True)

    def _end(self) -> None:
        """End the process from the thread, because the loop is blocked or waits for the disk."""
        if not self._ended:
            # Log in a daemon thread, because logging may block as well if the disk hangs.
            logger_thread = threading.Thread(target=self._log_left, daemon=True)
            logger_thread.start()
            # Wait at most 0.2 s for the log line: the exit must not depend on it.
            logger_thread.join(0.2)
        _exit(self._status)

    # -- both ------------------------------------------------------------------------------------

    def _log_left(self) -> None:
        now = time.monotonic()
        runs = [run.described(now) for run in self._runtime.receiver.runs]
        step = self._runtime.receiver.upgrade_step
        if step is not None:
            hint = "this step of the upgrade did not stop; the next start resumes where it stopped"
        elif runs:
            hint = LEFT_BEHIND
        else:
            hint = (
                "no handler is running, but something else did not stop: check the disk and the "
                "database"
            )
        _log.error("runtime.left_behind", runs=runs, upgrade_step=step, hint=hint)

    def _call(self, function: Callable[[], object]) -> None:
        if self._token is not None:
            # The loop may end between the check and the call; then there is nothing to wake.
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(function)

    def _wake_thread(self) -> None:
        with suppress(OSError):
            self._writer.send(_WAKE)


def _no_op() -> None:
    """Do nothing; scheduling this wakes the loop, which then handles the signal."""


def _exit(status: int) -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    logs.flush(FLUSH_SECONDS)
    # No atexit, no flush of standard output, no wait for threads: any of them may hang.
    os._exit(status)
