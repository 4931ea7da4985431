"""One worker process as its supervisor sees it, and its start."""

import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import attrs
import trio

from ..base.executor import start_thread
from ..config import Settings
from .presence import SUPERVISOR_VARIABLE
from .worker import MessageSocket, ProcessReport, WorkerAssignment


@attrs.frozen
class WorkerCommand:
    """The program of a process, the number of processes, and their time limits in seconds.

    When the time for the drain is over, each process still has ``end_seconds`` to log the work that
    it abandons (docs/adr/0031-bounded-shutdown.md), and ``forced_end_seconds`` after a second
    signal. ``watchdog``: a process that is silent for so long is killed; None: no process is.
    """

    arguments: tuple[str, ...]
    count: int
    end_seconds: float
    forced_end_seconds: float
    watchdog: float | None = None


def process_count(settings: Settings) -> int:
    """Return ``Server:Processes``; for 0, the number of processors that this process may use."""
    if settings.server.processes:
        return settings.server.processes
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@attrs.define(eq=False)
class WorkerProcess:
    """One process, from its start until it has ended.

    ``ready_at`` is the time since which it serves; None before. ``silent_seconds`` counts from its
    last message. ``holder_checks`` is the number of checks in a row that found it silent and
    holding the store's write lock.
    """

    number: int
    owner: str
    settings: Settings
    popen: "subprocess.Popen[bytes]"
    messages: MessageSocket
    out: "trio.MemorySendChannel[bytes]"
    outgoing: "trio.MemoryReceiveChannel[bytes]"
    ended: trio.Event = attrs.Factory(trio.Event)
    ready_at: float | None = None
    silent_seconds: float = 0.0
    silence_logged: bool = False
    holder_checks: int = 0
    report: ProcessReport = attrs.Factory(ProcessReport)

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        assignment: WorkerAssignment,
        owner: str,
        sockets: Sequence[socket.socket],
    ) -> "WorkerProcess":
        """Start a process with ``assignment``, which inherits ``sockets``.

        Call it in the main thread: the process asks the kernel to be killed when the thread that
        has started it ends (prctl(2), PR_SET_PDEATHSIG).
        """
        ours, theirs = socket.socketpair()
        descriptors = [sock.fileno() for sock in sockets]
        # A process inherits the mask: a HUP during the start of its Python stays pending until it
        # ignores the signal.
        with theirs, _hangup_blocked():
            popen = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                env={**os.environ, SUPERVISOR_VARIABLE: str(theirs.fileno())},
                pass_fds=(theirs.fileno(), *descriptors),
                # Ctrl-C signals the whole foreground group of a terminal. In a separate group, the
                # processes get only the supervisor's signals.
                process_group=0,
            )
        out, outgoing = trio.open_memory_channel[bytes](inf)
        process = cls(
            assignment.number,
            owner,
            assignment.settings,
            popen,
            MessageSocket(ours),
            out,
            outgoing,
        )
        out.send_nowait(pickle.dumps(assignment))
        token = trio.lowlevel.current_trio_token()
        # A thread for each, because each waits for as long as its process runs.
        start_thread(_wait, popen, token, process.ended, name="sdk_trio-process")
        return process

    def post(self, *message: Any) -> None:
        """Queue a message to the process. The queue is unbounded; there are few messages."""
        self.out.send_nowait(pickle.dumps(message))

    def signal(self, number: int) -> None:
        """Send a signal, if the process still exists."""
        with suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def served_seconds(self, now: float) -> float:
        """Return for how long it has served, 0 if it never did; ``now`` is a Trio time."""
        return 0.0 if self.ready_at is None else now - self.ready_at


@contextmanager
def _hangup_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(
    popen: "subprocess.Popen[bytes]", token: trio.lowlevel.TrioToken, ended: trio.Event
) -> None:
    popen.wait()
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(ended.set)
