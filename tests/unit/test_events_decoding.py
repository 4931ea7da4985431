"""From bytes to events: hostile bodies, drift, and preserved data."""

import copy
import json
import math
import re
import threading
import types
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.errors import DeliveryDecodingError
from sdk_trio.events import (
    DEFAULT_CATALOG,
    Drift,
    Envelope,
    Event,
    Order,
    OrderPaidEvent,
    Payload,
    Subscription,
    UnknownEvent,
    decode_envelope,
    decode_event,
    subject_of,
)
from sdk_trio.events.decoding import (
    MAX_DRIFTS,
    MAX_TYPE_LENGTH,
    Documents,
    Outline,
    plain_outline,
)
from sdk_trio.events.samples import sample, sample_body
from sdk_trio.events.values import (
    MAX_DEPTH,
    MAX_NUMBER_LENGTH,
    MAX_REPAIRS,
    NotJsonError,
    fit,
    legible,
)

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
TYPES = [row.wire_type for row in DEFAULT_CATALOG]


DOCUMENTS = Documents(DEFAULT_CATALOG)


def decode(raw: bytes, **arguments: Any) -> tuple[Event[Any], list[Drift]]:
    """Decode in the three ways that there are, and see that none differs from the others."""
    catalog = arguments.get("catalog", DEFAULT_CATALOG)
    documents = DOCUMENTS if catalog is DEFAULT_CATALOG else Documents(catalog)
    outlines = [plain_outline(raw), plain_outline(raw, documents)]
    try:
        envelope = decode_envelope(raw)
    except DeliveryDecodingError:
        assert outlines == [None, None]
        raise
    event, drifts = decode_from(envelope, raw, **arguments)
    for outline in outlines:
        if outline is not None:
            assert subject_of(outline) == subject_of(envelope)
            again, reported = decode_from(outline, raw, **arguments)
            assert type(again) is type(event)
            assert (again, reported) == (event, drifts)
            assert getattr(again.data, "extra", None) == getattr(event.data, "extra", None)
    return event, drifts


def decode_from(
    envelope: Envelope | Outline, raw: bytes, **arguments: Any
) -> tuple[Event[Any], list[Drift]]:
    drifts: list[Drift] = []
    known: dict[str, Any] = {"header_timestamp": 1_700_000_000, "received_at": 1_700_000_001.5}
    event = decode_event(
        envelope,
        webhook_id="msg_1",
        raw=raw,
        on_drift=drifts.append,
        **{**known, **arguments},
    )
    return event, drifts


def body(data: object, wire_type: str = "order.paid") -> bytes:
    document = {"type": wire_type, "timestamp": "2026-03-04T05:06:07Z", "data": data}
    return json.dumps(document).encode()


def around(value: bytes) -> bytes:
    return b'{"type":"order.paid","data":{"id":"a","unheard":' + value + b"}}"


# In one pass


@pytest.mark.parametrize("wire_type", TYPES)
def test_a_known_type_at_the_beginning_is_read_in_one_pass(wire_type: str) -> None:
    raw = sample_body(wire_type, now=NOW)
    row = DEFAULT_CATALOG.by_type(wire_type)
    assert row is not None
    outline = plain_outline(raw, DOCUMENTS)
    assert outline is not None
    assert type(outline.data) is row.data_class
    event, drifts = decode(raw)
    assert drifts == []
    assert event.data == outline.data
    assert plain_outline(raw, Documents([])) == plain_outline(raw)


@pytest.mark.parametrize(
    ("raw", "wire_type"),
    [
        (b'{"type":"order.paid","type":"refund.created","data":{"id":"a"}}', "refund.created"),
        (b'{"type":"order.p\\u0061id","data":{"id":"a"}}', "order.paid"),
        (b'{"data":{"type":"refund.created","id":"a"},"type":"order.paid"}', "order.paid"),
        (b' {\n"type" : "order.paid", "data":{"id":"a"}}', "order.paid"),
        (b'{"type":"order.paid","data":{"id":"b"},"data":{"id":"a"}}', "order.paid"),
        (b'{"type":"order.paid","data":{"id":"b","id":"a"}}', "order.paid"),
        (b'{"type":"order.paid","data":5,"data":{"id":"a"}}', "order.paid"),
    ],
)
def test_the_type_and_the_subject_are_those_of_the_whole_document(
    raw: bytes, wire_type: str
) -> None:
    event, _ = decode(raw)
    assert (event.type, event.data.id) == (wire_type, "a")


