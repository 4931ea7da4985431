"""The way of log lines out of the process, which never makes the event loop wait for a reader.

A line is written at once where the descriptor takes it at once. Else it joins a bounded buffer that
a thread empties as fast as the reader reads. When the buffer is full, lines are dropped: Debug and
Info before Warning and Error, and a line ``log.dropped`` says how many of each level.

In a program's event loop the lines of one turn leave in one write at the end of the turn; a
Warning, an Error and a line of another thread take them along at once.
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

#: The size of the buffer in bytes: some five thousand lines, which outlast a reader that is
#: restarted, and no matter for the memory of a daemon.
MOST_BYTES = 1 << 20

#: The longest write, in bytes: POSIX keeps a write of this size to a pipe in one piece, so a
#: program that shares the pipe cannot put its words into the middle of a line. Longer lines are
#: written alone.
WRITE_BYTES: int = getattr(select, "PIPE_BUF", 4096)

#: The longest write to a regular file, in bytes. The kernel appends each write as a whole there,
#: whatever its size, and a turn at full load has more than ``WRITE_BYTES``.
FILE_WRITE_BYTES = 1 << 16

#: The most lines that a turn of the loop gathers, so that a long turn cannot fill the memory.
TURN_LINES = 128

#: The seconds that the thread waits before it tries a failing descriptor again: a full disk, a pipe
#: that its reader has closed.
RETRY_SECONDS = 1.0

#: The seconds that the thread waits for further lines before it ends.
IDLE_SECONDS = 5.0

#: The seconds that the end of a program waits for a slow reader.
EXIT_SECONDS = 1.0

#: Levels and the label of the metric.
_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    WARNING: "warning",
    logging.ERROR: "error",
}

#: The level of the rest of a line whose beginning is written: such a rest is never dropped.
_BEGUN = logging.CRITICAL + 1

#: Lines dropped since the start of the process, by level.
dropped_in_all: Counter[str] = Counter(dict.fromkeys(_LEVELS.values(), 0))


def level_name(level: int) -> str:
    """Return the name of a level in a line: that of the standard library in small letters."""
    return _LEVELS.get(level) or logging.getLevelName(level).lower()


class LogDescriptor(NamedTuple):
    """A descriptor or stream that takes bytes.

    ``take`` writes what it can without waiting and returns how much that was; ``push`` may wait,
    and is called by a thread; ``close`` frees what the target has opened. ``identity`` is that of
    the file behind a descriptor. ``buffered`` says whether lines wait for a target that fails,
    ``most`` is the longest write in bytes.
    """

    take: Callable[[bytes], int]
    push: Callable[[bytes], int]
    close: Callable[[], None]
    identity: tuple[int, int] | None
    buffered: bool = True
    most: int = WRITE_BYTES


def target_of(stream: TextIO) -> LogDescriptor:
    """Return the way to write to ``stream`` without waiting, as far as the system has one.

    ``O_NONBLOCK`` must not be set on the descriptor itself: it belongs to the open file, which a
    shell, the standard output and every other program at this terminal share, and theirs would fail
    with EAGAIN. To ask ``poll`` first is not enough: another program may fill the pipe in between,
    and a terminal is writable that has room for a single byte. So a pipe and a terminal are opened
    a second time under ``/proc/self/fd``, which makes an open file of our own; a socket has a flag
    for each send. Where neither works (another user's pipe, other systems) the thread writes all.
    A regular file is written at once: its write goes to the memory of the kernel.
    """
    identity = identity_of(stream)
    if identity is None:
        return _text(stream)
    descriptor = stream.fileno()
    mode = os.fstat(descriptor)
    with suppress(OSError, ValueError):
        stream.flush()  # what was written before comes first
    if stat.S_ISREG(mode.st_mode) or _is_null(mode):
        write = _writer(descriptor)
        return LogDescriptor(write, write, _nothing, identity, most=FILE_WRITE_BYTES)
    if stat.S_ISSOCK(mode.st_mode):
        return _socket(descriptor, identity)
    own = _reopened(descriptor, identity)
    if own is not None:
        take = _without_waiting(_writer(own))
        return LogDescriptor(take, _waiting(take, own), lambda: os.close(own), identity)
    return LogDescriptor(lambda _data: 0, _writer(descriptor), _nothing, identity)


def identity_of(stream: TextIO) -> tuple[int, int] | None:
    """Return device and inode of a stream's file; None: it has no descriptor."""
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
    """Return a descriptor of our own that does not block, for what ``descriptor`` leads to."""
    if sys.platform != "linux":
        return None  # where /dev/fd is a dup, the open file would be shared
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

    return LogDescriptor(write, write, _nothing, None, buffered=False)


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
            # One object for each wait: of an object that a thread waits on while the process forks,
            # the child has a copy that stays in use for ever, and refuses the child's own wait.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll(RETRY_SECONDS * 1000)
        return taken

    return push


def _nothing() -> None:
    """Free nothing: the descriptor belongs to somebody else."""


class LogOutput:
    """Lines on their way to one target, in their order; any thread may call.

    Args:
        stream: a text stream, such as ``sys.stderr``. One without a descriptor is written to as it
            is, and may wait.
        told: returns the line that says how many lines of each level were dropped.
        most_bytes: how much waits for the reader at most.
    """

    def __init__(
        self,
        stream: TextIO,
        told: Callable[[Mapping[str, int]], str],
        *,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.stream = stream
        self._target = target_of(stream)
        self._told = told
        self._most = most_bytes
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._loop: int | None = None
        self._turn: list[tuple[int, str]] = []
        # Reentrant, because the garbage collector may run somebody's __del__ that logs.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[tuple[int, bytes]] = deque()
        #: Bytes that wait or are being written by the thread, and those of Debug and Info in them.
        self._size = 0
        self._small = 0
        self._dropped: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._closed = False

    # -- lines come ------------------------------------------------------------------------------

    def write(self, level: int, line: str) -> None:
        """Write a line, with its end, or have it wait; never raises for the target's sake."""
        # One append, which the interpreter does not divide: another thread may take the lines away.
        turn = self._turn
        turn.append((level, line))
        if get_ident() != self._loop or level >= WARNING or len(turn) >= TURN_LINES:
            self.end_turn()

    def begin_turns(self) -> None:
        """Gather what this thread writes, until :meth:`end_turn`."""
        self._loop = get_ident()

    def end_turns(self) -> None:
        """Write each line at once from now on."""
        self._loop = None
        self.end_turn()

    def end_turn(self) -> None:
        """Write the lines that were gathered."""
        if self._turn:
            with self._lock:
                self._write_turn()

    def _write_turn(self) -> None:
        turn = self._turn
        texts = turn[:]
        del turn[: len(texts)]  # another thread may have appended one in between
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
                lines.insert(0, self._take_told())
            lines = self._write_at_once(lines)
        if lines and self._target.buffered:
            for level, line in lines:
                self._keep(level, line)
            self._wake()
        else:
            dropped_in_all.update(level_name(level) for level, _ in lines)

    def _write_at_once(self, lines: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Write what the target takes without waiting, and return the rest."""
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
            return 0  # the thread finds out whether it lasts

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._encoding, "backslashreplace")

    # -- lines wait ------------------------------------------------------------------------------

    def _keep(self, level: int, line: bytes) -> None:
        small = level < WARNING
        if self._dropped:
            # Half of the buffer has to be free before small lines are kept again. Otherwise a
            # reader that is a little too slow would get a line about dropped ones for every line.
            if self._size <= self._most // 2:
                self._append(*self._take_told())
            elif small:
                self._drop(level)
                return
        if self._size + len(line) > self._most and (small or not self._make_room(len(line))):
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

    def _make_room(self, size: int) -> bool:
        """Drop the oldest Debug and Info lines for a more important one; say whether it fits.

        A quarter of the buffer is made free, so that a flood of Errors looks at each line once.
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

    def _take_told(self) -> tuple[int, bytes]:
        line = self._encoded(self._told(self._dropped))
        self._dropped = Counter()
        return WARNING, line

    # -- lines leave, in the thread --------------------------------------------------------------

    def _wake(self) -> None:
        """Have the thread write what waits."""
        if self._thread is not None:
            self._changed.notify_all()
            return
        thread = threading.Thread(target=self._empty, name="sdk_trio-log", daemon=True)
        # If the system gives no further thread, the next line tries again.
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
                self._append(*self._take_told())
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
        """Wait until all lines are written, at most ``seconds``; say whether they are.

        A target that fails is not waited for.
        """
        # The lock may be held by a write to a disk that hangs.
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            self._write_turn()
            self._changed.wait_for(lambda: not self._size or self._failing, seconds)
            return not self._size
        finally:
            self._lock.release()

    def close(self) -> None:
        """Write what can be written within :data:`EXIT_SECONDS`, and free the descriptor."""
        self.flush(EXIT_SECONDS)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is None:
                self._target.close()

    def leads_to(self, stream: TextIO) -> bool:
        """Say whether ``stream`` is the one of this output and leads where it did."""
        if stream is not self.stream or self._closed:
            return False
        return self._target.identity == identity_of(stream)

    def before_fork(self) -> None:
        """Write what can be written at once; no thread changes anything until after the fork."""
        self._lock.acquire()
        self._write_turn()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Forget what waits, which the parent writes, and its thread and loop."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = self._loop = None
        self._turn.clear()
        self._waiting.clear()
        self._size = self._small = 0
        self._dropped = Counter()


def _piece(lines: Sequence[tuple[int, bytes]], begin: int, most: int) -> tuple[int, bytes]:
    """Return the end of the lines from ``begin`` on that are one write, and their bytes."""
    size = len(lines[begin][1])
    end = begin + 1
    while end < len(lines) and size + len(lines[end][1]) <= most:
        size += len(lines[end][1])
        end += 1
    return end, b"".join([line for _, line in islice(lines, begin, end)])


def _untaken(lines: list[tuple[int, bytes]], taken: int) -> list[tuple[int, bytes]]:
    """Return what is left of ``lines`` after ``taken`` bytes of them."""
    for number, (level, line) in enumerate(lines):
        if taken < len(line):
            first = (_BEGUN, line[taken:]) if taken else (level, line)
            return [first, *lines[number + 1 :]]
        taken -= len(line)
    return []
