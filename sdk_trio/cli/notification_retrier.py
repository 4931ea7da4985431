"""``notify retry``: repeats messages that were not sent, or may not have been sent."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from ..config import Settings
from ..config.notification_options import enabled_channels
from ..errors import EXIT_FAILURE
from ..storage.notification_records import (
    RETRIABLE,
    NotificationId,
    NotificationRecord,
    NotificationState,
)
from ..storage.ports import NotificationStore
from .command_arguments import CHANNELS
from .notifications import open_notifications, parse_id
from .printer import Progress, print_rows, say
from .questioner import confirmed
from .settings_reader import load
from .usage import UsageError

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
    enabled = enabled_channels(options) if options.enabled else CHANNELS
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
