"""The circuit breaker: examples, and a machine that compares it with a model made otherwise."""

import gc
import weakref

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from sdk_trio.base.breaker import (
    PROBE_HINT_SECONDS,
    AttemptOutcome,
    BreakerPolicy,
    BreakerState,
    CircuitBreaker,
    CircuitRefusal,
    Permit,
)
from sdk_trio.net.messages import Incident

OK, FAIL, NEUTRAL = AttemptOutcome.SUCCESS, AttemptOutcome.FAILURE, AttemptOutcome.NEUTRAL


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def breaker(threshold=3, sampling=30.0, break_seconds=15.0, on_change=None):
    clock = Clock()
    policy = BreakerPolicy(threshold, sampling, break_seconds)
    return CircuitBreaker(policy, clock=clock, on_change=on_change), clock


def attempt(circuit, outcome):
    permit = circuit.acquire()
    assert isinstance(permit, Permit)
    circuit.report(permit, outcome)


def opened(**policy):
    circuit, clock = breaker(**policy)
    for _ in range(circuit.policy.failure_threshold):
        attempt(circuit, FAIL)
    return circuit, clock


def test_opens_on_the_last_of_enough_failures_in_a_row():
    circuit, _ = breaker(threshold=3)
    attempt(circuit, FAIL)
    attempt(circuit, FAIL)
    assert circuit.state is BreakerState.CLOSED
    attempt(circuit, FAIL)
    assert circuit.state is BreakerState.OPEN
    assert circuit.acquire() == CircuitRefusal(15.0)


def test_one_success_ends_a_row_of_failures():
    circuit, _ = breaker(threshold=3)
    for outcome in (FAIL, FAIL, OK, FAIL, FAIL):
        attempt(circuit, outcome)
    assert circuit.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("spread", "state"), [(30.0, BreakerState.OPEN), (30.5, BreakerState.CLOSED)]
)
def test_failures_count_only_within_the_window(spread, state):
    circuit, clock = breaker(threshold=3, sampling=30.0)
    attempt(circuit, FAIL)
    clock.now += spread
    attempt(circuit, FAIL)
    attempt(circuit, FAIL)
    assert circuit.state is state


def test_the_window_slides_over_a_long_row_of_failures():
    circuit, clock = breaker(threshold=3, sampling=30.0)
    for _ in range(4):
        clock.now += 20.0
        attempt(circuit, FAIL)
    assert circuit.state is BreakerState.CLOSED
    attempt(circuit, FAIL)
    assert circuit.state is BreakerState.OPEN


def test_after_the_break_one_probe_passes_and_its_success_closes():
    circuit, clock = opened()
    clock.now += 15.0
    assert circuit.state is BreakerState.PROBING
    probe = circuit.acquire()
    assert isinstance(probe, Permit)
    assert circuit.acquire() == CircuitRefusal(PROBE_HINT_SECONDS)
    circuit.report(probe, OK)
    assert circuit.state is BreakerState.CLOSED


def test_a_failed_probe_opens_for_another_break():
    circuit, clock = opened()
    clock.now += 20.0
    attempt(circuit, FAIL)
    assert circuit.acquire() == CircuitRefusal(15.0)


def test_a_cancelled_probe_frees_its_slot():
    circuit, clock = opened()
    clock.now += 15.0
    abandoned = circuit.acquire()
    circuit.report(abandoned, NEUTRAL)
    assert circuit.state is BreakerState.PROBING
    probe = circuit.acquire()
    assert isinstance(probe, Permit)
    circuit.report(abandoned, FAIL)
    circuit.report(abandoned, OK)
    assert circuit.state is BreakerState.PROBING
    circuit.report(probe, OK)
    assert circuit.state is BreakerState.CLOSED


def test_results_of_requests_before_the_outage_do_not_count_after_it():
    circuit, clock = breaker(threshold=1)
    early = [circuit.acquire() for _ in range(3)]
    attempt(circuit, FAIL)
    circuit.report(early[0], OK)
    assert circuit.state is BreakerState.OPEN
    clock.now += 15.0
    probe = circuit.acquire()
    circuit.report(early[1], OK)
    assert circuit.state is BreakerState.PROBING
    circuit.report(probe, OK)
    circuit.report(early[2], FAIL)
    assert circuit.state is BreakerState.CLOSED


def test_isolated_by_hand_until_closed_by_hand():
    circuit, clock = breaker()
    circuit.isolate()
    clock.now += 1e9
    assert circuit.state is BreakerState.ISOLATED
    assert circuit.acquire() == CircuitRefusal(None)
    circuit.close()
    attempt(circuit, OK)
    assert circuit.state is BreakerState.CLOSED


def test_closing_by_hand_forgets_failures():
    circuit, _ = breaker(threshold=2)
    attempt(circuit, FAIL)
    circuit.close()
    attempt(circuit, FAIL)
    assert circuit.state is BreakerState.CLOSED


def test_each_change_is_reported_once():
    reported = []
    circuit, clock = breaker(threshold=1, on_change=reported.append)
    attempt(circuit, FAIL)
    clock.now += 15.0
    circuit.report(circuit.acquire(), NEUTRAL)
    attempt(circuit, OK)
    circuit.isolate()
    circuit.isolate()
    circuit.close()
    assert reported == ["open", "probing", "closed", "isolated", "closed"]


