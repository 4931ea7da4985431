"""Replication inside the runtime: watcher, supervised replicator, health check, verification.

They are siblings of the other parts in the runtime's nursery, and show their state as metrics
(docs/reference/metrics.md).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from ..base.logs import get_logger
from ..base.private_files import create_data_directory
from ..base.telemetry import Sample
from ..config import Settings
from ..replication.control import control_socket_path
from ..replication.health import HealthState, ReplicationHealth
from ..replication.health_check import HealthChecker, LagSurveyor
from ..replication.manifest import ManifestWriter
from ..replication.plan import SupervisorTimeouts
from ..replication.replica import ReplicaReader
from ..replication.running_replicator import Signaler
from ..replication.supervisor import Supervisor
from ..replication.verification import Verifier
from ..replication.verification_schedule import VerificationKeeper, VerificationScheduler
from ..replication.watch import (
    ManifestRenderer,
    Reloader,
    TenantList,
    WatchedTenants,
    Watcher,
    find_databases,
)
from ..storage.ports import Inbox
from ..tenants.databases import databases_directory
from ..webhooks.companion import Part

_log = get_logger("replication")


def sample_replication(health: ReplicationHealth | None) -> tuple[Sample, ...]:
    """Return the samples of the last check; none before it, or if checks are disabled.

    ``sdk_replication_lag_seconds`` is the largest lag of all databases, infinite while one was
    never in sync. ``sdk_replication_databases{state}`` is the number of databases in each state.
    """
    # No sample instead of a 0, which would look healthy to an alert on the lag.
    if health is None or health.state is HealthState.DISABLED or health.lag_seconds is None:
        return ()
    return (
        Sample("sdk_replication_lag_seconds", (), health.lag_seconds),
        *(
            Sample("sdk_replication_databases", (("state", state.value),), count)
            for state, count in health.counts.items()
        ),
    )


def make_scheduler(
    settings: Settings,
    tenants: TenantList,
    inbox: Inbox,
    *,
    clock: Callable[[], float],
    term: int | None = None,
) -> VerificationScheduler:
    """Return the scheduler that verifies the replicas of these settings' tenants.

    Args:
        settings: with ``UseReplication``.
        tenants: the tenants' service.
        inbox: keeps the outcome; open as long as the scheduler runs.
        clock: returns Unix seconds.
        term: the term of this leader; None: this is the only host.
    """
    verifier = Verifier(settings, ReplicaReader(settings), clock=clock)
    keeper = VerificationKeeper(verifier, inbox, clock=clock, term=term)
    return VerificationScheduler(settings, tenants, keeper, clock=clock)


def sample_verification(scheduler: VerificationScheduler | None) -> tuple[Sample, ...]:
    """Return ``sdk_replication_verified_age_seconds``; nothing before the first run without
    failures."""
    age = None if scheduler is None else scheduler.verified_age_seconds
    return () if age is None else (Sample("sdk_replication_verified_age_seconds", (), age),)


def build_watcher(
    settings: Settings, tenants: WatchedTenants, supervisor: Reloader | None = None
) -> Watcher:
    """Return the watcher of these settings.

    Args:
        settings: with ``UseReplication``.
        tenants: the tenants' service.
        supervisor: runs the replicator and is asked to reload; None: the process of the pid file
            gets a signal instead.
    """
    options = settings.multi_tenant.file_db.replication
    return Watcher(
        tenants,
        databases_directory(settings),
        render=ManifestRenderer(settings),
        writer=ManifestWriter(Path(options.config_output_path)),
        reloader=supervisor or Signaler(Path(options.replicator_pid_file_path)),
        window=options.auto_regenerate_debounce_window.total_seconds(),
    )


class ReplicationOverseer:
    """The watcher, the replicator where ``Supervise`` is true, and the health check.

    Args:
        settings: with ``UseReplication``.
        tenants: the tenants' service, which must be running.

    Raises:
        ReplicatorError: the control socket's path would be too long.
        StoreUnavailableError: the directory of the databases cannot be made.
    """

    def __init__(self, settings: Settings, tenants: WatchedTenants) -> None:
        self._settings = settings
        self._tenants = tenants
        self._directory = create_data_directory(databases_directory(settings)).absolute()
        options = settings.multi_tenant.file_db.replication
        self.supervisor: Supervisor | None = None
        if options.supervise:
            # The last sync of the replicator has the same time limit as the drain: an unreachable
            # target must not make the shutdown longer.
            stop = float(settings.webhooks.graceful_drain_timeout_seconds)
            patience = attrs.evolve(SupervisorTimeouts(), stop=stop)
            self.supervisor = Supervisor(
                options, self._directory, patience=patience, waits_for_reload=True
            )
        self._checker = HealthChecker(
            options,
            control_socket_path(str(self._directory)),
            wanted=self._wanted,
            failure=self._failure,
            reloading=self._reloading,
            # A supervised replicator has a control socket, which is more accurate than a listing of
            # the target.
            surveyor=None if options.supervise else LagSurveyor(settings),
        )

    @property
    def health(self) -> ReplicationHealth | None:
        """The result of the last check; None before the first one."""
        return self._checker.latest

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The metrics of the last check."""
        return sample_replication(self.health)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield the tasks of replication with their names, in the order in which they start.

        Each runs until it is cancelled. The watcher then ends at once. A supervised replicator
        syncs the databases once more and stops.
        """
        options = self._settings.multi_tenant.file_db.replication
        if self.supervisor is not None:
            # First, because it takes the lock of the databases: a second process fails here before
            # it writes anything.
            yield "the supervisor of the replicator", self.supervisor.run
        if self.supervisor is None and not options.auto_regenerate_on_tenant_change:
            _log.info(
                "replication.left_alone",
                detail="AutoRegenerateOnTenantChange is false: after a change of the tenants run "
                "'replication render --output FILE' and restart the replicator",
            )
        else:
            watcher = build_watcher(self._settings, self._tenants, self.supervisor)
            yield "the watcher of the tenants' databases", watcher.run
        yield "the health check of replication", self._checker.run

    def end_by(self, deadline: float) -> None:
        """Limit the last sync of a supervised replicator by a deadline, a Trio time."""
        if self.supervisor is not None:
            self.supervisor.end_by(deadline)

    def force(self) -> None:
        """Cut the stop of a supervised replicator short."""
        if self.supervisor is not None:
            self.supervisor.force()

    async def _wanted(self) -> Mapping[str, str]:
        found = await find_databases(self._tenants, self._directory)
        return {file.path: file.replica for file in found}

    def _failure(self) -> str | None:
        return None if self.supervisor is None else self.supervisor.failure

    def _reloading(self) -> bool:
        return self.supervisor is not None and self.supervisor.reloading
