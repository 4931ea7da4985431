"""Arguments of operations: their place in path, query and body, and refused ones."""

import enum
import inspect
import json
import pydoc
from collections import Counter
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urlencode
from uuid import UUID

import httpx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sdk_trio.client.call import UNSET, CallOptions
from sdk_trio.client.client import Client
from sdk_trio.client.operation import (
    Body,
    Operation,
    OperationAnswer,
    description_of,
    json_value,
    operation,
    path_segment,
    prepare,
    query_pairs,
    signature_of,
)
from sdk_trio.client.operations import OPERATIONS
from sdk_trio.client.records import Record
from sdk_trio.client.resources import BoundOperation
from sdk_trio.config import Settings

SETTINGS = {"Mode": "Custom", "CustomBaseUrl": "https://upstream.test", "AccessToken": "token"}

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | texts | st.floats(-1e9, 1e9)


class Colour(enum.Enum):
    RED = "red"


GET_ORDER = operation("GET /orders/{id}", OperationAnswer.RECORD, resource="orders", name="get")
MEMBER = operation(
    "PATCH /customers/{id}/members/{member_id}",
    OperationAnswer.RECORD,
    resource="customers.members",
    name="update",
)
#: The table does not know it, so its arguments are not checked.
LIST = operation("GET /things/", OperationAnswer.PAGE, resource="things", name="list")
ROTATE = operation(
    "POST /keys/{id}/rotate", OperationAnswer.RECORD, resource="keys", name="rotate", body=Body.NONE
)


# --- path ----------------------------------------------------------------------------------------


@given(texts)
def test_a_path_parameter_stays_one_segment_and_is_read_back(text: str) -> None:
    assume(text not in ("", ".", ".."))
    path = prepare(GET_ORDER, [text]).path
    prefix, _, segment = path.rpartition("/")
    assert prefix == "/orders"
    assert unquote(segment) == text
    assert httpx.URL(f"https://upstream.test{path}").raw_path == path.encode()


@pytest.mark.parametrize("value", ["", ".", ".."])
def test_values_that_name_another_operation_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"orders\.get\(id=\)"):
        prepare(GET_ORDER, [value])


@pytest.mark.parametrize("value", [None, True, 1.5, b"x", ["x"], UNSET, Record({})])
def test_values_that_are_no_part_of_a_path_are_refused(value: Any) -> None:
    if value is UNSET:
        assert path_segment(value, "x") == "UNSET"
        return
    with pytest.raises(TypeError, match=r"orders\.get\(id=\)"):
        prepare(GET_ORDER, [value])


@pytest.mark.parametrize(
    ("value", "segment"),
    [(7, "7"), (UUID(int=1), str(UUID(int=1))), (Colour.RED, "red"), ("a/b c", "a%2Fb%20c")],
)
def test_ids_of_every_kind(value: Any, segment: str) -> None:
    assert prepare(GET_ORDER, [value]).path == f"/orders/{segment}"
    assert prepare(GET_ORDER, fields={"id": value}).path == f"/orders/{segment}"


def test_path_parameters_by_position_and_name_are_the_same() -> None:
    by_name = prepare(MEMBER, [], {"member_id": "m", "id": "c", "name": "n"})
    mixed = prepare(MEMBER, ["c"], {"member_id": "m", "name": "n"})
    assert by_name == mixed
    assert by_name.path == "/customers/c/members/m"
    assert by_name.json == {"name": "n"}


@pytest.mark.parametrize(
    ("row", "positional", "fields", "message"),
    [
        (GET_ORDER, [], {}, r"orders\.get\(\) needs the path parameter 'id' of /orders/\{id\}$"),
        (GET_ORDER, [], {"order_id": "x"}, r"did you mean id= by order_id=\?"),
        (MEMBER, ["c"], {"membr_id": "x"}, r"did you mean member_id= by membr_id=\?"),
        (GET_ORDER, ["a", "b"], {}, r"got 2 positional arguments, but its path takes 1 \(id\)"),
        (LIST, ["a"], {}, r"got 1 positional arguments, but its path takes none"),
        (GET_ORDER, ["a"], {"id": "b"}, r"got the path parameter 'id' twice"),
        (ROTATE, ["a"], {"reason": "b"}, r"keys\.rotate\(\) takes no fields, but got reason"),
    ],
)
def test_wrong_parameters_are_explained(
    row: Operation, positional: list[Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        prepare(row, positional, fields)


# --- query ---------------------------------------------------------------------------------------


@given(st.dictionaries(texts, scalars | st.lists(scalars.filter(lambda v: v is not None))))
def test_a_query_is_what_httpx_makes_of_it_without_none(fields: dict[str, Any]) -> None:
    kept = {key: value for key, value in fields.items() if value is not None}
    ours = httpx.QueryParams(list(query_pairs(fields))).multi_items()
    assert Counter(ours) == Counter(httpx.QueryParams(kept).multi_items())
    assert httpx.QueryParams(urlencode(list(query_pairs(fields)))).multi_items() == ours


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (True, ["true"]),
        (False, ["false"]),
        (None, []),
        ([], []),
        (["a", None, "b"], ["a", "b"]),
        ((1, 2), ["1", "2"]),
        (Colour.RED, ["red"]),
        (date(2026, 1, 2), ["2026-01-02"]),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), ["2026-01-02T03:04:05+00:00"]),
        (
            datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3))),
            ["2026-01-02T00:00:00-03:00"],
        ),
        (UUID(int=5), [str(UUID(int=5))]),
        (Decimal("1.10"), ["1.10"]),
    ],
)
def test_values_in_a_query(value: Any, texts: list[str]) -> None:
    assert prepare(LIST, fields={"x": value}).query == tuple(("x", text) for text in texts)


