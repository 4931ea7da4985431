"""Protection against forked children that run the event loop of their parent.

``os.fork`` copies the event loop with all its tasks, but no threads. A child that returns into the
loop would accept deliveries, take wake-ups of the parent, and wait for a commit thread that it does
not have. So it is ended at the end of the step of its task. A child that runs another program or
ends itself, as those of ``multiprocessing`` do, never gets that far.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

from ..base import logs
from ..errors import EXIT_FAILURE

_log = logs.get_logger("runtime")

#: Time to write the log line, in seconds.
_FLUSH_SECONDS = 0.2

# The number of running runtimes, and whether the hook is installed. It cannot be removed.
_runtimes = 0
_hooked = False


class _EndAtNextStep(trio.abc.Instrument):
    """Ends this process when a task gives control back to the loop."""

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """End the process."""
        _log.error(
            "runtime.forked_child",
            pid=os.getpid(),
            parent=os.getppid(),
            hint="a handler called os.fork(), and the child returned into the event loop, so it "
            "was ended; end the child with os._exit, or start programs with trio.run_process",
        )
        logs.flush(_FLUSH_SECONDS)
        # No clean-up: files, sockets and locks belong to the parent.
        os._exit(EXIT_FAILURE)


def _in_child() -> None:
    # A fork in another thread than the loop's cannot return into the loop.
    if _runtimes:
        with suppress(RuntimeError):
            trio.lowlevel.add_instrument(_EndAtNextStep())


@contextmanager
def children_ended() -> Iterator[None]:
    """End forked children of this process that return into the loop that runs the block."""
    global _runtimes, _hooked
    if not _hooked and hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=_in_child)
        _hooked = True
    _runtimes += 1
    try:
        yield
    finally:
        _runtimes -= 1
