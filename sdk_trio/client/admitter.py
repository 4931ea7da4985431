"""The limiter in the pipeline: calls wait for their turn, and a 429 shuts the gate for its token.

A call waits before its first attempt, outside the retry layer; further attempts and hedges ask the
same limiter, so that our own rate holds for everything that is sent.
"""

import math
from collections.abc import Callable
from typing import Protocol

import attrs
import httpx
import trio

from ..base.bell import Bell
from .attempts import AttemptKind
from .deadline import CallCut, CallsUnderWay
from .errors import RateLimitedError
from .limiter import LimitPolicy, RateLimiter
from .request import Call
from .retry import RETRYABLE_STATUSES, TOO_MANY_REQUESTS, parse_retry_after

#: The longest time that one answer can shut the gate for, in seconds: a day. A mistaken header must
#: not silence a process for good.
LONGEST_GATE_SECONDS = 86_400.0

#: Above this number idle limiters are forgotten: there may be as many tokens as customers.
_KEPT_LIMITERS = 256


class CallLayer(Protocol):
    """A layer that sees whole calls."""

    async def send(self, call: Call) -> httpx.Response:
        """Make the call's attempts and return its final answer."""
        ...


class AttemptLayer(Protocol):
    """A layer that sees single attempts."""

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make the attempt and return its answer."""
        ...


@attrs.frozen
class TooLong:
    """A refusal: the attempt's turn comes after ``seconds``, later than the call may wait."""

    seconds: float


class Limiters:
    """One limiter for each access token at each origin.

    Args:
        policy: the rate of each of them.
        clock: returns the current time in seconds.
    """

    def __init__(self, policy: LimitPolicy, *, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._by_token: dict[tuple[str, str], RateLimiter] = {}
        #: Rings at each :meth:`change`.
        self.changed = Bell()

    def change(self, policy: LimitPolicy) -> None:
        """Go on at another rate; waiting calls keep their position and learn their new time."""
        if policy == self._policy:
            return
        self._policy = policy
        for limiter in self._by_token.values():
            limiter.change(policy)
        self.changed.ring()

    def of(self, call: Call) -> RateLimiter:
        """Return the limiter of ``call``'s token and origin."""
        key = (call.origin, call.token)
        found = self._by_token.get(key)
        if found is None:
            if len(self._by_token) >= _KEPT_LIMITERS:
                self._by_token = {k: v for k, v in self._by_token.items() if not v.is_idle}
            found = self._by_token[key] = RateLimiter(self._policy, clock=self._clock)
        return found


class Admitter:
    """Holds attempts until the limiter lets them leave.

    Args:
        inner: brings admitted calls to their end.
        limiters: who may leave when.
        under_way: keeps each wait, so that closing the client ends it.
        clock: returns the current time in seconds.
        longest_wait: seconds; a call that would wait longer is ended instead.
    """

    def __init__(
        self,
        limiters: Limiters,
        *,
        under_way: CallsUnderWay,
        clock: Callable[[], float],
        longest_wait: float,
    ) -> None:
        self._limiters = limiters
        self._under_way = under_way
        self._clock = clock
        self._longest_wait = longest_wait

    async def admit(self, call: Call, *, not_before: float = -math.inf) -> TooLong | None:
        """Wait until an attempt of ``call`` may leave, and not before ``not_before``.

        Returns:
            None when it may leave now; its place counts as used, unless it is given back. TooLong
            when its turn comes too late.

        Raises:
            CallCut: the client was closed meanwhile.

        Returns at once, without a checkpoint, when it need not wait or will not.
        Cancelling gives the place up.
        """
        limiter = self._limiters.of(call)
        place = limiter.book()
        admitted = False
        try:
            while True:
                # The time is computed again after each wait: the gate may have been shut
                # meanwhile, or the rate changed by a reload.
                now = self._clock()
                leaves_at = max(not_before, place.due, limiter.shut_until)
                if leaves_at <= now:
                    admitted = True
                    return None  # noqa: ASYNC910 - the attempt follows at once
                if leaves_at - now > self._longest_wait or leaves_at >= call.deadline:
                    return TooLong(leaves_at - now)  # noqa: ASYNC910 - callers wait
                await self._wait(leaves_at)
        finally:
            limiter.leave(place)
            if not admitted:
                limiter.give_back()

    async def _wait(self, leaves_at: float) -> None:
        """Wait until then, or until the rate has changed."""
        scope = self._under_way.begin(leaves_at)
        try:
            with scope:
                await self._limiters.changed.wait()
        finally:
            self._under_way.end(scope)
        if self._under_way.is_closed:
            raise CallCut

    def admit_now(self, call: Call) -> bool:
        """Take a place for an attempt of ``call`` if one may leave at once; say whether it may."""
        return self._clock() >= call.not_before and self._limiters.of(call).book_now()

    def give_back(self, call: Call) -> None:
        """Return the place of an attempt that was not sent."""
        self._limiters.of(call).give_back()


class AdmissionLayer:
    """The limiter as a layer: the first attempt of each call waits for its turn.

    Args:
        inner: sends admitted calls.
        admitter: decides when they may leave.
    """

    def __init__(self, inner: CallLayer, admitter: Admitter) -> None:
        self._inner = inner
        self._admitter = admitter

    async def send(self, call: Call) -> httpx.Response:
        """Wait for the call's turn, then hand the call on.

        Raises:
            RateLimitedError: its turn comes after the deadline or the longest wait; not sent.

        Cancelling gives the place up.
        """
        refusal = await self._admitter.admit(call)
        if refusal is not None:
            await trio.lowlevel.checkpoint()
            raise RateLimitedError(
                f"not sent: this token is to pause for {refusal.seconds:.1f} s",
                status=TOO_MANY_REQUESTS,
                method=call.method,
                path=call.path,
                retry_after=refusal.seconds,
            )
        try:
            return await self._inner.send(call)
        except BaseException:
            if call.attempts == 0:
                self._admitter.give_back(call)
            raise


class Gatekeeper:
    """Applies Retry-After: of every answer to its call, of a 429 to all calls of the token.

    Other calls with the same token would be answered 429 as well, and upstreams count these.

    Args:
        limiters: the limiters whose gates it shuts.
        clock: returns the current time in seconds.
        wall_clock: returns Unix time, for dates of answers that have no ``Date``.
    """

    def __init__(
        self,
        limiters: Limiters,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._limiters = limiters
        self._clock = clock
        self._wall_clock = wall_clock

    def note(self, call: Call, response: httpx.Response) -> None:
        """Note how long the upstream wants no request, from this moment on."""
        if response.status_code not in RETRYABLE_STATUSES:
            return
        seconds = retry_after_of(response, now=self._wall_clock())
        if seconds is None:
            return
        call.not_before = max(call.not_before, self._clock() + seconds)
        if response.status_code == TOO_MANY_REQUESTS:
            self._limiters.of(call).shut(min(seconds, LONGEST_GATE_SECONDS))


def retry_after_of(response: httpx.Response, *, now: float) -> float | None:
    """Return the wait in seconds that ``response`` asks for, None when it asks for none.

    ``now`` is Unix time, for a date in an answer that has no ``Date``.
    """
    headers = response.headers
    asked = headers.get("retry-after")
    return None if asked is None else parse_retry_after(asked, date=headers.get("date"), now=now)