def test_a_mapping_in_a_query_is_a_deep_object() -> None:
    call = prepare(LIST, fields={"metadata": {"plan": "pro", "tier": [1, 2], "none": None}})
    assert call.query == (
        ("metadata[plan]", "pro"),
        ("metadata[tier]", "1"),
        ("metadata[tier]", "2"),
    )


def test_query_as_a_mapping_is_the_query_and_as_a_text_the_upstreams_search() -> None:
    assert prepare(LIST, query={"a": 1}, fields={"b": 2}).query == (("a", "1"), ("b", "2"))
    assert prepare(LIST, query="ann").query == (("query", "ann"),)
    assert prepare(LIST, query={"query": "ann"}).query == (("query", "ann"),)
    write = prepare(MEMBER, ["c", "m"], {"name": "n"}, query={"dry": True})
    assert (write.query, write.json) == ((("dry", "true"),), {"name": "n"})


# --- body ----------------------------------------------------------------------------------------

documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(texts, documents))
def test_a_body_of_json_values_is_sent_as_it_is(document: dict[str, Any]) -> None:
    call = prepare(MEMBER, ["c", "m"], body=document)
    assert call.json == document
    assert json.loads(json.dumps(call.json)) == document
    assert call.query == ()


def test_values_in_a_body() -> None:
    given = {
        "none": None,
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "at": time(3, 4),
        "price": Decimal("1.10"),
        "id": UUID(int=5),
        "colour": Colour.RED,
        "list": (1, {2}),
        "record": Record({"a": {"b": 1}}),
    }
    assert prepare(ROTATE, ["k"], body=given).json == {
        "none": None,
        "when": "2026-01-02T00:00:00+00:00",
        "day": "2026-01-02",
        "at": "03:04:00",
        "price": "1.10",
        "id": str(UUID(int=5)),
        "colour": "red",
        "list": [1, [2]],
        "record": {"a": {"b": 1}},
    }


@pytest.mark.parametrize(
    ("value", "error", "where"),
    [
        (datetime(2026, 1, 2), ValueError, r"body\.a\[1\] is 2026-01-02T00:00:00, a time without"),
        (float("nan"), ValueError, r"body\.a\[1\] is nan"),
        (float("inf"), ValueError, r"body\.a\[1\] is inf"),
        (b"x", TypeError, r"body\.a\[1\] is a bytes"),
        (object(), TypeError, r"body\.a\[1\] is an object"),
        ({1: 2}, TypeError, r"body\.a\[1\] has the key 1"),
    ],
)
def test_values_without_a_json_form_are_refused_with_their_place(
    value: Any, error: type[Exception], where: str
) -> None:
    with pytest.raises(error, match=where):
        json_value({"a": [0, value]})


@pytest.mark.parametrize("value", [datetime(2026, 1, 2), float("nan"), object(), b"x"])
def test_values_without_a_query_form_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^since is "):
        prepare(LIST, fields={"since": value})


def test_writes_without_fields_send_an_empty_object_or_nothing() -> None:
    assert prepare(MEMBER, ["c", "m"]).json == {}
    assert prepare(ROTATE, ["k"]).json is UNSET
    assert prepare(ROTATE, ["k"], body=None).json is None
    assert prepare(GET_ORDER, ["k"]).json is UNSET
    assert prepare(GET_ORDER, ["k"]).form is None


def test_form_fields_are_text() -> None:
    row = operation("POST /token", OperationAnswer.RECORD, body=Body.FORM)
    call = prepare(row, [], {"scope": ["a", "b"], "refresh": True, "none": None})
    assert call.form == (("scope", "a"), ("scope", "b"), ("refresh", "true"))
    assert call.json is UNSET
    assert prepare(row).form is None


