"""Runs one child process that never outlives us.

``trio.lowlevel.open_process`` starts a child from a worker thread that ends when it has been idle
for ten seconds, and Linux ties "end the child with its parent" to the *thread* that started it. So
the thread here stays: it starts the child and waits for it.
"""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from ..base.logs import get_logger
from ..errors import ReplicatorError

_log = get_logger("replication")

#: How long the kernel may take to bury what was killed.
KILL_SECONDS: Final = 5.0

_LAUNCHER = str(Path(__file__).resolve().with_name("launcher.py"))

# Its own: a full default limiter must not keep a child from being started or buried.
_THREADS = trio.CapacityLimiter(math.inf)


@attrs.define(eq=False)
class Child:
    """A child process: ``output`` is what it writes, for one reader, who closes it."""

    output: trio.abc.ReceiveStream
    ended: trio.Event
    _process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None: it runs."""
        return self._process.returncode

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        status = self.status
        if status is not None and status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"status {status}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child has ended."""
        self._process.send_signal(number)


@attrs.define(eq=False)
class _Launch:
    """What the thread reports: the process, or why there is none."""

    settled: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    process: "subprocess.Popen[bytes] | None" = None
    failure: OSError | None = None


async def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
    task_status: trio.TaskStatus[Child] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run ``command`` until it ends; started with the child, in a process group of its own.

    Args:
        command: an absolute path and its arguments.
        environment: all variables of the child.
        inherited: file descriptors that it keeps open.

    Raises:
        ReplicatorError: it cannot be started.

    Cancelled, it kills the child. Its caller stops it in an orderly way before that.
    """
    reading, writing = os.pipe()
    launch = _Launch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_start_and_wait, launch, command, environment, inherited, writing)
        try:
            await launch.settled.wait()
            if launch.process is not None:
                output = trio.lowlevel.FdStream(reading)
                task_status.started(Child(output, launch.ended, launch.process))
                await launch.ended.wait()
        finally:
            if launch.process is not None and not launch.ended.is_set():
                launch.process.kill()
    if launch.failure is not None:
        os.close(reading)
        reason = launch.failure.strerror
        raise ReplicatorError(f"{command[0]} cannot be started: {reason}") from launch.failure


async def end_child(child: Child, seconds: float) -> None:
    """Have ``child`` end in its own way within ``seconds``, or kill it; 0 kills it at once.

    Cancelled, it leaves the child as it is.
    """
    if seconds > 0:
        child.send(signal.SIGTERM)
    with trio.move_on_after(seconds):
        await child.ended.wait()
    if child.ended.is_set():
        return
    _log.warning(
        "replication.killed",
        pid=child.pid,
        after=seconds,
        hint="the next start syncs what was not synced",
    )
    child.send(signal.SIGKILL)
    with trio.move_on_after(KILL_SECONDS):
        await child.ended.wait()


async def _start_and_wait(
    launch: _Launch,
    command: Sequence[str],
    environment: Mapping[str, str],
    inherited: Sequence[int],
    output: int,
) -> None:
    token = trio.lowlevel.current_trio_token()

    def in_thread() -> None:
        try:
            launch.process = subprocess.Popen(
                [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                pass_fds=inherited,
                process_group=0,
            )
        except OSError as error:
            launch.failure = error
        finally:
            os.close(output)
            trio.from_thread.run_sync(launch.settled.set, trio_token=token)
        if launch.process is not None:
            launch.process.wait()

    try:
        await trio.to_thread.run_sync(in_thread, limiter=_THREADS)
    finally:
        launch.ended.set()
