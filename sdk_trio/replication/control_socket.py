"""Where the replicator's control socket is, and what is said over it. Pure.

Decoding is lenient: fields that a later release adds are ignored, one that it drops is None.
"""

import posixpath
from datetime import datetime
from typing import Final, TypeVar

import attrs
import msgspec

from ..errors import ReplicatorError

T = TypeVar("T")

#: The socket's name in the directory of the databases.
SOCKET_NAME: Final = "replicator.sock"

#: A unix socket's path has a bound: 108 bytes with the last zero on Linux, 104 elsewhere.
LONGEST_SOCKET_PATH: Final = 103


@attrs.frozen
class ReplicatedDatabase:
    """A database as the replicator reports it.

    ``status`` is ``replicating``, ``open`` or ``stopped``; ``last_sync_at`` is when it was last in
    step with its replica, in Unix seconds; None: never since the replicator started.
    """

    path: str
    status: str
    last_sync_at: float | None


@attrs.frozen
class ReplicatorInfo:
    """The replicator itself: its version, process id, and how many databases it has."""

    version: str
    pid: int
    database_count: int


@attrs.frozen
class SyncResult:
    """How a forced sync ended: ``txid`` is the database's position, the other the replica's."""

    status: str
    txid: int | None
    replicated_txid: int | None


def control_socket_path(directory: str) -> str:
    """Return where the control socket of the replicator of the databases in ``directory`` is.

    Args:
        directory: an absolute path.

    Raises:
        ReplicatorError: the path is longer than a socket's may be.
    """
    path = posixpath.join(directory, SOCKET_NAME)
    length = len(path.encode("utf-8", "surrogateescape"))
    if length > LONGEST_SOCKET_PATH:
        raise ReplicatorError(
            f"the replicator's control socket would be {path}, whose {length} bytes are more than "
            f"the {LONGEST_SOCKET_PATH} that a socket's path may have: set "
            "Sdk:MultiTenant:FileDb:Directory to a shorter path"
        )
    return path


class _Database(msgspec.Struct):
    path: str
    status: str = ""
    last_sync_at: datetime | None = None


class _List(msgspec.Struct):
    databases: list[_Database]


class _Info(msgspec.Struct):
    pid: int
    version: str = ""
    database_count: int = 0


class _Sync(msgspec.Struct):
    status: str = ""
    txid: int | None = None
    replicated_txid: int | None = None


class _Error(msgspec.Struct):
    error: str = ""


def read_list(body: bytes) -> tuple[ReplicatedDatabase, ...]:
    """Read the answer of ``GET /list``.

    Raises:
        ReplicatorError: it is no such answer.
    """
    return tuple(
        ReplicatedDatabase(
            each.path,
            each.status,
            None if each.last_sync_at is None else each.last_sync_at.timestamp(),
        )
        for each in _decoded(body, _List).databases
    )


def read_info(body: bytes) -> ReplicatorInfo:
    """Read the answer of ``GET /info``.

    Raises:
        ReplicatorError: it is no such answer.
    """
    found = _decoded(body, _Info)
    return ReplicatorInfo(found.version, found.pid, found.database_count)


def read_sync(body: bytes) -> SyncResult:
    """Read the answer of ``POST /sync``.

    Raises:
        ReplicatorError: it is no such answer.
    """
    found = _decoded(body, _Sync)
    return SyncResult(found.status, found.txid, found.replicated_txid)


def read_error(body: bytes) -> str:
    """Return why the replicator refused, in its own words; never raises."""
    try:
        return msgspec.json.decode(body, type=_Error).error or "without a reason"
    except msgspec.MsgspecError:
        return "without a reason"


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReplicatorError(f"the replicator's answer makes no sense: {error}") from error
