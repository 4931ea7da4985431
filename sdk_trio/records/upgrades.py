"""The marker row of the upgrade from a single tenant: a plain record, without I/O."""

import enum

import msgspec


class UpgradeState(enum.StrEnum):
    """``pending`` (there is no marker yet) ``-> running(step, position) -> done``."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


class UpgradeMarker(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the upgrade; completed steps need not run again.

    ``tenant_id`` is the default tenant, None as long as nothing had to be moved. ``step`` is the
    current or last step, ``position`` its progress in its own terms, None at its start.
    ``finished`` are the completed steps; None in a marker of an earlier version, which did not
    record them. Times are Unix seconds.
    """

    state: UpgradeState
    tenant_id: str | None
    step: str
    position: str | None = None
    started_at: float
    finished_at: float | None = None
    finished: tuple[str, ...] | None = None


class StoredBody(msgspec.Struct, frozen=True):
    """The stored body of a delivery, with its type."""

    sequence: int
    type: str
    raw: bytes


class Assigned(msgspec.Struct, frozen=True):
    """One batch of deliveries that were assigned to the default tenant.

    ``rows`` is the number assigned, ``marker`` the stored marker; ``last``: no delivery remains
    after this batch.
    """

    rows: int
    marker: UpgradeMarker
    last: bool
