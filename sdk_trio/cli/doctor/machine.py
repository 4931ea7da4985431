"""The checks of ``doctor`` on this machine: permissions, certificate, disk, descriptors, clock."""

import ctypes
import os
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from ...admin.access import TOKEN_NAME
from ...base.ownership import user_name
from ...base.private_files import exposure, visibility
from ...config import Loaded, Secret, Settings, StorageBackend
from ...config.fields import ReplicaTargetType
from ...config.table import table
from ...errors import OptionsValidationError, ReplicatorError
from ...replication.child import find_replicator
from ...replication.running_replicator import SignalRefusal, read_pid, refusal_to_signal
from ...server.limits import OWN_DESCRIPTORS, Limits, share_descriptors
from ...server.listen import reachable_descriptor_limit
from ...server.tls import RENEW, URGENT_EXPIRY_SECONDS, load_certificate, validity
from ..receiver import NoReceiverError, find
from ..sign import DEV_SECRET_NAME
from ..terminal import size_text
from . import Report

REPLICATION = "Sdk:MultiTenant:FileDb:Replication"
STORAGE_PATH = "Sdk:Storage:Path"

#: The minimum of free bytes and file nodes with which a store can work for a while.
LEAST_FREE_BYTES = 100 * 1024 * 1024
COMFORTABLE_FREE_BYTES = 1024 * 1024 * 1024
LEAST_FREE_NODES = 1000

#: The days before its end from which a certificate is mentioned: those of 90 days are usually
#: renewed 30 days before.
NOTABLE_EXPIRY_DAYS = 30
_DAY_SECONDS = 86_400

#: The result of adjtimex(2) when the clock is not synchronized (TIME_ERROR).
_CLOCK_ERROR = 5
#: More bytes than ``struct timex`` has on any Linux.
_TIMEX_BYTES = 512


def check_permissions(loaded: Loaded, settings: Settings, report: Report) -> None:
    """Report files that others can read, and directories that this user cannot use."""
    if settings.storage.backend is StorageBackend.SQLITE:
        _check_data_directory(Path(settings.storage.path), report)
    for key, file in _secret_files(loaded, settings):
        _check_secret_file(key, Path(file), report)
    server = settings.server
    if server.cert_file and server.key_file:
        _check_certificate(server.cert_file, server.key_file, report)


def _check_certificate(cert_file: str, key_file: str, report: Report) -> None:
    where = f"Sdk:Server:CertFile ({cert_file})"
    try:
        dates = validity(load_certificate(cert_file, key_file), cert_file)
    except OptionsValidationError as error:
        report.problem(
            where,
            f"the certificate and the key cannot be used together: {_reason(error)}",
            "give the chain in CertFile and its own, unencrypted key in KeyFile, both as PEM",
        )
        return
    if dates is None:
        report.note(where, "its expiry date is unknown")
        return
    begin, end = dates
    now = time.time()
    if not begin <= now <= end:
        fault = "it is not yet valid" if now < begin else "it has expired"
        report.problem(
            where, f"every sender rejects it: {fault}", f"{RENEW}; or the clock is wrong"
        )
        return
    days = (end - now) / _DAY_SECONDS
    if end - now < URGENT_EXPIRY_SECONDS:
        report.warning(where, f"it expires in {days:.0f} days", RENEW)
    elif days < NOTABLE_EXPIRY_DAYS:
        report.note(where, f"it expires in {days:.0f} days", RENEW)
    else:
        report.ok(where, f"it matches the key, and is valid for {days:.0f} more days")


def _reason(error: OptionsValidationError) -> str:
    cause = error.__cause__
    return getattr(cause, "reason", None) or getattr(cause, "strerror", None) or str(error)


