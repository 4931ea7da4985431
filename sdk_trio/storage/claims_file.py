"""The claims file: the keys of runs whose claims no commit has reached yet, on SQLite.

It is there for a handler that ends the process in the first moment of an unawaited run
(:mod:`.unawaited`): without a trace of the run, each redelivery would end the process again. The
file is written and not synced: its content must survive the process, not the machine. It is not
mapped into memory, because another program that truncates a mapped file ends the process (SIGBUS).

At a start, a key in the file is that of an *interrupted run*: the process ended during it. If the
store knows the key, the claim was committed, and the store counts the run itself. Otherwise the run
stays in the file until the next claim of its key has counted it.
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

#: Slots for runs; if all are taken, a claim is awaited.
SLOTS = 256

#: The most interrupted runs that are remembered, the newest ones: their slots must not stay taken
#: if their senders never deliver again.
MOST_INTERRUPTED = SLOTS // 4

_MAGIC = b"sdk-trio claims 1\n"

# The head of a slot: checksum of the rest, number of ends of the process (0: no start has counted
# them yet), length of the key, start of the run in Unix seconds. A key has at most 293 bytes.
_HEAD = struct.Struct("<IHHd")
_SLOT = 320
_LARGEST_KEY = _SLOT - _HEAD.size
_SIZE = _SLOT * (SLOTS + 1)
_NOTHING = bytes(_SLOT)


class InterruptedRun(msgspec.Struct, frozen=True):
    """A run of ``key`` during which the process ended before its claim was committed.

    ``process_ends`` is 1, or 0 in a slot that no start has read yet.
    """

    key: str
    process_ends: int
    begun: float
    slot: int


def read_claims(path: str | os.PathLike[str], *, is_new: bool) -> list[InterruptedRun]:
    """Return the runs that earlier processes have left in the file, the oldest first.

    A missing or damaged file is logged, unless ``is_new`` says that the store is new, too. A slot
    with a wrong checksum is skipped: its process ended before the handler began, or the machine
    lost its power.

    Raises:
        OSError: it cannot be read, or it is not a regular file.
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
            runs.append(InterruptedRun(key, ends, begun, slot))
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
        raise OSError(f"{os.fspath(path)} is not a regular file: remove it")
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

    A slot is in one of three states:

    - *free*: empty, or it still has the key of a run that the store has recorded;
    - *taken*: it has the key of a run in progress, or of an interrupted run;
    - *to be cleared*: its run is over, and its key must be removed before it is free.

    Args:
        path: the file; its content is overwritten.
        left: the result of :func:`read_claims`, without the runs that the store knows.

    Raises:
        OSError: it cannot be opened or written, or it is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], left: Sequence[InterruptedRun]) -> None:
        self._free = list(range(SLOTS, 0, -1))
        # Those of the free slots that still have a key.
        self._with_key: dict[int, None] = {}
        self._to_clear: list[int] = []
        #: By key.
        self.interrupted: dict[str, InterruptedRun] = {}
        content = bytearray(_MAGIC.ljust(_SIZE, b"\0"))
        for run in left[-MOST_INTERRUPTED:]:
            # 0 if no start has found this run before: it has ended one process. A later start keeps
            # the number, because the key's next claim removes the run from this file.
            slot, ends = self._free.pop(), run.process_ends or 1
            record = _record(run.key.encode(), ends, run.begun)
            content[slot * _SLOT : slot * _SLOT + len(record)] = record
            self.interrupted[run.key] = InterruptedRun(run.key, ends, run.begun, slot)
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            # Written as a whole, so that no later write needs more space on the disk.
            if os.write(descriptor, content) != _SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, _SIZE)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        for run in self.interrupted.values():
            _log.warning(
                "store.run_ended_process",
                key=run.key,
                process_ends=run.process_ends,
                hint="the process ended when the handler of this inline event had just begun; it "
                "is counted, and its next delivery waits for its claim",
            )

    def take(self, key: str, now: float) -> int | None:
        """Write the key of a run that is about to begin; None if that is impossible.

        Args:
            key: the delivery's.
            now: Unix seconds.

        Returns:
            the slot, for :meth:`free`.
        """
        if self._to_clear:
            self._clear_slots()
        content = key.encode()
        if not self._free or len(content) > _LARGEST_KEY:
            return None
        slot = self._free.pop()
        try:
            _write_at(self._descriptor, _record(content, 0, now), slot * _SLOT)
        except OSError:
            self._free.append(slot)
            return None
        self._with_key.pop(slot, None)
        return slot

    def free(self, slot: int, *, is_recorded: bool = False, later: bool = False) -> None:
        """Give up the slot of a run that is over.

        Args:
            slot: the result of :meth:`take`.
            is_recorded: the outcome is in the store, so the key may stay in the file: a start finds
                it in the store, too.
            later: remove the key at the next :meth:`take`, because the disk may make this thread
                wait at present.
        """
        if is_recorded:
            self._with_key[slot] = None
            self._free.append(slot)
            return
        self._to_clear.append(slot)
        if not later:
            self._clear_slots()

    def forget_interrupted(self, key: str) -> None:
        """Forget an interrupted run, which the store has counted."""
        run = self.interrupted.pop(key, None)
        if run is not None:
            self.free(run.slot)

    def clear_recorded(self) -> None:
        """Remove the keys of recorded runs, before the store may forget them."""
        while self._with_key:
            slot, _ = self._with_key.popitem()
            if not self._clear(slot):
                return  # one key may be taken for that of an interrupted run

    def close(self) -> None:
        """Close the file; what it holds stays."""
        descriptor = self._descriptor
        if descriptor >= 0:
            self._clear_slots()
            self.clear_recorded()
            self._descriptor = -1
            os.close(descriptor)

    def _clear_slots(self) -> None:
        slots, self._to_clear = self._to_clear, []
        for slot in slots:
            (self._free if self._clear(slot) else self._to_clear).append(slot)

    def _clear(self, slot: int) -> bool:
        """Remove the key of a slot; False: the disk does not take it."""
        try:
            _write_at(self._descriptor, _NOTHING, slot * _SLOT)
        except OSError:
            return False
        return True
