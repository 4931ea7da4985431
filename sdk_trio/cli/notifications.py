"""``notify``: messages to site managers, their texts and states.

JSON has stable names; a message's id is the sequence of its transition and its channel, ``17-sms``.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import attrs

from ..errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILURE,
    EXIT_UNAVAILABLE,
    SdkError,
)
from ..records.channels import CHANNELS, ContactKind
from ..records.states import RETRIABLE, NotificationState, Transition
from .parse import UsageError, add_format, add_limit, describing

if not describing():
    import trio

    from ..config import Settings
    from ..config.fields import Form, check_form
    from ..config.options.notifications import enabled_channels, measure_sms
    from ..config.table import NOTIFICATIONS
    from ..notifications.send import (
        Again,
        Ambiguous,
        Outcome,
        Refused,
        Sent,
        Skipped,
        sample_record,
    )
    from ..notifications.templates import Message, render, template_of
    from ..records.notifications import (
        NotificationId,
        NotificationRecord,
        listed_notification,
        parse_notification_id,
    )
    from ..records.tenants import OutboxRecord
    from .settings import load
    from .store import open_store, require_tenants, tenant_id_of
    from .tenants import find_tenant
    from .terminal import (
        Progress,
        cell,
        confirmed,
        print_fields,
        print_json,
        print_list,
        print_text,
        say,
    )

#: The columns of ``notify list``.
LIST_COLUMNS = (
    "id",
    ("tenant", "tenant_identifier"),
    "transition",
    "occurred_at",
    "state",
    "attempts",
    "reason",
)


def shown(record: NotificationRecord) -> dict[str, Any]:
    """Return one whole message with its transition and its recipient."""
    transition = attrs.asdict(record.outbox)
    # The sequence in the outbox is internal, and the message's id starts with it.
    del transition["sequence"]
    return {**listed_notification(record), "outbox": transition}


class UnknownNotificationError(SdkError):
    """The store has no message with this id."""


def parse_id(text: str) -> NotificationId:
    """Return the id of a message from its text, such as ``17-sms``.

    Raises:
        UsageError: it is not an id.
    """
    id = parse_notification_id(text)
    if id is None:
        raise UsageError(
            f"{text!r} is not the id of a message: use a number and a channel, such as 17-email; "
            "'notify list' shows them"
        )
    return id


def list_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``notify list``."""
    parser.add_argument(
        "--state", choices=[state.value for state in NotificationState], help="only this state"
    )
    parser.add_argument("--channel", choices=CHANNELS, help="only this channel")
    parser.add_argument("--tenant", metavar="T", help="only this tenant, or its id")
    add_limit(parser)
    add_format(parser)


