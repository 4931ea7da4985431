"""Routes of forwarding: match events to routes, and interpret an application's answers. Pure.

The first route of the list that matches an event takes it. ``forward.py`` posts the events;
docs/how-to/forward-to-an-application.md describes both.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..base.times import rfc3339
from ..config import Settings
from ..config.options.forward import RouteOptions
from ..config.options.webhooks import QueueOptions
from ..records.deliveries import Postponed
from ..records.policies import Backoff, Policy

#: The maximum runs of an event that an application refuses (4xx). A deployment may be in progress,
#: so it is retried. But the same request is usually refused again, so it is retried less often than
#: MaxAttempts.
FEW_ATTEMPTS = 3

GONE = 410

#: Statuses of a request that arrived incomplete, too early, or over a rate limit; the event itself
#: is not refused.
_TRY_AGAIN = frozenset({408, 425, 429})

#: Statuses of an application, or of a proxy before it, that is temporarily unavailable.
_UNAVAILABLE = frozenset({429, 502, 503, 504})

#: The prefix of types that this program sends to itself, such as the probe of ``doctor``; they are
#: never forwarded or paused.
OUR_OWN = "sdk_trio."

#: The maximum length of an answer that is stored with an attempt, in characters.
ANSWER_CHARACTERS = 300


class Condition(msgspec.Struct, frozen=True):
    """A JSON pointer (RFC 6901) into the body, and the required value."""

    path: tuple[str, ...]
    text: str
    value: Any

    @classmethod
    def of(cls, setting: str) -> "Condition":
        """Read ``POINTER=VALUE``; a value that is not JSON counts as text."""
        pointer, _, text = setting.partition("=")
        # In this order, so that ~01 is ~1 and not a slash.
        path = tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        return cls(path, text, value)

    def holds(self, document: Any) -> bool:
        """Return whether the body has the value at the pointer."""
        for part in self.path:
            if isinstance(document, dict) and part in document:
                document = document[part]
            elif isinstance(document, list) and part.isdecimal() and int(part) < len(document):
                document = document[int(part)]
            else:
                return False
        # "=5" matches the number and the text: the upstream may send either.
        if isinstance(document, str):
            return document in (self.value, self.text)
        # True == 1 in Python, but not in JSON.
        same_kind = isinstance(document, bool) is isinstance(self.value, bool)
        return same_kind and bool(document == self.value)


class Route(msgspec.Struct, frozen=True):
    """One route with its parsed conditions."""

    options: RouteOptions
    types: re.Pattern[str]
    conditions: tuple[Condition, ...]

    @classmethod
    def of(cls, options: RouteOptions) -> "Route":
        """Return the route of checked settings."""
        globs = "|".join(f"(?:{fnmatch.translate(glob)})" for glob in options.types)
        return cls(options, re.compile(globs), tuple(map(Condition.of, options.where)))

    @property
    def name(self) -> str:
        """The route's name."""
        return self.options.name

    @property
    def group(self) -> str:
        """The name of its events where a policy limits them; see :class:`Policy`."""
        return f"route:{self.name}"

    def policy(self, queue: QueueOptions) -> Policy:
        """Return the policies of its handler; ``queue`` has the waits that it does not set."""
        options = self.options
        base, cap = options.retry_base_seconds, options.retry_cap_seconds
        retry = None
        if base is not None or cap is not None:
            base = queue.retry_base_seconds if base is None else base
            retry = Backoff(base, max(base, queue.retry_cap_seconds if cap is None else cap))
        return Policy(
            max_attempts=options.max_attempts,
            concurrency=options.concurrency,
            rate_per_minute=options.rate_per_minute,
            retry=retry,
            coalesce=options.coalesce,
        )

    def takes(
        self, event_type: str, document: Callable[[], Any], source: str | None = None
    ) -> bool:
        """Return whether it takes an event; ``document`` reads the body if a condition needs it.

        ``source`` is the event's source, None for the upstream.
        """
        sources = self.options.sources
        if source not in sources and (sources or source is not None):
            return False
        if self.types.match(event_type) is None:
            return False
        return all(condition.holds(document()) for condition in self.conditions)


def routes_of(settings: Settings) -> tuple[Route, ...]:
    """Return the routes of checked settings in their order."""
    return tuple(map(Route.of, settings.forward.all_routes))


