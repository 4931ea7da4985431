"""The settings of tenants, of the upgrade, and other sections of ``MultiTenant``. Pure."""

from datetime import timedelta
from typing import Annotated

from ..fields import DefaultTenantStrategy, Form, ReplicaTargetType, Section, about
from .notifications import NotificationsOptions


class ObjectStoreOptions(Section, frozen=True, kw_only=True):
    """Replication to an object store."""

    bucket: Annotated[str, about("Bucket name.", required=True)] = ""
    region: Annotated[str, about("Region.", required=True)] = "us-east-1"
    path_prefix: Annotated[str, about("Prefix of every replicated database file.")] = "sdk/tenants/"
    access_key_id_env_var: Annotated[
        str, about("Variable with the access key id.", form=Form.ENV_VAR, required=True)
    ] = "OBJECT_STORE_ACCESS_KEY_ID"
    secret_access_key_env_var: Annotated[
        str, about("Variable with the secret access key.", form=Form.ENV_VAR, required=True)
    ] = "OBJECT_STORE_SECRET_ACCESS_KEY"
    endpoint_url: Annotated[str | None, about("Address of a compatible store.", form=Form.URL)] = (
        None
    )
    # Otherwise the bucket's name becomes a subdomain of the host, and a bare name such as localhost
    # has none.
    force_path_style: Annotated[bool, about("Needed by some compatible stores.")] = False


class BlobStoreOptions(Section, frozen=True, kw_only=True):
    """Replication to a blob store."""

    account_name: Annotated[str, about("Storage account name.", required=True)] = ""
    container: Annotated[str, about("Container name.", required=True)] = "sdk-tenants"
    path_prefix: Annotated[str, about("Prefix of every replicated file.")] = ""
    access_key_env_var: Annotated[
        str, about("Variable with the account key.", form=Form.ENV_VAR, required=True)
    ] = "BLOB_STORE_KEY"
    endpoint_url: Annotated[str | None, about("Address of a compatible store.", form=Form.URL)] = (
        None
    )


class CloudStorageOptions(Section, frozen=True, kw_only=True):
    """Replication to cloud storage."""

    bucket: Annotated[str, about("Bucket name.", required=True)] = ""
    path_prefix: Annotated[str, about("Prefix of every replicated file.")] = "sdk/tenants/"
    credentials_json_path: Annotated[
        str,
        about(
            "Path of a service-account JSON file, which must exist.",
            form=Form.ABSOLUTE_PATH,
            required=True,
        ),
    ] = ""


class SftpOptions(Section, frozen=True, kw_only=True):
    """Replication over SFTP."""

    host: Annotated[str, about("SFTP host.", required=True)] = ""
    port: Annotated[int, about("SFTP port.", between=(1, 65_535))] = 22
    user: Annotated[str, about("Login user.", required=True)] = ""
    path: Annotated[str, about("Remote path.", required=True)] = "/srv/sdk/tenants/"
    private_key_path: Annotated[
        str,
        about(
            "Path of the SSH private key, which must exist.", form=Form.ABSOLUTE_PATH, required=True
        ),
    ] = ""
    # Without it every host that answers is trusted; a warning at startup reports that.
    host_key: Annotated[str | None, about("The host's public key.", default_note="any")] = None


class LocalDiskOptions(Section, frozen=True, kw_only=True):
    """Replication to a directory, for tests and development."""

    path: Annotated[str, about("Replica directory; created if absent.", required=True)] = (
        "/var/lib/sdk/replication-replica/"
    )


class ReplicationOptions(Section, frozen=True, kw_only=True):
    """File-database replication, gated by UseReplication."""

    use_replication: Annotated[bool, about("Master switch; when false the section is ignored.")] = (
        False
    )
    replica_target_type: Annotated[
        ReplicaTargetType, about("The replica's target; its section must be set.")
    ] = ReplicaTargetType.OBJECT_STORE
    sync_interval_seconds: Annotated[
        int,
        about("How often write-ahead-log changes are flushed.", between=(1, 3600), unit="seconds"),
    ] = 1
    # RetentionDays divided by this is the number of full copies per database: 720 by default.
    snapshot_interval_minutes: Annotated[
        int, about("Time between snapshots.", between=(1, 1440), unit="minutes")
    ] = 60
    retention_days: Annotated[
        int, about("Point-in-time restore window.", between=(1, 365), unit="days")
    ] = 30
    # The replicator serves it on 127.0.0.1 without a password, with Go's profiler: every user of
    # the machine can query it.
    metrics_port: Annotated[
        int, about("Port of the replicator's metrics endpoint.", between=(1024, 65_535))
    ] = 9090
    health_check_enabled: Annotated[
        bool, about("Query the metrics endpoint and report the lag.")
    ] = True
    # Counted from the time a sync is due, so up to SyncIntervalSeconds more may be missing.
    health_check_max_lag_seconds: Annotated[
        int, about("Threshold between Degraded and Healthy.", between=(1, 3600), unit="seconds")
    ] = 30
    auto_regenerate_on_tenant_change: Annotated[
        bool, about("Watch databases and lifecycle, and signal the replicator with SIGHUP (POSIX).")
    ] = False
    config_output_path: Annotated[
        str,
        about(
            "Replicator configuration; its directory must be writable. Required when "
            "AutoRegenerateOnTenantChange is true."
        ),
    ] = "/etc/replicator.yml"
    replicator_pid_file_path: Annotated[
        str,
        about("Pid file of the replicator. Required when AutoRegenerateOnTenantChange is true."),
    ] = "/var/run/replicator.pid"
    # Changes of tenants often come in bursts, and each could restart the replicator for all.
    auto_regenerate_debounce_window: Annotated[
        timedelta,
        about("Collapses bursts of events into one regeneration; 00:00:00: one for each event."),
    ] = timedelta(seconds=2)
    # Off by default: an independent process keeps replicating while the daemon restarts.
    supervise: Annotated[
        bool, about("Run the replicator as a child process instead of signalling an external one.")
    ] = False
    replicator_path: Annotated[
        str | None,
        about(
            "The replicator's binary.",
            form=Form.ABSOLUTE_PATH,
            default_note="next to the interpreter, then PATH",
        ),
    ] = None
    # Off by default: every replica is downloaded in full, and object stores bill that.
    verify_interval_hours: Annotated[
        int | None,
        about(
            "How often the runtime restores and compares every active tenant's replica, which "
            "is downloaded in full each time.",
            between=(1, 8760),
            unit="hours",
            default_note="never; 'replication verify' does it once",
        ),
    ] = None
    object_store: ObjectStoreOptions = ObjectStoreOptions()
    blob_store: BlobStoreOptions = BlobStoreOptions()
    cloud_storage: CloudStorageOptions = CloudStorageOptions()
    sftp: SftpOptions = SftpOptions()
    local_disk: LocalDiskOptions = LocalDiskOptions()


