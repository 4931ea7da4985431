"""``replication run``: the replicator under supervision, controlled by signals."""

import signal
from argparse import Namespace
from collections.abc import AsyncIterator

import trio

from ..base import logs
from ..config import Settings, unmet_needs
from ..config.gates import USE_REPLICATION
from ..errors import OptionsValidationError, Problem
from ..replication.binary_finder import find_replicator
from ..replication.pid_file_writer import hold_pid_file
from ..replication.supervisor import Supervisor
from ..storage.data_directory import create_data_directory, keep_files_private
from ..tenants.database_opener import databases_directory
from .daemon import begin_logs
from .settings_reader import read

_log = logs.get_logger("cli")


def run_replicator(arguments: Namespace) -> int:
    """Supervise the replicator until TERM or INT; return 0, or 128 + signal when forced.

    HUP reads the configuration again. The first TERM or INT lets it sync a last time, a second one
    ends it at once.

    Raises:
        SdkError: it could not start.
    """
    keep_files_private()
    loaded = read(arguments)
    settings = require_replication(loaded.require())
    begin_logs(loaded)
    options = settings.multi_tenant.file_db.replication
    find_replicator(options)
    directory = create_data_directory(databases_directory(settings))
    supervisor = Supervisor(options, directory)
    path = arguments.pid_file or options.replicator_pid_file_path
    return trio.run(_serve, supervisor, path)


def require_replication(settings: Settings) -> Settings:
    """Return the settings if they ask for replication.

    Raises:
        OptionsValidationError: ``UseReplication`` is false, or there are no tenants.
    """
    if not settings.multi_tenant.file_db.replication.use_replication:
        raise OptionsValidationError(
            [Problem(USE_REPLICATION, "is false, so nothing is replicated: set it to true")]
        )
    if unmet_needs(settings):
        raise OptionsValidationError(unmet_needs(settings))
    return settings


async def _serve(supervisor: Supervisor, pid_file: str) -> int:
    obedience = _Obedience(supervisor)
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # The pid file is written before the configuration is first read, so that a process that
    # writes the configuration afterwards can signal this one.
    with trio.open_signal_receiver(*watched) as arriving, hold_pid_file(pid_file):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obedience.watch, arriving)
            await supervisor.run()
            nursery.cancel_scope.cancel()
    return 0 if obedience.forced_by is None else 128 + obedience.forced_by


class _Obedience:
    """The requests of the signals so far."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._stopped = False
        self.forced_by: int | None = None

    async def watch(self, arriving: AsyncIterator[int]) -> None:
        """Obey signals as they arrive, until cancelled."""
        async for number in arriving:
            if number == signal.SIGHUP:
                self._supervisor.request_reload()
            elif not self._stopped:
                self._stopped = True
                _log.info("replication.stopping", signal=signal.Signals(number).name)
                self._supervisor.stop()
            else:
                self.forced_by = number
                _log.warning("replication.forced", signal=signal.Signals(number).name)
                self._supervisor.force()
