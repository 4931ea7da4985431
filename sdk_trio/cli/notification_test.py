"""``notify preview``: the messages about a transition, as each channel would send them."""

import time
import uuid
from argparse import Namespace

import attrs
import trio

from ..config import Settings
from ..config.metadata import Form
from ..config.section_switches import NOTIFICATIONS
from ..config.template_text import measure_sms
from ..config.text_formats import check_form
from ..errors import EXIT_CONFIGURATION, EXIT_FAILURE, EXIT_UNAVAILABLE
from ..notifications.send import Again, Ambiguous, Outcome, Refused, Sent, Skipped
from ..notifications.templates import Message, render, template_of
from ..records.channels import CHANNELS, ContactKind
from ..records.tenants import OutboxRecord, Tenant, TenantStatus, Transition
from .settings_reader import load
from .tenants import find_tenant
from .terminal import cell, print_json, print_text
from .usage import UsageError

#: The status of a made-up tenant before each transition.
_BEFORE = {Transition.REACTIVATED: TenantStatus.SUSPENDED}


def preview(arguments: Namespace) -> int:
    """Print subject, text, HTML and SMS; nothing is sent.

    Raises:
        UnknownTenantError: there is no such tenant.
    """
    settings = load(arguments)
    transition = Transition(arguments.transition)
    tenant = find_tenant(arguments, arguments.tenant) if arguments.tenant else None
    record = sample_record(transition, tenant, reason=arguments.reason)
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
        _print(message)
    return 0


def sample_record(
    transition: Transition, tenant: Tenant | None = None, *, reason: str | None = None
) -> OutboxRecord:
    """Return the record of a transition that has not taken place, of a tenant or a made-up one."""
    now = time.time()
    if tenant is None:
        tenant = Tenant(
            id=str(uuid.uuid4()),
            identifier="example",
            name="Example Ltd",
            status=_BEFORE.get(transition, TenantStatus.ACTIVE),
            created_at=now,
        )
        reason = reason or "invoice 2026-117 is unpaid"
    new = TenantStatus.ACTIVE if transition is Transition.REACTIVATED else TenantStatus(transition)
    return OutboxRecord(
        delivery_id=str(uuid.uuid4()),
        tenant_id=tenant.id,
        tenant_identifier=tenant.identifier,
        tenant_name=tenant.name,
        transition=transition,
        previous_status=tenant.status,
        new_status=new,
        reason=reason,
        actor="cli",
        occurred_at=now,
        site_manager_email=tenant.site_manager_email,
        site_manager_email_verified=tenant.site_manager_email_verified,
        site_manager_phone=tenant.site_manager_phone,
    )


def _print(message: Message) -> None:
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
            print_text(cell(line))
        print_text("")


_FORMS = {ContactKind.EMAIL: Form.EMAIL, ContactKind.PHONE: Form.PHONE}

#: The word, the exit status and the advice for each outcome.
_ENDINGS: dict[type, tuple[str, int, str]] = {
    Sent: ("sent", 0, ""),
    Again: ("again", EXIT_UNAVAILABLE, "test again later; a daemon tries again by itself"),
    Refused: ("refused", EXIT_FAILURE, "change that, then test again"),
    Skipped: ("skipped", EXIT_CONFIGURATION, "change that, then test again; nothing was sent"),
    Ambiguous: ("unknown", EXIT_FAILURE, "look whether it has arrived: it may have been sent"),
}


def test(arguments: Namespace) -> int:
    """Send a test message through the real sender and print its outcome.

    The channel counts as enabled for this one message, and the others as not. Status 0 when it
    was sent, 1 refused or unknown, 69 to be tried again later, 78 not sent for want of a setting.

    Raises:
        UsageError: ``--to`` is missing, or not an address of the channel.
        OptionsValidationError: the channel's settings are wrong.
    """
    settings = _settings(arguments)
    record = _record(arguments, settings)
    outcome = trio.run(_send, settings, arguments.channel, record)
    word, status, advice = _ENDINGS[type(outcome)]
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
        print_text(f"what to do: {advice}")
    return status


def _settings(arguments: Namespace) -> Settings:
    channel = CHANNELS[arguments.channel]
    own = {f"{NOTIFICATIONS}:Enabled": "true"} | {
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
        form = _FORMS[contact]
        if not arguments.to:
            raise UsageError(f"notify test --channel {arguments.channel} needs --to: {form.value}")
        wrong = check_form(form, arguments.to, development=settings.is_development)
        if wrong is not None:
            raise UsageError(f"--to {wrong}")
    return attrs.evolve(
        sample_record(Transition.SUSPENDED),
        tenant_name="A test tenant that does not exist",
        tenant_identifier="test",
        reason="this is a test of notifications, and nothing has changed",
        site_manager_email=arguments.to,
        site_manager_email_verified=True,
        site_manager_phone=arguments.to,
    )


async def _send(settings: Settings, channel: str, record: OutboxRecord) -> Outcome:
    from ..runtime.notifications import make_channels

    channels = make_channels(settings.multi_tenant.notifications)
    return await channels[channel].send(record)
