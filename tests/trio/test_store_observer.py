"""The observer that reads the store for probes and metrics: its interval, and its reports of
failures."""

import attrs
import pytest
import trio
import trio.testing
from support.deliveries import arrival, memory_inbox

from sdk_trio.admin.access import Pacer
from sdk_trio.admin.status import (
    COUNTING_SHARE,
    FRESH_SECONDS,
    PATIENCE_SECONDS,
    STALLED_SECONDS,
    StoreObserver,
)
from sdk_trio.errors import NotRunningError, StoreUnavailableError
from sdk_trio.records.tenants import TenantStatus


@attrs.define
class Store:
    """An inbox that counts how often it is asked, and can be slow or broken."""

    inbox: object = attrs.Factory(memory_inbox)
    writes: int = 0
    counts_made: int = 0
    write_seconds: float = 0.0
    count_seconds: float = 0.0
    fault: Exception | None = None
    lost: str | None = None

    def stores(self):
        return self, self.tenants

    async def tenants(self):
        await trio.lowlevel.checkpoint()
        return {TenantStatus.ACTIVE: 3}

    async def write_checkpoint(self, name, value):
        self.writes += 1
        await trio.sleep(self.write_seconds)
        if self.fault is not None:
            raise self.fault
        await self.inbox.write_checkpoint(name, value)

    async def counts(self):
        self.counts_made += 1
        await trio.sleep(self.count_seconds)
        return await self.inbox.counts()

    async def oldest_waiting(self):
        return await self.inbox.oldest_waiting()

    async def clock_offset(self):
        return await self.inbox.clock_offset()

    async def expired_leases(self, *, before):
        return await self.inbox.expired_leases(before=before)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
async def observer(store, nursery, autojump_clock):
    observer = StoreObserver(store.stores, clock=trio.current_time)
    nursery.start_soon(observer.run)
    return observer


async def test_without_requests_nothing_is_queried(store, observer, autojump_clock):
    await trio.sleep(1000)
    assert (store.writes, store.counts_made) == (0, 0)


async def test_requests_within_some_seconds_share_one_query(store, observer, autojump_clock):
    async with trio.open_nursery() as crowd:
        for _ in range(50):
            crowd.start_soon(observer.wait_for_check)
            crowd.start_soon(observer.wait_for_figures)
    assert (store.writes, store.counts_made) == (1, 1)
    assert observer.check().ok
    await trio.sleep(FRESH_SECONDS - 0.5)
    await observer.wait_for_check()
    assert store.writes == 1
    await trio.sleep(1)
    await observer.wait_for_check()
    assert store.writes == 2


async def test_slow_counts_are_rarely_repeated(store, observer, autojump_clock):
    store.count_seconds = 4.0
    begun = trio.current_time()
    for _ in range(1000):
        await observer.wait_for_figures()
        await trio.sleep(1)
    took = trio.current_time() - begun
    assert store.counts_made * store.count_seconds <= took * COUNTING_SHARE * 1.1
    assert store.counts_made > 5


async def test_a_request_waits_a_bounded_time_for_a_slow_store(store, observer, autojump_clock):
    store.write_seconds = STALLED_SECONDS + 3
    begun = trio.current_time()
    await observer.wait_for_check()
    assert trio.current_time() - begun == pytest.approx(PATIENCE_SECONDS)
    await trio.sleep(STALLED_SECONDS)
    check = observer.check()
    assert not check.ok
    assert "has not answered" in check.detail
    await trio.sleep(10)
    assert observer.check().ok


async def test_a_slow_write_alone_does_not_change_the_reports(store, observer, autojump_clock):
    await observer.wait_for_check()
    store.write_seconds = STALLED_SECONDS - 0.1
    await trio.sleep(FRESH_SECONDS)
    for _ in range(20):
        await observer.wait_for_check()
        assert observer.check().ok


async def test_a_fault_is_reported_at_once_and_forgotten_once_it_is_over(
    store, observer, autojump_clock
):
    await observer.wait_for_check()
    store.fault = StoreUnavailableError("the disk is full")
    await trio.sleep(FRESH_SECONDS)
    begun = trio.current_time()
    await observer.wait_for_check()
    assert trio.current_time() - begun < PATIENCE_SECONDS
    assert (observer.check().ok, observer.check().detail) == (False, "the disk is full")
    store.fault = None
    await observer.wait_for_check()
    assert observer.check().ok


async def test_a_store_that_is_not_open_is_no_fault_of_the_observer(store, nursery, autojump_clock):
    opened = False

    def stores():
        if not opened:
            raise NotRunningError("the store is not open")
        return store.stores()

    observer = StoreObserver(stores, clock=trio.current_time)
    nursery.start_soon(observer.run)
    await observer.wait_for_check()
    assert observer.check().detail == "the store is not open"
    await observer.wait_for_figures()
    assert list(observer.samples()) == []
    opened = True
    await trio.sleep(1)
    await observer.wait_for_check()
    await observer.wait_for_figures()
    assert observer.check().ok
    values = {(s.name, *(v for _, v in s.labels)): s.value for s in observer.samples()}
    assert values["sdk_tenants", "Active"] == 3
    assert values["sdk_inbox_events", "done"] == 0


async def test_leases_that_no_process_takes_over_are_degraded_and_stay_ready(autojump_clock):
    inbox = memory_inbox(owner="gone")
    begun = trio.current_time()
    await inbox.accept(arrival(now=begun).delivery, leased=True)
    observer = StoreObserver(lambda: (inbox, None), clock=trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(observer.run)
        assert observer.check_leases().ok
        for seconds, overdue in ((0, 0), (75 + 20, 1)):
            await trio.sleep(seconds)
            await observer.wait_for_figures()
            check = observer.check_leases()
            assert (check.ok, check.degraded) == (True, overdue > 0), check
            values = {sample.name: sample.value for sample in observer.samples()}
            assert values["sdk_leases_expired"] == overdue
        nursery.cancel_scope.cancel()


async def test_waiting_is_a_checkpoint_even_when_nothing_has_to_be_waited_for(
    observer, autojump_clock
):
    await observer.wait_for_check()
    await observer.wait_for_figures()
    with trio.testing.assert_checkpoints():
        await observer.wait_for_check()
    with trio.testing.assert_checkpoints():
        await observer.wait_for_figures()


async def test_a_pacer_lets_a_burst_pass_and_then_its_pace(autojump_clock):
    pacer = Pacer(per_second=10, burst=5)
    begun = trio.current_time()
    for _ in range(5):
        await pacer.wait_for_slot()
    assert trio.current_time() == begun
    async with trio.open_nursery() as crowd:
        for _ in range(20):
            crowd.start_soon(pacer.wait_for_slot)
    assert trio.current_time() - begun == pytest.approx(2.0)
    await trio.sleep(100)
    begun = trio.current_time()
    for _ in range(6):
        await pacer.wait_for_slot()
    assert trio.current_time() - begun == pytest.approx(0.1)
