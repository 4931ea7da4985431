"""Messages to site managers as rows of a table and objects of JSON. Pure.

JSON has stable names; a message's id is the sequence of its transition and its channel, ``17-sms``.
"""

import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from ..config import Settings
from ..config.options.notifications import enabled_channels
from ..errors import EXIT_FAILURE, SdkError, UnknownTenantError
from ..records.channels import CHANNELS
from ..records.notifications import (
    RETRIABLE,
    NotificationId,
    NotificationRecord,
    NotificationState,
    parse_notification_id,
)
from ..storage.open import open_store
from ..storage.ports import NotificationStore, Store
from ..tenants.service import TenantService
from .settings_reader import load
from .terminal import Progress, cell, confirmed, print_json, print_rows, print_text, say
from .upgrade import require_tenants
from .usage import UsageError, moment_text, parse_count

#: The columns of ``notify list``.
LIST_COLUMNS = ("id", "tenant", "transition", "occurred", "state", "attempts", "reason")


def listed(record: NotificationRecord) -> dict[str, Any]:
    """Return a message's stored fields, and those of its transition that identify it."""
    outbox = record.outbox
    return {
        "id": str(record.id),
        "channel": record.id.channel,
        "state": str(record.state),
        "attempts": record.attempts,
        "delivery_id": outbox.delivery_id,
        "tenant_id": outbox.tenant_id,
        "tenant_identifier": outbox.tenant_identifier,
        "transition": str(outbox.transition),
        "occurred_at": outbox.occurred_at,
        "created_at": record.created_at,
        "next_attempt_at": record.next_attempt_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "provider_id": record.provider_id,
        "reason": record.reason,
    }


def table_row(record: NotificationRecord) -> dict[str, Any]:
    """Return the cells of ``LIST_COLUMNS``."""
    row = listed(record)
    return {
        **row,
        "tenant": row["tenant_identifier"],
        "occurred": moment_text(record.outbox.occurred_at),
    }


def shown(record: NotificationRecord) -> dict[str, Any]:
    """Return one whole message with its transition and its recipient."""
    transition = attrs.asdict(record.outbox)
    del transition["sequence"]
    return {**listed(record), "outbox": transition}


class UnknownNotificationError(SdkError):
    """There is no message of this id in the store."""


@asynccontextmanager
async def open_notifications(settings: Settings) -> AsyncIterator[Store]:
    """Open the store that exists, beside a daemon or without one.

    Raises:
        TenantsDisabledError: there are no tenants.
        StorageError: there is no store, or it cannot be opened.
    """
    require_tenants(settings)
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        yield store


def parse_id(text: str) -> NotificationId:
    """Return the id of a message from its text, such as ``17-sms``.

    Raises:
        UsageError: it is none.
    """
    id = parse_notification_id(text)
    if id is None:
        raise UsageError(
            f"{text!r} is no id of a message: it is a number and a channel, such as 17-email; "
            "'notify list' shows them"
        )
    return id


def list_notifications(arguments: Namespace) -> int:
    """Print the newest messages, newest first.

    Raises:
        UnknownTenantError: there is no tenant of that name.
    """
    limit = parse_count(arguments.limit, option="--limit")
    state = NotificationState(arguments.state) if arguments.state else None
    settings = load(arguments)

    async def find() -> list[NotificationRecord]:
        async with open_notifications(settings) as store:
            tenant_id = None
            if arguments.tenant is not None:
                tenant_id = await _tenant_id(settings, store, arguments.tenant)
            return list(
                await store.notifications.find(
                    state=state, channel=arguments.channel, tenant_id=tenant_id, limit=limit
                )
            )

    records = trio.run(find)
    as_json = arguments.format == "json"
    rows = [listed(r) if as_json else table_row(r) for r in records]
    print_rows(rows, LIST_COLUMNS, as_json=as_json)
    if not records:
        say("no messages")
    return 0


async def _tenant_id(settings: Settings, store: Store, key: str) -> str:
    try:
        tenant = await TenantService(settings, store.tenants).get(key)
    except UnknownTenantError:
        raise UnknownTenantError(f"there is no tenant {key!r}: 'tenant list' shows them") from None
    return tenant.id


def show_notification(arguments: Namespace) -> int:
    """Print one message with its transition.

    Raises:
        UnknownNotificationError: there is none of that id.
    """
    id = parse_id(arguments.id)
    settings = load(arguments)

    async def get() -> NotificationRecord | None:
        async with open_notifications(settings) as store:
            return await store.notifications.get(id)

    record = trio.run(get)
    if record is None:
        raise UnknownNotificationError(
            f"there is no message {id}: 'notify list' shows what there is; messages are removed 90 "
            "days after they were finished"
        )
    if arguments.format == "json":
        print_json(shown(record))
    else:
        _print_notification(record)
    return 0


