"""Deliveries as stored in the inbox: plain records, and their JSON form. Pure.

Times are Unix seconds as floats; ids are the text of the ``webhook-id`` header. The *key* of a
delivery is its signer and its id, because an id is unique only per sender. A source, which is
a sender other than the upstream, signs as ``@NAME``.

:func:`listed` and :func:`shown` make the JSON of the command line and the admin address. Its fields
are named like the records' attributes, and scripts rely on them: fields may be added, but not
renamed.
"""

import base64
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from .states import REPLAYABLE as REPLAYABLE
from .states import UNFINISHED as UNFINISHED
from .states import DeliveryState as DeliveryState

#: The word entered instead of a tenant for the host's delivery of an id.
HOST = "host"

#: The error of a run during which its process ended.
PROCESS_ENDED = "the process ended while it ran"

#: The first character of a source's signer. No tenant's id begins with it.
SOURCE_MARK = "@"

#: The maximum number of other bodies stored per key. Later ones are only counted.
MOST_EVIDENCE = 10


def key_of(webhook_id: str, signer: str | None) -> str:
    """Return the key of a delivery: the id if the host signed it, else ``ID.TENANT``.

    An id never contains a dot, so the two forms cannot be confused, and all keys of one id are
    adjacent in the index.
    """
    return f"{webhook_id}.{signer}" if signer else webhook_id


def signer_of_key(key: str) -> str:
    """Return the signer in a key, "" for the host."""
    return key.partition(".")[2]


def signer_of(source: str) -> str:
    """Return the signer of a source's deliveries, ``@NAME``."""
    return f"{SOURCE_MARK}{source}"


def source_of_signer(signer: str) -> str | None:
    """Return the source that is this signer; None: the upstream's host, or a tenant."""
    return signer[1:] if signer.startswith(SOURCE_MARK) else None


class NewDelivery(msgspec.Struct, frozen=True, gc=False):
    """A verified delivery to be stored; a Struct, which is faster to create than an attrs class.

    ``subject`` is ``data.id`` or None; with ``ordered``, unfinished events of one subject run one
    at a time in order of arrival. ``timestamp`` is the signed header, in Unix seconds.
    ``tenant_id`` is the tenant it belongs to, if any. ``signer`` is the tenant whose secret
    verified it, "" for the host's, ``@NAME`` for a source's. ``address`` is the sender's, if known;
    it is stored if the body differs from the first one of its key.

    No text of it has half of a surrogate pair, which no store can hold
    (:func:`~sdk_trio.base.text.storable`).
    """

    webhook_id: str
    type: str
    raw: bytes
    timestamp: int
    received_at: float
    subject: str | None = None
    ordered: bool = False
    tenant_id: str | None = None
    signer: str = ""
    address: str | None = None

    @property
    def key(self) -> str:
        """The key under which the inbox stores it; see :func:`key_of`."""
        return key_of(self.webhook_id, self.signer)

    @property
    def source(self) -> str | None:
        """The source that sent it; None: the upstream."""
        return source_of_signer(self.signer)

    @property
    def tenant_or_signer(self) -> str | None:
        """The tenant it belongs to, or the source's signer; each has subjects of its own."""
        return self.signer if self.signer.startswith(SOURCE_MARK) else self.tenant_id


