"""Pauses and limits, as every store keeps them."""

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from integration.test_store_contract import Stores
from msgspec import structs
from support.deliveries import Bench
from support.postgres import FURTHER_VERSIONS, running_server
from support.serving import registry
from support.waiting import until

from sdk_trio.events import OrderUpdatedEvent
from sdk_trio.records.deliveries import Dead, DeliveryState, Done, NewDelivery, Released, Retry
from sdk_trio.records.policies import BURST_SHARE, PAUSED, ClaimLimits, GroupLimit
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines.postgres_address import PostgresAddress
from sdk_trio.storage.ports import Inbox
from sdk_trio.storage.postgres_inbox import PostgresInbox
from sdk_trio.storage.subjects import find_newer_handled

NOW = 1000.0


@pytest.fixture(
    params=["sqlite", "memory", "postgres", *(f"postgres{each}" for each in FURTHER_VERSIONS)]
)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    stores = Stores(request.param, tmp_path)
    yield stores
    for inbox in stores.opened:
        await inbox.close()


def delivery(
    webhook_id: str, event_type: str = "order.paid", *, subject: str | None = None
) -> NewDelivery:
    raw = b'{"type":"x"}'
    return NewDelivery(webhook_id, event_type, raw, 7, NOW, subject, subject is not None)


async def accept(inbox: Inbox, *ids: str, **fields: Any) -> None:
    for webhook_id in ids:
        await inbox.accept(delivery(webhook_id, **fields), leased=False)


def limits(free_workers: int = 100, **groups: GroupLimit) -> ClaimLimits:
    """Return limits of the types that are named, with "_" for a dot."""
    named = {name.replace("_", "."): limit for name, limit in groups.items()}
    return ClaimLimits(
        lambda event_type, _raw, _signer: event_type if event_type in named else None,
        named,
        frozenset(),
        free_workers,
    )


def pausing(event_type: str) -> ClaimLimits:
    group = f"{PAUSED}{event_type}"
    return ClaimLimits(
        lambda each, _raw, _signer: group if each == event_type else None,
        {},
        frozenset({group}),
        100,
    )


async def take(
    inbox: Inbox, obeyed: ClaimLimits | None = None, *, now: float = NOW, limit: int = 100
) -> list[str]:
    due = await inbox.claim_due(limit=limit, now=now, limits=obeyed)
    return [record.key for record in due.records]


# -- concurrency -----------------------------------------------------------------------------------


async def test_no_more_are_leased_than_the_concurrency_over_all_owners(stores: Stores) -> None:
    one, two = await stores.open("one"), await stores.open("two")
    await accept(one, *"abcde")
    both = limits(order_paid=GroupLimit(concurrency=2))
    assert await take(one, both) == ["a", "b"]
    assert await take(two, both) == []
    await one.start("a", now=NOW)
    await one.finish("a", Done(), now=NOW)
    assert await take(two, both) == ["c"]
    assert await take(one, both) == []


@pytest.mark.parametrize(
    "outcome",
    [Done(), Done(reason="discarded"), Dead("boom"), Released(), Retry(NOW + 900, "boom")],
)
async def test_each_end_of_a_run_frees_its_slot(stores: Stores, outcome: Any) -> None:
    inbox = await stores.open()
    await accept(inbox, "a", "b")
    one = limits(order_paid=GroupLimit(concurrency=1))
    assert await take(inbox, one) == ["a"]
    await inbox.start("a", now=NOW)
    assert await take(inbox, one) == []
    await inbox.finish("a", outcome, now=NOW)
    assert await take(inbox, one) == (["a"] if outcome == Released() else ["b"])


async def test_a_killed_owner_uses_its_slots_until_its_leases_end(stores: Stores) -> None:
    killed, other = await stores.open("killed"), await stores.open("other")
    await accept(killed, "a", "b", "c")
    one = limits(order_paid=GroupLimit(concurrency=1))
    assert await take(killed, one) == ["a"]
    await killed.start("a", now=NOW)
    assert await take(other, one) == []
    await other.take_over("killed", successor="successor", now=NOW)
    # The successor has the suspect, and with it the slot.
    assert await take(other, one) == []


