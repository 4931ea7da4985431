"""The supervisor's decisions: when to restart, with which configuration, and how to change it.

The replicator itself reads a configuration before it is used. It ignores unknown keys and exits
with success after failures, so only the databases it finds count. The running replicator has its
own copy: the original may be replaced by a broken one at any time, and a crashed replicator is
restarted with the working one.
"""

import posixpath
import re
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import attrs
import msgspec
import trio

from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..base.opener import open_file
from ..config.options.tenants import ReplicationOptions
from ..errors import ReplicationError, ReplicatorError
from .manifest import ManifestWriter, TenantDatabaseFile, quoted, render_manifest, replica_url

#: Bounds of the wait before a restart, in seconds. Jitter keeps the replicators of many hosts from
#: returning to one target together.
BASE_SECONDS: Final = 0.5
CAP_SECONDS: Final = 30.0

_IDENTITY: Final = re.compile(r"\n    # file [^\n]*")

#: After working for this time, in seconds, a replicator's failures are counted from zero.
STABLE_SECONDS: Final = 60.0

#: Names of the copies, in the directory of the databases.
CANDIDATE_NAME: Final = "replicator.candidate.yml"
RUNNING_NAME: Final = "replicator.running.yml"

#: Time for the replicator to read a configuration, in seconds; with 5000 databases it takes 0.3.
READ_SECONDS: Final = 30.0

#: Longest configuration that is read, in bytes.
MAX_BYTES: Final = 64 * 1024 * 1024

_log = get_logger("replication")


@attrs.frozen
class SupervisorTimeouts:
    """The supervisor's timeouts, in seconds.

    ``stop`` is for the last sync of an orderly stop; the replicator itself takes up to 30.
    ``last_sync`` is the minimum for that, if other parts have used up the drain timeout.
    ``reload_stop`` is for a stop before a restart; it is shorter, because a sync follows the
    restart anyway. ``first_reload`` is the wait for the first reload at the start. ``start`` is the
    time until the replicator has its databases, plus ``start_each`` for each of them. ``lock`` is
    the wait for the end of a killed predecessor's child. ``watch`` is the time between two checks;
    after ``silent_checks`` of them without an answer, the replicator counts as hanging.
    """

    stop: float = 35.0
    last_sync: float = 2.0
    reload_stop: float = 10.0
    first_reload: float = 10.0
    start: float = 60.0
    start_each: float = 0.5
    lock: float = 10.0
    watch: float = 15.0
    silent_checks: int = 4


@attrs.frozen
class Plan:
    """A configuration that the replicator itself has read: its text, and its databases."""

    text: str
    databases: frozenset[str]


@attrs.frozen
class LiveChange:
    """The step from one configuration to another over the control socket, without a restart.

    ``gone`` are unregistered first; then ``added`` are registered, each with its replica's address.
    """

    gone: tuple[str, ...]
    added: Mapping[str, str]


def live_change(
    old: Plan, new: Plan, options: ReplicationOptions, *, working_directory: str
) -> LiveChange | None:
    """Return the change from ``old`` to ``new`` in a running replicator; None: it needs a restart.

    A restart is needed in three cases: the head (settings for all databases) differs; a database
    has another target or file, because the replicator has the old file open; or an address cannot
    express a database's entry, because it would be replicated with other settings than configured.

    Args:
        old: the configuration that the replicator runs with.
        new: the new configuration.
        options: the replication options; an entry that they do not render is an operator's own.
        working_directory: where a relative ``LocalDisk:Path`` starts.
    """
    old_head, old_entries = _parts(old.text)
    new_head, new_entries = _parts(new.text)
    # The head applies to all databases; the replicator reads it only at its start.
    if old_head != new_head:
        return None
    names = {quoted(path): path for path in old.databases | new.databases}
    gone = _paths_of(set(old_entries) - set(new_entries), names)
    fresh = {entry: _paths_of({entry}, names) for entry in set(new_entries) - set(old_entries)}
    added = {}
    for entry, paths in fresh.items():
        for path in paths:
            url = _address_of(path, entry, options, working_directory)
            if url is None:
                return None
            added[path] = url
    # Proves that every entry was understood and that none was changed.
    if gone & added.keys() or old.databases - gone | added.keys() != new.databases:
        return None
    return LiveChange(tuple(sorted(gone)), dict(sorted(added.items())))


def _paths_of(entries: Collection[str], names: Mapping[str, str]) -> set[str]:
    first_lines = (entry.partition("\n")[0] for entry in entries)
    return {names[line] for line in first_lines if line in names}


def _address_of(
    path: str, entry: str, options: ReplicationOptions, working_directory: str
) -> str | None:
    """Return the address of a database's replica, if the options render the same entry."""
    # The last line is the path of the replica; a misread name renders another entry.
    name = posixpath.basename(entry.rpartition("path: ")[2].strip('"'))
    file = TenantDatabaseFile(name, path)
    try:
        expected = render_manifest(options, [file], working_directory=working_directory)
    except ValueError:
        return None
    # An entry that the settings would render differently is an operator's, which an address cannot
    # express.
    if _parts(expected)[1] != [_IDENTITY.sub("", entry)]:
        return None
    return replica_url(options, name, working_directory=working_directory)


