"""The rate limit of one source, under a clock that the tests turn."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.webhooks.screen import MAX_OFFENDERS, MAX_SOURCES, RateLimit

NOW = 1_700_000_000.0
A, B = "203.0.113.7", "198.51.100.66"


def spend(limit: RateLimit, address: str | None, now: float = NOW) -> int:
    """Use up what ``address`` has left and be refused once; return how many were admitted."""
    admitted = 0
    while limit.admit(address, now) is None:
        admitted += 1
    return admitted


@pytest.mark.parametrize("per_minute", [1, 3, 7, 60, 600])
def test_a_quiet_source_may_send_a_minute_s_worth_at_once(per_minute: int) -> None:
    limit = RateLimit(per_minute)
    assert spend(limit, A) == per_minute
    assert spend(limit, A, NOW + 3600) == per_minute


@pytest.mark.parametrize("per_minute", [1, 3, 7, 60, 600])
def test_a_client_that_waits_as_requested_is_admitted(per_minute: int) -> None:
    limit = RateLimit(per_minute)
    now = NOW
    spend(limit, A, now)
    for _ in range(20):
        wait = limit.admit(A, now)
        assert wait is not None
        assert 0 < wait <= 60 / per_minute + 0.002
        # A millisecond of the wait is there for rounding.
        assert limit.admit(A, now + wait - 0.0015) is not None
        now += wait
        assert limit.admit(A, now) is None


def test_rounding_causes_no_refusal_at_a_high_rate() -> None:
    limit = RateLimit(100_000)
    now = NOW
    for _ in range(1000):
        while (wait := limit.admit(A, now)) is None:
            pass
        now += wait
        assert limit.admit(A, now) is None


def test_a_refused_delivery_does_not_prolong_the_wait() -> None:
    limit = RateLimit(6)
    spend(limit, A)
    for second in range(10):
        assert limit.admit(A, NOW + second) is not None
    assert limit.admit(A, NOW + 10.01) is None


def test_sources_do_not_share_a_limit() -> None:
    limit = RateLimit(2)
    spend(limit, A)
    assert spend(limit, B) == 2
    assert spend(limit, None) == 2
    assert limit.admit(A, NOW) is not None


def test_an_ipv6_subscriber_is_one_source() -> None:
    limit = RateLimit(2)
    assert limit.admit("2001:db8::1", NOW) is None
    assert limit.admit("2001:db8:0:0:ffff::2", NOW) is None
    assert limit.admit("2001:db8::3", NOW) is not None
    assert limit.admit("2001:db8:0:1::3", NOW) is None


def test_ipv4_in_ipv6_is_that_ipv4_source() -> None:
    limit = RateLimit(1)
    assert limit.admit(A, NOW) is None
    assert limit.admit(f"::ffff:{A}", NOW) is not None
    assert limit.admit(f"::ffff:{B}", NOW) is None


@pytest.mark.parametrize("address", ["", ":", "testclient", "unix:/run/x", "fe80::1%eth0"])
def test_any_text_is_a_source(address: str) -> None:
    assert spend(RateLimit(2), address) == 2


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    limit = RateLimit(60)
    spend(limit, A)
    assert limit.admit(A, NOW - 3600) is not None
    assert limit.admit(A, NOW - 3600 + 1.01) is None


def test_below_one_a_minute_is_refused() -> None:
    for per_minute in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            RateLimit(per_minute)


@given(
    per_minute=st.integers(1, 200),
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
@example(per_minute=7, gaps=[0.0] * 20)
def test_no_window_admits_more_than_the_burst_and_its_share(
    per_minute: int, gaps: list[float]
) -> None:
    limit = RateLimit(per_minute)
    now = NOW
    admitted: list[float] = []
    for gap in gaps:
        now += gap
        admitted += [now] * sum(limit.admit(A, now) is None for _ in range(5))
    for first, start in enumerate(admitted):
        for last in range(first, len(admitted), 7):
            allowed = per_minute + (admitted[last] - start) * per_minute / 60
            assert last - first + 1 <= allowed + 1e-3


@given(st.integers(1, 100), st.lists(st.floats(1, 5), min_size=1, max_size=40))
def test_a_client_within_the_rate_is_never_refused(per_minute: int, factors: list[float]) -> None:
    limit = RateLimit(per_minute)
    now = NOW
    for _ in range(per_minute - 1):
        limit.admit(A, now)
    for factor in factors:
        assert limit.admit(A, now) is None
        now += factor * 60 / per_minute + 0.001


def test_memory_is_bounded() -> None:
    limit = RateLimit(1)
    for number in range(MAX_SOURCES + 5000):
        limit.admit(f"fresh-{number}", NOW)
        if number % 3 == 0:
            limit.admit(f"fresh-{number}", NOW)
    assert len(limit) == MAX_SOURCES


def test_a_flood_of_addresses_does_not_free_an_offender() -> None:
    limit = RateLimit(2)
    spend(limit, A)
    for number in range(3 * MAX_SOURCES):
        limit.admit(f"flood-{number}", NOW + 1)
    assert limit.admit(A, NOW + 2) is not None


def test_a_busy_offender_outlasts_a_flood_of_offenders() -> None:
    limit = RateLimit(1)
    spend(limit, A)
    for number in range(2 * MAX_OFFENDERS):
        spend(limit, f"offender-{number}", NOW + 1)
        if number % 500 == 0:
            assert limit.admit(A, NOW + 1) is not None
    assert limit.admit(A, NOW + 1) is not None


def test_the_source_seen_the_longest_ago_is_forgotten_first() -> None:
    limit = RateLimit(2)
    for address in (A, B, A):
        assert limit.admit(address, NOW) is None
    for number in range(MAX_SOURCES - MAX_OFFENDERS - 1):
        limit.admit(f"fresh-{number}", NOW)
    assert limit.admit(A, NOW) is not None
    assert spend(limit, B) == 2


def test_an_offender_that_was_quiet_for_a_minute_is_an_offender_no_more() -> None:
    limit = RateLimit(2)
    spend(limit, A)
    assert limit.admit(A, NOW + 61) is None
    # Among the fresh ones again, so a flood makes it forgotten.
    for number in range(MAX_SOURCES):
        limit.admit(f"flood-{number}", NOW + 61)
    assert spend(limit, A, NOW + 61) == 2
