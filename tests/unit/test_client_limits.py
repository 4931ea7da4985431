"""The retry budget and the rate limiter, each under any order of events."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client.layers.admission import LimitPolicy, RateLimiter
from sdk_trio.client.layers.retry import BudgetPolicy, RetryBudget


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


waits = st.floats(0, 100).map(lambda seconds: ("wait", seconds))
budget_events = st.lists(
    st.sampled_from([("deposit", 0), ("withdraw", 0), ("withdraw", 0)]) | waits
)


@given(budget_events)
def test_spending_never_exceeds_the_start_the_deposits_and_the_floor(events):
    clock = Clock()
    policy = BudgetPolicy()
    budget = RetryBudget(policy, clock=clock)
    spent = deposits = 0
    for event, seconds in events:
        if event == "wait":
            clock.now += seconds
        elif event == "deposit":
            budget.deposit()
            deposits += 1
        elif budget.withdraw() is not None:
            spent += 1
        floor = policy.floor_per_second * (clock.now - 50.0)
        assert spent <= policy.reserve + policy.deposit_per_call * deposits + floor + 1e-6
        assert 0 <= budget.balance <= policy.maximum


def test_an_empty_budget_fills_by_time_up_to_its_reserve():
    clock = Clock()
    budget = RetryBudget(BudgetPolicy(), clock=clock)
    while budget.withdraw() is not None:
        pass
    assert budget.balance < 1
    clock.now += 0.5
    assert budget.withdraw() == 1
    assert budget.withdraw() is None
    clock.now += 1e6
    assert budget.balance == BudgetPolicy().reserve


def test_first_attempts_save_up_beyond_the_reserve_and_time_does_not_take_it_away():
    clock = Clock()
    budget = RetryBudget(BudgetPolicy(), clock=clock)
    for _ in range(10_000):
        budget.deposit()
    clock.now += 1e6
    assert budget.balance == BudgetPolicy().maximum


def test_a_refund_restores_what_a_withdrawal_took():
    budget = RetryBudget(BudgetPolicy(), clock=Clock())
    before = budget.balance
    assert budget.withdraw() == 1
    budget.refund()
    assert budget.balance == before


@given(
    per_minute=st.integers(1, 6000),
    burst=st.integers(1, 20),
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_no_window_holds_more_departures_than_burst_and_rate_allow(per_minute, burst, gaps):
    clock = Clock()
    limiter = RateLimiter(LimitPolicy(per_minute, burst), clock=clock)
    departures = []
    for gap in gaps:
        clock.now += gap
        departures.append(limiter.book().due)
    assert departures == sorted(departures)
    for i, first in enumerate(departures):
        for j in range(i, len(departures)):
            allowed = burst + (departures[j] - first) * per_minute / 60
            assert j - i + 1 <= allowed + 1e-6


def test_an_idle_bucket_lets_a_burst_leave_at_once():
    limiter = RateLimiter(LimitPolicy(60, burst=3), clock=Clock())
    assert [limiter.book().due for _ in range(5)] == pytest.approx([50, 50, 50, 51, 52])


def test_a_place_given_back_moves_later_ones_up():
    limiter = RateLimiter(LimitPolicy(60, burst=1), clock=Clock())
    assert limiter.book().due == 50
    assert limiter.book().due == 51
    limiter.give_back()
    assert limiter.book().due == 51
    limiter.give_back()
    limiter.give_back()
    assert limiter.backlog == 0


def test_booking_now_takes_a_place_only_when_none_has_to_wait():
    clock = Clock()
    limiter = RateLimiter(LimitPolicy(60, burst=2), clock=clock)
    assert limiter.book_now()
    assert limiter.book_now()
    assert not limiter.book_now()
    assert limiter.backlog == 2
    clock.now += 1
    assert limiter.book_now()


def test_without_a_rate_only_the_gate_holds_back():
    clock = Clock()
    limiter = RateLimiter(LimitPolicy(), clock=clock)
    assert {limiter.book().due for _ in range(100)} == {50.0}
    assert limiter.backlog == 0
    limiter.pause(10)
    assert not limiter.book_now()
    clock.now += 10
    assert limiter.book_now()


@given(st.lists(st.floats(0, 1000), min_size=1))
def test_the_gate_opens_no_earlier_than_the_latest_that_was_asked_for(seconds):
    clock = Clock()
    limiter = RateLimiter(LimitPolicy(), clock=clock)
    assert limiter.paused_until == -math.inf
    asked = []
    for each in seconds:
        limiter.pause(each)
        asked.append(clock.now + each)
        clock.now += 1
    assert limiter.paused_until == max(asked)
    clock.now = max(asked)
    assert limiter.is_idle


RATES = st.none() | st.integers(1, 6000)


@given(
    before=RATES,
    after=RATES,
    burst=st.integers(1, 20),
    gaps=st.lists(st.floats(0, 5), max_size=30),
    later=st.lists(st.floats(0, 5), max_size=30),
)
def test_after_a_change_of_rate_the_order_stays_and_the_new_rate_is_kept(
    before, after, burst, gaps, later
):
    clock = Clock()
    limiter = RateLimiter(LimitPolicy(before, burst), clock=clock)
    places = []
    for gap in gaps:
        clock.now += gap
        for place in [place for place in places if place.due <= clock.now]:
            limiter.leave(place)
        places.append(limiter.book())
    changed_at, backlog = clock.now, limiter.backlog
    left = sum(place.due <= changed_at for place in places)
    gone = [place.due for place in places[:left]]
    limiter.change(LimitPolicy(after, burst))
    assert [place.due for place in places[:left]] == gone, "who may leave is not called back"
    if before is not None and after is not None:
        # No place is lost, and none is given twice.
        assert limiter.backlog == pytest.approx(backlog, abs=1e-6)
    for gap in later:
        clock.now += gap
        places.append(limiter.book())
    departures = [place.due for place in places]
    assert departures == sorted(departures)
    waiting = departures[left:]
    if after is None:
        assert all(due <= changed_at for due in waiting[: len(gaps) - left])
        return
    for i, first in enumerate(waiting):
        for j in range(i, len(waiting)):
            allowed = burst + (waiting[j] - first) * after / 60
            assert j - i + 1 <= allowed + 1e-6


def test_an_awaited_rate_slot_moves_with_the_rate():
    clock = Clock()
    limiter = RateLimiter(LimitPolicy(60, burst=1), clock=clock)
    places = [limiter.book() for _ in range(4)]
    clock.now += 0.5
    limiter.change(LimitPolicy(120, burst=1))
    assert [place.due for place in places] == pytest.approx([50, 50.75, 51.25, 51.75])
    limiter.leave(places[1])
    limiter.give_back()
    limiter.change(LimitPolicy(60, burst=1))
    assert [place.due for place in places[2:]] == pytest.approx([52, 53])
    assert limiter.book().due == pytest.approx(53), "the one that was given back is free"
    limiter.change(LimitPolicy(None))
    assert [place.due for place in places[2:]] == [50.5, 50.5]


def test_an_incident_is_paid_for_once_and_the_next_one_only_later():
    clock = Clock()
    policy = BudgetPolicy()
    budget = RetryBudget(policy, clock=clock)
    first, second, third = object(), object(), object()
    assert [budget.withdraw(first) for _ in range(50)] == [1.0] + [0.0] * 49
    budget.refund(0.0)
    assert budget.balance == policy.reserve - 1
    # Further failures follow at once: that is an outage, and each retry costs.
    assert [budget.withdraw(second) for _ in range(50)] == [1.0] * 19 + [None] * 31
    clock.now += policy.incident_seconds
    assert [budget.withdraw(third) for _ in range(3)] == [1.0, 0.0, 0.0]
