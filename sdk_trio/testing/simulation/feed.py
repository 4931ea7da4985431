"""A client of the feed: it follows each incarnation of a host, and must not miss a delivery.

It is the client of ``events tail`` and ``listen``. Like them, it keeps its position and the store's
name between connections.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import trio

from ...admin.follow import FeedReader
from ...records.deliveries import DeliveryRecord
from .audit import Auditor
from .host import Host

#: The admin token of each simulation. It guards nothing.
TOKEN = "simulated-token-of-the-admin-address"

#: The environment variable from which the runtime reads the token.
TOKEN_VARIABLE = "SDK_ADMIN_TOKEN"

#: The seconds after the last commit within which the client must have seen every delivery.
CATCH_UP_SECONDS = 60

#: The mean time of one connection, in seconds.
CONNECTED_SECONDS = 15.0


class FeedClient:
    """Follows the feed of one host.

    Args:
        seed: its dice.
        host: the host.
        auditor: gets what it finds.
        record: writes a line of the story.
    """

    def __init__(
        self, seed: int, host: Host, auditor: Auditor, record: Callable[..., None]
    ) -> None:
        self._dice = random.Random(f"{seed}/feed")
        self._host = host
        self._auditor = auditor
        self._record = record
        self._after = 0
        self._store: str | None = None
        #: The keys that were seen, by sequence, since the last resynchronization.
        self._seen: dict[int, str] = {}

    async def run(self) -> None:
        """Follow the feed until cancelled."""
        while True:
            if self._host.serves:
                await self._follow()
            await trio.sleep(self._dice.uniform(0.05, 2.0))

    async def _follow(self) -> None:
        machine = self._host.machine
        assert machine is not None
        reader = FeedReader(
            f"unix:{self._host.admin_socket(machine)}",
            TOKEN,
            {"kinds": "delivery"},
            self._after,
            self._store,
        )
        self._record("feed.connects", after=self._after)
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + self._dice.expovariate(
                1 / CONNECTED_SECONDS
            )
            machine.links[nursery.cancel_scope] = None
            nursery.start_soon(reader.run, None)
            async for message in reader:
                self._note(message)
                self._after, self._store = message["seq"], reader.store
        machine.links.pop(nursery.cancel_scope, None)

    def _note(self, message: dict[str, Any]) -> None:
        if message["kind"] == "hello" and message["replaced"]:
            self._record("feed.starts_over")
            self._seen.clear()
        if message["kind"] != "delivery":
            return
        key, sequence = message["event"]["key"], message["event"]["sequence"]
        if sequence in self._seen:
            self._auditor.find("feed_twice", f"the feed has sent {key} twice")
        elif self._seen and sequence < max(self._seen):
            self._auditor.find("feed_order", f"the feed has sent {key} after a later delivery")
        self._seen[sequence] = key

    async def judge(self, records: Sequence[DeliveryRecord]) -> None:
        """Require that it has seen, or soon sees, each delivery of the store."""
        expected = {record.sequence: record.key for record in records}
        for _ in range(CATCH_UP_SECONDS):
            missing = [key for number, key in expected.items() if self._seen.get(number) != key]
            if not missing:
                return
            await trio.sleep(1)
        self._auditor.find("feed_gap", f"the feed has not sent {', '.join(missing[:5])}")
