"""``events list`` and ``events show``."""

import time
from argparse import Namespace

import trio

from ..config import Settings
from ..config.layers import printable
from ..errors import SdkError
from ..storage.record_fields import listed, shown
from ..storage.records import UNFINISHED, AttemptRecord, DeliveryRecord, DeliveryState
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
        UnknownEventError: the inbox has no event of that id.
    """
    settings = load(arguments)
    record, attempts = trio.run(_get, settings, arguments.id)
    if arguments.format == "json":
        print_json(shown(record, attempts))
    else:
        _print_event(record, attempts)
    return 0


async def _get(settings: Settings, webhook_id: str) -> tuple[DeliveryRecord, list[AttemptRecord]]:
    async with open_store(settings) as inbox:
        record = await inbox.get(webhook_id)
        if record is None:
            raise UnknownEventError(
                f"the inbox in {settings.storage.path} has no event {webhook_id!r}; "
                "'events list' shows what it has"
            )
        return record, list(await inbox.attempts(webhook_id))


def _next_run(record: DeliveryRecord) -> str | None:
    if record.state not in UNFINISHED:
        return None
    return "a worker" if record.queued else "the sender's next delivery"


def _print_event(record: DeliveryRecord, attempts: list[AttemptRecord]) -> None:
    fields = {
        "webhook id": record.webhook_id,
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
        "last error": record.last_error,
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