def _check_data_directory(directory: Path, report: Report) -> None:
    where = f"{STORAGE_PATH} ({directory.absolute()})"
    if not directory.exists():
        # The nearest existing directory decides whether the others can be created.
        parent = next(p for p in directory.absolute().parents if p.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            report.note(where, "it does not exist yet: the first start creates it, for this user")
        else:
            report.problem(
                where,
                f"it does not exist, and this user cannot create it in {parent}",
                "create it for the user of the receiver, with mode 0700, or choose another path",
            )
        return
    if not directory.is_dir() or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        report.problem(
            where,
            "this user cannot read and write it as a directory",
            "give it to the user of the receiver; run doctor as that user",
        )
        return
    # The same judgement as at a start, so that doctor and receiver never differ.
    fault = exposure(directory)
    if fault is not None:
        what, _, remedy = fault.partition(": ")
        report.problem(where, f"the receiver does not start: it {what}", remedy)
    elif visible := visibility(directory):
        what, _, remedy = visible.partition(": ")
        report.warning(where, f"it {what}", remedy)
    else:
        report.ok(where, "only this user can read and write it")
    # The receiver cannot open files that a command created as another user, such as root.
    for file in sorted(directory.iterdir()):
        if not os.access(file, os.R_OK | os.W_OK):
            report.problem(
                str(file.absolute()),
                "this user cannot read and write it",
                "give it to the user of the receiver; do not run commands as another user",
            )


def _secret_files(loaded: Loaded, settings: Settings) -> list[tuple[str, str]]:
    """Return the files with secrets, each with the key that names it."""
    found: dict[str, str] = {}
    secret_keys = tuple(row.key.casefold() for row in table() if row.kind is Secret)
    for key, origin in loaded.origins.items():
        # An origin may have a line after the file: `.env:3`.
        file = origin if os.path.isfile(origin) else origin.rpartition(":")[0]
        if key.casefold().startswith(secret_keys) and os.path.isfile(file):
            # One finding for a file, however many secrets are in it.
            found.setdefault(file, key)
    for name, what in ((DEV_SECRET_NAME, "the secret of dev"), (TOKEN_NAME, "the admin token")):
        if (file_of := Path(settings.storage.path) / name).is_file():
            found.setdefault(str(file_of.absolute()), what)
    if settings.server.key_file:
        found.setdefault(settings.server.key_file, "Sdk:Server:KeyFile")
    replication = settings.multi_tenant.file_db.replication
    if replication.use_replication:
        target = replication.replica_target_type
        if target is ReplicaTargetType.SFTP:
            found[replication.sftp.private_key_path] = f"{REPLICATION}:Sftp:PrivateKeyPath"
        elif target is ReplicaTargetType.CLOUD_STORAGE:
            path = replication.cloud_storage.credentials_json_path
            found[path] = f"{REPLICATION}:CloudStorage:CredentialsJsonPath"
    return [(key, file) for file, key in found.items()]


def _check_secret_file(key: str, file: Path, report: Report) -> None:
    status = file.stat()
    mode = stat.S_IMODE(status.st_mode)
    where = f"{key} ({file})"
    # root can read everything anyway.
    if status.st_uid not in (os.geteuid(), 0):
        report.problem(
            where,
            f"it belongs to the user {user_name(status.st_uid)}, who knows the secret and can "
            "change it",
            "give it to the user of the receiver, or make another secret; run doctor as that user",
        )
    elif mode & stat.S_IRWXO:
        report.problem(
            where,
            f"every user of this machine may read the secret in it (mode {mode:04o})",
            f"chmod 0600 {file}, then replace the secret if strangers had access",
        )
    # A note: with systemd and in containers a group is often how the receiver gets at its files.
    elif mode & stat.S_IRWXG:
        report.note(where, f"its group may read the secret in it (mode {mode:04o})")
    else:
        report.ok(where, f"only its owner reads it (mode {mode:04o})")


def check_disk(settings: Settings, report: Report, growth_per_day: float | None = None) -> None:
    """Compare the free space on the data directory's disk with the inbox's needs.

    ``growth_per_day`` is in bytes, None if unknown.
    """
    if settings.storage.backend is not StorageBackend.SQLITE:
        report.note("Sdk:Storage:Backend", f"{settings.storage.backend}: nothing is kept on disk")
        return
    directory = Path(settings.storage.path).absolute()
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    disk = os.statvfs(existing)
    # f_bavail instead of f_bfree: part of the disk is reserved for root.
    free = disk.f_bavail * disk.f_frsize
    where = f"{STORAGE_PATH} ({existing})"
    if free < LEAST_FREE_BYTES:
        report.problem(
            where,
            f"the disk has {size_text(free)} free: deliveries are answered 503 once it is full",
            "free some space, or move the data directory to another disk",
        )
    elif growth_per_day and free / growth_per_day < settings.webhooks.payload_retention_days:
        report.warning(
            where,
            f"the inbox has lately grown by {size_text(growth_per_day)} a day: the "
            f"{size_text(free)} that are free last for {free / growth_per_day:.0f} days, and "
            f"bodies are kept for {settings.webhooks.payload_retention_days}",
            "get a larger disk, or lower Sdk:Webhooks:PayloadRetentionDays",
        )
    elif free < COMFORTABLE_FREE_BYTES:
        report.warning(where, f"the disk has {size_text(free)} free", "free some space soon")
    else:
        report.ok(where, f"{size_text(free)} free")
    # File systems that create nodes on demand report a total of 0.
    if disk.f_files and disk.f_favail < LEAST_FREE_NODES:
        report.problem(
            where,
            f"the file system has {disk.f_favail} file nodes left: soon no file can be created, "
            "however many bytes are free",
            "remove unneeded files (df -i shows where)",
        )


def check_descriptors(settings: Settings, report: Report) -> None:
    """Compare the limit of open files with the connections that are allowed."""
    wanted = Limits().connections
    limit = share_descriptors(reachable_descriptor_limit()).receiver
    whose = "this shell's"
    try:
        # The limit of this shell differs from the receiver's, whose unit sets its own.
        pid = find(settings.storage.path).pid
        limit = share_descriptors(_descriptors_of(pid)).receiver
        whose = f"the running receiver's (process {pid})"
    except (NoReceiverError, OSError, ValueError):
        pass
    calls = settings.connection.max_connections_per_server
    # The pool of the client may fill up in an outage of the upstream: deliveries must still find
    # descriptors.
    if limit < calls + OWN_DESCRIPTORS:
        report.problem(
            "RLIMIT_NOFILE",
            f"{whose} limit of open files leaves {limit} for connections, and the client "
            f"may open {calls} (Sdk:Connection:MaxConnectionsPerServer)",
            "LimitNOFILE=65536 in the systemd unit, or ulimit -n 65536",
        )
    elif limit < wanted + calls:
        report.note(
            "RLIMIT_NOFILE",
            f"{whose} limit of open files leaves {limit} for connections; beyond that senders "
            f"are answered 503, otherwise beyond {wanted}",
            "LimitNOFILE=65536 in the systemd unit, or ulimit -n 65536",
        )
    else:
        report.ok("RLIMIT_NOFILE", f"{whose} limit allows {wanted} connections")


def _descriptors_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines():
        if line.startswith("Max open files"):
            return int(line.split()[3])
    raise ValueError("there is no such limit")


def check_clock(report: Report) -> None:
    """Report whether the kernel considers the clock synchronized.

    A wrong clock rejects every delivery: timestamps count within a tolerance only.
    """
    where = "clock of this machine"
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(
            ctypes.create_string_buffer(_TIMEX_BYTES)
        )
    except (AttributeError, OSError):
        state = -1
    if state == -1:
        report.note(
            where,
            "the kernel does not report whether it is synchronized",
            "compare it with another clock: beyond ToleranceSeconds every delivery is refused",
        )
    elif state == _CLOCK_ERROR:
        report.note(
            where,
            "the kernel reports that it is not synchronized; in a container the host may do so",
            "run an NTP client (systemd-timesyncd, chrony) on the host",
        )
    else:
        report.ok(where, "the kernel reports that it is synchronized by NTP or similar")


def check_replication(
    settings: Settings, environ: Mapping[str, str], report: Report, *, may_run: bool
) -> None:
    """Report which replicator would run, and whether the process to signal survives SIGHUP.

    Args:
        may_run: the user named the settings' files, so the binary in them may be run for its
            version. A diagnosis never runs a program from settings that were only found in a
            working directory.
    """
    options = settings.multi_tenant.file_db.replication
    if not options.use_replication:
        report.note(f"{REPLICATION}:UseReplication", "false: nothing is replicated")
        return
    where = f"{REPLICATION}:ReplicatorPath"
    try:
        binary = find_replicator(options, environ=environ)
    except ReplicatorError as error:
        what, _, remedy = str(error).rpartition(": ")
        if options.supervise:
            report.problem(where, f"{what}: nothing is replicated", remedy)
        else:
            # Another user's process may replicate, with a binary of its own.
            report.warning(where, f"{what}: 'replication verify' and 'restore' need it", remedy)
    else:
        if options.replicator_path and not may_run:
            version = "its version was not checked, because no file was named with --config"
        else:
            version = f"version {_version_of(binary)}"
        report.ok(where, f"{binary}, {version}")
    if options.supervise:
        report.ok(f"{REPLICATION}:Supervise", "true: the daemon runs the replicator as its child")
    elif options.auto_regenerate_on_tenant_change:
        _check_pid_file(Path(options.replicator_pid_file_path), report)


def _version_of(binary: str) -> str:
    try:
        ran = subprocess.run(
            # Bounded: a program that hangs here is also a finding.
            [binary, "version"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    # Cut, because it is the output of a foreign program.
    return ran.stdout.strip()[:40] or "unknown"


def _check_pid_file(file: Path, report: Report) -> None:
    where = f"{REPLICATION}:ReplicatorPidFilePath ({file})"
    pid = read_pid(file)
    refusal = pid if isinstance(pid, SignalRefusal) else refusal_to_signal(pid)
    if refusal is None:
        report.ok(where, f"process {pid} can be signalled")
        return
    who = "" if isinstance(pid, SignalRefusal) else f"process {pid}: "
    report.problem(
        where,
        f"{who}{refusal.detail}; it is not signalled, so it never learns of new tenants",
        "start the replicator with 'replication run --pid-file', or set Supervise to true",
    )
