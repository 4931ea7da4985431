"""When a configured secret is reported as unused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.webhooks.secret_usage import DAY_SECONDS, SecretUsage

HOUR = 3600.0


def test_matches_are_counted_for_each_secret() -> None:
    usage = SecretUsage(3, 0.0)
    for index in (0, 2, 2):
        usage.record(index, 1.0)
    assert usage.matches == (1, 0, 2)
    with pytest.raises(IndexError):
        usage.record(3, 1.0)


def test_a_secret_idle_for_a_day_while_another_is_used_is_reported() -> None:
    usage = SecretUsage(2, 0.0)
    usage.record(0, 0.0)
    usage.record(1, 5 * HOUR)
    usage.record(0, 28 * HOUR)
    assert usage.unused(29 * HOUR - 1) == []
    assert usage.unused(29 * HOUR) == [1]


def test_a_secret_that_never_matched_has_a_day_from_the_start() -> None:
    usage = SecretUsage(2, 10 * HOUR)
    usage.record(0, 33 * HOUR)
    assert usage.unused(34 * HOUR - 1) == []
    assert usage.unused(34 * HOUR) == [1]


def test_at_most_once_a_day_for_each_secret() -> None:
    usage = SecretUsage(3, 0.0)
    for hour in range(24 * 4):
        usage.record(0, hour * HOUR)
    usage.record(2, 1 * HOUR)
    reported = [(hour, usage.unused(hour * HOUR)) for hour in range(96, 121)]
    usage.record(0, 119 * HOUR)
    assert [(hour, found) for hour, found in reported if found] == [(96, [1, 2])]
    assert usage.unused(120 * HOUR) == [1, 2]


def test_without_deliveries_nothing_is_reported() -> None:
    usage = SecretUsage(2, 0.0)
    assert usage.unused(100 * DAY_SECONDS) == []
    usage.record(0, 100 * DAY_SECONDS)
    assert usage.unused(101 * DAY_SECONDS) == []


def test_a_secret_in_use_again_is_reported_no_more() -> None:
    usage = SecretUsage(2, 0.0)
    usage.record(0, 24 * HOUR)
    assert usage.unused(24 * HOUR) == [1]
    usage.record(1, 25 * HOUR)
    usage.record(0, 48 * HOUR)
    assert usage.unused(48.5 * HOUR) == []


def test_the_only_secret_is_never_unused() -> None:
    usage = SecretUsage(1, 0.0)
    usage.record(0, 0.0)
    assert usage.unused(DAY_SECONDS) == []
    assert SecretUsage(0, 0.0).unused(DAY_SECONDS) == []


steps = st.tuples(
    st.sampled_from(["match", "ask"]), st.integers(0, 2), st.floats(0, 2 * DAY_SECONDS)
)


@given(st.lists(steps, max_size=60))
def test_reports_are_true_and_rare(history: list[tuple[str, int, float]]) -> None:
    now = 0.0
    usage = SecretUsage(3, now)
    last_match = dict.fromkeys(range(3), 0.0)
    matched: set[int] = set()
    last_report: dict[int, float] = {}
    for step, index, gap in history:
        now += gap
        if step == "match":
            usage.record(index, now)
            last_match[index] = now
            matched.add(index)
            continue
        for unused in usage.unused(now):
            assert now - last_match[unused] >= DAY_SECONDS
            assert any(now - last_match[other] < DAY_SECONDS for other in matched - {unused})
            assert unused not in last_report or now - last_report[unused] >= DAY_SECONDS
            last_report[unused] = now


def test_a_rotation_keeps_the_counts_of_the_secrets_that_stay():
    usage = SecretUsage(2, now=0.0)
    for _ in range(3):
        usage.record(1, 10.0)
    usage.rearrange([None, 1], now=1000.0)
    assert usage.matches == (0, 3)
    # The new one is not called unused before it had its day; the other one has matched.
    assert usage.unused(1000.0) == []
    usage.record(1, DAY_SECONDS + 500.0)
    assert usage.unused(DAY_SECONDS + 999.0) == []
    assert usage.unused(DAY_SECONDS + 1000.0) == [0]
    usage.rearrange([1], now=DAY_SECONDS + 2000.0)
    assert usage.matches == (4,)
    usage.record(0, DAY_SECONDS + 2001.0)
    assert usage.matches == (5,)
