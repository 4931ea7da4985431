"""Deliveries as the inbox keeps them: plain records, and their form in JSON. Pure.

Times are Unix seconds as floats, ids are the ``webhook-id`` header's text. A delivery is found by
its *key*: its signer and its id, because an id is unique for one sender and not in the world.

:func:`listed` and :func:`shown` make the JSON of the command line and of the admin address. Its
fields have the names of the records' attributes, so a name here is a promise to scripts: fields
may be added, none may be renamed.
"""

import base64
import enum
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from .states import REPLAYABLE as REPLAYABLE
from .states import UNFINISHED as UNFINISHED
from .states import DeliveryState as DeliveryState

#: The word that a person writes in place of a tenant to mean the host's delivery of an id.
HOST = "host"

#: The error of a run during which its process ended.
PROCESS_ENDED = "the process ended while it ran"

#: The most other bodies that are kept of one key: the first ones. Further ones are still counted.
MOST_EVIDENCE = 10


def key_of(webhook_id: str, signer: str | None) -> str:
    """Return the key of a delivery: its id alone if the host signed it, else ``ID.TENANT``.

    No id holds a dot, so the two forms cannot be confused, and all keys of one id are neighbours in
    the index.
    """
    return f"{webhook_id}.{signer}" if signer else webhook_id


class NewDelivery(msgspec.Struct, frozen=True, gc=False):
    """A verified delivery as it goes into the inbox; a Struct, which is made faster than attrs.

    ``subject`` is ``data.id`` or None; with ``ordered`` the unfinished events of one subject run
    one at a time in the order of arrival. ``timestamp`` is the signed header, in Unix seconds.
    ``tenant_id`` is the tenant that it belongs to, if there is one. ``signer`` is the tenant whose
    secret has verified it, "" for the host's. ``address`` is the sender's, if it is known; it is
    kept where the body turns out to be another one than the first of its key.
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
        """The key that the inbox finds it by; see :func:`key_of`."""
        return key_of(self.webhook_id, self.signer)


@attrs.frozen
class DeliveryRecord:
    """One delivery as the inbox holds it now.

    ``sequence`` grows in order of arrival. ``queued`` says that our own workers run it; False
    means that the sender's redeliveries do. ``attempts`` counts the runs that were started since it
    arrived or was last put back, ``earlier_attempts`` those before. ``process_ends`` says in how
    many of them the process ended, ``ran_alone`` whether no other run was beside the last of these.
    ``generation`` counts how often it was put back after it had been done.
    ``raw`` is None once the payload retention has passed, or where a listing leaves bodies out.
    ``signer`` is the tenant whose secret verified it, "" for the host's.
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
        """The key that the inbox finds it by; see :func:`key_of`."""
        return key_of(self.webhook_id, self.signer)


class EvidenceRecord(msgspec.Struct, frozen=True):
    """Another body that came under the key of a delivery: when, from where, and its bytes.

    ``tenant_id`` is the tenant that it belongs to, which may be another one than the delivery's.
    """

    received_at: float
    address: str | None
    raw: bytes
    tenant_id: str | None = None


class AttemptRecord(msgspec.Struct, frozen=True):
    """One run that failed: its number from 1, when, for how long, and why.

    ``place`` is the innermost line of the user's code, as ``FILE:LINE in FUNCTION``, or the
    beginning of what an application answered to a forwarded event; ``traceback`` is kept in
    Development only. The run of a forwarded event that ended well is kept as well, without an
    ``error``.
    """

    number: int
    started_at: float
    finished_at: float
    error: str
    place: str | None = None
    traceback: str | None = None


