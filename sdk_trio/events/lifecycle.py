"""The event types that the current state of a record implies. Pure.

A *kind* is a list of the upstream whose records catch-up can turn into events. Each kind has the
type ``*.updated``, which carries the current state, and *stages*: the lifecycle types that a record
passes through. A stage is implied if the record's status or times show that it was reached.
docs/reference/catch-up.md has the table for users.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ..base.text import storable


class Stage(msgspec.Struct, frozen=True):
    """One lifecycle type of a kind.

    ``at`` is the field with the time at which a record reached the stage; None: no field has it.
    ``statuses`` are the statuses that imply the stage; empty: the time in ``at`` implies it.
    ``undone_by`` is a later type that takes back what this one gives, if the record then has one of
    ``undone_statuses``; empty: any status.
    """

    type: str
    at: str | None = None
    statuses: frozenset[str] = frozenset()
    undone_by: str | None = None
    undone_statuses: frozenset[str] = frozenset()

    def is_reached(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record has reached the stage."""
        if self.statuses:
            status = record.get("status")
            return isinstance(status, str) and status in self.statuses
        return self.at is not None and record.get(self.at) is not None

    def is_undone(self, event_type: str, status: object) -> bool:
        """Return whether an event, with this status of its record, takes back the stage."""
        if event_type != self.undone_by:
            return False
        # A status that is not text is unknown, and may not be hashable.
        return not self.undone_statuses or (
            isinstance(status, str) and status in self.undone_statuses
        )


#: The field with the time of a record's creation, by which most lists are sorted.
CREATED: Final = "created_at"


class RecordKind(msgspec.Struct, frozen=True):
    """One list of the upstream.

    ``name`` is the attribute of the client. ``family`` is the first part of the types. ``sorting``
    is the field of the list's order, which never changes once it is set.
    """

    name: str
    family: str
    stages: tuple[Stage, ...]
    sorting: str = CREATED

    @property
    def updated(self) -> str:
        """The type that carries the current state."""
        return f"{self.family}.updated"

    @property
    def types(self) -> tuple[str, ...]:
        """All types of the kind, the lifecycle in its order and then ``*.updated``."""
        return (*(stage.type for stage in self.stages), self.updated)


def _created(family: str) -> Stage:
    return Stage(f"{family}.created", at="created_at")


_PAID = frozenset({"paid", "partially_refunded", "refunded"})
_REFUNDED = frozenset({"partially_refunded", "refunded"})

#: The lists in the order in which they are read: a record comes after those that it refers to.
KINDS: Final = (
    RecordKind("products", "product", (_created("product"),)),
    RecordKind("customers", "customer", (_created("customer"),)),
    RecordKind(
        "checkouts",
        "checkout",
        (
            _created("checkout"),
            Stage("checkout.expired", at="expires_at", statuses=frozenset({"expired"})),
        ),
    ),
    RecordKind(
        "subscriptions",
        "subscription",
        (
            _created("subscription"),
            Stage("subscription.active", at="started_at", undone_by="subscription.revoked"),
            Stage("subscription.past_due", at="past_due_at", statuses=frozenset({"past_due"})),
            Stage("subscription.paused", at="paused_at", statuses=frozenset({"paused"})),
            Stage("subscription.canceled", at="canceled_at"),
            Stage("subscription.revoked", at="ended_at"),
        ),
        # The list cannot be sorted by created_at.
        sorting="started_at",
    ),
    RecordKind(
        "orders",
        "order",
        (
            _created("order"),
            # A partial refund takes nothing back.
            Stage(
                "order.paid",
                statuses=_PAID,
                undone_by="order.refunded",
                undone_statuses=frozenset({"refunded"}),
            ),
            Stage("order.refunded", statuses=_REFUNDED),
        ),
    ),
    RecordKind("refunds", "refund", (_created("refund"),)),
    RecordKind(
        "benefit_grants",
        "benefit_grant",
        (
            Stage("benefit_grant.created", at="granted_at", undone_by="benefit_grant.revoked"),
            Stage("benefit_grant.revoked", at="revoked_at"),
        ),
    ),
)

