"""The catalogue of event types: one event class per wire type, and the table made from them.

A class is named after its type, ``order.paid`` is :class:`OrderPaidEvent`. Its base names the class
of ``event.data``. The classes are written out, not generated, so that editors and type checkers see
them. A :class:`Catalog` never changes: with a host's own types it is another one.
"""

import enum
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, get_args, get_origin

import attrs

from ..errors import HandlerRegistrationError
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
from .values import decoder_for, fields_of


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


#: The types that the completeness check counts, in the order of its report.
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


#: A type is a column and a metric label: short, visible, parts joined by full stops.
_WIRE_TYPE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_WIRE_TYPE_LENGTH = 128


class EventGroup(enum.Enum):
    """The origin of a type in the catalogue."""

    KNOWN = "known"
    """One of the 28 that the completeness check counts."""
    ADDITIONAL = "additional"
    """Sent by the upstream, typed and dispatched, not counted."""
    APPLICATION = "application"
    """Added by the application with :meth:`Catalog.with_event`."""


@attrs.frozen
class EventType:
    """One row of the catalogue."""

    wire_type: str
    event_class: type[Event[Any]]
    data_class: type[Any]
    group: EventGroup


def _data_class_of(event_class: type[Event[Any]]) -> type[Any] | None:
    """Return ``X`` of the nearest base ``Event[X]``; None when it is not a class."""
    for ancestor in event_class.__mro__:
        for base in ancestor.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is Event:
                (argument,) = get_args(base)
                found = get_origin(argument) or argument
                return found if isinstance(found, type) else None
    return None


def _row(event_class: type[Event[Any]], group: EventGroup) -> EventType:
    data_class = _data_class_of(event_class)
    if data_class is None:
        raise HandlerRegistrationError(
            f"{event_class.__qualname__} does not say what its data is: derive it from Event[X], "
            "where X is a class of the application, or Event[dict]"
        )
    return EventType(event_class.wire_type, event_class, data_class, group)


def _by_wire_type(rows: tuple[EventType, ...]) -> dict[str, EventType]:
    return {row.wire_type: row for row in rows}


@attrs.frozen
class Catalog:
    """All types that have a class of their own. Unchangeable: :meth:`with_event` makes another.

    Iteration yields every :class:`EventType`: known, additional, the application's.
    """

    rows: tuple[EventType, ...]
    _by_type: dict[str, EventType] = attrs.field(init=False, repr=False, eq=False)
    _by_class: dict[type[Event[Any]], EventType] = attrs.field(init=False, repr=False, eq=False)

    @_by_type.default
    def _index_types(self) -> dict[str, EventType]:
        return _by_wire_type(self.rows)

    @_by_class.default
    def _index_classes(self) -> dict[type[Event[Any]], EventType]:
        return {row.event_class: row for row in self.rows}

    def __iter__(self) -> Iterator[EventType]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def by_type(self, wire_type: str) -> EventType | None:
        """Return the row of ``wire_type``; None for a type without a class, which is normal."""
        return self._by_type.get(wire_type)

    def by_class(self, event_class: type[Event[Any]]) -> EventType:
        """Return the row of ``event_class``.

        Raises:
            HandlerRegistrationError: the class is not in this catalogue.
        """
        row = self._by_class.get(event_class)
        if row is None:
            name = getattr(event_class, "__qualname__", repr(event_class))
            raise HandlerRegistrationError(
                f"{name} is not in the catalogue of events: use one of its classes "
                f"(OrderPaidEvent, ...), or add yours with catalog.with_event({name})"
            )
        return row

    @property
    def known(self) -> tuple[EventType, ...]:
        """The 28 types that the completeness check counts, in the order of its report."""
        return self._of(EventGroup.KNOWN)

    @property
    def additional(self) -> tuple[EventType, ...]:
        """The 14 further types that the upstream sends."""
        return self._of(EventGroup.ADDITIONAL)

    @property
    def application(self) -> tuple[EventType, ...]:
        """The types that the application added."""
        return self._of(EventGroup.APPLICATION)

    def _of(self, group: EventGroup) -> tuple[EventType, ...]:
        return tuple(row for row in self.rows if row.group is group)

    def with_event(self, *event_classes: type[Event[Any]]) -> "Catalog":
        """Return a catalogue that has the application's own event classes as well.

        Args:
            event_classes: classes derived from ``Event[X]``, each with a ``wire_type`` of its own.
                ``X`` is an attrs class, a ``msgspec.Struct``, a dataclass or ``dict``; every field
                of it needs a default, as any field may be absent from a delivery.

        Raises:
            HandlerRegistrationError: a type is malformed or already there, or a class cannot be
                decoded or constructed.
        """
        catalog = self
        for event_class in event_classes:
            row = _checked(event_class)
            taken = catalog.by_type(row.wire_type)
            if taken is not None:
                raise HandlerRegistrationError(
                    f"{event_class.__qualname__}: the type {row.wire_type!r} already belongs to "
                    f"{taken.event_class.__qualname__}; each type has one class"
                )
            catalog = Catalog((*catalog.rows, row))
        return catalog


