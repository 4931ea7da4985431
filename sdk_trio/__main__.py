"""``python -m sdk_trio``, and the command ``sdk-trio``: the command line.

Each import here slows every start; the signal handlers are set before everything else is imported.
"""

import gc
import os
import signal
import sys
from types import FrameType


class DeferredSignal:
    """A deferred signal; ``called`` is true once it has arrived."""

    def __init__(self) -> None:
        self.called: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remember it."""
        self.called = True


class Interruption:
    """The handler of INT until the command starts something that must be shut down in order."""

    #: The command line sees this attribute and returns INT to Python's own handler.
    for_the_start: bool = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process, with the status that shells give to an interrupted command."""
        os._exit(130)


def main() -> int:
    """Run the command line; signals during the imports do not end the process by accident.

    HUP makes a daemon reload, but would end a process that is still starting. INT would print the
    traceback of an import, or be lost: an exception raised in a callback of an import is only
    printed.
    """
    _open_standard_streams()
    # No garbage collection during the imports: each command enables the collector afterwards.
    gc.disable()
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, DeferredSignal())
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interruption())
    from .cli.main import main as run

    return run()


def _open_standard_streams() -> None:
    """Redirect standard streams that the caller has closed (``2>&-``) to the null device.

    Python replaces them with None, which cannot be written to. The next opened file, such as the
    store's, would get their number, and a library's output to descriptor 2 would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


if __name__ == "__main__":
    sys.exit(main())
