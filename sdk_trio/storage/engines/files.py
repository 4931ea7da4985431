"""The store's files: checks before each answer that the commits are in the files on the disk.

SQLite keeps the descriptors that it opened. If the files are removed, replaced or truncated, SQLite
continues to write commits that no later process will find, and with a write-ahead log it does not
notice. So after every commit, and before its callers get their results, :class:`StoreFile` checks
that the commit is in the files that the *names* refer to now. With one check a second, deliveries
acknowledged in that second could be lost. A check costs six system calls a batch, in addition to
one ``fdatasync`` (docs/adr/0024-store-files.md).

A name can refer to another file only after its directory has changed, and each change sets a time
there (``ctime``) that no program can choose. So one call for the directory replaces those for the
three files, unless the last change is more recent than :data:`SETTLED_SECONDS`: file systems round
the time, and a second change may get the time of the first one. A mount over one of the files
changes no time of the directory, so the names are looked at again every :data:`TRUSTED_SECONDS`.

On Windows an open file can be neither removed nor replaced, so nothing is checked.

When a sync fails, Linux marks the pages that it could not write as clean. The page cache still has
them, the disk does not, and the next sync succeeds without them. In the write-ahead log this is a
hole: SQLite recovers the log up to the first bad frame, so a power cut loses every later commit. In
the database it is a page that SQLite's checkpoint copied; its only other copy is in the log.
:func:`rewrite_log` and :func:`rewrite_pages` write the same bytes again, which makes the pages
dirty again, and sync them. Readers see no difference. Afterwards everything that the log has is on
the disk (docs/adr/0071-log-rewrite.md has the proof).
"""

import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

import apsw
import msgspec

from ...base import clock
from ...base.logs import get_logger
from ...base.opener import open_database, open_file, sync_file, write_file
from ...errors import StoreLostError, StoreUnavailableError

_log = get_logger("storage")

#: The size of the head of a write-ahead log, and of the head of each page in it (a *frame*), in
#: bytes; see "The WAL file format" at sqlite.org.
_LOG_HEAD = 32
_FRAME_HEAD = 24

#: Magic numbers of a log, with the byte order in which its checksums are computed. The checksums
#: are always stored in big-endian order.
_ORDERS = {0x377F0682: "<", 0x377F0683: ">"}

#: The smallest size of an index in use, in bytes; a new one is empty.
_LEAST_INDEX = 32_768

#: Time for a database that seems truncated to grow, in seconds: another process's checkpoint writes
#: the new size before the last page.
_GROWING_SECONDS = 1.0

#: Age of the last change of a directory, in seconds, from which on a further one has another time:
#: the coarsest file systems count two seconds.
SETTLED_SECONDS = 3.0

#: The longest time for which a directory that does not change answers for the names, in seconds.
TRUSTED_SECONDS = 1.0

#: Damage that SQLite reports is believed after this time, in seconds.
_DAMAGE_SECONDS = 2.0

#: SQLite's errors for damage. It reports a page that the disk refuses to read as damage, too (it
#: turns SQLITE_IOERR_CORRUPTFS into SQLITE_CORRUPT).
DAMAGE = (apsw.CorruptError, apsw.NotADBError)

_Identity = tuple[int, int]


class _Written(msgspec.Struct, frozen=True):
    """The last commit that was seen in the log: its frame's number and head.

    ``head`` is the head of the log, with that of its first frame.
    """

    head: bytes
    frame: int
    frame_head: bytes


def report_cut_index(file: str) -> None:
    """Log that the store's index (-shm) was truncated, if an earlier process left it so.

    SQLite maps the index into memory. Truncating the file ends every process that uses it with
    SIGBUS, which the process can neither survive nor log. The next start reports it here.
    """
    index = f"{os.path.realpath(file)}-shm"
    try:
        size = os.path.getsize(index)
    except OSError:
        return
    if size < _LEAST_INDEX and has_log(file):
        _log.error(
            "store.index_truncated",
            file=index,
            bytes=size,
            hint="another program truncated it while the store was in use, which ends the process "
            "(SIGBUS, 'Bus error'); nothing that was acknowledged is lost; find that program, and "
            "keep it away from the data directory",
        )


def has_log(file: str) -> bool:
    """Return whether the write-ahead log of a database has any content."""
    try:
        return os.path.getsize(f"{os.path.realpath(file)}-wal") > 0
    except OSError:
        return False


def may_pass(file: str, since: float) -> bool:
    """Return whether damage first found at ``since`` may be a read error of the disk.

    Args:
        file: the database, opened by SQLite in this process or not.
        since: a monotonic time.
    """
    return clock.monotonic() - since < _DAMAGE_SECONDS or any(
        map(_is_refused, (file, f"{file}-wal"))
    )


def _is_refused(file: str) -> bool:
    with suppress(apsw.CantOpenError):
        reader = _open_by_sqlite(file)
        try:
            reader.xRead(100, 0)
        except apsw.IOError:
            return True
        finally:
            with suppress(apsw.Error):
                reader.xClose()
    return False


