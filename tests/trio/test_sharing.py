"""Work that one process has accepted, and another one with free workers takes."""

import pytest
import trio
from support.deliveries import Bench, arrival, memory_inbox, settings
from support.serving import registry

from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.webhooks.sharing import is_shared

SHARED = {"Storage__Backend": "Sqlite", "Server__Processes": 2}


def two_processes(handled, seconds, **policy):
    """Return benches of two owners on one store, and note what each handles."""
    inboxes = [memory_inbox(owner="one")]
    inboxes.append(memory_inbox(owner="two", shares=inboxes[0]))

    def handler_of(name):
        async def handler(event):
            await trio.sleep(seconds)
            handled.append((name, event.webhook_id, event.attempt))

        return handler

    return [
        Bench.of(registry(handler_of(name), enqueue=True, **policy), inbox, **SHARED)
        for name, inbox in zip("ab", inboxes, strict=True)
    ]


async def test_a_burst_of_one_process_is_handled_by_both(autojump_clock):
    handled = []
    benches = two_processes(handled, 0.1)
    async with trio.open_nursery() as nursery:
        for bench in benches:
            await nursery.start(bench.queue.run)
        await trio.sleep(3)
        for number in range(640):
            await benches[0].queue.accept(arrival(webhook_id=f"m{number}"))
        begun = trio.current_time()
        while len(handled) < 640:
            await trio.sleep(0.1)
        # Eight workers of one process need eight seconds.
        assert trio.current_time() - begun < 6
        for bench in benches:
            bench.queue.close()
    shares = {name: sum(each[0] == name for each in handled) for name in "ab"}
    assert min(shares.values()) >= 640 / 3, shares
    assert len({webhook_id for _, webhook_id, _ in handled}) == 640
    assert {attempt for _, _, attempt in handled} == {1}
    assert (await benches[0].inbox.counts())[DeliveryState.DONE] == 640


async def test_long_runs_of_one_process_do_not_hold_up_what_another_can_do(autojump_clock):
    handled = []
    benches = two_processes(handled, 100)
    async with trio.open_nursery() as nursery:
        for bench in benches:
            await nursery.start(bench.queue.run)
        await trio.sleep(3)
        for number in range(16):
            await benches[0].queue.accept(arrival(webhook_id=f"m{number}"))
        await trio.sleep(110)
        # One process would have needed twice as long.
        assert len(handled) == 16
        for bench in benches:
            bench.queue.close()


async def test_a_single_process_keeps_its_accepted_events(autojump_clock):
    handled = []
    bench, _ = two_processes(handled, 1)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        await trio.sleep(3)
        for number in range(50):
            await bench.queue.accept(arrival(webhook_id=f"m{number}"))
        await trio.sleep(2.5)
        assert bench.queue.depth == 50 - 8 * 3
        await trio.sleep(10)
        bench.queue.close()
    assert len(handled) == 50


async def test_fast_runs_need_few_claims_while_another_process_asks(autojump_clock, monkeypatch):
    handled, claims = [], []
    bench, other = two_processes(handled, 0.001)
    claim_due = bench.inbox.claim_due

    async def take_and_count(**keywords):
        claims.append(trio.current_time())
        return await claim_due(**keywords)

    monkeypatch.setattr(bench.inbox, "claim_due", take_and_count)
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.queue.run)
        for number in range(12800):
            if number % 64 == 0:  # four thousand events a second, in bursts
                await trio.sleep(0.016)
            await bench.queue.accept(arrival(webhook_id=f"m{number}"))
            if number == 63:
                await other.inbox.ask_for_work(seconds=600, now=trio.current_time())
                assert await other.inbox.is_work_wanted(now=trio.current_time())
        await trio.sleep(1)
        bench.queue.close()
    assert len(handled) == 12800
    # At first the rate of the runs is unknown.
    late = [at for at in claims if at > 1.0]
    assert len(late) < 300, len(late)


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({"Storage__Backend": "Sqlite"}, False),
        ({"Storage__Backend": "Sqlite", "Server__Processes": 2}, True),
        ({"Storage__Backend": "Postgres"}, True),
        ({}, False),
    ],
)
def test_only_a_store_that_several_processes_may_use_is_shared(keys, shared):
    assert is_shared(settings(**keys)) is shared
