"""The checked-in OpenAPI documents against the code that they describe: its routes and types.

tests/integration/test_openapi.py tests the answers of the servers.
"""

import ast
import inspect
import json
from pathlib import Path

import msgspec
import pytest

from sdk_trio import admin, webhooks
from sdk_trio.admin import api, app
from sdk_trio.admin.console import LONGEST_REASON
from sdk_trio.admin.query import (
    LARGEST_LIMIT,
    LARGEST_REPLAY,
    LARGEST_SEQUENCE,
    LINE,
    LONGEST_ACTOR,
    MOMENT,
    ListQuery,
    ReplayRequest,
)
from sdk_trio.admin.replay import ReplayCandidate, replay_rows
from sdk_trio.base.telemetry import Check
from sdk_trio.records.deliveries import REPLAYABLE, AttemptRecord, DeliveryRecord, DeliveryState


def document_of(package):
    return json.loads(Path(package.__file__).with_name("openapi.json").read_text("utf-8"))


ADMIN = document_of(admin)
SCHEMAS = ADMIN["components"]["schemas"]
REMEDY = "bring sdk_trio/admin/openapi.json up to date"


def types_of(schema, definitions):
    """Return the JSON types that a schema admits."""
    if "$ref" in schema:
        return types_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return {kind for one in schema["anyOf"] for kind in types_of(one, definitions)}
    if "type" in schema:
        return set(schema["type"] if isinstance(schema["type"], list) else [schema["type"]])
    values = schema.get("enum", [schema.get("const")])
    names = {str: "string", type(None): "null", bool: "boolean", int: "integer"}
    return {names[type(value)] for value in values}


@pytest.mark.parametrize(
    ("name", "record", "without", "beside"),
    [
        ("Event", DeliveryRecord, {"raw"}, {"key", "source"}),
        ("Attempt", AttemptRecord, set(), set()),
        ("Check", Check, set(), set()),
    ],
)
def test_a_documented_record_has_the_fields_and_types_of_the_codes_own(
    name, record, without, beside
):
    (schema,), definitions = msgspec.json.schema_components([record])
    of_code = definitions[schema["$ref"].rpartition("/")[2]]["properties"]
    documented = SCHEMAS[name]["properties"]
    assert set(documented) == set(of_code) - without | beside, REMEDY
    for field in set(documented) - beside:
        expected = types_of(of_code[field], definitions)
        assert types_of(documented[field], SCHEMAS) == expected, (REMEDY, field)


def test_details_of_an_event_have_all_that_its_row_has():
    details, row = SCHEMAS["EventDetails"], SCHEMAS["Event"]
    assert row["properties"].items() <= details["properties"].items(), REMEDY
    assert set(row["required"]) <= set(details["required"]), REMEDY


def test_the_documented_states_are_the_stores():
    states = [str(state) for state in DeliveryState]
    assert SCHEMAS["Event"]["properties"]["state"]["enum"] == states, REMEDY
    assert SCHEMAS["ReplayedEvent"]["properties"]["state"]["enum"] == [*states, None], REMEDY


def test_the_documented_query_is_the_one_that_is_read():
    documented = {
        parameter["name"]: parameter["schema"]
        for parameter in ADMIN["paths"]["/api/events"]["get"]["parameters"]
    }
    fields = dict(zip(ListQuery.__struct_fields__, ListQuery.__struct_defaults__, strict=True))
    assert set(documented) == set(fields), REMEDY
    limit = documented["limit"]
    assert (limit["maximum"], limit["default"]) == (LARGEST_LIMIT, fields["limit"]), REMEDY
    assert documented["since"]["pattern"] == documented["until"]["pattern"] == MOMENT, REMEDY
    for cursor in ("after", "before"):
        assert documented[cursor]["maximum"] == LARGEST_SEQUENCE, REMEDY


def test_the_documented_order_of_a_replay_is_the_one_that_is_read():
    by_id, by_state = (one["properties"] for one in SCHEMAS["ReplayRequest"]["oneOf"])
    of_code = msgspec.json.schema(ReplayRequest)["$defs"]["ReplayRequest"]["properties"]
    assert {*by_id, *by_state} == set(of_code), REMEDY
    assert by_id["ids"]["maxItems"] == LARGEST_REPLAY, REMEDY
    assert by_state["state"]["enum"] == [str(state) for state in REPLAYABLE], REMEDY
    (states,) = [one["enum"] for one in of_code["state"]["anyOf"] if "enum" in one]
    assert set(states) == {str(state) for state in REPLAYABLE}


def test_the_documented_actor_and_reason_are_lines_of_the_codes_own():
    actor, reason = SCHEMAS["Actor"], SCHEMAS["TransitionRequest"]["properties"]["reason"]
    assert actor["pattern"] == reason["pattern"] == LINE, REMEDY
    assert (actor["maxLength"], reason["maxLength"]) == (LONGEST_ACTOR, LONGEST_REASON), REMEDY


def test_the_documented_result_of_a_replay_is_the_one_that_is_made():
    (row,) = replay_rows([ReplayCandidate("a key", "msg_1", "order.paid", "dead")], set())
    assert set(row) == set(SCHEMAS["ReplayedEvent"]["properties"]), REMEDY


def test_every_address_in_the_code_is_documented():
    written = {
        node.value
        for module in (app, api)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("/")
        and not node.value.endswith("/")
    }
    documented = {path.removesuffix("/{webhook_id}") for path in ADMIN["paths"]}
    # The first one is the prefix of all routes that need the token.
    assert written - {"/api", "/replay", "/trigger"} <= documented, REMEDY
    assert app.REPLAY in documented


@pytest.mark.parametrize("document", [ADMIN, document_of(webhooks)], ids=["admin", "webhooks"])
def test_all_references_of_a_document_exist_and_are_used(document):
    text = json.dumps(document)
    shared = {
        f"#/components/{kind}/{name}"
        for kind, named in document["components"].items()
        if kind != "securitySchemes"
        for name in named
    }
    used = {part.partition('"')[0] for part in text.split('"$ref": "')[1:]}
    assert used == shared
