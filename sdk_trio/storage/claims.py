"""Claims that are not waited for: how a SQLite store knows that a key is new, and what it risks.

The claim of an inline run whose key is surely new is not waited for: a lone inline delivery is one
transaction instead of two (docs/adr/0047-unawaited-claims.md). That takes two things:

:class:`StoreKeys`, a filter in memory, says of most new keys that they are surely new.

:class:`ClaimsFile` has the keys of the runs that were begun before the store has committed their
claims. Most handlers have ended before the claim is handed to the committing thread. A handler that
ends the process in that moment would leave no trace, and each redelivery would end the process
again. So the key of each such run stands in this file while no commit knows of it. It is written
and not synced: what the kernel has survives the process, and need not survive the machine. It is
not mapped into memory, because a mapped file that another program truncates ends the process
(SIGBUS).

A slot that is found at the start is a run during which the process ended, unless the store knows
its key: then the claim was committed, and the store counts the run itself. What is found stays in
the file, as a run that has *ended* a process, until the key's next claim counts it.
"""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
import trio

from ..base import clock
from ..base.logs import get_logger
from ..base.opener import open_file
from ..errors import StoreLostError, StoreUnavailableError
from ..records.deliveries import NewDelivery
from .commit import GroupCommit
from .readers import ReaderPool
from .sql.dialect import SqlTransaction

_log = get_logger("storage")

# -- the filter of known keys ----------------------------------------------------------------------

#: Keys that the first generation of a filter is made for; each further one is twice as large.
FIRST_GENERATION = 1 << 16

# Bits for each key, of which it sets three. A generation that is full takes 1 of 200 new keys for
# known ones; to be wrong costs no more than a claim that is waited for.
_BITS_FOR_KEY = 16

_BITS = bytes(1 << place for place in range(8))


