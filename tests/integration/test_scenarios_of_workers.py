"""Scenarios of the suites of River, Oban, procrastinate and Polar, with a whole runtime.

Each docstring names the repository, the file and the test that the scenario comes from. River is
riverqueue/river, Oban is oban-bg/oban, procrastinate is procrastinate-org/procrastinate, Polar is
polarsource/polar. Scenarios of a store are in ``test_scenarios_of_queues.py``.
"""

import base64
import collections
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
import standardwebhooks
import trio
from support.deliveries import settings
from support.postgres import on_every_store
from support.senders import Senders
from support.serving import RawWire, registry, request, running, serving
from support.waiting import until

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.errors import RetryLater
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.runtime import Runtime
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.testing import AppUnderTest

#: A retry comes at once, so that no test waits for one.
AT_ONCE = {"Webhooks__Queue__RetryBaseSeconds": 0.001, "Webhooks__Queue__RetryCapSeconds": 0.001}


@pytest.fixture
def sqlite(tmp_path):
    return {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}


@contextlib.asynccontextmanager
async def started(handler: Any, **keys: Any) -> AsyncIterator[AppUnderTest]:
    """Run a runtime with a queued handler, which is drained at the end of the block."""
    runtime = Runtime(settings(**keys), registry(handler, enqueue=True))
    async with running(runtime):
        yield AppUnderTest(runtime)


async def records(keys: dict[str, Any], *names: str) -> list[Any]:
    """Return the records of these events in the file of an ended runtime."""
    inbox = await SqliteInbox.open(
        Path(keys["Storage__Path"]) / "inbox.db",
        LeaseTerms(owner="test", lease_seconds=1, dedup_seconds=3600, payload_seconds=3600),
    )
    try:
        return [await inbox.get(name) for name in names]
    finally:
        with trio.move_on_after(30, shield=True):
            await inbox.close()


# -- River -----------------------------------------------------------------------------------------


