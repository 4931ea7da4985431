"""The interface of tenants' transitions, for the rest of the program."""

from typing import Protocol

from ..storage.tenant_records import Tenant
from .status import TransitionResult

#: The actor in the audit trail when a program names none.
APPLICATION = "application"

#: A tenant, its id or its identifier.
TenantKey = Tenant | str


class TenantStatusService(Protocol):
    """The four transitions of a tenant.

    Each takes a tenant (the record, its id or its identifier), a reason (one line, at most 1000
    characters) and an actor (at most 200). For a tenant in that status already it is a successful
    no-op: nothing is written and no message is sent. With ``expected_version`` the tenant must
    still have the version that the caller has seen.

    Each writes the status, its audit row and its outbox row in one transaction. When it is
    cancelled, either nothing or all of it is written; reading the tenant tells which. Each raises:

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

        A tenant whose site manager's email is not verified is not suspended, since nobody would
        learn of it, unless ``RequireVerifiedEmailForSuspension`` is false, or
        ``bypass_email_verification`` is given while ``SuspendUnverifiedTenantsAnyway`` is true. The
        audit row names the setting.

        Raises:
            SuspensionRefusedError: the email is not verified, and nothing relaxes the rule.
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
