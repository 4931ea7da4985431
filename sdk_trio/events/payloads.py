"""The typed, lenient data of events: one class per shape, noun file without I/O (spec 2.5).

Only ``id`` is certain. Every other field is None when the sender left it out or sent a value of
another kind; what is new in the sender's API is found in :attr:`Payload.extra`. Amounts are
integers in the currency's smallest unit, times are aware, and values that look like enumerations
stay ``str``, so that a new status is an ordinary value instead of an error.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec

from .values import plain_members

#: A point in time that carries its offset from UTC; one without it does not fit.
Time: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]

#: The pairs that an application attached to a record: text, numbers or booleans.
Metadata: TypeAlias = dict[str, Any]


# Structs: an order takes half the time to decode that it takes into an attrs class. The bases of
# nested records need no garbage collection: what was decoded from JSON refers to nothing above it.
class Payload(msgspec.Struct, frozen=True, dict=True):
    """Base of every data class, and the data of an event whose type is not in the catalogue.

    ``id`` identifies the subject record; "" when the sender sent none. A class of an application
    derives from it without a decorator, and its fields need defaults.
    """

    id: str = ""

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that this class does not name, as plain JSON values; decoded on first use.

        Empty for a payload that was not decoded from a delivery, and for a copy of one. Unknown
        fields of *nested* records are in ``event.json``.
        """
        kept = self.__dict__
        extra: Mapping[str, Any] | None = kept.get("extra")
        if extra is None:
            raw: msgspec.Raw | None = kept.get("raw")
            named = frozenset(self.__struct_fields__)
            extra = kept["extra"] = {} if raw is None else plain_members(raw, without=named)
        return extra


def keep_raw(payload: Payload, data_raw: msgspec.Raw) -> None:
    """Let ``payload.extra`` be computed from ``data_raw``, the undecoded ``data`` of its event."""
    payload.__dict__["raw"] = data_raw


class CustomerRef(msgspec.Struct, frozen=True, gc=False):
    """The customer as other records embed it."""

    id: str | None = None
    email: str | None = None
    name: str | None = None


class ProductRef(msgspec.Struct, frozen=True, gc=False):
    """The product as other records embed it."""

    id: str | None = None
    name: str | None = None


class Price(msgspec.Struct, frozen=True, gc=False):
    """The price that a subscription is billed at."""

    id: str | None = None
    name: str | None = None
    price_amount: int | None = None
    price_currency: str | None = None


class OrderItem(msgspec.Struct, frozen=True, gc=False):
    """One line of an order."""

    product_id: str | None = None
    product_name: str | None = None
    label: str | None = None
    price_amount: int | None = None
    amount: int | None = None
    currency: str | None = None


class Order(Payload, frozen=True):
    """A purchase: one-time, or one billing cycle of a subscription."""

    status: str | None = None
    number: str | None = None
    amount: int | None = None
    subtotal_amount: int | None = None
    discount_amount: int | None = None
    net_amount: int | None = None
    tax_amount: int | None = None
    total_amount: int | None = None
    currency: str | None = None
    channel: str | None = None
    billing_reason: str | None = None
    invoice_number: str | None = None
    customer: CustomerRef | None = None
    organization_id: str | None = None
    product_id: str | None = None
    subscription_id: str | None = None
    items: tuple[OrderItem, ...] | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None
    modified_at: Time | None = None


class Subscription(Payload, frozen=True):
    """A recurring purchase of a product."""

    status: str | None = None
    amount: int | None = None
    currency: str | None = None
    current_period_start: Time | None = None
    current_period_end: Time | None = None
    canceled_at: Time | None = None
    cancel_at_period_end: bool | None = None
    started_at: Time | None = None
    ends_at: Time | None = None
    ended_at: Time | None = None
    customer_id: str | None = None
    customer: CustomerRef | None = None
    product_id: str | None = None
    product: ProductRef | None = None
    price: Price | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None
    modified_at: Time | None = None


