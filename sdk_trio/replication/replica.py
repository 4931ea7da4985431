"""A replica: its files, the states that can be restored from them, and the binary that reads them.

A replica is a set of files. Each has the changes from one transaction to another; a snapshot begins
at transaction 1. New files have single transactions. Later they are merged into larger ones with
the time of their *last* transaction: an old point in time is therefore restored to the last
boundary before it, never to a later state.

Each query starts the binary with a configuration of exactly one tenant, in a temporary directory.
It touches no database and no running replicator.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import attrs
import filelock
import trio

from ..base.opener import open_file
from ..base.times import readable, rfc3339
from ..config import Settings
from ..errors import ReplicationError, ReplicatorError, RestoreError, StoreLockedError
from ..tenants.databases import databases_directory
from .child import find_replicator, secret_values
from .health import ReplicaPosition
from .manifest import TenantDatabaseFile, child_environment, render_manifest, unset_variables

#: Name of the lock file that is locked while the directory is in use.
_LOCK_NAME = "in-use.lock"


@contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a directory in ``parent`` for this user only, and remove it at the end.

    Directories of the same prefix of killed processes are removed first, so that the files of
    crashes do not accumulate.

    Raises:
        OSError: it cannot be created.
    """
    with suppress(OSError):
        for left in parent.glob(f"{prefix}*"):
            _remove_unused(left)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = filelock.FileLock(directory / _LOCK_NAME, thread_local=False)
    try:
        lock.acquire(timeout=0)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


