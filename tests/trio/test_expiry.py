"""The deadline of a request that its connection enforces, and runs within it."""

from contextlib import contextmanager

import pytest
import trio
from support.deliveries import Bench, arrival
from support.serving import registry

from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.server.deadline import RequestDeadline

SWEEP_SECONDS = 0.5
TIMEOUT = "Webhooks__InlineTimeoutSeconds"


@pytest.fixture
async def expiry(nursery):
    made = RequestDeadline(SWEEP_SECONDS)

    async def sweep():
        while True:
            await trio.sleep(SWEEP_SECONDS)
            made.sweep(trio.current_time())

    nursery.start_soon(sweep)
    return made


@contextmanager
def request(expiry):
    """Apply the deadline as a connection does around its application."""
    with expiry.scope:
        yield


@pytest.mark.parametrize("begun", [0, 0.2, 0.49, 0.5])
@pytest.mark.parametrize("seconds", [0.01, 0.49, 0.5, 0.99, 1, 1.01, 1.5, 3.7, 8])
async def test_the_deadline_is_exact(autojump_clock, expiry, seconds, begun):
    await trio.sleep(begun)
    started = trio.current_time()
    with request(expiry):
        with expiry.move_on_after(seconds):
            await trio.sleep_forever()
        assert expiry.cancelled_caught
        # The scope around the application is cancelled, and with it the next wait.
        await trio.sleep_forever()
    assert expiry.cancel_called
    assert expiry.scope.cancelled_caught
    assert trio.current_time() - started == pytest.approx(seconds)


async def test_a_block_that_ended_in_time_is_never_cancelled(autojump_clock, expiry):
    with request(expiry):
        for seconds in (0.3, 0.9, 2, 8, 0.3):
            with expiry.move_on_after(seconds):
                await trio.sleep(seconds * 0.9)
            assert not expiry.cancel_called
            await trio.sleep(20)
    assert not expiry.spent


async def test_a_run_past_the_deadline_fails_and_its_response_is_in_time(autojump_clock, expiry):
    ended, answers = [], []

    async def handler(event):
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    bench = Bench.of(registry(handler), **{TIMEOUT: 8})
    started = trio.current_time()

    async def wait_for_it():
        await trio.sleep(1)
        answers.append(await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_it)
        with request(expiry):
            answer = await bench.runner.inline.run(
                arrival(webhook_id="a"), bench.handler(), expiry=expiry
            )
            answers.append(answer)
    assert expiry.cancelled_caught
    assert ended == [started + 8]
    assert [answer.status for answer in answers] == [500, 500]
    record = await bench.inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.RETRYING, 1)
    assert "InlineTimeoutSeconds" in record.last_error


@pytest.mark.parametrize("fails", [True, False])
async def test_a_handler_that_ends_by_itself_when_cancelled_decides_the_outcome(
    autojump_clock, expiry, fails
):
    async def handler(event):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if fails:
                raise ValueError("made of a cancellation") from None

    bench = Bench.of(registry(handler), **{TIMEOUT: 8})
    with request(expiry):
        answer = await bench.runner.inline.run(
            arrival(webhook_id="a"), bench.handler(), expiry=expiry
        )
    assert expiry.spent
    assert answer.status == (500 if fails else 200)
    record = await bench.inbox.get("a")
    assert record.state is (DeliveryState.RETRYING if fails else DeliveryState.DONE)
    assert record.last_error == ("ValueError: made of a cancellation" if fails else None)


async def test_the_stop_of_the_server_releases_a_run_within_its_deadline(autojump_clock, expiry):
    async def handler(event):
        await trio.sleep_forever()

    bench = Bench.of(registry(handler), **{TIMEOUT: 8})
    with trio.move_on_after(7) as scope, request(expiry):
        await bench.runner.inline.run(arrival(webhook_id="a"), bench.handler(), expiry=expiry)
    assert scope.cancelled_caught
    assert not expiry.cancel_called
    assert not expiry.cancelled_caught
    record = await bench.inbox.get("a")
    assert (record.state, record.attempts) == (DeliveryState.RECEIVED, 0)
