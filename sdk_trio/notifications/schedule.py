"""The state of a message after an attempt, and the time of the next one. Pure."""

import attrs

from ..base.throttle import jittered_wait
from ..records.notifications import NotificationState, SendResult
from .send import Again, Ambiguous, Outcome, Refused, Sent, Skipped

#: The longest reason that is kept, in characters.
MAX_REASON_LENGTH = 500


@attrs.frozen
class RetrySchedule:
    """The number of attempts of a message on its channel, and the waits between them.

    ``max_attempts`` counts all of them, the first included. After the n-th failed one the wait is
    drawn from ``U(0, min(cap, base * 2**(n - 1)))``. With the defaults eight attempts last half an
    hour on average: long enough for a provider to come back, and for a message that is still news.
    """

    max_attempts: int = 8
    base_seconds: float = 30.0
    cap_seconds: float = 3600.0


def ending_of(
    outcome: Outcome,
    *,
    attempts: int,
    repeatable: bool,
    schedule: RetrySchedule,
    now: float,
    fraction: float,
) -> SendResult:
    """Decide what follows an attempt.

    Args:
        outcome: the channel's.
        attempts: the number of this attempt, from 1.
        repeatable: whether the receiver recognizes a repetition: only then is a message sent again
            that may have arrived.
        schedule: the number of attempts and the waits.
        now: Unix seconds.
        fraction: the caller's randomness, from 0 to 1.
    """
    match outcome:
        case Sent(provider_id):
            return SendResult(NotificationState.SENT, provider_id=provider_id)
        case Skipped(reason):
            return SendResult(NotificationState.SKIPPED, _cut(reason))
        case Refused(reason):
            return SendResult(NotificationState.FAILED, _cut(reason))
        # A person cannot tell a second SMS from a second transition, and what was sent cannot be
        # called back: so a person decides (``notify retry``).
        case Ambiguous(reason) if not repeatable:
            return SendResult(NotificationState.UNKNOWN, _cut(reason))
        # The receiver recognises a repetition by its ``deliveryId``.
        case Ambiguous(reason):
            asked = 0.0
        case Again(reason, after_seconds):
            asked = after_seconds or 0.0
    if attempts >= schedule.max_attempts:
        return SendResult(NotificationState.FAILED, _cut(reason))
    wait = jittered_wait(
        attempts, fraction, base_seconds=schedule.base_seconds, cap_seconds=schedule.cap_seconds
    )
    # The provider's wait is a lower bound. The jitter on top keeps all messages that got the same
    # answer from coming back at the same moment.
    return SendResult(NotificationState.RETRYING, _cut(reason), next_attempt_at=now + asked + wait)


def interrupted(*, repeatable: bool, reason: str, now: float) -> SendResult:
    """Return what is recorded of an attempt that was cut off after the sending had begun."""
    if repeatable:
        return SendResult(NotificationState.RETRYING, reason, next_attempt_at=now)
    return SendResult(NotificationState.UNKNOWN, reason)


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_LENGTH else reason[: MAX_REASON_LENGTH - 1] + "…"
