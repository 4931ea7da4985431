"""Two hosts on one PostgreSQL database share the work that one of them has accepted."""

import collections
import time
from pathlib import Path
from typing import Any

import trio
from support.deliveries import Bench, arrival
from support.postgres import open_inbox
from support.serving import registry

from sdk_trio.records.deliveries import DeliveryState

EVENTS = 640


async def test_each_of_two_hosts_handles_a_third_of_a_burst_of_one(tmp_path: Path) -> None:
    handled: list[tuple[str, str]] = []
    terms = {"lease_seconds": 75, "dedup_seconds": 1e6, "payload_seconds": 1e6}
    inboxes = [await open_inbox(tmp_path, owner=name, **terms) for name in ("one", "two")]

    def handler_of(name: str) -> Any:
        async def handler(event: Any) -> None:
            await trio.sleep(0.1)
            handled.append((name, event.webhook_id))

        return handler

    benches = [
        Bench.of(
            registry(handler_of(name), enqueue=True),
            inbox,
            clock=time.time,
            Storage__Backend="Postgres",
        )
        for name, inbox in zip(("one", "two"), inboxes, strict=True)
    ]
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for bench in benches:
                await nursery.start(bench.queue.run)
            async with trio.open_nursery() as senders:
                for number in range(EVENTS):
                    brought = arrival(webhook_id=f"m{number}", now=time.time())
                    senders.start_soon(benches[0].queue.accept, brought)
            while len(handled) < EVENTS:
                await trio.sleep(0.05)
            for bench in benches:
                bench.queue.close()
    assert len(set(handled)) == len({webhook_id for _, webhook_id in handled}) == EVENTS
    shares = collections.Counter(name for name, _ in handled)
    assert min(shares.values()) >= EVENTS / 3, shares
    assert (await inboxes[0].counts())[DeliveryState.DONE] == EVENTS
    for inbox in inboxes:
        await inbox.close()
