"""The marker row of the upgrade from a single tenant: a plain record, without I/O."""

import enum

import msgspec


class UpgradeState(enum.StrEnum):
    """``pending`` (there is no marker yet) ``-> running(step, position) -> done``."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


class UpgradeMarker(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the upgrade; what lies before it need not be done again.

    ``tenant_id`` is the default tenant, None while nothing had to be moved. ``step`` is the step
    that runs or ran last, ``position`` how far that step has come in its own terms, None at its
    beginning. ``finished`` are the steps that need not run again, None in a marker of an earlier
    version, which did not keep them. Times are Unix seconds.
    """

    state: UpgradeState
    tenant_id: str | None
    step: str
    position: str | None = None
    started_at: float
    finished_at: float | None = None
    finished: tuple[str, ...] | None = None


class StoredBody(msgspec.Struct, frozen=True):
    """The body of a delivery that is still kept, with its type."""

    sequence: int
    type: str
    raw: bytes


class Assigned(msgspec.Struct, frozen=True):
    """One batch of deliveries that were given to the default tenant.

    ``rows`` is the number that had no tenant, ``marker`` the stored marker, ``last`` whether no
    delivery comes after this batch.
    """

    rows: int
    marker: UpgradeMarker
    last: bool