async def test_events_of_other_types_pass_those_that_wait_for_a_slot(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, *(f"limited{number}" for number in range(30)))
    await accept(inbox, "free", event_type="order.created")
    one = limits(order_paid=GroupLimit(concurrency=1))
    assert await take(inbox, one, limit=5) == ["limited0", "free"]


async def test_no_limited_event_is_claimed_without_a_free_worker(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "a", "b")
    await accept(inbox, "free", event_type="order.created")
    none = limits(0, order_paid=GroupLimit(concurrency=5))
    due = await inbox.claim_due(limit=9, now=NOW, limits=none)
    assert [record.key for record in due.records] == ["free"]
    assert due.limited
    assert await take(inbox, limits(1, order_paid=GroupLimit(concurrency=5))) == ["a"]


@pytest.mark.parametrize("stores", ["sqlite", "memory"], indirect=True)
async def test_retries_wait_for_a_slot_as_well(stores: Stores) -> None:
    """On PostgreSQL the clock is the server's, which no test can set."""
    inbox = await stores.open(lease_seconds=1000)
    await accept(inbox, "a", "b")
    one = limits(order_paid=GroupLimit(concurrency=1))
    assert await take(inbox, one) == ["a"]
    await inbox.start("a", now=NOW)
    await inbox.finish("a", Retry(NOW + 5, "boom"), now=NOW)
    assert await take(inbox, one) == ["b"]
    assert await take(inbox, one, now=NOW + 10) == []
    await inbox.start("b", now=NOW + 10)
    await inbox.finish("b", Done(), now=NOW + 10)
    assert await take(inbox, one, now=NOW + 10) == ["a"]


async def test_a_policy_that_is_gone_holds_nothing(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "a", "b", "c")
    assert await take(inbox, limits(order_paid=GroupLimit(concurrency=1))) == ["a"]
    taken = []
    for _ in range(3):
        taken += await take(inbox, None)
    assert taken == ["b", "c"]


async def test_an_owner_without_limits_finds_what_another_leaves_in_a_group(
    stores: Stores,
) -> None:
    new, old = await stores.open("new"), await stores.open("old")
    await accept(new, "before")
    assert await take(new) == ["before"]
    # Another version, which still limits the type, holds its events, and ends.
    await accept(old, "a", "b")
    assert await take(old, limits(free_workers=0, order_paid=GroupLimit(concurrency=1))) == []
    taken = []
    for _ in range(3):
        taken += await take(new)
    assert taken == ["a", "b"]


async def test_the_group_with_the_oldest_event_is_first(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "first", event_type="refund.created")
    await accept(inbox, *"abc")
    many = limits(1, order_paid=GroupLimit(concurrency=9), refund_created=GroupLimit(concurrency=9))
    assert await take(inbox, many) == ["first"]
    assert await take(inbox, many) == ["a"]


# -- rate ------------------------------------------------------------------------------------------


async def test_a_rate_is_of_the_store_and_outlives_its_owners(
    stores: Stores, make_clock: Callable[[], Any]
) -> None:
    clock = make_clock()
    one, two = await stores.open("one"), await stores.open("two")
    await accept(one, *(f"m{number}" for number in range(40)))
    # A burst of five per cent: 5 at once, then one each 0.6 s.
    obeyed = limits(order_paid=GroupLimit(rate_per_minute=100.0))
    begun = clock.now()
    taken = await take(one, obeyed, now=clock.now())
    taken += await take(two, obeyed, now=clock.now())
    assert len(taken) == 5 + int((clock.now() - begun) / 0.6)
    due = await two.claim_due(limit=9, now=clock.now(), limits=obeyed)
    assert due.next_due_at is not None
    assert clock.now() - 0.1 < due.next_due_at < clock.now() + 0.7
    while len(taken) < 9:
        await clock.forward(0.3)
        taken += await take(one if len(taken) % 2 else two, obeyed, now=clock.now())
    assert clock.now() - begun >= 4 * 0.6 - 0.05