def test_a_class_that_reads_the_id_otherwise_is_decoded_after_the_outline() -> None:
    class Renamed(Payload, frozen=True, rename={"id": "name"}):
        pass

    class Changed(Payload, frozen=True):
        def __post_init__(self) -> None:
            msgspec.structs.force_setattr(self, "id", "changed")

    for data_class in (Renamed, Changed):
        event_class = types.new_class(
            "AcmeEvent",
            (Event[data_class],),  # type: ignore[valid-type]
            exec_body=lambda namespace: namespace.update(wire_type="acme.renamed"),
        )
        catalog = DEFAULT_CATALOG.with_event(event_class)
        raw = body({"id": "a", "name": "b"}, "acme.renamed")
        outline = plain_outline(raw, Documents(catalog))
        assert outline is not None
        assert subject_of(outline) == "a"
        decode(raw, catalog=catalog)


# Bodies that are not events


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b" \n", id="blank"),
        pytest.param(b"\x00", id="NUL"),
        pytest.param(b"type=order.paid", id="form"),
        pytest.param(b"\x1f\x8b\x08\x00\x00\x00\x00\x00", id="gzip"),
        pytest.param(b"\xff\xfe{\x00}\x00", id="UTF-16"),
        pytest.param('{"type":"order.paid"}'.encode("utf-16"), id="UTF-16 with its mark"),
        pytest.param(b'\xef\xbb\xbf\xef\xbb\xbf{"type":"order.paid"}', id="two BOMs"),
        pytest.param(around(b'"\xff"'), id="not UTF-8 in an unknown field"),
        pytest.param(around(b'"\xc0\x80"'), id="overlong UTF-8"),
        pytest.param(b'{"type":"order.paid","\xff":1}', id="not UTF-8 in a name"),
        pytest.param(around(b'"\\ud800" "'), id="lone surrogate before garbage"),
        pytest.param(around(b'"\\ud8"'), id="half an escape"),
        pytest.param(around(b"-NaN"), id="-NaN"),
        pytest.param(around(b"Inf"), id="Inf"),
        pytest.param(around(b"01"), id="leading zero"),
        pytest.param(around(b"+1"), id="plus sign"),
        pytest.param(around(b"1_000"), id="underscore"),
        pytest.param(around(b"0x10"), id="hexadecimal"),
        pytest.param(around(b"'a'"), id="single quotes"),
        pytest.param(around(b"[1,]"), id="trailing comma"),
        pytest.param(around(b"1/**/"), id="comment"),
        pytest.param(around(b'"a\nb"'), id="control character"),
        pytest.param(around(b'"\\q"'), id="unknown escape"),
        pytest.param(around(b"1")[:-1], id="cut off"),
        pytest.param(around(b"1") + b"x", id="something behind it"),
        pytest.param(around(b"1") + around(b"1"), id="two documents"),
        pytest.param(around(b"[" * 100_000 + b"]" * 99_999), id="100000 arrays, one not closed"),
        pytest.param(around(b"[" * 1000 + b"}" * 1000), id="arrays closed as objects"),
        pytest.param(around(b"[" * 1000 + b"x" + b"]" * 1000), id="garbage in the depth"),
        pytest.param(around(b"[" * 1000 + b"1 2" + b"]" * 1000), id="no comma in the depth"),
        pytest.param(b"[" * 100_000, id="100000 arrays, never closed"),
        pytest.param(b'{"type":"a","x":' * 100_000, id="100000 objects, never closed"),
        pytest.param(b'{"type":' + b"7" * 5000 + b"}", id="5000 digits as type"),
        pytest.param(b'{"type":""}', id="empty type"),
        pytest.param(b'{"type":"%b"}' % (b"a" * (MAX_TYPE_LENGTH + 1)), id="type too long"),
        pytest.param(b"[]", id="array"),
        pytest.param(b'[{"type":"order.paid"}]', id="array of events"),
        pytest.param(b'"order.paid"', id="string"),
        pytest.param(b"1", id="number"),
        pytest.param(b"null", id="null"),
        pytest.param(b"true", id="true"),
        pytest.param(b"{}", id="no members"),
        pytest.param(b'{"data":{"id":"a"}}', id="no type"),
        pytest.param(b'{"Type":"order.paid"}', id="type in capitals"),
        pytest.param(b'{"type":null}', id="type null"),
        pytest.param(b'{"type":1}', id="type number"),
        pytest.param(b'{"type":["order.paid"]}', id="type array"),
        pytest.param(b'{"type":{"type":"order.paid"}}', id="type object"),
        pytest.param(b'{"type":"order.paid","type":1}', id="last type number"),
    ],
)
def test_a_body_that_is_not_an_event(raw: bytes) -> None:
    with pytest.raises(DeliveryDecodingError, match="the body is not an event"):
        decode_envelope(raw)