def test_an_incident_is_one_failure_however_many_attempts_it_befell():
    circuit, _ = breaker(threshold=3)
    incident = Incident()
    riders = [circuit.acquire() for _ in range(20)]
    for permit in riders:
        circuit.report(permit, FAIL, incident)
    assert circuit.state is BreakerState.CLOSED
    attempt(circuit, FAIL)
    assert circuit.state is BreakerState.CLOSED
    circuit.report(circuit.acquire(), FAIL, Incident())
    assert circuit.state is BreakerState.OPEN


def test_an_incident_reported_late_is_not_a_second_failure():
    circuit, _ = breaker(threshold=2)
    incident = Incident()
    early, late = circuit.acquire(), circuit.acquire()
    circuit.report(early, FAIL, incident)
    attempt(circuit, OK)
    attempt(circuit, FAIL)
    circuit.report(late, FAIL, incident)
    assert circuit.state is BreakerState.CLOSED


def test_a_report_of_an_older_generation_does_not_count_an_incident():
    circuit, _ = breaker(threshold=1)
    incident = Incident()
    early = circuit.acquire()
    circuit.close()
    circuit.report(early, FAIL, incident)
    assert circuit.state is BreakerState.CLOSED
    circuit.report(circuit.acquire(), FAIL, incident)
    assert circuit.state is BreakerState.OPEN


def test_a_breaker_keeps_no_incident_alive():
    circuit, _ = breaker()
    incident = Incident()
    reference = weakref.ref(incident)
    circuit.report(circuit.acquire(), FAIL, incident)
    del incident
    gc.collect()
    assert reference() is None


class BreakerMachine(RuleBasedStateMachine):
    """Any order of permits, reports, waits and hands against a model that keeps all history.

    Reports name incidents, often the same one.

    The model keeps all reports since the last change of state in a list, and applies the
    specification to the list.
    """

    THRESHOLD, SAMPLING, BREAK = 3, 30.0, 15.0
    INCIDENTS = (None, *(Incident() for _ in range(4)))
    permits = Bundle("permits")

    def __init__(self):
        super().__init__()
        self.circuit, self.clock = breaker(self.THRESHOLD, self.SAMPLING, self.BREAK)
        self.chapter = 0
        self.story = []
        self.state = BreakerState.CLOSED
        self.opened_at = None
        self.probe = None
        self.reported = set()

    def begin(self, state):
        self.chapter += 1
        self.story = []
        self.state = state
        self.opened_at = self.clock.now if state is BreakerState.OPEN else None
        self.probe = None

    @rule(target=permits)
    def acquire(self):
        given = self.circuit.acquire()
        if self.state is BreakerState.OPEN and self.clock.now >= self.opened_at + self.BREAK:
            self.begin(BreakerState.PROBING)
        expected = self.state is BreakerState.CLOSED or (
            self.state is BreakerState.PROBING and self.probe is None
        )
        assert isinstance(given, Permit) is expected
        token = (self.chapter, object())
        if self.state is BreakerState.PROBING and expected:
            self.probe = token
        if self.state is BreakerState.OPEN:
            assert given.retry_after == pytest.approx(self.opened_at + self.BREAK - self.clock.now)
        return (given, token)

    @rule(
        held=consumes(permits),
        outcome=st.sampled_from([OK, FAIL, FAIL, NEUTRAL]),
        incident=st.sampled_from(INCIDENTS),
    )
    def report(self, held, outcome, incident):
        given, token = held
        if isinstance(given, CircuitRefusal):
            return
        self.circuit.report(given, outcome, incident)
        if outcome is FAIL and incident is not None and token[0] == self.chapter:
            if incident in self.reported:
                outcome = NEUTRAL
            self.reported.add(incident)
        if self.state is BreakerState.PROBING and token == self.probe:
            self.probe = None
            if outcome is OK:
                self.begin(BreakerState.CLOSED)
            elif outcome is FAIL:
                self.begin(BreakerState.OPEN)
        elif self.state is BreakerState.CLOSED and token[0] == self.chapter:
            if outcome is not NEUTRAL:
                self.story.append((self.clock.now, outcome))
            last = self.story[-self.THRESHOLD :]
            if (
                len(last) == self.THRESHOLD
                and all(each is FAIL for _, each in last)
                and last[-1][0] - last[0][0] <= self.SAMPLING
                and outcome is FAIL
            ):
                self.begin(BreakerState.OPEN)

    @rule(seconds=st.sampled_from([0.5, 1.0, 7.0, 14.5, 15.0, 16.0, 31.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def isolate(self):
        self.circuit.isolate()
        self.begin(BreakerState.ISOLATED)

    @precondition(lambda self: self.state is not BreakerState.CLOSED)
    @rule()
    def close(self):
        self.circuit.close()
        self.begin(BreakerState.CLOSED)

    @invariant()
    def same_state(self):
        expected = self.state
        if expected is BreakerState.OPEN and self.clock.now >= self.opened_at + self.BREAK:
            expected = BreakerState.PROBING
        assert self.circuit.state is expected
        assert self.circuit.probe_is_out is (self.probe is not None)


TestBreakerMachine = BreakerMachine.TestCase
