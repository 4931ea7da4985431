"""Ends the processes of a test process after that process has ended in any way.

:func:`begin` starts one reaper for this process, and registers each process that
``subprocess.Popen`` starts from then on. :func:`register` adds one that was started otherwise. The
reaper waits for the end of its parent. Then it kills the remaining processes and descendants.

``PR_SET_PDEATHSIG`` is not sufficient: it is bound to the thread that forks, a daemonized server
loses it, and descendants of a child do not inherit it.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

#: The seconds between two checks whether the parent has ended.
_CHECK_SECONDS = 0.2

#: The descriptor for registering processes; None: there is no reaper.
_reaper: int | None = None
_Popen = subprocess.Popen


class RegisteredPopen(_Popen):  # type: ignore[type-arg]
    """A process that ends with this one."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        register(self.pid)


def begin() -> None:
    """Start the reaper of this process; a no-op without ``/proc``."""
    global _reaper
    if _reaper is not None or not Path("/proc/self/stat").exists():
        return
    started = _Popen(
        [sys.executable, "-IS", __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the whole group of a terminal
    )
    assert started.stdin is not None
    # Only the descriptor is kept: the destructor of a Popen object would warn about its process.
    _reaper = os.dup(started.stdin.fileno())
    started.stdin.close()
    started.returncode = 0
    subprocess.Popen = RegisteredPopen  # type: ignore[misc]


def register(pid: int) -> None:
    """Register a process, to end with this one, including its descendants."""
    started = _start_of(pid)
    if _reaper is None or started is None:
        return
    # One write of less than PIPE_BUF bytes: threads do not mix their lines.
    os.write(_reaper, f"{pid} {started}\n".encode())


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` after the name, beginning with the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def _start_of(pid: int) -> str | None:
    """Return the start time of a process in ticks: together with the id it is unique."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def _is_alive(pid: int, started: str) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[19] == started and fields[0] not in "ZX"


def _is_reaper(pid: int) -> bool:
    try:
        return os.fsencode(__file__) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def descendants(roots: set[int]) -> set[int]:
    """Return these processes and all below them, zombies left out."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None and fields[0] not in "ZX":
            parents[int(name)] = int(fields[1])
    found = roots & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _reap(registered: dict[int, str]) -> None:
    roots = {pid for pid, started in registered.items() if _is_alive(pid, started)}
    stopped: set[int] = set()
    # A stopped process forks no more, so the last round finds all. The reaper of a process of
    # pytest-xdist is excluded: it has registered daemons that are no longer descendants.
    while more := {pid for pid in descendants(roots | stopped) - stopped if not _is_reaper(pid)}:
        for pid in more:
            _send(pid, signal.SIGSTOP)
        stopped |= more
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


def _serve(parent: int) -> None:
    registered: dict[int, str] = {}
    rest = b""
    is_open = True
    while os.getppid() == parent:
        if not select.select([0] if is_open else [], [], [], _CHECK_SECONDS)[0]:
            continue
        rest, is_open = _read(rest, registered)
    while is_open and select.select([0], [], [], 0)[0]:
        rest, is_open = _read(rest, registered)
    _reap(registered)


def _read(rest: bytes, registered: dict[int, str]) -> tuple[bytes, bool]:
    content = os.read(0, 65_536)
    *lines, rest = (rest + content).split(b"\n")
    for line in lines:
        pid, started = line.decode().split()
        registered[int(pid)] = started
    return rest, bool(content)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _serve(int(sys.argv[1]))