class SingleTenantUpgradeOptions(Section, frozen=True, kw_only=True):
    """The one-time upgrade of a single-tenant host."""

    enable_automatic_upgrade: Annotated[
        bool,
        about("Run the upgrade on the first multi-tenant boot; otherwise by an explicit command."),
    ] = True
    default_tenant_strategy: Annotated[
        DefaultTenantStrategy, about("How the default tenant is found.")
    ] = DefaultTenantStrategy.LITERAL_DEFAULT
    literal_default_tenant_slug: Annotated[
        str,
        about(
            "Identifier of the default tenant; required by strategy LiteralDefault.",
            form=Form.SLUG,
            required=True,
        ),
    ] = "default"
    literal_default_tenant_name: Annotated[
        str,
        about(
            "Display name of the default tenant; required by strategy LiteralDefault.",
            required=True,
        ),
    ] = "Default Tenant"
    # An organization belongs to one tenant: deliveries of several are ambiguous.
    literal_default_tenant_organization_id: Annotated[
        str | None,
        about(
            "Organization of the default tenant, for strategy LiteralDefault; null: the only one "
            "in the stored deliveries, if there is exactly one."
        ),
    ] = None
    # A host that keeps writing to the old database would write data of no tenant.
    require_graceful_quiescence: Annotated[
        bool, about("Refuse to run unless the host has signalled quiescence.")
    ] = True
    # Steps continue where they stopped, but a copy of the database restarts: it must fit.
    max_run_duration: Annotated[
        timedelta, about("Hard wall-clock cap of the upgrade.", minimum=1, unit="seconds")
    ] = timedelta(minutes=30)
    # Copied and never removed: the operator removes it when no one needs it.
    source_database: Annotated[
        str | None,
        about(
            "The single-tenant SQLite database; it is copied for the default tenant.",
            default_note="default.db in the FileDb directory, if there is one",
        ),
    ] = None


class FileDbOptions(Section, frozen=True, kw_only=True):
    """The tenants' database files."""

    directory: Annotated[
        str | None,
        about(
            "Directory with one SQLite file per tenant.",
            default_note="tenants under the data directory",
        ),
    ] = None
    replication: ReplicationOptions = ReplicationOptions()


class TenantStatusOptions(Section, frozen=True, kw_only=True):
    """Policy of the tenant status service."""

    require_verified_email_for_suspension: Annotated[
        bool, about("Refuse to suspend a tenant whose site manager's email is not verified.")
    ] = True
    # The setting allows it, each call must request it, and the audit trail names the setting.
    suspend_unverified_tenants_anyway: Annotated[
        bool, about("Allow the per-call bypass of the requirement above.")
    ] = False
    # Until then a deleted tenant can be reactivated.
    deleted_tenant_retention_days: Annotated[
        int,
        about(
            "Retention of soft-deleted tenants before their data may be removed; 0: the next "
            "purge may remove it, and a deleted tenant cannot be reactivated.",
            minimum=0,
            unit="days",
        ),
    ] = 90


class MultiTenantOptions(Section, frozen=True, kw_only=True):
    """Tenants, their databases, the upgrade and notifications."""

    enabled: Annotated[bool, about("Enable tenants, their databases and the upgrade.")] = False
    # False by default: existing hosts rely on their one secret for every tenant's events (ADR 36).
    own_secrets_only: Annotated[
        bool, about("Reject host-signed deliveries of tenants that have their own webhook secrets.")
    ] = False
    single_tenant_upgrade: SingleTenantUpgradeOptions = SingleTenantUpgradeOptions()
    file_db: FileDbOptions = FileDbOptions()
    tenant_status: TenantStatusOptions = TenantStatusOptions()
    notifications: NotificationsOptions = NotificationsOptions()
