"""``events list`` and ``events show``."""

import time
from argparse import Namespace
from collections.abc import Sequence

import trio

from ..config import Settings
from ..config.layers import printable
from ..errors import SdkError
from ..storage.record_fields import listed, shown
from ..storage.records import (
    UNFINISHED,
    AttemptRecord,
    DeliveryRecord,
    DeliveryState,
    EvidenceRecord,
)
from ..storage.replayer import ambiguity, find_meant
from .event_rows import LIST_COLUMNS, readable_body, table_row
from .moments import moment_text, parse_count, parse_since
from .printer import cell, print_json, print_rows, print_text, say
from .settings_reader import load
from .store_opener import open_store
from .tenant_access import tenant_id_of


class UnknownEventError(SdkError):
    """There is no event of this id in the inbox."""


def list_events(arguments: Namespace) -> int:
    """Print the newest events, newest first."""
    limit = parse_count(arguments.limit, option="--limit")
    since = parse_since(arguments.since, now=time.time()) if arguments.since else None
    state = DeliveryState(arguments.state) if arguments.state else None
    settings = load(arguments)

    async def find() -> list[DeliveryRecord]:
        tenant_id = await tenant_id_of(settings, arguments.tenant)
        async with open_store(settings) as inbox:
            return list(
                await inbox.find(
                    type=arguments.type,
                    state=state,
                    since=since,
                    tenant_id=tenant_id,
                    limit=limit,
                )
            )

    records = trio.run(find)
    as_json = arguments.format == "json"
    rows = [listed(r) if as_json else table_row(r) for r in records]
    print_rows(rows, LIST_COLUMNS, as_json=as_json)
    if not records:
        say("no events")
    return 0


def show_event(arguments: Namespace) -> int:
    """Print one event with its body and its failed runs.

    Raises:
        UnknownEventError: the inbox has no event of that id, or several senders' ones.
    """
    settings = load(arguments)
    record, attempts, evidence = trio.run(_get, settings, arguments.id)
    if arguments.format == "json":
        print_json(shown(record, attempts, evidence))
    else:
        _print_event(record, attempts)
        _print_other_bodies(evidence)
    return 0


async def _get(
    settings: Settings, text: str
) -> tuple[DeliveryRecord, Sequence[AttemptRecord], Sequence[EvidenceRecord]]:
    async with open_store(settings) as inbox:
        found = await find_meant(inbox, text)
        if not found:
            raise UnknownEventError(
                f"the inbox in {settings.storage.path} has no event {text!r}; "
                "'events list' shows what it has"
            )
        if len(found) > 1:
            raise UnknownEventError(f"{text!r}: {ambiguity(found)}")
        (record,) = found
        return record, await inbox.attempts(record.key), await inbox.evidence(record.key)


def _next_run(record: DeliveryRecord) -> str | None:
    if record.state not in UNFINISHED:
        return None
    return "a worker" if record.queued else "the sender's next delivery"


def _print_event(record: DeliveryRecord, attempts: Sequence[AttemptRecord]) -> None:
    fields = {
        "webhook id": record.webhook_id,
        "key": record.key if record.signer else None,
        "tenant": record.tenant_id,
        "signed by": {None: None, "": "the host"}.get(record.signer, f"tenant {record.signer}"),
        "type": record.type,
        "state": record.state,
        "next run by": _next_run(record),
        "attempts": record.attempts,
        "subject": record.subject,
        "ordered": record.ordered,
        "received": moment_text(record.received_at),
        "signed": moment_text(record.timestamp),
        "started": moment_text(record.started_at),
        "next attempt": moment_text(record.next_attempt_at),
        "finished": moment_text(record.finished_at),
        "parked because" if record.state == "parked" else "last error": record.last_error,
    }
    width = max(map(len, fields))
    for name, value in fields.items():
        if value is not None:
            print_text(f"{name.ljust(width)}  {cell(value)}")
    if attempts:
        print_text("\nfailed attempts")
        rows = [
            {
                "number": attempt.number,
                "started": moment_text(attempt.started_at),
                "seconds": f"{attempt.finished_at - attempt.started_at:.3f}",
                "error": attempt.error,
                "place": attempt.place,
            }
            for attempt in attempts
        ]
        print_rows(rows, ("number", "started", "seconds", "error", "place"), as_json=False)
        if attempts[-1].traceback:
            print_text("")
            print_text("\n".join(map(printable, attempts[-1].traceback.splitlines())))
    print_text("\nbody")
    print_text(readable_body(record.raw))


def _print_other_bodies(evidence: Sequence[EvidenceRecord]) -> None:
    for other in evidence:
        where = f" from {cell(other.address)}" if other.address else ""
        whose = f", of tenant {other.tenant_id}" if other.tenant_id else ""
        print_text(f"\nanother body, received {moment_text(other.received_at)}{where}{whose}")
        print_text(readable_body(other.raw))
