"""Policies of a handler: how often, how long, and how many of its events run. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

import msgspec

from ..base.times import rfc3339
from .deliveries import SOURCE_MARK

#: The most runs of an event, the largest concurrency and the highest rate that can be set.
MOST_ATTEMPTS = 1000
MOST_CONCURRENT = 1024
HIGHEST_RATE = 1_000_000.0

#: The longest run and the longest wait, in seconds: a week, as in the settings.
LONGEST_SECONDS = 604_800.0

#: The longest inline run, in seconds: the sender gives up on a delivery after 10.
LONGEST_INLINE_SECONDS = 9.0

#: The longest glob of a pause.
MOST_GLOB_CHARACTERS = 256


class Backoff(msgspec.Struct, frozen=True):
    """The waits between the runs of an event, in seconds.

    Before run number ``n + 1`` it waits a random time from 0 to ``min(cap, base * 2**(n - 1))``.
    """

    base: float = 1.0
    cap: float = 900.0


class PolicyArguments(TypedDict, total=False):
    """The policies of a handler, as arguments of ``register``, ``on`` and ``fallback``.

    ===================  =======================================================================
    ``max_attempts``     runs of an event before it is a dead letter, the first included
    ``timeout``          seconds that one run may take
    ``concurrency``      runs at once, over all processes and hosts of the store
    ``rate_per_minute``  runs that begin in a minute, over all processes and hosts of the store
    ``retry``            a :class:`Backoff`: the waits between the runs
    ``coalesce``         True: run only the newest waiting event of a subject; implies ``ordered``
    ===================  =======================================================================

    Without one, the settings' value applies. ``concurrency``, ``rate_per_minute``, ``retry`` and
    ``coalesce`` need ``enqueue=True``.
    """

    max_attempts: int | None
    timeout: float | None
    concurrency: int | None
    rate_per_minute: float | None
    retry: Backoff | None
    coalesce: bool


class Policy(msgspec.Struct, frozen=True):
    """The policies of one handler; see :class:`PolicyArguments`. None: the settings' value."""

    max_attempts: int | None = None
    timeout: float | None = None
    concurrency: int | None = None
    rate_per_minute: float | None = None
    retry: Backoff | None = None
    coalesce: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether the store has to decide which of the handler's events may run."""
        return self.concurrency is not None or self.rate_per_minute is not None or self.coalesce

    def described(self) -> dict[str, Any]:
        """Return the policies that were set, for logs and listings."""
        shown = {
            "max_attempts": self.max_attempts,
            "timeout": self.timeout,
            "concurrency": self.concurrency,
            "rate_per_minute": self.rate_per_minute,
            "retry": None if self.retry is None else f"{self.retry.base:g}..{self.retry.cap:g} s",
            "coalesce": self.coalesce or None,
        }
        return {name: value for name, value in shown.items() if value is not None}

    def __str__(self) -> str:
        """Return the policies that were set as one line, "" without any."""
        return ", ".join(f"{name}={value}" for name, value in self.described().items())


UNLIMITED = Policy()


