"""Scenarios of the suites of River, Oban and procrastinate, on every store.

Each docstring names the repository, the file and the test that the scenario comes from. River is
riverqueue/river, Oban is oban-bg/oban, procrastinate is procrastinate-org/procrastinate. Scenarios
of whole workers are in ``test_scenarios_of_workers.py``.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from support.stores import Stores, delivery

from sdk_trio.errors import EventTakenOverError, StoreUnavailableError
from sdk_trio.records.deliveries import (
    Admission,
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Parked,
    Postponed,
    Released,
    Retry,
)


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    stores = Stores(request.param, tmp_path)
    yield stores
    await stores.close()


on_databases = pytest.mark.parametrize("stores", ["sqlite", "postgres"], indirect=True)
on_servers = pytest.mark.parametrize("stores", ["postgres"], indirect=True)


async def take(inbox: Any, *, now: float, limit: int = 9) -> list[str]:
    return [record.key for record in (await inbox.claim_due(limit=limit, now=now)).records]


async def run(inbox: Any, key: str, outcome: Any, *, now: float = 1001.0) -> None:
    """Accept a delivery, run it, and record the outcome, all at the same time."""
    await inbox.accept(delivery(key, at=now), leased=True)
    await inbox.start(key, now=now)
    await inbox.finish(key, outcome, now=now)


async def accept_all(inbox: Any, keys: Sequence[str], *, leased: bool = True) -> None:
    async with trio.open_nursery() as nursery:
        for key in keys:
            nursery.start_soon(partial(inbox.accept, delivery(key), leased=leased))


async def state_of(inbox: Any, key: str) -> tuple[str, int]:
    record = await inbox.get(key)
    return record.state, record.attempts


# -- River -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["expired", "retrying", "waiting"])
async def test_one_more_than_a_batch_is_a_second_batch(stores: Stores, why: str) -> None:
    """River, internal/maintenance/job_rescuer_test.go and job_scheduler_test.go.

    RescuesInBatches, SchedulesInBatches.
    """
    dead, inbox = await stores.open("dead"), await stores.open()
    keys = [f"m{number:02}" for number in range(11)]
    await accept_all(dead, keys, leased=why != "waiting")
    for key in keys if why != "waiting" else ():
        await dead.start(key, now=1000)
        if why == "retrying":
            await dead.finish(key, Retry(1015, "no"), now=1001)
    first = await inbox.claim_due(limit=10, now=1020)
    second = await inbox.claim_due(limit=10, now=1020)
    third = await inbox.claim_due(limit=10, now=1020)
    assert [len(each.records) for each in (first, second, third)] == [10, 1, 0]
    assert (first.more, third.more) == (True, False)
    taken = [record.key for each in (first, second) for record in each.records]
    assert sorted(taken) == keys


async def test_a_full_batch_of_live_runs_hides_no_expired_one(stores: Stores) -> None:
    """River, internal/maintenance/job_rescuer_test.go, RescuesPastFullBatchOfJobsWithNoTimeout."""
    live, dead, inbox = [await stores.open(name) for name in ("live", "dead", "one")]
    held = [f"live-{number}" for number in range(8)]
    for key in held:
        await live.accept(delivery(key), leased=True)
        await live.start(key, now=1000)
    await dead.accept(delivery("stuck"), leased=True)
    await dead.start("stuck", now=1000)
    await live.renew(held, now=1009)
    assert await take(inbox, now=1012, limit=3) == ["stuck"]
    assert {await state_of(inbox, key) for key in held} == {("running", 1)}


async def test_outcomes_recorded_together_stay_separate(stores: Stores) -> None:
    """River, riverdriver/riverdrivertest/job_update.go.

    JobSetStateIfRunningMany_MultipleJobsAtOnce, UnknownJobIgnored.
    """
    inbox = await stores.open()
    outcomes = {
        "done": Done(),
        "retry": Retry(1050, "retry"),
        "dead": Dead("dead"),
        "parked": Parked("parked"),
        "released": Released(),
        "later": Postponed(1060, "later"),
    }
    await accept_all(inbox, list(outcomes))
    for key in outcomes:
        await inbox.start(key, now=1001)
    async with trio.open_nursery() as nursery:
        for key, outcome in {"unknown": Done(), **outcomes}.items():
            nursery.start_soon(partial(inbox.finish, key, outcome, now=1002))
    found = {
        r.key: (r.state, r.attempts, r.next_attempt_at, r.last_error) for r in await inbox.find()
    }
    assert found == {
        "done": ("done", 1, None, None),
        "retry": ("retrying", 1, 1050, "retry"),
        "dead": ("dead", 1, None, "dead"),
        "parked": ("parked", found["parked"][1], None, "parked"),
        "released": ("received", 0, None, None),
        "later": ("retrying", 0, 1060, "later"),
    }
    assert [len(await inbox.attempts(key)) for key in outcomes] == [0, 1, 1, 0, 0, 0]


@on_databases
@pytest.mark.parametrize("why", ["unknown", "not running", "retrying"])
async def test_no_effect_is_applied_for_an_event_that_does_not_run(
    stores: Stores, why: str
) -> None:
    """River, job_complete_tx_test.go, ErrorIfJobDoesntExist and ErrorIfNotRunning."""
    inbox = await stores.open()
    key = "unknown" if why == "unknown" else "m1"
    if why == "retrying":
        await run(inbox, "m1", Retry(1050, "no"))
    else:
        await run(inbox, "m1", Done())
    before = await inbox.get("m1")
    applied = []
    with pytest.raises(EventTakenOverError):
        await inbox.conclude(key, applied.append, attempt=1, now=1003)
    assert applied == []
    assert await inbox.get("m1") == before


@on_servers
async def test_a_host_that_does_not_lead_ends_no_term_of_another(stores: Stores) -> None:
    """River, riverdriver/riverdrivertest/leader.go, LeaderResign/DoesNotResignWithoutLeadership.

    Also DoesNotResignNewerTermForSameLeaderID: an old leader resigns late. There, the newer term is
    its own; here, it is another host's, since no two living processes have the same owner.
    """
    one, two = await stores.open("one"), await stores.open("two")
    assert await one.lead(seconds=0.2) == 1
    with trio.fail_after(30):
        while await two.lead(seconds=60) is None:
            await trio.sleep(0.05)
    assert await one.lead(seconds=0) is None
    with pytest.raises(StoreUnavailableError, match="term 1"):
        await one.write_checkpoint("position", "late", term=1)
    await two.write_checkpoint("position", "of two", term=2)
    assert await two.lead(seconds=60) == 2


async def test_a_replay_leaves_a_run_and_a_waiting_event_alone(stores: Stores) -> None:
    """River, riverdriver/riverdrivertest/job_update.go, JobRetry/DoesNotUpdateARunningJob.

    Also DoesNotAlterScheduledAtIfInThePastAndJobAlreadyAvailable, ReturnsErrNotFoundIfJobNotFound.
    """
    inbox = await stores.open()
    await inbox.accept(delivery("waiting"), leased=False)
    await inbox.accept(delivery("running"), leased=True)
    await inbox.start("running", now=1001)
    await inbox.claim(delivery("inline"))
    keys = ("waiting", "running", "inline")
    before = [await inbox.get(key) for key in keys]
    assert await inbox.replay([*keys, "unknown"]) == []
    assert [await inbox.get(key) for key in keys] == before
    await inbox.finish("running", Done(), now=1002)
    assert await state_of(inbox, "running") == ("done", 1)


async def test_many_events_are_finished_while_others_are_fetched(stores: Stores) -> None:
    """River, producer_test.go, CompletesJobWhileFetchingNewOnes.

    Also internal/jobcompleter/job_completer_test.go, FastContinuousCompletion: more than a batch.
    """
    inbox = await stores.open(lease_seconds=3600)
    keys = [f"m{number}" for number in range(150)]
    await accept_all(inbox, keys, leased=False)
    taken: list[str] = []
    async with trio.open_nursery() as nursery:
        while records := (await inbox.claim_due(limit=20, now=1001)).records:
            for record in records:
                taken.append(record.key)
                inbox.start_unawaited(record.key, now=1001)
                nursery.start_soon(partial(inbox.finish, record.key, Done(), now=1002))
    assert sorted(taken) == sorted(keys)
    counts = await inbox.counts()
    assert counts == {**dict.fromkeys(counts, 0), DeliveryState.DONE: 150}


async def test_the_failed_runs_are_kept_in_order_across_a_replay(stores: Stores) -> None:
    """River, internal/jobexecutor/job_executor_test.go, ErrorAgainAfterRetry."""
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=False)
    for number in range(1, 4):
        assert await take(inbox, now=1000 + number) == ["m1"]
        await inbox.start("m1", now=1000 + number)
        outcome = Dead("e3") if number == 3 else Retry(1000 + number, f"e{number}")
        await inbox.finish("m1", outcome, now=1000 + number)
    await inbox.replay(["m1"])
    assert await take(inbox, now=1010) == ["m1"]
    await inbox.start("m1", now=1011)
    await inbox.finish("m1", Retry(1012, "e4"), now=1011)
    failed = await inbox.attempts("m1")
    assert [(run.error, run.started_at) for run in failed] == [
        *(("e1", 1001), ("e2", 1002), ("e3", 1003), ("e4", 1011)),
    ]
    record = await inbox.get("m1")
    assert (record.attempts, record.earlier_attempts) == (1, 3)


async def test_the_outcome_of_a_run_that_was_erased_brings_nothing_back(stores: Stores) -> None:
    """River, internal/jobcompleter/job_completer_test.go.

    TestInlineJobCompleter_CompleteDeletedJob.
    """
    inbox = await stores.open()
    for key in ("m1", "m2"):
        await inbox.accept(delivery(key, tenant_id="t"), leased=True)
        await inbox.start(key, now=1001)
    assert await inbox.erase("t") == 2
    await inbox.finish("m1", Retry(1010, "no"), now=1002)
    await inbox.finish("m2", Done(), now=1002)
    assert [await inbox.get(key) for key in ("m1", "m2")] == [None, None]
    assert list(await inbox.attempts("m1")) == []
    assert sum((await inbox.counts()).values()) == 0
    # The key is free, as if it had never been used.
    admitted = await inbox.accept(delivery("m2", tenant_id="t", at=1003), leased=True)
    assert (admitted.admission, admitted.attempts) == (Admission.NEW, 0)


# -- Oban ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["leased", "waiting", "parked", "mixed"])
async def test_of_many_owners_one_accepts_an_event(stores: Stores, way: str) -> None:
    """Oban, test/oban/engine_test.exs, "preventing duplicate jobs between processes"."""
    inboxes = [await stores.open(f"owner {number}") for number in range(8)]
    admissions: list[Admission] = []

    async def accept(number: int, inbox: Any) -> None:
        incoming = delivery(at=1000 + number)
        if way == "parked" or (way == "mixed" and number % 2):
            admissions.append((await inbox.park(incoming)).admission)
        else:
            admitted = await inbox.accept(incoming, leased=way == "leased")
            admissions.append(admitted.admission)

    async with trio.open_nursery() as nursery:
        for number, inbox in enumerate(inboxes):
            nursery.start_soon(accept, number, inbox)
    # A parked event is accepted once more by the first owner that has a handler for it.
    most = 2 if way == "mixed" else 1
    assert 1 <= admissions.count(Admission.NEW) <= most
    assert [record.key for record in await inboxes[0].find()] == ["m1"]
    owners = [await take(inbox, now=1020) for inbox in inboxes]
    assert sum(map(len, owners)) == (0 if way == "parked" else 1)


@pytest.mark.parametrize(("at", "expected"), [(1190, Admission.DONE), (1191, Admission.NEW)])
async def test_an_id_is_remembered_from_the_end_of_its_run(
    stores: Stores, at: float, expected: Admission
) -> None:
    """Oban, test/oban/engine_test.exs, "scoping uniqueness by period" and "... scheduled time".

    It arrived at 1000 and was done at 1090; it is remembered for 100 seconds.
    """
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=True)
    await inbox.renew(["m1"], now=1085)
    await inbox.start("m1", now=1085)
    await inbox.finish("m1", Done(), now=1090)
    assert (await inbox.accept(delivery(at=at), leased=True)).admission is expected


async def test_of_events_in_all_states_the_ended_ones_are_replayed(stores: Stores) -> None:
    """Oban, test/oban/engine_test.exs, "retrying jobs from multiple states"."""
    inbox = await stores.open()
    await inbox.accept(delivery("waiting"), leased=False)
    await run(inbox, "done", Done())
    await run(inbox, "dead", Dead("no"))
    await run(inbox, "retrying", Retry(9000, "no"))
    await run(inbox, "parked", Parked("no"))
    await inbox.accept(delivery("running"), leased=True)
    await inbox.start("running", now=1001)
    keys = ("waiting", "running", "done", "dead", "retrying", "parked")
    assert sorted(await inbox.replay(keys)) == ["dead", "parked", "retrying"]
    found = {record.key: (record.state, record.attempts) for record in await inbox.find()}
    assert found == {
        **dict.fromkeys(("waiting", "dead", "retrying", "parked"), ("received", 0)),
        "running": ("running", 1),
        "done": ("done", 1),
    }
    assert await take(inbox, now=1002) == ["waiting", "dead", "retrying", "parked"]


async def test_only_runs_whose_lease_has_ended_are_rescued(stores: Stores) -> None:
    """Oban, test/oban/lifeline_test.exs, "rescuing executing jobs older than the rescue window"."""
    dead, inbox = await stores.open("dead"), await stores.open()
    for number in range(6):
        incoming = delivery(f"m{number}", at=1000 + number)
        await dead.accept(incoming, leased=True)
        await dead.start(f"m{number}", now=1000 + number)
    assert await take(inbox, now=1012.5) == ["m0", "m1", "m2"]
    states = [await state_of(inbox, f"m{number}") for number in range(6)]
    assert states == [("received", 1)] * 3 + [("running", 1)] * 3
    assert [len(await inbox.attempts(f"m{number}")) for number in range(6)] == [1, 1, 1, 0, 0, 0]


async def test_a_long_run_that_is_renewed_is_never_rescued(stores: Stores) -> None:
    """Oban, issue 1141: a live job was rescued; test/oban/lifeline_test.exs covers the window."""
    inbox, other = await stores.open(), await stores.open("other")
    await inbox.accept(delivery(), leased=True)
    await inbox.start("m1", now=1000)
    for now in range(1005, 1200, 5):
        await inbox.renew(["m1"], now=now)
        assert await take(other, now=now + 4) == []
        assert await other.expired_leases(before=now + 4) == 0
    await inbox.finish("m1", Done(), now=1200)
    assert await state_of(other, "m1") == ("done", 1)


@on_servers
async def test_a_leader_whose_lease_has_ended_concedes_to_the_next(stores: Stores) -> None:
    """Oban, test/oban/peers/database_test.exs.

    "retaining leadership while the lease is held", "assuming leadership after another node's lease
    expires", "conceding leadership after another node takes over the lease".
    """
    one, two, three = [await stores.open(name) for name in ("one", "two", "three")]
    assert await one.lead(seconds=0.2) == 1
    async with trio.open_nursery() as nursery:
        terms: list[int | None] = []

        async def ask(inbox: Any) -> None:
            with trio.fail_after(30):
                while not any(terms):
                    terms.append(await inbox.lead(seconds=60))
                    await trio.sleep(0.02)

        nursery.start_soon(ask, two)
        nursery.start_soon(ask, three)
    assert [term for term in terms if term] == [2], "one of them, once"
    assert await one.lead(seconds=60) is None


async def test_an_event_due_at_this_moment_is_due(stores: Stores) -> None:
    """Oban, test/oban/engine_test.exs, "executing jobs scheduled on or before the current time"."""
    inbox = await stores.open()
    for key, at in (("past", 1010.0), ("now", 1020.0), ("soon", 1020.001), ("future", 1030.0)):
        await run(inbox, key, Retry(at, "no"))
    due = await inbox.claim_due(limit=9, now=1020.0)
    assert [record.key for record in due.records] == ["past", "now"]
    assert due.next_due_at == pytest.approx(1020.001, abs=1e-4)


async def test_the_retention_takes_nothing_that_is_unfinished(stores: Stores) -> None:
    """Oban, test/oban/engine_test.exs, "deleting jobs in prunable states".

    procrastinate, tests/integration/test_manager.py, test_delete_old_jobs_job_todo and
    test_delete_old_jobs_job_doing.
    """
    inbox = await stores.open()
    for key in ("waiting", "running", "inline"):
        await inbox.accept(delivery(key), leased=key != "waiting")
    await inbox.start("running", now=1001)
    await inbox.claim(delivery("claimed"))
    await run(inbox, "retrying", Retry(1e8, "no"))
    await run(inbox, "redelivered", Retry(None, "no"))
    await run(inbox, "dead", Dead("no"))
    await run(inbox, "done", Done())
    await run(inbox, "parked", Parked())
    await inbox.purge(now=1e9)
    left = {record.key for record in await inbox.find()}
    assert {"waiting", "running", "inline", "claimed", "retrying", "dead"} <= left
    assert not left & {"done", "parked"}
    for key in ("waiting", "running", "inline", "retrying", "dead"):
        assert (await inbox.get(key)).raw, "its body is needed"


async def test_an_event_that_is_postponed_twenty_times_has_not_begun(stores: Stores) -> None:
    """Oban, test/oban/engine_test.exs, "rolling back the attempt and counting snoozes"."""
    inbox = await stores.open()
    await inbox.accept(delivery(), leased=True)
    for number in range(20):
        await inbox.start("m1", now=1001 + number)
        await inbox.finish("m1", Postponed(1002 + number, "not yet"), now=1001 + number)
        assert await take(inbox, now=1002 + number) == ["m1"]
    await inbox.start("m1", now=1030)
    await inbox.finish("m1", Retry(1031, "boom"), now=1030)
    assert await state_of(inbox, "m1") == ("retrying", 1)
    assert [run.number for run in await inbox.attempts("m1")] == [1]


async def test_simultaneous_events_get_one_queue_slot_each(stores: Stores) -> None:
    """Oban, test/oban/engine_test.exs, "inserting multiple jobs"."""
    inboxes = [await stores.open("one"), await stores.open("two")]
    async with trio.open_nursery() as nursery:
        for number in range(40):
            brought = delivery(f"m{number}")
            nursery.start_soon(partial(inboxes[number % 2].accept, brought, leased=False))
    records = await inboxes[0].find(limit=100)
    sequences = [record.sequence for record in records]
    assert len(set(sequences)) == len(records) == 40
    assert await inboxes[1].last_sequence() == max(sequences)
    assert await take(inboxes[1], now=1001, limit=40) == [r.key for r in reversed(records)]


# -- procrastinate ---------------------------------------------------------------------------------


async def test_ordered_events_without_a_subject_are_no_lane(stores: Stores) -> None:
    """procrastinate, tests/integration/test_manager.py, test_fetch_job_spacial_case_none_lock."""
    inbox = await stores.open()
    for key in ("a", "b"):
        await inbox.accept(delivery(key, ordered=True), leased=False)
    assert await take(inbox, now=1001) == ["a", "b"]


@pytest.mark.parametrize(("now", "stalled"), [(2005, False), (2011, True)])
async def test_the_last_run_decides_whether_a_run_stalls(
    stores: Stores, now: float, stalled: bool
) -> None:
    """procrastinate, tests/integration/test_manager.py, test_get_stalled_jobs_by_started__retries.

    Both, ``__no`` and ``__yes``: it ran long ago, failed, and runs again since the time 2000.
    """
    inbox, other = await stores.open(), await stores.open("other")
    await run(inbox, "m1", Retry(1500, "no"))
    assert await take(inbox, now=2000) == ["m1"]
    await inbox.start("m1", now=2000)
    assert await take(other, now=now) == (["m1"] if stalled else [])
    record = await other.get("m1")
    assert (record.attempts, record.process_ends) == (2, int(stalled))


async def test_unlisted_events_of_an_earlier_owner_are_recovered(stores: Stores) -> None:
    """procrastinate, tests/integration/test_manager.py.

    test_get_stalled_jobs_by_heartbeat__pruned_worker: no process knows the worker.
    """
    gone, inbox = await stores.open("gone"), await stores.open()
    await gone.accept(delivery("leased"), leased=True)
    await gone.accept(delivery("started"), leased=True)
    await gone.start("started", now=1001)
    if stores.kind != "memory":  # where it would forget them
        await gone.close()
    assert await inbox.recover(dead="gone") == 2
    assert await inbox.recover(dead="gone") == 0
    assert await take(inbox, now=1002) == ["leased", "started"]
    assert (await state_of(inbox, "leased"), await state_of(inbox, "started")) == (
        ("received", 0),
        ("received", 1),
    )


@pytest.mark.parametrize("first", [Done(), Dead("first"), Parked("first"), Retry(1050, "first")])
async def test_the_first_outcome_of_a_run_stays(stores: Stores, first: Any) -> None:
    """procrastinate, tests/integration/test_manager.py, test_finish_job_wrong_initial_status."""
    inbox = await stores.open()
    await run(inbox, "m1", first)
    before, runs = await inbox.get("m1"), await inbox.attempts("m1")
    for second in (Dead("second"), Retry(2000, "second"), Released(), Postponed(2000, "second")):
        await inbox.finish("m1", second, now=1003)
    assert await inbox.get("m1") == before
    assert await inbox.attempts("m1") == runs


async def test_a_duplicate_among_events_that_come_together_stops_none_of_them(
    stores: Stores,
) -> None:
    """procrastinate, tests/integration/test_manager.py.

    test_batch_defer_jobs_violate_queueing_lock: there, the whole batch fails.
    """
    inbox = await stores.open()
    await run(inbox, "done", Done())
    admissions: dict[str, list[Admission]] = {}

    async def accept(incoming: NewDelivery) -> None:
        admitted = await inbox.accept(incoming, leased=False)
        admissions.setdefault(incoming.key, []).append(admitted.admission)

    async with trio.open_nursery() as nursery:
        for key in ("a", "b", "a", "done", "c", "b"):
            nursery.start_soon(accept, delivery(key, at=1002))
    assert {key: sorted(each.name for each in found) for key, found in admissions.items()} == {
        "a": ["NEW", "QUEUED"],
        "b": ["NEW", "QUEUED"],
        "c": ["NEW"],
        "done": ["DONE"],
    }
    assert sorted(await take(inbox, now=1003)) == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["parked", "dead", "released", "retried"])
async def test_a_lane_goes_on_behind_a_run_that_was_ended(stores: Stores, how: str) -> None:
    """procrastinate, tests/integration/test_manager.py.

    test_fetch_job_respect_lock_aborting_job.
    """
    inbox = await stores.open()
    for key in ("first", "second"):
        await inbox.accept(delivery(key, subject="s", ordered=True), leased=False)
    assert await take(inbox, now=1001) == ["first"]
    await inbox.start("first", now=1001)
    assert await take(inbox, now=1001) == [], "while it runs"
    outcomes = {"parked": Parked(), "dead": Dead("no"), "released": Released()}
    await inbox.finish("first", outcomes.get(how, Retry(1005, "no")), now=1002)
    expected = {"released": ["first"], "retried": []}.get(how, ["second"])
    assert await take(inbox, now=1003) == expected
