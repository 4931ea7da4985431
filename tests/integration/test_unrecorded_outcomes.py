"""An inline run whose outcome the store could not record: it is recorded later, and runs once."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio
import trio.testing
from support.admin import TOKEN, administered
from support.deliveries import Bench, arrival
from support.serving import delivery_request, exchange, registry, signed
from support.stores import Stores
from support.waiting import until

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import Dead, DeliveryState
from sdk_trio.webhooks import inline


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


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


def unavailable(*_arguments: object, **_keywords: object) -> None:
    raise StoreUnavailableError("disk full")


class Shop:
    """A handler of every order, and the runs that it had."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def bench(self, inbox: Any) -> Bench:
        async def handler(event: Any) -> None:
            self.runs.append(event.webhook_id)

        return Bench.of(registry(handler), inbox, clock=time.time)


async def deliver(bench: Bench, webhook_id: str = "m1", subject: str = "s1") -> int:
    arrived = arrival(webhook_id=webhook_id, subject=subject, now=time.time())
    answer = await bench.runner.inline.run(arrived, bench.handler())
    return answer.status


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[list[str]]:
    """Return the keys that each line of an event names."""
    lines = [getattr(record, "sdk", ("", {})) for record in caplog.records]
    return [sorted(fields["keys"]) for name, fields in lines if name == event]


async def claiming_bench(shop: Shop, inbox: Any) -> Bench:
    """Return a bench whose inbox has read the keys of its store, and claims without a commit."""
    bench = shop.bench(inbox)
    with trio.fail_after(10):
        while inbox.claim_unawaited(arrival(now=time.time()).delivery) is None:
            await trio.sleep(0.01)
    await bench.runner.renew()
    return bench


async def test_another_process_does_not_run_it_again(stores: Stores) -> None:
    shop = Shop()
    one, two = [shop.bench((await stores.open(owner)).raw) for owner in ("one", "two")]
    with failing_ends(one.inbox):
        with pytest.raises(StoreUnavailableError):
            await deliver(one)
        await one.runner.inline.record_ended()
    renewed = await one.runner.renew()
    assert (renewed.given_up, len(renewed.lost)) == (0, 0)
    assert await deliver(two) == 503
    await one.runner.inline.record_ended()
    record = await two.inbox.get("m1")
    assert (record.state, record.attempts) == (DeliveryState.DONE, 1)
    assert one.counters.values["handled"] == 1
    assert [await deliver(each) for each in (one, two)] == [200, 200]
    assert (shop.runs, one.counters.values["handled"]) == (["m1"], 1)


async def test_a_redelivery_before_that_records_it(stores: Stores) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    assert await deliver(bench) == 200
    await bench.runner.inline.record_ended()
    assert (await bench.inbox.get("m1")).state is DeliveryState.DONE
    assert (shop.runs, bench.counters.values["handled"]) == (["m1"], 1)


async def test_a_redelivery_joins_the_recording(stores: Stores) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    answers: list[int] = []

    async def redeliver() -> None:
        answers.append(await deliver(bench))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.runner.inline.record_ended)
        nursery.start_soon(redeliver)
    assert answers == [200]
    assert (shop.runs, bench.counters.values["handled"]) == (["m1"], 1)


async def test_an_outcome_that_the_store_confirmed_too_late_is_reported(stores: Stores) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    finish = bench.inbox.finish

    async def confirm_too_late(*arguments: Any, **named: Any) -> None:
        assert await finish(*arguments, **named)
        raise StoreUnavailableError("no answer")

    with (
        patch.object(bench.inbox, "finish", confirm_too_late),
        pytest.raises(StoreUnavailableError),
    ):
        await deliver(bench)
    await bench.runner.inline.record_ended()
    assert not bench.runner.inline.unrecorded.by_key
    assert (shop.runs, bench.counters.values["handled"]) == (["m1"], 1)


async def test_a_stop_records_it_or_names_it(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox):
        for webhook_id in ("m1", "m2"):
            with pytest.raises(StoreUnavailableError):
                await deliver(bench, webhook_id)
        await bench.runner.inline.end()
    assert logged(caplog, "webhook.outcomes_unrecorded") == [["m1", "m2"]]
    caplog.clear()
    await bench.runner.inline.end()
    assert not logged(caplog, "webhook.outcomes_unrecorded")
    assert shop.runs == ["m1", "m2"]