def _open_by_sqlite(file: str, access: int = apsw.SQLITE_OPEN_READONLY) -> apsw.VFSFile:
    # Read through SQLite's own file object: closing our own descriptor would drop SQLite's POSIX
    # locks of this file.
    return apsw.VFSFile("", file, [apsw.SQLITE_OPEN_MAIN_DB | access, 0])


class StoreFile:
    """The three files of an open store: the database, its log (-wal) and its index (-shm).

    It belongs to the thread of ``connection``, which has used the write-ahead log already.

    Every method raises :class:`~sdk_trio.errors.StoreUnavailableError` or an error of SQLite if the
    disk cannot be read. That proves nothing, so the caller checks again.

    Raises:
        StoreLostError: the files were removed while they were opened.
    """

    def __init__(self, file: str, connection: apsw.Connection) -> None:
        # The name that the next process will use; SQLite's own name has all links resolved.
        self.file: str = os.path.abspath(file)
        self._log = connection.filename_wal
        self._index = f"{self._log.removesuffix('-wal')}-shm"
        self.page_size: int = int(connection.pragma("page_size"))
        self._written: _Written | None = None
        # Device and inode: a name that leads to another file later is another store.
        self._database_id = self._identity(self.file)[0]
        self._log_id = self._identity(self._log)[0]
        self._index_id = self._identity(self._index)[0]
        self._size = 0
        self._directory = os.path.dirname(self.file)
        # Device, inode and last change of the directory in which the three names were found to be
        # right; None: they have to be looked at.
        self._trusted_state: tuple[int, int, int] | None = None
        self._trusted_until = 0.0
        self._reader = _open_by_sqlite(self.file)
        self._head = self._read_head()
        # A plain descriptor is safe here: SQLite locks no byte of the log. It is opened last, so
        # that no failure leaves it open.
        try:
            self._log_descriptor = open_file(self._log, os.O_RDONLY)
        except FileNotFoundError:
            raise self._lost(self._log, "was removed") from None
        except OSError as error:
            raise self._unavailable(self._log, error) from error

    def close(self) -> None:
        """Close the descriptor of the check; the connection stays open."""
        with suppress(apsw.Error):
            self._reader.xClose()
        descriptor, self._log_descriptor = self._log_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def require_same(self) -> None:
        """Raise :class:`StoreLostError` unless the name refers to the database that was opened."""
        self._require(self.file, self._database_id)

    def require_written(self, frames: int) -> None:
        """Check that a commit is in the files that a restart would open.

        Args:
            frames: number of frames in the log after the commit, as SQLite counts them.

        Raises:
            StoreLostError: it is not.
        """
        if sys.platform == "win32":
            return
        self._require_files()
        head = self._read_log(0, _LOG_HEAD + _FRAME_HEAD)
        last = self._read_log(self._offset(frames), _FRAME_HEAD)
        # Both frames are of this log, by its salts, and the last one ends a transaction.
        salts = head[16:24]
        whole = len(head) == _LOG_HEAD + _FRAME_HEAD and len(last) == _FRAME_HEAD
        if not (whole and head[40:48] == salts == last[8:16] and any(salts) and any(last[4:8])):
            raise self._lost(self._log, "was cut short or overwritten")
        # The previous commit must still be there: a log that was truncated in between has a hole,
        # and a restart reads only up to the hole.
        if not self._still_has(self._written, head):
            raise self._lost(self._log, "was cut short or overwritten")
        self._written = _Written(head, frames, last)

    def is_unchanged(self) -> bool:
        """Return whether all commits are certainly in place.

        False if the log was restarted: either another process has checkpointed it, which is normal,
        or it was truncated. Only a write shows which, with :meth:`require_written`.

        Raises:
            StoreLostError: they are not.
        """
        if sys.platform == "win32":
            return True
        self._require_files()
        written = self._written
        if written is None:
            return False
        head = self._read_log(0, _LOG_HEAD + _FRAME_HEAD)
        return head == written.head and self._still_has(written, head)

    def _still_has(self, written: _Written | None, head: bytes) -> bool:
        if written is None or written.head != head:
            return True  # a new log: the previous one was copied into the database completely
        return self._read_log(self._offset(written.frame), _FRAME_HEAD) == written.frame_head

    def _offset(self, frame: int) -> int:
        return _LOG_HEAD + (frame - 1) * (_FRAME_HEAD + self.page_size)

    # -- looking ---------------------------------------------------------------------------------

    def _require_files(self) -> None:
        size = self._require_names()
        if self._read_head() != self._head:
            raise self._lost(self.file, "was cut short or overwritten")
        # A database may grow; only a smaller one needs a reason.
        if size < self._size:
            self._require_whole(size)
        self._size = size

    def _require_names(self) -> int:
        """Check that the three names refer to our files; return the size of the database."""
        # Read before the names, so that the next check finds a change in between.
        state, changed_at = self._state_of_directory()
        now = clock.monotonic()
        if state is not None and state == self._trusted_state and now < self._trusted_until:
            return self._reader.xFileSize()
        size = self._require(self.file, self._database_id)
        self._require(self._log, self._log_id)
        self._require(self._index, self._index_id)
        is_settled = clock.wall() - changed_at > SETTLED_SECONDS and not any(
            map(os.path.islink, (self.file, self._log, self._index))
        )
        self._trusted_state = state if is_settled else None
        self._trusted_until = now + TRUSTED_SECONDS
        return size

    def _state_of_directory(self) -> tuple[tuple[int, int, int] | None, float]:
        try:
            found = os.stat(self._directory)
        except OSError:
            return None, 0.0  # the check of the names reports the reason
        return (found.st_dev, found.st_ino, found.st_ctime_ns), found.st_ctime

    def _require(self, path: str, identity: _Identity) -> int:
        found, size = self._identity(path)
        if found != identity:
            raise self._lost(path, "was replaced by another file")
        return size

    def _identity(self, path: str) -> tuple[_Identity, int]:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._lost(path, "was removed") from None
        except OSError as error:
            raise self._unavailable(path, error) from error
        return (found.st_dev, found.st_ino), found.st_size

    def _require_whole(self, size: int) -> None:
        """Check that a smaller database is complete: after VACUUM its head has the new size."""
        # A checkpoint of another process writes the new size into the head before the last page.
        deadline = clock.monotonic() + _GROWING_SECONDS
        while size < self._declared_size():
            if clock.monotonic() >= deadline:
                raise self._lost(self.file, "was cut short")
            clock.sleep(0.01)
            size = self._require(self.file, self._database_id)

    def _declared_size(self) -> int:
        return int.from_bytes(self._read_database()[28:32], "big") * self.page_size

    def _read_head(self) -> bytes:
        """Return the constant parts of the database's head: magic, page size, application id."""
        head = self._read_database()
        return head[:18] + head[68:72]

    def _read_database(self) -> bytes:
        # An error of SQLite here is a read error of the disk, which proves nothing, so it
        # propagates. A truncated file can be read, and is shorter.
        return self._reader.xRead(100, 0)

    def _read_log(self, offset: int, size: int) -> bytes:
        if sys.platform == "win32":
            return b""
        try:
            # pread shares no position, and the page cache has the bytes: the commit has just
            # written them.
            return os.pread(self._log_descriptor, size, offset)
        except OSError as error:
            raise self._unavailable(self._log, error) from error

    def _unavailable(self, path: str, error: OSError) -> StoreUnavailableError:
        of = "" if path == self.file else f", of the store {self.file},"
        return StoreUnavailableError(
            f"{path}{of} cannot be read at present ({error.strerror}): check the disk (dmesg)"
        )

    def _lost(self, path: str, what: str) -> StoreLostError:
        of = "" if path == self.file else f", of the store {self.file},"
        return StoreLostError(
            f"{path}{of} {what} while it was in use; no delivery is accepted: put back what "
            "was there, or restore a backup ('storage restore FILE'), and restart"
        )


