"""The retry layer: another attempt where the policy, the budget and the deadline allow one."""

from collections.abc import Callable

import httpx

from ...base.backoff import jittered_wait
from ...base.logs import get_logger
from ..call import Call
from ..errors import CircuitOpenError, ConnectionFailedError, OutcomeUnknownError
from ..retry import FailureKind, RetryBudget, RetryPolicy, may_retry_failure, may_retry_status
from .admission import AttemptKind, AttemptLayer, ClientCounters, RateGate, WaitTooLong

logger = get_logger("client")


class Retryer:
    """Makes attempts until one is final.

    Args:
        inner: makes one attempt, with its hedge.
        policy: the waits; each call has its own number of retries.
        budget: pays for retries.
        admitter: the limiter, asked before each retry.
        clock: returns the current time in seconds.
        random: returns a number from 0 to 1.
        counters: counts refusals of the budget.
    """

    def __init__(
        self,
        inner: AttemptLayer,
        *,
        policy: RetryPolicy,
        budget: RetryBudget,
        admitter: RateGate,
        clock: Callable[[], float],
        random: Callable[[], float],
        counters: ClientCounters,
    ) -> None:
        self._inner = inner
        self._policy = policy
        self._budget = budget
        self._admitter = admitter
        self._clock = clock
        self._random = random
        self._counters = counters

    async def send(self, call: Call) -> httpx.Response:
        """Return the first final answer, or the last one there was.

        A retry that the breaker refuses changes nothing about that, because the call's own last
        answer explains more. The refusal is then in ``call.refusal``.

        Raises:
            OutcomeUnknownError: a write may have been executed, and may not be repeated.
            ConnectionFailedError: the last attempt brought no answer.
            CircuitOpenError: the breaker refused even the first attempt.
            DeadlineExceededError: the call's deadline has come.

        Cancelling during a wait refunds the price of the attempt after it.
        """
        last = await self._attempt(call, AttemptKind.FIRST)
        failures = 1
        while failures <= call.max_retries and _may_repeat(call, last):
            paid = self._budget.withdraw(_incident_of(last))
            if paid is None:
                self._counters.budget_refusals += 1
                break
            if not await self._wait(call, failures, last, paid):
                break
            try:
                last = await self._paid_attempt(call, paid)
            except CircuitOpenError as refusal:
                call.refusal = refusal
                break
            failures += 1
        if isinstance(last, httpx.Response):
            return last
        # The write may have been executed. "Connection failed" would invite the caller to repeat
        # it.
        if last.kind is FailureKind.UNCONFIRMED and not call.idempotent:
            raise outcome_unknown(call) from last
        raise last

    async def _attempt(
        self, call: Call, kind: AttemptKind
    ) -> httpx.Response | ConnectionFailedError:
        try:
            call.last = await self._inner.send(call, kind)
        except ConnectionFailedError as error:
            call.last = error
        return call.last  # noqa: ASYNC910 - an attempt was made

    async def _wait(
        self,
        call: Call,
        failures: int,
        last: httpx.Response | ConnectionFailedError,
        paid: float,
    ) -> bool:
        """Wait for the next attempt's time; refund it and return False when that is too late."""
        now = self._clock()
        wait = jittered_wait(
            failures,
            self._random(),
            base_seconds=self._policy.base_seconds,
            cap_seconds=self._policy.cap_seconds,
        )
        not_before = max(now + wait, call.not_before)
        logger.info(
            "client.retry",
            method=call.method,
            path=call.path,
            attempts=call.attempts,
            reason=_reason(last),
            seconds=round(not_before - now, 3),
        )
        admitted = False
        try:
            leave = await self._admitter.admit(call, not_before=not_before)
            admitted = not isinstance(leave, WaitTooLong)
        finally:
            if not admitted:
                self._budget.refund(paid)
        return admitted

    async def _paid_attempt(
        self, call: Call, paid: float
    ) -> httpx.Response | ConnectionFailedError:
        sent = call.attempts
        try:
            return await self._attempt(call, AttemptKind.RETRY)
        except BaseException:
            # The breaker has refused it, or it was cancelled before it left: nothing was sent.
            if call.attempts == sent:
                self._budget.refund(paid)
                self._admitter.give_back(call)
            raise


def _may_repeat(call: Call, last: httpx.Response | ConnectionFailedError) -> bool:
    if isinstance(last, httpx.Response):
        return may_retry_status(last.status_code, idempotent=call.idempotent)
    return may_retry_failure(last.kind, idempotent=call.idempotent)


def _incident_of(last: httpx.Response | ConnectionFailedError) -> object | None:
    return None if isinstance(last, httpx.Response) else last.incident


def _reason(last: httpx.Response | ConnectionFailedError) -> str:
    return str(last.status_code) if isinstance(last, httpx.Response) else type(last).__name__


def outcome_unknown(call: Call) -> OutcomeUnknownError:
    """Return the error for a write that was sent and not answered."""
    return OutcomeUnknownError(
        "the request was sent and no answer came: whether it took effect is not known",
        method=call.method,
        path=call.path,
    )