def difference(wanted: Collection[str], found: Collection[str]) -> str:
    """Describe how ``found`` differs from ``wanted``: counts, and one example of each kind."""
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing, such as {missing[0]}")
    if extra:
        parts.append(f"{len(extra)} not wanted, such as {extra[0]}")
    return "; ".join(parts) or "none missing"


def _parts(text: str) -> tuple[str, list[str]]:
    """Split our configuration into its head and its databases' entries."""
    if "\ndbs: []" in text:
        return text.replace("\ndbs: []", "\ndbs:").rstrip("\n"), []
    head, *entries = text.split("\n  - path: ")
    return head.rstrip("\n"), [entry.rstrip("\n") for entry in entries]


def with_control_socket(text: str, socket_path: str) -> str:
    """Return a configuration with the control socket and JSON logs, which the supervisor needs.

    An operator's own configuration may lack them. ``socket_path`` must need no YAML escapes except
    those of ``quoted``.
    """
    keys = {line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()}
    lines = [text.rstrip("\n")]
    # An operator's own settings of these two stay unchanged.
    if "socket" not in keys:
        lines.append(f"socket: {{enabled: true, path: {quoted(socket_path)}, permissions: 0600}}")
    if "logging" not in keys:
        lines.append("logging: {type: json, stderr: true}")
    return "\n".join(lines) + "\n"


class _Entry(msgspec.Struct):
    path: str


class PlanReader:
    """Reads the configuration at ``config_path`` and keeps the copies in ``directory``.

    Args:
        config_path: the file that the watcher, ``replication render`` or an operator writes.
        directory: of the databases; an absolute path.
        socket_path: the path of the control socket.
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
        """Return the current configuration; ``known`` itself if the text is unchanged.

        Raises:
            ReplicatorError: it does not exist, or the replicator cannot read it.
            ReplicationError: the copy cannot be written.
        """
        text = with_control_socket(await self._text(), self._socket_path)
        if known is not None and known.text == text:
            return known
        # The replicator reads a copy: the original could be replaced between its reading and ours.
        await run_in_thread(ManifestWriter(self._candidate).write, text)
        return Plan(text, await self._databases(binary, text))

    async def adopt(self, plan: Plan) -> None:
        """Make ``plan`` the copy from which the replicator starts.

        Raises:
            ReplicationError: the copy cannot be written.
        """
        await run_in_thread(ManifestWriter(self.running_path).write, plan.text)

    async def _text(self) -> str:
        def load() -> bytes:
            with open(self.config_path, "rb", opener=open_file) as file:
                return file.read(MAX_BYTES + 1)

        try:
            content = await run_in_thread(load)
            # Reads one byte more than allowed, so a longer file is detected without reading all of
            # it.
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
            raise ReplicatorError(f"{binary} is not a known replicator: {error}") from error
        return frozenset(entry.path for entry in found or ())


def _check(answer: "subprocess.CompletedProcess[bytes]") -> None:
    if answer.returncode != 0:
        words = answer.stderr.decode("utf-8", "replace").strip()[-500:]
        raise ReplicatorError(f"the replicator cannot read its configuration: {words}")


class ChildConfiguration:
    """The current configuration, the last one that worked, and the last one that did not.

    Args:
        reader: reads the configuration.
    """

    def __init__(self, reader: PlanReader) -> None:
        self._reader = reader
        self._good: Plan | None = None
        self._rejected: str | None = None
        #: The current configuration; None before the first one.
        self.plan: Plan | None = None

    @property
    def databases(self) -> frozenset[str]:
        """The paths of the databases in the current configuration."""
        return frozenset() if self.plan is None else self.plan.databases

    @property
    def running_path(self) -> str:
        """The copy from which the replicator starts."""
        return str(self._reader.running_path)

    async def choose(self, binary: str) -> None:
        """Choose the configuration to start with: the new one, or else the last good one.

        Raises:
            ReplicationError: none can be read, or the copy cannot be written.
        """
        try:
            plan = await self._reader.read(binary, self.plan)
        except ReplicationError as error:
            if self.plan is None:
                raise
            self._complain(error)
            plan = self.plan
        if plan.text == self._rejected and self._good is not None:
            # It failed before: use the last good one. A later reload retries the new one.
            plan = self._good
        await self.adopt(plan)

    async def read_latest(self, binary: str) -> Plan | None:
        """Return the current configuration, even one that failed; None if unreadable.

        The current one stays until :meth:`adopt` or :meth:`choose`.
        """
        try:
            plan = await self._reader.read(binary, self.plan)
        except ReplicationError as error:
            self._complain(error)
            return None  # noqa: ASYNC910 - the raising task has been awaited
        self._rejected = None
        return plan

    async def adopt(self, plan: Plan) -> None:
        """Use ``plan`` from now on.

        Raises:
            ReplicationError: the copy cannot be written.
        """
        await self._reader.adopt(plan)
        self.plan = plan

    def confirm(self) -> None:
        """Record that the current configuration works."""
        self._good = self.plan

    def reject(self) -> None:
        """Record that the current configuration failed, if there is another one to fall back to."""
        # The only available configuration is retried: its fault may be the target's, and temporary.
        if self._good is not None and self._good is not self.plan and self.plan is not None:
            self._rejected = self.plan.text

    def _complain(self, error: ReplicationError) -> None:
        _log.error(
            "replication.failed",
            error=str(error),
            kept=len(self.databases),
            hint="the previous configuration stays in force",
        )
