"""The typed, lenient data of events: one class per shape, noun file without I/O (spec 2.5).

Only ``id`` is certain. Every other field is None when the sender left it out or sent a value of
another kind; what is new in the sender's API is found in :attr:`Payload.extra`. Amounts are
integers in the currency's smallest unit, times are aware, and values that look like enumerations
stay ``str``, so that a new status is an ordinary value instead of an error.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import attrs
import msgspec

from .values import plain_members

#: A point in time that carries its offset from UTC; one without it does not fit.
Time: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]

#: The pairs that an application attached to a record: text, numbers or booleans.
Metadata: TypeAlias = dict[str, Any]


class _Kept:
    """Holds the undecoded ``data``; apart, since attrs would make fields of the slots."""

    __slots__ = ("_data_raw", "_extra")

    _data_raw: msgspec.Raw
    _extra: Mapping[str, Any]


@attrs.frozen
class Payload(_Kept):
    """Base of every data class, and the data of an event whose type is not in the catalogue.

    ``id`` identifies the subject record; "" when the sender sent none.
    """

    id: str = ""

    # No cached_property: attrs makes it a __getattr__, which the decoder would call for every
    # field that the sender left out.
    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that this class does not name, as plain JSON values; decoded on first use.

        Empty for a payload that was not decoded from a delivery, and for a copy of one. Unknown
        fields of *nested* records are in ``event.json``.
        """
        raw = getattr(self, "_data_raw", None)
        if raw is None:
            return {}
        if not hasattr(self, "_extra"):
            named = frozenset(field.name for field in attrs.fields(type(self)))
            object.__setattr__(self, "_extra", plain_members(raw, without=named))
        return self._extra


def keep_raw(payload: Payload, data_raw: msgspec.Raw) -> None:
    """Let ``payload.extra`` be computed from ``data_raw``, the undecoded ``data`` of its event."""
    object.__setattr__(payload, "_data_raw", data_raw)


@attrs.frozen
class CustomerRef:
    """The customer as other records embed it."""

    id: str | None = None
    email: str | None = None
    name: str | None = None


@attrs.frozen
class ProductRef:
    """The product as other records embed it."""

    id: str | None = None
    name: str | None = None


@attrs.frozen
class Price:
    """The price that a subscription is billed at."""

    id: str | None = None
    name: str | None = None
    price_amount: int | None = None
    price_currency: str | None = None


@attrs.frozen
class OrderItem:
    """One line of an order."""

    product_id: str | None = None
    product_name: str | None = None
    label: str | None = None
    price_amount: int | None = None
    amount: int | None = None
    currency: str | None = None


@attrs.frozen
class Order(Payload):
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


@attrs.frozen
class Subscription(Payload):
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


@attrs.frozen
class Checkout(Payload):
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


@attrs.frozen
class Customer(Payload):
    """A person or company that buys."""

    email: str | None = None
    email_verified: bool | None = None
    name: str | None = None
    external_id: str | None = None
    organization_id: str | None = None
    active_subscriptions_count: int | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


@attrs.frozen
class ActiveSubscription:
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


@attrs.frozen
class GrantedBenefit:
    """A benefit within a customer's state."""

    id: str | None = None
    benefit_id: str | None = None
    benefit_type: str | None = None
    granted_at: Time | None = None


@attrs.frozen
class CustomerState(Customer):
    """A customer together with all that the customer is entitled to at present."""

    active_subscriptions: tuple[ActiveSubscription, ...] | None = None
    granted_benefits: tuple[GrantedBenefit, ...] | None = None


@attrs.frozen
class Product(Payload):
    """Something that is sold."""

    name: str | None = None
    description: str | None = None
    is_archived: bool | None = None
    is_recurring: bool | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


@attrs.frozen
class Benefit(Payload):
    """Something that buyers of a product receive: a licence key, a download, a role."""

    type: str | None = None
    description: str | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    created_at: Time | None = None


@attrs.frozen
class BenefitGrant(Payload):
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


@attrs.frozen
class Refund(Payload):
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


@attrs.frozen
class CustomerSeat(Payload):
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


@attrs.frozen
class Member(Payload):
    """A person who belongs to a customer that is a team."""

    customer_id: str | None = None
    email: str | None = None
    name: str | None = None
    external_id: str | None = None
    role: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None


@attrs.frozen
class Discount(Payload):
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


@attrs.frozen
class Organization(Payload):
    """The seller's own account."""

    name: str | None = None
    slug: str | None = None
    avatar_url: str | None = None
    email: str | None = None
    website: str | None = None
    status: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
