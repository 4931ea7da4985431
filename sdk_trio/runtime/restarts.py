"""Decisions about processes that ended: the pause before a restart, and when to give up. Pure."""

import signal
from contextlib import suppress
from typing import Final

from ..errors import EXIT_CONFIGURATION, EXIT_UNAVAILABLE, SdkError

#: A process that has served for this long, in seconds, counts as steady. Its successor starts at
#: once.
STEADY_SECONDS: Final = 5.0

#: A process that ends earlier than this, in seconds, has served no request.
USELESS_SECONDS: Final = 1.0

#: The pause before the second restart in a row, in seconds, doubled for each further one, and the
#: longest pause. An event that ends its process each time is a dead letter after a few runs. Any
#: longer series of ends is a fault of the machine or of the application, which quick restarts do
#: not fix.
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0

#: Processes that end in a row, while none serves steadily, before the supervisor gives up.
MOST_ENDS: Final = 10


class ProcessesError(SdkError):
    """The processes that receive deliveries do not start, or end repeatedly."""


class ProcessMisconfiguredError(ProcessesError):
    """A process has refused its settings, or those of the application."""

    exit_code = EXIT_CONFIGURATION


class ProcessUnavailableError(ProcessesError):
    """A process lacks something that it needs, such as its store."""

    exit_code = EXIT_UNAVAILABLE


_START_ERRORS: dict[int, type[ProcessesError]] = {
    kind.exit_code: kind for kind in (ProcessMisconfiguredError, ProcessUnavailableError)
}


def pause_before(ends: int) -> float:
    """Return the pause before a restart, in seconds, after ``ends`` quick ends in a row."""
    if ends < 2:
        return 0.0
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(ends - 2, 16))


def describe_end(status: int) -> str:
    """Describe how a process ended; ``status`` is that of :mod:`subprocess`."""
    if status >= 0:
        return f"with status {status}"
    with suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


def start_error(status: int, number: int, count: int) -> ProcessesError:
    """Return the error of a first process that ended before it served."""
    return _START_ERRORS.get(status, ProcessesError)(
        f"process {number} of {count} ended {describe_end(status)} before it served; see its own "
        "messages above"
    )


class EndCounter:
    """Counts unexpected ends of processes, in total and in a row."""

    def __init__(self) -> None:
        self.total: int = 0
        self._in_a_row = 0

    def count(self, number: int, status: int, *, served: float, others_steady: bool) -> None:
        """Count the end of process ``number``, which had served for ``served`` seconds.

        Raises:
            ProcessesError: too many ended in a row while none served steadily.
        """
        self.total += 1
        steady = served >= USELESS_SECONDS or others_steady
        self._in_a_row = 0 if steady else self._in_a_row + 1
        if self._in_a_row >= MOST_ENDS:
            raise ProcessesError(
                f"{self._in_a_row} processes ended in a row, and none has served for "
                f"{STEADY_SECONDS:g} s; the last one, process {number}, ended "
                f"{describe_end(status)}. See its own messages and 'process.ended' above"
            )