def test_the_error_holds_nothing_of_the_body() -> None:
    for raw in (
        b'{"type":7,"data":"swordfish"}',
        b'{"type":"swordfish","data":"\xff"}',
        b'{"swordfish":',
    ):
        with pytest.raises(DeliveryDecodingError) as caught:
            decode_envelope(raw)
        assert "swordfish" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_deep_body_is_an_event_at_any_stack_depth_of_the_caller() -> None:
    def descend(frames: int) -> None:
        if frames:
            return descend(frames - 1)
        event, _ = decode(around(b"[" * 900 + b"]" * 900))
        assert event.data.id == "a"
        assert "unheard" in event.data.extra
        return None

    for frames in (0, 100, 300):
        descend(frames)


def test_a_caller_at_the_end_of_its_stack_gets_no_recursion_error() -> None:
    raw = around(b"[" * 200 + b"]" * 200)
    outcomes: set[str] = set()

    def descend() -> None:
        try:
            outcome = "event"
            decode_envelope(raw)
        except DeliveryDecodingError:
            outcome = "refused"
        outcomes.add(outcome)
        descend()

    def run() -> None:
        # The last frames before the recursion limit cannot call anything, so their errors do not
        # count.
        with pytest.raises(RecursionError):
            descend()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "event" in outcomes
    assert outcomes <= {"event", "refused"}


# Bodies that strict decoders refuse


REPLACED = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'"\\ud800"', REPLACED),
        (b'"\\udc00 and then text"', f"{REPLACED} and then text"),
        (b'"\\uD83Dx\\ud83d\\ude00"', f"{REPLACED}x\N{GRINNING FACE}"),
        (b'"\\ud83d\\ud83d\\ude00"', f"{REPLACED}\N{GRINNING FACE}"),
        (b'"\\\\ud83d \\ud83d"', f"\\ud83d {REPLACED}"),
        (b'"\xed\xa0\x80"', REPLACED),
        (b'{"\\ud800":1}', {REPLACED: 1}),
        (b"NaN", None),
        (b"[Infinity,-Infinity,1]", [None, None, 1]),
        (b"1" * (MAX_NUMBER_LENGTH + 1), None),
        (b"-" + b"9" * 5000, None),
        (b"[1," + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b",2]", None),
        (b"[" * 100_000 + b"]" * 100_000, None),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, None),
    ],
)
def test_an_event_in_json_that_strict_decoders_refuse_is_dispatched(
    value: bytes, expected: object
) -> None:
    event, drifts = decode(around(value))
    assert isinstance(event, OrderPaidEvent)
    assert event.raw == around(value)
    assert event.data.id == "a"
    assert subject_of(decode_envelope(around(value))) == "a"
    assert event.json["type"] == "order.paid"
    if expected is not None:
        assert event.data.extra == {"unheard": expected}
        assert event.json["data"]["unheard"] == expected
    elif value[:1] not in b"[{":
        assert event.data.extra == {"unheard": None}
    assert "timestamp" in [drift.path for drift in drifts]
    json.dumps(event.json).encode()  # what is read can be written again


