"""The checks of ``doctor`` on the store: its events, its tenants, and messages to site managers.

They change nothing and send nothing.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ...admin.status import DIFFERING_SECONDS
from ...config import Secret, Settings, StorageBackend, parse_secret
from ...config.fields import Form
from ...config.options.notifications import NotificationsOptions, enabled_channels
from ...config.table import NOTIFICATIONS, is_below, table
from ...errors import StorageError, TenantCredentialsError
from ...notifications.send import Skipped, credential
from ...records.channels import CHANNELS, ContactKind, NotificationChannel
from ...records.deliveries import DeliveryState
from ...records.notifications import NotificationState
from ...records.policies import name_of_glob, resume_options
from ...records.tenants import Tenant, TenantStatus
from ...storage.data_directory import DATABASE_NAME
from ...storage.examine import Contents, Examination, examine
from ...storage.open import open_store, postgres_address
from ...storage.sql.schema import VERSION
from ...tenants.credentials import CredentialReader
from ..pauses import pauses_in
from ..receiver import NoReceiverError, find
from ..terminal import size_text
from . import Report
from .machine import STORAGE_PATH

if TYPE_CHECKING:
    from ...storage.examine_postgres import PostgresExamination
    from ...storage.sql.notifications import NotificationStore

#: The time limit of SQLite's integrity check, in seconds: it reads the whole file.
CHECK_SECONDS = 5.0

#: The size in bytes from which the write-ahead log is reported: ten times the size at which it is
#: usually checkpointed. A log this large means that a long-running reader blocks checkpoints.
LARGE_LOG_BYTES = 160 * 1024 * 1024

#: The age in seconds from which an unfinished event is reported: older than usual retries last.
OLD_EVENT_SECONDS = 86_400.0

#: The share of used queue slots above which a warning is needed.
FULL_SHARE = 0.8

#: The age in seconds from which a reader of the database is reported: dead rows stay until it ends.
LONG_READ_SECONDS = 900.0

#: Seconds for which a failover that may have lost deliveries is reported.
FAILOVER_SECONDS = 7 * 86_400.0

#: The maximum number of tenants whose credentials and recipients are checked.
MOST_TENANTS = 1000


async def check_pauses(settings: Settings, report: Report) -> None:
    """Report the pauses of events that are in force.

    Raises:
        StorageError: the store cannot be opened.
    """
    for pause in await pauses_in(settings):
        report.warning(
            f"events of {name_of_glob(pause.glob)}",
            str(pause),
            f"if it is over, run: events resume {resume_options(pause.glob)}",
        )


async def check_file(settings: Settings, report: Report) -> Contents | None:
    """Report the state of a SQLite store, and the parts that need attention.

    Returns:
        Its content; None if there is no store of this version.

    Raises:
        StoreUnavailableError: it cannot be read.
    """
    backend = settings.storage.backend
    file = Path(settings.storage.path) / DATABASE_NAME
    if backend is not StorageBackend.SQLITE:
        report.note(STORAGE_PATH, f"{backend}: it is not examined from here")
        await trio.lowlevel.checkpoint()
        return None
    found: Examination | None = None
    if file.exists():
        found = await trio.to_thread.run_sync(
            lambda: examine(file, now=time.time(), check_seconds=CHECK_SECONDS),
            abandon_on_cancel=True,
        )
    else:
        await trio.lowlevel.checkpoint()
    _compare_with_receiver(settings, report)
    if found is None:
        report.note(STORAGE_PATH, "there is no inbox yet: the first start creates it")
        return None
    _describe_file(found, report)
    if found.contents is not None:
        _describe_contents(settings, found.contents, report)
    return found.contents


async def check_database(settings: Settings, report: Report) -> Contents | None:
    """Report whether the database of Backend Postgres can be used; change nothing in it.

    Returns:
        Its content; None if there is no store of this version.
    """
    address = postgres_address(settings)
    from ...storage.examine_postgres import examine_postgres

    where = f"Sdk:Storage:PostgresDsnEnvVar ({settings.storage.postgres_dsn_env_var})"
    try:
        found = await trio.to_thread.run_sync(examine_postgres, address, abandon_on_cancel=True)
    except StorageError as error:
        report.problem(where, str(error), "fix it: until then deliveries are answered 503")
        await trio.lowlevel.checkpoint()
        return None
    if not found.syncs:
        report.problem(
            where,
            "the server runs with fsync = off: acknowledged events are lost if its machine "
            "loses power",
            "set fsync to on in postgresql.conf",
        )
    if found.holder is not None and found.holder[1] > LONG_READ_SECONDS:
        name, age = found.holder
        report.warning(
            where,
            f"the {name} has been reading for {age / 60:.0f} minutes and prevents the removal of "
            f"{sum(found.dead.values())} dead rows, which slow down polling for due events",
            "end it (pg_terminate_backend, ROLLBACK PREPARED), or run it on a standby",
        )
    if found.blocked is not None:
        waiting, holding, seconds = found.blocked
        report.warning(
            where,
            f"the {waiting} waits for a lock of the {holding}, whose transaction has done nothing "
            f"for {seconds:.0f} s",
            "end it (pg_terminate_backend) unless it is a running report or migration",
        )
    _describe_replication(where, found, report)
    _compare_clocks(settings, found.clock_offset, report)
    what = f"PostgreSQL {found.server}, {size_text(found.size)}"
    if found.contents is None:
        report.note(where, f"{what}: the next start upgrades the schema {address.schema}")
    else:
        report.ok(where, f"{what}, the schema {address.schema} has the version of this program")
        _describe_contents(settings, found.contents, report)
    return found.contents


def _describe_replication(where: str, found: "PostgresExamination", report: Report) -> None:
    """Report whether a failover can lose data, and what the last one may have lost."""
    from ...storage.engines.postgres_failover import LOST_HINT

    if found.standbys and not found.replicated:
        report.note(
            where,
            f"replication to {found.standbys} standbys is asynchronous: a failover loses data "
            "that was acknowledged in the last moments; set synchronous_standby_names to prevent "
            "that",
        )
    timeline = found.timeline
    if timeline is None or timeline.since is None or timeline.complete:
        return
    if time.time() - timeline.since < FAILOVER_SECONDS:
        at = datetime.fromtimestamp(timeline.since, UTC)
        report.warning(
            where,
            f"the database changed at {at:%Y-%m-%d %H:%M} UTC (a failover or a restore: timeline "
            f"{timeline.before} to {timeline.number}): {LOST_HINT.partition(':')[0]}",
            "have the sender deliver them again (sdk-trio events reconcile)",
        )


def _compare_clocks(settings: Settings, offset: float, report: Report) -> None:
    """Report a clock of this host that differs from the database's."""
    if abs(offset) < DIFFERING_SECONDS:
        return
    side = "ahead of" if offset > 0 else "behind"
    what = f"this host's clock is {abs(offset):.0f} s {side} the database's"
    remedy = "synchronize both (chrony, systemd-timesyncd)"
    if abs(offset) > settings.webhooks.tolerance_seconds:
        what += ": every delivery is refused, as its timestamp looks too old or too new"
        report.problem("clock", what, remedy)
    else:
        report.warning("clock", what, remedy)


