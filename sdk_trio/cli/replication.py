"""``replication render``: the replicator's configuration for the present tenants."""

import sys
import uuid
from argparse import Namespace
from pathlib import Path

import trio

from ..config import Settings
from ..config.gates import USE_REPLICATION
from ..errors import EXIT_FAILURE, OptionsValidationError, Problem, ReplicationError
from ..replication.database_finder import find_databases
from ..replication.manifest import TenantDatabaseFile
from ..replication.manifest_writer import ManifestWriter
from ..runtime.replication_runner import render_for
from ..storage import open_store
from ..tenants import TenantService
from ..tenants.database_opener import databases_directory
from .printer import say
from .settings_reader import load
from .upgrade import require_tenants


def render(arguments: Namespace) -> int:
    """Print the configuration, write it, or say whether the file is current.

    Raises:
        OptionsValidationError: ``UseReplication`` is false, so the section was not checked.
        TenantsDisabledError: there are no tenants.
        StorageError: the store cannot be read.
        ReplicationError: the file cannot be written, or the replicator would misread a path.
    """
    settings = load(arguments)
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        raise OptionsValidationError(
            [Problem(USE_REPLICATION, "is false, so nothing is replicated: set it to true")]
        )
    require_tenants(settings)
    databases = trio.run(_databases, settings)
    try:
        text = render_for(settings, databases)
    except ValueError as error:
        raise ReplicationError(str(error)) from error
    if arguments.check:
        return _check(Path(arguments.output or options.config_output_path), text)
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    written = ManifestWriter(Path(arguments.output)).write(text)
    say(f"{arguments.output} {'written' if written else 'is current'}: {_count(databases)}")
    return 0


def _check(file: Path, text: str) -> int:
    if ManifestWriter(file).is_current(text):
        say(f"{file} is current")
        return 0
    say(
        f"{file} is not current: 'replication render --output {file}' writes it; then the "
        "replicator has to reload or be restarted"
    )
    return EXIT_FAILURE


def _count(databases: list[TenantDatabaseFile]) -> str:
    return f"{len(databases)} database{'s' if len(databases) != 1 else ''}"


async def _databases(settings: Settings) -> list[TenantDatabaseFile]:
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        tenants = TenantService(settings, store.tenants)
        return await find_databases(tenants, databases_directory(settings))
