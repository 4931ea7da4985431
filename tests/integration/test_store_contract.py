"""The contract of every store beyond the model: cancellation, concurrency, retention, listings."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import asdict, replace
from support.postgres import FURTHER_VERSIONS
from support.stores import Stores, delivery

from sdk_trio.base.text import storable
from sdk_trio.errors import EventTakenOverError, StoreUnavailableError
from sdk_trio.records.deliveries import (
    Admission,
    Admitted,
    Dead,
    DeliveryRecord,
    DeliveryState,
    Done,
    EvidenceRecord,
    Lease,
    NewDelivery,
    Parked,
    Postponed,
    Purged,
    Released,
    Renewed,
    Retry,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.storage.ports import Inbox


@pytest.fixture(
    params=["sqlite", "memory", "postgres", *(f"postgres{each}" for each in FURTHER_VERSIONS)]
)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    stores = Stores(request.param, tmp_path)
    yield stores
    await stores.close()


async def test_a_new_delivery_is_kept_with_everything_it_brought(stores: Stores) -> None:
    inbox = await stores.open()
    brought = delivery(subject="ord_1", ordered=True)
    await inbox.accept(brought, leased=False)
    record = await inbox.get("m1")
    assert record is not None
    expected = asdict(brought)
    del expected["address"]  # of no interest, unless another body comes under the same key
    assert {name: getattr(record, name) for name in expected} == expected
    assert await inbox.get("m2") is None


async def test_odd_ids_types_and_bodies_come_back_unchanged(stores: Stores) -> None:
    inbox = await stores.open()
    for odd in ("' OR 1=1 --", "a\0b", "\u2603" * 300, " ", "%"):
        incoming = NewDelivery(odd, odd, odd.encode() + b"\xff\0", 7, 1.5, odd, True)
        assert (await inbox.accept(incoming, leased=False)).admission is Admission.NEW
        record = await inbox.get(odd)
        assert record is not None
        assert (record.type, record.raw, record.subject) == (odd, incoming.raw, odd)
    assert len((await inbox.claim_due(limit=10, now=2)).records) == 5


async def note_admission(
    call: Callable[[NewDelivery], Awaitable[Admitted]], incoming: NewDelivery, into: list[Admission]
) -> None:
    into.append((await call(incoming)).admission)


async def test_of_fifty_tasks_with_the_same_id_one_is_the_first(stores: Stores) -> None:
    inbox = await stores.open()
    for call in (lambda d: inbox.accept(d, leased=True), inbox.park):
        incoming = delivery(getattr(call, "__name__", "m"))
        answers: list[Admission] = []

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(note_admission, call, incoming, answers)
        assert answers.count(Admission.NEW) == 1


async def test_of_several_owners_one_runs_a_delivery_inline(stores: Stores) -> None:
    inboxes = [await stores.open(f"owner {n}") for n in range(8)]
    answers: list[Admission] = []
    async with trio.open_nursery() as nursery:
        for inbox in inboxes:
            nursery.start_soon(note_admission, inbox.claim, delivery(), answers)
    assert sorted(answer.name for answer in answers) == ["NEW", *["RUNNING"] * 7]


async def test_a_running_claim_is_protected_from_other_owners_but_not_from_its_own(
    stores: Stores,
) -> None:
    ours, theirs = await stores.open("ours"), await stores.open("theirs")
    assert (await ours.claim(delivery("m"))).admission is Admission.NEW
    assert (await theirs.claim(delivery("m"))).admission is Admission.RUNNING
    # Its owner does not run it, so the call that claimed it was abandoned, and does not count.
    again = await ours.claim(delivery("m"))
    assert (again.admission, again.attempts) == (Admission.NEW, 0)


async def test_each_of_many_workers_gets_deliveries_of_its_own(stores: Stores) -> None:
    inboxes = [await stores.open(f"owner {n}") for n in range(3)]
    for n in range(60):
        await inboxes[0].accept(delivery(f"m{n}"), leased=False)
    taken: list[str] = []

    async def work(inbox: Inbox) -> None:
        while due := (await inbox.claim_due(limit=7, now=1001)).records:
            taken.extend(record.webhook_id for record in due)

    async with trio.open_nursery() as nursery:
        for inbox in inboxes * 2:
            nursery.start_soon(work, inbox)
    assert sorted(taken) == sorted(f"m{n}" for n in range(60))


async def test_ordered_deliveries_of_a_subject_wait_for_each_other(stores: Stores) -> None:
    inbox = await stores.open()
    for n in (1, 2, 3):
        incoming = replace(delivery(f"a{n}", subject="a", ordered=True), type=f"t{n}")
        await inbox.accept(incoming, leased=False)
    await inbox.accept(delivery("b1", subject="b", ordered=True), leased=False)
    await inbox.accept(delivery("a free", subject="a"), leased=False)

    async def take(now: float) -> list[str]:
        return [r.webhook_id for r in (await inbox.claim_due(limit=9, now=now)).records]

    assert await take(1001) == ["a1", "b1", "a free"]
    await inbox.start("a1", now=1001)
    assert await take(1001) == []
    await inbox.finish("a1", Retry(1010, "boom"), now=1002)
    assert await take(1009) == [], "a retry in the future still holds its place in the line"
    assert await take(1010) == ["a1"]
    await inbox.start("a1", now=1010)
    await inbox.finish("a1", Dead("boom"), now=1011)
    assert await take(1011) == ["a2"]
    await inbox.replay(["a1"])
    await inbox.release(["a2"])
    assert await take(1012) == ["a1"], "what is replayed is first in line again"


async def test_recovery_hands_crashed_runs_to_our_own_workers(stores: Stores) -> None:
    crashed = await stores.open("crashed")
    await crashed.claim(delivery("inline"))
    await crashed.accept(delivery("queued"), leased=True)
    await crashed.accept(delivery("started"), leased=True)
    await crashed.start("started", now=1001)
    await crashed.accept(delivery("waiting"), leased=False)
    inbox = await stores.open("next")
    await inbox.accept(delivery("own"), leased=True)
    assert await inbox.recover() == 3
    due = (await inbox.claim_due(limit=9, now=1002)).records
    found = {r.webhook_id: (r.state, r.queued, r.attempts) for r in due}
    received = DeliveryState.RECEIVED
    assert found == {
        "inline": (received, True, 1),
        "queued": (received, True, 0),
        "started": (received, True, 1),
        "waiting": (received, True, 0),
    }
    # The owner that only seemed dead has lost its lease: it changes nothing.
    await crashed.finish("started", Dead("late"), now=1003)
    assert (await inbox.get("started")).state is received  # type: ignore[union-attr] # it exists


async def test_metrics_count_commits(stores: Stores) -> None:
    inbox = await stores.open()
    if stores.kind == "memory":
        assert not list(inbox.samples())
        return

    def shown(name: str) -> float:
        return next(each.value for each in inbox.samples() if each.name == name)

    before = shown("sdk_store_commit_seconds_count")
    for key in ("ended", "kept", "let go"):
        await inbox.claim(delivery(key))
    await inbox.finish("ended", Done(), now=1001)
    assert shown("sdk_store_commit_seconds_count") >= before + 4
    assert shown("sdk_store_commit_seconds_sum") > 0


async def test_the_runs_of_one_dead_owner_are_left_to_its_successor(stores: Stores) -> None:
    dead, alive = await stores.open("dead"), await stores.open("alive")
    await dead.accept(delivery("queued"), leased=True)
    await dead.accept(delivery("started"), leased=True)
    await dead.start("started", now=1001)
    await alive.accept(delivery("of another"), leased=True)
    assert await alive.take_over("dead", successor="successor", now=1002) == 2
    assert await alive.take_over("dead", successor="successor", now=1002) == 0
    free = (await alive.claim_due(limit=9, now=1002)).records
    assert [record.webhook_id for record in free] == ["queued"], (
        "a run that ended it is the successor's"
    )
    # The successor dies before it has run it: its own successor gets it.
    await (await stores.open("successor")).claim_suspects(limit=9, now=1002)
    assert await alive.take_over("successor", successor="second successor", now=1002) == 1
    assert not (await alive.claim_due(limit=9, now=1003)).records
    successor = await stores.open("second successor")
    (suspect,) = (await successor.claim_suspects(limit=9, now=1003)).records
    reported = (suspect.webhook_id, suspect.state, suspect.attempts, suspect.process_ends)
    assert reported == ("started", DeliveryState.RECEIVED, 1, 1)
    await dead.finish("started", Dead("late"), now=1003)
    assert (await successor.get("started")).state is DeliveryState.RECEIVED  # type: ignore[union-attr] # it exists


async def test_a_run_without_a_successor_is_claimed_after_its_lease(
    stores: Stores,
) -> None:
    dead, alive = await stores.open("dead"), await stores.open("alive")
    await dead.claim(delivery("only"))
    assert await alive.take_over("dead", successor="never", now=1002) == 1
    assert not (await alive.claim_due(limit=9, now=1003)).records
    assert not (await alive.claim_suspects(limit=9, now=1003)).records
    (record,) = (await alive.claim_due(limit=9, now=1003 + 75)).records
    assert (record.webhook_id, record.process_ends, record.ran_alone) == ("only", 1, True)


async def test_a_run_that_is_begun_without_waiting_counts_before_what_follows(
    stores: Stores,
) -> None:
    inbox = await stores.open()
    for webhook_id in ("done", "failed"):
        await inbox.accept(delivery(webhook_id), leased=True)
        inbox.start_unawaited(webhook_id, now=1001)
    running = await inbox.get("done")
    await inbox.finish("done", Done(), now=1002)
    await inbox.finish("failed", Retry(1100, "no"), now=1002)
    done, failed = await inbox.get("done"), await inbox.get("failed")
    assert running is not None
    assert done is not None
    assert failed is not None
    assert (done.state, done.attempts, done.started_at) == (DeliveryState.DONE, 1, 1001)
    assert (failed.state, failed.attempts) == (DeliveryState.RETRYING, 1)
    assert [(run.number, run.started_at) for run in await inbox.attempts("failed")] == [(1, 1001)]


async def test_a_postponed_run_is_not_counted_and_is_due_at_its_time(
    stores: Stores,
) -> None:
    inbox = await stores.open()
    for name in ("began", "leased", "first", "second"):
        ordered = name in ("first", "second")
        await inbox.accept(delivery(name, ordered=ordered, subject="s"), leased=name != "second")
    inbox.start_unawaited("began", now=1001)
    await inbox.claim_due(limit=9, now=1001)
    await inbox.start("first", now=1001)
    for name in ("began", "leased", "first"):
        await inbox.finish(name, Postponed(1100, "the route is paused"), now=1002)
    for name in ("began", "leased", "first"):
        record = await inbox.get(name)
        assert record is not None
        assert (record.state, record.attempts) == (DeliveryState.RETRYING, 0)
        assert (record.next_attempt_at, record.last_error) == (1100, "the route is paused")
        assert list(await inbox.attempts(name)) == []
    # It delays its successors, and no other event.
    due = await inbox.claim_due(limit=9, now=1099)
    assert (list(due.records), due.next_due_at) == ([], 1100)
    due = await inbox.claim_due(limit=9, now=1100)
    assert [record.webhook_id for record in due.records] == ["began", "leased", "first"]
    # One that ends well has no error left of its wait; the error of a failed run is history.
    inbox.start_unawaited("began", now=1101)
    await inbox.start("leased", now=1101)
    await inbox.start("first", now=1101)
    await inbox.finish("first", Retry(1102, "no"), now=1101)
    assert len((await inbox.claim_due(limit=9, now=1102)).records) == 1
    inbox.start_unawaited("first", now=1102)
    for name, error in (("began", None), ("leased", None), ("first", "no")):
        await inbox.finish(name, Done(), now=1103)
        record = await inbox.get(name)
        assert record is not None
        assert (record.state, record.last_error) == (DeliveryState.DONE, error)


async def test_the_application_s_answer_is_stored_with_a_successful_run(stores: Stores) -> None:
    inbox = await stores.open()
    for name in ("began", "started", "retried"):
        await inbox.accept(delivery(name), leased=True)
    inbox.start_unawaited("began", now=1001)
    await inbox.start("started", now=1001)
    await inbox.start("retried", now=1001)
    await inbox.finish("retried", Retry(1002, "500", answer="answered 500: oh"), now=1002)
    await inbox.claim_due(limit=9, now=1002)
    await inbox.start("retried", now=1002)
    for name in ("began", "started", "retried"):
        await inbox.finish(name, Done("answered 200: ok"), now=1003)
        record = await inbox.get(name)
        assert record is not None
        assert record.state is DeliveryState.DONE
    for name in ("began", "started"):
        (run,) = await inbox.attempts(name)
        assert (run.number, run.started_at, run.finished_at) == (1, 1001, 1003)
        assert (run.error, run.place) == ("", "answered 200: ok")
    failed, ended = await inbox.attempts("retried")
    assert (failed.number, failed.error, failed.place) == (1, "500", "answered 500: oh")
    assert (ended.number, ended.error, ended.place) == (2, "", "answered 200: ok")


async def test_a_run_that_begins_and_ends_at_once_counts_as_any_other(stores: Stores) -> None:
    inbox, other = await stores.open("one"), await stores.open("other")
    ids = ("ours", "another's")
    for webhook_id in ids:
        await inbox.accept(delivery(webhook_id), leased=webhook_id == "ours")
    await other.claim_due(limit=9, now=1001)
    await other.start("another's", now=1001)
    for webhook_id in ids:
        inbox.start_unawaited(webhook_id, now=1002)
        await inbox.finish(webhook_id, Done(), now=1003)
    found = [await inbox.get(webhook_id) for webhook_id in ids]
    assert [
        record and (record.state, record.attempts, record.started_at, record.finished_at)
        for record in found
    ] == [
        (DeliveryState.DONE, 1, 1002, 1003),
        (DeliveryState.RUNNING, 1, 1001, None),
    ]


async def test_a_closed_store_ignores_unawaited_work(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.accept(delivery("m1"), leased=True)
    await inbox.close()
    inbox.start_unawaited("m1", now=1001)


async def test_a_start_that_is_repeated_counts_once(stores: Stores) -> None:
    """It is unknown whether a failed start was committed; another run counts."""
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=True)
    for run in (1, 2):
        for now in (1011, 1012, 1013):
            await inbox.start("m1", now=now)
        record = await inbox.get("m1")
        assert record is not None
        assert (record.attempts, record.started_at) == (run, 1013)
        await inbox.finish("m1", Retry(1014, "no"), now=1014)
        (taken,) = (await inbox.claim_due(limit=9, now=1014)).records
        assert taken.attempts == run


async def test_a_lease_is_another_s_until_it_expires(stores: Stores) -> None:
    inbox, other = await stores.open("one"), await stores.open("other")
    await inbox.accept(delivery(), leased=True)

    async def attempts() -> int:
        record = await inbox.get("m1")
        assert record is not None
        return record.attempts

    assert not await other.start("m1", now=1009)
    assert await attempts() == 0
    await inbox.renew(["m1"], now=1009)
    assert not await other.start("m1", now=1015)
    assert await attempts() == 0
    assert len((await other.claim_due(limit=9, now=1019)).records) == 1
    assert await other.start("m1", now=1019)
    assert await attempts() == 1
    assert await inbox.renew(["m1"], now=1020) == Renewed(lost=frozenset({"m1"}))
    assert not await inbox.start("m1", now=1020)
    await inbox.finish("m1", Done(), now=1020)
    assert (await inbox.counts())[DeliveryState.RUNNING] == 1, "the run of the other goes on"
    await other.finish("m1", Done(), now=1021)
    assert not await inbox.start("m1", now=1021), "it is finished"
    assert not await inbox.start("gone", now=1021)
    assert await inbox.renew(["m1", "gone"], now=1021) == Renewed()


async def test_no_run_starts_without_the_lease_of_its_delivery(stores: Stores) -> None:
    """Its lease was taken over, and the new owner has put it back: it waits for its retry."""
    inbox, other = await stores.open("one"), await stores.open("other")
    await inbox.accept(delivery("waits"), leased=False)
    assert not await inbox.start("waits", now=1000)
    await inbox.accept(delivery(), leased=True)
    assert [each.key for each in (await other.claim_due(limit=9, now=1011)).records] == [
        "waits",
        "m1",
    ]
    await other.start("m1", now=1011)
    await other.finish("m1", Retry(1100, "boom"), now=1012)
    await other.release(["waits"])
    for key in ("m1", "waits"):
        assert not await inbox.start(key, now=1013)
        inbox.start_unawaited(key, now=1013)
        await inbox.finish(key, Done(), now=1014)
    records = [await inbox.get(key) for key in ("m1", "waits")]
    assert [(each.state, each.attempts) for each in records if each] == [
        (DeliveryState.RETRYING, 1),
        (DeliveryState.RECEIVED, 0),
    ]


async def test_a_renewal_gives_up_leases_that_are_not_held(stores: Stores) -> None:
    """Events claimed for a caller that has left are due at once, and no attempt is counted."""
    inbox, other = await stores.open("one"), await stores.open("other")
    for name in ("held", "stray", "started", "waits"):
        await inbox.accept(delivery(name), leased=True)
    for name in ("held", "started", "waits"):
        await inbox.start(name, now=1001)
    await inbox.finish("waits", Retry(1002, "no"), now=1001)
    await inbox.claim(delivery("inline"))
    await other.claim(delivery("foreign"))
    fetched = (await inbox.claim_due(limit=9, now=1002)).records
    assert [record.key for record in fetched] == ["waits"]
    assert await inbox.renew(["held"], now=1003) == Renewed(given_up=4)
    assert await inbox.renew(["held"], now=1003) == Renewed()
    due = (await other.claim_due(limit=9, now=1003)).records
    found = [(record.key, record.attempts, record.process_ends) for record in due]
    assert found == [("stray", 0, 0), ("started", 0, 0), ("waits", 1, 0)]
    record = await inbox.get("inline")
    assert record is not None
    assert (record.state, record.queued, record.attempts) == ("received", False, 0)
    assert (await inbox.claim(delivery("inline"))).admission is Admission.NEW
    assert await inbox.start("held", now=1004)
    assert (await other.claim(delivery("foreign"))).admission is Admission.NEW, "the other's own"


async def test_leases_that_no_one_has_taken_over_are_counted(stores: Stores) -> None:
    inbox, other = await stores.open("one"), await stores.open("other")
    for name in ("a", "b", "free"):
        await inbox.accept(delivery(name), leased=name != "free")
    await inbox.claim(delivery("inline"))  # no one runs it unless its sender delivers it again
    await inbox.start("b", now=1000)
    assert await other.expired_leases(before=1009) == 0
    assert await other.expired_leases(before=1010) == 2
    await inbox.renew(["b"], now=1005)
    assert await other.expired_leases(before=1014) == 0
    assert await other.expired_leases(before=1015) == 1
    await other.claim_due(limit=9, now=1015)
    assert await inbox.expired_leases(before=1015) == 0


async def test_an_ordered_event_behind_a_stray_lease_runs_after_a_renewal(stores: Stores) -> None:
    inbox = await stores.open("one")
    for name in ("first", "second"):
        await inbox.accept(delivery(name, subject="lane", ordered=True), leased=False)
    assert [each.key for each in (await inbox.claim_due(limit=1, now=1001)).records] == ["first"]
    assert (await inbox.claim_due(limit=9, now=1001)).records == []
    await inbox.renew([], now=1001)
    (record,) = (await inbox.claim_due(limit=9, now=1001)).records
    assert record.key == "first"


async def test_giving_up_a_lease_neither_stops_a_run_nor_uncounts_one(stores: Stores) -> None:
    inbox = await stores.open()
    for name in ("running", "leased"):
        await inbox.accept(delivery(name), leased=True)
    await inbox.start("running", now=1001)
    await inbox.release(["running", "leased", "unknown"])
    due = (await inbox.claim_due(limit=9, now=1001)).records
    assert [(record.webhook_id, record.attempts) for record in due] == [("leased", 0)]
    for name in ("running", "leased"):
        await inbox.finish(name, Released(), now=1002)
    due = (await inbox.claim_due(limit=9, now=1002)).records
    assert [record.attempts for record in due] == [0, 0]


LATE = (
    *(Done(), Done("answered 200"), Retry(1010, "late"), Dead("late")),
    *(Released(), Parked("late"), Postponed(1010, "late")),
)


@pytest.mark.parametrize("inline", [False, True], ids=["queued", "inline"])
async def test_a_late_outcome_does_not_end_a_later_run_of_the_same_process(
    stores: Stores, inline: bool
) -> None:
    inbox: Inbox = (await stores.open()).raw

    async def begin(key: str, now: float) -> Lease:
        if inline:
            lease = (await inbox.claim(delivery(key))).lease
        else:
            await inbox.accept(delivery(key), leased=False)
            lease = (await inbox.claim_due(limit=9, now=now)).leases[key]
        assert lease is not None
        assert inline or await inbox.start(lease, now=now)
        return lease

    for key, outcome in ((f"m{number}", outcome) for number, outcome in enumerate(LATE)):
        first = await begin(key, 1000)
        assert await inbox.renew([], now=1001) == Renewed(given_up=1)
        second = await begin(key, 1002)
        before = await inbox.get(key)
        assert not await inbox.finish(first, outcome, now=1003)
        assert not await inbox.start(first, now=1003)
        assert not await inbox.join(first)
        assert await inbox.release([first]) == 0
        if stores.kind != "memory":
            with pytest.raises(EventTakenOverError):
                await inbox.conclude(first, lambda _: None, attempt=1, now=1003)
        inbox.end_unawaited(first, now=1003)
        assert await inbox.get(key) == before
        assert not await inbox.attempts(key)
        assert await inbox.renew([second], now=1004) == Renewed()
        assert await inbox.finish(second, Done(), now=1005)
        assert not await inbox.finish(second, Done(), now=1006), "it is done already"
        record = await inbox.get(key)
        assert record is not None
        assert (record.state, record.attempts, record.finished_at) == (DeliveryState.DONE, 1, 1005)


async def test_a_renewal_keeps_the_lease_of_a_call_that_ends_meanwhile(stores: Stores) -> None:
    inbox: Inbox = (await stores.open()).raw
    leases = []

    async def take(number: int) -> None:
        leases.append((await inbox.accept(delivery(f"a{number}"), leased=True)).lease)
        leases.append((await inbox.claim(delivery(f"c{number}"))).lease)

    async def renew() -> None:
        held = [lease for lease in leases if lease is not None]
        assert (await inbox.renew(held, now=1000)).given_up == 0

    for number in range(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, number)
            nursery.start_soon(renew)


async def test_half_of_a_surrogate_pair_is_stored_as_the_replacement_character(
    stores: Stores,
) -> None:
    """JSON can bring it into any text, and no database takes it."""
    inbox: Inbox = (await stores.open()).raw
    odd, stored = "a\ud800z", "a\ufffdz"
    incoming = storable(NewDelivery(odd, odd, b"{}", 7, 1000.0, subject=odd))
    lease = (await inbox.accept(incoming, leased=True)).lease
    assert lease is not None
    again = storable(NewDelivery(odd, odd, b"{}", 7, 1001.0, subject=odd))
    assert (await inbox.accept(again, leased=False)).admission is Admission.QUEUED
    record = await inbox.get(odd)
    assert record is not None
    assert (record.key, record.type, record.subject) == (stored, stored, stored)
    assert await inbox.known([odd, "other"]) == {stored}
    assert [each.key for each in await inbox.find(subject=odd)] == [stored]
    assert await inbox.finish(lease, Retry(2000.0, odd, traceback=odd), now=1002)
    record = await inbox.get(stored)
    assert record is not None
    assert record.last_error == stored
    assert [(each.error, each.traceback) for each in await inbox.attempts(odd)] == [
        (stored, stored)
    ]
    assert await inbox.replay([odd]) == [stored]
    await inbox.park(storable(NewDelivery("p" + odd, "t", b"{}", 7, 1000.0)), odd)
    parked = await inbox.get("p" + odd)
    assert parked is not None
    assert parked.last_error == stored
    await inbox.pause(odd, actor=odd, reason=odd, until=None, now=1003)
    assert [(each.glob, each.reason) for each in await inbox.pauses(now=1003)] == [(stored, stored)]
    await inbox.write_checkpoint(odd, odd)
    assert await inbox.read_checkpoint(odd) == stored


async def test_a_listing_filters_and_pages(stores: Stores) -> None:
    inbox = await stores.open()
    for n in range(6):
        incoming = delivery(f"m{n}", at=1000.0 + n, subject=f"s{n % 2}")
        await inbox.accept(replace(incoming, type=f"t{n % 3}"), leased=True)
        if n < 2:
            await inbox.finish(f"m{n}", Done(), now=1010)

    async def find(**conditions: Any) -> list[str]:
        records = await inbox.find(**conditions)
        assert all(record.raw is None for record in records)
        return [record.webhook_id for record in records]

    assert await find() == ["m5", "m4", "m3", "m2", "m1", "m0"]
    assert await find(limit=2) == ["m5", "m4"]
    assert await find(type="t1") == ["m4", "m1"]
    assert await find(state=DeliveryState.DONE) == ["m1", "m0"]
    assert await find(state=DeliveryState.RECEIVED, limit=3) == ["m5", "m4", "m3"]
    assert await find(since=1003) == ["m5", "m4", "m3"]
    assert await find(subject="s1", type="t0") == ["m3"]
    second = (await inbox.find())[-2].sequence
    assert await find(after_sequence=second, limit=2) == ["m2", "m3"]
    assert await find(before_sequence=second + 3, limit=2) == ["m3", "m2"]
    assert await find(before_sequence=second + 3, after_sequence=second) == ["m2", "m3"]
    assert await find(after_sequence=second, oldest_first=False, limit=2) == ["m5", "m4"]
    assert await find(oldest_first=True, limit=2) == ["m0", "m1"]
    assert await find(since=1001, until=1003) == ["m2", "m1"]
    assert await find(tenant_id="unknown") == []


async def test_retention_removes_bodies_then_records_but_no_dead_letter(stores: Stores) -> None:
    inbox = await stores.open()
    for name in ("done", "dead", "parked", "queued"):
        await inbox.accept(delivery(name), leased=True)
    await inbox.finish("done", Done(), now=1001)
    await inbox.finish("dead", Dead("boom"), now=1001)
    await inbox.finish("parked", Parked(), now=1001)
    assert await inbox.purge(now=1040) == Purged(0, 0, 0)
    # In memory the body has gone with the end of its delivery.
    bodies = 0 if stores.kind == "memory" else 1
    assert await inbox.purge(now=1041.5) == Purged(bodies, 0, 1)
    done = await inbox.get("done")
    assert done is not None
    assert done.raw is None
    assert (await inbox.accept(delivery("done", at=1101), leased=True)).admission is Admission.DONE
    assert await inbox.purge(now=1101.5) == Purged(0, 1, 0)
    assert [r.webhook_id for r in await inbox.find()] == ["queued", "dead"]
    assert await inbox.replay(["dead"]) == ["dead"]
    again = await inbox.accept(delivery("done", at=1102), leased=True)
    assert again.admission is Admission.NEW


async def test_only_changes_of_others_are_changes_elsewhere(stores: Stores) -> None:
    inbox, other = await stores.open("one"), await stores.open("other")
    await inbox.changed_elsewhere()  # opening a store may write to it
    await inbox.accept(delivery(), leased=True)
    assert not await inbox.changed_elsewhere()
    await other.accept(delivery("m2"), leased=False)
    await other.get("m2")
    assert await inbox.changed_elsewhere()
    assert not await inbox.changed_elsewhere()


async def test_a_closed_store_raises_an_error(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=True)
    await inbox.close()
    await inbox.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await inbox.accept(delivery(), leased=True)
    with pytest.raises(StoreUnavailableError, match="closed"):
        await inbox.get("m1")


# -- cancellation ------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Inbox], Awaitable[Any]]] = {
    "accept": lambda inbox: inbox.accept(delivery("new"), leased=True),
    "claim": lambda inbox: inbox.claim(delivery("new")),
    "park": lambda inbox: inbox.park(delivery("new")),
    "start": lambda inbox: inbox.start("leased", now=1001),
    "finish done": lambda inbox: inbox.finish("running", Done(), now=1001),
    "finish retry": lambda inbox: inbox.finish("running", Retry(1002, "boom"), now=1001),
    "finish released": lambda inbox: inbox.finish("running", Released(), now=1001),
    "release": lambda inbox: inbox.release(["leased"]),
    "claim_due": lambda inbox: inbox.claim_due(limit=5, now=1001),
    "recover": lambda inbox: inbox.recover(),
    "take_over": lambda inbox: inbox.take_over("unknown", successor="successor", now=1001),
    "renew": lambda inbox: inbox.renew(["running"], now=1001),
    "replay": lambda inbox: inbox.replay(["dead"]),
    "repeat": lambda inbox: inbox.repeat(["dead"]),
    "get": lambda inbox: inbox.get("leased"),
    "attempts": lambda inbox: inbox.attempts("dead"),
    "find": lambda inbox: inbox.find(),
    "counts": lambda inbox: inbox.counts(),
    "changed_elsewhere": lambda inbox: inbox.changed_elsewhere(),
    "purge": lambda inbox: inbox.purge(now=2000),
}


async def prepare(inbox: Inbox) -> None:
    for name in ("leased", "running", "dead"):
        await inbox.accept(delivery(name), leased=True)
    await inbox.start("running", now=1000)
    await inbox.start("dead", now=1000)
    await inbox.finish("dead", Dead("boom"), now=1000)
    await inbox.accept(delivery("due"), leased=False)


async def everything(inbox: Inbox) -> list[Any]:
    names = [record.webhook_id for record in await inbox.find()]
    return [(await inbox.get(name), await inbox.attempts(name)) for name in names]


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_is_cancelled_first_changes_nothing(stores: Stores, call: str) -> None:
    inbox = await stores.open()
    await prepare(inbox)
    before = await everything(inbox)
    with trio.CancelScope() as scope:
        scope.cancel()
        await CALLS[call](inbox)
    assert scope.cancelled_caught, "every method is a checkpoint"
    assert await everything(inbox) == before


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_cancelled_at_any_step_is_undone_or_done(
    tmp_path: Path, call: str, stores: Stores
) -> None:
    twin = Stores(stores.kind, tmp_path / "twin")
    (tmp_path / "twin").mkdir(mode=0o700)
    whole = await twin.open()
    await prepare(whole)
    before = await everything(whole)
    await CALLS[call](whole)
    ends = [before, await everything(whole)]
    await whole.close()

    inbox = await stores.open()
    await prepare(inbox)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(CALLS[call], inbox)
            # One step of the loop: the call has begun and waits, if it does, for its thread.
            await trio.lowlevel.cancel_shielded_checkpoint()
            scope.cancel()
    assert await everything(inbox) in ends
    # A purge that was cut short finishes at the next one; all else is still usable too.
    await inbox.purge(now=2000)
    assert (await inbox.accept(delivery("later"), leased=True)).admission is Admission.NEW


async def test_closing_is_shielded(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=True)
    with trio.CancelScope() as scope:
        scope.cancel()
        await inbox.close()
    if stores.kind == "sqlite":
        assert not stores.file.with_name("inbox.db-wal").exists()
    with pytest.raises(StoreUnavailableError):
        await inbox.counts()


async def test_it_reports_known_ids_in_any_state(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.accept(delivery("waiting"), leased=False)
    await inbox.claim(delivery("failed"))
    await inbox.finish("failed", Dead("no"), now=1001)
    await inbox.park(delivery("parked"))
    asked = ["waiting", "failed", "parked", "never", "' OR 1=1 --", "a\0b"]
    assert await inbox.known(asked) == {"waiting", "failed", "parked"}
    assert await inbox.known([]) == frozenset()
    assert await inbox.known([f"m{n}" for n in range(5000)]) == frozenset()


async def test_checkpoints_are_shared_replaced_and_forgotten(stores: Stores) -> None:
    inbox, other = await stores.open("one"), await stores.open("two")
    assert await inbox.read_checkpoint("a") is None
    await inbox.write_checkpoint("a", "first")
    await inbox.write_checkpoint("b", "")
    await inbox.write_checkpoint("a", "second \u2603")
    assert await other.read_checkpoint("a") == "second \u2603"
    assert await other.read_checkpoint("b") == ""
    await other.write_checkpoint("a", None)
    await other.write_checkpoint("a", None)
    assert await inbox.read_checkpoint("a") is None
    await inbox.write_checkpoint("a", "first", once=True)
    await other.write_checkpoint("a", "second", once=True)
    assert await other.read_checkpoint("a") == "first"
    await inbox.close()
    with pytest.raises(StoreUnavailableError):
        await inbox.write_checkpoint("a", "late")


async def test_the_oldest_waiting_delivery_is_the_first_that_workers_have_to_run(stores):
    inbox = await stores.open()
    assert await inbox.oldest_waiting() is None
    for number, at in enumerate((1000.0, 1001.0, 1002.0, 1003.0)):
        await inbox.accept(delivery(f"m{number}", at=at), leased=True)
    await inbox.claim(delivery("inline", at=500.0))
    await inbox.park(delivery("parked", at=400.0))
    await inbox.start("m1", now=1004.0)
    assert await inbox.oldest_waiting() == 1000.0
    await inbox.start("m0", now=1004.0)
    await inbox.finish("m0", Retry(2000.0, "not yet"), now=1005.0)
    assert await inbox.oldest_waiting() == 1001.0
    for name in ("m1", "m2"):
        await inbox.start(name, now=1005.0)
        await inbox.finish(name, Done(), now=1006.0)
    assert await inbox.oldest_waiting() == 1003.0
    await inbox.start("m3", now=1005.0)
    await inbox.finish("m3", Dead("no"), now=1006.0)
    assert await inbox.oldest_waiting() is None


async def test_the_highest_sequence_outlives_its_delivery(stores: Stores) -> None:
    inbox, other = await stores.open("one"), await stores.open("two")
    assert await inbox.last_sequence() == 0
    await inbox.accept(delivery("stays"), leased=False)
    for name in ("parked", "newest"):
        await inbox.park(delivery(name))
    record = await inbox.get("newest")
    assert record is not None
    assert await other.last_sequence() == record.sequence >= 3
    await inbox.purge(now=5000)
    assert [left.key for left in await inbox.find()] == ["stays"]
    assert await other.last_sequence() == record.sequence
    await inbox.accept(delivery("next"), leased=False)
    assert await other.last_sequence() == record.sequence + 1


# -- keys --------------------------------------------------------------------------------------


async def test_a_cursor_beyond_the_newest_event_reads_no_more_than_there_is(stores: Stores) -> None:
    store = await stores.open()
    for name in ("m1", "m2"):
        await store.accept(delivery(name), leased=False)
    with trio.fail_after(30):
        for before in (2**62, 2**63 - 1):
            found = await store.find(type="order.paid", before_sequence=before)
            assert [record.webhook_id for record in found] == ["m2", "m1"]
            assert await store.find(type="order.pade", before_sequence=before) == []
            assert await store.find(state=DeliveryState.DEAD, before_sequence=before) == []
        assert await store.find(type="order.paid", after_sequence=2**63 - 1) == []


async def test_a_source_has_its_own_ids_lanes_and_listing(stores: Stores) -> None:
    inbox = await stores.open()
    for signer in ("", "@a", "@b"):
        for number in (1, 2):
            incoming = delivery(f"m{number}", subject="s", ordered=True, signer=signer)
            assert (await inbox.accept(incoming, leased=False)).admission is Admission.NEW
    due = await inbox.claim_due(now=1002, limit=10)
    # One of each lane, although their subject is the same.
    assert {record.key for record in due.records} == {"m1", "m1.@a", "m1.@b"}
    found = await inbox.find(source="a", oldest_first=True)
    assert [(r.key, r.webhook_id, r.source, r.tenant_id) for r in found] == [
        ("m1.@a", "m1", "a", None),
        ("m2.@a", "m2", "a", None),
    ]
    assert await inbox.find(source="a", tenant_id="t") == []
    assert await inbox.find(source="c") == []
    assert [r.key for r in await inbox.find(source="b", subject="s", limit=1)] == ["m2.@b"]
    assert await inbox.unowned() == []


async def test_an_id_belongs_to_its_signer_and_people_find_all_who_used_it(stores: Stores) -> None:
    inbox = await stores.open()
    for signer in ("", "t1", "t2"):
        incoming = delivery("m1", signer=signer, tenant_id=signer or None)
        assert (await inbox.accept(incoming, leased=False)).admission is Admission.NEW
        assert (await inbox.accept(incoming, leased=False)).admission is Admission.QUEUED
    await inbox.accept(delivery("m10", signer="t1", tenant_id="t1"), leased=False)
    found = await inbox.find_by_id("m1")
    assert [(r.key, r.webhook_id, r.signer) for r in found] == [
        ("m1", "m1", ""),
        ("m1.t1", "m1", "t1"),
        ("m1.t2", "m1", "t2"),
    ]
    assert all(record.raw for record in found)
    assert len(await inbox.find_by_id("m1", limit=2)) == 2
    assert await inbox.known(["m1.t1", "m1.t3", "m10"]) == {"m1.t1"}


async def test_a_line_of_ordered_deliveries_is_one_tenant_s(stores: Stores) -> None:
    inbox = await stores.open()
    for number, tenant in enumerate((None, "t1", "t1", "t2", None)):
        incoming = delivery(f"m{number}", subject="s", ordered=True, tenant_id=tenant)
        await inbox.accept(incoming, leased=False)
    taken = [record.webhook_id for record in (await inbox.claim_due(limit=9, now=1001)).records]
    assert taken == ["m0", "m1", "m3"]


async def test_other_bodies_are_kept_once_up_to_a_bound_and_go_with_the_first(
    stores: Stores,
) -> None:
    inbox = await stores.open()
    first = delivery("m1", signer="t1", tenant_id="t1")
    await inbox.accept(first, leased=True)
    assert list(await inbox.evidence("m1.t1")) == []
    others = [replace(first, raw=b"%d" % n, address="192.0.2.1") for n in range(12)]
    for other in (first, others[0], *others):
        admitted = await inbox.accept(other, leased=True)
        assert admitted.same_body == (other is first)
    await inbox.keep_other(others[0])
    await inbox.keep_other(replace(first, webhook_id="unknown"))
    expected = [EvidenceRecord(1000.0, "192.0.2.1", b"%d" % n, "t1") for n in range(10)]
    assert list(await inbox.evidence("m1.t1")) == expected
    record = await inbox.get("m1.t1")
    assert record is not None
    assert record.raw == first.raw
    assert list(await inbox.evidence("m1")) == []
    await inbox.start("m1.t1", now=1001)
    await inbox.finish("m1.t1", Done(), now=1002)
    assert list(await inbox.evidence("m1.t1")) == expected
    await inbox.purge(now=1002 + 41)
    # The store in memory keeps what it has of a done delivery until that is forgotten.
    assert list(await inbox.evidence("m1.t1")) == (expected if stores.kind == "memory" else [])
    await inbox.purge(now=1002 + 101)
    assert list(await inbox.evidence("m1.t1")) == []
    assert await inbox.get("m1.t1") is None


async def test_the_memory_of_other_bodies_is_bounded_and_freed() -> None:
    inbox = MemoryInbox(
        LeaseTerms(owner="one", lease_seconds=1, dedup_seconds=1, payload_seconds=1)
    )
    for number in range(20):
        incoming = delivery(f"m{number}")
        await inbox.park(incoming)
        await inbox.park(replace(incoming, raw=bytes(2**20)))
    kept = [len(await inbox.evidence(f"m{number}")) for number in range(20)]
    assert 0 < sum(kept) <= 16
    await inbox.purge(now=1002)
    assert inbox._rows.evidence_bytes == 0


async def test_why_a_delivery_is_parked_is_kept_until_it_runs_again(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.park(delivery("m1"), "not wanted")
    await inbox.park(delivery("m1"), "another reason")
    await inbox.accept(delivery("m2"), leased=True)
    await inbox.start("m2", now=1001)
    await inbox.finish("m2", Parked("its tenant sleeps"), now=1002)
    reasons = {record.webhook_id: record.last_error for record in await inbox.find()}
    assert reasons == {"m1": "not wanted", "m2": "its tenant sleeps"}
    assert await inbox.replay(["m1"]) == ["m1"]
    record = await inbox.get("m1")
    assert record is not None
    assert record.last_error is None


async def test_a_copy_of_a_parked_delivery_is_run_by_workers_whatever_its_sender_does(
    stores: Stores,
) -> None:
    inbox = await stores.open()
    await inbox.park(delivery("m1"), "its tenant sleeps")
    # It was answered 200: if an inline run of the copy failed, nothing would run it again.
    copy = await inbox.claim(delivery("m1", at=1001))
    assert copy == Admitted(Admission.QUEUED)
    (record,) = (await inbox.claim_due(limit=10, now=1001)).records
    assert (record.key, record.attempts, record.last_error) == ("m1", 0, None)
    assert await inbox.start("m1", now=1001)
    await inbox.finish("m1", Retry(1002, "boom"), now=1001)
    (record,) = (await inbox.claim_due(limit=10, now=1002)).records
    assert record.key == "m1"


async def test_a_done_delivery_that_is_repeated_is_its_next_generation(stores: Stores) -> None:
    inbox = await stores.open()
    await inbox.accept(delivery("m1"), leased=True)
    await inbox.start("m1", now=1001)
    await inbox.finish("m1", Done(), now=1002)
    if stores.kind == "memory":
        # It keeps no bodies of done events, so they cannot run again.
        assert list(await inbox.repeat(["m1", "unknown"])) == []
        return
    assert list(await inbox.repeat(["m1", "unknown"])) == ["m1"]
    assert list(await inbox.repeat(["m1"])) == []
    (record,) = (await inbox.claim_due(limit=9, now=1003)).records
    assert (record.generation, record.attempts, record.earlier_attempts) == (1, 0, 1)
    assert (await inbox.counts())[DeliveryState.DONE] == 0
    await inbox.start("m1", now=1004)
    await inbox.finish("m1", Dead("boom"), now=1005)
    # A redelivery and a replay are runs of the same generation.
    admitted = await inbox.accept(delivery("m1", at=1006), leased=True)
    assert (admitted.admission, admitted.generation) == (Admission.NEW, 1)
    await inbox.start("m1", now=1007)
    await inbox.finish("m1", Dead("boom"), now=1008)
    await inbox.replay(["m1"])
    (record,) = (await inbox.claim_due(limit=9, now=1009)).records
    assert record.generation == 1
    await inbox.start("m1", now=1010)
    await inbox.finish("m1", Done(), now=1011)
    done = await inbox.get("m1")
    assert done is not None
    assert (done.state, done.generation) == (DeliveryState.DONE, 1)
    assert (await inbox.counts())[DeliveryState.DONE] == 1
    # Beyond the deduplication the same id is a new record, and none that was asked for again.
    again = await inbox.accept(delivery("m1", at=5000), leased=True)
    assert (again.admission, again.generation) == (Admission.NEW, 0)


async def test_behind_a_long_lane_everything_else_is_found(stores: Stores) -> None:
    inbox = await stores.open(lease_seconds=3600)
    pairs = [f"c{number}" for number in range(250)] * 2
    for subjects in (["a"] * 1200, [None] * 30, ["b"] * 1100, pairs):
        async with trio.open_nursery() as nursery:
            for number, subject in enumerate(subjects):
                brought = delivery(f"{subject}-{number}", subject=subject, ordered=bool(subject))
                nursery.start_soon(partial(inbox.accept, brought, leased=False))

    async def found(now: float) -> tuple[Sequence[DeliveryRecord], float | None]:
        records: list[DeliveryRecord] = []
        for _ in range(60):
            due = await inbox.claim_due(limit=100, now=now)
            records += due.records
            if not due.more:
                return records, due.next_due_at
        raise AssertionError("there is no end of looks")

    async def end(records: Sequence[DeliveryRecord]) -> None:
        async with trio.open_nursery() as nursery:
            for record in records:
                nursery.start_soon(partial(inbox.finish, record.key, Done(), now=1001.5))

    firsts, _ = await found(1001)
    taken = {subject: [r for r in firsts if r.subject == subject] for subject in ("a", "b", None)}
    assert [len(records) for records in taken.values()] == [1, 1, 30]
    assert len(firsts) == 282

    # The first event of the longest lane keeps running, and delays no other lane.
    await end(taken["b"])
    (second,), _ = await found(1002)
    assert (second.subject, second.sequence) == ("b", taken["b"][0].sequence + 1)
    await end([record for record in firsts if str(record.subject).startswith("c")])
    seconds, next_poll = await found(1003)
    assert {record.subject for record in seconds} == set(pairs)
    assert len(seconds) == 250

    # Leases given up behind the polls' position are found by the next round of polls.
    await inbox.release([taken[None][0].key])
    again, next_poll = await found(1004)
    if not again:
        assert next_poll is not None
        again, _ = await found(next_poll)
    assert [record.key for record in again] == [taken[None][0].key]

    # So it is while more waits beyond than the looks take.
    now = (next_poll or 1004.0) + 10
    for number in range(60):
        await inbox.accept(delivery(f"later-{number}"), leased=False)
    while not (await inbox.claim_due(limit=1, now=now)).records:
        pass
    await inbox.release([again[0].key])
    looks = [await inbox.claim_due(limit=1, now=now + 0.25 * look) for look in range(40)]
    assert again[0].key in {record.key for due in looks for record in due.records}