def test_a_type_and_an_id_with_half_an_emoji_can_be_kept_and_logged() -> None:
    raw = b'{"type":"order.\\ud83d","data":{"id":"x\\ud83d"}}'
    envelope = decode_envelope(raw)
    assert envelope.type == f"order.{REPLACED}"
    assert subject_of(envelope) == f"x{REPLACED}"
    event, drifts = decode(raw)
    assert event.data.id == f"x{REPLACED}"
    assert drifts[0].message.startswith("JSON that strict decoders refuse: half of a surrogate")


def test_a_byte_order_mark_is_passed_over() -> None:
    raw = b"\xef\xbb\xbf" + around(b"1")
    event, _ = decode(raw)
    assert event.data.extra == {"unheard": 1}
    assert event.json["type"] == "order.paid"
    assert event.raw == raw


def test_a_type_of_256_characters_is_one() -> None:
    for wire_type in ("a", "\N{GRINNING FACE}" * MAX_TYPE_LENGTH):
        assert decode_envelope(json.dumps({"type": wire_type}).encode()).type == wire_type


_JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=()), max_size=3)
            | st.sampled_from(["id", "type", "data", "timestamp", "items", "customer"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(
    document=st.dictionaries(st.text(max_size=3), _JSON_VALUES, max_size=3),
    wire_type=st.sampled_from(TYPES)
    | st.text(st.characters(exclude_categories=()), min_size=1, max_size=MAX_TYPE_LENGTH),
    data=_JSON_VALUES,
    as_is=st.booleans(),
    blank=st.sampled_from(["", " ", "\n\t"]),
    twice=st.booleans(),
)
def test_any_json_with_a_type_is_an_event(
    document: dict[str, Any], wire_type: str, data: object, as_is: bool, blank: str, twice: bool
) -> None:
    text = json.dumps({**document, "type": wire_type, "data": data}, ensure_ascii=not as_is)
    if twice:
        text = '{"type":7,' + text[1:]
    text = blank + text + blank
    assert json.loads(text)["type"] == wire_type
    raw = text.encode("utf-8", "surrogatepass")
    event, _ = decode(raw)
    assert event.raw == raw
    event.type.encode()
    (subject_of(decode_envelope(raw)) or "").encode()
    str(event.data.id).encode()
    assert set(event.json) >= {"type", "data"}
    json.dumps(event.json, ensure_ascii=False).encode()


@given(st.text(st.sampled_from('[]{}",:\\\\ud8dc01-.eENaInfity\n trusl')).map(str.encode))
@example(b'{"type":"a","b":[1,2,{"c":"\\u0041"}]}')
@example(b'{"type":"a",}')
def test_legible_bodies_are_those_that_python_reads(raw: bytes) -> None:
    try:
        expected = json.loads(raw)
    except ValueError:
        with pytest.raises(NotJsonError):
            legible(raw)
        return
    text, changes = legible(raw)
    assert changes or text == raw
    assert changes or repr(json.loads(text)) == repr(expected)
    msgspec.json.decode(text, type=dict[str, msgspec.Raw] if isinstance(expected, dict) else Any)


# Bodies that are unusual events


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"[" * 200 + b"]" * 200, None),
        (b'"' + b"[{" * 5000 + b'"', "[{" * 5000),
        (b'"\\"' + b"[" * 5000 + b'\\\\"', '"' + "[" * 5000 + "\\"),
        (b'["\\\\","' + b"[" * 5000 + b'"]', ["\\", "[" * 5000]),
        (b'"\\\\\\"[[[' + b"[" * 5000 + b'"', '\\"[[[' + "[" * 5000),
        (b'"' + b"1" * 9000 + b'"', "1" * 9000),
        (b"1" * MAX_NUMBER_LENGTH, None),
        (b"[" + b"{}," * 1000 + b"1]", [{}] * 1000 + [1]),
        (b"1e400", math.inf),
        (b'"\\ud83d\\ude00"', "\N{GRINNING FACE}"),
        ('"\N{GRINNING FACE}\u2028\u00e9"'.encode(), "\N{GRINNING FACE}\u2028\u00e9"),
        (b'"\\u0000"', "\0"),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b"-0", 0),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
    ],
)
def test_an_odd_value_in_an_unknown_field_survives(value: bytes, expected: object) -> None:
    event, drifts = decode(around(value))
    assert isinstance(event, OrderPaidEvent)
    assert event.data.id == "a"
    assert [drift.path for drift in drifts] == ["timestamp"]
    if expected is None:
        expected = json.loads(value)
    assert event.data.extra == {"unheard": expected}
    assert event.json["data"]["unheard"] == expected
    assert event.raw == around(value)


