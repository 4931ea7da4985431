# For: Catalog, DEFAULT_CATALOG, Event, Payload, EventType
from sdk_trio.events import DEFAULT_CATALOG, Event, Payload


class InvoiceData(Payload, frozen=True):
    total: int | None = None


class InvoiceSentEvent(Event[InvoiceData]):
    wire_type = "acme.invoice_sent"


catalog = DEFAULT_CATALOG.with_event(InvoiceSentEvent)
row = catalog.by_type("acme.invoice_sent")
print(row and row.event_class.__name__)
# Output: InvoiceSentEvent
