"""What servers are given: a store full of finished events, and a certificate for loopback."""

import base64
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import attrs
import trustme
from load import webhook_ids

from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    KeyFile,
    Tenant,
    TenantCredentials,
    TenantStatus,
)
from sdk_trio.storage.sqlite.connect import connect_writer
from sdk_trio.storage.sqlite.tenants import add

_CHUNK = 10_000

_FINISHED = """
INSERT INTO inbox (delivery_key, signer, type, state, queued, attempts, received_at, timestamp,
                   subject, ordered, started_at, finished_at)
VALUES (?, '', 'order.paid', 'done', 1, 1, ?, ?, '0f2e7b8a-5d31-4c67-9a57-2f9f64b6a001', 0, ?, ?)
"""

_BODY = "INSERT INTO body (sequence, raw) VALUES (last_insert_rowid(), ?)"


@attrs.frozen
class Certificate:
    """PEM files: what a server shows, its key, and what its clients trust."""

    chain: Path
    key: Path
    authority: Path


def issue_certificate(directory: Path) -> Certificate:
    """Make a certificate for 127.0.0.1 below an authority of its own."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate = Certificate(
        directory / "chain.pem", directory / "key.pem", directory / "authority.pem"
    )
    certificate.chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(certificate.key)
    authority.cert_pem.write_to_path(certificate.authority)
    return certificate


def fill_store(file: Path, count: int, *, growing: bool = False) -> None:
    """Create a store with ``count`` finished events, as a receiver would have left them.

    Their bodies are small: a finished event's body is never looked at, so that its size costs
    nothing but the time to fill.
    """
    connection = connect_writer(str(file))
    # Nobody is promised anything here, so nothing waits for the disk.
    connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -400000")
    print(f"filling a store with {count} finished events", file=sys.stderr)
    moment = time.time()
    for first in range(0, count, _CHUNK):
        connection.execute("BEGIN")
        for webhook_id in webhook_ids(min(_CHUNK, count - first), growing=growing):
            connection.execute(_FINISHED, (webhook_id, moment, int(moment), moment, moment))
            connection.execute(_BODY, (b"{}",))
        connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def fill_tenants(directory: Path, count: int, key_of: Callable[[int], bytes]) -> None:
    """Create a store with ``count`` tenants below ``directory``, each with a key file of its own.

    A tenth of them is suspended.
    """
    data, keys = directory / "data", directory / "keys"
    data.mkdir(parents=True, mode=0o700)
    keys.mkdir()
    connection = connect_writer(str(data / "inbox.db"))
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
            add(connection, tenant, audit)
    connection.close()