def test_white_space_around_the_document_is_json() -> None:
    event, _ = decode(b'\r\n\t {"type" : "order.paid" , "data" : { "id" : "a" } } \n')
    assert event.data.id == "a"


def test_of_duplicate_names_the_last_one_counts_everywhere() -> None:
    raw = (
        b'{"type":"order.created","type":"order.paid","data":{"id":"first"},'
        b'"data":{"id":"a","id":"b","new":1,"new":2,"due_amount":"x","due_amount":7}}'
    )
    event, _ = decode(raw)
    assert event.type == event.json["type"] == "order.paid"
    assert event.data.id == event.json["data"]["id"] == "b"
    assert event.data.due_amount == 7
    assert event.data.extra == {"new": 2}
    assert subject_of(decode_envelope(raw)) == "b"


@pytest.mark.parametrize("kept", [b"null", b"[]", b"[1]", b'"text"', b"7", b"true", b"{}", None])
def test_data_that_is_missing_or_not_an_object_is_drift(kept: bytes | None) -> None:
    data = b"" if kept is None else b',"data":' + kept
    raw = b'{"type":"order.paid","timestamp":"2026-03-04T05:06:07Z"' + data + b"}"
    event, drifts = decode(raw)
    assert isinstance(event, OrderPaidEvent)
    assert event.data == Order()
    assert event.data.extra == {}
    assert subject_of(decode_envelope(raw)) is None
    assert [drift.path for drift in drifts] == ["data.id" if kept == b"{}" else "data"]
    assert {drift.type for drift in drifts} == {"order.paid"}


# Members of an event


def test_members_of_an_event() -> None:
    raw = sample_body("order.paid", now=NOW)
    event, drifts = decode(raw, attempt=3)
    assert drifts == []
    assert (event.webhook_id, event.type, event.attempt) == ("msg_1", "order.paid", 3)
    assert event.timestamp == NOW
    assert event.received_at == datetime.fromtimestamp(1_700_000_001.5, UTC)
    assert event.received_at.tzinfo is UTC
    assert event.tenant is None
    assert event.raw is raw
    assert event.json == json.loads(raw)
    assert event.json is event.json
    assert attrs.evolve(event, tenant="t").tenant == "t"


@pytest.mark.parametrize(
    "sent", [b'"yesterday"', b'"2026-03-04T05:06:07"', b"1700000000", b"null", b"{}", b'""', None]
)
def test_an_unfit_timestamp_is_replaced_by_the_signed_header(sent: bytes | None) -> None:
    member = b"" if sent is None else b'"timestamp":' + sent + b","
    event, drifts = decode(b"{" + member + b'"type":"order.paid","data":{"id":"a"}}')
    assert event.timestamp == datetime.fromtimestamp(1_700_000_000, UTC)
    assert event.data.id == "a"
    assert [drift.path for drift in drifts] == ["timestamp"]


def test_a_timestamp_keeps_its_offset() -> None:
    raw = body({"id": "a"}).replace(b"05:06:07Z", b"05:06:07.25+02:00")
    event, drifts = decode(raw)
    expected = datetime(2026, 3, 4, 5, 6, 7, 250_000, timezone(timedelta(hours=2)))
    assert event.timestamp == expected
    assert event.timestamp.utcoffset() == timedelta(hours=2)
    assert drifts == []


