"""Coalescing: which of the waiting events of one subject carries its newest state. Pure.

Two events can replace each other if they have the same type, handler and signer. The one with the
later ``modified_at`` has the newer state, in whatever order they arrived. Events whose body has no
such time are compared by arrival, and only with each other. So are those whose time is in the
future: one wrong time must not supersede all later states of its subject.
"""

from collections.abc import Iterable, Sequence

import msgspec

from ..records.deliveries import signer_of_key
from ..records.synthetic import is_synthetic
from .lifecycle import stored_state

#: The most by which the upstream's clock is expected to be ahead of this host's, in seconds. A
#: state that changed at T cannot have arrived earlier than T minus this.
SKEW_SECONDS = 600.0

#: The beginning of the reason of a done event that was not run; the key of the newer one follows.
SUPERSEDED = "superseded by "


class WaitingEvent(msgspec.Struct, frozen=True):
    """A waiting event of a lane. ``changed_at`` is the time of its state; None: it has none."""

    sequence: int
    key: str
    type: str
    changed_at: float | None


def time_of_state(raw: bytes | None, by: float) -> float | None:
    """Return when the state in a body changed; None if it has no time that was possible ``by``."""
    at = stored_state(raw).changed_at
    return at if at is not None and at <= by + SKEW_SECONDS else None


def coalesce(
    first: WaitingEvent, others: Iterable[WaitingEvent]
) -> tuple[WaitingEvent, Sequence[WaitingEvent]]:
    """Return the event with the newest state, and those that it supersedes.

    Args:
        first: the first event of its lane.
        others: those of the lane that the same handler gets.
    """
    # A synthetic event may carry a later state than an event that arrives after it, so the rules of
    # storage.subjects decide about it when it runs.
    if is_synthetic(first.key):
        return first, ()
    alike = [first, *(each for each in others if _may_replace(each, first))]
    newest = max(alike, key=lambda each: (each.changed_at or 0.0, each.sequence))
    return newest, [each for each in alike if each is not newest]


def _may_replace(each: WaitingEvent, first: WaitingEvent) -> bool:
    return (
        each.sequence != first.sequence
        and each.type == first.type
        and signer_of_key(each.key) == signer_of_key(first.key)
        and (each.changed_at is None) == (first.changed_at is None)
        and not is_synthetic(each.key)
    )
