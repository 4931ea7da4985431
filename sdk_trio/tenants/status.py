"""The status of a tenant: its transitions, their conditions, and their actor. Pure."""

from collections.abc import Mapping
from typing import Protocol

import attrs

from ..config import Settings
from ..errors import IllegalTransitionError, SuspensionRefusedError
from ..records.tenants import AuditAction, Tenant, TenantStatus, Transition

DAY_SECONDS = 86_400.0

_STATUS_KEY = "Sdk:MultiTenant:TenantStatus"

#: The settings that can relax the rule of the verified email; an audit row names the one that did.
REQUIRE_VERIFIED_EMAIL = f"{_STATUS_KEY}:RequireVerifiedEmailForSuspension"
SUSPEND_ANYWAY = f"{_STATUS_KEY}:SuspendUnverifiedTenantsAnyway"

_ACTIVE, _SUSPENDED = TenantStatus.ACTIVE, TenantStatus.SUSPENDED
_DEACTIVATED, _DELETED = TenantStatus.DEACTIVATED, TenantStatus.DELETED

#: The target status of each transition, and the statuses it may start from. If the tenant already
#: has the target status, it is a no-op, so that a command can be repeated.
TARGETS: Mapping[Transition, TenantStatus] = {
    Transition.SUSPENDED: _SUSPENDED,
    Transition.DEACTIVATED: _DEACTIVATED,
    Transition.REACTIVATED: _ACTIVE,
    Transition.DELETED: _DELETED,
}
SOURCES: Mapping[Transition, frozenset[TenantStatus]] = {
    Transition.SUSPENDED: frozenset({_ACTIVE}),
    Transition.DEACTIVATED: frozenset({_ACTIVE, _SUSPENDED}),
    Transition.REACTIVATED: frozenset({_SUSPENDED, _DEACTIVATED, _DELETED}),
    Transition.DELETED: frozenset({_ACTIVE, _SUSPENDED, _DEACTIVATED}),
}

ACTIONS: Mapping[Transition, AuditAction] = {
    transition: AuditAction(transition.value) for transition in Transition
}

_VERBS: Mapping[Transition, str] = {
    Transition.SUSPENDED: "suspended",
    Transition.DEACTIVATED: "deactivated",
    Transition.REACTIVATED: "reactivated",
    Transition.DELETED: "deleted",
}


@attrs.frozen(kw_only=True)
class StatusPolicy:
    """The settings of transitions."""

    require_verified_email: bool = True
    suspend_unverified_anyway: bool = False
    retention_seconds: float = 90 * DAY_SECONDS

    @classmethod
    def of(cls, settings: Settings) -> "StatusPolicy":
        """Return the policy of ``settings``."""
        options = settings.multi_tenant.tenant_status
        return cls(
            require_verified_email=options.require_verified_email_for_suspension,
            suspend_unverified_anyway=options.suspend_unverified_tenants_anyway,
            retention_seconds=options.deleted_tenant_retention_days * DAY_SECONDS,
        )


@attrs.frozen(kw_only=True)
class Decision:
    """The effect of an allowed transition; ``no_op`` when the tenant has that status already.

    ``relaxation`` is the full key of the setting without which it would have been refused.
    """

    new_status: TenantStatus
    no_op: bool = False
    relaxation: str | None = None


@attrs.frozen(kw_only=True)
class TransitionResult:
    """The result of a transition. ``tenant`` is its current record.

    ``no_op``: it already had that status, so nothing was written and no message is sent.
    ``occurred_at`` is in Unix seconds.
    """

    tenant: Tenant
    transition: Transition
    previous_status: TenantStatus
    new_status: TenantStatus
    no_op: bool
    occurred_at: float
    relaxation: str | None = None


