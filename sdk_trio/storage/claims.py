"""The claims file: the inline runs that were begun before the store has committed their claims.

The claim of a delivery that is surely new is not waited for: its handler runs at once, and most
handlers have ended before the claim is handed to the committing thread. A handler that ends the
process in that moment would leave no trace, and each redelivery would end the process again. So
the key of each such run stands in this file while no commit knows of it. It is written and not
synced: what the kernel has survives the process, and need not survive the machine
(docs/adr/0047-unawaited-claims.md). It is not mapped into memory, because a mapped
file that another program truncates ends the process (SIGBUS).

A slot that is found at the start is a run during which the process ended, unless the store knows
its key: then the claim was committed, and the store counts the run itself. What is found stays in
the file, as a run that has *ended* a process, until the key's next claim counts it.
"""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence

import msgspec

from ..base.logs import get_logger
from ..base.opener import open_file

_log = get_logger("storage")

#: Name of the file, beside the database.
CLAIMS_NAME = "inbox.claims"

#: Runs that have a place at one time; further ones wait for their claims.
SLOTS = 256

#: Runs found at starts that are kept, the last ones: a sender that never delivers again must not
#: take the places for good.
MOST_ENDED = SLOTS // 4

_MAGIC = b"sdk-trio claims 1\n"

# Sum over the rest, number of counted ends of the process (0: not looked at yet), length of the
# key, and the time at which the run began, in Unix seconds. A key has at most 293 bytes.
_HEAD = struct.Struct("<IHHd")
_SLOT = 320
_LARGEST_KEY = _SLOT - _HEAD.size
_SIZE = _SLOT * (SLOTS + 1)
_NOTHING = bytes(_SLOT)


class EndedRun(msgspec.Struct, frozen=True):
    """A run of ``key`` during which the process ended, ``ends`` times, before it was committed."""

    key: str
    ends: int
    begun: float
    slot: int


def read_claims(path: str | os.PathLike[str], *, is_new: bool) -> list[EndedRun]:
    """Return the runs that earlier processes have left in the file, the oldest first.

    That it is missing or damaged is logged, unless ``is_new`` says that the store is new, too. A
    slot with a wrong sum is passed over: its process has ended before the handler began, or the
    machine has lost its power.

    Raises:
        OSError: it cannot be read, or it is no ordinary file.
    """
    content = _read(path)
    if not content.startswith(_MAGIC) or len(content) != _SIZE:
        if content or not is_new:
            _log.warning(
                "store.claims_lost",
                file=os.fspath(path),
                found="damaged" if content else "nothing",
                hint="whether the last process ended in the first moment of an inline run is not "
                "known; such a run is counted from its next one on",
            )
        return []
    runs = []
    for slot in range(1, SLOTS + 1):
        total, ends, length, begun = _HEAD.unpack_from(content, slot * _SLOT)
        used = content[slot * _SLOT :][: _HEAD.size + length]
        if 0 < length <= _LARGEST_KEY and zlib.crc32(used[4:]) == total:
            key = used[_HEAD.size :].decode("utf-8", "replace")
            runs.append(EndedRun(key, ends, begun, slot))
    return sorted(runs, key=lambda run: run.begun)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read(_SIZE + 1)


def _open(path: str | os.PathLike[str], flags: int) -> int:
    # A link in its place is refused: another file of ours would be overwritten. Not blocking: a
    # pipe in its place would never open.
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    descriptor = open_file(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is no ordinary file: remove it")
    return descriptor


def _record(key: bytes, ends: int, begun: float) -> bytes:
    content = _HEAD.pack(0, ends, len(key), begun)[4:] + key
    return zlib.crc32(content).to_bytes(4, "little") + content


def _seek_and_write(descriptor: int, content: bytes, offset: int) -> None:
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, content)


# Windows has no pwrite. A write of a slot within the file is never short.
_write_at: Callable[[int, bytes, int], object] = getattr(os, "pwrite", _seek_and_write)


class ClaimsFile:
    """The open claims file; one process at a time may have it.

    Args:
        path: the file; it is made anew.
        left: what :func:`read_claims` has found there, without the runs that the store knows.

    Raises:
        OSError: it cannot be opened or written, or it is no ordinary file.
    """

    def __init__(self, path: str | os.PathLike[str], left: Sequence[EndedRun]) -> None:
        self._free = list(range(SLOTS, 0, -1))
        self._spent: list[int] = []
        self.ended: dict[str, EndedRun] = {}
        content = bytearray(_MAGIC.ljust(_SIZE, b"\0"))
        for run in left[-MOST_ENDED:]:
            # An end that an earlier start has found is counted already: such a key runs no more
            # before its claim is in the store, and is not in this file any more then.
            slot, ends = self._free.pop(), run.ends or 1
            record = _record(run.key.encode(), ends, run.begun)
            content[slot * _SLOT : slot * _SLOT + len(record)] = record
            self.ended[run.key] = EndedRun(run.key, ends, run.begun, slot)
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            # Written as a whole, so that no later write needs room on the disk.
            if os.write(descriptor, content) != _SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, _SIZE)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        for run in self.ended.values():
            _log.warning(
                "store.run_ended_process",
                key=run.key,
                process_ends=run.ends,
                hint="the process ended when the handler of this inline event had just begun; it "
                "is counted, and its next delivery waits for its claim",
            )

    def take(self, key: str, now: float) -> int | None:
        """Write down a run that is about to begin; None if that is impossible.

        Args:
            key: the delivery's.
            now: Unix seconds.

        Returns:
            the slot, for :meth:`clear`.
        """
        if self._spent:
            self._clear_spent()
        content = key.encode()
        if not self._free or len(content) > _LARGEST_KEY:
            return None
        slot = self._free.pop()
        record = _record(content, 0, now)
        try:
            _write_at(self._descriptor, record, slot * _SLOT)
        except OSError:
            self._free.append(slot)
            return None
        return slot

    def clear(self, slot: int) -> None:
        """Give up a slot: its run is over, or counted by the store."""
        try:
            _write_at(self._descriptor, _NOTHING, slot * _SLOT)
        except OSError:
            self._spent.append(slot)
        else:
            self._free.append(slot)

    def clear_later(self, slot: int) -> None:
        """Give up a slot at the next :meth:`take`, while the disk may make this thread wait."""
        self._spent.append(slot)

    def counted(self, key: str) -> None:
        """Forget an ended run, which the store has counted."""
        run = self.ended.pop(key, None)
        if run is not None:
            self.clear(run.slot)

    def close(self) -> None:
        """Close the file; what it holds stays."""
        descriptor = self._descriptor
        if descriptor >= 0:
            self._clear_spent()
            self._descriptor = -1
            os.close(descriptor)

    def _clear_spent(self) -> None:
        spent, self._spent = self._spent, []
        for slot in spent:
            self.clear(slot)
