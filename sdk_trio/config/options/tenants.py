"""The settings of tenants, of the upgrade, and the sections below ``MultiTenant``. Pure."""

from datetime import timedelta

import attrs

from ..fields import DefaultTenantStrategy, Form, ReplicaTargetType, about
from .notifications import NotificationsOptions


@attrs.frozen(kw_only=True)
class ObjectStoreOptions:
    """Replication to an object store."""

    bucket: str = attrs.field(default="", metadata=about("Bucket name.", required=True))
    region: str = attrs.field(default="us-east-1", metadata=about("Region.", required=True))
    path_prefix: str = attrs.field(
        default="sdk/tenants/",
        metadata=about("Prefix of every replicated database file."),
    )
    access_key_id_env_var: str = attrs.field(
        default="OBJECT_STORE_ACCESS_KEY_ID",
        metadata=about("Variable with the access key id.", form=Form.ENV_VAR, required=True),
    )
    secret_access_key_env_var: str = attrs.field(
        default="OBJECT_STORE_SECRET_ACCESS_KEY",
        metadata=about("Variable with the secret access key.", form=Form.ENV_VAR, required=True),
    )
    endpoint_url: str | None = attrs.field(
        default=None,
        metadata=about("Address of a compatible store.", form=Form.URL),
    )
    # Else the bucket's name is put before the host's, and a bare name such as localhost has none
    # below it.
    force_path_style: bool = attrs.field(
        default=False, metadata=about("Needed by some compatible stores.")
    )


@attrs.frozen(kw_only=True)
class BlobStoreOptions:
    """Replication to a blob store."""

    account_name: str = attrs.field(
        default="", metadata=about("Storage account name.", required=True)
    )
    container: str = attrs.field(
        default="sdk-tenants", metadata=about("Container name.", required=True)
    )
    path_prefix: str = attrs.field(default="", metadata=about("Prefix of every replicated file."))
    access_key_env_var: str = attrs.field(
        default="BLOB_STORE_KEY",
        metadata=about("Variable with the account key.", form=Form.ENV_VAR, required=True),
    )
    endpoint_url: str | None = attrs.field(
        default=None,
        metadata=about("Address of a compatible store.", form=Form.URL),
    )


@attrs.frozen(kw_only=True)
class CloudStorageOptions:
    """Replication to cloud storage."""

    bucket: str = attrs.field(default="", metadata=about("Bucket name.", required=True))
    path_prefix: str = attrs.field(
        default="sdk/tenants/", metadata=about("Prefix of every replicated file.")
    )
    credentials_json_path: str = attrs.field(
        default="",
        metadata=about(
            "Path of a service-account JSON file, which must exist.",
            form=Form.ABSOLUTE_PATH,
            required=True,
        ),
    )


@attrs.frozen(kw_only=True)
class SftpOptions:
    """Replication over SFTP."""

    host: str = attrs.field(default="", metadata=about("SFTP host.", required=True))
    port: int = attrs.field(default=22, metadata=about("SFTP port.", minimum=1, maximum=65_535))
    user: str = attrs.field(default="", metadata=about("Login user.", required=True))
    path: str = attrs.field(
        default="/srv/sdk/tenants/", metadata=about("Remote path.", required=True)
    )
    private_key_path: str = attrs.field(
        default="",
        metadata=about(
            "Path of the SSH private key, which must exist.",
            form=Form.ABSOLUTE_PATH,
            required=True,
        ),
    )
    # Without it any host that answers is trusted; that is a warning at the start.
    host_key: str | None = attrs.field(
        default=None,
        metadata=about("Public key that the host must have.", default_note="any"),
    )


@attrs.frozen(kw_only=True)
class LocalDiskOptions:
    """Replication to a directory, for tests and development."""

    path: str = attrs.field(
        default="/var/lib/sdk/replication-replica/",
        metadata=about("Replica directory; created if absent.", required=True),
    )


