"""``events tail``: prints the changes of the inbox as they are seen."""

import sys
import time
from argparse import Namespace

import trio

from ..config import Settings
from ..storage.ports import Inbox
from ..storage.record_fields import listed
from ..storage.records import DeliveryRecord, DeliveryState
from .moments import moment_text
from .printer import cell, print_json_line, print_text, say
from .settings_reader import load
from .store_opener import open_store

#: How often the store is asked whether it has changed, in seconds. The question costs no disk
#: access, and people do not notice a quarter of a second.
POLL_SECONDS = 0.25

#: How many new events are read at once.
PAGE = 200

#: The most events of one state that are watched: the newest ones.
WATCHED = 1000

_OPEN = tuple(state for state in DeliveryState if state is not DeliveryState.DONE)


def tail(arguments: Namespace) -> int:
    """Print new events and changes of those that are not done, a line each, until interrupted."""
    trio.run(_tail, load(arguments), arguments.type, arguments.format == "json")
    return 0


async def _tail(settings: Settings, event_type: str | None, as_json: bool) -> None:
    async with open_store(settings) as inbox:
        tailer = Tailer(inbox, event_type)
        await tailer.begin()
        say("waiting for changes; Ctrl-C ends")
        while True:
            for record in await tailer.changes():
                _print(record, as_json)
            await trio.sleep(POLL_SECONDS)


class Tailer:
    """Finds what has changed since the last look.

    New events are found by their sequence. Events that are not done are read again, because they
    may still run or be replayed; their end is found by their id. Of two changes of one event
    between two looks only the later one is seen.
    """

    def __init__(self, inbox: Inbox, event_type: str | None = None) -> None:
        self._inbox = inbox
        self._type = event_type
        self._last_sequence = 0
        self._open: dict[str, DeliveryRecord] = {}

    async def begin(self) -> None:
        """Read the present state, so that only later changes are reported."""
        await self._inbox.changed_elsewhere()
        newest = await self._inbox.find(limit=1)
        self._last_sequence = newest[0].sequence if newest else 0
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
            if ended is not None and ended.state is DeliveryState.DONE:
                changed[key] = ended
        for record in await self._arrivals():
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
        while True:
            page = await self._inbox.find(
                type=self._type, after_sequence=self._last_sequence, limit=PAGE
            )
            found += page
            if page:
                self._last_sequence = page[-1].sequence
            if len(page) < PAGE:
                return found


def _differs(record: DeliveryRecord, known: DeliveryRecord | None) -> bool:
    return known is None or _progress(record) != _progress(known)


def _progress(record: DeliveryRecord) -> tuple[object, ...]:
    return record.state, record.attempts, record.started_at, record.finished_at


def _print(record: DeliveryRecord, as_json: bool) -> None:
    if as_json:
        print_json_line(listed(record))
        return
    parts = [moment_text(time.time()), record.state.ljust(8), record.type, record.key]
    if record.last_error and record.state != "done":
        parts.append(record.last_error.splitlines()[0])
    print_text("  ".join(cell(part) for part in parts))
    sys.stdout.flush()
