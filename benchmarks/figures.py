"""Tables of medians with their range, and ratios that are taken round by round."""

import statistics
from collections.abc import Mapping, Sequence

from peers import REFERENCE, Server

Runs = Mapping[str, Sequence[Mapping[str, float]]]

#: A server that uses less of its core than this was waiting for somebody else.
SATURATED = 0.85
#: A generator that uses more of its core than this may have been what it was waiting for.
GENERATOR_BUSY = 0.97


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range of a list of figures."""
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def column(runs: Runs, server: str, figure: str) -> list[float]:
    """One figure of a server in every round that has it."""
    return [run[figure] for run in runs.get(server, ()) if figure in run]


def ratios(runs: Runs, one: tuple[str, str], other: tuple[str, str]) -> list[float]:
    """``one`` divided by ``other``, each a server and a figure, round by round."""
    pairs = zip(column(runs, *one), column(runs, *other), strict=False)
    return [dividend / divisor for dividend, divisor in pairs if divisor]


def table(runs: Runs, servers: Sequence[Server]) -> str:
    """Every server's figures as Markdown."""
    lines = [
        f"| server | deliveries/s | ratio to {REFERENCE} | CPU us each | p50 ms | p99 ms "
        "| idle MB | first 200 ms | stop ms | core used |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for server in servers:
        columns = [
            f"{server.name}: {server.about}",
            spread(column(runs, server.name, "rate"), 0),
            spread(ratios(runs, (server.name, "rate"), (REFERENCE, "rate"))),
            spread(column(runs, server.name, "cpu_us"), 0),
            spread(column(runs, server.name, "p50_ms")),
            spread(column(runs, server.name, "p99_ms")),
            spread(column(runs, server.name, "idle_mb"), 0),
            spread(column(runs, server.name, "start_ms"), 0),
            spread(column(runs, server.name, "stop_ms"), 0),
            spread(column(runs, server.name, "used")),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def goals(runs: Runs) -> str:
    """The goals of the project and what this run says of them, as Markdown.

    ``by rate`` is what one core delivers. ``by CPU`` compares CPU time per delivery: it says the
    same where every server was saturated, and still holds where a neighbour took the core away.
    """
    lines = ["| what | by rate | by CPU | goal |", "|---|---|---|---|"]
    for what, one, other, goal in (
        ("inline to FastAPI", "inline", REFERENCE, ">= 3"),
        ("inline to node", "inline", "node", ">= 1.2"),
        ("inline to the limit", "inline", "minimal", ">= 0.9"),
        ("inline to stock hypercorn", "inline", "stock", ">= 9"),
        ("durable enqueue to FastAPI", "durable", REFERENCE, ">= 1.8"),
    ):
        by_rate = ratios(runs, (one, "rate"), (other, "rate"))
        by_cpu = ratios(runs, (other, "cpu_us"), (one, "cpu_us"))
        lines.append(f"| {what} | {spread(by_rate)} | {spread(by_cpu)} | {goal} |")
    done = (
        ratios(runs, ("durable", "done_rate"), (REFERENCE, "rate")),
        ratios(runs, (REFERENCE, "cpu_us"), ("durable", "done_cpu_us")),
    )
    start = ratios(runs, ("inline", "start_ms"), (REFERENCE, "start_ms"))
    added = _differences(runs, "p50_ms", "durable", "inline")
    memory = column(runs, "inline", "idle_mb")
    lines += [
        f"| durable to done to FastAPI | {spread(done[0])} | {spread(done[1])} | >= 1 |",
        f"| p50 added by durability, ms | {spread(added)} | | <= 1 |",
        f"| idle memory, MB | {spread(memory, 0)} | | <= 40 |",
        f"| exec to first 200, to FastAPI | {spread(start)} | | <= 0.7 |",
    ]
    return "\n".join(lines)


def _differences(runs: Runs, figure: str, one: str, other: str) -> list[float]:
    pairs = zip(column(runs, one, figure), column(runs, other, figure), strict=False)
    return [first - second for first, second in pairs]


def problems(runs: Runs, servers: Sequence[Server]) -> list[str]:
    """Reasons not to believe this run."""
    found = []
    for server in servers:
        for run in runs.get(server.name, ()):
            if run["errors"]:
                found.append(f"{server.name}: {run['errors']:.0f} answers were not 200")
            if run["used"] < SATURATED and not server.durable:
                found.append(
                    f"{server.name}: the server was not the bottleneck (it used "
                    f"{run['used']:.2f} of its core, the generator {run['generator_used']:.2f})"
                )
    return found