def problems_of(policy: Policy, *, enqueue: bool) -> Iterator[str]:
    """Yield what is wrong with the policies of a handler, each with its remedy."""
    whole = (("max_attempts", MOST_ATTEMPTS), ("concurrency", MOST_CONCURRENT))
    for name, most in whole:
        value = getattr(policy, name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            yield f"{name}={value!r} is not a whole number from 1 to {most}"
    longest = LONGEST_SECONDS if enqueue else LONGEST_INLINE_SECONDS
    if policy.timeout is not None and not _is_between(policy.timeout, 0.01, longest):
        hint = "" if enqueue else ", as the sender waits 10 seconds; enqueue=True allows more"
        span = f"from 0.01 to {longest:g}"
        yield f"timeout={policy.timeout!r} is not a number of seconds {span}{hint}"
    rate = policy.rate_per_minute
    if rate is not None and not _is_between(rate, 0.01, HIGHEST_RATE):
        yield f"rate_per_minute={rate!r} is not a number from 0.01 to {HIGHEST_RATE:g}"
    if policy.retry is not None:
        yield from _problems_of_backoff(policy.retry)
    if type(policy.coalesce) is not bool:
        yield f"coalesce={policy.coalesce!r} is neither True nor False"
    if not enqueue:
        for name in ("concurrency", "rate_per_minute", "retry", "coalesce"):
            if getattr(policy, name) not in (None, False):
                yield f"{name} needs enqueue=True: an inline run begins when its delivery comes"


def _problems_of_backoff(retry: object) -> Iterator[str]:
    if not isinstance(retry, Backoff):
        yield f"retry={retry!r} is not a Backoff: write retry=Backoff(base=1, cap=900)"
        return
    for name in ("base", "cap"):
        value = getattr(retry, name)
        if not _is_between(value, 0, LONGEST_SECONDS):
            yield f"retry has {name}={value!r}, which is not a number of seconds from 0 to 604800"
            return
    if retry.cap < retry.base:
        yield f"retry has cap={retry.cap!r}, which is less than its base={retry.base!r}"


def _is_between(value: object, least: float, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= most  # false for NaN


# -- pauses --------------------------------------------------------------------------------------


class EventPause(msgspec.Struct, frozen=True):
    """A pause of the events whose type matches ``glob``; times are Unix seconds.

    The glob of a source's events is that of :func:`glob_of`.

    It ends at ``until``, or when it is resumed. ``ended_at`` and ``ended_by`` are set then, and the
    record stays as the audit of both actions.
    """

    glob: str
    since: float
    actor: str
    reason: str = ""
    until: float | None = None
    ended_at: float | None = None
    ended_by: str | None = None

    def is_active(self, now: float) -> bool:
        """Return whether it holds events at ``now``."""
        return self.ended_at is None and (self.until is None or now < self.until)

    def __str__(self) -> str:
        until = "" if self.until is None else f" until {rfc3339(self.until)}"
        reason = self.reason or "no reason was given"
        return (
            f"{name_of_glob(self.glob)} is paused since {rfc3339(self.since)}{until}, "
            f"by {self.actor}: {reason}"
        )


def glob_of(types: str, source: str | None = None) -> str:
    """Return the glob of a pause, with the source whose events it holds: ``@NAME:GLOB``."""
    return types if source is None else f"{SOURCE_MARK}{source}:{types}"


def split_glob(glob: str) -> tuple[str | None, str]:
    """Return the source of a pause's glob, None for the upstream's events, and their types."""
    if not glob.startswith(SOURCE_MARK):
        return None, glob
    source, _, types = glob[1:].partition(":")
    return source, types


def name_of_glob(glob: str) -> str:
    """Return a pause's glob for people."""
    source, types = split_glob(glob)
    return types if source is None else f"{types} of {source}"


def resume_options(glob: str) -> str:
    """Return the options of ``events resume`` that end the pause of a glob."""
    source, types = split_glob(glob)
    return f"{'' if source is None else f'--source {source} '}--type '{types}'"


#: The prefix of the groups of paused events. Those of handlers have another one, so that no name of
#: a type or a route makes the two equal.
PAUSED = "pause:"

#: The first text after all texts with this prefix.
AFTER_PAUSED = "pause;"


def pause_group(glob: str) -> str:
    """Return the group of the events that a pause of ``glob`` holds."""
    return f"{PAUSED}{glob}"


def handler_group(name: str) -> str:
    """Return the group of a handler's events; ``name`` is its type, its route, or the fallback."""
    return f"handler:{name}"


def glob_problem(glob: str) -> str | None:
    """Return why ``glob`` cannot be paused, or None."""
    if not 1 <= len(glob) <= MOST_GLOB_CHARACTERS or not glob.isprintable():
        return f"a glob has 1 to {MOST_GLOB_CHARACTERS} printable characters, such as order.*"
    if glob.startswith(SOURCE_MARK):
        return f"a glob does not begin with {SOURCE_MARK}; the source is named beside it"
    return None


class GroupLimit(msgspec.Struct, frozen=True):
    """The part of the policy of one group that the store keeps."""

    concurrency: int | None = None
    rate_per_minute: float | None = None
    coalesce: bool = False


class ClaimLimits(msgspec.Struct, frozen=True):
    """The pauses and policies that a claim of due events obeys.

    Args:
        group_of: returns the group of an event, by its type, body and signer: one of ``groups``,
            the group of a pause that holds it, or None for an event without limits.
        groups: the limits by group.
        pauses: the groups of the active pauses.
        free_workers: how many events of ``groups`` may be claimed now, as workers are free.
        reads_bodies: ``group_of`` needs the body.
    """

    group_of: Callable[[str, bytes, str], str | None]
    groups: Mapping[str, GroupLimit]
    pauses: frozenset[str]
    free_workers: int
    reads_bodies: bool = False


#: The limits of a process without pauses and policies, which releases events that other processes
#: have held.
NO_LIMITS = ClaimLimits(lambda _type, _raw, _signer: None, {}, frozenset(), 0)


#: The share of a minute's worth of runs that may begin at once.
BURST_SHARE = 0.05


def burst_of(rate_per_minute: float) -> float:
    """Return how many runs of a rate may begin at once: 1 at least.

    A small burst keeps every minute within five per cent of the rate, and still uses the whole
    rate when claims come some seconds late.
    """
    return max(1.0, rate_per_minute * BURST_SHARE)
