"""``python -m sdk_trio``, and the command ``sdk-trio``: the command line.

Each import here costs a start; the signals are taken before everything else is imported.
"""

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


def main() -> int:
    """Run the command line, from the first moment on with signals that end nothing by accident.

    HUP, which asks a daemon to reload, would end a process that has not got so far; INT would leave
    a traceback of whatever is being imported.
    """
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, HeldSignal())
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from .cli.main import main as run

    signal.signal(signal.SIGINT, interrupt)
    return run()


if __name__ == "__main__":
    sys.exit(main())
