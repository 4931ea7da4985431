"""A store as version 7 of the schema left it: written by that version's own statements."""

import hashlib
import os
from pathlib import Path

import apsw
import attrs

from sdk_trio.records.deliveries import AttemptRecord, DeliveryRecord, DeliveryState, EvidenceRecord
from sdk_trio.storage.sql.schema import APPLICATION_ID, MIGRATIONS

_DELIVERY = """
INSERT INTO inbox (sequence, delivery_key, signer, type, state, queued, attempts, received_at,
    timestamp, subject, ordered, next_attempt_at, started_at, finished_at, last_error, tenant_id,
    process_ends, ran_alone, earlier_attempts, failed_at, lease_owner, lease_until)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


@attrs.define
class StoreSeven:
    """What is in the store."""

    records: list[DeliveryRecord] = attrs.field(factory=list)
    attempts: dict[str, list[AttemptRecord]] = attrs.field(factory=dict)
    evidence: dict[str, list[EvidenceRecord]] = attrs.field(factory=dict)


def make_store_seven(file: Path, rounds: int = 1) -> StoreSeven:
    """Write a store with deliveries in each state and return what is in it.

    Each round has eleven deliveries. Between two rounds, and at the end, others were removed.
    """
    old = apsw.Connection(os.fspath(file))
    old.pragma("journal_mode", "wal")
    for step in MIGRATIONS[:7]:
        for statement in step:
            old.execute(statement)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 7")
    store = StoreSeven()
    with old:
        for number in range(rounds):
            for record in _round(12 * number + 1, f"{number}"):
                _add(old, store, record)
        last = 12 * rounds + 7
        gone = attrs.evolve(store.records[0], sequence=last, webhook_id="gone")
        _insert(old, gone)
        old.execute("DELETE FROM inbox WHERE sequence = ?", (last,))
    old.close()
    return store


def _round(first: int, name: str) -> list[DeliveryRecord]:
    done = DeliveryRecord(
        sequence=first,
        webhook_id=f"done-{name}",
        type="order.paid",
        state=DeliveryState.DONE,
        queued=True,
        attempts=1,
        received_at=1000.0,
        timestamp=999,
        subject=f"order-{name}",
        ordered=False,
        next_attempt_at=None,
        started_at=1000.5,
        finished_at=1001.0,
        last_error=None,
        raw=b'{"of": "done"}',
        signer="",
    )
    arrived = attrs.evolve(done, started_at=None, finished_at=None, attempts=0)
    changes = (
        {},
        {"webhook_id": f"bare-{name}", "raw": None, "queued": False},
        {
            "webhook_id": f"twice-{name}",
            "attempts": 3,
            "earlier_attempts": 2,
            "last_error": "E",
            "process_ends": 1,
            "ran_alone": True,
        },
        {"webhook_id": f"unsigned-{name}", "signer": None, "tenant_id": "t1"},
        {"webhook_id": f"shared-{name}", "signer": "t1", "tenant_id": "t1"},
        {"webhook_id": f"shared-{name}", "signer": "t2", "tenant_id": "t2"},
    )
    ended = [attrs.evolve(done, **change) for change in changes]
    open_ones = (
        {"webhook_id": f"received-{name}", "state": "received", "ordered": True},
        {"webhook_id": f"running-{name}", "state": "running", "attempts": 1, "started_at": 1000.5},
        {
            "webhook_id": f"retrying-{name}",
            "state": "retrying",
            "attempts": 2,
            "next_attempt_at": 2000.0,
            "started_at": 1000.5,
            "last_error": "E",
        },
        {
            "webhook_id": f"dead-{name}",
            "state": "dead",
            "queued": False,
            "attempts": 5,
            "finished_at": 1002.0,
            "last_error": "E",
        },
    )
    for change in open_ones:
        ended.append(attrs.evolve(arrived, **{**change, "state": DeliveryState(change["state"])}))
    parked = {"webhook_id": f"parked-{name}", "state": DeliveryState.PARKED, "queued": False}
    ended.append(attrs.evolve(arrived, **parked, last_error="nobody wants it"))
    return [attrs.evolve(each, sequence=first + place) for place, each in enumerate(ended)]


def _insert(old: apsw.Connection, record: DeliveryRecord) -> None:
    running = record.state is DeliveryState.RUNNING
    old.execute(
        _DELIVERY,
        (
            record.sequence,
            record.key,
            record.signer,
            record.type,
            record.state,
            record.queued,
            record.attempts,
            record.received_at,
            record.timestamp,
            record.subject,
            record.ordered,
            record.next_attempt_at,
            record.started_at,
            record.finished_at,
            record.last_error,
            record.tenant_id,
            record.process_ends,
            record.ran_alone,
            record.earlier_attempts,
            1000.0 if record.next_attempt_at else None,
            "dead owner" if running else None,
            1010.0 if running else None,
        ),
    )


def _add(old: apsw.Connection, store: StoreSeven, record: DeliveryRecord) -> None:
    _insert(old, record)
    if record.raw is not None:
        old.execute("INSERT INTO body VALUES (?, ?)", (record.sequence, record.raw))
    store.records.append(record)
    if record.last_error == "E":
        failed = AttemptRecord(1, 1000.5, 1000.75, "E", "app.py:1 in handle")
        old.execute(
            "INSERT INTO attempt (sequence, number, started_at, finished_at, error, place) "
            "VALUES (?, 1, 1000.5, 1000.75, 'E', 'app.py:1 in handle')",
            (record.sequence,),
        )
        store.attempts[record.key] = [failed]
    if record.state is DeliveryState.DEAD:
        raw = b"another body"
        old.execute(
            "INSERT INTO evidence (sequence, digest, received_at, address, raw, tenant_id) "
            "VALUES (?, ?, 1003.0, '192.0.2.1', ?, 't1')",
            (record.sequence, hashlib.sha256(raw).digest(), raw),
        )
        store.evidence[record.key] = [EvidenceRecord(1003.0, "192.0.2.1", raw, "t1")]