def list_notifications(arguments: Namespace) -> int:
    """Print the newest messages, newest first.

    Raises:
        UnknownTenantError: there is no tenant of that name.
    """
    state = NotificationState(arguments.state) if arguments.state else None
    settings = load(arguments)

    async def find() -> Sequence[NotificationRecord]:
        require_tenants(settings)
        tenant_id = await tenant_id_of(settings, arguments.tenant)
        async with open_store(settings) as store:
            return await store.notifications.find(
                state=state,
                channel=arguments.channel,
                tenant_id=tenant_id,
                limit=arguments.limit + 1,
            )

    print_list(
        arguments,
        [listed_notification(record) for record in trio.run(find)],
        LIST_COLUMNS,
        nothing="no messages",
        limit=arguments.limit,
        more="--limit N, or --state S, --channel C, --tenant T",
    )
    return 0


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``notify show``."""
    parser.add_argument("id", metavar="ID", help="the message, such as 17-email")
    add_format(parser)


def show_notification(arguments: Namespace) -> int:
    """Print one message with its transition.

    Raises:
        UnknownNotificationError: there is no message with that id.
    """
    id = parse_id(arguments.id)
    settings = load(arguments)

    async def get() -> NotificationRecord | None:
        async with open_store(settings) as store:
            return await store.notifications.get(id)

    record = trio.run(get)
    if record is None:
        raise UnknownNotificationError(
            f"there is no message {id}: 'notify list' lists the messages; they are removed 90 "
            "days after they were finished"
        )
    if arguments.format == "json":
        print_json(shown(record))
    else:
        _print_notification(record)
    return 0


def _print_notification(record: NotificationRecord) -> None:
    outbox = record.outbox
    print_fields(
        {
            "id": str(record.id),
            "state": record.state,
            "reason": record.reason,
            "attempts": record.attempts,
            "tenant": outbox.tenant_identifier,
            "transition": f"{outbox.previous_status} -> {outbox.new_status} ({outbox.transition})",
            "why": outbox.reason,
            "actor": outbox.actor,
            "occurred_at": outbox.occurred_at,
            "email": outbox.site_manager_email,
            "email_verified": outbox.site_manager_email_verified,
            "phone": outbox.site_manager_phone,
            "delivery_id": outbox.delivery_id,
            "started_at": record.started_at,
            "next_attempt_at": record.next_attempt_at,
            "finished_at": record.finished_at,
            "provider's id": record.provider_id,
        }
    )


#: The number of messages retried in one transaction; longer transactions would delay a running
#: receiver's commits.
CHUNK = 200

COLUMNS = ("id", "tenant", "transition", "state", "retried", "reason")


def retry_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``notify retry``."""
    parser.add_argument("ids", metavar="ID", nargs="*", help="messages, such as 17-email")
    parser.add_argument(
        "--state",
        choices=[state.value for state in NotificationState if state in RETRIABLE],
        help="every message in this state, instead of ids",
    )
    parser.add_argument("--channel", choices=CHANNELS, help="with --state: only this channel")
    parser.add_argument("--dry-run", action="store_true", help="list the messages, send none")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_format(parser)


def retry(arguments: Namespace) -> int:
    """Retry the named or selected messages; return 1 if a named one could not be retried.

    Raises:
        UsageError: neither ids nor ``--state``, or both.
    """
    if bool(arguments.ids) == bool(arguments.state):
        both = "; not both" if arguments.ids else ""
        raise UsageError(f"give the ids of messages, or --state failed, skipped or unknown{both}")
    if arguments.ids and arguments.channel:
        raise UsageError(
            "--channel filters the messages of a --state: remove it, or give a --state instead "
            "of ids"
        )
    ids = [parse_id(text) for text in arguments.ids]
    settings = load(arguments)
    rows = trio.run(_candidates, settings, arguments, ids)
    possible = [id for id, row in rows.items() if row["reason"] is None]
    retried: set[NotificationId] = set()
    if not arguments.dry_run:
        # People read these messages, and some may have arrived already: ask before many are sent
        # again.
        sure = len(possible) < 2 or arguments.yes
        if not (sure or confirmed(f"send {len(possible)} messages again?")):
            say("nothing was changed")
            return EXIT_FAILURE
        retried = trio.run(_retry_all, settings, possible)
    for id, row in rows.items():
        if id in retried:
            row |= {"state": str(NotificationState.PENDING), "retried": True}
        # The daemon may have sent it since it was read, or another command may have retried it.
        elif not (row["reason"] or arguments.dry_run):
            row["reason"] = "it changed in the meantime; check it with 'notify show'"
    print_list(arguments, list(rows.values()), COLUMNS)
    if arguments.dry_run:
        say(f"{len(possible)} would be sent again")
    else:
        say(f"{len(retried)} will be sent again by a running daemon")
    reached = set(possible) if arguments.dry_run else retried
    return EXIT_FAILURE if set(ids) - reached else 0


async def _candidates(
    settings: Settings, arguments: Namespace, ids: Sequence[NotificationId]
) -> dict[NotificationId, dict[str, Any]]:
    """Return a row per requested message; ``reason`` says why it cannot be sent again."""
    options = settings.multi_tenant.notifications
    # If these settings disable notifications, only the daemon's settings know the channels.
    enabled = enabled_channels(options) if options.enabled else tuple(CHANNELS)
    async with open_store(settings) as store:
        messages = store.notifications
        if not arguments.ids:
            found: list[NotificationRecord] = []
            while page := await messages.find(
                state=NotificationState(arguments.state),
                channel=arguments.channel,
                before=found[-1].id if found else None,
                limit=CHUNK,
            ):
                found += page
            return {record.id: _candidate(record.id, record, enabled) for record in found}
        return {id: _candidate(id, await messages.get(id), enabled) for id in ids}


