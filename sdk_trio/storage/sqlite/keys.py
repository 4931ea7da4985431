"""The keys that the store has, known without asking it; see :class:`StoreKeys`."""

import time
from collections.abc import Collection, Sequence
from functools import partial

import apsw
import trio

from ...errors import StoreLostError, StoreUnavailableError
from ...records.deliveries import NewDelivery
from .committer import Committer
from .known import KnownKeys, key_hash
from .queries import QueryRunner

#: Keys that come after a filter was built, beyond twice as many as it had, after which it is built
#: anew: without that it would hold every key that ever came.
KEYS_BEFORE_REBUILD = 1_000_000

#: Pause after a failure to read the keys of the store, in seconds.
LEARN_AGAIN_SECONDS = 5.0

#: Rows that are read at a time to learn their keys: a millisecond of Python.
LEARNED_AT_ONCE = 500

_KEYS = "SELECT sequence, hash FROM arrival WHERE sequence > ? ORDER BY sequence LIMIT ?"


def read_keys(connection: apsw.Connection, after: int) -> Sequence[tuple[int, int]]:
    """Return sequence and hash of the next deliveries in the order of their arrival."""
    found = connection.execute(_KEYS, (after, LEARNED_AT_ONCE))
    return [(int(sequence), int(hashed)) for sequence, hashed in found]


def _count_keys(connection: apsw.Connection, after: int) -> int:
    return int(connection.execute("SELECT coalesce(max(sequence), 0) FROM arrival").get) - after


#: The number of the writing connection, and how often it has seen others write.
Version = tuple[int, int]


class StoreKeys:
    """Knows of a key that the store surely does not have it, without asking the store.

    The filter is built in the background, from the first question on: who never asks pays nothing.
    This process notes each key before it writes it. What other connections write shows in the
    number ``data_version``, which is compared in each transaction that relied on the answer; then
    the rows that came since are read before anything is surely new again.

    Args:
        committer: runs what reads the number.
        queries: reads the rows.
        held: keys that are to be written and may not have been handed to ``committer`` yet.
    """

    def __init__(
        self, committer: Committer, queries: QueryRunner, held: Collection[str] = ()
    ) -> None:
        self._committer = committer
        self._queries = queries
        self._held = held
        #: Every key that is about to be written is added to it; None before the first question.
        self.filter: KnownKeys | None = None
        self._complete = False
        # Another connection has written since: set by the committing thread as well.
        self._behind = False
        self._version = (0, 0)
        # The last number that was asked for, and in which transaction.
        self._answer, self._asked = (0, 0), 0
        self._most = KEYS_BEFORE_REBUILD
        self._up_to = 0
        self._wanted = trio.Event()
        self._scope = trio.CancelScope()

    def begin(self) -> None:
        """Begin to learn the keys of the store."""
        self._begin_filter()
        self._wanted.set()

    def _begin_filter(self) -> KnownKeys:
        # Jobs that the committer got before this are committed before the rows are read, because it
        # keeps their order; what comes later is added by its caller.
        self._complete, self._up_to, self._most = False, 0, KEYS_BEFORE_REBUILD
        self.filter = KnownKeys()
        for key in self._held:
            self.filter.add(key_hash(key))
        return self.filter

    def note_new(self, delivery: NewDelivery) -> bool:
        """Add the key of a delivery, and return whether no row is of it, surely.

        False until all keys are known.
        """
        keys = self.filter
        # Added whatever follows: a further delivery of it is new on no way.
        if keys is None or not keys.add(key_hash(delivery.key)):
            return False
        # A row from before signers were kept has the id alone for a key, and may be of this signer.
        if delivery.signer and keys.may_hold(key_hash(delivery.webhook_id)):
            return False
        return self._complete and not self._behind

    def check(self, connection: apsw.Connection) -> None:
        """Notice in the committing thread, within a transaction, that others have written."""
        if self._number(connection) != self._version:
            self._behind = True

    @property
    def version(self) -> Version:
        """A number for :meth:`is_still`, from when a key was noted."""
        return self._version

    def is_still(self, connection: apsw.Connection, version: Version) -> bool:
        """Say in the committing thread, within a transaction, that no other has written since.

        Then a key that was surely new when ``version`` was read is not in the store.
        """
        self.check(connection)
        return self._number(connection) == version

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
        version = await self._committer.submit(self._number, synced=False)
        keys.reserve(await self._queries.run(partial(_count_keys, after=self._up_to)))
        while found := await self._queries.run(partial(read_keys, after=self._up_to)):
            begun = time.monotonic()
            for sequence, hashed in found:
                keys.add(hashed)
                self._up_to = sequence
            # A large store is learned in the background of the deliveries.
            await trio.sleep(2 * (time.monotonic() - begun))
        # Only now: a row that was still to be read is not surely new.
        self._version, self._behind = version, False
        if not self._complete:
            self._complete = True
            self._most = 2 * keys.added + KEYS_BEFORE_REBUILD

    def _number(self, connection: apsw.Connection) -> Version:
        """Return a number that changes when another connection writes."""
        # Nobody else writes within a transaction: its first job asks for all of them.
        if self._asked != self._committer.transactions:
            self._asked = self._committer.transactions
            self._answer = self._committer.connections, int(connection.pragma("data_version"))
        return self._answer
