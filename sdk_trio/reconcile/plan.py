"""The decisions of reconciliation: which deliveries were missed, and what to do. Pure.

The upstream lists its deliveries, each with its event; the event's id is the ``webhook-id`` of the
delivery. An id without a record in the inbox was missed, so the upstream is asked to deliver it
again. The list is read in *windows* of time, the oldest first. The checkpoint advances over a
window only when every event in it has arrived or is abandoned.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, urlsplit

import attrs

from ..base.throttle import longest_wait
from ..base.times import rfc3339
from ..errors import EXIT_CONFIGURATION, SdkError

#: The name of the checkpoint in the inbox.
CHECKPOINT_NAME = "reconciliation"

#: Time before the checkpoint that a pass reads again, in seconds. The upstream lists a delivery
#: some time after its timestamp, and clocks differ. A receiver whose clock is off by more than 5
#: minutes rejects every delivery, so twice that covers both.
OVERLAP_SECONDS = 600.0

#: Length of a window, in seconds; a crash repeats at most one window.
WINDOW_SECONDS = 3600.0

#: The upstream excludes both ends of the time range, so windows overlap by this much, in seconds.
EDGE_SECONDS = 1.0

#: Time for a requested event to arrive before it is requested again, in seconds. It doubles with
#: each request, so that an event that this receiver refuses is not delivered in a loop.
FIRST_WAIT_SECONDS = 600.0


class UnknownEndpointError(SdkError):
    """This receiver's endpoint at the upstream is unknown; the message names the setting."""

    exit_code = EXIT_CONFIGURATION


class UnreadableDeliveryError(SdkError):
    """The upstream's list contains a delivery without an event id or a time."""


@attrs.frozen
class Sighting:
    """An event in the upstream's list of deliveries.

    ``at`` is the time of its earliest listed delivery in Unix seconds. ``delivered``: a delivery
    was answered with success. ``archived``: the upstream has deleted the payload and cannot deliver
    it again.
    """

    webhook_id: str
    type: str
    at: float
    delivered: bool
    archived: bool


class Action(StrEnum):
    """The action for an event without a record in the inbox."""

    ASK = "ask"
    """Ask the upstream to deliver it again."""
    WAIT = "wait"
    """Wait: it was requested a short time ago."""
    LEAVE = "leave"
    """Do nothing: another receiver acknowledged it before the first pass of this inbox."""
    LOST = "lost"
    """Report it: the upstream cannot deliver it again."""


@attrs.frozen
class Requests:
    """The number of requests for an event, and the time of the last one (Unix seconds)."""

    times: int
    last: float

    def is_due(self, now: float) -> bool:
        """Return whether the event should have arrived by ``now``."""
        return now - self.last >= longest_wait(self.times, base_seconds=FIRST_WAIT_SECONDS)


@attrs.frozen
class Checkpoint:
    """The state between two passes; times are Unix seconds.

    ``began`` is the time of the first pass of this inbox. Every delivery up to ``until`` has
    arrived or is abandoned. ``asked`` holds the requested events that have not arrived yet.
    """

    began: float
    until: float
    asked: Mapping[str, Requests] = attrs.field(factory=dict)

    def as_text(self) -> str:
        """Return the stored form."""
        asked = {name: [entry.times, entry.last] for name, entry in self.asked.items()}
        return json.dumps({"began": self.began, "until": self.until, "asked": asked})

    @classmethod
    def from_text(cls, text: str) -> "Checkpoint":
        """Return the checkpoint of :meth:`as_text`; raise ``ValueError`` for any other text."""
        try:
            document = json.loads(text)
            asked = {
                str(name): Requests(int(times), float(last))
                for name, (times, last) in document["asked"].items()
            }
            read = cls(float(document["began"]), float(document["until"]), asked)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not a checkpoint of reconciliation: {error!r}") from error
        if not math.isfinite(read.began + read.until):
            raise ValueError("this is not a checkpoint of reconciliation: its times are not finite")
        return read

    @classmethod
    def first(cls, now: float, lookback_seconds: float) -> "Checkpoint":
        """Return the checkpoint before the first pass."""
        return cls(began=now, until=now - lookback_seconds)