def _candidate(
    id: NotificationId, record: NotificationRecord | None, enabled: Sequence[str]
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"id": str(id), "retried": False}
    if record is None:
        return row | {"reason": "there is no such message"}
    if record.state not in RETRIABLE:
        row["reason"] = f"is {record.state}: failed, skipped and unknown messages are sent again"
    elif record.id.channel not in enabled:
        # A retry would be skipped at once, with a less precise state than the old one.
        row["reason"] = f"the channel {record.id.channel} is switched off in these settings"
    outbox = record.outbox
    return row | {
        "tenant": outbox.tenant_identifier,
        "transition": str(outbox.transition),
        "state": str(record.state),
    }


async def _retry_all(settings: Settings, ids: Sequence[NotificationId]) -> set[NotificationId]:
    retried: set[NotificationId] = set()
    progress = Progress("retried", len(ids))
    async with open_store(settings) as store:
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            retried.update(await store.notifications.retry(chunk))
            progress.advance(len(chunk))
    return retried


# -- notify preview, notify test -----------------------------------------------------------------


def preview_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``notify preview``."""
    parser.add_argument(
        "--transition",
        choices=[transition.value for transition in Transition],
        required=True,
        help="which texts",
    )
    parser.add_argument(
        "--tenant", metavar="T", help="a tenant, or its id, instead of sample values"
    )
    parser.add_argument("--reason", metavar="R", help="the reason (default: a made-up one)")
    add_format(parser)


def preview(arguments: Namespace) -> int:
    """Print subject, text, HTML and SMS; nothing is sent.

    Raises:
        UnknownTenantError: there is no such tenant.
    """
    settings = load(arguments)
    transition = Transition(arguments.transition)
    tenant = find_tenant(arguments, arguments.tenant) if arguments.tenant else None
    record = sample_record(transition, tenant, now=time.time(), reason=arguments.reason)
    templates = settings.multi_tenant.notifications.templates
    message = render(template_of(templates, transition), record)
    if arguments.format == "json":
        size = measure_sms(message.sms_text)
        print_json(
            {
                "transition": str(transition),
                "email_subject": message.email_subject,
                "email_text": message.email_text,
                "email_html": message.email_html,
                "sms_text": message.sms_text,
                "sms_encoding": size.encoding,
                "sms_units": size.units,
                "sms_segments": size.segments,
            }
        )
    else:
        _print_message(message)
    return 0


def _print_message(message: Message) -> None:
    size = measure_sms(message.sms_text)
    plural = "" if size.segments == 1 else "s"
    sms = f"SMS: {size.segments} segment{plural}, {size.units} units of {size.encoding}"
    for heading, text in (
        ("Email subject", message.email_subject),
        ("Email text", message.email_text),
        ("Email HTML", message.email_html),
        (sms, message.sms_text),
    ):
        print_text(f"--- {heading} ---")
        for line in text.splitlines():
            # A template may contain any characters of a settings file: no control characters for
            # the terminal.
            print_text(cell(line))
        print_text("")


def _ending_of(outcome: Outcome) -> tuple[str, int, str]:
    """Return the word, the exit status and the advice for an outcome."""
    match outcome:
        case Sent():
            return "sent", 0, ""
        case Again():
            advice = "test again later; a daemon retries automatically"
            return "again", EXIT_UNAVAILABLE, advice
        case Refused():
            return "refused", EXIT_FAILURE, "change that, then test again"
        case Skipped():
            return "skipped", EXIT_CONFIGURATION, "change that, then test again; nothing was sent"
        # 1 and not 69: scripts retry after 69, which might send it twice.
        case Ambiguous():
            advice = "check whether it has arrived: it may have been sent"
            return "unknown", EXIT_FAILURE, advice


def test_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``notify test``."""
    parser.add_argument("--channel", choices=CHANNELS, required=True, help="which channel")
    parser.add_argument(
        "--to",
        metavar="ADDRESS",
        help="an email address, a phone number as +15551234567, or a URL (of webhook; default: the "
        "configured one)",
    )
    add_format(parser)


