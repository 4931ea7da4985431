"""The admission layer: the client's own rate limit, and the pause after a 429.

:class:`RateLimiter` is pure: a token bucket and a pause, which return times to wait.
:class:`RateGate` waits for them, up to a limit.
"""

import math
from collections.abc import Callable

import attrs
import httpx
import trio

from ...base.bell import Bell
from ...base.throttle import TokenBucket
from ..answers import RETRYABLE_STATUSES, TOO_MANY_REQUESTS, retry_after_of
from ..call import Call
from ..errors import RateLimitedError
from . import AttemptKind, CallCut, CallLayer, CallsInProgress

SECONDS_PER_MINUTE = 60.0


@attrs.frozen
class LimitPolicy:
    """The client's own rate limit.

    ``per_minute`` attempts per minute on average, ``burst`` at once; None: no limit except the
    pause after a 429. None is the default, because the upstream knows its limit better.
    """

    per_minute: float | None = None
    burst: int = 10


class Reservation:
    """A reserved rate slot: the attempt is sent at ``due``, or at once if that has passed.

    ``due`` changes with the rate while a call waits.
    """

    __slots__ = ("due",)

    def __init__(self, due: float) -> None:
        self.due: float = due


class RateLimiter:
    """The limiter of one access token at one origin.

    Args:
        policy: the rate.
        clock: returns the current time in seconds; it must never go back.
    """

    def __init__(self, policy: LimitPolicy, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paused_until = -math.inf
        self._waiting: set[Reservation] = set()
        self.policy: LimitPolicy = policy
        self._bucket = _bucket_of(policy)

    @property
    def paused_until(self) -> float:
        """Return the end of the pause; a time in the past if there is none."""
        return self._paused_until

    @property
    def backlog(self) -> float:
        """Return how many tokens the bucket lacks; 0 if it is full."""
        return 0.0 if self._bucket is None else self._bucket.missing(self._clock())

    @property
    def is_idle(self) -> bool:
        """Return whether dropping this limiter would change nothing."""
        return self._paused_until <= self._clock() and not self.backlog

    def pause(self, seconds: float) -> None:
        """Send no attempt for ``seconds``, after a 429; never shortens a longer pause."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def change(self, policy: LimitPolicy) -> None:
        """Change the rate.

        No slot is lost or assigned twice: the bucket lacks as many tokens as before, and waiting
        calls keep their order, at the new rate from now on.
        """
        now = self._clock()
        before, bucket = self.policy, self._bucket
        self.policy = policy
        if bucket is None or policy.per_minute is None:
            # No call waited before, or none has to wait now.
            self._bucket = _bucket_of(policy)
            for slot in self._waiting:
                slot.due = now
            return
        bucket.change(per_second=_per_second(policy), burst=_burst(policy), now=now)
        for slot in self._waiting:
            ahead = (slot.due - now) * _per_second(before) + _burst(before)
            slot.due = max(now, now + (ahead - _burst(policy)) / _per_second(policy))

    def book(self) -> Reservation:
        """Reserve the next rate slot; call :meth:`leave` when its time has come.

        Not needed for a slot that is due at once.
        """
        now = self._clock()
        slot = Reservation(now if self._bucket is None else self._bucket.book(now))
        if slot.due > now:
            self._waiting.add(slot)
        return slot

    def leave(self, slot: Reservation) -> None:
        """Stop waiting for ``slot``, whether the attempt departs or not."""
        self._waiting.discard(slot)

    def book_now(self) -> bool:
        """Reserve a slot if an attempt may be sent at once; return whether it may."""
        now = self._clock()
        if self._paused_until > now:
            return False
        return self._bucket is None or not self._bucket.admit(now)

    def give_back(self) -> None:
        """Return a reserved and unused slot: all later ones move up."""
        if self._bucket is not None:
            self._bucket.give_back()


def _bucket_of(policy: LimitPolicy) -> TokenBucket | None:
    if policy.per_minute is None:
        return None
    return TokenBucket(per_second=_per_second(policy), burst=_burst(policy))


def _per_second(policy: LimitPolicy) -> float:
    return (policy.per_minute or 0.0) / SECONDS_PER_MINUTE


def _burst(policy: LimitPolicy) -> int:
    return max(policy.burst, 1)


#: The longest pause that one answer can cause, in seconds: a day. A mistaken header must not stop a
#: process for good.
LONGEST_PAUSE_SECONDS = 86_400.0

#: Above this number, idle limiters are dropped: there may be as many tokens as customers.
_KEPT_LIMITERS = 256


@attrs.frozen
class WaitTooLong:
    """A refusal: the rate slot is in ``seconds``, later than the call may wait."""

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
        #: Rings on each :meth:`change`.
        self.changed: Bell = Bell()

    def change(self, policy: LimitPolicy) -> None:
        """Change the rate; waiting calls keep their order and get their new time."""
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
            # Tenants' tokens come and go; an idle limiter has no state to keep.
            if len(self._by_token) >= _KEPT_LIMITERS:
                self._by_token = {k: v for k, v in self._by_token.items() if not v.is_idle}
            found = self._by_token[key] = RateLimiter(self._policy, clock=self._clock)
        return found


class RateGate:
    """Delays attempts until the limiter allows them.

    Args:
        limiters: the limiters of all tokens.
        in_progress: registers each wait, so that closing the client ends it.
        clock: returns the current time in seconds.
        wall_clock: returns Unix time, for dates in answers without ``Date``.
        longest_wait: in seconds; a call that would wait longer is refused.
    """

    def __init__(
        self,
        limiters: Limiters,
        *,
        in_progress: CallsInProgress,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        longest_wait: float,
    ) -> None:
        self._limiters = limiters
        self._under_way = in_progress
        self._clock = clock
        self._wall_clock = wall_clock
        self._longest_wait = longest_wait

    async def admit(self, call: Call, *, not_before: float = -math.inf) -> WaitTooLong | None:
        """Wait until an attempt of ``call`` may be sent, not before ``not_before``.

        Returns:
            None if it may be sent now; its slot is used up unless it is given back. WaitTooLong if
            the slot is too late.

        Raises:
            CallCut: the client was closed during the wait.

        Returns at once, without a checkpoint, if it need not wait or refuses. Cancellation gives
        the slot back.
        """
        limiter = self._limiters.of(call)
        slot = limiter.book()
        admitted = False
        try:
            while True:
                # Computed again after each wait: there may be a new pause, or a reload may have
                # changed the rate.
                now = self._clock()
                leaves_at = max(not_before, slot.due, limiter.paused_until)
                if leaves_at <= now:
                    admitted = True
                    return None
                # Refused at once: a caller should not wait a minute to learn that its time was too
                # short.
                if leaves_at - now > self._longest_wait or leaves_at >= call.deadline:
                    return WaitTooLong(leaves_at - now)
                await self._wait(leaves_at)
        finally:
            limiter.leave(slot)
            if not admitted:
                limiter.give_back()

    async def _wait(self, leaves_at: float) -> None:
        """Wait until ``leaves_at``, or until the rate changes."""
        scope = self._under_way.begin(leaves_at)
        try:
            with scope:
                await self._limiters.changed.wait()
        finally:
            self._under_way.end(scope)
        if self._under_way.is_closed:
            raise CallCut

    def admit_now(self, call: Call) -> bool:
        """Reserve a slot if an attempt of ``call`` may be sent at once; return whether it may."""
        return self._clock() >= call.not_before and self._limiters.of(call).book_now()

    def give_back(self, call: Call) -> None:
        """Return the slot of an attempt that was not sent."""
        self._limiters.of(call).give_back()

    def note(self, call: Call, response: httpx.Response) -> None:
        """Apply Retry-After from now on: to the call, and for a 429 to all calls of the token.

        Other calls with the same token would be answered 429 as well, and upstreams count these.
        """
        if response.status_code not in RETRYABLE_STATUSES:
            return
        seconds = retry_after_of(response, now=self._wall_clock())
        if seconds is None:
            return
        call.not_before = max(call.not_before, self._clock() + seconds)
        if response.status_code == TOO_MANY_REQUESTS:
            # Bounded: one wrong header must not stop every call with this token for good.
            self._limiters.of(call).pause(min(seconds, LONGEST_PAUSE_SECONDS))


class AdmissionLayer(CallLayer):
    """The layer that makes the first attempt of each call wait for a rate slot.

    Args:
        gate: decides when it may be sent.
    """

    def __init__(self, gate: RateGate) -> None:
        self._gate = gate

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Wait for a rate slot, then pass the call on.

        Raises:
            RateLimitedError: the slot is after the deadline or the longest wait; not sent.

        Cancellation gives the slot back.
        """
        refusal = await self._gate.admit(call)
        if refusal is not None:
            await trio.lowlevel.checkpoint()
            raise RateLimitedError(
                f"not sent: this token is paused for {refusal.seconds:.1f} s",
                status=TOO_MANY_REQUESTS,
                method=call.method,
                path=call.shown_path,
                retry_after=refusal.seconds,
            )
        try:
            return await self.next.send(call, kind)
        except BaseException:
            # The upstream has not seen it, so the next call gets its rate slot.
            if call.attempts == 0:
                self._gate.give_back(call)
            raise
