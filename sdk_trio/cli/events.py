"""``events list``, ``show``, ``replay`` and ``tail``: the inbox."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs

from ..errors import EXIT_FAILURE, SdkError
from ..records.states import REPLAYABLE, UNFINISHED, DeliveryState
from .parse import (
    UsageError,
    add_feed,
    add_format,
    add_limit,
    add_moment,
    add_source,
    describing,
    moment_text,
)

if not describing():
    import trio

    from ..admin.follow import open_feed
    from ..admin.replay import (
        ReplayCandidate,
        ambiguity,
        find_chosen,
        find_meant,
        find_named,
        replay_all,
        replay_rows,
    )
    from ..config import Settings
    from ..config.sources import printable
    from ..records.deliveries import (
        AttemptRecord,
        DeliveryRecord,
        EvidenceRecord,
        body_fields,
        listed,
        shown,
    )
    from ..storage.ports import Inbox
    from ..webhooks.routes import first_match, routes_of
    from .listen import REPLACED, feed_source, first_since, raw_of
    from .routes import find_route
    from .settings import load
    from .store import open_inbox, tenant_id_of
    from .terminal import (
        STATE_COLORS,
        Progress,
        cell,
        confirmed,
        is_terminal,
        print_fields,
        print_json,
        print_json_line,
        print_list,
        print_rows,
        print_text,
        say,
    )

#: The columns of ``events list``.
# The key is the argument of 'events show'.
LIST_COLUMNS = (
    "received_at",
    ("webhook_id", "key"),
    "type",
    "state",
    "attempts",
    "subject",
    "last_error",
)

LIST_COLUMNS_OF_SOURCES = (*LIST_COLUMNS[:2], "source", *LIST_COLUMNS[2:])


def _require_one_owner(arguments: Namespace) -> None:
    if arguments.tenant is not None and arguments.source is not None:
        raise UsageError("give --tenant or --source: the events of a source have no tenant")


def readable_body(raw: bytes | None) -> str:
    """Return a body for people: JSON indented, anything else as text, safe for a terminal."""
    if raw is None:
        return "(removed: see Sdk:Webhooks:PayloadRetentionDays)"
    try:
        # Most bodies are JSON. Show others as well: they are the reason why an event was parked.
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = raw.decode("utf-8", "backslashreplace")
    return "\n".join(printable(line) for line in text.split("\n"))


class UnknownEventError(SdkError):
    """The inbox has no event with this id, or several events from different senders."""


def list_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events list``."""
    parser.add_argument("--type", metavar="T", help="only this event type")
    parser.add_argument(
        "--state", choices=[state.value for state in DeliveryState], help="only this state"
    )
    parser.add_argument(
        "--subject", metavar="ID", help="only events about this object, such as an order's id"
    )
    parser.add_argument("--tenant", metavar="T", help="only this tenant's, by name or id")
    add_source(parser, "only this source's")
    add_moment(parser, "--since", "only events received since T")
    add_limit(parser)
    add_format(parser)