class KnownKeys:
    """Says of a key that it is surely new, or that it may be known (a Bloom filter).

    It never takes a known key for a new one once the key was added. What was added stays: keys
    that the retention has removed are merely not sure to be new. It belongs to one thread.

    Burton H. Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", 1970; the places
    are made of two halves of one hash, as Kirsch and Mitzenmacher ("Less Hashing, Same
    Performance", 2006) show to be as good.
    """

    def __init__(self) -> None:
        self._generations: list[tuple[bytearray, int]] = []
        #: The number of keys that were added and new.
        self.added: int = 0
        self._grow(FIRST_GENERATION)

    def _grow(self, keys: int) -> None:
        # A power of two, so that a place is found by a mask.
        size = 1 << (keys * _BITS_FOR_KEY - 1).bit_length()
        self._newest = bytearray(size // 8)
        self._mask = size - 1
        self._generations.append((self._newest, self._mask))
        self._room = size // _BITS_FOR_KEY

    def reserve(self, keys: int) -> None:
        """Make room for so many further keys at once: each generation is asked about each key."""
        if keys > self._room:
            self._grow(keys)

    def add(self, hashed: int) -> bool:
        """Add a key by its hash, and return whether it was surely new."""
        if self.may_hold(hashed):
            return False
        if not self._room:
            self._grow(2 * (self._mask + 1) // _BITS_FOR_KEY)
        bits, mask = self._newest, self._mask
        stride = (hashed >> 32) | 1
        # Not in a loop, here and below: a fifth of the time, which every delivery takes.
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        hashed += stride
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        hashed += stride
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        self._room -= 1
        self.added += 1
        return True

    def may_hold(self, hashed: int) -> bool:
        """Return whether a key may have been added; False: it was surely not."""
        stride = (hashed >> 32) | 1
        second, third = hashed + stride, hashed + 2 * stride
        for bits, mask in self._generations:
            if (
                bits[(hashed & mask) >> 3] & _BITS[hashed & 7]
                and bits[(second & mask) >> 3] & _BITS[second & 7]
                and bits[(third & mask) >> 3] & _BITS[third & 7]
            ):
                return True
        return False


#: Keys that come after a filter was built, beyond twice as many as it had, after which it is built
#: anew: without that it would hold every key that ever came.
KEYS_BEFORE_REBUILD = 1_000_000

#: Pause after a failure to read the keys of the store, in seconds.
LEARN_AGAIN_SECONDS = 5.0

#: Rows that are read at a time to learn their keys: a millisecond of Python.
LEARNED_AT_ONCE = 500

_KEYS = """
SELECT sequence, delivery_key FROM arrival WHERE sequence > :after ORDER BY sequence LIMIT :limit
"""


def _read_keys(tx: SqlTransaction, after: int) -> Sequence[tuple[int, str]]:
    return tx.all(_KEYS, after=after, limit=LEARNED_AT_ONCE)


def _count_keys(tx: SqlTransaction, after: int) -> int:
    ((last,),) = tx.all("SELECT coalesce(max(sequence), 0) FROM arrival")
    return int(last) - after


#: The number of the writing connection, and how often it has seen others write.
Version = tuple[int, int]


def version_of(tx: SqlTransaction) -> Version:
    """Return a number that changes when another connection writes; SQLite only."""
    version: Version = tx.version  # type: ignore[attr-defined]
    return version


class StoreKeys:
    """Knows of a key that the store surely does not have it, without asking the store.

    The filter is built in the background, from the first question on: who never asks pays nothing.
    This process notes each key before it writes it. What other connections write shows in the
    number ``data_version``, which is compared in each transaction that relied on the answer; then
    the rows that came since are read before anything is surely new again.

    Args:
        commits: runs what reads the number.
        readers: read the rows.
        held: keys that are to be written and may not have been handed over yet.
    """

    def __init__(
        self, commits: GroupCommit, readers: ReaderPool, held: Collection[str] = ()
    ) -> None:
        self._commits = commits
        self._readers = readers
        self._held = held
        #: Every key that is about to be written is added to it; None before the first question.
        self.filter: KnownKeys | None = None
        self._complete = False
        # Another connection has written since: set by the committing thread as well.
        self._behind = False
        #: A number for :meth:`is_still`, from when a key was noted.
        self.version: Version = (0, 0)
        self._most = KEYS_BEFORE_REBUILD
        self._up_to = 0
        self._wanted = trio.Event()
        self._scope = trio.CancelScope()

    def begin(self) -> None:
        """Begin to learn the keys of the store."""
        self._begin_filter()
        self._wanted.set()

    def _begin_filter(self) -> KnownKeys:
        # Units that were handed over before this are committed before the rows are read, because
        # the order is kept; what comes later is added by its caller.
        self._complete, self._up_to, self._most = False, 0, KEYS_BEFORE_REBUILD
        self.filter = KnownKeys()
        for key in self._held:
            self.filter.add(hash(key))
        return self.filter

    def note_new(self, delivery: NewDelivery) -> bool:
        """Add the key of a delivery, and return whether no row is of it, surely.

        False until all keys are known.
        """
        keys = self.filter
        # Added whatever follows: a further delivery of the same key is not new.
        if keys is None or not keys.add(hash(delivery.key)):
            return False
        return self._complete and not self._behind

    def check(self, tx: SqlTransaction) -> None:
        """Notice in the committing thread, within a transaction, that others have written."""
        if version_of(tx) != self.version:
            self._behind = True

    def is_still(self, tx: SqlTransaction, version: Version) -> bool:
        """Say in the committing thread, within a transaction, that no other has written since.

        Then a key that was surely new when ``version`` was read is not in the store.
        """
        self.check(tx)
        return version_of(tx) == version

    def catch_up(self, *, changed: bool = False) -> None:
        """Read what others have written, if that was noticed; ``changed`` says that it was."""
        if self.filter is not None and (changed or self._behind or self.filter.added > self._most):
            self._behind = True
            self._wanted.set()

    def stop(self) -> None:
        """End :meth:`run`."""
        self._scope.cancel()

    async def run(self) -> None:
        """Learn whenever that is wanted, until :meth:`stop`, or until the store is lost."""
        with self._scope:
            while True:
                await self._wanted.wait()
                self._wanted = trio.Event()
                try:
                    await self._learn()
                except StoreLostError:
                    return
                except StoreUnavailableError:
                    await trio.sleep(LEARN_AGAIN_SECONDS)
                    self._wanted.set()

    async def _learn(self) -> None:
        keys = self.filter
        if keys is None or keys.added > self._most:
            # It holds keys that the retention has removed long since.
            keys = self._begin_filter()
        # Before the rows: what others write after the number was read changes it again.
        version = await self._commits.submit(version_of, durable=False)
        keys.reserve(await self._readers.run(partial(_count_keys, after=self._up_to)))
        while found := await self._readers.run(partial(_read_keys, after=self._up_to)):
            begun = clock.monotonic()
            for sequence, key in found:
                keys.add(hash(key))
                self._up_to = sequence
            # A large store is learned in the background of the deliveries.
            await trio.sleep(2 * (clock.monotonic() - begun))
        # Only now: a row that was still to be read is not surely new.
        self.version, self._behind = version, False
        if not self._complete:
            self._complete = True
            self._most = 2 * keys.added + KEYS_BEFORE_REBUILD


# -- the claims file -------------------------------------------------------------------------------

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
