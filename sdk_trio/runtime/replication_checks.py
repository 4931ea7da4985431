"""Replication's part in the probes of the admin address. Pure.

A replica that lags never makes the process unready: a receiver that refused deliveries because its
backup is behind would turn a risk into a loss. It is degraded, which ``/healthz``, the metrics and
the alerts show.
"""

from typing import Protocol

from ..base.metrics import Check
from ..replication.health import HealthState, ReplicationHealth
from ..replication.verification import VerificationState

#: Tenants that a check names; it counts the others.
NAMED = 5


class Overseen(Protocol):
    """The part of replication that the check reads."""

    @property
    def health(self) -> ReplicationHealth | None:
        """Return the last result, None before the first look."""
        ...


class Scheduled(Protocol):
    """The part of the verification that the check reads."""

    @property
    def state(self) -> VerificationState:
        """Return the results of the runs so far."""
        ...


def check_replication(overseen: Overseen | None) -> Check:
    """Return the state of replication; before the first look it is degraded, never healthy."""
    health = None if overseen is None else overseen.health
    if health is None:
        return Check("replication", True, "nobody has looked yet", degraded=True)
    if health.state is HealthState.DISABLED:
        return Check("replication", True, health.reason)
    degraded = health.state is not HealthState.HEALTHY
    return Check("replication", True, f"{health.state}: {health.reason}", degraded=degraded)


def check_verification(scheduled: Scheduled | None) -> Check:
    """Return whether the last verification of each tenant's replica was good."""
    failed = {} if scheduled is None else scheduled.state.failed
    if not failed:
        return Check("replicas", True, "no verification has failed")
    names = ", ".join(sorted(failed)[:NAMED])
    more = "" if len(failed) <= NAMED else f" and {len(failed) - NAMED} more"
    return Check(
        "replicas",
        True,
        f"the replicas of {len(failed)} tenants cannot be restored, or are not what they should "
        f"be: {names}{more}; see 'replication verify'",
        degraded=True,
    )
