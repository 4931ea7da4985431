"""A disk that fails on demand: a library, compiled when it is first wanted, before the C library.

Give a process :attr:`DiskFaults.environment`, and :meth:`DiskFaults.set` what shall go wrong; it
begins with the next call and ends with :meth:`DiskFaults.clear`, while the process runs.
"""

import errno
import os
from pathlib import Path

import attrs

from .preloaded import compiled

_SOURCE = Path(__file__).with_suffix(".c")


@attrs.frozen
class Fault:
    """What goes wrong: ``kind`` is ``error``, ``slow``, ``hang`` or ``short``; see the C source.

    ``operation`` is ``open``, ``read``, ``write``, ``sync``, ``delete`` or ``any``; ``prefix`` is
    how the resolved paths of the files begin, and ``percent`` of the calls meet it.
    """

    kind: str
    operation: str
    prefix: str | os.PathLike[str]
    argument: int = 0
    percent: int = 100

    def line(self) -> str:
        prefix = os.path.realpath(self.prefix)
        return f"{self.kind} {self.argument} {self.percent} {self.operation} {prefix}\n"


def broken(operation: str, prefix: str | os.PathLike[str], *, percent: int = 100) -> Fault:
    """The disk reports an error (EIO)."""
    return Fault("error", operation, prefix, errno.EIO, percent)


def full(prefix: str | os.PathLike[str]) -> Fault:
    """There is no room for what is written (ENOSPC)."""
    return Fault("error", "write", prefix, errno.ENOSPC)


def hanging(operation: str, prefix: str | os.PathLike[str]) -> Fault:
    """Calls do not return until the fault is gone."""
    return Fault("hang", operation, prefix)


def slow(operation: str, prefix: str | os.PathLike[str], milliseconds: int) -> Fault:
    """Every call takes that much longer."""
    return Fault("slow", operation, prefix, milliseconds)


class DiskFaults:
    """The faults of the processes that were started with :attr:`environment`.

    Skips the test where there is no compiler, or the system has no such libraries.

    Args:
        directory: where the rules are kept: one that no fault concerns.
    """

    def __init__(self, directory: Path) -> None:
        self._rules = directory / "disk-faults"
        self._rules.write_text("")
        self._hung = directory / "disk-faults.hung"
        self.environment = {"LD_PRELOAD": compiled(_SOURCE), "SDK_DISK_FAULTS": str(self._rules)}

    @property
    def has_hung(self) -> bool:
        """Whether a call has met a fault that hangs since the last :meth:`set`."""
        return self._hung.exists()

    def set(self, *faults: Fault) -> None:
        """Let ``faults``, the first that fits first, take the place of those before."""
        self._hung.unlink(missing_ok=True)
        partial = self._rules.with_suffix(".partial")
        partial.write_text("".join(fault.line() for fault in faults))
        partial.replace(self._rules)

    def clear(self) -> None:
        """Let the disk work again; what hangs goes on."""
        self.set()