_STAGES: Final = {stage.type: stage for kind in KINDS for stage in kind.stages}


def stage_of(event_type: str) -> Stage | None:
    """Return the stage of a lifecycle type; None for any other type."""
    return _STAGES.get(event_type)


class Implied(msgspec.Struct, frozen=True):
    """An event type that a record's state implies, and its time in Unix seconds."""

    type: str
    at: float


class Changed(msgspec.Struct, frozen=True):
    """A record that changed in a range of time.

    ``changed_at`` is the time of its last change (Unix seconds), and ``changed_text`` the same as
    the upstream wrote it. ``implied`` are lifecycle types in their order. ``uncertain`` are types
    that the state implies, too, but that may be older than the retention of ids.
    """

    kind: RecordKind
    subject: str
    record: Mapping[str, Any]
    changed_at: float
    changed_text: str
    implied: tuple[Implied, ...]
    uncertain: tuple[str, ...] = ()


def find_change(
    kind: RecordKind, record: Mapping[str, Any], *, since: float, until: float, memory: float
) -> Changed | None:
    """Return the changes of a record between two times; None if there are none.

    A stage with a time of its own is implied if that time lies in the range. A stage without one,
    such as ``order.paid``, is implied by the state alone. Both are uncertain if the inbox would not
    remember an earlier event of the stage.

    Args:
        kind: of the record.
        record: as the upstream lists it.
        since: Unix seconds.
        until: Unix seconds. A record that was created later is not in this range.
        memory: the inbox knows which events it got since this time (Unix seconds).

    Raises:
        ValueError: the record has no id, or neither ``modified_at`` nor ``created_at`` is a time.
    """
    subject = record.get("id")
    text = record.get("modified_at") or record.get("created_at")
    changed_at, created_at = seconds_of(text), seconds_of(record.get("created_at"))
    if not isinstance(subject, str) or not subject or changed_at is None:
        raise ValueError("the record has no id, or no time that can be read")
    if changed_at < since or (created_at is not None and created_at > until):
        return None
    implied: list[Implied] = []
    uncertain: list[str] = []
    for stage in kind.stages:
        if not stage.is_reached(record):
            continue
        at = None if stage.at is None else seconds_of(record.get(stage.at))
        if at is not None and not since <= at <= until:
            continue
        earliest = created_at if at is None else at
        if earliest is not None and earliest >= memory:
            implied.append(Implied(stage.type, changed_at if at is None else at))
        else:
            uncertain.append(stage.type)
    return Changed(
        kind,
        storable(subject),
        storable(record),
        changed_at,
        storable(str(text)),
        tuple(implied),
        tuple(uncertain),
    )


def seconds_of(text: object) -> float | None:
    """Return a time of the upstream in Unix seconds; None if it cannot be read."""
    if not isinstance(text, str):
        return None
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


class _Data(msgspec.Struct, frozen=True, gc=False):
    modified_at: Any = None
    created_at: Any = None
    status: Any = None


class _Document(msgspec.Struct, frozen=True, gc=False):
    data: _Data = _Data()


_decode = msgspec.json.Decoder(_Document).decode


class StoredState(msgspec.Struct, frozen=True):
    """The state in a stored body: when it changed (Unix seconds), and its status; None: unknown."""

    changed_at: float | None = None
    status: object = None


def stored_state(raw: bytes | None) -> StoredState:
    """Return the state that a stored body carries; one that cannot be read has none."""
    if not raw:
        return StoredState()
    try:
        data = _decode(raw).data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return StoredState()
    return StoredState(seconds_of(data.modified_at or data.created_at), data.status)


def event_body(event_type: str, at: float, record: Mapping[str, Any]) -> bytes:
    """Return the body of a synthetic event, in the form of the upstream's own."""
    timestamp = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"type": event_type, "timestamp": timestamp, "data": record})


def kinds_of(types: Collection[str]) -> Sequence[RecordKind]:
    """Return the kinds that have one of ``types``, in the order of :data:`KINDS`."""
    return [kind for kind in KINDS if any(name in types for name in kind.types)]