def decide(
    tenant: Tenant,
    transition: Transition,
    policy: StatusPolicy,
    *,
    now: float,
    bypass_email_verification: bool = False,
) -> Decision:
    """Decide about one transition.

    Args:
        tenant: its current record.
        transition: the requested transition.
        policy: the settings.
        now: Unix seconds; a deleted tenant can be reactivated until its retention has passed.
        bypass_email_verification: suspend although the site manager's email is not verified;
            counts only while ``SuspendUnverifiedTenantsAnyway`` is true.

    Raises:
        IllegalTransitionError: the status does not allow it.
        SuspensionRefusedError: the email is not verified, and no setting relaxes that rule.
    """
    target = TARGETS[transition]
    # A repeated transition is not an error: people press a button twice.
    if tenant.status is target:
        return Decision(new_status=target, no_op=True)
    if tenant.status not in SOURCES[transition]:
        allowed = " or ".join(sorted(SOURCES[transition]))
        raise _illegal(tenant, transition, f"only one that is {allowed} can be")
    # From then on a purge may be in progress, and would continue under an active tenant.
    if tenant.status is _DELETED and not is_retained(tenant, policy, now=now):
        raise _illegal(
            tenant,
            transition,
            f"its retention of {policy.retention_seconds / DAY_SECONDS:g} days has passed "
            f"({_STATUS_KEY}:DeletedTenantRetentionDays)",
        )
    relaxation = None
    if transition is Transition.SUSPENDED:
        relaxation = _relaxation(tenant, policy, bypass=bypass_email_verification)
    return Decision(new_status=target, relaxation=relaxation)


def is_retained(tenant: Tenant, policy: StatusPolicy, *, now: float) -> bool:
    """Return whether a deleted tenant is within its retention and can be reactivated."""
    # Without a deletion time the retention starts now: data must not be removed because a field is
    # missing.
    deleted_at = now if tenant.deleted_at is None else tenant.deleted_at
    return now - deleted_at <= policy.retention_seconds


def _relaxation(tenant: Tenant, policy: StatusPolicy, *, bypass: bool) -> str | None:
    """Return the setting that lets an unverified tenant be suspended; None if none is needed."""
    # The site manager of a suspended tenant must learn of it; an unverified address may be a
    # stranger's.
    if tenant.site_manager_email_verified:
        return None
    if not policy.require_verified_email:
        return REQUIRE_VERIFIED_EMAIL
    if bypass and policy.suspend_unverified_anyway:
        return SUSPEND_ANYWAY
    if bypass:
        advice = f"the bypass counts only while {SUSPEND_ANYWAY} is true, and it is false"
    elif policy.suspend_unverified_anyway:
        advice = "verify it, or bypass this rule (--bypass-email-verification)"
    else:
        advice = f"verify it, or relax the rule with {REQUIRE_VERIFIED_EMAIL} or {SUSPEND_ANYWAY}"
    raise SuspensionRefusedError(
        f"the tenant {tenant.identifier!r} is not suspended: its site manager's email is not "
        f"verified; {advice}"
    )


def _illegal(tenant: Tenant, transition: Transition, why: str) -> IllegalTransitionError:
    return IllegalTransitionError(
        f"the tenant {tenant.identifier!r} is {tenant.status} and cannot be "
        f"{_VERBS[transition]}: {why}",
        status=tenant.status,
        transition=transition,
    )


#: The actor in the audit trail when a program names none.
APPLICATION = "application"

#: A tenant, its id or its identifier.
TenantKey = Tenant | str


class TenantStatusService(Protocol):
    """The four transitions of a tenant.

    Each takes a tenant (the record, its id or its identifier), a reason (one line, at most 1000
    characters) and an actor (at most 200). If the tenant already has the status, it is a no-op:
    nothing is written and no message is sent. With ``expected_version``, the tenant must still have
    that version.

    Each writes the status, its audit row and its outbox row in one transaction. On cancellation,
    either all or nothing is written; reading the tenant shows which. Each raises:

    - UnknownTenantError: there is no such tenant.
    - IllegalTransitionError: its status does not allow the transition.
    - TenantConflictError: another change of the tenant came first; of simultaneous ones, one wins.
    - InvalidTenantError: reason or actor cannot be accepted.
    - StoreUnavailableError: the store cannot write at present.
    """

    async def suspend(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        bypass_email_verification: bool = False,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """Suspend an active tenant.

        A tenant whose site manager's email is unverified is not suspended, since no one would learn
        of it. Exceptions: ``RequireVerifiedEmailForSuspension`` is false, or
        ``bypass_email_verification`` is given while ``SuspendUnverifiedTenantsAnyway`` is true. The
        audit row names the setting.

        Raises:
            SuspensionRefusedError: the email is not verified, and no setting relaxes the rule.
        """
        ...

    async def reactivate(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """Make a tenant active again; a deleted one within ``DeletedTenantRetentionDays``."""
        ...

    async def deactivate(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """Deactivate an active or suspended tenant."""
        ...

    async def delete(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """Delete a tenant softly: its data stays until it is purged."""
        ...
