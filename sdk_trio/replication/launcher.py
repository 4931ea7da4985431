"""A short program between the supervisor and the replicator: it sets PDEATHSIG, then execs.

It runs as a file, isolated and without this package: ``launcher.py PARENT PROGRAM [ARG...]``. A
killed process cannot end its children, so the kernel must do it (PR_SET_PDEATHSIG). A
``preexec_fn`` would run between fork and exec, which is unsafe in a program with threads. macOS has
no such signal; there the lock that the child inherits prevents a second replicator.
"""

import ctypes
import os
import signal
import sys

#: linux/prctl.h
_PR_SET_PDEATHSIG = 1


def launch(parent: int, program: list[str]) -> None:
    """Set PDEATHSIG, then exec ``program``; return only if the parent has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return  # the parent ended before prctl, so no signal will come
    os.execv(program[0], program)  # noqa: S606 - an absolute path, and no shell is wanted


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
