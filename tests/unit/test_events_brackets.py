"""The data of an event, read by attributes and by brackets, like records of the client."""

import copy
import pickle
from datetime import UTC, datetime

import pytest

from sdk_trio.events import Order, Payload, decode_envelope, decode_event
from sdk_trio.events.catalog import DEFAULT_CATALOG
from sdk_trio.events.decoding import Documents, plain_outline

BODY = (
    b'{"type":"order.paid","timestamp":"2026-01-01T00:00:00Z","data":{"id":"o1","total_amount":5,'
    b'"status":null,"new_field":{"a":[1]},"customer":{"id":"c1","newer":1}}}'
)


def event_of(envelope, raw=BODY):
    return decode_event(envelope, webhook_id="m", raw=raw, header_timestamp=0, received_at=0)


@pytest.fixture(params=["envelope", "outline", "document"])
def data(request):
    if request.param == "envelope":
        return event_of(decode_envelope(BODY)).data
    rows = [DEFAULT_CATALOG.by_type("order.paid")] if request.param == "document" else ()
    return event_of(plain_outline(BODY, Documents(rows))).data


def test_fields_of_the_class_are_the_same_by_attribute_and_bracket(data):
    assert isinstance(data, Order)
    assert data["id"] == data.id == "o1"
    assert data["total_amount"] == data.total_amount == 5
    assert data["customer"]["id"] == data.customer.id == "c1"
    assert data["customer"]["email"] is None


def test_names_of_an_embedded_record_are_those_with_a_value(data):
    assert "id" in data["customer"]
    assert "email" not in data.customer
    assert "nothing_like_it" not in data.customer
    assert list(data.customer) == ["id"]


def test_fields_that_the_class_does_not_name_are_plain_values(data):
    assert data["new_field"] == data.new_field == data.extra["new_field"] == {"a": [1]}


def test_a_null_is_none_and_what_was_not_sent_is_a_key_error(data):
    assert data["status"] is None
    assert data.currency is None
    with pytest.raises(KeyError, match="currency"):
        data["currency"]
    assert "status" in data
    assert "new_field" in data
    assert "currency" not in data
    assert list(data) == ["id", "total_amount", "status", "new_field", "customer"]


@pytest.mark.parametrize("name", ["total_amonut", "new_feild", "nothing_like_it"])
def test_an_unknown_name_is_an_error_with_the_closest_one(data, name):
    near = {"total_amonut": "total_amount", "new_feild": "new_field"}.get(name)
    hint = f"Order has no field '{name}'" + (f"; did you mean '{near}'" if near else "")
    with pytest.raises(AttributeError, match=hint.replace("?", r"\?")):
        getattr(data, name)
    with pytest.raises(KeyError, match="has no field"):
        data[name]
    with pytest.raises(KeyError, match=r"CustomerRef has no field 'newer'.*event\.json"):
        data["customer"]["newer"]


def test_copied_and_constructed_data_have_the_fields_of_their_class(data):
    for made in (copy.copy(data), pickle.loads(pickle.dumps(data)), Order(id="o1", total_amount=5)):
        assert made["total_amount"] == 5
        assert "total_amount" in made
        with pytest.raises(KeyError):
            made["new_field"]
        with pytest.raises(AttributeError):
            getattr(made, "new_field")  # noqa: B009 - checkers know no such field
    assert Payload()["id"] == ""


def test_an_unknown_type_is_read_by_attribute_and_bracket():
    raw = b'{"type":"new.type","data":{"id":"x","amount":5}}'
    data = event_of(decode_envelope(raw), raw).data
    assert data.amount == data["amount"] == 5


def test_a_renamed_field_is_read_by_the_name_that_was_sent():
    class Renamed(Payload, rename="camel"):
        first_name: str | None = None
        at: datetime = datetime(2026, 1, 1, tzinfo=UTC)

    made = Renamed(id="x", first_name="Ada")
    assert made["firstName"] == "Ada"
    assert list(made) == ["id", "firstName", "at"]