@pytest.mark.parametrize("seconds", [999_999_999_999, 1e300, math.inf, math.nan, -1e18])
def test_moments_beyond_the_calendar_do_not_raise(seconds: float) -> None:
    event, _ = decode(
        b'{"type":"order.paid","data":{}}', header_timestamp=seconds, received_at=seconds
    )
    assert event.timestamp.tzinfo is UTC
    assert event.received_at.tzinfo is UTC


def test_the_repr_of_an_event_has_no_text_of_a_customer() -> None:
    event, _ = decode(sample_body("customer.created", now=NOW))
    assert event.data.email == "ada@example.com"
    assert "ada" not in repr(event)
    assert event.data.id in repr(event)


def test_an_event_cannot_be_changed() -> None:
    event, _ = decode(sample_body("order.paid", now=NOW))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.attempt = 2  # type: ignore[misc]  # the mistake under test
    with pytest.raises(AttributeError):
        event.data.status = "paid"


def test_a_type_without_a_class_keeps_everything() -> None:
    raw = body({"id": "a", "total": 5, "lines": [{"x": 1}]}, "acme.invoice_sent")
    event, drifts = decode(raw)
    assert type(event) is UnknownEvent
    assert event.type == "acme.invoice_sent"
    assert type(event.data) is Payload
    assert event.data.id == "a"
    assert event.data.extra == {"total": 5, "lines": [{"x": 1}]}
    assert drifts == []


def test_a_payload_made_by_hand_has_no_extra() -> None:
    assert Order(id="a", status="paid").extra == {}
    assert Payload().id == ""


# Drift


def test_new_values_and_new_fields_are_not_drift() -> None:
    raw = body({"id": "a", "status": "quantum", "new": {"deep": [1]}, "items": [{"new": 1}]})
    event, drifts = decode(raw)
    assert drifts == []
    assert event.data.status == "quantum"
    assert event.data.extra == {"new": {"deep": [1]}}
    assert event.json["data"]["items"] == [{"new": 1}]


def test_matching_fields_are_kept_down_to_the_nested_records() -> None:
    raw = body(
        {
            "id": "a",
            "due_amount": "twelve",
            "currency": "eur",
            "customer": {"id": 7, "email": ["x"], "name": "Ada"},
            "items": [{"label": "one", "amount": 1.5}, "two", None, {"label": "three"}],
            "metadata": ["no", "mapping"],
            "created_at": "2026-03-04T05:06:07",
            "modified_at": "2026-03-04T05:06:07Z",
            "new": True,
        }
    )
    event, drifts = decode(raw)
    data = event.data
    assert isinstance(data, Order)
    assert (data.id, data.due_amount, data.currency) == ("a", None, "eur")
    assert data.customer is not None
    assert (data.customer.id, data.customer.email, data.customer.name) == ("7", None, "Ada")
    assert data.items is not None
    assert [(item.label, item.amount) for item in data.items] == [("one", None), ("three", None)]
    assert data.metadata is None
    assert data.created_at is None
    assert data.modified_at == NOW
    assert data.extra == {"new": True}
    assert event.json == json.loads(raw)
    assert [drift.path for drift in drifts] == [
        "data.created_at",
        "data.due_amount",
        "data.metadata",
        "data.customer.id",
        "data.customer.email",
        "data.items[0].amount",
        "data.items[1]",
        "data.items[2]",
    ]
    assert not any("twelve" in drift.message for drift in drifts)


