"""The event that a handler receives: the base class of all event classes (spec 2.5)."""

import functools
from datetime import datetime
from typing import Any, ClassVar, Generic, TypeVar

import attrs

from .payloads import Payload
from .values import plain

DataT_co = TypeVar("DataT_co", covariant=True)


def _name_of_data(data: object) -> str:
    """Show the subject alone: an event may be logged, what customers entered may not."""
    identifier = getattr(data, "id", None)
    return f"<{type(data).__name__} id={identifier!r}>"


@attrs.frozen
class Event(Generic[DataT_co]):
    """One verified delivery, typed by its event class (spec 2.5).

    Delivery is at least once: ``webhook_id`` is the same for every copy and every retry, so it
    is the key by which a handler makes its work idempotent.

    An application's own event class names its type and its data::

        class InvoiceSentEvent(Event[InvoiceData]):
            wire_type = "invoice.sent"
    """

    wire_type: ClassVar[str] = ""
    """The type that deliveries of this class carry; "" on classes that stand for many."""

    webhook_id: str
    """The ``webhook-id`` header."""
    type: str
    """The type as it was sent, such as ``order.paid``."""
    timestamp: datetime
    """When it happened, aware: the document's ``timestamp``, else the signed header's."""
    data: DataT_co = attrs.field(repr=_name_of_data)
    """The payload: what fits its class. ``data.id`` identifies the subject record."""
    raw: bytes = attrs.field(repr=False)
    """The exact bytes that were signed."""
    attempt: int
    """How many times this event has been handed to a handler, this one included: from 1."""
    received_at: datetime
    """When this copy arrived here, aware."""
    tenant: Any = None
    """The tenant that the event belongs to, or None."""

    @functools.cached_property
    def json(self) -> dict[str, Any]:
        """The full document as plain JSON values; decoded on first use."""
        document: dict[str, Any] = plain(self.raw)
        return document


class UnknownEvent(Event[Payload]):
    """An event whose type is not in the catalogue; its fields are in ``data.extra``."""

    __slots__ = ()
