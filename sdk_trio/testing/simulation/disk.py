"""The disk of a simulation: SQLite's files, whose unsynced writes a power cut drops or tears.

The files are real files in a temporary directory; they represent the page cache. For each block
written since the last sync, the disk remembers the old content. A power cut decides for each such
block, at random, what the platter has: the old content, the new one, or sectors of both.

A sync that fails leaves blocks *lost*, as Linux does: the page cache has the new content, no later
sync writes it, and a power cut brings the old one back.
"""

import os
import random
from collections.abc import Callable

import apsw
import msgspec

#: Sizes in bytes of the units that the page cache and the disk write atomically.
BLOCK = 4096
SECTOR = 512

#: The probabilities that an unsynced block is old, torn or new after a power cut.
_OLD, _TORN = 0.4, 0.15


class HostDownError(BaseException):
    """The host of this call has crashed. No code of the product catches it."""


class LockHeldError(BaseException):
    """Another host holds the lock that this call waits for. No code of the product catches it."""


class _File(msgspec.Struct):
    """The older state of the platter: the replaced blocks, and the size at the last sync."""

    size: int
    dirty: dict[int, bytes] = {}
    lost: dict[int, bytes] = {}


class Disk:
    """The files of one data directory.

    Args:
        dice: decides what a crash and a failed sync leave.
        directory: only the files in it are simulated.
        now: returns the virtual seconds.
    """

    def __init__(self, dice: random.Random, directory: str, now: Callable[[], float]) -> None:
        self._now = now
        self._dice = dice
        self._directory = f"{directory}{os.sep}"
        self._files: dict[str, _File] = {}
        #: Files that were opened for writing and never synced.
        self.unsynced: dict[str, None] = {}
        #: The end of each fault: ``full``, ``sync``, ``read``. A job that waits for the end
        #: advances the time itself, while no task runs.
        self.ends: dict[str, float] = {}

    def holds(self, path: str | None) -> bool:
        """Return whether ``path`` is on this disk."""
        return path is not None and path.startswith(self._directory)

    def has(self, fault: str) -> bool:
        """Return whether the disk currently has the fault ``full``, ``sync`` or ``read``."""
        return fault in self.ends and self._now() < self.ends[fault]

    def will_write(
        self, path: str, offset: int, length: int, size: int, read: Callable[[int, int], bytes]
    ) -> None:
        """Remember what a write at ``offset`` replaces.

        Args:
            size: the current size of the file, in bytes.
            read: returns bytes of the file, called with an offset and a maximum number.

        Raises:
            OSError: the disk is full.
        """
        if self.has("full"):
            raise OSError(28, os.strerror(28))
        file = self._file(path, size)
        for block in range(offset // BLOCK, (offset + length - 1) // BLOCK + 1):
            if block not in file.dirty:
                old = file.lost.pop(block, None)
                file.dirty[block] = read(BLOCK, block * BLOCK) if old is None else old

    def will_truncate(
        self, path: str, length: int, size: int, read: Callable[[int, int], bytes]
    ) -> None:
        """Remember what a truncation to ``length`` bytes removes; see :meth:`will_write`."""
        if length < size:
            self.will_write(path, length, size - length, size, read)

    def _file(self, path: str, size: int) -> _File:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _File(size)
        return file

    def sync(self, path: str, size: int) -> None:
        """Put a file on the platter.

        Raises:
            OSError: the disk failed; some blocks are lost.
        """
        file = self._file(path, size)
        if self.has("sync"):
            for block in list(file.dirty):
                old = file.dirty.pop(block)
                if self._dice.random() < 0.7:
                    file.lost[block] = old
            raise OSError(5, os.strerror(5))
        file.dirty.clear()
        file.size = size
        self.unsynced.pop(path, None)

    def forget(self, path: str) -> None:
        """Note that a file was deleted."""
        self._files.pop(path, None)
        self.unsynced.pop(path, None)

    def cut_power(self) -> int:
        """Give the files the content of the platter; return how many blocks differ from what was
        written.

        No connection may be open.
        """
        reverted = 0
        for path, file in self._files.items():
            if os.path.exists(path):
                reverted += self._revert(path, file)
        for path in self.unsynced:
            if os.path.exists(path) and self._dice.random() < 0.5:
                os.truncate(path, self._dice.randrange(os.path.getsize(path) + 1))
                reverted += 1
        self._files.clear()
        self.unsynced.clear()
        return reverted

    def _revert(self, path: str, file: _File) -> int:
        reverted = 0
        size = os.path.getsize(path)
        shrinks = bool(file.dirty) and self._dice.random() < 0.5
        with open(path, "r+b") as opened:
            for block, old in sorted({**file.dirty, **file.lost}.items()):
                roll = 0.0 if block in file.lost else self._dice.random()
                if roll >= _OLD + _TORN:
                    continue
                opened.seek(block * BLOCK)
                new = opened.read(BLOCK)
                old = old.ljust(len(new), b"\0")
                if roll >= _OLD:
                    cut = self._dice.randrange(1, BLOCK // SECTOR) * SECTOR
                    old = new[:cut] + old[cut:]
                opened.seek(block * BLOCK)
                opened.write(old[: max(0, max(size, file.size) - block * BLOCK)])
                reverted += 1
            if shrinks and file.size < size:
                opened.truncate(file.size)
        return reverted


class SimulatedFiles(apsw.VFS):
    """SQLite's view of the disk: its own file functions, with :class:`Disk` in between.

    Args:
        disk: the disk.
        host: returns the host of the current task.
        touch: called before a host reads or changes a file; raises
            :class:`HostDownError` if the host has crashed.
    """

    NAME = "sdk_trio-simulation"

    def __init__(
        self, disk: Disk, host: Callable[[], object], touch: Callable[[object, str], None]
    ) -> None:
        self.disk = disk
        self.host = host
        self.touch = touch
        self.base = apsw.vfs_names()[0]
        # Registered as the default, so that every database of this process uses it.
        super().__init__(self.NAME, self.base, makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        """Open a file."""
        path = name if name is None or isinstance(name, str) else name.filename()
        if not self.disk.holds(path):
            return apsw.VFSFile(self.base, name, flags)
        assert path is not None
        return _SimulatedFile(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        """Delete a file."""
        if self.disk.holds(filename):
            self.touch(self.host(), "delete")
            self.disk.forget(filename)
        super().xDelete(filename, syncdir)


class _SimulatedFile(apsw.VFSFile):
    def __init__(
        self, vfs: SimulatedFiles, path: str, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        self._vfs = vfs
        self._disk = vfs.disk
        self._path = path
        self._host = vfs.host()
        super().__init__(vfs.base, name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        if self._disk.ends and self._disk.has("read"):
            self._vfs.touch(self._host, "read")
            raise apsw.IOError("the simulated disk does not read")
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._vfs.touch(self._host, "write")
        try:
            self._disk.will_write(self._path, offset, len(data), super().xFileSize(), super().xRead)
        except OSError as error:
            raise apsw.FullError(str(error)) from error
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._vfs.touch(self._host, "truncate")
        self._disk.will_truncate(self._path, newsize, super().xFileSize(), super().xRead)
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self._vfs.touch(self._host, "sync")
        try:
            self._disk.sync(self._path, super().xFileSize())
        except OSError as error:
            raise apsw.IOError(str(error)) from error
