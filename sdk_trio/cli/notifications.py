"""``notify list`` and ``notify show``: the messages to site managers and their outcomes."""

import uuid
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ..config import Settings
from ..errors import SdkError, UnknownTenantError
from ..storage import open_store
from ..storage.notification_records import (
    NotificationId,
    NotificationRecord,
    NotificationState,
    parse_notification_id,
)
from ..storage.ports import Store
from ..tenants import TenantService
from .moments import moment_text, parse_count
from .notification_rows import LIST_COLUMNS, listed, shown, table_row
from .printer import cell, print_json, print_rows, print_text, say
from .settings_reader import load
from .upgrade import require_tenants
from .usage import UsageError


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
