"""Backups of the store: ``storage backup`` and ``storage restore``.

A backup is a compressed tar archive of a manifest and of the store as one SQLite file, for every
engine. It is a snapshot, and is made while a receiver works. SQLite copies a file (``VACUUM
INTO``); a PostgreSQL database is read in one snapshot. A backup is verified before it gets its
name, and before anything is restored.
"""

import errno
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import apsw
import msgspec

from .._version import __version__
from ..base import clock
from ..base.opener import open_file, sync_file, sync_path
from ..errors import StoreVersionError
from .admission import LeaseTerms
from .copying import Report, TransferError, count_rows
from .data_directory import DATABASE_NAME
from .locations import SqliteLocation, SqliteSide, filling_file, put_in_place, remove_file
from .open import LEASE_SECONDS
from .sql import leases
from .sql.dialect import SqlTransaction
from .sql.reads import other_tables
from .sql.schema import VERSION

#: The layout of the archive.
FORMAT = 1

_MANIFEST = "manifest.json"

#: Bytes that are read at once, and the most that a manifest has.
_BLOCK = 1 << 20

#: zlib's usual level; the highest takes several times as long for a few hundredths of the size.
_LEVEL = 6

#: Instructions of SQLite's virtual machine between two reports.
_INSTRUCTIONS = 100_000

# The errors of reading an archive of which bytes were changed or are missing; names and numbers of
# its headers may be unreadable.
_DAMAGE = (
    tarfile.TarError,
    zlib.error,
    gzip.BadGzipFile,
    EOFError,
    ValueError,
    OverflowError,
    msgspec.MsgspecError,
)