@pytest.mark.parametrize(
    ("sent", "expected", "subject", "drifting"),
    [
        (b'"a"', "a", "a", False),
        (b"17", "17", "17", True),
        (b"-17", "-17", "-17", True),
        (b"1.50", "1.50", "1.50", True),
        (b"12345678901234567890123", "12345678901234567890123", "12345678901234567890123", True),
        (b"1e400", "1e400", "1e400", True),
        (b'"\\u0061"', "a", "a", False),
        (b'""', "", None, True),
        (b"null", "", None, True),
        (b"true", "", None, True),
        (b"[1]", "", None, True),
        (b'{"id":"a"}', "", None, True),
    ],
)
@pytest.mark.parametrize("wire_type", ["order.paid", "acme.invoice_sent"])
def test_the_id_is_always_text(
    wire_type: str, sent: bytes, expected: str, subject: str | None, drifting: bool
) -> None:
    raw = body({"id": 0}, wire_type).replace(b'{"id": 0}', b'{"id":' + sent + b"}")
    event, drifts = decode(raw)
    assert event.data.id == expected
    assert subject_of(decode_envelope(raw)) == subject
    assert [drift.path for drift in drifts] == (["data.id"] if drifting else [])


def test_identifiers_of_other_records_are_text_as_well() -> None:
    event, drifts = decode(body({"id": "a", "product_id": 5, "invoice_number": 6}))
    assert (event.data.product_id, event.data.invoice_number) == ("5", None)
    assert [drift.path for drift in drifts] == ["data.invoice_number", "data.product_id"]


def test_a_number_out_of_range_costs_no_metadata() -> None:
    event, _ = decode(around(b'0,"metadata":{"a":1e400,"b":"kept"}'))
    assert event.data.metadata == {"a": math.inf, "b": "kept"}


def test_reports_are_bounded() -> None:
    event, drifts = decode(body({"id": "a", "items": [1] * 10_000}))
    assert event.data.items == ()
    assert len(drifts) == MAX_DRIFTS


def test_drift_need_not_be_listened_to() -> None:
    raw = body({"id": 1})
    event = decode_event(
        decode_envelope(raw), webhook_id="", raw=raw, header_timestamp=0, received_at=0
    )
    assert event.data.id == "1"


