"""Opening, closing and announcing alerts, for any course of a condition."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.alerts.conditions import AlertCondition
from sdk_trio.alerts.lifecycle import MOST_MESSAGES, advance
from sdk_trio.config.options.alerts import AlertsOptions
from sdk_trio.records.alerts import Alert, AlertName, MessageKind

NAME = AlertName.STORE_UNREACHABLE
OPTIONS = AlertsOptions(close_after_seconds=60, repeat_hours=1)
REPEAT = 3600.0
START = 1_800_000_000.0

ReportedMessages = list[tuple[float, MessageKind]]


class World:
    """One condition over time."""

    def __init__(self, options: AlertsOptions = OPTIONS) -> None:
        self.options = options
        self.now = START
        self.alerts: dict[AlertName, Alert] = {}
        self.reported: ReportedMessages = []
        self.last: list[bool] = []

    def see(self, holds: bool | None, after: float = 0.0) -> None:
        self.now += after
        step = advance(self.alerts, [AlertCondition(NAME, holds, "why")], self.options, self.now)
        self.alerts |= {alert.name: alert for alert in step.changed}
        for announcement in step.announcements:
            self.reported.append((self.now, announcement.kind))
            self.last.append(announcement.is_last)

    @property
    def kinds(self) -> list[str]:
        return [str(kind) for _, kind in self.reported]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([True, False, None]),
        st.one_of(st.floats(0, 200), st.floats(0, 3 * REPEAT), st.just(60.0)),
    ),
    max_size=80,
)


@given(STEPS)
def test_no_sequence_of_flaps_floods(steps: Sequence[tuple[bool | None, float]]) -> None:
    world = World()
    for holds, after in steps:
        world.see(holds, after)
    times = [at for at, _ in world.reported]
    for first, fourth in zip(times, times[MOST_MESSAGES:], strict=False):
        assert fourth - first >= REPEAT
    changes = [kind for kind in world.kinds if kind != "reminder"]
    expected = ["opened", "closed"] * len(changes)
    assert changes == expected[: len(changes)]
    for (before, _), (at, kind) in zip(world.reported, world.reported[1:], strict=False):
        if kind is MessageKind.REMINDER:
            assert at - before >= REPEAT


@given(STEPS, st.booleans())
def test_in_the_end_the_last_message_is_the_truth(
    steps: Sequence[tuple[bool | None, float]], holds: bool
) -> None:
    world = World()
    for each, after in steps:
        world.see(each, after)
    world.see(holds)
    world.see(holds, OPTIONS.close_after_seconds)
    world.see(holds, REPEAT)
    is_open = NAME in world.alerts and world.alerts[NAME].is_open
    assert is_open == holds
    announced = [kind for kind in world.kinds if kind != "reminder"]
    assert (announced[-1:] == ["opened"]) == holds


@given(STEPS, st.floats(0, 10 * REPEAT))
def test_a_clock_that_was_set_back_silences_no_alert_for_longer(
    steps: Sequence[tuple[bool | None, float]], back: float
) -> None:
    world = World()
    for holds, after in steps:
        world.see(holds, after)
    world.now -= back
    world.see(True)
    world.see(True, REPEAT)
    world.reported.clear()
    world.see(True, REPEAT)
    assert world.kinds == ["reminder"]


@pytest.mark.parametrize("seconds", [0, 1, 59, 61, 86])
def test_a_thousand_flaps_within_the_interval_give_at_most_three_messages(seconds: int) -> None:
    world = World(AlertsOptions(close_after_seconds=60, repeat_hours=48))
    for _ in range(1000):
        world.see(True, seconds)
        world.see(False, 0)
        world.see(False, seconds)
    assert len(world.reported) <= 3
    assert world.kinds[0] == "opened"


def test_a_condition_that_is_unknown_changes_nothing() -> None:
    world = World()
    world.see(None)
    assert world.alerts == {}
    world.see(True)
    world.see(False)
    world.see(None, 1000)
    assert world.alerts[NAME].is_open
    assert world.kinds == ["opened"]


def test_an_alert_closes_after_its_condition_did_not_hold_for_the_whole_time() -> None:
    world = World()
    world.see(True)
    world.see(False, 30)
    world.see(False, 59)
    assert world.alerts[NAME].is_open
    world.see(True, 0.5)
    world.see(False, 0.5)
    world.see(False, 59)
    assert world.kinds == ["opened"]
    world.see(False, 1)
    assert world.kinds == ["opened", "closed"]
    assert world.alerts[NAME].openings == 1


def test_an_open_alert_is_repeated_once_an_interval() -> None:
    world = World()
    for _ in range(4 * 60):
        world.see(True, 60)
    assert world.kinds == ["opened", "reminder", "reminder", "reminder"]


def test_the_last_message_of_an_interval_is_marked_and_later_ones_follow_it() -> None:
    world = World()
    for _ in range(3):
        world.see(True, 10)
        world.see(False, 10)
        world.see(False, 60)
    assert world.kinds == ["opened", "closed", "opened"]
    assert world.last == [False, False, True]
    world.see(False, REPEAT)
    assert world.kinds[3:] == ["closed"]
    assert world.alerts[NAME].openings == 3
