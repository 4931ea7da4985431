"""The types that a record's state implies, and what supersedes a synthetic event."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.events import DEFAULT_CATALOG
from sdk_trio.events.lifecycle import (
    KINDS,
    StoredState,
    event_body,
    find_change,
    seconds_of,
    stored_state,
)
from sdk_trio.events.samples import sample
from sdk_trio.records.deliveries import DeliveryRecord, DeliveryState
from sdk_trio.records.synthetic import is_synthetic, synthetic_id
from sdk_trio.storage.subjects import SubjectEvent, has_state, superseded_by

BY_NAME = {kind.name: kind for kind in KINDS}
NOW = 1_700_000_000.0


def at(seconds):
    return f"2023-11-14T{22 + int((seconds + 800) // 3600):02}:13:20Z" if seconds else None


def change(kind, **fields):
    record = {"id": "x", "created_at": "2023-11-01T00:00:00Z", **fields}
    return find_change(
        BY_NAME[kind],
        record,
        since=seconds_of("2023-11-14T00:00:00Z"),
        until=seconds_of("2023-11-15T00:00:00Z"),
        memory=seconds_of("2023-11-10T00:00:00Z"),
    )


IN_GAP, BEFORE, AFTER = "2023-11-14T12:00:00Z", "2023-11-12T00:00:00Z", "2023-11-16T00:00:00Z"


@pytest.mark.parametrize(
    ("kind", "fields", "implied"),
    [
        ("customers", {}, []),
        ("customers", {"created_at": IN_GAP}, ["customer.created"]),
        ("products", {"created_at": IN_GAP}, ["product.created"]),
        ("refunds", {"created_at": IN_GAP}, ["refund.created"]),
        ("checkouts", {"status": "expired", "expires_at": IN_GAP}, ["checkout.expired"]),
        ("checkouts", {"status": "open", "expires_at": IN_GAP}, []),
        ("subscriptions", {"started_at": BEFORE}, []),
        (
            "subscriptions",
            {"created_at": IN_GAP, "started_at": IN_GAP},
            ["subscription.created", "subscription.active"],
        ),
        ("subscriptions", {"status": "past_due", "past_due_at": IN_GAP}, ["subscription.past_due"]),
        ("subscriptions", {"status": "active", "past_due_at": IN_GAP}, []),
        ("subscriptions", {"status": "paused", "paused_at": IN_GAP}, ["subscription.paused"]),
        (
            "subscriptions",
            {"canceled_at": IN_GAP, "ended_at": IN_GAP},
            ["subscription.canceled", "subscription.revoked"],
        ),
        ("subscriptions", {"canceled_at": IN_GAP, "ended_at": AFTER}, ["subscription.canceled"]),
        ("orders", {"created_at": BEFORE, "status": "paid"}, ["order.paid"]),
        ("orders", {"created_at": BEFORE, "status": "pending"}, []),
        ("orders", {"created_at": BEFORE, "status": "refunded"}, ["order.paid", "order.refunded"]),
        ("benefit_grants", {"granted_at": IN_GAP}, ["benefit_grant.created"]),
        ("benefit_grants", {"granted_at": BEFORE, "revoked_at": IN_GAP}, ["benefit_grant.revoked"]),
    ],
)
def test_the_lifecycle_types_that_a_state_implies(kind, fields, implied):
    found = change(kind, modified_at=IN_GAP, **fields)
    assert [each.type for each in found.implied] == implied


@pytest.mark.parametrize(
    "fields",
    [
        {"modified_at": 1_700_000_000},
        {"modified_at": "yesterday"},
        {"created_at": None},
        {"id": "", "modified_at": IN_GAP},
        {"id": 7, "modified_at": IN_GAP},
    ],
)
def test_a_record_whose_change_cannot_be_read_is_not_taken_for_unchanged(fields):
    with pytest.raises(ValueError, match="no id, or no time"):
        change("orders", **fields)


def test_an_order_older_than_the_memory_of_the_inbox_is_uncertain():
    found = change("orders", modified_at=IN_GAP, status="paid")
    assert (found.implied, found.uncertain) == ((), ("order.paid",))


@pytest.mark.parametrize(
    "fields",
    [
        {"modified_at": BEFORE},
        {"modified_at": None},  # created long ago
        {"created_at": AFTER, "modified_at": None},
    ],
)
def test_records_unchanged_in_the_gap_are_omitted(fields):
    assert change("orders", **fields) is None


def test_every_type_of_a_kind_exists_and_the_samples_have_the_fields_that_imply_it():
    for kind in KINDS:
        for name in kind.types:
            assert DEFAULT_CATALOG.by_type(name) is not None
        for stage in kind.stages:
            now = seconds_of("2023-11-14T12:00:00+00:00")
            data = sample(stage.type, now=_aware(now))["data"]
            assert stage.at is None or stage.at in data
            assert not stage.statuses or "status" in data
            assert stage.is_reached(data), stage.type


def _aware(seconds):
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_an_id_is_a_webhook_id_and_has_no_dot(kind, subject, modified):
    name = synthetic_id(kind, subject, modified)
    assert is_synthetic(name)
    assert name == synthetic_id(kind, subject, modified)
    assert "." not in name
    assert name.isascii()
    assert len(name) == 41


@given(st.binary(max_size=200))
def test_a_body_that_cannot_be_read_carries_no_state(raw):
    assert isinstance(stored_state(raw), StoredState)


def test_a_body_carries_the_time_of_its_change():
    assert stored_state(
        b'{"data": {"modified_at": null, "created_at": "2023-11-14T22:13:20Z", "status": "x"}}'
    ) == StoredState(NOW, "x")


RECORD = DeliveryRecord(
    sequence=1,
    webhook_id="evt_1",
    type="order.updated",
    state=DeliveryState.DONE,
    queued=True,
    attempts=1,
    received_at=NOW,
    timestamp=int(NOW),
    subject="x",
    ordered=False,
    next_attempt_at=None,
    started_at=None,
    finished_at=None,
    last_error=None,
    raw=None,
)


def event_of(changed_at, status=None, **fields):
    return SubjectEvent(attrs.evolve(RECORD, **fields), StoredState(changed_at, status))


@pytest.mark.parametrize(
    ("event", "holds"),
    [
        (event_of(NOW), True),
        (event_of(NOW + 1), True),
        (event_of(NOW - 1), False),
        (event_of(None), False),
        (event_of(NOW, state=DeliveryState.DEAD), True),
        (event_of(NOW, type="order.paid"), False),
        (event_of(NOW + 1, type="order.paid"), True),
        (event_of(NOW + 1, type="order.paid", state=DeliveryState.PARKED), False),
    ],
)
def test_whether_the_inbox_has_a_state(event, holds):
    assert has_state([event], "order.updated", NOW) is holds


@pytest.mark.parametrize(
    ("event_type", "event", "superseded"),
    [
        ("order.updated", event_of(NOW + 1), True),
        ("order.updated", event_of(NOW - 1), False),
        ("order.updated", event_of(NOW + 1, webhook_id="mine"), False),
        ("order.paid", event_of(NOW + 1), False),
        ("order.paid", event_of(None, type="order.paid"), True),
        ("order.paid", event_of(None, type="order.paid", webhook_id="sdkstate_1"), False),
        ("order.paid", event_of(NOW + 1, "refunded", type="order.refunded"), True),
        ("order.paid", event_of(NOW + 1, "partially_refunded", type="order.refunded"), False),
        ("subscription.active", event_of(None, type="subscription.revoked"), True),
        ("order.refunded", event_of(None, type="order.paid"), False),
    ],
)
def test_events_that_supersede_a_waiting_event(event_type, event, superseded):
    found = superseded_by([event], "mine", event_type, NOW)
    assert (found is not None) is superseded


@pytest.mark.parametrize("status", [["paid"], {"name": "paid"}, 1, None])
def test_a_status_that_is_no_text_implies_and_takes_back_nothing(status):
    found = change("orders", created_at=IN_GAP, status=status)
    assert [implied.type for implied in found.implied] == ["order.created"]
    paid = BY_NAME["orders"].stages[1]
    assert not paid.is_undone("order.refunded", status)


def test_a_record_with_half_of_a_surrogate_pair_becomes_an_event():
    """JSON allows it in any text, and neither a body nor a store can hold it."""
    found = change("customers", id="c\ud800", created_at=IN_GAP, modified_at=IN_GAP, name="\udfff")
    assert found is not None
    assert (found.subject, found.record["name"]) == ("c\ufffd", "\ufffd")
    body = event_body("customer.created", NOW, found.record)
    assert json.loads(body)["data"]["id"] == "c\ufffd"
