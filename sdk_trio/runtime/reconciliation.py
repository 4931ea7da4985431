"""What was missed, and what is to be done about it. Pure.

The upstream lists the deliveries it made, each with the event that it carried; the id of that
event is what arrived, or would have arrived, as ``webhook-id``. So what the inbox has no record of
was missed, and the upstream is asked to deliver it again, which brings it through every check of
the receiver. A list is read in *windows* of time, the oldest first, and the checkpoint moves over
a window only when everything in it has arrived.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import attrs

from ..base.backoff import longest_wait
from ..base.times import rfc3339
from ..errors import EXIT_CONFIGURATION, SdkError

#: The name of the checkpoint in the inbox.
CHECKPOINT_NAME = "reconciliation"

#: How far a pass reaches back behind the checkpoint, in seconds: a delivery is listed only some
#: time after its timestamp, and clocks differ. A receiver whose clock is 5 minutes off rejects
#: every delivery, so twice that covers both.
OVERLAP_SECONDS = 600.0

#: Length of a window, in seconds: what a crash may cost in repeated reading.
WINDOW_SECONDS = 3600.0

#: The upstream leaves out both ends of the time that it is asked for; windows share this much.
EDGE_SECONDS = 1.0

#: How long an event that was asked for may take to arrive before it is asked for again, in
#: seconds; doubled each time, so that an endpoint that refuses it is not called for ever.
FIRST_WAIT_SECONDS = 600.0


class UnknownEndpointError(SdkError):
    """Which of the upstream's webhook endpoints leads here is not known; says what to set."""

    exit_code = EXIT_CONFIGURATION


class UnreadableDeliveryError(SdkError):
    """The upstream's list holds a delivery that says not enough."""


@attrs.frozen
class Sighting:
    """An event in the upstream's list: when it was last delivered, in Unix seconds, and how.

    ``delivered`` says that the upstream was once answered with success, ``archived`` that it has
    no payload any more and cannot deliver it again.
    """

    webhook_id: str
    type: str
    at: float
    delivered: bool
    archived: bool


class Action(StrEnum):
    """What is done about an event that the inbox has no record of."""

    ASK = "ask"
    """The upstream is asked to deliver it again."""
    WAIT = "wait"
    """It was, a short time ago."""
    LEAVE = "leave"
    """Somebody else answered for it with success, before this inbox was first reconciled."""
    LOST = "lost"
    """The upstream cannot deliver it again."""


@attrs.frozen
class Asked:
    """How often an event was asked for, and when last (Unix seconds)."""

    times: int
    last: float

    def is_due(self, now: float) -> bool:
        """Return whether it should have arrived by ``now``."""
        return now - self.last >= longest_wait(self.times, base_seconds=FIRST_WAIT_SECONDS)


@attrs.frozen
class Checkpoint:
    """What is remembered from one pass to the next.

    ``began`` is when this inbox was first reconciled. All that was delivered up to ``until`` has
    arrived or is given up. ``asked`` are the events that have not arrived yet. Unix seconds.
    """

    began: float
    until: float
    asked: Mapping[str, Asked] = attrs.field(factory=dict)

    def as_text(self) -> str:
        """Return it as it is stored."""
        asked = {name: [entry.times, entry.last] for name, entry in self.asked.items()}
        return json.dumps({"began": self.began, "until": self.until, "asked": asked})

    @classmethod
    def from_text(cls, text: str) -> "Checkpoint":
        """Return what :meth:`as_text` stored; raises ``ValueError`` for anything else."""
        try:
            document = json.loads(text)
            asked = {
                str(name): Asked(int(times), float(last))
                for name, (times, last) in document["asked"].items()
            }
            read = cls(float(document["began"]), float(document["until"]), asked)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no checkpoint of a reconciliation: {error!r}") from error
        if not math.isfinite(read.began + read.until):
            raise ValueError("this is no checkpoint of a reconciliation: its times are no numbers")
        return read

    @classmethod
    def first(cls, now: float, lookback_seconds: float) -> "Checkpoint":
        """Return where the first pass begins."""
        return cls(began=now, until=now - lookback_seconds)


@attrs.frozen
class Window:
    """A stretch of time, in Unix seconds."""

    start: float
    end: float

    def query(self) -> dict[str, str]:
        """Return the filter of the upstream's list that covers it, both ends included."""
        return {
            "start_timestamp": rfc3339(self.start - EDGE_SECONDS),
            "end_timestamp": rfc3339(self.end + EDGE_SECONDS),
        }


def windows(start: float, end: float) -> Iterator[Window]:
    """Cut the time from ``start`` to ``end`` into windows, the oldest first."""
    while start < end:
        stop = min(start + WINDOW_SECONDS, end)
        yield Window(start, stop)
        start = stop