@pytest.mark.parametrize("stores", ["sqlite", "memory"], indirect=True)
async def test_a_rate_goes_on_after_the_clock_was_set_back(stores: Stores) -> None:
    """On PostgreSQL the clock is the server's, which no test can set."""
    inbox = await stores.open()
    await accept(inbox, "a", "b")
    obeyed = limits(order_paid=GroupLimit(rate_per_minute=1.0))
    assert await take(inbox, obeyed, now=NOW + 86400) == ["a"]
    assert await take(inbox, obeyed, now=NOW) == []
    assert await take(inbox, obeyed, now=NOW + 61) == ["b"]


async def test_a_claim_that_waited_for_another_one_brings_no_token_back(tmp_path: Path) -> None:
    """Its time is older than that of the other claim."""
    stores = Stores("sqlite", tmp_path)
    one, two = await stores.open("one"), await stores.open("two")
    await accept(one, *(f"m{number}" for number in range(20)))
    obeyed = limits(order_paid=GroupLimit(rate_per_minute=60.0))  # three may begin at once
    assert len(await take(one, obeyed, now=NOW)) == 3
    assert len(await take(one, obeyed, now=NOW + 10)) == 3
    assert await take(two, obeyed, now=NOW + 5) == []
    assert await take(one, obeyed, now=NOW + 10) == []
    assert len(await take(one, obeyed, now=NOW + 11)) == 1
    for inbox in stores.opened:
        await inbox.close()


class Moved:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self._now = NOW

    def now(self) -> float:
        return self._now

    async def forward(self, seconds: float) -> None:
        self._now += seconds
        await trio.lowlevel.checkpoint()


class Real:
    """The time of the machine, as the store has a clock of its own."""

    def now(self) -> float:
        import time

        return time.time()

    async def forward(self, seconds: float) -> None:
        await trio.sleep(seconds)


@pytest.fixture
def make_clock(stores: Stores) -> Callable[[], Any]:
    return Real if stores.kind.startswith("postgres") else Moved


# -- coalescing ------------------------------------------------------------------------------------


async def test_only_the_newest_waiting_event_of_a_subject_runs(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "a1", "a2", "a3", subject="a")
    await accept(inbox, "b1", subject="b")
    obeyed = limits(order_paid=GroupLimit(coalesce=True))
    taken = [*await take(inbox, obeyed), *await take(inbox, obeyed)]
    assert sorted(taken) == ["a3", "b1"]
    for key in ("a1", "a2"):
        record = await inbox.get(key)
        assert record is not None
        assert (record.state, record.last_error) == (DeliveryState.DONE, "superseded by a3")
        assert record.attempts == 0


async def test_a_running_event_is_not_superseded_and_the_newest_waits(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "a1", subject="a")
    obeyed = limits(order_paid=GroupLimit(coalesce=True))
    assert await take(inbox, obeyed) == ["a1"]
    await inbox.start("a1", now=NOW)
    await accept(inbox, "a2", "a3", subject="a")
    assert await take(inbox, obeyed) == []
    await inbox.finish("a1", Done(), now=NOW)
    assert [*await take(inbox, obeyed), *await take(inbox, obeyed)] == ["a3"]


async def test_events_of_another_type_of_the_subject_are_not_superseded(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "a1", subject="a")
    await accept(inbox, "other", event_type="order.refunded", subject="a")
    await accept(inbox, "a2", subject="a")
    obeyed = limits(order_paid=GroupLimit(coalesce=True))
    handled = []
    for _ in range(6):
        for key in await take(inbox, obeyed):
            await inbox.start(key, now=NOW)
            await inbox.finish(key, Done(), now=NOW)
            handled.append(key)
    assert handled == ["other", "a2"]


