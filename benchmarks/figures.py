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
    """The goals of the project and what this run says of them, as Markdown."""
    rows = [
        ("inline / FastAPI", ratios(runs, ("inline", "rate"), (REFERENCE, "rate")), ">= 3"),
        ("inline / node", ratios(runs, ("inline", "rate"), ("node", "rate")), ">= 1.2"),
        ("inline / minimal", ratios(runs, ("inline", "rate"), ("minimal", "rate")), ">= 0.9"),
        ("inline / stock hypercorn", ratios(runs, ("inline", "rate"), ("stock", "rate")), ">= 9"),
        ("durable enqueue / FastAPI", ratios(runs, ("durable", "rate"), (REFERENCE, "rate")), ">= 1.8"),
        ("durable to done / FastAPI", ratios(runs, ("durable", "done_rate"), (REFERENCE, "rate")), ">= 1"),
        ("CPU: FastAPI / inline", ratios(runs, (REFERENCE, "cpu_us"), ("inline", "cpu_us")), ">= 3"),
        ("CPU: node / inline", ratios(runs, ("node", "cpu_us"), ("inline", "cpu_us")), ">= 1.2"),
        ("CPU: minimal / inline", ratios(runs, ("minimal", "cpu_us"), ("inline", "cpu_us")), ">= 0.9"),
        ("CPU: stock hypercorn / inline", ratios(runs, ("stock", "cpu_us"), ("inline", "cpu_us")), ">= 9"),
        ("p50 durable - inline, ms", _differences(runs, "p50_ms", "durable", "inline"), "<= 1"),
        ("idle memory, MB", column(runs, "inline", "idle_mb"), "<= 40"),
        ("first 200 / FastAPI", ratios(runs, ("inline", "start_ms"), (REFERENCE, "start_ms")), "<= 0.7"),
    ]  # fmt: skip
    lines = ["| what | median (range) | goal |", "|---|---|---|"]
    lines += [f"| {what} | {spread(values)} | {goal} |" for what, values, goal in rows]
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
