"""Wiring of the scheduled verification of replicas, and its metric."""

from collections.abc import Callable

from ..base.metrics import Sample
from ..config import Settings
from ..replication.database_finder import TenantList
from ..replication.replica_reader import ReplicaReader
from ..replication.verification_keeper import VerificationKeeper
from ..replication.verification_scheduler import VerificationScheduler
from ..replication.verifier import Verifier
from ..storage.ports import Inbox


def make_scheduler(
    settings: Settings, tenants: TenantList, inbox: Inbox, *, clock: Callable[[], float]
) -> VerificationScheduler:
    """Return the scheduler that verifies the replicas of these settings' tenants.

    Args:
        settings: with ``UseReplication``.
        tenants: the tenants' service.
        inbox: keeps the outcome; open as long as the scheduler runs.
        clock: returns Unix seconds.
    """
    verifier = Verifier(settings, ReplicaReader(settings), clock=clock)
    keeper = VerificationKeeper(verifier, inbox, clock=clock)
    return VerificationScheduler(settings, tenants, keeper, clock=clock)


def sample_verification(scheduler: VerificationScheduler | None) -> tuple[Sample, ...]:
    """Return ``sdk_replication_verified_age_seconds``; nothing before the first good run."""
    age = None if scheduler is None else scheduler.verified_age_seconds
    return () if age is None else (Sample("sdk_replication_verified_age_seconds", (), age),)
