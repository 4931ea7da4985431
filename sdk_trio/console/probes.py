"""What the probes answer to a list of checks. Pure (contracts 8).

``/livez`` says only that the event loop moves. ``/readyz`` is for who sends traffic here: one
failed check is enough. ``/healthz`` is for people: it also names parts that are degraded, which
still do their work. None of them looks at the upstream, whose faults no restart would mend.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..base.metrics import Check


def is_ready(checks: Iterable[Check]) -> bool:
    """Return whether deliveries should be sent here."""
    return all(check.ok for check in checks)


def status_of(checks: Iterable[Check]) -> str:
    """Return ``failing``, ``degraded`` or ``ok``: the worst of the checks."""
    checks = tuple(checks)
    if not is_ready(checks):
        return "failing"
    return "degraded" if any(check.degraded for check in checks) else "ok"


def checks_document(checks: Sequence[Check], *, details: bool) -> list[dict[str, Any]]:
    """Return the checks as JSON; ``details`` adds the reasons, which strangers need not see."""
    return [
        {
            "name": check.name,
            "ok": check.ok,
            "degraded": check.degraded,
            **({"detail": check.detail} if details else {}),
        }
        for check in checks
    ]
