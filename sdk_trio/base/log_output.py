"""Write log lines without making the event loop wait for their reader.

A line is written at once if the descriptor accepts it. Otherwise it joins a bounded buffer, which a
thread drains as fast as the reader reads. When the buffer is full, lines are dropped: Debug and
Info before Warning and Error. A line ``log.dropped`` reports how many of each level.

In an event loop, the lines of one iteration are written together at its end. A Warning, an Error or
a line from another thread writes them at once.
"""

import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from logging import WARNING
from threading import get_ident
from typing import NamedTuple, TextIO

#: The size of the buffer in bytes, about five thousand lines: enough while a reader restarts, and
#: small for a daemon.
MOST_BYTES = 1 << 20

#: The longest write, in bytes. POSIX writes up to this size to a pipe atomically, so output of a
#: program that shares the pipe cannot split a line. Longer lines are written one at a time.
WRITE_BYTES: int = getattr(select, "PIPE_BUF", 4096)

#: The longest write to a regular file, in bytes. The kernel appends a write of any size atomically,
#: and at full load one iteration has more than ``WRITE_BYTES``.
FILE_WRITE_BYTES = 1 << 16

#: The maximum number of lines gathered in one iteration of the loop, which bounds their memory.
BATCH_LINES = 128

#: Seconds before the thread retries a failing descriptor: a full disk, a pipe closed by its reader.
RETRY_SECONDS = 1.0

#: Seconds that the thread waits for further lines before it ends.
IDLE_SECONDS = 5.0

#: Seconds that a program waits for a slow reader when it exits.
EXIT_SECONDS = 1.0

#: The metric's label for each level.
_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    WARNING: "warning",
    logging.ERROR: "error",
}

#: The level of the rest of a partly written line, which is never dropped.
_BEGUN = logging.CRITICAL + 1

#: Lines dropped since the start of the process, by level.
dropped_in_all: Counter[str] = Counter(dict.fromkeys(_LEVELS.values(), 0))


def level_name(level: int) -> str:
    """Return a level's name as log lines show it: the standard library's name in lower case."""
    return _LEVELS.get(level) or logging.getLevelName(level).lower()


class LogDescriptor(NamedTuple):
    """A descriptor or stream that takes bytes.

    ``take`` writes without waiting and returns the number of bytes written. ``push`` may wait and
    runs in a thread. ``close`` frees descriptors that the target opened. ``identity`` is that of
    the file behind a descriptor. ``buffered`` is whether lines wait while the target fails;
    ``most`` is the longest write in bytes.
    """

    take: Callable[[bytes], int]
    push: Callable[[bytes], int]
    close: Callable[[], None]
    identity: tuple[int, int] | None
    buffered: bool = True
    most: int = WRITE_BYTES


def target_of(stream: TextIO) -> LogDescriptor:
    """Return a target that writes to ``stream`` without waiting, as far as the system allows.

    The descriptor itself must not get ``O_NONBLOCK``: the flag belongs to the open file, which a
    shell and other programs at the terminal share, and their writes would fail with EAGAIN. Calling
    ``poll`` first is not enough: another program may fill the pipe in between, and a terminal
    counts as writable if it can take one byte. A pipe or terminal is therefore reopened under
    ``/proc/self/fd``, which gives an open file of our own; a socket has a flag per send. Where
    neither works (another user's pipe, other systems), the thread does all writes. A regular file
    is written directly, since the kernel buffers the write.
    """
    identity = identity_of(stream)
    if identity is None:
        return _text(stream)
    descriptor = stream.fileno()
    mode = os.fstat(descriptor)
    with suppress(OSError, ValueError):
        stream.flush()  # earlier output comes first
    if stat.S_ISREG(mode.st_mode) or _is_null(mode):
        write = _writer(descriptor)
        return LogDescriptor(write, write, _no_op, identity, most=FILE_WRITE_BYTES)
    if stat.S_ISSOCK(mode.st_mode):
        return _socket(descriptor, identity)
    own = _reopened(descriptor, identity)
    if own is not None:
        take = _without_waiting(_writer(own))
        return LogDescriptor(take, _waiting(take, own), lambda: os.close(own), identity)
    return LogDescriptor(lambda _data: 0, _writer(descriptor), _no_op, identity)


