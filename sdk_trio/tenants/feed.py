"""The feed of tenants' transitions to other parts of the program: never blocks, loses none.

A change sends only "look again", through a channel of one place: a subscriber that has not looked
yet needs no second message, and a full channel cannot block the change. The transitions themselves
are read from the outbox, by sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import trio

from ..records.tenants import OutboxRecord
from ..storage.ports import TenantStore


class TransitionFeed:
    """The transitions after a position, for one subscriber, in order and without a gap.

    ``position`` is the sequence of the last one that was returned. A subscriber that must not miss
    any stores it and subscribes from there after a restart.
    """

    def __init__(
        self, store: TenantStore, wake: trio.MemoryReceiveChannel[None], position: int
    ) -> None:
        self._store = store
        self._wake = wake
        self.position: int = position

    async def next(self, *, limit: int = 100) -> Sequence[OutboxRecord]:
        """Wait until there are transitions, and return up to ``limit`` of them.

        When it is cancelled, ``position`` does not move.

        Raises:
            StoreUnavailableError: the store cannot be read at present; ask again.
        """
        while True:
            records = await self._store.outbox(after_sequence=self.position, limit=limit)
            if records:
                self.position = records[-1].sequence
                return records
            await self.wait()

    async def wait(self) -> None:
        """Wait until some tenant may have changed since the last call, credentials included."""
        await self._wake.receive()


class Subscribers:
    """The subscribers to changes."""

    def __init__(self) -> None:
        self._channels: set[trio.MemorySendChannel[None]] = set()

    @contextmanager
    def subscribe(self, store: TenantStore, after: int) -> Iterator[TransitionFeed]:
        """Return a feed of the transitions after that sequence, for the length of the block."""
        # One place: "look again" needs no counting, and a slow subscriber holds up no transition.
        send, receive = trio.open_memory_channel[None](1)
        with send, receive:
            self._channels.add(send)
            try:
                yield TransitionFeed(store, receive, after)
            finally:
                self._channels.discard(send)

    def wake(self) -> None:
        """Tell every subscriber to look again."""
        for channel in self._channels:
            # A full channel holds the message already, and its reader has not looked yet.
            with suppress(trio.WouldBlock):
                channel.send_nowait(None)
