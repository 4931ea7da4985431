"""A power cut: the state of a process's files after the machine loses its power.

A preloaded library records every write and sync (``power_cut.c``). :func:`replay` replays the
records and tracks the content of each page of 4 KB in the page cache and on the disk:

- A write changes the page cache and makes the page dirty.
- A successful sync writes the pages that were dirty at its beginning to the disk.
- A *failed* sync writes nothing and marks these pages clean, as Linux does: they do not reach the
  disk before they are written again (https://wiki.postgresql.org/wiki/Fsync_Errors).

Creating and removing files counts as durable at once.
"""

import random
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from .preloaded import compiled

_SOURCE = Path(__file__).with_suffix(".c")

#: Size of a page of the page cache, in bytes.
PAGE = 4096

_RECORD = struct.Struct("=IIIIQQ")
_WRITE, _TRUNCATE, _UNLINK, _SYNC_BEGIN, _SYNC_DONE, _SYNC_FAILED = range(1, 7)

#: Files that are useless after a power cut: SQLite rebuilds its index.
_SUFFIXES_LOST = ("-shm",)


@attrs.define
class _File:
    """One file: its page cache, its disk, and the dirty pages with the number of their write."""

    cached: bytearray
    disk: bytearray
    dirty: dict[int, int] = attrs.Factory(dict)
    writes: int = 0

    def write(self, at: int, data: bytes) -> None:
        self._grow(self.cached, at + len(data))
        self.cached[at : at + len(data)] = data
        self.writes += 1
        for page in range(at // PAGE, (at + len(data) - 1) // PAGE + 1):
            self.dirty[page] = self.writes

    def truncate(self, size: int) -> None:
        for content in (self.cached, self.disk):
            del content[size:]
        self._grow(self.cached, size)
        self.dirty = {page: number for page, number in self.dirty.items() if page * PAGE < size}

    def dirty_pages(self) -> dict[int, tuple[int, bytes]]:
        """Return the pages that a sync would have to write now."""
        return {
            page: (number, bytes(self.cached[page * PAGE : (page + 1) * PAGE]))
            for page, number in self.dirty.items()
        }

    def end_sync(self, begun: Mapping[int, tuple[int, bytes]], done: bool) -> None:
        for page, (number, content) in begun.items():
            if done and page * PAGE < len(self.cached):
                self._put(self.disk, page, content)
            if self.dirty.get(page) == number:
                del self.dirty[page]

    def after_cut(self, chance: random.Random | None) -> bytes:
        """Return the remaining content; with ``chance``, some dirty pages were already written."""
        left = bytearray(self.disk)
        for page, (_, content) in self.dirty_pages().items():
            if chance is not None and chance.random() < 0.5:
                self._put(left, page, content)
        return bytes(left)

    def _put(self, into: bytearray, page: int, content: bytes) -> None:
        self._grow(into, page * PAGE + len(content))
        into[page * PAGE : page * PAGE + len(content)] = content

    @staticmethod
    def _grow(content: bytearray, size: int) -> None:
        if len(content) < size:
            content.extend(bytes(size - len(content)))


class Disk:
    """The files of the directory at one position in the records.

    Attributes:
        at: that position, in bytes of the journal.
        failed_syncs: the number of syncs that have failed before.
    """

    def __init__(self, base: Path) -> None:
        self.at = 0
        self.failed_syncs = 0
        self._files = {
            file.name: _File(bytearray(file.read_bytes()), bytearray(file.read_bytes()))
            for file in base.iterdir()
        }
        self._syncs: dict[tuple[int, str], dict[int, tuple[int, bytes]]] = {}

    def apply(self, operation: int, name: str, thread: int, number: int, data: bytes) -> None:
        """Apply one record; ``number`` is its offset, or the new size of the file."""
        if operation == _UNLINK:
            self._files.pop(name, None)
            return
        file = self._files.setdefault(name, _File(bytearray(), bytearray()))
        if operation == _WRITE:
            file.write(number, data)
        elif operation == _TRUNCATE:
            file.truncate(number)
        elif operation == _SYNC_BEGIN:
            self._syncs[thread, name] = file.dirty_pages()
        else:
            self.failed_syncs += operation == _SYNC_FAILED
            file.end_sync(self._syncs.pop((thread, name), {}), operation == _SYNC_DONE)

    def cut(self, into: Path, chance: random.Random | None = None) -> None:
        """Write the files after a power cut at this position into a directory.

        Without ``chance`` only synced data is left.
        """
        for name, file in self._files.items():
            if not name.endswith(_SUFFIXES_LOST):
                (into / name).write_bytes(file.after_cut(chance))


def replay(journal: Path, base: Path) -> Iterator[Disk]:
    """Yield the disk after each record of the journal; it is always the same object.

    Args:
        journal: the file of the records; an incomplete last one is ignored.
        base: the files at the beginning, all of them on the disk.
    """
    disk = Disk(base)
    if not journal.exists():
        return
    with journal.open("rb") as records:
        while len(head := records.read(_RECORD.size)) == _RECORD.size:
            operation, name_length, thread, _, offset, length = _RECORD.unpack(head)
            name = records.read(name_length).decode()
            data = records.read(length) if operation == _WRITE else b""
            if operation == _WRITE and len(data) < length:
                return
            number = length if operation == _TRUNCATE else offset
            disk.apply(operation, name, thread, number, data)
            disk.at = records.tell()
            yield disk


class PowerCut:
    """The disk of the processes that were started with :attr:`environment`.

    Skips the test if the library is not available; see :func:`.preloaded.compiled`.

    Args:
        data: the directory of the files.
        kept: a directory for the records, made here.
    """

    def __init__(self, data: Path, kept: Path) -> None:
        self._data = data
        self._kept = kept
        #: The records; see :func:`replay`.
        self.journal: Path = kept / "journal"
        #: The files at the beginning of the records.
        self.base: Path = kept / "base"
        self.base.mkdir(parents=True)
        self.environment = {
            "LD_PRELOAD": compiled(_SOURCE),
            "SDK_POWER_CUT_FROM": f"{data.resolve()}/",
            "SDK_POWER_CUT_TO": str(kept),
        }

    def kill_after_sync(self, wanted: bool) -> None:
        """Make the next sync end the process as soon as its data is on the disk."""
        if wanted:
            (self._kept / "kill").touch()
        else:
            (self._kept / "kill").unlink()

    def recorded(self) -> int:
        """Return the number of bytes recorded so far, the moment of :attr:`Disk.at`."""
        return self.journal.stat().st_size

    def happen(self) -> None:
        """Replace the data directory by the synced data, after its processes were killed."""
        with tempfile.TemporaryDirectory() as name:
            self._cut_to(Path(name))
            for directory in (self._data, self.base):
                for file in directory.iterdir():
                    file.unlink()
                shutil.copytree(name, directory, dirs_exist_ok=True)
        self.journal.unlink()

    def left(self, statement: str) -> list[tuple[object, ...]]:
        """Query the store that a power cut would leave, without changing it."""
        with tempfile.TemporaryDirectory() as name:
            self._cut_to(Path(name))
            connection = sqlite3.connect(Path(name) / "inbox.db")
            try:
                return connection.execute(statement).fetchall()
            finally:
                connection.close()

    def _cut_to(self, directory: Path) -> None:
        last = Disk(self.base)
        for last in replay(self.journal, self.base):  # noqa: B007 - the last one is wanted
            pass
        last.cut(directory)
