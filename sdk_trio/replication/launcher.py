"""Becomes another program that the kernel ends when our process ends, however it ends.

Run as a file, isolated and without this package: ``launcher.py PARENT PROGRAM [ARGUMENT...]``. A
killed process cannot end its children itself, and a function between fork and exec is unsafe in a
program with threads; so this short program stands between. Where the kernel has no such wish
(macOS), the lock that the child holds keeps a second replicator away instead.
"""

import ctypes
import os
import signal
import sys

#: linux/prctl.h
_PR_SET_PDEATHSIG = 1


def launch(parent: int, program: list[str]) -> None:
    """Ask for our end at the parent's end, then become ``program``; returns only if it is gone."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return  # it ended before the kernel knew
    os.execv(program[0], program)  # noqa: S606 - an absolute path, and no shell is wanted


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
