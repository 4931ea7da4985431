"""One event class per type: the table from which the catalogue is made (spec 6.1).

A class is named after its type, ``order.paid`` is :class:`OrderPaidEvent`. Its base names the class
of ``event.data``. The classes are written out, not generated, so that editors and type checkers see
them.
"""

from typing import Any

from .event import Event
from .payloads import (
    Benefit,
    BenefitGrant,
    Checkout,
    Customer,
    CustomerSeat,
    CustomerState,
    Discount,
    Member,
    Order,
    Organization,
    Product,
    Refund,
    Subscription,
)


class OrderCreatedEvent(Event[Order]):
    """An order was made; it may not be paid yet."""

    __slots__ = ()

    wire_type = "order.created"


class OrderUpdatedEvent(Event[Order]):
    """An order changed, its status included."""

    __slots__ = ()

    wire_type = "order.updated"


class OrderPaidEvent(Event[Order]):
    """An order is paid: the moment to deliver what was bought."""

    __slots__ = ()

    wire_type = "order.paid"


class OrderRefundedEvent(Event[Order]):
    """An order was refunded, fully or in part."""

    __slots__ = ()

    wire_type = "order.refunded"


class SubscriptionCreatedEvent(Event[Subscription]):
    """A subscription was made; it may not be active yet."""

    __slots__ = ()

    wire_type = "subscription.created"


class SubscriptionActiveEvent(Event[Subscription]):
    """A subscription became active: its first payment succeeded."""

    __slots__ = ()

    wire_type = "subscription.active"


class SubscriptionUpdatedEvent(Event[Subscription]):
    """A subscription changed in any way."""

    __slots__ = ()

    wire_type = "subscription.updated"


class SubscriptionCanceledEvent(Event[Subscription]):
    """A subscription will end; it may run until its period's end."""

    __slots__ = ()

    wire_type = "subscription.canceled"


class SubscriptionUncanceledEvent(Event[Subscription]):
    """A cancellation was withdrawn before it took effect."""

    __slots__ = ()

    wire_type = "subscription.uncanceled"


class SubscriptionPastDueEvent(Event[Subscription]):
    """A renewal could not be charged; it is tried again."""

    __slots__ = ()

    wire_type = "subscription.past_due"


class SubscriptionRevokedEvent(Event[Subscription]):
    """A subscription has ended: the moment to withdraw access."""

    __slots__ = ()

    wire_type = "subscription.revoked"


class CheckoutCreatedEvent(Event[Checkout]):
    """A checkout was opened."""

    __slots__ = ()

    wire_type = "checkout.created"


class CheckoutUpdatedEvent(Event[Checkout]):
    """A checkout changed, its status included."""

    __slots__ = ()

    wire_type = "checkout.updated"


class CheckoutExpiredEvent(Event[Checkout]):
    """A checkout was left and can no longer be completed."""

    __slots__ = ()

    wire_type = "checkout.expired"


class CustomerCreatedEvent(Event[Customer]):
    """A customer was made."""

    __slots__ = ()

    wire_type = "customer.created"


class CustomerUpdatedEvent(Event[Customer]):
    """A customer's details changed."""

    __slots__ = ()

    wire_type = "customer.updated"


class CustomerStateChangedEvent(Event[CustomerState]):
    """A customer's subscriptions or benefits changed; the whole state is in it."""

    __slots__ = ()

    wire_type = "customer.state_changed"


class CustomerDeletedEvent(Event[Customer]):
    """A customer was deleted."""

    __slots__ = ()

    wire_type = "customer.deleted"


class ProductCreatedEvent(Event[Product]):
    """A product was made."""

    __slots__ = ()

    wire_type = "product.created"


class ProductUpdatedEvent(Event[Product]):
    """A product changed, or was archived."""

    __slots__ = ()

    wire_type = "product.updated"


class BenefitCreatedEvent(Event[Benefit]):
    """A benefit was made."""

    __slots__ = ()

    wire_type = "benefit.created"


class BenefitUpdatedEvent(Event[Benefit]):
    """A benefit changed."""

    __slots__ = ()

    wire_type = "benefit.updated"


class BenefitGrantCreatedEvent(Event[BenefitGrant]):
    """A customer was granted a benefit."""

    __slots__ = ()

    wire_type = "benefit_grant.created"


class BenefitGrantUpdatedEvent(Event[BenefitGrant]):
    """A grant changed."""

    __slots__ = ()

    wire_type = "benefit_grant.updated"


class BenefitGrantCycledEvent(Event[BenefitGrant]):
    """A grant was renewed with its subscription's new period."""

    __slots__ = ()

    wire_type = "benefit_grant.cycled"