def read_sighting(delivery: Mapping[str, Any]) -> Sighting:
    """Read one entry of the upstream's list of deliveries.

    Raises:
        UnreadableDeliveryError: it does not say which event it carried, or when.
    """
    event = delivery.get("webhook_event")
    webhook_id = event.get("id") if isinstance(event, Mapping) else None
    try:
        at = datetime.fromisoformat(str(delivery.get("created_at")))
    except ValueError:
        at = None
    if not isinstance(event, Mapping) or not isinstance(webhook_id, str) or at is None:
        raise UnreadableDeliveryError(
            f"the upstream's delivery {delivery.get('id')!r} names no webhook_event with an id, or "
            "has no created_at: its list is not what this version reads"
        )
    return Sighting(
        webhook_id=webhook_id,
        type=str(event.get("type")),
        at=(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(),
        delivered=event.get("succeeded") is True or delivery.get("succeeded") is True,
        archived=event.get("is_archived") is True,
    )


def merge(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Return one sighting an event, the earliest first: events have a delivery each attempt."""
    by_id: dict[str, Sighting] = {}
    for sighting in sightings:
        other = by_id.get(sighting.webhook_id, sighting)
        by_id[sighting.webhook_id] = attrs.evolve(
            sighting,
            at=min(sighting.at, other.at),
            delivered=sighting.delivered or other.delivered,
            archived=sighting.archived or other.archived,
        )
    return sorted(by_id.values(), key=lambda sighting: sighting.at)


def decide(sighting: Sighting, checkpoint: Checkpoint, now: float) -> Action:
    """Return what to do about an event that the inbox has no record of."""
    if sighting.delivered and sighting.at < checkpoint.began:
        return Action.LEAVE
    if sighting.archived:
        return Action.LOST
    asked = checkpoint.asked.get(sighting.webhook_id)
    return Action.ASK if asked is None or asked.is_due(now) else Action.WAIT


def advanced(
    checkpoint: Checkpoint, window: Window, unresolved: Sequence[Sighting], *, whole: bool
) -> Checkpoint:
    """Return the checkpoint after ``window``: never past what is unresolved.

    ``whole`` says that everything before the window is resolved.
    """
    if not whole:
        return checkpoint
    oldest = min((sighting.at for sighting in unresolved), default=window.end)
    return attrs.evolve(checkpoint, until=min(oldest, window.end))


def without(checkpoint: Checkpoint, webhook_ids: Collection[str]) -> Checkpoint:
    """Return the checkpoint with those no longer asked for."""
    kept = {name: entry for name, entry in checkpoint.asked.items() if name not in webhook_ids}
    return attrs.evolve(checkpoint, asked=kept)


def with_asked(checkpoint: Checkpoint, webhook_id: str, now: float) -> Checkpoint:
    """Return the checkpoint with one more request for the event."""
    before = checkpoint.asked.get(webhook_id)
    entry = Asked(1 if before is None else before.times + 1, now)
    return attrs.evolve(checkpoint, asked={**checkpoint.asked, webhook_id: entry})


@attrs.frozen
class Endpoint:
    """A webhook endpoint of the upstream that leads to this receiver."""

    id: str
    enabled: bool


def choose_endpoints(
    listed: Sequence[Mapping[str, Any]], *, configured: Sequence[str], path: str
) -> tuple[Endpoint, ...]:
    """Return those endpoints of the upstream that lead here.

    An event has another id at each endpoint, so the others' deliveries never arrive here.

    Args:
        listed: the upstream's endpoints.
        configured: the ids that the settings name; empty: the only endpoint there is, or the
            only one whose URL has this receiver's path.
        path: ``Sdk:Webhooks:Path``.

    Raises:
        UnknownEndpointError: there is no such endpoint, or more than one.
    """
    by_id = {str(entry.get("id")): entry for entry in listed}
    there = ", ".join(f"{name} ({_shown_url(entry)})" for name, entry in by_id.items()) or "none"
    missing = [name for name in configured if name not in by_id]
    if missing:
        raise UnknownEndpointError(
            "Sdk:Webhooks:Reconciliation:EndpointIds: the upstream has no webhook endpoint "
            f"{', '.join(map(repr, missing))}; it has: {there}"
        )
    chosen = list(configured) or list(by_id)
    if len(chosen) > 1 and not configured:
        chosen = [name for name in chosen if has_path(by_id[name], path)]
    if len(chosen) != 1 and not configured:
        raise UnknownEndpointError(
            "which of the upstream's webhook endpoints leads here is not known: name it in "
            f"Sdk:Webhooks:Reconciliation:EndpointIds; there are: {there}"
        )
    return tuple(Endpoint(name, by_id[name].get("enabled") is not False) for name in chosen)


def has_path(entry: Mapping[str, Any], path: str) -> bool:
    """Return whether a webhook endpoint of the upstream has the path of this receiver."""
    return urlsplit(str(entry.get("url"))).path.rstrip("/").endswith(path.rstrip("/"))


def _shown_url(entry: Mapping[str, Any]) -> str:
    """Return an endpoint's address without user, query or fragment, which may hold secrets."""
    parts = urlsplit(str(entry.get("url")))
    return f"{parts.scheme}://{parts.hostname}{parts.path}"
