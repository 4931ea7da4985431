"""The common parts of the commands on replicas: settings, binary, tenant, and signals."""

import os
import signal
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ..config import Settings
from ..errors import OptionsValidationError, Problem, StoreUnavailableError, UnknownTenantError
from ..replication.binary_finder import find_replicator
from ..replication.manifest import unset_variables
from ..replication.replica_reader import ReplicaReader
from ..storage import open_store
from ..storage.tenant_records import Tenant
from ..tenants.identity import is_tenant_id
from ..tenants.service import TenantService
from .printer import say
from .store_opener import why_unreachable

T = TypeVar("T")

#: Exit status of a command that a signal ended, as a shell reports it.
_SIGNAL_BASE = 128


def open_reader(settings: Settings) -> ReplicaReader:
    """Return a reader of these settings' replicas.

    Raises:
        OptionsValidationError: replication is off, so its section means nothing.
        ReplicatorError: there is no binary.
    """
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        raise OptionsValidationError(
            [
                Problem(
                    "Sdk:MultiTenant:FileDb:Replication:UseReplication",
                    "is false, so there is no target to read replicas from: set it to true",
                )
            ]
        )
    binary = find_replicator(options)
    name_unset_variables(settings)
    return ReplicaReader(settings, binary=binary, environ=os.environ)


def name_unset_variables(settings: Settings) -> None:
    """Name the unset variables of the target's keys; a machine's role may replace them."""
    for each in unset_variables(settings.multi_tenant.file_db.replication, os.environ):
        say(f"warning: {each}: set it, unless this machine has a role that may use the target")


async def find_tenant(settings: Settings, key: str) -> tuple[str, Tenant | None]:
    """Return a tenant's id and the tenant; with an id, the tenant need not be known here.

    An id is enough where the store is lost, or the tenant was purged.

    Raises:
        UnknownTenantError: there is no tenant of this identifier.
        StoreUnavailableError: an identifier was given, and there is no store to look it up in.
    """
    missing = why_unreachable(settings)
    if missing is not None:
        await trio.lowlevel.checkpoint()
        if is_tenant_id(key):
            return key, None
        raise StoreUnavailableError(
            f"{missing}; without a store, name the tenant by its id (a UUID)"
        )
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        try:
            tenant = await TenantService(settings, store.tenants).get(key)
        except UnknownTenantError:
            if is_tenant_id(key):
                return key, None
            raise
    return tenant.id, tenant


def run_until_signal(work: Callable[[], Awaitable[T]]) -> tuple[int, T | None]:
    """Run ``work`` and return 0 and its result; a signal cancels it and gives its status.

    So a command that gets TERM cleans up as it does for an interrupt.
    """

    async def run() -> tuple[int, T | None]:
        result: T | None = None
        status = 0

        async def end_at_signal(*, task_status: trio.TaskStatus[None]) -> None:
            nonlocal status
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *_HANGUP) as signals:
                task_status.started()
                async for number in signals:
                    status = _SIGNAL_BASE + number
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            await nursery.start(end_at_signal)
            result = await work()
            nursery.cancel_scope.cancel()
        return status, result

    return trio.run(run)


_HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
