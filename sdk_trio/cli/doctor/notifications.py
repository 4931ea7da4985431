"""The checks of ``doctor`` on notifications: settings, credentials, recipients and messages."""

import time
from collections.abc import Callable, Iterable, Mapping

import trio

from ...config import Settings, StorageBackend
from ...config.fields import Form
from ...config.options.notifications import NotificationsOptions, enabled_channels
from ...config.table import NOTIFICATIONS, is_below, table
from ...notifications.send import Skipped, credential
from ...records.channels import CHANNELS, ContactKind, NotificationChannel
from ...records.notifications import NotificationState
from ...records.tenants import Tenant, TenantStatus
from ...storage.examine import Examination
from ...storage.open import open_store
from ...storage.ports import NotificationStore
from . import Report

CHANNELS_KEY = f"{NOTIFICATIONS}:EnabledChannels"

_CONTACTS: Mapping[ContactKind, Callable[[Tenant], str | None]] = {
    ContactKind.EMAIL: lambda tenant: tenant.site_manager_email,
    ContactKind.PHONE: lambda tenant: tenant.site_manager_phone,
}

#: The most active tenants whose recipients are checked.
MOST_TENANTS = 1000

#: Domains of documentation and of local machines, from which no mail can come (RFC 2606, 6761,
#: 6762).
_NO_DOMAINS = (
    *(".example", ".invalid", ".test", ".localhost", ".local"),
    *("example.com", "example.org", "example.net"),
)

#: The advice for messages in these states.
_WAITING_FOR_SOMEBODY = {
    NotificationState.FAILED: "remove the causes that 'notify list --state failed' shows, then "
    "'notify retry --state failed'",
    NotificationState.UNKNOWN: "look at the provider for those that 'notify list --state unknown' "
    "shows; 'notify retry' sends them again",
}

#: The age in seconds from which a waiting message shows that no process sends messages: the longest
#: wait between two attempts is an hour, and providers seldom ask for a longer one.
OLD_SECONDS = 2 * 3600.0


async def check_notifications(
    settings: Settings, found: Examination | None, environ: Mapping[str, str], report: Report
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
        _check_sender(options.email.from_address, report)
    if len(report.findings) == before:
        names = ", ".join(enabled_channels(options))
        report.ok(CHANNELS_KEY, f"{names}: every credential is there; 'notify test' tries them")
    if settings.storage.backend is not StorageBackend.SQLITE or found is None:
        await trio.lowlevel.checkpoint()
        return
    if not found.is_current:
        await trio.lowlevel.checkpoint()
        return
    async with open_store(settings, owner="doctor") as store:
        tenants = await store.tenants.page(status=TenantStatus.ACTIVE, limit=MOST_TENANTS)
        _check_recipients(options, tenants, report)
        await _check_messages(store.notifications, report)


def _are_used(settings: Settings, options: NotificationsOptions, report: Report) -> bool:
    key = f"{NOTIFICATIONS}:Enabled"
    if not options.enabled:
        report.note(key, "false: nobody is told of transitions")
        return False
    # The checks of the settings report notifications without tenants or without a channel already.
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


def _check_sender(address: str, report: Report) -> None:
    domain = address.rpartition("@")[2].casefold()
    if "." not in domain or domain.endswith(_NO_DOMAINS):
        report.warning(
            f"{NOTIFICATIONS}:Email:FromAddress",
            f"no mail can come from the domain {domain}, so the provider will refuse it",
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
            f"they are not told that way ('tenant contact' takes {contact.argument})",
        )


def _named(tenants: list[Tenant]) -> str:
    names = ", ".join(tenant.identifier for tenant in tenants[:5])
    return f"tenants {names}" + ("" if len(tenants) <= 5 else ", ...")


async def _check_messages(store: NotificationStore, report: Report) -> None:
    counts = await store.counts()
    for state, remedy in _WAITING_FOR_SOMEBODY.items():
        if counts[state]:
            report.warning("messages", f"{counts[state]} messages are {state}", remedy)
    if counts[NotificationState.SKIPPED]:
        report.note(
            "messages",
            f"{counts[NotificationState.SKIPPED]} messages were skipped: nothing was sent",
            "'notify list --state skipped' says why",
        )
    oldest = await _oldest_pending(store)
    if oldest is not None and time.time() - oldest > OLD_SECONDS:
        report.warning(
            "messages",
            f"a message has waited for its first attempt for {(time.time() - oldest) / 3600:.0f} "
            "hours",
            "start the daemon with notifications enabled; 'notify list --state pending' shows it",
        )
    if not any(counts[state] for state in _WAITING_FOR_SOMEBODY):
        report.ok("messages", f"{counts[NotificationState.SENT]} were sent, none is failed or lost")


async def _oldest_pending(store: NotificationStore) -> float | None:
    """Return the time of the oldest of the newest thousand pending messages, None without any."""
    found = await store.find(state=NotificationState.PENDING, limit=1000)
    return min((record.created_at for record in found), default=None)
