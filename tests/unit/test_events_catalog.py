"""The catalogue of types, and events that an application adds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import attrs
import msgspec
import pytest

import sdk_trio.events
from sdk_trio.errors import HandlerRegistrationError
from sdk_trio.events import (
    DEFAULT_CATALOG,
    Event,
    OrderPaidEvent,
    Payload,
    UnknownEvent,
    decode_envelope,
    decode_event,
)

KNOWN = [
    "order.created",
    "order.updated",
    "order.paid",
    "order.refunded",
    "subscription.created",
    "subscription.active",
    "subscription.updated",
    "subscription.canceled",
    "subscription.uncanceled",
    "subscription.past_due",
    "subscription.revoked",
    "checkout.created",
    "checkout.updated",
    "checkout.expired",
    "customer.created",
    "customer.updated",
    "customer.state_changed",
    "customer.deleted",
    "product.created",
    "product.updated",
    "benefit.created",
    "benefit.updated",
    "benefit_grant.created",
    "benefit_grant.updated",
    "benefit_grant.cycled",
    "benefit_grant.revoked",
    "refund.created",
    "refund.updated",
]

TYPES = [row.wire_type for row in DEFAULT_CATALOG]


def class_name(wire_type: str) -> str:
    subject, happening = wire_type.split(".")
    words = subject.split("_") + happening.split("_")
    return "".join(word[0].upper() + word[1:] for word in words) + "Event"


def test_28_types_are_known_in_the_order_of_the_reference() -> None:
    assert len(KNOWN) == 28
    assert [row.wire_type for row in DEFAULT_CATALOG.known] == KNOWN


def test_the_others_are_typed_but_not_counted() -> None:
    additional = [row.wire_type for row in DEFAULT_CATALOG.additional]
    assert "member.created" in additional
    assert [*KNOWN, *additional] == TYPES
    assert len(set(TYPES)) == len(TYPES)
    assert DEFAULT_CATALOG.application == ()


@pytest.mark.parametrize(
    ("wire_type", "expected"),
    [
        ("order.created", "OrderCreatedEvent"),
        ("subscription.past_due", "SubscriptionPastDueEvent"),
        ("customer.state_changed", "CustomerStateChangedEvent"),
        ("benefit_grant.cycled", "BenefitGrantCycledEvent"),
    ],
)
def test_the_naming_rule_itself(wire_type: str, expected: str) -> None:
    assert class_name(wire_type) == expected


@pytest.mark.parametrize("wire_type", TYPES)
def test_each_type_has_an_exported_class_named_after_it(wire_type: str) -> None:
    row = DEFAULT_CATALOG.by_type(wire_type)
    assert row is not None
    assert row.event_class.__name__ == class_name(wire_type)
    assert row.event_class.wire_type == wire_type
    assert getattr(sdk_trio.events, class_name(wire_type)) is row.event_class
    assert class_name(wire_type) in sdk_trio.events.__all__
    assert DEFAULT_CATALOG.by_class(row.event_class) is row
    assert issubclass(row.data_class, Payload)
    assert row.data_class.__name__ in sdk_trio.events.__all__
    assert row.event_class.__doc__


@pytest.mark.parametrize("wire_type", TYPES)
def test_the_data_class_is_named_after_the_subject(wire_type: str) -> None:
    subject = "customer_state" if wire_type.endswith("state_changed") else wire_type.split(".")[0]
    row = DEFAULT_CATALOG.by_type(wire_type)
    assert row is not None
    expected = "".join(word.capitalize() for word in subject.split("_"))
    assert row.data_class.__name__ == expected, (
        f"name the data of {wire_type} {expected}, after what stands before the dot"
    )


def test_all_exported_names_exist_once() -> None:
    names = sdk_trio.events.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(sdk_trio.events, name) for name in names)


def test_an_unknown_type_has_no_row() -> None:
    assert DEFAULT_CATALOG.by_type("acme.invoice_sent") is None


@pytest.mark.parametrize("stranger", [UnknownEvent, Event, int, "order.paid"])
def test_a_class_that_is_not_in_the_catalogue_is_named_in_the_error(stranger: Any) -> None:
    with pytest.raises(HandlerRegistrationError, match=r"not in the catalogue.*with_event"):
        DEFAULT_CATALOG.by_class(stranger)


@attrs.frozen
class Line:
    quantity: int | None = None


class InvoicePayload(Payload, frozen=True):
    total: int | None = None


@attrs.frozen
class InvoiceAttrs:
    id: str = ""
    total: int | None = None


class InvoiceStruct(msgspec.Struct, rename="camel"):
    id: str = ""
    total: int | None = None
    sent_by: str | None = None


@dataclass(frozen=True)
class InvoiceDataclass:
    id: str = ""
    total: int | None = None
    lines: list[Line] = field(default_factory=list)


class PayloadEvent(Event[InvoicePayload]):
    wire_type = "acme.invoice_sent"


class AttrsEvent(Event[InvoiceAttrs]):
    wire_type = "acme.invoice_sent"


class StructEvent(Event[InvoiceStruct]):
    wire_type = "acme.invoice_sent"


class DataclassEvent(Event[InvoiceDataclass]):
    wire_type = "acme.invoice_sent"


class DictEvent(Event[dict[str, Any]]):
    wire_type = "acme.invoice_sent"


def decode(event_class: type[Event[Any]], raw: bytes) -> tuple[Event[Any], list[str]]:
    paths: list[str] = []
    event = decode_event(
        decode_envelope(raw),
        webhook_id="msg_1",
        raw=raw,
        header_timestamp=0,
        received_at=0,
        catalog=DEFAULT_CATALOG.with_event(event_class),
        on_drift=lambda drift: paths.append(drift.path),
    )
    return event, paths


FITTING = (
    b'{"type":"acme.invoice_sent","timestamp":"2026-01-02T03:04:05Z","data":{"id":"i","total":5}}'
)
UNFIT = FITTING.replace(b'"i"', b"17").replace(b"5}}", b'5,"unheard":[1]}}')


@pytest.mark.parametrize("event_class", [PayloadEvent, AttrsEvent, StructEvent, DataclassEvent])
def test_an_application_brings_its_own_event_and_data_class(event_class: Any) -> None:
    event, paths = decode(event_class, FITTING)
    assert type(event) is event_class
    assert (event.data.id, event.data.total, paths) == ("i", 5, [])
    event, paths = decode(event_class, UNFIT)
    assert (event.data.id, event.data.total, paths) == ("17", 5, ["data.id"])


def test_data_derived_from_payload_has_extra() -> None:
    event, _ = decode(PayloadEvent, UNFIT)
    assert event.data.extra == {"unheard": [1]}


def test_a_plain_dict_as_data() -> None:
    event, paths = decode(DictEvent, UNFIT)
    assert event.data == {"id": 17, "total": 5, "unheard": [1]}
    assert paths == []
    event, paths = decode(DictEvent, b'{"type":"acme.invoice_sent","data":[]}')
    assert event.data == {}
    assert paths == ["data", "timestamp"]


def test_names_of_a_struct_in_json_are_respected_when_fields_do_not_fit() -> None:
    event, paths = decode(
        StructEvent, b'{"type":"acme.invoice_sent","data":{"id":"i","sentBy":"ada","total":"x"}}'
    )
    assert (event.data.id, event.data.sent_by, event.data.total) == ("i", "ada", None)
    assert "data.total" in paths


def test_one_unfit_element_of_a_list_leaves_the_others() -> None:
    lines = b'[{"quantity":1},7,{"quantity":"x"}]'
    raw = b'{"type":"acme.invoice_sent","data":{"id":"i","lines":%s}}' % lines
    event, paths = decode(DataclassEvent, raw)
    assert event.data.lines == [Line(1), Line(None)]
    assert paths == ["data.lines[1]", "data.lines[2].quantity", "timestamp"]


def test_a_value_that_the_applications_validator_refuses_is_left_out() -> None:
    @attrs.frozen
    class Checked:
        id: str = ""
        total: int = attrs.field(default=0, validator=attrs.validators.ge(0))

    class CheckedEvent(Event[Checked]):
        wire_type = "acme.invoice_sent"

    event, paths = decode(
        CheckedEvent, b'{"type":"acme.invoice_sent","data":{"id":"i","total":-1}}'
    )
    assert event.data == Checked("i", 0)
    assert "data.total" in paths


def test_a_number_is_kept_as_text_only_where_text_is_expected() -> None:
    @attrs.frozen
    class Numbered:
        id: int = 0
        row_id: int | None = None

    class NumberedEvent(Event[Numbered]):
        wire_type = "acme.invoice_sent"

    event, paths = decode(
        NumberedEvent, b'{"type":"acme.invoice_sent","data":{"id":7,"row_id":1.5}}'
    )
    assert event.data == Numbered(7, None)
    assert paths == ["data.row_id", "timestamp"]


def test_a_nested_record_that_cannot_be_made_is_left_out() -> None:
    @attrs.frozen
    class Strict:
        needed: int

    @attrs.frozen
    class Outer:
        id: str = ""
        strict: Strict | None = None

    class OuterEvent(Event[Outer]):
        wire_type = "acme.invoice_sent"

    event, paths = decode(OuterEvent, b'{"type":"acme.invoice_sent","data":{"id":"i","strict":{}}}')
    assert event.data == Outer("i", None)
    assert "data.strict" in paths


def test_registration_leaves_the_default_catalogue_as_it_is() -> None:
    extended = DEFAULT_CATALOG.with_event(PayloadEvent)
    assert [row.wire_type for row in extended.application] == ["acme.invoice_sent"]
    assert len(extended.known) == 28
    assert len(extended) == len(DEFAULT_CATALOG) + 1
    assert DEFAULT_CATALOG.by_type("acme.invoice_sent") is None


@pytest.mark.parametrize("taken", ["order.paid", "member.created"])
def test_a_type_has_one_class(taken: str) -> None:
    class Another(Event[InvoicePayload]):
        wire_type = taken

    with pytest.raises(HandlerRegistrationError, match=f"{taken}.*already belongs to"):
        DEFAULT_CATALOG.with_event(Another)


def test_the_same_class_twice_is_an_error() -> None:
    with pytest.raises(HandlerRegistrationError, match="already belongs to PayloadEvent"):
        DEFAULT_CATALOG.with_event(PayloadEvent, PayloadEvent)


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        "acme.invoice_sent\n",
        "rechnung.bezahlt\u00e9",
        "a" * 129,
        7,
    ],
)
def test_a_malformed_type_is_refused(malformed: Any) -> None:
    class Malformed(Event[InvoicePayload]):
        wire_type = malformed

    with pytest.raises(HandlerRegistrationError, match=r"Malformed\.wire_type"):
        DEFAULT_CATALOG.with_event(Malformed)


def no_data_class() -> Any:
    class Bare(Event):  # type: ignore[type-arg]  # the mistake under test
        wire_type = "acme.invoice_sent"

    return Bare


def required_field() -> Any:
    @attrs.frozen
    class Required:
        total: int

    class RequiredEvent(Event[Required]):
        wire_type = "acme.invoice_sent"

    return RequiredEvent


def undecodable() -> Any:
    @attrs.frozen
    class Undecodable:
        call: Callable[[], None] | int | str | list[int] | dict[str, int] | None = None
        both: list[int] | set[int] | None = None

    class UndecodableEvent(Event[Undecodable]):
        wire_type = "acme.invoice_sent"

    return UndecodableEvent


def not_a_record() -> Any:
    class NumberEvent(Event[int]):
        wire_type = "acme.invoice_sent"

    return NumberEvent


def extra_member() -> Any:
    @attrs.frozen
    class WithMember(Event[InvoicePayload]):
        wire_type: ClassVar[str] = "acme.invoice_sent"
        needed: int = attrs.field(kw_only=True)

    return WithMember


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_data_class, "derive it from Event"),
        (required_field, "give every field a default"),
        (undecodable, "cannot be decoded"),
        (not_a_record, "must be an attrs class"),
        (extra_member, "give every added field a default"),
        (lambda: "acme.invoice_sent", "not a class derived from"),
        (lambda: InvoicePayload, "not a class derived from"),
    ],
)
def test_errors_of_the_first_delivery_are_raised_at_registration(
    make: Callable[[], Any], says: str
) -> None:
    with pytest.raises(HandlerRegistrationError, match=says):
        DEFAULT_CATALOG.with_event(make())


def test_a_subclass_of_an_event_class_may_take_a_type_of_its_own() -> None:
    class Special(OrderPaidEvent):
        wire_type = "order.specially_paid"

    row = DEFAULT_CATALOG.with_event(Special).by_type("order.specially_paid")
    assert row is not None
    assert row.data_class.__name__ == "Order"