#: Makes a file of the store of a backup: takes its path.
Make = Callable[[Path, Report], None]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a backup.

    ``made_at`` is the time at which it was begun, in ISO 8601, ``program`` the version of this
    package and ``schema`` that of the store. ``size`` (in bytes) and ``sha256`` are those of the
    store's file, ``rows`` its rows by table. ``other_tables`` are an application's own tables.
    """

    format: int
    made_at: str
    program: str
    schema: int
    backend: str
    size: int
    sha256: str
    rows: dict[str, int]
    other_tables: list[str]


# -- backup --------------------------------------------------------------------------------------


def back_up(file: Path, make: Make, *, backend: str, report: Report) -> Manifest:
    """Write a backup of a store to the new file ``file``; blocks.

    It is written beside ``file``, in a directory that is removed afterwards, or by the next call if
    this one is killed. ``file`` appears when the backup is complete, was read again, and is on the
    disk. Both copies of the store need space there.

    Args:
        file: the backup; readable by this user alone.
        make: makes the copy of the store, such as :func:`copy_file`.
        backend: the store's backend, for the manifest.
        report: called again and again.

    Raises:
        TransferError: ``file`` exists, or the disk has failed or is full.
        StorageError: the store cannot be read.
    """
    if os.path.lexists(file):
        raise _exists(file)
    directory = file.with_name(f".{file.name}.partial")
    made_at = datetime.fromtimestamp(clock.wall(), UTC).isoformat(timespec="seconds")
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        try:
            database, archive = directory / DATABASE_NAME, directory / "backup"
            make(database, report)
            manifest = _describe(database, made_at=made_at, backend=backend, report=report)
            _pack(archive, database, manifest, report)
            report("verify", 0)
            with _reading(archive, file) as (_, blocks):
                for _ in blocks:
                    pass
            _publish(archive, file)
            sync_path(file.absolute().parent)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise _disk_full(file, error) from error
    return manifest


def _publish(archive: Path, file: Path) -> None:
    """Give the complete archive its name, unless another file has got that name meanwhile."""
    try:
        try:
            os.link(archive, file)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: take the name first, then replace it
            os.close(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                os.replace(archive, file)
            except OSError:
                file.unlink()  # empty, it would pass for a backup
                raise
    except FileExistsError:
        raise _exists(file) from None


def _exists(file: Path) -> TransferError:
    return TransferError(f"{file} exists: a backup replaces nothing; name another file")


def _disk_full(place: Path, error: OSError) -> TransferError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space there, or name another disk" if full else "check it, and repeat this"
    return TransferError(f"{place} cannot be written ({error.strerror or error}): {remedy}")


def copy_file(source: Path, file: Path, report: Report) -> None:
    """Copy a snapshot of the store in ``source`` to the new file ``file``; blocks.

    Raises:
        StorageError: the store cannot be read, or a disk has failed.
        StoreVersionError: it is not a store of this version.
        OSError: ``file`` cannot be written, or its disk is full; :func:`back_up` translates it.
    """

    def steps() -> bool:
        report("copy the store", 0)
        return False

    os.close(open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    with SqliteSide.connected(source) as side:
        connection = side.connection
        side.state.require_current()
        connection.set_progress_handler(steps, _INSTRUCTIONS)
        try:
            connection.execute("VACUUM INTO ?", (str(file),))
        except apsw.FullError as error:
            raise OSError(errno.ENOSPC, "the disk or its quota is full") from error
        except apsw.IOError as error:
            raise TransferError(
                f"the copy of {source} to {file.parent} failed ({error}): check both disks "
                "(dmesg), free some space, and repeat this"
            ) from error


def _describe(database: Path, *, made_at: str, backend: str, report: Report) -> Manifest:
    report("check", 0)
    with SqliteSide.connected(database) as side:
        _require_whole(side.connection, str(database))
        rows, tables = count_rows(side.tx), other_tables(side.tx)
    with open(database, "rb", opener=open_file) as content:
        digest = hashlib.file_digest(content, "sha256")
    return Manifest(
        format=FORMAT,
        made_at=made_at,
        program=__version__,
        schema=VERSION,
        backend=backend,
        size=database.stat().st_size,
        sha256=digest.hexdigest(),
        rows=rows,
        other_tables=list(tables),
    )


def _require_whole(connection: apsw.Connection, place: str) -> None:
    found = str(connection.execute("PRAGMA integrity_check(1)").get)
    if found != "ok":
        raise TransferError(f"{place} is damaged: {found}; 'storage check' says more of the store")


def _pack(archive: Path, database: Path, manifest: Manifest, report: Report) -> None:
    report("compress", 0)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    descriptor = open_file(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as raw:
        with (
            gzip.GzipFile("", "wb", _LEVEL, raw) as zipped,
            tarfile.open(fileobj=zipped, mode="w|") as tar,
        ):
            tar.addfile(_member(_MANIFEST, len(text)), io.BytesIO(text))
            with open(database, "rb", opener=open_file) as content:
                tar.addfile(_member(DATABASE_NAME, manifest.size), content)
        raw.flush()
        sync_file(raw.fileno())


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(clock.wall())
    return member


@contextmanager
def _reading(archive: Path, name: Path) -> Iterator[tuple[Manifest, Iterator[bytes]]]:
    """Open a backup; the caller reads the blocks of its store to their end.

    Args:
        archive: the file.
        name: its name in messages.

    Raises:
        TransferError: it is not a backup, or is damaged.
        StoreVersionError: it is of a later version.
        OSError: it cannot be read.
    """
    try:
        with (
            open(archive, "rb") as raw,
            gzip.GzipFile(fileobj=raw, mode="rb") as zipped,
            tarfile.open(fileobj=zipped, mode="r|") as tar,
        ):
            manifest = _read_manifest(tar, name)
            yield manifest, _blocks(tar, manifest, name)
            # gzip's checksum comes last.
            while zipped.read(_BLOCK):
                pass
    except _DAMAGE as error:
        raise TransferError(
            f"{name} is not a backup of this program, or is damaged ({error}): use another one"
        ) from error


def _read_manifest(tar: tarfile.TarFile, name: Path) -> Manifest:
    member = tar.next()
    content = None if member is None or member.name != _MANIFEST else tar.extractfile(member)
    if content is None:
        raise tarfile.ReadError("it has no manifest")
    text = content.read(_BLOCK)
    head = msgspec.json.decode(text, type=_Head)
    if (head.format, head.schema) != (FORMAT, VERSION):
        raise StoreVersionError(
            f"{name} has format {head.format} and schema version {head.schema}, and was made by "
            f"version {head.program} of sdk_trio; this version restores format {FORMAT} and schema "
            f"version {VERSION}: install the version that made it, and restore it by that one"
        )
    return msgspec.json.decode(text, type=Manifest)


class _Head(msgspec.Struct, frozen=True):
    """The part of the manifest that every format has."""

    format: int
    schema: int
    program: str


def _blocks(tar: tarfile.TarFile, manifest: Manifest, name: Path) -> Iterator[bytes]:
    member = tar.next()
    content = None if member is None or member.name != DATABASE_NAME else tar.extractfile(member)
    if content is None:
        raise tarfile.ReadError("it has no store")
    digest = hashlib.sha256()
    while block := content.read(_BLOCK):
        digest.update(block)
        yield block
    if digest.hexdigest() != manifest.sha256:
        raise tarfile.ReadError("the digest of the store is another one")


# -- restore -------------------------------------------------------------------------------------

#: Puts a verified file of a store in place: takes its path, the last step, and the report.
Put = Callable[[Path, Callable[[SqlTransaction], None], Report], None]


def restore(file: Path, directory: Path, put: Put, *, report: Report) -> Manifest:
    """Verify a backup and restore it; blocks. The caller holds the lock of ``directory``.

    The leases that the backup holds are given up, as their processes are gone.

    Args:
        file: the backup.
        directory: the data directory, where the store is unpacked.
        put: puts the store in place, such as :func:`put_file`.
        report: called again and again.

    Raises:
        TransferError: the backup is damaged, or the disk has failed or is full.
        StoreVersionError: the backup is of another version.
        StorageError: the target cannot be used.
    """
    if not file.is_file():
        raise TransferError(f"there is no backup at {file.absolute()}: name one")
    unpacked = filling_file(directory / DATABASE_NAME)
    try:
        remove_file(unpacked)
        try:
            with _reading(file, file) as (manifest, blocks):
                report("verify", 0)
                _write(unpacked, blocks)
            with SqliteSide.connected(unpacked) as side:
                if side.state.version != VERSION:
                    raise TransferError(f"{file} holds no store of this program")
                _require_whole(side.connection, str(file))
                if count_rows(side.tx) != manifest.rows:
                    raise TransferError(f"{file} has other rows than its manifest says")
            put(unpacked, _give_up_leases, report)
        finally:
            remove_file(unpacked)
    except OSError as error:
        raise _disk_full(directory, error) from error
    return manifest


def _write(file: Path, blocks: Iterator[bytes]) -> None:
    with open(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as content:
        for block in blocks:
            content.write(block)


def _give_up_leases(tx: SqlTransaction) -> None:
    terms = LeaseTerms(
        owner="storage restore",
        lease_seconds=LEASE_SECONDS,
        dedup_seconds=0.0,
        payload_seconds=0.0,
    )
    leases.recover(tx, terms, dead=None)
    # Claimed by the first poll, which reports those that may have been sent.
    tx.run("UPDATE notification SET lease_until = 0 WHERE lease_owner IS NOT NULL")
    tx.run("UPDATE lease SET until = 0")


def put_file(
    target: Path, file: Path, finish: Callable[[SqlTransaction], None], report: Report
) -> None:
    """Make the unpacked store in ``file`` the database ``target``; blocks.

    Raises:
        TransferError: ``target`` is not empty.
        StorageError: it cannot be used.
        OSError: the disk failed.
    """
    SqliteLocation(target).survey().require_fillable()
    report("put in place", 0)
    with SqliteSide.connected(file, apsw.SQLITE_OPEN_READWRITE) as side:
        side.connection.execute("BEGIN IMMEDIATE")
        finish(side.tx)
        side.connection.execute("COMMIT")
    sync_path(file)
    put_in_place(file, target)
