"""``events replay``: puts dead and parked events back, one by one or in bulk."""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from ..config import Settings
from ..errors import EXIT_FAILURE
from ..storage.ports import Inbox
from ..storage.records import DeliveryRecord, DeliveryState
from .commands import REPLAYABLE_STATES
from .moments import parse_since
from .printer import Progress, print_rows, say
from .settings_reader import load
from .store_opener import open_store
from .usage import UsageError

#: Events put back in one transaction: few enough that no delivery waits for it.
CHUNK = 200

COLUMNS = ("webhook_id", "type", "state", "replayed", "reason")


@attrs.frozen
class Candidate:
    """An event that was asked for: ``reason`` says why it cannot be replayed, if it cannot."""

    webhook_id: str
    type: str | None = None
    state: str | None = None
    reason: str | None = None


def replay(arguments: Namespace) -> int:
    """Replay the events that were named or chosen; 1 if one of those named could not be.

    Raises:
        UsageError: neither ids nor ``--state``, or both.
    """
    if bool(arguments.ids) == bool(arguments.state):
        raise UsageError("give the ids of events, or --state dead or --state parked; not both")
    if arguments.ids and (arguments.type or arguments.since):
        raise UsageError("--type and --since choose among a --state; leave them out with ids")
    since = parse_since(arguments.since, now=time.time()) if arguments.since else None
    settings = load(arguments)
    candidates = trio.run(_candidates, settings, arguments, since)
    possible = [candidate.webhook_id for candidate in candidates if candidate.reason is None]
    replayed: set[str] = set()
    if not arguments.dry_run:
        if len(possible) > 1 and not (arguments.yes or _confirmed(len(possible))):
            say("nothing was replayed")
            return EXIT_FAILURE
        replayed = trio.run(_put_back, settings, possible)
    _print(candidates, replayed, arguments)
    expected = {candidate.webhook_id for candidate in candidates} if arguments.ids else set()
    reached = set(possible) if arguments.dry_run else replayed
    return EXIT_FAILURE if expected - reached else 0


async def _candidates(
    settings: Settings, arguments: Namespace, since: float | None
) -> list[Candidate]:
    """Return every event that was asked for, those that cannot be replayed included."""
    async with open_store(settings) as inbox:
        if arguments.ids:
            return [await _named(inbox, webhook_id) for webhook_id in dict.fromkeys(arguments.ids)]
        return await _chosen(inbox, arguments, since)


async def _named(inbox: Inbox, webhook_id: str) -> Candidate:
    record = await inbox.get(webhook_id)
    if record is None:
        return Candidate(webhook_id, reason="there is no such event in the inbox")
    return _candidate(record, _fault(record))


def _fault(record: DeliveryRecord) -> str | None:
    if record.state not in REPLAYABLE_STATES:
        return f"is {record.state}: only dead and parked events are replayed"
    return None if record.raw is not None else "its body is not kept any more"


def _candidate(record: DeliveryRecord, reason: str | None = None) -> Candidate:
    return Candidate(record.webhook_id, record.type, str(record.state), reason)


async def _chosen(inbox: Inbox, arguments: Namespace, since: float | None) -> list[Candidate]:
    """Return every event of the state, oldest first, page by page."""
    found: list[Candidate] = []
    after = 0
    while True:
        page = await inbox.find(
            type=arguments.type,
            state=DeliveryState(arguments.state),
            since=since,
            after_sequence=after,
            limit=CHUNK,
        )
        if not page:
            return found
        after = page[-1].sequence
        found += map(_candidate, page)


def _confirmed(count: int) -> bool:
    """Ask whether to replay so many; where nobody can be asked, a script meant what it wrote."""
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"replay {count} events? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


async def _put_back(settings: Settings, ids: Sequence[str]) -> set[str]:
    replayed: set[str] = set()
    progress = Progress("replayed", len(ids))
    async with open_store(settings) as inbox:
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            replayed.update(await inbox.replay(chunk))
            progress.advance(len(chunk))
    return replayed


def _print(candidates: Sequence[Candidate], replayed: set[str], arguments: Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        done = candidate.webhook_id in replayed
        reason = candidate.reason
        if not (done or reason or arguments.dry_run):
            reason = "it changed meanwhile; look at it with 'events show'"
        state = str(DeliveryState.RECEIVED) if done else candidate.state
        rows.append({**attrs.asdict(candidate), "state": state, "replayed": done, "reason": reason})
    print_rows(rows, COLUMNS, as_json=arguments.format == "json")
    if arguments.dry_run:
        possible = sum(candidate.reason is None for candidate in candidates)
        say(f"{possible} would be replayed")
    else:
        say(f"{len(replayed)} replayed; a running receiver takes them up by itself")