class BenefitGrantRevokedEvent(Event[BenefitGrant]):
    """A customer lost a benefit."""

    __slots__ = ()

    wire_type = "benefit_grant.revoked"


class RefundCreatedEvent(Event[Refund]):
    """A refund was made, or asked for."""

    __slots__ = ()

    wire_type = "refund.created"


class RefundUpdatedEvent(Event[Refund]):
    """A refund changed, its status included."""

    __slots__ = ()

    wire_type = "refund.updated"


class CustomerSeatAssignedEvent(Event[CustomerSeat]):
    """A seat was offered to somebody."""

    __slots__ = ()

    wire_type = "customer_seat.assigned"


class CustomerSeatClaimedEvent(Event[CustomerSeat]):
    """A seat was taken by the one it was offered to."""

    __slots__ = ()

    wire_type = "customer_seat.claimed"


class CustomerSeatRevokedEvent(Event[CustomerSeat]):
    """A seat was withdrawn."""

    __slots__ = ()

    wire_type = "customer_seat.revoked"


class MemberCreatedEvent(Event[Member]):
    """Somebody joined a customer's team."""

    __slots__ = ()

    wire_type = "member.created"


class MemberUpdatedEvent(Event[Member]):
    """A member's details or role changed."""

    __slots__ = ()

    wire_type = "member.updated"


class MemberDeletedEvent(Event[Member]):
    """Somebody left a customer's team."""

    __slots__ = ()

    wire_type = "member.deleted"


class SubscriptionMigratedEvent(Event[Subscription]):
    """A subscription that another payment provider billed is billed by the upstream from now on.

    Which provider, and its id there, stand beside the data: ``event.json["provider"]`` and
    ``event.json["provider_subscription_id"]``.
    """

    __slots__ = ()

    wire_type = "subscription.migrated"


class SubscriptionCycledEvent(Event[Subscription]):
    """A subscription began a new billing period."""

    __slots__ = ()

    wire_type = "subscription.cycled"


class SubscriptionPausedEvent(Event[Subscription]):
    """A subscription was paused; access is withdrawn for a time."""

    __slots__ = ()

    wire_type = "subscription.paused"


class SubscriptionResumedEvent(Event[Subscription]):
    """A paused subscription runs again."""

    __slots__ = ()

    wire_type = "subscription.resumed"


class DiscountCreatedEvent(Event[Discount]):
    """A discount was made."""

    __slots__ = ()

    wire_type = "discount.created"


class DiscountUpdatedEvent(Event[Discount]):
    """A discount changed, or was redeemed."""

    __slots__ = ()

    wire_type = "discount.updated"


class DiscountDeletedEvent(Event[Discount]):
    """A discount was deleted."""

    __slots__ = ()

    wire_type = "discount.deleted"


class OrganizationUpdatedEvent(Event[Organization]):
    """The seller's account changed."""

    __slots__ = ()

    wire_type = "organization.updated"


#: The types that the completeness check counts (spec 6.1), in the order of its report.
KNOWN_EVENTS: tuple[type[Event[Any]], ...] = (
    OrderCreatedEvent,
    OrderUpdatedEvent,
    OrderPaidEvent,
    OrderRefundedEvent,
    SubscriptionCreatedEvent,
    SubscriptionActiveEvent,
    SubscriptionUpdatedEvent,
    SubscriptionCanceledEvent,
    SubscriptionUncanceledEvent,
    SubscriptionPastDueEvent,
    SubscriptionRevokedEvent,
    CheckoutCreatedEvent,
    CheckoutUpdatedEvent,
    CheckoutExpiredEvent,
    CustomerCreatedEvent,
    CustomerUpdatedEvent,
    CustomerStateChangedEvent,
    CustomerDeletedEvent,
    ProductCreatedEvent,
    ProductUpdatedEvent,
    BenefitCreatedEvent,
    BenefitUpdatedEvent,
    BenefitGrantCreatedEvent,
    BenefitGrantUpdatedEvent,
    BenefitGrantCycledEvent,
    BenefitGrantRevokedEvent,
    RefundCreatedEvent,
    RefundUpdatedEvent,
)

#: Types that the upstream sends as well; typed and dispatched, but not counted.
ADDITIONAL_EVENTS: tuple[type[Event[Any]], ...] = (
    CustomerSeatAssignedEvent,
    CustomerSeatClaimedEvent,
    CustomerSeatRevokedEvent,
    MemberCreatedEvent,
    MemberUpdatedEvent,
    MemberDeletedEvent,
    SubscriptionCycledEvent,
    SubscriptionPausedEvent,
    SubscriptionResumedEvent,
    SubscriptionMigratedEvent,
    DiscountCreatedEvent,
    DiscountUpdatedEvent,
    DiscountDeletedEvent,
    OrganizationUpdatedEvent,
)
