"""Which organization a delivery names, read after its verification and guessed at before."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.events import DEFAULT_CATALOG, claimed_organization, decode_envelope, organization_of
from sdk_trio.events.decoding import (
    ORGANIZATION_PATHS,
    ORGANIZATION_TYPE,
    SCANNED_BYTES,
    SCANNED_TOKENS,
)
from sdk_trio.events.samples import sample_body

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
TYPES = [row.wire_type for row in DEFAULT_CATALOG]


def read(body: bytes) -> str | None:
    envelope = decode_envelope(body)
    return organization_of(envelope.type, envelope.data_raw)


def nested(path: tuple[str, ...], value: object) -> dict[str, Any]:
    *parents, name = path
    found: dict[str, Any] = {name: value}
    for parent in reversed(parents):
        found = {parent: found}
    return found


def expected_of(document: dict[str, Any]) -> str | None:
    """The rule, written down another time, over what Python reads."""
    data = document.get("data")
    own = [("id",)] if document["type"] == ORGANIZATION_TYPE else []
    for path in [*ORGANIZATION_PATHS, *own]:
        found: Any = data
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, str) and found:
            return found
    return None


@pytest.mark.parametrize("path", ORGANIZATION_PATHS)
def test_it_is_found_at_each_place_where_the_upstream_names_it(path: tuple[str, ...]) -> None:
    data = {"id": "a", "items": [{"organization_id": "no"}], **nested(path, "org-1")}
    body = json.dumps({"type": "order.paid", "data": data}).encode()
    assert read(body) == claimed_organization(body) == "org-1"


def test_of_an_organization_it_is_the_id() -> None:
    body = json.dumps({"data": {"id": "org-1"}, "type": ORGANIZATION_TYPE}).encode()
    assert read(body) == claimed_organization(body) == "org-1"
    other = json.dumps({"data": {"id": "org-1"}, "type": "customer.updated"}).encode()
    assert read(other) is claimed_organization(other) is None


@pytest.mark.parametrize("wire_type", TYPES)
def test_the_samples_of_every_type_are_read_alike(wire_type: str) -> None:
    body = sample_body(wire_type, now=NOW)
    assert claimed_organization(body) == read(body) == expected_of(json.loads(body))


_NAMES = st.sampled_from(
    [
        "organization_id",
        "customer",
        "product",
        "benefit",
        "subscription",
        "order",
        "id",
        "x",
        "data",
    ]
)
_VALUES = st.recursive(
    st.none() | st.integers() | st.booleans() | st.sampled_from(["org-1", "org-2", "}{][,:", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=25,
)


@given(
    st.sampled_from([ORGANIZATION_TYPE, "order.paid"]),
    st.dictionaries(_NAMES, _VALUES, max_size=5),
    st.dictionaries(st.sampled_from(["customer", "id", "timestamp"]), _VALUES),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_the_guess_agrees_with_the_decoded_value(
    wire_type: str, data: Any, rest: Any, last: bool, indent: int | None
) -> None:
    document = {**rest, "type": wire_type, "data": data} if last else {"data": data, **rest}
    document["type"] = wire_type
    body = json.dumps(document, indent=indent).encode()
    assert read(body) == expected_of(document)
    assert claimed_organization(body) == expected_of(document)


@given(st.binary() | st.text(st.sampled_from('"[]{},:\\ data')).map(str.encode))
def test_any_bytes_claim_something_or_nothing(body: bytes) -> None:
    claimed_organization(body)
    claimed_organization(b'{"data":{"organization_id":' + body)


def test_no_more_is_read_than_the_limits() -> None:
    claim = b'"data":{"organization_id":"org-1"}}'
    near = b'{"x":"' + b"a" * (SCANNED_BYTES - 100) + b'",' + claim
    assert claimed_organization(near) == "org-1"
    assert claimed_organization(b'{"x":"' + b"a" * SCANNED_BYTES + b'",' + claim) is None
    assert claimed_organization(b'{"x":[' + b'"",' * (SCANNED_TOKENS - 10) + b"1]," + claim)
    assert claimed_organization(b'{"x":[' + b'"",' * SCANNED_TOKENS + b"1]," + claim) is None


def test_text_that_is_not_ascii_claims_nothing() -> None:
    for value in (b'"\xff"', b"7", b"null", b'["org-1"]', b'""'):
        body = b'{"data":{"organization_id":' + value + b"}}"
        assert claimed_organization(body) is None
    assert organization_of("order.paid", msgspec.Raw(b"[]")) is None
