"""What becomes of a delivery after a run failed: pure decisions (contracts 2, 3 and 5)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from ..config.secret import MASK
from ..errors import RetryLater
from ..jitter import longest_wait
from ..storage.records import Dead, Retry

if TYPE_CHECKING:
    from ..storage.tenant_records import Tenant

#: The longest error text that is kept with a delivery, in characters.
MAX_ERROR_LENGTH = 2000


@attrs.frozen
class Failure:
    """Why a run did not finish: ``error`` for people, ``retry_after`` seconds if it asked.

    ``error_type`` is the name of the exception's class.
    """

    error: str
    retry_after: float | None = None
    error_type: str = "timeout"


def failure_of_time(handler: str, seconds: float) -> Failure:
    """Return the failure of an inline run that outlasted InlineTimeoutSeconds."""
    return Failure(
        f"the handler {handler} took longer than InlineTimeoutSeconds ({seconds:g} s); "
        "register it with enqueue=True"
    )


@attrs.frozen
class RetryPolicy:
    """How often and how late an enqueued event is run again.

    ``max_attempts`` counts all runs, the first included; ``base_seconds`` and ``cap_seconds``
    bound the delay: full jitter, ``U(0, min(cap, base * 2**(attempts - 1)))``.
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float

    def longest_delay(self, attempts: int) -> float:
        """Return the upper end, in seconds, of the delay after ``attempts`` failed runs."""
        return longest_wait(attempts, base_seconds=self.base_seconds, cap_seconds=self.cap_seconds)


def after_queued_failure(
    failure: Failure, *, attempts: int, policy: RetryPolicy, now: float, fraction: float
) -> Retry | Dead:
    """Decide what follows the failed run number ``attempts`` of an enqueued event.

    ``fraction`` in [0, 1) is the caller's randomness, ``now`` Unix seconds. A delay that the
    handler asked for is a lower bound; the jitter comes on top, so that many do not return at once.
    """
    if attempts >= policy.max_attempts:
        return Dead(failure.error)
    delay = (failure.retry_after or 0.0) + fraction * policy.longest_delay(attempts)
    return Retry(at=now + delay, error=failure.error)


def after_inline_failure(failure: Failure, *, attempts: int, max_attempts: int) -> Retry | Dead:
    """Decide what follows the failed run number ``attempts`` of an inline event.

    Up to ``max_attempts`` the sender is asked to deliver again; then the event is a dead letter,
    and the sender gets 200, because it disables an endpoint that fails too often.
    """
    if attempts >= max_attempts:
        return Dead(failure.error)
    return Retry(at=None, error=failure.error)


def retry_after_of(error: Exception) -> float | None:
    """Return the longest delay, in seconds, that an error or one in its group asked for."""
    if isinstance(error, RetryLater):
        return error.seconds
    if isinstance(error, ExceptionGroup):
        asked = [retry_after_of(part) for part in error.exceptions]
        return max((seconds for seconds in asked if seconds is not None), default=None)
    return None


def describe_error(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return ``Type: message`` of an exception, groups flattened, cut to a bounded length.

    The message is the handler's own, for operators; a secret of ours that it quotes (``secrets``)
    has a mask in its place.

    The text can be stored and logged whatever the exception is: its own ``__str__`` may raise, and
    may return what UTF-8 has no bytes for (a file name with undecodable bytes).
    """
    if isinstance(error, BaseExceptionGroup):
        text = "; ".join(describe_error(part, secrets) for part in error.exceptions)
    else:
        message = _message_of(error)
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text if len(text) <= MAX_ERROR_LENGTH else text[: MAX_ERROR_LENGTH - 1] + "…"


def hint_when_parked(tenant: "Tenant | None") -> str:
    """Say why an event was parked, and what to do."""
    if tenant is None or tenant.is_active:
        return "no handler for this type; register one, then replay the event"
    return (
        f"its tenant {tenant.identifier} is {tenant.status}, and the handler has "
        "run_when_suspended=False; reactivate the tenant, then replay the event"
    )


def _message_of(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception as failure:
        return f"(no text: its __str__ raised {type(failure).__name__})"
    return message.encode("utf-8", "backslashreplace").decode("utf-8")
