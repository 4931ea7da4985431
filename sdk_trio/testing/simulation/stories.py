"""The story of a failure: the shortest plan that still fails in the same way, as text."""

from collections.abc import Callable, Iterator

import attrs
import msgspec

from .journal import Line
from .plan import SimulationPlan, World
from .world import Result

#: The maximum number of simulations per shrink.
MOST_RUNS = 120

#: Scale of times that is tried once the plan is short.
_SHORTER = 0.5

#: Runtime log events that only repeat the world's own lines.
_QUIET = {"webhook.received", "webhook.handled", "runtime.draining", "runtime.stopped"}
_QUIET |= {"config.warning", "runtime.started"}


def shrink(result: Result, run: Callable[[SimulationPlan], Result]) -> Result:
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


def _smaller(plan: SimulationPlan) -> Iterator[SimulationPlan]:
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


def _scaled(plan: SimulationPlan, factor: float) -> SimulationPlan:
    arrivals = tuple(
        msgspec.structs.replace(each, at=round(each.at * factor, 3)) for each in plan.arrivals
    )
    faults = tuple(
        msgspec.structs.replace(each, at=round(each.at * factor, 3)) for each in plan.faults
    )
    return msgspec.structs.replace(plan, arrivals=arrivals, faults=faults)


def describe(result: Result, whole: Result | None) -> str:
    """Return the story of a failure as text.

    Args:
        result: the result of the shrunk plan.
        whole: the result of the original plan; None if it was not shrunk.
    """
    plan = result.plan
    lines = [f"seed {plan.seed} failed:"]
    lines += [f"  {found.at:10.3f} s  {found.kind}: {found.text}" for found in result.violations]
    if whole is not None:
        lines += [
            "",
            f"the shortest story that fails in this way: {len(plan.arrivals)} of "
            f"{len(whole.plan.arrivals)} events, {len(plan.faults)} of "
            f"{len(whole.plan.faults)} faults",
        ]
    lines.append("")
    end = max((found.at for found in result.violations), default=0.0)
    lines += [_shown(line) for line in result.story if line.at <= end and line.event not in _QUIET]
    return "\n".join(lines)


def _shown(line: Line) -> str:
    return f"  {line.at:10.3f} s  {line.host:<8} {line.event} {line.fields}".rstrip()


def written_test(
    result: Result, app: str, check: str | None, world: World, upstream: str | None = None
) -> str:
    """Return a module for pytest that runs the plan of a failure.

    Args:
        result: the failing result.
        app: the handlers, as ``module:attribute``.
        check: the check, in the same form, if there was one.
        world: the world of the failure.
        upstream: the function that makes its upstream, in the same form, if there was one.
    """
    imports: dict[str, dict[str, None]] = {}
    names = []
    for reference in (app, check, upstream):
        if reference is not None:
            module, _, attribute = reference.partition(":")
            imports.setdefault(module, {})[attribute.partition(".")[0]] = None
            names.append(attribute)
    arguments = f"{names[0]}, world=WORLD, plan=PLAN"
    if check is not None:
        arguments += f", check={names[1]}"
    plan = msgspec.json.format(msgspec.json.encode(result.plan), indent=1).decode()
    first = result.violations[0]
    sections = [
        f'"""Seed {result.plan.seed} of a simulation: {first.kind}."""',
        "\n".join(
            [
                *(f"from {module} import {', '.join(roots)}" for module, roots in imports.items()),
                "",
                "from sdk_trio.testing import World, simulate",
            ]
        ),
        f"WORLD = {_source(world, None if upstream is None else names[-1])}",
        f'PLAN = """\n{plan}\n"""',
        f"\ndef test_seed_{result.plan.seed}():\n    simulate({arguments})",
    ]
    return "\n\n".join(sections) + "\n"


def _source(world: World, upstream: str | None) -> str:
    default = World()
    changed: dict[str, str] = {
        name: repr(value)
        for name, value in attrs.asdict(world, recurse=False).items()
        if value != getattr(default, name)
    }
    if upstream is not None:
        changed["upstream"] = upstream
    return f"World({', '.join(f'{name}={value}' for name, value in changed.items())})"
