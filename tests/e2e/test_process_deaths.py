"""An event whose handler ends the process becomes a dead letter, and causes no endless loop.

A handler that raises what is meant to end a program ends nothing but its own run.
"""

import time

import pytest
import trio
from support.deliveries import SECRET
from support.supervised import Daemon, running
from support.unawaited import SEEN_SECONDS, wait_until_unawaited

from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.testing import sign_delivery

HARD = ("exit", "segfault", "kill", "abort")
SOFT = (
    *("sysexit", "interrupt", "generator", "asyncio", "own", "group", "text", "leak"),
    *("traceback", "claims", "derive", "nursery"),
)
ATTEMPTS = 3


@pytest.fixture
def daemon(tmp_path):
    return Daemon(
        tmp_path,
        {
            "Webhooks:Queue:MaxAttempts": str(ATTEMPTS),
            "Webhooks:InlineMaxAttempts": str(ATTEMPTS),
            "Webhooks:Queue:RetryBaseSeconds": "1",
            "Webhooks:Queue:RetryCapSeconds": "1",
        },
    )


@pytest.mark.parametrize("inline", [False, True], ids=["queued", "inline"])
@pytest.mark.parametrize("kind", HARD)
def test_a_run_that_ends_the_process_is_repeated_as_often_as_the_setting_says(daemon, kind, inline):
    webhook_id = f"{kind}-late"
    with running(daemon):
        daemon.deliver(webhook_id, inline=inline)
        daemon.supervise(webhook_id)
        record = daemon.wait_for_state(webhook_id, "dead")
        assert daemon.runs(webhook_id) == ATTEMPTS
        assert daemon.starts == ATTEMPTS + 1
        assert record["attempts"] == ATTEMPTS
        assert record["last_error"] == f"the process ended {ATTEMPTS} times while it ran"
        assert daemon.deliver("fine-1") == 200
        daemon.wait_for_state("fine-1", "done")
        # The sender's next delivery of it must not begin all over.
        assert daemon.deliver(webhook_id, inline=inline) == 200
        assert daemon.runs(webhook_id) == ATTEMPTS


@pytest.mark.parametrize("kind", HARD)
def test_an_end_in_the_first_moment_of_an_inline_run_is_counted(daemon, kind):
    """Its claim was not waited for, and no commit knew of the run."""
    webhook_id = f"{kind}-now"
    daemon.environment["ASIDE"] = SEEN_SECONDS
    with running(daemon):
        wait_until_unawaited(daemon)
        daemon.deliver(webhook_id, inline=True)
        daemon.ended()
        assert daemon.state(webhook_id) is None, "the store knew of it"
        assert daemon.start(), daemon.log()
        (found,) = daemon.logged("store.run_ended_process")
        assert (found["key"], found["process_ends"]) == (webhook_id, 1)
        # The delivery was not answered, so the sender repeats it.
        daemon.deliver(webhook_id, inline=True)
        daemon.supervise(webhook_id)
        record = daemon.wait_for_state(webhook_id, "dead")
        assert daemon.runs(webhook_id) == ATTEMPTS
        assert record["attempts"] == ATTEMPTS
        assert record["last_error"] == f"the process ended {ATTEMPTS} times while it ran"
        assert daemon.deliver(webhook_id, inline=True) == 200
        assert daemon.runs(webhook_id) == ATTEMPTS
        assert daemon.deliver("fine-2", inline=True) == 200


def test_an_inline_event_that_may_run_once_runs_twice_if_it_ends_the_process_at_once(daemon):
    """Nothing is known of what ran beside it, so it may not be dead for another event's fault."""
    daemon.environment["ASIDE"] = SEEN_SECONDS
    daemon.settings["Webhooks:InlineMaxAttempts"] = "1"
    with running(daemon):
        wait_until_unawaited(daemon)
        daemon.deliver("exit-now", inline=True)
        daemon.ended()
        assert daemon.start(), daemon.log()
        daemon.deliver("exit-now", inline=True)
        daemon.supervise("exit-now")
        assert daemon.wait_for_state("exit-now", "dead")
        assert daemon.runs("exit-now") == 2


