"""The result of a verification, and the memory of earlier ones. Pure.

The memory is a small JSON document in the store, so that a verification by a command counts for
the daemon and the other way round.
"""

import enum
import json
from collections.abc import Iterable

import attrs

from ..base.times import readable

#: The name of the store's checkpoint.
CHECKPOINT = "replication.verification"

#: Failures that are remembered by name; if the target is away, all tenants fail alike.
_REMEMBERED_FAILURES = 100


#: Tolerance in seconds: the times of a replica's files are cut to whole seconds.
_CUT_SECONDS = 2.0


class Comparison(enum.StrEnum):
    """The outcome of comparing the restored content with the live database."""

    IDENTICAL = "identical"
    #: Writes came all the while, so that no moment could be compared.
    BUSY = "not compared: busy"
    #: There is no database here to compare it with.
    ALONE = "not compared: no database"
    DIFFERENT = "different"
    NONE = "-"


@attrs.frozen(kw_only=True)
class Verification:
    """The result for one tenant's replica; ``problem`` is None when it is good.

    ``skipped`` says why there is nothing to verify, such as a tenant without a database yet.
    ``txid`` and ``as_of`` (Unix seconds) are those of the restored state. ``begins_at`` is when
    the first snapshot was, and ``mark`` when the first was that has to be there for a long time
    yet: half of the retention.
    """

    tenant_id: str
    identifier: str
    verified_at: float
    problem: str | None = None
    skipped: str | None = None
    content: Comparison = Comparison.NONE
    txid: int | None = None
    as_of: float | None = None
    bytes: int | None = None
    seconds: float = 0.0
    begins_at: float | None = None
    mark: float | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the replica."""
        return self.problem is None


@attrs.frozen
class VerificationState:
    """The memory: the last run in which everything was good, and what failed since.

    ``ran_at`` is the end of the last run over all active tenants, ``verified_at`` the end of the
    last one without a failure, both in Unix seconds. ``failed`` maps tenant ids to problems, and
    ``marks`` maps them to a moment to which the replica reached back, in Unix seconds.
    """

    ran_at: float | None = None
    verified_at: float | None = None
    failed: dict[str, str] = attrs.field(factory=dict)
    marks: dict[str, float] = attrs.field(factory=dict)

    def compared(self, result: Verification, *, retention: float) -> Verification:
        """Return ``result``, with a problem if the replica begins later than it did.

        If somebody empties the target, the replicator fills it again, and the replica looks good;
        but the earlier points in time are gone.

        Args:
            result: of a tenant.
            retention: seconds for which points in time are kept.
        """
        mark = self.marks.get(result.tenant_id)
        if mark is None or result.begins_at is None or result.problem is not None:
            return result
        if result.begins_at <= mark + _CUT_SECONDS or mark < result.verified_at - retention:
            return result
        return attrs.evolve(
            result,
            problem=f"points in time are gone: it begins at {readable(result.begins_at)}, and "
            f"reached back to {readable(mark)}; look for who emptied the target, and accept the "
            "loss with 'replication verify --accept-loss'",
        )

    def after_run(
        self, results: Iterable[Verification], *, now: float, accept_loss: bool = False
    ) -> "VerificationState":
        """Return the state after a run over all active tenants.

        With ``accept_loss``, the times to which replicas reached back are forgotten.
        """
        results = list(results)
        failed = _problems(results)
        verified_at = self.verified_at if failed else now
        state = VerificationState(now, verified_at, failed, self.marks)
        known = {each.tenant_id for each in results}
        for result in results:
            state = state._marked(result, accept_loss=accept_loss)
        return attrs.evolve(state, marks={k: at for k, at in state.marks.items() if k in known})

    def after_one(self, result: Verification, *, accept_loss: bool = False) -> "VerificationState":
        """Return the state after one tenant was verified by itself; see :meth:`after_run`."""
        others = {key: text for key, text in self.failed.items() if key != result.tenant_id}
        state = attrs.evolve(self, failed={**others, **_problems([result])})
        return state._marked(result, accept_loss=accept_loss)

    def _marked(self, result: Verification, *, accept_loss: bool) -> "VerificationState":
        """Return the state with what is to be there at the next verification of this tenant."""
        if not accept_loss and result.problem is not None:
            return self
        marks = dict(self.marks)
        if result.mark is not None:
            marks[result.tenant_id] = result.mark
        else:
            marks.pop(result.tenant_id, None)
        return attrs.evolve(self, marks=marks)

    def age(self, now: float) -> float | None:
        """Return how many seconds ago every active tenant was verified; None: never."""
        return None if self.verified_at is None else max(0.0, now - self.verified_at)

    def to_text(self) -> str:
        """Return the state as a checkpoint of the store."""
        return json.dumps(attrs.asdict(self))


def _problems(results: Iterable[Verification]) -> dict[str, str]:
    failures = [(each.tenant_id, each.problem) for each in results if each.problem is not None]
    return dict(failures[:_REMEMBERED_FAILURES])


def state_from_text(text: str | None) -> VerificationState:
    """Return what was remembered; what cannot be read counts as nothing."""
    try:
        document = json.loads(text or "{}")
        return VerificationState(
            ran_at=_number(document.get("ran_at")),
            verified_at=_number(document.get("verified_at")),
            failed={str(key): str(value) for key, value in document.get("failed", {}).items()},
            marks={str(key): float(at) for key, at in document.get("marks", {}).items()},
        )
    except (ValueError, AttributeError, TypeError):
        return VerificationState()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
