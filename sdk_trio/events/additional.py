"""Further types that the upstream sends: typed and dispatched, but not counted at startup.

Each class is the complete declaration of a type, as in :mod:`sdk_trio.events.known`. Add a new
upstream type here, next to those with the same data.
"""

from .event import Event
from .payloads import CustomerSeat, Discount, Member, Organization, Subscription


class CustomerSeatAssignedEvent(Event[CustomerSeat]):
    """A seat was offered to a person."""

    __slots__ = ()

    wire_type = "customer_seat.assigned"


class CustomerSeatClaimedEvent(Event[CustomerSeat]):
    """An offered seat was claimed."""

    __slots__ = ()

    wire_type = "customer_seat.claimed"


class CustomerSeatRevokedEvent(Event[CustomerSeat]):
    """A seat was withdrawn."""

    __slots__ = ()

    wire_type = "customer_seat.revoked"


class MemberCreatedEvent(Event[Member]):
    """A person joined a customer's team."""

    __slots__ = ()

    wire_type = "member.created"


class MemberUpdatedEvent(Event[Member]):
    """A member's details or role changed."""

    __slots__ = ()

    wire_type = "member.updated"


class MemberDeletedEvent(Event[Member]):
    """A person left a customer's team."""

    __slots__ = ()

    wire_type = "member.deleted"


class SubscriptionCycledEvent(Event[Subscription]):
    """A subscription began a new billing period."""

    __slots__ = ()

    wire_type = "subscription.cycled"


class SubscriptionPausedEvent(Event[Subscription]):
    """A subscription was paused; access is withdrawn temporarily."""

    __slots__ = ()

    wire_type = "subscription.paused"


class SubscriptionResumedEvent(Event[Subscription]):
    """A paused subscription was resumed."""

    __slots__ = ()

    wire_type = "subscription.resumed"


class SubscriptionMigratedEvent(Event[Subscription]):
    """A subscription was migrated from another payment provider to the upstream.

    The provider and its id there are outside the data: ``event.json["provider"]`` and
    ``event.json["provider_subscription_id"]``.
    """

    __slots__ = ()

    wire_type = "subscription.migrated"


class DiscountCreatedEvent(Event[Discount]):
    """A discount was created."""

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
