"""Replay: finds the deliveries that an operator names, and puts them back into the queue."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from ..records.deliveries import HOST, REPLAYABLE, DeliveryRecord, DeliveryState
from ..storage.ports import Inbox

#: Deliveries put back in one transaction, so few that new deliveries do not wait for it.
CHUNK = 200

#: The parts that differ between errors of one cause: UUIDs, long words with digits or of
#: hexadecimal digits only, and numbers.
_IDS = re.compile(
    r"\b(?:[0-9a-fA-F]+-){4}[0-9a-fA-F]+\b"
    r"|\b(?=\w*[0-9])\w{8,}\b|\b[0-9a-fA-F]{8,}\b|0x[0-9a-fA-F]+|[0-9]+"
)

_GROUP_CHARACTERS = 200


def error_group(text: str | None) -> str:
    """Return the group of an error: its first line without the numbers and ids in it."""
    first = (text or "").partition("\n")[0][:_GROUP_CHARACTERS]
    return _IDS.sub("#", first)


class ReplayCandidate(msgspec.Struct, frozen=True):
    """A requested event; ``reason`` explains why it cannot be replayed, if it cannot."""

    key: str
    webhook_id: str
    type: str | None = None
    state: str | None = None
    reason: str | None = None


async def find_named(
    inbox: Inbox, webhook_ids: Sequence[str], *, again: bool = False
) -> list[ReplayCandidate]:
    """Return one candidate for each id, even if it cannot be replayed.

    With ``again`` done events can be.
    """
    await trio.lowlevel.checkpoint()
    return [await _named(inbox, webhook_id, again) for webhook_id in dict.fromkeys(webhook_ids)]


async def _named(inbox: Inbox, webhook_id: str, again: bool) -> ReplayCandidate:
    found = await find_meant(inbox, webhook_id)
    if len(found) == 1:
        return _candidate(found[0], _fault(found[0], again))
    reason = ambiguity(found) if found else "there is no such event in the inbox"
    return ReplayCandidate(webhook_id, webhook_id, reason=reason)


async def find_meant(inbox: Inbox, text: str) -> Sequence[DeliveryRecord]:
    """Return the records that match an id: one, none, or several of different signers.

    Args:
        text: a key, an id, or an id with ``.host`` for the host's delivery of that id.
    """
    webhook_id, dot, signer = text.partition(".")
    if dot:
        record = await inbox.get(webhook_id if signer == HOST else text)
        return [] if record is None else [record]
    return await inbox.find_by_id(text)


def ambiguity(records: Sequence[DeliveryRecord]) -> str:
    """Return the message that lists the keys of an id that several senders have used."""
    keys = (record.key if record.signer else f"{record.key}.{HOST}" for record in records)
    return f"several senders use this id; name one of {', '.join(keys)}"


def _fault(record: DeliveryRecord, again: bool) -> str | None:
    if record.state is DeliveryState.DONE and not again:
        return (
            "is done: only dead, parked and retrying events are replayed; 'events replay --again' "
            "runs it again, with all its effects"
        )
    if record.state not in REPLAYABLE and record.state is not DeliveryState.DONE:
        return f"is {record.state}: only dead, parked and retrying events are replayed"
    return None if record.raw is not None else "its body is no longer stored"


def _candidate(record: DeliveryRecord, reason: str | None = None) -> ReplayCandidate:
    return ReplayCandidate(record.key, record.webhook_id, record.type, str(record.state), reason)


async def find_chosen(
    inbox: Inbox,
    state: DeliveryState,
    *,
    type: str | None = None,
    since: float | None = None,
    until: float | None = None,
    error: str | None = None,
    subject: str | None = None,
    tenant_id: str | None = None,
    source: str | None = None,
    limit: int | None = None,
    wanted: Callable[[DeliveryRecord], Awaitable[bool]] | None = None,
) -> list[ReplayCandidate]:
    """Return the events of a state, oldest first, read page by page; at most ``limit``.

    ``error`` is the text of an error of the wanted group; ``wanted`` chooses among the others.
    """
    await trio.lowlevel.checkpoint()
    found: list[ReplayCandidate] = []
    after = 0
    # `wanted` may choose few events of a page, so the limit does not bound the page.
    filtered = error is not None or wanted is not None
    while limit is None or len(found) < limit:
        page = await inbox.find(
            type=type,
            state=state,
            since=since,
            until=until,
            subject=subject,
            tenant_id=tenant_id,
            source=source,
            after_sequence=after,
            limit=CHUNK if limit is None or filtered else min(CHUNK, limit - len(found)),
        )
        if not page:
            break
        after = page[-1].sequence
        alike = [
            each
            for each in page
            if error is None or error_group(each.last_error) == error_group(error)
        ]
        chosen = alike if wanted is None else [each for each in alike if await wanted(each)]
        found += map(_candidate, chosen)
    return found if limit is None else found[:limit]


async def replay_all(
    inbox: Inbox,
    keys: Sequence[str],
    advance: Callable[[int], None] | None = None,
    *,
    again: bool = False,
) -> set[str]:
    """Replay deliveries in several transactions; return the keys of those that were put back.

    If it is cancelled, finished transactions stay. ``advance`` is called with the number of
    deliveries of each transaction. With ``again`` done ones are put back, too.
    """
    await trio.lowlevel.checkpoint()
    replayed: set[str] = set()
    for start in range(0, len(keys), CHUNK):
        # Short transactions: new deliveries wait for the same writer.
        chunk = keys[start : start + CHUNK]
        replayed.update(await inbox.replay(chunk))
        if again:
            replayed.update(await inbox.repeat([key for key in chunk if key not in replayed]))
        if advance is not None:
            advance(len(chunk))
    return replayed


def replay_rows(
    candidates: Sequence[ReplayCandidate], replayed: set[str], *, dry_run: bool = False
) -> list[dict[str, Any]]:
    """Return an object of JSON for each candidate: whether it was put back, and why not."""
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        done = candidate.key in replayed
        reason = candidate.reason
        if not (done or reason or dry_run):
            reason = "it changed meanwhile; check it with 'events show'"
        state = str(DeliveryState.RECEIVED) if done else candidate.state
        rows.append(
            {
                **msgspec.structs.asdict(candidate),
                "state": state,
                "replayed": done,
                "reason": reason,
            }
        )
    return rows
