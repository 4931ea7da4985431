"""Asks the replicator's binary what a tenant's replica holds, and has it restored (contracts 7).

Each question starts the binary with a configuration of exactly one tenant, which exists as long
as the block of :func:`ReplicaReader.open`. No database and no running replicator is touched.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from ..base.times import rfc3339
from ..config import Settings
from ..errors import ReplicationError, ReplicatorError, RestoreError
from ..tenants.database_opener import database_path, databases_directory
from . import replica
from .binary_finder import find_replicator
from .child_output_reader import secret_values
from .manifest import (
    TenantDatabaseFile,
    child_environment,
    render_manifest,
    unset_variables,
)
from .replica import ReplicaFile, RestorePoint

T = TypeVar("T")

#: How long the target may take to list what it holds, in seconds. Of a target that is away the
#: binary's own attempts take up to five minutes.
LIST_SECONDS = 60.0

#: How much of the binary's own words is shown.
_SHOWN_CHARACTERS = 400

_DAMAGE = re.compile(
    r"checksum|integrity check|decode|corrupt|non-contiguous|invalid ltx|unexpected EOF|"
    r"malformed|lz4"
)


class ReplicaReader:
    """Reads replicas.

    Args:
        settings: validated settings; the section Replication and its target are used.
        binary: the path of the replicator's binary; None: it is looked for each time.
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

    def prepare(self, tenant_id: str, scratch: Path) -> "TenantReplica":
        """Write the configuration of one tenant into ``scratch`` and return its replica.

        Raises:
            RestoreError: the configuration cannot be written.
            ReplicatorError: there is no binary.
        """
        binary = self._binary or find_replicator(self._options, environ=self._environ)
        database = os.fspath(database_path(self._directory, tenant_id))
        try:
            text = render_manifest(
                self._options,
                [TenantDatabaseFile(tenant_id, database)],
                working_directory=os.getcwd(),
            )
            manifest = scratch / "replicator.yml"
            with open(os.open(manifest, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
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
    """The replica of one tenant. Every method runs the binary; cancelled, it ends it."""

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
        # Said first: what the replicator says of it is about the roles of machines.
        self._first = "".join(f"{each}; " for each in unset)

    async def list_files(self, *, level: str = "all") -> tuple[ReplicaFile, ...]:
        """Return the files of the replica; none when the target does not know the tenant.

        Args:
            level: ``all``, or one level alone, which is one request; fresh files are on ``0``.

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
        return _understood(replica.parse_files, text)

    async def plan(self, *, at: float | None = None) -> RestorePoint:
        """Return the state that :meth:`restore` gives.

        Raises:
            RestoreError: there is nothing that could be restored.
            ReplicatorError: as of :meth:`list_files`.
        """
        output = os.fspath(Path(self._manifest).with_name("planned.db"))
        text = await self._run("restore", "-dry-run", "-json", *_until(at=at), "-o", output)
        return _understood(replica.parse_plan, text)

    async def restore(
        self, output: Path, *, at: float | None = None, txid: int | None = None
    ) -> None:
        """Restore into the new file ``output`` and check its integrity, all of it.

        Args:
            output: does not exist yet; removed again when this fails.
            at: the last state before these Unix seconds.
            txid: exactly this transaction; not together with ``at``.

        Raises:
            RestoreError: the replica is damaged, or the disk is full.
            ReplicatorError: as of :meth:`list_files`.
        """
        until = _until(at=at, txid=txid)
        await self._run(
            "restore", "-json", "-integrity-check", "full", *until, "-o", os.fspath(output)
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
        told = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        words = " ".join((told or lines or [f"exit status {ended.returncode}"])[-1].split())
        for secret in self._secrets:
            words = words.replace(secret, "***")
        words = words[:_SHOWN_CHARACTERS]
        if "no space left on device" in said or "disk quota exceeded" in said:
            return RestoreError(
                f"the disk is full: free some space, or restore to another file system ({words})"
            )
        if "no matching backup files" in said:
            return RestoreError("the target holds nothing that could be restored")
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
            f"the replicator answered what is not understood ({error}); this version works with "
            "Litestream 0.5"
        ) from error