@attrs.frozen
class Window:
    """A range of time, in Unix seconds."""

    start: float
    end: float

    def query(self) -> dict[str, str]:
        """Return the list filter that covers this window, both ends included."""
        return {
            "start_timestamp": rfc3339(self.start - EDGE_SECONDS),
            "end_timestamp": rfc3339(self.end + EDGE_SECONDS),
        }


def windows(start: float, end: float) -> Iterator[Window]:
    """Split the time from ``start`` to ``end`` into windows, the oldest first."""
    while start < end:
        stop = min(start + WINDOW_SECONDS, end)
        yield Window(start, stop)
        start = stop


def read_sighting(delivery: Mapping[str, Any]) -> Sighting:
    """Read one entry of the upstream's list of deliveries.

    Raises:
        UnreadableDeliveryError: the entry has no event id or no time.
    """
    event = delivery.get("webhook_event")
    webhook_id = event.get("id") if isinstance(event, Mapping) else None
    try:
        at = datetime.fromisoformat(str(delivery.get("created_at")))
    except ValueError:
        at = None
    if not isinstance(event, Mapping) or not isinstance(webhook_id, str) or at is None:
        raise UnreadableDeliveryError(
            f"the upstream's delivery {delivery.get('id')!r} has no webhook_event with an id, or "
            "no created_at; this version cannot read the upstream's list: upgrade sdk-trio"
        )
    return Sighting(
        webhook_id=webhook_id,
        type=str(event.get("type")),
        at=(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(),
        # Both the event and each attempt have the flag; either is enough.
        delivered=event.get("succeeded") is True or delivery.get("succeeded") is True,
        archived=event.get("is_archived") is True,
    )


def merge(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Return one sighting for each event, the earliest first.

    The list has an entry for each attempt, so an event may be in it several times.
    """
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
    """Return the action for an event without a record in the inbox."""
    # Before the first pass, a predecessor of this inbox acknowledged the delivery. Requesting it
    # again would run an event that another program has handled. If the delivery succeeded after
    # the first pass, this inbox has lost the event, so it is requested again.
    if sighting.delivered and sighting.at < checkpoint.began:
        return Action.LEAVE
    if sighting.archived:
        return Action.LOST
    asked = checkpoint.asked.get(sighting.webhook_id)
    return Action.ASK if asked is None or asked.is_due(now) else Action.WAIT


def advanced(
    checkpoint: Checkpoint, window: Window, unresolved: Sequence[Sighting], *, whole: bool
) -> Checkpoint:
    """Return the checkpoint after ``window``, never past an unresolved event.

    ``whole``: everything before the window is resolved.
    """
    # An earlier window has an unresolved event, and the checkpoint never passes it.
    if not whole:
        return checkpoint
    oldest = min((sighting.at for sighting in unresolved), default=window.end)
    return attrs.evolve(checkpoint, until=min(oldest, window.end))


def without(checkpoint: Checkpoint, webhook_ids: Collection[str]) -> Checkpoint:
    """Return the checkpoint without the requests for these events."""
    kept = {name: entry for name, entry in checkpoint.asked.items() if name not in webhook_ids}
    return attrs.evolve(checkpoint, asked=kept)


def with_asked(checkpoint: Checkpoint, webhook_id: str, now: float) -> Checkpoint:
    """Return the checkpoint with one more request for the event."""
    before = checkpoint.asked.get(webhook_id)
    entry = Requests(1 if before is None else before.times + 1, now)
    return attrs.evolve(checkpoint, asked={**checkpoint.asked, webhook_id: entry})


@attrs.frozen
class ReadEndpoint:
    """A webhook endpoint of the upstream whose URL is the URL of this receiver.

    ``events`` are the types that it subscribes to; None: unknown. ``is_certain``: its id is in the
    settings, or its URL has the path of this receiver. Otherwise it is the only one of the account.
    """

    id: str
    enabled: bool
    events: frozenset[str] | None = None
    is_certain: bool = True


def choose_endpoints(
    listed: Sequence[Mapping[str, Any]], *, configured: Sequence[str], path: str
) -> tuple[ReadEndpoint, ...]:
    """Return the endpoints of the upstream that deliver to this receiver.

    An event has a different id at each endpoint, so deliveries to other endpoints are not missing
    here.

    Args:
        listed: the upstream's endpoints.
        configured: the ids in the settings; empty: the only endpoint, or the only one whose URL has
            this receiver's path.
        path: ``Sdk:Webhooks:Path``.

    Raises:
        UnknownEndpointError: no endpoint matches, or more than one.
    """
    by_id = {str(entry.get("id")): entry for entry in listed}
    existing = ", ".join(f"{name} ({_shown_url(entry)})" for name, entry in by_id.items()) or "none"
    missing = [name for name in configured if name not in by_id]
    if missing:
        raise UnknownEndpointError(
            "Sdk:Webhooks:Reconciliation:EndpointIds: the upstream has no webhook endpoint "
            f"{', '.join(map(repr, missing))}; it has: {existing}"
        )
    chosen = list(configured) or list(by_id)
    if len(chosen) > 1 and not configured:
        chosen = [name for name in chosen if has_path(by_id[name], path)]
    # Redelivering for the wrong endpoint would send every event to another program again.
    if len(chosen) != 1 and not configured:
        raise UnknownEndpointError(
            "the upstream's webhook endpoint for this receiver is unknown; set "
            f"Sdk:Webhooks:Reconciliation:EndpointIds to its id; the upstream has: {existing}"
        )
    return tuple(
        attrs.evolve(
            _read_endpoint(name, by_id[name]),
            is_certain=bool(configured) or has_path(by_id[name], path),
        )
        for name in chosen
    )


def _read_endpoint(name: str, entry: Mapping[str, Any]) -> ReadEndpoint:
    events = entry.get("events")
    return ReadEndpoint(
        name,
        entry.get("enabled") is not False,
        frozenset(map(str, events)) if isinstance(events, list) else None,
    )


def choose_tenant_endpoints(
    listed: Sequence[Mapping[str, Any]],
    *,
    configured: Sequence[str],
    path: str,
    identifier: str,
) -> tuple[ReadEndpoint, ...]:
    """Return the endpoints in a tenant's organization that deliver to this receiver.

    Args:
        listed: the endpoints of its organization.
        configured: as for :func:`choose_endpoints`; ids of other organizations are ignored.
        path: ``Sdk:Webhooks:Path``.
        identifier: the tenant's identifier; the path of the tenant's own address ends with it.

    Raises:
        UnknownEndpointError: no endpoint matches, or more than one.
    """
    here = [name for name in configured if any(str(each.get("id")) == name for each in listed)]
    own = f"{path.rstrip('/')}/{identifier}"
    if not any(has_path(each, own) for each in listed):
        own = path
    return choose_endpoints(listed, configured=here, path=own)


def subscribed_types(endpoints: Iterable[ReadEndpoint]) -> frozenset[str] | None:
    """Return the types that any of the endpoints subscribes to; None: unknown, so all."""
    types: frozenset[str] = frozenset()
    for endpoint in endpoints:
        if endpoint.events is None:
            return None
        types |= endpoint.events
    return types


def has_path(entry: Mapping[str, Any], path: str) -> bool:
    """Return whether a webhook endpoint of the upstream has the path of this receiver."""
    return _split_url(entry).path.rstrip("/").endswith(path.rstrip("/"))


def _split_url(entry: Mapping[str, Any]) -> SplitResult:
    try:
        return urlsplit(str(entry.get("url")))
    except ValueError:
        return urlsplit("")  # it is the URL of no receiver


def _shown_url(entry: Mapping[str, Any]) -> str:
    """Return an endpoint's URL without user, query or fragment, which may contain secrets."""
    parts = _split_url(entry)
    return f"{parts.scheme}://{parts.hostname}{parts.path}"
