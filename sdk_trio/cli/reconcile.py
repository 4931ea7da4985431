"""``events reconcile``: asks the upstream for events that the inbox never received."""

import time
from argparse import Namespace
from collections.abc import Sequence

import trio

from ..client.client import Client
from ..client.deliveries import UpstreamDeliveries
from ..config import Settings
from ..reconcile.plan import Sighting
from ..reconcile.reconciler import Reconciler
from .settings_reader import read
from .store_opener import open_store
from .terminal import Progress, print_rows, say
from .usage import UsageError, moment_text, parse_since

COLUMNS = ("webhook_id", "type", "sent", "delivered", "action")


def reconcile(arguments: Namespace) -> int:
    """Ask for every event since ``--since`` that the inbox has no record of; print them.

    They arrive at the receiver as deliveries, so it has to run. With ``--dry-run`` none is
    requested. Returns 1 when the upstream cannot deliver one of them any more.

    Raises:
        UsageError: ``--since`` is no time, or further back than the inbox remembers.
        StoreUnavailableError: there is no inbox.
        CallError: the upstream could not be asked; events requested until then arrive.
    """
    now = time.time()
    since = parse_since(arguments.since, now=now)
    settings = read(arguments, standalone=False).require()
    _check_reach(settings, since, now)
    actions = trio.run(_reconcile, settings, since, arguments.dry_run)
    rows = [
        {
            "webhook_id": sighting.webhook_id,
            "type": sighting.type,
            "sent": moment_text(sighting.at),
            "delivered": sighting.delivered,
            "action": action,
        }
        for sighting, action in actions
    ]
    print_rows(rows, COLUMNS, as_json=arguments.format == "json")
    lost = sum(action == "lost" for _, action in actions)
    verb = "would be asked for" if arguments.dry_run else "asked for"
    say(f"{len(actions) - lost} {verb}, {lost} cannot be had any more")
    return 1 if lost else 0


def _check_reach(settings: Settings, since: float, now: float) -> None:
    """Refuse a time before the inbox's memory: forgotten events would be handled twice."""
    options = settings.webhooks
    hours = min(options.dedup_retention_hours, options.payload_retention_days * 24)
    if since < now - hours * 3600:
        raise UsageError(
            f"--since reaches back further than the inbox remembers ({hours} hours: "
            "Sdk:Webhooks:DedupRetentionHours and PayloadRetentionDays), so events that were "
            "handled would be asked for again"
        )
    if since > now:
        raise UsageError("--since lies in the future")


async def _reconcile(
    settings: Settings, since: float, dry_run: bool
) -> Sequence[tuple[Sighting, str]]:
    actions: list[tuple[Sighting, str]] = []
    async with open_store(settings) as inbox, Client(settings) as client:
        reconciler = Reconciler(UpstreamDeliveries(client), inbox, settings)
        missing = await reconciler.survey(since)
        progress = Progress("asked for", len(missing), quiet_below=5)
        for sighting in missing:
            if sighting.archived:
                actions.append((sighting, "lost"))
            elif dry_run:
                actions.append((sighting, "would ask"))
            else:
                agreed = await reconciler.ask(sighting)
                actions.append((sighting, "asked" if agreed else "lost"))
            progress.advance()
    return actions
