"""The settings of tenants, of the upgrade, and the sections below ``MultiTenant``. Pure."""

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
    # Else the bucket's name is put before the host's, and a bare name such as localhost has none
    # below it.
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
    # Without it any host that answers is trusted; that is a warning at the start.
    host_key: Annotated[
        str | None, about("Public key that the host must have.", default_note="any")
    ] = None


class LocalDiskOptions(Section, frozen=True, kw_only=True):
    """Replication to a directory, for tests and development."""

    path: Annotated[str, about("Replica directory; created if absent.", required=True)] = (
        "/var/lib/sdk/replication-replica/"
    )


class ReplicationOptions(Section, frozen=True, kw_only=True):
    """File-database replication, gated by UseReplication."""

    use_replication: Annotated[bool, about("Master toggle; when false the section is ignored.")] = (
        False
    )
    replica_target_type: Annotated[
        ReplicaTargetType, about("Where to; the matching sub-options must be set.")
    ] = ReplicaTargetType.OBJECT_STORE
    sync_interval_seconds: Annotated[
        int,
        about("How often write-ahead-log changes are flushed.", between=(1, 3600), unit="seconds"),
    ] = 1
    # RetentionDays divided by this is the number of full copies of each database: 720 by default.
    snapshot_interval_minutes: Annotated[
        int, about("Time between snapshots.", between=(1, 1440), unit="minutes")
    ] = 60
    retention_days: Annotated[
        int, about("Point-in-time restore window.", between=(1, 365), unit="days")
    ] = 30
    # The replicator serves it on 127.0.0.1 without a password, and Go's profiler as well: every
    # user of the machine can ask it.
    metrics_port: Annotated[
        int, about("Port of the replicator's metrics endpoint.", between=(1024, 65_535))
    ] = 9090
    health_check_enabled: Annotated[
        bool, about("Query the metrics endpoint and report the lag.")
    ] = True
    # Counted from when a sync is due, so up to SyncIntervalSeconds more may be missing.
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
    # Tenants often come in bursts, and a change may restart the replicator for all of them.
    auto_regenerate_debounce_window: Annotated[
        timedelta,
        about("Collapses bursts of events into one regeneration; 00:00:00: one for each event."),
    ] = timedelta(seconds=2)
    # Less work than a process of its own, which goes on replicating while the daemon is restarted.
    supervise: Annotated[
        bool, about("Run the replicator as our own child instead of signalling another's.")
    ] = False
    replicator_path: Annotated[
        str | None,
        about(
            "The replicator's binary.",
            form=Form.ABSOLUTE_PATH,
            default_note="beside the interpreter, then PATH",
        ),
    ] = None
    # Off by default: all of every replica is downloaded, and object stores bill that.
    verify_interval_hours: Annotated[
        int | None,
        about(
            "How often the runtime restores every active tenant's replica and compares it: all of "
            "it is downloaded each time.",
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
    # An organization is one tenant's: deliveries that name several cannot say which.
    literal_default_tenant_organization_id: Annotated[
        str | None,
        about(
            "Organization of the default tenant, for strategy LiteralDefault; null: the one that "
            "the stored deliveries name, if it is one."
        ),
    ] = None
    # A host that goes on writing to the old database would write to what is no tenant's any more.
    require_graceful_quiescence: Annotated[
        bool, about("Refuse to run unless the host has signalled quiescence.")
    ] = True
    # The steps go on from where they were, but a copy of the database begins anew: it has to fit.
    max_run_duration: Annotated[
        timedelta, about("Hard wall-clock cap of the upgrade.", minimum=1, unit="seconds")
    ] = timedelta(minutes=30)
    # Copied and never removed: the operator does that when nobody needs it any more.
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
    # The setting allows it, each call has to ask for it, and the audit trail names the setting.
    suspend_unverified_tenants_anyway: Annotated[
        bool, about("Allow the per-call bypass of the requirement above.")
    ] = False
    # Until then a deleted tenant can be made active again.
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

    enabled: Annotated[bool, about("Turns on tenants, their databases and the upgrade.")] = False
    # False by default: hosts rely on their one secret proving every tenant's events (ADR 36).
    own_secrets_only: Annotated[
        bool, about("A tenant that has webhook secrets of its own is not signed for by the host's.")
    ] = False
    single_tenant_upgrade: SingleTenantUpgradeOptions = SingleTenantUpgradeOptions()
    file_db: FileDbOptions = FileDbOptions()
    tenant_status: TenantStatusOptions = TenantStatusOptions()
    notifications: NotificationsOptions = NotificationsOptions()