def _compare_with_receiver(settings: Settings, report: Report) -> None:
    """Report whether the running receiver writes to a file that a restart would not open."""
    try:
        # Without a receiver, no process writes elsewhere.
        receiver = find(settings.storage.path)
    except NoReceiverError:
        return
    file = Path(settings.storage.path) / DATABASE_NAME
    if not _writes_elsewhere(receiver.pid, file):
        return
    what = "was replaced" if file.exists() else "was removed"
    report.problem(
        str(file),
        f"it {what}: the receiver (process {receiver.pid}) has another file open; it accepts no "
        "delivery",
        "put back the file, or restore a backup ('storage restore FILE'), and restart the "
        "receiver; until the receiver ends, its open file is available on Linux under "
        f"/proc/{receiver.pid}/fd",
    )


def _writes_elsewhere(pid: int, file: Path) -> bool:
    """Return whether a process has a store other than ``file`` open; False if unknown."""
    directory = f"/proc/{pid}/fd"
    try:
        # Under /proc a removed file keeps its name, followed by "(deleted)".
        opened = [
            os.stat(f"{directory}/{number}")
            for number in os.listdir(directory)
            if os.path.basename(os.readlink(f"{directory}/{number}")).split(" ")[0] == DATABASE_NAME
        ]
        wanted = file.stat() if file.exists() else None
    except OSError:
        return False
    return bool(opened) and not any(wanted and os.path.samestat(wanted, one) for one in opened)