def state(webhook_id: str, changed_at: int | None, signer: str = "") -> NewDelivery:
    """Return an event of one subject with the state of that minute."""
    at = (
        "null"
        if changed_at is None
        else f'"{1970 + changed_at // 60}-01-01T00:{changed_at % 60:02}:00Z"'
    )
    raw = f'{{"type":"order.updated","data":{{"id":"a","modified_at":{at}}}}}'.encode()
    return NewDelivery(webhook_id, "order.updated", raw, 7, NOW, "a", True, "tenant", signer)


async def handle_all(inbox: Inbox, obeyed: ClaimLimits) -> list[str]:
    """Run what the claims allow, until there is nothing more; return the keys in order."""
    handled: list[str] = []
    while (due := await inbox.claim_due(limit=9, now=NOW, limits=obeyed)).records or due.more:
        for record in due.records:
            await inbox.start(record.key, now=NOW)
            await inbox.finish(record.key, Done(), now=NOW)
            handled.append(record.key)
    return handled


@pytest.mark.parametrize(
    ("states", "handled"),
    [
        ([3, 5, 4], ["e1"]),
        ([5, 3], ["e0"]),
        ([3, 3], ["e1"]),
        ([None, None], ["e1"]),
        # Neither is known to be newer.
        ([5, None], ["e0", "e1"]),
        # A time that is years ahead.
        ([60, 5], ["e0", "e1"]),
    ],
)
async def test_the_newest_state_runs_in_whatever_order_the_events_arrived(
    stores: Stores, states: list[int | None], handled: list[str]
) -> None:
    inbox = await stores.open()
    for number, changed_at in enumerate(states):
        await inbox.accept(state(f"e{number}", changed_at), leased=False)
    assert await handle_all(inbox, limits(order_updated=GroupLimit(coalesce=True))) == handled


async def test_events_of_two_signers_do_not_supersede_each_other(stores: Stores) -> None:
    inbox = await stores.open()
    for event in (state("a", 1), state("b", 2, "tenant"), state("c", 3)):
        await inbox.accept(event, leased=False)
    obeyed = limits(order_updated=GroupLimit(coalesce=True))
    assert await handle_all(inbox, obeyed) == ["b.tenant", "c"]


@pytest.mark.parametrize("stores", ["sqlite", "postgres"], indirect=True)
async def test_an_older_state_that_arrives_late_is_not_handled_after_a_newer_one(
    stores: Stores,
) -> None:
    """The store in memory keeps no bodies of handled events."""
    handled: list[str] = []

    async def handle(event: OrderUpdatedEvent) -> None:
        handled.append(event.key)

    inbox = await stores.open(lease_seconds=60)
    handlers = registry(handle, OrderUpdatedEvent, enqueue=True, coalesce=True)
    bench = Bench.of(handlers, inbox, clock=time.time)

    async def arrives(event: NewDelivery) -> None:
        event = structs.replace(event, tenant_id=None, received_at=time.time())
        await inbox.accept(event, leased=False)
        bench.queue.wake()

        async def is_done() -> bool:
            record = await inbox.get(event.key)
            return record is not None and record.state is DeliveryState.DONE

        await until(is_done)

    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await arrives(state("a", 5))
        await arrives(state("b", 3))
        await arrives(state("c", 6))
        assert handled == ["a", "c"]
        await arrives(state("ahead", 60 * 200))
        await arrives(state("d", 7))
        assert handled.pop() == "d"
        assert handled.pop() == "ahead"
        record = await inbox.get("b")
        assert record is not None
        assert record.last_error == "superseded by a"
        await inbox.repeat(["b"])
        bench.queue.wake()
        await until(lambda: handled == ["a", "c", "b"])
        bench.queue.close()
    assert bench.counters.values["superseded"] == 1


@pytest.mark.parametrize("stores", ["sqlite", "postgres"], indirect=True)
async def test_an_event_is_not_superseded_by_one_that_was_not_handled(stores: Stores) -> None:
    inbox = await stores.open()
    obeyed = limits(order_updated=GroupLimit(coalesce=True))
    for event in (state("a", 3), state("b", 5)):
        await inbox.accept(event, leased=False)
    assert [*await take(inbox, obeyed), *await take(inbox, obeyed)] == ["b"]
    await inbox.start("b", now=NOW)
    await inbox.finish("b", Dead("boom"), now=NOW)
    assert await find_newer_handled(inbox, state("late", 1)) is None
    await inbox.replay(["b"])
    assert await handle_all(inbox, obeyed) == ["b"]
    assert await find_newer_handled(inbox, state("late", 1)) == "b"


