"""The outcome of a delivery after a run failed."""

import asyncio
import math
import os
import signal
import sys

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.base.foreign_errors import is_interrupt
from sdk_trio.base.throttle import longest_wait
from sdk_trio.records.deliveries import Dead, Retry
from sdk_trio.webhooks.outcomes import (
    MAX_ERROR_LENGTH,
    RUNS_FOR_PROOF,
    DeliveryRetries,
    Failure,
    after_inline_failure,
    after_process_ends,
    after_queued_failure,
    describe_error,
    divide,
    is_caused_by,
    must_run_alone,
    place_of,
    traceback_of,
)

SECONDS = st.floats(0, 604_800)
POLICIES = st.builds(DeliveryRetries, st.integers(1, 50), st.floats(0, 86_400), SECONDS)
FRACTIONS = st.floats(0, 1, exclude_max=True)
NOW = 1_700_000_000.0


def longest_delay(attempts, policy):
    return longest_wait(attempts, base_seconds=policy.base_seconds, cap_seconds=policy.cap_seconds)


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
@example(attempts=9999, policy=DeliveryRetries(10_000, 86_400.0, 604_800.0), fraction=0.999)
def test_the_delay_is_between_nothing_and_the_bound_of_its_attempt(attempts, policy, fraction):
    policy = DeliveryRetries(attempts + 1, policy.base_seconds, policy.cap_seconds)
    following = retry(attempts, policy, fraction)
    delay = following.at - NOW
    bound = longest_delay(attempts, policy)
    assert 0 <= delay <= bound + 1e-6
    assert bound <= policy.cap_seconds
    assert math.isfinite(following.at)


@given(st.integers(1, 40), POLICIES, FRACTIONS, SECONDS)
def test_the_requested_delay_is_a_lower_bound(attempts, policy, fraction, asked):
    policy = DeliveryRetries(attempts + 1, policy.base_seconds, policy.cap_seconds)
    delay = retry(attempts, policy, fraction, asked).at - NOW
    assert delay >= asked - 1e-6
    assert delay <= asked + longest_delay(attempts, policy) + 1e-6


@given(FRACTIONS)
def test_the_jitter_is_full(fraction):
    """The delay is the randomness times its bound, down to nothing: 4 * 2 * 2 seconds here."""
    delay = retry(3, DeliveryRetries(8, 4.0, 900.0), fraction).at - NOW
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


def test_a_handler_that_needs_asyncio_gets_a_pointer_to_it():
    with pytest.raises(RuntimeError) as caught:
        asyncio.get_running_loop()
    assert "asyncio=True runs a handler on the application's loop" in describe_error(caught.value)


@given(st.text(max_size=5000))
@example("x" * 5000)
@example("\udcff" * 2000)
def test_the_description_is_never_longer_than_its_limit(text):
    described = describe_error(ValueError(text))
    assert len(described) <= MAX_ERROR_LENGTH
    nested = ExceptionGroup("many", [ValueError(text)] * 5)
    assert len(describe_error(nested)) <= MAX_ERROR_LENGTH


class _SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_written_is_still_described():
    assert "_SilentError" in describe_error(_SilentError())


ENDS = st.integers(1, 20)


@given(ends=ENDS, attempts=st.integers(1, 40), most=st.integers(1, 20), alone=st.booleans())
def test_an_event_that_ends_the_process_runs_a_bounded_number_of_times(ends, attempts, most, alone):
    dead = after_process_ends(ends, ran_alone=alone, attempts=attempts, max_attempts=most)
    if attempts < most:
        assert dead is None, "it has runs left"
    elif alone or attempts >= most + RUNS_FOR_PROOF:
        assert dead is not None
        assert dead.error.startswith(f"the process ended {ends} time")
        assert dead.recorded
    else:
        assert dead is None
        assert must_run_alone(ends, attempts=attempts, max_attempts=most), "else no event is named"


@given(attempts=st.integers(0, 40), most=st.integers(1, 20), alone=st.booleans())
def test_an_event_in_whose_runs_no_process_ended_is_no_suspect(attempts, most, alone):
    assert after_process_ends(0, ran_alone=alone, attempts=attempts, max_attempts=most) is None
    assert not must_run_alone(0, attempts=attempts, max_attempts=most)


@given(most=st.integers(1, 20), crowd=st.booleans(), counted=st.booleans())
def test_the_worst_number_of_runs_of_one_that_always_ends_the_process(most, crowd, counted):
    """Played through from the first run on; ``crowd``: others run whenever that is allowed."""
    runs = attempts = ends = 0
    alone = False
    while after_process_ends(ends, ran_alone=alone, attempts=attempts, max_attempts=most) is None:
        isolated = must_run_alone(ends, attempts=attempts, max_attempts=most)
        runs += 1
        if runs == 1 and not counted:
            continue  # it ended before its start was synced: it is unknown
        attempts += 1
        ends += 1
        alone = isolated or not crowd
    uncounted = not counted
    assert runs == most + uncounted + (crowd and most == 1)


def test_the_place_is_the_innermost_line_of_the_users_code(tmp_path):
    (tmp_path / "users_module.py").write_text(
        "import json\n\n\ndef parse(text):\n    return json.loads(text)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import users_module

        with pytest.raises(ValueError, match="Expecting") as caught:
            users_module.parse("{")
    finally:
        sys.path.remove(str(tmp_path))
    assert place_of(caught.value) == f"{tmp_path / 'users_module.py'}:5 in parse"
    both = BaseExceptionGroup("both", [caught.value, SystemExit()])
    assert place_of(both) == place_of(caught.value)
    assert place_of(ValueError("never raised")) is None


def test_a_traceback_is_masked_and_bounded():
    with pytest.raises(ValueError, match="a secret") as caught:
        raise ValueError("a secret-value")
    text = traceback_of(caught.value, ["secret-value"])
    assert text.startswith("Traceback")
    assert "raise ValueError" in text
    assert "a secret-value" not in text.rpartition("ValueError:")[2]


def test_only_a_signal_is_an_interrupt():
    def is_own(error):
        try:
            raise error
        except BaseException as raised:
            return not is_interrupt(raised)

    assert is_own(KeyboardInterrupt())
    assert is_own(ValueError())

    def press_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass  # it comes between two steps of the interpreter

    async def press():
        with pytest.raises(KeyboardInterrupt) as caught:
            press_ctrl_c()
        return is_interrupt(caught.value)

    # A process that a shell has started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert trio.run(press)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_group_is_divided_and_what_an_error_comes_of_is_found_in_it():
    ours, own = divide(
        BaseExceptionGroup("both", [KeyError(1), SystemExit(2)]), lambda e: isinstance(e, KeyError)
    )
    assert (type(ours), type(own)) == (KeyError, SystemExit)
    assert divide(KeyError(), lambda e: True)[1] is None

    def fail():
        try:
            raise KeyError
        except KeyError:
            raise ValueError from None

    with pytest.raises(ValueError, match=r"^$") as caught:
        fail()
    caught.value.__cause__ = caught.value  # a circle ends, too
    assert is_caused_by(ExceptionGroup("one", [caught.value]), KeyError)
    assert not is_caused_by(caught.value, OSError)