def first_match(
    routes: Sequence[Route], event_type: str, raw: bytes | None, source: str | None = None
) -> int | None:
    """Return the index of the first route that takes an event, None if none does.

    ``raw`` is the body; without one, routes with conditions take nothing. ``source`` is the event's
    source, None for the upstream.
    """
    if source is None and event_type.startswith(OUR_OWN):
        return None
    read: list[Any] = []

    def document() -> Any:
        if not read:
            try:
                read.append(msgspec.json.decode(raw or b"null"))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                read.append(None)
        return read[0]

    for index, route in enumerate(routes):
        if route.takes(event_type, document, source):
            return index
    return None


# -- after a post -------------------------------------------------------------------------


class Ruling(msgspec.Struct, frozen=True):
    """The consequence of a failed post, where it differs from the queue's default.

    ``retry_after`` is the minimum wait in seconds. ``most_attempts``: dead after this many.
    ``postponed``: the attempt does not count. ``answer`` is the beginning of the response.
    """

    retry_after: float | None = None
    most_attempts: int | None = None
    postponed: Postponed | None = None
    answer: str | None = None


class PostFailedError(Exception):
    """The application did not take an event; ``ruling`` has the consequence."""

    def __init__(self, text: str, ruling: Ruling) -> None:
        super().__init__(text)
        self.ruling = ruling


class Judgement(msgspec.Struct, frozen=True):
    """The meaning of an application's status.

    ``done``: it has the event. ``pauses``: it wants no more events. ``unavailable``: it cannot
    answer at present, whatever the event. ``at_fault``: it failed, maybe because of the event.
    ``most_attempts`` and ``retry_after`` are as for :class:`Ruling`; with ``holds``, no other event
    is posted before ``retry_after`` either.
    """

    text: str
    done: bool = False
    pauses: bool = False
    unavailable: bool = False
    at_fault: bool = False
    most_attempts: int | None = None
    retry_after: float | None = None
    holds: bool = False


def judge(status: int, retry_after: float | None, *, longest: float) -> Judgement:
    """Return the meaning of a status; ``Retry-After`` is limited to ``longest`` seconds."""
    text = f"answered {status}"
    if 200 <= status < 300:
        return Judgement(text, done=True)
    if status == GONE:
        return Judgement(f"{text}: it wants no more events", pauses=True)
    wait = None if retry_after is None else min(retry_after, longest)
    if status in _TRY_AGAIN or status >= 500:
        unavailable = status in _UNAVAILABLE
        return Judgement(
            text,
            unavailable=unavailable,
            at_fault=status >= 500 and not unavailable,
            retry_after=wait,
            holds=unavailable and wait is not None,
        )
    if 300 <= status < 400:
        # Following it would post to an address that is not configured.
        text += ", a redirect, which is not followed: set the route's Url to its target"
    return Judgement(text, most_attempts=FEW_ATTEMPTS, retry_after=wait)


def answer_text(status: int, body: bytes) -> str:
    """Return a status and the beginning of a body as one line of text."""
    shown = body[: 4 * ANSWER_CHARACTERS].decode("utf-8", "replace")
    shown = " ".join(shown.split())[:ANSWER_CHARACTERS]
    return f"answered {status}: {shown}" if shown else f"answered {status}"


# -- pauses --------------------------------------------------------------------------------------

#: The value of ``sdk_forward_route_state`` for a route whose application fails or is unavailable.
WAITING = 1


class Pause(msgspec.Struct, frozen=True):
    """A pause of a route: its reason, start (Unix seconds) and actor.

    It is not an :class:`~..records.policies.EventPause`: the application itself begins it by
    answering 410, and its end also closes the circuit breaker of the route. The gate that obeys it
    postpones events for that breaker anyway, so one mechanism for both would not save the gate.
    """

    reason: str
    at: float
    actor: str

    def __str__(self) -> str:
        return f"since {rfc3339(self.at)}, by {self.actor}: {self.reason}"

    def as_text(self) -> str:
        """Return the form in which it is stored."""
        return json.dumps(msgspec.structs.asdict(self))


def pause_of(text: str | None) -> Pause | None:
    """Read a stored pause; None if there is none.

    An unreadable record counts as a pause: posting events that an operator has stopped is worse.
    """
    if text is None:
        return None
    try:
        return Pause(**json.loads(text))
    except (ValueError, TypeError):
        return Pause("its record in the store cannot be read", 0.0, "unknown")


def checkpoint_of(route: str) -> str:
    """Return the name under which the pause of a route is stored."""
    return f"forward.paused.{route}"