def _describe_file(found: Examination, report: Report) -> None:
    where = found.file
    problem = found.state.problem()
    if problem is not None:
        report.problem(where, f"it {problem[0]}", problem[1])
    # Not upgraded here: doctor changes nothing.
    elif (version := found.state.version or 0) < VERSION:
        report.note(
            where, f"its schema has version {version}: the next start brings it to {VERSION}"
        )
    if found.damage is not None:
        report.problem(
            where,
            f"it is damaged: {found.damage}",
            "stop the receiver, and restore a backup: 'storage restore FILE'",
        )
    # A note, because only its size prevented the check.
    elif not found.checked:
        report.note(where, f"it is too large to be checked for damage in {CHECK_SECONDS:g} s")
    else:
        report.ok(where, f"{size_text(found.file_size)}, no damage")
    if found.wal_size > LARGE_LOG_BYTES:
        report.warning(
            f"{where}-wal",
            f"the write-ahead log is {size_text(found.wal_size)} large: a long-running reader, "
            "such as an open sqlite3 shell or a stopped backup, blocks checkpoints",
            "end that reader (lsof shows it)",
        )


def _describe_contents(settings: Settings, found: Contents, report: Report) -> None:
    dead = found.states.get(DeliveryState.DEAD, 0)
    if dead:
        report.warning(
            "inbox",
            f"{dead} dead letters: their handlers failed for good",
            "'events list --state dead' shows why; fix a cause, then run 'events replay --state "
            "dead --error TEXT'; narrow it with --type, --since and --until, and preview it with "
            "--dry-run",
        )
    for reason, types in found.parked.items():
        # The reason is written as `fault; advice`.
        fault, _, advice = reason.partition("; ")
        named = ", ".join(f"{name} ({count})" for name, count in types.items())
        report.warning(
            "inbox",
            f"parked: {named}: {fault}",
            f"{advice or 'see them'}: 'events list --state parked', 'events replay --state parked "
            "--type T'",
        )
    if found.expired_leases:
        report.warning(
            "inbox",
            f"{found.expired_leases} events belong to a process that hangs or has ended, and no "
            "other process has claimed them",
            "start a receiver if none runs; otherwise its log and /readyz show why its workers "
            "are busy or cannot reach the store",
        )
    age = 0.0 if found.oldest_unfinished is None else time.time() - found.oldest_unfinished
    if age > OLD_EVENT_SECONDS:
        report.warning(
            "inbox",
            f"the oldest unfinished event arrived {age / 3600:.0f} hours ago",
            "start a receiver if none runs; 'events list --state retrying' lists the failures",
        )
    if not (dead or found.parked or found.expired_leases) and age <= OLD_EVENT_SECONDS:
        waiting = sum(found.states.values())
        report.ok("inbox", f"{waiting} events wait, none is dead, parked or old")
    # Each of several processes has a share of the slots, and refuses deliveries beyond it.
    places = settings.webhooks.queue.capacity
    waiting = found.states.get(DeliveryState.RECEIVED, 0)
    if waiting >= FULL_SHARE * places:
        report.warning(
            "Sdk:Webhooks:Queue:Capacity",
            f"{waiting} events wait for a worker, and the queue has {places} slots: further "
            "deliveries are answered 503",
            "handlers are slower than events arrive: the metric sdk_webhook_handler_seconds "
            "shows which; more Webhooks:Queue:Workers help if handlers wait for other services",
        )


