"""What the store keeps of the upgrade from a single tenant: one marker row (contracts 5 and 6)."""

import enum

import attrs


class UpgradeState(enum.StrEnum):
    """``pending`` (there is no marker yet) ``-> running(step, position) -> done``."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


@attrs.frozen(kw_only=True)
class UpgradeMarker:
    """How far the upgrade has come; what lies before it need not be done again.

    ``tenant_id`` is the default tenant, ``step`` the step that runs or ran last, ``position`` how
    far that step has come in its own terms, None at its beginning. Times are Unix seconds.
    """

    state: UpgradeState
    tenant_id: str
    step: str
    position: str | None = None
    started_at: float
    finished_at: float | None = None


@attrs.frozen
class Assigned:
    """One batch of deliveries that were given to the default tenant.

    ``rows`` is how many had no tenant, ``marker`` what is stored now, ``last`` whether no delivery
    comes after this batch.
    """

    rows: int
    marker: UpgradeMarker
    last: bool
