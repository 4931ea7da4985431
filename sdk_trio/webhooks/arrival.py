"""A delivery between its verification and its handler. Pure."""

import msgspec

from ..events import Envelope, decode_envelope
from ..storage.records import DeliveryRecord, NewDelivery


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A verified, decoded delivery on its way to its handler.

    ``earlier_attempts`` counts the runs that it had before it was replayed.
    """

    delivery: NewDelivery
    envelope: Envelope
    earlier_attempts: int = 0


def arrival_of(record: DeliveryRecord) -> Arrival:
    """Rebuild the arrival of a delivery that the inbox kept.

    Raises:
        DeliveryDecodingError: the body is no event. A receiver stores none of these, so the store
            is damaged.
    """
    raw = record.raw or b""
    delivery = NewDelivery(
        webhook_id=record.webhook_id,
        type=record.type,
        raw=raw,
        timestamp=record.timestamp,
        received_at=record.received_at,
        subject=record.subject,
        ordered=record.ordered,
        tenant_id=record.tenant_id,
        signer=record.signer or "",
    )
    return Arrival(delivery, decode_envelope(raw), record.earlier_attempts)
