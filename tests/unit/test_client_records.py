"""Records keep the whole answer of the upstream, and their repr shows no secret."""

import copy
import pickle
import typing
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client import models, stubs
from sdk_trio.client.operations import OPERATIONS, OperationAnswer
from sdk_trio.client.records import Record, wrap

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(st.text(), documents, max_size=6)


def unwrapped(value: object) -> object:
    if isinstance(value, Record):
        return {name: unwrapped(value[name]) for name in value}
    return [unwrapped(item) for item in value] if isinstance(value, list) else value


@given(objects)
def test_every_field_is_readable_and_raw_is_the_document(document: dict[str, object]) -> None:
    record = Record(document)
    assert record.raw is document
    assert unwrapped(record) == document
    assert list(record) == list(document)
    assert len(record) == len(document)
    assert record
    for name in document:
        assert name in record
        if name not in ("raw", "_fields") and not hasattr(object, name) and name[:2] != "__":
            assert getattr(record, name) == record[name]


@given(objects)
def test_records_are_copied_and_pickled_whole(document: dict[str, object]) -> None:
    record = Record(document)
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    assert copy.copy(record).raw is document


def test_times_of_the_model_are_aware_as_in_events() -> None:
    document = {
        "created_at": "2026-04-01T12:00:00Z",
        "modified_at": None,
        "metadata": {"created_at": "2026-04-01T12:00:00Z"},
        "customer": {"created_at": "2026-04-01T12:00:00.5+02:00", "deleted_at": "soon"},
        "next_payment_attempt_at": "\ud83d",
        "status": "2026-04-01T12:00:00Z",
    }
    order = Record(document, "orders.get")
    noon = datetime(2026, 4, 1, 12, tzinfo=UTC)
    assert order.created_at == order["created_at"] == noon
    assert order.customer.created_at == noon.replace(hour=10, microsecond=500_000)
    assert order.modified_at is None
    # Invalid times, and fields of the application, stay as sent.
    assert order.customer.deleted_at == "soon"
    assert order.next_payment_attempt_at == "\ud83d"
    assert order.metadata.created_at == "2026-04-01T12:00:00Z"
    assert order.status == "2026-04-01T12:00:00Z"
    assert Record(document).created_at == "2026-04-01T12:00:00Z"
    assert order.raw is document


def test_objects_inside_lists_and_objects_are_records() -> None:
    order = Record(
        {"id": "1", "customer": {"email": "a@b.c"}, "items": [{"label": "x"}, [{"y": 1}]]}
    )
    assert order.customer.email == "a@b.c"
    assert order.items[0].label == "x"
    assert order.items[1][0].y == 1
    assert wrap([1, {"a": None}])[1].a is None
    assert wrap([[[{"a": 1}], 2], []])[0][0][0].a == 1


def test_fields_named_like_methods_of_a_dict_are_fields() -> None:
    record = Record({"items": [], "get": 1, "keys": 2, "raw": 3})
    assert (record.items, record.get, record.keys) == ([], 1, 2)
    assert record["raw"] == 3


def test_an_absent_field_suggests_a_similar_name() -> None:
    record = Record({"total_amount": 1})
    with pytest.raises(AttributeError, match=r"'total_amont'; did you mean 'total_amount'\?"):
        record.total_amont  # noqa: B018 - reading it is the test
    with pytest.raises(KeyError):
        record["nothing"]
    assert not hasattr(record, "nothing")
    assert getattr(record, "nothing", None) is None


def test_records_are_read_only_and_not_hashable() -> None:
    record = Record({"a": 1})
    with pytest.raises(AttributeError, match="read-only"):
        record.a = 2
    with pytest.raises(AttributeError, match="read-only"):
        del record.a
    with pytest.raises(TypeError):
        hash(record)
    assert record != {"a": 1}
    assert "a" in dir(record)


@given(st.dictionaries(st.text(min_size=1), st.just("s3cr3t-value"), max_size=8))
def test_repr_shows_no_value_but_what_names_the_record(fields: dict[str, str]) -> None:
    for name in ("id", "type", "status", "slug"):
        fields.pop(name, None)
    record = Record({"id": "cus_1", "nested": {"token": "s3cr3t-value"}, **fields})
    assert "s3cr3t" not in repr(record)
    assert "cus_1" in repr(record)


def test_repr_counts_the_other_fields() -> None:
    assert repr(Record({"id": "1", "token": "x"})) == "Record(id='1', and 1 field)"
    assert repr(Record({"a": 1, "b": 2})) == "Record(and 2 fields)"
    assert repr(Record({})) == "Record()"
    assert repr(Record({"status": "x" * 100})) == "Record(and 1 field)"


# --- what the models know -------------------------------------------------------------------------


def test_a_field_of_the_model_that_is_absent_or_null_reads_as_none() -> None:
    order = Record({"id": "o", "total_amount": None, "customer": {"id": "c"}}, "orders.get")
    assert order.total_amount is None
    assert order.refunded_amount is None
    assert order.customer.email is None
    assert "total_amount" in order
    assert "refunded_amount" not in order
    with pytest.raises(KeyError):
        order["refunded_amount"]


def test_a_name_that_neither_the_answer_nor_its_model_has_is_no_field() -> None:
    order = Record({"id": "o", "items": [{"id": "i"}], "metadata": {}}, "orders.list")
    with pytest.raises(AttributeError, match=r"'totl_amount'; did you mean 'total_amount'\?"):
        _ = order.totl_amount
    with pytest.raises(AttributeError, match="'trial_start'"):
        _ = order.trial_start  # of a subscription
    with pytest.raises(AttributeError, match="'amount'"):
        _ = order.metadata.amount  # its author chose the names
    assert order.items[0].amount is None
    with pytest.raises(AttributeError):
        _ = order.items[0].customer
    with pytest.raises(AttributeError):
        _ = Record({}).id


def test_a_union_has_the_fields_of_each_of_its_models() -> None:
    customer = Record({"type": "brand_new"}, "customers.get")
    assert (customer.type, customer.email, customer.billing_address) == ("brand_new", None, None)


def test_a_record_survives_copies_and_pickles() -> None:
    order = Record({"customer": {}}, "orders.get")
    for twin in (copy.deepcopy(order), pickle.loads(pickle.dumps(order))):
        assert twin == order
        assert twin.customer.email is None


def test_every_operation_that_answers_records_leads_to_their_fields() -> None:
    others = {OperationAnswer.JSON, OperationAnswer.NOTHING, OperationAnswer.CSV}
    for name, row in OPERATIONS.items():
        assert row.known is not None
        answered = stubs.models_in(row.known.returns)
        assert bool(answered) == (row.answer not in others), name
        for model in answered:
            # A revocation is answered with an empty object.
            assert stubs.fields_of(model) or name == "oauth2.revoke_token", (name, model)


def test_models_are_there_to_annotate_with() -> None:
    def handle(order: models.Order, address: models.AddressInput, status: models.OrderStatus): ...

    assert typing.get_type_hints(handle) == {"order": Record, "address": dict, "status": str}
    assert models.Unlisted("new") == "new"
    assert {"Order", "AddressInput", "OrderStatus"} <= set(dir(models))
    with pytest.raises(AttributeError, match="Odrer"):
        _ = models.Odrer
