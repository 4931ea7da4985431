"""The databases to replicate: those of active tenants whose file is there, and which file that is.

A replicator keeps a file that it has opened, also when another one takes its name. So each file has
an identity: its inode and the time of its creation. The inode alone is not enough, because a file
system gives it to the next file as soon as it is free. Writes, checkpoints and ``VACUUM`` change
neither. Python reads the time of creation on macOS and Windows only, so on Linux ``statx`` is
called.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from ..errors import ReplicationError
from ..records.tenants import Tenant, TenantStatus
from .manifest import TenantDatabaseFile

# linux/fcntl.h and linux/stat.h
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_BTIME_OFFSET: Final = 0x50

_PAGE = 500
_SUFFIX = ".db"


def read_identity(path: str, inode: int) -> str:
    """Return the identity of a file; blocks for some microseconds.

    Args:
        path: the file's; a link is not followed.
        inode: its number.

    Returns:
        Digits and one hyphen. Where the file system keeps no creation time, the number alone.

    Raises:
        OSError: it is gone.
    """
    return f"{inode}-{_created(path) or 0:x}"


def _find_statx() -> Callable[..., Any] | None:
    try:
        return ctypes.CDLL(None, use_errno=True).statx
    except (OSError, TypeError, AttributeError):
        return None


_statx = _find_statx()


def _created(path: str) -> int | None:
    """Return the time of a file's creation in nanoseconds; None if the system does not keep it."""
    if _statx is None:
        found = os.stat(path, follow_symlinks=False)
        seconds = getattr(found, "st_birthtime", None)
        return None if seconds is None else int(seconds * 1_000_000_000)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, answer):
        number = ctypes.get_errno()
        if os.path.lexists(path):
            return None  # a kernel without this call
        raise OSError(number, os.strerror(number), path)
    (mask,) = struct.unpack_from("=I", answer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else None


class TenantList(Protocol):
    """The part of the tenants' service that is used here."""

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

    Links are left out: two names of one database would be replicated twice, which damages the
    replica. One scan of 5000 databases with their logs takes 50 ms.

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
