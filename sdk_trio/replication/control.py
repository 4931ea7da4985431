"""The replicator's control socket: its path, its messages, and a client.

The replicator answers on a unix socket and on a loopback port, a few times a minute; each query has
its own connection. A pool, redirects and the like are not needed, and would load httpx at every
start. Decoding is lenient: a field that a later release adds is ignored, a dropped one is None.
"""

import posixpath
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

import attrs
import h11
import msgspec
import trio

from ..base import opener
from ..errors import ReplicatorError

#: Bytes of one read.
_PIECE_BYTES = 65_536

T = TypeVar("T")

#: The socket's name in the directory of the databases.
SOCKET_NAME: Final = "replicator.sock"

#: The longest path of a unix socket: sun_path has 108 bytes on Linux and 104 elsewhere, with the
#: zero at its end.
LONGEST_SOCKET_PATH: Final = 103

#: Time for an ordinary answer, in seconds.
ANSWER_SECONDS = 5.0

#: The longest answer, in bytes: the list of some 300,000 databases.
MAX_ANSWER_BYTES = 64 * 1024 * 1024

_OK = 200


@attrs.frozen
class LocalAnswer:
    """A complete answer: its status, and its body."""

    status: int
    body: bytes


async def ask_local(
    connect: Callable[[], Awaitable[trio.abc.Stream]],
    target: str,
    *,
    body: bytes | None = None,
    seconds: float,
    max_bytes: int,
    where: str,
) -> LocalAnswer:
    """Request ``target`` and return the answer, whatever its status.

    Args:
        connect: opens the connection.
        target: the path of the request.
        body: JSON to post; None: the request is a GET.
        seconds: time limit of the whole exchange.
        max_bytes: the longest body of an answer.
        where: the server's address, for messages.

    Raises:
        ReplicatorError: no connection, no complete answer in time, or a too long one.

    If it is cancelled, it closes the connection.
    """
    try:
        with trio.fail_after(seconds):
            return await _ask(await connect(), target, body, max_bytes)
    except trio.TooSlowError:
        reason = f"no answer within {seconds:g} s"
    except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError, _TooLongError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise ReplicatorError(f"the replicator at {where} cannot be queried: {reason}")


class _TooLongError(Exception):
    """The body is longer than its bound."""


