"""Says what a SIGHUP would do to a process, before one is sent."""

import os
import subprocess
from pathlib import Path
from typing import Final

import attrs

#: The replicator itself ends when it is sent SIGHUP: it reloads nothing.
BARE_REPLICATOR: Final = "litestream"

#: SIGHUP, signal 1, in the masks of /proc/PID/status.
_HUP_BIT: Final = 1

_PS_SECONDS: Final = 5.0


@attrs.frozen
class Harm:
    """Why a process must not be sent SIGHUP: ``reason`` is one word, ``detail`` for people."""

    reason: str
    detail: str


def find_harm(pid: int, *, proc: Path = Path("/proc")) -> Harm | None:
    """Return why SIGHUP would not do what it is meant to do; None when nothing speaks against it.

    Known to end by it: the replicator's own binary, and every process that has set no handler.

    Args:
        pid: of a process that exists, or did a moment ago.
        proc: where the kernel shows processes; where there is none, ``ps`` is asked.
    """
    if not (proc / "self").exists():
        return _by_name(_name_by_ps(pid))
    try:
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
        status = (proc / str(pid) / "status").read_text(errors="replace")
        command = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except FileNotFoundError:
        return Harm("stale", "there is no such process")
    except OSError as error:
        return Harm("unknown", f"it cannot be seen what it is ({error.strerror})")
    return _by_name(name) or _by_command(command) or _by_program(pid, proc) or _by_status(status)


def _by_name(name: str) -> Harm | None:
    if os.path.basename(name) != BARE_REPLICATOR:
        return None
    return Harm(
        "bare",
        "it is the replicator itself, which SIGHUP would end; run it under "
        "'replication run --pid-file FILE', which reloads",
    )


def _by_command(command: list[str]) -> Harm | None:
    # A copy of the binary under another name is still called with its own words.
    called = command[0] if command[1:2] != ["replicate"] else BARE_REPLICATOR
    return _by_name(called)


def _by_program(pid: int, proc: Path) -> Harm | None:
    try:
        return _by_name(os.readlink(proc / str(pid) / "exe").removesuffix(" (deleted)"))
    except OSError:
        return None  # another user's: its name and its command have been looked at


def _by_status(status: str) -> Harm | None:
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields.get("State", "").strip().startswith(("Z", "X")):
        return Harm("stale", "it has ended")
    if _has_hup(fields, "SigIgn"):
        return Harm("deaf", "it ignores SIGHUP")
    # A program may block the signal and read it from a descriptor instead of handling it.
    if not (_has_hup(fields, "SigCgt") or _has_hup(fields, "SigBlk")):
        return Harm("unprepared", "it does not handle SIGHUP, which would end it")
    return None


def _has_hup(fields: dict[str, str], mask: str) -> bool:
    return bool(int(fields.get(mask, "0").strip() or "0", 16) & _HUP_BIT)


def _name_by_ps(pid: int) -> str:
    try:
        found = subprocess.run(
            ["/bin/ps", "-o", "comm=", "-p", str(pid)],
            capture_output=True,
            timeout=_PS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.decode(errors="replace").strip()