async def test_suspects_that_are_not_claimed_use_no_rate(stores: Stores) -> None:
    killed, inbox = await stores.open("killed"), await stores.open()
    await accept(killed, "a", "b")
    await take(killed)
    for key in ("a", "b"):
        await killed.start(key, now=NOW)
    await inbox.recover()
    obeyed = limits(order_paid=GroupLimit(rate_per_minute=2 / BURST_SHARE))
    for key in ("a", "b"):
        due = await inbox.claim_suspects(limit=1, now=NOW, limits=obeyed)
        assert [record.key for record in due.records] == [key]
        await inbox.start(key, now=NOW)
        await inbox.finish(key, Done(), now=NOW)


async def test_a_suspect_that_is_superseded_is_reported(stores: Stores) -> None:
    killed, successor = await stores.open("killed"), await stores.open("successor")
    await killed.accept(state("a", 1), leased=False)
    obeyed = limits(order_updated=GroupLimit(coalesce=True))
    assert await take(killed, obeyed) == ["a"]
    await killed.start("a", now=NOW)
    await successor.take_over("killed", successor="absent", now=NOW)
    await successor.take_over("absent", successor="successor", now=NOW)
    await successor.release(["a"])
    await successor.accept(state("b", 2), leased=False)
    due = await successor.claim_suspects(limit=9, now=NOW, limits=obeyed)
    assert due.superseded == [("a", "b")]
    assert due.records == []
    assert await handle_all(successor, obeyed) == ["b"]


@pytest.mark.parametrize("ids", [("sdkstate_1", "real"), ("real", "sdkstate_1")])
async def test_a_synthetic_event_is_not_superseded_by_arrival(
    stores: Stores, ids: tuple[str, str]
) -> None:
    inbox = await stores.open()
    await accept(inbox, *ids, subject="a")
    obeyed = limits(order_paid=GroupLimit(coalesce=True))
    handled = []
    for _ in range(2):
        for key in await take(inbox, obeyed):
            await inbox.start(key, now=NOW)
            await inbox.finish(key, Done(), now=NOW)
            handled.append(key)
    assert handled == [*ids]


# -- pauses ----------------------------------------------------------------------------------------


async def test_paused_events_wait_without_an_attempt_and_go_on_in_order(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, *"abc")
    await accept(inbox, "free", event_type="order.created")
    assert await take(inbox, pausing("order.paid"), limit=2) == ["free"]
    assert await take(inbox, pausing("order.paid")) == []
    await accept(inbox, "d")
    assert await take(inbox, pausing("order.paid")) == []
    taken = []
    for _ in range(3):
        taken += await take(inbox, None)
    assert taken == [*"abcd"]
    record = await inbox.get("a")
    assert record is not None
    assert (record.state, record.attempts) == (DeliveryState.RECEIVED, 0)


async def test_events_that_wait_for_a_limit_can_be_paused(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, *"abcd")
    limited = limits(order_paid=GroupLimit(concurrency=1))
    assert await take(inbox, limited) == ["a"]
    await inbox.finish("a", Done(), now=NOW)
    group = f"{PAUSED}order.*"
    both = ClaimLimits(lambda _type, _raw, _signer: group, limited.groups, frozenset({group}), 100)
    assert await take(inbox, both) == []
    taken = []
    for _ in range(3):
        taken += await take(inbox, limited)
    assert taken == ["b"]


