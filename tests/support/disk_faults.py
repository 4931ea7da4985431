"""A disk that fails on demand: a preloaded library, compiled at the first use.

Start a process with :attr:`DiskFaults.environment`, and set faults with :meth:`DiskFaults.set`.
They apply from the next call until :meth:`DiskFaults.clear`, while the process runs.
"""

import errno
import os
from pathlib import Path

import attrs

from .preloaded import compiled

_SOURCE = Path(__file__).with_suffix(".c")


@attrs.frozen
class Fault:
    """A fault: ``kind`` is ``error``, ``slow``, ``hang`` or ``short``; see the C source.

    ``operation`` is ``open``, ``read``, ``write``, ``sync``, ``delete`` or ``any``. ``prefix`` is
    the beginning of the resolved paths, and ``percent`` of the calls are affected.
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
    """Writes fail because the disk is full (ENOSPC)."""
    return Fault("error", "write", prefix, errno.ENOSPC)


def hanging(operation: str, prefix: str | os.PathLike[str]) -> Fault:
    """Calls do not return until the fault is cleared."""
    return Fault("hang", operation, prefix)


def slow(operation: str, prefix: str | os.PathLike[str], milliseconds: int) -> Fault:
    """Every call takes longer by that time."""
    return Fault("slow", operation, prefix, milliseconds)


class DiskFaults:
    """The faults of the processes that were started with :attr:`environment`.

    Skips the test without a compiler, or if the system does not support preloading.

    Args:
        directory: for the rules; no fault may affect it.
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
        """Replace the faults; the first one that matches a call applies."""
        self._hung.unlink(missing_ok=True)
        partial = self._rules.with_suffix(".partial")
        partial.write_text("".join(fault.line() for fault in faults))
        partial.replace(self._rules)

    def clear(self) -> None:
        """Let the disk work again; hanging calls continue."""
        self.set()