@attrs.frozen(kw_only=True)
class ReplicationOptions:
    """File-database replication, gated by UseReplication."""

    use_replication: bool = attrs.field(
        default=False,
        metadata=about("Master toggle; when false the section is ignored."),
    )
    replica_target_type: ReplicaTargetType = attrs.field(
        default=ReplicaTargetType.OBJECT_STORE,
        metadata=about("Where to; the matching sub-options must be set."),
    )
    sync_interval_seconds: int = attrs.field(
        default=1,
        metadata=about(
            "How often write-ahead-log changes are flushed.",
            minimum=1,
            maximum=3600,
            unit="seconds",
        ),
    )
    # RetentionDays divided by this is the number of full copies of each database: 720 by default.
    snapshot_interval_minutes: int = attrs.field(
        default=60,
        metadata=about("Time between snapshots.", minimum=1, maximum=1440, unit="minutes"),
    )
    retention_days: int = attrs.field(
        default=30,
        metadata=about("Point-in-time restore window.", minimum=1, maximum=365, unit="days"),
    )
    # The replicator serves it on 127.0.0.1 without a password, and Go's profiler as well: every
    # user of the machine can ask it.
    metrics_port: int = attrs.field(
        default=9090,
        metadata=about("Port of the replicator's metrics endpoint.", minimum=1024, maximum=65_535),
    )
    health_check_enabled: bool = attrs.field(
        default=True,
        metadata=about("Query the metrics endpoint and report the lag."),
    )
    # Counted from when a sync is due, so up to SyncIntervalSeconds more may be missing.
    health_check_max_lag_seconds: int = attrs.field(
        default=30,
        metadata=about(
            "Threshold between Degraded and Healthy.",
            minimum=1,
            maximum=3600,
            unit="seconds",
        ),
    )
    auto_regenerate_on_tenant_change: bool = attrs.field(
        default=False,
        metadata=about(
            "Watch databases and lifecycle, and signal the replicator with SIGHUP (POSIX)."
        ),
    )
    config_output_path: str = attrs.field(
        default="/etc/replicator.yml",
        metadata=about(
            "Replicator configuration; its directory must be writable. Required when "
            "AutoRegenerateOnTenantChange is true."
        ),
    )
    replicator_pid_file_path: str = attrs.field(
        default="/var/run/replicator.pid",
        metadata=about(
            "Pid file of the replicator. Required when AutoRegenerateOnTenantChange is true."
        ),
    )
    # Tenants often come in bursts, and a change may restart the replicator for all of them.
    auto_regenerate_debounce_window: timedelta = attrs.field(
        default=timedelta(seconds=2),
        metadata=about("Collapses bursts of events into one regeneration."),
    )
    # Less work than a process of its own, which goes on replicating while the daemon is restarted.
    supervise: bool = attrs.field(
        default=False,
        metadata=about("Run the replicator as our own child instead of signalling another's."),
    )
    replicator_path: str | None = attrs.field(
        default=None,
        metadata=about(
            "The replicator's binary.",
            form=Form.ABSOLUTE_PATH,
            default_note="beside the interpreter, then PATH",
        ),
    )
    # Off by default: all of every replica is downloaded, and object stores bill that.
    verify_interval_hours: int | None = attrs.field(
        default=None,
        metadata=about(
            "How often the runtime restores every active tenant's replica and compares it: all of "
            "it is downloaded each time.",
            minimum=1,
            maximum=8760,
            unit="hours",
            default_note="never; 'replication verify' does it once",
        ),
    )
    object_store: ObjectStoreOptions = attrs.field(factory=ObjectStoreOptions)
    blob_store: BlobStoreOptions = attrs.field(factory=BlobStoreOptions)
    cloud_storage: CloudStorageOptions = attrs.field(factory=CloudStorageOptions)
    sftp: SftpOptions = attrs.field(factory=SftpOptions)
    local_disk: LocalDiskOptions = attrs.field(factory=LocalDiskOptions)


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
    # An organization is one tenant's: deliveries that name several cannot say which.
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
    # The steps go on from where they were, but a copy of the database begins anew: it has to fit.
    max_run_duration: timedelta = attrs.field(
        default=timedelta(minutes=30),
        metadata=about("Hard wall-clock cap of the upgrade.", minimum=1, unit="seconds"),
    )
    # Copied and never removed: the operator does that when nobody needs it any more.
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
    # The setting allows it, each call has to ask for it, and the audit trail names the setting.
    suspend_unverified_tenants_anyway: bool = attrs.field(
        default=False,
        metadata=about("Allow the per-call bypass of the requirement above."),
    )
    # Until then a deleted tenant can be made active again.
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
