"""The decisions of a reconciliation pass, without an upstream."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.reconcile.plan import (
    FIRST_WAIT_SECONDS,
    WINDOW_SECONDS,
    Action,
    Checkpoint,
    ReadEndpoint,
    Requests,
    Sighting,
    UnknownEndpointError,
    UnreadableDeliveryError,
    Window,
    advanced,
    choose_endpoints,
    decide,
    merge,
    read_sighting,
    windows,
    with_asked,
    without,
)
from sdk_trio.runtime.wiring import sample_client

times = st.floats(min_value=0, max_value=2e9)


def sighting(at: float = 100.0, name: str = "e", **fields: Any) -> Sighting:
    return Sighting(name, "order.paid", at, **{"delivered": False, "archived": False, **fields})


@given(times, st.floats(min_value=0, max_value=90_000))
def test_windows_cover_the_time_without_a_gap(start: float, length: float) -> None:
    found = list(windows(start, start + length))
    edges = [start, *(window.end for window in found)]
    assert [window.start for window in found] == edges[:-1]
    assert edges[-1] == start + length
    assert all(window.end - window.start <= WINDOW_SECONDS + 1e-3 for window in found)


def test_a_window_includes_both_of_its_ends() -> None:
    assert Window(1000, 4600).query() == {
        "start_timestamp": "1970-01-01T00:16:39Z",
        "end_timestamp": "1970-01-01T01:16:41Z",
    }


@given(times, times, st.dictionaries(st.text(), st.builds(Requests, st.integers(1, 9), times)))
def test_a_checkpoint_survives_its_storage(began: float, until: float, asked: Any) -> None:
    checkpoint = Checkpoint(began, until, asked)
    assert Checkpoint.from_text(checkpoint.as_text()) == checkpoint


@given(
    st.text()
    | st.sampled_from(
        [
            "{}",
            "[]",
            '{"asked":{"a":1},"began":1,"until":1}',
            "7",
            '{"asked":{},"began":NaN,"until":1}',
        ]
    )
)
def test_any_other_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a checkpoint"):
        Checkpoint.from_text(text)


@given(times, st.lists(times, max_size=5), st.booleans())
def test_a_checkpoint_never_passes_an_unresolved_event(
    until: float, ats: list[float], whole: bool
) -> None:
    window = Window(until, until + 10)
    moved = advanced(Checkpoint(0, until), window, [sighting(at) for at in ats], whole=whole)
    assert moved.until <= (window.end if whole else until)
    assert not whole or all(moved.until <= at for at in ats)


def test_waits_double_and_arrived_events_are_removed() -> None:
    checkpoint = Checkpoint(0, 0)
    for times in range(12):
        checkpoint = with_asked(checkpoint, "e", 1000)
        due = 1000 + FIRST_WAIT_SECONDS * 2**times
        assert decide(sighting(), checkpoint, due - 1) is Action.WAIT
        assert decide(sighting(), checkpoint, due) is Action.ASK
    assert Requests(10**9, 0).is_due(1e30)
    assert without(checkpoint, ["e"]).asked == {}


def test_deliveries_to_others_count_only_before_the_first_pass() -> None:
    checkpoint = Checkpoint(began=200, until=0)
    assert decide(sighting(199, delivered=True), checkpoint, 300) is Action.LEAVE
    assert decide(sighting(201, delivered=True), checkpoint, 300) is Action.ASK
    assert decide(sighting(199), checkpoint, 300) is Action.ASK
    assert decide(sighting(199, archived=True), checkpoint, 300) is Action.LOST


def test_the_attempts_of_one_event_are_one_sighting() -> None:
    again = [sighting(9, delivered=True), sighting(5), sighting(7, "f")]
    assert merge(again) == [sighting(5, delivered=True), sighting(7, "f")]


def test_a_delivery_of_the_upstream_is_read() -> None:
    event = {"id": "evt_1", "type": "order.paid", "succeeded": None, "is_archived": False}
    listed = {"created_at": "1970-01-01T00:01:40Z", "succeeded": False, "webhook_event": event}
    assert read_sighting(listed) == sighting(100, "evt_1")
    assert read_sighting({**listed, "created_at": "1970-01-01T00:01:40"}).at == 100
    assert read_sighting({**listed, "webhook_event": {**event, "succeeded": True}}).delivered
    for broken in (
        {},
        {**listed, "created_at": None},
        {**listed, "webhook_event": None},
        {**listed, "webhook_event": {"id": 7}},
    ):
        with pytest.raises(UnreadableDeliveryError, match="webhook_event"):
            read_sighting(broken)


HERE = {"id": "a", "url": "https://shop.example/pre/hooks/sdk"}
ELSE = {"id": "b", "url": "https://user:pass@shop.example/other?key=hidden", "enabled": False}


def test_the_endpoint_is_the_only_one_or_has_our_path_or_is_configured() -> None:
    def chosen(listed: Any, configured: Any = ()) -> list[str]:
        found = choose_endpoints(listed, configured=configured, path="/hooks/sdk")
        return [endpoint.id for endpoint in found]

    assert chosen([ELSE]) == ["b"]
    assert chosen([HERE, ELSE]) == ["a"]
    assert chosen([HERE, ELSE], ["b", "a"]) == ["b", "a"]
    assert choose_endpoints([ELSE], configured=(), path="/x") == (
        ReadEndpoint("b", enabled=False, is_certain=False),
    )
    for listed, configured in ([[], []], [[HERE, {**HERE, "id": "c"}], []], [[ELSE], ["a"]]):
        with pytest.raises(UnknownEndpointError, match="Reconciliation:EndpointIds") as caught:
            chosen(listed, configured)
        assert "hidden" not in str(caught.value)
        assert "pass" not in str(caught.value)


@pytest.mark.parametrize("url", ["https://[bad/hooks/sdk", "https://\u2100/hooks/sdk", None, 7])
def test_an_endpoint_without_a_usable_url_is_that_of_no_receiver(url: Any) -> None:
    broken = {"id": "c", "url": url}
    (found,) = choose_endpoints([broken, HERE], configured=(), path="/hooks/sdk")
    assert found.id == "a"
    with pytest.raises(UnknownEndpointError):
        choose_endpoints([broken, broken | {"id": "d"}], configured=(), path="/hooks/sdk")


def test_the_clients_counters_have_the_names_of_the_metrics() -> None:
    class Counters:
        requests = {("GET", "ok"): 3, ("POST", "outcome_unknown"): 1}  # noqa: RUF012 - read only
        attempts_per_call = {1: 3, 4: 1}  # noqa: RUF012 - read only

    lines = [(s.name, dict(s.labels), s.value) for s in sample_client(Counters(), "probing")]
    assert lines == [
        ("sdk_client_requests_total", {"method": "GET", "outcome": "ok"}, 3),
        ("sdk_client_requests_total", {"method": "POST", "outcome": "outcome_unknown"}, 1),
        ("sdk_client_circuit_state", {}, 2),
        ("sdk_client_attempts_bucket", {"le": "1"}, 3),
        ("sdk_client_attempts_bucket", {"le": "4"}, 4),
        ("sdk_client_attempts_bucket", {"le": "+Inf"}, 4),
        ("sdk_client_attempts_sum", {}, 7),
        ("sdk_client_attempts_count", {}, 4),
    ]
