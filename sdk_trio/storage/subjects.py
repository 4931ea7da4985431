"""The events of one subject in the inbox, and whether they supersede a synthetic one.

The rule, which docs/reference/catch-up.md states for users: of two states of a subject, the one
with the later ``modified_at`` counts.
"""

from collections.abc import Sequence

import msgspec
import trio

from ..events.coalescing import SKEW_SECONDS, SUPERSEDED, time_of_state
from ..events.lifecycle import StoredState, stage_of, stored_state
from ..records.deliveries import DeliveryRecord, DeliveryState, NewDelivery
from ..records.synthetic import is_synthetic
from .ports import Inbox

#: Records that are read at a time.
_PAGE = 200

#: States in which no handler has run the event, and none will by itself.
_NOT_HANDLED = frozenset({DeliveryState.PARKED, DeliveryState.DEAD})


class SubjectEvent(msgspec.Struct, frozen=True):
    """An event of a subject in the inbox, and the state that it carries.

    The state is unknown if the event arrived before the time of interest.
    """

    record: DeliveryRecord
    state: StoredState = StoredState()


async def events_of_subject(
    inbox: Inbox, subject: str, tenant_id: str | None, *, changed_since: float
) -> list[SubjectEvent]:
    """Return all events of a subject, the newest first.

    Args:
        inbox: the open store.
        subject: ``data.id``.
        tenant_id: of the tenant; None: without tenants.
        changed_since: bodies of earlier states are not read (Unix seconds).

    Raises:
        StoreUnavailableError: from the inbox.
    """
    found: list[SubjectEvent] = []
    before: int | None = None
    while True:
        page: Sequence[DeliveryRecord] = await inbox.find(
            subject=subject, tenant_id=tenant_id, before_sequence=before, limit=_PAGE
        )
        # A source may use the same id for something else.
        for record in (each for each in page if each.source is None):
            state = StoredState()
            # An event that arrived earlier cannot carry such a state, so its body is not read.
            if record.received_at >= changed_since - SKEW_SECONDS:
                full = await inbox.get(record.key)
                state = stored_state(None if full is None else full.raw)
            found.append(SubjectEvent(record, state))
        if len(page) < _PAGE:
            return found
        before = page[-1].sequence


def has_state(events: Sequence[SubjectEvent], event_type: str, changed_at: float) -> bool:
    """Return whether an event has the state of ``changed_at``, or a later one, for a type."""
    return any(_carries(each, event_type, changed_at) for each in events)


def _carries(event: SubjectEvent, event_type: str, changed_at: float) -> bool:
    found = event.state.changed_at
    if found is None:
        return False
    # An event of the same type counts in any state: people replay a parked or dead one. A later
    # state that came with another type counts if a handler gets it.
    if event.record.type == event_type:
        return found >= changed_at
    return found > changed_at and event.record.state not in _NOT_HANDLED


def superseded_by(
    events: Sequence[SubjectEvent], key: str, event_type: str, changed_at: float
) -> str | None:
    """Return the id of the event that makes a waiting synthetic event superfluous, or None.

    A later state supersedes a ``*.updated``. A delivered event of the same type, or of one that
    undoes it, supersedes a lifecycle event.

    Args:
        events: the events of its subject.
        key: its own key.
        event_type: its type.
        changed_at: the last change of the state that it carries (Unix seconds).
    """
    stage = stage_of(event_type)
    for each in events:
        record = each.record
        if record.key == key:
            continue
        if stage is None:
            if _carries(each, event_type, changed_at):
                return record.webhook_id
        elif not is_synthetic(record.webhook_id) and (
            record.type == event_type or stage.is_undone(record.type, each.state.status)
        ):
            return record.webhook_id
    return None


async def find_newer_handled(inbox: Inbox, delivery: NewDelivery) -> str | None:
    """Return the key of a handled event with a later state of the same subject, type and signer.

    It lets a handler that coalesces skip an older state that arrives late.

    Raises:
        StoreUnavailableError: from the inbox.
    """
    changed_at = time_of_state(delivery.raw, delivery.received_at)
    if delivery.subject is None or changed_at is None:
        await trio.lowlevel.checkpoint()
        return None
    found = await inbox.find(
        subject=delivery.subject,
        type=delivery.type,
        tenant_id=delivery.tenant_id,
        state=DeliveryState.DONE,
        # An event that arrived earlier cannot carry a later state.
        since=changed_at - SKEW_SECONDS,
        limit=_PAGE,
    )
    for record in found:
        # A superseded one was not handled, and the event that superseded it may be dead.
        handled = not (record.last_error or "").startswith(SUPERSEDED)
        if handled and record.signer == delivery.signer and record.key != delivery.key:
            full = await inbox.get(record.key)
            at = None if full is None else time_of_state(full.raw, record.received_at)
            if at is not None and at > changed_at:
                return record.key
    return None


async def find_superseding(inbox: Inbox, delivery: NewDelivery) -> str | None:
    """Return the id of the event that supersedes a waiting synthetic one, or None.

    Real events may have arrived since it was added, and an older state must not overwrite theirs.

    Raises:
        StoreUnavailableError: from the inbox.
    """
    changed_at = stored_state(delivery.raw).changed_at
    if delivery.subject is None or changed_at is None:
        await trio.lowlevel.checkpoint()
        return None
    events = await events_of_subject(
        inbox, delivery.subject, delivery.tenant_id, changed_since=changed_at
    )
    return superseded_by(events, delivery.key, delivery.type, changed_at)
