"""The holders of file locks, as the kernel lists them. Linux only."""

from pathlib import Path


def lock_holder(inode: int) -> int | None:
    """Return the process that holds the flock(2) lock of a file; None if none or unknown.

    The device is not compared: on btrfs and overlayfs it differs from that of stat(2).
    """
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    for line in locks.splitlines():
        # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF"; a waiting process has "->" after "1:".
        _, kind, _, _, pid, file, *_ = line.split()
        if kind == "FLOCK" and file.rpartition(":")[2] == str(inode) and int(pid) > 0:
            return int(pid)
    return None
