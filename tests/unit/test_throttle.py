"""How often a line of the log may be caused by strangers."""

from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base.logs import Throttle


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_kind_has_its_lines_and_then_is_left_out_until_the_while_is_over():
    clock = Clock()
    throttle = Throttle(lines=2, seconds=10, clock=clock)
    assert [throttle.admit("a") for _ in range(4)] == [0, 0, None, None]
    assert throttle.admit("b") == 0
    clock.now += 9.9
    assert throttle.admit("a") is None
    clock.now += 0.1
    assert [throttle.admit("a") for _ in range(3)] == [3, 0, None]


def test_what_was_left_out_is_told_once():
    throttle = Throttle(lines=1, seconds=10, clock=Clock())
    for kind in "aabbbc":
        throttle.admit(kind)
    assert throttle.take_left_out() == {"a": 1, "b": 2}
    assert throttle.take_left_out() == {}
    assert throttle.admit("a") is None
    assert throttle.take_left_out() == {"a": 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20), st.booleans())))
def test_nothing_is_lost_and_no_while_has_more_lines_than_allowed(steps):
    clock = Clock()
    throttle = Throttle(lines=3, seconds=10, clock=clock)
    told = 0
    lines: dict[str, list[float]] = {}
    for kind, pause, asked in steps:
        clock.now += pause
        left_out = throttle.admit(kind)
        if left_out is not None:
            told += 1 + left_out
            lines.setdefault(kind, []).append(clock.now)
        if asked:
            told += sum(throttle.take_left_out().values())
    assert told + sum(throttle.take_left_out().values()) == len(steps)
    for times in lines.values():
        assert all(times[at + 4] - times[at] >= 10 for at in range(len(times) - 4))