@pytest.mark.parametrize("stores", ["sqlite", "postgres"], indirect=True)
async def test_a_claim_that_is_committed_too_late_keeps_its_lease(stores: Stores) -> None:
    shop = Shop()
    one, two = [shop.bench((await stores.open(owner)).raw) for owner in ("one", "two")]
    with failing_ends(one.inbox), pytest.raises(StoreUnavailableError):
        await deliver(one)
    claim = one.inbox.claim

    async def claim_too_late(*arguments: Any, **named: Any) -> None:
        await claim(*arguments, **named)
        raise StoreUnavailableError("no answer")

    with patch.object(one.inbox, "claim", claim_too_late):
        await one.runner.inline.record_ended()
    assert (await one.runner.renew()).given_up == 0
    assert await deliver(two) == 503
    await one.runner.inline.record_ended()
    assert await deliver(one) == 200
    assert (shop.runs, one.counters.values["handled"]) == (["m1"], 1)


@pytest.mark.parametrize("stores", ["sqlite"], indirect=True)
async def test_another_body_is_evidence_beside_the_one_that_was_handled(
    stores: Stores, tmp_path: Path
) -> None:
    """The claim of the first one was not stored, either."""
    shop = Shop()
    inbox = (await stores.open(claims=tmp_path / "claims")).raw
    bench = await claiming_bench(shop, inbox)
    broken = patch.object(inbox._engine, "transact", unavailable)
    with broken, pytest.raises(StoreUnavailableError):
        await deliver(bench, subject="first")
    assert await deliver(bench, subject="second") == 200
    record = await inbox.get("m1")
    assert (record.state, b"first" in record.raw) == (DeliveryState.DONE, True)
    (other,) = await inbox.evidence("m1")
    assert b"second" in other.raw
    assert (shop.runs, bench.counters.values["different_body"]) == (["m1"], 1)


async def test_a_run_that_does_not_end_takes_no_time_of_the_last_record(stores: Stores) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    bench.runner.inline._in_flight["other"] = inline.InFlight(b"")
    with trio.move_on_after(2):
        await bench.runner.inline.end()
    assert (await bench.inbox.get("m1")).state is DeliveryState.DONE


