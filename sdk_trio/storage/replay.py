"""Replay: finds the deliveries that an operator names, and puts them back into the queue."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from ..records.deliveries import HOST, REPLAYABLE, DeliveryRecord, DeliveryState
from .ports import Inbox

#: Deliveries put back in one transaction: few enough that new deliveries do not wait for it.
CHUNK = 200


class ReplayCandidate(msgspec.Struct, frozen=True):
    """An event that was asked for: ``reason`` says why it cannot be replayed, if it cannot."""

    key: str
    webhook_id: str
    type: str | None = None
    state: str | None = None
    reason: str | None = None


async def find_named(
    inbox: Inbox, webhook_ids: Sequence[str], *, again: bool = False
) -> list[ReplayCandidate]:
    """Return a candidate for each id, each once, those that cannot be replayed included.

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
    """Return the records that an id may mean: one, none, or several of different signers.

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
            "runs it once more, with all its effects"
        )
    if record.state not in REPLAYABLE and record.state is not DeliveryState.DONE:
        return f"is {record.state}: only dead, parked and retrying events are replayed"
    return None if record.raw is not None else "its body is not kept any more"


def _candidate(record: DeliveryRecord, reason: str | None = None) -> ReplayCandidate:
    return ReplayCandidate(record.key, record.webhook_id, record.type, str(record.state), reason)


async def find_chosen(
    inbox: Inbox,
    state: DeliveryState,
    *,
    type: str | None = None,
    since: float | None = None,
    subject: str | None = None,
    tenant_id: str | None = None,
    limit: int | None = None,
    wanted: Callable[[DeliveryRecord], Awaitable[bool]] | None = None,
) -> list[ReplayCandidate]:
    """Return the events of a state, oldest first, read page by page; at most ``limit``.

    ``wanted`` chooses among them.
    """
    await trio.lowlevel.checkpoint()
    found: list[ReplayCandidate] = []
    after = 0
    while limit is None or len(found) < limit:
        page = await inbox.find(
            type=type,
            state=state,
            since=since,
            subject=subject,
            tenant_id=tenant_id,
            after_sequence=after,
            limit=CHUNK if limit is None else min(CHUNK, limit - len(found)),
        )
        if not page:
            break
        after = page[-1].sequence
        chosen = page if wanted is None else [each for each in page if await wanted(each)]
        found += map(_candidate, chosen)
    return found


async def put_back(
    inbox: Inbox,
    keys: Sequence[str],
    advance: Callable[[int], None] | None = None,
    *,
    again: bool = False,
) -> set[str]:
    """Replay deliveries in several transactions; return the keys of those that were put back.

    If it is cancelled, finished transactions stay. ``advance`` is called with the number of
    deliveries of each. With ``again`` done ones are put back, too.
    """
    await trio.lowlevel.checkpoint()
    replayed: set[str] = set()
    for start in range(0, len(keys), CHUNK):
        # Short transactions: deliveries that arrive meanwhile wait for the same writer.
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
            reason = "it changed meanwhile; look at it with 'events show'"
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
