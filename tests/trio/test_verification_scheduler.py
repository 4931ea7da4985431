"""The scheduled verification of replicas, and the state between two runs."""

import attrs
import pytest
import trio

from sdk_trio.config import Settings
from sdk_trio.errors import StoreLockedError, StoreUnavailableError
from sdk_trio.replication.verification import Verification, VerificationState
from sdk_trio.replication.verification_schedule import LOOK_SECONDS, VerificationScheduler

HOUR = 3600.0
START = 1_800_000_000.0


@attrs.define
class Keeper:
    """Remembers like the real one; ``fails`` are what its next runs raise."""

    clock: object
    state: VerificationState = attrs.Factory(VerificationState)
    fails: list = attrs.Factory(list)
    problem: str | None = None
    runs: list = attrs.Factory(list)

    async def read(self):
        await trio.lowlevel.checkpoint()
        return self.state

    async def verify_active(self, tenants, *, report):
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise self.fails.pop(0)
        self.runs.append(self.clock())
        result = Verification(
            tenant_id="t", identifier="acme", verified_at=self.clock(), problem=self.problem
        )
        report(result, 1, 1)
        self.state = self.state.after_run([result], now=self.clock())


def clock():
    return START + trio.current_time()


def scheduler(keeper, hours):
    key = "MultiTenant:FileDb:Replication:VerifyIntervalHours"
    settings = Settings.from_mapping({key: hours} if hours else {}, standalone=True, receiver=False)
    return VerificationScheduler(settings, None, keeper, clock=clock)


@pytest.fixture
def keeper():
    return Keeper(clock)


async def test_it_verifies_once_replication_is_up_and_then_in_its_interval(
    autojump_clock, nursery, keeper
):
    made = scheduler(keeper, 6)
    assert made.verified_age_seconds is None
    nursery.start_soon(made.run)
    await trio.sleep(13 * HOUR)
    assert len(keeper.runs) == 3
    assert LOOK_SECONDS <= keeper.runs[0] - START <= 2 * LOOK_SECONDS
    assert keeper.runs[1] - keeper.runs[0] == pytest.approx(6 * HOUR, abs=LOOK_SECONDS)
    assert made.verified_age_seconds == pytest.approx(HOUR, abs=3 * LOOK_SECONDS)
    nursery.cancel_scope.cancel()


async def test_verifications_by_commands_count(autojump_clock, nursery, keeper):
    keeper.state = VerificationState(START - HOUR, START - HOUR)
    made = scheduler(keeper, 6)
    nursery.start_soon(made.run)
    await trio.sleep(4.9 * HOUR)
    assert keeper.runs == []
    keeper.state = VerificationState(clock(), clock())
    await trio.sleep(5.9 * HOUR)
    assert keeper.runs == []
    nursery.cancel_scope.cancel()


async def test_without_an_interval_it_only_reports_the_known_state(autojump_clock, nursery, keeper):
    keeper.state = VerificationState(START, START - HOUR, {"t": "it lags"})
    made = scheduler(keeper, None)
    nursery.start_soon(made.run)
    await trio.sleep(100 * HOUR)
    assert keeper.runs == []
    assert made.state.failed == {"t": "it lags"}
    assert made.verified_age_seconds == pytest.approx(101 * HOUR)
    nursery.cancel_scope.cancel()


async def test_a_failure_is_known_and_logged_and_ages(autojump_clock, nursery, keeper, caplog):
    made = scheduler(keeper, 1)
    nursery.start_soon(made.run)
    await trio.sleep(HOUR / 2)
    keeper.problem = "it is damaged"
    await trio.sleep(3 * HOUR)
    assert made.state.failed == {"t": "it is damaged"}
    assert made.verified_age_seconds == pytest.approx(3.5 * HOUR, abs=2 * LOOK_SECONDS)
    nursery.cancel_scope.cancel()
    said = [record.sdk for record in caplog.records if hasattr(record, "sdk")]
    failures = [fields for event, fields in said if event == "replication.verification_failed"]
    assert failures
    assert failures[0]["tenant"] == "acme"
    assert failures[0]["problem"] == "it is damaged"


@pytest.mark.parametrize("error", [StoreUnavailableError("full"), StoreLockedError("a command")])
async def test_failed_verifications_are_retried_soon(autojump_clock, nursery, keeper, error):
    keeper.fails = [error]
    nursery.start_soon(scheduler(keeper, 24).run)
    await trio.sleep(2.5 * LOOK_SECONDS)
    assert len(keeper.runs) == 1
    nursery.cancel_scope.cancel()


async def test_a_clock_that_is_set_back_does_not_put_it_off(autojump_clock, nursery, keeper):
    keeper.state = VerificationState(START + 1000 * HOUR, START)
    nursery.start_soon(scheduler(keeper, 6).run)
    await trio.sleep(1.5 * LOOK_SECONDS)
    assert len(keeper.runs) == 1
    nursery.cancel_scope.cancel()


async def test_after_a_failure_it_does_not_wait_for_days(autojump_clock, nursery, keeper):
    keeper.problem = "it lags"
    nursery.start_soon(scheduler(keeper, 168).run)
    await trio.sleep(2.5 * HOUR)
    assert len(keeper.runs) == 3
    keeper.problem = None
    await trio.sleep(100 * HOUR)
    assert len(keeper.runs) == 4
    nursery.cancel_scope.cancel()
