"""Gaps of the upstream's deliveries, and the stored state of an account."""

import attrs
import pytest

from sdk_trio.reconcile.gap import (
    LEAST_RETRIES_SECONDS,
    OVERLAP_SECONDS,
    AccountState,
    CatchUpRun,
    ListEnd,
    ListProgress,
    found_disabled,
    found_enabled,
    may_reenable,
    state_name,
    until_now,
)
from sdk_trio.testing.simulation.sender import ATTEMPTS, BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS

NOW = 1_700_000_000.0
HOUR = 3600.0


def enabled(state, now=NOW):
    return found_enabled(state, now, lookback_seconds=24 * HOUR)


def test_the_first_contact_is_no_gap():
    assert enabled(AccountState()) == AccountState(contact=NOW)


def test_an_endpoint_that_was_disabled_at_the_first_contact_is_a_gap():
    state = enabled(found_disabled(AccountState(), NOW - HOUR))
    assert (state.run.since, state.run.until) == (NOW - 24 * HOUR, until_now(NOW))


def test_a_disabled_endpoint_is_a_gap_from_before_the_last_contact():
    state = found_disabled(AccountState(contact=NOW - 60), NOW - 30)
    assert found_disabled(state, NOW) == state
    state = enabled(state)
    run = CatchUpRun(NOW - 60 - OVERLAP_SECONDS, until_now(NOW))
    assert state == AccountState(contact=NOW, run=run)


@pytest.mark.parametrize(("pause", "is_gap"), [(60, False), (600, False), (601, True)])
def test_a_pause_that_is_longer_than_the_retries_is_a_gap(pause, is_gap):
    state = enabled(AccountState(contact=NOW - pause))
    assert (state.run is not None) is is_gap


def test_no_pause_outlasts_the_retries_of_the_sender_unnoticed():
    waits = (
        min(BACKOFF_SECONDS * 2.0**n, LONGEST_BACKOFF_SECONDS) / 2 for n in range(ATTEMPTS - 1)
    )
    assert sum(waits) > LEAST_RETRIES_SECONDS


def test_a_second_gap_begins_an_unfinished_run_again():
    run = CatchUpRun(NOW - 9 * HOUR, NOW - 8 * HOUR, lists=(), added=3)
    state = enabled(AccountState(contact=NOW - 2 * HOUR, run=run))
    assert state.run == CatchUpRun(NOW - 9 * HOUR, until_now(NOW))
    assert enabled(state, NOW + 60).run == state.run  # no gap: it goes on


def test_a_clock_that_was_set_back_is_no_gap():
    state = enabled(AccountState(contact=NOW + HOUR))
    assert state == AccountState(contact=NOW)


def test_a_gap_before_which_the_clock_was_set_back_is_as_long_as_the_lookback():
    state = found_disabled(AccountState(contact=NOW + 4 * HOUR), NOW + 4 * HOUR)
    run = CatchUpRun(NOW - 24 * HOUR, until_now(NOW))
    assert enabled(state) == AccountState(contact=NOW, run=run)


def test_the_endpoint_is_enabled_at_most_once_an_hour():
    assert may_reenable(AccountState(), NOW)
    assert not may_reenable(AccountState(reenabled_at=NOW - HOUR + 1), NOW)
    assert may_reenable(AccountState(reenabled_at=NOW - HOUR), NOW)
    # By another host, whose clock is ahead.
    assert not may_reenable(AccountState(reenabled_at=NOW + 5), NOW)
    # The clock was set back.
    assert may_reenable(AccountState(reenabled_at=NOW + HOUR), NOW)


def test_a_state_is_read_as_it_was_stored():
    orders = ListProgress("orders", 3, 250, 1, ListEnd(3, 49, "ord_1"))
    lists = (orders, ListProgress("refunds"))
    run = CatchUpRun(NOW, NOW + 1, "order.*", lists, 200, 20, 10, 1)
    for state in (AccountState(), AccountState(NOW, NOW, NOW, run)):
        assert AccountState.from_text(state.as_text()) == state


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": 1}', '{"run": null, "contact": NaN}'])
def test_another_text_is_no_state(text):
    with pytest.raises(ValueError, match="not a state"):
        AccountState.from_text(text)


def test_each_account_has_its_own_state():
    assert (
        len({state_name(None), state_name("a"), state_name(None, "x"), state_name("a", "x")}) == 4
    )


def test_a_list_whose_records_moved_is_shifted():
    first, last = ListProgress("orders", 1, end=ListEnd(2, 1, "b")), ["a", "b", "c"]
    assert not first.is_shifted(["x"], 5)
    assert not attrs.evolve(first, page=2, total=5).is_shifted(last, 6)
    assert not attrs.evolve(first, page=2).is_shifted(last, None)
    # One record disappeared, and another one was created.
    assert attrs.evolve(first, page=2, total=5).is_shifted(["b", "c", "d"], 5)
    assert attrs.evolve(first, page=2).is_shifted(["b"], None)
    # The number of records shows it earlier.
    assert attrs.evolve(first, total=6).is_shifted(["x"], 5)


def test_a_list_is_begun_again():
    run = CatchUpRun(1.0, 2.0).begin(["orders", "refunds"]).after_page(250, has_next=True)
    assert run.current == ListProgress("orders", 2, 250)
    run = run.restart_current()
    assert run.current == ListProgress("orders", restarts=1)
    run = run.with_end(ListEnd(1, 0, "a")).restart_current()
    assert run.lists == (ListProgress("orders", restarts=2), ListProgress("refunds"))
