"""The pump's reaction to each outcome, with a simulated clock and a store in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from support.notified import FakeChannel, answering, states, transition
from trio.testing import MockClock, wait_all_tasks_blocked

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.notifications.pump import (
    ATTEMPT_SECONDS,
    NEWS_SECONDS,
    RETENTION_SECONDS,
    ChannelLimits,
    NotificationPump,
)
from sdk_trio.notifications.send import (
    Again,
    Ambiguous,
    Outcome,
    Refused,
    RetrySchedule,
    Sent,
    Skipped,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox

TERMS = {"lease_seconds": 75.0, "dedup_seconds": 100.0, "payload_seconds": 40.0}
EPOCH = 1_800_000_000.0


#: The difference between the wall clock and the loop's clock: days without events pass at once.
AHEAD = [0.0]


def now() -> float:
    return EPOCH + AHEAD[0] + trio.current_time()


@attrs.define
class Running:
    store: Any
    pump: NotificationPump
    nursery: trio.Nursery

    async def happen(self, identifier: str = "acme") -> str:
        """A transition, at which the pump is woken; its message's number."""
        await transition(self.store, identifier, now=now())
        self.pump.wake()
        return str((await self.store.tenants.outbox(limit=1000))[-1].sequence)

    async def states(self) -> dict[str, str]:
        return states(await self.store.notifications.find(limit=1000))

    async def get(self, id: str) -> Any:
        (found,) = [r for r in await self.store.notifications.find(limit=1000) if str(r.id) == id]
        return found


def new_store(owner: str = "a", shares: Any = None) -> Any:
    return MemoryInbox(LeaseTerms(owner=owner, **TERMS), shares=shares)


