"""``routes list``, ``pause`` and ``resume``: the routes of forwarded events."""

from __future__ import annotations

import re
import time
from argparse import ArgumentParser, Namespace

from ..errors import SdkError
from .parse import add_format, add_reason_and_actor, describing

if not describing():
    import trio

    from ..config import Settings
    from ..storage.ports import Inbox
    from ..webhooks.routes import WAITING, Pause, checkpoint_of, pause_of, routes_of
    from .receiver import admin_address, fetch
    from .settings import load
    from .store import checked_actor, checked_reason, open_inbox, why_unreachable
    from .terminal import print_list, say

#: A sample of the metric, as a route's name is a label without escapes.
_ROUTE_STATE = re.compile(
    r'^sdk_forward_route_state\{[^}]*route="([^"]*)"[^}]*\} (\S+)', re.MULTILINE
)

COLUMNS = ("name", "state", "types", "where", "url", "timeout_seconds", "policies")
COLUMNS_OF_SOURCES = (*COLUMNS[:2], "sources", *COLUMNS[2:])


class UnknownRouteError(SdkError):
    """The settings have no route of this name."""


def list_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``routes list``."""
    add_format(parser)


def list_routes(arguments: Namespace) -> int:
    """Print the routes in their order; the first that matches an event takes it."""
    settings = load(arguments)
    routes = routes_of(settings)
    pauses = trio.run(pauses_of, settings)
    waiting, unknown = _waiting_routes(settings) if routes else (set[str](), None)
    rows = []
    for route in routes:
        options, pause = route.options, pauses.get(route.name)
        row = {
            "name": route.name,
            "state": "paused" if pause else "waiting" if route.name in waiting else "open",
            "types": list(options.types),
            **({"sources": list(options.sources)} if options.sources else {}),
            "where": list(options.where),
            "url": options.url,
            "timeout_seconds": options.timeout_seconds,
            "ordered": options.ordered,
            "concurrency": options.concurrency,
            "policies": str(route.policy(settings.webhooks.queue)),
            "paused_at": pause and pause.at,
            "paused_by": pause and pause.actor,
            "reason": pause and pause.reason,
        }
        rows.append(row)
    of_sources = any("sources" in row for row in rows)
    print_list(arguments, rows, COLUMNS_OF_SOURCES if of_sources else COLUMNS)
    for name, pause in pauses.items():
        say(f"{name} is paused {pause}")
    if waiting:
        say(
            f"{', '.join(sorted(waiting))}: the application fails or is unavailable, so its "
            "events wait and are retried automatically"
        )
    if unknown is not None:
        say(f"open: not paused; the state of the applications is unknown: {unknown}")
    if not routes:
        say("no routes: set Sdk:Forward:Routes, or run with --forward-to URL")
    return 0


def _waiting_routes(settings: Settings) -> tuple[set[str], str | None]:
    """Return the routes that the running receiver has stopped for failures.

    The second value is the reason why the receiver could not be queried, or None.
    """
    try:
        status, metrics = fetch(admin_address(settings), "/metrics")
    except SdkError as error:
        return set(), str(error)
    if status != 200:
        return set(), f"the admin address answers /metrics with {status}"
    found = _ROUTE_STATE.findall(metrics.decode("utf-8", "replace"))
    return {name for name, state in found if float(state) == WAITING}, None


def pause_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``routes pause``."""
    parser.add_argument("name", metavar="NAME", help="the route, as 'routes list' names it")
    add_reason_and_actor(parser)


def pause(arguments: Namespace) -> int:
    """Keep the events of a route in the store, until it is resumed.

    Raises:
        UnknownRouteError: the settings have no such route.
    """
    reason = checked_reason(arguments) or "no reason was given"
    wanted = Pause(reason, time.time(), checked_actor(arguments))
    before = trio.run(_change, load(arguments), arguments.name, wanted)
    if before is not None:
        say(f"{arguments.name} was paused already, {before}")
    else:
        say(f"{arguments.name} is paused; a running receiver notices within a second or two")
    return 0


def resume_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``routes resume``."""
    parser.add_argument("name", metavar="NAME", help="the route, as 'routes list' names it")


def resume(arguments: Namespace) -> int:
    """Release the events of a paused route.

    Raises:
        UnknownRouteError: the settings have no such route.
    """
    before = trio.run(_change, load(arguments), arguments.name, None)
    if before is None:
        say(f"{arguments.name} is not paused")
    else:
        say(f"{arguments.name} is resumed; its events are posted within seconds, the oldest first")
    return 0


async def pauses_of(settings: Settings) -> dict[str, Pause]:
    """Return the pauses of routes by name; empty if the store cannot be reached."""
    routes = settings.forward.all_routes
    if not routes or why_unreachable(settings) is not None:
        await trio.lowlevel.checkpoint()
        return {}
    async with open_inbox(settings) as inbox:
        found = {route.name: await _pause_in(inbox, route.name) for route in routes}
    return {name: pause for name, pause in found.items() if pause is not None}


async def _pause_in(inbox: Inbox, name: str) -> Pause | None:
    return pause_of(await inbox.read_checkpoint(checkpoint_of(name)))


async def _change(settings: Settings, name: str, wanted: Pause | None) -> Pause | None:
    """Write or remove a pause; return the previous one. A new pause does not replace an existing
    one."""
    find_route(settings, name)
    async with open_inbox(settings) as inbox:
        before = await _pause_in(inbox, name)
        if (before is None) is not (wanted is None):
            text = None if wanted is None else wanted.as_text()
            await inbox.write_checkpoint(checkpoint_of(name), text)
        return before


def find_route(settings: Settings, name: str) -> int:
    """Return the index of a route in the settings.

    Raises:
        UnknownRouteError: there is no route with that name.
    """
    names = [route.name for route in settings.forward.all_routes]
    if name not in names:
        known = f"there are {', '.join(names)}" if names else "there are no routes"
        hint = "; for a receiver with --forward-to URL, add --set Sdk:Forward:Url=URL"
        raise UnknownRouteError(f"no route is named {name!r}: {known}{'' if names else hint}")
    return names.index(name)
