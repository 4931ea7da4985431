"""The state of replication as metrics (docs/reference/metrics.md). Pure."""

from ..base.metrics import Sample
from ..replication.health import HealthState, ReplicationHealth


def sample_replication(health: ReplicationHealth | None) -> tuple[Sample, ...]:
    """Return the samples of the last check; none before it, or where checks are disabled.

    ``sdk_replication_lag_seconds`` is the largest lag of all databases, infinite while one was
    never in step; ``sdk_replication_databases{state}`` is how many are in which state.
    """
    if health is None or health.state is HealthState.DISABLED or health.lag_seconds is None:
        return ()
    return (
        Sample("sdk_replication_lag_seconds", (), health.lag_seconds),
        *(
            Sample("sdk_replication_databases", (("state", state.value),), count)
            for state, count in health.counts.items()
        ),
    )