async def test_one_that_is_dropped_while_it_is_recorded_is_recorded(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    claim = bench.inbox.claim

    async def drop(*arguments: Any, **named: Any) -> Any:
        admitted = await claim(*arguments, **named)
        bench.runner.inline.unrecorded.remove("m1")
        return admitted

    with patch.object(bench.inbox, "claim", drop):
        await bench.runner.inline.record_ended()
    assert (await bench.inbox.get("m1")).state is DeliveryState.DONE
    assert [await deliver(bench), len(shop.runs)] == [200, 1]


async def test_too_many_are_dropped_and_named(
    stores: Stores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    size = len(arrival(webhook_id="m1").delivery.raw)
    monkeypatch.setattr(inline, "MOST_UNRECORDED_BYTES", 2 * size)
    with failing_ends(bench.inbox):
        for number in range(3):
            with pytest.raises(StoreUnavailableError):
                await deliver(bench, f"m{number}")
    assert logged(caplog, "webhook.outcomes_unrecorded") == [["m0"]]
    await bench.runner.inline.end()
    states = [(await bench.inbox.get(f"m{number}")).state for number in range(3)]
    assert states == [DeliveryState.RUNNING, DeliveryState.DONE, DeliveryState.DONE]


async def test_an_outcome_is_obsolete_after_a_replay(stores: Stores) -> None:
    shop = Shop()
    bench = shop.bench((await stores.open()).raw)
    with failing_ends(bench.inbox), pytest.raises(StoreUnavailableError):
        await deliver(bench)
    (ended,) = bench.runner.inline.unrecorded.successes
    await bench.inbox.finish(ended.lease, Dead("an operator"), now=time.time())
    await bench.inbox.replay(["m1"])
    await bench.runner.inline.record_ended()
    assert not bench.runner.inline.unrecorded.by_key
    assert (await bench.inbox.get("m1")).state is DeliveryState.RECEIVED


@pytest.mark.parametrize("stores", ["sqlite"], indirect=True)
async def test_an_end_together_with_its_claim_is_recorded_after_an_outage(
    stores: Stores, tmp_path: Path
) -> None:
    shop = Shop()
    inbox = (await stores.open(claims=tmp_path / "claims")).raw
    bench = await claiming_bench(shop, inbox)
    with patch.object(inbox._engine, "transact", unavailable):
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                await deliver(bench)
        assert await inbox.get("m1") is None
    await bench.runner.renew()
    await bench.runner.inline.record_ended()
    assert (await inbox.get("m1")).state is DeliveryState.DONE
    assert (shop.runs, bench.counters.values["handled"]) == (["m1"], 1)


@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_a_body_of_another_type_does_not_run_it_again(backend: str) -> None:
    shop = Shop()

    async def handler(event: Any) -> None:
        shop.runs.append(event.webhook_id)

    async with administered(registry(handler), Storage__Backend=backend) as admin:
        store = admin.app.store
        with failing_ends(store):
            sent = delivery_request(signed(webhook_id="m1"))
            assert (await exchange(admin.app, sent)).status == 503
        other = delivery_request(signed(b'{"type":"no.handler","data":{}}', webhook_id="m1"))
        assert (await exchange(admin.app, other)).status == 200
        assert (await store.get("m1")).state is DeliveryState.DONE
        assert shop.runs == ["m1"]


@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_copies_that_wait_for_a_thread_meanwhile_do_not_run_it_again(backend: str) -> None:
    runs: list[str] = []
    statuses: list[int] = []
    may_end = threading.Event()

    def handler(event: Any) -> None:
        runs.append(event.webhook_id)
        may_end.wait(30)

    keys = {"Storage__Backend": backend, "Webhooks__Queue__Threads": 1}
    async with administered(registry(handler), **keys) as admin, trio.open_nursery() as nursery:

        async def deliver(webhook_id: str) -> None:
            sent = delivery_request(signed(webhook_id=webhook_id))
            statuses.append((await exchange(admin.app, sent)).status)

        async def has(count: int) -> bool:
            await trio.lowlevel.checkpoint()
            return len(statuses if may_end.is_set() else runs) == count

        nursery.start_soon(deliver, "other")
        await until(lambda: has(1))
        with failing_ends(admin.app.store):
            for _ in range(3):
                nursery.start_soon(deliver, "m1")
            await trio.testing.wait_all_tasks_blocked(0.05)
            may_end.set()
            await until(lambda: has(4))
        assert (statuses, runs) == ([503] * 4, ["other", "m1"])
        statuses.clear()
        for webhook_id in ("m1", "other"):
            await deliver(webhook_id)
        assert (statuses, runs) == ([200, 200], ["other", "m1"])


@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_a_process_that_ends_at_once_names_it(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()

    async def handler(event: Any) -> None:
        shop.runs.append(event.webhook_id)

    async with administered(registry(handler), Storage__Backend=backend) as admin:
        with failing_ends(admin.app.store):
            sent = delivery_request(signed(webhook_id="m1"))
            assert (await exchange(admin.app, sent)).status == 503
            await admin.app.runtime.receiver.leave()
        assert logged(caplog, "webhook.outcomes_unrecorded") == [["m1"]]


@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_a_receiver_records_all_once_the_store_answers(backend: str) -> None:
    shop = Shop()

    async def handler(event: Any) -> None:
        shop.runs.append(event.webhook_id)

    keys = [f"m{number}" for number in range(60)]
    async with administered(registry(handler), Storage__Backend=backend) as admin:
        store = admin.app.store
        with failing_ends(store):
            for key in keys:
                sent = delivery_request(signed(webhook_id=key))
                assert (await exchange(admin.app, sent)).status == 503

        async def all_done() -> bool:
            return (await store.counts()).get(DeliveryState.DONE) == len(keys)

        await until(all_done)
        assert shop.runs == keys