def test_an_end_in_the_first_moment_of_the_first_run_is_the_only_one_not_counted(daemon):
    """The start of a fresh event is not waited for: one run more is the price of that speed."""
    with running(daemon):
        daemon.deliver("exit-now")
        daemon.supervise("exit-now")
        record = daemon.wait_for_state("exit-now", "dead")
        assert daemon.runs("exit-now") in (ATTEMPTS, ATTEMPTS + 1)
        assert record["attempts"] == ATTEMPTS


def test_the_same_holds_for_an_event_that_waited_in_the_store(daemon):
    """Its first start is not awaited either, and each later one is counted before it runs."""
    data = daemon.directory / "data"
    data.mkdir(mode=0o700)

    async def keep() -> None:
        terms = {"lease_seconds": 10, "dedup_seconds": 1e9, "payload_seconds": 1e9}
        inbox = await SqliteInbox.open(data / "inbox.db", LeaseTerms(owner="earlier", **terms))
        for webhook_id in ("exit-now", "fine-1"):
            signed = sign_delivery("order.paid", secret=SECRET, webhook_id=webhook_id)
            delivery = NewDelivery(webhook_id, "order.paid", signed.body, 1, time.time())
            await inbox.accept(delivery, leased=False)
        await inbox.close()

    trio.run(keep)
    with daemon:
        daemon.start()
        daemon.supervise("exit-now")
        record = daemon.wait_for_state("exit-now", "dead")
        assert daemon.runs("exit-now") in (ATTEMPTS, ATTEMPTS + 1)
        assert record["attempts"] == ATTEMPTS
        daemon.wait_for_state("fine-1", "done")


def test_an_event_that_ends_the_process_alone_is_dead_after_one_run_if_only_one_is_allowed(daemon):
    daemon.settings["Webhooks:Queue:MaxAttempts"] = "1"
    with running(daemon):
        daemon.deliver("exit-late")
        daemon.supervise("exit-late")
        assert daemon.wait_for_state("exit-late", "dead")["last_error"] == (
            "the process ended 1 time while it ran"
        )
        assert daemon.runs("exit-late") == 1


@pytest.mark.parametrize("attempts", [1, ATTEMPTS])
def test_events_that_merely_ran_at_the_same_time_are_finished(daemon, attempts):
    """They are held until the other one has ended the process beside them."""
    daemon.settings["Webhooks:Queue:MaxAttempts"] = str(attempts)
    hold = daemon.directory / "hold"
    hold.touch()
    neighbours = [f"aside-{number}" for number in range(5)]
    with running(daemon):
        for webhook_id in neighbours:
            assert daemon.deliver(webhook_id) == 200
        for webhook_id in neighbours:
            daemon.wait_for_state(webhook_id, "running")
        daemon.deliver("exit-late")
        daemon.ended()
        hold.unlink()
        daemon.supervise("exit-late")
        daemon.wait_for_state("exit-late", "dead")
        # One run more than allowed, where the first one with company was the last one allowed.
        assert daemon.runs("exit-late") == max(attempts, 2)
        for webhook_id in neighbours:
            assert daemon.wait_for_state(webhook_id, "done")
        assert daemon.logged("webhook.quarantined")


@pytest.mark.parametrize("inline", [False, True], ids=["queued", "inline"])
def test_anything_that_a_handler_raises_is_only_its_own_failure(daemon, inline):
    ids = [f"{kind}-1" for kind in SOFT]
    with running(daemon):
        for webhook_id in ids:
            statuses = [
                daemon.deliver(webhook_id, inline=inline) for _ in range(ATTEMPTS if inline else 1)
            ]
            assert statuses == ([500] * (ATTEMPTS - 1) + [200] if inline else [200])
        for webhook_id in ids:
            record = daemon.wait_for_state(webhook_id, "dead")
            assert record["attempts"] == ATTEMPTS
            assert daemon.runs(webhook_id) == ATTEMPTS
        assert daemon.starts == 1
        failed = daemon.logged("webhook.failed")
        assert {line["webhook_id"] for line in failed} == set(ids)
        assert {line["handler"] for line in failed} == {"inline" if inline else "queued"}
        assert all("application.py" in line["place"] for line in failed)
        assert daemon.deliver("fine-1", inline=inline) == 200
        daemon.wait_for_state("fine-1", "done")
        daemon.signal(15)
        assert daemon.ended() == 0