def test(arguments: Namespace) -> int:
    """Send a test message through the real sender and print its outcome.

    Only this channel counts as enabled for this message. Status 0 if it was sent, 1 if refused or
    unknown, 69 if it should be retried later, 78 if a missing setting prevented it.

    Raises:
        UsageError: ``--to`` is missing, or not an address of the channel.
        OptionsValidationError: the channel's settings are wrong.
    """
    settings = _settings(arguments)
    record = _record(arguments, settings)
    outcome = trio.run(_send, settings, arguments.channel, record)
    word, status, advice = _ending_of(outcome)
    provider_id = outcome.provider_id if isinstance(outcome, Sent) else None
    reason = None if isinstance(outcome, Sent) else outcome.reason
    if arguments.format == "json":
        print_json(
            {
                "channel": arguments.channel,
                "outcome": word,
                "provider_id": provider_id,
                "reason": reason,
                "after_seconds": outcome.after_seconds if isinstance(outcome, Again) else None,
                "advice": advice or None,
                "delivery_id": record.delivery_id,
            }
        )
        return status
    detail = f" as {provider_id}" if provider_id else ""
    print_text(cell(f"{word}{detail}: {reason}" if reason else f"{word}{detail}"))
    if isinstance(outcome, Again) and outcome.after_seconds is not None:
        print_text(f"not before {outcome.after_seconds:.0f} s from now")
    if advice:
        print_text(f"to do: {advice}")
    return status


def _settings(arguments: Namespace) -> Settings:
    channel = CHANNELS[arguments.channel]
    if arguments.to and channel.contact is None and channel.target is None:
        raise UsageError(
            f"notify test --channel {channel.name} takes no --to: the message goes where "
            f"{NOTIFICATIONS}:{channel.key} says"
        )
    own = {f"{NOTIFICATIONS}:Enabled": "true"} | {
        # The others are disabled, so that only this channel's settings must be valid.
        f"{NOTIFICATIONS}:EnabledChannels:{row.key}": str(row is channel).lower()
        for row in CHANNELS.values()
    }
    if channel.target is not None and arguments.to:
        own[f"{NOTIFICATIONS}:{channel.key}:{channel.target}"] = arguments.to
    # Appended as --set arguments, so that the command's own options win over the given ones.
    arguments.set = [*arguments.set, *(f"{key}={value}" for key, value in own.items())]
    return load(arguments)


def _record(arguments: Namespace, settings: Settings) -> OutboxRecord:
    contact = CHANNELS[arguments.channel].contact
    if contact is not None:
        form = {ContactKind.EMAIL: Form.EMAIL, ContactKind.PHONE: Form.PHONE}[contact]
        if not arguments.to:
            raise UsageError(f"notify test --channel {arguments.channel} needs --to: {form.value}")
        wrong = check_form(form, arguments.to, development=settings.is_development)
        if wrong is not None:
            raise UsageError(f"--to {wrong}")
    return attrs.evolve(
        sample_record(Transition.SUSPENDED, now=time.time()),
        # The recipient must not mistake the message for a real suspension.
        tenant_name="A test tenant that does not exist",
        tenant_identifier="test",
        reason="this is a test of notifications, and nothing has changed",
        site_manager_email=arguments.to,
        # The address was entered manually for this message, so it needs no verification.
        site_manager_email_verified=True,
        site_manager_phone=arguments.to,
    )


async def _send(settings: Settings, channel: str, record: OutboxRecord) -> Outcome:
    from ..runtime.notifications import make_channels

    channels = make_channels(settings.multi_tenant.notifications)
    return await channels[channel].send(record)
