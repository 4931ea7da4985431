"""The settings of tenants, of the upgrade, and the sections below ``MultiTenant``. Pure."""

from datetime import timedelta

import attrs

from ..choices import DefaultTenantStrategy
from ..metadata import Form, about
from .notifications import NotificationsOptions
from .replication import ReplicationOptions


@attrs.frozen(kw_only=True)
class SingleTenantUpgradeOptions:
    """The one-time upgrade of a single-tenant host."""

    enable_automatic_upgrade: bool = attrs.field(
        default=True,
        metadata=about(
            "Run the upgrade on the first multi-tenant boot; otherwise by an explicit command."
        ),
    )
    default_tenant_strategy: DefaultTenantStrategy = attrs.field(
        default=DefaultTenantStrategy.LITERAL_DEFAULT,
        metadata=about("How the default tenant is found."),
    )
    literal_default_tenant_slug: str = attrs.field(
        default="default",
        metadata=about(
            "Identifier of the default tenant; required by strategy LiteralDefault.",
            form=Form.SLUG,
            required=True,
        ),
    )
    literal_default_tenant_name: str = attrs.field(
        default="Default Tenant",
        metadata=about(
            "Display name of the default tenant; required by strategy LiteralDefault.",
            required=True,
        ),
    )
    literal_default_tenant_organization_id: str | None = attrs.field(
        default=None,
        metadata=about(
            "Organization of the default tenant, for strategy LiteralDefault; null: the one that "
            "the stored deliveries name, if it is one."
        ),
    )
    # A host that goes on writing to the old database would write to what is no tenant's any more.
    require_graceful_quiescence: bool = attrs.field(
        default=True,
        metadata=about("Refuse to run unless the host has signalled quiescence."),
    )
    max_run_duration: timedelta = attrs.field(
        default=timedelta(minutes=30),
        metadata=about("Hard wall-clock cap of the upgrade.", minimum=1, unit="seconds"),
    )
    source_database: str | None = attrs.field(
        default=None,
        metadata=about(
            "The single-tenant SQLite database; it is copied for the default tenant.",
            default_note="default.db in the FileDb directory, if there is one",
        ),
    )


@attrs.frozen(kw_only=True)
class FileDbOptions:
    """The tenants' database files."""

    directory: str | None = attrs.field(
        default=None,
        metadata=about(
            "Directory with one SQLite file per tenant.",
            default_note="tenants under the data directory",
        ),
    )
    replication: ReplicationOptions = attrs.field(factory=ReplicationOptions)


@attrs.frozen(kw_only=True)
class TenantStatusOptions:
    """Policy of the tenant status service."""

    require_verified_email_for_suspension: bool = attrs.field(
        default=True,
        metadata=about("Refuse to suspend a tenant whose site manager's email is not verified."),
    )
    suspend_unverified_tenants_anyway: bool = attrs.field(
        default=False,
        metadata=about("Allow the per-call bypass of the requirement above."),
    )
    deleted_tenant_retention_days: int = attrs.field(
        default=90,
        metadata=about(
            "Retention of soft-deleted tenants before their data may be removed.",
            minimum=0,
            unit="days",
        ),
    )


@attrs.frozen(kw_only=True)
class MultiTenantOptions:
    """Tenants, their databases, the upgrade and notifications."""

    enabled: bool = attrs.field(
        default=False,
        metadata=about("Turns on tenants, their databases and the upgrade."),
    )
    # False by default: hosts rely on their one secret proving every tenant's events (ADR 36).
    own_secrets_only: bool = attrs.field(
        default=False,
        metadata=about(
            "A tenant that has webhook secrets of its own is not signed for by the host's."
        ),
    )
    single_tenant_upgrade: SingleTenantUpgradeOptions = attrs.field(
        factory=SingleTenantUpgradeOptions
    )
    file_db: FileDbOptions = attrs.field(factory=FileDbOptions)
    tenant_status: TenantStatusOptions = attrs.field(factory=TenantStatusOptions)
    notifications: NotificationsOptions = attrs.field(factory=NotificationsOptions)