@attrs.frozen
class DeliveryRecord:
    """One delivery in its current stored state.

    ``sequence`` grows in order of arrival. ``queued`` means that our own workers run it; otherwise
    the sender's redeliveries do. ``attempts`` counts the runs started since it arrived or was last
    replayed, ``earlier_attempts`` those before. ``process_ends`` counts the runs during which the
    process ended, ``ran_alone`` is whether the last of these was the only run then. ``generation``
    counts the replays after it was done. ``raw`` is None after the payload retention, or if a
    listing omits bodies. ``signer`` is the tenant whose secret verified it, "" for the host's,
    ``@NAME`` for a source's.
    """

    sequence: int
    webhook_id: str
    type: str
    state: DeliveryState
    queued: bool
    attempts: int
    received_at: float
    timestamp: int
    subject: str | None
    ordered: bool
    next_attempt_at: float | None
    started_at: float | None
    finished_at: float | None
    last_error: str | None
    raw: bytes | None
    tenant_id: str | None = None
    process_ends: int = 0
    ran_alone: bool = attrs.field(default=False, converter=bool)
    earlier_attempts: int = 0
    signer: str = ""
    generation: int = 0

    @property
    def key(self) -> str:
        """The key under which the inbox stores it; see :func:`key_of`."""
        return key_of(self.webhook_id, self.signer)

    @property
    def source(self) -> str | None:
        """The source that sent it; None: the upstream."""
        return source_of_signer(self.signer)


class EvidenceRecord(msgspec.Struct, frozen=True):
    """Another body received under the key of a delivery: its time, its source address, and its
    bytes.

    ``tenant_id`` is its own tenant, which may differ from the delivery's.
    """

    received_at: float
    address: str | None
    raw: bytes
    tenant_id: str | None = None


class AttemptRecord(msgspec.Struct, frozen=True):
    """One failed run: its number from 1, its time, its duration, and the reason.

    ``place`` is the innermost line of the user's code, as ``FILE:LINE in FUNCTION``, or for a
    forwarded event the beginning of the application's answer. ``traceback`` is stored in
    Development only. A successful run of a forwarded event is stored as well, without an ``error``.
    """

    number: int
    started_at: float
    finished_at: float
    error: str
    place: str | None = None
    traceback: str | None = None


class Admission(enum.Enum):
    """The inbox's result for a new delivery."""

    NEW = enum.auto()
    """Accepted: committed (``accept``) or claimed (``claim``)."""
    QUEUED = enum.auto()
    """The same event is committed to the queue and unfinished."""
    RUNNING = enum.auto()
    """The same event runs inline under another live lease holder."""
    DONE = enum.auto()
    """The same event finished within the dedup retention."""


class Lease(msgspec.Struct, eq=False, gc=False):
    """The ownership of one run: a claim returns it, and every later operation on the run names it.

    ``key`` is the delivery's. The token is new with each claim of a run: an operation whose token
    is not the current one changes nothing. ``sequence`` and ``start`` belong to the store:
    ``start`` is its ``UnawaitedStart`` while the start of the run may not be recorded yet, which
    the outcome records again; else None.
    """

    key: str
    token: int
    sequence: int = 0
    start: Any = None

    def renew_as(self, other: "Lease") -> None:
        """Become the lease ``other`` of the same delivery, for all that have this object."""
        self.token, self.sequence, self.start = other.token, other.sequence, None


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """The result of ``accept`` and ``claim``.

    ``attempts`` are the runs started so far, ``earlier`` those before the last replay;
    ``generation`` counts the replays after it was done. ``same_body`` is False if the key is known
    with another body. The first body stays, and the others are stored beside it; see
    :meth:`Inbox.evidence`. ``lease`` is that of the caller's run, if it runs the delivery.
    """

    admission: Admission
    attempts: int = 0
    same_body: bool = True
    earlier: int = 0
    generation: int = 0
    lease: Lease | None = None


class Due(msgspec.Struct, frozen=True):
    """The result of ``claim_due``.

    ``records`` include their bodies; ``leases`` has the lease of each, by key. ``more``: ask again
    at once, because further records may be due: beyond ``limit``, in lanes that were not read, or
    made free by this call.
    ``next_due_at`` is the time of the next retry, or None. ``first_runs`` are the keys that
    certainly no process has started to run. ``limited``: events wait for a limit of their handler.
    ``superseded`` are the keys of events that were ended, each with the key of the newer one.
    """

    records: Sequence[DeliveryRecord]
    more: bool
    next_due_at: float | None
    first_runs: frozenset[str] = frozenset()
    limited: bool = False
    superseded: Sequence[tuple[str, str]] = ()
    leases: Mapping[str, Lease] = msgspec.field(default_factory=dict)


