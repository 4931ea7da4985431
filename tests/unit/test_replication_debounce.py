"""A burst is one change, a window after its first."""

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdk_trio.replication.watch import Debounce


def test_the_first_of_a_burst_opens_the_window_and_the_others_do_not_move_it() -> None:
    debounce = Debounce(2)
    assert not debounce.take(0)
    for now in (10, 11, 11.9):
        debounce.note(now)
        assert not debounce.take(now)
    assert debounce.take(12)
    assert not debounce.take(100)


def test_a_failed_change_is_due_later_but_no_later_than_a_new_one() -> None:
    debounce = Debounce(2)
    debounce.postpone(10, 30)
    assert not debounce.take(39)
    assert debounce.take(40)
    debounce.postpone(50, 30)
    debounce.note(51)
    assert debounce.take(53)


def test_no_window_is_at_once() -> None:
    debounce = Debounce(0)
    debounce.note(5)
    assert debounce.take(5)


@given(st.lists(st.floats(0, 0.5), min_size=1), st.floats(0.1, 10))
def test_changes_without_a_pause_are_due_all_the_same(pauses: list[float], window: float) -> None:
    debounce, now, taken = Debounce(window), 0.0, 0
    for pause in pauses:
        debounce.note(now)
        now += pause
        taken += debounce.take(now)
    assert taken >= math.floor(now / (window + 0.5))


class Model(RuleBasedStateMachine):
    """Against a model that remembers each change on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.debounce = Debounce(2)
        self.now = 0.0
        self.waiting: list[float] = []

    @rule(seconds=st.floats(0, 3))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def note(self) -> None:
        self.waiting.append(self.now)
        self.debounce.note(self.now)

    @rule()
    @precondition(lambda self: self.waiting)
    def take(self) -> None:
        due = self.now >= min(self.waiting) + 2
        assert self.debounce.take(self.now) == due
        if due:
            self.waiting.clear()

    @invariant()
    def due_with_the_first(self) -> None:
        assert self.debounce.due_at == min(self.waiting, default=math.inf) + 2


TestModel = Model.TestCase