def test_fields_add_to_a_body_that_is_a_mapping() -> None:
    call = prepare(MEMBER, ["c", "m"], {"name": "n"}, body={"new": 1})
    assert call.json == {"new": 1, "name": "n"}
    with pytest.raises(TypeError, match=r"customers\.members\.update\(\) got 'name' twice"):
        prepare(MEMBER, ["c", "m"], {"name": "n"}, body={"name": "m"})
    with pytest.raises(TypeError, match=r"got fields \(name\) and a body= that is not a mapping"):
        prepare(MEMBER, ["c", "m"], {"name": "n"}, body=[1])


# --- options -------------------------------------------------------------------------------------


def test_an_operation_declared_harmless_may_be_repeated_and_the_caller_overrides_it() -> None:
    row = operation("POST /introspect", OperationAnswer.RECORD, idempotent=True)
    assert prepare(row).options.idempotent is True
    assert prepare(row, options=CallOptions(idempotent=False)).options.idempotent is False
    assert prepare(MEMBER, ["c", "m"]).options.idempotent is UNSET


@pytest.mark.parametrize("text", ["GET orders", "FETCH /orders", "GET  /orders", "/orders", ""])
def test_a_row_is_a_method_and_a_path(text: str) -> None:
    with pytest.raises(ValueError, match="METHOD /path"):
        operation(text, OperationAnswer.RECORD)


# --- names ---------------------------------------------------------------------------------------

ORDERS = OPERATIONS["orders.list"]
UPDATE = OPERATIONS["subscriptions.update"]


@pytest.mark.parametrize(
    ("row", "path", "fields", "hint"),
    [
        (
            ORDERS,
            [],
            {"stauts": "paid"},
            r"orders\.list\(\) has no argument 'stauts'; did you mean 'status'\?",
        ),
        (ORDERS, [], {"stauts[a]": "paid"}, "has no argument 'stauts\\[a\\]'"),
        (ORDERS, [], {"optoins": None}, r"did you mean 'options'\?"),
        (UPDATE, ["s"], {"cancel_at_perod_end": True}, r"did you mean 'cancel_at_period_end'\?"),
        (UPDATE, ["s"], {"idd": "x"}, r"did you mean 'id'\?"),
        (GET_ORDER, [], {"di": "x"}, "needs the path parameter 'id'"),
        (GET_ORDER, ["o"], {"zzzz": "x"}, r"query=\{'zzzz': \.\.\.\} sends fields that are newer"),
        (UPDATE, ["s"], {"zzzz": "x"}, r"body=\{'zzzz': \.\.\.\} sends fields that are newer"),
    ],
)
def test_a_misspelt_argument_is_refused_with_what_was_meant(
    row: Operation, path: list[str], fields: dict[str, Any], hint: str
) -> None:
    with pytest.raises(TypeError, match=hint):
        prepare(row, path, fields)


def test_arguments_newer_than_the_table_can_be_passed() -> None:
    assert prepare(ORDERS, [], {"status": "paid"}, query={"new": 1}).query == (
        ("new", "1"),
        ("status", "paid"),
    )
    assert prepare(UPDATE, ["s"], {"seats": 1}, body={"new": 1}).json == {"new": 1, "seats": 1}
    assert prepare(ORDERS, [], {"new": 1}, is_checked=False).query == (("new", "1"),)
    assert prepare(ORDERS, [], {"metadata[plan]": "x"}).query == (("metadata[plan]", "x"),)


def test_every_operation_has_its_parameters_as_signature_and_help() -> None:
    for name, row in OPERATIONS.items():
        known = row.known
        assert known is not None
        assert [*known.fields][: len(row.parameters)] == [*row.parameters], name
        assert known.summary.endswith("."), name
        shown = signature_of(row).parameters
        assert {*known.fields, "options", "query"} <= {*shown}, name
        assert description_of(row).startswith(known.summary)
        assert f"{row.method} {row.path}" in description_of(row)


def test_help_and_inspect_show_what_an_operation_takes() -> None:
    client = Client(Settings.from_mapping(SETTINGS, receiver=False))
    signature = inspect.signature(client.orders.list)
    assert str(signature.parameters["status"]) == (
        "status: OrderStatus | Many[OrderStatus] | None = None"
    )
    assert str(inspect.signature(client.orders.get)).startswith("(id: str | UUID, *, query:")
    text = pydoc.plain(pydoc.render_doc(client.orders.list))
    assert "List the orders." in text
    assert "Scopes: orders:read" in text
    assert "created_after: str | date | None" in text
    assert "callable operation" in pydoc.plain(pydoc.render_doc(BoundOperation))
    assert inspect.signature(BoundOperation).parameters.keys() == {"endpoint", "sender", "options"}


def test_a_known_operation_without_a_table_entry_shows_what_it_knows() -> None:
    assert str(signature_of(ROTATE)).startswith("(id: Any")
    assert description_of(ROTATE).startswith("POST /keys/{id}/rotate")