def list_events(arguments: Namespace) -> int:
    """Print the newest events, newest first."""
    state = DeliveryState(arguments.state) if arguments.state else None
    _require_one_owner(arguments)
    settings = load(arguments)

    async def find() -> Sequence[DeliveryRecord]:
        tenant_id = await tenant_id_of(settings, arguments.tenant)
        async with open_inbox(settings) as inbox:
            return await inbox.find(
                type=arguments.type,
                state=state,
                since=arguments.since,
                subject=arguments.subject,
                tenant_id=tenant_id,
                source=arguments.source,
                limit=arguments.limit + 1,
            )

    rows = [listed(record) for record in trio.run(find)]
    # People without sources do not read of them.
    of_sources = any("source" in row for row in rows)
    print_list(
        arguments,
        rows,
        LIST_COLUMNS_OF_SOURCES if of_sources else LIST_COLUMNS,
        nothing="no events",
        limit=arguments.limit,
        more="--limit N, or --since T, --state S, --type T",
    )
    return 0


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events show``."""
    parser.add_argument("id", metavar="ID", help="the webhook id")
    add_format(parser)


def show_event(arguments: Namespace) -> int:
    """Print one event with its body and its failed runs.

    Raises:
        UnknownEventError: the inbox has no event with that id, or events from several senders.
    """
    settings = load(arguments)
    record, attempts, evidence = trio.run(find_event, settings, arguments.id)
    if arguments.format == "json":
        print_json(shown(record, attempts, evidence))
    else:
        _print_event(record, attempts)
        _print_other_bodies(evidence)
    return 0


async def find_event(
    settings: Settings, text: str
) -> tuple[DeliveryRecord, Sequence[AttemptRecord], Sequence[EvidenceRecord]]:
    """Return an event with its failed runs and other bodies that came under its id.

    Raises:
        UnknownEventError: the inbox has no event with that id, or events from several senders.
    """
    async with open_inbox(settings) as inbox:
        found = await find_meant(inbox, text)
        if not found:
            raise UnknownEventError(
                f"the inbox in {settings.storage.path} has no event {text!r}; "
                "'events list' lists its events"
            )
        # Tenants and the host may each have signed an event of the same id.
        if len(found) > 1:
            raise UnknownEventError(f"{text!r}: {ambiguity(found)}")
        (record,) = found
        return record, await inbox.attempts(record.key), await inbox.evidence(record.key)


def _signer_of(record: DeliveryRecord) -> str:
    if record.source is not None:
        return f"source {record.source}"
    return f"tenant {record.signer}" if record.signer else "the host"


def _next_run(record: DeliveryRecord) -> str | None:
    if record.state not in UNFINISHED:
        return None
    return "a worker" if record.queued else "the sender's next delivery"


def _print_event(record: DeliveryRecord, attempts: Sequence[AttemptRecord]) -> None:
    fields = {
        "webhook_id": record.webhook_id,
        "key": record.key if record.signer else None,
        "tenant": record.tenant_id,
        "source": record.source,
        "signed by": _signer_of(record),
        "type": record.type,
        "state": record.state,
        "next run by": _next_run(record),
        "attempts": record.attempts,
        "subject": record.subject,
        "ordered": record.ordered,
        "received_at": record.received_at,
        "signed_at": record.timestamp,
        "started_at": record.started_at,
        "next_attempt_at": record.next_attempt_at,
        "finished_at": record.finished_at,
        # A parked event has not failed: the same column has the reason for parking.
        "parked because" if record.state == "parked" else "last error": record.last_error,
        # A narrow terminal truncates it in the table of attempts.
        "place": attempts[-1].place if attempts else None,
    }
    print_fields(fields)
    if attempts:
        answered = any(not attempt.error for attempt in attempts)
        print_text("\nattempts" if answered else "\nfailed attempts")
        rows = [
            {
                "number": attempt.number,
                "started_at": attempt.started_at,
                "seconds": f"{attempt.finished_at - attempt.started_at:.3f}",
                "error": attempt.error or None,
                "place": attempt.place,
            }
            for attempt in attempts
        ]
        print_rows(rows, ("number", "started_at", "seconds", "error", "place"), as_json=False)
        if attempts[-1].traceback:
            print_text("")
            print_text("\n".join(map(printable, attempts[-1].traceback.splitlines())))
    print_text("\nbody")
    print_text(readable_body(record.raw))
    if is_terminal() and record.last_error and record.state is not DeliveryState.DONE:
        # Repeat the error: a long body scrolls it off the screen.
        where = attempts[-1].place if attempts else None
        say(f"\n{record.state}: {cell(record.last_error)}{f' ({cell(where)})' if where else ''}")


def _print_other_bodies(evidence: Sequence[EvidenceRecord]) -> None:
    for other in evidence:
        where = f" from {cell(other.address)}" if other.address else ""
        whose = f", of tenant {other.tenant_id}" if other.tenant_id else ""
        print_text(f"\nanother body, received {moment_text(other.received_at)}{where}{whose}")
        print_text(readable_body(other.raw))


COLUMNS = (("webhook_id", "key"), "type", "state", "replayed", "reason")


def replay_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events replay``."""
    parser.add_argument("ids", metavar="ID", nargs="*", help="dead, parked or retrying events")
    parser.add_argument(
        "--state",
        choices=[state.value for state in REPLAYABLE],
        help="every event in this state, instead of ids",
    )
    parser.add_argument("--type", metavar="T", help="with --state: only this event type")
    parser.add_argument(
        "--subject", metavar="ID", help="with --state: only events about this object"
    )
    parser.add_argument("--tenant", metavar="T", help="with --state: only this tenant's events")
    add_source(parser, "with --state: only this source's events")
    add_moment(parser, "--since", "with --state: only events received since T")
    add_moment(parser, "--until", "with --state: only events received before T")
    parser.add_argument(
        "--error",
        metavar="TEXT",
        help="with --state: only events with this last error; numbers and ids may differ",
    )
    parser.add_argument("--route", metavar="R", help="with --state: only events of this route")
    parser.add_argument(
        "--again",
        action="store_true",
        help="with ids: replay done events as well, which repeats their effects",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the events, replay none")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    add_format(parser)


def replay(arguments: Namespace) -> int:
    """Replay events given by id or by ``--state``; return 1 if a given id cannot be replayed.

    Raises:
        UsageError: neither ids nor ``--state``, or both.
    """
    if bool(arguments.ids) == bool(arguments.state):
        both = "; not both" if arguments.ids else ""
        raise UsageError(f"give the ids of events, or --state dead, parked or retrying{both}")
    choices = ("type", "subject", "tenant", "source", "since", "until", "error", "route")
    if arguments.ids and any(getattr(arguments, each) is not None for each in choices):
        raise UsageError(
            "--type, --subject, --tenant, --source, --since, --until, --error and --route filter "
            "the events of a --state: remove them, or give a --state instead of ids"
        )
    _require_one_owner(arguments)
    if arguments.again and not arguments.ids:
        raise UsageError("--again is for events that are named by their ids")
    if arguments.error is not None and not arguments.error.strip():
        raise UsageError("--error is empty: give the error's first line, as 'events list' shows it")
    settings = load(arguments)
    candidates = trio.run(_candidates, settings, arguments)
    possible = [candidate.key for candidate in candidates if candidate.reason is None]
    replayed: set[str] = set()
    if not arguments.dry_run:
        # A single event needs no confirmation; several may be more than the user intended.
        sure = len(possible) < 2 or arguments.yes
        if not (sure or confirmed(_question(candidates))):
            say("nothing was replayed")
            return EXIT_FAILURE
        replayed = trio.run(_replay_all, settings, possible, arguments.again)
    _print_replayed(candidates, replayed, arguments)
    # With --state nothing was named, so nothing can be missing.
    expected = {candidate.key for candidate in candidates} if arguments.ids else set()
    reached = set(possible) if arguments.dry_run else replayed
    return EXIT_FAILURE if expected - reached else 0


def _question(candidates: Sequence[ReplayCandidate]) -> str:
    types = Counter(each.type for each in candidates if each.reason is None)
    named = [f"{count} {name}" for name, count in types.most_common(3)]
    more = ", ..." if len(types) > 3 else ""
    return f"replay {types.total()} events ({', '.join(named)}{more})?"


async def _candidates(settings: Settings, arguments: Namespace) -> list[ReplayCandidate]:
    """Return every requested event, including those that cannot be replayed."""
    tenant_id = await tenant_id_of(settings, arguments.tenant)
    async with open_inbox(settings) as inbox:
        if arguments.ids:
            return await find_named(inbox, arguments.ids, again=arguments.again)
        state = DeliveryState(arguments.state)
        route = arguments.route
        # Reject an empty name: a script with an unset variable must not replay all events.
        wanted = None if route is None else _taken_by(settings, route, inbox)
        return await find_chosen(
            inbox,
            state,
            type=arguments.type,
            since=arguments.since,
            until=arguments.until,
            error=arguments.error,
            subject=arguments.subject,
            tenant_id=tenant_id,
            source=arguments.source,
            wanted=wanted,
        )


def _taken_by(
    settings: Settings, name: str, inbox: Inbox
) -> Callable[[DeliveryRecord], Awaitable[bool]]:
    """Return a predicate: would the current settings send an event to this route?"""
    routes, place = routes_of(settings), find_route(settings, name)
    # Listings have no bodies, and most routes need none.
    by_body = any(route.conditions for route in routes[: place + 1])

    async def is_taken(record: DeliveryRecord) -> bool:
        await trio.lowlevel.checkpoint()
        whole = await inbox.get(record.key) if by_body else record
        return whole is not None and (
            first_match(routes, whole.type, whole.raw, whole.source) == place
        )

    return is_taken


async def _replay_all(settings: Settings, ids: Sequence[str], again: bool) -> set[str]:
    progress = Progress("replayed", len(ids))
    async with open_inbox(settings) as inbox:
        return await replay_all(inbox, ids, progress.advance, again=again)


def _print_replayed(
    candidates: Sequence[ReplayCandidate], replayed: set[str], arguments: Namespace
) -> None:
    rows = replay_rows(candidates, replayed, dry_run=arguments.dry_run)
    print_list(arguments, rows, COLUMNS)
    if arguments.ids and arguments.format != "json" and is_terminal():
        for row in rows:
            if row["reason"]:  # a narrow table cuts it
                say(f"{cell(row['key'])}: {row['reason']}")
    if arguments.dry_run:
        possible = sum(candidate.reason is None for candidate in candidates)
        say(f"{possible} would be replayed")
    elif replayed:
        say(f"{len(replayed)} replayed; a running receiver runs them")
    else:
        say("0 replayed")
    if arguments.error is not None and not candidates:
        say(
            "no event has this error: give the whole error as 'events list' shows it; numbers and "
            "ids may differ"
        )


#: Seconds between two polls of the store for changes. A poll needs no disk access, and people do
#: not notice a quarter of a second.
POLL_SECONDS = 0.25

#: Seconds for which a lower sequence number may still appear: longer than a host retries a commit.
LATE_SECONDS = 20.0

#: The number of new events that are read at once.
PAGE = 200

#: The most events of each state that are watched, newest first.
WATCHED = 1000

# Done events are omitted: there may be millions, and none of them changes again.
_OPEN = tuple(state for state in DeliveryState if state is not DeliveryState.DONE)


def tail_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events tail``."""
    parser.add_argument("--type", metavar="T", help="only this event type; * matches any text")
    parser.add_argument(
        "--state", choices=[state.value for state in DeliveryState], help="only in this state"
    )
    parser.add_argument("--tenant", metavar="T", help="only this tenant's, by name or id")
    add_source(parser, "only this source's")
    add_moment(parser, "--since", "first print the events received since T")
    parser.add_argument("--body", action="store_true", help="print the body of each arrival")
    add_feed(parser)
    add_format(parser)


def tail(arguments: Namespace) -> int:
    """Print a line per new event and per change of an event that is not done, until interrupted.

    Raises:
        FeedRefusedError: the receiver of ``--from`` refuses.
    """
    _require_one_owner(arguments)
    settings = load(arguments)
    trio.run(_tail if arguments.from_ is None else _tail_feed, settings, arguments)
    return 0


async def _tail(settings: Settings, arguments: Namespace) -> None:
    tenant_id = await tenant_id_of(settings, arguments.tenant)
    wanted = TailFilter(arguments.type, arguments.state, tenant_id, arguments.source)
    printer = TailPrinter(as_json=arguments.format == "json")
    async with open_inbox(settings) as inbox:
        tailer = Tailer(inbox, wanted.exact_type)
        await tailer.begin()

        async def show(records: Sequence[DeliveryRecord]) -> None:
            await trio.lowlevel.checkpoint()
            for record in records:
                if wanted.wants(record):
                    whole = await inbox.get(record.key) if arguments.body else None
                    printer.show(listed(record), None if whole is None else whole.raw)

        if arguments.since is not None:
            await show(await _arrived_since(inbox, arguments.since, wanted))
        say("waiting for changes; Ctrl-C ends")
        while True:
            await show(await tailer.changes())
            await trio.sleep(POLL_SECONDS)


async def _arrived_since(inbox: Inbox, since: float, wanted: TailFilter) -> list[DeliveryRecord]:
    found: list[DeliveryRecord] = []
    after = 0
    while True:
        page = await inbox.find(
            type=wanted.exact_type,
            tenant_id=wanted.tenant_id,
            source=wanted.source,
            since=since,
            after_sequence=after,
            limit=PAGE,
        )
        found += page
        if len(page) < PAGE:
            return found
        after = page[-1].sequence


async def _tail_feed(settings: Settings, arguments: Namespace) -> None:
    source = feed_source(settings, arguments)
    printer = TailPrinter(as_json=arguments.format == "json")
    since = arguments.since
    after = None if since is None else await first_since(source, since)
    connected = False
    async with open_feed(
        source.url,
        token=source.token,
        after=after,
        kinds=("delivery", "changed", "rejected"),
        types=(arguments.type,) if arguments.type else (),
        state=arguments.state,
        tenant=arguments.tenant,
        source=arguments.source,
        body=arguments.body,
    ) as feed:
        async for message in feed:
            match message["kind"]:
                case "hello":
                    say(f"connected to {source.url}; Ctrl-C ends")
                    if message["replaced"]:
                        say(REPLACED)
                    elif connected:
                        say("changes while disconnected are not shown: run 'events list'")
                    connected = True
                case "lagged":
                    say(f"{message['dropped']} changes were omitted: this program was too slow")
                case "delivery" | "changed":
                    event = message["event"]
                    printer.show(event, raw_of(event) if message["kind"] == "delivery" else None)
                case "rejected" if not (arguments.type or arguments.state):
                    printer.show_rejected(message["rejection"])


@attrs.frozen
class TailFilter:
    """The events that ``events tail`` prints."""

    type: str | None
    state: str | None
    tenant_id: str | None
    source: str | None = None

    @property
    def exact_type(self) -> str | None:
        """The type, if it is not a pattern: then the store filters by it."""
        return None if self.type is None or "*" in self.type else self.type

    def wants(self, record: DeliveryRecord) -> bool:
        """Return whether a record is printed."""
        return (
            (self.type is None or fnmatchcase(record.type, self.type))
            and self.state in (None, record.state)
            and self.tenant_id in (None, record.tenant_id)
            and self.source in (None, record.source)
        )


class TailPrinter:
    """Prints each change as one line, truncated to the terminal, with its state in colour.

    A pipe gets the whole line without colours.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        drawn = is_terminal()
        self._width = shutil.get_terminal_size().columns if drawn else None
        self._colors = drawn and not os.environ.get("NO_COLOR")
        self._with_body: set[str] = set()

    def show(self, event: Mapping[str, Any], raw: bytes | None) -> None:
        """Print an event, and its body if given; as text, only the first line of its error."""
        if self._as_json:
            print_json_line({**event, **({} if raw is None else body_fields(raw))})
            return
        parts = [event["type"], event["key"]]
        if event["last_error"] and event["state"] != "done":
            parts.append(event["last_error"].partition("\n")[0])
        self._print(event["state"], parts)
        if raw is not None and event["key"] not in self._with_body:
            self._with_body.add(event["key"])
            for line in readable_body(raw).split("\n"):
                print_text(f"  {line}")
            sys.stdout.flush()
        if event["state"] == "done":
            self._with_body.discard(event["key"])  # most done events never change again

    def show_rejected(self, rejection: Mapping[str, Any]) -> None:
        """Print a request that was not answered 200."""
        if self._as_json:
            print_json_line(rejection)
            return
        parts = [f"{rejection['status']} {rejection['cause']}"]
        names = ("address", "webhook_id", "type", "detail")
        parts += [str(rejection[name]) for name in names if rejection[name] is not None]
        self._print("rejected", parts)

    def _print(self, state: str, parts: Sequence[str]) -> None:
        # The time of the poll, because records do not store when they last changed.
        clock = time.strftime("%H:%M:%S", time.gmtime())
        line = "  ".join([clock, state.ljust(8), *(cell(part) for part in parts)])
        if self._width is not None and len(line) > self._width:
            line = f"{line[: self._width - 1]}…"
        if self._colors and state in STATE_COLORS:
            line = line.replace(state, f"\x1b[{STATE_COLORS[state]}m{state}\x1b[0m", 1)
        print_text(line)
        sys.stdout.flush()


class Tailer:
    """Finds the changes since the last poll.

    New events are found by their sequence. Unfinished events are read again, because they may still
    run or be replayed. Those that have finished since are read by id. If an event changes twice
    between two polls, only the later change is seen.
    """

    def __init__(self, inbox: Inbox, event_type: str | None = None) -> None:
        self._inbox = inbox
        self._type = event_type
        #: The sequence up to which no new arrival can appear, and those found above it, each with
        #: the time it was found.
        self._settled = 0
        self._found: dict[int, float] = {}
        self._open: dict[str, DeliveryRecord] = {}

    async def begin(self) -> None:
        """Read the current state, so that only later changes are reported."""
        await self._inbox.changed_elsewhere()
        # Read these before the open events, so that an event that arrives between the two reads
        # counts as an arrival.
        newest = await self._inbox.find(limit=PAGE)
        self._settled = newest[-1].sequence - 1 if newest else 0
        self._note([record.sequence for record in newest])
        self._open = await self._find_open()

    async def changes(self) -> list[DeliveryRecord]:
        """Return new and changed events, in order of arrival."""
        if not await self._inbox.changed_elsewhere():
            return []
        found = await self._find_open()
        changed = {
            key: record for key, record in found.items() if _differs(record, self._open.get(key))
        }
        for key in self._open.keys() - found.keys():
            ended = await self._inbox.get(key)
            # An event that is no longer listed was handled, or newer ones displaced it. Report only
            # those that were handled.
            if ended is not None and ended.state is DeliveryState.DONE:
                changed[key] = ended
        for record in await self._arrivals():
            # An arrival that has changed already is in `changed` in its later state.
            changed.setdefault(record.key, record)
        self._open = found
        return sorted(changed.values(), key=lambda record: record.sequence)

    async def _find_open(self) -> dict[str, DeliveryRecord]:
        await trio.lowlevel.checkpoint()
        return {
            record.key: record
            for state in _OPEN
            for record in await self._inbox.find(type=self._type, state=state, limit=WATCHED)
        }

    async def _arrivals(self) -> list[DeliveryRecord]:
        found: list[DeliveryRecord] = []
        after = self._settled
        while True:
            # Read all types: a missing number may belong to a delivery that is not committed yet.
            page = await self._inbox.find(after_sequence=after, oldest_first=True, limit=PAGE)
            found += [record for record in page if record.sequence not in self._found]
            if len(page) < PAGE:
                break
            after = page[-1].sequence
        self._note([record.sequence for record in found])
        return [record for record in found if self._type in (None, record.type)]

    def _note(self, sequences: Sequence[int]) -> None:
        """Remember found arrivals, and advance past those that are complete.

        Hosts that share a store do not always commit in the order of the sequence numbers.
        """
        now = time.monotonic()
        self._found |= dict.fromkeys(sequences, now)
        complete = self._inbox.in_order
        for sequence in sorted(self._found):
            late = now - self._found[sequence] > LATE_SECONDS
            if not (complete or late or sequence == self._settled + 1):
                return
            self._settled = sequence
            del self._found[sequence]


def _differs(record: DeliveryRecord, known: DeliveryRecord | None) -> bool:
    return known is None or _progress(record) != _progress(known)


def _progress(record: DeliveryRecord) -> tuple[object, ...]:
    return record.state, record.attempts, record.started_at, record.finished_at
