"""A wall clock that a test sets for the processes that it starts."""

import time
from pathlib import Path

from .preloaded import compiled

_SOURCE = Path(__file__).with_suffix(".c")


class ClockSteps:
    """The wall clock of the processes that were started with :attr:`environment`.

    Skips the test if the library is not available; see :func:`.preloaded.compiled`.

    Args:
        directory: for the file with the clock's offset.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock-step"
        self.seconds = 0
        self.environment = {"LD_PRELOAD": compiled(_SOURCE), "SDK_CLOCK_STEP": str(self._file)}
        self.set(0)

    def set(self, seconds: int) -> None:
        """Set the clock ahead of the true time by ``seconds``."""
        self.seconds = seconds
        partial = self._file.with_suffix(".partial")
        partial.write_text(str(seconds))
        partial.replace(self._file)

    def now(self) -> float:
        """Return the time in those processes, in Unix seconds."""
        return time.time() + self.seconds