async def check_tenants(settings: Settings, found: Contents | None, report: Report) -> None:
    """Read every tenant's credentials, and report those that cannot be read or used."""
    key = "Sdk:MultiTenant:Enabled"
    if not settings.multi_tenant.enabled:
        report.note(key, "false: there are no tenants")
        await trio.lowlevel.checkpoint()
        return
    if found is None:
        report.note(key, "there is no store of this version yet, and so no tenants")
        await trio.lowlevel.checkpoint()
        return
    async with open_store(settings, owner="doctor") as store:
        tenants = await store.tenants.page(status=TenantStatus.ACTIVE, limit=MOST_TENANTS)
    reader = CredentialReader()
    before = len(report.findings)
    for tenant in tenants:
        await _check_tenant(settings, tenant, reader, report)
    if len(report.findings) == before:
        report.ok(key, f"{len(tenants)} active tenants, and every credential can be read")
    # In multi-tenant mode the receiver starts without a host secret, so report here if neither the
    # host nor a tenant has one.
    unowned = not settings.webhooks.all_secrets and not any(
        tenant.credentials.webhook_secrets for tenant in tenants
    )
    if unowned:
        report.problem(
            "Sdk:Webhooks:Secrets",
            "neither the host nor any tenant has a webhook secret: no delivery can be verified",
            "set one, or give tenants their own ('tenant add --webhook-secret-env')",
        )


async def _check_tenant(
    settings: Settings, tenant: Tenant, reader: CredentialReader, report: Report
) -> None:
    await trio.lowlevel.checkpoint()
    where = f"tenant {tenant.identifier}"
    remedy = "set the variable, or put the file there, for the user of the receiver"
    try:
        await reader.access_token(tenant)
    except TenantCredentialsError as error:
        report.problem(where, str(error), remedy)
    for source in tenant.credentials.webhook_secrets:
        try:
            secrets = await reader.read_webhook_secrets(tenant, source)
        except TenantCredentialsError as error:
            report.problem(where, str(error), remedy)
            continue
        # Parsed as in the receiver, where only the log reports it.
        for secret in secrets:
            if (fault := _fault_of(secret, settings)) is not None:
                report.problem(where, f"a webhook secret of its own {fault}", "replace it")


def _fault_of(secret: Secret, settings: Settings) -> str | None:
    try:
        parse_secret(secret.reveal(), settings.webhooks.key_derivation)
    except ValueError as error:
        return str(error)
    return None


# -- messages to site managers -------------------------------------------------------------------

CHANNELS_KEY = f"{NOTIFICATIONS}:EnabledChannels"

_CONTACTS: Mapping[ContactKind, Callable[[Tenant], str | None]] = {
    ContactKind.EMAIL: lambda tenant: tenant.site_manager_email,
    ContactKind.PHONE: lambda tenant: tenant.site_manager_phone,
}

#: Domains of documentation and of local machines, which have no mail (RFC 2606, 6761, 6762).
_NO_DOMAINS = (
    *(".example", ".invalid", ".test", ".localhost", ".local"),
    *("example.com", "example.org", "example.net"),
)

#: The advice for messages in these states.
_NEEDS_OPERATOR = {
    NotificationState.FAILED: "'notify list --state failed' shows the causes; fix them, then run "
    "'notify retry --state failed'",
    NotificationState.UNKNOWN: "check at the provider those that 'notify list --state unknown' "
    "shows; 'notify retry' sends them again",
}

#: The age in seconds from which a waiting message shows that no process sends messages: the longest
#: wait between attempts is an hour, and providers seldom request a longer one.
OLD_MESSAGE_SECONDS = 2 * 3600.0


async def check_notifications(
    settings: Settings, found: Contents | None, environ: Mapping[str, str], report: Report
) -> None:
    """Report what prevents messages to site managers; change nothing and send nothing.

    Raises:
        StoreUnavailableError: the store cannot be read.
    """
    options = settings.multi_tenant.notifications
    if not _are_used(settings, options, report):
        await trio.lowlevel.checkpoint()
        return
    before = len(report.findings)
    for name in enabled_channels(options):
        _check_credentials(CHANNELS[name], settings, environ, report)
    if options.enabled_channels.email:
        check_sender(f"{NOTIFICATIONS}:Email:FromAddress", options.email.from_address, report)
    if len(report.findings) == before:
        names = ", ".join(enabled_channels(options))
        report.ok(CHANNELS_KEY, f"{names}: every credential is there; 'notify test' tries them")
    if found is None:
        await trio.lowlevel.checkpoint()
        return
    async with open_store(settings, owner="doctor") as store:
        tenants = await store.tenants.page(status=TenantStatus.ACTIVE, limit=MOST_TENANTS)
        _check_recipients(options, tenants, report)
        await _check_messages(store.notifications, report)


