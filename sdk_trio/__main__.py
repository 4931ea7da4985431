"""``python -m sdk_trio``, and the command ``sdk-trio``: the command line.

Each import here costs a start; the signals are taken before everything else is imported.
"""

import gc
import os
import signal
import sys
from types import FrameType


class HeldSignal:
    """A signal that somebody will ask for later: ``called`` says whether it has come."""

    def __init__(self) -> None:
        self.called: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remember it."""
        self.called = True


class Interruption:
    """The handler of INT while nothing has begun that would have to be ended in order."""

    #: The command line gives INT back to Python, and knows by this that it is to.
    for_the_start: bool = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process, with the status that shells give to an interrupted command."""
        os._exit(130)


def main() -> int:
    """Run the command line, from the first moment on with signals that end nothing by accident.

    HUP, which asks a daemon to reload, would end a process that has not got so far. INT would leave
    a traceback of whatever is being imported, or none and no end: an exception that is raised in a
    callback of an import is printed and forgotten.
    """
    _open_standard_streams()
    # Nothing of the imports is garbage that could wait no longer: each command turns the collector
    # on again after them.
    gc.disable()
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, HeldSignal())
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interruption())
    from .cli.main import main as run

    return run()


def _open_standard_streams() -> None:
    """Lead standard streams that the caller has closed (``2>&-``) to the null device.

    Python has None in their place, which nobody can write to. Their numbers would go to the next
    files that are opened, such as the store's, and what a library says to number 2 would end there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


if __name__ == "__main__":
    sys.exit(main())
