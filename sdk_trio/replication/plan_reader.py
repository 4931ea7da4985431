"""Has the replicator itself read a configuration, before anything depends on it.

It ignores what it does not know and exits with success after failures, so what counts is which
databases it finds. The running replicator has a copy of its own: the original may be replaced by
a broken one at any time, and a replicator that crashes then starts again from what worked.
"""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import trio

from ..errors import ReplicatorError
from .manifest_writer import ManifestWriter
from .restarts import Plan, completed

#: Names of the copies, in the directory of the databases.
CANDIDATE_NAME: Final = "replicator.candidate.yml"
RUNNING_NAME: Final = "replicator.running.yml"

#: How long the replicator may take to read a configuration: 5000 databases take it 0.3 s.
READ_SECONDS: Final = 30.0

#: Longest configuration that is read, in bytes.
MAX_BYTES: Final = 64 * 1024 * 1024


class _Entry(msgspec.Struct):
    path: str


class PlanReader:
    """Reads the configuration at ``config_path`` and keeps the copies in ``directory``.

    Args:
        config_path: what the watcher, ``replication render`` or an operator writes.
        directory: of the databases; an absolute path.
        socket_path: where the control socket shall be.
        environment: returns the replicator's environment for a configuration.
    """

    def __init__(
        self,
        config_path: str,
        directory: Path,
        *,
        socket_path: str,
        environment: Callable[[str], Mapping[str, str]],
    ) -> None:
        self.config_path = config_path
        self.running_path: Path = directory / RUNNING_NAME
        self._candidate = directory / CANDIDATE_NAME
        self._socket_path = socket_path
        self._environment = environment

    async def read(self, binary: str, known: Plan | None) -> Plan:
        """Return the configuration as it is now; ``known`` itself when it is the same text.

        Raises:
            ReplicatorError: it is not there, or the replicator cannot read it.
            ReplicationError: the copy cannot be written.
        """
        text = completed(await self._text(), self._socket_path)
        if known is not None and known.text == text:
            return known
        await trio.to_thread.run_sync(ManifestWriter(self._candidate).write, text)
        return Plan(text, await self._databases(binary, text))

    async def adopt(self, plan: Plan) -> None:
        """Make ``plan`` the copy from which the replicator starts.

        Raises:
            ReplicationError: the copy cannot be written.
        """
        await trio.to_thread.run_sync(ManifestWriter(self.running_path).write, plan.text)

    async def _text(self) -> str:
        def load() -> bytes:
            with open(self.config_path, "rb") as file:
                return file.read(MAX_BYTES + 1)

        try:
            content = await trio.to_thread.run_sync(load)
            if len(content) > MAX_BYTES:
                raise ReplicatorError(f"{self.config_path} is longer than {MAX_BYTES} bytes")
            return content.decode()
        except FileNotFoundError as error:
            raise ReplicatorError(
                f"there is no replicator configuration {self.config_path}: 'replication render' "
                "writes it, and so does the daemon with AutoRegenerateOnTenantChange"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ReplicatorError(f"{self.config_path} cannot be read: {reason}") from error

    async def _databases(self, binary: str, text: str) -> frozenset[str]:
        path = str(self._candidate)
        try:
            with trio.fail_after(READ_SECONDS):
                answer = await trio.run_process(
                    [binary, "databases", "-json", "-config", path],
                    env=dict(self._environment(text)),
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                )
        except OSError as error:
            raise ReplicatorError(f"{binary} cannot be executed: {error.strerror}") from error
        except trio.TooSlowError as error:
            raise ReplicatorError(f"{binary} did not read {path} in {READ_SECONDS:g} s") from error
        try:
            _check(answer)
            found = msgspec.json.decode(answer.stdout or b"[]", type=list[_Entry] | None)
        except msgspec.MsgspecError as error:
            raise ReplicatorError(f"{binary} is no replicator that we know: {error}") from error
        return frozenset(entry.path for entry in found or ())


def _check(answer: "subprocess.CompletedProcess[bytes]") -> None:
    if answer.returncode != 0:
        words = answer.stderr.decode("utf-8", "replace").strip()[-500:]
        raise ReplicatorError(f"the replicator cannot read its configuration: {words}")
