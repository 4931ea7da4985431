"""Checks of ``doctor``: the channels of alerts, what they cannot see, and what they have found."""

from collections.abc import Mapping

import trio

from ...alerts.channels import name_of
from ...config import Settings
from ...config.fields import AlertChannel, Form
from ...config.table import ALERTS, ALERTS_ENABLED, is_below, table
from ...notifications.send import Skipped, credential
from ...records.alerts import listed_alerts
from ...records.states import NotificationState
from ...storage.examine import Contents
from ..store import open_alerts
from . import Report
from .store import check_sender

_CHANNELS_KEY = f"{ALERTS}:Channels"


async def check_alerts(
    settings: Settings, found: Contents | None, environ: Mapping[str, str], report: Report
) -> None:
    """Report what prevents messages about alerts, and open alerts; send and change nothing.

    Raises:
        StoreUnavailableError: the store cannot be read.
    """
    options = settings.alerts
    if not options.enabled:
        report.note(ALERTS_ENABLED, "false: dead letters and outages are logged, and not sent")
        await trio.lowlevel.checkpoint()
        return
    before = len(report.findings)
    for channel in options.channels:
        _check_credentials(channel, settings, environ, report)
    if AlertChannel.EMAIL in options.channels:
        check_sender(f"{ALERTS}:Email:FromAddress", options.email.from_address, report)
    if len(report.findings) == before:
        names = ", ".join(map(name_of, options.channels))
        report.ok(_CHANNELS_KEY, f"{names}: every credential is there; 'alerts test' tries them")
    if not settings.webhooks.reconciliation.enabled:
        report.note(
            "Sdk:Webhooks:Reconciliation:Enabled",
            "false: an endpoint that the upstream disables is noticed as silence only",
            f"enable it, or set {ALERTS}:SilenceMinutes",
        )
    if found is None:
        await trio.lowlevel.checkpoint()
        return
    await _check_rows(settings, report)


def _check_credentials(
    channel: AlertChannel, settings: Settings, environ: Mapping[str, str], report: Report
) -> None:
    for setting in table():
        is_variable = setting.about.form is Form.ENV_VAR
        if not is_variable or not is_below(setting.key, f"{ALERTS}:{channel}"):
            continue
        variable = setting.of(settings)
        # The same check as before sending, so that the finding names the reason in the same words.
        value = credential(environ.get, variable, for_header=channel is not AlertChannel.WEBHOOK)
        if isinstance(value, Skipped):
            report.problem(
                setting.key,
                f"{value.reason}: no alert is sent on the channel {name_of(channel)}",
                f"set {variable} for the user of the receiver, restart it, then 'alerts test'",
            )


async def _check_rows(settings: Settings, report: Report) -> None:
    async with open_alerts(settings) as store:
        book = await store.load()
    for row in listed_alerts(book):
        if row["state"] == "open":
            report.warning(row["name"], row["detail"], "'alerts list' shows when it opened")
    failed = [each for each in book.messages if each.state is NotificationState.FAILED]
    if failed:
        report.warning(
            "messages",
            f"{len(failed)} messages about alerts could not be sent; the last one on the channel "
            f"{failed[-1].channel}: {failed[-1].reason}",
            "'alerts test' tries the channels",
        )