class Renewed(msgspec.Struct, frozen=True):
    """The result of ``renew``.

    ``lost`` are the keys of leases that another owner has taken over; ``given_up`` is the number of
    stored leases of this owner that it no longer held.
    """

    lost: frozenset[str] = frozenset()
    given_up: int = 0


class Done(msgspec.Struct, frozen=True):
    """The handler finished. ``answer`` is the application's answer to a forwarded event.

    ``reason`` is why the event is done without being handled: it was discarded.
    """

    answer: str | None = None
    reason: str | None = None


class Retry(msgspec.Struct, frozen=True):
    """The run failed. ``at`` is the time of our next attempt; None: the sender redelivers it.

    ``asked`` is true if the handler requested a later run with ``RetryLater``. ``answer`` is the
    beginning of the application's answer, which is stored and never logged.
    """

    at: float | None
    error: str
    place: str | None = None
    traceback: str | None = None
    answer: str | None = None
    asked: bool = False


class Dead(msgspec.Struct, frozen=True):
    """The last allowed run failed.

    ``recorded``: the record of the last failed run exists already. ``answer`` is as in
    :class:`Retry`.
    """

    error: str
    place: str | None = None
    traceback: str | None = None
    recorded: bool = False
    answer: str | None = None


class Released(msgspec.Struct, frozen=True):
    """A shutdown cancelled the run: the attempt does not count, and the event is due again."""


class Postponed(msgspec.Struct, frozen=True):
    """The event was postponed: no attempt is used up, and it is due again at ``at``."""

    at: float
    reason: str


class Parked(msgspec.Struct, frozen=True):
    """The event is stored without being run, and can be replayed. ``reason`` says why."""

    reason: str | None = None


Outcome = Done | Retry | Dead | Released | Postponed | Parked


class Purged(msgspec.Struct, frozen=True):
    """Counts of rows that a retention pass removed: bodies, finished and parked deliveries."""

    bodies: int
    finished: int
    parked: int


def listed(record: DeliveryRecord) -> dict[str, Any]:
    """Return every attribute except the body, which listings omit; ``source`` if it has one."""
    # Fifty bodies of a megabyte would make a listing useless.
    fields = attrs.asdict(record, filter=lambda field, _: field.name != "raw")
    source = {} if record.source is None else {"source": record.source}
    return {**fields, "key": record.key, **source}


def shown(
    record: DeliveryRecord,
    attempts: Sequence[AttemptRecord],
    evidence: Sequence[EvidenceRecord],
    *,
    body: bool = True,
) -> dict[str, Any]:
    """Return one event in full, with its failed runs and the other bodies of its key.

    With ``body``, the event and each other body have ``raw`` or ``raw_base64``.
    """
    failed = [msgspec.structs.asdict(attempt) for attempt in attempts if attempt.error]
    answered = [msgspec.structs.asdict(attempt) for attempt in attempts if not attempt.error]
    return {
        **listed(record),
        **(body_fields(record.raw) if body else {}),
        "failed_attempts": failed,
        "answered_attempts": answered,
        "other_bodies": [
            {
                "received_at": other.received_at,
                "address": other.address,
                "tenant_id": other.tenant_id,
                **(body_fields(other.raw) if body else {}),
            }
            for other in evidence
        ],
    }


def body_fields(raw: bytes | None) -> dict[str, str | None]:
    """Return ``raw`` as text, ``raw_base64`` if it is not UTF-8, null if it was removed."""
    if raw is None:
        return {"raw": None}
    try:
        return {"raw": raw.decode()}
    except UnicodeDecodeError:
        # A separate name, so that base64 is not mistaken for the text itself.
        return {"raw_base64": base64.b64encode(raw).decode("ascii")}
