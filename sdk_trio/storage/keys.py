"""The keys that a SQLite store has, known without asking it; see :class:`StoreKeys`.

A filter in memory says of most new keys that they are surely new. So a lone inline delivery is one
transaction instead of two: its claim need not be committed before its handler runs.
"""

from collections.abc import Collection, Sequence
from functools import partial

import trio

from ..base import clock
from ..errors import StoreLostError, StoreUnavailableError
from ..records.deliveries import NewDelivery
from .commit import GroupCommit
from .readers import ReaderPool
from .sql.dialect import SqlTransaction

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
