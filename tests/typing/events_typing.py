"""What a type checker says about events: checked by mypy, and harmless to import."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, assert_type

from sdk_trio.events import (
    Benefit,
    BenefitGrant,
    BenefitGrantCycledEvent,
    BenefitUpdatedEvent,
    Catalog,
    Checkout,
    CheckoutExpiredEvent,
    Customer,
    CustomerCreatedEvent,
    CustomerSeat,
    CustomerSeatClaimedEvent,
    CustomerState,
    CustomerStateChangedEvent,
    Discount,
    DiscountCreatedEvent,
    Envelope,
    Event,
    EventType,
    Member,
    MemberDeletedEvent,
    Order,
    OrderItem,
    OrderPaidEvent,
    Organization,
    OrganizationUpdatedEvent,
    Payload,
    Product,
    ProductUpdatedEvent,
    Refund,
    RefundUpdatedEvent,
    Subscription,
    SubscriptionPastDueEvent,
    UnknownEvent,
    decode_envelope,
    decode_event,
    subject_of,
)


def data_has_the_type_of_its_event(
    order: OrderPaidEvent,
    subscription: SubscriptionPastDueEvent,
    checkout: CheckoutExpiredEvent,
    customer: CustomerCreatedEvent,
    state: CustomerStateChangedEvent,
    product: ProductUpdatedEvent,
    benefit: BenefitUpdatedEvent,
    grant: BenefitGrantCycledEvent,
    refund: RefundUpdatedEvent,
    seat: CustomerSeatClaimedEvent,
    member: MemberDeletedEvent,
    discount: DiscountCreatedEvent,
    organization: OrganizationUpdatedEvent,
    unknown: UnknownEvent,
) -> None:
    assert_type(order.data, Order)
    assert_type(subscription.data, Subscription)
    assert_type(checkout.data, Checkout)
    assert_type(customer.data, Customer)
    assert_type(state.data, CustomerState)
    assert_type(product.data, Product)
    assert_type(benefit.data, Benefit)
    assert_type(grant.data, BenefitGrant)
    assert_type(refund.data, Refund)
    assert_type(seat.data, CustomerSeat)
    assert_type(member.data, Member)
    assert_type(discount.data, Discount)
    assert_type(organization.data, Organization)
    assert_type(unknown.data, Payload)


def members_and_fields_are_typed(event: OrderPaidEvent) -> None:
    assert_type(event.webhook_id, str)
    assert_type(event.type, str)
    assert_type(event.timestamp, datetime)
    assert_type(event.raw, bytes)
    assert_type(event.attempt, int)
    assert_type(event.received_at, datetime)
    assert_type(event.json, dict[str, Any])
    assert_type(event.data.id, str)
    assert_type(event.data.total_amount, int | None)
    assert_type(event.data.created_at, datetime | None)
    assert_type(event.data.items, tuple[OrderItem, ...] | None)
    assert_type(event.data.metadata, dict[str, Any] | None)
    assert_type(event.data.extra, Mapping[str, Any])


def an_event_stands_for_its_base(event: OrderPaidEvent) -> Event[Payload]:
    return event


def events_cannot_be_changed(event: OrderPaidEvent) -> None:
    event.attempt = 2  # type: ignore[misc]  # frozen: the error is what is tested
    event.data.status = "paid"  # type: ignore[misc]  # frozen: the error is what is tested


def decoding_is_typed(raw: bytes, catalog: Catalog) -> None:
    envelope = decode_envelope(raw)
    assert_type(envelope, Envelope)
    assert_type(envelope.timestamp, datetime | None)
    assert_type(subject_of(envelope), str | None)
    assert_type(catalog.by_type(envelope.type), EventType | None)
    event = decode_event(envelope, webhook_id="", raw=raw, header_timestamp=0, received_at=0.0)
    if isinstance(event, OrderPaidEvent):
        assert_type(event.data, Order)
