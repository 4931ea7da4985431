"""The answer to a further delivery of a known id."""

import pytest

from sdk_trio.records.deliveries import Admission, DeliveryState
from sdk_trio.storage.admission import (
    ACCEPTING,
    CLAIMING,
    PARKING,
    Change,
    ExistingState,
    Known,
    LeaseTerms,
    existing_state,
)


def known(state: str, **fields: object) -> Known:
    defaults = {"queued": False, "attempts": 1, "finished_at": None, "foreign_lease_until": None}
    return Known(DeliveryState(state), **{**defaults, **fields})  # type: ignore[arg-type] # by name


@pytest.mark.parametrize(
    ("record", "standing"),
    [
        (known("done", finished_at=900.0), ExistingState.FINISHED),
        (known("done", finished_at=899.9), ExistingState.FORGOTTEN),
        (known("dead", finished_at=0.0), ExistingState.DEAD),
        (known("parked"), ExistingState.PARKED),
        (known("received", queued=True), ExistingState.QUEUED),
        (known("running", queued=True, foreign_lease_until=0.0), ExistingState.QUEUED),
        (known("retrying", queued=True), ExistingState.QUEUED),
        (known("running", foreign_lease_until=1000.1), ExistingState.RUNNING),
        (known("running"), ExistingState.FAILED_INLINE),
        (known("dead", process_ends=1), ExistingState.PROCESS_ENDED),
        (known("retrying"), ExistingState.FAILED_INLINE),
        (known("received"), ExistingState.FAILED_INLINE),
    ],
)
def test_the_state_of_a_record(record: Known, standing: ExistingState) -> None:
    assert existing_state(record, now=1000.0, dedup_seconds=100.0) is standing


@pytest.mark.parametrize("rulings", [ACCEPTING, CLAIMING, PARKING])
def test_every_standing_has_an_answer_and_only_new_and_requeued_write(rulings) -> None:  # type: ignore[no-untyped-def] # a table
    assert set(rulings) == set(ExistingState)
    for ruling in rulings.values():
        writes = ruling.admission is Admission.NEW or ruling.change is Change.QUEUE
        assert writes == (ruling.change is not Change.NOTHING)


def test_attempts_continue_after_a_failed_run_and_start_over_after_a_replay() -> None:
    assert CLAIMING[ExistingState.DEAD].change is Change.UPDATE
    assert ACCEPTING[ExistingState.DEAD].change is Change.RESTART
    assert CLAIMING[ExistingState.PARKED].change is Change.QUEUE
    assert CLAIMING[ExistingState.FAILED_INLINE].change is Change.UPDATE


@pytest.mark.parametrize(
    ("until", "live"),
    [(None, False), (1000.0, False), (1000.1, True), (1135.0, True), (1135.1, False)],
)
def test_a_lease_is_live_until_its_end_unless_a_wrong_clock_has_put_that_too_far(until, live):
    terms = LeaseTerms(owner="a", lease_seconds=75.0, dedup_seconds=1.0, payload_seconds=1.0)
    assert terms.live(until, now=1000.0) == (until if live else None)