def identity_of(stream: TextIO) -> tuple[int, int] | None:
    """Return device and inode of a stream's file; None if it has no descriptor."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return found.st_dev, found.st_ino


def _is_null(found: os.stat_result) -> bool:
    with suppress(OSError):
        return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev
    return False


def _reopened(descriptor: int, identity: tuple[int, int]) -> int | None:
    """Return a non-blocking descriptor of our own for the file of ``descriptor``."""
    if sys.platform != "linux":
        return None  # if /dev/fd is a dup, the open file is shared
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return None
    found = os.fstat(own)
    if (found.st_dev, found.st_ino) == identity:
        return own
    os.close(own)
    return None


def _socket(descriptor: int, identity: tuple[int, int]) -> LogDescriptor:
    connection = socket.socket(fileno=os.dup(descriptor))

    def send(data: bytes) -> int:
        return connection.send(data, socket.MSG_DONTWAIT)

    take = _without_waiting(send)
    return LogDescriptor(take, _waiting(take, connection.fileno()), connection.close, identity)


def _text(stream: TextIO) -> LogDescriptor:
    def write(data: bytes) -> int:
        stream.write(data.decode())
        stream.flush()
        return len(data)

    return LogDescriptor(write, write, _no_op, None, buffered=False)


def _writer(descriptor: int) -> Callable[[bytes], int]:
    def write(data: bytes) -> int:
        return os.write(descriptor, data)

    return write


def _without_waiting(write: Callable[[bytes], int]) -> Callable[[bytes], int]:
    def take(data: bytes) -> int:
        try:
            return write(data)
        except BlockingIOError:
            return 0

    return take


def _waiting(take: Callable[[bytes], int], descriptor: int) -> Callable[[bytes], int]:
    def push(data: bytes) -> int:
        taken = take(data)
        if not taken:
            # A new object for each wait: if the process forks while a thread waits on one, the
            # child's copy stays in use and refuses to wait.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll(RETRY_SECONDS * 1000)
        return taken

    return push


def _no_op() -> None:
    """Free nothing: the descriptor is not ours."""


class LogOutput:
    """Buffers lines and writes them to one target in order; any thread may call.

    Args:
        stream: a text stream, such as ``sys.stderr``. A stream without a descriptor is written
            directly, and may block.
        dropped_line: renders the line that reports how many lines of each level were dropped.
        most_bytes: the size of the buffer.
    """

    def __init__(
        self,
        stream: TextIO,
        dropped_line: Callable[[Mapping[str, int]], str],
        *,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.stream = stream
        self._target = target_of(stream)
        self._dropped_line = dropped_line
        self._most = most_bytes
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._loop: int | None = None
        self._batch: list[tuple[int, str]] = []
        # Reentrant: the garbage collector may run a __del__ that logs.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[tuple[int, bytes]] = deque()
        #: Bytes that are buffered or being written by the thread, and the Debug and Info share.
        self._size = 0
        self._small = 0
        self._dropped: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._closed = False

    # -- accept lines ------------------------------------------------------------------------------

    def write(self, level: int, line: str) -> None:
        """Write a line, including its line end, or buffer it; never raises if the target fails."""
        # Appending is atomic, and another thread may take the lines.
        batch = self._batch
        batch.append((level, line))
        if get_ident() != self._loop or level >= WARNING or len(batch) >= BATCH_LINES:
            self.write_batch()

    def begin_batching(self) -> None:
        """Gather this thread's lines until :meth:`write_batch`."""
        self._loop = get_ident()

    def end_batching(self) -> None:
        """Write each line at once from now on."""
        self._loop = None
        self.write_batch()

    def write_batch(self) -> None:
        """Write the gathered lines."""
        if self._batch:
            with self._lock:
                self._write_gathered()

    def _write_gathered(self) -> None:
        batch = self._batch
        texts = batch[:]
        del batch[: len(texts)]  # another thread may have appended one since
        taken = 0
        if not self._size and not self._dropped:
            piece = self._encoded("".join([text for _, text in texts]))
            if len(piece) <= self._target.most:
                taken = self._take(piece)
                if taken == len(piece):
                    return
        lines = _untaken([(level, self._encoded(text)) for level, text in texts], taken)
        if not self._size:
            if self._dropped:
                lines.insert(0, self._take_dropped_line())
            lines = self._write_at_once(lines)
        if lines and self._target.buffered:
            for level, line in lines:
                self._buffer(level, line)
            self._wake()
        else:
            dropped_in_all.update(level_name(level) for level, _ in lines)

    def _write_at_once(self, lines: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Write without waiting, and return the lines that were not written."""
        begin = 0
        while begin < len(lines):
            end, piece = _piece(lines, begin, self._target.most)
            taken = self._take(piece)
            if taken < len(piece):
                return _untaken(lines[begin:], taken)
            begin = end
        return []

    def _take(self, piece: bytes) -> int:
        try:
            return self._target.take(piece)
        except (OSError, ValueError):
            return 0  # the thread retries

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._encoding, "backslashreplace")

    # -- buffer lines ------------------------------------------------------------------------------

    def _buffer(self, level: int, line: bytes) -> None:
        small = level < WARNING
        if self._dropped:
            # Half of the buffer must be free before Debug and Info lines are buffered again.
            # Otherwise a slightly slow reader would get one log.dropped line per log line.
            if self._size <= self._most // 2:
                self._append(*self._take_dropped_line())
            elif small:
                self._drop(level)
                return
        if self._size + len(line) > self._most and (small or not self._free_space(len(line))):
            self._drop(level)
            return
        self._append(level, line)

    def _append(self, level: int, line: bytes) -> None:
        self._waiting.append((level, line))
        self._size += len(line)
        if level < WARNING:
            self._small += len(line)

    def _drop(self, level: int) -> None:
        name = level_name(level)
        self._dropped[name] += 1
        dropped_in_all[name] += 1

    def _free_space(self, size: int) -> bool:
        """Drop the oldest Debug and Info lines for a more important one; return whether it fits.

        Frees a quarter of the buffer at once, so that a flood of Errors scans the lines only once.
        """
        if self._small:
            most = self._most - max(size, self._most // 4)
            kept: deque[tuple[int, bytes]] = deque()
            for level, line in self._waiting:
                if level < WARNING and self._size > most:
                    self._size -= len(line)
                    self._small -= len(line)
                    self._drop(level)
                else:
                    kept.append((level, line))
            self._waiting = kept
        return self._size + size <= self._most

    def _take_dropped_line(self) -> tuple[int, bytes]:
        line = self._encoded(self._dropped_line(self._dropped))
        self._dropped = Counter()
        return WARNING, line

    # -- write lines, in the thread --------------------------------------------------------------

    def _wake(self) -> None:
        """Have the thread write the buffer."""
        if self._thread is not None:
            self._changed.notify_all()
            return
        thread = threading.Thread(target=self._empty, name="sdk_trio-log", daemon=True)
        # If the system cannot start a thread, the next line tries again.
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def _empty(self) -> None:
        while (piece := self._next_piece()) is not None:
            rest = piece
            while rest and not self._closed:
                try:
                    rest = rest[self._target.push(rest) :]
                    self._failing = False
                except (OSError, ValueError):
                    self._fail()
                    time.sleep(RETRY_SECONDS)
            with self._changed:
                self._size -= len(piece)
                self._changed.notify_all()

    def _fail(self) -> None:
        with self._changed:
            self._failing = True
            self._changed.notify_all()

    def _next_piece(self) -> bytes | None:
        with self._changed:
            if self._dropped and not self._waiting:
                self._append(*self._take_dropped_line())
            if not self._waiting and not self._closed:
                self._changed.wait(IDLE_SECONDS)
            if not self._waiting or self._closed:
                self._thread = None
                if self._closed:
                    self._target.close()
                return None
            end, piece = _piece(self._waiting, 0, self._target.most)
            for _ in range(end):
                level, line = self._waiting.popleft()
                if level < WARNING:
                    self._small -= len(line)
            return piece

    # -- the end, and forks ----------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until all lines are written; return whether they are.

        Does not wait for a target that fails.
        """
        # The lock may be held by a write to a hung disk.
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            self._write_gathered()
            self._changed.wait_for(lambda: not self._size or self._failing, seconds)
            return not self._size
        finally:
            self._lock.release()

    def close(self) -> None:
        """Write as much as possible within :data:`EXIT_SECONDS`, and free the descriptor."""
        self.flush(EXIT_SECONDS)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is None:
                self._target.close()

    def leads_to(self, stream: TextIO) -> bool:
        """Return whether ``stream`` is this output's stream and still refers to the same file."""
        if stream is not self.stream or self._closed:
            return False
        return self._target.identity == identity_of(stream)

    def before_fork(self) -> None:
        """Write without waiting and take the lock: no thread changes anything during the fork."""
        self._lock.acquire()
        self._write_gathered()

    def after_fork_in_parent(self) -> None:
        """Release the lock."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Discard the buffered lines, which the parent writes, and the parent's thread and loop."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = self._loop = None
        self._batch.clear()
        self._waiting.clear()
        self._size = self._small = 0
        self._dropped = Counter()


def _piece(lines: Sequence[tuple[int, bytes]], begin: int, most: int) -> tuple[int, bytes]:
    """Return the end index of the lines from ``begin`` that fit one write, and their bytes."""
    size = len(lines[begin][1])
    end = begin + 1
    while end < len(lines) and size + len(lines[end][1]) <= most:
        size += len(lines[end][1])
        end += 1
    return end, b"".join([line for _, line in islice(lines, begin, end)])


def _untaken(lines: list[tuple[int, bytes]], taken: int) -> list[tuple[int, bytes]]:
    """Return the rest of ``lines`` after the first ``taken`` bytes."""
    for number, (level, line) in enumerate(lines):
        if taken < len(line):
            first = (_BEGUN, line[taken:]) if taken else (level, line)
            return [first, *lines[number + 1 :]]
        taken -= len(line)
    return []
