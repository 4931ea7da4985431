"""Wiring of replication for a running program: watcher, renderer, and whoever is told to reload."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import trio

from ..base.logs import get_logger
from ..config import Settings
from ..replication.control_socket import control_socket_path
from ..replication.manifest import TenantDatabaseFile, is_large_fleet, render_manifest
from ..replication.manifest_writer import ManifestWriter
from ..replication.ports import Reloader
from ..replication.signaler import Signaler
from ..replication.watcher import WatchedTenants, Watcher
from ..tenants.database_opener import databases_directory

_log = get_logger("replication")

#: Sync interval that the warning about a large fleet suggests, in seconds: each busy database makes
#: a request to the target every interval, and object stores bill them.
_FLEET_SYNC_SECONDS = 10


class Supervisor(Reloader, Protocol):
    """A reloader that runs the replicator itself."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the replicator until cancelled."""
        ...


async def run_replication(
    settings: Settings,
    tenants: WatchedTenants,
    supervisor: Supervisor | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the replicator at the active tenants' databases until cancelled.

    Args:
        settings: with ``UseReplication``. With ``AutoRegenerateOnTenantChange`` false and without a
            supervisor it only logs that the operator renders the configuration.
        tenants: the running service of tenants.
        supervisor: runs the replicator; None: the operator runs it, and it gets a signal.

    If it is cancelled, the watcher ends first, so that a supervised replicator does its last sync
    with the databases that it has.
    """
    options = settings.multi_tenant.file_db.replication
    if supervisor is None and not options.auto_regenerate_on_tenant_change:
        _log.info(
            "replication.left_alone",
            detail="AutoRegenerateOnTenantChange is false: after a change of the tenants run "
            "'replication render --output FILE' and restart the replicator",
        )
        task_status.started()
        await trio.sleep_forever()
    watcher = build_watcher(settings, tenants, supervisor)
    async with trio.open_nursery() as nursery:
        if supervisor is not None:
            await nursery.start(supervisor.run)
        await nursery.start(watcher.run)
        task_status.started()


def build_watcher(
    settings: Settings, tenants: WatchedTenants, supervisor: Supervisor | None = None
) -> Watcher:
    """Return the watcher of these settings.

    Args:
        settings: with ``UseReplication``.
        tenants: the tenants' service.
        supervisor: runs the replicator and is asked to reload; None: the process of the pid file
            gets a signal instead.
    """
    options = settings.multi_tenant.file_db.replication
    reloader: Reloader = supervisor or Signaler(Path(options.replicator_pid_file_path))
    return Watcher(
        tenants,
        databases_directory(settings),
        render=_Renderer(settings),
        writer=ManifestWriter(Path(options.config_output_path)),
        reloader=reloader,
        window=options.auto_regenerate_debounce_window.total_seconds(),
    )


class _Renderer:
    """Renders manifests, and warns once of a fleet that is large for its sync interval."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._warned = False

    def __call__(self, databases: Sequence[TenantDatabaseFile]) -> str:
        options = self._settings.multi_tenant.file_db.replication
        sync = options.sync_interval_seconds
        costly = is_large_fleet(options, len(databases)) and sync < _FLEET_SYNC_SECONDS
        if costly and not self._warned:
            self._warned = True
            _log.warning(
                "replication.fleet_is_large",
                databases=len(databases),
                detail=f"each busy database makes a request every {sync} s: SyncIntervalSeconds of "
                f"{_FLEET_SYNC_SECONDS} or more costs less",
            )
        return render_for(self._settings, databases)


def render_for(settings: Settings, databases: Sequence[TenantDatabaseFile]) -> str:
    """Return the manifest of these databases, with the control socket that reports their lag.

    Args:
        settings: with ``UseReplication``; relative paths start in the current directory.
        databases: those of the active tenants.

    Raises:
        ReplicatorError: the socket's path would be too long.
        ValueError: as of :func:`~sdk_trio.replication.manifest.render_manifest`.
    """
    options = settings.multi_tenant.file_db.replication
    directory = str(databases_directory(settings).absolute())
    return render_manifest(
        options,
        databases,
        working_directory=os.getcwd(),
        socket_path=control_socket_path(directory),
    )
