"""Replication inside the runtime: the watcher, the supervised replicator, and the health check."""

from collections.abc import Collection

import attrs
import trio

from ..base.metrics import Sample
from ..config import Settings
from ..replication.control_socket import control_socket_path
from ..replication.database_finder import find_databases
from ..replication.health import ReplicationHealth
from ..replication.health_checker import HealthChecker
from ..replication.lag_surveyor import LagSurveyor
from ..replication.restarts import Patience
from ..replication.supervisor import Supervisor
from ..replication.watcher import WatchedTenants
from ..storage.data_directory import create_data_directory
from ..tenants.database_opener import databases_directory
from .replication_runner import run_replication
from .replication_samples import sample_replication


class ReplicationOverseer:
    """Runs the watcher, the replicator where ``Supervise`` is true, and the health check.

    Args:
        settings: with ``UseReplication``.
        tenants: the running service of tenants.

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
            # The last sync of the replicator has the same bound as the drain: a target that is away
            # must not hold the shutdown longer.
            stop = float(settings.webhooks.graceful_drain_timeout_seconds)
            patience = attrs.evolve(Patience(), stop=stop)
            self.supervisor = Supervisor(
                options, self._directory, patience=patience, told_to_begin=True
            )
        self._checker = HealthChecker(
            options,
            control_socket_path(str(self._directory)),
            wanted=self._wanted,
            failure=self._failure,
            reloading=self._reloading,
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

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the replicator at the tenants' databases until cancelled.

        A supervised replicator is then stopped in order, with a last sync.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(run_replication, self._settings, self._tenants, self.supervisor)
            task_status.started()
            nursery.start_soon(self._checker.run)

    def end_by(self, deadline: float) -> None:
        """Bound the last sync of a supervised replicator by the drain's deadline, a Trio time."""
        if self.supervisor is not None:
            self.supervisor.end_by(deadline)

    def force(self) -> None:
        """Cut the stop of a supervised replicator short."""
        if self.supervisor is not None:
            self.supervisor.force()

    async def _wanted(self) -> Collection[str]:
        return [file.path for file in await find_databases(self._tenants, self._directory)]

    def _failure(self) -> str | None:
        return None if self.supervisor is None else self.supervisor.failure

    def _reloading(self) -> bool:
        return self.supervisor is not None and self.supervisor.reloading
