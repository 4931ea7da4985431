"""Shrinking: the shortest plan that still fails in the same way."""

from collections.abc import Callable, Iterator

import msgspec

from .plan import Plan
from .world import Result

#: The most simulations that a shrinking runs.
MOST_RUNS = 120

#: Scale of times that is tried once the plan is short.
_SHORTER = 0.5


def shrink(result: Result, run: Callable[[Plan], Result]) -> Result:
    """Return the result of the smallest plan found that breaks the same promise.

    It is deterministic, since every simulation is.

    Args:
        result: a result with a violation.
        run: runs a plan.
    """
    kind = result.violations[0].kind
    left = MOST_RUNS
    best = result
    improved = True
    while improved and left > 0:
        improved = False
        for plan in _smaller(best.plan):
            if left <= 0:
                break
            left -= 1
            tried = run(plan)
            if any(found.kind == kind for found in tried.violations):
                best = tried
                improved = True
                break
    return best


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans that lack a part of this one, the larger parts first."""
    arrivals, faults = plan.arrivals, plan.faults
    size = len(arrivals) // 2
    while size:
        for begin in range(0, len(arrivals), size):
            rest = arrivals[:begin] + arrivals[begin + size :]
            if rest:
                yield msgspec.structs.replace(plan, arrivals=rest)
        size //= 2
    for number in range(len(faults)):
        yield msgspec.structs.replace(plan, faults=faults[:number] + faults[number + 1 :])
    for number, arrival in enumerate(arrivals):
        for change in ({"troubles": ()}, {"again_after": None}):
            name, value = next(iter(change.items()))
            if getattr(arrival, name) != value:
                less = msgspec.structs.replace(arrival, **change)
                changed = (*arrivals[:number], less, *arrivals[number + 1 :])
                yield msgspec.structs.replace(plan, arrivals=changed)
    if plan.end > 1:
        yield _scaled(plan, _SHORTER)


def _scaled(plan: Plan, factor: float) -> Plan:
    arrivals = tuple(
        msgspec.structs.replace(each, at=round(each.at * factor, 3)) for each in plan.arrivals
    )
    faults = tuple(
        msgspec.structs.replace(each, at=round(each.at * factor, 3)) for each in plan.faults
    )
    return msgspec.structs.replace(plan, arrivals=arrivals, faults=faults)
