"""Waits that double, up to a cap, and the jitter that spreads them."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.base.throttle import jittered_wait, longest_wait

FRACTIONS = st.floats(0, 1)
BASES = st.floats(0, 86_400)
CAPS = st.floats(0, 604_800)


@pytest.mark.parametrize(
    ("base", "cap", "waits"),
    [
        (1.0, 10.0, [1, 2, 4, 8, 10, 10]),
        (0.5, 8.0, [0.5, 1, 2, 4, 8, 8]),
        (1.0, 900.0, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900]),
        (600.0, math.inf, [600, 1200, 2400]),
    ],
)
def test_waits_double_up_to_the_cap(base, cap, waits):
    failures = range(1, len(waits) + 1)
    assert [longest_wait(n, base_seconds=base, cap_seconds=cap) for n in failures] == waits


@given(st.integers(1, 200), BASES, CAPS)
def test_a_wait_is_the_double_of_the_one_before_or_the_cap(failures, base, cap):
    wait, following = (
        longest_wait(n, base_seconds=base, cap_seconds=cap) for n in (failures, failures + 1)
    )
    assert wait <= following <= cap
    if failures < 60:
        assert following == min(cap, 2 * wait)


@given(st.integers(1, 10**9), FRACTIONS, BASES, CAPS)
@example(10**9, 1.0, 86_400.0, 604_800.0)
def test_a_wait_is_the_randomness_times_its_bound_however_many_failures(
    failures, fraction, base, cap
):
    bound = longest_wait(failures, base_seconds=base, cap_seconds=cap)
    assert math.isfinite(longest_wait(failures, base_seconds=base))
    wait = jittered_wait(failures, fraction, base_seconds=base, cap_seconds=cap)
    assert wait == fraction * bound
    assert 0 <= wait <= cap


def test_the_jitter_is_drawn_from_the_whole_interval():
    waits = [
        jittered_wait(3, fraction, base_seconds=0.5, cap_seconds=8.0) for fraction in (0, 0.5, 1)
    ]
    assert waits == [0, 1, 2]
