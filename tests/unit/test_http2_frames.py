"""What frames cost, and where incomplete ones are noticed: whatever the cuts."""

import itertools

import pytest
from h2.errors import ErrorCodes
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.runtime.http2_frames import (
    CAPACITY,
    MAX_FRAME_BYTES,
    PER_SECOND,
    PREFACE_BYTES,
    FrameError,
    FrameMeter,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING = b"\0\0\x08\x06\0\0\0\0\0" + b"12345678"


def frame(kind, payload=b"", flags=0):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + b"\0\0\0\1" + payload


def started(*data, now=0.0):
    meter = FrameMeter(0.0)
    meter.feed(PREFACE, 0.0)
    for piece in data:
        meter.feed(piece, now)
    return meter


def test_the_preface_is_the_one_of_http_2():
    assert len(PREFACE) == PREFACE_BYTES


@given(
    st.lists(
        st.builds(frame, st.integers(0, 12), st.binary(max_size=300), st.integers(0, 255)),
        max_size=20,
    ),
    st.lists(st.integers(0, 2000), max_size=8),
    st.integers(0, 12),
)
def test_cuts_change_neither_what_frames_cost_nor_what_is_incomplete(frames, cuts, less):
    data = PREFACE + b"".join(frames)
    data = data[: len(data) - less]
    whole, cut = FrameMeter(0.0), FrameMeter(0.0)
    whole.feed(data, 0.0)
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    for start, end in itertools.pairwise(places):
        cut.feed(data[start:end], 0.0)
    names = FrameMeter.__slots__
    assert [getattr(whole, name) for name in names] == [getattr(cut, name) for name in names]


@pytest.mark.parametrize(
    "begun",
    [
        PREFACE[:5],
        PREFACE + b"\0",
        PREFACE + PING[:-1],
        PREFACE + frame(1),
        PREFACE + frame(1) + frame(9),
    ],
)
def test_what_is_incomplete_is_dated_from_its_beginning_and_trickling_does_not_help(begun):
    meter = FrameMeter(0.0)
    meter.feed(begun[:-1], 1.0)
    first = meter.begun
    meter.feed(begun[-1:], 2.0)
    assert meter.begun == (first or 2.0)
    assert not meter.in_body


def test_a_complete_frame_is_dated_no_longer_and_the_next_one_anew():
    meter = started(PING[:3], now=1.0)
    meter.feed(PING[3:], 2.0)
    assert meter.begun is None
    meter.feed(frame(0, b"x" * 100)[:50], 3.0)
    assert (meter.begun, meter.in_body) == (3.0, True)


def test_a_head_of_several_frames_is_complete_with_its_last():
    meter = started(frame(1), frame(9))
    assert meter.begun is not None
    meter.feed(frame(9, flags=0x4), 1.0)
    assert meter.begun is None


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone():
    started((MAX_FRAME_BYTES).to_bytes(3, "big") + b"\0\0\0\0\0\1")
    with pytest.raises(FrameError) as caught:
        started((MAX_FRAME_BYTES + 1).to_bytes(3, "big") + b"\0\0\0\0\0\1")
    assert caught.value.code is ErrorCodes.FRAME_SIZE_ERROR


def test_frames_that_carry_nothing_use_the_allowance_up_and_time_gives_it_back():
    meter = started(*[PING] * int(CAPACITY))
    with pytest.raises(FrameError) as caught:
        meter.feed(PING, 0.0)
    assert caught.value.code is ErrorCodes.ENHANCE_YOUR_CALM
    meter = started(*[PING] * int(CAPACITY))
    for second in range(1, 100):
        meter.feed(PING * int(PER_SECOND), float(second))


def test_it_never_grows_beyond_its_beginning():
    meter = started()
    meter.earn(10 * CAPACITY)
    meter.feed(PING * int(CAPACITY), 1e9)
    with pytest.raises(FrameError):
        meter.feed(PING, 1e9)


def test_resets_cost_more_than_pings():
    with pytest.raises(FrameError):
        started(*[frame(3, b"\0" * 4)] * (int(CAPACITY) // 10 + 1))