@contextmanager
def work_alone(directory: Path, lock_name: str, work: str) -> Iterator[None]:
    """Hold a lock file in ``directory`` for a block.

    Args:
        directory: exists.
        lock_name: the file's name.
        work: the name of the exclusive work, for the message.

    Raises:
        StoreLockedError: another process does the same work.
        RestoreError: the directory cannot be written.
    """
    lock = filelock.FileLock(directory / lock_name, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StoreLockedError(f"another {work} runs in {directory}: wait until it ends") from None
    except OSError as error:
        raise RestoreError(
            f"{directory} cannot be written ({error.strerror}); make it writable for this user"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _remove_unused(directory: Path) -> None:
    marker = directory / _LOCK_NAME
    # If there is no lock file, another process has just created the directory and is about to lock
    # it.
    if not marker.exists():
        return
    lock = filelock.FileLock(marker, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except (filelock.Timeout, OSError):
        return
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()


#: The level of snapshots; files of lower levels contain changes.
SNAPSHOT_LEVEL = 9

T = TypeVar("T")

#: Time for the target to list its files, in seconds. If the target is unavailable, the binary's own
#: attempts take up to five minutes.
LIST_SECONDS = 60.0

#: Characters of the binary's own output in a message.
_SHOWN_CHARACTERS = 400

# The binary's messages for a replica that cannot be restored; every other failure is caused by the
# target or by us, and may be retried.
_DAMAGE = re.compile(
    r"checksum|integrity check|decode|corrupt|non-contiguous|invalid ltx|unexpected EOF|"
    r"malformed|lz4"
)


@attrs.frozen
class ReplicaFile:
    """One file of a replica; ``written_at`` are Unix seconds of its last transaction.

    The listing cuts fractions of seconds off, so it may be up to a second later.
    """

    level: int
    first_txid: int
    last_txid: int
    bytes: int
    written_at: float

    @property
    def is_snapshot(self) -> bool:
        """Whether a restore can start with it."""
        return self.level == SNAPSHOT_LEVEL or self.first_txid == 1


@attrs.frozen
class RestorePoint:
    """The state given by a restore: its last transaction, its time, and its files."""

    txid: int
    as_of: float
    bytes: int


def parse_files(text: str) -> tuple[ReplicaFile, ...]:
    """Return the files of ``litestream ltx -json``.

    Raises:
        ValueError: this is not such a listing.
    """
    rows = json.loads(text or "[]")
    # For a replica without files the binary prints null.
    if not isinstance(rows, list | type(None)):
        raise ValueError("no listing")
    return tuple(_file(row) for row in rows or ())


def parse_plan(text: str) -> RestorePoint:
    """Return the state that ``litestream restore -dry-run -json`` would restore.

    Raises:
        ValueError: this is not such a plan.
    """
    plan = json.loads(text)
    try:
        files = [_file(row) for row in plan["files"]]
        return RestorePoint(
            int(plan["max_txid"], 16), files[-1].written_at, sum(file.bytes for file in files)
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a plan of a restore: {error}") from error


def _file(row: Any) -> ReplicaFile:
    try:
        return ReplicaFile(
            level=int(row["level"]),
            first_txid=int(row["min_txid"], 16),
            last_txid=int(row["max_txid"], 16),
            bytes=int(row["size"]),
            written_at=datetime.fromisoformat(row["timestamp"]).timestamp(),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a file of a replica: {error}") from error


def newest_txid(files: Iterable[ReplicaFile]) -> int:
    """Return the last transaction in any file; 0 for no files."""
    return max((file.last_txid for file in files), default=0)


def newest_time(files: Iterable[ReplicaFile]) -> float | None:
    """Return the time of the last transaction, None for no files."""
    return max((file.written_at for file in files), default=None)


def newest_position(files: Sequence[ReplicaFile]) -> ReplicaPosition:
    """Return the last transaction in any file, with its earliest time.

    A snapshot is written later than its last transaction, and has the time of its writing.
    """
    txid = newest_txid(files)
    times = (file.written_at for file in files if file.last_txid == txid)
    return ReplicaPosition(txid, min(times, default=None))


def earliest_snapshot(files: Iterable[ReplicaFile], since: float = float("-inf")) -> float | None:
    """Return the time of the first snapshot at or after ``since`` (Unix seconds), None for none.

    Only files of the snapshot level count: only the retention removes them, while a file of changes
    that begins at transaction 1 is merged into a later one.
    """
    times = (file.written_at for file in files if file.level == SNAPSHOT_LEVEL)
    return min((time for time in times if time >= since), default=None)


def why_impossible(files: Sequence[ReplicaFile], at: float | None) -> str | None:
    """Return why nothing can be restored, or None if something can.

    Args:
        files: all files of the replica.
        at: the point in time in Unix seconds; None: the newest state.
    """
    if not files:
        return "the target has no replica of it"
    beginnings = [file.written_at for file in files if file.is_snapshot]
    if not beginnings:
        return (
            "the replica has no snapshot to start with: its oldest files were removed; restart the "
            "replicator, which then makes one, or wait for SnapshotIntervalMinutes"
        )
    if at is not None and at <= min(beginnings):
        return (
            f"the replica begins at {readable(min(beginnings))}, after the requested point in time"
        )
    return None


def find_gap(
    files: Iterable[ReplicaFile], point: RestorePoint, at: float | None
) -> ReplicaFile | None:
    """Return a file that a restore to ``at`` should have reached and did not, or None.

    Such a file exists if a file in between is missing. The replicator notices that for the newest
    state only; for a point in time it restores the state before the gap without an error.
    """
    for file in files:
        # A second of tolerance, since the listing cuts fractions off.
        if file.last_txid > point.txid and (at is None or file.written_at + 1 <= at):
            return file
    return None


class ReplicaReader:
    """Reads replicas.

    Args:
        settings: validated settings; the section Replication and its target are used.
        binary: the path of the replicator's binary; None: it is searched for each time.
        environ: where the credentials' variables are.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        binary: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._options = settings.multi_tenant.file_db.replication
        self._directory = databases_directory(settings).absolute()
        self._binary = binary
        self._environ = environ

    def prepare(self, name: str, scratch: Path) -> "TenantReplica":
        """Write the configuration of one tenant into ``scratch`` and return its replica.

        Args:
            name: the name of the replica's directory in the target.
            scratch: a directory.

        Raises:
            RestoreError: the configuration cannot be written.
            ReplicatorError: the binary is missing.
        """
        binary = self._binary or find_replicator(self._options, environ=self._environ)
        # Only a key here: the binary neither reads nor writes a database of that name.
        database = os.fspath(self._directory / f"{name}.db")
        try:
            text = render_manifest(
                self._options,
                [TenantDatabaseFile(name, database)],
                working_directory=os.getcwd(),
            )
            manifest = scratch / "replicator.yml"
            # It may contain the target's keys, so only we can read it from its first byte on.
            with open(manifest, "x", opener=open_file) as file:
                file.write(text)
        except (OSError, ValueError) as error:
            raise RestoreError(
                f"the replicator's configuration cannot be written in {scratch}: {error}"
            ) from error
        environ = child_environment(self._options, self._environ)
        secrets = secret_values(self._options, environ)
        unset = unset_variables(self._options, self._environ)
        return TenantReplica(binary, manifest, database, environ, secrets, unset)


class TenantReplica:
    """The replica of one tenant. Every method runs the binary; cancellation ends it."""

    def __init__(
        self,
        binary: str,
        manifest: Path,
        database: str,
        environ: Mapping[str, str],
        secrets: Sequence[str] = (),
        unset: Sequence[str] = (),
    ) -> None:
        self._binary = binary
        self._manifest = os.fspath(manifest)
        self._database = database
        self._environ = environ
        self._secrets = secrets
        # First in errors: without keys the replicator reports a missing machine role.
        self._first = "".join(f"{each}; " for each in unset)

    async def list_files(self, *, level: str = "all") -> tuple[ReplicaFile, ...]:
        """Return the files of the replica; empty if the target does not know the tenant.

        Args:
            level: ``all``, or a single level, which is one request; new files are on level ``0``.

        Raises:
            ReplicatorError: the target does not answer, or the binary cannot be run.
        """
        with trio.move_on_after(LIST_SECONDS) as deadline:
            text = await self._run("ltx", "-level", level, "-json")
        if deadline.cancelled_caught:
            raise ReplicatorError(
                f"{self._first}the replication target did not answer within {LIST_SECONDS:g} s: "
                "check that it is up and can be reached from this machine, and the section "
                "Sdk:MultiTenant:FileDb:Replication"
            )
        return _understood(parse_files, text)

    async def plan(self, *, at: float | None = None) -> RestorePoint:
        """Return the state that :meth:`restore` gives.

        Raises:
            RestoreError: there is nothing that could be restored.
            ReplicatorError: as for :meth:`list_files`.
        """
        output = os.fspath(Path(self._manifest).with_name("planned.db"))
        text = await self._run("restore", "-dry-run", "-json", *_until(at=at), "-o", output)
        return _understood(parse_plan, text)

    async def restore(
        self, output: Path, *, at: float | None = None, txid: int | None = None
    ) -> None:
        """Restore into the new file ``output`` and check its whole integrity.

        Args:
            output: does not exist yet; removed again when this fails.
            at: the last state before these Unix seconds.
            txid: exactly this transaction; not together with ``at``.

        Raises:
            RestoreError: the replica is damaged, or the disk is full.
            ReplicatorError: as for :meth:`list_files`.
        """
        until = _until(at=at, txid=txid)
        await self._run(
            # A quick check reads no index and no content: a restored database is used, so all of it
            # is read.
            "restore",
            "-json",
            "-integrity-check",
            "full",
            *until,
            "-o",
            os.fspath(output),
        )

    async def _run(self, verb: str, *options: str) -> str:
        command = [self._binary, verb, "-config", self._manifest, *options, self._database]
        try:
            ended = await trio.run_process(
                command,
                capture_stdout=True,
                capture_stderr=True,
                check=False,
                env=dict(self._environ),
            )
        except OSError as error:
            raise ReplicatorError(
                f"the replicator {self._binary} cannot be started ({error.strerror}); install the "
                "extra 'replication', or correct "
                "Sdk:MultiTenant:FileDb:Replication:ReplicatorPath"
            ) from error
        if ended.returncode:
            raise self._failure(ended)
        return ended.stdout.decode(errors="replace")

    def _failure(self, ended: "subprocess.CompletedProcess[bytes]") -> ReplicationError:
        said = ended.stderr.decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        # It logs its attempts first and the reason for giving up last.
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        words = " ".join((errors or lines or [f"exit status {ended.returncode}"])[-1].split())
        # The output may contain an address of the target, with the key in it.
        for secret in self._secrets:
            words = words.replace(secret, "***")
        words = words[:_SHOWN_CHARACTERS]
        if "no space left on device" in said or "disk quota exceeded" in said:
            return RestoreError(
                f"the disk is full: free some space, or restore to another file system ({words})"
            )
        if "no matching backup files" in said:
            return RestoreError("the target has nothing to restore")
        if _DAMAGE.search(said):
            return RestoreError(f"the replica is damaged: {words}")
        return ReplicatorError(
            f"{self._first}the replication target cannot be read: {words}; check that it is up, "
            "its credentials, and the section Sdk:MultiTenant:FileDb:Replication"
        )


def _until(*, at: float | None = None, txid: int | None = None) -> tuple[str, ...]:
    if txid is not None:
        return ("-txid", f"{txid:016x}")
    return () if at is None else ("-timestamp", rfc3339(at, timespec="milliseconds"))


def _understood(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ReplicatorError(
            f"the replicator's answer was not understood ({error}); this version works with "
            "Litestream 0.5"
        ) from error