async def test_a_stop_while_events_keep_coming_leaves_none_running(sqlite):
    """River, client_test.go, Test_Client_Stop_Common/WithContinualInsertionNoJobsLeftRunning."""
    handled: list[str] = []

    async def handler(event):
        handled.append(event.webhook_id)

    async with started(handler, **sqlite) as app:
        senders = Senders(app.url, pause=0, retry=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(senders.run)
            await senders.wait_for(20)
            app.runtime.shut_down("the test stops it")
            await until(lambda: app.runtime.report is not None)
            senders.stop()
    found = {each.state for each in await records(sqlite, *senders.accepted)}
    assert found <= {"done", "received"}, "none is left running"
    assert sorted(set(handled)) == sorted(handled), "no event ran twice"
    assert set(handled) <= set(senders.accepted), "what ran was acknowledged"


async def test_a_run_that_a_stop_interrupts_is_no_attempt_although_it_raises(sqlite):
    """River, client_test.go, Test_Client_SoftStopTimeout/ErroringJobGetsFreshAttempt."""
    begun = trio.Event()

    async def interrupted(event):
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("its own error, at the cancellation")

    async def fails(event):
        assert event.attempt == 1
        raise ValueError("a real error")

    limits = {"Webhooks__Queue__MaxAttempts": 2, "Webhooks__GracefulDrainTimeoutSeconds": 0.05}
    async with started(interrupted, **sqlite, **limits) as app:
        await app.deliver("order.paid", webhook_id="m1", settle=False)
        await begun.wait()
    later = {
        "Webhooks__Queue__RetryBaseSeconds": 86_400,
        "Webhooks__Queue__RetryCapSeconds": 86_400,
    }
    async with started(fails, **sqlite, **limits, **later) as app:
        await app.settle()
        record = await app.store.get("m1")
        assert (record.state, record.attempts) == (DeliveryState.RETRYING, 1)
        [run] = await app.store.attempts("m1")
        assert "a real error" in run.error


async def test_starts_and_stops_in_quick_succession_lose_and_repeat_nothing(sqlite):
    """River, client_test.go, Test_Client_Common/StartStopStress."""
    handled: list[str] = []

    async def handler(event):
        await trio.lowlevel.checkpoint()
        handled.append(event.webhook_id)

    names = [f"m{number}" for number in range(12)]
    for first in range(0, len(names), 3):
        async with started(handler, **sqlite) as app:
            for name in names[first : first + 3]:
                await app.deliver("order.paid", webhook_id=name, settle=False)
    async with started(handler, **sqlite) as app:
        await app.settle()
        assert (await app.store.counts())[DeliveryState.DONE] == len(names)
    assert sorted(handled) == sorted(names)


# -- Oban ------------------------------------------------------------------------------------------


@on_every_store
async def test_events_of_every_kind_end_in_their_own_state(store):
    """Oban, test/oban/engine_test.exs, "inserting and executing jobs".

    Also "discarding jobs that exceed max attempts" and "safely executing jobs with any type of
    exit", beside each other in one queue.
    """
    runs: collections.Counter[str] = collections.Counter()

    async def handler(event):
        runs[event.webhook_id] += 1
        kind, _, _ = event.webhook_id.partition("_")
        if kind == "fails":
            raise ValueError("always")
        if kind == "once" and event.attempt == 1:
            raise ValueError("only the first time")
        if kind == "later" and event.attempt == 1:
            raise RetryLater(0)
        if kind == "exits":
            raise SystemExit(3)

    kinds = ("works", "fails", "once", "later", "exits")
    names = [f"{kind}_{number}" for kind in kinds for number in range(3)]
    async with started(handler, **store, **AT_ONCE, Webhooks__Queue__MaxAttempts=2) as app:
        for name in names:
            await app.deliver("order.paid", webhook_id=name, settle=False)
        await app.deliver("order.created", webhook_id="unhandled", settle=False)
        expected = {"fails": "dead", "exits": "dead"}
        await until(lambda: sum(runs.values()) == 27)
        await app.settle()
        found = {name: (await app.store.get(name)).state for name in names}
        assert found == {name: expected.get(name.partition("_")[0], "done") for name in names}
        assert (await app.store.get("unhandled")).state == "parked"
    assert runs == {name: 1 if name.startswith("works") else 2 for name in names}


# -- procrastinate ---------------------------------------------------------------------------------


@on_every_store
async def test_no_more_events_run_at_once_than_there_are_workers(store):
    """procrastinate, tests/unit/test_worker.py, test_worker_run_respects_concurrency.

    Also test_worker_run_respects_concurrency_variant: more come while all workers are busy.
    """
    running_now: set[str] = set()
    most, gate = [0], trio.Event()

    async def handler(event):
        running_now.add(event.webhook_id)
        most[0] = max(most[0], len(running_now))
        await gate.wait()
        await trio.lowlevel.checkpoint()
        running_now.remove(event.webhook_id)

    async with started(handler, **store, Webhooks__Queue__Workers=3) as app:
        for number in range(5):
            await app.deliver("order.paid", webhook_id=f"m{number}", settle=False)
        await until(lambda: len(running_now) == 3)
        counts = await app.store.counts()
        assert (counts[DeliveryState.RUNNING], counts[DeliveryState.RECEIVED]) == (3, 2)
        gate.set()
        for number in range(5, 12):
            await app.deliver("order.paid", webhook_id=f"m{number}", settle=False)
        await app.settle()
        assert (await app.store.counts())[DeliveryState.DONE] == 12
    assert most == [3]


async def test_a_run_that_finishes_in_spite_of_a_stop_is_done(sqlite):
    """procrastinate, tests/unit/test_worker.py.

    test_stopping_worker_job_suppresses_cancellation.
    """
    begun = trio.Event()

    async def handler(event):
        begun.set()
        with contextlib.suppress(trio.Cancelled):  # its work is done
            await trio.sleep_forever()

    async with started(handler, **sqlite, Webhooks__GracefulDrainTimeoutSeconds=0.05) as app:
        await app.deliver("order.paid", webhook_id="m1", settle=False)
        await begun.wait()
    [record] = await records(sqlite, "m1")
    assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_a_stop_finishes_the_fast_run_and_gives_the_slow_one_back(sqlite):
    """procrastinate, tests/acceptance/test_async.py.

    test_stop_worker_aborts_async_jobs_past_shutdown_graceful_timeout, and
    test_stop_worker_retries_async_jobs_past_shutdown_graceful_timeout.
    """
    begun: list[str] = []

    async def handler(event):
        begun.append(event.webhook_id)
        if event.webhook_id == "slow":
            await trio.sleep_forever()

    async with started(handler, **sqlite, Webhooks__GracefulDrainTimeoutSeconds=0.05) as app:
        for name in ("slow", "fast"):
            await app.deliver("order.paid", webhook_id=name, settle=False)
        await until(lambda: set(begun) == {"slow", "fast"})
    assert app.runtime.report.ids == ("slow",)
    ran_again: list[tuple[str, int]] = []

    async def again(event):
        ran_again.append((event.webhook_id, event.attempt))

    async with started(again, **sqlite) as app:
        await app.settle()
    assert ran_again == [("slow", 1)]


# -- Polar -----------------------------------------------------------------------------------------


@attrs.define
class PolarSender:
    """The sender of server/polar/webhook/tasks.py and service.py, without its waits.

    Ten deliveries of an event at most; the events of an endpoint one after the other; the endpoint
    is disabled when the last ten events have failed, and later events are skipped. Its secret is
    signed with as text.
    """

    url: str
    secret: str
    enabled: bool = True
    answers: dict[str, list[int]] = attrs.Factory(dict)
    succeeded: list[bool] = attrs.Factory(list)

    RETRIES = 10
    THRESHOLD = 10

    async def send(
        self, event_id: str, body: str = '{"type":"order.paid","data":{"id":"o"}}'
    ) -> bool:
        """Deliver until an answer is 2xx; return whether one was."""
        if not self.enabled:
            return False
        answers = self.answers.setdefault(event_id, [])
        for _ in range(self.RETRIES):
            answers.append(await self._deliver(event_id, body))
            if 200 <= answers[-1] < 300:
                break
        self.succeeded.append(200 <= answers[-1] < 300)
        recent = self.succeeded[-self.THRESHOLD :]
        self.enabled = len(recent) < self.THRESHOLD or any(recent)
        return self.succeeded[-1]

    async def _deliver(self, event_id: str, body: str) -> int:
        now = datetime.now(UTC)
        secret = base64.b64encode(self.secret.encode()).decode()
        headers = {
            "user-agent": "polar.sh webhooks",
            "content-type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": standardwebhooks.Webhook(secret).sign(event_id, now, body),
        }
        with trio.fail_after(10), await RawWire.connect(self.url) as wire:
            await wire.send(request(body.encode(), headers.items()))
            return (await wire.answer()).status


#: As a merchant may have typed it: no base64.
POLAR_SECRET = "polar_whs_of a merchant, 32 characters"
POLAR = {
    "Webhooks__Secret": Secret(POLAR_SECRET, made_for_tests=True),
    "Webhooks__KeyDerivation": KeyDerivation.AUTO,
}


async def test_an_event_that_always_fails_never_disables_the_endpoint():
    """Polar, server/tests/webhooks/test_tasks.py.

    TestOnEventFailed.test_disables_endpoint_after_threshold_failures: eleven failed events would
    disable it. Each becomes a dead letter before the sender gives it up.
    """
    runs: collections.Counter[str] = collections.Counter()

    async def fails(event):
        runs[event.webhook_id] += 1
        raise ValueError("always")

    async with serving(registry(fails), **POLAR) as app:
        sender = PolarSender(app.url, POLAR_SECRET)
        names = [f"evt{number}" for number in range(11)]
        for name in names:
            assert await sender.send(name)
        assert sender.enabled
        assert (await app.store.counts())[DeliveryState.DEAD] == 11
    assert sender.answers == {name: [500] * 4 + [200] for name in names}
    assert runs == dict.fromkeys(names, 5)


async def test_a_failing_event_holds_up_the_senders_later_events_only_until_it_works():
    """Polar, server/polar/webhook/tasks.py, _webhook_event_send: earlier events go first.

    TestOnEventFailed.test_does_not_disable_with_mixed_results in server/tests/webhooks.
    """
    order: list[str] = []

    async def handler(event):
        order.append(event.webhook_id)
        if event.webhook_id == "evt1" and order.count("evt1") < 3:
            raise RetryLater(0)

    async with serving(registry(handler), **POLAR) as app:
        sender = PolarSender(app.url, POLAR_SECRET)
        for name in ("evt0", "evt1", "evt2"):
            assert await sender.send(name)
        # A redelivery that the merchant asks for is acknowledged, and runs nothing.
        assert await sender.send("evt1")
    assert order == ["evt0", "evt1", "evt1", "evt1", "evt2"]
    assert sender.answers["evt1"] == [503, 503, 200, 200]


async def test_a_wrong_secret_disables_the_endpoint_and_uses_up_no_id():
    """Polar, server/tests/webhooks/test_tasks.py.

    TestOnEventFailed.test_marks_pending_events_as_skipped_when_disabled, and
    TestWebhookEventSend.test_disabled_endpoint_skips_send.
    """
    handled: list[str] = []

    async def handler(event):
        handled.append(event.webhook_id)

    async with serving(registry(handler), **POLAR) as app:
        wrong = PolarSender(app.url, "another secret that is long enough")
        for number in range(10):
            assert not await wrong.send(f"evt{number}")
        assert not wrong.enabled
        assert {status for each in wrong.answers.values() for status in each} == {400}
        right = PolarSender(app.url, POLAR_SECRET)
        for number in range(12):
            assert await right.send(f"evt{number}")
    assert handled == [f"evt{number}" for number in range(12)]
