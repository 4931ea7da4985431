"""The decisions about attempts and the pace of a channel, for any input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.notifications.pump import Pace
from sdk_trio.notifications.send import (
    MAX_REASON_LENGTH,
    Again,
    Ambiguous,
    Outcome,
    Refused,
    RetrySchedule,
    Sent,
    Skipped,
    ending_of,
    interrupted,
)
from sdk_trio.records.notifications import NotificationId, NotificationState, parse_notification_id
from sdk_trio.runtime.notifications import sample_notifications
from sdk_trio.runtime.wiring import Sample

NOW = 1000.0
outcomes = st.one_of(
    st.builds(Sent, st.none() | st.text()),
    st.builds(Again, st.text(max_size=700), st.none() | st.floats(0, 1e6)),
    st.builds(Refused, st.text()),
    st.builds(Skipped, st.text()),
    st.builds(Ambiguous, st.text()),
)


@given(outcomes, st.integers(1, 2000), st.booleans(), st.floats(0, 1), st.integers(1, 20))
def test_every_outcome_has_an_ending(
    outcome: Outcome, attempts: int, repeatable: bool, fraction: float, most: int
) -> None:
    schedule = RetrySchedule(most)
    ending = ending_of(
        outcome,
        attempts=attempts,
        repeatable=repeatable,
        schedule=schedule,
        now=NOW,
        fraction=fraction,
    )
    again = isinstance(outcome, Again) or (isinstance(outcome, Ambiguous) and repeatable)
    expected = {
        Sent: NotificationState.SENT,
        Refused: NotificationState.FAILED,
        Skipped: NotificationState.SKIPPED,
        Ambiguous: NotificationState.UNKNOWN,
    }
    if not again:
        assert ending.state is expected[type(outcome)]
    elif attempts >= most:
        assert ending.state is NotificationState.FAILED
    else:
        assert ending.state is NotificationState.RETRYING
        asked = getattr(outcome, "after_seconds", None) or 0.0
        assert ending.next_attempt_at is not None
        wait = ending.next_attempt_at - NOW - asked
        bound = min(schedule.cap_seconds, schedule.base_seconds * 2 ** min(attempts - 1, 60))
        assert wait == pytest.approx(fraction * bound, abs=1e-6)
    assert (ending.next_attempt_at is None) == (ending.state is not NotificationState.RETRYING)
    assert len(ending.reason or "") <= MAX_REASON_LENGTH
    if isinstance(outcome, Sent):
        assert ending.provider_id == outcome.provider_id


def test_an_interrupted_send_is_repeated_only_where_repetition_is_detectable() -> None:
    assert interrupted(repeatable=False, reason="x", now=NOW).state is NotificationState.UNKNOWN
    assert interrupted(repeatable=True, reason="x", now=NOW).next_attempt_at == NOW


@given(
    st.floats(0.1, 100),
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 60), st.floats(0, 5)), max_size=40),
)
def test_a_pace_is_kept_in_every_window(
    per_second: float, burst: int, steps: list[tuple[float, int, float]]
) -> None:
    now = paused = 100.0
    pace = Pace(per_second=per_second, burst=burst)
    begun: list[float] = []
    for pause, wanted, asked in steps:
        now += pause
        taken = min(wanted, pace.allowed(now))
        if now < paused:
            assert taken == 0
        assert (pace.wait(now) == 0) == (pace.allowed(now) > 0)
        pace.take(taken, now)
        begun += [now] * taken
        if asked > 4:
            pace.pause(now + asked)
            paused = max(paused, now + asked)
    for first, start in enumerate(begun):
        for last in range(first, len(begun)):
            in_window = last - first + 1
            assert in_window <= burst + (begun[last] - start) * per_second + 1e-3


@given(st.integers(0, 10**15), st.sampled_from(("email", "sms", "webhook")))
def test_ids_are_read_as_they_are_shown(sequence: int, channel: str) -> None:
    id = NotificationId(sequence, channel)
    assert parse_notification_id(str(id)) == id
    assert parse_notification_id(f" {sequence}-{channel.upper()} ") == id


@given(st.text())
def test_any_text_is_an_id_or_none(text: str) -> None:
    id = parse_notification_id(text)
    assert id is None or (id.sequence >= 0 and id.channel.isalpha())


def test_counts_become_samples_with_channel_and_result() -> None:
    samples = sample_notifications({("sms", "sent"): 2, ("email", "failed"): 1}, ["sms"])
    assert samples[0] == Sample(
        "sdk_notifications_total", (("channel", "email"), ("result", "failed")), 1
    )
    assert {dict(s.labels)["result"]: s.value for s in samples[1:]} == {
        "failed": 0,
        "retried": 0,
        "sent": 2,
        "skipped": 0,
        "unknown": 0,
    }