# -- after a sync that failed ----------------------------------------------------------------------


def rewrite_log(log: str, frames: int) -> set[int]:
    """Check the log, write it again, sync it, and return the numbers of its pages.

    The caller holds the write lock: no process appends to the log or restarts it meanwhile. SQLite
    locks no byte of the log, so closing our descriptor releases no lock.

    Args:
        log: the write-ahead log.
        frames: the least number of frames in the log.

    Raises:
        StoreLostError: the page cache no longer has them either.
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
                f"{log}: a sync has failed, and the data that it should have written cannot be "
                "read back; no delivery is accepted: check the disk (dmesg), then restart"
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
    SQLite has no function for that lock. But a checkpoint takes it before it waits for the write
    lock, and calls the busy handler while it waits (sqlite.org/c3ref/wal_checkpoint_v2.html).

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
        # The checkpoint was started only for its lock. Without the write lock it would go on as a
        # passive one, but an interrupted checkpoint ends before its first page.
        connection.interrupt()
        return False

    try:
        # Before its first read, a connection has not seen the log and checkpoints nothing.
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        connection.set_busy_handler(with_lock)
        with suppress(apsw.InterruptError, apsw.BusyError):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
    finally:
        connection.close()
    if failure is not None:
        raise failure


def _rewrite(file: str, pages: Iterable[int], page_size: int) -> None:
    database = _open_by_sqlite(file, apsw.SQLITE_OPEN_READWRITE)
    try:
        for page in sorted(pages):
            offset = (page - 1) * page_size
            # A page beyond the end was not written by any checkpoint yet.
            if content := database.xRead(page_size, offset):
                database.xWrite(content, offset)
        database.xSync(apsw.SQLITE_SYNC_FULL)
    finally:
        database.xClose()
