"""What becomes of a delivery after a run failed (contracts 2, 3 and 5)."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.storage.records import Dead, Retry
from sdk_trio.webhooks.lifecycle import (
    MAX_ERROR_LENGTH,
    Failure,
    RetryPolicy,
    after_inline_failure,
    after_queued_failure,
    describe_error,
)

SECONDS = st.floats(0, 604_800)
POLICIES = st.builds(RetryPolicy, st.integers(1, 50), st.floats(0, 86_400), SECONDS)
FRACTIONS = st.floats(0, 1, exclude_max=True)
NOW = 1_700_000_000.0


def retry(attempts, policy, fraction=0.5, asked=None):
    failure = Failure("boom", asked)
    return after_queued_failure(
        failure, attempts=attempts, policy=policy, now=NOW, fraction=fraction
    )


@given(st.integers(1, 100), POLICIES, FRACTIONS, st.none() | SECONDS)
def test_it_is_dead_from_the_last_attempt_on_and_never_before(attempts, policy, fraction, asked):
    following = retry(attempts, policy, fraction, asked)
    assert isinstance(following, Dead) == (attempts >= policy.max_attempts)
    assert following.error == "boom"


@given(st.integers(1, 10_000), POLICIES, FRACTIONS)
@example(attempts=9999, policy=RetryPolicy(10_000, 86_400.0, 604_800.0), fraction=0.999)
def test_the_delay_is_between_nothing_and_the_bound_of_its_attempt(attempts, policy, fraction):
    policy = RetryPolicy(attempts + 1, policy.base_seconds, policy.cap_seconds)
    following = retry(attempts, policy, fraction)
    delay = following.at - NOW
    bound = policy.longest_delay(attempts)
    assert 0 <= delay <= bound + 1e-6
    assert bound <= policy.cap_seconds
    assert math.isfinite(following.at)


@given(st.integers(1, 200), POLICIES)
def test_the_bound_doubles_until_the_cap(attempts, policy):
    bound, following = policy.longest_delay(attempts), policy.longest_delay(attempts + 1)
    assert bound <= following
    if attempts < 60:
        assert following == min(policy.cap_seconds, 2 * bound) or bound == policy.cap_seconds


def test_the_bounds_of_the_defaults():
    policy = RetryPolicy(8, 1.0, 900.0)
    bounds = [policy.longest_delay(attempts) for attempts in range(1, 13)]
    assert bounds == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900]


@given(st.integers(1, 40), POLICIES, FRACTIONS, SECONDS)
def test_what_the_handler_asked_for_is_a_lower_bound(attempts, policy, fraction, asked):
    policy = RetryPolicy(attempts + 1, policy.base_seconds, policy.cap_seconds)
    delay = retry(attempts, policy, fraction, asked).at - NOW
    assert delay >= asked - 1e-6
    assert delay <= asked + policy.longest_delay(attempts) + 1e-6


@given(FRACTIONS)
def test_the_jitter_is_full(fraction):
    """The delay is the randomness times its bound, down to nothing: 4 * 2 * 2 seconds here."""
    delay = retry(3, RetryPolicy(8, 4.0, 900.0), fraction).at - NOW
    assert math.isclose(delay, 16 * fraction, abs_tol=1e-5)


@given(st.integers(1, 100), st.integers(1, 100))
def test_an_inline_failure_asks_the_sender_again_until_the_last_attempt(attempts, most):
    following = after_inline_failure(Failure("boom"), attempts=attempts, max_attempts=most)
    expected = Dead("boom") if attempts >= most else Retry(at=None, error="boom")
    assert following == expected


def test_an_error_is_described_by_its_class_and_message():
    assert describe_error(ValueError("bad")) == "ValueError: bad"
    assert describe_error(RuntimeError()) == "RuntimeError"
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("x", [KeyError("b")])])
    assert describe_error(group) == "ValueError: a; KeyError: 'b'"


@given(st.text(max_size=5000))
@example("x" * 5000)
@example("\udcff" * 2000)
def test_the_description_is_never_longer_than_what_is_kept(text):
    described = describe_error(ValueError(text))
    assert len(described) <= MAX_ERROR_LENGTH
    nested = ExceptionGroup("many", [ValueError(text)] * 5)
    assert len(describe_error(nested)) <= MAX_ERROR_LENGTH


class _SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_written_is_still_described():
    assert "_SilentError" in describe_error(_SilentError())
