"""Write the store's files again after a sync that failed, so that the disk surely has them.

When a sync fails, Linux marks the pages that it could not write as clean. The page cache still has
them, the disk does not, and the next sync succeeds without them. In the write-ahead log this is a
hole: SQLite recovers the log up to the first bad frame, so a power cut loses every later commit. In
the database it is a page that a checkpoint copied, and whose only other copy is in the log.

:func:`rewrite_log` and :func:`rewrite_pages` write the same bytes once more, which makes the pages
dirty again, and sync them. Readers see no difference. Afterwards everything that the log has is on
the disk (docs/adr/0071-log-rewrite.md has the proof).
"""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

import apsw

from ...base.opener import open_database, open_file, sync_file, write_file
from ...errors import StoreLostError

#: Sizes of the head of the log and of each frame's head, in bytes; see "The WAL file format" at
#: sqlite.org.
_LOG_HEAD = 32
_FRAME_HEAD = 24

#: Magic numbers of a log, with the byte order in which its checksums are computed. They are stored
#: in big-endian order by both.
_ORDERS = {0x377F0682: "<", 0x377F0683: ">"}


def rewrite_log(log: str, frames: int) -> set[int]:
    """Check the log, write it again, sync it, and return the numbers of the pages that it has.

    The caller holds the write lock: no process appends to the log or restarts it meanwhile. SQLite
    locks no byte of the log, so closing our descriptor releases no lock.

    Args:
        log: the write-ahead log.
        frames: number of frames that the log has at least.

    Raises:
        StoreLostError: the page cache has lost them as well.
        OSError: the disk still fails.
    """
    pages = set()
    descriptor = open_file(log, os.O_RDWR)
    try:
        found = 0
        for offset, content in _valid_parts(descriptor):
            write_file(descriptor, content, offset)
            if offset:
                found += 1
                pages.add(int.from_bytes(content[:4], "big"))
        if found < frames:
            raise StoreLostError(
                f"{log}: a sync has failed, and what it was to write cannot be read back either; "
                "nothing is accepted any more: check the disk (dmesg), then restart"
            )
        sync_file(descriptor)
    finally:
        os.close(descriptor)
    return pages


def _valid_parts(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yield the log's head and each frame up to the first bad one, with their offsets."""
    head = os.pread(descriptor, _LOG_HEAD, 0)
    order = _ORDERS.get(int.from_bytes(head[:4], "big"))
    if order is None or len(head) < _LOG_HEAD:
        return
    total = _checksum(order, (0, 0), head[:24])
    if struct.pack(">II", *total) != head[24:]:
        return
    yield 0, head
    size = _FRAME_HEAD + int.from_bytes(head[8:12], "big")
    offset = _LOG_HEAD
    while len(frame := os.pread(descriptor, size, offset)) == size:
        total = _checksum(order, total, frame[:8] + frame[_FRAME_HEAD:])
        # A frame of an earlier log has other salts.
        if frame[8:24] != head[16:24] + struct.pack(">II", *total):
            return
        yield offset, frame
        offset += size


def _checksum(order: str, total: tuple[int, int], content: bytes) -> tuple[int, int]:
    first, second = total
    words = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    for word in words:
        first = (first + word + second) & 0xFFFFFFFF
        second = (second + next(words) + first) & 0xFFFFFFFF
    return first, second


def rewrite_pages(file: str, pages: Iterable[int], page_size: int) -> None:
    """Write pages of the database again and sync it; the caller holds the write lock.

    It holds the checkpoint lock meanwhile, so no process copies newer content into these pages.
    SQLite has no call for that lock. But a checkpoint takes it before it waits for the write lock,
    and calls the busy handler while it waits (sqlite.org/c3ref/wal_checkpoint_v2.html).

    Raises:
        apsw.BusyError: another process runs a checkpoint.
        apsw.IOError: the disk still fails.
    """
    failure: apsw.Error | None = apsw.BusyError("another process runs a checkpoint")
    connection = open_database(file, flags=apsw.SQLITE_OPEN_READWRITE)

    def with_lock(_calls: int) -> bool:
        nonlocal failure
        try:
            _rewrite(file, pages, page_size)
            failure = None
        except apsw.Error as error:
            failure = error
        # The checkpoint was only for its lock: it must not copy anything.
        connection.interrupt()
        return False

    try:
        # Before its first read, a connection does not know of the log and checkpoints nothing.
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        connection.set_busy_handler(with_lock)
        with suppress(apsw.InterruptError, apsw.BusyError):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
    finally:
        connection.close()
    if failure is not None:
        raise failure


def _rewrite(file: str, pages: Iterable[int], page_size: int) -> None:
    # SQLite's own file object: closing a descriptor of ours would release SQLite's locks.
    flags = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE
    database = apsw.VFSFile("", file, [flags, 0])
    try:
        for page in sorted(pages):
            offset = (page - 1) * page_size
            # Nothing is read where no checkpoint has written yet.
            if content := database.xRead(page_size, offset):
                database.xWrite(content, offset)
        database.xSync(apsw.SQLITE_SYNC_FULL)
    finally:
        database.xClose()
