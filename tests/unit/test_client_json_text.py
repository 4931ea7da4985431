"""Every legal JSON text is read; nothing else is."""

import contextlib
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client import json_text
from sdk_trio.client.json_text import MAX_DEPTH, UnreadableJsonError, _read_slowly, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"x": 1e400}', {"x": Decimal("1e400")}),
        (b"[-1e400, 1.5]", [Decimal("-1e400"), 1.5]),
        (b"1e99999999999999999999", float("inf")),
        (b'"\\ud800"', "\ud800"),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b" [ ] ", []),
        (b'{"a": {}, "b": [[1e400]]}', {"a": {}, "b": [[Decimal("1e400")]]}),
    ],
)
def test_legal_texts_that_fast_readers_refuse(text, value):
    assert read_json(text) == value


def test_a_whole_number_of_any_length_is_exact():
    digits = "9" * 5000
    value = read_json(f'{{"n": {digits}}}'.encode())["n"]
    assert str(value) == digits
    assert read_json(b"9" * 4000) == 10**4000 - 1


def test_a_nesting_beyond_the_stack_is_read_and_a_bomb_of_brackets_is_not():
    for deep in (5000, MAX_DEPTH):
        value = read_json(b'[{"a":' * (deep // 2) + b"1" + b"}]" * (deep // 2))
        depth = 0
        while isinstance(value, list | dict):
            value = value[0] if isinstance(value, list) else value["a"]
            depth += 1
        assert depth == deep
    with pytest.raises(UnreadableJsonError, match="nested deeper"):
        read_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@given(VALUES)
def test_the_slow_reader_reads_what_json_writes(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert _read_slowly(text, 100) == value


@given(st.text(alphabet='[]{}:,"\\ u0eE-+.19dtrflsn\n', max_size=30))
def test_the_slow_reader_accepts_what_the_standard_one_does(text):
    try:
        expected = json.loads(text, parse_constant=_refuse)
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011 - it may be json's own
            _read_slowly(text, 100)
    else:
        assert repr(_read_slowly(text, 100)) == repr(expected)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(content):
    with contextlib.suppress(UnreadableJsonError):
        read_json(content)


@given(VALUES, st.integers(0, 4))
def test_a_limit_of_depth_holds_for_every_reader(value, limit):
    def depth(each):
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        return isinstance(each, list | dict) + max(map(depth, inner), default=0)

    for text, read in ((json.dumps(value), value), (f"[{json.dumps(value)}, 1e400]", None)):
        if depth(json.loads(text)) <= limit:
            assert read is None or read_json(text, max_depth=limit) == read
        else:
            with pytest.raises(UnreadableJsonError, match="nested deeper"):
                read_json(text, max_depth=limit)


def test_half_an_emoji_in_a_long_list_does_not_take_it_to_the_slow_reader(monkeypatch):
    def slow(text, max_depth):
        raise AssertionError("the slow reader would hold the loop up for seconds")

    monkeypatch.setattr(json_text, "_read_slowly", slow)
    read = read_json(b'{"items": [' + b'{"id": 1, "n": 1.5},' * 100 + b'"\\ud83d", 1e400]}')
    assert len(read["items"]) == 102
    for bad in (b"[1, 2", b"[NaN]", b'"\x01"', b"[1e400] x"):
        with pytest.raises(UnreadableJsonError):
            read_json(bad)


def test_a_refusal_leads_to_no_frame_that_holds_the_text():
    for content in (b"{", b'"\xff"', b'"\\x"', b"1 2"):
        with pytest.raises(UnreadableJsonError) as caught:
            read_json(content)
        assert caught.value.__context__ is None


def _refuse(name):
    raise ValueError(name)
