"""Samples: realistic, complete, deterministic, and changed by a merge patch."""

import copy
import json
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.errors import SdkError
from sdk_trio.events import (
    DEFAULT_CATALOG,
    Drift,
    Event,
    decode_envelope,
    decode_event,
    samples,
    subject_of,
)
from sdk_trio.events.samples import (
    UnknownEventTypeError,
    merge_patch,
    sample,
    sample_body,
    sample_types,
)

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
TYPES = [row.wire_type for row in DEFAULT_CATALOG]


def decode(raw: bytes) -> tuple[Event[Any], list[Drift]]:
    drifts: list[Drift] = []
    event = decode_event(
        decode_envelope(raw),
        webhook_id="msg_1",
        raw=raw,
        header_timestamp=0,
        received_at=0,
        on_drift=drifts.append,
    )
    return event, drifts


def test_there_is_a_sample_of_every_type() -> None:
    assert list(sample_types()) == TYPES
    assert set(samples._CHANGES) | set(samples._BESIDE_DATA) <= set(TYPES)


@pytest.mark.parametrize("wire_type", TYPES)
def test_a_sample_fits_its_class_and_uses_every_field(wire_type: str) -> None:
    raw = sample_body(wire_type, now=NOW)
    event, drifts = decode(raw)
    row = DEFAULT_CATALOG.by_type(wire_type)
    assert row is not None
    assert drifts == []
    assert type(event) is row.event_class
    assert event.timestamp == NOW
    assert event.data.extra == {}
    # Percentages have basis points; the sample is a fixed discount.
    assert set(row.data_class.__struct_fields__) - set(event.json["data"]) <= {"basis_points"}
    assert uuid.UUID(event.data.id).version == 4
    assert subject_of(decode_envelope(raw)) == event.data.id


@pytest.mark.parametrize(
    ("wire_type", "field", "value"),
    [
        ("order.created", "status", "pending"),
        ("order.paid", "status", "paid"),
        ("order.refunded", "status", "refunded"),
        ("subscription.active", "status", "active"),
        ("subscription.canceled", "cancel_at_period_end", True),
        ("subscription.uncanceled", "cancel_at_period_end", False),
        ("subscription.past_due", "status", "past_due"),
        ("subscription.revoked", "status", "canceled"),
        ("subscription.paused", "status", "paused"),
        ("checkout.created", "status", "open"),
        ("checkout.expired", "status", "expired"),
        ("customer.deleted", "deleted_at", "2026-03-04T05:06:07.000Z"),
        ("order.created", "paid", False),
        ("product.updated", "is_archived", True),
        ("benefit_grant.revoked", "is_revoked", True),
        ("benefit_grant.created", "is_granted", True),
        ("refund.created", "status", "pending"),
        ("refund.updated", "status", "succeeded"),
        ("customer_seat.claimed", "status", "claimed"),
    ],
)
def test_values_fit_the_type(wire_type: str, field: str, value: object) -> None:
    assert sample(wire_type, now=NOW)["data"][field] == value


def test_times_follow_now() -> None:
    revoked, _ = decode(sample_body("subscription.revoked", now=NOW))
    assert revoked.data.ended_at == NOW
    expired, _ = decode(sample_body("checkout.expired", now=NOW))
    assert expired.data.expires_at < NOW
    active, _ = decode(sample_body("subscription.active", now=NOW))
    assert active.data.current_period_start < NOW < active.data.current_period_end
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-7)))
    assert sample("order.paid", now=elsewhere) == sample("order.paid", now=NOW)


def test_amounts_add_up() -> None:
    order = sample("order.paid", now=NOW)["data"]
    assert order["net_amount"] == order["subtotal_amount"] - order["discount_amount"]
    assert order["total_amount"] == order["net_amount"] + order["tax_amount"]


def test_the_same_arguments_give_the_same_bytes_and_another_seed_other_ids() -> None:
    assert sample_body("order.paid", now=NOW) == sample_body("order.paid", now=NOW)
    here = sample("order.paid", now=NOW, seed="a")["data"]
    there = sample("order.paid", now=NOW, seed="b")["data"]
    assert here["id"] != there["id"]
    assert {**here, "id": 0}.keys() == {**there, "id": 0}.keys()


def test_records_of_one_seed_belong_together() -> None:
    order = sample("order.paid", now=NOW)["data"]
    assert order["subscription_id"] == sample("subscription.active", now=NOW)["data"]["id"]
    assert order["customer"]["id"] == sample("customer.created", now=NOW)["data"]["id"]
    assert order["id"] != order["subscription_id"]


def test_overrides_are_a_merge_patch_of_data() -> None:
    overrides = {"status": "brand_new", "customer": {"name": None, "vip": True}, "paid": None}
    before = copy.deepcopy(overrides)
    plain = sample("order.paid", now=NOW)["data"]
    changed = sample("order.paid", now=NOW, overrides=overrides)["data"]
    assert overrides == before
    assert changed["status"] == "brand_new"
    kept = {name: value for name, value in plain["customer"].items() if name != "name"}
    assert changed["customer"] == {**kept, "vip": True}
    assert "paid" not in changed
    assert changed["items"] == plain["items"]


@pytest.mark.parametrize(  # the examples of RFC 7396, appendix A
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch(target: Any, patch: Any, result: Any) -> None:
    assert merge_patch(target, patch) == result


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(TYPES), st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_any_overrides_give_a_body_that_is_an_event(
    wire_type: str, overrides: dict[str, Any]
) -> None:
    raw = sample_body(wire_type, now=NOW, overrides=overrides)
    assert json.loads(raw) == sample(wire_type, now=NOW, overrides=overrides)
    event, _ = decode(raw)
    assert isinstance(event.data.id, str)


def test_an_unknown_type_suggests_the_closest() -> None:
    with pytest.raises(
        UnknownEventTypeError, match=r"'order\.payed': did you mean order\.paid"
    ) as e:
        sample("order.payed", now=NOW)
    assert isinstance(e.value, KeyError)
    assert isinstance(e.value, SdkError)
    assert "order.paid" in e.value.suggestions
    with pytest.raises(UnknownEventTypeError, match=r"'xyzzy': 'sdk-trio events types' lists them"):
        sample_body("xyzzy", now=NOW)


def test_a_time_without_offset_is_refused() -> None:
    with pytest.raises(ValueError, match="aware"):
        sample("order.paid", now=datetime(2026, 1, 1))
