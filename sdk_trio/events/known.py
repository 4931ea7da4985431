"""The types that the completeness check at startup counts, in the order of its report.

Each class is the complete declaration of a type: its name, data, wire type and meaning. The
catalogue collects every class of this file; exports, samples, the reference page and the command
line follow (``make generate``). A class is named after its type: ``order.paid`` is
:class:`OrderPaidEvent`. The classes are written out, so that editors know them.
"""

from .event import Event
from .payloads import (
    Benefit,
    BenefitGrant,
    Checkout,
    Customer,
    CustomerState,
    Order,
    Product,
    Refund,
    Subscription,
)


class OrderCreatedEvent(Event[Order]):
    """An order was created; it may not be paid yet."""

    __slots__ = ()

    wire_type = "order.created"


class OrderUpdatedEvent(Event[Order]):
    """An order changed, its status included."""

    __slots__ = ()

    wire_type = "order.updated"


class OrderPaidEvent(Event[Order]):
    """An order was paid: the time to deliver the purchase."""

    __slots__ = ()

    wire_type = "order.paid"


class OrderRefundedEvent(Event[Order]):
    """An order was refunded, fully or in part."""

    __slots__ = ()

    wire_type = "order.refunded"


class SubscriptionCreatedEvent(Event[Subscription]):
    """A subscription was created; it may not be active yet."""

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
    """A subscription will end, possibly at the end of its period."""

    __slots__ = ()

    wire_type = "subscription.canceled"


class SubscriptionUncanceledEvent(Event[Subscription]):
    """A cancellation was withdrawn before it took effect."""

    __slots__ = ()

    wire_type = "subscription.uncanceled"


class SubscriptionPastDueEvent(Event[Subscription]):
    """A renewal could not be charged; the charge will be retried."""

    __slots__ = ()

    wire_type = "subscription.past_due"


class SubscriptionRevokedEvent(Event[Subscription]):
    """A subscription has ended: the time to withdraw access."""

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
    """A checkout was abandoned and can no longer be completed."""

    __slots__ = ()

    wire_type = "checkout.expired"


class CustomerCreatedEvent(Event[Customer]):
    """A customer was created."""

    __slots__ = ()

    wire_type = "customer.created"


class CustomerUpdatedEvent(Event[Customer]):
    """A customer's details changed."""

    __slots__ = ()

    wire_type = "customer.updated"


class CustomerStateChangedEvent(Event[CustomerState]):
    """A customer's subscriptions or benefits changed; the data has the whole state."""

    __slots__ = ()

    wire_type = "customer.state_changed"


class CustomerDeletedEvent(Event[Customer]):
    """A customer was deleted."""

    __slots__ = ()

    wire_type = "customer.deleted"


class ProductCreatedEvent(Event[Product]):
    """A product was created."""

    __slots__ = ()

    wire_type = "product.created"


class ProductUpdatedEvent(Event[Product]):
    """A product changed, or was archived."""

    __slots__ = ()

    wire_type = "product.updated"


class BenefitCreatedEvent(Event[Benefit]):
    """A benefit was created."""

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
    """A refund was created or requested."""

    __slots__ = ()

    wire_type = "refund.created"


class RefundUpdatedEvent(Event[Refund]):
    """A refund changed, its status included."""

    __slots__ = ()

    wire_type = "refund.updated"