@asynccontextmanager
async def running(
    channels: dict[str, Any], store: Any = None, *, max_attempts: int = 8, **limits: Any
) -> AsyncIterator[Running]:
    """A pump that runs; jitter is at its upper end."""
    store = new_store() if store is None else store
    each = ChannelLimits(schedule=RetrySchedule(max_attempts), **limits)
    pump = NotificationPump(
        channels,
        store.notifications,
        limits=dict.fromkeys(channels, each),
        clock=now,
        fraction=lambda: 1.0,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(pump.run)
        yield Running(store, pump, nursery)
        nursery.cancel_scope.cancel()


async def test_each_transition_is_announced_once_on_each_channel(autojump_clock: MockClock) -> None:
    channels = {"email": FakeChannel(), "sms": FakeChannel(), "webhook": FakeChannel(True)}
    async with running(channels) as app:
        for number in range(5):
            await app.happen(f"t{number}")
        await trio.sleep(2)
        assert set((await app.states()).values()) == {"sent"}
        for channel in channels.values():
            assert len(set(channel.begun)) == len(channel.begun) == 5
        assert app.pump.counts == {(name, "sent"): 5 for name in channels}
        assert (await app.get("1-email")).provider_id.startswith("id-")


@pytest.mark.parametrize(
    ("outcome", "repeatable", "state", "result"),
    [
        (Sent("x"), False, "sent", "sent"),
        (Refused("no such number"), False, "failed", "failed"),
        (Skipped("no address"), False, "skipped", "skipped"),
        (Ambiguous("no answer"), False, "unknown", "unknown"),
        (Ambiguous("no answer"), True, "retrying", "retried"),
        (Again("answered 503"), False, "retrying", "retried"),
    ],
)
async def test_the_record_of_each_outcome(
    autojump_clock: MockClock, outcome: Outcome, repeatable: bool, state: str, result: str
) -> None:
    channel = FakeChannel(repeatable, answering(outcome))
    async with running({"sms": channel}) as app:
        id = await app.happen() + "-sms"
        await wait_all_tasks_blocked()
        record = await app.get(id)
        assert (record.state, record.attempts) == (state, 1)
        assert record.reason == getattr(outcome, "reason", None)
        assert app.pump.counts == {("sms", result): 1}
        assert (record.finished_at is None) == (state == "retrying")


async def test_retries_wait_longer_each_time_and_end_after_max_attempts(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    channel = FakeChannel(False, answering(Again("answered 500")))
    async with running({"email": channel}, max_attempts=5) as app:
        id = await app.happen() + "-email"
        await trio.sleep(10_000)
        record = await app.get(id)
        assert (record.state, record.attempts, record.reason) == ("failed", 5, "answered 500")
        waits = [b - a for a, b in zip(channel.at, channel.at[1:], strict=False)]
        assert waits == pytest.approx([30, 60, 120, 240], abs=0.1)
        limited = [record.sdk[1]["retry_in"] for record in caplog.records if is_retry(record)]
        assert limited == pytest.approx(waits, abs=0.2)
        assert app.pump.counts == {("email", "retried"): 4, ("email", "failed"): 1}


def is_retry(record: Any) -> bool:
    return bool(getattr(record, "sdk", ("",))[0] == "notification.retried")


async def test_a_provider_that_asks_for_time_gets_it_for_all_messages_of_its_channel(
    autojump_clock: MockClock,
) -> None:
    limited = FakeChannel(False, answering(Again("answered 429", 100.0), Sent()))
    other = FakeChannel()
    async with running({"sms": limited, "email": other}) as app:
        await app.happen("a")
        await trio.sleep(1)
        await app.happen("b")
        await trio.sleep(98)
        assert len(limited.begun) == 1
        assert len(other.finished) == 2
        await trio.sleep(60)
        assert len(limited.finished) == 3
        # Retry-After is a lower bound: the message itself waits for its jitter on top.
        assert limited.at[1] - limited.at[0] == pytest.approx(100, abs=0.1)
        assert limited.at[2] - limited.at[0] == pytest.approx(130, abs=0.1)


async def test_a_provider_that_asks_for_long_gets_it_for_the_message_and_an_hour_for_the_channel(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    hour = 3600.0
    asked = 1.5 * hour
    limited = FakeChannel(False, answering(Again("answered 429", asked), Sent()))
    async with running({"sms": limited}) as app:
        await app.happen("a")
        await trio.sleep(1)
        await app.happen("b")
        await trio.sleep(asked - 100)
        assert [record.sdk for record in caplog.records if is_pause(record)] == [
            ("notification.channel_paused", {"channel": "sms", "seconds": hour, "asked": asked})
        ]
        assert limited.at[1] - limited.at[0] == pytest.approx(hour, abs=0.1)
        assert await app.states() == {"1-sms": "retrying", "2-sms": "sent"}
        await trio.sleep(200)
        assert await app.states() == {"1-sms": "sent", "2-sms": "sent"}
        assert limited.at[2] - limited.at[0] > asked


def is_pause(record: Any) -> bool:
    return bool(getattr(record, "sdk", ("",))[0] == "notification.channel_paused")


async def test_a_channel_is_not_asked_faster_than_its_pace(autojump_clock: MockClock) -> None:
    channel = FakeChannel()
    async with running({"sms": channel}, per_second=2.0, burst=3) as app:
        for number in range(13):
            await app.happen(f"t{number}")
        await trio.sleep(60)
        assert len(channel.begun) == 13
        assert channel.at[2] - channel.at[0] < 0.1
        assert channel.at[12] - channel.at[0] == pytest.approx(5.0, abs=0.1)


async def test_a_channel_that_hangs_holds_up_no_other(autojump_clock: MockClock) -> None:
    async def hang(number: int) -> Outcome:
        await trio.sleep_forever()
        raise AssertionError

    stuck, fine = FakeChannel(False, hang), FakeChannel()
    async with running({"sms": stuck, "email": fine}, burst=100) as app:
        for number in range(30):
            await app.happen(f"t{number}")
            await wait_all_tasks_blocked()
            assert len(fine.finished) == number + 1
        assert len(stuck.begun) == ChannelLimits().concurrency
        await trio.sleep(ATTEMPT_SECONDS + 1)
        found = list((await app.states()).values())
        assert found.count("unknown") == ChannelLimits().concurrency


async def test_a_channel_that_raises_is_recorded_and_continues(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(number: int) -> Outcome:
        await trio.lowlevel.checkpoint()
        if number == 0:
            raise ValueError("a fault of ours")
        return Sent()

    channel = FakeChannel(False, broken)
    async with running({"sms": channel}) as app:
        await app.happen("a")
        await trio.sleep(1)
        await app.happen("b")
        await trio.sleep(1)
        assert await app.states() == {"1-sms": "unknown", "2-sms": "sent"}
    assert "notification.crashed error='ValueError' where='" in caplog.text
    assert "a fault of ours" not in caplog.text


async def test_closed_it_finishes_what_was_begun_and_leaves_the_rest(
    autojump_clock: MockClock,
) -> None:
    async def slow(number: int) -> Outcome:
        await trio.sleep(5)
        return Sent()

    channel = FakeChannel(False, slow)
    async with running({"sms": channel}, concurrency=2) as app:
        for number in range(4):
            await app.happen(f"t{number}")
        await trio.sleep(1)
        app.pump.close()
        with trio.fail_after(5):
            await app.pump.ended.wait()
        found = await app.states()
        assert sorted(found.values()) == ["pending", "pending", "sent", "sent"]
        store = new_store("b", shares=app.store)
    async with running({"sms": FakeChannel()}, store) as app:
        await trio.sleep(1)
        assert set((await app.states()).values()) == {"sent"}


@pytest.mark.parametrize(("repeatable", "state"), [(False, "unknown"), (True, "retrying")])
async def test_attempts_interrupted_by_a_shutdown_are_unknown_or_due_again(
    autojump_clock: MockClock, repeatable: bool, state: str
) -> None:
    async def hang(number: int) -> Outcome:
        await trio.sleep_forever()
        raise AssertionError

    async with running({"sms": FakeChannel(repeatable, hang)}) as app:
        await app.happen()
        await wait_all_tasks_blocked()
        app.pump.close()
        await wait_all_tasks_blocked()
        assert not app.pump.ended.is_set()
        app.nursery.cancel_scope.cancel()
    assert await app.states() == {"1-sms": state}
    again = FakeChannel(repeatable)
    async with running({"sms": again}, new_store("b", shares=app.store)) as later:
        assert later.store is not app.store
        await trio.sleep(3600)
        assert await later.states() == {"1-sms": "sent" if repeatable else "unknown"}
        assert len(again.begun) == repeatable


async def test_transitions_before_the_first_start_are_skipped_and_those_of_a_pause_announced(
    autojump_clock: MockClock,
) -> None:
    store = new_store()
    await transition(store, "before", now=now())
    channel = FakeChannel()
    async with running({"sms": channel}, store) as app:
        await trio.sleep(1)
        assert await app.states() == {}
        await app.happen("during")
        await trio.sleep(1)
    await transition(store, "between", now=now())
    async with running({"sms": channel}, store) as app:
        await trio.sleep(1)
        assert await app.states() == {"2-sms": "sent", "3-sms": "sent"}


async def test_transitions_while_switched_off_are_never_announced(
    autojump_clock: MockClock,
) -> None:
    store = new_store()
    channel = FakeChannel()
    async with running({"sms": channel}, store):
        await trio.sleep(1)
    await transition(store, "just before", now=now())
    await store.notifications.switch_off()
    await transition(store, "during", now=now())
    async with running({"sms": channel}, store) as app:
        await trio.sleep(1)
        await app.happen("after")
        await trio.sleep(1)
        assert await app.states() == {"3-sms": "sent"}


async def test_stale_messages_are_skipped_and_can_be_requested(
    autojump_clock: MockClock,
) -> None:
    store = new_store()
    channel = FakeChannel()
    async with running({"sms": channel}, store):
        await trio.sleep(1)
    await transition(store, "old", now=now())
    AHEAD[0] += NEWS_SECONDS / 2
    await transition(store, "new", now=now())
    AHEAD[0] += NEWS_SECONDS / 2
    await trio.sleep(1)
    async with running({"sms": channel}, store) as app:
        await trio.sleep(1)
        assert await app.states() == {"1-sms": "skipped", "2-sms": "sent"}
        record = await app.get("1-sms")
        assert "24 hours old" in record.reason
        await store.notifications.retry([record.id])
        await trio.sleep(1)
        assert set((await app.states()).values()) == {"sent"}


async def test_messages_of_a_channel_that_was_switched_off_are_skipped(
    autojump_clock: MockClock,
) -> None:
    store = new_store()
    async with running({"sms": FakeChannel(False, answering(Again("answered 500")))}, store) as app:
        await app.happen()
        await trio.sleep(1)
    async with running({"email": FakeChannel()}, store) as app:
        await trio.sleep(1)
        assert await app.states() == {"1-sms": "skipped"}
        assert "is disabled" in (await app.get("1-sms")).reason


async def test_finished_messages_are_removed_after_their_retention(
    autojump_clock: MockClock,
) -> None:
    async with running({"sms": FakeChannel()}) as app:
        await app.happen()
        await trio.sleep(1)
        AHEAD[0] += RETENTION_SECONDS - 7000
        await trio.sleep(3700)
        assert await app.states() == {"1-sms": "sent"}
        await trio.sleep(3600)
        assert await app.states() == {}


class Failing:
    """A store whose methods fail while ``down`` names them."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.down: set[str] = set()
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **options: Any) -> Any:
            if name in self.down:
                self.refused += 1
                await trio.lowlevel.checkpoint()
                raise StoreUnavailableError("the disk is full")
            return await method(*args, **options)

        return call


METHODS = ("poll", "create_messages", "claim_due", "start", "finish", "renew", "purge")


@pytest.mark.parametrize("method", METHODS)
async def test_a_store_that_fails_for_a_while_delays_and_loses_nothing(
    autojump_clock: MockClock, method: str
) -> None:
    inbox = new_store()
    inbox.notifications = failing = Failing(inbox.notifications)
    channel = FakeChannel()
    async with running({"sms": channel}, inbox) as app:
        await app.happen("a")
        await trio.sleep(1)
        failing.down = {method}
        await app.happen("b")
        long = 3700 if method == "purge" else 60
        await trio.sleep(long)
        assert failing.refused
        failing.down = set()
        await trio.sleep(60)
        assert set((await app.states()).values()) == {"sent"}
        assert len(channel.begun) == len(set(channel.begun)) == 2


async def test_a_stale_lease_holder_does_not_send(autojump_clock: MockClock) -> None:
    inbox = new_store("a")
    other_store = new_store("b", shares=inbox)
    inbox.notifications = failing = Failing(inbox.notifications)
    mine, others = FakeChannel(), FakeChannel()
    async with running({"sms": mine}, inbox) as app:
        failing.down = {"start", "renew"}
        await app.happen()
        await trio.sleep(10)
        async with running({"sms": others}, other_store):
            await trio.sleep(60)
            assert others.begun == []
            await trio.sleep(TERMS["lease_seconds"])
            assert len(others.finished) == 1
        failing.down = set()
        await trio.sleep(10)
        assert mine.begun == []
        assert await app.states() == {"1-sms": "sent"}


async def test_a_process_that_dies_while_sending_leaves_it_unknown_or_due(
    autojump_clock: MockClock,
) -> None:
    store = new_store("dead")
    await store.notifications.create_messages({}, now=now(), oldest=0.0)
    await transition(store, now=now())
    both = {"sms": False, "webhook": True}
    await store.notifications.create_messages(both, now=now(), oldest=0.0)
    for name in both:
        (record,) = (await store.notifications.claim_due(name, limit=1, now=now())).records
        assert await store.notifications.start(record.id, now=now())
    channels = {"sms": FakeChannel(), "webhook": FakeChannel(True)}
    async with running(channels, new_store("b", shares=store)) as app:
        await trio.sleep(60)
        assert await app.states() == {"1-webhook": "sending", "1-sms": "sending"}
        await trio.sleep(30)
        assert await app.states() == {"1-webhook": "sent", "1-sms": "unknown"}
        assert channels["sms"].begun == []
        assert app.pump.counts == {("sms", "unknown"): 1, ("webhook", "sent"): 1}


async def test_an_attempt_whose_message_was_taken_over_is_logged_and_changes_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow(number: int) -> Outcome:
        await trio.sleep(10)
        return Sent("SM1")

    inbox = new_store("a")
    async with running({"sms": FakeChannel(behave=slow)}, inbox) as app:
        await app.happen()
        await trio.sleep(5)
        await new_store("b", shares=inbox).notifications.recover(now=now())
        await trio.sleep(10)
        assert await app.states() == {"1-sms": "unknown"}
        assert dict(app.pump.counts) == {}
    assert "notification.not_recorded id='1-sms' result='sent' provider_id='SM1'" in caplog.text


@pytest.mark.parametrize(("repeatable", "state"), [(False, "unknown"), (True, "retrying")])
async def test_a_channel_with_tasks_of_its_own_is_cut_off_and_recorded(
    autojump_clock: MockClock, repeatable: bool, state: str
) -> None:
    async def with_tasks(number: int) -> Outcome:
        async with trio.open_nursery() as nursery:  # raises a group when it is cancelled
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()

    async with running({"sms": FakeChannel(repeatable, with_tasks)}) as app:
        await app.happen()
        await trio.sleep(1)
        app.nursery.cancel_scope.cancel()
    record = await app.get("1-sms")
    assert (record.state, "interrupted by a shutdown" in record.reason) == (state, True)
