"""``notify preview``: the messages about a transition, as each channel would send them."""

import time
import uuid
from argparse import Namespace

from ..config.segments import measure_sms
from ..notifications.templates import Message, render, template_of
from ..storage.tenant_records import OutboxRecord, Tenant, TenantStatus, Transition
from .printer import cell, print_json, print_text
from .settings_reader import load
from .tenants import find_tenant

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