# Properties

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.just("2026-03-04T05:06:07Z"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@st.composite
def mangled_samples(draw: st.DrawFn) -> bytes:
    """A sample with a few pieces replaced, removed or doubled: nearly JSON, now and then JSON."""
    raw = bytearray(sample_body(draw(st.sampled_from(TYPES)), now=NOW))
    pieces = st.sampled_from(
        [
            b"",
            b'"',
            b"\\",
            b"\\ud800",
            b"\xff",
            b"[",
            b"{",
            b"}",
            b"1e999",
            b"null",
            b"9" * 4400,
            b",",
            b":",
        ]
    ) | st.binary(max_size=3)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        raw[start : start + draw(st.integers(0, 4))] = draw(pieces)
    return bytes(raw)


@given(st.binary(max_size=200) | mangled_samples())
@example(b'{"type":"a","data":{"b":1e400}}')
def test_any_bytes_are_an_event_or_refused_and_what_is_accepted_can_be_read(raw: bytes) -> None:
    try:
        event, _ = decode(raw)
    except DeliveryDecodingError:
        return
    independent = json.loads(raw.decode("utf-8-sig", "surrogatepass"))
    assert isinstance(independent, dict)
    if (
        event.json != independent
    ):  # what cannot be written in UTF-8, or is not a number, is replaced
        with pytest.raises((UnicodeEncodeError, ValueError)):
            json.dumps(independent, ensure_ascii=False, allow_nan=False).encode()
    assert event.type == re.sub("[\ud800-\udfff]", REPLACED, independent["type"])
    assert event.raw == raw
    json.dumps(event.data.extra, ensure_ascii=False).encode()


@given(st.text(min_size=1, max_size=MAX_TYPE_LENGTH), json_values, json_values)
def test_every_json_object_with_a_text_as_type_is_an_event(
    wire_type: str, timestamp: object, data: object
) -> None:
    raw = json.dumps({"type": wire_type, "timestamp": timestamp, "data": data}).encode()
    event, _ = decode(raw)
    assert event.type == wire_type
    assert event.timestamp.utcoffset() is not None
    assert isinstance(event.data.id, str)


def fits(wire_type: str, name: str, value: object) -> bool:
    """Whether the value is of the kind that the sample has in this field: an independent rule."""
    expected = sample(wire_type, now=NOW)["data"][name]
    if isinstance(expected, bool):
        return isinstance(value, bool)
    if isinstance(expected, int):
        return type(value) is int
    is_time = isinstance(expected, str) and re.match(r"\d{4}-\d\d-\d\dT", expected)
    return isinstance(expected, str) and isinstance(value, str) and not is_time


@given(st.data(), st.sampled_from(TYPES))
def test_any_data_of_any_type_keeps_the_matching_fields(
    data: st.DataObject, wire_type: str
) -> None:
    row = DEFAULT_CATALOG.by_type(wire_type)
    assert row is not None
    original = sample(wire_type, now=NOW)["data"]
    # Percentages have basis points; the sample is a fixed discount.
    names = [name for name in row.data_class.__struct_fields__ if name in original]
    sent = data.draw(
        st.dictionaries(
            st.sampled_from(names) | st.text(max_size=6), json_values, min_size=1, max_size=6
        )
    )
    # Real values beside the drawn ones: none may suffer from its neighbours.
    genuine = set(data.draw(st.lists(st.sampled_from(names), max_size=5, unique=True)))
    sent.update({name: original[name] for name in genuine})
    raw = body(sent, wire_type)
    event, drifts = decode(raw)
    assert type(event) is row.event_class
    assert type(event.data) is row.data_class
    assert isinstance(event.data.id, str)
    assert event.raw == raw
    assert event.json == json.loads(raw)
    assert event.data.extra == {name: value for name, value in sent.items() if name not in names}
    whole, _ = decode(sample_body(wire_type, now=NOW))
    for name in sent:
        if name in genuine:
            assert getattr(event.data, name) == getattr(whole.data, name)
        elif name in names and fits(wire_type, name, sent[name]):
            assert getattr(event.data, name) == sent[name]
    blamed = {re.split(r"[.\[]", drift.path)[1] for drift in drifts}
    assert not blamed & genuine
    assert (subject_of(decode_envelope(raw)) or "") == event.data.id


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_the_two_decoders_agree(unknown: dict[str, Any]) -> None:
    """One unfit field sends a payload the slow way; all else must be as on the fast way."""
    named = sample("subscription.active", now=NOW)["data"]
    data = {**unknown, **named}
    fast, none = decode(body(data, "subscription.active"))
    slow, some = decode(body({**data, "amount": "x"}, "subscription.active"))
    assert none == []
    assert [drift.path for drift in some] == ["data.amount"]
    assert isinstance(fast.data, Subscription)
    assert slow.data == msgspec.structs.replace(fast.data, amount=None)
    expected = {name: value for name, value in unknown.items() if name not in named}
    assert slow.data.extra == fast.data.extra == expected


def test_events_can_be_copied() -> None:
    event, _ = decode(sample_body("order.paid", now=NOW))
    assert copy.copy(event) == event
    assert copy.deepcopy(event) == event


def test_a_large_list_with_drift_is_checked_within_limits() -> None:
    """Counted, not timed: each value that does not fit costs a hundred times one that does."""
    good = {"product_id": "p", "amount": 1}
    bad = {"product_id": 7, "amount": "x", "label": [1]}
    items = [good] + [bad] * 20_000 + [good]
    event, drifts = decode(body({"id": "a", "items": items}))
    kept = event.data.items
    assert kept[0].amount == kept[-1].amount == 1
    assert 100 < len(kept) < MAX_REPAIRS
    assert len(drifts) <= MAX_DRIFTS


def test_repairs_are_counted_for_one_event_and_reported() -> None:
    reports: list[str] = []
    raw = json.dumps({"items": [{"amount": "x"}] * 3 * MAX_REPAIRS}).encode()
    fit(Order, raw, "data", lambda path, message: reports.append(message))
    assert len(reports) <= MAX_REPAIRS + 1
    assert reports[-1].startswith(f"more than {MAX_REPAIRS} values do not fit")
