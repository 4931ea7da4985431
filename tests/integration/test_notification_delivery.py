"""Dispatcher, senders and HTTP on real sockets: what becomes of each answer, end to end."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from support.notifications import (
    VARIABLES,
    FakeProvider,
    fake_provider,
    http_answer,
    options,
    read_request,
    reset,
)
from support.notified import FakeChannel, Stores, states, stores_of, transition
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.notifications.pump import ChannelLimits, NotificationPump
from sdk_trio.notifications.send import Outcome, RetrySchedule, Sent
from sdk_trio.records.notifications import NotificationState, SendResult
from sdk_trio.runtime.notifications import make_channels

CHANNELS = ("email", "sms", "webhook")
ACCEPTED = {
    "email": http_answer(202, X_Message_Id="m1"),
    "sms": http_answer(201, b'{"sid": "SM1"}'),
    "webhook": http_answer(200),
}
QUICK = ChannelLimits(
    per_second=10_000.0, burst=10_000, schedule=RetrySchedule(4, base_seconds=0.02, cap_seconds=0.1)
)


#: ``--log-cli-level=INFO`` shows them.
figures = logging.getLogger("figures")


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with stores_of(request.param, tmp_path) as stores:
        yield stores


@asynccontextmanager
async def running_pump(
    channels: Any, store: Any, limits: ChannelLimits = QUICK
) -> AsyncIterator[NotificationPump]:
    pump = NotificationPump(channels, store.notifications, limits=dict.fromkeys(channels, limits))
    async with trio.open_nursery() as nursery:
        await nursery.start(pump.run)
        yield pump
        pump.close()
        with trio.move_on_after(20):
            await pump.ended.wait()
        nursery.cancel_scope.cancel()


def all_in(store: Any, *wanted: str) -> Any:
    async def check() -> bool:
        found = states(await store.notifications.find(limit=10_000))
        return bool(found) and set(found.values()) <= set(wanted)

    return check


async def answer_with(stream: trio.SocketStream, answer: bytes) -> None:
    await read_request(stream)
    await stream.send_all(answer)


@attrs.define
class Script:
    """Treats the first connections as listed, and accepts all later ones."""

    steps: Sequence[str]
    accepted: bytes
    number: int = 0
    times: list[float] = attrs.Factory(list)

    async def __call__(self, provider: FakeProvider, stream: trio.SocketStream) -> None:
        step = self.steps[self.number] if self.number < len(self.steps) else "accept"
        self.number += 1
        self.times.append(trio.current_time())
        match step:
            case "accept":
                await answer_with(stream, self.accepted)
            case "429":
                await answer_with(stream, http_answer(429, Retry_After="3"))
            case "503" | "400":
                await answer_with(stream, http_answer(int(step)))
            case "silence":
                await read_request(stream)
                await trio.sleep_forever()
            case "reset":
                await read_request(stream)
                await reset(stream)
            case "half":
                await read_request(stream)
                await stream.send_all(self.accepted[:12])
                await reset(stream)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    ("steps", "once", "repeated"),
    [
        ((), ("sent", 1), ("sent", 1)),
        (("503", "503"), ("sent", 3), ("sent", 3)),
        (("503",) * 9, ("failed", 4), ("failed", 4)),
        (("400",), ("failed", 1), ("failed", 1)),
        (("reset",), ("unknown", 1), ("sent", 2)),
        (("half",), ("unknown", 1), ("sent", 2)),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
async def test_the_end_of_a_message_for_any_behavior_of_the_provider(
    channel: str,
    steps: Sequence[str],
    once: tuple[str, int],
    repeated: tuple[str, int],
    tmp_path: Path,
) -> None:
    script = Script(steps, ACCEPTED[channel])
    state, connections = repeated if channel == "webhook" else once
    async with stores_of("memory", tmp_path) as stores, fake_provider(behave=script) as provider:
        store = await stores.open("a")
        made = make_channels(loopback(provider), read_variable=VARIABLES.get)
        async with running_pump({channel: made[channel]}, store) as pump:
            await transition(store, now=time.time())
            pump.wake()
            await until(all_in(store, "sent", "failed", "unknown"))
        assert states(await store.notifications.find()) == {f"1-{channel}": state}
        assert script.number == connections


def loopback(provider: FakeProvider, *, timeout_seconds: int = 60) -> Any:
    """The options of every channel on a provider of this machine."""
    return options(provider.url, timeout_seconds=timeout_seconds)


async def test_a_webhook_that_answers_nothing_in_time_is_posted_again(tmp_path: Path) -> None:
    script = Script(("silence",), ACCEPTED["webhook"])
    async with stores_of("memory", tmp_path) as stores, fake_provider(behave=script) as provider:
        store = await stores.open("a")
        made = make_channels(loopback(provider, timeout_seconds=2), read_variable=VARIABLES.get)
        async with running_pump({"webhook": made["webhook"]}, store) as pump:
            await transition(store, now=time.time())
            pump.wake()
            await until(all_in(store, "sent"))
        assert script.number == 2
        assert pump.counts == {("webhook", "retried"): 1, ("webhook", "sent"): 1}


async def test_retry_after_of_one_provider_pauses_that_channel_alone(tmp_path: Path) -> None:
    script = Script(("429",), ACCEPTED["email"])
    async with stores_of("memory", tmp_path) as stores, fake_provider(behave=script) as provider:
        store = await stores.open("a")
        made = make_channels(loopback(provider), read_variable=VARIABLES.get)
        other = FakeChannel()
        async with running_pump({"email": made["email"], "sms": other}, store) as pump:
            await transition(store, "a", now=time.time())
            pump.wake()
            await until(lambda: script.number == 1)
            # Its answer must be read before the next attempt, or the pause would not be known yet.
            await until(all_in(store, "retrying", "sent"))
            for number in range(5):
                await transition(store, f"t{number}", now=time.time())
            pump.wake()
            await until(lambda: len(other.finished) == 6)
            # Unless this machine was so slow that the pause was over.
            assert script.number == 1 or trio.current_time() >= script.times[0] + 3
            await until(all_in(store, "sent"))
        assert min(script.times[1:]) - script.times[0] >= 3.0


async def test_without_its_variable_a_message_is_skipped_until_it_is_set_and_retried(
    tmp_path: Path,
) -> None:
    script = Script((), ACCEPTED["email"])
    variables: dict[str, str] = {}
    async with stores_of("memory", tmp_path) as stores, fake_provider(behave=script) as provider:
        store = await stores.open("a")
        made = make_channels(loopback(provider), read_variable=variables.get)
        async with running_pump({"email": made["email"]}, store) as pump:
            await transition(store, now=time.time())
            pump.wake()
            await until(all_in(store, "skipped"))
            (record,) = await store.notifications.find()
            assert "EMAIL_API_KEY is not set" in record.reason
            variables.update(VARIABLES)
            await store.notifications.retry([record.id])
            await until(all_in(store, "sent"))
        assert script.number == 1


@attrs.define
class Measured:
    """A host with a healthy email channel, whose latencies are measured, and an SMS channel."""

    store: Any
    pump: NotificationPump
    script: Script
    latencies: list[float] = attrs.Factory(list)

    async def measure(self, number: int) -> None:
        begun = trio.current_time()
        await transition(self.store, f"t{number}", now=time.time())
        self.pump.wake()
        await until(lambda: len(self.script.times) == number + 1)
        self.latencies.append(self.script.times[-1] - begun)


@asynccontextmanager
async def measured(directory: Path, sms: str) -> AsyncIterator[Measured]:
    async def hang(provider: FakeProvider, stream: trio.SocketStream) -> None:
        await read_request(stream)
        await trio.sleep(60)

    directory.mkdir(mode=0o700)
    script = Script((), ACCEPTED["email"])
    behave = hang if sms == "hangs" else Script((), ACCEPTED["sms"])
    async with (
        stores_of("sqlite", directory) as stores,
        fake_provider(behave=script) as fine,
        fake_provider(behave=behave) as other,
        trio.open_nursery() as nursery,
    ):
        if sms == "refuses":
            other.port = 1
        store = await stores.open("a")
        channels = {
            "email": make_channels(loopback(fine), read_variable=VARIABLES.get)["email"],
            "sms": make_channels(loopback(other), read_variable=VARIABLES.get)["sms"],
        }
        limits = dict.fromkeys(channels, QUICK)
        pump = NotificationPump(channels, store.notifications, limits=limits)
        await nursery.start(pump.run)
        yield Measured(store, pump, script)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
async def test_a_channel_that_is_down_changes_no_other_channel_s_latency(
    fault: str, tmp_path: Path
) -> None:
    async with (
        measured(tmp_path / "healthy", "works") as healthy,
        measured(tmp_path / "disturbed", fault) as disturbed,
    ):
        # Alternately, so that other load of this machine affects both alike.
        for number in range(40):
            await healthy.measure(number)
            await disturbed.measure(number)
        found = states(await disturbed.store.notifications.find(limit=100))
        assert "sent" not in {state for id, state in found.items() if id.endswith("sms")}
    # The slowest ones depend more on this machine than on the code, so they get a larger tolerance.
    for part, tolerance in ((0.5, 0.05), (0.9, 0.5)):
        one, other = (sorted(host.latencies)[int(40 * part)] for host in (healthy, disturbed))
        figures.info(
            "%s: %.0f %% within %.1f ms, else %.1f ms", fault, part * 100, other * 1000, one * 1000
        )
        assert other < 2 * one + tolerance


async def test_two_owners_of_one_store_never_send_the_same_message(stores: Stores) -> None:
    async def together(number: int) -> Outcome:
        # Neither does the other's work: the first ones are held until both have some.
        await until(lambda: all(channel.begun for channel in channels))
        return Sent()

    channels = [FakeChannel(behave=together), FakeChannel(behave=together)]
    first, second = await stores.open("a"), await stores.open("b")
    async with (
        running_pump({"sms": channels[0]}, first) as one,
        running_pump({"sms": channels[1]}, second) as other,
    ):
        for number in range(60):
            await transition(first, f"t{number}", now=time.time())
            one.wake()
            other.wake()
        # The last one may not have its message yet when all the others are sent.
        await until(lambda: len(channels[0].begun + channels[1].begun) >= 60)
        await until(all_in(first, "sent"))
    begun = channels[0].begun + channels[1].begun
    assert len(begun) == len(set(begun)) == 60


async def slow(number: int) -> Outcome:
    await trio.sleep(0.005)
    return Sent()


async def test_cancelled_at_any_point_nothing_is_lost_or_stuck_or_sent_twice(
    stores: Stores,
) -> None:
    """Cancel after each number of the loop's steps; the next owner finishes the rest."""
    lasting = {"lease_seconds": 10 * PATIENCE_SECONDS}
    first = await stores.open("start", **lasting)
    await first.notifications.create_messages({}, now=0.0, oldest=0.0)
    sent: list[str] = []
    for steps in range(45):
        store = await stores.open(f"o{steps}", **lasting)
        channel = FakeChannel(behave=slow if steps % 2 else None)
        record = await transition(store, f"t{steps}", now=time.time())
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                pump = NotificationPump(
                    {"sms": channel}, store.notifications, limits={"sms": QUICK}
                )
                nursery.start_soon(pump.run)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                    if stores.kind == "sqlite":
                        await trio.sleep(0.0007)
                scope.cancel()
        sent += channel.begun
        left = {str(r.outbox.delivery_id): r for r in await store.notifications.find(limit=100)}
        found = left.get(record.delivery_id)
        if found is not None:
            # Nothing is left under a lease, or in a state that no process would claim.
            assert str(found.state) in ("pending", "sent", "unknown")
            assert (found.state == "sent") <= (record.delivery_id in channel.finished)
            assert (found.state == "unknown") <= (record.delivery_id in channel.begun)
    final = FakeChannel()
    store = await stores.open("final", **lasting)
    async with running_pump({"sms": final}, store):
        # Sooner than any lease expires: none was left behind.
        await until(all_in(store, "sent", "unknown"))
    sent += final.begun
    assert len(sent) == len(set(sent))
    records = await store.notifications.find(limit=100)
    assert len(records) == 45
    assert {str(r.state) for r in records} <= {"sent", "unknown"}
    assert {r.outbox.delivery_id for r in records if r.state == "sent"} <= set(sent)


async def test_a_retry_is_handed_out_at_its_time_and_not_before(stores: Stores) -> None:
    store = await stores.open("a")
    notifications = store.notifications
    await notifications.create_messages({}, now=0.0, oldest=0.0)
    await transition(store, now=1.0)
    await notifications.create_messages({"sms": False}, now=1.0, oldest=0.0)
    (record,) = (await notifications.claim_due("sms", limit=5, now=1.0)).records
    await notifications.start(record.id, now=1.0)
    again = SendResult(NotificationState.RETRYING, "answered 503", next_attempt_at=9.0)
    assert await notifications.finish(record.id, again, now=2.0)
    early = await notifications.claim_due("sms", limit=5, now=8.9)
    assert (early.records, early.next_due_at) == ([], 9.0)
    assert (await notifications.poll({"sms": False}, now=8.9)).due == frozenset()
    assert (await notifications.poll({"sms": False}, now=9.0)).due == {"sms"}
    (record,) = (await notifications.claim_due("sms", limit=5, now=9.0)).records
    assert (record.attempts, record.reason) == (1, "answered 503")
