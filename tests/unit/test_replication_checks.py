"""Probes and replication: it never makes the process unready, and its faults are never hidden."""

import attrs
import pytest

from sdk_trio.replication.health import DatabaseHealth, HealthState, ReplicationHealth
from sdk_trio.replication.verification import VerificationState
from sdk_trio.runtime.admin import NAMED, check_replication, check_verification


@attrs.frozen
class Overseen:
    health: ReplicationHealth | None


@attrs.frozen
class Scheduled:
    state: VerificationState


def health(state):
    database = DatabaseHealth("/data/t.db", state, 40.0, 1.0, "it lags")
    return ReplicationHealth(state, 2.0, "1 of 1 lags", True, (database,))


@pytest.mark.parametrize(
    ("overseen", "degraded"),
    [
        (None, True),
        (Overseen(None), True),
        (Overseen(health(HealthState.HEALTHY)), False),
        (Overseen(health(HealthState.DEGRADED)), True),
        (Overseen(health(HealthState.UNHEALTHY)), True),
        (Overseen(health(HealthState.DISABLED)), False),
    ],
)
def test_a_lagging_replica_is_a_warning_only(overseen, degraded):
    check = check_replication(overseen)
    assert (check.name, check.ok, check.degraded) == ("replication", True, degraded)
    assert check.detail


def test_the_reason_is_reported():
    check = check_replication(Overseen(health(HealthState.UNHEALTHY)))
    assert check.detail == "Unhealthy: 1 of 1 lags"


@pytest.mark.parametrize("scheduled", [None, Scheduled(VerificationState(ran_at=1.0))])
def test_without_a_failed_verification_there_is_nothing_to_see(scheduled):
    check = check_verification(scheduled)
    assert (check.name, check.ok, check.degraded) == ("replicas", True, False)


def test_failed_verifications_name_the_tenants_and_stay_short():
    failed = {f"tenant-{number}": "a problem" for number in range(NAMED + 2)}
    check = check_verification(Scheduled(VerificationState(failed=failed)))
    assert (check.ok, check.degraded) == (True, True)
    assert "tenant-0" in check.detail
    assert f"tenant-{NAMED}" not in check.detail
    assert "2 more" in check.detail
    assert "a problem" not in check.detail
