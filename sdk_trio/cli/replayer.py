"""``events replay``: puts dead, parked and retrying events back, one by one or in bulk."""

import time
from argparse import Namespace
from collections.abc import Sequence

import trio

from ..config import Settings
from ..errors import EXIT_FAILURE
from ..storage.records import DeliveryState
from ..storage.replayer import Candidate, find_chosen, find_named, put_back, replay_rows
from .moments import parse_since
from .printer import Progress, print_rows, say
from .questioner import confirmed
from .settings_reader import load
from .store_opener import open_store
from .tenant_access import tenant_id_of
from .usage import UsageError

COLUMNS = ("webhook_id", "type", "state", "replayed", "reason")


def replay(arguments: Namespace) -> int:
    """Replay the named or chosen events; return 1 if a named one could not be replayed.

    Raises:
        UsageError: neither ids nor ``--state``, or both.
    """
    if bool(arguments.ids) == bool(arguments.state):
        raise UsageError("give the ids of events, or --state dead, parked or retrying; not both")
    if arguments.ids and (arguments.type or arguments.since or arguments.tenant):
        raise UsageError(
            "--type, --tenant and --since choose among a --state; leave them out with ids"
        )
    since = parse_since(arguments.since, now=time.time()) if arguments.since else None
    settings = load(arguments)
    candidates = trio.run(_candidates, settings, arguments, since)
    possible = [candidate.key for candidate in candidates if candidate.reason is None]
    replayed: set[str] = set()
    if not arguments.dry_run:
        sure = len(possible) < 2 or arguments.yes
        if not (sure or confirmed(f"replay {len(possible)} events?")):
            say("nothing was replayed")
            return EXIT_FAILURE
        replayed = trio.run(_put_back, settings, possible)
    _print(candidates, replayed, arguments)
    expected = {candidate.key for candidate in candidates} if arguments.ids else set()
    reached = set(possible) if arguments.dry_run else replayed
    return EXIT_FAILURE if expected - reached else 0


async def _candidates(
    settings: Settings, arguments: Namespace, since: float | None
) -> list[Candidate]:
    """Return every requested event, also those that cannot be replayed."""
    tenant_id = await tenant_id_of(settings, arguments.tenant)
    async with open_store(settings) as inbox:
        if arguments.ids:
            return await find_named(inbox, arguments.ids)
        state = DeliveryState(arguments.state)
        return await find_chosen(
            inbox, state, type=arguments.type, since=since, tenant_id=tenant_id
        )


async def _put_back(settings: Settings, ids: Sequence[str]) -> set[str]:
    progress = Progress("replayed", len(ids))
    async with open_store(settings) as inbox:
        return await put_back(inbox, ids, progress.advance)


def _print(candidates: Sequence[Candidate], replayed: set[str], arguments: Namespace) -> None:
    rows = replay_rows(candidates, replayed, dry_run=arguments.dry_run)
    as_json = arguments.format == "json"
    if not as_json:
        rows = [{**row, "webhook_id": row["key"]} for row in rows]
    print_rows(rows, COLUMNS, as_json=as_json)
    if arguments.dry_run:
        possible = sum(candidate.reason is None for candidate in candidates)
        say(f"{possible} would be replayed")
    else:
        say(f"{len(replayed)} replayed; a running receiver takes them up by itself")
