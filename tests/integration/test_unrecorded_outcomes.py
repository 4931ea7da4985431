"""An inline run whose outcome the store could not record: it is recorded later, and runs once."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio
from support.deliveries import Bench, arrival
from support.serving import registry
from support.stores import Stores

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import Dead, DeliveryState, Done


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    stores = Stores(request.param, tmp_path)
    yield stores
    await stores.close()


@contextmanager
def failing_ends(inbox: Any) -> Iterator[None]:
    """Let the store be unavailable for outcomes during the block."""

    async def fail(*_arguments: object, **_keywords: object) -> None:
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("disk full")

    with patch.object(inbox, "finish", fail):
        yield


class Shop:
    """Handlers, and the runs that they had."""

    def __init__(self, *, fails: bool = False) -> None:
        self.runs: list[str] = []
        self.fails = fails

    def bench(self, inbox: Any) -> Bench:
        async def handler(event: Any) -> None:
            self.runs.append(event.webhook_id)
            if self.fails:
                raise ValueError("no such product")

        return Bench.of(registry(handler), inbox, clock=time.time, Webhooks__InlineMaxAttempts=1)


async def deliver(bench: Bench) -> int:
    arrived = arrival(webhook_id="m1", now=time.time())
    answer = await bench.runner.inline.run(arrived, bench.handler())
    return answer.status


@pytest.mark.parametrize("fails", [False, True])
async def test_another_process_does_not_run_it_again(stores: Stores, fails: bool) -> None:
    shop = Shop(fails=fails)
    one, two = [shop.bench((await stores.open(owner)).raw) for owner in ("one", "two")]
    with failing_ends(one.inbox):
        with pytest.raises(StoreUnavailableError):
            await deliver(one)
        with pytest.raises(StoreUnavailableError):
            await one.runner.renew()
    # The first process still has the lease.
    assert await deliver(two) == 503
    renewed = await one.runner.renew()
    assert (renewed.given_up, len(renewed.lost)) == (0, 0)
    record = await two.inbox.get("m1")
    assert record.state is (DeliveryState.DEAD if fails else DeliveryState.DONE)
    assert record.attempts == 1
    assert one.counters.values["dead" if fails else "handled"] == 1
    assert shop.runs == ["m1"]
    if not fails:
        assert await deliver(two) == 200
        assert shop.runs == ["m1"]


async def test_a_redelivery_before_that_records_it(stores: Stores) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    assert await deliver(bench) == 200
    await bench.runner.renew()
    assert (await bench.inbox.get("m1")).state is DeliveryState.DONE
    assert (shop.runs, bench.counters.values["handled"]) == (["m1"], 1)


@pytest.mark.parametrize("stores", ["sqlite"], indirect=True)
@pytest.mark.parametrize("outcome", [Done(), Dead("no such product")])
async def test_an_end_with_its_unawaited_claim_can_be_recorded_again(
    stores: Stores, tmp_path: Path, outcome: Done | Dead
) -> None:
    inbox = (await stores.open(claims=tmp_path / "claims")).raw
    shop = Shop(fails=isinstance(outcome, Dead))
    bench = shop.bench(inbox)

    def fail(*_arguments: object, **_keywords: object) -> None:
        raise StoreUnavailableError("disk full")

    with trio.fail_after(10):
        while inbox.claim_unawaited(arrival(now=time.time()).delivery) is None:
            await trio.sleep(0.01)  # the keys of the store are being read
    await bench.runner.renew()
    with patch.object(inbox._engine, "transact", fail), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    assert await inbox.get("m1") is None
    await bench.runner.renew()
    assert (await inbox.get("m1")).state.value == ("done" if outcome == Done() else "dead")
    assert shop.runs == ["m1"]
    # The next run clears the slot of this one.
    assert inbox.claim_unawaited(arrival(now=time.time()).delivery) is not None
    assert "m1" not in (tmp_path / "claims").read_text(errors="replace")