class Checkout(Payload, frozen=True):
    """A checkout session, from its opening to its success or expiry."""

    status: str | None = None
    amount: int | None = None
    total_amount: int | None = None
    currency: str | None = None
    customer_email: str | None = None
    customer_id: str | None = None
    customer: CustomerRef | None = None
    product_id: str | None = None
    expires_at: Time | None = None
    order_id: str | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


class Customer(Payload, frozen=True):
    """A person or company that buys."""

    email: str | None = None
    email_verified: bool | None = None
    name: str | None = None
    external_id: str | None = None
    organization_id: str | None = None
    active_subscriptions_count: int | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


class ActiveSubscription(msgspec.Struct, frozen=True, gc=False):
    """A subscription within a customer's state."""

    id: str | None = None
    status: str | None = None
    amount: int | None = None
    currency: str | None = None
    recurring_interval: str | None = None
    current_period_start: Time | None = None
    current_period_end: Time | None = None
    cancel_at_period_end: bool | None = None
    started_at: Time | None = None
    product_id: str | None = None


class GrantedBenefit(msgspec.Struct, frozen=True, gc=False):
    """A benefit within a customer's state."""

    id: str | None = None
    benefit_id: str | None = None
    benefit_type: str | None = None
    granted_at: Time | None = None


class CustomerState(Customer, frozen=True):
    """A customer together with all that the customer is entitled to at present."""

    active_subscriptions: tuple[ActiveSubscription, ...] | None = None
    granted_benefits: tuple[GrantedBenefit, ...] | None = None


class Product(Payload, frozen=True):
    """Something that is sold."""

    name: str | None = None
    description: str | None = None
    is_archived: bool | None = None
    is_recurring: bool | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


class Benefit(Payload, frozen=True):
    """Something that buyers of a product receive: a licence key, a download, a role."""

    type: str | None = None
    description: str | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


class BenefitGrant(Payload, frozen=True):
    """That one customer has, or had, one benefit."""

    customer_id: str | None = None
    benefit_id: str | None = None
    benefit_type: str | None = None
    is_granted: bool | None = None
    granted_at: Time | None = None
    is_revoked: bool | None = None
    revoked_at: Time | None = None
    subscription_id: str | None = None
    order_id: str | None = None
    organization_id: str | None = None
    created_at: Time | None = None


class Refund(Payload, frozen=True):
    """Money given back for an order."""

    amount: int | None = None
    tax_amount: int | None = None
    currency: str | None = None
    reason: str | None = None
    status: str | None = None
    order_id: str | None = None
    subscription_id: str | None = None
    customer_id: str | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


class CustomerSeat(Payload, frozen=True):
    """One seat of a purchase that is sold by the seat."""

    status: str | None = None
    subscription_id: str | None = None
    order_id: str | None = None
    customer_id: str | None = None
    customer_email: str | None = None
    invitation_token_expires_at: Time | None = None
    claimed_at: Time | None = None
    revoked_at: Time | None = None
    seat_metadata: Metadata | None = None
    created_at: Time | None = None
    modified_at: Time | None = None


class Member(Payload, frozen=True):
    """A person who belongs to a customer that is a team."""

    customer_id: str | None = None
    email: str | None = None
    name: str | None = None
    external_id: str | None = None
    role: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None


class Discount(Payload, frozen=True):
    """A reduction of the price: ``amount`` for a fixed one, ``basis_points`` for a percentage."""

    name: str | None = None
    type: str | None = None
    code: str | None = None
    duration: str | None = None
    duration_in_months: int | None = None
    amount: int | None = None
    basis_points: int | None = None
    currency: str | None = None
    starts_at: Time | None = None
    ends_at: Time | None = None
    max_redemptions: int | None = None
    redemptions_count: int | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None
    modified_at: Time | None = None


class Organization(Payload, frozen=True):
    """The seller's own account."""

    name: str | None = None
    slug: str | None = None
    avatar_url: str | None = None
    email: str | None = None
    website: str | None = None
    status: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
