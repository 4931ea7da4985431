"""A delivery between its verification and its handler."""

from typing import Final

import msgspec
import trio
from msgspec.structs import replace

from ..base.executor import run_in_thread
from ..events import Envelope, decode_envelope, plain_envelope
from ..events.decoding import Outline
from ..records.deliveries import Admitted, DeliveryRecord, NewDelivery

#: Bodies above this are fully decoded in a thread: at half a second for a megabyte, decoding would
#: block the event loop.
LARGE_BYTES: Final = 256 * 1024


class VerifiedDelivery(msgspec.Struct, frozen=True, gc=False):
    """A verified and decoded delivery that a handler will get.

    ``earlier_attempts`` counts the runs that it had before it was replayed, ``generation`` its
    replays after it was done.
    """

    delivery: NewDelivery
    envelope: Envelope | Outline
    earlier_attempts: int = 0
    generation: int = 0


def resumed(arrival: VerifiedDelivery, admitted: Admitted) -> VerifiedDelivery:
    """Return the delivery with the runs that it had before it was replayed."""
    return replace(arrival, earlier_attempts=admitted.earlier, generation=admitted.generation)


async def decode_in_full(body: bytes) -> Envelope:
    """Return the envelope of a verified body that :func:`plain_envelope` did not decode.

    Cancellation waits for the thread, if there is one; it ends within a second.

    Raises:
        DeliveryDecodingError: the body is not an event.
    """
    if len(body) <= LARGE_BYTES:
        await trio.lowlevel.checkpoint()
        return decode_envelope(body)
    return await run_in_thread(decode_envelope, body)


async def arrival_of(record: DeliveryRecord) -> VerifiedDelivery:
    """Rebuild the arrival of a stored delivery.

    A source's body was read when it was verified; its handler's class decodes it.

    Raises:
        DeliveryDecodingError: the body is not an event. A receiver stores only events, so the store
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
    if record.source is not None:
        await trio.lowlevel.checkpoint()
        return VerifiedDelivery(
            delivery, Envelope(record.type), record.earlier_attempts, record.generation
        )
    envelope = plain_envelope(raw)
    if envelope is None:
        envelope = await decode_in_full(raw)
    else:
        await trio.lowlevel.checkpoint()
    return VerifiedDelivery(delivery, envelope, record.earlier_attempts, record.generation)
