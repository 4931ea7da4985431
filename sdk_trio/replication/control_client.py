"""Talks to a running replicator over its control socket."""

from functools import partial

import msgspec
import trio

from ..errors import ReplicatorError
from .control_socket import (
    ReplicatedDatabase,
    ReplicatorInfo,
    SyncResult,
    read_error,
    read_info,
    read_list,
    read_sync,
)
from .local_asker import ask_local

#: How long an ordinary answer may take, in seconds.
ANSWER_SECONDS = 5.0

#: How long the answer about all databases may be: 64 MiB are some 300,000 of them.
MAX_ANSWER_BYTES = 64 * 1024 * 1024

_OK = 200


class ControlClient:
    """The control socket at ``socket_path``; each question is a connection of its own.

    Every method raises :class:`~sdk_trio.errors.ReplicatorError` when nobody listens, when no
    whole answer comes in time, and when the answer is a refusal or makes no sense. Cancelled, it
    closes the connection; what the replicator has begun it may finish.
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
        """Return whether a replicator is there, though it may have no time for other questions.

        While one waits for a target that was away from its start, it lists no databases.
        """
        try:
            await self.info()
        except ReplicatorError:
            await trio.lowlevel.checkpoint()
            return False
        return True

    async def sync(self, path: str, *, wait: bool = True, seconds: int = 30) -> SyncResult:
        """Sync one database now, and with ``wait`` until the target has it.

        Args:
            path: the database's, as the configuration names it.
            wait: until the target has all of it; otherwise only until it is in the local copy.
            seconds: how long the sync may take.
        """
        question = {"path": path, "wait": wait, "timeout": seconds}
        return read_sync(await self._ask("/sync", question, seconds + self._seconds))

    async def register(self, path: str, replica_url: str) -> None:
        """Add a database with a target as a URL; one that is there keeps its old target.

        Of the configuration, what is said of all databases holds for it (snapshots, retention,
        levels), and what is said of one does not: it is synced every second, and has no
        ``auto-recover`` until the replicator is started again.
        """
        await self._ask("/register", {"path": path, "replica_url": replica_url}, self._seconds)

    async def unregister(self, path: str, *, seconds: int = 30) -> None:
        """Sync a database a last time and let go of its files: before they are deleted."""
        question = {"path": path, "timeout": seconds}
        await self._ask("/unregister", question, seconds + self._seconds)

    async def _ask(self, target: str, question: dict[str, object] | None, seconds: float) -> bytes:
        answer = await ask_local(
            partial(trio.open_unix_socket, self.socket_path),
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