class Admission(enum.Enum):
    """The inbox's answer to a delivery."""

    NEW = enum.auto()
    """It is ours now: committed (``accept``) or claimed (``claim``)."""
    QUEUED = enum.auto()
    """The same id is committed to the queue and not finished."""
    RUNNING = enum.auto()
    """The same id runs inline under another live owner."""
    DONE = enum.auto()
    """The same id has finished within the dedup retention."""


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """Answer of ``accept`` and ``claim``.

    ``attempts`` are the runs started before now, ``earlier`` those before it was put back, and
    ``generation`` counts how often that was after it had been done.
    ``same_body`` is False when the key was known with other bytes: the first ones stay, and the
    others are kept beside them, see :meth:`Inbox.evidence`.
    """

    admission: Admission
    attempts: int = 0
    same_body: bool = True
    earlier: int = 0
    generation: int = 0


class Due(msgspec.Struct, frozen=True):
    """The result of ``take_due``; the caller holds the lease of every record.

    ``records`` carry their bodies. ``more`` says that further records were due beyond ``limit``.
    ``next_due_at`` is the time of the next retry that was not due yet, or None. ``unbegun`` are the
    keys of those that surely no process has begun to run, not even one that ended right then.
    """

    records: Sequence[DeliveryRecord]
    more: bool
    next_due_at: float | None
    unbegun: frozenset[str] = frozenset()


class Renewed(msgspec.Struct, frozen=True):
    """The result of ``renew``.

    ``lost`` are the keys that another owner has taken over; ``given_up`` is the number of leases
    that the store had for this owner although it did not hold them.
    """

    lost: frozenset[str] = frozenset()
    given_up: int = 0


class Done(msgspec.Struct, frozen=True):
    """The handler finished. ``answer`` is what an application answered to a forwarded event."""

    answer: str | None = None


class Retry(msgspec.Struct, frozen=True):
    """The run failed. ``at`` is when our workers try again; None: the sender's redelivery will.

    ``asked`` says that its handler asked for a later one, by ``RetryLater``. ``answer`` is the
    beginning of what an application answered, which is kept and never logged.
    """

    at: float | None
    error: str
    place: str | None = None
    traceback: str | None = None
    answer: str | None = None
    asked: bool = False


class Dead(msgspec.Struct, frozen=True):
    """The run failed and was the last one allowed.

    ``recorded`` says that its last failed run has its record already. ``answer`` is as of
    :class:`Retry`.
    """

    error: str
    place: str | None = None
    traceback: str | None = None
    recorded: bool = False
    answer: str | None = None


class Released(msgspec.Struct, frozen=True):
    """The run was cut short by a shutdown: the attempt does not count, the event is due again."""


class Postponed(msgspec.Struct, frozen=True):
    """The run was put off: the attempt does not count, and the event is due again at ``at``."""

    at: float
    reason: str


class Parked(msgspec.Struct, frozen=True):
    """Nothing runs the event at present: it is kept, and replayable. ``reason`` says why."""

    reason: str | None = None


Outcome = Done | Retry | Dead | Released | Postponed | Parked


class Purged(msgspec.Struct, frozen=True):
    """Counts of what a retention pass removed: bodies, finished and parked deliveries."""

    bodies: int
    finished: int
    parked: int


def listed(record: DeliveryRecord) -> dict[str, Any]:
    """Return every attribute but the body, which listings leave out."""
    # A listing of fifty bodies of a megabyte would be of no use to anybody.
    fields = attrs.asdict(record, filter=lambda field, _: field.name != "raw")
    return {**fields, "key": record.key}


def shown(
    record: DeliveryRecord,
    attempts: Sequence[AttemptRecord],
    evidence: Sequence[EvidenceRecord],
    *,
    body: bool = True,
) -> dict[str, Any]:
    """Return one event whole: its failed runs, the other bodies that came under its key.

    With ``body``, it and each of those has ``raw`` or ``raw_base64``.
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
    """Return ``raw`` as text, ``raw_base64`` where it is not UTF-8, null if it is gone."""
    if raw is None:
        return {"raw": None}
    try:
        return {"raw": raw.decode()}
    except UnicodeDecodeError:
        # Another name, so that nobody takes base64 for the text itself.
        return {"raw_base64": base64.b64encode(raw).decode("ascii")}