def _checked(event_class: Any) -> EventType:
    """Refuse at start-up whatever could make decoding fail at the first delivery."""
    if not (isinstance(event_class, type) and issubclass(event_class, Event)):
        raise HandlerRegistrationError(f"{event_class!r} is no class derived from sdk_trio's Event")
    name = event_class.__qualname__
    wire_type: Any = event_class.wire_type
    if not isinstance(wire_type, str) or not (
        _WIRE_TYPE.fullmatch(wire_type) and len(wire_type) <= _MAX_WIRE_TYPE_LENGTH
    ):
        raise HandlerRegistrationError(
            f"{name}.wire_type is {wire_type!r}: it must be a type as it is sent, such as "
            f"'invoice.sent': letters, digits, '_' and '-', parts joined by '.', at most "
            f"{_MAX_WIRE_TYPE_LENGTH} characters"
        )
    row = _row(event_class, EventGroup.APPLICATION)
    _check_data_class(name, row.data_class)
    _check_construction(event_class, row)
    return row


def _check_data_class(event_name: str, data_class: type[Any]) -> None:
    where = f"{event_name}: its data class {data_class.__qualname__}"
    if not issubclass(data_class, dict) and fields_of(data_class) is None:
        raise HandlerRegistrationError(
            f"{where} must be an attrs class, a msgspec.Struct, a dataclass or dict"
        )
    try:
        decoder_for(data_class)
    except Exception as error:  # whatever the application's annotations make msgspec raise
        raise HandlerRegistrationError(f"{where} cannot be decoded from JSON: {error}") from error
    try:
        data_class()
    except Exception as error:  # the application's own constructor
        raise HandlerRegistrationError(
            f"{where} cannot be made from an empty payload ({error}): give every field a default, "
            "for example None"
        ) from error


def _check_construction(event_class: type[Event[Any]], row: EventType) -> None:
    epoch = datetime.fromtimestamp(0, UTC)
    try:
        event_class(
            webhook_id="",
            type=row.wire_type,
            timestamp=epoch,
            data=row.data_class(),
            raw=b"",
            attempt=1,
            received_at=epoch,
        )
    except Exception as error:  # the application's own constructor
        raise HandlerRegistrationError(
            f"{event_class.__qualname__} cannot be made with the members of an event ({error}): "
            "give every field that it adds a default"
        ) from error


#: The 28 known and 14 additional types.
DEFAULT_CATALOG = Catalog(
    (
        *(_row(event_class, EventGroup.KNOWN) for event_class in KNOWN_EVENTS),
        *(_row(event_class, EventGroup.ADDITIONAL) for event_class in ADDITIONAL_EVENTS),
    )
)