def _print_notification(record: NotificationRecord) -> None:
    outbox = record.outbox
    fields = {
        "id": str(record.id),
        "state": record.state,
        "reason": record.reason,
        "attempts": record.attempts,
        "tenant": outbox.tenant_identifier,
        "transition": f"{outbox.previous_status} -> {outbox.new_status} ({outbox.transition})",
        "why": outbox.reason,
        "actor": outbox.actor,
        "occurred": moment_text(outbox.occurred_at),
        "email": outbox.site_manager_email,
        "email verified": outbox.site_manager_email_verified,
        "phone": outbox.site_manager_phone,
        "delivery id": outbox.delivery_id,
        "started": moment_text(record.started_at),
        "next attempt": moment_text(record.next_attempt_at),
        "finished": moment_text(record.finished_at),
        "provider's id": record.provider_id,
    }
    width = max(map(len, fields))
    for name, value in fields.items():
        if value is not None:
            print_text(f"{name.ljust(width)}  {cell(value)}")


#: How many messages are put back in one transaction.
CHUNK = 200

COLUMNS = ("id", "tenant", "transition", "state", "retried", "reason")


@attrs.frozen
class Candidate:
    """A requested message; ``reason`` says why it cannot be sent again, None if it can."""

    id: NotificationId
    tenant: str | None = None
    transition: str | None = None
    state: str | None = None
    reason: str | None = None


def retry(arguments: Namespace) -> int:
    """Put the named or chosen messages back; return 1 if a named one could not be put back.

    Raises:
        UsageError: neither ids nor ``--state``, or both.
    """
    if bool(arguments.ids) == bool(arguments.state):
        raise UsageError(
            "give the ids of messages, or --state failed, skipped or unknown; not both"
        )
    if arguments.ids and arguments.channel:
        raise UsageError("--channel chooses among a --state; leave it out with ids")
    ids = [parse_id(text) for text in arguments.ids]
    settings = load(arguments)
    candidates = trio.run(_candidates, settings, arguments, ids)
    possible = [candidate.id for candidate in candidates if candidate.reason is None]
    retried: set[NotificationId] = set()
    if not arguments.dry_run:
        sure = len(possible) < 2 or arguments.yes
        if not (sure or confirmed(f"send {len(possible)} messages again?")):
            say("nothing was changed")
            return EXIT_FAILURE
        retried = trio.run(_put_back, settings, possible)
    _print(candidates, retried, arguments)
    reached = set(possible) if arguments.dry_run else retried
    return EXIT_FAILURE if set(ids) - reached else 0


async def _candidates(
    settings: Settings, arguments: Namespace, ids: Sequence[NotificationId]
) -> list[Candidate]:
    options = settings.multi_tenant.notifications
    # If these settings have notifications off, only the daemon's settings say which channels count.
    enabled = enabled_channels(options) if options.enabled else tuple(CHANNELS)
    async with open_notifications(settings) as store:
        if not arguments.ids:
            return await _chosen(store.notifications, arguments, enabled)
        found = []
        for id in dict.fromkeys(ids):
            record = await store.notifications.get(id)
            missing = Candidate(id, reason="there is no such message")
            found.append(missing if record is None else _candidate(record, enabled))
        return found


async def _chosen(
    store: NotificationStore, arguments: Namespace, enabled: Sequence[str]
) -> list[Candidate]:
    found: list[Candidate] = []
    last: NotificationId | None = None
    while True:
        page = await store.find(
            state=NotificationState(arguments.state),
            channel=arguments.channel,
            before=last,
            limit=CHUNK,
        )
        if not page:
            return found
        last = page[-1].id
        found += [_candidate(record, enabled) for record in page]


def _candidate(record: NotificationRecord, enabled: Sequence[str]) -> Candidate:
    reason = None
    if record.state not in RETRIABLE:
        reason = f"is {record.state}: failed, skipped and unknown messages are sent again"
    elif record.id.channel not in enabled:
        reason = f"the channel {record.id.channel} is switched off in these settings"
    outbox = record.outbox
    return Candidate(
        record.id, outbox.tenant_identifier, str(outbox.transition), str(record.state), reason
    )


async def _put_back(settings: Settings, ids: Sequence[NotificationId]) -> set[NotificationId]:
    retried: set[NotificationId] = set()
    progress = Progress("put back", len(ids))
    async with open_notifications(settings) as store:
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            retried.update(await store.notifications.retry(chunk))
            progress.advance(len(chunk))
    return retried


def _print(
    candidates: Sequence[Candidate], retried: set[NotificationId], arguments: Namespace
) -> None:
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        done = candidate.id in retried
        reason = candidate.reason
        if not (done or reason or arguments.dry_run):
            reason = "it changed meanwhile; look at it with 'notify show'"
        rows.append(
            {
                "id": str(candidate.id),
                "tenant": candidate.tenant,
                "transition": candidate.transition,
                "state": str(NotificationState.PENDING) if done else candidate.state,
                "retried": done,
                "reason": reason,
            }
        )
    print_rows(rows, COLUMNS, as_json=arguments.format == "json")
    if arguments.dry_run:
        say(f"{sum(candidate.reason is None for candidate in candidates)} would be sent again")
    else:
        say(f"{len(retried)} put back; a running daemon sends them by itself")