async def _ask(
    stream: trio.abc.Stream, target: str, body: bytes | None, max_bytes: int
) -> LocalAnswer:
    connection = h11.Connection(h11.CLIENT)
    # Closed by both sides at the end, so an answer without a length ends with the connection.
    headers = [("host", "localhost"), ("connection", "close")]
    if body is not None:
        headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
    request = h11.Request(method="GET" if body is None else "POST", target=target, headers=headers)
    async with stream:
        parts = [connection.send(request)]
        if body is not None:
            parts.append(connection.send(h11.Data(data=body)))
        parts.append(connection.send(h11.EndOfMessage()))
        await stream.send_all(b"".join(part or b"" for part in parts))
        status, found = 0, bytearray()
        while True:  # noqa: ASYNC913 - each round reads, or uses up what was read
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(_PIECE_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                found += event.data
                # Any program of this machine may listen on a port that the replicator has freed.
                if len(found) > max_bytes:
                    raise _TooLongError(f"its answer is longer than {max_bytes} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return LocalAnswer(status, bytes(found))
            elif isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("the connection ended before the answer")


@attrs.frozen
class ReplicatedDatabase:
    """A database as the replicator reports it.

    ``status`` is ``replicating``, ``open`` or ``stopped``. ``last_sync_at`` is the time at which it
    was last in sync with its replica, in Unix seconds; None: never since the replicator started.
    """

    path: str
    status: str
    last_sync_at: float | None


@attrs.frozen
class ReplicatorInfo:
    """The replicator itself: its version, process id, and the number of its databases."""

    version: str
    pid: int
    database_count: int


@attrs.frozen
class SyncResult:
    """The result of a forced sync: ``txid`` is the database's position, ``replicated`` the
    replica's."""

    status: str
    txid: int | None
    replicated_txid: int | None


def control_socket_path(directory: str) -> str:
    """Return the path of the control socket for the databases in ``directory``.

    Args:
        directory: an absolute path.

    Raises:
        ReplicatorError: the path is longer than a socket's may be.
    """
    path = posixpath.join(directory, SOCKET_NAME)
    length = len(path.encode("utf-8", "surrogateescape"))
    if length > LONGEST_SOCKET_PATH:
        raise ReplicatorError(
            f"the replicator's control socket path {path} has {length} bytes, more than "
            f"the {LONGEST_SOCKET_PATH} that a socket's path may have: set "
            "Sdk:MultiTenant:FileDb:Directory to a shorter path"
        )
    return path


# Only the fields that are used, each with a default where a release may leave it out.
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
        ReplicatorError: it is not such an answer.
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
        ReplicatorError: it is not such an answer.
    """
    found = _decoded(body, _Info)
    return ReplicatorInfo(found.version, found.pid, found.database_count)


def read_sync(body: bytes) -> SyncResult:
    """Read the answer of ``POST /sync``.

    Raises:
        ReplicatorError: it is not such an answer.
    """
    found = _decoded(body, _Sync)
    return SyncResult(found.status, found.txid, found.replicated_txid)


def read_error(body: bytes) -> str:
    """Return the replicator's reason for a refusal; never raises."""
    try:
        return msgspec.json.decode(body, type=_Error).error or "without a reason"
    except msgspec.MsgspecError:
        return "without a reason"


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReplicatorError(f"the replicator's answer is invalid: {error}") from error


class ControlClient:
    """The control socket at ``socket_path``; each query has its own connection.

    Every method raises :class:`~sdk_trio.errors.ReplicatorError` without a connection, without a
    complete answer in time, and for a refusal or an unreadable answer. Cancellation closes the
    connection; the replicator may still finish the work.
    """

    def __init__(self, socket_path: str, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.socket_path = socket_path
        self._seconds = answer_seconds

    async def list_databases(self) -> tuple[ReplicatedDatabase, ...]:
        """Return every database that it replicates, with the time of its last sync."""
        return read_list(await self._ask("/list", None, self._seconds))

    async def info(self) -> ReplicatorInfo:
        """Return its version and process id."""
        return read_info(await self._ask("/info", None, self._seconds))

    async def answers(self) -> bool:
        """Return whether a replicator answers at all.

        If its target was unavailable at its start, it answers this query and lists no databases.
        """
        try:
            await self.info()
        except ReplicatorError:
            await trio.lowlevel.checkpoint()
            return False
        return True

    async def sync(self, path: str, *, wait: bool = True, seconds: int = 30) -> SyncResult:
        """Sync one database now; with ``wait``, return only when the target has it.

        Args:
            path: the database's, as the configuration names it.
            wait: until the target has all of it; otherwise only until it is in the local copy.
            seconds: time limit of the sync.
        """
        # It ends the sync itself after that time and reports it; our limit is later, so that its
        # answer arrives.
        question = {"path": path, "wait": wait, "timeout": seconds}
        return read_sync(await self._ask("/sync", question, seconds + self._seconds))

    async def register(self, path: str, replica_url: str) -> None:
        """Add a database with a target as a URL; an existing database keeps its target.

        The settings of the configuration for all databases apply to it (snapshots, retention,
        levels), the settings of single databases do not: it is synced every second and has no
        ``auto-recover`` until the replicator is started again.
        """
        await self._ask("/register", {"path": path, "replica_url": replica_url}, self._seconds)

    async def unregister(self, path: str, *, seconds: int = 30) -> None:
        """Sync a database a last time and close its files, so that they can be deleted."""
        question = {"path": path, "timeout": seconds}
        await self._ask("/unregister", question, seconds + self._seconds)

    async def _ask(self, target: str, question: dict[str, object] | None, seconds: float) -> bytes:
        answer = await ask_local(
            partial(opener.dial_unix, self.socket_path),
            target,
            body=None if question is None else msgspec.json.encode(question),
            seconds=seconds,
            max_bytes=MAX_ANSWER_BYTES,
            where=self.socket_path,
        )
        if answer.status != _OK:
            raise ReplicatorError(
                f"the replicator refused {target} (status {answer.status}): "
                f"{read_error(answer.body)[:500]}"
            )
        return answer.body
