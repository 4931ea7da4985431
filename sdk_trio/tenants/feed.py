"""The feed of tenants' transitions to other parts of the program: it never blocks and loses none.

A change only sets each subscriber's flag. A subscriber that has not read yet needs no second
notification, and a slow one cannot block the change. The transitions themselves are read from the
outbox, by sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..base.bell import Flag
from ..records.tenants import OutboxRecord

if TYPE_CHECKING:
    from ..storage.sql.tenants import TenantStore


class TransitionFeed:
    """The transitions after a position, for one subscriber, in order and without a gap.

    ``position`` is the sequence of the last one that was returned. A subscriber that must not miss
    any stores it and subscribes from there after a restart. ``changed`` is raised when some tenant
    may have changed.
    """

    def __init__(self, store: "TenantStore", position: int) -> None:
        self._store = store
        self.position: int = position
        self.changed: Flag = Flag()

    async def next(self, *, limit: int = 100) -> Sequence[OutboxRecord]:
        """Wait until there are transitions, and return up to ``limit`` of them.

        On cancellation, ``position`` does not change.

        Raises:
            StoreUnavailableError: the store is unavailable; try again.
        """
        while True:
            records = await self._store.outbox(after_sequence=self.position, limit=limit)
            if records:
                self.position = records[-1].sequence
                return records
            await self.wait()

    async def wait(self) -> None:
        """Wait until some tenant may have changed since the last call, credentials included."""
        await self.changed.wait()


class Subscribers:
    """The subscribers to changes."""

    def __init__(self) -> None:
        self._flags: set[Flag] = set()

    @contextmanager
    def subscribe(self, store: "TenantStore", after: int) -> Iterator[TransitionFeed]:
        """Return a feed of the transitions after that sequence, during the block."""
        feed = TransitionFeed(store, after)
        self._flags.add(feed.changed)
        try:
            yield feed
        finally:
            self._flags.discard(feed.changed)

    def wake(self) -> None:
        """Notify every subscriber of a possible change."""
        for flag in self._flags:
            flag.set()
