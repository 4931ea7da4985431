"""Events: their classes, their data, the catalogue of types, and decoding.

Samples are in :mod:`sdk_trio.events.samples`, which is not imported here: receiving needs none.
"""

from . import payloads
from .additional import *
from .catalog import DEFAULT_CATALOG, Catalog, EventGroup, EventType
from .decoding import Drift, Envelope, decode_envelope, decode_event, plain_envelope, subject_of
from .event import Event, Payload, UnknownEvent
from .known import *
from .organization import claimed_organization, organization_of
from .payloads import *

__all__ = [
    # the catalogue and decoding
    "DEFAULT_CATALOG",
    "Catalog",
    "EventGroup",
    "EventType",
    "Drift",
    "Envelope",
    "decode_envelope",
    "decode_event",
    "claimed_organization",
    "organization_of",
    "plain_envelope",
    "subject_of",
    # bases of an application's own events
    "Event",
    "Payload",
    "UnknownEvent",
]
# One class for each type of the catalogue, and the classes of their data.
__all__ += [row.event_class.__name__ for row in DEFAULT_CATALOG]
__all__ += payloads.__all__
