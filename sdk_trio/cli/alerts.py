"""``alerts``: the conditions that an operator has to know about, and a test of the channels."""

from __future__ import annotations

import time
import uuid
from argparse import ArgumentParser, Namespace
from typing import Any

from .parse import add_format, describing

if not describing():
    import trio

    from ..alerts.messages import TEST_DETAIL
    from ..config.fields import AlertChannel
    from ..config.table import ALERTS, ALERTS_ENABLED
    from ..notifications.send import Outcome, Sent
    from ..records.alerts import AlertBook, AlertMessage, AlertName, MessageKind, listed_alerts
    from .notifications import describe_outcome
    from .settings import load
    from .store import open_alerts
    from .terminal import print_list

LIST_COLUMNS = ("name", "state", "opened_at", "closed_at", "openings", "detail", "messages")
TEST_COLUMNS = ("channel", "outcome", "reason", "advice")


def list_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``alerts list``."""
    parser.add_argument("--open", action="store_true", help="only open alerts")
    add_format(parser)


def list_alerts(arguments: Namespace) -> int:
    """Print every alert that has ever opened, the open ones first."""
    settings = load(arguments)

    async def read() -> AlertBook:
        async with open_alerts(settings) as store:
            return await store.load()

    rows = [
        row for row in listed_alerts(trio.run(read)) if row["state"] == "open" or not arguments.open
    ]
    if arguments.format != "json":
        for row in rows:
            sent = [f"{channel} {state}" for channel, state in row["messages"].items()]
            row["messages"] = ", ".join(sent)
    print_list(arguments, rows, LIST_COLUMNS, nothing="no alerts")
    return 0


def test_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``alerts test``."""
    parser.add_argument(
        "--channel",
        choices=("email", "webhook", "chat"),
        help="only this channel, even if it is not configured (default: all configured ones)",
    )
    add_format(parser)


def test(arguments: Namespace) -> int:
    """Send a test message on each configured channel and print the outcomes.

    Alerts count as enabled. The status is that of the worst outcome: 0 if all were sent, 1 if one
    was refused or its outcome is unknown, 69 if it may be accepted later, 78 if a setting is
    missing.

    Raises:
        OptionsValidationError: the settings of alerts are wrong.
    """
    own = {ALERTS_ENABLED: "true"}
    if arguments.channel:
        own[f"{ALERTS}:Channels"] = str(AlertChannel(arguments.channel))
    # Appended as --set arguments, so that the command's own options win over the given ones.
    arguments.set = [*arguments.set, *(f"{key}={value}" for key, value in own.items())]
    settings = load(arguments)
    rows, status = trio.run(_send, settings)
    print_list(arguments, rows, TEST_COLUMNS)
    return status


async def _send(settings: Any) -> tuple[list[dict[str, Any]], int]:
    from ..runtime.alerts import make_alert_senders

    now = time.time()
    rows, worst = [], 0
    for channel, sender in make_alert_senders(settings.alerts).items():
        message = AlertMessage(
            id=str(uuid.uuid4()),
            channel=channel,
            alert=AlertName.STORE_UNREACHABLE,
            kind=MessageKind.TEST,
            detail=TEST_DETAIL,
            opened_at=now,
            closed_at=None,
            created_at=now,
        )
        outcome: Outcome = await sender.send(message)
        word, status, advice = describe_outcome(outcome)
        reason = None if isinstance(outcome, Sent) else outcome.reason
        rows.append(
            {"channel": channel, "outcome": word, "reason": reason, "advice": advice or None}
        )
        worst = max(worst, status)
    await trio.lowlevel.checkpoint()
    return rows, worst