async def test_a_pause_records_who_began_and_ended_it(stores: Stores) -> None:
    one, two = await stores.open("one"), await stores.open("two")
    await one.pause("order.*", actor="ann", reason="migration", until=None, now=NOW)
    await one.pause("refund.*", actor="ann", reason="", until=NOW + 600, now=NOW)
    first, second = await two.pauses(now=NOW + 1)
    assert (first.glob, first.actor, first.reason) == ("order.*", "ann", "migration")
    assert second.until is not None
    assert second.until - second.since == pytest.approx(600, abs=0.1)
    await two.pause("order.*", actor="bob", reason="longer", until=NOW + 90, now=NOW + 5)
    everything = await one.pauses(ended=True, now=NOW + 6)
    begun, changed = [each for each in everything if each.glob == "order.*"]
    assert (begun.actor, begun.reason, begun.ended_by) == ("ann", "migration", "bob")
    assert begun.ended_at is not None
    assert begun.ended_at >= begun.since
    assert changed in await one.pauses(now=NOW + 6)
    assert (changed.since, changed.actor) == (begun.since, "bob")
    assert await two.resume("order.*", actor="eve", now=NOW + 10) == ["order.*"]
    assert await two.resume("order.*", actor="eve", now=NOW + 11) == []
    assert [pause.glob for pause in await one.pauses(now=NOW + 11)] == ["refund.*"]
    kept = {pause.glob: pause for pause in await one.pauses(ended=True, now=NOW)}["order.*"]
    assert kept.ended_by == "eve"
    await one.pause("a", actor="ann", reason="", until=None, now=NOW + 70)
    assert set(await one.resume(None, actor="eve", now=NOW + 80)) == {"a", "refund.*"}


async def test_a_pause_ends_at_its_time(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.pause("order.*", actor="ann", reason="", until=NOW + 60, now=NOW)
    assert len(await inbox.pauses(now=NOW + 59)) == 1
    assert await inbox.pauses(now=NOW + 60) == []
    assert await inbox.resume("order.*", actor="eve", now=NOW + 61) == []


async def test_a_pause_ends_by_the_clock_of_the_database(tmp_path: Path) -> None:
    """The clocks of the hosts are wrong, and differ by an hour."""
    terms = {"lease_seconds": 75, "dedup_seconds": 1e6, "payload_seconds": 1e6}
    address = PostgresAddress(dsn=running_server().database_of(tmp_path))
    inbox = await PostgresInbox.open(
        address, LeaseTerms(owner="one", shared_by_hosts=True, **terms)
    )
    await inbox.pause("order.*", actor="ann", reason="", until=NOW + 0.5, now=NOW)
    await inbox.pause("refund.*", actor="ann", reason="", until=NOW + 600, now=NOW)

    async def paused(now: float) -> list[str]:
        return [each.glob for each in await inbox.pauses(now=now)]

    async def first_has_ended() -> bool:
        return await paused(NOW + 3600) == ["refund.*"]

    await until(first_has_ended)
    assert await paused(NOW - 3600) == ["refund.*"]
    assert await inbox.resume("order.*", actor="eve", now=NOW - 3600) == []
    await inbox.close()


# -- sharing ---------------------------------------------------------------------------------------


async def test_work_is_wanted_only_while_others_hold_what_they_have_not_begun(
    stores: Stores,
) -> None:
    busy, idle = await stores.open("busy"), await stores.open("idle")
    await idle.ask_for_work(seconds=60, now=NOW)
    assert not await busy.is_work_wanted(now=NOW)
    await busy.accept(delivery("a"), leased=True)
    await idle.ask_for_work(seconds=60, now=NOW)
    assert await busy.is_work_wanted(now=NOW)
    await busy.release(["a"])
    assert await take(idle) == ["a"]
    if not stores.kind.startswith("postgres"):
        assert not await busy.is_work_wanted(now=NOW + 61)


async def test_why_an_event_was_discarded_is_kept(stores: Stores) -> None:
    inbox = await stores.open()
    await accept(inbox, "a")
    await take(inbox)
    await inbox.start("a", now=NOW)
    await inbox.finish("a", Done(reason="discarded: no such order"), now=NOW)
    record = await inbox.get("a")
    assert record is not None
    assert (record.state, record.last_error) == (DeliveryState.DONE, "discarded: no such order")
