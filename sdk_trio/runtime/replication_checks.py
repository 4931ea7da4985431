"""What probes say of replication (contracts 7). Pure.

A replica that lags never makes the process unready: a receiver that turned deliveries away
because its backup is behind would add a loss to a risk. It is degraded, which ``/healthz``, the
metrics and the alerts show.
"""

from typing import Protocol

from ..base.metrics import Check
from ..replication.health import HealthState, ReplicationHealth
from ..replication.verification import VerificationState

#: How many tenants a check names.
NAMED = 5


class Overseen(Protocol):
    """What is looked at of replication."""

    @property
    def health(self) -> ReplicationHealth | None:
        """Return what was found last, None before the first look."""
        ...


class Scheduled(Protocol):
    """What is looked at of the verification."""

    @property
    def state(self) -> VerificationState:
        """Return what is remembered of the runs so far."""
        ...


def check_replication(overseen: Overseen | None) -> Check:
    """Return how replication is; without a sample it is never well."""
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
