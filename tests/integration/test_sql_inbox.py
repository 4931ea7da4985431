"""The inbox in SQLite: claims of callers that have left, and remnants of an erased tenant."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from support.keyed import ByKey

from sdk_trio.records.deliveries import DeliveryState, Done, NewDelivery, Retry
from sdk_trio.storage import commit
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sql.arrivals import INDEX_EVERY
from sdk_trio.storage.sqlite_inbox import SqliteInbox

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 1e6, "payload_seconds": 1e6}


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[SqliteInbox]:
    inbox = ByKey(await SqliteInbox.open(tmp_path / "inbox.db", LeaseTerms(owner="one", **TERMS)))
    yield inbox
    await inbox.close()


def delivery(webhook_id: str, *, of: str | None = None, text: str = "") -> NewDelivery:
    raw = f'{{"of": "{text}"}}'.encode()
    return NewDelivery(webhook_id, f"t.{text}", raw, 7, 1000.0, f"s-{text}", tenant_id=of)


CLAIMS = {
    "accept": lambda inbox: inbox.accept(delivery("m1"), leased=True),
    "claim": lambda inbox: inbox.claim(delivery("m1")),
    "claim_due": lambda inbox: inbox.claim_due(limit=9, now=1001.0),
}


@pytest.mark.parametrize("claim", CLAIMS)
async def test_a_claim_whose_caller_left_is_given_up_by_the_next_renewal(
    inbox: SqliteInbox, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    """The store hangs, the caller is cancelled, and then the claim is committed after all."""
    monkeypatch.setattr(commit, "STALL_SECONDS", 0.05)
    await inbox.accept(delivery("m0"), leased=False)
    hang = threading.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox._commits.submit, lambda _: hang.wait(60))
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as impatient:
                impatient.start_soon(CLAIMS[claim], inbox)
                await trio.testing.wait_all_tasks_blocked()
                impatient.cancel_scope.cancel()
            hang.set()
        held: Any = "SELECT count(*) FROM work WHERE lease_owner IS NOT NULL"
        assert await inbox._commits.submit(lambda tx: tx.one(held)) == (1,), "it was committed"
        renewed = await inbox.renew([], now=1002.0)
        assert (renewed.lost, renewed.given_up) == (frozenset(), 1)
        key = "m1" if claim in ("accept", "claim") else "m0"
        record = await inbox.get(key)
        assert record is not None
        assert (record.state, record.attempts) == (DeliveryState.RECEIVED, 0)
        # A process without a lease records nothing.
        await inbox.finish(key, Done(), now=1003.0)
        assert (await inbox.counts())[DeliveryState.DONE] == 0


async def test_a_claim_that_is_still_waited_for_is_not_given_up(inbox: SqliteInbox) -> None:
    hang = threading.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox._commits.submit, lambda _: hang.wait(60))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(CLAIMS["accept"], inbox)
            await trio.testing.wait_all_tasks_blocked()
            renewed = []

            async def renew() -> None:
                renewed.append(await inbox.renew([], now=1002.0))

            nursery.start_soon(renew)
            await trio.testing.wait_all_tasks_blocked()
            hang.set()
    assert renewed[0].given_up == 0
    await inbox.finish("m1", Done(), now=1003.0)
    assert (await inbox.counts())[DeliveryState.DONE] == 1


async def test_nothing_of_an_erased_tenant_is_left_in_any_file(
    inbox: SqliteInbox, tmp_path: Path
) -> None:
    """Its id, keys, types, subjects, bodies and errors, in tables, indexes and the log."""
    secrets = (b"tenant-acme", b"key-acme", b"text-acme")
    names = ["acme" if number % 3 else "bolt" for number in range(2 * INDEX_EVERY + 50)]

    async def run(number: int, name: str) -> None:
        incoming = delivery(f"key-{name}-{number}", of=f"tenant-{name}", text=f"text-{name}")
        await inbox.accept(incoming, leased=True)
        if number % 5 == 0:
            await inbox.finish(incoming.key, Retry(None, f"text-{name}"), now=1001.0)
        elif number % 2:
            await inbox.finish(incoming.key, Done(), now=1001.0)

    async with trio.open_nursery() as nursery:
        for number, name in enumerate(names):
            nursery.start_soon(run, number, name)
    evidence = delivery("key-bolt-0", of="tenant-acme", text="text-acme")
    await inbox.accept(evidence, leased=False)
    assert await inbox.erase("tenant-acme") == names.count("acme")
    await inbox.wipe()
    assert not any((await inbox.holdings("tenant-acme")).values())
    contents = [path.read_bytes() for path in tmp_path.iterdir()]
    assert not [secret for secret in secrets for content in contents if secret in content]
    assert (await inbox.holdings("tenant-bolt"))["deliveries"] == names.count("bolt")
    assert await inbox.known(["key-bolt-0", "key-acme-1"]) == {"key-bolt-0"}