def _are_used(settings: Settings, options: NotificationsOptions, report: Report) -> bool:
    key = f"{NOTIFICATIONS}:Enabled"
    if not options.enabled:
        report.note(key, "false: transitions are not announced")
        return False
    # The settings checks already report notifications without tenants or without a channel.
    return settings.multi_tenant.enabled and bool(enabled_channels(options))


def _check_credentials(
    channel: NotificationChannel, settings: Settings, environ: Mapping[str, str], report: Report
) -> None:
    section = f"{NOTIFICATIONS}:{channel.key}"
    for setting in table():
        if setting.about.form is not Form.ENV_VAR or not is_below(setting.key, section):
            continue
        variable = setting.of(settings)
        # The same check as before sending, so that the finding names the reason in the same words.
        value = credential(environ.get, variable, for_header=not channel.signs)
        if isinstance(value, Skipped):
            report.problem(
                setting.key,
                f"{value.reason}: every message of the channel {channel.name} is skipped",
                f"set {variable} for the user of the receiver, restart it, then 'notify retry "
                f"--state skipped --channel {channel.name}'",
            )


def check_sender(key: str, address: str, report: Report) -> None:
    """Warn of a sender, the value of ``key``, whose domain cannot send mail."""
    domain = address.rpartition("@")[2].casefold()
    if "." not in domain or domain.endswith(_NO_DOMAINS):
        report.warning(
            key,
            f"the domain {domain} cannot send mail, so the provider will refuse it",
            "set an address that the provider has verified as a sender",
        )


def _check_recipients(
    options: NotificationsOptions, tenants: Iterable[Tenant], report: Report
) -> None:
    tenants = list(tenants)
    for name in enabled_channels(options):
        contact = CHANNELS[name].contact
        if contact is not None:
            without = [tenant for tenant in tenants if not _CONTACTS[contact](tenant)]
            _report_missing(contact, without, len(tenants), report)
    if options.enabled_channels.email:
        unverified = [
            t for t in tenants if t.site_manager_email and not t.site_manager_email_verified
        ]
        if unverified and not options.send_to_unverified_email:
            report.note(
                _named(unverified),
                f"{len(unverified)} of {len(tenants)} active tenants have a site manager whose "
                "email address is not verified: the channel email skips them",
                f"verify it, or set {NOTIFICATIONS}:SendToUnverifiedEmail to true",
            )


def _report_missing(
    contact: ContactKind, tenants: list[Tenant], total: int, report: Report
) -> None:
    if tenants:
        report.note(
            _named(tenants),
            f"{len(tenants)} of {total} active tenants have no site manager's {contact.label}: "
            f"they are not notified on this channel ('tenant set' takes {contact.argument})",
        )


def _named(tenants: list[Tenant]) -> str:
    names = ", ".join(tenant.identifier for tenant in tenants[:5])
    return f"tenants {names}" + ("" if len(tenants) <= 5 else ", ...")


async def _check_messages(store: "NotificationStore", report: Report) -> None:
    counts = await store.counts()
    for state, remedy in _NEEDS_OPERATOR.items():
        if counts[state]:
            report.warning("messages", f"{counts[state]} messages are {state}", remedy)
    if counts[NotificationState.SKIPPED]:
        report.note(
            "messages",
            f"{counts[NotificationState.SKIPPED]} messages were skipped: nothing was sent",
            "'notify list --state skipped' shows why",
        )
    # Only a first attempt: a retry waits for its time.
    oldest = await _oldest_pending(store)
    if oldest is not None and time.time() - oldest > OLD_MESSAGE_SECONDS:
        report.warning(
            "messages",
            f"a message has waited for its first attempt for {(time.time() - oldest) / 3600:.0f} "
            "hours",
            "start the daemon with notifications enabled; 'notify list --state pending' shows it",
        )
    if not any(counts[state] for state in _NEEDS_OPERATOR):
        report.ok("messages", f"{counts[NotificationState.SENT]} were sent, none is failed or lost")


async def _oldest_pending(store: "NotificationStore") -> float | None:
    """Return the time of the oldest of the newest thousand pending messages, None without any."""
    found = await store.find(state=NotificationState.PENDING, limit=1000)
    return min((record.created_at for record in found), default=None)
