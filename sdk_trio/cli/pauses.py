"""``events pause``, ``resume`` and ``pauses``: pause events by type; they wait in the store."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from .parse import (
    UsageError,
    add_format,
    add_reason_and_actor,
    add_source,
    describing,
    parse_moment,
)

if not describing():
    from collections.abc import Sequence
    from fnmatch import fnmatchcase

    import trio
    from msgspec.structs import asdict

    from ..config import Settings
    from ..events import DEFAULT_CATALOG
    from ..records.policies import (
        EventPause,
        glob_of,
        glob_problem,
        name_of_glob,
        split_glob,
    )
    from .settings import load
    from .store import checked_actor, checked_reason, open_inbox, source_named
    from .terminal import print_list, say

COLUMNS = ("type", "since", "until", "actor", "reason")

#: The columns with ``--all``, which also lists pauses that have ended.
ALL_COLUMNS = (*COLUMNS, "ended_at", "ended_by")


def pause_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events pause``."""
    parser.add_argument(
        "--type", metavar="GLOB", required=True, help="the types to pause, such as order.*"
    )
    add_source(parser, "events of this source, instead of the upstream's")
    parser.add_argument(
        "--until",
        metavar="T",
        help="when the pause ends by itself: ISO 8601, Unix seconds, or 15m, 2h, 3d from now",
    )
    add_reason_and_actor(parser)


def pause(arguments: Namespace) -> int:
    """Pause events of these types: they wait in the store until they are resumed.

    Raises:
        UsageError: the glob or the time cannot be used.
    """
    wrong = glob_problem(arguments.type)
    if wrong is not None:
        raise UsageError(f"--type: {wrong}")
    now = time.time()
    until = None
    if arguments.until is not None:
        until = parse_moment(arguments.until, now=now, option="--until", ahead=True)
    if until is not None and until <= now:
        raise UsageError(f"--until takes a time in the future, not {arguments.until!r}")
    settings = load(arguments)
    # Otherwise a misspelt name would pause nothing.
    if arguments.source is not None:
        source_named(settings, arguments.source)
    actor, reason = checked_actor(arguments), checked_reason(arguments) or ""
    glob = glob_of(arguments.type, arguments.source)
    (kept,) = trio.run(_pause, settings, glob, actor, reason, until, now)
    say(f"{kept}; each running receiver applies it within a second")
    # An application may have types of its own, so it is no error.
    known = (row.wire_type for row in DEFAULT_CATALOG)
    if arguments.source is None and not any(fnmatchcase(each, glob) for each in known):
        say(f"note: {glob} matches no known type; 'events types' lists them")
    return 0


def resume_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events resume``."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--type", metavar="GLOB", help="the glob, as 'events pauses' lists it")
    which.add_argument("--all", action="store_true", help="every pause")
    add_source(parser, "with --type: the source of the pause")
    parser.add_argument(
        "--actor", metavar="A", help="who makes the change (default: the user of the machine)"
    )


def resume(arguments: Namespace) -> int:
    """Resume paused events, the oldest first.

    Raises:
        UsageError: the glob is not paused.
    """
    if arguments.source is not None and arguments.type is None:
        raise UsageError("--source needs --type: the glob, as 'events pauses' lists it")
    glob = None if arguments.type is None else glob_of(arguments.type, arguments.source)
    ended, left = trio.run(_resume, load(arguments), glob, checked_actor(arguments))
    if not ended and glob is not None:
        known = ", ".join(name_of_glob(each.glob) for each in left) or "nothing"
        raise UsageError(f"{name_of_glob(glob)} is not paused; name a paused glob: {known}")
    say(f"resumed: {', '.join(map(name_of_glob, ended))}" if ended else "nothing is paused")
    return 0


def pauses_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events pauses``."""
    parser.add_argument("--all", action="store_true", help="also those that have ended")
    add_format(parser)


def pauses(arguments: Namespace) -> int:
    """Print the pauses: the type of the events, the start, and the actor."""
    found = trio.run(pauses_in, load(arguments), arguments.all)
    rows = [row_of(each) for each in found]
    columns = ALL_COLUMNS if arguments.all else COLUMNS
    if any("source" in row for row in rows):
        columns = (columns[0], "source", *columns[1:])
    print_list(arguments, rows, columns)
    if not rows and arguments.format != "json":
        say("nothing is paused")
    return 0


def row_of(pause: EventPause) -> dict[str, object]:
    """Return a pause as JSON."""
    fields = asdict(pause)
    source, types = split_glob(fields.pop("glob"))
    return {"type": types, **({} if source is None else {"source": source}), **fields}


async def pauses_in(settings: Settings, ended: bool = False) -> Sequence[EventPause]:
    """Return the pauses of the store that are in force; ``ended``: all of them."""
    async with open_inbox(settings) as inbox:
        return await inbox.pauses(now=time.time(), ended=ended)


async def _pause(
    settings: Settings, glob: str, actor: str, reason: str, until: float | None, now: float
) -> Sequence[EventPause]:
    async with open_inbox(settings) as inbox:
        await inbox.pause(glob, actor=actor, reason=reason, until=until, now=now)
        return [each for each in await inbox.pauses(now=now) if each.glob == glob]


async def _resume(
    settings: Settings, glob: str | None, actor: str
) -> tuple[Sequence[str], Sequence[EventPause]]:
    now = time.time()
    async with open_inbox(settings) as inbox:
        ended = await inbox.resume(glob, actor=actor, now=now)
        return ended, await inbox.pauses(now=now)
