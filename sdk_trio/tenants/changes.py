"""The records that one change of a tenant writes: row, audit and outbox. Pure."""

import attrs

from ..storage.tenant_records import (
    AuditAction,
    AuditRecord,
    OutboxRecord,
    Tenant,
    TenantStatus,
    Transition,
)
from . import identity


def is_verified(email: str | None, verified: bool) -> bool:
    """Return whether there is an address, and it is verified."""
    return verified and email is not None


def in_status(tenant: Tenant, status: TenantStatus, now: float) -> Tenant:
    """Return the tenant's next version, in another status since ``now``."""
    return attrs.evolve(
        tenant,
        status=status,
        deleted_at=now if status is TenantStatus.DELETED else None,
        version=tenant.version + 1,
    )


def audit_of(
    tenant: Tenant, action: AuditAction, reason: str | None, actor: str, now: float
) -> AuditRecord:
    """Return the audit row of a change; raise InvalidTenantError for a bad reason or actor."""
    return AuditRecord(
        tenant_id=tenant.id,
        tenant_identifier=tenant.identifier,
        action=action,
        actor=identity.check_actor(actor),
        reason=identity.check_reason(reason),
        occurred_at=now,
    )


def refused(audit: AuditRecord, transition: Transition, tenant: Tenant, why: str) -> AuditRecord:
    """Return the audit row of a transition that was requested and refused.

    Somebody who looks for an intruder or a broken script needs the refused requests as well.
    """
    return attrs.evolve(
        audit,
        action=AuditAction.REFUSED,
        previous_status=tenant.status,
        new_status=tenant.status,
        details=f"{transition}: {why}",
    )


def outbox_of(
    tenant: Tenant, transition: Transition, audit: AuditRecord, delivery_id: str
) -> OutboxRecord:
    """Return the outbox row that announces a transition to the tenant's present status."""
    if audit.previous_status is None:
        raise AssertionError("a transition has a previous status")
    return OutboxRecord(
        delivery_id=delivery_id,
        tenant_id=tenant.id,
        tenant_identifier=tenant.identifier,
        tenant_name=tenant.name,
        transition=transition,
        previous_status=audit.previous_status,
        new_status=tenant.status,
        reason=audit.reason,
        actor=audit.actor,
        occurred_at=audit.occurred_at,
        site_manager_email=tenant.site_manager_email,
        site_manager_email_verified=tenant.site_manager_email_verified,
        site_manager_phone=tenant.site_manager_phone,
    )
