"""Options, addresses, queries and headers of one call."""

import math
from datetime import UTC, date, datetime
from urllib.parse import parse_qsl, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client.call import (
    NO_OPTIONS,
    Call,
    CallOptions,
    checked_path,
    deadline_of,
    idempotency_key,
    join_url,
    may_execute_twice,
    merge_headers,
)
from sdk_trio.client.operation import query_pairs


def _encoded(params):
    return urlencode(list(query_pairs(params)))


def test_later_options_win_and_headers_are_joined():
    first = CallOptions(max_retries=1, total_timeout=5.0, headers={"A": "1", "B": "1"})
    merged = first.merged_with(CallOptions(total_timeout=None, headers={"B": "2"}))
    assert merged == CallOptions(max_retries=1, total_timeout=None, headers={"A": "1", "B": "2"})
    assert merged.merged_with(NO_OPTIONS) == merged


@pytest.mark.parametrize("bad", [0, -1, math.nan])
@pytest.mark.parametrize("name", ["attempt_timeout", "total_timeout", "hedge_after"])
def test_times_are_above_zero(name, bad):
    with pytest.raises(ValueError, match=name):
        CallOptions(**{name: bad})


def test_a_token_and_header_values_do_not_show():
    shown = repr(CallOptions(access_token="polar_oat_secret", headers={"X": "secret"}))
    assert "secret" not in shown
    call = Call(
        method="GET",
        path="/secret",
        query=(("q", "secret"),),
        json="secret",
        form=(("f", "secret"),),
        content=b"secret",
        options=CallOptions(access_token="secret"),
    )
    call.url, call.token, call.secrets = "https://a/secret", "secret", ("secret",)
    assert "secret" not in repr(call)


@given(st.lists(st.tuples(st.text(min_size=1), st.text() | st.integers() | st.booleans())))
def test_a_query_reads_back_as_it_was_given(pairs):
    def text(value):
        return str(value).lower() if isinstance(value, bool) else str(value)

    back = parse_qsl(_encoded(pairs), keep_blank_values=True)
    assert back == [(key, text(value)) for key, value in pairs]


def test_lists_repeat_their_key_and_none_is_left_out():
    query = {"id": ["a", None, "b c"], "none": None, "on": True, "day": date(2026, 4, 1)}
    assert _encoded(query) == "id=a&id=b+c&on=true&day=2026-04-01"
    assert _encoded({"at": datetime(2026, 4, 1, tzinfo=UTC)}) == (
        "at=2026-04-01T00%3A00%3A00%2B00%3A00"
    )
    assert _encoded({"metadata": {"plan": "a"}}) == "metadata%5Bplan%5D=a"
    with pytest.raises(ValueError, match="a time without a zone"):
        _encoded([("at", datetime(2026, 4, 1))])


@pytest.mark.parametrize(
    "path", ["/orders/", "/orders?page=1", "/x/%2e%2e%2Fy", "/a.b/..c/x..", "/x?q=/../"]
)
def test_good_paths(path):
    assert checked_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "orders",
        "https://elsewhere.example/",
        "//elsewhere.example/",
        "/orders/../../admin",
        "/orders/./x",
        "/orders/%2e%2E/x",
        "/orders/..",
        "/orders#x",
        "/orders\\x",
        "",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path):
    with pytest.raises(ValueError, match="path"):
        checked_path(path)


def test_a_query_is_appended_to_the_one_in_the_path():
    assert join_url("https://a/v1", "/x/", "b=1") == "https://a/v1/x/?b=1"
    assert join_url("https://a/v1", "/x?a=1", "b=1") == "https://a/v1/x?a=1&b=1"
    assert join_url("https://a/v1", "/x", "") == "https://a/v1/x"


def test_writes_get_a_key_of_their_own_and_reads_none():
    keys = iter(["k1", "k2"])
    assert idempotency_key("POST", NO_OPTIONS, new_key=lambda: next(keys)) == "k1"
    assert idempotency_key("PATCH", NO_OPTIONS, new_key=lambda: next(keys)) == "k2"
    assert idempotency_key("GET", NO_OPTIONS, new_key=lambda: next(keys)) is None
    given_one = CallOptions(idempotency_key="mine")
    assert idempotency_key("POST", given_one, new_key=lambda: next(keys)) == "mine"


def test_a_key_makes_a_write_repeatable_only_if_the_upstream_honors_it():
    with_key = CallOptions(idempotency_key="mine")
    assert not may_execute_twice("POST", with_key, upstream_honours_keys=False)
    assert may_execute_twice("POST", NO_OPTIONS, upstream_honours_keys=True)
    declared = CallOptions(idempotent=False)
    assert not may_execute_twice("POST", declared, upstream_honours_keys=True)
    assert may_execute_twice("POST", CallOptions(idempotent=True), upstream_honours_keys=False)


def test_headers_replace_those_of_the_same_name_in_any_case():
    base = [(b"Host", b"a"), (b"Accept", b"x")]
    assert list(merge_headers(base, {"accept": "y", "New": "z"})) == [
        (b"Host", b"a"),
        (b"accept", b"y"),
        (b"New", b"z"),
    ]
    assert list(merge_headers(base, {"ACCEPT": None})) == [(b"Host", b"a")]


@pytest.mark.parametrize(
    ("method", "hedged"),
    [("GET", True), ("HEAD", True), ("DELETE", False), ("PUT", False), ("POST", False)],
)
def test_only_reads_are_hedged(method, hedged):
    call = Call(method=method, path="/")
    call.hedge_after = 1.0
    assert call.may_be_hedged is hedged
    call.idempotent = False
    assert not call.may_be_hedged
    call.idempotent, call.is_stream = True, True
    assert not call.may_be_hedged


def test_deadlines():
    assert deadline_of(None, now=5.0) == math.inf
    assert deadline_of(2.0, now=5.0) == 7.0
