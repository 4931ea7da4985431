"""Tenants as stored: plain records, and rules that every store applies. Pure.

Times are Unix seconds as floats. Ids are UUIDs in canonical text form. Credentials are stored as
the names of their sources, ``env:NAME`` or ``file:PATH``, so a copy of the store contains no
credential.
"""

import enum
import hashlib
import json

import attrs

from ..errors import TenantConflictError, TenantExistsError, UnknownTenantError
from .states import TenantStatus as TenantStatus
from .states import Transition as Transition


class AuditAction(enum.StrEnum):
    """The subject of an audit row: a transition, or another change of the tenant."""

    CREATED = "Created"
    SUSPENDED = "Suspended"
    REACTIVATED = "Reactivated"
    DEACTIVATED = "Deactivated"
    DELETED = "Deleted"
    CHANGED = "Changed"
    PURGED = "Purged"
    REFUSED = "Refused"


@attrs.frozen
class EnvironmentVariable:
    """A credential that is the value of an environment variable."""

    name: str


@attrs.frozen
class KeyFile:
    """A credential that is the content of a file; ``path`` is absolute."""

    path: str


CredentialSource = EnvironmentVariable | KeyFile


@attrs.frozen(kw_only=True)
class TenantCredentials:
    """The sources of a tenant's own credentials; never the credentials themselves.

    Without ``access_token``, the host's token is used. A source of ``webhook_secrets`` has one
    secret per line, so a rotation is an edit of its content.
    """

    access_token: CredentialSource | None = None
    webhook_secrets: tuple[CredentialSource, ...] = ()

    @property
    def sources(self) -> tuple[CredentialSource, ...]:
        """Every configured source."""
        token = self.access_token
        return (*(() if token is None else (token,)), *self.webhook_secrets)


@attrs.frozen(kw_only=True)
class Tenant:
    """One tenant in its current stored state.

    ``identifier`` is the slug that people use; ``version`` counts its changes from 1.
    ``deleted_at`` is set while the status is ``Deleted``.
    """

    id: str
    identifier: str
    name: str
    status: TenantStatus = TenantStatus.ACTIVE
    site_manager_email: str | None = None
    site_manager_email_verified: bool = False
    site_manager_phone: str | None = None
    organization_id: str | None = None
    created_at: float
    deleted_at: float | None = None
    version: int = 1
    credentials: TenantCredentials = TenantCredentials()

    @property
    def is_active(self) -> bool:
        """Whether this tenant's client and database may be used."""
        return self.status is TenantStatus.ACTIVE

    @property
    def is_deleted(self) -> bool:
        """Whether it was deleted: its events are parked, including those signed by the host."""
        return self.status is TenantStatus.DELETED


@attrs.frozen(kw_only=True)
class AuditRecord:
    """A change of a tenant: its actor, time, reason, and the setting that relaxed a rule for it.

    ``sequence`` grows with every change of any tenant; the store sets it. ``relaxation`` is the
    full key of a setting. ``details`` names the changed values if the action does not; for a
    refused transition, its name and the reason.
    """

    sequence: int = 0
    tenant_id: str
    tenant_identifier: str
    action: AuditAction
    previous_status: TenantStatus | None = None
    new_status: TenantStatus | None = None
    actor: str
    reason: str | None = None
    relaxation: str | None = None
    details: str | None = None
    occurred_at: float


@attrs.frozen(kw_only=True)
class OutboxRecord:
    """One transition, published to the rest of the program with the data for its messages.

    ``sequence`` grows with every transition; the store sets it. ``delivery_id`` is a UUID. The
    site manager's address is the one at the time of the transition.
    """

    sequence: int = 0
    delivery_id: str
    tenant_id: str
    tenant_identifier: str
    tenant_name: str
    transition: Transition
    previous_status: TenantStatus
    new_status: TenantStatus
    reason: str | None
    actor: str
    occurred_at: float
    site_manager_email: str | None = None
    site_manager_email_verified: bool = False
    site_manager_phone: str | None = None


@attrs.frozen
class TenantPurged:
    """Counts of the rows that a purge removed besides the tenant's own."""

    outbox: int
    audit: int


def erasure_mark(organization_id: str) -> str:
    """Return the checkpoint name that records the purge of an organization's tenant.

    It contains a digest of the organization id, because a purged tenant's data must be gone.
    Without the record, a late redelivery would find no tenant and run as the host's.
    """
    return f"tenant.erased.{hashlib.sha256(organization_id.encode()).hexdigest()}"


def source_to_text(source: CredentialSource) -> str:
    """Return the text form of a source."""
    if isinstance(source, EnvironmentVariable):
        return f"env:{source.name}"
    return f"file:{source.path}"


def source_from_text(text: str) -> CredentialSource:
    """Return the source of a text of :func:`source_to_text`.

    Raises:
        ValueError: the text is not a source.
    """
    # Split only at the first colon: Windows paths contain another.
    kind, _, name = text.partition(":")
    if kind == "env" and name:
        return EnvironmentVariable(name)
    if kind == "file" and name:
        return KeyFile(name)
    raise ValueError("a source must be env: and a variable's name, or file: and a path")


def credentials_to_text(credentials: TenantCredentials) -> str | None:
    """Return the text to store; None for credentials without any source."""
    # NULL in the store: tenants without credentials are found without reading JSON.
    if credentials == TenantCredentials():
        return None
    token = credentials.access_token
    return json.dumps(
        {
            "access_token": None if token is None else source_to_text(token),
            "webhook_secrets": [source_to_text(source) for source in credentials.webhook_secrets],
        }
    )


def credentials_from_text(text: str | None) -> TenantCredentials:
    """Return the credentials of a text of :func:`credentials_to_text`."""
    if text is None:
        return TenantCredentials()
    found = json.loads(text)
    token = found["access_token"]
    return TenantCredentials(
        access_token=None if token is None else source_from_text(token),
        webhook_secrets=tuple(map(source_from_text, found["webhook_secrets"])),
    )


def require_version(stored: int | None, tenant: Tenant, *, expected: int) -> None:
    """Raise unless the stored version of ``tenant`` is ``expected``; None: it is not stored."""
    if stored is None:
        raise UnknownTenantError(f"the tenant {tenant.identifier!r} no longer exists")
    # Optimistic locking: a person at a form would hold a lock for minutes.
    if stored != expected:
        raise TenantConflictError(
            f"the tenant {tenant.identifier!r} was changed by someone else in the meantime "
            "(version "
            f"{stored}, not {expected}): this call changed nothing; check the tenant "
            "and try again"
        )


def taken(column: str, value: str | None, holder: str) -> TenantExistsError:
    """Return the error for a value that another tenant already has."""
    name = column.replace("_", " ")
    return TenantExistsError(
        f"the {name} {value!r} belongs to the tenant {holder!r} already: choose another one"
    )
