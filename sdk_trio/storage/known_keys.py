"""Known keys: how a SQLite store knows without a query that a key is surely new.

:class:`KnownKeys` is a filter in memory. :class:`StoreKeys` fills it from the store in the
background, and adds each key that this process is about to write. A key that is not in the filter
is in no row, unless another process has written meanwhile. The transaction that relies on the
answer checks that.
"""

from collections.abc import Collection, Sequence
from functools import partial

import trio

from ..base import clock
from ..errors import StoreLostError, StoreUnavailableError
from ..records.deliveries import NewDelivery
from .commit import GroupCommit
from .readers import ReaderPool
from .sql.dialect import SqlTransaction, Version

#: Keys that the first generation of a filter is made for; each further one is twice as large.
FIRST_GENERATION = 1 << 16

# Bits for each key, of which it sets three. A full generation reports 1 of 200 new keys as perhaps
# known. Such a mistake costs one commit more: the claim is awaited.
_BITS_FOR_KEY = 16

_BITS = bytes(1 << bit for bit in range(8))


class KnownKeys:
    """Finds that a key is surely new, or may be known (a Bloom filter).

    A key that was added is never reported as new. Nothing is removed: a key that the retention has
    removed from the store is still reported as perhaps known. The filter belongs to one thread.

    Burton H. Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", 1970; the bits
    are chosen by two halves of one hash, which Kirsch and Mitzenmacher ("Less Hashing, Same
    Performance", 2006) show to be as good.
    """

    def __init__(self) -> None:
        self._generations: list[tuple[bytearray, int]] = []
        #: The number of keys that were added and new.
        self.added: int = 0
        self._grow(FIRST_GENERATION)

    def _grow(self, keys: int) -> None:
        # A power of two, so that a bit is found by a mask.
        size = 1 << (keys * _BITS_FOR_KEY - 1).bit_length()
        self._newest = bytearray(size // 8)
        self._mask = size - 1
        self._generations.append((self._newest, self._mask))
        self._unused = size // _BITS_FOR_KEY

    def reserve(self, keys: int) -> None:
        """Make one generation for that many further keys, because each generation is searched."""
        if keys > self._unused:
            self._grow(keys)

    def add(self, hashed: int) -> bool:
        """Add a key by its hash, and return whether it was surely new."""
        if self.may_hold(hashed):
            return False
        if not self._unused:
            self._grow(2 * (self._mask + 1) // _BITS_FOR_KEY)
        bits, mask = self._newest, self._mask
        stride = (hashed >> 32) | 1
        # No loop here and below: that saves a fifth of the time, for every delivery.
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        hashed += stride
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        hashed += stride
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        self._unused -= 1
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


#: A filter that had n keys when it was built is rebuilt after this many keys more than 2 n.
#: Otherwise it would hold every key that ever came.
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


class StoreKeys:
    """Knows without a query that the store surely does not have a key.

    This process adds each key before it writes it. Writes of other connections change the version
    of the store. It is compared with that of the last transaction for each delivery, with that of
    the file twice a second, and in each transaction that relied on the answer.

    =========  ====================================  ===================  =========================
    state      filter                                a key is surely new  ends when
    =========  ====================================  ===================  =========================
    off        None                                  never                the first question comes
    building   lacks rows that were not read yet     never                all rows were read
    current    has every key, and some forgotten     if it lacks the key  a transaction sees a write
    behind     lacks rows that others have written   never                these rows were read
    =========  ====================================  ===================  =========================

    Args:
        commits: runs what reads the version.
        readers: read the rows.
        unawaited: keys of runs whose claims may not be in the store yet.
    """

    def __init__(
        self, commits: GroupCommit, readers: ReaderPool, unawaited: Collection[str] = ()
    ) -> None:
        self._commits = commits
        self._readers = readers
        self._unawaited = unawaited
        self._enabled = False
        #: None before the first question.
        self.filter: KnownKeys | None = None
        # All rows have been read once: the filter is not building.
        self._all_read = False
        # Another connection has written since.
        self._behind = False
        # That of the store when the last rows were read.
        self._version: Version | None = None
        self._most = KEYS_BEFORE_REBUILD
        self._up_to = 0
        self._wanted = trio.Event()
        self._scope = trio.CancelScope()

    def enable(self) -> None:
        """Let the first call of :meth:`note_new` begin to read the store's keys."""
        self._enabled = True
        # A system task: it lives as long as the store, and no nursery of a caller does.
        trio.lowlevel.spawn_system_task(self._run)

    def _begin_filter(self) -> KnownKeys:
        # Units that were handed over before this are committed before the rows are read, because
        # the commit thread keeps the order. Later keys are added by their callers.
        self._all_read, self._up_to, self._most = False, 0, KEYS_BEFORE_REBUILD
        self.filter = KnownKeys()
        # Their claims may be in no row yet: a withdrawn one is written with the end of its run.
        for key in self._unawaited:
            self.filter.add(hash(key))
        return self.filter

    def add(self, key: str) -> None:
        """Add a key that is about to be written."""
        if self.filter is not None:
            self.filter.add(hash(key))

    def note_new(self, delivery: NewDelivery) -> Version | None:
        """Add the key of a delivery.

        Returns:
            The version of the store in which surely no row has the key (``Arriving.new_in``). None:
            the key may be known, or not all keys of the store were read yet.
        """
        keys = self.filter
        if keys is None:
            if not self._enabled:
                return None
            keys = self._begin_filter()
            self._wanted.set()
        # Added whatever follows: a further delivery of the same key is not new.
        is_new = keys.add(hash(delivery.key))
        is_current = self._all_read and not self._behind
        if is_current and self._commits.version != self._version:
            # A transaction has found that others have written, perhaps this key.
            self.catch_up(changed=True)
            is_current = False
        return self._version if is_new and is_current else None

    def catch_up(self, *, changed: bool) -> None:
        """Read the rows of others, if there are any; replace a filter that is too large."""
        if self.filter is not None and (changed or self.filter.added > self._most):
            self._behind = True
            self._wanted.set()

    def stop(self) -> None:
        """Stop reading the store's keys."""
        self._scope.cancel()

    async def _run(self) -> None:
        """Read keys whenever that is requested, until :meth:`stop`, or until the store is lost."""
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
            # It holds keys that the retention removed long ago.
            keys = self._begin_filter()
        # Read before the rows: a later write of another connection changes the number again.
        version = await self._commits.submit(lambda tx: tx.version, durable=False)
        keys.reserve(await self._readers.run(partial(_count_keys, after=self._up_to)))
        while found := await self._readers.run(partial(_read_keys, after=self._up_to)):
            begun = clock.monotonic()
            for sequence, key in found:
                keys.add(hash(key))
                self._up_to = sequence
            # Learning takes at most a third of the event loop's time from the deliveries.
            await trio.sleep(2 * (clock.monotonic() - begun))
        # Only now: a key of an unread row is not surely new. If others have
        # written meanwhile, the store's version differs from `version`, so `_behind` may end.
        self._version, self._behind = version, False
        if not self._all_read:
            self._all_read = True
            self._most = 2 * keys.added + KEYS_BEFORE_REBUILD
