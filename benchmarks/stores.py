"""Test data for servers: stores full of events, and a certificate for the loopback address."""

import base64
import hashlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import apsw
import attrs
import trustme
from load import body, webhook_ids

from sdk_trio.records.deliveries import Dead, NewDelivery
from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    KeyFile,
    Tenant,
    TenantCredentials,
    TenantStatus,
)
from sdk_trio.storage import sql
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.data_directory import DATABASE_NAME
from sdk_trio.storage.engines.sqlite_connection import SqliteTransaction, connect_writer
from sdk_trio.storage.sql import admission, runs
from sdk_trio.storage.sql.admission import Arriving
from sdk_trio.storage.sql.dialect import SqlTransaction
from sdk_trio.storage.sql.leases import new_token
from sdk_trio.storage.sql.runs import RunEnd
from sdk_trio.storage.sql.tenants import add
from sdk_trio.storage.sql.versions import prepare_sqlite

_CHUNK = 2_000
#: An upper limit for one stored event on the disk, in bytes, with its log and a copy of the file.
_BYTES_OF_AN_EVENT = 10_000
_DAY = 86_400.0
#: A store of finished events is filled again before they reach any retention.
_OLDEST_SECONDS = 3 * _DAY
#: One finished event in so many has another type; one in ten times as many is dead or parked.
_OTHERS = 10

_TERMS = LeaseTerms(
    owner="benchmark", lease_seconds=75.0, dedup_seconds=7 * _DAY, payload_seconds=30 * _DAY
)


@attrs.frozen
class Certificate:
    """PEM files: the certificate, its key, and the authority that clients trust."""

    chain: Path
    key: Path
    authority: Path


def issue_certificate(directory: Path) -> Certificate:
    """Make a certificate for 127.0.0.1 with its own authority."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate = Certificate(
        directory / "chain.pem", directory / "key.pem", directory / "authority.pem"
    )
    certificate.chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(certificate.key)
    authority.cert_pem.write_to_path(certificate.authority)
    return certificate


_Insert = Callable[[SqlTransaction, NewDelivery, int], None]


def finished_store(directory: Path, count: int) -> Path:
    """Return a store with ``count`` events of the last hour; 99 of 100 are done."""
    return _stored(directory, "finished", count, time.time() - 3600.0, _insert_finished)


def expired_store(directory: Path, count: int) -> Path:
    """Return a store with ``count`` finished events that the default retention removes."""
    return _stored(directory, "expired", count, time.time() - 40 * _DAY, _insert_done)


def waiting_store(directory: Path, count: int) -> Path:
    """Return a store with ``count`` accepted events that are not yet claimed."""
    return _stored(directory, "waiting", count, time.time() - 3600.0, _insert_waiting)


def _insert_waiting(tx: SqlTransaction, delivery: NewDelivery, _: int) -> None:
    admission.accept_all(tx, _TERMS, [Arriving(delivery, None, tx.version)])


def _insert_done(tx: SqlTransaction, delivery: NewDelivery, _: int) -> None:
    now, token = delivery.received_at, new_token()
    arriving = [Arriving(delivery, token, tx.version)]
    ((_, sequence),) = admission.accept_all(tx, _TERMS, arriving)
    assert sequence is not None
    runs.end_all(tx, [RunEnd(sequence, token, now, begun=now)])


def _insert_finished(tx: SqlTransaction, delivery: NewDelivery, number: int) -> None:
    if number % (10 * _OTHERS) == 0:
        admission.park(tx, _TERMS, delivery, None)
    elif number % (10 * _OTHERS) == 1:
        failed = Dead("a benchmark's failure")
        runs.record_run(tx, _TERMS, delivery, new_token(), failed, delivery.received_at)
    else:
        _insert_done(tx, delivery, number)


def _stored(directory: Path, kind: str, count: int, begin: float, insert: _Insert) -> Path:
    """Return the store of this kind, which is made once for each version of the store's code.

    It is filled with the program's own statements, so it is like the store of a receiver: 2 KB
    bodies, random ids, and arrivals in order.
    """
    place = directory / f"{kind}-{count}-{_version()}"
    file = place / DATABASE_NAME
    finished = kind == "finished"
    if file.exists() and not (finished and _age(file) > _OLDEST_SECONDS):
        return file
    for old in directory.glob(f"{kind}-{count}-*"):
        shutil.rmtree(old)
    if shutil.disk_usage(directory).free < count * _BYTES_OF_AN_EVENT:
        raise SystemExit(
            f"{directory}: {count} stored events need {count * _BYTES_OF_AN_EVENT / 1e9:.1f} GB; "
            "name another directory with --directory, or fewer events with --finished"
        )
    print(f"filling a store: {count} events, {kind}", file=sys.stderr)
    made = directory / f"{kind}-{count}-{_version()}.{os.getpid()}"
    made.mkdir()
    connection = _create(made / DATABASE_NAME)
    # No durability is needed here, so no write waits for the disk.
    connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -1000000")
    _fill(connection, count, begin, insert, others=finished)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    os.sync()
    made.rename(place)
    return file


def _create(file: Path) -> apsw.Connection:
    return connect_writer(str(file), partial(prepare_sqlite, file=str(file)))


def _fill(
    connection: apsw.Connection, count: int, begin: float, insert: _Insert, *, others: bool
) -> None:
    raw = body()
    ids = webhook_ids(count)
    tx = SqliteTransaction(connection)
    for first in range(0, count, _CHUNK):
        with connection:
            for number in range(first, min(first + _CHUNK, count)):
                at = begin + 3000.0 * number / count
                made = NewDelivery(
                    next(ids),
                    "order.created" if others and number % _OTHERS == 0 else "order.paid",
                    raw,
                    int(at),
                    at,
                    subject=f"subject-{number}",
                )
                insert(tx, made, number)


def _version() -> str:
    """Return a digest of the code that determines the content of a store."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(Path(sql.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _age(file: Path) -> float:
    return time.time() - file.stat().st_mtime


def fill_tenants(directory: Path, count: int, key_of: Callable[[int], bytes]) -> None:
    """Create a store with ``count`` tenants below ``directory``, each with its own key file.

    A tenth of them is suspended.
    """
    data, keys = directory / "data", directory / "keys"
    data.mkdir(parents=True, mode=0o700)
    keys.mkdir()
    connection = _create(data / DATABASE_NAME)
    print(f"filling a store with {count} tenants", file=sys.stderr)
    with connection:
        for number in range(count):
            key = keys / str(number)
            key.write_text(f"whsec_{base64.b64encode(key_of(number)).decode()}\n")
            tenant = Tenant(
                id=str(uuid.uuid4()),
                identifier=f"tenant-{number:06d}",
                name=f"Tenant {number}",
                status=TenantStatus.ACTIVE if number % 10 else TenantStatus.SUSPENDED,
                site_manager_email=f"manager{number}@example.com",
                site_manager_email_verified=True,
                organization_id=f"org-{number:06d}",
                credentials=TenantCredentials(webhook_secrets=(KeyFile(str(key)),)),
                created_at=time.time(),
            )
            audit = AuditRecord(
                tenant_id=tenant.id,
                tenant_identifier=tenant.identifier,
                action=AuditAction.CREATED,
                new_status=tenant.status,
                actor="benchmark",
                occurred_at=tenant.created_at,
            )
            add(SqliteTransaction(connection), tenant, audit)
    connection.close()
