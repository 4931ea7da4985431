"""What a verification found, and what is remembered of it. Pure (contracts 7).

The memory is a small JSON document in the store, so that a verification by a command counts for
the daemon and the other way round.
"""

import enum
import json
from collections.abc import Iterable

import attrs

#: The name of the store's checkpoint.
CHECKPOINT = "replication.verification"

#: How many failures are remembered by name; of a target that is away, all of them fail alike.
_REMEMBERED_FAILURES = 100


class Comparison(enum.StrEnum):
    """What became of the comparison of the restored content with the live database."""

    IDENTICAL = "identical"
    #: Writes came all the while, so that no moment could be compared.
    BUSY = "not compared: busy"
    #: There is no database here to compare it with.
    ALONE = "not compared: no database"
    DIFFERENT = "different"
    NONE = "-"


@attrs.frozen(kw_only=True)
class Verification:
    """What was found about one tenant's replica; ``problem`` is None when it is good.

    ``skipped`` says why there is nothing to verify, such as a tenant without a database yet.
    ``txid`` and ``as_of`` (Unix seconds) are those of the restored state.
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

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the replica."""
        return self.problem is None


@attrs.frozen
class VerificationState:
    """What is remembered: the last run in which everything was good, and what failed since.

    ``ran_at`` is the end of the last run over all active tenants, ``verified_at`` the end of the
    last one without a failure, both in Unix seconds. ``failed`` maps tenant ids to problems.
    """

    ran_at: float | None = None
    verified_at: float | None = None
    failed: dict[str, str] = attrs.field(factory=dict)

    def after_run(self, results: Iterable[Verification], *, now: float) -> "VerificationState":
        """Return the state after a run over all active tenants."""
        failed = _problems(results)
        return VerificationState(now, self.verified_at if failed else now, failed)

    def after_one(self, result: Verification) -> "VerificationState":
        """Return the state after one tenant was verified by itself."""
        others = {key: text for key, text in self.failed.items() if key != result.tenant_id}
        return attrs.evolve(self, failed={**others, **_problems([result])})

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
        )
    except (ValueError, AttributeError, TypeError):
        return VerificationState()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
