"""Tells a file from another one that took its place under the same name.

The number of a file alone does not: a file system gives it to the next file as soon as it is
free. The time of a file's creation does, and neither writes, checkpoints nor ``VACUUM`` change
either. Python knows that time on macOS and Windows alone, so on Linux the kernel is asked.
"""

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any, Final

# linux/fcntl.h and linux/stat.h
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_BTIME_OFFSET: Final = 0x50


def read_identity(path: str, inode: int) -> str:
    """Return what stays the same as long as the file does; blocks for some microseconds.

    Args:
        path: the file's; a link is not followed.
        inode: its number.

    Returns:
        Digits and one hyphen. Where the file system keeps no creation time, the number alone.

    Raises:
        OSError: it is gone.
    """
    return f"{inode}-{_created(path) or 0:x}"


def _find_statx() -> Callable[..., Any] | None:
    try:
        return ctypes.CDLL(None, use_errno=True).statx
    except (OSError, TypeError, AttributeError):
        return None


_statx = _find_statx()


def _created(path: str) -> int | None:
    """Return when a file was created, in nanoseconds; None if nobody knows."""
    if _statx is None:
        found = os.stat(path, follow_symlinks=False)
        seconds = getattr(found, "st_birthtime", None)
        return None if seconds is None else int(seconds * 1_000_000_000)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, answer):
        number = ctypes.get_errno()
        if os.path.lexists(path):
            return None  # a kernel without this call
        raise OSError(number, os.strerror(number), path)
    (mask,) = struct.unpack_from("=I", answer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else None
